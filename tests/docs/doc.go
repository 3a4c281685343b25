// Package docs has no code, only a test that runs the commands of the documents.
package docs

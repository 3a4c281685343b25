// Package docs has no code, only tests that run the commands of the documents.
package docs

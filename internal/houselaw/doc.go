// Package houselaw holds no code, only tests of what the whole repository has agreed on: which room may import
// which, where C may live, and that documents and sources state the same bytes and numbers.
package houselaw

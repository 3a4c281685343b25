// Package conventions has no code, only tests of rules for the whole repository: which layer may import which, which
// packages may use cgo, and that documents and sources state the same bytes and numbers.
package conventions

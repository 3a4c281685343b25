// Package conventions holds no code, only tests of what the whole repository has agreed on: which layer may import
// which, where C may live, and that documents and sources state the same bytes and numbers.
package conventions

// Package privilege gives up the rights of root for good. A daemon calls it after it has opened the files that only
// root may open, and before it reads the first byte from any other party.
package privilege

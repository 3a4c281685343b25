// Package faults holds tests of the whole system under faults: real daemons, real workers, and clients in C and Go as
// separate processes, which are killed and stopped during calls. It has no code besides its tests; README.md
// describes the tests and how to run them.
package faults

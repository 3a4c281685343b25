// Package faults holds tests of the whole system under faults: real daemons, real workers, and clients in C and Go as
// processes of their own, which are killed and stopped while they call. It has no code besides its tests; README.md
// says what is tested and how to run it.
package faults

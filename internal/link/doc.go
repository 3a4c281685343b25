// Package link connects executors and clients to the resource manager's memory. Executor is an executor's end: it writes the executor's
// line and its cells. Client is a client's end: it reads the board and has a mailbox. docs/BOARD.md describes that memory, and
// internal/manager owns it.
//
// One call to the manager makes an end, which lives as long as its queue pair. After an error, close the end and make
// another one. This also settles operations whose outcome is unknown: each attachment gets new memory, and the caller writes
// the current state into it.
package link

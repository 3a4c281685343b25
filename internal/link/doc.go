// Package link is how executors and clients reach the resource manager's memory: the executor's end (Executor: its line and
// its cells) and the client's (Client: the board and a mailbox). docs/BOARD.md describes that memory, internal/manager owns
// it.
//
// An end is made by one call to the manager and lives as long as its queue pair. After an error it is of no use: close it
// and make another one. That is also how an operation of unknown outcome is settled: whoever attaches again gets
// fresh memory, and writes what holds.
package link

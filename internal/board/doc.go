// Package board is the layout of the memory that the resource manager lets others reach, and what both sides do with it:
// the table of executors that clients read (Table, Reader), the mailbox that a subscriber is written to, and the region
// in which an executor keeps the cells of its leases. docs/BOARD.md has every byte.
//
// All of it is read and written from afar while the other side changes it, and the parts of one remote read may arrive in
// any order. So every record has its own CRC32C and is copied before it is looked at: a copy whose checksum is wrong was
// torn, and is read again. Nothing here trusts what it reads: offsets, counts and slots are checked.
//
// The package moves no bytes over a network itself. What does is behind Memory and Writer.
package board

// Package handover lets a daemon continue as another program in the same process. The old program writes its state into a
// sealed memory file and calls execve. That keeps the process id, the child processes and the descriptors that are named
// in the state. The new program reads the state with Take.
package handover

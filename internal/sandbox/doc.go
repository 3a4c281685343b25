// Package sandbox is what of the confinement of workers is not in the worker itself (worker/sandbox.h):
// how much of it is wanted, and the user ids and control groups that workers get. It has no cgo.
package sandbox

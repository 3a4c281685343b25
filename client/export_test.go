package client

import "unsafe"

// Handle returns the lease's handle of rfaas.h.
func Handle(l *Lease) unsafe.Pointer { return unsafe.Pointer(l.c) }

// Index returns the index of a function in its lease.
func Index(f *Function) uint32 { return f.index }

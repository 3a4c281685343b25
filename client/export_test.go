package client

import "unsafe"

// Handle returns the lease as rfaas.h knows it.
func Handle(l *Lease) unsafe.Pointer { return unsafe.Pointer(l.c) }

// Index returns the number of a function in its lease.
func Index(f *Function) uint32 { return f.index }

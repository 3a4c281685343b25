package client

import (
	"context"
	"unsafe"
)

var background = context.Background()

// isBackground reports whether ctx is context.Background(). It compares the types only, because the type of context.Background() has a single
// value and is used by nothing else. The comparison of two interfaces also calls the type's equality function: it makes a call on the caller's thread of 137 ns
// 2 ns longer.
func isBackground(ctx context.Context) bool { return typeOf(&ctx) == typeOf(&background) }

// typeOf returns the first word of an interface value, which identifies the dynamic type.
func typeOf(ctx *context.Context) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(ctx)) }

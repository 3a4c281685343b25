package client

import (
	"context"
	"unsafe"
)

var background = context.Background()

// isBackground reports whether ctx is context.Background(). It compares the types only, because the type of context.Background() has a
// single value. A comparison of the two interfaces would also call the equality function of the type, which takes 2 ns of a call.
func isBackground(ctx context.Context) bool { return typeOf(&ctx) == typeOf(&background) }

// typeOf returns the first word of an interface value, which identifies the dynamic type.
func typeOf(ctx *context.Context) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(ctx)) }

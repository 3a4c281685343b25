package client

import (
	"context"
	"sync/atomic"
	"unsafe"

	"github.com/rfaas-go/rfaas/client/c"
)

// Number is what elements of typed payloads and results may be. They travel as the bytes that they have in memory.
type Number interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint | ~float32 | ~float64 | ~complex64 | ~complex128
}

// Bytes is the memory of s, without a copy: for payloads and results of [Function.Invoke] and its like.
func Bytes[T Number](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

// Invoke calls f with the elements of in and returns how many elements of its result are in out, which is room for at most
// len(out). A result that ends within an element is an error (StatusProtocol); the rest is as with [Function.Invoke].
func Invoke[In, Out Number](ctx context.Context, f *Function, in []In, out []Out) (n int, err error) {
	bytes, err := f.Invoke(ctx, Bytes(in), Bytes(out))
	var element Out
	size := int(unsafe.Sizeof(element))
	if err == nil && bytes%size != 0 {
		err = &Error{Status: StatusProtocol, Started: true, Text: f.op() + ": the result's size is not a multiple of the element's"}
	}
	return bytes / size, err
}

// Map calls f on the elements of in, each an item, on all workers of its lease, and stores the result of each in the same place of
// out: [Function.Map].
func Map[In, Out Number](ctx context.Context, f *Function, in []In, out []Out) error {
	var from In
	var to Out
	return f.Map(ctx, Bytes(in), int(unsafe.Sizeof(from)), Bytes(out), int(unsafe.Sizeof(to)), MapOptions{})
}

// Reducible lists the element types of results that [Reduce] combines.
type Reducible interface {
	~int32 | ~int64 | ~float32 | ~float64
}

// Reduce calls f on the elements of in, each an item, on all workers of its lease. Each result has as many elements as accumulator, and is
// combined with it element by element. Before the call, accumulator holds the values to begin with. Results are combined in the order of the items,
// so that the same input gives the same bits. After an error the contents of accumulator are undefined. Otherwise it works like [Function.Map].
func Reduce[In Number, Out Reducible](ctx context.Context, f *Function, in []In, accumulator []Out, operation Operation) error {
	var from In
	var to Out
	kind, fractions := c.Int32, Out(1)/2 != 0
	switch {
	case fractions && unsafe.Sizeof(to) == 4:
		kind = c.Float
	case fractions:
		kind = c.Double
	case unsafe.Sizeof(to) == 8:
		kind = c.Int64
	}
	return f.runOnItems(ctx, func(o c.CallOptions, cancelled *atomic.Uint32) error {
		return f.lease.c.Reduce(f.index, Bytes(in), int(unsafe.Sizeof(from)), Bytes(accumulator), len(in), int(operation), kind, o.Timeout, o.Repeats,
			cancelled)
	})
}

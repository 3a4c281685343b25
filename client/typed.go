package client

import (
	"context"
	"unsafe"
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
		err = &Error{Status: StatusProtocol, Started: true, Text: f.op() + ": the result's size is no multiple of an element's"}
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

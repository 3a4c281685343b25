package client

import (
	"context"
	"unsafe"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Buffer is registered memory outside the Go heap. A large payload inside it is sent by its worker without being copied
// first; it must then not change until the call has ended. When a lease goes on elsewhere its buffers stay, but are copied
// like any other memory.
type Buffer struct {
	worker *Worker
	region *dataplane.Region
	memory []byte // instead, where there is no worker but this process
}

// Alloc returns a zeroed buffer of size bytes for calls on this worker. It lives until Free or the lease's release.
func (w *Worker) Alloc(ctx context.Context, size int) (*Buffer, error) {
	const op = "allocate buffer"
	w = w.at()
	if err := w.claim(ctx, op); err != nil {
		return nil, err
	}
	defer w.lease.give(w)
	if w.lease.leaving.Load() {
		return nil, w.lease.leavingError(op)
	}
	if w.lease.local != nil {
		if size < 1 {
			return nil, fail(op, dataplane.StatusInvalid, "size %d", size)
		}
		return &Buffer{worker: w, memory: make([]byte, size)}, nil
	}
	r, err := w.ep.Alloc(size)
	if err != nil {
		return nil, err
	}
	b := &Buffer{worker: w, region: r}
	w.buffers = append(w.buffers, b)
	return b, nil
}

// Bytes is the memory, valid until Free or the lease's release; nil after Free.
func (b *Buffer) Bytes() []byte {
	if b.region == nil {
		return b.memory
	}
	return b.region.Bytes()
}

// Free gives the memory back. ErrBusy while calls are in flight on its worker: they may still read it. A second
// Free does nothing.
func (b *Buffer) Free(ctx context.Context) error {
	const op = "free buffer"
	w := b.worker
	if w.lease.released.Load() {
		return nil
	}
	if err := w.claim(ctx, op); err != nil {
		return err
	}
	defer w.lease.give(w)
	b.memory = nil
	if b.region == nil {
		return nil
	}
	if w.ch.Status() == dataplane.OK && w.ch.FreeSlots() < w.lease.config.Depth {
		return fail(op, dataplane.StatusBusy, "calls are in flight on worker %d", w.index)
	}
	for i, other := range w.buffers {
		if other == b {
			w.buffers = append(w.buffers[:i], w.buffers[i+1:]...)
			break
		}
	}
	b.region.Free()
	b.region = nil
	return nil
}

// region returns the registered memory that holds the whole payload, or nil. The claim's holder.
func (w *Worker) region(in []byte) *dataplane.Region {
	if len(w.buffers) == 0 || len(in) == 0 {
		return nil
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(in)))
	for _, b := range w.buffers {
		m := b.region.Bytes()
		from := uintptr(unsafe.Pointer(unsafe.SliceData(m)))
		if at >= from && at+uintptr(len(in)) <= from+uintptr(len(m)) {
			return b.region
		}
	}
	return nil
}

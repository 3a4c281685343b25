package client

import (
	"context"
	"sync"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Buffer is registered memory outside the Go heap. Over verbs, a large payload inside it is sent to any worker of its lease without being
// copied first; it must then not change until the call has ended. With [InPlace], workers of this node use it where it is.
type Buffer struct {
	lease *Lease

	mu     sync.Mutex
	memory []byte
}

// Alloc returns a zeroed buffer of size bytes. It lives until Free or the lease's release.
func (l *Lease) Alloc(ctx context.Context, size int) (*Buffer, error) {
	const op = "allocate buffer"
	if size < 1 {
		return nil, fail(op, dataplane.StatusInvalid, "size %d, want at least 1", size)
	}
	if l.released.Load() {
		return nil, fail(op, StatusLeaseEnded, "the lease was released")
	}
	return during(ctx, l.session, op, func() (*Buffer, error) {
		memory, err := l.c.Alloc(size)
		if err != nil {
			return nil, l.explain(err)
		}
		return &Buffer{lease: l, memory: memory}, nil
	}, func(b *Buffer) { _ = b.Free(context.Background()) })
}

// Alloc is Lease.Alloc.
func (w *Worker) Alloc(ctx context.Context, size int) (*Buffer, error) {
	return w.lease.Alloc(ctx, size)
}

// Bytes is the memory, valid until Free or the lease's release; nil afterwards.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lease.released.Load() {
		return nil
	}
	return b.memory
}

// Free gives the memory back. ErrBusy while calls of the lease are in flight: they may still read it. A second Free does nothing.
func (b *Buffer) Free(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.memory == nil || b.lease.released.Load() {
		return nil
	}
	if err := b.lease.c.Free(b.memory); err != nil {
		return b.lease.explain(err)
	}
	b.memory = nil
	return nil
}

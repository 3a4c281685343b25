package client

import (
	"context"
	"sync"
	"unsafe"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Piece is a piece of a payload or of a result: Bytes as they are, or with Size above 0, elements of Size bytes in them. The first
// element is at the beginning of Bytes, and each next one Stride bytes after the beginning of the one before. There are as many
// elements as fit.
type Piece struct {
	Bytes        []byte
	Size, Stride int
}

// Strided is a piece that consists of blocks of elements of s, whose beginnings are stride elements apart, as in MPI_Type_vector. For
// example, Strided(m[2:], 1, columns) is the column 2 of a matrix that is stored by rows.
func Strided[T Number](s []T, block, stride int) Piece {
	size := int(unsafe.Sizeof(*new(T)))
	return Piece{Bytes: Bytes(s), Size: block * size, Stride: stride * size}
}

var freePieces = sync.Pool{New: func() any { return new(c.Pieces) }}

// InvokePieces is [Function.Invoke] with payload and result in several pieces of memory. The function gets one contiguous payload, the
// pieces of in one after the other. Its result is stored to the pieces of out, one after the other. If pieces of out overlap, it is
// undefined which of them the common bytes belong to. The pieces of in must stay unchanged until InvokePieces returns. It makes no
// allocation.
//
// Errors: those of Invoke. ErrInvalid: a Stride is smaller than its Size.
func (f *Function) InvokePieces(ctx context.Context, in, out []Piece) (n int, err error) {
	l := f.lease
	p := freePieces.Get().(*c.Pieces)
	defer func() {
		p.Clear()
		freePieces.Put(p)
	}()
	if err := f.add(p, "in", in); err != nil {
		return 0, err
	}
	p.EndOfPayload()
	if err := f.add(p, "out", out); err != nil {
		return 0, err
	}
	if !l.turns.take(ctx, l.over) {
		return 0, l.noTurn(ctx, f.op())
	}
	defer l.turns.give()
	if l.released.Load() {
		return 0, l.noTurn(ctx, f.op())
	}
	o := repeatsOf(ctx).options(c.AnyWorker)
	if len(l.workers) > lanes || ctx.Done() != nil {
		return f.callWithin(ctx, o, nil, nil, p)
	}
	if n, err = l.c.InvokePieces(f.index, p, o); err != nil {
		err = l.explain(err)
	}
	return n, err
}

// add appends the pieces of a payload or result.
func (f *Function) add(p *c.Pieces, name string, pieces []Piece) error {
	for i, e := range pieces {
		switch {
		case e.Size == 0:
			p.Add(e.Bytes, len(e.Bytes), 1, 0)
		case e.Size < 0 || e.Stride < e.Size:
			return fail(f.op(), dataplane.StatusInvalid, "%s[%d] has Size %d and Stride %d, want a Stride of at least Size", name, i, e.Size, e.Stride)
		case len(e.Bytes) >= e.Size:
			p.Add(e.Bytes, e.Size, (len(e.Bytes)-e.Size)/e.Stride+1, e.Stride)
		}
	}
	return nil
}

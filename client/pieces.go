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
	p, err := f.collect(in, out)
	defer dropPieces(p)
	if err != nil {
		return 0, err
	}
	l := f.lease
	if !l.turns.take(ctx, l.over) {
		return 0, l.noTurn(ctx, f.op())
	}
	defer l.turns.give()
	return f.callPieces(ctx, c.AnyWorker, p)
}

// InvokePieces is Function.InvokePieces on this worker.
func (w *Worker) InvokePieces(ctx context.Context, f *Function, in, out []Piece) (n int, err error) {
	if err := w.check(f); err != nil {
		return 0, err
	}
	p, err := f.collect(in, out)
	defer dropPieces(p)
	if err != nil {
		return 0, err
	}
	if !w.turns.take(ctx, w.lease.over) {
		return 0, w.lease.noTurn(ctx, f.op())
	}
	w.lease.chosen.Add(1)
	defer w.turns.give()
	defer w.lease.chosen.Add(-1)
	return f.callPieces(ctx, w.index, p)
}

// callPieces makes a call. The caller holds a turn.
func (f *Function) callPieces(ctx context.Context, worker int, p *c.Pieces) (n int, err error) {
	l := f.lease
	if l.released.Load() {
		return 0, l.noTurn(ctx, f.op())
	}
	o := settingsOf(ctx).options(worker)
	if l.large || ctx.Done() != nil {
		return f.callWithin(ctx, o, nil, nil, p)
	}
	if n, err = l.c.InvokePieces(f.index, p, o); err != nil {
		err = l.explain(err)
	}
	return n, err
}

// collect returns the pieces of a payload and a result as C takes them. dropPieces frees them, also after an error.
func (f *Function) collect(in, out []Piece) (*c.Pieces, error) {
	p := freePieces.Get().(*c.Pieces)
	err := f.add(p, "in", in)
	p.EndOfPayload()
	if err == nil {
		err = f.add(p, "out", out)
	}
	return p, err
}

// collectParts returns the pieces of a table as C takes them.
func collectParts(op string, parts []Piece) (*c.Pieces, error) {
	p := freePieces.Get().(*c.Pieces)
	if bad := addPieces(p, parts); bad >= 0 {
		return p, badPiece(op, "parts", bad, parts)
	}
	return p, nil
}

func dropPieces(p *c.Pieces) {
	p.Clear()
	freePieces.Put(p)
}

// add appends the pieces of a payload or result.
func (f *Function) add(p *c.Pieces, name string, pieces []Piece) error {
	if bad := addPieces(p, pieces); bad >= 0 {
		return badPiece(f.op(), name, bad, pieces)
	}
	return nil
}

// addPieces appends pieces. It returns the index of the first malformed one, -1 if there is none.
func addPieces(p *c.Pieces, pieces []Piece) (bad int) {
	for i, e := range pieces {
		switch {
		case e.Size == 0:
			p.Add(e.Bytes, len(e.Bytes), 1, 0)
		case e.Size < 0 || e.Stride < e.Size:
			return i
		case len(e.Bytes) >= e.Size:
			p.Add(e.Bytes, e.Size, (len(e.Bytes)-e.Size)/e.Stride+1, e.Stride)
		}
	}
	return -1
}

func badPiece(op, name string, i int, pieces []Piece) error {
	return fail(op, dataplane.StatusInvalid, "%s[%d] has Size %d and Stride %d, want a Stride of at least Size", name, i, pieces[i].Size, pieces[i].Stride)
}

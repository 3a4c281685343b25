package client_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

func TestPieces(t *testing.T) {
	const rows, columns = 50, 7
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	echo, sleep := function(t, l, "echo"), function(t, l, "sleep_ns")
	cancellable, cancel := context.WithCancel(t.Context())
	defer cancel()
	for name, ctx := range map[string]context.Context{"background": context.Background(), "cancellable": cancellable, "idempotent": client.Idempotent(cancellable, 1)} {
		m, back := make([]float64, rows*columns), make([]float64, 2*rows*columns)
		for i := range m {
			m[i] = float64(i)
		}
		head, tail := []byte("a header"), make([]byte, 8)
		in := []client.Piece{{Bytes: head}, {}, client.Strided(m[2:], 1, columns), client.Strided(m, columns, 2*columns), client.Strided(m[:3], 4, 4)}
		out := []client.Piece{{Bytes: tail}, client.Strided(back, 1, 2), {Bytes: client.Bytes(back[rows*2:])}}
		n, err := echo.InvokePieces(ctx, in, out)
		if err != nil || n != 8+8*(rows+rows/2*columns) || string(tail) != "a header" {
			t.Fatalf("%s: %d bytes, %v, %q", name, n, err, tail)
		}
		if back[0] != 2 || back[2] != 2+columns || back[4] != 2+2*columns || back[1] != 0 {
			t.Errorf("%s: the column came as %v", name, back[:8])
		}
	}
	small := make([]byte, 7)
	parts := []client.Piece{{Bytes: small[:2]}, {Bytes: small[2:]}}
	if n, err := l.Worker(0).InvokePieces(t.Context(), echo, []client.Piece{{Bytes: []byte("on ")}, {Bytes: []byte("one")}}, parts); n != 6 || err != nil || string(small) != "on one\x00" {
		t.Errorf("on one worker: %d, %v, %q", n, err, small)
	}
	if _, err := l.Worker(0).InvokePieces(t.Context(), nil, nil, nil); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no function: %v", err)
	}
	clear(small)
	var e *client.Error
	n, err := echo.InvokePieces(t.Context(), []client.Piece{{Bytes: []byte("12345678")}}, []client.Piece{{Bytes: small[:3]}, {Bytes: small[3:]}})
	if n != 8 || !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || !slices.Equal(small, make([]byte, 7)) {
		t.Errorf("a result of 8 bytes in 7: %d, %v, %q", n, err, small)
	}
	if n, err := echo.InvokePieces(t.Context(), nil, nil); n != 0 || err != nil {
		t.Errorf("nothing: %d, %v", n, err)
	}
	for _, bad := range []client.Piece{{Bytes: small, Size: 2, Stride: 1}, {Bytes: small, Size: -1, Stride: 1}, {Bytes: small, Size: 2}} {
		if _, err := echo.InvokePieces(t.Context(), []client.Piece{{}, bad}, nil); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "in[1] has Size") {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	short, end := context.WithTimeout(t.Context(), time.Millisecond)
	defer end()
	if _, err := sleep.InvokePieces(short, []client.Piece{{Bytes: u64(forever)}}, []client.Piece{{Bytes: small}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after its context: %v", err)
	}
}

func TestPiecesMakeNoAllocation(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{})
	echo := function(t, l, "echo")
	memory := make([]byte, 24*8)
	var in, out []client.Piece
	for i := 0; i < 12; i++ {
		in = append(in, client.Piece{Bytes: memory[8*i : 8*i+8]})
		out = append(out, client.Piece{Bytes: memory[8*(12+i) : 8*(12+i)+8]})
	}
	cancellable, cancel := context.WithCancel(context.Background())
	defer cancel()
	for name, ctx := range map[string]context.Context{"background": context.Background(), "cancellable": cancellable} {
		least := math.Inf(1) // other goroutines allocate, too
		for try := 0; try < 5 && least > 0; try++ {
			least = min(least, testing.AllocsPerRun(200, func() {
				if _, err := echo.InvokePieces(ctx, in, out); err != nil {
					t.Fatal(err)
				}
			}))
		}
		if least != 0 {
			t.Errorf("%s: %v allocations per call, want 0", name, least)
		}
	}
}

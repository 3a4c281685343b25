package zygote

import (
	"bytes"
	"context"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// User code of a late worker can write to the worker's socket, and so forge the answer with the worker's blob. A wrong answer is an error, after which the
// executor kills the worker. The executor takes no blob from it.
func TestForgedBlobOfALateWorker(t *testing.T) {
	blob := bytes.Repeat([]byte{7}, blobMax)
	message := func(typ wire.Type, body []byte) []byte { return (&wire.Message{Type: typ, ID: 3, Body: body}).Encode() }
	for _, c := range []struct {
		name   string
		answer []byte // nil: the worker closes its socket
		good   bool
	}{
		{"a blob", message(wire.Resumed, blob), true},
		{"no blob", message(wire.Resumed, nil), false},
		{"a blob that is too large", message(wire.Resumed, append(blob, 0)), false},
		{"the largest message", message(wire.Resumed, make([]byte, wire.Max-wire.HeadSize)), false},
		{"more than the largest message", message(wire.Resumed, make([]byte, wire.Max)), false},
		{"another message", message(wire.Loaded, blob), false},
		{"a failure without a text", message(wire.Failed, []byte{1}), false},
		{"a part of a head", message(wire.Resumed, blob)[:wire.HeadSize-1], false},
		{"a body that is cut off", message(wire.Resumed, blob)[:wire.HeadSize+blobMax-1], false},
		{"an empty message", []byte{}, false},
		{"the end of the worker", nil, false},
	} {
		w, fd := lateWorker(t)
		if c.answer == nil {
			unix.Close(fd)
		} else if err := unix.Send(fd, c.answer, 0); err != nil {
			t.Fatal(err)
		}
		err := w.sendResume(t.Context(), []byte("client"))
		if (err == nil) != c.good || (w.blob != nil) != c.good || w.late == c.good {
			t.Errorf("%s: %v; blob %v, late %v", c.name, err, w.blob, w.late)
		}
		if c.answer != nil {
			unix.Close(fd)
		}
	}
	w, fd := lateWorker(t) // does not answer
	defer unix.Close(fd)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.sendResume(ctx, []byte("client")); err == nil || w.blob != nil || !w.late {
		t.Errorf("without an answer: %v; blob %v, late %v", err, w.blob, w.late)
	}
}

// lateWorker returns a late worker and its end of the socket.
func lateWorker(t *testing.T) (*Worker, int) {
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close() })
	return &Worker{id: 3, late: true, conn: ours}, theirs
}

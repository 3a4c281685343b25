package zygote

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
)

func TestTail(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var tl tail
		var all []byte
		for range r.IntN(6) {
			b := make([]byte, r.IntN(3*TailSize))
			for i := range b {
				b[i] = byte(r.Uint32())
			}
			tl.write(b)
			all = append(all, b...)
		}
		want := all[max(0, len(all)-TailSize):]
		if !bytes.Equal(tl.bytes(), want) {
			t.Fatalf("after %d bytes: tail differs", len(all))
		}
	}
}

func TestChattyFunction(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	for range 3 {
		begin := time.Now()
		w.mustCall(t, fnChatty, nil)
		t.Logf("1 MiB printed in %v", time.Since(begin))
	}
	if err := w.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := w.Exit().OutputTail
	if len(got) != TailSize || !bytes.HasSuffix(got, []byte("16383\nlast line\n")) {
		t.Errorf("tail of %d bytes ends %q", len(got), got[max(0, len(got)-40):])
	}
	if !bytes.Equal(w.OutputTail(), got) {
		t.Error("OutputTail differs from Exit's")
	}
}

// A process that the function left behind neither keeps the worker from being reaped nor outlives it.
func TestForkedProcessEndsWithWorker(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	left := int(binary.LittleEndian.Uint32(w.mustCall(t, fnForks, nil)))
	if !alive(left) {
		t.Fatal("nothing left behind")
	}
	w.Kill()
	within(t, time.Second, "exit", w.Done())
	eventually(t, time.Second, "process left behind is gone", func() bool { return !alive(left) })
}

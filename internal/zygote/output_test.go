package zygote

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
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

// Who prints without end costs the executor a bounded rate of reading, and waits itself; the last of it is had all the same.
func TestFloodOfOutput(t *testing.T) {
	o, fd, err := newOutput()
	if err != nil {
		t.Fatal(err)
	}
	in := os.NewFile(uintptr(fd), "output")
	const chunks = 4
	began := time.Now()
	n, err := in.Write(bytes.Repeat([]byte("x"), chunks*outputChunk+TailSize))
	took := time.Since(began)
	if err == nil {
		_, err = in.WriteString("last line\n")
	}
	if err != nil || n != chunks*outputChunk+TailSize {
		t.Fatalf("%d bytes written: %v", n, err)
	}
	in.Close()
	o.finish()
	// What the pipe holds was not waited for, nor the last chunk's pause.
	if least := (chunks - 1) * outputPause; took < least {
		t.Errorf("%d bytes in %v, want %v at least", n, took, least)
	}
	if got := o.bytes(); !bytes.HasSuffix(got, []byte("xlast line\n")) || len(got) != TailSize {
		t.Errorf("a tail of %d bytes", len(got))
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

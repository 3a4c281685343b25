package zygote

import (
	"github.com/rfaas-go/rfaas/internal/spawner/wire"

	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

func newTestOutput(t *testing.T) (*output, *os.File) {
	t.Helper()
	o, fd, err := newOutput()
	if err != nil {
		t.Fatal(err)
	}
	in := os.NewFile(uintptr(fd), "output")
	t.Cleanup(func() { in.Close() })
	return o, in
}

// A worker that prints without end costs the executor a bounded rate of reading, and itself waits. Its last output is kept
// all the same.
func TestFloodOfOutput(t *testing.T) {
	began := time.Now()
	o, in := newTestOutput(t)
	const chunks = 4
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

// Who prints byte by byte does not have each byte read by itself, and a line that is printed is there at once.
func TestOutputByBytes(t *testing.T) {
	began := time.Now()
	o, in := newTestOutput(t)
	if _, err := in.WriteString("first line\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first line", func() bool { return string(o.bytes()) == "first line\n" })
	for range outputRead - TailSize {
		if _, err := in.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.WriteString("last line\n"); err != nil {
		t.Fatal(err)
	}
	o.finish()
	// A rest lies between two of them but after one that filled the small buffer; there is a first one, and one of finish.
	took := time.Since(began)
	if most := int(took/outputRest) + 3; o.reads > most {
		t.Errorf("%d reads in %v, want %d at most", o.reads, took, most)
	}
	if got := o.bytes(); !bytes.HasSuffix(got, []byte("xlast line\n")) || o.total != outputRead-TailSize+21 {
		t.Errorf("a tail of %d bytes, of %d", len(got), o.total)
	}
}

// The last line is kept however much is before it in the pipe. The worker can enlarge the pipe and make it keep writes apart.
// No more than the pipe's content is read, though other processes go on writing.
func TestLastLineInALargePipe(t *testing.T) {
	const size = 1 << 20 // what users may have
	pages := size / os.Getpagesize()
	fcntl := func(f *os.File, cmd, arg int) {
		t.Helper()
		if err := wire.Control(f, func(fd int) error { _, err := unix.FcntlInt(uintptr(fd), cmd, arg); return err }); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct{ flags, writes, each int }{
		"full":              {unix.O_WRONLY, 1, size - 20},
		"writes kept apart": {unix.O_WRONLY | unix.O_DIRECT, pages - 10, 1},
	} {
		for _, others := range []bool{false, true} {
			o, in := newTestOutput(t)
			o.ready.SetReadDeadline(time.Unix(1, 0)) // nothing is read before the end
			<-o.done
			fcntl(in, unix.F_SETPIPE_SZ, size)
			fcntl(in, unix.F_SETFL, c.flags)
			for range c.writes {
				if _, err := in.Write(bytes.Repeat([]byte("x"), c.each)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := in.WriteString("last line\n"); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			if others {
				wg.Go(func() {
					for {
						if _, err := in.WriteString("y"); err != nil {
							return // the reader has gone
						}
					}
				})
			}
			o.finish()
			wg.Wait()
			if got := bytes.TrimRight(o.bytes(), "y"); !others && !bytes.HasSuffix(got, []byte("xlast line\n")) {
				t.Errorf("%s: the tail ends %q", name, got[max(0, len(got)-40):])
			}
			if least := uint64(c.writes*c.each + 10); o.total < least || o.total >= size+outputRead || o.reads > pages {
				t.Errorf("%s, with others %v: %d bytes in %d reads, want %d at least", name, others, o.total, o.reads, least)
			}
		}
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
	within(t, "exit", w.Done())
	eventually(t, "process left behind is gone", func() bool { return !alive(left) })
}

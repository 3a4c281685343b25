package zygote

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// watched is a worker whose page the test writes. The test also plays its spawner and reports the state of its device.
func watched(t *testing.T, device uint32) (*Worker, []byte) {
	t.Helper()
	p, err := newParts()
	if err != nil {
		t.Fatal(err)
	}
	words, err := unix.Mmap(p.theirs[2], 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	p.closeTheirs()
	ours, fd, err := wire.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := wire.Conn(fd)
	if err != nil {
		t.Fatal(err)
	}
	reaped := make(chan struct{})
	close(reaped)
	z := &Zygote{cfg: Config{Log: testLog(t)}, spawner: &connection{conn: ours, reaped: reaped}, changed: make(chan struct{}), workers: map[uint32]*Worker{},
		failed: make(chan error, 1), closed: true}
	w := &Worker{id: 1, z: z, conn: p.conn, output: p.output, page: p.page, answer: make(chan answer, 1), exited: make(chan wire.Exit, 1),
		device: make(chan uint32, 1), done: make(chan struct{}), gone: make(chan struct{})}
	w.serves.Store(&Spec{})
	z.workers[1] = w
	go w.watch()
	received := make(chan struct{})
	go func() {
		defer close(received)
		z.receive()
	}()
	go func() {
		buf := make([]byte, wire.Max)
		for {
			m, _, err := wire.Receive(theirs, buf, 0)
			switch {
			case err != nil:
				return
			case m.Type == wire.Device:
				wire.Send(theirs, &wire.Message{Type: wire.DeviceIs, ID: m.ID, Body: binary.LittleEndian.AppendUint32(nil, device)})
			case m.Type == wire.Kill:
				wire.Send(theirs, &wire.Message{Type: wire.Exited, ID: 1, Body: (&wire.Exit{Signal: int32(unix.SIGKILL)}).Encode()})
			}
		}
	}()
	t.Cleanup(func() {
		w.Kill()
		<-w.done
		theirs.Close()
		<-received
		unix.Munmap(words)
	})
	return w, words
}

// A function that closes its worker's device at once may do so before the executor has looked for the first time.
func TestDeviceIsClosedBeforeTheFirstLook(t *testing.T) {
	w, words := watched(t, wire.DeviceClosed)
	binary.LittleEndian.PutUint64(words, 1<<16) // the first call runs
	go w.watchDevice()
	select {
	case <-w.done:
	case <-time.After(20 * deviceLook):
		t.Fatal("a worker without its device goes on with its call")
	}
	if v := w.verdict.Load(); v == nil || v.status != wire.StatusWorkerDied || !strings.Contains(v.text, "closed the descriptors") {
		t.Errorf("verdict %+v", v)
	}
}

// Between calls no client waits for the worker, and calls that come and go prove that the worker answers.
func TestDeviceOfAnIdleWorker(t *testing.T) {
	w, words := watched(t, wire.DeviceClosed)
	var seen uint64
	for i, look := range []struct {
		begun, over uint64
		lost        bool
	}{
		{0, 0, false}, {0, 0, false}, // it has not been called yet
		{1, 0, false}, {2, 1, false}, // another call at each look
		{3, 3, false}, {3, 3, false},
		{4, 3, false}, {4, 3, true}, {4, 3, true},
		{4, 4, false}, {5, 4, false}, {5, 4, true},
	} {
		binary.LittleEndian.PutUint64(words, look.begun<<16)
		binary.LittleEndian.PutUint64(words[8:], look.over)
		if got := w.lostDevice(&seen); got != look.lost {
			t.Errorf("look %d, %d calls begun and %d over: lost %v, want %v", i, look.begun, look.over, got, look.lost)
		}
	}
	w.Kill()
	<-w.done
	w.command(wire.Device) // an answer about a worker that has ended changes nothing
	other := &Worker{id: 2, z: w.z, device: make(chan uint32, 1), done: make(chan struct{})}
	w.z.mu.Lock()
	w.z.workers[2] = other
	w.z.mu.Unlock()
	other.command(wire.Device)
	within(t, "an answer after it", func() <-chan struct{} {
		answered := make(chan struct{})
		go func() { <-other.device; close(answered) }()
		return answered
	}())
	w.z.forget(other)
	if w.lostDevice(&seen) {
		t.Error("a worker that has ended counts as one that has closed its device")
	}
}

package zygote

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// state is a process's state as /proc has it.
func state(t testing.TB, pid int) byte {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, ok := strings.Cut(string(b), ") ")
	if err != nil || !ok {
		t.Fatal(err)
	}
	return rest[0]
}

func (l *leased) renew(t testing.TB) []byte {
	t.Helper()
	line, err := l.c.ask("renew %d", l.channel)
	if err != nil {
		t.Fatal(err)
	}
	blob, err := hex.DecodeString(line)
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

func (l *leased) resume(t testing.TB, blob []byte) {
	t.Helper()
	if err := l.Resume(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	if _, err := l.c.ask("resume %d %x", l.channel, l.Blob()); err != nil {
		t.Fatal(err)
	}
}

const statusBadRequest = -205

// A worker serves one lease after the other over one queue pair, and is stopped in between, for as long as it takes.
func TestPark(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	pid := w.PID()
	for i := range 20 {
		w.mustCall(t, fnEcho, []byte("in a lease"))
		w.mustCall(t, fnEcho, make([]byte, 700)) // by the queue pair
		if n := w.Counters().Calls; n != 2 {
			t.Errorf("lease %d: %d calls are counted, want its own 2", i, n)
		}
		if err := w.Park(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it is stopped", func() bool { return state(t, pid) == 'T' })
		if i == 0 {
			time.Sleep(stopPatience + 200*time.Millisecond) // what nobody has stopped on purpose is killed by then
		}
		w.resume(t, w.renew(t))
		if !w.Steps().Cached || w.Steps().Connect <= 0 {
			t.Errorf("steps %+v", w.Steps())
		}
	}
	if w.PID() != pid {
		t.Errorf("pid %d was %d", w.PID(), pid)
	}
	if err := w.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.Kill()
	within(t, "a parked worker is killed", w.Done())
}

// Nothing that a client sends between leases, or of an earlier lease, is executed, even if the process is let run.
func TestParkedServesNobody(t *testing.T) {
	z := startZygote(t)
	w := lease(t, z, startClient(t), nil)
	w.mustCall(t, fnEcho, []byte("x"))
	if err := w.Park(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused := func(when string) {
		t.Helper()
		for _, size := range []int{8, 700} {
			if r, err := w.call(fnEcho, make([]byte, size)); err != nil || r.status != statusBadRequest {
				t.Errorf("%s: a call of %d bytes: status %d, %v, want %d", when, size, r.status, err, statusBadRequest)
			}
		}
	}
	unix.Kill(w.PID(), unix.SIGCONT)
	refused("parked")
	if n := w.Counters().Calls; n != 1 {
		t.Errorf("%d calls were executed, want 1", n)
	}
	// Its next lease has a generation that this client does not use.
	blob := w.renew(t)
	w.renew(t)
	if err := w.Resume(t.Context(), blob); err != nil {
		t.Fatal(err)
	}
	refused("of another lease")
	if n := w.Counters().Calls; n != 0 {
		t.Errorf("%d calls of another lease were executed", n)
	}
}

// Only the client that a worker is connected to can have it back.
func TestResumeRefuses(t *testing.T) {
	z := startZygote(t)
	c := startClient(t)
	w := lease(t, z, c, nil)
	w.mustCall(t, fnEcho, []byte("x"))
	_, other, err := c.offer()
	if err != nil {
		t.Fatal(err)
	}
	for what, blob := range map[string][]byte{"another channel's blob": other, "nonsense": []byte("nonsense"), "nothing": nil} {
		if err := w.Park(t.Context()); err != nil {
			t.Fatal(err)
		}
		var refused *WorkerError
		if err := w.Resume(t.Context(), blob); !errors.As(err, &refused) || refused.Status != statusBadBlob {
			t.Errorf("%s: %v, want status %d", what, err, statusBadBlob)
		}
	}
	// The right one still can. A worker that hangs in a call is not parked.
	w.resume(t, w.renew(t))
	go w.call(fnHangs, nil)
	eventually(t, "the call runs", func() bool { return w.Running() == "hangs" })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := w.Park(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("park while a call runs: %v", err)
	}
	w.Kill()
	<-w.Done()
	if err := w.Park(t.Context()); err == nil {
		t.Error("a dead worker was parked")
	}
}

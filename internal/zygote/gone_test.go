package zygote

import (
	"slices"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
)

// A worker that runs a function notices that its client's process has ended.
func TestClientGoneDuringACall(t *testing.T) {
	z := startZygote(t)
	for _, mode := range []uint8{0, 1, 2} {
		c := startClient(t)
		w := deathLease(t, z, c, func(s *Spec) { s.WaitMode = mode })
		if w.ClientGone() {
			t.Errorf("mode %d: the client is gone before it has called", mode)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.call(slices.Index(deathNames, "loops"), nil)
		}()
		eventually(t, "the function runs", func() bool { return w.Running() == "loops" })
		if w.ClientGone() {
			t.Errorf("mode %d: the client is gone while it waits for its reply", mode)
		}
		c.cmd.Process.Kill()
		<-ended
		eventually(t, "the worker notices", w.ClientGone)
		select {
		case <-w.Done():
			t.Errorf("mode %d: the worker has ended: %+v", mode, w.Exit())
		default:
		}
		w.Kill()
		within(t, "the end of a killed worker", w.Done())
	}
}

// A blocked worker is told when its client ends. So it rarely wakes to look for that itself: every 2 s, or four times a second if nothing tells it.
func TestBlockedWorkerSleeps(t *testing.T) {
	w := lease(t, startZygote(t), startClient(t), func(s *Spec) { s.WaitMode = api.WaitWarm })
	w.mustCall(t, fnEcho, []byte("x"))
	blocked := func() uint64 {
		w.page.mu.Lock()
		defer w.page.mu.Unlock()
		return w.page.word(6)
	}
	began, before := time.Now(), blocked()
	time.Sleep(time.Second)
	n, rest := blocked()-before, time.Since(began) // a loaded machine rests longer
	if most := 1 + uint64(rest/(2*time.Second)); n > most {
		t.Errorf("it woke %d times within %v without a call, want at most %d", n, rest, most)
	}
	w.mustCall(t, fnEcho, []byte("x"))
	w.c.cmd.Process.Kill()
	within(t, "end of the worker after its client's", w.Done())
}

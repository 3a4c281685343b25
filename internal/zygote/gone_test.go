package zygote

import (
	"slices"
	"testing"
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

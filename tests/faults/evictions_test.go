package faults

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

var (
	evictionCalls = flag.Int("eviction-calls", 4000, "calls of TestEvictionsLoseNoCall, at least")
	evictionsFlag = flag.Int("evictions", 4, "how often TestEvictionsLoseNoCall evicts the lease")
)

// TestEvictionsLoseNoCall evicts a lease with Failover again and again while its client makes one idempotent call after the other. The owner of the
// node ends the executor by SIGTERM, as when a batch system needs the node for a job. Each call ends with its own result, and the bill agrees
// with the calls and with the audit lines.
func TestEvictionsLoseNoCall(t *testing.T) {
	if testing.Short() {
		t.Skip("evicts leases for seconds")
	}
	if provider() != "shm" {
		t.Skip("a move of a lease does not depend on the provider: TestFailover crosses")
	}
	const tenant = "guest"
	w := newWorld(t)
	c := &chaos{t: t, storm: newStorm(t, w, "evictions")}
	w.newManagerOn(here, "--state-dir", filepath.Join(w.dir, "state"))
	byAddress := map[string]*daemon{}
	for i := range 2 {
		name := fmt.Sprintf("executor-%d", i)
		d := w.newExecutor(name, "--audit-file", filepath.Join(w.dir, name+".audit"))
		c.events.open(name)
		c.executors = append(c.executors, d)
		byAddress[d.address] = d
	}
	s, err := client.Connect(t.Context(), client.Options{Manager: w.manager.address, SecretFile: w.secret, Provider: provider(), Tenant: tenant})
	if err != nil {
		t.Fatal(err)
	}
	l := lease(t, s, client.LeaseOptions{Failover: true, WaitMode: client.Warm})
	f := function(t, l, "echo")

	var made, lost atomic.Int64
	var over atomic.Bool // all evictions are done
	var longest time.Duration
	var first error // of the calls that were lost
	done := make(chan struct{})
	call := func(i int, in, out []byte) error {
		ctx, cancel := context.WithTimeout(client.Idempotent(t.Context(), 3), callerBound)
		defer cancel()
		began := time.Now()
		n, err := f.Invoke(ctx, in, out)
		longest = max(longest, time.Since(began))
		switch {
		case err != nil:
			return fmt.Errorf("call %d of %d bytes: %w", i, len(in), err)
		case !bytes.Equal(out[:n], in):
			return fmt.Errorf("call %d of %d bytes: another result, of %d bytes", i, len(in), n)
		}
		return nil
	}
	go func() {
		defer close(done)
		const enough = 20                             // lost calls
		sizes := []int{8, 64, 300, 1024, 5000, 20000} // the last size does not fit into a slot and travels by the queue pair, the others by the mailbox
		in, out := make([]byte, 20000), make([]byte, 20000)
		for i := 0; (i < *evictionCalls || !over.Load()) && lost.Load() < enough; i++ {
			size := sizes[i%len(sizes)]
			binary.LittleEndian.PutUint64(in, uint64(i)*0x9e3779b97f4a7c15+1)
			copy(in[8:size], bytes.Repeat(in[:8], size/8))
			if err := call(i, in[:size], out); err != nil {
				if lost.Add(1) == 1 {
					first = err
				}
			} else {
				made.Add(1)
			}
		}
	}()
	var gone, back time.Duration // from an eviction to the executor's end, and until its lease has moved and it lends again
	evictions := 0
	evict := func() {
		d := byAddress[l.Executor()]
		if d == nil {
			t.Fatalf("the lease is at %q, which is no executor of this test", l.Executor())
		}
		p, began := d.current(), time.Now()
		p.signal(unix.SIGTERM)
		<-p.done
		gone = max(gone, time.Since(began))
		evictions++
		if code := p.state.ExitCode(); code != 0 {
			t.Errorf("%s ended with %v after SIGTERM", d.name, p.state)
		}
		// The lease moves with the next call. Later this executor takes it back from the other one.
		w.eventually(recoverBound, "the lease has moved, and "+d.name+" lends again", func() bool {
			list, err := w.executors()
			moved := l.Statistics().Moved
			w.lastly = fmt.Sprintf("%+v, %v; the lease is at %s after %d moves and %d evictions; %d calls lost", list, err, l.Executor(), moved, evictions, lost.Load())
			for _, e := range list {
				if e.Address == d.address && e.FreeCores == e.Cores && e.State != "draining" && e.State != "silent" {
					return moved >= uint64(evictions)
				}
			}
			return false
		})
		back = max(back, time.Since(began))
	}
	for ended := false; evictions < *evictionsFlag && !ended; {
		if made.Load() >= int64(evictions**evictionCalls / *evictionsFlag) {
			evict()
			continue
		}
		select {
		case <-done: // too many calls were lost
			ended = true
		case <-time.After(time.Millisecond):
		}
	}
	over.Store(true)
	<-done
	if lost.Load() > 0 {
		t.Errorf("%d calls were lost in %d evictions, the first one: %v", lost.Load(), evictions, first)
	}
	st := l.Statistics()
	if st.Moved < uint64(evictions) {
		t.Errorf("the lease moved %d times in %d evictions", st.Moved, evictions)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	for _, d := range c.executors {
		d.stop()
	}
	calls := uint64(made.Load())
	want := c.events.expectedCharges(c)[tenant]
	var got billed
	w.eventually(recoverBound, "the bill agrees with the calls and with the audit lines", func() bool {
		bills, err := c.bills()
		got = bills[tenant]
		w.lastly = fmt.Sprintf("%+v, %v; wanted %+v and %d calls, of which %d may have run again", bills, err, want, calls, st.Repeated)
		return err == nil && want != nil && got.cores >= want.low && got.cores <= want.high &&
			got.calls >= calls && got.calls <= calls+st.Repeated
	})
	t.Logf(`
calls made                       %d
calls lost                       %d
evictions                        %d
moves of the lease               %d
calls that were repeated         %d
calls billed                     %d
core time billed                 %.3f s, by the audit lines at least %.3f s
longest call                     %.0f ms
SIGTERM to the executor's end    at most %.0f ms
SIGTERM to lending again         at most %.0f ms`,
		calls, lost.Load(), evictions, st.Moved, st.Repeated, got.calls, got.cores.Seconds(), want.low.Seconds(), longest.Seconds()*1e3, gone.Seconds()*1e3, back.Seconds()*1e3)
	t.Logf("figure: evictions.calls = %d", calls)
	t.Logf("figure: evictions.lost = %d", lost.Load())
	t.Logf("figure: evictions.end_s = %.3f", gone.Seconds())
}

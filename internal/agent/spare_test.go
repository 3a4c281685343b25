package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Spare leases follow demand. A lease that gets new workers soon after another one adds a spare lease. One that nobody took removes one.
func TestDemandForSpareLeases(t *testing.T) {
	const fresh, cached = true, false
	now := time.Unix(1000, 0)
	var d demand
	for i, s := range []struct {
		after  time.Duration
		fresh  bool
		wanted int
	}{
		{0, fresh, 0}, // a program that leases once
		{provenFor + 1, fresh, 0},
		{provenFor, fresh, 1},
		{time.Second, cached, 1},
		{provenFor + 1, cached, 1},
		{provenFor, fresh, 2},
		{0, fresh, 2}, // the most
	} {
		now = now.Add(s.after)
		if d.acquired(now, s.fresh, 2); d.wanted != s.wanted {
			t.Fatalf("step %d: %d spare leases are wanted, want %d", i, d.wanted, s.wanted)
		}
	}
	d.ready = 1
	for _, want := range []int{1, 0, 0} {
		if d.unused(); d.wanted != want {
			t.Errorf("%d are wanted after one that nobody took, want %d", d.wanted, want)
		}
	}
	now = now.Add(provenFor + 1)
	if d.idle(now) {
		t.Error("forgotten although a spare lease is ready")
	}
	if d.ready = 0; !d.idle(now) {
		t.Error("not forgotten after it")
	}
	var none demand
	none.acquired(now, fresh, 0)
	if none.acquired(now, fresh, 0); none.wanted != 0 {
		t.Error("spare leases are wanted although the setting is 0")
	}
}

// A spare lease that is wanted, but that no executor has started, does not keep closed connections in memory.
func TestDemandOfClosedConnections(t *testing.T) {
	pool := grant.NewPool(time.Hour)
	control, err := pool.Open(t.Context(), grant.Options{Executor: "127.0.0.1:1", AllowPlaintext: true, Known: true, Keep: 1, Pool: 1})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "lib.so")
	if err := os.WriteFile(path, append([]byte("\x7fELF"), make([]byte, 60)...), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lib, err := control.Library(f, path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := control.Plan(lib, grant.Spec{Library: path, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	terms, _ := p.Terms(&grant.Held{})
	s := &spares{terms: map[grant.Terms]*demand{terms: {wanted: 1, last: now}}}
	if s.forget(now); len(s.terms) != 1 {
		t.Error("forgotten while the connections are open")
	}
	control.Close()
	pool.Close()
	if s.forget(now); len(s.terms) != 0 {
		t.Error("not forgotten after the connections were closed")
	}
}

// An executor that has no core for a spare lease is asked twice in a row, and then less and less often. After a success it is asked at once again.
func TestPauseAfterRefusedSpareLeases(t *testing.T) {
	now := time.Unix(1000, 0)
	refused := errors.New("no core")
	var d demand
	for i, pause := range []time.Duration{0, 0, refusedPause, 2 * refusedPause, 4 * refusedPause} {
		if d.tried(now, refused); max(d.again.Sub(now), 0) != pause {
			t.Errorf("%v until the next attempt after %d refusals, want %v", d.again.Sub(now), i+1, pause)
		}
	}
	for range 100 {
		d.tried(now, refused)
	}
	if d.again.Sub(now) != provenFor {
		t.Errorf("%v until the next attempt after many refusals, want %v", d.again.Sub(now), provenFor)
	}
	if d.tried(now, nil); now.Before(d.again) {
		t.Error("a pause after a success")
	}
	if d.tried(now, refused); now.Before(d.again) {
		t.Error("a pause after one refusal")
	}
}

// An attempt that fails is followed by another one, if a lease was granted or released meanwhile: the core that the attempt needed may have become free too late.
func TestAttemptAfterARelease(t *testing.T) {
	refused := errors.New("no core")
	for _, s := range []struct {
		d    demand
		err  error
		more bool
	}{
		{demand{wanted: 1}, refused, false},
		{demand{wanted: 1, freed: true}, refused, true},
		{demand{wanted: 2, ready: 1}, nil, true},
		{demand{wanted: 1, ready: 1, freed: true}, nil, false},
	} {
		if s.d.more(s.err) != s.more {
			t.Errorf("%+v after %v: another attempt: %v, want %v", s.d, s.err, !s.more, s.more)
		}
	}
}

// While a driver opens a device, the agent still answers leases, which need the mutex of the spare leases. A failed attempt is not remembered.
func TestOpeningADeviceHoldsNobodyUp(t *testing.T) {
	began, answer := make(chan struct{}), make(chan error)
	s := &spares{devs: make(map[device]*deviceOnce)}
	s.open = func(string, dataplane.Options) (*dataplane.Device, error) {
		began <- struct{}{}
		return nil, <-answer
	}
	for range 2 {
		result := make(chan error, 1)
		go func() {
			_, err := s.deviceOf(device{provider: dataplane.Verbs})
			result <- err
		}()
		<-began
		free := s.mu.TryLock()
		if free {
			s.mu.Unlock()
		}
		answer <- dataplane.ErrBusy
		if err := <-result; !errors.Is(err, dataplane.ErrBusy) {
			t.Errorf("opened with error %v, want %v", err, dataplane.ErrBusy)
		}
		if !free {
			t.Fatal("the mutex is held while the device is opened")
		}
	}
}

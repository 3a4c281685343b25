package manager

import (
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// A tenant's cores, reserved by two executors' atomics and by messages: one sum, which never stays above what is there, whoever
// dies in the middle.
func TestProviderLimits(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		w.stop()
		w.withLimits(t, "ann=10,*=3")
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		a, b := w.executor(1), w.executor(2)
		if !a.Limited() || a.Holds() != 24 {
			t.Fatalf("%v %d", a.Limited(), a.Holds())
		}
		r, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "ann"})
		ok(err)
		again, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "ann"})
		ok(err)
		other, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "zoe"})
		ok(err)
		if !r.GetLimited() || r.GetCores() != 10 || again.GetRecord() != r.GetRecord() || other.GetRecord() == r.GetRecord() || other.GetCores() != 3 {
			t.Errorf("%v %v %v", r, again, other)
		}
		ann := r.GetRecord()
		// has is what ann has as an executor reads it, and as the manager does.
		has := func(x *party, want uint64) {
			t.Helper()
			lim, err := x.Reserve(ann, 0)
			ok(err)
			if mine := w.limits.use()["ann"]; lim.Reserved() != want || mine.Reserved() != want || lim.Cores != 10 {
				t.Errorf("ann has %d as the executor reads it, %d as the manager does, want %d", lim.Reserved(), mine.Reserved(), want)
			}
		}
		take := func(x *party, place int, cores uint32) {
			t.Helper()
			_, err := x.Reserve(ann, int64(cores))
			ok(err)
			ok(x.Hold(place, ann, cores))
		}
		take(a, 0, 4)
		take(b, 3, 5)
		has(a, 9)
		// A third one, by message: 1 is left.
		inc := info(3, 4).Incarnation
		ask := func(cores uint32, force bool) *control.ReserveReply {
			t.Helper()
			r, err := w.client.Reserve(t.Context(), &control.ReserveRequest{Incarnation: inc, Tenant: "ann", Cores: cores, Force: force})
			ok(err)
			return r
		}
		if _, err := w.client.Reserve(t.Context(), &control.ReserveRequest{Incarnation: inc, Tenant: "ann", Cores: 1}); control.ClassOf(err) != control.ClassLease {
			t.Errorf("an executor that nobody knows reserves: %v", err)
		}
		id := register(t, w.Manager, "192.0.2.3:1", info(3, 4))
		if r := ask(2, false); r.GetGranted() || r.GetReserved() != 9 || r.GetCores() != 10 {
			t.Errorf("%v", r)
		}
		for range 2 { // repeating does no harm
			if r := ask(1, false); !r.GetGranted() || r.GetReserved() != 10 {
				t.Errorf("%v", r)
			}
		}
		if r := ask(3, true); !r.GetGranted() || r.GetReserved() != 12 {
			t.Errorf("by force: %v", r)
		}
		has(b, 12)
		// It leaves: what it had is free.
		_, err = w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: id})
		ok(err)
		has(a, 9)
		// An executor leaves, or is attached anew: what it said that it had is given back with the next look.
		_, err = w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: a.id})
		ok(err)
		w.harvest()
		has(b, 5)
		b.join(w.device())
		w.harvest()
		has(b, 0)
		take(b, 0, 2)
		// One that died between reserving and saying so is found out, later, but not one that is in the middle of it.
		_, err = b.Reserve(ann, 3)
		ok(err)
		for range 3 {
			w.harvest()
			w.clock.now = w.clock.now.Add(link.Timeout)
		}
		has(b, 5)
		w.harvest()
		has(b, 2)
		// One that is silent has nothing, and what it has again when it is back is counted again.
		w.table.sweep()
		w.clock.now = w.clock.now.Add(time.Second)
		for range 3 {
			w.table.sweep()
			w.clock.now = w.clock.now.Add(time.Second)
		}
		w.table.sweep()
		w.harvest()
		w.clock.now = w.clock.now.Add(mendAfter)
		w.harvest()
		has(b, 0)
		b.write(4)
		w.table.sweep()
		w.harvest()
		w.clock.now = w.clock.now.Add(mendAfter)
		w.harvest()
		has(b, 2)
		for _, tenant := range []string{"", string(make([]byte, 300))} {
			if _, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: tenant}); control.ClassOf(err) != control.ClassInvalid {
				t.Errorf("tenant of %d bytes: %v", len(tenant), err)
			}
		}
	})
}

// What executors have reserved by messages is bounded by the same silence as what others have by atomics, and is never counted twice
// when an executor changes from the one to the other.
func TestLimitsByMessages(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	w.stop()
	w.withLimits(t, "ann=10")
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "ann"})
	ok(err)
	ann := r.GetRecord()
	has := func(what string, want uint64) {
		t.Helper()
		if mine := w.limits.use()["ann"]; mine.Reserved() != want {
			t.Errorf("%s: ann has %d, want %d", what, mine.Reserved(), want)
		}
	}
	ask := func(n byte, cores uint32, force bool) bool {
		t.Helper()
		r, err := w.client.Reserve(t.Context(), &control.ReserveRequest{Incarnation: info(n, 4).Incarnation, Tenant: "ann", Cores: cores, Force: force})
		ok(err)
		return r.GetGranted()
	}
	// beats lets heartbeats pass, in which only those that are named are heard.
	beats := func(n int, heard map[uint64]byte) {
		t.Helper()
		for range n {
			w.clock.now = w.clock.now.Add(time.Second)
			for id, n := range heard {
				if !heartbeat(t, w.Manager, id, info(n, 4)) {
					t.Fatalf("executor %d is not known", id)
				}
			}
			w.table.sweep()
			w.harvest()
		}
	}
	one, two := register(t, w.Manager, "192.0.2.1:1", info(1, 4)), register(t, w.Manager, "192.0.2.2:1", info(2, 4))
	if !ask(1, 6, false) || !ask(2, 3, false) || ask(2, 5, false) {
		t.Error("6 and 3 of 10 are not granted, or 6 and 5 are")
	}
	has("both", 9)
	beats(missed-1, map[uint64]byte{two: 2})
	has("one has missed less than it may", 9)
	beats(1, map[uint64]byte{two: 2})
	has("one is silent", 3)
	if !ask(2, 9, false) {
		t.Error("what a silent executor had is not free")
	}
	beats(1, map[uint64]byte{one: 1, two: 2})
	has("it is back: counted above the limit", 15)
	if ask(2, 10, false) || !ask(2, 4, false) {
		t.Error("more above the limit is granted, or less is not")
	}
	has("less", 10)
	beats(missed, map[uint64]byte{two: 2})
	has("silent again", 4)
	if !ask(1, 6, true) { // whoever asks lives
		t.Error("by force")
	}
	has("it asks", 10)
	beats(1, map[uint64]byte{one: 1, two: 2})
	has("it asked", 10)
	// It finds a way of its own, and counts by that.
	p := &party{w: w, info: info(1, 4)}
	p.info.Providers = []string{"shm"}
	_, err = w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: one})
	ok(err)
	p.join(w.device()) // at an address of its own
	if !ask(1, 5, false) {
		t.Error("5 by message")
	}
	has("by message", 9)
	p.join(w.device())
	has("attached: it counts anew", 4)
	_, err = p.Reserve(ann, 5)
	ok(err)
	ok(p.Hold(0, ann, 5))
	has("by atomics", 9)
	// Its way is over, and it goes on by messages.
	beats(1, map[uint64]byte{two: 2, p.id: 1})
	has("by nothing", 4)
	var refused error
	for end := time.Now().Add(10 * time.Second); refused == nil && time.Now().Before(end); {
		refused = p.WriteLine(lineOf(p.info, 0, 999, w.clock.now))
	}
	if refused == nil {
		t.Error("who sends messages still writes its line")
	}
	if !ask(1, 5, true) {
		t.Error("5 by force")
	}
	beats(1, map[uint64]byte{two: 2, p.id: 1})
	has("by messages", 9)
	// An executor that reserves while it deregisters keeps nothing.
	w.limits.reserve([16]byte{7}, ann, 1, true)
	has("an unknown executor", 10)
	beats(1, map[uint64]byte{two: 2, p.id: 1})
	has("the unknown executor is dropped", 9)
}

// withLimits starts the manager anew, with limits.
func (w *world) withLimits(t *testing.T, text string) {
	t.Helper()
	var err error
	if w.config.Limits, err = accounting.ParseLimits(text); err != nil {
		t.Fatal(err)
	}
	w.start(8)
}

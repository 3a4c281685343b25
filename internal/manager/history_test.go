package manager

import (
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/history"
)

// sumHistory adds up a reply.
func sumHistory(r *control.HistoryReply) (sum history.Bucket) {
	for _, p := range r.GetSteps() {
		b := history.Bucket{Counters: history.Counters{Watched: p.GetWatchedUs(), Harvested: p.GetHarvestedUs(), Idle: p.GetIdleUs(), Batch: p.GetBatchUs(),
			Stats: board.StatsOf(p.GetStats())}, Tenants: map[string]accounting.Use{}}
		for _, t := range p.GetTenants() {
			b.Tenants[t.GetTenant()] = accounting.Use(t.GetUse())
		}
		sum.Add(&b)
	}
	return sum
}

// What executors report by memory and by message is in the history, once, also over a restart of the resource manager.
func TestProviderHistory(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		w := newWorld(t, provider, 8)
		ok := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		get := func(tenant string) history.Bucket {
			t.Helper()
			r, err := w.client.History(t.Context(), &control.HistoryRequest{Tenant: tenant, Seconds: 3600})
			ok(err)
			return sumHistory(r)
		}
		second := func() { // a heartbeat of the manager
			w.clock.now = w.clock.now.Add(time.Second)
			w.table.sweep()
			w.harvest()
			w.watch()
		}
		a := w.executor(1)
		a.info.NodeCores = 16 // 4 of them are lent
		var s board.Stats
		s.Starts[board.StartCold].Add(2 * time.Millisecond)
		s.Ended[board.EndRevoked] = 3
		report := func(free uint32) {
			t.Helper()
			a.write(free)
			ok(a.WriteStats(s, board.ShortIncarnation(incarnationOf(a.info))))
		}
		report(1)
		k := accounting.Key{Incarnation: incarnationOf(a.info), Lease: 5}
		ok(a.WriteHead(0, accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}))
		ok(a.Charge(0, accounting.Use{}, accounting.Use{accounting.CoreMicros: 7, accounting.Calls: 9}))
		second()
		report(1)
		second()
		h := get("")
		if h.Watched != 2e6 || h.Harvested != 2*3e6 || h.Idle != 2e6 || h.Tenants["ann"][accounting.Calls] != 9 {
			t.Errorf("%+v", h)
		}
		if h.Stats.Starts[board.StartCold].Count != 1 || h.Stats.Ended[board.EndRevoked] != 3 {
			t.Errorf("%+v", h.Stats)
		}
		if n := h.Batch; n != 0 { // registered without the node's cores
			t.Errorf("%d batch", n)
		}
		// A silent executor offers nothing. Its leases and their use may go on.
		for range missed + 1 {
			second()
		}
		before := get("")
		second()
		if after := get(""); after.Batch-before.Batch != 4e6 || after.Idle != before.Idle || after.Harvested != before.Harvested {
			t.Errorf("batch %d, idle %d", after.Batch-before.Batch, after.Idle-before.Idle)
		}
		// By message, with the same totals: nothing counts twice. What it counted last before it left counts.
		a.beat++
		a.info.Stats = s.Values()
		if !heartbeat(t, w.Manager, a.id, a.info) {
			t.Fatal("unknown")
		}
		s.Ended[board.EndRevoked]++
		a.info.Stats = s.Values()
		heartbeat(t, w.Manager, a.id, a.info)
		if h = get(""); h.Stats.Ended[board.EndRevoked] != 4 || h.Stats.Starts[board.StartCold].Count != 1 {
			t.Errorf("%+v", h.Stats)
		}
		last := h
		w.stop()
		w.start(8)
		if h = get(""); h.Counters != last.Counters || h.Tenants["ann"] != last.Tenants["ann"] {
			t.Errorf("%+v after a restart, %+v before", h, last)
		}
		// It registers again with its totals, and only what it counts from now on is new.
		w.clock.now = w.clock.now.Add(time.Minute)
		register(t, w.Manager, "192.0.2.1:7465", a.info)
		w.watch() // the manager was away for a minute, which is not counted
		s.Deaths++
		a.info.Stats = s.Values()
		id := register(t, w.Manager, "192.0.2.1:7465", a.info)
		if h = get(""); h.Stats.Deaths != 1 || h.Stats.Ended[board.EndRevoked] != 4 || h.Watched != last.Watched {
			t.Errorf("%+v", h)
		}
		// The node's other cores are not offered.
		before = get("")
		second()
		if after := get("bob"); after.Batch-before.Batch != 12e6 || after.Tenants["ann"] != (accounting.Use{}) {
			t.Errorf("%d batch, tenants %v", after.Batch-before.Batch, after.Tenants)
		}
		_, err := w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: id})
		ok(err)
		before = get("")
		second()
		if after := get(""); after.Batch-before.Batch != 16e6 {
			t.Errorf("%d batch after it has left", after.Batch-before.Batch)
		}
		if _, err := w.client.History(t.Context(), &control.HistoryRequest{Step: 7}); control.ClassOf(err) != control.ClassInvalid || !strings.Contains(err.Error(), "step 7 s") {
			t.Error(err)
		}
	})
}

// Bytes that no executor wrote are no counts.
func TestForgedStats(t *testing.T) {
	w := newWorld(t, "shm", 8)
	a := w.executor(1)
	s := board.Stats{Deaths: 1}
	incarnation := board.ShortIncarnation(incarnationOf(a.info))
	if err := a.WriteStats(s, incarnation+1); err != nil {
		t.Fatal(err)
	}
	w.table.survey()
	s.Deaths = 1<<64 - 1
	if err := a.WriteStats(s, incarnation); err != nil {
		t.Fatal(err)
	}
	w.table.survey()
	s.Deaths = 5 // as after a restart of the executor's counters
	if err := a.WriteStats(s, incarnation); err != nil {
		t.Fatal(err)
	}
	w.table.survey()
	r, err := w.client.History(t.Context(), &control.HistoryRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if h := sumHistory(r); h.Stats.Deaths != 1<<64-1 { // a sum that would overflow stays at the largest number
		t.Errorf("%d deaths", h.Stats.Deaths)
	}
}

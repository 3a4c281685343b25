package executor

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// An executor whose node is wanted back says so, gives no lease beyond that, and leaves by itself in time.
func TestUntilIsPublishedAndBoundsLeases(t *testing.T) {
	until := time.Now().Add(5 * time.Minute).Truncate(time.Second)
	n := newNode(t, func(c *Config) {
		c.Settings.Until, c.Settings.Grace = config.Instant(until), time.Minute
	})
	i, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil || i.GetAvailableUntil() != uint64(until.Unix()) {
		t.Errorf("available until %d, want %d; %v", i.GetAvailableUntil(), until.Unix(), err)
	}
	l := n.lease(1) // for an hour by default
	if d := time.Duration(l.GetDurationMs()) * time.Millisecond; d > 4*time.Minute || d < 3*time.Minute {
		t.Errorf("a lease of %v on a node that drains in 4 minutes", d)
	}
	n.release(l.GetLeaseId())
}

func TestBeforeUntil(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := &config.Executor{Grace: 10 * time.Second}
	if d := beforeUntil(s, time.Hour, now); d != time.Hour {
		t.Errorf("without an end: %v", d)
	}
	for left, want := range map[time.Duration]time.Duration{time.Hour: 30 * time.Minute, time.Minute: 50 * time.Second,
		10 * time.Second: time.Millisecond, -time.Hour: time.Millisecond} {
		s.Until = config.Instant(now.Add(left))
		if d := beforeUntil(s, 30*time.Minute, now); d != want {
			t.Errorf("%v before the end: a lease of %v, want %v", left, d, want)
		}
	}
}

func TestServeLeavesBeforeUntil(t *testing.T) {
	s := testSettings(t)
	s.Cores, s.Memory = config.Cores{Count: 1}, 1<<30
	s.Grace, s.Until = 10*time.Second, config.Instant(time.Now().Add(10*time.Second+300*time.Millisecond))
	z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
	done := make(chan error, 1)
	go func() { done <- serveWith(t.Context(), context.Background(), s, z, slog.New(slog.DiscardHandler)) }()
	select {
	case err := <-done:
		if err != nil || time.Now().After(s.Until.Time()) {
			t.Errorf("ended at %v with %v, wanted back at %v", time.Now(), err, s.Until)
		}
	case <-time.After(testBound):
		t.Error("still there")
	}
}

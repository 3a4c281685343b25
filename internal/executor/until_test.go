package executor

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

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

// The time may move, either way, and become unknown; nonsense is refused.
func TestUntilMoves(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	reports := make(chan struct{}, 10)
	n := newNode(t, func(c *Config) { c.Settings.Grace = time.Second })
	n.e.report = func() { reports <- struct{}{} }
	for i, until := range []uint64{uint64(now.Add(time.Hour).Unix()), uint64(now.Add(2 * time.Minute).Unix()), uint64(now.Add(10 * time.Minute).Unix()), 0} {
		for range 2 { // the repetition changes nothing
			if _, err := n.Until(n.ctx(), &control.UntilRequest{Until: until}); err != nil {
				t.Fatal(err)
			}
		}
		info, err := n.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
		if err != nil || info.GetAvailableUntil() != until {
			t.Errorf("available until %d, want %d; %v", info.GetAvailableUntil(), until, err)
		}
		if len(reports) != i+1 {
			t.Errorf("%d reports after %d changes", len(reports), i+1)
		}
	}
	_, err := n.Until(n.ctx(), &control.UntilRequest{Until: 1 << 40})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "1099511627776")
}

func TestBeforeUntil(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	if d := newWantedBack(time.Time{}, 10*time.Second).before(time.Hour, now); d != time.Hour {
		t.Errorf("without an end: %v", d)
	}
	for left, want := range map[time.Duration]time.Duration{time.Hour: 30 * time.Minute, time.Minute: 50 * time.Second,
		10 * time.Second: time.Millisecond, -time.Hour: time.Millisecond} {
		if d := newWantedBack(now.Add(left), 10*time.Second).before(30*time.Minute, now); d != want {
			t.Errorf("%v before the end: a lease of %v, want %v", left, d, want)
		}
	}
}

// Who waits for the time to drain follows it when it moves.
func TestWaitForWantedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		w := newWantedBack(time.Time{}, time.Minute)
		over := make(chan struct{})
		wait := func(ctx context.Context) {
			w.wait(ctx)
			over <- struct{}{}
		}
		go wait(t.Context())
		for _, at := range []time.Duration{10 * time.Minute, 5 * time.Minute, time.Hour} {
			time.Sleep(time.Minute)
			w.set(began.Add(at))
		}
		<-over
		if d := time.Since(began); d != 59*time.Minute {
			t.Errorf("after %v, want an hour less the grace", d)
		}
		w.set(time.Time{})
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		go wait(ctx)
		<-over
		if ctx.Err() == nil {
			t.Error("over without a time")
		}
	})
}

func TestServeLeavesBeforeUntil(t *testing.T) {
	s := testSettings(t)
	s.Cores, s.Memory = config.Cores{Count: 1}, 1<<30
	s.Grace, s.Until = 10*time.Second, config.Instant(time.Now().Add(10*time.Second+300*time.Millisecond))
	z := &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}
	done := make(chan error, 1)
	go func() {
		done <- serveWith(t.Context(), context.Background(), s, z, Handover{}, slog.New(slog.DiscardHandler))
	}()
	select {
	case err := <-done:
		if err != nil || time.Now().After(s.Until.Time()) {
			t.Errorf("ended at %v with %v, wanted back at %v", time.Now(), err, s.Until)
		}
	case <-time.After(testBound):
		t.Error("still there")
	}
}

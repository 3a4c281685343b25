package accounting

import (
	"context"
	"errors"
	"testing"
	"time"
)

// fakeReplica is a Replica whose Commit a test defines.
type fakeReplica struct {
	most      int
	commit    func(context.Context, []Change) error
	settled   []Change
	abandoned error
}

func (f *fakeReplica) Most() int                                    { return f.most }
func (f *fakeReplica) Commit(ctx context.Context, c []Change) error { return f.commit(ctx, c) }
func (f *fakeReplica) Settle(context.Context) ([]Change, error)     { return f.settled, nil }
func (f *fakeReplica) Abandon(err error)                            { f.abandoned = err }
func (f *fakeReplica) open(t *testing.T, more ...Change) *Ledger {
	t.Helper()
	l, err := OpenReplicatedLedger(f, func(add func(Change) error) error {
		for _, c := range append(NewRecords(), more...) {
			if err := add(c); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// leases returns the charges of n leases.
func leases(n int) (all []Entry) {
	at := time.Unix(7200, 0)
	for i := range n {
		all = append(all, Entry{Key: Key{Incarnation: [16]byte{1}, Lease: uint64(i + 1)}, Tenant: "ann", Began: at, AsOf: at, Use: Use{1}})
	}
	return all
}

// If memory cannot take a change that the replica has stored, the ledger refuses reads and writes, and calls Abandon of the replica.
func TestLedgerThatDiverges(t *testing.T) {
	now := time.Unix(7200, 0)
	for name, fill := range map[string]func(*Ledger, *fakeReplica){
		"after Commit": func(l *Ledger, f *fakeReplica) {
			f.commit = func(context.Context, []Change) error {
				l.db.MaxSize = 1 // as if there were no memory left
				return nil
			}
		},
		"after Settle": func(l *Ledger, f *fakeReplica) { f.settled = []Change{{Bucket: "none", Key: "k", Value: []byte("v")}} },
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeReplica{most: 10_000}
			l := f.open(t)
			fill(l, f)
			if err := l.Merge(t.Context(), now, leases(1000)...); !errors.Is(err, ErrDiverged) {
				t.Fatalf("the error is %v", err)
			}
			if !errors.Is(f.abandoned, ErrDiverged) {
				t.Errorf("the replica was told %v", f.abandoned)
			}
			f.settled, l.db.MaxSize = nil, 0
			f.commit = func(context.Context, []Change) error { t.Error("a change was written after all"); return nil }
			if err := l.Merge(t.Context(), now, leases(1)...); !errors.Is(err, ErrDiverged) {
				t.Errorf("the next change: %v", err)
			}
			if _, err := l.Totals("", time.Time{}); !errors.Is(err, ErrDiverged) {
				t.Errorf("a bill: %v", err)
			}
		})
	}
}

// Callers wait for a slow replica no longer than their contexts allow, and not at all while it does not answer.
func TestSlowReplica(t *testing.T) {
	now := time.Unix(7200, 0)
	entered, answer := make(chan struct{}), make(chan error)
	f := &fakeReplica{most: 10, commit: func(context.Context, []Change) error {
		entered <- struct{}{}
		return <-answer
	}}
	l := f.open(t)
	first := make(chan error)
	merge := func() { first <- l.Merge(context.Background(), now, leases(1)...) }
	go merge()
	<-entered
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Merge(ended, now, leases(2)...); !errors.Is(err, ErrBusy) {
		t.Errorf("a caller without time: %v", err)
	}
	answer <- errors.New("no answer")
	if err := <-first; err == nil || errors.Is(err, ErrBusy) {
		t.Errorf("the change without an answer: %v", err)
	}
	go merge()
	<-entered
	if err := l.Merge(context.Background(), now, leases(2)...); !errors.Is(err, ErrBusy) { // would wait for ever
		t.Errorf("a caller while the replica does not answer: %v", err)
	}
	answer <- nil
	if err := <-first; err != nil {
		t.Error(err)
	}
	go func() { first <- l.Merge(context.Background(), now, leases(3)...) }()
	<-entered
	answer <- nil
	if err := <-first; err != nil {
		t.Errorf("after the replica has answered again: %v", err)
	}
}

// A caller that gives up while the replica is slow does not make the ledger refuse other callers.
func TestCallerGivesUp(t *testing.T) {
	now := time.Unix(7200, 0)
	entered, answer := make(chan struct{}), make(chan struct{})
	f := &fakeReplica{most: 10, commit: func(ctx context.Context, _ []Change) error {
		entered <- struct{}{}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-answer:
			return nil
		}
	}}
	l := f.open(t)
	done := make(chan error, 2)
	merge := func(ctx context.Context, n int) { done <- l.Merge(ctx, now, leases(n)...) }
	ctx, cancel := context.WithCancel(t.Context())
	go merge(ctx, 1)
	<-entered
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that gave up: %v", err)
	}
	go merge(t.Context(), 1)
	<-entered
	bound, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Merge(bound, now, leases(2)...); !errors.Is(err, ErrBusy) || !errors.Is(err, context.Canceled) {
		t.Errorf("a caller without time: %v, want that another change has not ended in time", err)
	}
	answer <- struct{}{}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Lost records of a replica are not taken for a new ledger.
func TestReplicaWithoutRecords(t *testing.T) {
	l, err := OpenReplicatedLedger(&fakeReplica{}, func(func(Change) error) error { return nil })
	if !errors.Is(err, ErrLedger) {
		t.Errorf("the ledger %v was opened, error %v", l, err)
	}
}

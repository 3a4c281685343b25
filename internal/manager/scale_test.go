package manager

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// populated is a manager on shm with executors that one process writes for.
func populated(t *testing.T, n int) *Manager {
	t.Helper()
	m, err := New(Config{Heartbeat: time.Second, Slots: n, Providers: []string{dataplane.SHM}, Asked: true, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	for i := range n {
		in := info(1, 4)
		in.Incarnation[0], in.Incarnation[1] = byte(i), byte(i>>8)
		in.NodeId, in.Providers = fmt.Sprintf("boot/%d", i), []string{"verbs"}
		if _, _, err := m.table.register(fmt.Sprintf("198.18.%d.%d:7465", i/250, i%250+1), in); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// direct calls a manager without gRPC.
type direct struct {
	control.ManagerClient
	m *Manager
}

func attached(t *testing.T, m *Manager, dev *dataplane.Device) *link.Client {
	t.Helper()
	c, err := link.AttachClient(t.Context(), direct{m: m}, dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func median(d []time.Duration, q float64) time.Duration {
	slices.Sort(d)
	return d[int(float64(len(d)-1)*q)]
}

// A placement decision costs the same with 10 executors and with 10,000: the same bytes in as many reads, and about the same
// time.
func TestPlacementCost(t *testing.T) {
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	var readers [2]*board.Reader
	for i, n := range []int{10, 10_000} {
		if readers[i], err = board.NewReader(attached(t, populated(t, n), dev), ""); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	var took [2][]time.Duration
	var reads [2]uint64
	for range 5000 { // interleaved, so that both see the same machine
		for i, r := range readers {
			before, start := r.Reads(), time.Now()
			if _, err := r.Pick(board.Need{Cores: 1, Remote: board.Verbs}, nil, now, 1); err != nil {
				t.Fatal(err)
			}
			took[i] = append(took[i], time.Since(start))
			reads[i] = max(reads[i], r.Reads()-before)
		}
	}
	small, large := median(took[0], 0.5), median(took[1], 0.5)
	t.Logf("a decision: %v with 10 executors, %v with 10,000 (medians): %.2f times; %d and %d reads", small, large,
		float64(large)/float64(small), reads[0], reads[1])
	if reads[0] > 2 || reads[1] != reads[0] {
		t.Errorf("%d reads with 10 executors, %d with 10,000", reads[0], reads[1])
	}
	if large > 3*small { // what we claim is half of that; machines of tests are noisy
		t.Errorf("%v with 10 executors, %v with 10,000", small, large)
	}
}

// AttachClient is the operation itself.
func (d direct) AttachClient(ctx context.Context, r *control.AttachClientRequest, _ ...grpc.CallOption) (*control.AttachClientReply, error) {
	return d.m.AttachClient(ctx, r)
}

// A change is in the mailboxes of 1,000 subscribers within milliseconds.
func TestThousandMailboxes(t *testing.T) {
	subscribers, rounds := 1000, 200
	if testing.Short() {
		subscribers, rounds = 100, 50
	}
	m := populated(t, 64)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.tell(ctx) }()
	defer func() { stop(); <-done }()
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	boxes := make([]*link.Client, subscribers)
	for i := range boxes {
		boxes[i] = attached(t, m, dev)
	}
	for _, b := range boxes {
		mailbox(t, b, 64)
	}
	var took []time.Duration
	for round := range rounds {
		start := time.Now()
		m.notifier.change(board.Change{Slot: uint32(round), State: board.Silent})
		want := m.notifier.changes()
		for _, b := range boxes { // one scanner: it has seen all when it has seen the last to be written
			for {
				if got, err := b.Mailbox(); err == nil && got.Changes >= want {
					break
				}
				if time.Since(start) > 20*time.Second {
					t.Fatal("a mailbox does not change")
				}
			}
		}
		took = append(took, time.Since(start))
	}
	p99 := median(took, 0.99)
	t.Logf("a change in all of %d mailboxes: %v median, %v p99", subscribers, median(took, 0.5), p99)
	if median(took, 0.5) > 50*time.Millisecond {
		t.Errorf("%v median", median(took, 0.5))
	}
}

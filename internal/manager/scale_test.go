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
		if _, _, err := m.table.register(owner{}, fmt.Sprintf("198.18.%d.%d:7465", i/250, i%250+1), in); err != nil {
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

// AttachClient is the operation itself.
func (d direct) AttachClient(ctx context.Context, r *control.AttachClientRequest, _ ...grpc.CallOption) (*control.AttachClientReply, error) {
	return d.m.AttachClient(ctx, r)
}

// A change is in all of 1,000 mailboxes when the call that reports it returns. The goroutine that posts late changes does not run, so
// nothing else can have written it. Changes that follow within directEvery are left to that goroutine.
func TestThousandMailboxes(t *testing.T) {
	subscribers, rounds := 1000, 500
	if testing.Short() {
		subscribers, rounds = 100, 50
	}
	m := populated(t, 64)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	boxes := make([]*link.Client, subscribers)
	for i := range boxes {
		boxes[i] = attached(t, m, dev)
	}
	m.notifier.post() // what the goroutine does for a new subscriber
	told := func(changes uint64) (n int) {
		for _, b := range boxes {
			if got, err := b.Mailbox(); err == nil && got.Changes == changes {
				n++
			}
		}
		return n
	}
	change := func() uint64 {
		want := m.notifier.changes() + 1
		m.notifier.change(board.Change{Slot: uint32(want), State: board.Silent})
		return want
	}
	pause := time.NewTimer(2 * directEvery)
	defer pause.Stop()
	var took []time.Duration
	for range rounds {
		<-pause.C
		began := time.Now()
		want := change()
		took = append(took, time.Since(began))
		if n := told(want); n != subscribers {
			t.Fatalf("change %d is in %d of %d mailboxes when the call returns", want, n, subscribers)
		}
		pause.Reset(2 * directEvery)
	}
	t.Logf("%d mailboxes: %v median", subscribers, median(took, 0.5))
	t.Logf("figure: mailboxes.p99_ms = %.3f ms", float64(median(took, 0.99).Microseconds())/1e3)

	<-pause.C
	m.notifier.passed = time.Now().Add(time.Hour) // as if a pass had just ended
	want := change()
	if n := told(want); n != 0 {
		t.Errorf("change %d right after another is in %d mailboxes before the goroutine has run", want, n)
	}
	m.notifier.post()
	if n := told(want); n != subscribers {
		t.Errorf("change %d is in %d of %d mailboxes after the goroutine has run", want, n, subscribers)
	}
}

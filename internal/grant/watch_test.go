package grant

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// mute is an executor whose streams promise something and say "alive" as long as talk is open.
type mute struct {
	control.UnimplementedExecutorServer
	promise time.Duration // 0: the stream does not even begin
	every   time.Duration // how often it says that it lives
	talk    chan struct{}
}

func (m *mute) Events(_ *control.EventsRequest, s grpc.ServerStreamingServer[control.Event]) error {
	if m.promise > 0 {
		if err := s.Send(&control.Event{Kind: control.Event_KIND_OPEN, InMs: uint64(m.promise.Milliseconds())}); err != nil {
			return err
		}
	}
	tick := time.NewTicker(m.every)
	defer tick.Stop()
	talk := m.talk
	for {
		select {
		case <-s.Context().Done():
			return nil
		case <-talk:
			tick.Stop()
			talk = nil
		case <-tick.C:
			if err := s.Send(&control.Event{Kind: control.Event_KIND_ALIVE}); err != nil {
				return err
			}
		}
	}
}

// watched follows a lease on an executor like that.
func watched(t *testing.T, m *mute) (address string, told <-chan Event) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterExecutorServer(port.Server, m)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(port.Address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		conn.Close()
		port.Close(context.Background())
	})
	h := &Held{cl: control.NewExecutorClient(conn), Candidate: Candidate{Address: port.Address}, ID: 1}
	events := make(chan Event, 1)
	go func() {
		if last, ended := h.follow(ctx, func(Event) {}); ended {
			events <- last
		}
	}()
	return port.Address, events
}

// An executor that falls silent counts as gone after a multiple of what it promised, and not before.
func TestSilentExecutorIsGone(t *testing.T) {
	m := &mute{promise: 200 * time.Millisecond, every: 50 * time.Millisecond, talk: make(chan struct{})}
	address, told := watched(t, m)
	select {
	case e := <-told:
		t.Fatalf("an executor that says that it lives: %+v", e)
	case <-time.After(2 * silentTimes * m.promise):
	}
	close(m.talk)
	began := time.Now()
	select {
	case e := <-told:
		took := time.Since(began)
		if e.Kind != LeaseEnded || e.Status != dataplane.StatusPeerGone || !strings.Contains(e.Reason, address) || !strings.Contains(e.Reason, "1s") {
			t.Errorf("%+v", e)
		}
		if took < silentTimes*m.promise-2*m.promise {
			t.Errorf("after %v", took)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("its silence is not noticed")
	}
}

// One that promises nothing may be silent; a stream that does not even begin ends in bounded time.
func TestSilenceWithoutPromise(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	e := newEar(time.Hour)
	e.bound(0)
	e.listen(ctx, cancel) // returns
	if ctx.Err() != nil {
		t.Error("ended without a bound")
	}
	newEar(40*time.Millisecond).listen(ctx, cancel)
	if err := context.Cause(ctx); err == nil || !strings.Contains(err.Error(), "40ms") {
		t.Errorf("a stream that never begins: %v", err)
	}
}

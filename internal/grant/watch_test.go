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

// reached connects to an executor that a test makes up.
func reached(t *testing.T, executor control.ExecutorServer) (*grpc.ClientConn, string) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterExecutorServer(port.Server, executor)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(port.Address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		port.Close(context.Background())
	})
	return conn, port.Address
}

// watched follows a lease on an executor like that.
func watched(t *testing.T, m *mute) (address string, told <-chan Event) {
	t.Helper()
	conn, address := reached(t, m)
	h := &Held{cl: control.NewExecutorClient(conn), Candidate: Candidate{Address: address}, ID: 1}
	events := make(chan Event, 1)
	go func() {
		if last, ended := h.follow(t.Context(), func(Event) {}); ended {
			events <- last
		}
	}()
	return address, events
}

// releasing is an executor that ends the event stream of a lease when the lease is released.
type releasing struct {
	control.UnimplementedExecutorServer
	open, release, over chan struct{}
}

func (r *releasing) Events(_ *control.EventsRequest, s grpc.ServerStreamingServer[control.Event]) error {
	if err := s.Send(&control.Event{Kind: control.Event_KIND_OPEN}); err != nil {
		return err
	}
	close(r.open)
	select {
	case <-s.Context().Done():
		return s.Context().Err()
	case <-r.release:
	}
	err := s.Send(&control.Event{Kind: control.Event_KIND_LEASE_ENDED, Reason: "by its client"})
	close(r.over)
	return err
}

func (r *releasing) Release(ctx context.Context, _ *control.ReleaseRequest) (*control.ReleaseReply, error) {
	close(r.release)
	select {
	case <-r.over:
		return &control.ReleaseReply{}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// The event stream stays open until the executor has released the lease, because an executor takes the end of the stream for
// the loss of the client. Messages on the stream during the release are not reported as events.
func TestReleaseBeforeTheStreamEnds(t *testing.T) {
	r := &releasing{open: make(chan struct{}), release: make(chan struct{}), over: make(chan struct{})}
	conn, address := reached(t, r)
	h := &Held{c: &Control{opts: Options{Timeout: 20 * time.Second}}, cl: control.NewExecutorClient(conn), Candidate: Candidate{Address: address},
		ID: 1, end: time.Now().Add(time.Hour)}
	h.Watch(func(e Event) { t.Errorf("event %+v", e) })
	<-r.open
	if err := h.Release(t.Context()); err != nil {
		t.Error(err)
	}
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
		if e.Kind != LeaseEnded || e.Status != dataplane.StatusPeerGone || !strings.HasPrefix(e.Reason, "lost: executor "+address+": ") || !strings.Contains(e.Reason, "1s") {
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

// However late the last attempt to open a broken stream begins, the loss of the executor is known within openBound of the break.
func TestReopenBound(t *testing.T) {
	for broken := time.Duration(0); broken <= watchBound; broken += watchBound / 30 {
		if bound := reopenBound(broken); broken+bound > openBound {
			t.Errorf("broken for %v: the next attempt may take %v, together more than %v", broken, bound, openBound)
		}
	}
	if bound := reopenBound(time.Hour); bound != watchBound { // this process was stopped
		t.Errorf("after a pause of this process: %v, want %v", bound, watchBound)
	}
}

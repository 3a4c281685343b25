package grant

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// mute is an executor whose streams promise something and say "alive" as long as talk is open.
type mute struct {
	control.UnimplementedExecutorServer
	promise time.Duration // 0: the stream does not even begin
	every   time.Duration // how often it says that it lives
	talk    chan struct{}

	last    atomic.Int64 // when it last said so, in ns
	longest atomic.Int64 // longest time in ns between two such events
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
			now := time.Now().UnixNano()
			if last := m.last.Swap(now); last != 0 {
				m.longest.Store(max(m.longest.Load(), now-last))
			}
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
	for try := 1; !silentIsGone(t); try++ {
		if try == 3 {
			t.Fatal("this process did not run for too long each time")
		}
	}
}

// silentIsGone returns false if this process did not run for so long that the executor was silent without intent.
func silentIsGone(t *testing.T) bool {
	m := &mute{promise: 200 * time.Millisecond, every: 50 * time.Millisecond, talk: make(chan struct{})}
	address, told := watched(t, m)
	select {
	case e := <-told:
		if time.Duration(max(m.longest.Load(), time.Now().UnixNano()-m.last.Load())) >= silentTimes*m.promise/2 {
			return false
		}
		t.Fatalf("an executor that says that it lives: %+v", e)
	case <-time.After(2 * silentTimes * m.promise):
	}
	close(m.talk)
	select {
	case e := <-told:
		took := time.Duration(time.Now().UnixNano() - m.last.Load())
		if e.Kind != LeaseEnded || e.Status != dataplane.StatusPeerGone || !strings.HasPrefix(e.Reason, "lost: executor "+address+": ") || !strings.Contains(e.Reason, "1s") {
			t.Errorf("%+v", e)
		}
		if took < silentTimes*m.promise {
			t.Errorf("after %v", took)
		}
	case <-time.After(testkit.Bound):
		t.Fatal("its silence is not noticed")
	}
	return true
}

// stage is a made-up executor of which each stream is one of the plays. After the last one it is silent.
type stage struct {
	control.ExecutorClient
	promise time.Duration
	plays   []play
	last    time.Time // of the latest event
}

// play is a stream that opens after a time, carries events once a second, and breaks after a silence.
type play struct {
	opens  bool
	after  time.Duration
	says   int // events
	breaks time.Duration
	err    error // nil: the connection broke
}

const never = 1000 * time.Hour

func (s *stage) Events(ctx context.Context, _ *control.EventsRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[control.Event], error) {
	p := play{breaks: never}
	if len(s.plays) > 0 {
		p, s.plays = s.plays[0], s.plays[1:]
	}
	return &playing{stage: s, play: p, ctx: ctx}, nil
}

type playing struct {
	grpc.ClientStream
	*stage
	play
	ctx context.Context
}

func (p *playing) Recv() (*control.Event, error) {
	wait, e := p.breaks, (*control.Event)(nil)
	switch {
	case p.opens:
		p.opens = false
		wait, e = p.after, &control.Event{Kind: control.Event_KIND_OPEN, InMs: uint64(p.promise.Milliseconds())}
	case p.says > 0:
		p.says--
		wait, e = time.Second, &control.Event{Kind: control.Event_KIND_ALIVE}
	}
	select {
	case <-p.ctx.Done():
		return nil, p.ctx.Err()
	case <-time.After(wait):
	}
	switch {
	case e != nil:
		p.last = time.Now()
		return e, nil
	case p.err != nil:
		return nil, p.err
	}
	return nil, status.Error(codes.Unavailable, "connection timed out")
}

// However late the stream to a node that has failed breaks, the loss of the executor is known within lossBound of its last event. A client
// that waits for another worker has noticed the failure 3 to 4 s after that event, and waits for 10 s. An executor that reopens its stream in
// time is not lost.
func TestStreamBreaks(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	breaks := func(silent time.Duration) play { return play{opens: true, says: 3, breaks: silent} }
	opens := func(after time.Duration) play { return play{opens: true, after: after, says: 1 << 20} }
	fails := func(after time.Duration) play { return play{breaks: after} }
	refused := play{err: control.Errorf(control.ClassCredential, "the token has expired")}
	for _, c := range []struct {
		name    string
		promise time.Duration
		plays   []play
		lost    time.Duration // after the last event; 0: not lost
	}{
		{"at once", s, []play{breaks(0)}, openBound},
		{"after a second", s, []play{breaks(s)}, s + openBound},
		{"late", s, []play{breaks(4900 * ms)}, lossBound},
		{"late, and attempts fail slowly", s, []play{breaks(4900 * ms), fails(1500 * ms), fails(s)}, lossBound},
		{"never", s, []play{breaks(never)}, silentTimes * s},
		{"at once, and reopens", s, []play{breaks(0), opens(5500 * ms)}, 0},
		{"late, and reopens", s, []play{breaks(4900 * ms), opens(2900 * ms)}, 0},
		{"late, and reopens after attempts that fail", s, []play{breaks(4900 * ms), fails(0), fails(0), fails(0), opens(2700 * ms)}, 0},
		{"twice", s, []play{breaks(4900 * ms), {opens: true, after: 2 * s, breaks: s}, opens(5 * s)}, 0},
		{"late, with a long promise", maxPromise, []play{breaks(45 * s)}, 45*s + watchBound},
		{"late, with a long promise, and reopens", maxPromise, []play{breaks(45 * s), opens(2900 * ms)}, 0},
		{"and the executor refuses the token", s, []play{breaks(4 * s), refused, refused, refused, refused, opens(5900 * ms)}, 0},
		{"never, without a promise", 0, []play{breaks(never)}, silentTimes * maxPromise},
		{"late, without a promise, and reopens", 0, []play{breaks(45 * s), opens(2900 * ms)}, 0},
		{"before it opens", s, []play{fails(4 * s), opens(3900 * ms)}, 0},
		{"never, and does not open", s, nil, openBound},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				on := &stage{promise: c.promise, plays: c.plays, last: time.Now()}
				h := &Held{cl: on, Candidate: Candidate{Address: "10.0.0.1:1"}, ID: 1}
				e, ended := h.follow(ctx, func(Event) {})
				took := time.Since(on.last)
				t.Logf("%v after the last event: %s", took, e.Reason)
				if ended != (c.lost != 0) || ended && (took < c.lost || took > c.lost+50*ms || e.Status != dataplane.StatusPeerGone) {
					t.Errorf("lost %v after %v, want after %v; %+v", ended, took, c.lost, e)
				}
			})
		})
	}
}

// An executor at whose address attempts fail at once counts as lost sooner.
func TestStreamFailsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plays := []play{{opens: true, breaks: time.Second}}
		for range 100 {
			plays = append(plays, play{})
		}
		on := &stage{promise: time.Second, plays: plays}
		h := &Held{cl: on, Candidate: Candidate{Address: "10.0.0.1:1"}, ID: 1}
		e, ended := h.follow(t.Context(), func(Event) {})
		if took := time.Since(on.last) - time.Second; !ended || took < watchBound || took > watchBound+time.Second || !strings.HasSuffix(e.Reason, "connection timed out") {
			t.Errorf("lost %v, %v after the break: %+v", ended, took, e)
		}
	})
}

// unanswering is an executor that takes requests and answers none, as one whose node has failed.
type unanswering struct{ stage }

func unanswered[Reply any](ctx context.Context) (*Reply, error) {
	<-ctx.Done()
	return nil, status.FromContextError(ctx.Err()).Err()
}

func (*unanswering) Replace(ctx context.Context, _ *control.ReplaceRequest, _ ...grpc.CallOption) (*control.ReplaceReply, error) {
	return unanswered[control.ReplaceReply](ctx)
}

func (*unanswering) Inspect(ctx context.Context, _ *control.InspectRequest, _ ...grpc.CallOption) (*control.InspectReply, error) {
	return unanswered[control.InspectReply](ctx)
}

func (*unanswering) Renew(ctx context.Context, _ *control.RenewRequest, _ ...grpc.CallOption) (*control.RenewReply, error) {
	return unanswered[control.RenewReply](ctx)
}

func (*unanswering) CreateSeed(ctx context.Context, _ *control.CreateSeedRequest, _ ...grpc.CallOption) (*control.SeedReply, error) {
	return unanswered[control.SeedReply](ctx)
}

func (*unanswering) Release(ctx context.Context, _ *control.ReleaseRequest, _ ...grpc.CallOption) (*control.ReleaseReply, error) {
	return unanswered[control.ReleaseReply](ctx)
}

// A request to an executor ends when the executor is known to be lost, and not only after the session's time-out. The client has been told of
// the loss by then, so that the lease can move.
func TestLossEndsRequests(t *testing.T) {
	for name, ask := range map[string]func(context.Context, *Held) error{
		"replace": func(ctx context.Context, h *Held) error { _, err := h.Replace(ctx, 0, nil, false); return err },
		"inspect": func(ctx context.Context, h *Held) error { _, err := h.Inspect(ctx, 0); return err },
		"renew":   func(ctx context.Context, h *Held) error { return h.Renew(ctx, 0) },
		"seed": func(ctx context.Context, h *Held) error {
			_, err := h.CreateSeed(ctx, &control.CreateSeedRequest{})
			return err
		},
		"finish": func(ctx context.Context, h *Held) error {
			if err := h.Finish(ctx); err != nil {
				return err
			}
			return h.ended("finish")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				on := &unanswering{stage{promise: time.Second, plays: []play{{opens: true, breaks: never}}}}
				h := &Held{c: &Control{opts: Options{Timeout: 10 * time.Second}}, cl: on, Candidate: Candidate{Address: "10.0.0.1:1"}, ID: 1,
					end: time.Now().Add(time.Hour)}
				var told Event
				var lost time.Time
				h.Watch(func(e Event) { told, lost = e, time.Now() })
				defer h.StopWatch()
				time.Sleep(3 * time.Second) // until the client notices that its worker does not answer
				err := ask(ctx, h)
				if late := time.Since(lost); told.Kind != LeaseEnded || late != 0 {
					t.Errorf("returned %v after the event %+v", late, told)
				}
				if !errors.Is(err, dataplane.ErrLease) || !strings.Contains(err.Error(), told.Reason) {
					t.Errorf("%v, want the end of the lease: %s", err, told.Reason)
				}
			})
		})
	}
}

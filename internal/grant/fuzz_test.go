package grant

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// hostile is an executor whose answers the test chooses.
type hostile struct {
	control.UnimplementedExecutorServer
	mu     sync.Mutex
	info   control.InfoReply
	lease  control.LeaseReply
	worker control.ReplaceReply
	events []*control.Event
}

func answer[M proto.Message](h *hostile, m M) (M, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return proto.Clone(m).(M), nil
}

func (h *hostile) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	return answer(h, &h.info)
}

func (h *hostile) Lease(context.Context, *control.LeaseRequest) (*control.LeaseReply, error) {
	return answer(h, &h.lease)
}

func (h *hostile) Leasing(s grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	for {
		_, err := s.Recv()
		var l *control.LeaseReply
		if err == nil {
			l, err = answer(h, &h.lease)
		}
		if err == nil {
			err = s.Send(l)
		}
		if err != nil {
			return err
		}
	}
}

func (h *hostile) Replace(context.Context, *control.ReplaceRequest) (*control.ReplaceReply, error) {
	return answer(h, &h.worker)
}

func (h *hostile) Release(context.Context, *control.ReleaseRequest) (*control.ReleaseReply, error) {
	return &control.ReleaseReply{}, nil
}

func (h *hostile) Upload(s grpc.ClientStreamingServer[control.UploadChunk, control.UploadReply]) error {
	return s.SendAndClose(&control.UploadReply{})
}

func (h *hostile) Events(_ *control.EventsRequest, s grpc.ServerStreamingServer[control.Event]) error {
	h.mu.Lock()
	events := slices.Clone(h.events)
	h.mu.Unlock()
	for _, e := range events {
		if err := s.Send(e); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return nil
}

// A client whose executor answers anything gets a lease as it asked for or a typed error, in bounded time.
func FuzzExecutor(f *testing.F) {
	h := &hostile{}
	secret := filepath.Join(f.TempDir(), "secret")
	port, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		f.Fatal(err)
	}
	control.RegisterExecutorServer(port.Server, h)
	if err := port.Serve(); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { port.Close(context.Background()) })
	good := &control.InfoReply{ProtocolVersion: control.ProtocolVersion, Node: "n1", Cores: 4, FreeCores: 4, Providers: []string{"shm", "verbs"}}
	h.info.ProtocolVersion = good.ProtocolVersion
	c, err := openSession(f, Options{Executor: port.Address, SecretFile: secret, Timeout: 5 * time.Second})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(c.Close)
	marshal := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	grantOf := func(n int) *control.LeaseReply {
		l := &control.LeaseReply{LeaseId: 7, Functions: []string{"a", "b"}, DurationMs: 1000}
		for range n {
			l.Workers = append(l.Workers, &control.WorkerGrant{Blob: []byte("blob"), Cpus: []uint32{1}, Pid: 4711})
		}
		return l
	}
	events := marshal(&control.Event{Kind: control.Event_KIND_OPEN})
	f.Add(marshal(good), marshal(grantOf(2)), events)
	f.Add(marshal(good), marshal(grantOf(1)), marshal(&control.Event{Kind: control.Event_KIND_WORKER_DIED, Worker: 1 << 30, Pid: -1, Reason: "x", OutputTail: []byte("y")}))
	f.Add(marshal(good), marshal(&control.LeaseReply{CodeUnknown: true}), marshal(&control.Event{Kind: control.Event_KIND_LEASE_ENDED, Reason: "gone"}))
	f.Add(marshal(&control.InfoReply{ProtocolVersion: 77}), []byte{}, []byte{})
	huge := grantOf(2)
	huge.DurationMs, huge.LeaseId = 1<<63, 1<<63
	f.Add(marshal(good), marshal(huge), marshal(&control.Event{Kind: 99}))
	code := make([]byte, 64)
	copy(code, "\x7fELF\x02\x01\x01")
	lib, err := newLibrary("some.so", code)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, info, lease, event []byte) {
		var i control.InfoReply
		var l control.LeaseReply
		var e control.Event
		if proto.Unmarshal(info, &i) != nil || proto.Unmarshal(lease, &l) != nil || proto.Unmarshal(event, &e) != nil {
			return
		}
		h.mu.Lock()
		proto.Reset(&h.info)
		proto.Merge(&h.info, &i)
		proto.Reset(&h.lease)
		proto.Merge(&h.lease, &l)
		proto.Reset(&h.worker)
		if w := l.GetWorkers(); len(w) > 0 {
			h.worker.Worker = w[0]
		}
		h.events = []*control.Event{&e}
		h.mu.Unlock()
		typed := func(what string, err error) {
			var d *dataplane.Error
			if err != nil && (!errors.As(err, &d) || d.Status >= 0 || err.Error() == "") {
				t.Errorf("%s: %v", what, err)
			}
		}
		c.forget(port.Address)
		p, err := c.Plan(lib, Spec{Library: "some.so", Workers: 2, Depth: 8, Eager: 4096, Bulk: 4096})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Look(t.Context()); err != nil {
			typed("look", err)
			return
		}
		if _, err = p.Next(t.Context()); err != nil {
			typed("next", err)
			return
		}
		held, err := p.Grant(t.Context(), [][]byte{{1}, {2}})
		typed("grant", err)
		if err != nil {
			return
		}
		if len(held.Workers) != 2 || held.Duration < 0 {
			t.Errorf("granted %+v", held)
		}
		told := make(chan struct{}, 16)
		held.Watch(func(Event) { told <- struct{}{} })
		if k := e.GetKind(); k >= control.Event_KIND_WORKER_DIED && k <= control.Event_KIND_DRAINING {
			<-told // known kinds arrive
		}
		_, err = held.Replace(t.Context(), 1, []byte{3}, false)
		typed("replace", err)
		typed("release", held.Release(t.Context()))
	})
}

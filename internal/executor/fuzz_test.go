package executor

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/invoke"
)

// fuzzNode is an executor with fake workers and one library, without a port.
func fuzzNode(f *testing.F) (*Executor, sum) {
	f.Helper()
	s, err := config.LoadExecutor([]string{"--secret-file", filepath.Join(f.TempDir(), "secret")}, nil, io.Discard, "test")
	if err != nil {
		f.Fatal(err)
	}
	s.CodeLimit, s.CodeCache, s.MaxBulk = 1<<20, 1<<30, 1<<20
	e, err := New(Config{Settings: s, Cores: testCores(4), Memory: 4 << 30, Providers: []string{"shm"}, Node: "node", NodeID: "id",
		Spawner: &fakeSpawner{t: f, cores: map[int]*fakeWorker{}}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		f.Fatal(err)
	}
	e.codes.inspect = func(context.Context, *os.File) ([]string, error) { return []string{"alpha", "beta"}, nil }
	lib := []byte("\x7fELF library of the tests")
	h := sum(sha256.Sum256(lib))
	if _, _, err := e.codes.add(f.Context(), h, "", uint64(len(lib)), once(lib)); err != nil {
		f.Fatal(err)
	}
	return e, h
}

// anOperator returns the context of a caller that is authenticated as an operator.
func anOperator(ctx context.Context) context.Context {
	return control.WithCaller(ctx, &identity.Identity{Name: "test", Role: identity.RoleOperator})
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// mustBeNamed checks that an error of the service is one that its caller can act on.
func mustBeNamed(t *testing.T, err error) {
	t.Helper()
	st, ok := status.FromError(err)
	if !ok || control.ClassOf(err) == 0 || control.StatusOf(err) >= 0 || st.Message() == "" || !utf8.ValidString(st.Message()) {
		t.Errorf("an error without class or text: %v", err)
	}
}

// seedRequest is a good request with n workers.
func seedRequest(h sum, n int) *control.LeaseRequest {
	r := &control.LeaseRequest{ProtocolVersion: control.ProtocolVersion, RequestId: []byte("0123456789abcdef"), CodeSha256: h[:],
		Workers: uint32(n), Provider: "shm", Tenant: "alice", DurationMs: proto.Uint64(1000), CoresPerWorker: 1, MemoryPerWorker: 32 << 20}
	for range n {
		b := invoke.ChannelBlob{Role: invoke.RoleClient, Provider: invoke.ProviderSHM, Generation: 77, Depth: 16, Eager: 4096,
			Bulk: 4096, QueuePair: make([]byte, 80)}
		r.ClientBlobs = append(r.ClientBlobs, b.Marshal())
	}
	return r
}

// What a lease request passes is within everything that was promised; every other one is refused by name.
func FuzzLeaseRequest(f *testing.F) {
	e, h := fuzzNode(f)
	f.Add(marshal(f, seedRequest(h, 1)))
	f.Add(marshal(f, seedRequest(h, 4)))
	odd := seedRequest(h, 2)
	odd.CoresPerWorker, odd.MemoryPerWorker, odd.DurationMs = 2, 2<<30, proto.Uint64(0)
	f.Add(marshal(f, odd))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var req control.LeaseRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		_, terms, _, err := e.terms(anOperator(t.Context()), &req)
		if err != nil {
			mustBeNamed(t, err)
			return
		}
		if terms.Workers < 1 || terms.Workers > 4 || terms.CoresPerWorker < 1 || terms.Workers*terms.CoresPerWorker > 4 ||
			terms.MemoryPerWorker < minMemory || terms.MemoryPerWorker > 4<<30/uint64(terms.Workers) ||
			terms.Duration <= 0 || terms.Duration > e.cfg.Settings.LeaseMax || len(terms.Tenant) > maxTenant {
			t.Errorf("terms %+v", terms)
		}
		for i, blob := range req.GetClientBlobs() {
			if got, err := invoke.UnmarshalChannelBlob(blob); err != nil || got.Bulk > 1<<20 {
				t.Errorf("blob %d: %+v, %v", i, got, err)
			}
		}
	})
}

// stream is the server's side of a streaming call, whose client sends what is given.
type stream[In, Out any] struct {
	grpc.ServerStream
	ctx  context.Context
	send func() (*In, error)
	got  []*Out
}

func (s *stream[In, Out]) Context() context.Context    { return s.ctx }
func (s *stream[In, Out]) Send(m *Out) error           { s.got = append(s.got, m); return nil }
func (s *stream[In, Out]) Recv() (*In, error)          { return s.send() }
func (s *stream[In, Out]) SendAndClose(out *Out) error { return s.Send(out) }

// Any message to any operation, before and after a lease, gets an answer or a named error, and leaves nothing taken. id and
// worker replace those of the message when mend says so, since the fuzzer cannot guess them.
func FuzzService(f *testing.F) {
	e, h := fuzzNode(f)
	f.Add(byte(0), byte(0), marshal(f, seedRequest(h, 2)))
	f.Add(byte(1), byte(1), marshal(f, &control.ReplaceRequest{Worker: 1, ClientBlob: seedRequest(h, 1).ClientBlobs[0]}))
	f.Add(byte(2), byte(1), marshal(f, &control.ReleaseRequest{}))
	f.Add(byte(3), byte(1), marshal(f, &control.RenewRequest{DurationMs: proto.Uint64(1 << 40)}))
	f.Add(byte(4), byte(1), marshal(f, &control.EventsRequest{}))
	f.Add(byte(5), byte(0), marshal(f, &control.UploadChunk{Sha256: h[:], Size: 3, Data: []byte("abc"), Name: "x.so"}))
	f.Add(byte(6), byte(0), marshal(f, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion}))
	f.Add(byte(7), byte(1), marshal(f, &control.RevokeRequest{Reason: "wanted"}))
	f.Add(byte(8), byte(0), marshal(f, &control.LeasesRequest{}))
	f.Fuzz(func(t *testing.T, op, mend byte, b []byte) {
		ctx, cancel := context.WithTimeout(anOperator(t.Context()), 20*time.Second)
		defer cancel()
		var id uint64
		if mend&1 != 0 {
			req := seedRequest(h, 2)
			rand.Read(req.RequestId) // a known one would get the lease of an earlier round
			l, err := e.Lease(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			id = l.GetLeaseId()
		}
		replay := func(id uint64) {
			if _, err := e.Release(ctx, &control.ReleaseRequest{LeaseId: id}); err != nil {
				mustBeNamed(t, err)
			}
		}
		err := operate(ctx, e, op, id, b, replay)
		if err != nil {
			mustBeNamed(t, err)
		}
		if id != 0 {
			replay(id)
		}
		e.work.Wait()
		if c := e.table.Capacity(); c.FreeCores != c.Cores || c.FreeMemory != c.Memory || c.Leases != 0 {
			t.Errorf("operation %d leaves %+v", op, c)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if len(e.holdings) > 0 {
			t.Errorf("operation %d leaves %d holdings", op, len(e.holdings))
		}
	})
}

// operate sends one message; id, if not 0, is put into it. What is leased on the way is given to release.
func operate(ctx context.Context, e *Executor, op byte, id uint64, b []byte, release func(uint64)) (err error) {
	switch op % 9 {
	case 0:
		req := new(control.LeaseRequest)
		if proto.Unmarshal(b, req) == nil {
			var l *control.LeaseReply
			if l, err = e.Lease(ctx, req); err == nil && !l.GetCodeUnknown() {
				release(l.GetLeaseId())
			}
		}
	case 1:
		req := new(control.ReplaceRequest)
		if proto.Unmarshal(b, req) == nil {
			if id != 0 {
				req.LeaseId = id
			}
			_, err = e.Replace(ctx, req)
		}
	case 2:
		req := new(control.ReleaseRequest)
		if proto.Unmarshal(b, req) == nil {
			_, err = e.Release(ctx, req)
		}
	case 3:
		req := new(control.RenewRequest)
		if proto.Unmarshal(b, req) == nil {
			if id != 0 {
				req.LeaseId = id
			}
			_, err = e.Renew(ctx, req)
		}
	case 4:
		req := new(control.EventsRequest)
		if proto.Unmarshal(b, req) == nil {
			if id != 0 {
				req.LeaseId = id
			}
			gone, cancel := context.WithCancel(ctx)
			cancel()
			if err = e.Events(req, &stream[control.EventsRequest, control.Event]{ctx: gone}); err == context.Canceled {
				err = nil
			}
		}
	case 5:
		err = e.Upload(&stream[control.UploadChunk, control.UploadReply]{ctx: ctx, send: func() (*control.UploadChunk, error) {
			c := new(control.UploadChunk)
			n := min(len(b), 64)
			if n == 0 || proto.Unmarshal(b[:n], c) != nil {
				return nil, io.EOF
			}
			b = b[n:]
			return c, nil
		}})
	case 6:
		req := new(control.InfoRequest)
		if proto.Unmarshal(b, req) == nil {
			_, err = e.Info(ctx, req)
		}
	case 7:
		req := new(control.RevokeRequest)
		if proto.Unmarshal(b, req) == nil {
			if id != 0 {
				req.LeaseId = id
			}
			_, err = e.Revoke(ctx, req)
		}
	case 8:
		req := new(control.LeasesRequest)
		if proto.Unmarshal(b, req) == nil {
			_, err = e.Leases(ctx, req)
		}
	}
	return err
}

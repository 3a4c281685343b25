package grant

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
)

// lessor is an executor whose every lease is another one, and which a test may stop in the middle.
type lessor struct {
	control.UnimplementedExecutorServer
	streams, leases, calls atomic.Int64
	before                 func(*control.LeaseRequest) error // of an answer; nil: nothing
}

func (x *lessor) Info(context.Context, *control.InfoRequest) (*control.InfoReply, error) {
	return &control.InfoReply{ProtocolVersion: control.ProtocolVersion}, nil
}

func (x *lessor) Lease(context.Context, *control.LeaseRequest) (*control.LeaseReply, error) {
	return &control.LeaseReply{LeaseId: uint64(x.calls.Add(1))}, nil
}

func (x *lessor) Leasing(s grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	x.streams.Add(1)
	for {
		req, err := s.Recv()
		if err == nil && x.before != nil {
			err = x.before(req)
		}
		if err == nil {
			err = s.Send(&control.LeaseReply{LeaseId: uint64(x.leases.Add(1))})
		}
		if err != nil {
			return err
		}
	}
}

// older is one that knows no streams of requests.
type older struct{ *lessor }

func (older) Leasing(grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	return status.Error(codes.Unimplemented, "method Leasing not implemented")
}

// serveLessor serves on an address, "" for a new one.
func serveLessor(t *testing.T, x control.ExecutorServer, secret, address string) *control.Port {
	t.Helper()
	if address == "" {
		address = "127.0.0.1:0"
	}
	port, err := control.OpenPort(control.PortConfig{Listen: address, SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterExecutorServer(port.Server, x)
	if err := port.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(port.Server.Stop)
	return port
}

// lessee is a session with one executor, and what asks that for a lease.
func lessee(t *testing.T, x control.ExecutorServer) (c *Control, port *control.Port, secret string, ask func(context.Context) (uint64, error)) {
	t.Helper()
	secret = filepath.Join(t.TempDir(), "secret")
	port = serveLessor(t, x, secret, "")
	c, err := openSession(t, Options{Executor: port.Address, SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	conn, err := c.dial("test", port.Address)
	if err != nil {
		t.Fatal(err)
	}
	cl := control.NewExecutorClient(conn)
	return c, port, secret, func(ctx context.Context) (uint64, error) {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		r, _, err := c.lease(ctx, port.Address, cl, &control.LeaseRequest{})
		return r.GetLeaseId(), err
	}
}

// Lease after lease goes over one stream.
func TestOneStreamForManyLeases(t *testing.T) {
	x := &lessor{}
	_, _, _, ask := lessee(t, x)
	for i := range 5 {
		if id, err := ask(t.Context()); err != nil || id != uint64(i+1) {
			t.Fatalf("lease %d: %d, %v", i, id, err)
		}
	}
	if n := x.streams.Load(); n != 1 {
		t.Errorf("%d streams for 5 leases", n)
	}
}

// Those who ask at the same time have streams of their own, which stay for the next ones.
func TestLeasesSideBySide(t *testing.T) {
	x := &lessor{}
	var all sync.WaitGroup
	all.Add(4)
	x.before = func(*control.LeaseRequest) error { all.Done(); all.Wait(); return nil }
	c, _, _, ask := lessee(t, x)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := ask(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	c.shared.mu.Lock()
	rest := 0
	for _, idle := range c.streams {
		rest += len(idle)
	}
	c.shared.mu.Unlock()
	if n := x.streams.Load(); n != 4 || rest != 4 {
		t.Errorf("%d streams for 4 leases at a time, %d rest", n, rest)
	}
}

// A refusal is the caller's to hear, and the next lease has another stream.
func TestRefusedLease(t *testing.T) {
	x := &lessor{}
	x.before = func(*control.LeaseRequest) error { return control.Errorf(control.ClassBusy, "no cores") }
	_, _, _, ask := lessee(t, x)
	if _, err := ask(t.Context()); control.ClassOf(err) != control.ClassBusy {
		t.Errorf("%v, want what the executor says", err)
	}
	x.before = nil
	if id, err := ask(t.Context()); err != nil || id != 1 || x.streams.Load() != 2 {
		t.Errorf("lease %d, %v on %d streams", id, err, x.streams.Load())
	}
}

// If an executor has restarted at its address, or no longer accepts the credential with which the stream began, the request goes to it on a new
// connection. The caller notices nothing.
func TestStaleStream(t *testing.T) {
	x := &lessor{}
	_, port, secret, ask := lessee(t, x)
	if _, err := ask(t.Context()); err != nil {
		t.Fatal(err)
	}
	port.Server.Stop()
	serveLessor(t, x, secret, port.Address)
	if id, err := ask(t.Context()); err != nil || id != 2 {
		t.Errorf("after a restart: lease %d, %v", id, err)
	}
	var refused atomic.Bool
	x.before = func(*control.LeaseRequest) error {
		if refused.Swap(true) {
			return nil
		}
		return control.Errorf(control.ClassCredential, "expired")
	}
	if id, err := ask(t.Context()); err != nil || id != 3 || !refused.Load() {
		t.Errorf("after a refusal of what the stream began with: lease %d, %v", id, err)
	}
	x.before = func(*control.LeaseRequest) error {
		return control.Errorf(control.ClassCredential, "expired for good")
	}
	if _, err := ask(t.Context()); status.Code(err) != codes.Unauthenticated {
		t.Errorf("%v, want that the credential is no good", err)
	}
}

// When a caller gives up, its request returns at once, and its stream is not used again.
func TestCallerGivesUp(t *testing.T) {
	x := &lessor{}
	asked := make(chan uint64, 1)
	goOn := make(chan struct{})
	defer close(goOn)
	x.before = func(req *control.LeaseRequest) error { asked <- req.WaitMs; <-goOn; return nil }
	c, _, _, ask := lessee(t, x)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if wait := <-asked; wait == 0 || wait > 30_000 {
			t.Errorf("the executor was told that the caller waits %d ms, not up to 30 s", wait)
		}
		cancel()
	}()
	if _, err := ask(ctx); status.Code(err) != codes.Canceled {
		t.Errorf("%v, want that it was cancelled", err)
	}
	c.shared.mu.Lock()
	defer c.shared.mu.Unlock()
	if len(c.streams) != 0 {
		t.Error("the stream rests, with a reply to come")
	}
}

// An executor of before is asked by a call.
func TestExecutorWithoutStreams(t *testing.T) {
	x := older{&lessor{}}
	_, _, _, ask := lessee(t, x)
	for i := range 2 {
		if id, err := ask(t.Context()); err != nil || id != uint64(i+1) {
			t.Errorf("lease %d, %v", id, err)
		}
	}
	if n := x.calls.Load(); n != 2 {
		t.Errorf("%d calls", n)
	}
}

// No executor at the address: one attempt, and the reason.
func TestNobodyLeases(t *testing.T) {
	_, port, _, ask := lessee(t, &lessor{})
	port.Server.Stop()
	if _, err := ask(t.Context()); status.Code(err) != codes.Unavailable || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// What an executor answers is not asked again, whatever it says, on a stream that has answered before either.
func TestAnswersAreNotAskedAgain(t *testing.T) {
	for _, class := range []control.Class{control.ClassConnection, control.ClassUnsupported, control.ClassBusy, control.ClassInvalid} {
		x := &lessor{}
		_, _, _, ask := lessee(t, x)
		if _, err := ask(t.Context()); err != nil {
			t.Fatal(err)
		}
		var asked atomic.Int64
		x.before = func(*control.LeaseRequest) error { asked.Add(1); return control.Errorf(class, "worker 0 hangs") }
		if _, err := ask(t.Context()); control.ClassOf(err) != class || asked.Load() != 1 || x.calls.Load() != 0 {
			t.Errorf("%v: %v, asked %d times and by %d calls", class, err, asked.Load(), x.calls.Load())
		}
	}
}

// A node that accepts and says nothing delays a client by no more than the client's time-out.
func TestBeginIsBounded(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	secret := filepath.Join(t.TempDir(), "secret")
	if _, err := control.EnsureSecret(secret); err != nil {
		t.Fatal(err)
	}
	conn, err := control.Dial(silent.Addr().String(), control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := begin(ctx, control.NewExecutorClient(conn)); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v, want that its time was over", err)
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("after %v, and not 50 ms", d) // gRPC gives up after 5 s
	}
}

// An old stream is not used again: it shows the credential that it began with.
func TestOldStream(t *testing.T) {
	x := &lessor{}
	c, port, _, ask := lessee(t, x)
	for range 2 {
		if _, err := ask(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.shared.mu.Lock()
		c.streams[port.Address][0].began = time.Now().Add(-2 * streamAge)
		c.shared.mu.Unlock()
	}
	if n := x.streams.Load(); n != 2 {
		t.Errorf("%d streams", n)
	}
}

// handing is an executor whose first uploads end because another program takes its place.
type handing struct {
	*lessor
	ends    int
	uploads atomic.Int64
}

func (x *handing) Upload(s grpc.ClientStreamingServer[control.UploadChunk, control.UploadReply]) error {
	if x.uploads.Add(1) <= int64(x.ends) {
		return status.Error(codes.Unavailable, "the executor hands over")
	}
	for {
		if _, err := s.Recv(); errors.Is(err, io.EOF) {
			return s.SendAndClose(&control.UploadReply{})
		} else if err != nil {
			return err
		}
	}
}

// A library is sent once more if the executor hands over during its upload.
func TestUploadIsRepeatedOnce(t *testing.T) {
	for ends, works := range []bool{true, true, false} {
		x := &handing{lessor: &lessor{}, ends: ends}
		c, port, _, _ := lessee(t, x)
		conn, err := c.dial("test", port.Address)
		if err != nil {
			t.Fatal(err)
		}
		p := &Pending{c: c, lib: &Library{code: []byte("code")}}
		err = p.upload(t.Context(), control.NewExecutorClient(conn), port.Address)
		if (err == nil) != works || x.uploads.Load() != int64(min(ends, 1)+1) {
			t.Errorf("%d uploads end early: %v after %d uploads", ends, err, x.uploads.Load())
		}
	}
}

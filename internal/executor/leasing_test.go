package executor

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

type requestStream interface {
	Send(*control.LeaseRequest) error
	Recv() (*control.LeaseReply, error)
	CloseSend() error
}

// leasing opens a stream of requests.
func (n *node) leasing() requestStream {
	n.t.Helper()
	s, err := n.Leasing(n.ctx())
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

// asked is the reply to a request on a stream.
func (n *node) asked(s requestStream, req *control.LeaseRequest) *control.LeaseReply {
	n.t.Helper()
	err := s.Send(req)
	var l *control.LeaseReply
	if err == nil {
		l, err = s.Recv()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return l
}

// One stream takes request after request; the same one again is the same lease, on another stream and as a call too.
func TestLeasing(t *testing.T) {
	n := newNode(t)
	s := n.leasing()
	first := n.request(2)
	first.WaitMs = 60_000
	a := n.asked(s, first)
	b := n.asked(s, n.request(1))
	if len(a.GetWorkers()) != 2 || len(b.GetWorkers()) != 1 || a.GetLeaseId() == b.GetLeaseId() || n.free() != 1 {
		t.Errorf("leases %v and %v, %d cores free", a, b, n.free())
	}
	first.WaitMs = 30_000 // a repetition may wait for another time
	if again := n.asked(s, first); again.GetLeaseId() != a.GetLeaseId() {
		t.Errorf("lease %d again is %d", a.GetLeaseId(), again.GetLeaseId())
	}
	if again := n.asked(n.leasing(), first); again.GetLeaseId() != a.GetLeaseId() {
		t.Errorf("lease %d again on another stream is %d", a.GetLeaseId(), again.GetLeaseId())
	}
	first.WaitMs = 0
	if again, err := n.Lease(n.ctx(), first); err != nil || again.GetLeaseId() != a.GetLeaseId() {
		t.Errorf("lease %d again by a call is %v, %v", a.GetLeaseId(), again, err)
	}
	n.release(a.GetLeaseId())
	n.release(b.GetLeaseId())
	unknown := n.request(1)
	unknown.CodeSha256 = make([]byte, 32)
	if l := n.asked(s, unknown); !l.GetCodeUnknown() {
		t.Errorf("a library that nobody has: %v", l)
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the caller has ended the stream: %v", err)
	}
}

// What a call would refuse ends the stream, in the same words.
func TestLeasingRefuses(t *testing.T) {
	n := newNode(t)
	bad := n.request(1)
	bad.Workers = 99
	_, want := n.Lease(n.ctx(), bad)
	s := n.leasing()
	if err := s.Send(bad); err != nil {
		t.Fatal(err)
	}
	_, err := s.Recv()
	if err == nil || control.ClassOf(err) != control.ClassInvalid || err.Error() != want.Error() {
		t.Errorf("%v, want %v", err, want)
	}
	n.release(n.asked(n.leasing(), n.request(1)).GetLeaseId())
}

// The caller's time bounds the start of its workers.
func TestLeasingWaits(t *testing.T) {
	n := newNode(t)
	n.z.before = func(ctx context.Context, _ zygote.Spec) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	req := n.request(1)
	req.WaitMs = 200
	s := n.leasing()
	began := time.Now()
	if err := s.Send(req); err != nil {
		t.Fatal(err)
	}
	if l, err := s.Recv(); control.ClassOf(err) != control.ClassConnection {
		t.Errorf("%v, %v of a worker that does not start", l, err)
	}
	if d := time.Since(began); d > testBound/2 {
		t.Errorf("answered after %v, asked to wait for 200 ms", d)
	}
	eventually(t, "the cores are free", func() bool { return n.free() == 4 })
}

// A stream that rests does not keep the port from closing, and ends without an error.
func TestLeasingEndsWithThePort(t *testing.T) {
	n := newNode(t)
	s := n.leasing()
	n.release(n.asked(s, n.request(1)).GetLeaseId())
	ctx, cancel := context.WithTimeout(context.Background(), testBound)
	defer cancel()
	n.port.Close(ctx)
	if ctx.Err() != nil {
		t.Error("the port closed by force")
	}
	if l, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("%v, %v (%v)", l, err, status.Code(err) == codes.Unavailable)
	}
}

// A caller that leaves with its connection, while its request is answered, leaves nothing behind.
func TestLeasingCallerLeaves(t *testing.T) {
	n := newNode(t)
	began := make(chan struct{})
	goOn := make(chan struct{})
	n.z.before = func(context.Context, zygote.Spec) error {
		close(began)
		<-goOn
		return nil
	}
	conn := n.dial()
	s, err := control.NewExecutorClient(conn).Leasing(n.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(n.request(1)); err != nil {
		t.Fatal(err)
	}
	<-began
	conn.Close()
	close(goOn)
	eventually(t, "the lease has ended", func() bool { return n.free() == 4 && len(n.z.alive()) == 0 })
}

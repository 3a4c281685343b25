package control

import (
	"errors"
	"io"
	"os"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Leasing answers each request with a lease id: the length of the caller's tenant name.
func (w *whoServer) Leasing(s grpc.BidiStreamingServer[LeaseRequest, LeaseReply]) error {
	for {
		if _, err := s.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.Send(&LeaseReply{LeaseId: uint64(len(Caller(s.Context()).Tenant))}); err != nil {
			return err
		}
	}
}

// Each request on a stream counts as a call: if its caller may no longer make it, it is refused, counted and audited.
func TestEachRequestIsChecked(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	token := r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)
	s, err := dial(t, r.far(), DialConfig{TokenFile: token}).Leasing(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func() (*LeaseReply, error) {
		if err := s.Send(&LeaseRequest{}); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		return s.Recv()
	}
	for range 3 {
		if l, err := ask(); err != nil || l.GetLeaseId() != 3 {
			t.Fatalf("%v, %v", l, err)
		}
	}
	cred, err := identity.LoadCredentials(token)
	if err == nil {
		err = os.WriteFile(r.in("node/revoked"), []byte(cred.Claims.ID+" ann has left\n"), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "a request is refused", func() bool { // the list is looked at once a second
		_, err = ask()
		return err != nil
	})
	if status.Code(err) != codes.Unauthenticated || r.port.Gate.RefusedFor(identity.Revoked) != 1 {
		t.Errorf("revoked: %v, %d refused", err, r.port.Gate.RefusedFor(identity.Revoked))
	}
}

// A context from Closing ends before the port waits for streams.
func TestClosing(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	if Closing(t.Context()).Done() != nil {
		t.Error("outside of a call something closes")
	}
	if _, err := dial(t, r.port.Address, DialConfig{SecretFile: r.in("secret")}).Info(t.Context(), &InfoRequest{}); err != nil {
		t.Fatal(err)
	}
	closing := Closing(r.whoami.ctx)
	if closing.Err() != nil {
		t.Error("the port closes while it serves")
	}
	r.port.Close(t.Context())
	if closing.Err() == nil {
		t.Error("the port has closed and told nobody")
	}
}

// The number of a connection's request streams is limited. One that ends makes another possible.
func TestStreamsOfOneConnection(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	c := dial(t, r.port.Address, DialConfig{SecretFile: r.in("secret")})
	ask := func() (grpc.BidiStreamingClient[LeaseRequest, LeaseReply], error) {
		s, err := c.Leasing(t.Context())
		if err == nil {
			err = s.Send(&LeaseRequest{})
		}
		if err == nil || errors.Is(err, io.EOF) {
			_, err = s.Recv()
		}
		return s, err
	}
	var last grpc.BidiStreamingClient[LeaseRequest, LeaseReply]
	for i := range mostAsking {
		s, err := ask()
		if err != nil {
			t.Fatalf("stream %d: %v", i, err)
		}
		last = s
	}
	if _, err := ask(); status.Code(err) != codes.ResourceExhausted || IsClassed(err) {
		t.Errorf("%v, want that there are enough", err)
	}
	if err := last.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := last.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if _, err := ask(); err != nil {
		t.Errorf("after one has ended: %v", err)
	}
}

package grant

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// What gRPC says of a daemon that is dead, stopped, or none, in our terms.
func TestFromControl(t *testing.T) {
	preface := "connection error: desc = \"error reading server preface: "
	for _, c := range []struct {
		err    error
		status dataplane.Status
		cause  error
		text   string
	}{
		{status.Error(codes.Unavailable, preface+"context deadline exceeded\""), dataplane.StatusPeerGone, nil, "does not answer"},
		{status.Error(codes.Unavailable, preface+"read tcp 127.0.0.1:1->127.0.0.1:2: i/o timeout\""), dataplane.StatusPeerGone, nil, "does not answer"},
		{status.Error(codes.Unavailable, preface+"read tcp 127.0.0.1:1->127.0.0.1:2: use of closed network connection\""), dataplane.StatusPeerGone, nil, "does not answer"},
		{status.Error(codes.Unavailable, preface+"EOF\""), dataplane.StatusPeerGone, nil, "closed the connection"},
		{status.Error(codes.Unavailable, preface+"read tcp 127.0.0.1:1->127.0.0.1:2: read: connection reset by peer\""), dataplane.StatusPeerGone, nil, "closed the connection"},
		{status.Error(codes.Unavailable, preface+"http2: frame too large\""), dataplane.StatusProtocol, nil, "does not speak"},
		{status.Error(codes.Unavailable, "connection error: desc = \"transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused\""),
			dataplane.StatusPeerGone, nil, "n1: dial tcp 127.0.0.1:1: connect: connection refused"},
		{status.Error(codes.Unimplemented, "unknown service rfaas.Executor"), dataplane.StatusProtocol, nil, "another kind of daemon"},
		{status.Error(codes.DeadlineExceeded, "context deadline exceeded"), dataplane.StatusDeadline, context.DeadlineExceeded, "no answer in time"},
		{context.Canceled, dataplane.StatusCancelled, context.Canceled, "cancelled"},
	} {
		err := fromControl("ask", "n1", c.err)
		var e *dataplane.Error
		if !errors.As(err, &e) || e.Status != c.status || e.Op != "ask" || !containsAny(e.Detail, c.text) || !containsAny(e.Detail, "n1: ") {
			t.Errorf("%v: %v, want status %v and %q", c.err, err, c.status, c.text)
		}
		if c.cause != nil && !errors.Is(err, c.cause) {
			t.Errorf("%v: %v is not %v", c.err, err, c.cause)
		}
	}
	if err := fromControl("ask", "n1", nil); err != nil {
		t.Error(err)
	}
}

package grant

import (
	"context"
	"errors"
	"os"
	"path/filepath"
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

// The remedy fits the reason: a daemon that does not run, a wrong host name, or another server.
func TestRemedyOfAbsentDaemon(t *testing.T) {
	c := &shared{opts: Options{Manager: "n1"}}
	for detail, want := range map[string]string{
		"connect: connection refused": "connect: connection refused: if it does not run, start it (`resource-manager`), or " + tryRun,
		"lookup n1: no such host":     "lookup n1: no such host: check the host name in the address",
		"TLS handshake failed: EOF":   "TLS handshake failed: EOF",
	} {
		err := c.explainAbsent(fail("ask", dataplane.StatusPeerGone, "%s", detail), "n1")
		var e *dataplane.Error
		if !errors.As(err, &e) || e.Detail != want {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A token or secret that is missing or unreadable is an error of the credential, with the remedy.
func TestMissingCredential(t *testing.T) {
	dir := t.TempDir()
	open := filepath.Join(dir, "open")
	if err := os.WriteFile(open, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o666); err != nil { // readable for others: not used
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ address, variable, file, remedy string }{
		"no file at the default paths":       {"127.0.0.1:1", "", "", "start a daemon as this user"},
		"no file, and an address of another": {"192.0.2.1:1", "", "", "start a daemon as this user"},
		"no secret file":                     {"127.0.0.1:1", "RFAAS_SECRET_FILE", filepath.Join(dir, "none"), "start a daemon as this user"},
		"no token file":                      {"127.0.0.1:1", "RFAAS_TOKEN_FILE", filepath.Join(dir, "none"), "start a daemon as this user"},
		"a secret file of others":            {"127.0.0.1:1", "RFAAS_SECRET_FILE", open, "has mode 0666, so other users can access it; chmod 600 it"},
		"a directory as token file":          {"127.0.0.1:1", "RFAAS_TOKEN_FILE", dir, "is not a regular file"},
	} {
		pool := NewPool(0)
		defer pool.Close()
		_, err := pool.Open(t.Context(), Options{Executor: c.address, Getenv: func(key string) string {
			switch {
			case key == c.variable && key != "":
				return c.file
			case key == "HOME":
				return dir
			}
			return ""
		}})
		var e *dataplane.Error
		if !errors.As(err, &e) || e.Status != dataplane.StatusCredential || !containsAny(e.Detail, c.remedy) || containsAny(e.Detail, "start a daemon") != containsAny(c.remedy, "start a daemon") {
			t.Errorf("%s: %v, want status %v and only the remedy %q", name, err, dataplane.StatusCredential, c.remedy)
		}
		if c.file != "" && err != nil && !containsAny(err.Error(), c.file) {
			t.Errorf("%s: %v does not name the file", name, err)
		}
	}
}

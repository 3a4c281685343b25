package control

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

func TestParseAddresses(t *testing.T) {
	for text, want := range map[string]int{"a:1": 1, "a:1,b:2": 2, "a:1, b:2": 2, "127.0.0.1:1,localhost:2": 2, "unix:/run/a,b": 1, "[::1]:1,127.0.0.1:2": 2,
		"": 0, "a": 0, "a:1,": 0, "a:1,b": 0, "a:1,127.0.0.1:2": 0, "a:1,unix:/run/a": 0, "127.0.0.1:1,unix:/run/a": 0, strings.Repeat("a:1,", 8) + "a:1": 0} {
		list, err := ParseAddresses(text)
		if len(list) != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %v, %v; want %d addresses", text, list, err, want)
		}
		if Several(text) != (want > 1) {
			t.Errorf("%q: several %v", text, Several(text))
		}
	}
}

// The daemon that serves is found among addresses at which nobody listens, or a stopped process does not answer. A call that is not
// answered in time ends its connection.
func TestSeveralAddresses(t *testing.T) {
	leakcheck.Check(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts connections
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	p, _ := openPort(t, "127.0.0.1:0")
	for _, list := range [][]string{{dead.Addr().String(), p.Address}, {silent.Addr().String(), p.Address}, {p.Address, dead.Addr().String()}} {
		conn, err := Dial(strings.Join(list, ","), DialConfig{Secret: p.Secret})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := NewExecutorClient(conn).Info(t.Context(), &InfoRequest{}); err != nil {
			t.Errorf("%v: %v", list, err)
		}
		conn.Close()
	}
	conn, err := Dial(dead.Addr().String()+","+silent.Addr().String(), DialConfig{Secret: p.Secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := NewExecutorClient(conn).Info(ctx, &InfoRequest{}); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("a call that nobody answers: %v", err)
	}
}

// pausing answers Info, except for the first calls, which wait.
type pausing struct {
	UnimplementedExecutorServer
	waiting chan struct{} // receives for each call that waits
	wait    atomic.Int32  // calls that still have to wait
	answer  chan struct{} // closed: waiting calls are answered
}

func (p *pausing) Info(ctx context.Context, _ *InfoRequest) (*InfoReply, error) {
	if p.wait.Add(-1) >= 0 {
		p.waiting <- struct{}{}
		select {
		case <-p.answer:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	return &InfoReply{}, nil
}

// A call that is not answered in time does not end other calls, if its limit is short, or if the manager answers other calls meanwhile.
func TestSlowCallEndsNoOthers(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	for name, limit := range map[string]time.Duration{"short limit": 50 * time.Millisecond, "others are answered": silentAfter + 100*time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: filepath.Join(dir, "secret")})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close(t.Context())
			s := &pausing{waiting: make(chan struct{}, 2), answer: make(chan struct{})}
			s.wait.Store(2)
			RegisterExecutorServer(p.Server, s)
			if err := p.Serve(); err != nil {
				t.Fatal(err)
			}
			conn, err := Dial(p.Address+","+dead.Addr().String(), DialConfig{Secret: p.Secret})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			c := NewExecutorClient(conn)
			long := make(chan error, 1)
			go func() {
				_, err := c.Info(t.Context(), &InfoRequest{})
				long <- err
			}()
			<-s.waiting
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			limited := make(chan error, 1)
			go func() {
				_, err := c.Info(ctx, &InfoRequest{})
				limited <- err
			}()
			<-s.waiting
			if limit > silentAfter {
				if _, err := c.Info(t.Context(), &InfoRequest{}); err != nil {
					t.Error(err)
				}
			}
			if err := <-limited; status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("the limited call: %v", err)
			}
			close(s.answer)
			if err := <-long; err != nil {
				t.Errorf("the other call: %v", err)
			}
		})
	}
}

package control

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

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

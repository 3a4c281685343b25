package client_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// TestChain calls two functions by one call. Only the second one's result comes back, and errors name the function at fault.
func TestChain(t *testing.T) {
	w := newWorld(t)
	l := w.lease(t, client.LeaseOptions{Bulk: 1 << 20})
	chain := func(first, second string) *client.Function {
		c, err := l.Chain(function(t, l, first), function(t, l, second))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	large, out := bytes.Repeat([]byte{1, 0, 0, 0, 0, 0, 0, 0}, 1<<17), make([]byte, 1<<20)
	if n, err := chain("echo", "sum").Invoke(t.Context(), large, out); n != 8 || err != nil || !bytes.Equal(out[:8], u64(1<<17)) {
		t.Errorf("the sum of 1 MiB: %x, %v", out[:n], err)
	}
	if n, err := l.Worker(0).Invoke(t.Context(), chain("echo", "echo"), large, out); n != len(large) || err != nil || !bytes.Equal(out, large) {
		t.Errorf("an echo of an echo: %d bytes, %v", n, err)
	}
	for _, c := range []struct {
		first, second string
		status        client.Status
		want          string
	}{
		{"fail", "echo", client.StatusFunctionFailed, "fail, the first function of a chain, on worker 0 failed: so it is"},
		{"echo", "fail", client.StatusFunctionFailed, "fail, the second function of a chain, on worker 0 failed: so it is"},
		{"too_large", "echo", client.StatusFunctionFailed, "its result has 1048577 bytes, and in this lease a chain passes on at most 1048576: lease a larger bulk area"},
		{"echo", "too_large", client.StatusResultTooLarge, "invoke echo, then too_large: result of 9 bytes, the capacity is 8"},
		{"crash", "echo", client.StatusWorkerDied, "function crash of worker 0"},
		{"echo", "crash", client.StatusWorkerDied, "function crash of worker 0"},
	} {
		_, err := chain(c.first, c.second).Invoke(context.Background(), []byte("so it is"), out[:8])
		var e *client.Error
		if !errors.As(err, &e) || e.Status != c.status || !e.Started || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, then %s: %v, want %q", c.first, c.second, err, c.want)
		}
	}
	if _, err := l.Chain(function(t, l, "echo"), nil); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no second function: %v", err)
	}
	if _, err := l.Chain(chain("echo", "echo"), function(t, l, "echo")); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a chain of a chain: %v", err)
	}
}

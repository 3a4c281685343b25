package client_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// A result that is larger than out comes in new memory, and the function runs once.
func TestInvokeUpTo(t *testing.T) {
	w := newWorld(t)
	for name, options := range map[string]client.LeaseOptions{"workers": {Workers: 2, Bulk: 4 << 20}, "local": {Workers: 2, Bulk: 4 << 20, Local: true}} {
		t.Run(name, func(t *testing.T) {
			if name == "local" {
				taken := w.lease(t, client.LeaseOptions{Workers: 2})
				defer func() { _ = taken.Release(context.Background()) }()
			}
			l := w.lease(t, options)
			defer func() { _ = l.Release(context.Background()) }()
			if local := l.Provider() == "local"; local != (name == "local") {
				t.Fatalf("provider %s", l.Provider())
			}
			echo, count := function(t, l, "echo"), function(t, l, "count")
			in, room := bytes.Repeat([]byte("0123456789"), 100_000), make([]byte, 100)
			deadline, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for _, ctx := range []context.Context{context.Background(), deadline} {
				for _, size := range []int{0, 99, 100, 101, 20_000, len(in)} {
					for range 3 {
						got, err := echo.InvokeUpTo(ctx, in[:size], room, 1<<20)
						if err != nil || !bytes.Equal(got, in[:size]) || (size > 0 && size <= len(room)) != (len(got) > 0 && &got[0] == &room[0]) {
							t.Fatalf("%d bytes: %d came, %v", size, len(got), err)
						}
					}
				}
				if got, err := l.Worker(1).InvokeUpTo(ctx, echo, in[:500], nil, 500); err != nil || !bytes.Equal(got, in[:500]) {
					t.Errorf("on a worker: %d bytes, %v", len(got), err)
				}
			}
			for i := uint64(1); i < 4; i++ {
				if got, err := l.Worker(0).InvokeUpTo(t.Context(), count, nil, nil, 8); err != nil || !bytes.Equal(got, u64(i)) {
					t.Errorf("call %d: %v, %v", i, got, err)
				}
			}
			var e *client.Error
			if got, err := echo.InvokeUpTo(t.Context(), in[:500], room, 499); got != nil || !errors.As(err, &e) || e.Status != client.StatusResultTooLarge ||
				(name == "workers" && !strings.Contains(e.Text, "at most 499 bytes are kept")) {
				t.Errorf("more than the most: %d bytes, %v", len(got), err)
			}
			if _, err := echo.InvokeUpTo(t.Context(), in[:500], room, 50); !errors.As(err, &e) || e.Status != client.StatusResultTooLarge {
				t.Errorf("less than out: %v", err)
			}
			if _, err := echo.InvokeUpTo(t.Context(), nil, nil, -1); !errors.Is(err, client.ErrInvalid) {
				t.Errorf("a negative number: %v", err)
			}
		})
	}
}

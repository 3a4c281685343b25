package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// With no core free, functions run in this process.
func TestLocal(t *testing.T) {
	if provider() == "verbs" {
		t.Skip("functions in the caller are the same on every fabric")
	}
	w := newWorld(t, "--pool", "0")
	all := w.lease(t, client.LeaseOptions{Workers: 2, Local: true})
	l := w.lease(t, client.LeaseOptions{Workers: 2, Depth: 2, Local: true})
	if all.Provider() == "local" || l.Provider() != "local" || l.Workers() != 2 || l.Start() != client.StartUnknown {
		t.Fatalf("providers %s, %s, %d workers", all.Provider(), l.Provider(), l.Workers())
	}
	echo, count, pid := function(t, l, "echo"), function(t, l, "count"), function(t, l, "pid")
	out := make([]byte, 2<<20)
	if n, err := echo.Invoke(t.Context(), []byte("here"), out); err != nil || string(out[:n]) != "here" {
		t.Errorf("%q, %v", out[:n], err)
	}
	if _, err := pid.Invoke(t.Context(), nil, out); err != nil || binary.LittleEndian.Uint64(out) != uint64(os.Getpid()) {
		t.Errorf("it ran in process %x, %v", out[:8], err)
	}
	// Functions run one at a time, else the unprotected counter would be wrong.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				if _, err := count.Invoke(context.Background(), nil, make([]byte, 8)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if _, err := l.Worker(1).Invoke(t.Context(), count, nil, out); err != nil || binary.LittleEndian.Uint64(out) != 2001 {
		t.Errorf("%d calls counted, %v", binary.LittleEndian.Uint64(out), err)
	}
	n, err := echo.Invoke(t.Context(), u64(1), out[:4])
	var e *client.Error
	if !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || n != 8 || !e.Started {
		t.Errorf("too large a result: %d, %v", n, err)
	}
	if _, err := echo.Invoke(t.Context(), make([]byte, 2<<20+1), out); !errors.As(err, &e) || e.Status != client.StatusTooLarge || e.Started {
		t.Errorf("too large a payload: %v", err)
	}
	if _, err := function(t, l, "fail").Invoke(t.Context(), nil, out); !errors.As(err, &e) || e.Status != client.StatusFunctionFailed || !e.Started {
		t.Errorf("fail: %v", err)
	}
	if _, err := l.Function("ecko"); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `"ecko"`) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := echo.Invoke(client.Idempotent(ctx, 2), nil, nil); !errors.As(err, &e) || e.Status != client.StatusCancelled || e.Started {
		t.Errorf("a context that had ended: %v", err)
	}

	var calls [2]client.Call
	for i := range calls {
		if calls[i], err = l.Worker(0).Submit(t.Context(), echo, u64(uint64(i)), 8-4*i); err != nil {
			t.Fatal(err)
		}
	}
	var more []client.Call
	for err = nil; err == nil && len(more) < 9; {
		var c client.Call
		if c, err = l.Worker(0).Submit(t.Context(), echo, nil, 8); err == nil {
			more = append(more, c)
		}
	}
	if !errors.Is(err, client.ErrBusy) {
		t.Errorf("%d calls more than the depth: %v", len(more), err)
	}
	for _, c := range more {
		c.Cancel()
	}
	if ended, err := calls[0].Test(); !ended || err != nil {
		t.Error(ended, err)
	}
	if n, err := calls[0].Result(out); err != nil || n != 8 {
		t.Error(n, err)
	}
	if n, err := calls[1].Result(out); !errors.As(err, &e) || e.Status != client.StatusResultTooLarge || n != 8 {
		t.Error(n, err)
	}
	b, err := l.Worker(0).Alloc(t.Context(), 100_000)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := echo.Invoke(t.Context(), b.Bytes(), out); err != nil || n != len(b.Bytes()) {
		t.Error(n, err)
	}
	if err := errors.Join(b.Free(t.Context()), l.Renew(t.Context(), 0)); err != nil || b.Bytes() != nil {
		t.Error(err)
	}
	if _, err := l.Worker(0).Inspect(t.Context()); !errors.Is(err, client.ErrUnsupported) {
		t.Errorf("inspect: %v", err)
	}
	if s := l.Statistics(); s.Local < 2001 || s.Moved != 0 {
		t.Errorf("%+v", s)
	}
	if err := errors.Join(l.Release(t.Context()), all.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if _, err := echo.Invoke(t.Context(), nil, nil); !errors.Is(err, client.ErrLease) {
		t.Errorf("after release: %v", err)
	}
	for what, o := range map[string]client.LeaseOptions{"/etc/passwd": {Library: "/etc/passwd"}, "no library": {Code: []byte("no library")}} {
		o.Local = true
		if _, err := w.session.Lease(t.Context(), o); !errors.As(err, &e) || e.Status != client.StatusBadLibrary {
			t.Errorf("%s: %v", what, err)
		}
	}
}

package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// With no core free, functions run in this process.
func TestLocal(t *testing.T) {
	if provider() == "verbs" {
		t.Skip("functions in the caller are the same on every fabric")
	}
	w := newWorld(t, "--pool", "0")
	all := w.lease(t, client.LeaseOptions{Workers: 2, Local: true})
	l := w.lease(t, client.LeaseOptions{Workers: 2, Depth: 2, Local: true, Bulk: 2 << 20})
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
	var e *client.Error
	if _, err := function(t, l, "fail").Invoke(t.Context(), nil, out); !errors.As(err, &e) || e.Status != client.StatusFunctionFailed || !e.Started {
		t.Errorf("fail: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := echo.Invoke(client.Idempotent(ctx, 2), nil, nil); !errors.As(err, &e) || e.Status != client.StatusCancelled || e.Started {
		t.Errorf("a context that had ended: %v", err)
	}

	var calls [2]client.Call
	var err error
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
}

// A lease begins in this process, since nobody listens at the executor's address. Its calls move to the executor when that has started.
func TestLocalMoves(t *testing.T) {
	if provider() == "verbs" {
		t.Skip("functions in the caller are the same on every fabric")
	}
	at := "unix:" + filepath.Join(t.TempDir(), "executor")
	w := &world{secret: secretFile(t)}
	start(t, managerProgram, w.secret) // makes the secret
	s := w.connect(t, client.Options{Executor: at, Local: true})
	options := client.LeaseOptions{Library: built(t, "build/functions/echo.so")}
	if _, err := s.Lease(t.Context(), options); !errors.Is(err, client.ErrConnection) || !strings.Contains(err.Error(), at) {
		t.Errorf("a lease that needs workers: %v", err)
	}
	events := make(chan client.Event, 16)
	options.Local, options.OnEvent = true, func(e client.Event) { events <- e }
	l, err := s.Lease(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	echo, pid, out := function(t, l, "echo"), function(t, l, "pid"), make([]byte, 8)
	if e := ends(t, "the event", events); e.Kind != client.EventLocal || e.Reason != l.LocalReason() || !strings.Contains(e.Reason, at) {
		t.Errorf("%+v, reason %q", e, l.LocalReason())
	}
	call := func(in uint64) {
		t.Helper()
		if n, err := echo.Invoke(t.Context(), u64(in), out); err != nil || n != 8 || binary.LittleEndian.Uint64(out) != in {
			t.Fatalf("call %d: %x, %v", in, out[:n], err)
		}
	}
	call(1)
	start(t, "bin/executor", w.secret, "--listen", at, "--cores", "1", "--providers", provider())
	for in, end := uint64(2), time.Now().Add(20*time.Second); l.Provider() == "local" && time.Now().Before(end); in++ {
		call(in)
	}
	if e := ends(t, "the event", events); e.Kind != client.EventMoved || e.Reason != at || l.LocalReason() != "" {
		t.Errorf("%+v, reason %q", e, l.LocalReason())
	}
	if _, err := pid.Invoke(t.Context(), nil, out); err != nil || binary.LittleEndian.Uint64(out) == uint64(os.Getpid()) {
		t.Errorf("it ran in process %x, %v", out, err)
	}
	if s := l.Statistics(); s.Moved != 1 {
		t.Errorf("%+v", s)
	}
}

package executor

import (
	"bytes"
	"cmp"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

func TestInspect(t *testing.T) {
	n := newNode(t)
	l := n.lease(2)
	r, err := n.Inspect(n.ctx(), &control.InspectRequest{LeaseId: l.GetLeaseId(), Worker: 1})
	if err != nil {
		t.Fatal(err)
	}
	if r.GetPid() != l.GetWorkers()[1].GetPid() || r.GetRunning() != "busy" || string(r.GetOutputTail()) != "so far" || r.GetCalls() != 1 ||
		r.GetRefused() != 2 || r.GetFailed() != 3 || r.GetBytesIn() != 4 || r.GetBytesOut() != 5 {
		t.Errorf("%v", r)
	}
	_, err = n.Inspect(n.ctx(), &control.InspectRequest{LeaseId: l.GetLeaseId(), Worker: 2})
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "worker 2", "0 to 1")
	n.release(l.GetLeaseId())
	_, err = n.Inspect(n.ctx(), &control.InspectRequest{LeaseId: l.GetLeaseId()})
	wantError(t, err, codes.FailedPrecondition, control.ClassLease, "released")
}

// A client's report that a worker has not answered for longer than the call limit ends the worker. A shorter time does
// not, nor does any time without a call limit.
func TestUnansweredWorkerEnds(t *testing.T) {
	n := newNode(t)
	for _, c := range []struct {
		limit, unanswered uint64 // ms
		ends              bool
	}{{0, 1 << 60, false}, {500, 0, false}, {500, 1500, false}, {500, 1501, true}, {500, 1 << 63, true}} {
		req := n.request(2)
		req.CallLimitMs = c.limit
		l, err := n.Lease(n.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		ev := n.events(l.GetLeaseId())
		if _, err := n.Inspect(n.ctx(), &control.InspectRequest{LeaseId: l.GetLeaseId(), Worker: 1, UnansweredMs: c.unanswered}); err != nil {
			t.Fatal(err)
		}
		if c.ends {
			if e := ev.want(control.Event_KIND_WORKER_DIED); e.GetWorker() != 1 {
				t.Errorf("worker %d ended, want 1", e.GetWorker())
			}
		}
		if n := len(n.z.alive()); n != map[bool]int{false: 2, true: 1}[c.ends] {
			t.Errorf("limit %d ms, no answer for %d ms: %d workers live", c.limit, c.unanswered, n)
		}
		n.release(l.GetLeaseId())
	}
}

// A client that reports a worker as overdue many times ends it once, and causes one log line.
func TestUnansweredIsSaidOnce(t *testing.T) {
	n := newNode(t)
	var out bytes.Buffer
	n.e.log = slog.New(slog.NewTextHandler(&out, nil))
	req := n.request(1)
	req.CallLimitMs = 500
	l, err := n.Lease(n.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	for range 500 {
		if _, err := n.Inspect(n.ctx(), &control.InspectRequest{LeaseId: l.GetLeaseId(), UnansweredMs: 2000}); err != nil {
			t.Fatal(err)
		}
	}
	if lines := strings.Count(out.String(), "has not answered"); lines != 1 {
		t.Errorf("%d lines in the log, want 1", lines)
	}
	n.release(l.GetLeaseId())
}

func ms(n uint64) time.Duration { return time.Duration(n) * time.Millisecond }

// Workers get the limits of their lease, and the report of a death by a limit names it.
func TestCallLimit(t *testing.T) {
	for _, tc := range []struct{ own, asked, want uint64 }{{0, 0, 0}, {0, 1500, 1500}, {2000, 0, 2000}, {2000, 1, 1}, {2000, 2000, 2000}} {
		n := newNode(t, func(c *Config) { c.Settings.CallLimit = ms(tc.own) })
		req := n.request(1)
		req.CallLimitMs = tc.asked
		l, err := n.Lease(n.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		w := n.z.alive()[0]
		if w.spec.CallLimit != ms(tc.want) {
			t.Errorf("asked for %d of %d ms: %v", tc.asked, tc.own, w.spec.CallLimit)
		}
		ev := n.events(l.GetLeaseId())
		w.die(zygote.Exit{Signal: 9, Status: -504, Function: "f", Reason: "exceeded", Backtrace: "f+0x1"})
		if e := ev.want(control.Event_KIND_WORKER_DIED); e.GetStatus() != -504 || e.GetFunction() != "f" || e.GetBacktrace() != "f+0x1" {
			t.Errorf("event %v", e)
		}
	}
	for _, tc := range []struct{ call, init, asked, want uint64 }{{0, 0, 100, 0}, {2000, 0, 100, 2000}, {2000, 9000, 0, 9000}, {0, 9000, 100, 9000}} {
		n := newNode(t, func(c *Config) { c.Settings.CallLimit, c.Settings.InitLimit = ms(tc.call), ms(tc.init) })
		for _, init := range []bool{false, true} {
			req := n.request(1)
			req.CallLimitMs, req.InitCall = tc.asked, init
			l, err := n.Lease(n.ctx(), req)
			if err != nil {
				t.Fatal(err)
			}
			s := n.z.alive()[0].spec
			if want := ms(cmp.Or(tc.asked, tc.call)); s.CallLimit != want || !init && s.InitLimit != want || init && s.InitLimit != ms(tc.want) {
				t.Errorf("%+v, init call %v: %v and %v", tc, init, s.CallLimit, s.InitLimit)
			}
			n.release(l.GetLeaseId())
		}
	}
	n := newNode(t, func(c *Config) { c.Settings.CallLimit = ms(2000) })
	req := n.request(1)
	req.CallLimitMs = 2001
	_, err := n.Lease(n.ctx(), req)
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "call_limit_ms 2001", "2000")
	req.CallLimitMs = 1 << 63
	_, err = n.Lease(n.ctx(), req)
	wantError(t, err, codes.InvalidArgument, control.ClassInvalid, "call_limit_ms")
}

// The unnamed functions of a backtrace are looked up together, once. If that fails, the backtrace is reported without
// these names.
func TestBacktraceIsNamed(t *testing.T) {
	n := newNode(t)
	l := n.lease(2)
	ev := n.events(l.GetLeaseId())
	const trace = "library+0x1139\nvisible+0x7\nlibrary+0x2000\nlibrary+0xnonsense\nlibrary+0x1ffffffffffffffff\ncos+0x2a (libm.so.6)"
	var asked [][]uint64
	n.z.symbols = func(offsets []uint64) []string {
		asked = append(asked, offsets)
		return []string{"inner+0x9", ""}
	}
	workers := n.z.alive()
	workers[0].die(zygote.Exit{Signal: 11, Reason: "SIGSEGV", Backtrace: trace})
	want := strings.Replace(trace, "library+0x1139", "inner+0x9", 1)
	if e := ev.want(control.Event_KIND_WORKER_DIED); e.GetBacktrace() != want || e.GetPid() != int32(workers[0].pid) {
		t.Errorf("event %v", e)
	}
	if fmt.Sprint(asked) != "[[4409 8192]]" {
		t.Errorf("asked for %v", asked)
	}
	n.z.symbols = nil // it fails
	workers[1].die(zygote.Exit{Signal: 11, Reason: "SIGSEGV", Backtrace: trace})
	if e := ev.want(control.Event_KIND_WORKER_DIED); e.GetBacktrace() != trace {
		t.Errorf("event %v", e)
	}
}

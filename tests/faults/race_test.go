package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// raceReport is the last line of testdata/race.c.
type raceReport struct {
	Calls     uint64 `json:"calls"`
	OK        uint64 `json:"ok"`
	Deadline  uint64 `json:"deadline"`
	Cancelled uint64 `json:"cancelled"`
	Busy      uint64 `json:"busy"`
	Closed    uint64 `json:"closed"` // times that an unused buffer was protected against writes, or also reads
	Wrong     uint64 `json:"wrong"`
	LongestNS int64  `json:"longest_ns"`
	NS        int64  `json:"ns"`
}

// TestCancelsRaceReplies makes many calls whose cancels and deadlines race with their replies, from buffers between
// guard pages: a C process in each wait mode, and some calls in Go. No buffer is touched before the start or after
// the end of its call, every result is right, and every slot is free at the end.
func TestCancelsRaceReplies(t *testing.T) {
	if testing.Short() {
		t.Skip("makes many calls")
	}
	first := seed(t)
	w := newWorld(t)
	executor := w.newExecutor("executor")
	w.env = append(w.env, "RFAAS_EXECUTOR="+executor.address)
	var made uint64
	// If other programs use the cores too, waiting without spinning is several times faster.
	for mode, c := range []struct {
		name  string
		calls int
	}{{"adaptive", *callsFlag / 4}, {"hot", *callsFlag / 8}, {"warm", *callsFlag * 5 / 8}} {
		t.Run(c.name, func(t *testing.T) { made += raceInC(t, w, first+uint64(mode), c.calls, mode) })
	}
	t.Run("go", func(t *testing.T) { raceInGo(t, w, executor, first, *callsFlag/20) })
	executor.stop()
	if !t.Failed() {
		t.Logf("figure: race.calls = %d", made)
	}
}

// raceInC returns how many calls were made.
func raceInC(t *testing.T, w *world, seed uint64, calls, mode int) uint64 {
	var said []string
	var r *raceReport
	p, err := w.run(here, nil, func(s string) {
		if end, ok := strings.CutPrefix(s, "end "); ok {
			r = &raceReport{}
			if err := json.Unmarshal([]byte(end), r); err != nil {
				said = append(said, err.Error())
			}
			return
		}
		said = append(said, s)
	}, built(t, "build/faults/race"), built(t, "build/faults/work.so"), fmt.Sprint(seed), fmt.Sprint(calls), "16", fmt.Sprint(mode))
	if err != nil {
		t.Fatal(err)
	}
	// A million calls take about a minute. At this bound they hang.
	bound := 30*time.Second + time.Duration(calls)*time.Millisecond
	select {
	case <-p.done:
	case <-time.After(bound):
		where := stacks(p.pid())
		p.kill()
		t.Fatalf("%d calls were not over after %v; its threads:\n%s", calls, bound, where)
	}
	for _, s := range said {
		t.Error(s)
	}
	if r == nil {
		t.Fatalf("it ended (%v) without a report", p.state)
	}
	each := time.Duration(r.NS) / time.Duration(max(r.Calls, 1))
	t.Logf("%d calls, %v each: %d right, %d deadlines, %d cancelled; %d rests of a closed buffer; longest wait %v", r.Calls, each,
		r.OK, r.Deadline, r.Cancelled, r.Closed, time.Duration(r.LongestNS).Round(time.Microsecond))
	if least := uint64(calls) / 200; r.Calls < uint64(calls) || r.OK < least || r.Deadline < least || r.Cancelled < least || r.Closed < least {
		t.Errorf("too few of some kind, the race is not one: %+v", *r)
	}
	if d := time.Duration(r.LongestNS); d > 5*time.Second {
		t.Errorf("a call took %v", d)
	}
	return r.Calls
}

func isStatus(err error, st client.Status) bool {
	var e *client.Error
	return errors.As(err, &e) && e.Status == st
}

// guarded is memory between two inaccessible pages, as in race.c.
func guarded(t *testing.T, size int) []byte {
	page := os.Getpagesize()
	m, err := unix.Mmap(-1, 0, size+2*page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	b := m[page : page+size]
	protect(t, b, unix.PROT_READ|unix.PROT_WRITE)
	return b
}

func protect(t *testing.T, b []byte, rights int) {
	if err := unix.Mprotect(b, rights); err != nil {
		t.Fatal(err)
	}
}

// raceInGo does the same as race.c in Go: calls whose contexts end, and calls in flight that are cancelled. A result
// is at the end of its buffer, and a buffer is write-protected while no call uses it.
func raceInGo(t *testing.T, w *world, executor *daemon, seed uint64, calls int) {
	const depth, room, buffers = 8, 8192, 16
	s, err := client.Connect(t.Context(), client.Options{Executor: executor.address, SecretFile: w.secret, Provider: provider()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, err := s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/faults/work.so"), Depth: depth})
	if err != nil {
		t.Fatal(err)
	}
	f, err := l.Function("work")
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	var memory [buffers][]byte
	var pattern [buffers]uint64
	var resting []int
	rest := func(i int) {
		pattern[i] = r.Uint64()
		workFill(memory[i], pattern[i])
		protect(t, memory[i], unix.PROT_READ)
		resting = append(resting, i)
	}
	for i := range memory {
		memory[i] = guarded(t, room)
		rest(i)
	}
	take := func() int {
		k := r.IntN(len(resting))
		i := resting[k]
		resting[k] = resting[len(resting)-1]
		resting = resting[:len(resting)-1]
		if !workIs(memory[i], pattern[i]) {
			t.Fatal("a buffer was written while it was the caller's")
		}
		protect(t, memory[i], unix.PROT_READ|unix.PROT_WRITE)
		return i
	}
	var right, late, cancelled int
	tag := seed << 32
	payload := func(want int) []byte {
		tag++
		return workPayload(tag, r.IntN(4096), uint32(want), 0)
	}
	// ended checks the result in buffer i and protects the buffer again.
	ended := func(i, want, n int, hash uint64, err error) {
		out := memory[i][room-want:]
		switch {
		case err == nil:
			right++
			if n != want || !workIs(out[:n], hash) {
				t.Fatalf("a result of %d bytes is not the %d bytes of hash %x", n, want, hash)
			}
			whole := make([]byte, room)
			workFill(whole, pattern[i])
			copy(out, whole[room-want:])
		case isStatus(err, client.StatusDeadline):
			late++
		case isStatus(err, client.StatusCancelled):
			cancelled++
		default:
			t.Fatalf("a call ended with %v", err)
		}
		if !workIs(memory[i], pattern[i]) {
			t.Fatalf("a call that ended with %v wrote outside its result", err)
		}
		rest(i)
	}
	for right+late+cancelled < calls {
		if r.IntN(2) == 0 {
			i, want := take(), r.IntN(room)
			in := payload(want)
			hash := workHash(in)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(64+r.IntN(64))<<r.IntN(10))
			n, err := f.Invoke(ctx, in, memory[i][room-want:])
			cancel()
			if errors.Is(err, client.ErrBusy) {
				rest(i)
				continue
			}
			ended(i, want, n, hash, err)
			continue
		}
		type flying struct {
			client.Call
			want int
			hash uint64
		}
		var list []flying
		for range 1 + r.IntN(depth) {
			want := r.IntN(room)
			in := payload(want)
			hash := workHash(in)
			c, err := l.Worker(0).Submit(t.Context(), f, in, want)
			if errors.Is(err, client.ErrBusy) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			clear(in)
			list = append(list, flying{c, want, hash})
		}
		for _, c := range list {
			if r.IntN(2) == 0 {
				c.Cancel()
				cancelled++
				continue
			}
			if err := c.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			i := take()
			n, err := c.Result(memory[i][room-c.want:])
			ended(i, c.want, n, c.hash, err)
		}
	}
	t.Logf("%d right, %d deadlines, %d cancelled", right, late, cancelled)
	if right == 0 || late == 0 || cancelled == 0 {
		t.Error("none of some kind: the race is not one")
	}
	// Every slot is free again.
	w.eventually(10*time.Second, "as many calls as slots can be in flight", func() bool {
		var list []client.Call
		for range depth {
			c, err := l.Worker(0).Submit(t.Context(), f, workPayload(1, 0, 8, 0), 8)
			if err == nil {
				list = append(list, c)
			}
		}
		_, err := l.Worker(0).Submit(t.Context(), f, workPayload(1, 0, 8, 0), 8)
		for _, c := range list {
			if c.Wait(t.Context()) == nil {
				_, _ = c.Result(make([]byte, 8))
			}
		}
		return len(list) == depth && errors.Is(err, client.ErrBusy)
	})
	for len(resting) > 0 {
		take()
	}
}

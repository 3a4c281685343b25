package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// seedSum is the sum of the table of testdata/seeded.c.
func seedSum() (sum uint32) {
	for i := range uint32(8 << 20) {
		sum += uint32(uint8(i * 7))
	}
	return sum
}

// newSeedWorld is an executor for eight workers, and a library whose init call prepares a table.
func newSeedWorld(t *testing.T, way string, workers int) (*world, client.LeaseOptions) {
	t.Helper()
	return newWorld(t, "--share-cores", "4"), client.LeaseOptions{Library: compile(t, "seeded.so", "", "testdata/seeded.c", "-std=gnu11", "-D_GNU_SOURCE", "-pthread", "-O2",
		"-Wall", "-Werror", "-I../worker"), Workers: workers, InitFunction: "prepare", InitPayload: []byte(way), Seed: true, Memory: 64 << 20}
}

// useSeed calls a worker, and checks the number of its calls and its table. It returns a number that the worker's init call has chosen.
func useSeed(t testing.TB, l *client.Lease, worker int, calls uint32) (token uint32) {
	t.Helper()
	out := make([]byte, 12)
	if _, err := l.Worker(worker).Invoke(context.Background(), function(t, l, "use_table"), nil, out); err != nil {
		t.Fatal(err)
	}
	if n, sum := binary.LittleEndian.Uint32(out), binary.LittleEndian.Uint32(out[4:]); n != calls || sum != seedSum() {
		t.Errorf("worker %d: call %d, sum %d, want %d, %d", worker, n, sum, calls, seedSum())
	}
	return binary.LittleEndian.Uint32(out[8:])
}

// The init call is made once on a node. All workers start from its memory and share it: those of a lease, replacements, and those of later leases. Each changes
// only its own copy.
func TestSeed(t *testing.T) {
	const workers = 8
	w, o := newSeedWorld(t, "-", workers)
	l := w.lease(t, o)
	once := useSeed(t, l, 0, 1) // the number that the init call has chosen
	made := func(token uint32) {
		t.Helper()
		if token != once {
			t.Errorf("the init call was made again")
		}
	}
	for i := range workers {
		if steps := l.Worker(i).StartSteps(); steps.Start != client.StartSeeded {
			t.Fatalf("worker %d: %v start: %s", i, steps.Start, steps.Unseeded)
		}
		if i > 0 {
			made(useSeed(t, l, i, 1))
		}
	}
	made(useSeed(t, l, 0, 2))
	out := make([]byte, 4)
	if _, err := l.Worker(5).Invoke(context.Background(), function(t, l, "share"), nil, out); err != nil {
		t.Fatal(err)
	}
	if share, whole := binary.LittleEndian.Uint32(out), uint32(8<<10); share > whole/2 {
		t.Errorf("a worker's share of the table is %d KiB of %d", share, whole)
	}
	pid := l.Worker(3).PID()
	if _, err := l.Worker(3).Invoke(context.Background(), function(t, l, "end"), nil, nil); !errors.Is(err, client.ErrConnection) {
		t.Errorf("end: %v", err)
	}
	made(useSeed(t, l, 3, 1))
	if l.Worker(3).PID() == pid {
		t.Error("worker 3 was not replaced")
	}
	if n := l.Statistics().Seeded; n != workers+1 {
		t.Errorf("%d workers started from the seed, want %d", n, workers+1)
	}
	release(t, l)
	o.Workers, o.SeedRequired = 1, true
	made(useSeed(t, w.lease(t, o), 0, 1))
}

// A worker that has done nothing has little memory of its own.
func TestSeedMemory(t *testing.T) {
	if provider() != "shm" {
		t.Skip("with other providers, a worker has its channel alone")
	}
	w, o := newSeedWorld(t, "-", 8)
	l := w.lease(t, o)
	for i := range 8 {
		got := numbers(t, l, i, "memory")
		if shared, own := got[0]-got[1]-got[2], got[1]; shared > 128 || own > 512 {
			t.Errorf("worker %d: %d KiB of PSS, beside %d KiB written and %d KiB of its channel", i, shared, own, got[2])
		}
	}
}

// Workers make the init call themselves if its state cannot be kept, or its process is killed. With SeedRequired that is an error. The reason is reported.
func TestSeedUnavailable(t *testing.T) {
	for way, why := range map[string]string{"t": "has left 1 threads", "k": "killed"} {
		t.Run(way, func(t *testing.T) {
			w, o := newSeedWorld(t, way, 2)
			l := w.lease(t, o)
			if useSeed(t, l, 0, 1) == useSeed(t, l, 1, 1) {
				t.Error("only one worker has made the init call")
			}
			if steps := l.Worker(0).StartSteps(); steps.Start == client.StartSeeded || !strings.Contains(steps.Unseeded, why) {
				t.Errorf("%v start: %q, want %q", steps.Start, steps.Unseeded, why)
			}
			release(t, l)
			o.SeedRequired = true
			if _, err := w.session.Lease(context.Background(), o); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), why) {
				t.Errorf("with SeedRequired: %v, want %q", err, why)
			}
		})
	}
	w, o := newSeedWorld(t, "f", 1)
	if _, err := w.session.Lease(context.Background(), o); !errors.Is(err, client.ErrFunction) || !strings.Contains(err.Error(), "on purpose") {
		t.Errorf("an init call that fails: %v", err)
	}
	for _, change := range []func(o *client.LeaseOptions){
		func(o *client.LeaseOptions) { o.InitFunction, o.InitPayload = "", nil },
		func(o *client.LeaseOptions) { o.Reuse = true },
		func(o *client.LeaseOptions) { o.SeedRequired, o.Local = true, true },
	} {
		o := o
		change(&o)
		if _, err := w.session.Lease(context.Background(), o); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), "RFAAS_LEASE_SEED") {
			t.Errorf("invalid options: %v", err)
		}
	}
}

// numbers calls a function of a worker that returns numbers.
func numbers(t testing.TB, l *client.Lease, worker int, name string) []uint32 {
	t.Helper()
	out := make([]byte, 16)
	n, err := l.Worker(worker).Invoke(context.Background(), function(t, l, name), nil, out)
	if err != nil {
		t.Fatal(err)
	}
	var list []uint32
	for at := 0; at < n; at += 4 {
		list = append(list, binary.LittleEndian.Uint32(out[at:]))
	}
	return list
}

// A program creates a seed in one lease. Workers of later leases start from it, even in another session that knows only the name. The setup function is executed once.
// The functions that it registered run in each worker, and the workers have different numbers.
func TestNamedSeed(t *testing.T) {
	w, o := newSeedWorld(t, "", 1)
	o.Seed, o.InitFunction, o.InitPayload = false, "", nil
	ctx := context.Background()
	l := w.lease(t, o)
	s, err := l.CreateSeed(ctx, "prepare_children", []byte("-"), client.SeedOptions{Name: "table", TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if n := useTableless(t, l); n != 0 {
		t.Error("the setup function ran in the lease's worker")
	}
	suspect, err := l.CreateSeed(ctx, "prepare", []byte("h"), client.SeedOptions{Name: "suspect"})
	if err != nil {
		t.Fatal(err)
	}
	if d, err := suspect.Info(ctx); err != nil || !strings.HasPrefix(d.Warning, "words of the heap that look like pointers to memory outside the seed: 1, the first at") {
		t.Errorf("a pointer to the stack: %q, %v", d.Warning, err)
	}
	release(t, l)
	d, err := s.Info(ctx)
	if err != nil || d.Warning != "" || d.Bytes < 8<<20 || d.Memory != 64<<20 || d.Left <= 0 || d.Left > time.Minute || d.Function != "prepare_children" || !strings.HasPrefix(s.Name(), "table:") {
		t.Errorf("%q: %+v, %v", s.Name(), d, err)
	}
	other := w.connect(t, w.options())
	opened, err := other.OpenSeed(ctx, s.Name())
	if err != nil {
		t.Fatal(err)
	}
	o.Workers, o.SeedName, o.SeedRequired, o.Memory = 3, opened.Name(), true, 0
	seen := map[uint32]bool{}
	var token uint32
	for _, session := range []*client.Session{w.session, other} {
		l, err := session.Lease(ctx, o)
		if err != nil {
			t.Fatal(err)
		}
		for i := range o.Workers {
			got := numbers(t, l, i, "child")
			if seen[got[0]] || got[0] == 0 || got[1] != got[0] || got[2] != 2 || got[3] != 1 {
				t.Errorf("worker %d: number %d and %d, its functions were called as number %d and %d", i, got[0], got[1], got[2], got[3])
			}
			seen[got[0]] = true
			if made := useSeed(t, l, i, 1); token != 0 && made != token {
				t.Error("the setup function was executed again")
			} else {
				token = made
			}
		}
		release(t, l)
	}
	if d, err := opened.Info(ctx); err != nil || d.Children != 6 {
		t.Errorf("%d children, %v", d.Children, err)
	}
	if err := opened.Release(); err != nil {
		t.Error(err)
	}
	if _, err := s.Info(ctx); err != nil {
		t.Errorf("releasing an opened seed has withdrawn it: %v", err)
	}
	if err := s.Release(); err != nil {
		t.Error(err)
	}
	if _, err := other.OpenSeed(ctx, s.Name()); !errors.Is(err, client.ErrLease) || !strings.Contains(err.Error(), "released") {
		t.Errorf("a released seed: %v", err)
	}
}

// useTableless returns how many calls a worker without a table has executed before.
func useTableless(t testing.TB, l *client.Lease) uint32 { return numbers(t, l, 0, "child")[2] }

// A lease that was opened with a seed keeps it when the seed is released. A later lease of a program that has the handle's description makes it again. Errors name what is wrong.
func TestNamedSeedEnds(t *testing.T) {
	w, o := newSeedWorld(t, "", 1)
	o.Seed, o.InitFunction, o.InitPayload = false, "", nil
	ctx := context.Background()
	maker := w.lease(t, o)
	s, err := maker.CreateSeed(ctx, "prepare", []byte("-"), client.SeedOptions{Name: "table"})
	if err != nil {
		t.Fatal(err)
	}
	opened, err := w.session.OpenSeed(ctx, s.Name())
	if err != nil {
		t.Fatal(err)
	}
	named := o
	named.SeedName = s.Name()
	l := w.lease(t, named)
	token := useSeed(t, l, 0, 1)
	if err := s.Release(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Worker(0).Invoke(ctx, function(t, l, "end"), nil, nil); !errors.Is(err, client.ErrConnection) {
		t.Errorf("end: %v", err)
	}
	if got := useSeed(t, l, 0, 1); got != token {
		t.Error("a replacement did not start from the lease's seed")
	}
	release(t, l)
	if got := useSeed(t, w.lease(t, named), 0, 1); got == token {
		t.Error("a seed that was released is still used")
	}
	if err := opened.Release(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(o *client.LeaseOptions){
		"has no seed table": func(*client.LeaseOptions) {},
		"takes the place":   func(o *client.LeaseOptions) { o.InitFunction = "prepare" },
		"NAME:VERSION@":     func(o *client.LeaseOptions) { o.SeedName = "table" },
	} {
		o := named
		change(&o)
		if _, err := w.session.Lease(ctx, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for want, way := range map[string]string{"has left 1 threads": "t", "on purpose": "f", "killed": "k"} {
		if _, err := maker.CreateSeed(ctx, "prepare", []byte(way), client.SeedOptions{Name: "table"}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("way %s: %v, want %q", way, err, want)
		}
	}
	if _, err := maker.CreateSeed(ctx, "none", nil, client.SeedOptions{Name: "table"}); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("a missing function: %v", err)
	}
	if _, err := maker.CreateSeed(ctx, "prepare", []byte("-"), client.SeedOptions{Name: "a/b"}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a malformed name: %v", err)
	}
}

// An executor that hands over to another program keeps its seeds: workers of an open lease are replaced from theirs, and a lease finds a named one.
func TestHandoverKeepsSeeds(t *testing.T) {
	w, o := newSeedWorld(t, "-", 1)
	plain := o
	plain.Seed, plain.InitFunction, plain.InitPayload = false, "", nil
	ctx := context.Background()
	maker := w.lease(t, plain)
	s, err := maker.CreateSeed(ctx, "prepare_children", []byte("-"), client.SeedOptions{Name: "table"})
	if err != nil {
		t.Fatal(err)
	}
	release(t, maker)
	l := w.lease(t, o)
	token := useSeed(t, l, 0, 1)
	named := plain
	named.SeedName, named.SeedRequired = s.Name(), true
	first := w.lease(t, named)
	made := useSeed(t, first, 0, 1)
	release(t, first)
	w.handOver(t)
	useSeed(t, l, 0, 2)
	if _, err := l.Worker(0).Invoke(ctx, function(t, l, "end"), nil, nil); !errors.Is(err, client.ErrConnection) {
		t.Errorf("end: %v", err)
	}
	if got := useSeed(t, l, 0, 1); got != token {
		t.Error("a replacement did not start from the seed of the lease")
	}
	second := w.lease(t, named)
	if got := useSeed(t, second, 0, 1); got != made {
		t.Error("the named seed was made again")
	}
	if n := numbers(t, second, 0, "child")[0]; n != 2 {
		t.Errorf("the second worker of the named seed has number %d", n)
	}
	if d, err := s.Info(ctx); err != nil || d.Children != 2 {
		t.Errorf("%+v, %v", d, err)
	}
	if err := s.Release(); err != nil {
		t.Error(err)
	}
}

package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

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

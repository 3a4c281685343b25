package client_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// seedCluster starts a manager and executors of one core each, the first of them on this node, and returns a session and the options of a lease whose
// init call makes a seed. more has further arguments of executors.
func seedCluster(t *testing.T, executors int, more ...[]string) (nodes []*daemon, s *client.Session, o client.LeaseOptions) {
	t.Helper()
	leakcheck.Once(t, objects)
	secret := secretFile(t)
	manager := start(t, managerProgram, secret, "--heartbeat", "250ms")
	for i := range executors {
		args := []string{"--cores", "1", "--providers", provider(), "--grace", "1s", "--manager", manager.Address}
		if i == 0 {
			args = append(args, onThisNode)
		}
		if i < len(more) {
			args = append(args, more[i]...)
		}
		nodes = append(nodes, start(t, "bin/executor", secret, args...).joined(t))
	}
	w := &world{daemon: manager, secret: secret}
	return nodes, w.connect(t, client.Options{Manager: manager.Address}), client.LeaseOptions{Library: compile(t, "seeded.so", "", "testdata/seeded.c", "-std=gnu11",
		"-D_GNU_SOURCE", "-pthread", "-O2", "-Wall", "-Werror", "-I../worker"), Workers: 1, InitFunction: "prepare", InitPayload: []byte("-"), SeedRequired: true, Memory: 64 << 20}
}

// leaseAt leases at one executor. It returns the number that the init call of its worker has chosen.
func leaseAt(t *testing.T, s *client.Session, o client.LeaseOptions, at *daemon) (*client.Lease, uint32) {
	t.Helper()
	o.Executor = at.Address
	l, err := s.Lease(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if steps := l.Worker(0).StartSteps(); steps.Start != client.StartSeeded {
		t.Fatalf("%v start: %s", steps.Start, steps.Unseeded)
	}
	return l, useSeed(t, l, 0, 1)
}

// The init call of a lease across executors is made once. The other executors copy the seed, also from each other, and keep it.
func TestSeedIsCopied(t *testing.T) {
	nodes, s, o := seedCluster(t, 4)
	o.Workers = len(nodes)
	g, err := s.LeaseAcross(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	once := useSeed(t, g.Leases()[0], 0, 1)
	if len(g.Leases()) != len(nodes) {
		t.Fatalf("%d leases", len(g.Leases()))
	}
	for i, l := range g.Leases()[1:] {
		if steps := l.Worker(0).StartSteps(); steps.Start != client.StartSeeded {
			t.Fatalf("executor %d: %v start: %s", i+1, steps.Start, steps.Unseeded)
		}
		if useSeed(t, l, 0, 1) != once {
			t.Errorf("executor %d has made the init call again", i+1)
		}
		if useSeed(t, l, 0, 2) != once {
			t.Errorf("executor %d: the second call", i+1)
		}
	}
	if err := g.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.Workers = 1
	for i, n := range nodes {
		l, token := leaseAt(t, s, o, n)
		if token != once {
			t.Errorf("executor %d has not kept the seed", i)
		}
		release(t, l)
	}
}

// If the executors that have a seed are gone, the init call is made again.
func TestSeedSourceIsGone(t *testing.T) {
	nodes, s, o := seedCluster(t, 3)
	first, once := leaseAt(t, s, o, nodes[0])
	nodes[0].signal(syscall.SIGKILL)
	ends(t, "the executor", nodes[0].done)
	_, token := leaseAt(t, s, o, nodes[1])
	if token == once {
		t.Error("a seed was copied from an executor that is gone")
	}
	if _, again := leaseAt(t, s, o, nodes[2]); again != token {
		t.Error("the seed was not copied from the executor that has made it anew")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := first.Release(ctx); err != nil && !errors.Is(err, client.ErrConnection) && !errors.Is(err, client.ErrLease) {
		t.Error(err)
	}
}

// peek returns the sum of some bytes of the table in worker 0: `count` of them, from one on, with a distance of `step`.
func peek(t *testing.T, l *client.Lease, from, step, count uint32) (err error) {
	t.Helper()
	out, want := make([]byte, 8), uint32(0)
	for i := range count {
		want += uint32(uint8((from + i*step) * 7))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	in := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, from), step), count)
	if _, err = l.Worker(0).Invoke(ctx, function(t, l, "peek"), in, out); err == nil && binary.LittleEndian.Uint32(out) != want {
		t.Errorf("%d bytes from %d on: the sum is %d, want %d", count, from, binary.LittleEndian.Uint32(out), want)
	}
	return err
}

// An executor whose source is killed reads the pages that are missing from another executor that has the seed. If there is none, the call fails with an error that names the
// cause, and the next worker starts without the seed's pages.
func TestSeedSecondSource(t *testing.T) {
	device, err := os.OpenFile("/dev/userfaultfd", os.O_RDWR, 0)
	if err != nil {
		testkit.Lacks(t, "memory of workers cannot be filled on demand: %v", err)
	}
	device.Close()
	t.Setenv("RFAAS_TEST_PROVIDER", "tcp") // on shm, the memory of a process that was killed can be read for a while
	nodes, s, o := seedCluster(t, 3, nil, nil, []string{"--seed-fill", "touched"})
	o.SeedRequired, o.Seed = false, true
	_, once := leaseAt(t, s, o, nodes[0])
	o2 := o
	o2.Executor = nodes[2].Address
	l, err := s.Lease(t.Context(), o2)
	if err != nil {
		t.Fatal(err)
	}
	if steps := l.Worker(0).StartSteps(); steps.Start != client.StartSeeded {
		t.Fatalf("%v start: %s", steps.Start, steps.Unseeded)
	}
	if err := peek(t, l, 0, 4096, 100); err != nil {
		t.Fatal(err)
	}
	if _, token := leaseAt(t, s, o, nodes[1]); token != once {
		t.Error("the init call was made again")
	}
	nodes[0].signal(syscall.SIGKILL)
	ends(t, "the first source", nodes[0].done)
	if err := peek(t, l, 1<<20, 4096, 500); err != nil {
		t.Errorf("after the first source was killed: %v", err)
	}
	nodes[1].signal(syscall.SIGKILL)
	ends(t, "the second source", nodes[1].done)
	if err := peek(t, l, 1<<20, 4096, 600); err == nil || !strings.Contains(err.Error(), "lost the pages of its seed") {
		t.Errorf("after the second source was killed: %v", err)
	}
}

// If the source is killed while the rest of a seed travels, every call has the right result or an error that names the cause.
func TestSeedSourceKilled(t *testing.T) {
	t.Setenv("RFAAS_TEST_PROVIDER", "tcp")
	nodes, s, o := seedCluster(t, 2)
	o.SeedRequired, o.Seed = false, true
	leaseAt(t, s, o, nodes[0])
	o.Executor = nodes[1].Address
	l, err := s.Lease(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	nodes[0].signal(syscall.SIGKILL)
	if err := peek(t, l, 0, 1, 8<<20); err != nil && !strings.Contains(err.Error(), "lost the pages of its seed") {
		t.Error(err)
	}
	ends(t, "the source", nodes[0].done)
	if err := peek(t, l, 0, 1, 8<<20); err != nil && !strings.Contains(err.Error(), "lost the pages of its seed") {
		t.Error(err)
	}
}

// Workers of other executors start from a named seed, which these copy from the one that has made it. No other program has used the seed.
func TestNamedSeedIsCopied(t *testing.T) {
	nodes, s, o := seedCluster(t, 2)
	named := o
	named.InitFunction, named.InitPayload, named.SeedRequired = "", nil, false
	maker := named
	maker.Executor = nodes[0].Address
	l, err := s.Lease(t.Context(), maker)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := l.CreateSeed(t.Context(), "prepare", []byte("-"), client.SeedOptions{Name: "table"})
	if err != nil {
		t.Fatal(err)
	}
	release(t, l)
	named.SeedName, named.SeedRequired = seed.Name(), true
	l, there := leaseAt(t, s, named, nodes[1])
	if _, here := leaseAt(t, s, named, nodes[0]); here != there {
		t.Error("the setup function was executed again")
	}
	release(t, l)
	// The executor that has made the seed is asked first. Its only core is taken, so the other one serves the lease.
	if l, err = s.Lease(t.Context(), named); err != nil {
		t.Fatal(err)
	}
	if useSeed(t, l, 0, 1) != there {
		t.Error("the setup function was executed again")
	}
	release(t, l)
}

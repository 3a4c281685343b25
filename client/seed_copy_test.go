package client_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// seedCluster starts a manager and executors of one core each, the first of them on this node, and returns a session and the options of a lease whose
// init call makes a seed.
func seedCluster(t *testing.T, executors int) (nodes []*daemon, s *client.Session, o client.LeaseOptions) {
	t.Helper()
	checkLeaks(t)
	secret := secretFile(t)
	manager := start(t, managerProgram, secret, "--heartbeat", "250ms")
	for i := range executors {
		args := []string{"--cores", "1", "--providers", provider(), "--grace", "1s", "--manager", manager.Address}
		if i == 0 {
			args = append(args, onThisNode)
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

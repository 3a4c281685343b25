package client_test

import (
	"bytes"
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Workers of a seed that another executor has copied answer like workers of the executor that has made it, and like a worker that has made the init call itself.
// The libraries are those of testkit.SeedStates.
func TestSeedStatesAreCopied(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "web")
	nodes, s, o := seedCluster(t, 2, nil, []string{"--http-listen", "unix:" + socket})
	o.InitFunction, o.InitPayload, o.Memory = "setup", nil, 256<<20
	for _, name := range testkit.SeedStates {
		t.Run(name, func(t *testing.T) {
			o := o
			o.Library = testkit.SeedLibrary(t, root, name)
			var want [3]string
			for i, at := range []*daemon{nodes[0], nodes[0], nodes[1]} {
				o.Executor, o.SeedRequired = at.Address, i > 0
				l, err := s.Lease(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				if seeded := l.Worker(0).StartSteps().Start == client.StartSeeded; seeded != o.SeedRequired {
					t.Errorf("worker %d: seeded %v", i, seeded)
				}
				for n := range want {
					out := make([]byte, 4096)
					size, err := l.Worker(0).Invoke(context.Background(), function(t, l, "query"), nil, out)
					if err != nil {
						t.Fatal(err)
					}
					if got := string(bytes.TrimRight(out[:size], "\x00")); i == 0 {
						want[n] = got
					} else if got != want[n] || got == "" {
						t.Errorf("worker %d, call %d: %q, want %q", i, n, got, want[n])
					}
				}
				release(t, l)
			}
		})
	}
	if got, want := testkit.Metric(t, socket, `rfaas_executor_seeds_total{result="copied"}`), "6"; got != want {
		t.Errorf("the second executor has copied %s seeds, want %s", got, want)
	}
}

// The setup function is executed once in a cluster. On each node, 8 workers share its table, also if the node has copied the seed.
func TestSeedTableIsShared(t *testing.T) {
	const workers, whole = 8, 8 << 10 // KiB
	sockets := []string{filepath.Join(t.TempDir(), "web"), filepath.Join(t.TempDir(), "web")}
	var more [][]string
	for _, s := range sockets {
		more = append(more, []string{"--share-cores", "8", "--http-listen", "unix:" + s})
	}
	nodes, s, o := seedCluster(t, 2, more...)
	o.Workers = workers
	var once uint32
	for i, n := range nodes {
		began := time.Now()
		l, token := leaseAt(t, s, o, n)
		t.Logf("executor %d: %v from the request to the first result", i, time.Since(began))
		if once == 0 {
			once = token
		}
		var sum uint32
		for w := range workers {
			if w > 0 {
				token = useSeed(t, l, w, 1)
			}
			if token != once {
				t.Errorf("executor %d, worker %d: the setup function was executed again", i, w)
			}
		}
		for w := range workers {
			sum += numbers(t, l, w, "share")[0]
		}
		if sum > whole+whole/4 {
			t.Errorf("executor %d: the workers have %d KiB of a table of %d KiB", i, sum, whole)
		}
		release(t, l)
	}
	for i, want := range []string{"made", "copied"} {
		for _, result := range []string{"made", "copied", "refused", "failed"} {
			n := testkit.Metric(t, sockets[i], `rfaas_executor_seeds_total{result="`+result+`"}`)
			if (n == "1") != (result == want) {
				t.Errorf("executor %d has %q seeds that were %s", i, n, result)
			}
		}
	}
}

package client_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// middle is the median.
func middle(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// TestSeedFigures prints what seeds cost: making one of 1, 100 and 1000 MB beside copying as much, starting from one beside a pooled start, memory, and starts per second. It
// judges nothing.
func TestSeedFigures(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	w, o := newSeedWorld(t, "", 1)
	o.Seed, o.InitFunction, o.InitPayload = false, "", nil
	ctx := context.Background()
	open := func(o client.LeaseOptions) (*client.Lease, time.Duration) {
		began := time.Now()
		l := w.lease(t, o)
		if _, err := l.Worker(0).Invoke(ctx, function(t, l, "memory"), nil, make([]byte, 12)); err != nil {
			t.Fatal(err)
		}
		return l, time.Since(began)
	}
	for _, mb := range []uint32{1, 100, 1000} {
		o.Memory = uint64(mb)*1_000_000 + 64<<20
		var capture, copying, seeded, pooled, apply, load []time.Duration
		var s *client.Seed
		from := bytes.Repeat([]byte{1, 2, 3, 4}, int(mb)*250_000)
		for range 5 {
			maker := w.lease(t, o)
			var err error
			if s, err = maker.CreateSeed(ctx, "prepare_mb", binary.LittleEndian.AppendUint32(nil, mb), client.SeedOptions{Name: "figures"}); err != nil {
				t.Fatal(err)
			}
			release(t, maker)
			d, err := s.Info(ctx)
			if err != nil {
				t.Fatal(err)
			}
			capture = append(capture, d.Capture)
			to := make([]byte, len(from))
			copy(to, from) // so that its pages exist
			began := time.Now()
			copy(to, from)
			copying = append(copying, time.Since(began))
			if len(capture) < 5 {
				if err := s.Release(); err != nil {
					t.Fatal(err)
				}
			}
		}
		named := o
		named.SeedName, named.SeedRequired = s.Name(), true
		for range 15 {
			l, took := open(named)
			seeded, apply = append(seeded, took), append(apply, l.Worker(0).StartSteps().Code)
			release(t, l)
			plain := o
			plain.Memory++ // no cached worker has these terms
			o.Memory++
			l, took = open(plain)
			if steps := l.Worker(0).StartSteps(); steps.Start == client.StartPooled {
				pooled, load = append(pooled, took), append(load, steps.Code)
			}
			release(t, l)
		}
		fmt.Printf("%4d MB: capture %v (copying as much %v); lease to first result: seeded %v, pooled %v; library and seed %v, library only %v\n", mb, middle(capture), middle(copying),
			middle(seeded), middle(append(pooled, 0)), middle(apply), middle(append(load, 0)))
		named.Workers = 8
		l := w.lease(t, named)
		var shared, own, channel []time.Duration
		for i := range 8 {
			got := numbers(t, l, i, "memory")
			shared, own, channel = append(shared, time.Duration(got[0]-got[1]-got[2])), append(own, time.Duration(got[1])), append(channel, time.Duration(got[2]))
		}
		release(t, l)
		fmt.Printf("         8 workers that touch nothing: PSS of one %d KiB, beside %d KiB written and %d KiB of its channel\n", middle(shared), middle(own), middle(channel))
		began, starts := time.Now(), 0
		for time.Since(began) < 3*time.Second {
			release(t, w.lease(t, named))
			starts += 8
		}
		fmt.Printf("         leases of 8 workers one after the other: %.0f starts a second\n", float64(starts)/time.Since(began).Seconds())
		if err := s.Release(); err != nil {
			t.Fatal(err)
		}
	}
	o.Memory = 64 << 20
	o.Workers = 8
	began, starts := time.Now(), 0
	for time.Since(began) < 3*time.Second {
		o.Memory++
		release(t, w.lease(t, o))
		starts += 8
	}
	fmt.Printf("without a seed: %.0f starts a second\n", float64(starts)/time.Since(began).Seconds())
}

// TestSeedCopyFigures prints how long a lease takes from its request to the first result where the executor copies its named seed from another executor, beside a lease
// there when it has the seed. It judges nothing.
func TestSeedCopyFigures(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	nodes, s, o := seedCluster(t, 2)
	ctx := context.Background()
	o.InitFunction, o.InitPayload, o.SeedRequired = "", nil, false
	for _, mb := range []uint32{1, 5, 20, 100} {
		var steps []client.StartSteps
		o.Memory = uint64(mb)*1_000_000 + 64<<20
		open := func(name string, at int) time.Duration {
			to := o
			to.Executor, to.SeedName, to.SeedRequired = nodes[at].Address, name, name != ""
			began := time.Now()
			l, err := s.Lease(ctx, to)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.Worker(0).Invoke(ctx, function(t, l, "memory"), nil, make([]byte, 12)); err != nil {
				t.Fatal(err)
			}
			took := time.Since(began)
			steps = append(steps, l.Worker(0).StartSteps())
			release(t, l)
			return took
		}
		var copied, warm []time.Duration
		for range 9 {
			maker := o
			maker.Executor = nodes[0].Address
			l, err := s.Lease(ctx, maker)
			if err != nil {
				t.Fatal(err)
			}
			seed, err := l.CreateSeed(ctx, "prepare_mb", binary.LittleEndian.AppendUint32(nil, mb), client.SeedOptions{Name: "figures"})
			if err != nil {
				t.Fatal(err)
			}
			release(t, l)
			open("", 1) // so that it has the library
			copied = append(copied, open(seed.Name(), 1))
			steps = nil
			for range 3 {
				warm = append(warm, open(seed.Name(), 1))
			}
			if err := seed.Release(); err != nil {
				t.Fatal(err)
			}
		}
		fmt.Printf("%4d MB: lease to first result: copied %v, warm %v: %.1f times\n", mb, middle(copied), middle(warm), float64(middle(copied))/float64(middle(warm)))
		for _, x := range steps {
			fmt.Printf("         a warm one: %+v\n", x)
		}
	}
}

// TestSeedTouchedFigures prints how long it takes until a function has read 1 % of a seed of 100 MB on another node, and what the executor there has read meanwhile, for both values of
// seed-fill, beside reading all of the seed. It judges nothing.
func TestSeedTouchedFigures(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	const mb, rounds = 100, 7
	dir := t.TempDir()
	web := func(i int) string { return fmt.Sprintf("unix:%s/%d", dir, i) }
	var more [][]string
	for i, fill := range []string{"all", "all", "touched", "touched"} {
		more = append(more, []string{"--seed-fill", fill, "--http-listen", web(i)})
	}
	nodes, s, o := seedCluster(t, len(more), more...)
	ctx := context.Background()
	o.InitFunction, o.InitPayload, o.SeedRequired = "", nil, false
	o.Memory = mb*1_000_000 + 64<<20
	at := func(i int, name string) *client.Lease {
		to := o
		to.Executor, to.SeedName, to.SeedRequired = nodes[i].Address, name, name != ""
		l, err := s.Lease(ctx, to)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	type figure struct {
		took  []time.Duration
		bytes []float64
	}
	shapes := map[string][3]uint32{"1 % in sequence": {10_000_000, 4096, 244}, "1 % scattered": {0, 409_600, 244}, "all": {0, 4096, mb * 1_000_000 / 4096}}
	for _, what := range []string{"1 % in sequence", "1 % scattered", "all"} {
		shape := shapes[what]
		figures := make([]figure, len(nodes))
		for range rounds {
			maker := at(0, "")
			seed, err := maker.CreateSeed(ctx, "prepare_mb", binary.LittleEndian.AppendUint32(nil, mb), client.SeedOptions{Name: "figures"})
			if err != nil {
				t.Fatal(err)
			}
			release(t, maker)
			for i := 1; i < len(nodes); i++ {
				release(t, at(i, "")) // so that it has the library
				before, began := fetched(t, web(i)), time.Now()
				l := at(i, seed.Name())
				in := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, shape[0]), shape[1]), shape[2])
				if _, err := l.Worker(0).Invoke(ctx, function(t, l, "peek"), in, make([]byte, 4)); err != nil {
					t.Fatal(err)
				}
				f := &figures[i]
				f.took, f.bytes = append(f.took, time.Since(began)), append(f.bytes, fetched(t, web(i))-before)
				time.Sleep(300 * time.Millisecond) // so that the source knows the touched pages
				release(t, l)
			}
			if err := seed.Release(); err != nil {
				t.Fatal(err)
			}
		}
		for i, name := range []string{"all", "touched", "touched, recorded"} {
			f := figures[i+1]
			slices.Sort(f.bytes)
			n := f.bytes[len(f.bytes)/2]
			fmt.Printf("%-16s seed-fill=%-18s lease to first result %8v, then %6.2f MB read, %.2f times the %d touched pages\n", what, name, middle(f.took).Round(100*time.Microsecond), n/1e6,
				n/float64(shape[2]*4096), shape[2])
		}
	}
}

// fetched returns what an executor has read from others, in bytes.
func fetched(t *testing.T, web string) (n float64) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(web, "unix:"))
	}}}
	r, err := c.Get("http://executor/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	for s := bufio.NewScanner(r.Body); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "rfaas_executor_fetched_bytes_total "); ok {
			n, _ = strconv.ParseFloat(rest, 64)
		}
	}
	return n
}

// TestSeedTableFigures prints what a lease that maps 100 MB of a seed and reads them takes, beside a lease to which the same bytes are sent as a payload: on the executor that has made
// the seed, on another one that copies it first, and there once more. It judges nothing.
func TestSeedTableFigures(t *testing.T) {
	if os.Getenv("RFAAS_TEST_FIGURES") == "" {
		t.Skip("RFAAS_TEST_FIGURES is not set")
	}
	const mb, nodes = 100, 1000
	all, s, _ := seedCluster(t, 2)
	payload, answer := bytes.Repeat([]byte{7}, mb*1_000_000), make([]byte, 24)
	memory := uint64(512 << 20)
	lease := func(at *daemon, name string, in []byte) time.Duration {
		t.Helper()
		memory++ // no cached worker has these terms
		began := time.Now()
		l, err := s.Lease(t.Context(), client.LeaseOptions{Library: mappedLibrary(t, "uses"), Executor: at.Address, Bulk: int64(len(in)), Memory: memory})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Worker(0).Invoke(t.Context(), function(t, l, name), in, answer); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		release(t, l)
		return took
	}
	mappedLibrary(t, "uses")
	var here, there, again, sentHere, sentThere []time.Duration
	for range 7 {
		seed, err := makeTree(t, s, all[0].Address, "prepare", treeOf(nodes, mb))
		if err != nil {
			t.Fatal(err)
		}
		sentHere, sentThere = append(sentHere, lease(all[0], "payload", payload)), append(sentThere, lease(all[1], "payload", payload))
		if err := s.PutTableSeed(t.Context(), "tree", seed.Name()); err != nil {
			t.Fatal(err)
		}
		here, there = append(here, lease(all[0], "walk", nil)), append(there, lease(all[1], "walk", nil))
		again = append(again, lease(all[1], "walk", nil))
		if err := errors.Join(s.DropTable("tree"), seed.Release()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d MB over %s, lease and call: mapped %v, sent %v; on the other executor mapped with the copy %v, mapped again %v, sent %v", mb, provider(), middle(here), middle(sentHere), middle(there),
		middle(again), middle(sentThere))
}

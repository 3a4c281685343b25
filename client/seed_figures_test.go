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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// middle is the median.
func middle(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)/2]
}

// ms is the median in ms.
func ms(all []time.Duration) float64 {
	if len(all) == 0 {
		return 0
	}
	return float64(middle(all).Nanoseconds()) / 1e6
}

// TestSeedFigures prints what seeds cost: making one of 1, 100 and 1000 MB beside copying as much, starting from one beside a pooled start, memory, and starts per second. It
// judges nothing.
func TestSeedFigures(t *testing.T) {
	testkit.Figures(t)
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
	var rates []float64
	prepare := map[uint32]float64{1: 0.5, 100: 15, 1000: 150}
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
		size := fmt.Sprintf("%d MB: ", mb)
		floor := fmt.Sprintf("library only: %.2f ms; from a lease to its first result: seeded %v, pooled %v", ms(load), middle(seeded), middle(append(pooled, 0)))
		testkit.Figure(size+"capture", ms(capture), prepare[mb], false, "ms", fmt.Sprintf("copying as much: %.2f ms", ms(copying)))
		testkit.Figure(size+"a C library and its seed", ms(apply), 3, false, "ms", floor)
		testkit.Figure(size+"overlay", ms(apply)-ms(load), 0.1, false, "ms", "the difference between the two")
		named.Workers = 8
		l := w.lease(t, named)
		var shared, own, channel []time.Duration
		for i := range 8 {
			got := numbers(t, l, i, "memory")
			shared, own, channel = append(shared, time.Duration(got[0]-got[1]-got[2])), append(own, time.Duration(got[1])), append(channel, time.Duration(got[2]))
		}
		release(t, l)
		testkit.Figure(size+"memory of a worker that touches nothing (PSS), one of 8", float64(middle(shared)), 128, false, "KiB", fmt.Sprintf("it has written %d KiB, and has %d KiB of its channel", middle(own), middle(channel)))
		began, starts := time.Now(), 0
		for time.Since(began) < 3*time.Second {
			release(t, w.lease(t, named))
			starts += 8
		}
		rates = append(rates, float64(starts)/time.Since(began).Seconds())
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
	testkit.Figure("starts with the sandbox, in leases of 8 workers, 1 MB", rates[0], 4000, true, "a second",
		fmt.Sprintf("100 MB: %.0f, 1 GB: %.0f, without a seed: %.0f", rates[1], rates[2], float64(starts)/time.Since(began).Seconds()))
}

// TestSeedCopyFigures prints how long a lease takes from its request to the first result where the executor copies its named seed from another executor, beside a lease
// there when it has the seed. It judges nothing.
func TestSeedCopyFigures(t *testing.T) {
	testkit.Figures(t)
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
		testkit.Figure(fmt.Sprintf("%d MB over %s: a lease whose executor copies the seed first, to its first result", mb, provider()), ms(copied)/ms(warm), 2, false, "times a later lease there",
			fmt.Sprintf("%.1f and %.1f ms; a later one: code %v, sandbox %v, connect %v", ms(copied), ms(warm), steps[0].Code, steps[0].Sandbox, steps[0].Connect))
	}
}

// TestSeedTouchedFigures prints how long it takes until a function has read 1 % of a seed of 100 MB on another node, and what the executor there has read meanwhile, for both values of
// seed-fill, beside a lease to which all bytes are sent. It judges nothing.
func TestSeedTouchedFigures(t *testing.T) {
	testkit.Figures(t)
	const mb, rounds, pages = 100, 7, 244
	dir := t.TempDir()
	web := func(i int) string { return fmt.Sprintf("unix:%s/%d", dir, i) }
	fills := []string{"all", "all", "touched"}
	var more [][]string
	for i, fill := range fills {
		more = append(more, []string{"--seed-fill", fill, "--http-listen", web(i)})
	}
	nodes, s, o := seedCluster(t, len(more), more...)
	ctx := context.Background()
	o.InitFunction, o.InitPayload, o.SeedRequired = "", nil, false
	o.Memory = 3*mb*1_000_000 + 64<<20
	at := func(i int, change func(*client.LeaseOptions)) *client.Lease {
		to := o
		to.Executor = nodes[i].Address
		change(&to)
		l, err := s.Lease(ctx, to)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	call := func(l *client.Lease, name string, in []byte) {
		if _, err := l.Worker(0).Invoke(ctx, function(t, l, name), in, make([]byte, 12)); err != nil {
			t.Fatal(err)
		}
	}
	plain := func(*client.LeaseOptions) {}
	payload := bytes.Repeat([]byte{7}, mb*1_000_000)
	for what, shape := range map[string][2]uint32{"in sequence": {10_000_000, 4096}, "scattered": {0, 409_600}} {
		took, read, sent := make([][]time.Duration, len(nodes)), make([][]float64, len(nodes)), make([][]time.Duration, len(nodes))
		for range rounds {
			maker := at(0, plain)
			seed, err := maker.CreateSeed(ctx, "prepare_mb", binary.LittleEndian.AppendUint32(nil, mb), client.SeedOptions{Name: "figures"})
			if err != nil {
				t.Fatal(err)
			}
			release(t, maker)
			for i := 1; i < len(nodes); i++ {
				release(t, at(i, plain)) // so that it has the library
				before, began := fetched(t, web(i)), time.Now()
				l := at(i, func(o *client.LeaseOptions) { o.SeedName, o.SeedRequired = seed.Name(), true })
				call(l, "peek", binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, shape[0]), shape[1]), pages))
				took[i], read[i] = append(took[i], time.Since(began)), append(read[i], fetched(t, web(i))-before)
				release(t, l)
				began = time.Now()
				l = at(i, func(o *client.LeaseOptions) { o.Bulk = mb * 1_000_000 })
				call(l, "memory", payload)
				sent[i] = append(sent[i], time.Since(began))
				release(t, l)
			}
			if err := seed.Release(); err != nil {
				t.Fatal(err)
			}
		}
		for i := 1; i < len(nodes); i++ {
			slices.Sort(read[i])
			row := fmt.Sprintf("100 MB over %s, 1 %% touched, %s, seed-fill=%s: ", provider(), what, fills[i])
			testkit.Figure(row+"a lease there, to its first result", ms(took[i])/ms(sent[i]), 0.1, false, "times sending everything", fmt.Sprintf("%.1f and %.1f ms", ms(took[i]), ms(sent[i])))
			if fills[i] == "touched" { // the other executor also reads the rest
				testkit.Figure(row+"bytes read by then", read[i][rounds/2]/(mb*1e6), 0.1, false, "times the seed", fmt.Sprintf("%.2f MB, of which 1.00 MB are touched", read[i][rounds/2]/1e6))
			}
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
	testkit.Figures(t)
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
	for _, x := range []struct {
		where        string
		mapped, sent []time.Duration
	}{{"the executor that has made the seed", here, sentHere}, {"another executor, which copies the seed first", there, sentThere}, {"that executor once more", again, sentThere}} {
		testkit.Figure(fmt.Sprintf("%d MB over %s mapped as a table, lease and call at %s", mb, provider(), x.where), ms(x.mapped)/ms(x.sent), 1, false, "times sending them as a payload",
			fmt.Sprintf("%.1f and %.1f ms", ms(x.mapped), ms(x.sent)))
	}
}

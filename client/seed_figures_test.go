package client_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
		fmt.Sprintf("100 MB: %.0f, 1 GB: %.0f, without a seed: %.0f; fork of a process of that size: %s", rates[1], rates[2], float64(starts)/time.Since(began).Seconds(), testkit.ForkFloor(t, "../libexec/rfaas-bench-peer")))
}

// trial measures leases of a seedCluster. Its seeds are made at the first executor, and have a table of some MB.
type trial struct {
	t     *testing.T
	nodes []*daemon
	s     *client.Session
	o     client.LeaseOptions
	mb    uint32
	token map[string]uint32  // the number that the setup function of a seed has chosen, by the seed's name
	web   func(i int) string // address of an executor's metrics (metricsAt); nil: they cannot be read
}

func newTrial(t *testing.T, nodes []*daemon, s *client.Session, o client.LeaseOptions, mb uint32) *trial {
	o.InitFunction, o.InitPayload, o.SeedRequired, o.Memory = "", nil, false, uint64(mb)*1_000_000+64<<20
	return &trial{t: t, nodes: nodes, s: s, o: o, mb: mb, token: map[string]uint32{}}
}

func (r *trial) lease(at int, change func(*client.LeaseOptions)) *client.Lease {
	r.t.Helper()
	o := r.o
	o.Executor = r.nodes[at].Address
	change(&o)
	l, err := r.s.Lease(context.Background(), o)
	if err != nil {
		r.t.Fatal(err)
	}
	return l
}

func plain(*client.LeaseOptions) {}

func (r *trial) makeSeed() *client.Seed {
	r.t.Helper()
	l := r.lease(0, plain)
	seed, err := l.CreateSeed(context.Background(), "prepare_mb", binary.LittleEndian.AppendUint32(nil, r.mb), client.SeedOptions{Name: "figures"})
	if err != nil {
		r.t.Fatal(err)
	}
	release(r.t, l)
	return seed
}

// part is some bytes of the table: count bytes, the first one at from, at distances of step. If wrap is not 0, they are the bytes from + i*i*step modulo wrap.
type part struct{ from, step, count, wrap uint32 }

// at returns the place of a byte.
func (p part) at(i uint64) uint64 {
	if p.wrap != 0 {
		return uint64(p.from) + i*i*uint64(p.step)%uint64(p.wrap)
	}
	return uint64(p.from) + i*uint64(p.step)
}

// peek reads a part of the table in a worker, and checks it. All workers must have the table of one call of the setup function.
func (r *trial) peek(l *client.Lease, worker int, seed *client.Seed, p part) {
	r.t.Helper()
	in, out, want := []byte(nil), make([]byte, 8), uint32(0)
	for _, n := range []uint32{p.from, p.step, p.count, p.wrap} {
		in = binary.LittleEndian.AppendUint32(in, n)
	}
	if _, err := l.Worker(worker).Invoke(context.Background(), function(r.t, l, "peek"), in, out); err != nil {
		r.t.Fatal(err)
	}
	for i := range p.count {
		at := p.at(uint64(i))
		want += uint32(uint8(at &^ 7 * 0x9e3779b97f4a7c15 >> (8 * (at & 7))))
	}
	sum, token := binary.LittleEndian.Uint32(out), binary.LittleEndian.Uint32(out[4:])
	if once, known := r.token[seed.Name()]; known && token != once {
		r.t.Errorf("worker %d: the setup function was executed again", worker)
	}
	r.token[seed.Name()] = token
	if sum != want {
		r.t.Errorf("worker %d: %+v of %d MB: the sum is %d, want %d", worker, p, r.mb, sum, want)
	}
}

// seeded returns how long an executor's lease with the seed takes, from its request until each of its workers has read a part of the table.
func (r *trial) seeded(at int, seed *client.Seed, p part) (took time.Duration, steps client.StartSteps) {
	r.t.Helper()
	began := time.Now()
	l := r.lease(at, func(o *client.LeaseOptions) { o.SeedName, o.SeedRequired = seed.Name(), true })
	for i := range r.o.Workers {
		r.peek(l, i, seed, p)
	}
	took, steps = time.Since(began), l.Worker(0).StartSteps()
	release(r.t, l)
	return took, steps
}

// sent returns how long a lease without a seed takes, from its request until one of its workers has received as many bytes as the table has, and the others have executed
// an empty call.
func (r *trial) sent(at int) (took time.Duration) {
	r.t.Helper()
	payload := bytes.Repeat([]byte{7}, int(r.mb)*1_000_000)
	began := time.Now()
	l := r.lease(at, func(o *client.LeaseOptions) { o.Bulk = int64(len(payload)) })
	for i := range r.o.Workers {
		if _, err := l.Worker(i).Invoke(context.Background(), function(r.t, l, "child"), payload, make([]byte, 16)); err != nil {
			r.t.Fatal(err)
		}
		payload = nil
	}
	took = time.Since(began)
	release(r.t, l)
	return took
}

// eight are the arguments of an executor that has a pooled worker at each lease of a trial. With one core, the pool is empty for 5 ms after a lease.
var eight = []string{"--share-cores", "8"}

// copies returns the times from the request to the first result of leases at the second executor: of one that copies the seed first, and of later ones, when all of the seed has
// arrived. The executor has the library.
func (r *trial) copies(rounds int) (copied, later []time.Duration, steps client.StartSteps) {
	r.t.Helper()
	first := part{0, 4096, 1, 0}
	for range rounds {
		seed := r.makeSeed()
		release(r.t, r.lease(1, plain))
		before := r.fetched(1)
		took, _ := r.seeded(1, seed, first)
		copied = append(copied, took)
		r.whole(1, before)
		for range 3 {
			took, steps = r.seeded(1, seed, first)
			later = append(later, took)
		}
		if err := seed.Release(); err != nil {
			r.t.Fatal(err)
		}
	}
	return copied, later, steps
}

// where says what lies between the executors of a seedCluster.
func where() string {
	switch {
	case far != "":
		return "between two machines over " + provider()
	case secondNode != "":
		return "between two nodes over " + provider()
	}
	return "over " + provider()
}

func (r *trial) copyFigure(rounds int) {
	r.t.Helper()
	copied, later, steps := r.copies(rounds)
	testkit.Figure(fmt.Sprintf("%d MB %s: a lease whose executor copies the seed first, to its first result", r.mb, where()), ms(copied)/ms(later), 2, false, "times a later lease there",
		fmt.Sprintf("%.1f and %.1f ms; a later one: code %v, sandbox %v, connect %v; %s", ms(copied), ms(later), steps.Code, steps.Sandbox, steps.Connect, r.bare(1, r.mb*1_000_000)))
}

// TestSeedCopyFigures prints how long a lease takes from its request to the first result where the executor copies its named seed from another executor, beside a lease
// there when it has the seed. It judges nothing.
func TestSeedCopyFigures(t *testing.T) {
	testkit.Figures(t)
	web := metricsAt(t)
	nodes, s, o := seedCluster(t, 2, eight, append([]string{"--http-listen", web(1)}, eight...))
	for _, mb := range []uint32{1, 5, 20, 100} {
		r := newTrial(t, nodes, s, o, mb)
		r.web = web
		r.copyFigure(9)
	}
}

// touched are three ways to touch 1 % of a table.
func (r *trial) touched() map[string]part {
	pages := r.mb * 1_000_000 / 4096
	prime := pages // modulo a prime, the squares of these numbers differ
	for !big.NewInt(int64(prime)).ProbablyPrime(0) {
		prime--
	}
	return map[string]part{"in sequence": {r.mb * 100_000, 4096, pages / 100, 0}, "at even distances": {0, 409_600, pages / 100, 0}, "scattered": {0, 97 * 4096, pages / 100, prime * 4096}}
}

// bare returns, for a lease at an executor that exists, how long an empty call takes, and a call to which some bytes are sent. No copy of a seed can be faster than sending its bytes.
func (r *trial) bare(at int, size uint32) string {
	r.t.Helper()
	l := r.lease(at, func(o *client.LeaseOptions) { o.Bulk, o.Memory = int64(size), o.Memory+2*uint64(size) })
	defer release(r.t, l)
	call := func(payload []byte) (took []time.Duration) {
		for range 7 {
			began := time.Now()
			if _, err := l.Worker(0).Invoke(context.Background(), function(r.t, l, "child"), payload, make([]byte, 16)); err != nil {
				r.t.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		return took
	}
	sent := call(make([]byte, size))
	return fmt.Sprintf("bare: an empty call %.3f ms, a call with %.3g MB %.2f ms, a fault on new memory %.2f us", ms(call(nil)), float64(size)/1e6, ms(sent), freshFault(r.t))
}

// freshFault returns how long the first access to a page of new memory takes, in us.
func freshFault(t *testing.T) float64 {
	t.Helper()
	const pages = 1024
	mem, err := unix.Mmap(-1, 0, pages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		err = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	}
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for i := range pages {
		mem[i*4096] = 1
	}
	took := time.Since(began)
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	return float64(took.Nanoseconds()) / 1e3 / pages
}

func (r *trial) touchFigure(at int, what, fill string, took, sent []time.Duration) string {
	r.t.Helper()
	row := fmt.Sprintf("%d MB %s, 1 %% touched, %s, seed-fill=%s: ", r.mb, where(), what, fill)
	testkit.Figure(row+"a lease there, to its first result", ms(took)/ms(sent), 0.1, false, "times sending everything", fmt.Sprintf("%.1f and %.1f ms; %s", ms(took), ms(sent), r.bare(at, r.mb*10_000)))
	return row
}

// TestSeedTouchedFigures prints how long it takes until a function has read 1 % of a seed of 100 MB on another node, and what the executor there has read meanwhile, for both values of
// seed-fill, beside a lease to which all bytes are sent. It judges nothing.
func TestSeedTouchedFigures(t *testing.T) {
	testkit.Figures(t)
	const rounds = 7
	web := metricsAt(t)
	fills := []string{"all", "all", "touched"}
	var more [][]string
	for i, fill := range fills {
		more = append(more, []string{"--seed-fill", fill, "--http-listen", web(i)})
	}
	nodes, s, o := seedCluster(t, len(more), more...)
	r := newTrial(t, nodes, s, o, 100)
	r.web = web
	r.o.Memory += 200_000_000 // the payload
	for what, p := range r.touched() {
		took, read, sent := make([][]time.Duration, len(nodes)), make([][]float64, len(nodes)), make([][]time.Duration, len(nodes))
		for range rounds {
			seed := r.makeSeed()
			for i := 1; i < len(nodes); i++ {
				release(t, r.lease(i, plain)) // so that it has the library
				before := r.fetched(i)
				d, _ := r.seeded(i, seed, p)
				took[i], read[i] = append(took[i], d), append(read[i], r.fetched(i)-before)
				if fills[i] == "all" {
					r.whole(i, before)
				}
				sent[i] = append(sent[i], r.sent(i))
			}
			if err := seed.Release(); err != nil {
				t.Fatal(err)
			}
		}
		for i := 1; i < len(nodes); i++ {
			slices.Sort(read[i])
			row := r.touchFigure(i, what, fills[i], took[i], sent[i])
			if fills[i] == "touched" { // the other executor also reads the rest
				testkit.Figure(row+"bytes read by then", read[i][rounds/2]/100e6, 0.1, false, "times the seed", fmt.Sprintf("%.2f MB, of which 1.00 MB are touched", read[i][rounds/2]/1e6))
			}
		}
	}
}

// metricsAt returns unix sockets on which executors of this machine can serve their metrics.
func metricsAt(t *testing.T) func(i int) string {
	dir := t.TempDir()
	return func(i int) string { return fmt.Sprintf("unix:%s/%d", dir, i) }
}

// fetched returns what an executor has read from others, in bytes.
func (r *trial) fetched(i int) (n float64) {
	r.t.Helper()
	if r.web == nil {
		return 0
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(r.web(i), "unix:"))
	}}}
	reply, err := c.Get("http://executor/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer reply.Body.Close()
	for s := bufio.NewScanner(reply.Body); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "rfaas_executor_fetched_bytes_total "); ok {
			n, _ = strconv.ParseFloat(rest, 64)
		}
	}
	return n
}

// whole waits until an executor that has begun to copy a seed has read all of its table. `before` is what it had read before. So the reading delays nothing that is measured later.
func (r *trial) whole(i int, before float64) {
	r.t.Helper()
	if r.web != nil {
		testkit.Eventually(r.t, "the rest of a seed arrives", func() bool { return r.fetched(i)-before >= float64(r.mb)*1e6 })
	}
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
	var here, there, again, sentHere, sentThere, copied []time.Duration
	to := bytes.Clone(payload)
	for range 7 {
		began := time.Now()
		copy(to, payload)
		copied = append(copied, time.Since(began))
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
			fmt.Sprintf("%.1f and %.1f ms; bare: copying them in memory %.1f ms", ms(x.mapped), ms(x.sent), ms(copied)))
	}
}

// A node that does not have a seed joins. The time from the request of a lease until its workers have read their table is compared with a lease without the seed, to which the
// table's bytes are sent. It must not be much longer. The setup function is executed once. Between two nodes or machines, the test also prints the figures that TestSeedCopyFigures
// and TestSeedTouchedFigures print for one node, from fewer rounds.
func TestSeedJoins(t *testing.T) {
	const most, slack = 12, 4
	table, large, workers, rounds := uint32(32), uint32(100), 8, 3
	switch published := os.Getenv("RFAAS_TEST_FIGURES") != ""; {
	case far != "" && published: // emulated machines, which read 8 MB a second
		table, large = 8, 20
	case far != "":
		table, large, workers, rounds = 2, 8, 2, 2
	case published:
		rounds = 7
	}
	there, web := eight, (func(int) string)(nil)
	if far == "" {
		web = metricsAt(t)
		there = append([]string{"--http-listen", web(1)}, eight...)
	}
	nodes, s, o := seedCluster(t, 2, eight, there)
	o.Workers = workers
	r := newTrial(t, nodes, s, o, table)
	r.web = web
	var joined, sent []time.Duration
	for i := range most {
		seed := r.makeSeed()
		sent = append(sent, r.sent(1)) // now the executor has the library as well
		before := r.fetched(1)
		took, _ := r.seeded(1, seed, part{0, 409_600, table * 1_000_000 / 409_600, 0})
		joined = append(joined, took)
		r.whole(1, before)
		if err := seed.Release(); err != nil {
			t.Fatal(err)
		}
		if i+1 >= rounds && ms(joined) <= slack*ms(sent) {
			break
		}
	}
	ratio := ms(joined) / ms(sent)
	beside := fmt.Sprintf("a lease of %d workers, and sending %d MB to one of them: %.1f ms; %.2f times as long", workers, table, ms(sent), ratio)
	if os.Getenv("RFAAS_TEST_FIGURES") != "" {
		beside += "; " + r.bare(1, table*1_000_000)
	}
	testkit.Figure(fmt.Sprintf("%d MB %s: a node joins, to the first results of %d workers", table, where(), workers), ms(joined)/1e3, 1, false, "s", beside)
	if ratio > slack {
		t.Errorf("a node joins in %.1f ms, %.2f times a lease without the seed and sending as many bytes, which takes %.1f ms; want at most %d times", ms(joined), ratio, ms(sent), slack)
	}
	if far == "" && secondNode == "" {
		return
	}
	o.Workers = 1
	r = newTrial(t, nodes, s, o, 5)
	r.web = web
	r.copyFigure(rounds)
	r = newTrial(t, nodes, s, o, large)
	r.web = web
	r.o.Memory += uint64(2*large) * 1_000_000
	for what, p := range r.touched() {
		if large < 20 && what != "in sequence" { // parts of the whole seed
			continue
		}
		var took, sent []time.Duration
		for range rounds {
			seed := r.makeSeed()
			sent = append(sent, r.sent(1))
			before := r.fetched(1)
			d, _ := r.seeded(1, seed, p)
			took = append(took, d)
			r.whole(1, before)
			if err := seed.Release(); err != nil {
				t.Fatal(err)
			}
		}
		r.touchFigure(1, what, "all", took, sent)
	}
}

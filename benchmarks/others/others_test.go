package others

import (
	"bufio"
	"context"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/agenttest"
)

// TestMain also runs as the server that the tests start.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "echo-server" {
		if err := Serve(os.Args[2], os.Stdin, os.Stdout); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(agenttest.Run("../..", m.Run))
}

func config(only ...string) Config {
	self, _ := os.Executable()
	mpi, _ := filepath.Abs("../../build/bench/pingpong")
	return Config{Only: only, Rounds: 50, Executor: "../../bin/executor", Library: "../../build/functions/echo.so", Self: []string{self, "echo-server"}, MPI: mpi,
		Latency: latency.Config{Provider: "shm", Peer: "../../libexec/rfaas-bench-peer", Device: dataplane.Options{GIDIndex: -1},
			Modes: []dataplane.WaitMode{dataplane.Warm}, Payloads: []int{8, 100_000}, Pairs: 1, Duration: 20 * time.Second}}
}

// Every installed system gives figures, and the others give the reason. A disturbed pair is reported, and its figures are kept.
func TestRun(t *testing.T) {
	seen := map[string]int{}
	err := Run(t.Context(), config(), func(r *latency.Result) error {
		seen[r.Provider]++
		t.Logf("%s: p50 %d ns, ratio %v, %d pairs, skipped: %q", r.Key(), r.P50NS, r.Ratio, r.Pairs, r.Skipped)
		if r.Skipped == "" && (r.P50NS <= 0 || r.MaxNS < r.P50NS || r.Samples == 0 || r.Pairs > 1 || r.Pairs+r.PairsDiscarded > triesMost) {
			t.Errorf("%s: %+v", r.Key(), r)
		}
		if r.Skipped != "" && r.Client == "go" {
			t.Errorf("%s was skipped: %s", r.Provider, r.Skipped)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Names {
		if seen[name] == 0 {
			t.Errorf("nothing is said of %s", name)
		}
	}
}

// moves is a system whose first batches have no number as their mean, as if virtual CPUs had moved.
type moves struct {
	hangs
	batches, bad int
}

func (m *moves) batch(_ context.Context, _, n int) (float64, []int64, error) {
	if m.batches++; m.batches <= m.bad {
		return math.NaN(), slices.Repeat([]int64{1000}, n), nil
	}
	return 1000, slices.Repeat([]int64{1000}, n), nil
}

// A pair that does not count is replaced, until as many as wanted count or four times as many were tried.
func TestPairsThatDoNotCount(t *testing.T) {
	for bad, atLeast := range map[int]int{0: 2, 3: 5, 100: 8} {
		cfg := config()
		cfg.Latency.Pairs, cfg.Latency.Duration = 2, time.Minute
		if err := cfg.Latency.Validate(); err != nil {
			t.Fatal(err)
		}
		floor, err := latency.OpenFloor(cfg.Latency)
		if err != nil {
			t.Fatal(err)
		}
		o := &moves{bad: bad}
		var r latency.Result
		r.Payload = 8
		p, err := measure(t.Context(), &cfg, &r, o, floor)
		floor.Close()
		p.Fill(&r, "ping-pong")
		// On a busy machine other pairs may not count either.
		if err != nil || o.batches < atLeast || o.batches > 8 || r.Pairs+r.PairsDiscarded != o.batches || r.PairsDiscarded < min(bad, 8) ||
			(r.Pairs < 2 && o.batches < 8) || r.Samples != o.batches*cfg.Rounds {
			t.Errorf("%d bad ones: %v, %d batches, %+v", bad, err, o.batches, r)
		}
	}
}

// hangs is a system whose batches hang after the first few.
type hangs struct{ good int }

func (*hangs) start(context.Context) error { return nil }
func (*hangs) stop()                       {}
func (*hangs) how() string                 { return "it hangs" }

func (h *hangs) batch(ctx context.Context, _, n int) (float64, []int64, error) {
	if h.good--; h.good < 0 {
		<-ctx.Done()
		return 0, nil, ctx.Err()
	}
	return 1000, slices.Repeat([]int64{1000}, n), nil
}

// A system that hangs is ended and reported, and its earlier figures are kept.
func TestWhatHangs(t *testing.T) {
	for good, says := range map[int]string{0: "check that this system runs on the device", 2: "ended early: a batch of 8 B did not end within"} {
		cfg := config()
		limit := 100*time.Millisecond + time.Duration(good)*time.Second // enough for the good ones
		cfg.Latency.Pairs, cfg.Latency.Duration, cfg.patience = 10, time.Minute, limit-time.Minute
		if err := cfg.Latency.Validate(); err != nil {
			t.Fatal(err)
		}
		floor, err := latency.OpenFloor(cfg.Latency)
		if err != nil {
			t.Fatal(err)
		}
		var got []*latency.Result
		err = one(t.Context(), &cfg, "hangs", &hangs{good}, floor, func(r *latency.Result) error { got = append(got, r); return nil })
		floor.Close()
		if err != nil || len(got) != 1 {
			t.Fatalf("%v, %d results", err, len(got))
		}
		r := got[0]
		if text := r.Skipped + r.Method; !strings.Contains(text, says) || strings.Contains(text, "%!") || (r.Skipped != "") != (good == 0) || r.Samples != good*cfg.Rounds {
			t.Errorf("after %d good batches: %+v", good, r)
		}
	}
}

func TestMissingProgramIsSaid(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var got []string
	if err := Run(t.Context(), config("ucx", "mpich"), func(r *latency.Result) error { got = append(got, r.Skipped); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || !strings.Contains(got[0], "ucx-utils") || !strings.Contains(got[1], "mpirun.mpich") {
		t.Errorf("skipped: %q", got)
	}
}

func TestRunRefuses(t *testing.T) {
	if err := Run(t.Context(), config("carrier"), nil); err == nil || !strings.Contains(err.Error(), `"carrier"`) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, config("http"), func(*latency.Result) error { return nil }); err == nil {
		t.Error("a cancelled run ends well")
	}
}

func TestParse(t *testing.T) {
	mean, samples, err := parsePingPong("noise\n8 1 2 3\n64 10 20\n", 64)
	if err != nil || mean != 15 || !slices.Equal(samples, []int64{10, 20}) {
		t.Errorf("%v %v %v", mean, samples, err)
	}
	for _, bad := range []string{"", "8 1 2", "64 x"} {
		if _, _, err := parsePingPong(bad, 64); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
	mean, samples, err = parsePerftest("iterations,50.0_percentile_lat,avg_lat\n 200,0.5,0.75,1\n", 3)
	if err != nil || mean != 1500 || !slices.Equal(samples, []int64{1000, 1000, 1000}) {
		t.Errorf("%v %v %v", mean, samples, err)
	}
	for _, bad := range []string{"", "connection refused", "1,x,2"} {
		if _, _, err := parsePerftest(bad, 3); err == nil {
			t.Errorf("%q is read", bad)
		}
	}
}

// The server ends when its starter is gone.
func TestServeEndsWithItsInput(t *testing.T) {
	in, stop := io.Pipe()
	out, said := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- Serve("http", in, said) }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, "127.0.0.1:") {
		t.Errorf("it says %q, %v", line, err)
	}
	_ = stop.Close()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("it goes on")
	}
}

package latency

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/raw"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/topology"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

func TestMain(m *testing.M) { leakcheck.Main(m, nil, leakcheck.Objects(dataplane.Live)) }

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		values []float64
		q      float64
		want   float64
	}{
		{[]float64{3}, 0.5, 3},
		{[]float64{2, 1}, 0.5, 1.5},
		{[]float64{9, 1, 5}, 0.5, 5},
		{[]float64{4, 1, 3, 2}, 0.25, 1.75},
		{[]float64{4, 1, 3, 2}, 1, 4},
		{[]float64{4, 1, 3, 2}, 0, 1},
	} {
		before := slices.Clone(c.values)
		if got := quantile(c.values, c.q); got != c.want {
			t.Errorf("quantile(%v, %v) = %v, want %v", c.values, c.q, got, c.want)
		}
		if !slices.Equal(before, c.values) {
			t.Errorf("quantile changed its argument to %v", c.values)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing is %v", got)
	}
}

func TestHistogram(t *testing.T) {
	var h Histogram
	if h.Count() != 0 || h.Quantile(0.5) != 0 || h.Encode() != "" || h.Above(0) != 0 {
		t.Errorf("empty: %d samples, median %d, %q", h.Count(), h.Quantile(0.5), h.Encode())
	}
	for i := range int64(1000) {
		h.Add(i + 1)
	}
	h.Add(3_000_123, 120e9)
	for q, want := range map[float64]int64{0.5: 501, 0.9: 902, 1: 120e9} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %v is %d, want %d", q, got, want)
		}
	}
	if got := h.Quantile(0.9989); got < 2_990_000 || got > 3_010_000 {
		t.Errorf("three digits of 3000123: %d", got)
	}
	if h.Count() != 1002 || h.Above(1000) != 2 {
		t.Errorf("%d samples, %d above 1000", h.Count(), h.Above(1000))
	}
	cdf, err := CDF(h.Encode())
	if err != nil || len(cdf) != 1002 || cdf[0] != (Point{1, 1.0 / 1002}) || cdf[len(cdf)-1].Share != 1 {
		t.Fatalf("%v, %d points: %v", err, len(cdf), cdf[:min(len(cdf), 3)])
	}
	if _, err := CDF("nonsense"); err == nil {
		t.Error("nonsense was decoded")
	}
}

func TestPairingDiscardsChangesOfMode(t *testing.T) {
	var p pairing
	for _, c := range []struct {
		means, calibrations []float64
		want                bool
	}{
		{[]float64{100, 110}, []float64{130, 131, 129}, true},
		{[]float64{100, 500}, []float64{130, 131, 530}, false}, // moved at the end
		{[]float64{400, 110}, []float64{130, 530, 130}, false}, // moved there and back
		{[]float64{400, 440}, []float64{530, 530, 540}, true},  // the other mode, but throughout
		{[]float64{100, 120}, []float64{130, 162, 130}, true},  // within a quarter
		{[]float64{100, 120}, []float64{130, 164, 130}, false}, // above
		{[]float64{100, 120}, []float64{0, 130, 130}, false},   // no calibration at all
	} {
		if got := p.add(c.means, c.calibrations); got != c.want {
			t.Errorf("pair with calibrations %v counts: %v, want %v", c.calibrations, got, c.want)
		}
	}
	if len(p.rough) != 7 {
		t.Errorf("%d rough ratios of 7 pairs", len(p.rough))
	}
	if p.len() != 3 || p.discarded != 4 {
		t.Fatalf("%d good, %d discarded", p.len(), p.discarded)
	}
	if got := p.ratios(1, 0); !slices.Equal(got, []float64{1.1, 1.1, 1.2}) {
		t.Errorf("ratios %v", got)
	}
	if got := p.mean(0); got != 100 {
		t.Errorf("mean of the floor %v", got)
	}
}

func TestChoosePair(t *testing.T) {
	smt := func(cpu int, _ []int) []int { return []int{cpu &^ 1, cpu | 1} } // 0-1, 2-3, ...
	alone := func(cpu int, _ []int) []int { return []int{cpu} }
	for _, c := range []struct {
		allowed  []int
		siblings func(int, []int) []int
		want     []int
	}{
		{[]int{3}, alone, []int{3, 3}},
		{[]int{0, 1}, alone, []int{0, 1}},
		{[]int{0, 1}, smt, []int{0, 1}}, // nothing better
		{[]int{0, 1, 2, 3}, smt, []int{0, 2}},
		{[]int{0, 1, 2, 3, 4, 5}, smt, []int{1, 2}},
		{[]int{8, 9, 10, 11, 12, 13}, smt, []int{8, 10}},
	} {
		if got := choosePair(c.allowed, c.siblings); !slices.Equal(got, c.want) {
			t.Errorf("of %v: %v, want %v", c.allowed, got, c.want)
		}
	}
}

func TestValidate(t *testing.T) {
	good := func() Config {
		return Config{Provider: "shm", Modes: []dataplane.WaitMode{dataplane.Warm}, Payloads: []int{8}}
	}
	for name, c := range map[string]struct {
		change func(*Config)
		says   string
	}{
		"provider": {func(c *Config) { c.Provider = "tcp" }, `"tcp"`},
		"nothing":  {func(c *Config) { c.Payloads = nil }, "nothing to measure"},
		"payload":  {func(c *Config) { c.Payloads = []int{0} }, "payload of 0"},
		"memory":   {func(c *Config) { c.Payloads = []int{1 << 30}; c.Depth = 2 }, "in flight"},
		"depth":    {func(c *Config) { c.Depth = 9; c.Slots = 4 }, "depth 9 of 4"},
		"slots":    {func(c *Config) { c.Slots = 5000 }, "5000"},
		"eager":    {func(c *Config) { c.Eager = 1 << 30 }, "eager size"},
		"function": {func(c *Config) { c.Function = "sort" }, `"sort"`},
		"pairs":    {func(c *Config) { c.Pairs = -1 }, "pairs -1"},
		"one CPU":  {func(c *Config) { c.CPUs = []int{0} }, "two are needed"},
		"no CPU":   {func(c *Config) { c.CPUs = []int{0, 9999} }, "CPU 9999"},
		"hot on one": {func(c *Config) {
			all, _ := topology.Affinity()
			c.CPUs = []int{all[0], all[0]}
			c.Modes = []dataplane.WaitMode{dataplane.Warm, dataplane.Hot}
		}, "use --mode warm"},
	} {
		cfg := good()
		c.change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v, want one that says %q", name, err, c.says)
		}
	}
	cfg := good()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	if cfg.Depth != 1 || cfg.Pairs != 15 || cfg.Function != FunctionEcho || len(cfg.CPUs) != 2 {
		t.Errorf("defaults %+v", cfg)
	}
}

func example() *Result {
	near := true
	return &Result{Name: "latency", Provider: "shm", Client: "c", Mode: "hot", Function: "echo", Buffers: "copied", Payload: 8, Depth: 1, Samples: 3,
		P50NS: 181, P90NS: 190, P99NS: 250, P999NS: 1200, MaxNS: 31000, FloorName: "ping-pong", FloorP50: 170, Ratio: 1.0625,
		RatioLow: 1.05, RatioHigh: 1.07, MeanNS: 180.5, FloorMeanNS: 170.25, OpsPerS: 5.5e6, Pairs: 15, PairsDiscarded: 2,
		Complete: true, Calibration: Calibration{131, Number(math.NaN())}, Near: &near, Method: "as told"}
}

func TestJSONKeepsItsFields(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, example()); err != nil {
		t.Fatal(err)
	}
	line := b.String()
	for _, want := range []string{`"name":"latency"`, `"provider":"shm"`, `"client":"c"`, `"mode":"hot"`, `"payload":8`, `"depth":1`,
		`"samples":3`, `"p50_ns":181`, `"p90_ns":190`, `"p99_ns":250`, `"p999_ns":1200`, `"max_ns":31000`, `"floor_p50_ns":170`,
		`"ratio":1.0625`, `"pairs_discarded":2`, `"ops_per_s":5500000`, `"calibration_ns":{"before":131,"after":null}`} {
		if !strings.Contains(line, want) {
			t.Errorf("no %s in %s", want, line)
		}
	}
	if strings.Contains(line, "ratio_payload_only") {
		t.Errorf("fields that were not asked for in %s", line)
	}
	if strings.Count(line, "\n") != 1 {
		t.Errorf("not one line: %q", line)
	}
	back, err := ReadJSON(strings.NewReader("$ a prompt\n" + line + "a table\n" + line))
	if err != nil || len(back) != 2 {
		t.Fatalf("%d results, %v", len(back), err)
	}
	if r := back[0]; r.Key() != example().Key() || r.Ratio != 1.0625 || !math.IsNaN(float64(r.Calibration.After)) || !*r.Near {
		t.Errorf("came back as %+v", r)
	}
	if _, err := ReadJSON(strings.NewReader("{broken\n")); err == nil {
		t.Error("a broken line was read")
	}
}

func TestTableAndCSV(t *testing.T) {
	var table, csv bytes.Buffer
	other := example()
	other.Payload, other.Ratio, other.Complete = 1<<20, Number(math.NaN()), false
	if err := WriteTable(&table, example(), other); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(table.String(), "\n")
	if len(lines) < 4 || len(lines[0]) != len(lines[1]) || len(lines[1]) != len(lines[2]) {
		t.Errorf("not aligned:\n%s", table.String())
	}
	if !strings.Contains(lines[1], "1.062") || !strings.Contains(lines[1], "15 (-2)") || !strings.Contains(lines[2], "!") {
		t.Errorf("rows say\n%s", table.String())
	}
	if err := WriteCSV(&csv, example()); err != nil {
		t.Fatal(err)
	}
	rows := strings.Split(strings.TrimSpace(csv.String()), "\n")
	if len(rows) != 2 || strings.Count(rows[0], ",") != strings.Count(rows[1], ",") || !strings.HasPrefix(rows[1], "latency,shm,c,hot,echo,copied,8,1,3,181") {
		t.Errorf("CSV:\n%s", csv.String())
	}
}

// peerProgram is what make builds.
const peerProgram = "../../libexec/rfaas-bench-peer"

// quick is a measurement that takes well under a second, and little longer on a busy machine.
func quick(provider string) Config {
	cfg := Config{Provider: provider, Peer: peerProgram, Device: dataplane.Options{GIDIndex: -1},
		Modes: []dataplane.WaitMode{dataplane.Warm}, Payloads: []int{1, 8, 64, 100_000}, Pairs: 2, Rounds: 20, Duration: 500 * time.Millisecond}
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" { // everything is slow in the virtual machine
		cfg.Payloads, cfg.Pairs = []int{8, 20_000}, 1
	}
	return cfg
}

func providers(t *testing.T, f func(t *testing.T, provider string)) {
	all := []string{dataplane.SHM, dataplane.Verbs}
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		all = all[1:] // shm was tested outside the virtual machine
	}
	for _, p := range all {
		t.Run(p, func(t *testing.T) {
			d, err := dataplane.Open(p, dataplane.Options{GIDIndex: -1})
			if errors.Is(err, dataplane.ErrUnsupported) && os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
				t.Skip(err) // the softroce lane runs it
			}
			if err != nil {
				t.Fatal(err)
			}
			d.Close()
			f(t, p)
		})
	}
}

func TestRunProvider(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		for _, c := range []struct {
			name   string
			change func(*Config)
			once   bool // not in the virtual machine
		}{
			{"warm", func(*Config) {}, false},
			{"hot", func(c *Config) { c.Modes = []dataplane.WaitMode{dataplane.Hot} }, false},
			{"pipelined", func(c *Config) {
				c.Modes, c.Depth, c.Payloads = []dataplane.WaitMode{dataplane.Adaptive}, 16, []int{8, 1000}
			}, true},
			{"registered", func(c *Config) { c.Buffers = BuffersRegistered }, true},
			{"registered, pipelined", func(c *Config) {
				c.Modes, c.Depth, c.Buffers = []dataplane.WaitMode{dataplane.Adaptive}, 4, BuffersRegistered
			}, false},
			{"empty", func(c *Config) { c.Function, c.Payloads = FunctionEmpty, []int{8} }, true},
		} {
			t.Run(c.name, func(t *testing.T) {
				cfg := quick(provider)
				c.change(&cfg)
				if c.once && os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
					t.Skip("ran outside the virtual machine, and its parts run here in other combinations")
				}
				if cfg.Modes[0] != dataplane.Warm {
					twoCPUs(t)
				}
				var got []*Result
				if err := Run(context.Background(), cfg, func(r *Result) error { got = append(got, r); return nil }); err != nil {
					t.Fatal(err)
				}
				if want := len(cfg.Payloads); len(got) != want {
					t.Fatalf("%d results, want %d", len(got), want)
				}
				for _, r := range got {
					if r.Pairs+r.PairsDiscarded+r.PairsShared+r.PairsAwake < 1 {
						t.Errorf("%s: no pair was tried", r.Key())
					}
					if r.Pairs > 0 && (r.P50NS <= 0 || r.MaxNS < r.P999NS || r.P999NS < r.P50NS || r.OpsPerS <= 0 || r.Samples != r.Pairs*r.BatchCalls) {
						t.Errorf("%s: %+v", r.Key(), r)
					}
					if peers := cfg.peers(cfg.Modes[0], r.Payload); peers > 1 && r.Complete {
						if wanted := morePairs * cfg.Pairs; r.Pairs != wanted || r.Peers != min(peers, wanted) {
							t.Errorf("%s: %d pairs with %d peers, want %d", r.Key(), r.Pairs, r.Peers, wanted)
						}
					} else if peers == 1 && r.Peers != 0 {
						t.Errorf("%s: %d peers", r.Key(), r.Peers)
					}
					if r.FloorName != "none" && r.Pairs > 0 && !(r.Ratio > 0) {
						t.Errorf("%s: ratio %v to %s", r.Key(), r.Ratio, r.FloorName)
					}
				}
			})
		}
	})
}

func TestRunFloorsProvider(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		twoCPUs(t)
		cfg := quick(provider)
		cfg.Payloads, cfg.Batch = []int{8, 4096}, time.Millisecond
		seen := map[string]int{}
		if err := RunFloors(context.Background(), cfg, func(r *Result) error {
			seen[r.Function]++
			if r.Pairs > 0 && (r.P50NS <= 0 || r.MaxNS < r.P50NS || !(r.MeanNS > 0)) || r.Pairs+r.PairsDiscarded < 1 || r.Pairs+r.PairsDiscarded > cfg.Pairs {
				t.Errorf("%s: %+v", r.Key(), r)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if seen[raw.Read.String()] != 2 || seen[raw.FetchAdd.String()] != 1 || len(seen) < 3 {
			t.Errorf("floors: %v", seen)
		}
	})
}

func TestRunCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Run(ctx, quick(dataplane.SHM), func(*Result) error { return nil }); err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Fatalf("error %v", err)
	}
}

func TestCheck(t *testing.T) {
	good := example()
	if v := Check(good); !v.Bounded || !v.OK() || v.Disturbed {
		t.Errorf("good: %+v", v)
	}
	slow := example()
	slow.Ratio = 1.3
	if v := Check(slow); v.OK() || !strings.Contains(v.Exceeds[0], "1.3, bound 1.15") {
		t.Errorf("slow: %+v", v)
	}
	unknown := example()
	unknown.Ratio = Number(math.NaN())
	if v := Check(unknown); v.OK() {
		t.Error("an unknown ratio passes")
	}
	few := example()
	few.Ratio, few.Pairs = 1.3, 4
	if v := Check(few); !v.OK() || !v.Disturbed {
		t.Errorf("few pairs: %+v", v)
	}
	rough := example()
	rough.Ratio, rough.Pairs, rough.RatioRough, rough.PairsRough = 1.3, 4, 2.2, 12
	if v := Check(rough); !v.OK() || v.Disturbed || !v.Rough {
		t.Errorf("disturbed pairs below twice the bound: %+v", v)
	}
	rough.RatioRough = 2.6
	if v := Check(rough); v.OK() || !strings.Contains(v.Exceeds[0], "of 12 pairs, disturbed ones too, is 2.6") {
		t.Errorf("disturbed pairs above twice the bound: %+v", v)
	}
	other := example()
	other.Payload, other.Ratio = 9, 100
	if v := Check(other); v.Bounded || !v.OK() {
		t.Errorf("unbounded: %+v", v)
	}
}

// The better of two results counts, and an undisturbed result replaces a disturbed one.
func TestGuardTakesTheBetter(t *testing.T) {
	result := func(ratio float64, pairs int) *Result {
		r := example()
		r.Ratio, r.Pairs = Number(ratio), pairs
		return r
	}
	for name, c := range map[string]struct {
		slack       float64
		in          []*Result
		best        int
		ok, another bool
	}{
		"good at once":             {1, []*Result{result(1.1, 15)}, 0, true, false},
		"noise":                    {1, []*Result{result(1.4, 15), result(1.12, 15)}, 1, true, false},
		"a regression":             {1, []*Result{result(1.5, 15), result(1.4, 15), result(1.6, 15)}, 1, false, true},
		"within the slack":         {1.4, []*Result{result(1.6, 15)}, 0, true, false},
		"above the slack":          {1.4, []*Result{result(1.8, 15)}, 0, false, true},
		"disturbed":                {1, []*Result{result(9, 2)}, 0, true, true},
		"disturbed, then good":     {1, []*Result{result(1, 2), result(1.12, 15)}, 1, true, false},
		"bad, then disturbed":      {1, []*Result{result(1.4, 15), result(1, 2)}, 0, false, true},
		"disturbed, then too slow": {1, []*Result{result(1, 2), result(1.4, 15)}, 1, false, true},
	} {
		var g guarded
		for _, r := range c.in {
			g.take(r, c.slack)
		}
		if g.best != c.in[c.best] || g.verdict.OK() != c.ok || g.open() != c.another {
			t.Errorf("%s: ratio %v, ok %v, open %v", name, g.best.Ratio, g.verdict.OK(), g.open())
		}
	}
}

func TestCompare(t *testing.T) {
	a, b, gone, fresh, again := example(), example(), example(), example(), example()
	b.Ratio, gone.Payload, fresh.Mode, again.Ratio = 1.1688, 5, "warm", 1.275
	changes, onlyOld, onlyNew := Compare([]*Result{a, gone}, []*Result{b, fresh, again})
	if len(changes) != 1 || changes[0].New != again || math.Abs(changes[0].Worse()-0.2) > 1e-9 {
		t.Errorf("changes %+v", changes)
	}
	if len(onlyOld) != 1 || onlyOld[0] != gone.Key() || len(onlyNew) != 1 || onlyNew[0] != fresh.Key() {
		t.Errorf("only old %v, only new %v", onlyOld, onlyNew)
	}
	a.Ratio = Number(math.NaN())
	b.P50NS = 2 * a.P50NS
	if c := (Change{"", a, b}); c.Worse() != 1 {
		t.Errorf("without a floor: %v", c.Worse())
	}
	a.Ratio, b.Ratio = 0, 0 // as starts have
	if c := (Change{"", a, b}); c.Worse() != 1 {
		t.Errorf("of starts: %v", c.Worse())
	}
}

// Package cold measures what `rfaas bench cold` prints: the time from a lease's request to the first result, and the time of each step. The
// worker is new, pooled, spare, or the cached worker of the last lease. A cached worker is frozen, or still awake and polling.
//
// A spare worker comes from the agent on request, or in advance, with the release of the lease before.
//
// The executor is a process of its own. Before the first lease, the client is connected and the executor has the library. The time
// of that, the first contact, is reported separately, with and without TLS. So is the time to start a process for a call, as
// every lease of the first rFaaS did. In mode pooled, each lease is requested when the executor's pool is full again, so that no
// start includes the time to fill it. In mode spare, each lease is requested when the agent has a spare lease for it.
package cold

import (
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/fromc"
	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Config says what to measure. Executor, Provider, Library and Function are mandatory.
type Config struct {
	Executor string // path of the program
	Provider string // shm, verbs or tcp
	Library  string // with the function, which is called without a payload
	Function string
	Mode     string        // one of Modes; empty: cold
	Leases   int           // to measure; 0: 200
	Workers  int           // of each lease; 0: 1
	Bulk     int64         // bytes of each channel's bulk area; 0: the client's default, negative: none
	Peer     string        // path of rfaas-bench-peer, the process whose start is measured; empty: none is
	Client   string        // language of the code that takes the leases, "go" or "c"; empty: go
	Rest     time.Duration // time from each release to the next request, if Client is c
	Progress func(line string)

	again bool // a later run: do not measure first contact with TLS and process starts again
}

// Result has the figures of one run: medians in ns unless their name says otherwise. The JSON form is read by other
// programs: fields are added, never changed.
type Result struct {
	Name         string  `json:"name"` // "start"
	Provider     string  `json:"provider"`
	Client       string  `json:"client"` // go or c
	Mode         string  `json:"mode"`   // one of Modes
	Function     string  `json:"function"`
	Workers      int     `json:"workers"` // of each lease; the steps are those of the first one
	Samples      int     `json:"samples"`
	Others       int     `json:"others"` // leases that started in another way, for example because the pool was empty; not counted
	P50NS        int64   `json:"p50_ns"` // from the lease's request to the first result
	P90NS        int64   `json:"p90_ns"`
	P99NS        int64   `json:"p99_ns"`
	P999NS       int64   `json:"p999_ns"` // the longest with fewer than 1000 samples
	MaxNS        int64   `json:"max_ns"`
	ControlNS    int64   `json:"control_ns"` // the lease without its worker's start: the client's channels, round trip, grant
	ForkNS       int64   `json:"fork_ns"`
	SandboxNS    int64   `json:"sandbox_ns"`
	ConnectNS    int64   `json:"connect_ns"`
	CodeNS       int64   `json:"code_ns"`
	FirstCallNS  int64   `json:"first_call_ns"`
	ReleaseNS    int64   `json:"release_ns"`           // not part of the above
	FirstContact int64   `json:"first_contact_ns"`     // connecting, sending the library, the first lease and call
	FirstTLS     int64   `json:"first_contact_tls_ns"` // the same with another executor, TLS and a token; 0: this machine has only loopback addresses
	ProcessNS    int64   `json:"process_start_ns"`     // a new process: fork, exec, device, memory, connection, first call; 0: not measured
	Load         float64 `json:"load_avg"`             // of the last minute, at the start
	Runs         int     `json:"runs"`                 // of each mode, in turn; this is the one with the median p50
	RunsP50      []int64 `json:"runs_p50_ns"`          // of each run, in order
	StartedAt    string  `json:"started_at"`
	Method       string  `json:"method"`
}

// samples are the times of every lease, by step.
type samples struct{ total, control, fork, sandbox, connect, code, call, release []int64 }

// modes are the executor's settings for each way to start, without the numbers of cores and of pooled workers.
var modes = map[string][]string{
	"cold":   {"--cache-time", "0s"},
	"pooled": {"--cache-time", "0s"},
	"cached": {"--cache-awake", "0s"},
	"awake":  {"--cache-awake", "1s"}, // longer than the time until the next lease
	"spare":  {},
	"ahead":  {},
}

// settings returns the executor's settings for the mode.
func (cfg *Config) settings() []string {
	cores, pool := cfg.Workers, 0
	switch cfg.Mode {
	case "pooled":
		pool = cfg.pool()
	case "spare", "ahead":
		cores *= 4 // for a lease, two spare leases, and the cores that must stay free beside a spare lease
	}
	return append([]string{"--pool", strconv.Itoa(pool), "--share-cores", strconv.Itoa(cores)}, modes[cfg.Mode]...)
}

// pool is the size of the executor's pool in mode pooled.
func (cfg *Config) pool() int { return max(poolLeast, cfg.Workers) }

// starts has the client's name for the start of a mode, where it differs from the mode's name. The executors of these modes have no pool, so no
// other start has this name.
var starts = map[string]string{"spare": "pooled", "ahead": "pooled", "awake": "cached"}

// Modes are the ways to start that can be measured on a provider.
func Modes(provider string) []string {
	all := slices.Sorted(maps.Keys(modes))
	return slices.DeleteFunc(all, func(m string) bool {
		return (m == "awake" || m == "ahead") && provider != dataplane.SHM
	})
}

// Check returns an error if the configuration is wrong.
func (cfg *Config) Check() error {
	switch {
	case cfg.Leases < 0 || cfg.Leases > 100_000:
		return fmt.Errorf("%d leases: want 1 to 100000", cfg.Leases)
	case cfg.Workers < 0 || cfg.Workers > 64:
		return fmt.Errorf("%d workers: want 1 to 64", cfg.Workers)
	case cfg.Provider != "shm" && cfg.Provider != "verbs" && cfg.Provider != "tcp":
		return fmt.Errorf("provider %q is not one of shm, verbs, tcp", cfg.Provider)
	case cfg.Mode != "" && !slices.Contains(Modes(cfg.Provider), cfg.Mode):
		return fmt.Errorf("mode %q on %s is not one of %s", cfg.Mode, cfg.Provider, strings.Join(Modes(cfg.Provider), ", "))
	case cfg.Rest < 0 || cfg.Rest > time.Minute:
		return fmt.Errorf("rest %v: want 0s to 1m", cfg.Rest)
	case cfg.Rest > 0 && cfg.Client != "c":
		return fmt.Errorf("rest %v: only a client in C rests, use client c", cfg.Rest)
	case cfg.Client != "" && cfg.Client != "go" && cfg.Client != "c":
		return fmt.Errorf("client %q is not one of c, go", cfg.Client)
	}
	return nil
}

// Run starts an executor, measures, and ends the executor. Blocks; ctx bounds it.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	n := cmp.Or(cfg.Leases, 200)
	cfg.Mode, cfg.Workers = cmp.Or(cfg.Mode, "cold"), max(cfg.Workers, 1)
	dir, err := os.MkdirTemp("", "rfaas-bench")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	secret := filepath.Join(dir, "secret")
	e, err := startExecutor(ctx, cfg, "127.0.0.1:0", "--secret-file", secret)
	if err != nil {
		return nil, err
	}
	defer e.Stop()
	r := &Result{Name: "start", Provider: cfg.Provider, Client: cmp.Or(cfg.Client, "go"), Mode: cfg.Mode, Function: cfg.Function, Workers: cfg.Workers, Samples: n,
		Load: latency.LoadAverage(), StartedAt: time.Now().UTC().Format(time.RFC3339),
		Method: "one lease after the other; time from the lease's request to the first result, client connected, library uploaded; " +
			"the client's Go runtime has one processor (GOMAXPROCS), like a rank that is bound to a core"}
	s, first, err := contact(ctx, cfg, client.Options{Executor: e.Address, Provider: cfg.Provider, SecretFile: secret})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	r.FirstContact = first
	take := func(all *samples, before func() error) (string, error) { return all.lease(ctx, s, cfg, before) }
	if cfg.Client == "c" {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		r.Method = fmt.Sprintf("one lease after the other from C, each requested %v after the previous release; time from the lease's request to the first result, client connected, library uploaded", cfg.Rest)
		c, err := fromc.Open(e.Address, cfg.Provider, secret)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		take = func(all *samples, before func() error) (string, error) { return all.leaseFromC(c, cfg, before) }
	}
	var all samples
	for len(all.total) < n {
		if done := len(all.total) + r.Others; cfg.Progress != nil && done%20 == 0 {
			cfg.Progress(fmt.Sprintf("%s %s: %d of %d leases, %d started otherwise", cfg.Provider, cfg.Mode, len(all.total), n, r.Others))
		}
		if err := e.ready(ctx, &cfg, len(all.total)+r.Others); err != nil {
			return nil, err
		}
		one := all
		how, err := take(&all, e.beforeRelease(ctx, &cfg))
		if err != nil {
			return nil, err
		}
		if how == cmp.Or(starts[cfg.Mode], cfg.Mode) {
			continue
		}
		all = one
		if r.Others++; r.Others > othersMost*n {
			return nil, fmt.Errorf("%d leases started %s, and %d otherwise: the last one %s", len(all.total), cfg.Mode, r.Others, how)
		}
	}
	if !cfg.again {
		if r.FirstTLS, err = firstTLS(ctx, cfg, dir); err != nil {
			return nil, err
		}
		if r.ProcessNS, err = processStart(cfg); err != nil {
			return nil, err
		}
	}
	slices.Sort(all.total)
	r.P50NS, r.P90NS, r.P99NS, r.P999NS, r.MaxNS = rank(all.total, 500), rank(all.total, 900), rank(all.total, 990), rank(all.total, 999), all.total[n-1]
	for into, list := range map[*int64][]int64{&r.ControlNS: all.control, &r.ForkNS: all.fork, &r.SandboxNS: all.sandbox, &r.ConnectNS: all.connect,
		&r.CodeNS: all.code, &r.FirstCallNS: all.call, &r.ReleaseNS: all.release} {
		slices.Sort(list)
		*into = rank(list, 500)
	}
	return r, nil
}

// MostRuns is how often Series measures each mode at most.
const MostRuns = 25

// Rest is long enough for all work of a release to end and for processors without work to halt.
const Rest = 5 * time.Millisecond

// Series measures each mode runs times, an odd number, in turn, and returns the run with the median p50 of each mode, so that a
// disturbance of some seconds hits a run and not the result. First contact with TLS and the start of a process are the first
// run's. After an error the results are those of the earlier runs. Blocks; ctx bounds it.
func Series(ctx context.Context, cfg Config, modes []string, runs int) ([]*Result, error) {
	if runs < 1 || runs > MostRuns || runs%2 == 0 {
		return nil, fmt.Errorf("%d runs: want an odd number, 1 to %d", runs, MostRuns)
	}
	all := make([][]*Result, len(modes))
	progress := cfg.Progress
	var failed error
measure:
	for run := range runs {
		for i, mode := range modes {
			cfg.Mode, cfg.again = mode, run > 0
			if progress != nil && runs > 1 {
				cfg.Progress = func(line string) { progress(fmt.Sprintf("run %d of %d: %s", run+1, runs, line)) }
			}
			r, err := Run(ctx, cfg)
			if err != nil {
				failed = err
				break measure
			}
			all[i] = append(all[i], r)
		}
	}
	var results []*Result
	for _, of := range all {
		if len(of) > 0 {
			results = append(results, median(of))
		}
	}
	return results, failed
}

// median is the run with the median p50, with the p50 of all runs added.
func median(of []*Result) *Result {
	var p50 []int64
	for _, r := range of {
		p50 = append(p50, r.P50NS)
	}
	tls, process := of[0].FirstTLS, of[0].ProcessNS
	slices.SortStableFunc(of, func(a, b *Result) int { return cmp.Compare(a.P50NS, b.P50NS) })
	r := of[(len(of)-1)/2]
	r.Runs, r.RunsP50, r.FirstTLS, r.ProcessNS = len(of), p50, tls, process
	return r
}

// contact connects and makes the first lease and call; first is the time of that, ns.
func contact(ctx context.Context, cfg Config, o client.Options) (s *client.Session, first int64, err error) {
	began := time.Now()
	if s, err = client.Connect(ctx, o); err != nil {
		return nil, 0, err
	}
	var one samples
	if _, err := one.lease(ctx, s, cfg, nil); err != nil {
		return nil, 0, errors.Join(err, s.Close())
	}
	return s, int64(time.Since(began)) - one.release[0], nil
}

// processes is how many process starts are measured.
const processes = 15

// processStart is the median time to start a process, ns; 0 without a peer program, and on tcp.
func processStart(cfg Config) (int64, error) {
	if cfg.Peer == "" || cfg.Provider == dataplane.TCP { // the peer knows shm and verbs
		return 0, nil
	}
	var all []int64
	for range processes {
		d, err := latency.ProcessStart(cfg.Provider, dataplane.Options{GIDIndex: -1}, cfg.Peer)
		if err != nil {
			return 0, fmt.Errorf("start a process: %w", err)
		}
		all = append(all, int64(d))
	}
	slices.Sort(all)
	return rank(all, 500), nil
}

// othersMost is how many leases may start in another way, for each lease to measure.
const othersMost = 20

// rank is a quantile of ascending values: the smallest that permille of a thousand values do not exceed.
func rank(sorted []int64, permille int) int64 {
	return sorted[max((len(sorted)*permille+999)/1000-1, 0)]
}

// leaseFromC does from C what lease does from Go.
func (a *samples) leaseFromC(c *fromc.Session, cfg Config, before func() error) (how string, err error) {
	t, err := c.Lease(fromc.Terms{Library: cfg.Library, Function: cfg.Function, Workers: cfg.Workers, Bulk: cfg.Bulk,
		Reuse: cfg.Mode == "cached" || cfg.Mode == "awake", Hot: cfg.Mode == "awake", Rest: cfg.Rest}, before)
	if err != nil {
		return "", err
	}
	a.add(t.Total, t.Leased, t.Release, client.StartSteps{Fork: t.Fork, Sandbox: t.Sandbox, Connect: t.Connect, Code: t.Code})
	return client.Start(t.Start).String(), nil
}

func (a *samples) add(total, leased, release time.Duration, steps client.StartSteps) {
	a.release = append(a.release, int64(release))
	a.total = append(a.total, int64(total))
	a.control = append(a.control, int64(leased-steps.Fork-steps.Sandbox-steps.Connect-steps.Code))
	a.sandbox = append(a.sandbox, int64(steps.Sandbox))
	a.fork, a.connect, a.code = append(a.fork, int64(steps.Fork)), append(a.connect, int64(steps.Connect)), append(a.code, int64(steps.Code))
	a.call = append(a.call, int64(total-leased))
}

// lease takes a lease, makes one call, calls before unless it is nil, releases the lease, and records the times. how says how the worker started.
func (a *samples) lease(ctx context.Context, s *client.Session, cfg Config, before func() error) (how string, err error) {
	options := client.LeaseOptions{Library: cfg.Library, Workers: cfg.Workers, Bulk: cfg.Bulk, Reuse: cfg.Mode == "cached" || cfg.Mode == "awake"}
	if cfg.Mode == "awake" {
		options.WaitMode = client.Hot // an adaptive worker would be asleep again when the release returns
	}
	ctx = context.WithoutCancel(ctx) // otherwise the client in Go makes each step on another goroutine, to watch the context
	began := time.Now()
	l, err := s.Lease(ctx, options)
	if err != nil {
		return "", err
	}
	leased := time.Since(began)
	f, err := l.Function(cfg.Function)
	if err == nil {
		_, err = f.Invoke(ctx, nil, make([]byte, 64))
	}
	total := time.Since(began)
	steps := l.Worker(0).StartSteps()
	if err == nil && before != nil {
		err = before()
	}
	began = time.Now()
	if err = errors.Join(err, l.Release(ctx)); err != nil {
		return "", err
	}
	a.add(total, leased, time.Since(began), steps)
	return steps.Start.String(), nil
}

// WriteJSON writes a result as one line.
func WriteJSON(w io.Writer, r *Result) error { return json.NewEncoder(w).Encode(r) }

// WriteCSV writes a line for each result below the names of the columns, which are those of the JSON form.
func WriteCSV(w io.Writer, results ...*Result) error {
	c := csv.NewWriter(w)
	kind := reflect.TypeFor[Result]()
	row := make([]string, kind.NumField())
	for i := range row {
		row[i] = kind.Field(i).Tag.Get("json")
	}
	if err := c.Write(row); err != nil {
		return err
	}
	for _, r := range results {
		for i := range row {
			row[i] = fmt.Sprint(reflect.ValueOf(*r).Field(i).Interface())
		}
		if err := c.Write(row); err != nil {
			return err
		}
	}
	c.Flush()
	return c.Error()
}

// WriteTable writes a result as a table.
func WriteTable(w io.Writer, r *Result) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	us := func(ns int64) string { return fmt.Sprintf("%.0f us", float64(ns)/1e3) }
	fmt.Fprintf(t, "%s, %s:\tp50\tp90\tp99\tp99.9\tmax\tcontrol\tfork\tsandbox\tconnect\tcode\tfirst call\t\n", r.Mode, r.Provider)
	fmt.Fprintf(t, "lease to first result\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", us(r.P50NS), us(r.P90NS), us(r.P99NS), us(r.P999NS), us(r.MaxNS), us(r.ControlNS),
		us(r.ForkNS), us(r.SandboxNS), us(r.ConnectNS), us(r.CodeNS), us(r.FirstCallNS))
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "%d leases of %d workers (%d started otherwise); release %s; first contact %s", r.Samples, r.Workers, r.Others, us(r.ReleaseNS), us(r.FirstContact))
	if r.FirstTLS > 0 {
		fmt.Fprintf(w, ", with TLS %s", us(r.FirstTLS))
	}
	if r.ProcessNS > 0 {
		fmt.Fprintf(w, "; start of a process to its first call %s, %.2f of it", us(r.ProcessNS), float64(r.P50NS)/float64(r.ProcessNS))
	}
	if r.Runs > 1 {
		fmt.Fprintf(w, "; the run with the median p50 of %d runs:", r.Runs)
		for _, p50 := range r.RunsP50 {
			fmt.Fprintf(w, " %s", us(p50))
		}
	}
	_, err := fmt.Fprintf(w, "; load %.1f. %s.\n", r.Load, r.Method)
	return err
}

// Package leases measures what `rfaas-bench leases` prints: the lines of the table "The control plane beside KRCORE and Swift" of benchmarks/README.md
// that one machine can measure, each beside its floor from the same run.
package leases

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/benchmarks/cold"
	"github.com/rfaas-go/rfaas/benchmarks/control"
	"github.com/rfaas-go/rfaas/benchmarks/fromc"
	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Config says what to measure. Control.Latency, Control.Manager, Cold.Executor, Cold.Library, Cold.Function and Contact are mandatory.
type Config struct {
	Control control.Config
	Cold    cold.Config
	Contact []string // command that prints the microseconds of its first contact (Contact)
	Leases  int      // of each kind of start
	Group   int      // workers of the group
}

// Row is a line of the table. The JSON form is read by other programs: fields are added, never changed.
type Row struct {
	ID     string  `json:"id"` // of the requirement, K1 to K12 and S1 to S6; "": one without a number
	What   string  `json:"what"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Bound  float64 `json:"bound"` // 0: no bound, the value is measured for comparison
	Least  bool    `json:"least"` // the bound is the smallest value, otherwise the largest
	Beside string  `json:"beside"`
}

// none is the bound of a value that must be 0.
const none = 0.5

// Holds reports whether the value is within the bound.
func (r *Row) Holds() bool {
	return r.Bound == 0 || r.Least && r.Value >= r.Bound || !r.Least && r.Value <= r.Bound
}

// Run measures the lines of the table and returns them in its order. On verbs it measures only the lines that need a device. After an error it returns the
// lines that it had measured before.
func Run(ctx context.Context, cfg Config) (rows []Row, err error) {
	cfg.Control.Executors, cfg.Control.Subscribers = []int{10, 1000}, []int{1}
	parts := []func(context.Context, *Config) ([]Row, error){metadata, claims, brokered, starts, group, contacts}
	if cfg.Cold.Provider == dataplane.Verbs {
		parts = []func(context.Context, *Config) ([]Row, error){brokered}
	}
	for _, part := range parts {
		var some []Row
		some, err = part(ctx, &cfg)
		if rows = append(rows, some...); err != nil {
			break
		}
	}
	return rows, err
}

// lookUps is the number of look-ups of a batch. The first one of each batch runs in cold caches, so a batch has many.
const lookUps = 1000

// metadata measures the look-up of an executor that the client has not used before.
func metadata(ctx context.Context, cfg *Config) ([]Row, error) {
	results := map[string]*latency.Result{}
	cfg.Control.Batch = lookUps
	err := control.Run(ctx, cfg.Control, func(r *latency.Result) error {
		results[r.Function] = r
		return nil
	})
	if err != nil {
		return nil, err
	}
	look, stopped, message := results["look-up"], results["look-up, manager stopped"], results["look-up by message, 10 executors"]
	clock := results["clock, 1 us"]
	if look == nil || stopped == nil || message == nil || clock == nil {
		return nil, errors.New("bench control measured no look-up")
	}
	floor := fmt.Sprintf("a bare read of %d B: p50 %s", look.Payload, us(look.FloorP50))
	return []Row{
		{"K1", "metadata of an executor that was never seen, p99", micro(look.P99NS), "us", 10, false, fmt.Sprintf("p50 %s; %s; a loop that reads the clock for 1 us: p99 %s", us(look.P50NS), floor, us(clock.P99NS))},
		{"K2", "such look-ups on one thread", look.OpsPerS / 1e3, "K/s", 150, true, floor},
		{"K3", "metadata of an executor", board.LineSize + board.IdentitySize, "B", 58, false, "a line and an identity, with names and addresses"},
		{"K4", "look-up against the message, manager stopped", float64(message.P50NS) / float64(stopped.P50NS), "times as fast", 4.4, true,
			fmt.Sprintf("2 reads, p50 %s; the shortest message, a list of 10, p50 %s", us(stopped.P50NS), us(message.P50NS))},
	}, nil
}

// claimRounds is how many times all lines of a region are claimed.
const claimRounds = 50

// claims measures claims of one thread: the compare-and-swap on the claim word, and the bell that wakes the executor.
func claims(context.Context, *Config) ([]Row, error) {
	r, err := claim.New(func() {})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	mem, err := unix.Mmap(int(r.File().Fd()), 0, claim.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(mem)
	const wake, one = 1, 1 // FUTEX_WAKE
	bell := r.Bell()
	var took time.Duration
	booked, swaps := 0, make([]int64, 0, claimRounds)
	for range claimRounds {
		var slots [claim.Lines]*claim.Slot
		for i := range slots {
			if slots[i], err = r.Arm(uint64(i+1), time.Second, 0, claim.Frozen, nil, func(time.Duration) { booked++ }); err != nil {
				return nil, err
			}
		}
		began := time.Now()
		for _, s := range slots {
			at, armed, claimed := claim.Word(s.Line, s.Sequence)
			if !atomic.CompareAndSwapUint64((*uint64)(unsafe.Pointer(&mem[at])), armed, claimed) {
				return nil, fmt.Errorf("line %d was not armed", s.Line)
			}
			atomic.AddUint32(bell, 1)
			unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), wake, one, 0, 0, 0)
		}
		d := time.Since(began)
		took += d
		swaps = append(swaps, int64(d)/claim.Lines)
		r.Collect()
	}
	if booked != claimRounds*claim.Lines {
		return nil, fmt.Errorf("%d claims were booked, want %d", booked, claimRounds*claim.Lines)
	}
	slices.Sort(swaps)
	return []Row{{"K2", "claims on one thread", claimRounds * claim.Lines / took.Seconds() / 1e3, "K/s", 150, true,
		fmt.Sprintf("a compare-and-swap and a wake-up of the executor's thread, which books all: %d ns (median of %d rounds)", swaps[len(swaps)/2], len(swaps))}}, nil
}

// wakeRounds is how often a bare wake-up is measured.
const wakeRounds = 100

// pollingRest is the time between a release and the next request to workers that poll. After cold.Rest, the client's code and data are no longer in the
// processor's caches, which takes about as long as the lease.
const pollingRest = time.Millisecond

// starts measures the time from a lease's request to the first result, for each kind of start, from C. Lines of leases that wake processes also have the time
// of the same wake-ups in a bare program.
func starts(ctx context.Context, cfg *Config) ([]Row, error) {
	cfg.Cold.Leases = cfg.Leases
	w, err := fromc.MeasureWakes(wakeRounds)
	if err != nil {
		return nil, err
	}
	wakes := fmt.Sprintf("bare wake-up of a thread: %s; of a thread that thaws a process: %s", us(w.Thread), us(w.Frozen))
	if w.Why != nil {
		wakes = fmt.Sprintf("bare wake-up of a thread: %s; of a frozen process not measured: %v", us(w.Thread), w.Why)
	}
	cfg.Cold.Client = "go"
	fromGo, err := series(ctx, cfg.Cold, "awake", "cached")
	if err != nil {
		return nil, err
	}
	cfg.Cold.Client, cfg.Cold.Rest = "c", pollingRest
	polling, err := series(ctx, cfg.Cold, "awake")
	if err != nil {
		return nil, err
	}
	cfg.Cold.Rest = cold.Rest
	of, err := series(ctx, cfg.Cold, "awake", "cached", "ahead", "spare", "pooled", "cold")
	if err != nil {
		return nil, err
	}
	fork := "not measured"
	if cfg.Cold.Peer != "" {
		if fork, err = latency.Fork(cfg.Cold.Peer); err != nil {
			return nil, err
		}
	}
	process := cmp.Or(fromGo["awake"].ProcessNS, of["awake"].ProcessNS)
	later := of["awake"]
	of["awake"] = polling["awake"]
	line := func(id, what, mode string, bound float64) Row {
		r := of[mode]
		beside := fmt.Sprintf("p90 %s, p99 %s", us(r.P90NS), us(r.P99NS))
		if g := fromGo[mode]; g != nil {
			beside += fmt.Sprintf("; from Go %s", us(g.P50NS))
		}
		if mode == "cached" || mode == "ahead" {
			beside += "; " + wakes
		}
		if mode == "awake" {
			beside += fmt.Sprintf("; requested %v after the previous release: %s", cold.Rest, us(later.P50NS))
		}
		if mode == "cold" {
			beside += "; bare fork of a process of the zygote's size: " + fork
		}
		return Row{id, "lease to first result, " + what + ", p50", micro(r.P50NS), "us", bound, false, beside}
	}
	rows := []Row{
		line("", "claimed and awake", "awake", 15),
		line("", "cached, claimed and asleep", "cached", 100),
		line("", "spare, given in advance, claimed and asleep", "ahead", 100),
		line("", "spare, asked for at the agent", "spare", 0),
		line("", "pooled", "pooled", 0),
		line("", "cold", "cold", 0),
	}
	if process == 0 {
		return rows, nil
	}
	ready := func(how, mode string) Row {
		return Row{"S2", "worker ready to post (" + how + ") against a cold process", float64(process) / float64(of[mode].P50NS), "times as fast", 20, true,
			"a process that is started for the call: " + us(process)}
	}
	return append(rows, ready("claimed and awake", "awake"), ready("claimed, asleep", "cached")), nil
}

// group measures leases of several workers.
func group(ctx context.Context, cfg *Config) ([]Row, error) {
	cfg.Cold.Workers, cfg.Cold.Leases, cfg.Cold.Peer = cfg.Group, max(cfg.Leases/4, 1), ""
	of, err := series(ctx, cfg.Cold, "cached", "spare", "cold")
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, mode := range []string{"cached", "spare"} {
		rows = append(rows, Row{"K11", fmt.Sprintf("a group of %d workers, %s, as a share of cold", cfg.Group, mode), 100 * float64(of[mode].P50NS) / float64(of["cold"].P50NS), "%", 17, false,
			fmt.Sprintf("p50 %s; cold %s", us(of[mode].P50NS), us(of["cold"].P50NS))})
	}
	return rows, nil
}

func series(ctx context.Context, cfg cold.Config, modes ...string) (map[string]*cold.Result, error) {
	results, err := cold.Series(ctx, cfg, modes, 1)
	of := map[string]*cold.Result{}
	for _, r := range results {
		of[r.Mode] = r
	}
	return of, err
}

// contactProcesses is the number of processes whose first contact is measured.
const contactProcesses = 15

// contacts measures the first contact of processes with an agent that runs.
func contacts(ctx context.Context, cfg *Config) ([]Row, error) {
	dir, err := os.MkdirTemp("", "rfaas-bench")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	secret := filepath.Join(dir, "secret")
	e, err := cold.StartExecutor(ctx, cfg.Cold, "--secret-file", secret)
	if err != nil {
		return nil, err
	}
	defer e.Stop()
	s, err := client.Connect(ctx, client.Options{Executor: e.Address, Provider: dataplane.SHM, SecretFile: secret}) // so that the agent runs
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var all []int64
	for range contactProcesses {
		c := exec.CommandContext(ctx, cfg.Contact[0], cfg.Contact[1:]...)
		c.Env = append(os.Environ(), "RFAAS_EXECUTOR="+e.Address, "RFAAS_SECRET_FILE="+secret)
		c.Stderr = os.Stderr
		out, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(cfg.Contact, " "), err)
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	slices.Sort(all)
	return []Row{{"S1", "first contact of a process, agent running, p50", micro(all[len(all)/2]), "us", 1000, false, fmt.Sprintf("the slowest of %d: %s", len(all), us(all[len(all)-1]))}}, nil
}

// Contact opens a session and writes how long that took, in ns. It runs in a process of its own.
func Contact(ctx context.Context, w io.Writer) error {
	began := time.Now()
	s, err := client.Connect(ctx, client.Options{})
	if err != nil {
		return err
	}
	took := time.Since(began)
	fmt.Fprintln(w, int64(took))
	return s.Close()
}

func micro(ns int64) float64 { return float64(ns) / 1e3 }

func us(ns int64) string {
	if ns < 1000 {
		return fmt.Sprintf("%d ns", ns)
	}
	return fmt.Sprintf("%.1f us", micro(ns))
}

// WriteJSON writes each line as an object.
func WriteJSON(w io.Writer, rows []Row) error {
	e := json.NewEncoder(w)
	for i := range rows {
		if err := e.Encode(&rows[i]); err != nil {
			return err
		}
	}
	return nil
}

// WriteTable writes the lines as a table. Values outside of their bounds are marked.
func WriteTable(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "\twhat\tmeasured\tbound\t\tbeside it")
	for i := range rows {
		r := &rows[i]
		bound, mark := "", ""
		if r.Bound != 0 {
			bound, mark = fmt.Sprintf("at most %.4g", r.Bound), "holds"
			if r.Bound == none {
				bound = "0"
			}
			if r.Least {
				bound = fmt.Sprintf("at least %.4g", r.Bound)
			}
			if !r.Holds() {
				mark = "MISSED"
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g %s\t%s\t%s\t%s\n", r.ID, r.What, r.Value, r.Unit, bound, mark, r.Beside)
	}
	return t.Flush()
}

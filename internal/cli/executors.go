package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// executorRow is one executor as `rfaas executors --json` prints it.
type executorRow struct {
	Address         string   `json:"address"`
	Node            string   `json:"node"`
	State           string   `json:"state"` // idle, busy, draining or silent
	Cores           uint32   `json:"cores"`
	FreeCores       uint32   `json:"free_cores"`
	MemoryBytes     uint64   `json:"memory_bytes"`
	FreeMemoryBytes uint64   `json:"free_memory_bytes"`
	Providers       []string `json:"providers"`
	AgeMS           uint64   `json:"age_ms"`          // since the last heartbeat
	Until           uint64   `json:"available_until"` // Unix seconds, 0: not known
	Leases          uint32   `json:"leases"`
	Addresses       []string `json:"addresses,omitempty"` // of its network devices
	By              string   `json:"by"`                  // memory or message: how this was learned
	Slowdown        float64  `json:"neighbour_slowdown"`  // 1.01 if other programs of the node need 1 % more time beside the workers; 0: not measured
	Incarnation     string   `json:"incarnation"`

	nodeID string
}

// reachable returns an error if an executor cannot be dialled at its address from this node.
func (r *executorRow) reachable() error {
	self, err := control.NodeID()
	if err == nil {
		err = control.CheckLocal(r.Address, r.nodeID, self)
	}
	return err
}

func stateText(alive, draining, cordoned bool, free, cores uint32) string {
	switch {
	case !alive:
		return "silent"
	case cordoned:
		return "cordoned"
	case draining:
		return "draining"
	case free < cores:
		return "busy"
	}
	return "idle"
}

func rowOf(e *control.ExecutorEntry) executorRow {
	i := e.GetInfo()
	return executorRow{Address: e.GetAddress(), Node: i.GetNode(), State: stateText(e.GetAlive(), i.GetDraining(), i.GetCordoned(), i.GetFreeCores(), i.GetCores()),
		Cores: i.GetCores(), FreeCores: i.GetFreeCores(), MemoryBytes: i.GetMemoryBytes(), FreeMemoryBytes: i.GetFreeMemoryBytes(),
		Leases: i.GetLeases(), Providers: i.GetProviders(), AgeMS: e.GetAgeMs(), Until: i.GetAvailableUntil(), Slowdown: float64(i.GetNeighbourSlowdown()) / 1000, Incarnation: fmt.Sprintf("%x", i.GetIncarnation()), By: "message", nodeID: i.GetNodeId()}
}

func newExecutors(a *app) *cobra.Command {
	var manager string
	var asJSON, watch bool
	var every time.Duration
	c := &cobra.Command{
		Use:   "executors",
		Short: "List the executors that the resource manager knows",
		Long: "List the executors that the resource manager knows. The list is read from the manager's memory. On shm and verbs\n" +
			"that costs the manager nothing and works while it is stopped. If the memory cannot be reached, the command asks the manager.\n" +
			"--watch runs until it is interrupted: a terminal shows the current state; otherwise each change prints a table, or with\n" +
			"--json a line with an array.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if every < time.Millisecond {
				return a.BadUsage(fmt.Errorf("--every %v: want 1ms at least", every))
			}
			v, err := a.openBoard(manager)
			if err != nil {
				return err
			}
			defer v.close()
			if watch {
				return a.watchExecutors(c.Context(), v, every, asJSON)
			}
			rows, err := v.list(c.Context())
			switch {
			case err != nil:
				return err
			case asJSON:
				return a.printJSON(rows)
			}
			return a.printExecutors(rows)
		},
	}
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	c.Flags().BoolVar(&watch, "watch", false, "go on, and print again when something has changed")
	c.Flags().DurationVar(&every, "every", time.Second, "with --watch: how often to look")
	return c
}

// watchExecutors prints the executors until ctx ends, which is its proper end. While the manager is away it says so and waits.
func (a *app) watchExecutors(ctx context.Context, v *boardView, every time.Duration, asJSON bool) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	screen := !asJSON && isTerminal(a.Stdout)
	var last []executorRow
	away := false
	for first := true; ; first = false {
		rows, err := v.list(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !away:
			fmt.Fprintf(a.Stderr, "rfaas: %v; waiting for it\n", err)
		case err != nil:
		case screen:
			fmt.Fprint(a.Stdout, "\x1b[H\x1b[2J") // home, clear
			err = a.printExecutors(rows)
		case first || away || !sameExecutors(rows, last):
			if asJSON {
				err = json.NewEncoder(a.Stdout).Encode(rows)
			} else {
				err = a.printExecutors(rows)
			}
			if err != nil {
				return err
			}
			last = rows
		}
		away = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sameExecutors compares all but the ages and the slowdowns, which always change.
func sameExecutors(a, b []executorRow) bool {
	return slices.EqualFunc(a, b, func(x, y executorRow) bool {
		x.AgeMS, y.AgeMS, x.Slowdown, y.Slowdown = 0, 0, 0, 0
		return reflect.DeepEqual(x, y)
	})
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

func (a *app) printExecutors(rows []executorRow) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no executors")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "ADDRESS\tNODE\tSTATE\tFREE/CORES\tFREE/MEMORY\tLEASES\tSLOWDOWN\tPROVIDERS\tUNTIL\tSEEN")
	for _, r := range rows {
		age := time.Duration(r.AgeMS) * time.Millisecond
		fmt.Fprintf(w, "%s\t%s\t%s\t%d/%d\t%s/%s\t%d\t%s\t%s\t%s\t%v ago\n", plain(r.Address), plain(r.Node), r.State, r.FreeCores, r.Cores,
			mib(r.FreeMemoryBytes), mib(r.MemoryBytes), r.Leases, slowdownText(r.Slowdown), plain(strings.Join(r.Providers, ",")), untilText(r.Until), age.Round(100*time.Millisecond))
	}
	return w.Flush()
}

// plain replaces the control characters of a name that others chose, so that a terminal executes nothing in it.
func plain(name string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == utf8.RuneError {
			return ' '
		}
		return r
	}, name)
}

// mib rounds a size down for people.
func mib(n uint64) string { return config.Bytes(n &^ (1<<20 - 1)).String() }

// slowdownText is the slowdown of other programs in percent.
func slowdownText(ratio float64) string {
	if ratio == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*(ratio-1))
}

// untilText is local time of day, with the date unless it is within a day.
func untilText(unix uint64) string {
	if unix == 0 {
		return "-"
	}
	t := time.Unix(int64(unix), 0)
	if left := time.Until(t); left > 24*time.Hour || left < -24*time.Hour {
		return t.Format(time.DateTime)
	}
	return t.Format(time.TimeOnly)
}

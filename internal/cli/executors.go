package cli

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// executorRow is one executor as `rfaas executors --json` prints it.
type executorRow struct {
	Address         string   `json:"address"`
	Node            string   `json:"node"`
	State           string   `json:"state"` // idle, busy, draining or dead
	Cores           uint32   `json:"cores"`
	FreeCores       uint32   `json:"free_cores"`
	MemoryBytes     uint64   `json:"memory_bytes"`
	FreeMemoryBytes uint64   `json:"free_memory_bytes"`
	Providers       []string `json:"providers"`
	AgeMS           uint64   `json:"age_ms"`          // since the last heartbeat
	Until           uint64   `json:"available_until"` // Unix seconds, 0: not known
	Incarnation     string   `json:"incarnation"`
}

func rowOf(e *control.ExecutorEntry) executorRow {
	i := e.GetInfo()
	state := "idle"
	switch {
	case !e.GetAlive():
		state = "dead"
	case i.GetDraining():
		state = "draining"
	case i.GetFreeCores() < i.GetCores():
		state = "busy"
	}
	return executorRow{Address: e.GetAddress(), Node: i.GetNode(), State: state, Cores: i.GetCores(),
		FreeCores: i.GetFreeCores(), MemoryBytes: i.GetMemoryBytes(), FreeMemoryBytes: i.GetFreeMemoryBytes(),
		Providers: i.GetProviders(), AgeMS: e.GetAgeMs(), Until: i.GetAvailableUntil(), Incarnation: fmt.Sprintf("%x", i.GetIncarnation())}
}

func newExecutors(a *app) *cobra.Command {
	var manager string
	var asJSON bool
	c := &cobra.Command{
		Use:   "executors",
		Short: "List the executors that the resource manager knows",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			conn, err := a.dial(manager)
			if err != nil {
				return err
			}
			defer conn.Close()
			reply, err := control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
			if err != nil {
				return fmt.Errorf("resource manager at %s: %s", manager, control.Text(err))
			}
			rows := make([]executorRow, 0, len(reply.GetExecutors()))
			for _, e := range reply.GetExecutors() {
				rows = append(rows, rowOf(e))
			}
			if asJSON {
				return a.printJSON(rows)
			}
			return a.printExecutors(rows)
		},
	}
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

func (a *app) printExecutors(rows []executorRow) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no executors")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "ADDRESS\tNODE\tSTATE\tFREE/CORES\tFREE/MEMORY\tPROVIDERS\tUNTIL\tSEEN")
	for _, r := range rows {
		age := time.Duration(r.AgeMS) * time.Millisecond
		fmt.Fprintf(w, "%s\t%s\t%s\t%d/%d\t%s/%s\t%s\t%s\t%v ago\n", r.Address, r.Node, r.State, r.FreeCores, r.Cores,
			mib(r.FreeMemoryBytes), mib(r.MemoryBytes), strings.Join(r.Providers, ","), untilText(r.Until), age.Round(100*time.Millisecond))
	}
	return w.Flush()
}

// mib rounds a size down for people.
func mib(n uint64) string { return config.Bytes(n &^ (1<<20 - 1)).String() }

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

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// leaseRow is one lease as `rfaas leases --json` prints it.
type leaseRow struct {
	ID          string `json:"id"` // decimal: JSON numbers do not hold 64 bits everywhere
	Tenant      string `json:"tenant"`
	State       string `json:"state"`
	Workers     uint32 `json:"workers"`
	Wanted      uint32 `json:"workers_wanted"` // more than workers: the others are added as cores become free
	CPUs        string `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
	AgeMS       uint64 `json:"age_ms"`
	LeftMS      uint64 `json:"left_ms"`
	Flag        string `json:"flag,omitempty"` // unreserved: granted while the tenant's limit could not be looked at
}

// onExecutor runs f with a connection to an executor; its error names the address.
func (a *app) onExecutor(ctx context.Context, address string, f func(context.Context, control.ExecutorClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	conn, err := a.dial(address)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := f(ctx, control.NewExecutorClient(conn)); err != nil {
		return daemonError{"executor at " + address, err}
	}
	return nil
}

func newLeases(a *app) *cobra.Command {
	var executor string
	var asJSON bool
	c := &cobra.Command{
		Use:   "leases",
		Short: "List the leases of an executor: yours, or all for an operator",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			rows := []leaseRow{}
			err := a.onExecutor(c.Context(), executor, func(ctx context.Context, e control.ExecutorClient) error {
				reply, err := e.Leases(ctx, &control.LeasesRequest{})
				for _, l := range reply.GetLeases() {
					cpus := make([]int, 0, len(l.GetCpus()))
					for _, n := range l.GetCpus() {
						cpus = append(cpus, int(n))
					}
					rows = append(rows, leaseRow{ID: strconv.FormatUint(l.GetLeaseId(), 10), Tenant: l.GetTenant(),
						State: l.GetState(), Workers: l.GetWorkers(), Wanted: max(l.GetWorkersWanted(), l.GetWorkers()), CPUs: config.Cores{List: cpus}.String(),
						MemoryBytes: l.GetMemoryBytes(), AgeMS: l.GetAgeMs(), LeftMS: l.GetLeftMs(), Flag: l.GetFlag()})
				}
				return err
			})
			switch {
			case err != nil:
				return err
			case asJSON:
				return a.printJSON(rows)
			}
			return a.printLeases(rows)
		},
	}
	a.addressFlag(c, &executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

func (a *app) printLeases(rows []leaseRow) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no leases")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "LEASE\tTENANT\tSTATE\tWORKERS\tCPUS\tMEMORY\tAGE\tLEFT\tFLAG")
	seconds := func(ms uint64) time.Duration { return (time.Duration(ms) * time.Millisecond).Round(time.Second) }
	for _, r := range rows {
		workers := fmt.Sprint(r.Workers)
		if r.Workers < r.Wanted {
			workers = fmt.Sprintf("%d of %d", r.Workers, r.Wanted)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%v\t%v\t%s\n", r.ID, plain(r.Tenant), r.State, workers, r.CPUs, mib(r.MemoryBytes),
			seconds(r.AgeMS), seconds(r.LeftMS), cmp.Or(r.Flag, "-"))
	}
	return w.Flush()
}

func newRevoke(a *app) *cobra.Command {
	var executor, reason string
	c := &cobra.Command{
		Use:   "revoke LEASE",
		Short: "End a lease at once: the executor kills its workers",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 0, 64)
			if err != nil || id == 0 {
				return a.BadUsage(fmt.Errorf("%q is no lease: want a number as rfaas leases prints it", args[0]))
			}
			return a.onExecutor(c.Context(), executor, func(ctx context.Context, e control.ExecutorClient) error {
				_, err := e.Revoke(ctx, &control.RevokeRequest{LeaseId: id, Reason: reason})
				return err
			})
		},
	}
	a.addressFlag(c, &executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	c.Flags().StringVar(&reason, "reason", "", "reason that the client is told")
	return c
}

func newDrain(a *app) *cobra.Command {
	var executor, manager, reason string
	var grace time.Duration
	c := &cobra.Command{
		Use:   "drain [NODE]",
		Short: "Drain an executor: it grants no new leases, running calls finish, then it ends",
		Long: "Drain an executor: it grants no new leases, running calls finish, then it ends. NODE is the control address of an executor,\n" +
			"or a host name as rfaas executors prints it: then all executors of that node drain. The resource manager knows their\n" +
			"addresses. Without NODE, --executor or $RFAAS_EXECUTOR must name the executor.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if grace < 0 {
				return a.BadUsage(fmt.Errorf("grace %v is negative", grace))
			}
			if len(args) == 0 && !c.Flags().Changed("executor") && a.Getenv("RFAAS_EXECUTOR") == "" {
				return a.BadUsage(errors.New("which executor? give NODE (rfaas executors lists them), --executor or RFAAS_EXECUTOR"))
			}
			addresses := []string{executor}
			if len(args) > 0 {
				if c.Flags().Changed("executor") {
					return a.BadUsage(fmt.Errorf("both NODE %q and --executor %s: want one", args[0], executor))
				}
				var err error
				if addresses, err = a.executorsOf(c.Context(), manager, args[0]); err != nil {
					return err
				}
			}
			var errs []error
			for _, address := range addresses {
				err := a.onExecutor(c.Context(), address, func(ctx context.Context, e control.ExecutorClient) error {
					_, err := e.Drain(ctx, &control.DrainRequest{GraceMs: uint64(grace.Milliseconds()), Reason: reason})
					return err
				})
				if errs = append(errs, err); err == nil && len(args) > 0 {
					fmt.Fprintf(a.Stdout, "%s drains\n", address)
				}
			}
			return errors.Join(errs...)
		},
	}
	a.addressFlag(c, &executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "with NODE: address of the resource manager")
	c.Flags().DurationVar(&grace, "grace", 0, "how long running calls may take (default: the executor's setting)")
	c.Flags().StringVar(&reason, "reason", "", "what the clients are told")
	return c
}

// executorsOf finds the addresses of a node's living executors, or of the one with that address.
func (a *app) executorsOf(ctx context.Context, manager, node string) ([]string, error) {
	v, err := a.openBoard(manager)
	if err != nil {
		return nil, err
	}
	defer v.close()
	rows, err := v.list(ctx)
	if err != nil {
		return nil, err
	}
	var found []string
	dead := false
	for _, r := range rows {
		if r.Node != node && r.Address != node {
			continue
		}
		if r.State == "silent" {
			dead = true
			continue
		}
		if err := r.reachable(); err != nil {
			return nil, err
		}
		found = append(found, r.Address)
	}
	switch {
	case len(found) > 0:
		return found, nil
	case dead:
		return nil, fmt.Errorf("the executor of node %q is silent", node)
	}
	return nil, fmt.Errorf("no executor of node %q among the %d that the resource manager at %s knows (rfaas executors lists them)", node, len(rows), manager)
}

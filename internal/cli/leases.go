package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// leaseRow is one lease as `rfaas leases --json` prints it.
type leaseRow struct {
	ID          string `json:"id"` // decimal: JSON numbers do not hold 64 bits everywhere
	Executor    string `json:"executor"`
	Tenant      string `json:"tenant"`
	State       string `json:"state"`
	Workers     uint32 `json:"workers"`
	Wanted      uint32 `json:"workers_wanted"` // more than workers: the others are added as cores become free
	CPUs        string `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
	AgeMS       uint64 `json:"age_ms"`
	LeftMS      uint64 `json:"left_ms"`
	Flag        string `json:"flag,omitempty"` // unreserved: granted while the tenant's limit could not be checked
}

// onExecutor runs f with a connection to an executor. Its errors name the address.
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

// atOnce is the largest number of executors that a command asks at the same time.
const atOnce = 32

// onExecutors runs f for several executors at the same time. It returns the errors in the order of the addresses.
func (a *app) onExecutors(ctx context.Context, addresses []string, f func(ctx context.Context, i int, e control.ExecutorClient) error) error {
	errs := make([]error, len(addresses))
	var asked sync.WaitGroup
	running := make(chan struct{}, atOnce)
	for i, address := range addresses {
		running <- struct{}{}
		asked.Go(func() {
			errs[i] = a.onExecutor(ctx, address, func(ctx context.Context, e control.ExecutorClient) error { return f(ctx, i, e) })
			<-running
		})
	}
	asked.Wait()
	return errors.Join(errs...)
}

// leaseRange selects the leases that a command lists or revokes: by executor and by tenant.
type leaseRange struct {
	executor, manager, tenant string
	all                       bool
}

// flags adds the flags of the range to a command.
func (r *leaseRange) flags(a *app, c *cobra.Command) {
	a.addressFlag(c, &r.executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	a.addressFlag(c, &r.manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager, for all its executors")
	c.Flags().BoolVar(&r.all, "all", false, "use all executors of the resource manager, even if only RFAAS_EXECUTOR is set")
	c.Flags().StringVar(&r.tenant, "tenant", "", "only leases of this tenant")
}

// check decides between one executor and all executors of the resource manager, as client programs do: an address in the flags wins over those in
// the environment, and there the manager wins. It returns an error if the flags contradict each other.
func (r *leaseRange) check(a *app, c *cobra.Command) error {
	if c.Flags().Changed("tenant") && r.tenant == "" {
		return a.BadUsage(errors.New("--tenant is empty"))
	}
	chosen := c.Flags().Changed("executor") || c.Flags().Changed("all")
	r.all = r.all || c.Flags().Changed("manager") || !chosen && a.Getenv(grant.EnvManager) != ""
	return cmp.Or(a.oneFlag(c, "executor", "manager"), a.oneFlag(c, "executor", "all"))
}

// unclear says whether only the environment chooses the executors, and names both one executor and a resource manager.
func (r *leaseRange) unclear(a *app, c *cobra.Command) bool {
	for _, name := range []string{"executor", "manager", "all"} {
		if c.Flags().Changed(name) {
			return false
		}
	}
	return a.Getenv(grant.EnvManager) != "" && a.Getenv(grant.EnvExecutor) != ""
}

// addresses returns the addresses of the executors that report to the resource manager, and of the silent ones.
func (r *leaseRange) addresses(ctx context.Context, a *app) (living, silent []string, err error) {
	if !r.all {
		return []string{r.executor}, nil, nil
	}
	v, err := a.openBoard(r.manager)
	if err != nil {
		return nil, nil, err
	}
	defer v.close()
	rows, err := v.list(ctx)
	var errs []error
	for _, row := range rows {
		if row.State == "silent" {
			silent = append(silent, row.Address)
		} else if err := row.reachable(); err != nil {
			errs = append(errs, err)
		} else {
			living = append(living, row.Address)
		}
	}
	return living, silent, cmp.Or(err, errors.Join(errs...))
}

// leases asks one executor for its leases and returns those of the range.
func (r *leaseRange) leases(ctx context.Context, address string, e control.ExecutorClient) ([]leaseRow, error) {
	reply, err := e.Leases(ctx, &control.LeasesRequest{})
	var rows []leaseRow
	for _, l := range reply.GetLeases() {
		if r.tenant != "" && l.GetTenant() != r.tenant {
			continue
		}
		cpus := make([]int, 0, len(l.GetCpus()))
		for _, n := range l.GetCpus() {
			cpus = append(cpus, int(n))
		}
		rows = append(rows, leaseRow{ID: strconv.FormatUint(l.GetLeaseId(), 10), Executor: address, Tenant: l.GetTenant(),
			State: l.GetState(), Workers: l.GetWorkers(), Wanted: max(l.GetWorkersWanted(), l.GetWorkers()), CPUs: config.Cores{List: cpus}.String(),
			MemoryBytes: l.GetMemoryBytes(), AgeMS: l.GetAgeMs(), LeftMS: l.GetLeftMs(), Flag: l.GetFlag()})
	}
	return rows, err
}

func newLeases(a *app) *cobra.Command {
	var r leaseRange
	var asJSON bool
	c := &cobra.Command{
		Use:   "leases",
		Short: "List leases of an executor, or of all executors: your own, or all if you are an operator",
		Long: "List the leases of the executor that --executor names, or of all executors of the resource manager that --manager names. Without\n" +
			"these flags, $RFAAS_MANAGER names the resource manager, or else $RFAAS_EXECUTOR names the executor. A tenant sees its own\n" +
			"leases, an operator sees all.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := r.check(a, c); err != nil {
				return err
			}
			addresses, silent, err := r.addresses(c.Context(), a)
			if err != nil && len(addresses) == 0 {
				return err
			}
			for _, address := range silent {
				fmt.Fprintf(a.Stderr, "rfaas: the executor at %s is silent: its leases are not listed\n", plain(address))
			}
			found := make([][]leaseRow, len(addresses))
			err = errors.Join(err, a.onExecutors(c.Context(), addresses, func(ctx context.Context, i int, e control.ExecutorClient) (err error) {
				found[i], err = r.leases(ctx, addresses[i], e)
				return err
			}))
			rows := slices.Concat(found...)
			if err != nil && len(rows) == 0 {
				return err
			}
			if asJSON {
				return errors.Join(a.printJSON(append([]leaseRow{}, rows...)), err)
			}
			return errors.Join(a.printLeases(rows, r.all), err)
		},
	}
	r.flags(a, c)
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return c
}

// printLeases prints a table. With all, it has a column of executors.
func (a *app) printLeases(rows []leaseRow, all bool) error {
	if len(rows) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no leases")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	if all {
		fmt.Fprint(w, "EXECUTOR\t")
	}
	fmt.Fprintln(w, "LEASE\tTENANT\tSTATE\tWORKERS\tCPUS\tMEMORY\tAGE\tLEFT\tFLAG")
	seconds := func(ms uint64) time.Duration { return (time.Duration(ms) * time.Millisecond).Round(time.Second) }
	for _, r := range rows {
		workers := fmt.Sprint(r.Workers)
		if r.Workers < r.Wanted {
			workers = fmt.Sprintf("%d of %d", r.Workers, r.Wanted)
		}
		if all {
			fmt.Fprintf(w, "%s\t", plain(r.Executor))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%v\t%v\t%s\n", r.ID, plain(r.Tenant), plain(r.State), workers, r.CPUs, mib(r.MemoryBytes),
			seconds(r.AgeMS), seconds(r.LeftMS), cmp.Or(plain(r.Flag), "-"))
	}
	return w.Flush()
}

func newRevoke(a *app) *cobra.Command {
	var r leaseRange
	var reason string
	c := &cobra.Command{
		Use:   "revoke LEASE | revoke --tenant TENANT",
		Short: "End leases at once: the executor kills their workers",
		Long: "End one lease at once, or all leases of a tenant: the executor kills their workers. The command asks the same\n" +
			"executors as rfaas leases with the same flags. An operator may end all leases, a tenant only its own. A program can open a new\n" +
			"lease at once, and a lease with failover does so by itself. To prevent that, revoke the tenant's tokens first (rfaas token\n" +
			"revoke --tenant), or drain the node (rfaas drain). If RFAAS_MANAGER and RFAAS_EXECUTOR are both set, --tenant needs\n" +
			"--executor, --manager or --all.",
		Example: "  rfaas revoke 1234567890 --reason 'node is needed'\n  rfaas revoke --tenant ann --manager service:7464",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := r.check(a, c); err != nil {
				return err
			}
			switch {
			case len(args) == 1 && r.tenant != "":
				return a.BadUsage(fmt.Errorf("both the lease %s and --tenant: want one", args[0]))
			case len(args) == 0 && r.tenant == "":
				return a.BadUsage(errors.New("which leases? give LEASE (rfaas leases lists them) or --tenant"))
			case len(args) == 0 && r.unclear(a, c):
				return a.BadUsage(fmt.Errorf("%s and %s are both set: give --executor or --all", grant.EnvManager, grant.EnvExecutor))
			case len(args) == 0:
				return a.revokeTenant(c.Context(), &r, reason)
			}
			id, err := strconv.ParseUint(args[0], 0, 64)
			if err != nil || id == 0 {
				return a.BadUsage(fmt.Errorf("%q is not a lease: want a number that rfaas leases prints", args[0]))
			}
			return a.revokeLease(c.Context(), &r, id, reason)
		},
	}
	r.flags(a, c)
	c.Flags().StringVar(&reason, "reason", "", "reason to report to the client")
	return c
}

// revokeLease ends one lease. If r has several executors, it asks all of them, because only its executor knows the lease.
func (a *app) revokeLease(ctx context.Context, r *leaseRange, id uint64, reason string) error {
	addresses, silent, err := r.addresses(ctx, a)
	var revoked atomic.Bool
	var without atomic.Int32 // executors that have answered that they do not have the lease
	err = errors.Join(err, a.onExecutors(ctx, addresses, func(ctx context.Context, _ int, e control.ExecutorClient) error {
		_, err := e.Revoke(ctx, &control.RevokeRequest{LeaseId: id, Reason: reason})
		switch {
		case err == nil:
			revoked.Store(true)
		case r.all && control.ClassOf(err) == control.ClassLease:
			without.Add(1)
			return nil
		}
		return err
	}))
	if revoked.Load() { // ids of leases are random, so no other executor has this one
		return nil
	}
	if err != nil && len(addresses) == 0 {
		return err
	}
	for _, address := range silent {
		err = errors.Join(err, fmt.Errorf("the executor at %s is silent: a lease on it cannot be revoked", address))
	}
	if r.all {
		err = errors.Join(fmt.Errorf("lease %d: unknown to the executors that answer (%d), or another tenant's", id, without.Load()), err)
	}
	return err
}

// revokeTenant ends the leases of a tenant. Its error names each executor on which leases of the tenant may be left.
func (a *app) revokeTenant(ctx context.Context, r *leaseRange, reason string) error {
	addresses, silent, err := r.addresses(ctx, a)
	if err != nil && len(addresses)+len(silent) == 0 {
		return err
	}
	errs := []error{err}
	for _, address := range silent {
		errs = append(errs, fmt.Errorf("the executor at %s is silent: no lease on it was revoked", address))
	}
	revoked := make([]int, len(addresses))
	errs = append(errs, a.onExecutors(ctx, addresses, func(ctx context.Context, i int, e control.ExecutorClient) error {
		rows, err := r.leases(ctx, addresses[i], e)
		errs := []error{err}
		for _, row := range rows {
			id, _ := strconv.ParseUint(row.ID, 10, 64)
			_, err := e.Revoke(ctx, &control.RevokeRequest{LeaseId: id, Reason: reason})
			switch {
			case err == nil:
				revoked[i]++
			case control.ClassOf(err) != control.ClassLease: // a lease error: the lease has already ended
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}))
	for i, n := range revoked {
		if n > 0 {
			fmt.Fprintf(a.Stdout, "leases of %s revoked on %s: %d\n", plain(r.tenant), plain(addresses[i]), n)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if sum := slices.Max(append(revoked, 0)); sum == 0 {
		fmt.Fprintf(a.Stdout, "%s has no leases that you may end\n", plain(r.tenant))
	}
	return nil
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
					fmt.Fprintf(a.Stdout, "%s is draining\n", address)
				}
			}
			return errors.Join(errs...)
		},
	}
	a.addressFlag(c, &executor, "executor", "RFAAS_EXECUTOR", control.DefaultExecutorAddress, "address of the executor")
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "with NODE: address of the resource manager")
	c.Flags().DurationVar(&grace, "grace", 0, "how long running calls may take (default: the executor's setting)")
	c.Flags().StringVar(&reason, "reason", "", "reason to report to the clients")
	return c
}

// executorsOf returns the addresses of a node's executors that report to the resource manager. node may also be the address of one executor.
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

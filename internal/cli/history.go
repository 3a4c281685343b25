package cli

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
)

// historyStep is a step as `rfaas history --json` prints it. Hours are core-hours.
type historyStep struct {
	Start         string                   `json:"start"`
	Seconds       float64                  `json:"seconds"` // for which the resource manager ran
	Harvested     float64                  `json:"harvested_hours"`
	Idle          float64                  `json:"idle_hours"`
	Batch         float64                  `json:"batch_hours"`
	Calls         uint64                   `json:"calls"`
	Failures      uint64                   `json:"failures"`
	CallSeconds   float64                  `json:"call_seconds"`
	Starts        map[string]historyStarts `json:"starts"`
	FailedStarts  uint64                   `json:"failed_starts"`
	Deaths        uint64                   `json:"worker_deaths"`
	Ended         map[string]uint64        `json:"leases_ended"`
	Tenants       []historyTenant          `json:"tenants"`
	stats         board.Stats
	revokedLeases uint64
}

type historyStarts struct {
	Count  uint64  `json:"count"`
	Mean   float64 `json:"mean_seconds"`
	Median float64 `json:"median_seconds"`
	P95    float64 `json:"p95_seconds"`
}

type historyTenant struct {
	Tenant      string  `json:"tenant"` // empty: further tenants
	Hours       float64 `json:"core_hours"`
	GiBHours    float64 `json:"gib_hours"`
	Calls       uint64  `json:"calls"`
	Failures    uint64  `json:"failures"`
	CallSeconds float64 `json:"call_seconds"`
	BytesIn     uint64  `json:"bytes_in"`
	BytesOut    uint64  `json:"bytes_out"`
}

func newHistory(a *app) *cobra.Command {
	var manager, tenant, since string
	var step time.Duration
	var asJSON, asCSV, tenants bool
	c := &cobra.Command{
		Use:   "history",
		Short: "Show what the cluster did over the last hour, day, week or year",
		Long: "Show what the cluster did, in steps of equal length, as the resource manager's history has it. Core-hours are harvested (leases had the cores),\n" +
			"idle (offered, and no lease had them) or batch (no executor offered them). --since is a duration before now (24h), a date (2026-01-31) or a time\n" +
			"(2026-01-31T15:00:00Z). --step is 10s, 5m, 1h or 24h, which are kept for an hour, a day, a week and a year. By default it is the finest that\n" +
			"goes back far enough in at most 100 steps. --tenants prints the tenants' use instead, and --tenant that of one tenant. A tenant's own token shows its own use only. START-MEDIAN and START-P95\n" +
			"are estimates of how long workers took to start. REVOKED counts leases that were revoked or ended by a drain.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			if asJSON && asCSV {
				return a.BadUsage(errors.New("--json and --csv: want one"))
			}
			now := time.Now()
			from, err := parseSince(since, now)
			switch {
			case err != nil:
				return a.BadUsage(err)
			case !from.Before(now):
				return a.BadUsage(fmt.Errorf("--since %q is not in the past", since))
			case step < 0 || step%time.Second != 0:
				return a.BadUsage(fmt.Errorf("--step %v: want 10s, 5m, 1h or 24h", step))
			}
			conn, err := a.dial(manager)
			if err != nil {
				return err
			}
			defer conn.Close()
			r, err := control.NewManagerClient(conn).History(ctx, &control.HistoryRequest{Tenant: tenant,
				Seconds: uint64((now.Sub(from) + time.Second - 1) / time.Second), Step: uint64(step / time.Second)})
			if err != nil {
				return daemonError{"resource manager at " + manager, err}
			}
			steps := stepsOf(r)
			switch {
			case asJSON:
				return a.printJSON(steps)
			case asCSV && (tenants || tenant != ""):
				return csv.NewWriter(a.Stdout).WriteAll(tenantRows(steps))
			case asCSV:
				return csv.NewWriter(a.Stdout).WriteAll(stepRows(steps))
			case tenants:
				return a.printTenants(sumSteps(steps))
			}
			return a.printHistory(steps, tenant)
		},
	}
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	c.Flags().StringVar(&tenant, "tenant", "", "only the use of this tenant")
	c.Flags().BoolVar(&tenants, "tenants", false, "print the use of each tenant")
	c.Flags().StringVar(&since, "since", "24h", "how far back")
	c.Flags().DurationVar(&step, "step", 0, "length of a step: 10s, 5m, 1h or 24h (default: by --since)")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of steps")
	c.Flags().BoolVar(&asCSV, "csv", false, "print comma-separated values")
	return c
}

func hours(us uint64) float64 { return float64(us) / 3.6e9 }

func tenantOf(name string, u []uint64) historyTenant {
	var use accounting.Use
	copy(use[:], u)
	return historyTenant{Tenant: name, Hours: hours(use[accounting.CoreMicros]), GiBHours: float64(use[accounting.MemoryMiBMillis]) / 1024 / 3.6e6,
		Calls: use[accounting.Calls], Failures: use[accounting.Failures], CallSeconds: float64(use[accounting.ExecMicros]) / 1e6,
		BytesIn: use[accounting.BytesIn], BytesOut: use[accounting.BytesOut]}
}

func (t *historyTenant) add(o *historyTenant) {
	t.Hours += o.Hours
	t.GiBHours += o.GiBHours
	t.Calls += o.Calls
	t.Failures += o.Failures
	t.CallSeconds += o.CallSeconds
	t.BytesIn += o.BytesIn
	t.BytesOut += o.BytesOut
}

func stepsOf(r *control.HistoryReply) []historyStep {
	steps := make([]historyStep, 0, len(r.GetSteps()))
	for _, p := range r.GetSteps() {
		s := historyStep{Start: time.Unix(p.GetStart(), 0).Format(time.RFC3339), Seconds: float64(p.GetWatchedUs()) / 1e6, Harvested: hours(p.GetHarvestedUs()),
			Idle: hours(p.GetIdleUs()), Batch: hours(p.GetBatchUs()), Tenants: []historyTenant{}, stats: board.StatsOf(p.GetStats())}
		for _, u := range p.GetTenants() {
			t := tenantOf(u.GetTenant(), u.GetUse())
			s.Calls += t.Calls
			s.Failures += t.Failures
			s.CallSeconds += t.CallSeconds
			s.Tenants = append(s.Tenants, t)
		}
		slices.SortFunc(s.Tenants, byHours)
		s.fill()
		steps = append(steps, s)
	}
	return steps
}

// fill sets what follows from stats.
func (s *historyStep) fill() {
	s.Starts, s.Ended = map[string]historyStarts{}, map[string]uint64{}
	for i, name := range board.StartNames {
		c := &s.stats.Starts[i]
		h := historyStarts{Count: c.Count, Median: c.Quantile(0.5).Seconds(), P95: c.Quantile(0.95).Seconds()}
		if c.Count > 0 {
			h.Mean = float64(c.Nanos) / float64(c.Count) / 1e9
		}
		s.Starts[name] = h
	}
	for i, name := range board.EndNames {
		s.Ended[name] = s.stats.Ended[i]
	}
	s.FailedStarts, s.Deaths = s.stats.FailedStarts, s.stats.Deaths
	s.revokedLeases = s.stats.Ended[board.EndRevoked] + s.stats.Ended[board.EndDrained]
}

func byHours(a, b historyTenant) int {
	switch {
	case a.Hours > b.Hours:
		return -1
	case a.Hours < b.Hours:
		return 1
	}
	return 0
}

// sumSteps adds up all steps.
func sumSteps(steps []historyStep) (sum historyStep) {
	tenants := map[string]*historyTenant{}
	for i := range steps {
		s := &steps[i]
		sum.Seconds += s.Seconds
		sum.Harvested += s.Harvested
		sum.Idle += s.Idle
		sum.Batch += s.Batch
		sum.Calls += s.Calls
		sum.Failures += s.Failures
		sum.CallSeconds += s.CallSeconds
		sum.stats.Add(&s.stats)
		for k := range s.Tenants {
			t := &s.Tenants[k]
			if tenants[t.Tenant] == nil {
				tenants[t.Tenant] = &historyTenant{Tenant: t.Tenant}
			}
			tenants[t.Tenant].add(t)
		}
	}
	for _, t := range tenants {
		sum.Tenants = append(sum.Tenants, *t)
	}
	slices.SortFunc(sum.Tenants, byHours)
	sum.fill()
	return sum
}

// all returns the starts of all paths together.
func (s *historyStep) all() (all board.StartCounts) {
	for i := range s.stats.Starts {
		c := &s.stats.Starts[i]
		all.Count += c.Count
		for k, n := range c.Buckets {
			all.Buckets[k] += n
		}
	}
	return all
}

// short formats a duration with three digits.
func short(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return strconv.FormatInt(d.Microseconds(), 10) + "us"
	case d < time.Second:
		return strconv.FormatFloat(float64(d)/1e6, 'g', 3, 64) + "ms"
	}
	return strconv.FormatFloat(d.Seconds(), 'g', 3, 64) + "s"
}

func meanCall(seconds float64, calls uint64) string {
	if calls == 0 {
		return "-"
	}
	return short(time.Duration(seconds / float64(calls) * 1e9))
}

func (a *app) printHistory(steps []historyStep, tenant string) error {
	if len(steps) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "the resource manager has no history of that time")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	row := func(start string, s *historyStep) {
		if tenant != "" {
			var t historyTenant
			for i := range s.Tenants {
				t.add(&s.Tenants[i])
			}
			fmt.Fprintf(w, "%s\t%s\t%.3f\t%.3f\t%d\t%d\t%s\n", start, plain(tenant), t.Hours, t.GiBHours, t.Calls, t.Failures, meanCall(t.CallSeconds, t.Calls))
			return
		}
		all := s.all()
		fmt.Fprintf(w, "%s\t%.3f\t%.3f\t%.3f\t%d\t%d\t%d\t%d\t%s\t%s\t%d\t%d\t%s\t%d\n", start, s.Harvested, s.Idle, s.Batch, s.Starts["cold"].Count, s.Starts["seeded"].Count,
			s.Starts["pooled"].Count, s.Starts["cached"].Count, short(all.Quantile(0.5)), short(all.Quantile(0.95)), s.Calls, s.Failures, meanCall(s.CallSeconds, s.Calls), s.revokedLeases)
	}
	if tenant != "" {
		fmt.Fprintln(w, "START\tTENANT\tCORE-HOURS\tGIB-HOURS\tCALLS\tFAILURES\tMEAN-CALL")
	} else {
		fmt.Fprintln(w, "START\tHARVESTED\tIDLE\tBATCH\tCOLD\tSEEDED\tPOOLED\tCACHED\tSTART-MEDIAN\tSTART-P95\tCALLS\tFAILURES\tMEAN-CALL\tREVOKED")
	}
	for i := range steps {
		at, err := time.Parse(time.RFC3339, steps[i].Start)
		if err != nil {
			return err
		}
		row(at.Local().Format("2006-01-02T15:04:05"), &steps[i])
	}
	sum := sumSteps(steps)
	row("total", &sum)
	return w.Flush()
}

func (a *app) printTenants(sum historyStep) error {
	if len(sum.Tenants) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "nothing was used")
		return err
	}
	total := 0.0
	for _, t := range sum.Tenants {
		total += t.Hours
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "TENANT\tCORE-HOURS\tSHARE\tGIB-HOURS\tCALLS\tFAILURES\tMEAN-CALL")
	for _, t := range sum.Tenants {
		name, share := plain(t.Tenant), "-"
		if t.Tenant == "" {
			name = "(others)"
		}
		if total > 0 {
			share = fmt.Sprintf("%.1f%%", 100*t.Hours/total)
		}
		fmt.Fprintf(w, "%s\t%.3f\t%s\t%.3f\t%d\t%d\t%s\n", name, t.Hours, share, t.GiBHours, t.Calls, t.Failures, meanCall(t.CallSeconds, t.Calls))
	}
	return w.Flush()
}

func stepRows(steps []historyStep) [][]string {
	head := []string{"start", "seconds", "harvested_hours", "idle_hours", "batch_hours", "calls", "failures", "call_seconds", "failed_starts", "worker_deaths"}
	for _, name := range board.StartNames {
		head = append(head, name+"_starts", name+"_mean_seconds", name+"_median_seconds", name+"_p95_seconds")
	}
	for _, name := range board.EndNames {
		head = append(head, "leases_"+name)
	}
	rows := [][]string{head}
	float := func(f float64) string { return strconv.FormatFloat(f, 'g', 9, 64) }
	count := func(n uint64) string { return strconv.FormatUint(n, 10) }
	for i := range steps {
		s := &steps[i]
		row := []string{s.Start, float(s.Seconds), float(s.Harvested), float(s.Idle), float(s.Batch), count(s.Calls), count(s.Failures), float(s.CallSeconds), count(s.FailedStarts), count(s.Deaths)}
		for _, name := range board.StartNames {
			h := s.Starts[name]
			row = append(row, count(h.Count), float(h.Mean), float(h.Median), float(h.P95))
		}
		for _, name := range board.EndNames {
			row = append(row, count(s.Ended[name]))
		}
		rows = append(rows, row)
	}
	return rows
}

func tenantRows(steps []historyStep) [][]string {
	rows := [][]string{{"start", "tenant", "core_hours", "gib_hours", "calls", "failures", "call_seconds", "bytes_in", "bytes_out"}}
	float := func(f float64) string { return strconv.FormatFloat(f, 'g', 9, 64) }
	count := func(n uint64) string { return strconv.FormatUint(n, 10) }
	for _, s := range steps {
		for _, t := range s.Tenants {
			rows = append(rows, []string{s.Start, t.Tenant, float(t.Hours), float(t.GiBHours), count(t.Calls), count(t.Failures), float(t.CallSeconds), count(t.BytesIn), count(t.BytesOut)})
		}
	}
	return rows
}

package cli

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/rfaas-go/rfaas/internal/control"
)

// bill is one tenant's as `rfaas bill --json` prints it. Numbers are text: they are exact and may be large.
type bill struct {
	Tenant   string     `json:"tenant"`
	Since    string     `json:"since,omitempty"`
	Currency string     `json:"currency,omitempty"`
	Amount   string     `json:"amount"`
	Lines    []billLine `json:"lines"`
}

type billLine struct {
	Item     string `json:"item"`
	Units    string `json:"units"` // as counted: core-microseconds, MiB-milliseconds, calls, bytes
	Quantity string `json:"quantity"`
	Price    string `json:"price"`
	Amount   string `json:"amount"`
}

func newBill(a *app) *cobra.Command {
	var manager, tenant, since string
	var asJSON, asCSV bool
	c := &cobra.Command{
		Use:   "bill",
		Short: "Show what tenants have used and owe",
		Long: "Show what tenants have used and owe, as the resource manager's ledger has it. --since is a date (2026-01-31), a time\n" +
			"(2026-01-31T15:00:00Z) or a duration before now (720h); it is rounded down to the hour. --json and --csv have the exact count\n" +
			"too, as units: core-microseconds for hours of cores, MiB-milliseconds for gib-hour, calls, bytes. If an executor was\n" +
			"killed, the time after the last charge of its leases is missing: at most the executor's charge-interval, a second by default.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), a.timeout)
			defer cancel()
			if asJSON && asCSV {
				return a.BadUsage(errors.New("--json and --csv: want one"))
			}
			from, err := parseSince(since, time.Now())
			if err != nil {
				return a.BadUsage(err)
			}
			conn, err := a.dial(manager)
			if err != nil {
				return err
			}
			defer conn.Close()
			req := &control.BillRequest{Tenant: tenant}
			if !from.IsZero() {
				req.Since = from.Unix()
			}
			r, err := control.NewManagerClient(conn).Bill(ctx, req)
			if err != nil {
				return daemonError{"resource manager at " + manager, err}
			}
			if t := r.GetTrouble(); t != "" {
				fmt.Fprintf(a.Stderr, "rfaas: warning: %s\n", t)
			}
			bills := billsOf(r, from)
			switch {
			case asJSON:
				return a.printJSON(bills)
			case asCSV:
				return a.printBillsCSV(bills)
			}
			return a.printBills(bills)
		},
	}
	a.addressFlag(c, &manager, "manager", "RFAAS_MANAGER", control.DefaultManagerAddress, "address of the resource manager")
	c.Flags().StringVar(&tenant, "tenant", "", "only this tenant")
	c.Flags().StringVar(&since, "since", "", "only what was used since then (default: from the beginning)")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	c.Flags().BoolVar(&asCSV, "csv", false, "print comma-separated values")
	return c
}

// parseSince reads a date, a time or a duration before now; zero time for "".
func parseSince(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339, time.DateTime, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return t, nil
		}
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, fmt.Errorf("--since %q is not a date like 2026-01-31, a time like 2026-01-31T15:00:00Z or a duration like 720h", text)
}

func billsOf(r *control.BillReply, since time.Time) []bill {
	bills := make([]bill, 0, len(r.GetBills()))
	for _, t := range r.GetBills() {
		b := bill{Tenant: t.GetTenant(), Currency: r.GetCurrency(), Amount: t.GetAmount()}
		if !since.IsZero() {
			b.Since = since.Truncate(time.Hour).Format(time.RFC3339)
		}
		for _, l := range t.GetLines() {
			b.Lines = append(b.Lines, billLine{l.GetItem(), l.GetUnits(), l.GetQuantity(), l.GetPrice(), l.GetAmount()})
		}
		bills = append(bills, b)
	}
	return bills
}

func (a *app) printBillsCSV(bills []bill) error {
	w := csv.NewWriter(a.Stdout)
	rows := [][]string{{"tenant", "item", "units", "quantity", "price", "amount", "currency"}}
	for _, b := range bills {
		for _, l := range b.Lines {
			rows = append(rows, []string{b.Tenant, l.Item, l.Units, l.Quantity, l.Price, l.Amount, b.Currency})
		}
	}
	return w.WriteAll(rows)
}

// printBills writes a table: a line for each item that was used or has a price, and the sum.
func (a *app) printBills(bills []bill) error {
	if len(bills) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "nothing was used")
		return err
	}
	w := tabwriter.NewWriter(a.Stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "TENANT\tITEM\tQUANTITY\tPRICE\tAMOUNT")
	for _, b := range bills {
		for _, l := range b.Lines {
			if l.Units != "0" || l.Price != "0" {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", plain(b.Tenant), l.Item, l.Quantity, l.Price, l.Amount)
			}
		}
		fmt.Fprintf(w, "%s\ttotal\t\t\t%s\n", plain(b.Tenant), strings.TrimSpace(b.Amount+" "+b.Currency))
	}
	return w.Flush()
}

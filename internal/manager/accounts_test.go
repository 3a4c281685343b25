package manager

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// charge charges lease 5 in a cell.
func (p *party) charge(cell int, tenant string, n uint64) {
	p.w.t.Helper()
	head := accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(p.info), Lease: 5}, Tenant: tenant, Began: p.w.clock.now}
	if err := errors.Join(p.WriteHead(cell, head), p.Charge(cell, accounting.Use{}, accounting.Use{n})); err != nil {
		p.w.t.Fatal(err)
	}
}

// counted is a metric of the manager's without labels.
func (w *world) counted(name string) float64 {
	w.t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(&collector{w.Manager})
	families, err := r.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	w.t.Fatalf("no metric %s", name)
	return 0
}

// An executor's wrong charges are refused and logged once. The ledger accepts and acknowledges the charges of others.
func TestRefusedChargesAreNobodyElses(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	var log bytes.Buffer
	w.accounts.log = slog.New(slog.NewTextHandler(&log, nil))
	bad, good := w.executor(1), w.executor(2)
	bad.charge(0, "ann", 10)
	w.harvest()
	bad.charge(1, "bob", 20) // the same lease
	good.charge(0, "cat", 30)
	for range 3 {
		w.harvest()
	}
	for tenant, want := range map[string]string{"ann": "10", "bob": "", "cat": "30"} {
		if got := w.charged(tenant); got != want { // and the bill reports no failure
			t.Errorf("%s is charged %q, want %q", tenant, got, want)
		}
	}
	if err := w.accounts.failing(); err != nil {
		t.Errorf("the ledger does not take charges: %v", err)
	}
	if _, given, err := bad.Receipt(1); given || err != nil {
		t.Errorf("a receipt for what was refused: %v, %v", given, err)
	}
	if got := log.String(); strings.Count(got, "refused some charges") != 1 || !strings.Contains(got, "ann") || !strings.Contains(got, "bob") {
		t.Errorf("the log: %s", got)
	}
}

// Each refused charge is logged and counted once, in whatever order the cells are read.
func TestRefusedChargesAreLoggedOnce(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	var log bytes.Buffer
	w.accounts.log = slog.New(slog.NewTextHandler(&log, nil))
	var bad [3]*party
	for i := range bad {
		bad[i] = w.executor(byte(i + 1))
		bad[i].charge(0, "ann", 10)
	}
	w.harvest()
	harvested := func(what string, lines int, charges float64) {
		t.Helper()
		for range 20 { // the order of the table's map varies
			w.harvest()
		}
		if got := strings.Count(log.String(), "refused some charges"); got != lines {
			t.Fatalf("%s: %d lines, want %d: %s", what, got, lines, log.String())
		}
		if got := w.counted("rfaas_manager_refused_charges_total"); got != charges {
			t.Errorf("%s: %v are counted, want %v", what, got, charges)
		}
	}
	leave := func(p *party) {
		t.Helper()
		if _, err := w.client.Deregister(t.Context(), &control.DeregisterRequest{ExecutorId: p.id}); err != nil {
			t.Fatal(err)
		}
	}
	harvested("none", 0, 0)
	bad[0].charge(1, "bob", 20)
	bad[1].charge(1, "bob", 20)
	harvested("two", 1, 2)
	bad[2].charge(1, "bob", 20)
	harvested("one more", 2, 3)
	leave(bad[0])
	harvested("one has gone", 2, 3)
	leave(bad[1])
	leave(bad[2])
	harvested("all have gone", 2, 3)
	if n := len(w.accounts.refused); n != 0 {
		t.Errorf("%d refusals are remembered", n)
	}
}

// Refused charges are distinguished from errors of the ledger, even if both occur at once. A damaged record may also be an invalid entry. An
// executor that settles by message gives up only invalid charges, and keeps those whose record in the ledger is damaged.
func TestRefusalsAreSeparatedFromLedgerErrors(t *testing.T) {
	refusal := fmt.Errorf("%w: not of ann", accounting.ErrConflict)
	damage, full := fmt.Errorf("%w: %w", accounting.ErrLedger, accounting.ErrInvalid), errors.New("disk full")
	for name, c := range map[string]struct {
		err     error
		refused []string
		ledger  error
		class   control.Class
	}{
		"nothing":      {nil, nil, nil, 0},
		"disk full":    {full, nil, full, control.ClassBusy},
		"refusal":      {errors.Join(refusal), []string{refusal.Error()}, nil, control.ClassInvalid},
		"damage":       {errors.Join(damage), nil, damage, control.ClassBusy},
		"both at once": {errors.Join(damage, refusal), []string{refusal.Error()}, damage, control.ClassInvalid},
	} {
		if err := settleError(c.err); (err == nil) != (c.err == nil) || control.ClassOf(err) != c.class {
			t.Errorf("%s: the executor receives %v", name, err)
		}
		if refused, err := splitErrors(c.err); !slices.Equal(refused, c.refused) || !errors.Is(err, c.ledger) || (c.ledger == nil) != (err == nil) {
			t.Errorf("%s: %q, %v", name, refused, err)
		}
	}
}

// An executor whose charges are refused for new reasons at each harvest does not fill the log.
func TestRefusedChargesDoNotFillTheLog(t *testing.T) {
	c := &clock{time.Unix(1e9, 0)}
	var log bytes.Buffer
	a := &accounts{log: slog.New(slog.NewTextHandler(&log, nil)), now: c.Now}
	const harvests, charges = 600, 100
	for i := range harvests {
		var texts []string
		for j := range charges {
			texts = append(texts, fmt.Sprintf("charge %d of harvest %d", j, i))
		}
		a.refuse(texts)
		c.now = c.now.Add(time.Second)
	}
	if lines := strings.Count(log.String(), "\n"); lines < 10 || lines > 25 || log.Len() > 25*2000 {
		t.Errorf("%d lines, %d bytes", lines, log.Len())
	}
	if n := a.refusedCharges(); n != harvests*charges {
		t.Errorf("%d charges are counted", n)
	}
	if !strings.Contains(log.String(), fmt.Sprintf("more=%d", 60*charges-refusedTexts)) {
		t.Errorf("no line counts the charges that were not listed: %s", log.String())
	}
}

// An executor whose message failed uses cells afterwards, for example after a restart of the manager. When the ledger accepts charges from
// cells, the failure of the message is cleared after clearAfterMerge, and not earlier.
func TestMessageFailureIsClearedByCells(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	x, y := w.executor(1), w.executor(2)
	w.accounts.note(ofMessages, errors.New("no space"))
	w.clock.now = w.clock.now.Add(clearAfterMerge)
	x.charge(0, "ann", 1)
	w.harvest()
	if w.accounts.failing() == nil {
		t.Errorf("the failure is cleared after %v", clearAfterMerge)
	}
	w.clock.now = w.clock.now.Add(time.Second)
	w.harvest()
	if w.accounts.failing() == nil {
		t.Error("the failure is cleared although no cell was merged")
	}
	y.charge(0, "ann", 1)
	w.harvest()
	if err := w.accounts.failing(); err != nil {
		t.Errorf("the ledger accepts charges: %v", err)
	}
}

// A resource manager that starts with a ledger of which more than half is unused compacts it.
func TestManagerCompactsLedger(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "ledger")
	l, err := accounting.OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	const leases = 25_000
	name := strings.Repeat("n", accounting.MaxName)
	began := time.Unix(7200, 0)
	entries := make([]accounting.Entry, leases)
	for i := range entries {
		entries[i] = accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{1}, Lease: uint64(i) + 1}, Tenant: name, Node: name, Began: began, AsOf: began, Use: accounting.Use{1}}
	}
	if err := l.Merge(t.Context(), began, entries...); err != nil {
		t.Fatal(err)
	}
	for n := 1; n > 0; {
		if n, err = l.Prune(t.Context(), began.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	before := l.Size()
	l.Close()
	a, err := openAccounts(dir, accounting.Tariff{}, slog.New(slog.DiscardHandler), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	totals, err := a.ledger.Totals("", time.Time{})
	sum := totals[name]
	if size := a.ledger.Size(); err != nil || size > before/10 || sum.Of(0).Int64() != leases {
		t.Errorf("%d bytes, before %d; %v core microseconds, want %d; %v", size, before, sum.Of(0), leases, err)
	}
}

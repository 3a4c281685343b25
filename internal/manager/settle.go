package manager

import (
	"context"
	"errors"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
)

// Settle merges sums that come by message. The caller must own their incarnations: it has registered them, or was the
// first to charge under them. The second case is needed because an executor leaves its journal to the next one on its node,
// and the resource manager may have lost its registrations meanwhile.
func (m *Manager) Settle(ctx context.Context, req *control.SettleRequest) (*control.SettleReply, error) {
	ctx, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	entries, err := entriesOf(req)
	if err == nil && len(entries) > 0 {
		if err = m.settleFor(ctx, entries); err == nil {
			err = m.accounts.ledger.Merge(ctx, m.accounts.now(), entries...)
			_, ledgerErr := splitErrors(err)
			m.accounts.note(ofMessages, ledgerErr)
			err = settleError(err)
		}
	}
	if err != nil {
		if control.ClassOf(err) == control.ClassInvalid {
			m.accounts.unsettled.Add(1)
		}
		return nil, err
	}
	m.accounts.heard(entries)
	return &control.SettleReply{}, nil
}

// settleFor returns an error if the caller may not charge some of the entries.
func (m *Manager) settleFor(ctx context.Context, entries []accounting.Entry) error {
	o := ownerOf(ctx)
	incarnations := map[[16]byte]bool{}
	for i := range entries {
		incarnations[entries[i].Incarnation] = true
	}
	var claims []accounting.Claim
	for incarnation := range incarnations {
		if err := m.table.check(o, incarnation); errors.Is(err, errOwner) { // the ledger may not have it yet
			return m.answer(ctx, control.Manager_Settle_FullMethodName, err)
		}
		claims = append(claims, o.claim(incarnation))
	}
	refused, err := m.accounts.ledger.Claim(ctx, m.accounts.now(), claims...)
	if err != nil {
		m.accounts.note(ofMessages, err)
		return settleError(err)
	}
	if err := errors.Join(refused...); err != nil {
		return m.answer(ctx, control.Manager_Settle_FullMethodName, err)
	}
	return nil
}

// settleError classes the errors of Merge for an executor: it gives up refused charges (class invalid), and keeps
// charges that the ledger cannot store now (class busy).
func settleError(err error) error {
	refused, ledgerErr := splitErrors(err)
	switch {
	case len(refused) > 0:
		return control.Errorf(control.ClassInvalid, "%v", err)
	case ledgerErr != nil:
		return control.Errorf(control.ClassBusy, "%v", err)
	}
	return nil
}

func entriesOf(req *control.SettleRequest) ([]accounting.Entry, error) {
	entries := make([]accounting.Entry, 0, len(req.GetEntries()))
	for _, r := range req.GetEntries() {
		if len(r.GetIncarnation()) != 16 || len(r.GetUse()) != accounting.NumCounters {
			return nil, control.Errorf(control.ClassInvalid, "account entry with %d bytes of incarnation and %d counters, want 16 and %d",
				len(r.GetIncarnation()), len(r.GetUse()), accounting.NumCounters)
		}
		e := accounting.Entry{Key: accounting.Key{Lease: r.GetLease(), Part: r.GetPart()}, Tenant: r.GetTenant(), Node: r.GetNode(),
			Began: time.Unix(0, r.GetBeganNs()), AsOf: time.Unix(0, r.GetAsOfNs()), Final: r.GetFinal()}
		copy(e.Incarnation[:], r.GetIncarnation())
		copy(e.Use[:], r.GetUse())
		entries = append(entries, e)
	}
	return entries, nil
}

// unconfirmed returns an error if another resource manager may serve, so that the ledger here may lack charges.
func (m *Manager) unconfirmed() error {
	if m.cfg.Confirmed == nil {
		return nil
	}
	return m.cfg.Confirmed()
}

// Bill returns the bills of tenants. A resource manager that may not be the leader any more returns an error instead.
func (m *Manager) Bill(ctx context.Context, req *control.BillRequest) (*control.BillReply, error) {
	a := m.accounts
	since := time.Unix(max(req.GetSince(), 0), 0).Truncate(time.Hour)
	ctx, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	missing := m.harvestWithin(ctx, true) // include the charges until now
	totals, err := a.ledger.Totals(req.GetTenant(), since)
	if err != nil {
		return nil, control.Errorf(control.ClassFatal, "%v", err)
	}
	if err := m.unconfirmed(); err != nil {
		return nil, control.Errorf(control.ClassConnection, "%v", err)
	}
	reply := &control.BillReply{Currency: a.tariff.Currency, Trouble: a.state()}
	if reply.Trouble == "" && missing != nil {
		reply.Trouble = missing.Error()
	}
	for _, b := range accounting.Bills(&a.tariff, totals, since) {
		t := &control.TenantBill{Tenant: b.Tenant, Amount: b.Amount}
		for _, l := range b.Lines {
			t.Lines = append(t.Lines, &control.BillLine{Item: l.Item, Units: l.Units, Quantity: l.Quantity, Price: l.Price, Amount: l.Amount})
		}
		reply.Bills = append(reply.Bills, t)
	}
	return reply, nil
}

package executor

import (
	"context"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/link"
)

// run measures and settles every interval, and soon after a lease has ended, until ctx ends.
func (a *accounts) run(ctx context.Context, interval time.Duration, m control.ManagerClient) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	look := time.NewTicker(sampleEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			a.sample()
			continue
		case <-tick.C:
		case <-a.poke:
		}
		a.step(ctx, m)
	}
}

// step measures, writes the journal and settles.
func (a *accounts) step(ctx context.Context, m control.ManagerClient) {
	a.settling.Lock()
	defer a.settling.Unlock()
	entries := a.measure()
	for _, e := range entries {
		if o := a.owed[e.Key]; o != nil {
			o.entry = e
		} else {
			a.owed[e.Key] = &owed{entry: e, cell: -1}
		}
	}
	if a.journal != nil && len(entries) > 0 {
		a.note("the journal cannot be written; what leases use is in memory only", a.journal.Put(entries...))
	}
	if a.way != nil {
		if err := a.charge(); err != nil {
			a.note("the resource manager's memory cannot be reached; charges wait", err)
			a.leave()
		} else {
			a.note("the resource manager's memory cannot be reached; charges wait", nil)
		}
	}
	if m != nil {
		a.message(ctx, m)
	}
}

// note logs the beginning and the end of an error.
func (a *accounts) note(what string, err error) {
	a.mu.Lock()
	had := a.trouble[what]
	a.trouble[what] = err != nil
	a.mu.Unlock()
	switch {
	case err != nil && !had:
		a.log.Warn(what, "error", control.Text(err))
	case err == nil && had:
		a.log.Info("resolved: " + what)
	}
}

// join sets the connection to the manager's memory, whose cells must be zero.
func (a *accounts) join(x *link.Executor) {
	if a == nil {
		return
	}
	a.settling.Lock()
	defer a.settling.Unlock()
	a.leave()
	a.way, a.cells = x, make([]*owed, x.Cells())
}

// detach removes the connection before it is closed.
func (a *accounts) detach() {
	if a == nil {
		return
	}
	a.settling.Lock()
	defer a.settling.Unlock()
	a.leave()
}

func (a *accounts) leave() {
	a.way, a.cells = nil, nil
	for _, o := range a.owed {
		o.cell, o.charged, o.headed = -1, accounting.Use{}, false
	}
}

// charge updates the cells and frees those that the ledger has.
func (a *accounts) charge() error {
	for _, o := range a.inOrder(nil) {
		if err := a.chargeOne(o); err != nil {
			return err
		}
		if o.cell < 0 || !o.entry.Final {
			continue
		}
		r, given, err := a.way.Receipt(o.cell)
		if err != nil {
			return err
		}
		if given && r.Covers(&o.entry) {
			if err := a.way.Clear(o.cell); err != nil {
				return err
			}
			a.settled(o)
		}
	}
	return nil
}

// inOrder returns the owed entries that match, oldest first. nil: all of them.
func (a *accounts) inOrder(match func(*owed) bool) (list []*owed) {
	for _, o := range a.owed {
		if match == nil || match(o) {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, func(x, y *owed) int { return x.entry.Began.Compare(y.entry.Began) })
	return list
}

func (a *accounts) chargeOne(o *owed) error {
	e := &o.entry
	if o.cell < 0 {
		if o.earlier {
			return nil
		}
		if o.cell = slices.Index(a.cells, nil); o.cell < 0 {
			return nil // by message
		}
		a.cells[o.cell] = o
		if err := a.way.WriteHead(o.cell, accounting.CellHead{Key: e.Key, Tenant: e.Tenant, Began: e.Began}); err != nil {
			return err
		}
	}
	if err := a.way.Charge(o.cell, o.charged, e.Use); err != nil {
		return err
	}
	o.charged = e.Use
	if !e.Final || o.headed {
		return nil
	}
	o.headed = true
	return a.way.WriteHead(o.cell, accounting.CellHead{Key: e.Key, Tenant: e.Tenant, Began: e.Began, Ended: e.AsOf, Final: true})
}

// settled drops an entry that the ledger has completely.
func (a *accounts) settled(o *owed) {
	a.log.Debug("account settled", "lease", o.entry.Key.String(), "tenant", o.entry.Tenant)
	delete(a.owed, o.entry.Key)
	if a.journal != nil {
		a.journal.Drop(o.entry.Key)
	}
	if o.cell >= 0 {
		a.cells[o.cell] = nil
	}
}

// messageMost is the largest number of entries in one message: with the longest names they fit into control.MaxRequest.
const messageMost = 400

// message settles entries without a cell. The ledger has them when the answer arrives.
func (a *accounts) message(ctx context.Context, m control.ManagerClient) {
	batch := a.inOrder(func(o *owed) bool { return o.cell < 0 })
	if len(batch) == 0 {
		return
	}
	batch = batch[:min(len(batch), messageMost)]
	const what = "the resource manager does not accept charges; the executor keeps them and tries again"
	err := settle(ctx, m, batch)
	if control.ClassOf(err) == control.ClassInvalid && len(batch) > 1 {
		for _, o := range batch { // find the invalid one
			if err = settle(ctx, m, []*owed{o}); err == nil || control.ClassOf(err) == control.ClassInvalid {
				a.answered(o, err)
			}
		}
		return
	}
	a.note(what, err)
	if err == nil || control.ClassOf(err) == control.ClassInvalid {
		for _, o := range batch {
			a.answered(o, err)
		}
	}
}

// answered records that the manager has accepted an entry, or has refused it for good.
func (a *accounts) answered(o *owed, err error) {
	if err != nil {
		a.log.Error("the resource manager refused the charges of a lease", "lease", o.entry.Key.String(), "error", control.Text(err))
	}
	if o.entry.Final {
		a.settled(o)
	}
}

func settle(ctx context.Context, m control.ManagerClient, batch []*owed) error {
	req := &control.SettleRequest{}
	for _, o := range batch {
		req.Entries = append(req.Entries, entryMessage(&o.entry))
	}
	ctx, cancel := context.WithTimeout(ctx, managerCall)
	defer cancel()
	_, err := m.Settle(ctx, req)
	return err
}

func entryMessage(e *accounting.Entry) *control.AccountEntry {
	return &control.AccountEntry{Incarnation: e.Incarnation[:], Lease: e.Lease, Part: e.Part, Tenant: e.Tenant,
		Node: e.Node, BeganNs: e.Began.UnixNano(), AsOfNs: e.AsOf.UnixNano(), Final: e.Final, Use: e.Use[:]}
}

// finish sends everything to the manager by message until ctx ends. No lease may be left. Entries that are not sent
// remain in the journal for the next executor of this node.
func (a *accounts) finish(ctx context.Context, m control.ManagerClient) {
	if a == nil {
		return
	}
	a.detach()
	for range 1 + len(a.owed)/messageMost {
		a.step(ctx, m)
	}
	a.settling.Lock()
	defer a.settling.Unlock()
	if n := len(a.owed); n > 0 {
		a.log.Warn("not all charges reached the resource manager", "leases", n, "journal", a.journal != nil)
	}
	if a.journal != nil {
		a.note("the journal cannot be closed", a.journal.Close())
	}
}

package manager

import (
	"context"
	"path/filepath"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/history"
)

// openHistory opens the history beside the ledger. The ledger reports to it what it books.
func (m *Manager) openHistory() (err error) {
	path := ""
	if m.cfg.StateDir != "" {
		path = filepath.Join(m.cfg.StateDir, "history")
	}
	if m.history, err = history.Open(path, ledgerWait, m.cfg.Now(), m.log); err != nil {
		return err
	}
	m.accounts.ledger.Booked = func(tenant, node string, u accounting.Use) { m.history.Use(m.cfg.Now(), node, tenant, u) }
	m.watched = m.cfg.Now()
	return nil
}

// closeLedger closes the ledger and the history.
func (m *Manager) closeLedger() {
	m.accounts.close()
	m.history.Close(m.cfg.Now())
}

// watch adds the time since the last call to the history, unless this process was stopped meanwhile.
func (m *Manager) watch() {
	now := m.cfg.Now()
	elapsed := now.Sub(m.watched)
	m.watched = now
	all := m.table.survey()
	if elapsed > 0 && elapsed < missed*m.cfg.Heartbeat {
		m.history.Watch(now, elapsed, all)
	}
	m.history.Save(now, false)
}

// tierFor returns the tier for a step and a time span. A step of 0 chooses one with at most a hundred buckets.
func tierFor(step, span time.Duration) (tier int, ok bool) {
	for i, t := range history.Tiers {
		if t.Width == step || step == 0 && span <= time.Duration(min(t.Keep, 100))*t.Width {
			return i, true
		}
	}
	return len(history.Tiers) - 1, step == 0
}

// History returns what the cluster did.
func (m *Manager) History(_ context.Context, req *control.HistoryRequest) (*control.HistoryReply, error) {
	const longest = 10 * 366 * 24 * 3600
	span := time.Duration(min(req.GetSeconds(), longest)) * time.Second
	if span == 0 {
		span = 24 * time.Hour
	}
	tier, ok := tierFor(time.Duration(min(req.GetStep(), longest))*time.Second, span)
	if !ok {
		return nil, control.Errorf(control.ClassInvalid, "step %d s: want 10, 300, 3600 or 86400", req.GetStep())
	}
	reply := &control.HistoryReply{Step: uint64(history.Tiers[tier].Width / time.Second)}
	for _, b := range m.history.Since(tier, m.cfg.Now().Add(-span)) {
		s := &control.HistoryStep{Start: b.Start.Unix(), WatchedUs: b.Watched, HarvestedUs: b.Harvested, IdleUs: b.Idle, BatchUs: b.Batch, Stats: b.Stats.Values()}
		for tenant, u := range b.Tenants {
			if req.GetTenant() == "" || tenant == req.GetTenant() {
				s.Tenants = append(s.Tenants, &control.TenantUse{Tenant: tenant, Use: append([]uint64(nil), u[:]...)})
			}
		}
		reply.Steps = append(reply.Steps, s)
	}
	return reply, nil
}

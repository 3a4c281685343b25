package agent

import (
	"context"
	"os"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// adopt continues a lease that another agent held.
func (c *client) adopt(r *request) (func(bool), body, error) {
	const op = "adopt a lease"
	if r.err != nil {
		return nil, nil, r.err
	}
	l := r.lease
	held, err := l.adopt(r.ctx, &r.adopt, r)
	if !l.done(held, err) {
		return nil, nil, failed(op, dataplane.StatusCancelled, "the lease was released while it was being adopted")
	}
	if err != nil {
		return nil, nil, err
	}
	return l.granted, func(b []byte) []byte { return protocol.EncodeUntil(b, untilNs(held)) }, nil
}

func untilOf(ns int64) time.Time { return time.Now().Add(time.Duration(ns - dataplane.Now())) }

// adopt takes over the lease first, because its client and its executor wait for that. The library is read in the background.
func (l *lease) adopt(ctx context.Context, m *protocol.Adopt, r *request) (*grant.Held, error) {
	a := grant.Adoption{ID: m.LeaseID, Address: l.c.env.address(m.At), Node: m.Node, Provider: m.Provider, Library: m.Library,
		Until: untilOf(m.UntilNs)}
	for _, pid := range m.PIDs {
		a.PIDs = append(a.PIDs, int(pid))
	}
	spec := l.c.spec(&m.Spec)
	spec.Tables = l.session.tables.current() // the client publishes them again before it hands its leases over
	// If the client releases the lease meanwhile, done releases it at its executor.
	pending, held, err := l.session.control.Adopt(context.WithoutCancel(ctx), spec, a)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.pending = pending
	l.mu.Unlock()
	l.growth.present = int(m.Present)
	if file := r.file; file != nil {
		r.file = nil
		l.c.background(func() {
			defer file.Close()
			l.learn(file, m.Spec.Library, pending)
		})
	}
	return held, nil
}

// learn reads the library of an adopted lease, for backtraces. Many clients may hand over leases at once, so one library is read at a time.
func (l *lease) learn(file *os.File, name string, pending *grant.Pending) {
	a := l.c.a
	select {
	case a.learning <- struct{}{}:
		defer func() { <-a.learning }()
	case <-l.c.ctx.Done():
		return
	}
	lib, err := l.session.control.Library(file, name)
	if err != nil {
		l.c.log.Debug("the library of an adopted lease cannot be read", "library", name, "error", err)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = pending.With(lib)
}

// plan returns the plan of a granted lease.
func (l *lease) plan() *grant.Pending {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pending
}

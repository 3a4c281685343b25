package agent

import (
	"context"
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

func (l *lease) adopt(ctx context.Context, m *protocol.Adopt, r *request) (*grant.Held, error) {
	var lib *grant.Library
	if r.file != nil {
		var err error
		if lib, err = l.session.control.Library(r.file, m.Spec.Library); err != nil {
			l.c.log.Debug("the library of an adopted lease cannot be read", "library", m.Spec.Library, "error", err)
		}
	}
	a := grant.Adoption{ID: m.LeaseID, Address: l.c.env.address(m.At), Node: m.Node, Provider: m.Provider, Library: m.Library,
		Until: untilOf(m.UntilNs)}
	for _, pid := range m.PIDs {
		a.PIDs = append(a.PIDs, int(pid))
	}
	spec := l.c.spec(&m.Spec)
	spec.Tables = l.session.tables.current() // the client publishes them again before it hands its leases over
	if lib != nil {
		var err error
		if spec.Bundle, err = l.bundle(ctx, lib, &m.Spec, r); err != nil {
			l.c.log.Debug("the bundle of an adopted lease cannot be made", "library", m.Spec.Library, "error", err)
			lib = nil
		}
	}
	// If the client releases the lease meanwhile, done releases it at its executor.
	pending, held, err := l.session.control.Adopt(context.WithoutCancel(ctx), lib, spec, a)
	l.pending = pending
	if held != nil {
		l.growth.present = int(m.Present)
	}
	return held, err
}

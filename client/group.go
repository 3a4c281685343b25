package client

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/hashicorp/go-multierror"

	"github.com/rfaas-go/rfaas/client/c"
	"github.com/rfaas-go/rfaas/internal/api"
)

// Group is workers on one or several executors: a lease at each. Safe for concurrent use.
type Group struct {
	leases []*Lease
}

// LeaseAcross leases o.Workers workers wherever they fit, on as few executors as it finds. Each executor's part is a Lease of its
// own: it is renewed, drained and lost separately. If an executor refuses, LeaseAcross asks others. Nothing stays leased
// after an error. o.Local is ignored. Needs a resource manager. Blocks up to the session's time-out for each round. Errors:
// ErrBusy (there is room for fewer; the text says how many), and those of Lease.
func (s *Session) LeaseAcross(ctx context.Context, o LeaseOptions) (*Group, error) {
	o.Local = false
	options, err := o.c()
	if err != nil {
		return nil, err
	}
	return during(ctx, s, "lease across executors", func() (*Group, error) {
		handles, err := waiting(ctx, options, func() ([]*c.Lease, error) {
			return s.c.LeaseOpenAcross(options, min(cmp.Or(o.Workers, 1), api.LeasesMax))
		})
		if err != nil {
			return nil, err
		}
		return s.newGroup(handles, &o)
	}, func(g *Group) { _ = g.Release(context.Background()) })
}

func (s *Session) newGroup(handles []*c.Lease, o *LeaseOptions) (*Group, error) {
	g := &Group{}
	var errs *multierror.Error
	for _, h := range handles {
		l, err := s.newLease(h, o)
		if err == nil {
			g.leases = append(g.leases, l)
		}
		errs = multierror.Append(errs, err)
	}
	if err := errs.ErrorOrNil(); err != nil {
		_ = g.Release(context.Background()) // the caller gets the first error
		return nil, err
	}
	return g, nil
}

// Leases returns the parts, one for each executor.
func (g *Group) Leases() []*Lease { return slices.Clone(g.leases) }

// Workers is how many workers there are in all.
func (g *Group) Workers() (n int) {
	for _, l := range g.leases {
		n += l.Workers()
	}
	return n
}

// Release ends all leases. A second Release does nothing.
func (g *Group) Release(ctx context.Context) error {
	var errs *multierror.Error
	for _, l := range g.leases {
		errs = multierror.Append(errs, l.Release(ctx))
	}
	return errs.ErrorOrNil()
}

// GroupFunction is a function on all executors of a group. Safe for concurrent use.
type GroupFunction struct {
	on   []*Function
	next atomic.Uint32
}

// Function finds a function by name, as Lease.Function does.
func (g *Group) Function(name string) (*GroupFunction, error) {
	f := &GroupFunction{}
	for _, l := range g.leases {
		x, err := l.Function(name)
		if err != nil {
			return nil, err
		}
		f.on = append(f.on, x)
	}
	return f, nil
}

// On returns the function at each executor, in the order of Group.Leases.
func (f *GroupFunction) On() []*Function { return slices.Clone(f.on) }

// Invoke is Function.Invoke at one of the executors. They take turns, except those without a free worker while others have one. If the
// executor or worker is lost, and the call was not executed or has a context of [Idempotent], Invoke repeats it at the next executor,
// at each executor once.
func (f *GroupFunction) Invoke(ctx context.Context, in, out []byte) (n int, err error) {
	from, ran := f.next.Add(1), false
	at := func(i int) *Function { return f.on[(from+uint32(i))%uint32(len(f.on))] }
	var tried []*Function
	for range f.on {
		var x *Function
		for i := range f.on {
			if y := at(i); !slices.Contains(tried, y) && (x == nil || !x.lease.idle() && y.lease.idle()) {
				x = y
			}
		}
		tried = append(tried, x)
		n, err = x.Invoke(ctx, in, out)
		var e *Error
		if err == nil || !errors.As(err, &e) {
			return n, err
		}
		ran = ran || e.Started
		if !errors.Is(err, ErrConnection) && !errors.Is(err, ErrLease) || e.Started && settingsOf(ctx).times == 0 || ctx.Err() != nil {
			e.Started = ran
			return n, err
		}
		e.Started = ran
	}
	return n, err
}

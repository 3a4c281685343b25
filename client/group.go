package client

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/hashicorp/go-multierror"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// Group is workers on one or several executors: a lease at each. Safe for concurrent use.
type Group struct {
	leases []*Lease
}

// LeaseAcross leases o.Workers workers wherever they fit, on as few executors as it finds. Each executor's part is a Lease of its
// own: it is renewed, drained and lost by itself. All or nothing: an executor that refuses is replaced by others, and
// nothing stays leased after an error. o.Local is passed over. Needs a resource manager. Blocks up to the session's time-out for each round. Errors:
// ErrBusy (there is room for fewer; the text says how many), and those of Lease.
func (s *Session) LeaseAcross(ctx context.Context, o LeaseOptions) (*Group, error) {
	g := &Group{}
	giveUp := func(err error) (*Group, error) {
		_ = g.Release(context.WithoutCancel(ctx))
		return nil, err
	}
	left := cmp.Or(o.Workers, 1)
	var tried []string // each round asks others
	for left > 0 {
		shares, err := s.control.Spread(ctx, grant.Spec{Workers: left, CoresPerWorker: o.CoresPerWorker, Memory: o.Memory,
			Duration: o.Duration, Executor: o.Executor}, tried)
		if err != nil {
			return giveUp(err)
		}
		taken, err := s.leaseShares(ctx, o, shares)
		for i, l := range taken {
			tried = append(tried, shares[i].Address)
			if l != nil {
				g.leases = append(g.leases, l)
				left -= l.Workers()
			}
		}
		if err != nil {
			return giveUp(err)
		}
	}
	return g, nil
}

// leaseShares asks all executors at once. A nil lease: that one refused. An error: asking others makes no sense.
func (s *Session) leaseShares(ctx context.Context, o LeaseOptions, shares []grant.Share) ([]*Lease, error) {
	leases, errs := make([]*Lease, len(shares)), make([]error, len(shares))
	done := make(chan struct{})
	for i, share := range shares {
		go func() {
			part := o
			part.Workers, part.Local = share.Workers, false
			leases[i], errs[i] = s.leaseAt(ctx, part, share.Address)
			done <- struct{}{}
		}()
	}
	for range shares {
		<-done
	}
	for _, err := range errs {
		if err != nil && (!errors.Is(err, ErrBusy) && !errors.Is(err, ErrConnection) || ctx.Err() != nil) {
			return leases, err
		}
	}
	return leases, nil
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

// Invoke is Function.Invoke on a free worker of any executor: the executors take turns, and those without a free worker
// and those whose lease has ended are passed over. When no worker is free it waits for one of the executor whose turn it is. A call
// that has not started where its worker or lease is lost is made again at the executor whose turn it is then, and one of [Idempotent] in any case: an
// executor whose worker died may have its turn, one that is itself in doubt has none while there are others.
func (f *GroupFunction) Invoke(ctx context.Context, in, out []byte) (int, error) {
	var failed []*Function
	r, once, ran := repeatsOf(ctx), ctx, false
	if r.times > 0 {
		once = Idempotent(ctx, 0)
	}
	for left, more := r.times, r.times+2*len(f.on); ; more-- {
		attempt, cancel := r.bound(once)
		x := f.choose(failed)
		n, err := x.Invoke(attempt, in, out)
		cancel()
		if err == nil {
			return n, nil
		}
		var e *Error
		if !errors.As(err, &e) || !r.again(ctx, e) || more == 0 || e.Started && left == 0 {
			return n, maybeRan(err, ran)
		}
		if e.Started {
			ran = true
			left--
		}
		switch e.Status {
		case StatusWorkerDied, StatusTimeLimit, StatusMemoryLimit, StatusDeadline: // its executor is well
		default:
			failed = append(failed, x)
		}
	}
}

// choose returns the function at the executor whose turn it is. Those that failed are the last choice: an executor that is gone has free
// workers until it is known to be gone.
func (f *GroupFunction) choose(failed []*Function) *Function {
	turn := f.next.Add(1)
	x := f.chooseBut(turn, failed)
	if x == nil && len(failed) > 0 {
		x = f.chooseBut(turn, nil)
	}
	if x == nil {
		x = f.on[turn%uint32(len(f.on))]
	}
	return x
}

// chooseBut returns the first from turn on that has a free worker; without one, the first, where a call waits. nil: all are lost or failed.
func (f *GroupFunction) chooseBut(turn uint32, failed []*Function) (waitAt *Function) {
	n := uint32(len(f.on))
	for i := range n {
		x := f.on[(turn+i)%n]
		if x.lease.Err() != nil || slices.Contains(failed, x) {
			continue
		}
		if x.lease.anyFree() {
			return x
		}
		if waitAt == nil {
			waitAt = x
		}
	}
	return waitAt
}

// anyFree says whether some worker was free a moment ago.
func (l *Lease) anyFree() bool {
	l = l.at()
	for i := range l.free {
		if l.free[i].Load() != 0 {
			return true
		}
	}
	return false
}

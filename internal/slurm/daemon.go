package slurm

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"
)

// DaemonConfig configures a Daemon. All fields are mandatory.
type DaemonConfig struct {
	// Usage asks Slurm for the resources of jobs on this node.
	Usage func(ctx context.Context) (Usage, error)
	// Launch runs an executor and blocks until all its processes have ended. After ctx ends, that must be soon.
	Launch func(ctx context.Context, o Offer) error
	// Leased reports whether the running executor has leases. An error counts as yes.
	Leased func(ctx context.Context) (bool, error)

	Order      []int  // from CPUOrder
	KeepCPUs   int    // kept for the system
	KeepMemory uint64 // bytes
	Spare      bool   // also lend the rest of a node with jobs, not only whole nodes
	// Resync is how often Slurm is asked without an event, in case a hook was lost.
	Resync time.Duration
	// GrowWithin is how long an executor whose cores are leased may stay smaller than it could be.
	GrowWithin time.Duration
	Log        *slog.Logger
}

// Daemon runs an executor on the part of a node that jobs do not use. Slurm's prolog and epilog notify it of jobs.
type Daemon struct {
	c      DaemonConfig
	events chan func()
	over   chan struct{} // closed when Run returns

	running *running
	waiting []chan<- struct{} // prologs that wait until no executor runs
	gone    map[int64]bool    // jobs whose epilog has begun
	doubted map[int64]bool    // jobs whose uncertain resources were logged
	arrived int               // prologs so far; an answer of Slurm from before the latest one is ignored
	asking  bool
	again   bool // ask once more after the answer
	growing time.Time
	failed  int // consecutive executors that ended by themselves
	notYet  time.Time
	silent  bool // Slurm does not answer, which was logged
	// A timer runs after which Slurm is asked whether the node may be used.
	watching bool
}

// running is an executor.
type running struct {
	offer   Offer
	since   time.Time
	stop    context.CancelFunc
	stopped bool
}

// Delays of a node daemon: before it starts another executor after one that ended by itself, first and longest; before it
// asks Slurm again after no answer, while an executor could grow, and while the node may not be used.
const (
	restartLeast = time.Second
	restartMost  = time.Minute
	slurmAgain   = 2 * time.Second
	growLook     = 2 * time.Second
	usableAgain  = 2 * time.Second
)

// NewDaemon returns a Daemon. Run starts its work.
func NewDaemon(c DaemonConfig) *Daemon {
	return &Daemon{c: c, events: make(chan func()), over: make(chan struct{}), gone: map[int64]bool{}, doubted: map[int64]bool{}}
}

// errOver means that the node daemon has ended, or that the caller's context has.
var errOver = errors.New("the node daemon is ending")

// do runs f in Run's goroutine.
func (a *Daemon) do(ctx context.Context, f func()) error {
	select {
	case a.events <- f:
		return nil
	case <-a.over:
		return errOver
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Prolog reports that a job is about to start here. It blocks until no executor runs any more. A new executor, on the
// rest of the node, starts later.
func (a *Daemon) Prolog(ctx context.Context, job int64) error {
	out := make(chan struct{})
	err := a.do(ctx, func() {
		a.arrived++
		delete(a.gone, job) // requeued
		if a.running == nil {
			close(out)
		} else {
			a.waiting = append(a.waiting, out)
			a.stop("a job wants the node", "job", job)
		}
		a.ask()
	})
	if err != nil {
		return err
	}
	select {
	case <-out:
		return nil
	case <-a.over:
		return nil // the node daemon has ended, and the executor with it
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Epilog reports that a job's processes are gone.
func (a *Daemon) Epilog(ctx context.Context, job int64) error {
	return a.do(ctx, func() {
		a.gone[job] = true
		a.ask()
	})
}

// Status is the state of a node daemon.
type Status struct {
	CPUs     []int  `json:"cpus"` // lent CPUs
	Memory   uint64 `json:"memory"`
	Running  bool   `json:"running"`
	Stopping bool   `json:"stopping"`
	Arrived  int    `json:"prologs"`
}

// Status returns the state of the node daemon.
func (a *Daemon) Status(ctx context.Context) (Status, error) {
	got := make(chan Status, 1)
	err := a.do(ctx, func() {
		s := Status{Arrived: a.arrived}
		if r := a.running; r != nil {
			s.CPUs, s.Memory, s.Running, s.Stopping = r.offer.CPUs, r.offer.Memory, true, r.stopped
		}
		got <- s
	})
	if err != nil {
		return Status{}, err
	}
	return <-got, nil
}

// Run runs executors until ctx ends. It returns when the last one has ended.
func (a *Daemon) Run(ctx context.Context) {
	defer close(a.over)
	resync := time.NewTicker(a.c.Resync)
	defer resync.Stop()
	stopping := ctx.Done()
	a.ask()
	for ctx.Err() == nil || a.running != nil || a.asking {
		if a.again && !a.asking && ctx.Err() == nil {
			a.query(ctx)
		}
		select {
		case f := <-a.events:
			f()
		case <-resync.C:
			a.ask()
		case <-stopping:
			stopping = nil
			if a.running != nil {
				a.stop("the node daemon is ending")
			}
		}
	}
}

// later runs f in Run's goroutine after a delay, unless Run has returned.
func (a *Daemon) later(d time.Duration, f func()) {
	t := time.NewTimer(d)
	go func() {
		defer t.Stop()
		select {
		case <-t.C:
			a.do(context.Background(), f)
		case <-a.over:
		}
	}()
}

// ask makes Run ask Slurm soon.
func (a *Daemon) ask() { a.again = true }

// query asks Slurm and calls act with the answer.
func (a *Daemon) query(ctx context.Context) {
	a.asking, a.again = true, false
	arrived := a.arrived
	go func() {
		u, err := a.c.Usage(ctx)
		a.do(context.Background(), func() {
			a.asking = false
			switch {
			case ctx.Err() != nil:
			case arrived != a.arrived:
				a.ask()
			case err != nil:
				if !a.silent {
					a.c.Log.Warn("Slurm does not report the resources of this node's jobs; asking again", "error", err)
				}
				a.silent = true
				a.later(slurmAgain, a.ask)
			default:
				a.silent = false
				a.act(ctx, u)
			}
		})
	}()
}

// act starts, replaces or stops the executor according to what jobs leave of the node.
func (a *Daemon) act(ctx context.Context, u Usage) {
	for job := range a.gone {
		if !slices.ContainsFunc(u.Holds, func(h Hold) bool { return h.Job == job }) {
			delete(a.gone, job) // Slurm no longer lists it
		}
	}
	a.warn(u)
	want := offer(u, a.c.Order, a.gone, a.c.KeepCPUs, a.c.KeepMemory, a.c.Spare)
	if !u.Usable && !a.watching {
		// No hook reports that a node was resumed, rebooted or registered.
		a.watching = true
		a.later(min(usableAgain, a.c.Resync), func() { a.watching = false; a.ask() })
	}
	r := a.running
	switch {
	case r == nil && len(want.CPUs) > 0 && len(a.waiting) == 0:
		if wait := time.Until(a.notYet); wait > 0 {
			a.later(wait, a.ask)
			return
		}
		a.start(want)
	case r == nil || r.stopped:
	case r.offer.equal(want):
		a.growing = time.Time{}
	case !r.offer.within(want):
		a.stop("jobs have the lent resources") // a hook was lost
	default:
		a.grow(ctx)
	}
}

// warn logs, once for each job, that a job may be counted with more than it has.
func (a *Daemon) warn(u Usage) {
	doubted := map[int64]bool{}
	for _, h := range u.Holds {
		if h.Doubt == nil {
			continue
		}
		doubted[h.Job] = true
		if !a.doubted[h.Job] {
			a.c.Log.Warn("a job's own text, such as its name, looks like Slurm's description of nodes; counting all of it as the job's resources",
				"job", h.Job, "cpus", h.CPUs, "memory_mib", h.Memory>>20, "error", h.Doubt)
		}
	}
	a.doubted = doubted
}

// grow replaces an executor that could lend more, when it has no leases or after GrowWithin.
func (a *Daemon) grow(ctx context.Context) {
	if a.growing.IsZero() {
		a.growing = time.Now()
	}
	r, due := a.running, time.Since(a.growing) >= a.c.GrowWithin
	go func() {
		leased, err := a.c.Leased(ctx)
		a.do(context.Background(), func() {
			switch {
			case a.running != r || r.stopped:
			case due:
				a.stop("more can be lent, and the leases did not end in time", "waited", a.c.GrowWithin)
			case err == nil && !leased:
				a.stop("more can be lent, and the executor has no leases")
			default:
				a.later(min(growLook, a.c.GrowWithin), a.ask)
			}
		})
	}()
}

// start starts an executor. It is not bound to Run's context: stop ends it.
func (a *Daemon) start(o Offer) {
	ctx, stop := context.WithCancel(context.Background())
	r := &running{offer: o, since: time.Now(), stop: stop}
	a.running, a.growing = r, time.Time{}
	a.c.Log.Info("executor started", "cpus", o.CPUs, "memory_mib", o.Memory>>20)
	go func() {
		err := a.c.Launch(ctx, o)
		stop()
		a.do(context.Background(), func() { a.ended(r, err) })
	}()
}

// stop asks the executor to end.
func (a *Daemon) stop(reason string, args ...any) {
	r := a.running
	if !r.stopped {
		a.c.Log.Info("asked the executor to end", append([]any{"reason", reason}, args...)...)
	}
	r.stopped = true
	r.stop()
}

// ended handles an executor's end.
func (a *Daemon) ended(r *running, err error) {
	a.running = nil
	for _, w := range a.waiting {
		close(w)
	}
	a.waiting = nil
	lived := time.Since(r.since)
	if r.stopped {
		a.failed = 0
		a.c.Log.Info("executor ended", "error", err)
	} else {
		if lived > restartMost {
			a.failed = 0
		}
		wait := min(restartLeast<<min(a.failed, 10), restartMost)
		a.failed++
		a.notYet = time.Now().Add(wait)
		a.c.Log.Warn("executor ended by itself; starting another", "error", err, "lived", lived.Round(time.Millisecond), "in", wait)
	}
	a.ask()
}

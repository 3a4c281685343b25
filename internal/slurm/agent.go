package slurm

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"
)

// AgentConfig is what an Agent is made of. All fields are mandatory.
type AgentConfig struct {
	// Usage asks what jobs have of this node.
	Usage func(ctx context.Context) (Usage, error)
	// Launch runs an executor until it has ended with all that it started; soon after ctx has ended, at most.
	Launch func(ctx context.Context, o Offer) error
	// Leased says whether somebody has cores of the running executor. Errors count as yes.
	Leased func(ctx context.Context) (bool, error)

	Order      []int  // of CPUOrder
	KeepCPUs   int    // for the system
	KeepMemory uint64 // bytes
	Spare      bool   // lend what jobs leave of a node, not whole nodes only
	// Resync is how often Slurm is asked without a cause, in case a hook was lost.
	Resync time.Duration
	// GrowWithin is how long an executor whose cores are leased may stay smaller than it could be.
	GrowWithin time.Duration
	Log        *slog.Logger
}

// Agent runs an executor on what jobs leave of a node. Slurm's prolog and epilog tell it about jobs.
type Agent struct {
	c      AgentConfig
	events chan func()
	over   chan struct{} // closed when Run returns

	running *running
	waiting []chan<- struct{} // prologs, until no executor runs
	gone    map[int64]bool    // jobs whose epilog has begun
	doubted map[int64]bool    // jobs of which the log says that what they hold is not certain
	arrived int               // prologs so far: an answer of Slurm from before one means nothing
	asking  bool
	again   bool // ask once more when the answer is there
	growing time.Time
	failed  int // executors that ended by themselves, in a row
	notYet  time.Time
	silent  bool // Slurm did not answer, and the log says so
	// Slurm is going to be asked whether the node may be used.
	watching bool
}

// running is an executor.
type running struct {
	offer   Offer
	since   time.Time
	stop    context.CancelFunc
	stopped bool
}

// How long an agent waits: with another executor after one that ended by itself, at first and at most; with asking Slurm again
// after it did not answer, while an executor could grow, and while the node may not be used.
const (
	restartLeast = time.Second
	restartMost  = time.Minute
	slurmAgain   = 2 * time.Second
	growLook     = 2 * time.Second
	usableAgain  = 2 * time.Second
)

// NewAgent makes an Agent; Run brings it to life.
func NewAgent(c AgentConfig) *Agent {
	return &Agent{c: c, events: make(chan func()), over: make(chan struct{}), gone: map[int64]bool{}, doubted: map[int64]bool{}}
}

// errOver: the agent has ended, or the caller's time has.
var errOver = errors.New("the agent is ending")

// do runs f in Run's goroutine.
func (a *Agent) do(ctx context.Context, f func()) error {
	select {
	case a.events <- f:
		return nil
	case <-a.over:
		return errOver
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Prolog tells that a job is about to start here. It returns when no executor runs any more; a new one, on what the job
// leaves, comes later.
func (a *Agent) Prolog(ctx context.Context, job int64) error {
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
		return nil // and the executor with it
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Epilog tells that a job's processes are gone.
func (a *Agent) Epilog(ctx context.Context, job int64) error {
	return a.do(ctx, func() {
		a.gone[job] = true
		a.ask()
	})
}

// Status is what the agent does now.
type Status struct {
	CPUs     []int  `json:"cpus"` // that are lent
	Memory   uint64 `json:"memory"`
	Running  bool   `json:"running"`
	Stopping bool   `json:"stopping"`
	Arrived  int    `json:"prologs"`
}

// Status says what the agent does now.
func (a *Agent) Status(ctx context.Context) (Status, error) {
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

// Run runs executors until ctx ends, and returns when the last one has ended.
func (a *Agent) Run(ctx context.Context) {
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
				a.stop("the agent is ending")
			}
		}
	}
}

// later runs f in Run's goroutine after a time, unless Run has returned.
func (a *Agent) later(d time.Duration, f func()) {
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

// ask has Slurm asked soon.
func (a *Agent) ask() { a.again = true }

// query asks Slurm, and acts when it has answered.
func (a *Agent) query(ctx context.Context) {
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
					a.c.Log.Warn("Slurm does not say what jobs have of this node; it is asked again", "error", err)
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

// act brings the executor to what the node has left.
func (a *Agent) act(ctx context.Context, u Usage) {
	for job := range a.gone {
		if !slices.ContainsFunc(u.Holds, func(h Hold) bool { return h.Job == job }) {
			delete(a.gone, job) // Slurm has forgotten it
		}
	}
	a.warn(u)
	want := offer(u, a.c.Order, a.gone, a.c.KeepCPUs, a.c.KeepMemory, a.c.Spare)
	if !u.Usable && !a.watching {
		// Resumed, rebooted or just registered: no hook tells of that.
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
		a.stop("jobs have what was lent") // a hook was lost
	default:
		a.grow(ctx)
	}
}

// warn logs, once for each job, that more may be counted for a job than it has.
func (a *Agent) warn(u Usage) {
	doubted := map[int64]bool{}
	for _, h := range u.Holds {
		if h.Doubt == nil {
			continue
		}
		doubted[h.Job] = true
		if !a.doubted[h.Job] {
			a.c.Log.Warn("a job's own text, such as its name, looks like what Slurm says of nodes: all of it counts as held by the job",
				"job", h.Job, "cpus", h.CPUs, "memory_mib", h.Memory>>20, "error", h.Doubt)
		}
	}
	a.doubted = doubted
}

// grow replaces an executor that could lend more, when nobody uses it or after a while.
func (a *Agent) grow(ctx context.Context) {
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
				a.stop("more can be lent, and has waited long enough", "waited", a.c.GrowWithin)
			case err == nil && !leased:
				a.stop("more can be lent, and nobody uses it")
			default:
				a.later(min(growLook, a.c.GrowWithin), a.ask)
			}
		})
	}()
}

// start starts an executor. What runs until it ends is not bound to Run's context: stop ends it.
func (a *Agent) start(o Offer) {
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

// stop has the executor end.
func (a *Agent) stop(reason string, args ...any) {
	r := a.running
	if !r.stopped {
		a.c.Log.Info("executor asked to leave", append([]any{"reason", reason}, args...)...)
	}
	r.stopped = true
	r.stop()
}

// ended notes an executor's end.
func (a *Agent) ended(r *running, err error) {
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
		a.c.Log.Warn("executor ended by itself; another is started", "error", err, "lived", lived.Round(time.Millisecond), "in", wait)
	}
	a.ask()
}

package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

const (
	// Between two searches for another home; an executor that comes ends a pause early.
	pauseMin = 5 * time.Millisecond
	pauseMax = 500 * time.Millisecond
	// newsPatience is how long a call waits to be told that an executor is lost which does not answer: the control part's own
	// patience is 3 s.
	newsPatience = 5 * time.Second
)

// mover is how a lease goes on elsewhere. The lease that the program holds is a front without workers; its home is a lease on
// one executor, and calls go there.
//
//	home lost (event) ──▶ seek: look, lease, connect ──▶ home = the new one ──▶ retire: give the old one back
//	                        ▲ refused: again, later, or when an executor comes
type mover struct {
	session *Session
	front   *Lease
	options LeaseOptions
	config  dataplane.ChannelConfig
	plan    *grant.Pending // how the first home was found
	news    *grant.Changes // of the seeker

	home  atomic.Pointer[Lease]
	local *Lease // with LeaseOptions.Local: the home while there is no other
	moved atomic.Uint64

	ctx    context.Context // ends with the front
	cancel context.CancelFunc
	work   sync.WaitGroup // the seeker, and those that retire old homes

	mu      sync.Mutex
	changed chan struct{} // closed and replaced when the home is lost or another one
	seeking bool
	closed  bool
	trouble string   // why the last search was in vain
	left    []*Lease // retired homes whose buffers the program still has

	events sync.Mutex // one at a time, of all homes
}

// leaseMoving takes a lease that goes on elsewhere, or runs in this process when nobody has room.
func (s *Session) leaseMoving(ctx context.Context, o LeaseOptions, cfg dataplane.ChannelConfig, at string) (_ *Lease, err error) {
	front := &Lease{session: s, config: cfg, byName: make(map[string]*Function)}
	m := &mover{session: s, front: front, options: o, config: cfg, news: s.control.Changes(), changed: make(chan struct{})}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	front.mover = m
	if o.Local {
		if m.local, err = s.localLease(front, o, cfg); err != nil {
			m.cancel()
			return nil, err
		}
	}
	holder := front
	if !o.Failover {
		holder = nil // a lease like any other
	}
	home, err := s.leaseFor(ctx, holder, o, cfg, at)
	switch {
	case err == nil && o.Failover:
		m.plan = home.plan
	case err == nil:
		m.close()
		return home, nil
	case m.local != nil && ctx.Err() == nil && (errors.Is(err, ErrBusy) || errors.Is(err, ErrConnection)):
		home = m.local
	default:
		m.close()
		return nil, err
	}
	for name, f := range home.byName {
		front.byName[name] = &Function{lease: front, index: f.index, name: name}
	}
	m.home.Store(home)
	if !s.enter(front) {
		_ = front.Release(context.WithoutCancel(ctx))
		return nil, fail("lease", dataplane.StatusInvalid, "the session is closed")
	}
	if !home.good() { // lost before it was the home
		home.lost()
	}
	return front, nil
}

// close ends what is not a home's.
func (m *mover) close() {
	m.cancel()
	if m.local != nil {
		m.local.cancel()
		m.local.local.close()
	}
}

// good says that calls may be started.
func (l *Lease) good() bool { return !l.leaving.Load() && !l.over.Load() }

// lost tells the front of a home, if it is one, that it is no good any more.
func (l *Lease) lost() {
	if l.front == nil {
		return
	}
	m := l.front.mover
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.home.Load() != l {
		return
	}
	if m.local != nil {
		m.toHere(l)
	}
	m.note()
	if !m.seeking {
		m.seeking = true
		m.work.Go(m.seek)
	}
}

// toHere has calls run in this process instead of a home that is lost. Under mu.
func (m *mover) toHere(old *Lease) {
	m.home.Store(m.local)
	m.front.replaced.Add(old.replaced.Load())
	m.work.Go(func() { m.retire(old) })
}

// note tells who waits that something has changed. Under mu.
func (m *mover) note() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// tell passes an event on to the program.
func (m *mover) tell(e Event) {
	if m.options.OnEvent == nil {
		return
	}
	m.events.Lock()
	defer m.events.Unlock()
	m.options.OnEvent(e)
}

// where returns the home when it can be called, waiting for it if need be. suspect is one on which a call has failed: if it is not
// known to be lost, that is waited for, too.
func (m *mover) where(ctx context.Context, op string, suspect *Lease) (*Lease, error) {
	if home := m.home.Load(); home != suspect && home.good() {
		return home, nil
	}
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		m.mu.Lock()
		home, changed, trouble, closed := m.home.Load(), m.changed, m.trouble, m.closed
		m.mu.Unlock()
		if closed {
			return nil, fail(op, StatusLeaseEnded, "the lease was released")
		}
		patience := m.session.control.Timeout()
		if home.good() {
			if home != suspect {
				return home, nil
			}
			patience = min(patience, newsPatience)
		}
		if trouble == "" {
			trouble = "still asking"
		}
		timer.Reset(time.Until(start.Add(patience)))
		select {
		case <-changed:
		case <-m.ctx.Done():
		case <-ctx.Done():
			return nil, contextError(ctx, op, fmt.Sprintf("%s; no other until then: %s", home.whyLost(), trouble), false)
		case <-timer.C:
			return nil, fail(op, StatusLeaseEnded, "%s; no other within %v: %s", home.whyLost(), patience, trouble)
		}
	}
}

// whyLost says what happened to a home.
func (l *Lease) whyLost() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	why := l.reason
	if l.ended == dataplane.OK {
		why = l.why
	}
	if why == "" {
		why = "not known"
	}
	return fmt.Sprintf("the lease on %s ended: %s", l.held.Address, why)
}

// seek finds another home, however long that takes.
func (m *mover) seek() {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		home, err := m.look()
		m.mu.Lock()
		if m.closed {
			m.mu.Unlock()
			if err == nil {
				_ = home.Release(context.Background())
			}
			return
		}
		if err != nil {
			m.trouble = err.Error()
			m.mu.Unlock()
			m.wait(pause)
			continue
		}
		old := m.home.Swap(home)
		m.moved.Add(1)
		m.trouble = ""
		if old != m.local {
			m.front.replaced.Add(old.replaced.Load())
			m.work.Go(func() { m.retire(old) })
		}
		good := home.good()
		m.seeking = !good
		if !good && m.local != nil {
			m.toHere(home)
		}
		m.note()
		m.mu.Unlock()
		m.tell(Event{Kind: EventMoved, Reason: home.held.Address})
		if good {
			return
		}
		pause = pauseMin / 2
	}
}

// look has another home granted, of the executors as they are now.
func (m *mover) look() (*Lease, error) {
	p, err := m.plan.Again(m.ctx)
	if err != nil {
		return nil, err
	}
	return m.session.leaseBy(m.ctx, m.front, p, m.options, m.config)
}

// wait returns after the pause, or as soon as the resource manager tells of an executor that has come.
func (m *mover) wait(pause time.Duration) {
	ctx, cancel := context.WithTimeout(m.ctx, pause)
	defer cancel()
	m.news.AwaitExecutor(ctx)
}

// retire gives back a home that nobody starts calls on any more, after those in flight.
func (m *mover) retire(old *Lease) {
	stop := context.AfterFunc(m.ctx, old.stopHeal)
	defer stop()
	if !old.over.Load() {
		for _, w := range old.workers {
			if !w.quiet() {
				break
			}
		}
	}
	old.retire(m.ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(old.workers, func(w *Worker) bool { return w.ch != nil }) {
		m.left = append(m.left, old)
	}
}

// retire ends a home. What its submitted calls came to may still be asked for, and buffers stay.
func (l *Lease) retire(ctx context.Context) {
	l.end(StatusLeaseEnded, "calls go elsewhere")
	l.close()
	l.held.StopWatch()
	l.stopHealing()
	for _, w := range l.workers {
		w.take() // whoever is inside comes out, since the channels failed
		w.settle()
	}
	_ = l.held.Release(ctx) // an error: its executor finds out by itself that nobody holds it
	for _, w := range l.workers {
		if len(w.buffers) == 0 {
			w.connection.close()
			w.connection = connection{}
		}
		l.give(w)
	}
}

// release is Release of the front.
func (m *mover) release(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	m.note()
	m.mu.Unlock()
	m.cancel()
	m.work.Wait()
	var err error
	if home := m.home.Load(); home != m.local {
		err = home.Release(ctx)
	}
	m.close()
	for _, old := range m.left {
		old.cancel()
		for _, w := range old.workers {
			w.take()
			w.freeBuffers()
			if w.ch != nil {
				w.close()
			}
		}
	}
	m.session.leave(m.front)
	return err
}

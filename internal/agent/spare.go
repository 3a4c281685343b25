package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// provenFor is how long an acquisition counts for the demand. A lease that gets new workers within this time after another lease with the same
// terms makes the agent start a spare lease. A program that leases once causes none.
const provenFor = 10 * time.Second

// courtesy is how long the agent waits before each attempt to start a spare lease. A client that has just got a lease is about to make its first
// call, and a start would take a core from it.
const courtesy = 5 * time.Millisecond

// demand is the demand for leases with the same terms.
type demand struct {
	last   time.Time // of the latest acquisition
	wanted int       // spare leases
	ready  int       // spare leases that are cached
	making bool      // a goroutine starts spare leases
	freed  bool      // a lease was granted or released since that goroutine began its latest attempt

	refused int       // attempts to start a spare lease that failed since the last success
	again   time.Time // no attempt before this time
}

// After more than refusedMost failed attempts in a row, the agent pauses before the next one. The first pause is refusedPause. Each further pause is
// twice as long as the one before, up to provenFor. The first refusals cause no pause, because an executor without a free core usually refuses an
// attempt when a lease is granted, and has the core when that lease is released.
const (
	refusedMost  = 2
	refusedPause = 50 * time.Millisecond
)

// tried counts an attempt to start a spare lease.
func (d *demand) tried(now time.Time, err error) {
	if err == nil {
		d.refused, d.again = 0, time.Time{}
		return
	}
	if d.refused++; d.refused > refusedMost {
		d.again = now.Add(min(refusedPause<<min(d.refused-refusedMost-1, 10), provenFor))
	}
}

// more reports whether another attempt follows one that ended with err.
func (d *demand) more(err error) bool { return d.ready < d.wanted && (err == nil || d.freed) }

// acquired counts an acquisition. fresh: it found no cached workers, so one more spare lease would have helped.
func (d *demand) acquired(now time.Time, fresh bool, most int) {
	if fresh && !d.last.IsZero() && now.Sub(d.last) <= provenFor {
		d.wanted = min(d.wanted+1, most)
	}
	d.last = now
}

// unused counts a spare lease that was given up before any client took it, or whose workers could not be resumed.
func (d *demand) unused() { d.wanted = max(d.wanted-1, 0) }

// idle reports whether the demand need not be remembered any more.
func (d *demand) idle(now time.Time) bool {
	return d.wanted == 0 && d.ready == 0 && !d.making && now.Sub(d.last) > provenFor
}

// device is a provider and the options with which its device is opened.
type device struct {
	provider string
	options  dataplane.Options
}

// deviceOnce is a device that is open, or that a goroutine opens now.
type deviceOnce struct {
	once sync.Once
	dev  *dataplane.Device
	err  error
}

// spares keeps spare leases ahead of demand, for the next client process of the user that leases with the same terms. Their workers have loaded
// the library and are connected. Executors freeze the workers, charge nobody for them, and end them when another lease needs
// their cores.
type spares struct {
	a      *Agent
	ctx    context.Context // ends when no more are started
	cancel context.CancelFunc
	work   sync.WaitGroup
	open   func(provider string, options dataplane.Options) (*dataplane.Device, error)

	mu    sync.Mutex
	terms map[grant.Terms]*demand
	devs  map[device]*deviceOnce // of the spare channels; each is opened for the first ones, without mu, because a driver may take long
	// Brokers of the devices on verbs, which post for clients until these have queue pairs of their own.
	brokers map[*dataplane.Device]*dataplane.Broker
	closed  bool
}

// spareChannels are channels that the agent connects for a client.
type spareChannels interface {
	Offers() ([][]byte, error)
	Connect(i int, blob []byte) error
	Pack() (endpoint int, channels []dataplane.Packed, err error)
	Close()
}

func newSpares(a *Agent) *spares {
	s := &spares{a: a, terms: make(map[grant.Terms]*demand), devs: make(map[device]*deviceOnce), open: dataplane.Open, brokers: make(map[*dataplane.Device]*dataplane.Broker)}
	s.ctx, s.cancel = context.WithCancel(a.ctx)
	return s
}

// acquired counts a granted lease, and starts spare leases in the background if they are wanted. fresh: the granted lease has new workers.
func (s *spares) acquired(p *grant.Pending, h *grant.Held, fresh bool, now time.Time) {
	terms, ok := p.Terms(h)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.terms[terms]
	if d == nil {
		s.forget(now)
		d = &demand{}
		s.terms[terms] = d
	}
	d.acquired(now, fresh, p.Pool())
	s.fill(d, p, h)
}

// forget forgets demands that are not needed any more. Terms of closed connections would keep the memory of these, for example libraries. The caller holds mu.
func (s *spares) forget(now time.Time) {
	for t, d := range s.terms {
		if d.idle(now) || d.ready == 0 && !d.making && t.Closed() {
			delete(s.terms, t)
		}
	}
}

// released starts the spare leases that are still wanted, because they may have lacked the cores of the released lease.
func (s *spares) released(p *grant.Pending, h *grant.Held) {
	terms, ok := p.Terms(h)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.terms[terms]; d != nil {
		s.fill(d, p, h)
	}
}

// fill starts spare leases in the background until there are as many as wanted, or until one fails. If fill is called during an attempt that fails,
// another one follows, because the attempt may have come before the cores were free. The caller holds mu.
func (s *spares) fill(d *demand, p *grant.Pending, h *grant.Held) {
	if s.closed || d.ready >= d.wanted {
		return
	}
	if d.freed = true; d.making {
		return
	}
	d.making = true
	like := p.Spare(h)
	s.work.Go(func() {
		defer like.Close()
		for s.attempt(d, like) {
		}
	})
}

// attempt tries to start a spare lease after the pause before it. It returns true if another attempt follows. Otherwise the demand's goroutine ends.
func (s *spares) attempt(d *demand, like *grant.Spare) bool {
	s.mu.Lock()
	pause := max(courtesy, time.Until(d.again))
	s.mu.Unlock()
	err := s.wait(pause)
	s.mu.Lock()
	d.freed = false
	d.making = d.ready < d.wanted // not if fewer have been wanted since
	making := d.making
	s.mu.Unlock()
	if !making {
		return false
	}
	if err == nil {
		err = s.start(d, like)
	}
	if err != nil {
		s.tell(like, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.tried(time.Now(), err)
	d.making = d.more(err) && !s.closed
	return d.making
}

func (s *spares) wait(d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

func (s *spares) tell(like *grant.Spare, err error) {
	level := slog.LevelWarn
	if errors.Is(err, dataplane.ErrBusy) || errors.Is(err, dataplane.ErrConnection) || s.ctx.Err() != nil {
		level = slog.LevelDebug
	}
	s.a.log.Log(s.ctx, level, "no spare workers started", "library", like.Library(), "executor", like.Executor(), "error", err)
}

// device returns the device of spare channels, and opens it for the first ones.
func (s *spares) device(like *grant.Spare) (*dataplane.Device, error) {
	provider, options := like.Device()
	return s.deviceOf(device{provider, options})
}

func (s *spares) deviceOf(key device) (*dataplane.Device, error) {
	s.mu.Lock()
	o := s.devs[key]
	if o == nil {
		o = &deviceOnce{}
		s.devs[key] = o
	}
	s.mu.Unlock()
	o.once.Do(func() { o.dev, o.err = s.open(key.provider, key.options) })
	if o.err != nil { // the next one tries again
		s.mu.Lock()
		if s.devs[key] == o {
			delete(s.devs, key)
		}
		s.mu.Unlock()
	}
	return o.dev, o.err
}

// start starts one spare lease. On verbs, the channels pass through a broker. If that is not possible, for example because the executor has an
// earlier version, the workers are late (grant.Spare.Bound): the client offers channels when it takes the lease.
func (s *spares) start(d *demand, like *grant.Spare) error {
	if !like.Bound() {
		return s.startConnected(d, like, s.channels)
	}
	if like.Brokered() {
		err := s.startConnected(d, like, s.brokered)
		if err == nil || errors.Is(err, dataplane.ErrBusy) || errors.Is(err, dataplane.ErrConnection) {
			return err
		}
		s.a.log.Debug("spare workers without a broker", "library", like.Library(), "executor", like.Executor(), "error", err)
	}
	started, err := like.StartLate(s.ctx)
	if err == nil {
		s.keep(d, started, nil)
	}
	return err
}

// channels makes channels that another process can take over.
func (s *spares) channels(like *grant.Spare) (spareChannels, error) {
	dev, err := s.device(like)
	if err != nil {
		return nil, err
	}
	return dev.NewChannels(like.Channels())
}

// brokered makes channels through a broker.
func (s *spares) brokered(like *grant.Spare) (spareChannels, error) {
	dev, err := s.device(like)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	b := s.brokers[dev]
	if b == nil {
		if b, err = dev.NewBroker(); err == nil {
			s.brokers[dev] = b
		}
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	n, _, cfg := like.Channels()
	return b.NewChannels(n, cfg)
}

// startConnected makes the channels, lets the executor start workers that connect to them, and keeps the descriptors for the process that takes the
// lease.
func (s *spares) startConnected(d *demand, like *grant.Spare, open func(*grant.Spare) (spareChannels, error)) error {
	channels, err := open(like)
	if err != nil {
		return err
	}
	defer channels.Close() // a packed channel lives on in its descriptors
	offers, err := channels.Offers()
	if err != nil {
		return err
	}
	started, err := like.Start(s.ctx, offers)
	if err != nil {
		return err
	}
	for i := range started.Workers {
		if err == nil {
			err = channels.Connect(i, started.Workers[i].Blob)
		}
	}
	var h *handed
	if err == nil {
		h, err = s.a.pack(channels)
	}
	if err != nil {
		started.Drop()
		return err
	}
	s.keep(d, started, h)
	return nil
}

// keep lists a spare lease. It takes over the channels, which are nil if the workers are late.
func (s *spares) keep(d *demand, started *grant.Started, channels io.Closer) {
	s.mu.Lock()
	d.ready++
	s.mu.Unlock()
	started.Keep(channels, func(taken bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if d.ready--; !taken {
			d.unused()
		}
	}, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		d.unused() // so that workers that never serve a lease are not started again and again
	})
}

// pack returns connected channels in the form in which a client hands them over (client/c/hand.c): the endpoint's descriptor comes first.
func (a *Agent) pack(channels spareChannels) (*handed, error) {
	const op = "keep the channels of spare workers"
	endpoint, all, err := channels.Pack()
	if err != nil {
		return nil, err
	}
	h := &handed{a: a}
	p, files := part{}, []int{endpoint}
	flush := func() error {
		if !a.hold(len(files)) {
			return failed(op, dataplane.StatusBusy, "%d more descriptors would exceed a quarter of this process's limit", len(files))
		}
		if p.files = copies(files); p.files == nil {
			a.held.Add(-int64(len(files)))
			return failed(op, dataplane.StatusBusy, "no descriptor is left")
		}
		p.Files = len(files)
		h.add(p)
		p, files = part{Hand: protocol.Hand{First: h.workers}}, nil
		return nil
	}
	for _, c := range all {
		if p.Count == mostPacked || len(files)+len(c.Files) > protocol.MaxFiles {
			err = flush()
		}
		if err != nil {
			break
		}
		p.Count, p.Size, p.Channels = p.Count+1, len(c.Description), append(p.Channels, c.Description...)
		files = append(files, c.Files...)
	}
	if err == nil {
		err = flush()
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// mostPacked is the most channels of one part.
const mostPacked = protocol.MaxFiles / 6

// close ends the attempts to start spare leases, and closes the devices. It does not release the spare leases, because grant.Pool does that.
func (s *spares) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.work.Wait()
	for _, b := range s.brokers {
		b.Close()
	}
	for _, o := range s.devs {
		o.dev.Close()
	}
}

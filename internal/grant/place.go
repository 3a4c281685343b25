package grant

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
)

// pickTries is how many groups of the board a pick looks at before the manager is asked for its list.
const pickTries = 8

// refreshAfter is the largest age of the index of executors on this node.
const refreshAfter = 10 * time.Second

// refreshSoon is its largest age when no executor was found with it, since one may have registered on this node.
const refreshSoon = 20 * time.Millisecond

// attachEvery is the time from a failed attempt to connect to the next one. An attempt can take seconds on tcp.
const attachEvery = 30 * time.Second

// places reads the manager's board. It attaches when it is first used, and again after an error, since a manager that was restarted
// has other memory. Safe for concurrent use. A caller waits for its turn no longer than its context allows.
type places struct {
	locked  chan struct{}   // capacity 1: full while a goroutine uses the fields below
	closing context.Context // ended by end: the session is being closed
	end     context.CancelFunc
	devices link.Devices
	client  *link.Client // nil: not attached
	reader  *board.Reader
	fresh   time.Time // when the reader was last refreshed
	closed  bool
	failed  error     // why no provider could connect; nil: one did
	tried   time.Time // when failed was set
	asked   time.Time // when one of several managers was last asked for its epoch

	attached atomic.Pointer[string] // the provider while reader is set, else nil
}

func (p *places) open() {
	p.locked = make(chan struct{}, 1)
	p.closing, p.end = context.WithCancel(context.Background())
}

// lock waits for the goroutine that uses p, which may be waiting for a manager that does not answer. If lock returns an error, ctx has ended.
func (p *places) lock(ctx context.Context) error {
	select {
	case p.locked <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *places) unlock() { <-p.locked }

// hello asks the manager how its memory can be reached. An error says that the address is not a manager's.
func (c *shared) hello(ctx context.Context) (*control.ManagerHelloReply, error) {
	const op = "ask the resource manager"
	at, err := c.manager()
	if err != nil {
		return nil, err
	}
	conn, err := c.dial(op, at)
	if err != nil {
		return nil, err
	}
	r, err := control.NewManagerClient(conn).Hello(ctx, &control.ManagerHelloRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		return nil, c.explainAbsent(fromControl(op, at, err), at)
	}
	return r, nil
}

// attach makes sure that there is a reader. It ends early when the session is closed. Under the lock.
func (c *shared) attach(ctx context.Context) error {
	p := &c.places
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.closing, cancel)()
	if p.reader != nil && c.replaced(ctx) {
		p.drop()
	}
	if p.reader != nil {
		return nil
	}
	if p.closed {
		return fail("read the board", dataplane.StatusInvalid, "the session is closed")
	}
	every := attachEvery
	if control.Several(c.opts.Manager) {
		every = otherManager // the one that failed may be gone
	}
	if p.failed != nil && time.Since(p.tried) < every {
		return p.failed
	}
	hello, err := c.hello(ctx)
	if err != nil {
		return err
	}
	conn, err := c.dial("ask the resource manager", c.opts.Manager)
	if err != nil {
		return err
	}
	p.devices.Options = c.opts.verbs()
	p.devices.Options.Encrypt, _ = dataplane.Encryption(c.opts.DataEncryption, c.opts.AllowPlaintext)
	provider, err := p.devices.Try(link.Providers(hello, c.nodeID, ""), func(dev *dataplane.Device) (err error) {
		p.client, err = link.AttachClient(ctx, control.NewManagerClient(conn), dev)
		return err
	})
	if errors.Is(err, link.ErrNoWay) {
		return errNoBoard
	}
	if err != nil {
		var unreachable *dataplane.Error
		if ctx.Err() == nil && errors.As(err, &unreachable) {
			p.failed, p.tried = err, time.Now()
		}
		return err
	}
	if p.reader, err = board.NewReader(p.client, c.nodeID); err != nil {
		p.drop()
		return err
	}
	p.failed = nil
	p.fresh = time.Now()
	p.attached.Store(&provider)
	return nil
}

// otherManager is the interval at which one of several managers is asked whether it still serves the board, and the time limit of the question.
const otherManager = time.Second

// replaced reports whether another manager has taken over. The board of a manager whose process is stopped can still be read on shm and verbs. The board of
// a manager that is only slow stays in use. The caller holds the lock of places.
func (c *shared) replaced(ctx context.Context) bool {
	p := &c.places
	if !control.Several(c.opts.Manager) || time.Since(p.asked) < otherManager {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, otherManager)
	defer cancel()
	hello, err := c.hello(ctx)
	p.asked = time.Now()
	return err == nil && hello.GetEpoch() != p.reader.Header().Epoch
}

var errNoBoard = errors.New("this node cannot reach the board by any provider")

// drop closes the connection. The next use makes a new one. Under the lock.
func (p *places) drop() {
	if p.client != nil {
		p.client.Close()
	}
	p.client, p.reader = nil, nil
	p.attached.Store(nil)
}

func (p *places) close() {
	p.end()
	p.locked <- struct{}{} // an attempt to attach has been cancelled
	defer p.unlock()
	p.drop()
	p.closed = true
	p.devices.Close()
}

// pick finds an executor on the board that is not in refused, and adds it to refused. After an error the caller asks the manager.
func (c *shared) pick(ctx context.Context, s *Spec, refused map[uint32]bool) (Candidate, error) {
	p := &c.places
	if err := p.lock(ctx); err != nil {
		return Candidate{}, err
	}
	defer p.unlock()
	cand, err := c.pickLocked(ctx, s, refused)
	if err != nil && !errors.Is(err, board.ErrNone) {
		p.drop() // the manager's list is as good, and the next lease attaches again
	}
	return cand, err
}

// refresh reads the index again if it is older than age. Under the lock.
func (p *places) refresh(age time.Duration) error {
	if time.Since(p.fresh) <= age {
		return nil
	}
	if err := p.reader.Refresh(); err != nil {
		return err
	}
	p.fresh = time.Now()
	return nil
}

// pickLocked prefers an executor with room for all workers to one that has room only for the fewest.
func (c *shared) pickLocked(ctx context.Context, s *Spec, refused map[uint32]bool) (Candidate, error) {
	if err := c.attach(ctx); err != nil {
		return Candidate{}, err
	}
	cand, err := c.pickFor(s, s.Workers, refused)
	if errors.Is(err, board.ErrNone) && s.least() < s.Workers {
		return c.pickFor(s, s.least(), refused)
	}
	return cand, err
}

// pickFor finds an executor with room for a number of workers.
func (c *shared) pickFor(s *Spec, workers int, refused map[uint32]bool) (Candidate, error) {
	p := &c.places
	need := board.Need{Cores: uint32(workers * s.CoresPerWorker), MemoryMiB: uint32(min((s.Memory*uint64(workers)+1<<20-1)>>20, 1<<32-1)),
		For: s.Duration}
	switch c.opts.Provider {
	case "shm":
		need.Local = board.SHM
	case "verbs":
		need.Local, need.Remote = board.Verbs, board.Verbs
	case "tcp":
		need.Local, need.Remote = board.TCP, board.TCP
	case "ofi":
		need.Local, need.Remote = board.OFI, board.OFI
	default:
		need.Local, need.Remote = board.SHM|board.TCP, board.TCP
		if c.devices() {
			need.Local, need.Remote = need.Local|board.Verbs, need.Remote|board.Verbs
		}
		if c.opts.OFI {
			need.Local, need.Remote = need.Local|board.OFI, need.Remote|board.OFI
		}
	}
	if err := p.refresh(refreshAfter); err != nil {
		return Candidate{}, err
	}
	for range pickTries {
		choice, err := p.reader.Pick(need, refused, time.Now(), pickTries)
		if errors.Is(err, board.ErrNone) {
			if err := p.refresh(refreshSoon); err != nil {
				return Candidate{}, err
			}
			choice, err = p.reader.Pick(need, refused, time.Now(), pickTries)
		}
		if err != nil {
			return Candidate{}, err
		}
		refused[choice.Line.Slot] = true
		id, err := p.reader.Identity(&choice.Line)
		if errors.Is(err, board.ErrGone) || errors.Is(err, board.ErrTorn) || errors.Is(err, board.ErrLayout) {
			continue
		}
		if err != nil {
			return Candidate{}, err
		}
		info := &control.InfoReply{Node: id.Node, NodeId: id.NodeID, Incarnation: id.Incarnation[:], Cores: choice.Line.Cores, FreeCores: choice.Line.FreeCores,
			Providers:   choice.Line.Providers.Names(),
			MemoryBytes: uint64(choice.Line.MemoryMiB) << 20, FreeMemoryBytes: uint64(choice.Line.FreeMiB) << 20, MaxDepth: id.MaxDepth, MaxEager: id.MaxEager, MaxBulk: id.MaxBulk}
		provider, err := c.named(id.Control, info)
		if err != nil {
			continue
		}
		return Candidate{Address: id.Control, Node: id.Node, Provider: provider, info: info}, nil
	}
	return Candidate{}, board.ErrNone
}

// only returns the address of the only executor that may grant the lease, "" if there may be several. The executor that has made the lease's
// seed is asked first, but others can copy the seed.
func (s *Spec) only() string {
	if s.Executor == "" && s.At != "" && s.At == s.Seed.GetOrigin() {
		return ""
	}
	return cmp.Or(s.Executor, s.At)
}

// firstAt finds the executor of at as the first candidate, and all others behind it. An executor that cannot be asked is no error if there are others.
func (c *shared) firstAt(ctx context.Context, at, s *Spec) (found []Candidate, unusable []error, byBoard bool, err error) {
	found, unusable, err = c.candidates(ctx, at)
	others, alsoUnusable, oerr := c.candidates(ctx, s)
	if oerr != nil {
		return found, unusable, false, err
	}
	others = slices.DeleteFunc(others, func(o Candidate) bool { return o.Address == s.At })
	if found = append(found, others...); len(found) > 0 {
		err = nil
	}
	return found, append(unusable, alsoUnusable...), false, err
}

// first finds the first candidates: one executor from the board (byBoard), or the manager's whole list. unusable has the reasons why other
// executors of that list cannot be asked.
func (c *shared) first(ctx context.Context, s *Spec, refused map[uint32]bool) (found []Candidate, unusable []error, byBoard bool, err error) {
	if s.At != "" {
		at := *s
		at.Executor = s.At
		if s.only() != "" {
			s = &at
		} else {
			return c.firstAt(ctx, &at, s)
		}
	}
	if s.Executor == "" && c.opts.Executor == "" {
		if cand, err := c.pick(ctx, s, refused); err == nil {
			return []Candidate{cand}, nil, true, nil
		}
	}
	found, unusable, err = c.candidates(ctx, s)
	return found, unusable, false, err
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/client/internal/grant"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

const (
	flagAllowPlaintext = 1 // RFAAS_SESSION_ALLOW_PLAINTEXT
	flagRenew          = 1 // RFAAS_LEASE_RENEW
)

// service answers the messages of the seam. Safe for concurrent use; operations of one lease come one at a time.
type service struct {
	event func([]byte) // towards C

	mu       sync.Mutex
	sessions map[uint64]*grant.Control
	leases   map[uint64]*lease
	watches  map[uint64]*watch // by session
	next     uint64
}

// watch is a session's subscription to changes. One operation at a time.
type watch struct {
	changes *grant.Changes
	left    []grant.Change // that there was no room for
}

// lease is one key's state: pending until it is granted.
type lease struct {
	pending  *grant.Pending
	held     *grant.Held
	replaced map[int]*replacement // by worker: under way, or not fetched yet
	news     *grant.Changes       // for who waits for an executor; nil: nobody has yet
}

// replacement is a worker that is being replaced. It goes on when the caller that began it has no more time.
type replacement struct {
	blob   string
	done   chan struct{} // closed when worker and err are set
	worker grant.Worker
	err    error
}

func newService(event func([]byte)) *service {
	return &service{event: event, sessions: make(map[uint64]*grant.Control), leases: make(map[uint64]*lease), watches: make(map[uint64]*watch)}
}

// handle runs one operation and returns its status and reply; a failure's reply has the text.
func (s *service) handle(op uint32, req []byte) (status int32, reply []byte) {
	f, err := decode(req)
	var out message
	if err == nil {
		err = s.run(op, f, &out)
	}
	if err == nil {
		return int32(dataplane.OK), out
	}
	st := int32(dataplane.StatusFatal)
	var typed *dataplane.Error
	if errors.As(err, &typed) {
		st = int32(typed.Status)
	}
	out = nil
	out.str(tagText, err.Error())
	return st, out
}

func (s *service) run(op uint32, f fields, out *message) error {
	ctx := context.Background() // every operation is bounded by the session's time-out
	switch op {
	case opSessionOpen:
		return s.sessionOpen(ctx, f, out)
	case opSessionClose:
		return s.sessionClose(f)
	case opPlan:
		return s.plan(ctx, f)
	case opNext:
		return s.nextCandidate(f, out)
	case opGrant:
		return s.grant(ctx, f, out)
	case opReplace:
		return s.replace(ctx, f, out)
	case opRelease:
		return s.release(ctx, f, out)
	case opInspect:
		return s.inspect(ctx, f, out)
	case opRenew:
		return s.renew(ctx, f)
	case opFinish:
		return s.finish(f)
	case opChanges:
		return s.changes(ctx, f, out)
	case opSpread:
		return s.spread(ctx, f, out)
	case opAwait:
		return s.await(ctx, f, out)
	case opSilent:
		return s.silent(f)
	}
	return &dataplane.Error{Op: "control", Status: dataplane.StatusProtocol, Detail: fmt.Sprintf("unknown operation %d", op)}
}

func (s *service) sessionOpen(ctx context.Context, f fields, out *message) error {
	o := grant.Options{
		Manager:        f.str(tagManager),
		Executor:       f.str(tagExecutor),
		Provider:       f.str(tagProvider),
		Tenant:         f.str(tagTenant),
		AllowPlaintext: f.u64(tagFlags)&flagAllowPlaintext != 0,
		Timeout:        time.Duration(f.u64(tagTimeoutNs)),
		Keep:           int(int64(f.u64(tagKeep))),
		Dropped:        func(name any) { s.dropped(name.(uint64)) },
	}.WithEnvironment(os.Getenv)
	c, err := grant.Open(ctx, o)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	s.sessions[s.next] = c
	out.u64(tagSession, s.next)
	return nil
}

func (s *service) sessionClose(f fields) error {
	id := f.u64(tagSession)
	s.mu.Lock()
	c := s.sessions[id]
	delete(s.sessions, id)
	delete(s.watches, id)
	s.mu.Unlock()
	if c == nil {
		return unknown("session", id)
	}
	c.Close()
	return nil
}

func (s *service) session(f fields) (*grant.Control, error) {
	id := f.u64(tagSession)
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.sessions[id]; c != nil {
		return c, nil
	}
	return nil, unknown("session", id)
}

// changes says what has happened to executors.
func (s *service) changes(ctx context.Context, f fields, out *message) error {
	c, err := s.session(f)
	if err != nil {
		return err
	}
	id := f.u64(tagSession)
	s.mu.Lock()
	w := s.watches[id]
	if w == nil {
		w = &watch{changes: c.Changes()}
		s.watches[id] = w
	}
	s.mu.Unlock()
	if len(w.left) == 0 {
		if w.left, err = w.changes.Poll(ctx); err != nil {
			return err
		}
	}
	n := min(f.u64(tagCount), uint64(len(w.left)))
	for _, x := range w.left[:n] {
		out.str(tagExecutor, x.Address)
		out.str(tagNode, x.Node)
		out.u64(tagEvent, uint64(x.State))
	}
	w.left = w.left[n:]
	return nil
}

// await waits for an executor to come.
func (s *service) await(ctx context.Context, f fields, out *message) error {
	_, l, err := s.lease(f)
	if err != nil {
		return err
	}
	if l.news == nil {
		l.news = l.pending.Changes()
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(min(f.u64(tagTimeoutNs), uint64(time.Minute))))
	defer cancel()
	n := uint64(0)
	if l.news.AwaitExecutor(ctx) {
		n = 1
	}
	out.u64(tagCount, n)
	return nil
}

// spread says which executors have room for how many workers.
func (s *service) spread(ctx context.Context, f fields, out *message) error {
	c, err := s.session(f)
	if err != nil {
		return err
	}
	if _, ok := f[tagAt]; ok { // leases, each at one executor
		if at := cmp.Or(f.str(tagAt), c.Executor()); at != "" {
			out.str(tagExecutor, at)
			out.u64(tagWorkers, f.u64(tagWorkers))
			return nil
		}
	}
	var avoid []string
	for _, b := range f[tagExecutor] {
		avoid = append(avoid, string(b))
	}
	shares, err := c.Spread(ctx, grant.Spec{Workers: int(min(f.u64(tagWorkers), 1<<32)), CoresPerWorker: int(min(f.u64(tagCores), 1<<32)),
		Memory: f.u64(tagMemory), Duration: time.Duration(f.u64(tagDurationNs))}, avoid)
	for _, x := range shares {
		out.str(tagExecutor, x.Address)
		out.u64(tagWorkers, uint64(x.Workers))
	}
	return err
}

func (s *service) plan(ctx context.Context, f fields) error {
	key := f.u64(tagKey)
	c, err := s.session(f)
	if err != nil {
		return err
	}
	if from := f.u64(tagFrom); from != 0 {
		return s.planLike(ctx, key, from)
	}
	spec := grant.Spec{
		Library:        f.str(tagLibrary),
		Workers:        int(f.u64(tagWorkers)),
		CoresPerWorker: int(f.u64(tagCores)),
		Memory:         f.u64(tagMemory),
		Mode:           control.WaitMode(f.u64(tagWaitMode)),
		Duration:       time.Duration(f.u64(tagDurationNs)),
		Renew:          f.u64(tagFlags)&flagRenew != 0 || f.u64(tagDurationNs) == 0,
		CallLimit:      time.Duration(f.u64(tagCallLimitNs)),
		Executor:       f.str(tagExecutor),
		At:             f.str(tagAt),
		Depth:          int(f.u64(tagDepth)),
		Eager:          int(f.u64(tagEager)),
		Bulk:           f.u64(tagBulk),
	}
	if code := f[tagCode]; len(code) > 0 {
		spec.Code = append([]byte(nil), code[0]...) // the request is C's memory
	}
	p, err := c.Prepare(ctx, spec)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[key] = &lease{pending: p}
	return nil
}

// planLike plans a lease that takes the place of another one.
func (s *service) planLike(ctx context.Context, key, from uint64) error {
	s.mu.Lock()
	old := s.leases[from]
	s.mu.Unlock()
	if old == nil {
		return unknown("lease", from)
	}
	p, err := old.pending.Again(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[key] = &lease{pending: p}
	return nil
}

func (s *service) lease(f fields) (uint64, *lease, error) {
	key := f.u64(tagKey)
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[key]; l != nil {
		return key, l, nil
	}
	return key, nil, unknown("lease", key)
}

func (s *service) nextCandidate(f fields, out *message) error {
	_, l, err := s.lease(f)
	if err != nil {
		return err
	}
	c, err := l.pending.Next()
	if err != nil {
		return err
	}
	out.str(tagExecutor, c.Address)
	out.str(tagNode, c.Node)
	out.str(tagProvider, c.Provider)
	if c.Kept != nil {
		out.u64(tagKept, c.Kept.State.(uint64))
	}
	return nil
}

func (s *service) grant(ctx context.Context, f fields, out *message) error {
	key, l, err := s.lease(f)
	if err != nil {
		return err
	}
	held, err := l.pending.Grant(ctx, copies(f[tagBlob]))
	if err != nil {
		return err
	}
	s.mu.Lock()
	l.held = held
	s.mu.Unlock()
	out.u64(tagLeaseID, held.ID)
	for _, w := range held.Workers {
		out.bytes(tagBlob, w.Blob)
		out.u64(tagPID, uint64(w.PID))
		out.u64(tagStart, uint64(w.Start))
	}
	for _, name := range held.Functions {
		out.str(tagFunction, name)
	}
	held.Watch(func(e grant.Event) { s.tell(key, e) })
	return nil
}

// dropped tells C that what it keeps under a name is not needed any more.
func (s *service) dropped(name uint64) {
	var m message
	m.u64(tagEvent, newsDropped)
	m.u64(tagKept, name)
	s.event(m)
}

// tell passes an event on to C.
func (s *service) tell(key uint64, e grant.Event) {
	var m message
	m.u64(tagKey, key)
	text := e.Reason
	switch e.Kind {
	case grant.WorkerDied:
		text = e.Death()
		m.u64(tagEvent, newsWorkerDied)
		m.u64(tagWorker, uint64(e.Worker))
		m.u64(tagPID, uint64(e.PID))
	case grant.LeaseEnded:
		m.u64(tagEvent, newsEnded)
	case grant.Draining:
		m.u64(tagEvent, newsDraining)
	case grant.Expiring:
		m.u64(tagEvent, newsExpiring)
	}
	m.u64(tagInNs, uint64(e.In))
	m.u64(tagStatus, uint64(int64(e.Status)))
	m.str(tagText, text)
	m.str(tagBacktrace, e.Backtrace)
	m.bytes(tagOutput, e.Output)
	s.event(m)
}

func (s *service) replace(ctx context.Context, f fields, out *message) error {
	const op = "replace a worker"
	_, l, err := s.lease(f)
	if err != nil {
		return err
	}
	blobs := copies(f[tagBlob])
	if l.held == nil || len(blobs) != 1 {
		return &dataplane.Error{Op: op, Status: dataplane.StatusProtocol, Detail: fmt.Sprintf("%d blobs, want 1, of a granted lease", len(blobs))}
	}
	i := int(f.u64(tagWorker))
	s.mu.Lock()
	r := l.replaced[i]
	if r == nil || r.blob != string(blobs[0]) {
		r = &replacement{blob: string(blobs[0]), done: make(chan struct{})}
		if l.replaced == nil {
			l.replaced = make(map[int]*replacement)
		}
		l.replaced[i] = r
		go func() {
			defer close(r.done)
			r.worker, r.err = l.held.Replace(ctx, i, blobs[0])
		}()
	}
	s.mu.Unlock()
	patience := time.NewTimer(time.Duration(f.u64(tagTimeoutNs)))
	defer patience.Stop()
	select {
	case <-r.done:
	case <-patience.C:
		select {
		case <-r.done: // it was there already, and no time was given
		default:
			return nil
		}
	}
	s.mu.Lock()
	delete(l.replaced, i)
	s.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	out.bytes(tagBlob, r.worker.Blob)
	out.u64(tagPID, uint64(r.worker.PID))
	out.u64(tagStart, uint64(r.worker.Start))
	return nil
}

// held is what the lease that f names holds. op: of the error when it holds nothing yet.
func (s *service) held(f fields, op string) (*grant.Held, error) {
	_, l, err := s.lease(f)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.held == nil {
		return nil, &dataplane.Error{Op: op, Status: dataplane.StatusProtocol, Detail: "the lease is not granted yet"}
	}
	return l.held, nil
}

func (s *service) inspect(ctx context.Context, f fields, out *message) error {
	held, err := s.held(f, "inspect a worker")
	if err != nil {
		return err
	}
	i, err := held.Inspect(ctx, int(f.u64(tagWorker)))
	if err != nil {
		return err
	}
	out.u64(tagPID, uint64(i.PID))
	out.str(tagFunction, i.Running)
	out.bytes(tagOutput, i.Output)
	for _, n := range []uint64{i.Calls, i.Failed, i.Refused, i.BytesIn, i.BytesOut} {
		out.u64(tagCount, n)
	}
	return nil
}

// silent has it found out why a worker does not answer.
func (s *service) silent(f fields) error {
	held, err := s.held(f, "silent worker")
	if err != nil {
		return err
	}
	held.Unanswered(grant.Unanswered{Worker: int(f.u64(tagWorker)), Since: int64(f.nth(tagCount, 0)), At: int64(f.nth(tagCount, 1))})
	return nil
}

// release gives a lease back, or has it kept if C says under which name it has the connections.
func (s *service) release(ctx context.Context, f fields, out *message) error {
	key, l, err := s.lease(f)
	if err != nil {
		return nil // it was never planned
	}
	s.mu.Lock()
	delete(s.leases, key)
	s.mu.Unlock()
	if l.held == nil {
		l.pending.Discard()
		return nil
	}
	name := f.u64(tagKept)
	if name == 0 {
		return l.held.Release(ctx)
	}
	kept, err := l.held.ReleaseKeep(ctx, name)
	if kept {
		out.u64(tagKept, name)
	}
	return err
}

// heldOf is the granted lease of a message.
func (s *service) heldOf(op string, f fields) (*grant.Held, error) {
	_, l, err := s.lease(f)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.held == nil {
		return nil, &dataplane.Error{Op: op, Status: dataplane.StatusProtocol, Detail: "the lease is not granted yet"}
	}
	return l.held, nil
}

func (s *service) renew(ctx context.Context, f fields) error {
	h, err := s.heldOf("renew", f)
	if err != nil {
		return err
	}
	return h.Renew(ctx, time.Duration(f.u64(tagDurationNs)))
}

// finish gives a lease back in the background when its calls have ended.
func (s *service) finish(f fields) error {
	h, err := s.heldOf("finish", f)
	if err != nil {
		return err
	}
	// Ends with the connection, at the latest. An error: the executor ends the lease by itself, and says so.
	go func() { _ = h.Finish(context.Background()) }()
	return nil
}

func copies(in [][]byte) [][]byte {
	out := make([][]byte, len(in))
	for i, b := range in {
		out[i] = append([]byte(nil), b...)
	}
	return out
}

func unknown(what string, id uint64) error {
	return &dataplane.Error{Op: "control", Status: dataplane.StatusInvalid, Detail: fmt.Sprintf("unknown %s %#x", what, id)}
}

package executor

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/lease"
)

// claims lets clients claim cached workers without a message (internal/claim). Each connection of an agent has a region of its own. Only an agent on
// this node and its user's processes can map it: the agent connects to a socket and gets the region's descriptor for the token that came with the reply
// to a release. An agent reaches the region over provider tcp (AttachClaims) if its workers use that provider. On verbs, the agent and its client processes
// are claimants, which reach only a cell of their own.
type claims struct {
	e *Executor

	mu      sync.Mutex
	ended   bool
	socket  *net.UnixListener
	regions map[context.Context]*region // by connection
	far     map[string]*reachable       // by provider
	closing sync.WaitGroup              // regions that were removed from the map and are not closed yet, and connections that part has begun to close

	claimants map[string]int // number of claimants that are not closed yet, without the agents, by tenant

	armed sync.Map // lease.ID of cached workers -> armedLine

	greeting sync.Mutex
	greeted  map[uint32]int // connections to the socket, by user id
}

// armedLine is the line of cached workers that can be claimed, and their tenant.
type armedLine struct {
	*claim.Slot
	tenant string
}

// region is the claim region of a connection.
type region struct {
	*claim.Region
	token, proof [claimSecret]byte
	reach        *reach            // of the agent, on tcp or verbs; nil: the agent has not asked for it. Under claims.mu
	claimants    map[uint64]*reach // of the agent's client processes, on verbs. Under claims.mu
	parting      int               // claimants that were removed from the map and are not closed yet. Under claims.mu
	using        sync.WaitGroup    // connections that are being closed. Add is called under claims.mu, and before or with partAll
}

// close closes the region when its connections are closed. partAll was called before.
func (r *region) close() {
	r.using.Wait()
	r.Close()
}

const (
	claimSecret  = 16                     // bytes of a token, and of the proof with which the executor answers it
	claimHello   = 500 * time.Millisecond // time in which a connected agent must send its token
	claimGreeted = 16                     // connections that are served at once
	claimUser    = 4                      // of them, of one user
)

// region returns the region of a connection. It makes one if there is none.
func (c *claims) region(conn context.Context) (*region, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.regions[conn]; r != nil {
		return r, nil
	}
	if c.ended || conn.Err() != nil {
		return nil, errors.New("the connection has ended")
	}
	if err := c.listen(); err != nil {
		return nil, err
	}
	r := &region{}
	rand.Read(r.token[:])
	rand.Read(r.proof[:])
	var err error
	if r.Region, err = claim.New(func() {
		defer c.e.turns.enter()()
		r.Collect()
	}); err != nil {
		return nil, err
	}
	if c.regions == nil {
		c.regions = map[context.Context]*region{}
	}
	c.regions[conn] = r
	context.AfterFunc(conn, func() {
		leave := c.e.turns.enter()
		c.mu.Lock()
		there := c.regions[conn] == r
		if there {
			delete(c.regions, conn)
			c.partAll(r)
			c.closing.Add(1)
		}
		c.mu.Unlock()
		if there {
			r.Shut()
		}
		leave() // a handover does not wait for queue pairs
		if there {
			r.close()
			c.closing.Done()
		}
	})
	return r, nil
}

// listen opens the socket. The caller holds mu.
func (c *claims) listen() error {
	if c.socket != nil {
		return nil
	}
	var name [16]byte
	rand.Read(name[:])
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@rfaas-claims-" + hex.EncodeToString(name[:]), Net: "unix"})
	if err != nil {
		return err
	}
	c.socket = l
	go c.serve(l)
	return nil
}

// serve hands out regions until the socket is closed. Any process of the node can connect; it gets nothing without a token.
func (c *claims) serve(l *net.UnixListener) {
	turns := make(chan struct{}, claimGreeted)
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptor is free
			time.Sleep(claimHello)
			continue
		}
		leave := c.admit(conn)
		if leave == nil {
			conn.Close()
			continue
		}
		turns <- struct{}{}
		go func() {
			defer func() { <-turns }()
			defer leave()
			defer conn.Close()
			if err := c.greet(conn); err != nil {
				c.e.log.Debug("a claim region was not handed out", "error", err)
			}
		}()
	}
}

// admit counts a connection for its user. It returns nil if the user has too many connections, and otherwise a function that uncounts this one.
func (c *claims) admit(conn *net.UnixConn) (leave func()) {
	uid := uint32(0)
	if raw, err := conn.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			if who, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				uid = who.Uid
			}
		})
	}
	c.greeting.Lock()
	defer c.greeting.Unlock()
	if c.greeted == nil {
		c.greeted = map[uint32]int{}
	}
	if c.greeted[uid] >= claimUser {
		return nil
	}
	c.greeted[uid]++
	return func() {
		c.greeting.Lock()
		defer c.greeting.Unlock()
		if c.greeted[uid]--; c.greeted[uid] == 0 {
			delete(c.greeted, uid)
		}
	}
}

func (c *claims) greet(conn *net.UnixConn) error {
	_ = conn.SetDeadline(time.Now().Add(claimHello))
	var token [claimSecret]byte
	if _, err := io.ReadFull(conn, token[:]); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock() // so that the region stays open
	for _, r := range c.regions {
		if subtle.ConstantTimeCompare(token[:], r.token[:]) == 1 {
			_, _, err := conn.WriteMsgUnix(r.proof[:], unix.UnixRights(int(r.File().Fd())), nil)
			return err
		}
	}
	return errors.New("unknown token")
}

// possible reports whether cached workers may be claimed. No limit may refuse the lease, and the node must not be wanted back before its end. No
// client of another tenant may be waiting for room, because a claim would always come before that client.
func (c *claims) possible(k *cached, terms *lease.Terms) bool {
	most := terms.Duration + c.e.cfg.Settings.CacheTime
	by := k.spec.Provider != dataplane.OFI && !k.late
	return by && c.e.whyCordoned() == "" && !c.e.memoryShort.Load() && !c.e.room.othersWait(terms.Tenant) && !c.e.limits.mayRefuse() && c.e.back.before(most, c.e.now()) == most
}

// arm lets the clients of the agent that released a lease, or has asked for spare workers, claim the workers. It returns nil if they can be reused by
// message only. claimant: the client process that can claim them on verbs; 0, or a process that is no claimant: the agent.
func (c *claims) arm(ctx context.Context, k *cached, terms *lease.Terms, claimant uint64, state claim.State) *control.Claim {
	e := c.e
	if e.gate.Take(ctx, quota.Leases, 1) != nil { // the claim will be a lease
		return nil
	}
	conn := control.Connection(ctx)
	r, err := c.region(conn)
	var workers []claim.Worker
	for _, w := range k.workers {
		if err != nil {
			break
		}
		var one claim.Worker
		if one, err = w.Claimable(); err == nil {
			defer one.Close()
			workers = append(workers, one)
		}
	}
	var s *claim.Slot
	var id lease.ID
	client := e.table.ClientTime(terms.Duration)
	if k.spec.Provider != dataplane.Verbs {
		claimant = 0 // every process that maps the region, or the agent on tcp
	} else if err == nil && !c.isClaimant(r, claimant) {
		claimant = claim.Agent
	}
	stored := make(chan struct{})
	if err == nil {
		id = randomID()
		caller := context.WithoutCancel(ctx)
		s, err = r.Arm(uint64(id), client, claimant, state, workers, func(ago time.Duration) {
			<-stored // book deletes what is stored below, and the claim may come before that
			e.book(caller, conn, k, terms.Tenant, id, ago)
		})
	}
	if err != nil {
		e.log.Debug("cached workers cannot be claimed; they are reused by message", "lease", uint64(k.id), "error", err)
		return nil
	}
	c.armed.Store(k.id, armedLine{s, terms.Tenant})
	close(stored)
	reply := &control.Claim{Line: s.Line, Sequence: s.Sequence, Token: r.token[:]}
	if k.spec.Provider == dataplane.SHM {
		reply.Socket, reply.Proof = c.socket.Addr().String(), r.proof[:]
	} else {
		reply.LeaseId, reply.ClientMs, reply.Claimant = uint64(id), milliseconds(client), claimant
	}
	return reply
}

// isClaimant reports whether a client process with this id is a claimant of a region.
func (c *claims) isClaimant(r *region, id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.claimants[id] != nil
}

// slot returns the line of cached workers, or nil if they cannot be claimed or a claim of them was booked.
func (c *claims) slot(id lease.ID) *claim.Slot {
	s, armed := c.armed.Load(id)
	if !armed {
		return nil
	}
	return s.(armedLine).Slot
}

// revoke closes the line of cached workers. It returns false if a client has claimed them. The workers belong to the client's lease then.
func (c *claims) revoke(id lease.ID) bool {
	s := c.slot(id)
	if s == nil {
		return true
	}
	if !s.Revoke() {
		return false
	}
	c.armed.Delete(id)
	return true
}

// revokeAll makes all cached workers reusable by message only. When it returns, all earlier claims are booked.
func (c *claims) revokeAll() { c.revokeIf(everyTenant) }

// revokeIf is revokeAll for the workers of some tenants.
func (c *claims) revokeIf(of func(tenant string) bool) {
	c.armed.Range(func(id, line any) bool {
		if of(line.(armedLine).tenant) {
			c.revoke(id.(lease.ID))
		}
		return true
	})
	c.collect()
}

// revokeSoon calls revokeIf on another goroutine. It is for a caller that a handover may wait for, or that is outside the turnstile.
func (c *claims) revokeSoon(of func(tenant string) bool) {
	go func() {
		defer c.e.turns.enter()()
		c.revokeIf(of)
	}()
}

func everyTenant(string) bool { return true }

// collect books all claims so far. The caller is inside the turnstile, or has shut it.
func (c *claims) collect() {
	c.mu.Lock()
	all := make([]*region, 0, len(c.regions))
	for _, r := range c.regions {
		all = append(all, r)
	}
	c.mu.Unlock()
	for _, r := range all {
		r.Collect()
	}
}

// close revokes all lines and closes all regions. It closes the devices when no connection uses them any more.
func (c *claims) close() {
	c.revokeAll()
	c.mu.Lock()
	c.ended = true
	if c.socket != nil {
		c.socket.Close()
	}
	regions, far := c.regions, c.far
	c.regions, c.far = nil, nil
	for _, r := range regions {
		c.partAll(r)
	}
	c.mu.Unlock()
	for _, r := range regions {
		r.close()
	}
	c.closing.Wait()
	for _, to := range far {
		to.close()
	}
}

// bookClaim makes sure that an earlier claim of this lease is booked, so that the lease is known and has its workers. The caller is inside the turnstile.
func (e *Executor) bookClaim(id lease.ID) {
	if _, err := e.table.Get(id); err != nil {
		e.claims.collect()
	}
	if h := e.holding(id); h != nil {
		<-h.started // another goroutine is booking it
	}
}

// bookClaimFor is bookClaim for a caller outside of the turnstile.
func (e *Executor) bookClaimFor(id lease.ID) {
	defer e.turns.enter()()
	e.bookClaim(id)
}

// book turns a claim into a lease. The lease's workers serve it already. ago is the time since the claim. tenant, caller and conn are those of the release.
func (e *Executor) book(caller, conn context.Context, k *cached, tenant string, id lease.ID, ago time.Duration) {
	at := e.now().Add(-ago)
	e.mu.Lock()
	l, err := lease.Lease{}, lease.ErrNotCached
	if e.cached[k.id] == k {
		l, err = e.table.Claim(k.id, id, at)
	}
	e.claims.armed.Delete(k.id)
	if err != nil { // a process has guessed the line before the reply named it
		e.mu.Unlock()
		e.tell(&holding{tenant: tenant}, slog.LevelWarn, "ending workers that were claimed before they were cached", "lease", uint64(k.id), "error", err)
		for _, w := range k.workers {
			w.Kill()
		}
		return
	}
	delete(e.cached, k.id)
	h := newHolding(id, k.code, k.spec, l.CPUs)
	was, _ := e.table.Get(k.id)
	h.tenant, h.tables, h.spare = l.Terms.Tenant, k.tables, was.Terms.Spare
	e.holdings[id] = h
	e.mu.Unlock()
	e.release(k)
	e.accounts.succeed(k.id, l, k.workers, k.used, control.WaitMode(h.spec.WaitMode) != control.WaitMode_WAIT_MODE_WARM, at, h.tables)
	e.metrics.claims.Inc()
	flag, refused := e.reserve(h) // a limit may have been set since the line was armed
	var granted []*control.WorkerGrant
	for i, w := range k.workers {
		g := h.seatWorker(i, w, nil)
		if g == nil { // the lease has ended already; finishEnd waits for h.started
			stopAll(context.Background(), []Worker{w}, killed)
			continue
		}
		granted = append(granted, g)
		e.metrics.started(g)
		e.watch(h, i, w)
	}
	h.mu.Lock()
	h.granted, h.flag = granted, flag
	h.mu.Unlock()
	e.audit(caller, identity.AuditGrant, h, l.Terms.Tenant, "", func(line *identity.AuditEntry) { line.Start = startOf(granted) })
	close(h.started)
	h.askedOn(conn, func() { e.table.Gone(id) })
	e.tell(h, slog.LevelDebug, "workers claimed", "lease", uint64(id), "of", uint64(k.id), "ago", ago)
	if refused != nil {
		if h, err := e.beginEnd(context.Background(), id, lease.Revoked, fmt.Sprint(control.Text(refused))); err == nil {
			e.finishEnd(context.Background(), h, killed)
		}
		return
	}
	e.room.took(l.Terms.Tenant)
	e.changed()
}

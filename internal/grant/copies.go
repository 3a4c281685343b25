package grant

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// copies knows which executors have the seeds of a session's leases. So the init call of a seed is made once, and other executors copy the seed from
// one that has it. Each executor that has a copy lends it, too, so the copies spread like a tree. Safe for concurrent use.
type copies struct {
	mu    sync.Mutex
	seeds map[seedID]*seedPlaces
	tick  uint64
}

// seedsMost is how many seeds are remembered.
const seedsMost = 256

// copyTries is how many executors are asked to lend a seed before the init call is made again.
const copyTries = 3

// seedID identifies a seed by what its content depends on.
type seedID [sha256.Size]byte

// seedPlaces says where a seed is.
type seedPlaces struct {
	at     []*seedPlace
	making string        // executor that makes it; "": none
	made   chan struct{} // closed when making is over
	// refused means that an executor has granted the lease without a seed. Then each executor makes its own attempt.
	refused bool
	known   bool // the executor that has made a seed with a name is, or was, in at
	used    uint64
}

// seedPlace is an executor that has a seed.
type seedPlace struct {
	address string
	key     []byte // names the seed there; none: its name does
	info    *control.InfoReply
	readers int // executors that are copying it from here
}

func (p *Pending) seedID() (id seedID) {
	h := sha256.New()
	s := &p.spec
	for _, part := range [][]byte{p.sha[:], []byte(s.Seed.GetFunction()), s.Seed.GetPayload()} {
		_ = binary.Write(h, binary.LittleEndian, uint64(len(part))) // a hash returns no error
		h.Write(part)
	}
	tables := tablesKey(s.all())
	h.Write(tables[:])
	fmt.Fprintf(h, "%s\x00%s\x00", s.Seed.GetName(), s.Seed.GetOrigin())
	_ = binary.Write(h, binary.LittleEndian, []uint64{uint64(s.Seed.GetVersion()), s.Memory, uint64(s.CoresPerWorker), uint64(s.Depth), uint64(s.Eager), s.Bulk})
	h.Sum(id[:0])
	return id
}

// seedTurn is what a lease request to one executor does about its seed.
type seedTurn struct {
	c       *copies
	id      seedID
	address string
	makes   bool         // others wait until it is over
	had     bool         // the executor has had the seed
	from    []*seedPlace // executors from which the seed can be copied
	copy    []byte       // hash of the copy that the executor has fetched
	why     error        // why nothing could be copied
	early   *loan        // see lendEarly; nil: none
	ended   func(bool)   // ends early's use of its source; see take
}

// begin returns what a request does. If another executor is making the seed, it waits for it, but no longer than the request's own init call may take.
func (c *copies) begin(ctx context.Context, p *Pending, address string) *seedTurn {
	t := &seedTurn{c: c, id: p.seedID(), address: address}
	ctx, cancel := context.WithTimeout(ctx, p.spec.Seed.Limit())
	defer cancel()
	for {
		c.mu.Lock()
		s := c.seed(t.id)
		if at := p.spec.Seed.GetOrigin(); !s.known && at != "" && at != address {
			s.at, s.known = append(s.at, &seedPlace{address: at}), true // it has a name
		}
		t.from = slices.DeleteFunc(slices.Clone(s.at), func(x *seedPlace) bool { return x.address == address })
		t.had = len(t.from) < len(s.at)
		wait := s.made
		switch {
		case s.refused || len(s.at) > 0 || s.making == address || ctx.Err() != nil:
			wait = nil
		case s.making == "":
			t.makes, s.making, s.made = true, address, make(chan struct{})
			wait = nil
		}
		c.mu.Unlock()
		if wait == nil {
			return t
		}
		select {
		case <-wait:
		case <-ctx.Done():
		}
	}
}

// seed returns the record of a seed, and makes it if there is none. Under the lock.
func (c *copies) seed(id seedID) *seedPlaces {
	c.tick++
	s := c.seeds[id]
	if s == nil {
		s = &seedPlaces{}
		if c.seeds == nil {
			c.seeds = map[seedID]*seedPlaces{}
		}
		if len(c.seeds) >= seedsMost {
			c.forgetOldest()
		}
		c.seeds[id] = s
	}
	s.used = c.tick
	return s
}

func (c *copies) forgetOldest() {
	var oldest seedID
	var at *seedPlaces
	for id, s := range c.seeds {
		if s.making == "" && (at == nil || s.used < at.used) {
			oldest, at = id, s
		}
	}
	delete(c.seeds, oldest)
}

// end records the executor's answer. nil: the executor has not answered. The turn of a lease without a seed is nil.
func (t *seedTurn) end(r *control.LeaseReply, info *control.InfoReply) {
	if t == nil {
		return
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	s := t.c.seed(t.id)
	s.at = slices.DeleteFunc(s.at, func(x *seedPlace) bool { return x.address == t.address })
	if len(r.GetSeed()) == sha256.Size {
		s.at, s.refused = append(s.at, &seedPlace{address: t.address, key: r.GetSeed(), info: info}), false
	} else if t.makes && r.GetLeaseId() != 0 {
		s.refused = true
	}
	if t.makes && s.making == t.address {
		s.making = ""
		close(s.made)
	}
}

// request returns the seed of the request.
func (t *seedTurn) request(seed *control.Seed) *control.Seed {
	if t == nil || seed == nil {
		return seed
	}
	seed = proto.CloneOf(seed)
	seed.Elsewhere, seed.Copy = len(t.from) > 0, t.copy
	if t.why != nil {
		seed.NoCopy = t.why.Error()
	}
	return seed
}

// take returns the executor from which the fewest executors are copying, and counts one more until done is called. Nil: no executor is left to ask.
func (t *seedTurn) take() (from *seedPlace, done func(lost bool)) {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if len(t.from) == 0 {
		return nil, nil
	}
	from = slices.MinFunc(t.from, func(a, b *seedPlace) int { return cmp.Compare(a.readers, b.readers) })
	from.readers++
	return from, func(lost bool) {
		t.c.mu.Lock()
		defer t.c.mu.Unlock()
		from.readers--
		if lost {
			s := t.c.seed(t.id)
			s.at = slices.DeleteFunc(s.at, func(x *seedPlace) bool { return x == from })
			t.from = slices.DeleteFunc(t.from, func(x *seedPlace) bool { return x == from })
		}
	}
}

// lendEarly asks an executor to lend the seed while the candidate is asked for the lease, because the candidate probably needs the seed.
func (p *Pending) lendEarly(ctx context.Context, cand *Candidate) {
	t := p.turn
	if t.had || cand.Cached != nil || cand.info == nil {
		return
	}
	from, done := t.take()
	if from == nil {
		return
	}
	info := p.c.known(from)
	if info == nil {
		done(false)
		return
	}
	providers := sharedProviders(cand.info, info)
	conn, err := p.c.dial("copy a seed", from.address)
	if len(providers) == 0 || providers[0] == dataplane.Verbs || err != nil { // over verbs, the loan copies the seed
		done(false)
		return
	}
	t.early, t.ended = p.borrow(ctx, control.NewExecutorClient(conn), from, nil, providers[0]), done
}

// notNeeded ends the loan of lendEarly, if there is one.
func (t *seedTurn) notNeeded() {
	if t != nil && t.early != nil {
		t.early.end()
		t.ended(false)
		t.early = nil
	}
}

// copySeed has the candidate copy the seed from an executor that has it. If that fails, the request says why, and the candidate makes the init call.
func (p *Pending) copySeed(ctx context.Context, cl control.ExecutorClient, cand *Candidate) {
	t := p.turn
	for range copyTries {
		from, done, early := (*seedPlace)(nil), t.ended, t.early
		if t.early = nil; early != nil {
			from = early.from
		} else if from, done = t.take(); from == nil {
			break
		}
		digest, err := p.copyFrom(ctx, cl, cand, from, early, nil, false)
		done(err != nil && ctx.Err() == nil)
		if err == nil {
			t.copy = digest
			return
		}
		t.why = fmt.Errorf("from %s: %w", from.address, err)
		if ctx.Err() != nil {
			break
		}
	}
	t.giveUp(t.why)
}

// giveUp makes the next request ask for an init call. The request tells the executor why.
func (t *seedTurn) giveUp(why error) { t.copy, t.from, t.why = nil, nil, why }

// sharedProviders returns the providers over which one executor can read the memory of another, the best first.
func sharedProviders(a, b *control.InfoReply) (list []string) {
	for _, p := range []string{dataplane.SHM, dataplane.Verbs, dataplane.TCP} {
		same := p != dataplane.SHM || a.GetNodeId() != "" && a.GetNodeId() == b.GetNodeId()
		if same && slices.Contains(a.GetProviders(), p) && slices.Contains(b.GetProviders(), p) {
			list = append(list, p)
		}
	}
	return list
}

// known returns the description of an executor that has a seed, or nil.
func (c *shared) known(from *seedPlace) *control.InfoReply {
	if from.info != nil {
		return from.info
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.infos[from.address]
}

// copyFrom makes the candidate copy a seed from one executor: the seed of the table, or if table is nil, the seed of the lease. early is the loan for which
// that executor was asked before (lendEarly); nil: it was not asked. instead: the candidate has lost another source (anotherSource).
func (p *Pending) copyFrom(ctx context.Context, cl control.ExecutorClient, cand *Candidate, from *seedPlace, early *loan, table *Table, instead bool) (digest []byte, err error) {
	info := p.c.known(from)
	providers := sharedProviders(cand.info, info)
	if len(providers) == 0 { // its description is not known, or it was perhaps restarted with other providers
		if info, err = p.c.info(ctx, from.address); err != nil {
			early.end()
			return nil, err
		}
		providers = sharedProviders(cand.info, info)
	}
	if len(providers) == 0 {
		early.end()
		return nil, fmt.Errorf("it offers providers %v, and %s offers %v", info.GetProviders(), cand.Address, cand.info.GetProviders())
	}
	conn, err := p.c.dial("copy a seed", from.address)
	if err != nil {
		early.end()
		return nil, err
	}
	if early != nil { // it may have ended in the meantime, for example during an upload
		providers = slices.Insert(providers, 0, providers[0])
	}
	for _, provider := range providers {
		l := early
		if early = nil; l == nil {
			l = p.borrow(ctx, control.NewExecutorClient(conn), from, table, provider)
		}
		if digest, err = p.lendTo(l, cl, cand, table, instead); err == nil || control.StatusOf(err) == int32(dataplane.StatusLeaseEnded) || ctx.Err() != nil {
			return digest, err
		}
		err = fmt.Errorf("over %s: %w", provider, err)
	}
	p.c.forget(from.address) // it may have been restarted with other providers
	return nil, err
}

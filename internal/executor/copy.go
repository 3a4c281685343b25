package executor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// A seed can be copied from another executor, so that the init call is made once in the whole cluster. The client's agent knows which executors have
// the seed. It asks one of them to lend it (lend.go), and this one to fetch it, by one-sided reads. The copy waits in the store of tables, unused, until
// the agent's lease request names it. Nothing here reads the seed's bytes, except to hash them.

// copyKey names the copy of a seed before a lease uses it. No client can make a table with this hash.
func copyKey(owner string, content sum) sum { return keyOf("copy of a seed", owner, content) }

// mappedKey returns the key of the copy of a seed whose heap leases map as a table. The copy belongs to the owner alone, even if the owner has named another owner's key.
func mappedKey(owner string, seed sum) sum { return keyOf("mapped seed", owner, seed) }

// keyOf returns a key that no other kind, owner or hash has.
func keyOf(kind, owner string, of sum) (key sum) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%d\x00%s", kind, len(owner), owner)
	h.Write(of[:])
	h.Sum(key[:0])
	return key
}

// copyName returns the key of a requested copy in the store, and its name for the caller.
func copyName(req *control.FetchRequest, owner string, content sum) (key, name sum, err error) {
	if len(req.GetTable()) == 0 {
		return copyKey(owner, content), content, nil
	}
	h, err := checkSum("table", req.GetTable())
	key = mappedKey(owner, h)
	return key, key, err
}

// seedOffer is the checked part of a request that describes a seed.
type seedOffer struct {
	c     *zygote.SeedCopy
	parts []memoryPart // all segments
	at    []uint64     // addresses of the segments
	// Where the proofs are. If the size is 0, there are none.
	proofs *control.MemoryRef
	first  []zygote.SeedRun
}

func offerOf(req *control.FetchRequest) (*seedOffer, error) {
	o := &seedOffer{c: &zygote.SeedCopy{Units: req.GetSeed().GetUnits()}, proofs: req.GetProofs(), first: runsOf(req.GetSeed().GetTouched())}
	most, at := req.GetMemory().GetSize(), req.GetSeed().GetAt()
	for i, x := range req.GetSeed().GetSegments() {
		h, err := checkSum(fmt.Sprintf("sha256 of segment %d", i), x.GetSha256())
		if err != nil {
			return nil, err
		}
		if i >= len(at) || at[i] > most || x.GetSize() > most-at[i] {
			return nil, invalidf("seed: segment %d of %d bytes does not lie in the %d bytes of memory", i, x.GetSize(), most)
		}
		o.c.Segments = append(o.c.Segments, zygote.SeedSegment{Offset: x.GetOffset(), Size: x.GetSize(), Sum: h})
		o.at = append(o.at, req.GetMemory().GetAddr()+at[i])
		o.parts = addPart(o.parts, memoryPart{o.at[i], x.GetSize()})
	}
	if err := o.c.Check(); err != nil {
		return nil, invalidf("seed: %v", err)
	}
	if n, want := o.proofs.GetSize(), o.c.ProofsSize(); n != 0 && n < want {
		return nil, invalidf("seed: proofs of %d bytes, want %d", n, want)
	}
	return o, nil
}

// fetchSeed copies a seed from the memory of another executor.
func (e *Executor) fetchSeed(ctx context.Context, req *control.FetchRequest, stream grpc.ServerStreamingServer[control.FetchReply]) error {
	offer, err := offerOf(req)
	if err != nil {
		return err
	}
	c := offer.c
	size, owner, content := c.Bytes(), codeOwner(ctx), c.Sum()
	key, name, err := copyName(req, owner, content)
	if err != nil {
		return err
	}
	switch {
	case req.GetRest():
		e.fillings.hurry(key)
		return stream.Send(&control.FetchReply{Done: true})
	case req.GetInstead():
		return e.replaceSource(ctx, key, offer, req, stream)
	}
	ctx, cancel := fetchContext(ctx, size)
	defer cancel()
	// This context is for reading the rest, on which workers of other agents depend too. A handover and the end of the stream end ctx, but not this one.
	long, end := context.WithCancelCause(context.WithoutCancel(stream.Context()))
	defer end(nil)
	keep := context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	buffers := uint64(0) // memory that copying takes
	defer func() {
		if buffers > 0 {
			e.tables.giveBack(buffers)
		}
	}()
	guard := &fetchSource{e: e, ctx: long} // a drain ends its context, too
	if err := e.fabric.add(guard); err != nil {
		return err
	}
	defer e.fabric.remove(guard)
	f := newFilling(guard.ctx, stream.Send)
	defer func() { f.source.close() }()
	t, err := e.tables.seed(ctx, key, owner, func(room *seedRoom) (s *zygote.Seed, err error) {
		if err := room.take(size); err != nil {
			return nil, err
		}
		if err := e.tables.makeRoom(c.CopyMemory()); err != nil {
			return nil, fmt.Errorf("no memory for %d bytes of buffers: %w", c.CopyMemory(), err)
		}
		buffers = c.CopyMemory()
		source, err := e.connectSource(guard.ctx, req, offer.parts, stream.Send)
		if err != nil {
			return nil, err
		}
		f.source = newSeedSource(source, offer)
		if !req.GetOnDemand() || len(req.GetTable()) > 0 || size < onDemandLeast || offer.proofs.GetSize() == 0 || !e.cfg.Spawner.FillsPages() {
			return zygote.CopySeed(c, source)
		}
		f.seed, err = zygote.PageSeed(c, zygote.PageOptions{Read: f.read, Lost: f.lost, First: offer.first, Exact: e.cfg.Settings.SeedFill == config.SeedFillTouched, Touched: f.touched})
		return f.seed, err
	})
	if f.seed == nil { // nothing more is copied: the memory is free before the caller learns that
		e.tables.giveBack(buffers)
		buffers = 0
	}
	e.changed()
	switch {
	case err != nil && control.IsClassed(err):
		return err
	case err != nil:
		return control.Errorf(control.ClassConnection, "the seed cannot be copied: %v", err)
	}
	e.tables.release([]*table{t})
	if f.seed == nil {
		return stream.Send(&control.FetchReply{Done: true, Seed: name[:]})
	}
	defer e.fillings.add(key, f)()
	_ = stream.Send(&control.FetchReply{Done: true, Seed: name[:], Filling: true}) // if the caller has left, the reading goes on without it
	keep()
	handover, stop := e.turns.closing()
	defer stop()
	defer endAfter(handover, handoverRest, end)()
	defer endAfter(stream.Context(), fetchLimit(size), end)()
	defer context.AfterFunc(stream.Context(), f.seed.Hurry)()
	return e.fillSeed(handover, f, size)
}

const (
	// onDemandLeast is the size of a seed, in bytes, below which copying all of it takes less time than the faults of the first call.
	onDemandLeast = 2 << 20
	// onDemandFirst is how long only pages that a worker waits for are read: about the time of a start and a first call, which then need not share the link.
	onDemandFirst = 10 * time.Millisecond
	// handoverRest is how long a handover waits for the rest of a seed. It is shorter than handoverPatience: no lease can be granted meanwhile, and the source,
	// or the caller, may take as long as they want.
	handoverRest = 5 * time.Second
)

// endAfter calls end when patience has passed after the end of ctx. The caller must call stop.
func endAfter(ctx context.Context, patience time.Duration, end context.CancelCauseFunc) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		time.AfterFunc(patience, func() { end(fmt.Errorf("%w, and the seed has not arrived within %v", context.Cause(ctx), patience)) })
	})
}

// fillSeed reads the rest of a seed from which workers can start. A handover waits for it for a while (handoverRest), because the next program could not go on with it. With
// seed-fill=touched, it reads only what workers touch until a handover, or until half of lease-max has passed. The source asks it to read the rest when half of its own lease-max has passed (lend).
func (e *Executor) fillSeed(handover context.Context, f *filling, size uint64) error {
	wait := onDemandFirst
	if e.cfg.Settings.SeedFill == config.SeedFillTouched {
		wait = e.cfg.Settings.LeaseMax / 2
	}
	ctx, cancel := context.WithCancelCause(f.ctx)
	defer cancel(nil)
	limit := fetchLimit(size)
	defer time.AfterFunc(wait+limit, func() { cancel(errSlow) }).Stop()
	defer time.AfterFunc(wait, f.begin).Stop()
	defer context.AfterFunc(handover, f.seed.Hurry)()
	err := f.seed.Fill(ctx, f.rest)
	e.log.Debug("no page of a seed is read any more", "bytes", size, "read", f.seed.Moved(), "err", err)
	if err == nil {
		return nil
	}
	e.tables.dropLost(f.seed)
	e.changed()
	if errors.Is(err, zygote.ErrReleased) {
		return nil
	}
	e.log.Warn("a seed cannot be copied any more: its workers are ended", "err", err)
	return control.Errorf(control.ClassConnection, "the rest of the seed cannot be copied: %v", err)
}

// dropLost takes a seed whose pages are lost out of the store.
func (s *tableStore) dropLost(seed *zygote.Seed) {
	s.mu.Lock()
	var unused []*table
	for key, t := range s.tables {
		if t.seed != seed {
			continue
		}
		delete(s.tables, key)
		t.gone = true
		if t.refs == 0 {
			s.freeing++
			unused = append(unused, t)
		}
	}
	s.mu.Unlock()
	s.free(unused...)
}

// addPart adds a part to those that are read one after the other.
func addPart(parts []memoryPart, p memoryPart) []memoryPart {
	if last := len(parts) - 1; last >= 0 && parts[last].addr+parts[last].size == p.addr {
		parts[last].size += p.size
		return parts
	}
	return append(parts, p)
}

// takeCopy takes the copy of a seed out of the store. Its memory is then charged to the seed that is being made of it. Nil: the store does not have the copy, or another request uses it.
func (s *tableStore) takeCopy(key sum, owner string, room *seedRoom) *zygote.Seed {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[key]
	if t == nil || t.seed == nil || t.refs > 0 || !t.usable(owner) {
		return nil
	}
	delete(s.tables, key)
	room.add(t.size)
	return t.seed
}

// knowsSeed reports whether the store needs no offer for the seed of a wish: it has the seed or the copy that the wish names, is making the seed, or has failed to.
func (s *tableStore) knowsSeed(w *wish) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.tables[w.key]; t != nil && t.usable(w.owner) || s.arriving[sending{w.key, w.owner}] != nil {
		return true
	}
	t := s.tables[copyKey(w.owner, w.copied())]
	return t != nil && t.usable(w.owner)
}

// copied returns the name of the copy in the request, or zeros.
func (w *wish) copied() (h sum) {
	copy(h[:], w.GetCopy())
	return h
}

// findSeed returns the seed of a lease: the copy that the request names, or a new one.
func (e *Executor) findSeed(ctx context.Context, h *holding, w *wish, room *seedRoom) (*zygote.Seed, error) {
	s := e.tables.takeCopy(copyKey(w.owner, w.copied()), w.owner, room)
	switch {
	case s == nil:
		if w.GetNoCopy() != "" {
			e.tell(h, slog.LevelWarn, "a seed is not copied from another executor: the init call is made again", "lease", uint64(h.id), "reason", cutText(w.GetNoCopy()))
		}
		return e.makeSeed(ctx, h, w)
	case s.Heap() != w.heap && (w.GetName() == "" || s.Heap() > w.heap):
		s.Close()
		return nil, fmt.Errorf("the copy has a heap of %d bytes, and the lease's workers have %d", s.Heap(), w.heap)
	}
	e.metrics.seeds.WithLabelValues(seedCopied).Inc()
	e.tell(h, slog.LevelInfo, "seed copied from another executor", "lease", uint64(h.id), "function", w.GetFunction(), "bytes", s.Bytes)
	return s, nil
}

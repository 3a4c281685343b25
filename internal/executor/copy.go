package executor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/zygote"
)

// A seed can be copied from another executor, so that the init call is made once in the whole cluster. The client's agent knows which executors have
// the seed. It asks one of them to lend it (lend.go), and this one to fetch it, by one-sided reads. The copy waits in the store of tables, unused, until
// the agent's lease request names it. Nothing here reads the seed's bytes, except to hash them.

// copyKey names the copy of a seed before a lease uses it. No client can make a table with this hash.
func copyKey(owner string, content sum) (key sum) {
	h := sha256.New()
	fmt.Fprintf(h, "copy of a seed\x00%d\x00%s", len(owner), owner)
	h.Write(content[:])
	h.Sum(key[:0])
	return key
}

// fetchSeed copies a seed from the memory of another executor.
func (e *Executor) fetchSeed(ctx context.Context, req *control.FetchRequest, stream grpc.ServerStreamingServer[control.FetchReply]) error {
	c := &zygote.SeedCopy{Units: req.GetSeed().GetUnits()}
	var parts []memoryPart
	most, at := req.GetMemory().GetSize(), req.GetSeed().GetAt()
	for i, x := range req.GetSeed().GetSegments() {
		h, err := checkSum(fmt.Sprintf("sha256 of segment %d", i), x.GetSha256())
		if err != nil {
			return err
		}
		if i >= len(at) || at[i] > most || x.GetSize() > most-at[i] {
			return invalidf("seed: segment %d of %d bytes does not lie in the %d bytes of memory", i, x.GetSize(), most)
		}
		c.Segments = append(c.Segments, zygote.SeedSegment{Offset: x.GetOffset(), Size: x.GetSize(), Sum: h})
		parts = addPart(parts, memoryPart{req.GetMemory().GetAddr() + at[i], x.GetSize()})
	}
	if err := c.Check(); err != nil {
		return invalidf("seed: %v", err)
	}
	size, owner, content := c.Bytes(), codeOwner(ctx), c.Sum()
	ctx, cancel := fetchContext(ctx, size)
	defer cancel()
	var source *fetchSource
	defer func() { source.close() }()
	// A handover ends ctx, but not the reading of the rest, which uses this context.
	long, end := context.WithCancelCause(stream.Context())
	defer end(nil)
	keep := context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	var filling *zygote.Seed
	t, err := e.tables.seed(ctx, copyKey(owner, content), owner, func(room *seedRoom) (s *zygote.Seed, err error) {
		if err := room.take(size); err != nil {
			return nil, err
		}
		if source, err = e.connectSource(long, req, parts, stream.Send); err != nil {
			return nil, err
		}
		if !req.GetOnDemand() || size < onDemandLeast || !e.cfg.Spawner.FillsPages() {
			return zygote.CopySeed(c, source)
		}
		filling, err = zygote.PageSeed(c, nil, func(i int, b []byte) error { return source.readAt(b, req.GetMemory().GetAddr()+at[i]) })
		return filling, err
	})
	e.changed()
	switch {
	case err != nil && control.IsClassed(err):
		return err
	case err != nil:
		return control.Errorf(control.ClassConnection, "the seed cannot be copied: %v", err)
	}
	e.tables.release([]*table{t})
	if err := stream.Send(&control.FetchReply{Done: true, Seed: content[:], Filling: filling != nil}); err != nil || filling == nil {
		if filling != nil {
			end(errors.New("the caller has left"))
			return e.fillSeed(source, filling, size) // ends the reading
		}
		return err
	}
	keep()
	defer endAfterHandover(ctx, end)()
	return e.fillSeed(source, filling, size)
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

// endAfterHandover calls end when a handover, which ends ctx, has waited for handoverRest. The caller calls stop.
func endAfterHandover(ctx context.Context, end context.CancelCauseFunc) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		time.AfterFunc(handoverRest, func() { end(fmt.Errorf("a handover has waited for it for %v", handoverRest)) })
	})
}

// fillSeed reads the rest of a seed from which workers can start. A handover waits for it for a while (handoverRest), because the next program could not go on with it.
func (e *Executor) fillSeed(source *fetchSource, s *zygote.Seed, size uint64) error {
	ctx, cancel := fetchContext(source.ctx, size)
	defer cancel()
	rest := make(chan struct{})
	defer time.AfterFunc(onDemandFirst, func() { close(rest) }).Stop()
	err := s.Fill(ctx, rest)
	if err == nil {
		return nil
	}
	e.tables.dropLost(s)
	e.changed()
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

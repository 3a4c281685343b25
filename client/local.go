package client

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/grant"
)

// local runs a lease's functions in this process.
type local struct {
	library *dataplane.Local
	limit   int64
	turn    chan struct{} // capacity 1: functions keep state and expect to be alone, as in a worker
	closed  chan struct{}
	calls   atomic.Uint64
}

// localLease makes a home of a front whose workers are this process. It is never lost.
func (s *Session) localLease(front *Lease, o LeaseOptions, cfg dataplane.ChannelConfig) (*Lease, error) {
	library, err := dataplane.OpenLocal(o.Library, o.Code)
	if err != nil {
		return nil, err
	}
	names, err := exported(o.Library, o.Code)
	if err != nil {
		library.Close()
		return nil, fail("open the library in this process", StatusBadLibrary, "%v", err)
	}
	node, _ := os.Hostname()
	n := max(o.Workers, 1)
	l := &Lease{session: s, front: front, config: cfg, free: make([]atomic.Uint64, (n+63)/64), wake: make(chan struct{}, n),
		byName: make(map[string]*Function), closing: make(chan struct{}),
		held:  &grant.Held{Candidate: grant.Candidate{Provider: "local", Node: node}, Functions: names},
		local: &local{library: library, limit: max(cfg.Bulk, int64(cfg.Eager)), turn: make(chan struct{}, 1), closed: make(chan struct{})}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.healCtx, l.stopHeal = l.ctx, l.cancel
	for i, name := range names {
		l.byName[name] = &Function{lease: l, index: uint32(i), name: name}
	}
	for i := range n {
		w := newWorker(l, i, connection{})
		w.pid = os.Getpid()
		l.workers = append(l.workers, w)
		l.free[i/64].Or(1 << (i % 64))
	}
	return l, nil
}

// exported lists the functions that a library has for C, in the order that executors give them.
func exported(path string, code []byte) ([]string, error) {
	if code == nil {
		var err error
		if code, err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	f, err := elf.NewFile(bytes.NewReader(code))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, s := range symbols {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC && s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) == elf.STB_GLOBAL &&
			elf.ST_VISIBILITY(s.Other) == elf.STV_DEFAULT && !strings.HasPrefix(s.Name, "_Z") && s.Name != "_init" && s.Name != "_fini" {
			names[s.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// invoke runs a function on the caller's thread, when nobody else's runs.
func (c *local) invoke(ctx context.Context, f *Function, in, out []byte) (n int, err error) {
	if ctx.Err() != nil {
		return 0, contextError(ctx, f.op(), "in this process", false)
	}
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return 0, contextError(ctx, f.op(), "other calls run in this process", false)
	case <-c.closed:
		return 0, fail(f.op(), StatusLeaseEnded, "the lease was released")
	}
	if c.library == nil {
		return 0, fail(f.op(), StatusLeaseEnded, "the lease was released")
	}
	n, st := c.library.Call(f.name, c.limit, in, out)
	switch st {
	case dataplane.OK:
	case StatusTooLarge:
		return 0, fail(f.op(), st, "payload of %d bytes; the lease carries %d", len(in), c.limit)
	case StatusResultTooLarge:
		err = &Error{Op: f.op(), Status: st, Detail: fmt.Sprintf("it has %d bytes, in this process", n), Started: true}
	default:
		return 0, fail(f.op(), st, "in this process")
	}
	c.calls.Add(1)
	return n, err
}

// close ends it when no function runs any more.
func (c *local) close() {
	close(c.closed)
	c.turn <- struct{}{}
	c.library.Close()
	c.library = nil
	<-c.turn
}

// startHere is Submit of a worker that is this process: the call has ended when it returns.
func (w *Worker) startHere(ctx context.Context, f *Function, in []byte, capacity int) (Call, error) {
	if err := w.claim(ctx, "invoke"); err != nil {
		return Call{}, err
	}
	defer w.lease.give(w)
	if len(w.lost) >= w.lease.config.Depth {
		return Call{}, w.explain(f.op(), 0, false, dataplane.StatusBusy)
	}
	out := make([]byte, min(max(capacity, 0), int(w.lease.local.limit)))
	n, err := w.lease.local.invoke(ctx, f, in, out)
	o := outcome{n: n, started: true}
	if e, _ := err.(*Error); e != nil && e.Status == StatusResultTooLarge {
		o.status = e.Status
	} else if err != nil {
		return Call{}, err
	} else {
		o.data = out[:n]
	}
	c := Call{worker: w, f: f, seq: w.number()}
	w.remember(c.seq, o)
	return c, nil
}

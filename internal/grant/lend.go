package grant

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

type (
	loanStream  = grpc.BidiStreamingClient[control.LendRequest, control.LendReply]
	fetchStream = grpc.ServerStreamingClient[control.FetchReply]
)

// loan is a request to an executor to lend a seed.
type loan struct {
	from     *seedPlace
	provider string
	ctx      context.Context // of both streams; it ends with the request, but no longer once leave has returned true
	cancel   context.CancelCauseFunc
	leave    func() bool
	limit    *time.Timer
	stream   loanStream
	offer    *control.LendReply
	err      error         // why there is no offer
	answered chan struct{} // closed when offer or err is set
}

// borrow asks an executor to lend a seed: the seed of the table, or if table is nil, the seed of the lease. It does not wait for the answer.
func (p *Pending) borrow(request context.Context, lender control.ExecutorClient, from *seedPlace, table *Table, provider string) *loan {
	l := &loan{from: from, provider: provider, answered: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(request))
	l.leave = context.AfterFunc(request, func() { l.cancel(context.Cause(request)) })
	l.limit = time.AfterFunc(p.c.opts.Timeout+p.loanLimit(table), func() { l.cancel(errors.New("no answer in time")) })
	ask := &control.LendRequest{Seed: from.key, Provider: provider, OnDemand: table == nil}
	if from.key == nil {
		ask.Name, ask.Version = p.seedName(table)
		ask.Tenant = p.c.opts.Tenant
	}
	go func() {
		defer close(l.answered)
		if l.stream, l.err = lender.Lend(l.ctx); l.err != nil {
			return
		}
		if l.err = l.stream.Send(ask); l.err != nil && !errors.Is(l.err, io.EOF) {
			return
		}
		if l.offer, l.err = l.stream.Recv(); l.err != nil {
			l.err = l.cause(l.err)
		}
	}()
	return l
}

// cause returns why the loan has failed.
func (l *loan) cause(err error) error {
	if why := context.Cause(l.ctx); why != nil && !errors.Is(why, context.Canceled) {
		return why
	}
	return err
}

// end ends the loan. Nil: there is none.
func (l *loan) end() {
	if l == nil {
		return
	}
	l.leave()
	l.limit.Stop()
	l.cancel(nil) // ends both streams
}

// lendTo makes an executor fetch a seed from the lender of a loan. It returns the name of the copy at the executor. table, instead: see copyFrom.
func (p *Pending) lendTo(l *loan, to control.ExecutorClient, cand *Candidate, table *Table, instead bool) (digest []byte, err error) {
	kept := false
	defer func() {
		if !kept {
			l.end()
		}
	}()
	if <-l.answered; l.err != nil {
		return nil, l.err
	}
	ctx, provider, offer := l.ctx, l.provider, l.offer
	var size uint64
	for _, x := range offer.GetSeed().GetSegments() {
		size += x.GetSize()
	}
	l.limit.Reset(p.c.opts.Timeout + time.Duration(float64(size)/tableRate*float64(time.Second)))
	var filling atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r, err := l.stream.Recv()
		switch {
		case !filling.Load():
			l.cancel(cmp.Or(err, errors.New("it sent a second offer"))) // the executor ends the loan
		case r.GetEnding():
			rest, err := to.Fetch(ctx, &control.FetchRequest{Provider: provider, Memory: offer.GetMemory(), Seed: offer.GetSeed(), Rest: true})
			if err == nil {
				_, _ = rest.Recv() // if that executor cannot be reached, the other stream ends too
			}
			_, _ = l.stream.Recv()
		} // otherwise the other executor notices when it reads, and asks for another source
	}()
	fetch, err := to.Fetch(ctx, &control.FetchRequest{Provider: provider, Blob: offer.GetBlob(), Memory: offer.GetMemory(), Proofs: offer.GetProofs(), Seed: offer.GetSeed(), OnDemand: table == nil, Instead: instead, Table: table.seedKey()})
	if err != nil {
		return nil, l.cause(err)
	}
	for {
		r, err := fetch.Recv()
		switch {
		case err != nil:
			return nil, l.cause(err)
		case r.GetDone() && r.GetFilling() && l.leave() && l.limit.Stop():
			// The lease need not wait for the rest. The streams go on until all of the seed has arrived. This request does not limit their time, because workers
			// depend on the seed. The executor limits the reading. Workers of other sessions may depend on the seed too, so the connections outlive this session.
			if filling.Store(true); ctx.Err() != nil {
				return nil, l.cause(ctx.Err())
			}
			kept = true
			over, id := p.c.fill(), p.seedID()
			go func() {
				defer over()
				defer l.cancel(nil)
				p.keepLoan(ctx, id, l.stream, fetch, to, cand, l.from.address)
				if l.stream.CloseSend() != nil { // unlike cancel, this lets the last message arrive
					return
				}
				patience := time.NewTimer(p.c.opts.Timeout)
				defer patience.Stop()
				select {
				case <-ended:
				case <-patience.C:
				}
			}()
			return r.GetSeed(), nil
		case r.GetDone():
			return r.GetSeed(), nil
		}
		if err := l.stream.Send(&control.LendRequest{Blob: r.GetBlob()}); err != nil {
			<-ctx.Done() // the goroutine above receives the reason
			return nil, l.cause(err)
		}
	}
}

// keepLoan handles the messages of an executor that reads a seed. It returns when the reading ends, or when no executor lends the seed any more.
func (p *Pending) keepLoan(ctx context.Context, id seedID, loan loanStream, fetch fetchStream, to control.ExecutorClient, cand *Candidate, from string) {
	lost := []string{cand.Address, from}
	for {
		r, err := fetch.Recv()
		switch {
		case err != nil: // the executor itself reports errors to the clients of its workers
			return
		case r.GetLost() != "":
			if !p.anotherSource(ctx, id, to, cand, &lost) {
				return
			}
		case len(r.GetTouched()) > 0:
			_ = loan.Send(&control.LendRequest{Touched: r.GetTouched()}) // if the source has ended the loan, nobody needs the list
		}
	}
}

// sourcePatience is how long anotherSource waits for the answer of one executor. The executor that needs the source gives up after 10 s (its fetchConnect), and several executors must be
// asked within that time, because one that is stopped, or whose node is lost, does not answer.
const sourcePatience = 10 * time.Second / (copyTries + 1)

// anotherSource finds a new source for an executor that has lost its source of a seed. It asks no executor whose address is in `asked`, and appends the address of each executor that it asks.
func (p *Pending) anotherSource(ctx context.Context, id seedID, to control.ExecutorClient, cand *Candidate, asked *[]string) bool {
	for range copyTries {
		from := p.c.copies.other(id, *asked)
		if from == nil {
			return false
		}
		*asked = append(*asked, from.address)
		try, stop := context.WithTimeout(ctx, min(p.c.opts.Timeout, sourcePatience))
		_, err := p.copyFrom(try, to, cand, from, nil, nil, true)
		stop()
		if err == nil {
			return true
		}
	}
	return false
}

// other returns an executor that has a seed and whose address is not in `not`, or nil.
func (c *copies) other(id seedID, not []string) *seedPlace {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.seeds[id]; s != nil {
		for _, x := range s.at {
			if !slices.Contains(not, x.address) {
				return x
			}
		}
	}
	return nil
}

package grant

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// leasing is a stream on which leases are asked for. It stays open from one to the next, which saves both sides what a call costs
// to begin and to end. One goroutine at a time.
type leasing struct {
	stream grpc.BidiStreamingClient[control.LeaseRequest, control.LeaseReply]
	cancel context.CancelFunc
	began  time.Time
	used   bool // it has answered before
}

// streamAge is how long a stream is used: it shows the credential that it began with.
const streamAge = time.Minute

// idleStreams is how many unused streams to an executor stay open.
const idleStreams = 4

// rested returns an idle stream to addr, nil if there is none.
func (c *shared) rested(addr string) *leasing {
	c.mu.Lock()
	defer c.mu.Unlock()
	for idle := c.streams[addr]; len(idle) > 0; idle = c.streams[addr] {
		last := len(idle) - 1
		s := idle[last]
		if idle[last] = nil; last == 0 {
			delete(c.streams, addr)
		} else {
			c.streams[addr] = idle[:last]
		}
		if time.Since(s.began) <= streamAge {
			return s
		}
		s.cancel()
	}
	return nil
}

// begin opens a stream; ctx bounds only that.
func begin(ctx context.Context, cl control.ExecutorClient) (*leasing, error) {
	own, cancel := context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, cancel)
	stream, err := cl.Leasing(own)
	if !stop() && err == nil {
		err = own.Err()
	}
	if err != nil {
		cancel()
		return nil, patience(ctx, err)
	}
	return &leasing{stream: stream, cancel: cancel, began: time.Now()}, nil
}

// patience is the error of a stream that ends with ctx.
func patience(ctx context.Context, err error) error {
	if ctx.Err() != nil && (status.Code(err) == codes.Canceled || errors.Is(err, context.Canceled)) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return err
}

// rest keeps a stream for the next lease.
func (c *shared) rest(addr string, s *leasing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.streams[addr]) == idleStreams {
		s.cancel()
		return
	}
	c.streams[addr] = append(c.streams[addr], s)
}

// ask sends one request and waits for its reply until ctx ends. open says whether the stream can be used again.
func (s *leasing) ask(ctx context.Context, req *control.LeaseRequest) (r *control.LeaseReply, open bool, err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	r, err = s.exchange(req)
	if open = stop() && err == nil; !open {
		s.cancel()
	}
	s.used = s.used || err == nil
	return r, open, patience(ctx, err)
}

func (s *leasing) exchange(req *control.LeaseRequest) (*control.LeaseReply, error) {
	if err := s.stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	r, err := s.stream.Recv() // after io.EOF it says why
	if errors.Is(err, io.EOF) {
		err = status.Error(codes.Unavailable, "the executor stops")
	}
	return r, err
}

// lease sends a request and returns its reply. When the stream or the connection broke on the way, or the executor takes no more what the
// stream began with, it asks once more on a new one, under the same request id, which the executor answers with the first grant
// if there was one. What the executor answers counts, also if it says that somebody cannot be reached.
func (c *shared) lease(ctx context.Context, addr string, cl control.ExecutorClient, req *control.LeaseRequest) (*control.LeaseReply, error) {
	s := c.rested(addr)
	for again := false; ; again = true {
		if s == nil {
			var err error
			if s, err = begin(ctx, cl); err != nil {
				return nil, err
			}
		}
		if end, ok := ctx.Deadline(); ok {
			req.WaitMs = uint64(max(time.Until(end)/time.Millisecond, 1))
		}
		r, open, err := s.ask(ctx, req)
		if open {
			c.rest(addr, s)
		}
		code, old := status.Code(err), s.used
		switch s = nil; {
		case err == nil:
			return r, nil
		case code == codes.Unimplemented && !control.IsClassed(err), code == codes.ResourceExhausted && !control.IsClassed(err):
			// An executor of before, or one that has enough streams of ours.
			req.WaitMs = 0
			return cl.Lease(ctx, req)
		case again || ctx.Err() != nil:
			return nil, err
		case code == codes.Unavailable && !dialFailed(err), code == codes.Unauthenticated && old:
		default:
			return nil, err
		}
	}
}

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
	used   bool // it has answered before
}

// leasing returns the stream to addr that nobody uses now, or opens one.
func (c *Control) leasing(addr string, cl control.ExecutorClient) (*leasing, error) {
	c.mu.Lock()
	s := c.streams[addr]
	delete(c.streams, addr)
	c.mu.Unlock()
	if s != nil {
		return s, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := cl.Leasing(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	return &leasing{stream: stream, cancel: cancel}, nil
}

// rest keeps a stream for the next lease, one for each address.
func (c *Control) rest(addr string, s *leasing) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.streams[addr] != nil {
		s.cancel()
		return
	}
	c.streams[addr] = s
}

// ask sends one request and waits for its reply until ctx ends. open says whether the stream can be used again.
func (s *leasing) ask(ctx context.Context, req *control.LeaseRequest) (r *control.LeaseReply, open bool, err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	r, err = s.exchange(req)
	open = stop() && err == nil
	switch {
	case open:
		s.used = true
	case err != nil && ctx.Err() != nil:
		err = status.FromContextError(ctx.Err()).Err()
	}
	if !open {
		s.cancel()
	}
	return r, open, err
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

// stale says whether an error may be due to what has become of the stream since it was opened.
func (s *leasing) stale(err error) bool {
	code := status.Code(err)
	return s.used && (code == codes.Unavailable || code == codes.Unauthenticated)
}

// lease sends a request and returns its reply. When the stream or the connection broke on the way it asks once more under the same
// request id, which the executor answers with the first grant if there was one.
func (c *Control) lease(ctx context.Context, addr string, cl control.ExecutorClient, req *control.LeaseRequest) (*control.LeaseReply, error) {
	if end, ok := ctx.Deadline(); ok {
		req.WaitMs = uint64(max(time.Until(end)/time.Millisecond, 1))
	}
	for again := false; ; again = true {
		s, err := c.leasing(addr, cl)
		if err != nil {
			return nil, err
		}
		r, open, err := s.ask(ctx, req)
		if open {
			c.rest(addr, s)
		}
		broken := status.Code(err) == codes.Unavailable && !dialFailed(err)
		switch {
		case err == nil:
			return r, nil
		case status.Code(err) == codes.Unimplemented: // an executor of before
			req.WaitMs = 0
			return cl.Lease(ctx, req)
		case again || ctx.Err() != nil || !broken && !s.stale(err):
			return nil, err
		}
	}
}

package grant

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// leasing is a stream of lease requests. It stays open between requests, which saves both sides the cost of beginning and ending a gRPC
// call. Use by one goroutine at a time.
type leasing struct {
	stream grpc.BidiStreamingClient[control.LeaseRequest, control.LeaseReply]
	cancel context.CancelFunc
	began  time.Time
	used   bool // it has had a reply
	peer   peer.Peer
}

// streamAge is how long a stream is used. Its credential is the one with which it began.
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

// begin opens a stream. ctx bounds the opening and not the stream.
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

// patience returns the error for a stream, which is that of ctx if ctx has ended the stream.
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

// ask sends one request and waits for its reply until ctx ends. open reports whether the stream can be used again.
func (s *leasing) ask(ctx context.Context, req *control.LeaseRequest) (r *control.LeaseReply, open bool, err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	r, err = s.exchange(req)
	if open = stop() && err == nil; !open {
		s.cancel()
	}
	if p, ok := peer.FromContext(s.stream.Context()); ok && err == nil {
		s.used, s.peer = true, *p
	}
	return r, open, patience(ctx, err)
}

func (s *leasing) exchange(req *control.LeaseRequest) (*control.LeaseReply, error) {
	if err := s.stream.Send(req); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	r, err := s.stream.Recv() // after io.EOF of Send, Recv returns the reason
	if errors.Is(err, io.EOF) {
		err = status.Error(codes.Unavailable, "the executor stops")
	}
	return r, err
}

// lease sends a request and returns its reply and the end of the connection from which it came. If the stream or the connection breaks, or the executor no longer accepts the stream's
// credential, it repeats the request once on a new stream. The request id is the same, so the executor answers with the first grant if
// there was one. A reply of the executor is final, also if its error is of the class connection.
func (c *shared) lease(ctx context.Context, addr string, cl control.ExecutorClient, req *control.LeaseRequest) (*control.LeaseReply, *peer.Peer, error) {
	s := c.rested(addr)
	for again := false; ; again = true {
		if s == nil {
			var err error
			if s, err = begin(ctx, cl); err != nil {
				return nil, nil, err
			}
		}
		if end, ok := ctx.Deadline(); ok {
			req.WaitMs = uint64(max(time.Until(end)/time.Millisecond, 1))
		}
		r, open, err := s.ask(ctx, req)
		if open {
			c.rest(addr, s)
		}
		code, old, from := status.Code(err), s.used, &s.peer
		switch s = nil; {
		case err == nil:
			return r, from, nil
		case code == codes.Unimplemented && !control.IsClassed(err), code == codes.ResourceExhausted && !control.IsClassed(err):
			// An executor of an earlier version, or one that accepts no more streams from this client.
			req.WaitMs = 0
			r, err := cl.Lease(ctx, req, grpc.Peer(from))
			return r, from, err
		case again || ctx.Err() != nil:
			return nil, nil, err
		case code == codes.Unavailable && !dialFailed(err), code == codes.Unauthenticated && old:
		default:
			return nil, nil, err
		}
	}
}

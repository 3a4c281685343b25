package executor

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// requests is one stream of lease requests.
type requests struct {
	e      *Executor
	stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]

	mu     sync.Mutex // held from a request to its reply
	closed bool       // nothing is answered any more
}

// Leasing answers lease requests one after the other, until the caller ends the stream, one fails, or the port closes. Only the end of
// this function ends a read, so another goroutine reads, and answers there and then.
func (e *Executor) Leasing(stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	closing := control.Closing(stream.Context())
	r := &requests{e: e, stream: stream}
	done := make(chan error, 1)
	go func() { done <- r.serve() }()
	select {
	case err := <-done:
		return err
	case <-closing.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	return nil
}

// serve returns nil when the caller has ended the stream.
func (r *requests) serve() error {
	deepen()
	for {
		req, err := r.stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = r.answer(req)
		}
		if err != nil {
			return err
		}
	}
}

// mostWait is longer than anybody waits.
const mostWait = 24 * time.Hour

// answer grants or refuses one request.
func (r *requests) answer(req *control.LeaseRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil // the stream has ended
	}
	ctx := r.stream.Context()
	if wait := req.GetWaitMs(); wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(min(wait, uint64(mostWait/time.Millisecond)))*time.Millisecond)
		defer cancel()
		req.WaitMs = 0 // a repetition may wait for another time
	}
	reply, err := r.e.Lease(ctx, req)
	if err != nil {
		return err
	}
	return r.stream.Send(reply)
}

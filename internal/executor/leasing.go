package executor

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
)

// requests is one stream of lease requests.
type requests struct {
	e      *Executor
	stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]

	turn chan struct{} // capacity 1: filled from a request to its reply, and for ever when nothing is answered any more
}

// lastReply is how long a caller who does not read may keep the port from closing.
const lastReply = 200 * time.Millisecond

// Leasing answers lease requests one after the other, until the caller ends the stream, one fails, or the port closes. Only the end of
// this function ends a read, so another goroutine reads, and answers there and then.
func (e *Executor) Leasing(stream grpc.BidiStreamingServer[control.LeaseRequest, control.LeaseReply]) error {
	closing := control.Closing(stream.Context())
	r := &requests{e: e, stream: stream, turn: make(chan struct{}, 1)}
	done := make(chan error, 1)
	go func() { done <- r.serve() }()
	select {
	case err := <-done:
		return err
	case <-closing.Done():
	}
	select {
	case r.turn <- struct{}{}:
	case <-time.After(lastReply):
	}
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
	ctx := r.stream.Context()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done(): // it has ended with the port
		return ctx.Err()
	}
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

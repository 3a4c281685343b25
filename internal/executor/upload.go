package executor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/quota"
)

const (
	// uploadPause is how long an upload may send nothing, since others may wait for it.
	uploadPause = 30 * time.Second
	// slowestUpload is the lowest rate of an upload on top of that, in bytes per second. A slower upload would occupy
	// space that others need.
	slowestUpload = 1 << 20
)

// Upload stores a library.
func (e *Executor) Upload(stream grpc.ClientStreamingServer[control.UploadChunk, control.UploadReply]) error {
	return e.turns.yieldTo(stream.Context(), func(ctx context.Context) error { return e.upload(ctx, stream) })
}

func (e *Executor) upload(ctx context.Context, stream grpc.ClientStreamingServer[control.UploadChunk, control.UploadReply]) error {
	// Recv has no deadline of its own; it ends when this function returns.
	chunks := make(chan *control.UploadChunk)
	fault := make(chan error, 1)
	go func() {
		for {
			c, err := stream.Recv()
			if err != nil {
				fault <- err
				return
			}
			select {
			case chunks <- c:
			case <-ctx.Done():
				return
			}
		}
	}()
	var late <-chan time.Time // set when the size is known
	var size uint64
	recv := func() (*control.UploadChunk, error) {
		pause := time.NewTimer(e.codes.pause)
		defer pause.Stop()
		select {
		case c := <-chunks:
			return c, nil
		case err := <-fault:
			if errors.Is(err, io.EOF) {
				return nil, invalidf("upload: the stream ended before all bytes had arrived")
			}
			return nil, err
		case <-pause.C:
			return nil, control.Errorf(control.ClassConnection, "upload: received nothing for %v", e.codes.pause)
		case <-ctx.Done():
			return nil, interrupted(ctx, "upload")
		case <-late:
			return nil, control.Errorf(control.ClassConnection, "upload: not complete within %v", e.codes.within(size))
		}
	}
	first, err := recv()
	if err != nil {
		return err
	}
	h, err := checkSum("sha256", first.GetSha256())
	if err != nil {
		return err
	}
	next := func() ([]byte, error) {
		if c := first; c != nil {
			first = nil
			return c.GetData(), nil
		}
		c, err := recv()
		if err == nil && len(c.GetData()) == 0 {
			err = invalidf("upload: a chunk without data")
		}
		return c.GetData(), err
	}
	name := first.GetName()
	size = first.GetSize()
	if size <= e.codes.limit { // else it is refused
		end := time.NewTimer(e.codes.within(size))
		defer end.Stop()
		late = end.C
		if err := e.gate.Take(ctx, quota.UploadBytes, int(size)); err != nil {
			return err
		}
	}
	names, known, err := e.codes.add(ctx, h, codeOwner(ctx), size, next)
	if err != nil {
		return err
	}
	e.metrics.uploaded(known)
	e.log.Debug("library stored", "name", name, "sha256", fmt.Sprintf("%x", h[:6]), "bytes", size, "functions", len(names), "known", known)
	return stream.SendAndClose(&control.UploadReply{Functions: names, WasKnown: known})
}

// interrupted returns the error for a transfer whose context has ended.
func interrupted(ctx context.Context, what string) error {
	return control.Errorf(control.ClassConnection, "%s: %v", what, context.Cause(ctx))
}

package control

import (
	"context"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/rfaas-go/rfaas/internal/quota"
)

// gRPC keeps a reply until the caller's flow-control window has space for it, and meanwhile counts the call as over. A
// caller that never reads could make a daemon keep any number of replies. The replies of each tenant, and of each node,
// are therefore bounded in bytes.

// heldReply is a reply whose bytes count for a caller until gRPC has sent or dropped them.
type heldReply struct {
	data    []byte
	release func() // may be called more than once
}

// Get is not used. With Put it makes a heldReply the pool to which its own buffer returns.
func (h *heldReply) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put is called when the buffer is no longer needed.
func (h *heldReply) Put(*[]byte) { h.release() }

// replyCodec is gRPC's codec for messages. It also accepts held replies, which are already encoded.
type replyCodec struct{ encoding.CodecV2 }

func newReplyCodec() replyCodec { return replyCodec{encoding.GetCodecV2(protocodec.Name)} }

// Marshal encodes a message.
func (c replyCodec) Marshal(v any) (mem.BufferSlice, error) {
	if h, ok := v.(*heldReply); ok {
		return mem.BufferSlice{mem.NewBuffer(&h.data, h)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// holdReply counts a reply for the caller of ctx. Small replies, whose buffers gRPC does not return, and those of
// operators do not count.
func (g *Gate) holdReply(ctx context.Context, reply any) (any, error) {
	m, ok := reply.(proto.Message)
	if !ok {
		return reply, nil
	}
	party, counts := partyOf(Caller(ctx))
	size := proto.Size(m)
	if !counts || mem.IsBelowBufferPoolingThreshold(size) {
		return reply, nil
	}
	release, err := g.tenants.HoldSome(party, quota.Replies, size)
	if err != nil {
		return nil, Errorf(ClassBusy, "%v", err)
	}
	data, err := proto.Marshal(m)
	if err != nil {
		release()
		return nil, err
	}
	// When a connection breaks, gRPC may drop unsent replies without returning their buffers.
	stop := context.AfterFunc(Connection(ctx), release)
	return &heldReply{data: data, release: sync.OnceFunc(func() {
		stop()
		release()
	})}, nil
}

// replying is a stream whose replies count.
type replying struct {
	grpc.ServerStream
	gate *Gate
}

// SendMsg sends a reply. Beyond the bound it does not wait but ends the stream with an error.
func (s *replying) SendMsg(m any) error {
	reply, err := s.gate.holdReply(s.Context(), m)
	if err != nil {
		return err
	}
	return s.ServerStream.SendMsg(reply) // returns the buffer, also on error
}

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

// gRPC keeps a reply until its caller has made room for it, and the call counts as over meanwhile. A caller that makes no room would have a daemon keep
// as many replies as it can ask for, so those of a tenant, or of a node, are bounded in bytes together.

// heldReply is a reply whose bytes count for a caller until gRPC has sent or dropped them.
type heldReply struct {
	data    []byte
	release func() // may be called more than once
}

// Get is not used; with Put a heldReply is the pool that its own buffer goes back to.
func (h *heldReply) Get(n int) *[]byte { b := make([]byte, n); return &b }

// Put is called when the buffer is not needed any more.
func (h *heldReply) Put(*[]byte) { h.release() }

// replyCodec is gRPC's codec for messages. It takes held replies too, which are encoded already.
type replyCodec struct{ encoding.CodecV2 }

func newReplyCodec() replyCodec { return replyCodec{encoding.GetCodecV2(protocodec.Name)} }

// Marshal encodes a message.
func (c replyCodec) Marshal(v any) (mem.BufferSlice, error) {
	if h, ok := v.(*heldReply); ok {
		return mem.BufferSlice{mem.NewBuffer(&h.data, h)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// holdReply counts a reply for the caller of ctx. Small ones, which gRPC does not give back, and those of operators do not count.
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
	// What gRPC has not sent when a connection breaks it may forget without giving it back.
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

// SendMsg sends a reply. Beyond the bound it waits for no room: the stream ends with an error.
func (s *replying) SendMsg(m any) error {
	reply, err := s.gate.holdReply(s.Context(), m)
	if err != nil {
		return err
	}
	return s.ServerStream.SendMsg(reply) // which gives its buffer back, also when it fails
}

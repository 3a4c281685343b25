package control

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"
)

// connections is a stats.Handler that attaches a context to each connection.
type connections struct{ closing context.Context }

type connKey struct{}

type conn struct {
	ctx     context.Context
	end     context.CancelFunc
	closing context.Context // of the port
	asking  atomic.Int32    // streams of requests
	refused atomic.Int32    // refused calls whose contexts gRPC still keeps
	held    bool            // counted for its tenant; used only by the reading goroutine
}

func (s connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	c := &conn{closing: s.closing}
	// The contexts of calls are children of this one. gRPC does not end those of calls that tap refused, so end them with the
	// connection.
	c.ctx, c.end = context.WithCancel(ctx)
	return context.WithValue(c.ctx, connKey{}, c)
}

func (connections) HandleConn(ctx context.Context, s stats.ConnStats) {
	if _, over := s.(*stats.ConnEnd); over {
		ctx.Value(connKey{}).(*conn).end()
	}
}

func (connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }
func (connections) HandleRPC(context.Context, stats.RPCStats)                       {}

// Connection returns a context that ends with the connection of the call with ctx, possibly long after the call.
// Outside of a call it never ends.
func Connection(ctx context.Context) context.Context {
	if c, ok := ctx.Value(connKey{}).(*conn); ok {
		return c.ctx
	}
	return context.Background()
}

// Closing returns a context that ends when the port of the call with ctx begins to close, before it waits for streams
// to end. Outside of a call it never ends.
func Closing(ctx context.Context) context.Context {
	if c, ok := ctx.Value(connKey{}).(*conn); ok && c.closing != nil {
		return c.closing
	}
	return context.Background()
}

// mostAsking is how many streams of requests one connection may have. They are idle most of the time. Beyond that a
// client makes unary calls.
const mostAsking = 32

// countAsking counts a stream of requests until done is called. It returns nil if there are too many.
func countAsking(ctx context.Context) (done func()) {
	c, ok := ctx.Value(connKey{}).(*conn)
	if !ok {
		return func() {}
	}
	if c.asking.Add(1) > mostAsking {
		c.asking.Add(-1)
		return nil
	}
	return func() { c.asking.Add(-1) }
}

// flowWindow is how many bytes may be in flight on a connection, and to a client on each of its streams. With a fixed
// size gRPC does not measure the bandwidth. Measuring needs a ping for each message, which would wake both sides twice
// more for every lease.
const flowWindow = 1 << 20

// serverStreamWindow is how many unread bytes of a stream a daemon buffers. It is the smallest window that gRPC
// supports. A larger message takes one more round trip.
const serverStreamWindow = 64<<10 - 1

// gRPC keeps the context of a call that tap refused until the call's deadline or the connection's end. A connection
// with more refused calls than this is closed.
const (
	maxRefused      = 64   // of an unauthenticated connection
	maxRefusedKnown = 1024 // of an authenticated connection
)

// refuse counts a refused call, and closes its connection if there are too many.
func (c *conn) refuse(ctx context.Context, l *link) {
	n := c.refused.Add(1)
	context.AfterFunc(ctx, func() { c.refused.Add(-1) })
	if l == nil || l.bounded == nil {
		return
	}
	if n >= maxRefusedKnown || n >= maxRefused && !l.bounded.authenticated.Load() {
		l.bounded.Close()
	}
}

// streamWorkers is how many goroutines gRPC keeps for the next calls, with the stacks that they have grown. Each open
// stream occupies one. Further simultaneous calls get goroutines of their own.
const streamWorkers = 8

// newServer returns a gRPC server with the gate in front of every call and the limits that both daemons use.
func newServer(t *serverTransport, streams int, closing context.Context) *grpc.Server {
	return grpc.NewServer(
		grpc.Creds(t),
		grpc.InTapHandle(t.gate.tap),
		grpc.UnaryInterceptor(t.gate.unary),
		grpc.StreamInterceptor(t.gate.stream),
		grpc.ForceServerCodecV2(newReplyCodec()),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.StatsHandler(connections{closing}),
		grpc.MaxConcurrentStreams(uint32(streams)),
		grpc.MaxRecvMsgSize(MaxRequest),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.MaxHeaderListSize(16<<10),
		grpc.InitialWindowSize(serverStreamWindow), grpc.InitialConnWindowSize(flowWindow),
		grpc.ConnectionTimeout(5*time.Second),
		// Detects clients on silent nodes. A process that is stopped only briefly stays connected.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 5 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	)
}

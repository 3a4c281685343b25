package control

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"
)

// connections is the stats.Handler that ties a context to each connection.
type connections struct{ closing context.Context }

type connKey struct{}

type conn struct {
	ctx     context.Context
	end     context.CancelFunc
	closing context.Context // of the port
	asking  atomic.Int32    // streams of requests
	refused atomic.Int32    // refused calls whose contexts gRPC still has
	held    bool            // counted for its tenant; for the goroutine that reads
}

func (s connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	c := &conn{closing: s.closing}
	// The contexts of calls are children of this one. gRPC does not end those of calls that tap refused: the connection's end does.
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

// Connection returns a context that ends with the connection on which the call with ctx came, which may be long after the
// call; one that never ends outside of a call.
func Connection(ctx context.Context) context.Context {
	if c, ok := ctx.Value(connKey{}).(*conn); ok {
		return c.ctx
	}
	return context.Background()
}

// Closing returns a context that ends when the port of the call with ctx begins to close, which waits for streams to end; one that
// never ends outside of a call.
func Closing(ctx context.Context) context.Context {
	if c, ok := ctx.Value(connKey{}).(*conn); ok && c.closing != nil {
		return c.closing
	}
	return context.Background()
}

// mostAsking is how many streams of requests one connection may have open, which rest most of the time. Its client makes calls beyond that.
const mostAsking = 32

// countAsking counts one, and done takes it back; nil: there are too many.
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

// flowWindow is how many bytes may be under way on a connection, and to a client on each of its streams. A size that is set keeps gRPC
// from measuring one, by a ping for each message, which would wake both sides twice more for every lease.
const flowWindow = 1 << 20

// serverStreamWindow is how many bytes of a stream a daemon keeps that no handler has asked for, the least that gRPC can do. A message
// that is larger takes one round trip more.
const serverStreamWindow = 64<<10 - 1

// gRPC keeps the context of a call that tap refused until the call's deadline or the connection's end. A connection that makes it keep
// more of them than this is closed.
const (
	maxRefused      = 64   // of an unauthenticated connection
	maxRefusedKnown = 1024 // of another
)

// refuse counts a refused call, and closes its connection if there are too many.
func (c *conn) refuse(ctx context.Context, l *link) {
	n := c.refused.Add(1)
	context.AfterFunc(ctx, func() { c.refused.Add(-1) })
	if l == nil || l.guest == nil {
		return
	}
	if n >= maxRefusedKnown || n >= maxRefused && !l.guest.free.Load() {
		l.guest.Close()
	}
}

// streamWorkers is how many goroutines stay to serve the next call, with the stack that the last one has needed, as long as the
// collector leaves it to them. Streams that stay open keep one each; more calls at a time have goroutines of their own.
const streamWorkers = 8

// newServer makes a gRPC server with the gate in front of every call and the limits that both daemons use.
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
		// Finds clients whose node fell silent. A process that is only stopped for a moment stays.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 5 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	)
}

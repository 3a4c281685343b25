package control

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// Gate lets calls through that carry the right secret and counts the others.
type Gate struct {
	secret  Secret
	refused atomic.Uint64
}

// NewGate makes a gate for the secret.
func NewGate(secret Secret) *Gate { return &Gate{secret: secret} }

// Refused returns how many calls came without the right secret.
func (g *Gate) Refused() uint64 { return g.refused.Load() }

func (g *Gate) check(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	sent := md.Get(secretKey)
	switch {
	case len(sent) == 0:
		g.refused.Add(1)
		return unauthenticated("no secret was sent")
	case len(sent) != 1 || !g.secret.matches(sent[0]):
		g.refused.Add(1)
		return unauthenticated("wrong secret")
	}
	return nil
}

// connections is the stats.Handler that ties a context to each connection.
type connections struct{}

type connKey struct{}

type conn struct {
	ctx context.Context
	end context.CancelFunc
}

func (connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	c := &conn{}
	c.ctx, c.end = context.WithCancel(context.Background())
	return context.WithValue(ctx, connKey{}, c)
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

// NewServer makes a gRPC server with the gate in front of every call and the limits that both daemons use.
func NewServer(g *Gate, opts ...grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append([]grpc.ServerOption{
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if err := g.check(ctx); err != nil {
				return nil, err
			}
			return h(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) error {
			if err := g.check(s.Context()); err != nil {
				return err
			}
			return h(srv, s)
		}),
		grpc.StatsHandler(connections{}),
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ConnectionTimeout(5 * time.Second),
		// Finds clients whose node fell silent. A process that is only stopped for a moment stays.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 5 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	}, opts...)...)
}

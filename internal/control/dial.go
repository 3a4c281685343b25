package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// DialConfig says how to dial. The zero value takes what the user has: the token of $RFAAS_TOKEN_FILE and the secret of
// $RFAAS_SECRET_FILE, else those in their usual places. Naming one here or in the environment leaves out the usual places.
type DialConfig struct {
	// Secret is proved with every call, and nothing else is.
	Secret *Secret
	// SecretFile is read when Secret is nil. Empty: SecretPath(os.Getenv).
	SecretFile string
	// TokenFile is a file of rfaas token issue. Empty: identity.TokenPath(os.Getenv).
	TokenFile string
	// CAFile has the certificates that daemons on other nodes are checked with. Empty: $RFAAS_CA_FILE, else what the token
	// file has.
	CAFile string
	// Node proves itself to other nodes by its certificate. Connections end when it gets another one, and the next call makes a new one.
	Node *identity.Node
	// AllowPlaintext leaves out TLS, also with addresses that are neither loopback nor a unix socket.
	AllowPlaintext bool
	// Getenv looks up what is empty above. nil: os.Getenv.
	Getenv func(string) string
	// Connect connects to a unix socket that this process may not reach itself. nil: it may.
	Connect func(path string) (net.Conn, error)
	// ConnectTimeout bounds one attempt to connect. 0: 5 s.
	ConnectTimeout time.Duration
}

// Dial prepares a connection to an executor or a resource manager at "host:port" or "unix:PATH". It checks the
// address and reads the credentials but does not wait for the connection: the first call connects, fails with
// codes.Unavailable when nobody is there, and later calls try again. Closing it ends every call on it. It is
// safe for concurrent use and meant to be kept: one per address and process.
func Dial(addr string, cfg DialConfig) (*grpc.ClientConn, error) {
	a, err := ParseAddress(addr)
	if err != nil {
		return nil, Errorf(ClassInvalid, "%v", err)
	}
	who, err := cfg.credentials(a)
	if err != nil {
		if far := a.CheckPlaintext(cfg.AllowPlaintext); far != nil && errors.Is(err, errNobody) {
			return nil, Errorf(ClassInvalid, "%v (%s)", far, Text(err))
		}
		return nil, err
	}
	tlsConfig, err := cfg.tls(a, who)
	if err != nil {
		return nil, err
	}
	transport := &clientTransport{tls: tlsConfig}
	if cfg.Node != nil && tlsConfig != nil {
		transport.live = &live{conns: map[net.Conn]struct{}{}}
		cfg.Node.OnReload(transport.live.end)
	}
	timeout := cfg.ConnectTimeout
	if timeout == 0 {
		timeout = 5 * time.Second
	}
	// passthrough and our own dialer: no DNS service-config look-ups, no HTTP proxy from the environment,
	// and unix sockets the same way.
	conn, err := grpc.NewClient("passthrough:///"+a.String(),
		grpc.WithTransportCredentials(transport),
		grpc.WithPerRPCCredentials(who),
		grpc.WithAuthority("rfaas"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if a.Network == "unix" && cfg.Connect != nil {
				return cfg.Connect(a.Target)
			}
			var d net.Dialer
			return d.DialContext(ctx, a.Network, a.Target)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: timeout,
		}),
		// A silent node is found while an event stream is open. 10 s is the least that grpc-go accepts here.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		// The connection stays while leases rest in a cache.
		grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(flowWindow), grpc.WithInitialConnWindowSize(flowWindow),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxRequest)),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", a, err)
	}
	return conn, nil
}

func (c *DialConfig) getenv(name string) string {
	if c.Getenv != nil {
		return c.Getenv(name)
	}
	return os.Getenv(name)
}

// TokenTenant is the tenant of the token that Dial would show for these settings, "" if it would show none.
func (c DialConfig) TokenTenant() string {
	if token, _, _ := c.places(); c.Secret == nil && token != "" {
		if cred, err := identity.LoadCredentials(token); err == nil {
			return cred.Claims.Tenant
		}
	}
	return ""
}

package control

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// secretKey is the metadata key that carries the secret.
const secretKey = "rfaas-secret"

// DialConfig says how to dial. The zero value is right for a client of the same user on the same node.
type DialConfig struct {
	// Secret is sent with every call. nil: read from SecretFile.
	Secret *Secret
	// SecretFile is read when Secret is nil. Empty: SecretPath(os.Getenv).
	SecretFile string
	// AllowPlaintext permits addresses that are neither loopback nor a unix socket.
	AllowPlaintext bool
	// ConnectTimeout bounds one attempt to connect. 0: 5 s.
	ConnectTimeout time.Duration
}

// Dial prepares a connection to an executor or a resource manager at "host:port" or "unix:PATH". It checks the
// address and reads the secret but does not wait for the connection: the first call connects, fails with
// codes.Unavailable when nobody is there, and later calls try again. Closing it ends every call on it. It is
// safe for concurrent use and meant to be kept: one per address and process.
func Dial(addr string, cfg DialConfig) (*grpc.ClientConn, error) {
	a, err := ParseAddress(addr)
	if err != nil {
		return nil, Errorf(ClassInvalid, "%v", err)
	}
	if err := a.CheckPlaintext(cfg.AllowPlaintext); err != nil {
		return nil, Errorf(ClassInvalid, "%v", err)
	}
	secret, err := cfg.secret()
	if err != nil {
		return nil, err
	}
	timeout := cfg.ConnectTimeout
	if timeout == 0 {
		timeout = 5 * time.Second
	}
	// passthrough and our own dialer: no DNS service-config look-ups, no HTTP proxy from the environment,
	// and unix sockets the same way.
	conn, err := grpc.NewClient("passthrough:///"+a.String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithPerRPCCredentials(secretCredentials(secret.Hex())),
		grpc.WithAuthority("rfaas"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
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
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", a, err)
	}
	return conn, nil
}

func (c DialConfig) secret() (Secret, error) {
	if c.Secret != nil {
		return *c.Secret, nil
	}
	path := c.SecretFile
	if path == "" {
		var err error
		if path, err = SecretPath(os.Getenv); err != nil {
			return Secret{}, err
		}
	}
	s, err := LoadSecret(path)
	if err != nil {
		return s, fmt.Errorf("%w (made by the first executor or resource manager that this user starts)", err)
	}
	return s, nil
}

// secretCredentials puts the secret into every call's metadata.
type secretCredentials string

func (c secretCredentials) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{secretKey: string(c)}, nil
}

// RequireTransportSecurity is false: Dial itself has checked that the address is local or that plain text is allowed.
func (secretCredentials) RequireTransportSecurity() bool { return false }

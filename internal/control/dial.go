package control

import (
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

// DialConfig says how to dial. The zero value uses the user's credentials: the token of $RFAAS_TOKEN_FILE and the
// secret of $RFAAS_SECRET_FILE, else those at their default paths. If one of them is named here or in the environment,
// the default paths are not used.
type DialConfig struct {
	// Secret is the only credential used, if it is set.
	Secret *Secret
	// SecretFile is read if Secret is nil. Empty: SecretPath(os.Getenv).
	SecretFile string
	// ReadSecret is the content of SecretFile, for a daemon that has read it. nil: the file is read.
	ReadSecret *Secret
	// TokenFile is a file from rfaas token issue. Empty: identity.TokenPath(os.Getenv).
	TokenFile string
	// Token is used instead of a token file, if it is set. Several connections may share it.
	Token *Token
	// CAFile has the certificates to check daemons on other nodes with. Empty: $RFAAS_CA_FILE, else the certificates in
	// the token file.
	CAFile string
	// Node authenticates to other nodes with its certificate. When it gets a new certificate, its connections are
	// closed, and the next call makes a new one.
	Node *identity.Node
	// AllowPlaintext turns TLS off for all addresses, not only for loopback and unix sockets.
	AllowPlaintext bool
	// Getenv looks up the environment variables named above. nil: os.Getenv.
	Getenv func(string) string
	// Connect connects to a unix socket that this process has no permission to reach itself. nil: connect directly.
	Connect func(path string) (net.Conn, error)
}

// Dial prepares a connection to an executor or a resource manager at "host:port" or "unix:PATH", or to the one of several resource
// managers at "host:port,host:port" that serves (see ParseAddresses). It checks the address
// and loads the credentials but does not wait for the connection. The first call connects. It fails with
// codes.Unavailable if nothing answers at the address, and later calls try again. Closing the connection ends every
// call on it. It is safe for concurrent use. A process keeps one per address.
func Dial(addr string, cfg DialConfig) (*grpc.ClientConn, error) {
	list, err := ParseAddresses(addr)
	if err != nil {
		return nil, Errorf(ClassInvalid, "%v", err)
	}
	a := list[0] // the others need the same credentials
	who, err := cfg.credentials(a)
	if err != nil {
		if far := a.CheckPlaintext(cfg.AllowPlaintext); far != nil && errors.Is(err, errNobody) {
			return nil, Errorf(ClassCredential, "%v (%s)", far, Text(err))
		}
		return nil, err
	}
	transport := &clientTransport{}
	for _, a := range list {
		config, err := cfg.tls(a, who)
		if err != nil {
			return nil, err
		}
		transport.tls = append(transport.tls, config)
	}
	if cfg.Node != nil && transport.secure() || len(list) > 1 {
		transport.live = &live{conns: map[net.Conn]struct{}{}}
	}
	if cfg.Node != nil && transport.secure() {
		cfg.Node.OnReload(transport.live.end)
	}
	d := &dialer{list: list, connect: cfg.Connect}
	times := grpc.ConnectParams{MinConnectTimeout: 5 * time.Second,
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}}
	target := "passthrough:///" + a.String()
	var more []grpc.DialOption
	if len(list) > 1 {
		var resolve grpc.DialOption
		target, resolve = d.target()
		times.MinConnectTimeout, times.Backoff.MaxDelay = severalConnect, 300*time.Millisecond
		more = append(more, resolve, grpc.WithUnaryInterceptor(transport.live.leaveSilent))
	}
	// passthrough with our own dialer avoids DNS service-config look-ups and HTTP proxies from the environment, and treats
	// unix sockets in the same way.
	conn, err := grpc.NewClient(target, append(more,
		grpc.WithTransportCredentials(transport),
		grpc.WithPerRPCCredentials(who),
		grpc.WithAuthority("rfaas"),
		grpc.WithContextDialer(d.dial),
		grpc.WithConnectParams(times),
		// Detects a silent node while an event stream is open. 10 s is the smallest value that grpc-go accepts.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		// The connection stays open while released leases are cached.
		grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(flowWindow), grpc.WithInitialConnWindowSize(flowWindow),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxRequest)),
		grpc.WithDisableServiceConfig(),
	)...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", addr, err)
	}
	return conn, nil
}

func (c *DialConfig) getenv(name string) string {
	if c.Getenv != nil {
		return c.Getenv(name)
	}
	return os.Getenv(name)
}

// TokenTenant returns the tenant of the token that Dial would send with these settings, "" if it would send none.
func (c DialConfig) TokenTenant() string {
	if token, _, _ := c.places(); c.Secret == nil && token != "" {
		if cred, err := identity.LoadCredentials(token); err == nil {
			return cred.Claims.Tenant
		}
	}
	return ""
}

package control

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// exporterLabel is the label of the TLS exporter value that a proof is bound to (RFC 5705).
const exporterLabel = "EXPORTER-rfaas-proof-v1"

// link is one connection, on either side. gRPC carries it as AuthInfo.
type link struct {
	credentials.CommonAuthInfo
	channel *identity.Channel
	bounded *boundedConn   // at the server
	plain   bool           // plain text from another node, which is not allowed
	node    *identity.Node // at the server: checks channel.Node
	tracked *tracked       // at the client; nil: the connection is not tracked

	mu       sync.Mutex
	verified map[string]identity.Identity // at the server: by scheme and credential
	made     map[string]made              // at the client: by scheme
}

// made is a credential for a connection, and what it was made from.
type made struct{ from, credential string }

// AuthType implements credentials.AuthInfo.
func (*link) AuthType() string { return "rfaas" }

// clientTransport connects with TLS, or without if it has no TLS configuration.
type clientTransport struct {
	tls  []func() (*tls.Config, error) // of each address, called at each handshake; nil: no TLS
	live *live                         // nil: connections stay open when the files change
}

// secure reports whether connections use TLS.
func (t *clientTransport) secure() bool { return t.tls[0] != nil }

// live are the connections that have used this node's certificate, or that one of several managers has accepted. They are closed when the
// certificate is replaced, so that the next call uses the new one. Otherwise the server would refuse calls on them when the old certificate
// expires.
type live struct {
	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// tracked is a connection of live.
type tracked struct {
	net.Conn
	of *live

	mu     sync.Mutex
	read   time.Time // when something last arrived
	silent time.Time // beginning of the first call that was not answered in time, if nothing has arrived since; else zero
}

// Read notes that something has arrived.
func (t *tracked) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	if n > 0 {
		t.mu.Lock()
		t.read, t.silent = time.Now(), time.Time{}
		t.mu.Unlock()
	}
	return n, err
}

func (l *live) track(c net.Conn) net.Conn {
	if l == nil {
		return c
	}
	t := &tracked{Conn: c, of: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[t] = struct{}{}
	return t
}

// Close closes the connection.
func (t *tracked) Close() error {
	t.of.mu.Lock()
	delete(t.of.conns, t)
	t.of.mu.Unlock()
	return t.Conn.Close()
}

// end closes all connections.
func (l *live) end() {
	l.mu.Lock()
	conns := slices.Collect(maps.Keys(l.conns))
	l.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

func (t *clientTransport) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	l := &link{channel: &identity.Channel{}}
	which := 0
	if r, ok := raw.(*routed); ok {
		which = r.which
		raw = t.live.track(raw)
	}
	if t.tls[which] == nil {
		l.tracked, _ = raw.(*tracked)
		l.SecurityLevel = credentials.NoSecurity
		l.channel.Nonce = make([]byte, identity.NonceSize)
		rand.Read(l.channel.Nonce)
		l.channel.Address = addressOf(raw.RemoteAddr())
		return raw, l, nil
	}
	config, err := t.tls[which]()
	if err != nil {
		raw.Close()
		return nil, nil, err
	}
	if _, done := raw.(*tracked); !done {
		raw = t.live.track(raw)
	}
	l.tracked, _ = raw.(*tracked)
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, nil, fmt.Errorf("TLS: %w", explain(err))
	}
	if err := l.bind(conn); err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, l, nil
}

// explain adds the likely cause to TLS errors.
func explain(err error) error {
	var record tls.RecordHeaderError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &record):
		return fmt.Errorf("%w (the daemon does not use TLS: it has no identity directory)", err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w (its certificate belongs to another cluster than the token or %s)", err, identity.CAFileEnv)
	}
	return err
}

// bind sets the value that identifies this TLS connection.
func (l *link) bind(conn *tls.Conn) error {
	l.SecurityLevel = credentials.PrivacyAndIntegrity
	state := conn.ConnectionState()
	var err error
	if l.channel.Binding, err = state.ExportKeyingMaterial(exporterLabel, nil, 32); err != nil {
		return fmt.Errorf("TLS: %w", err)
	}
	return nil
}

func (t *clientTransport) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("a client's transport does not serve")
}

func (t *clientTransport) Info() credentials.ProtocolInfo { return info(t.secure()) }
func (t *clientTransport) Clone() credentials.TransportCredentials {
	c := *t
	return &c
}
func (t *clientTransport) OverrideServerName(string) error { return errors.New("not supported") }

func info(secure bool) credentials.ProtocolInfo {
	if !secure {
		return credentials.ProtocolInfo{SecurityProtocol: "insecure"}
	}
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// serverTransport accepts TLS. It accepts plain text from this node, and from others if that is allowed.
type serverTransport struct {
	node       *identity.Node // nil: no TLS
	tls        *tls.Config    // likewise
	allowPlain bool
	gate       *Gate
}

// tlsHandshake is the first byte of a TLS connection. The first byte of HTTP/2 is a letter.
const tlsHandshake = 0x16

func (t *serverTransport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	l := &link{channel: &identity.Channel{Remote: raw.RemoteAddr().String()}}
	conn := raw
	under := raw
	if l.bounded, _ = raw.(*boundedConn); l.bounded != nil {
		under = l.bounded.Conn
	}
	if u, ok := under.(*net.UnixConn); ok {
		l.channel.PeerUID, l.channel.Remote = peerUID(u)
	} else if t.tls != nil {
		var first [1]byte
		if _, err := raw.Read(first[:]); err != nil {
			raw.Close()
			return nil, nil, err
		}
		conn = &prefixed{Conn: raw, first: first[:]}
		if first[0] == tlsHandshake {
			return t.secure(conn, l)
		}
	}
	l.SecurityLevel = credentials.NoSecurity
	l.channel.Address = addressOf(raw.LocalAddr())
	// The gate refuses the calls, so that the caller gets an explanation.
	l.plain = l.channel.PeerUID == nil && !t.allowPlain && !isLoopback(raw.RemoteAddr())
	return conn, l, nil
}

func (t *serverTransport) secure(raw net.Conn, l *link) (net.Conn, credentials.AuthInfo, error) {
	conn := tls.Server(raw, t.tls)
	err := conn.Handshake() // gRPC has set a deadline
	if err == nil {
		err = l.bind(conn)
	}
	if err != nil {
		raw.Close()
		t.gate.refuseConnection(l.channel.Remote, err)
		return nil, nil, fmt.Errorf("TLS: %w", err)
	}
	if certs := conn.ConnectionState().VerifiedChains; len(certs) > 0 {
		l.channel.Node, l.node = t.node.Identify(certs[0][0], now()), t.node
	}
	return conn, l, nil
}

func (t *serverTransport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("a server's transport does not dial")
}

func (t *serverTransport) Info() credentials.ProtocolInfo { return info(t.tls != nil) }
func (t *serverTransport) Clone() credentials.TransportCredentials {
	c := *t
	return &c
}
func (t *serverTransport) OverrideServerName(string) error { return errors.New("not supported") }

// serverTLS returns the server's TLS configuration: nodes send certificates, clients send tokens instead. Each
// handshake uses the current files. There is no session resumption, which would use those of an earlier handshake.
func serverTLS(n *identity.Node) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		f := n.Files(now())
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{f.Certificate}, ClientCAs: f.CA,
			ClientAuth: tls.VerifyClientCertIfGiven, NextProtos: []string{"h2"}, SessionTicketsDisabled: true}, nil
	}}
}

// clientTLS returns a node's TLS configuration for connections to other nodes.
func clientTLS(n *identity.Node, host string) *tls.Config {
	f := n.Files(now())
	return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host, NextProtos: []string{"h2"}, RootCAs: f.CA,
		Certificates: []tls.Certificate{f.Certificate}, VerifyConnection: func(s tls.ConnectionState) error {
			return n.CheckRevoked(s.PeerCertificates[0], now())
		}}
}

// prefixed is a connection of which the first byte was already read.
type prefixed struct {
	net.Conn
	first []byte
}

func (c *prefixed) Read(b []byte) (int, error) {
	if len(c.first) > 0 && len(b) > 0 {
		n := copy(b, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// addressOf returns the address of a server's end in a form that is equal at both ends: an IP address and a port,
// without the zone, which is local to a node; or the path that a unix socket is bound to.
func addressOf(a net.Addr) string {
	if p, err := netip.ParseAddrPort(a.String()); err == nil {
		return netip.AddrPortFrom(p.Addr().Unmap().WithZone(""), p.Port()).String()
	}
	return a.Network() + ":" + a.String()
}

func isLoopback(a net.Addr) bool {
	if a == nil {
		return false
	}
	p, err := netip.ParseAddrPort(a.String())
	return err == nil && p.Addr().Unmap().IsLoopback()
}

// peerUID returns the user at the other end of a unix socket, and a text for logs.
func peerUID(c *net.UnixConn) (uid *uint32, remote string) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, "unix"
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil || err != nil {
		return nil, "unix"
	}
	return &cred.Uid, fmt.Sprintf("unix uid %d pid %d", cred.Uid, cred.Pid)
}

// now is the clock for making and checking proofs.
func now() time.Time { return time.Now() }

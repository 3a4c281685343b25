package hostile

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

const outsider = "outsider"

// credentialHeader is the metadata that carries a call's token and proof.
const credentialHeader = "rfaas-token"

func outsiderAttacks() []attack {
	return []attack{
		{outsider, "a hundred messages that never end, executor", "memory bounded", func(c *cluster) string { return floodsMessages(c, c.newExecutor()) }},
		{outsider, "a hundred messages that never end, manager", "memory bounded", func(c *cluster) string { return floodsMessages(c, c.newManager()) }},
		{outsider, "random bytes at both ports", "closed, tenants are served", atBoth(sendsRandom)},
		{outsider, "plain HTTP at the control port", "closed or refused", atBoth(speaksHTTP)},
		{outsider, "calls without a credential, plain", "Unauthenticated", callsPlain},
		{outsider, "calls over TLS without a certificate", "Unauthenticated", callsTLS},
		{outsider, "a certificate of another cluster", "refused", callsWithForeignCertificate},
		{outsider, "an older TLS", "refused by the handshake", atBoth(speaksOldTLS)},
		{outsider, "a malformed token", "Unauthenticated", showsMalformed},
		{outsider, "a token of another cluster", "Unauthenticated", showsForeign},
		{outsider, "a token with a changed tenant", "Unauthenticated", showsChanged},
		{outsider, "a token without its key", "Unauthenticated", showsStolen},
		{outsider, "a token that has expired", "Unauthenticated", showsEnded},
		{outsider, "a token that expires while its connection is open", "Unauthenticated", outlivesToken},
		{outsider, "a node's certificate that has expired", "refused", showsEndedCertificate},
		{outsider, "a token that was revoked", "Unauthenticated", showsRevoked},
		{outsider, "a proof that was used on another connection", "Unauthenticated", replays},
		{outsider, "a proof made for another address", "Unauthenticated", replaysElsewhere},
		{outsider, "a wrong secret", "Unauthenticated", guessesSecret},
		{outsider, "headers that never end", "memory bounded", atBoth(floodsHeaders)},
		{outsider, "huge headers", "closed or refused, memory bounded", atBoth(sendsHugeHeader)},
		{outsider, "streams opened and reset without end", "memory and processor bounded", atBoth(resetsStreams)},
		{outsider, "five thousand silent connections", "descriptors bounded, tenants are served", atBoth(connectsAlways)},
		{outsider, "slow handshakes and first calls", "tenants are served", atBoth(connectsSlowly)},
		{outsider, "a daemon with node B's certificate in A's place", "the client refuses it", func(c *cluster) string {
			if posesAs(c, "node-a") == "" {
				c.Errorf("the client refuses node A's own certificate: the attack shows nothing")
			}
			return posesAs(c, "node-b")
		}},
		{outsider, "a daemon with a certificate of another cluster", "the client refuses it", func(c *cluster) string { return posesAs(c, "node-other") }},
		{outsider, "leases and bills by HTTP without its token", "401 or 403", readsPages},
		{outsider, "slow requests for health", "health is answered", asksSlowly},
		{outsider, "no list of revoked tokens", "no token is accepted", takesListAway},
	}
}

// atBoth returns an attack on the executor and on the manager.
func atBoth(attack func(c *cluster, d *daemon) string) func(*cluster) string {
	return func(c *cluster) string {
		got := ""
		for _, d := range []*daemon{c.executor, c.manager} {
			if s := attack(c, d); s != "" {
				got += d.name + ": " + s + "; "
			}
			if s := c.served(d); s != "" {
				got += d.name + " serves no tenant: " + s + "; "
			}
		}
		return got
	}
}

// served returns why the daemon does not serve ann on a new connection, "" if it does.
func (c *cluster) served(d *daemon) string {
	conn := c.dial(d.address, control.DialConfig{TokenFile: c.token("ann")})
	defer conn.Close()
	return info(c, d, conn)
}

// info makes a call that every tenant may make, and returns its error's text.
func info(c *cluster, d *daemon, conn *grpc.ClientConn) string {
	if err := ask(c, d, conn); err != nil {
		return err.Error()
	}
	return ""
}

func ask(c *cluster, d *daemon, conn *grpc.ClientConn) (err error) {
	if ctx := c.within(patience); !d.isManager() {
		_, err = control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	} else {
		_, err = control.NewManagerClient(conn).List(ctx, &control.ListRequest{})
	}
	return err
}

func (c *cluster) tcp(d *daemon) net.Conn {
	c.Helper()
	conn, err := net.Dial("tcp", d.address)
	if err != nil {
		c.Fatal(err)
	}
	return conn
}

func sendsRandom(c *cluster, d *daemon) string {
	var wg sync.WaitGroup
	for i := range 200 {
		conn := c.tcp(d)
		wg.Go(func() {
			defer conn.Close()
			b := make([]byte, 4096)
			rand.Read(b)
			copy(b, [][]byte{{}, {0x16, 3, 1}, []byte(http2.ClientPreface), {0}}[i%4])
			conn.SetDeadline(time.Now().Add(patience))
			conn.Write(b)
			conn.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, conn)
		})
	}
	wg.Wait()
	return ""
}

func speaksHTTP(c *cluster, d *daemon) string {
	conn := c.tcp(d)
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	conn.(*net.TCPConn).CloseWrite()
	b, _ := io.ReadAll(conn)
	if bytes.Contains(b, []byte("200 OK")) {
		return fmt.Sprintf("%.100q", b)
	}
	return ""
}

// raw dials with a transport of gRPC, which sends no credential of rfaas.
func (c *cluster) raw(d *daemon, cred credentials.TransportCredentials) *grpc.ClientConn {
	c.Helper()
	conn, err := grpc.NewClient("passthrough:///"+d.address, grpc.WithTransportCredentials(cred))
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { conn.Close() })
	return conn
}

// everyMethod calls each method of the daemons without a token. It describes the calls that were not refused with a wanted code.
func everyMethod(c *cluster, cred credentials.TransportCredentials, want ...codes.Code) (got string) {
	for _, d := range []*daemon{c.executor, c.manager} {
		conn := c.raw(d, cred)
		services := []grpc.ServiceDesc{control.Executor_ServiceDesc}
		if d.isManager() {
			services[0] = control.Manager_ServiceDesc
		}
		for _, s := range services {
			for _, m := range s.Methods {
				err := conn.Invoke(c.within(patience), "/"+s.ServiceName+"/"+m.MethodName, &control.InfoRequest{}, &control.InfoReply{})
				got += refusal(m.MethodName, err, want...)
			}
			for _, m := range s.Streams {
				stream, err := conn.NewStream(c.within(patience), &m, "/"+s.ServiceName+"/"+m.StreamName)
				if err == nil {
					stream.SendMsg(&control.InfoRequest{})
					stream.CloseSend()
					err = stream.RecvMsg(&control.InfoReply{})
				}
				got += refusal(m.StreamName, err, want...)
			}
		}
	}
	return got
}

func callsPlain(c *cluster) string {
	return everyMethod(c, insecure.NewCredentials(), codes.Unauthenticated, codes.Unavailable)
}

// tlsConfig returns the TLS settings of a client that checks the daemon's certificate.
func (c *cluster) tlsConfig() *tls.Config {
	c.Helper()
	ca, err := os.ReadFile(c.in("node-a/ca.crt"))
	if err != nil {
		c.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &tls.Config{RootCAs: pool, ServerName: "localhost", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
}

func callsTLS(c *cluster) string {
	return everyMethod(c, credentials.NewTLS(c.tlsConfig()), codes.Unauthenticated, codes.Unavailable)
}

func callsWithForeignCertificate(c *cluster) string {
	t := c.tlsConfig()
	for _, pair := range [][2]string{{"node-other/node.crt", "node-other/node.key"}} {
		cert, err := tls.LoadX509KeyPair(c.in(pair[0]), c.in(pair[1]))
		if err != nil {
			c.Fatal(err)
		}
		t.Certificates = append(t.Certificates, cert)
	}
	// The client shows it even if the server does not accept its issuer.
	t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &t.Certificates[0], nil }
	return everyMethod(c, credentials.NewTLS(t), codes.Unauthenticated, codes.Unavailable)
}

func speaksOldTLS(c *cluster, d *daemon) string {
	t := c.tlsConfig()
	t.MinVersion, t.MaxVersion = tls.VersionTLS10, tls.VersionTLS12
	conn, err := tls.Dial("tcp", d.address, t)
	if err != nil {
		return ""
	}
	defer conn.Close()
	return fmt.Sprintf("it speaks version %x", conn.ConnectionState().Version)
}

// shows makes a call with a given text as its credential.
func shows(c *cluster, credential string) string {
	conn := c.raw(c.executor, insecure.NewCredentials())
	ctx := metadata.AppendToOutgoingContext(c.within(patience), credentialHeader, credential)
	_, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	return refusal("info", err, codes.Unauthenticated)
}

// proofFor returns the channel that a client on this node signs a proof for.
func proofFor(address string) *identity.Channel {
	ch := &identity.Channel{Nonce: make([]byte, identity.NonceSize), Address: address}
	rand.Read(ch.Nonce)
	return ch
}

func (c *cluster) credentials(token string) *identity.Credentials {
	c.Helper()
	cred, err := identity.LoadCredentials(token)
	if err != nil {
		c.Fatal(err)
	}
	return cred
}

func (c *cluster) proof(cred *identity.Credentials, d *daemon) string {
	return identity.ProveToken(cred.Token, cred.Key, proofFor(d.address), time.Now())
}

func showsMalformed(c *cluster) string {
	good := c.proof(c.credentials(c.token("eve")), c.executor)
	token, proof, _ := strings.Cut(good, " ")
	got := ""
	for _, s := range []string{"", " ", "x", token, token + " ", token + " x.y.z.w", " " + proof, token[:len(token)/2] + " " + proof,
		token + "  " + proof, token + " " + proof + ".x", strings.Repeat("A", 8000), token + " " + strings.Repeat("9", 4000)} {
		if r := shows(c, s); r != "" {
			got += fmt.Sprintf("%.40q: %s", s, r)
		}
	}
	if r := shows(c, good); !strings.Contains(r, "accepted") {
		c.Errorf("the good token that these were made of is refused, the attack shows nothing: %s", r)
	}
	return got
}

func showsForeign(c *cluster) string {
	path := c.in("foreign.token")
	c.rfaas("token", "issue", "--dir", c.in("other-cluster"), "--tenant", "eve", "--role", "operator", "--out", path)
	return shows(c, c.proof(c.credentials(path), c.executor))
}

// showsChanged changes every seventh byte of a token, one at a time. No such token may be accepted.
func showsChanged(c *cluster) string {
	cred, got := c.credentials(c.token("eve")), ""
	for at := 0; at < len(cred.Token); at += 7 {
		b := []byte(cred.Token)
		b[at] = map[bool]byte{true: 'A', false: 'B'}[b[at] != 'A']
		s := identity.ProveToken(string(b), cred.Key, proofFor(c.executor.address), time.Now())
		if r := shows(c, s); r != "" {
			got += fmt.Sprintf("byte %d: %s", at, r)
		}
	}
	return got
}

// showsStolen shows ann's token with a proof by another key.
func showsStolen(c *cluster) string {
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		c.Fatal(err)
	}
	ann := c.credentials(c.token("ann"))
	return shows(c, identity.ProveToken(ann.Token, key, proofFor(c.executor.address), time.Now()))
}

func showsEnded(c *cluster) string {
	cred := c.credentials(c.token("ended", "--for", "1s"))
	after(time.Unix(cred.Claims.Ends, 0))
	return shows(c, c.proof(cred, c.executor))
}

// after waits until the clock is past a time.
func after(ends time.Time) {
	until(func() bool { return time.Now().After(ends.Add(100 * time.Millisecond)) })
}

func outlivesToken(c *cluster) string {
	path := c.token("ends-soon", "--for", "2s")
	conn := c.dial(c.executor.address, control.DialConfig{TokenFile: path})
	if err := ask(c, c.executor, conn); err != nil {
		c.Errorf("the token is refused before it ends, the attack shows nothing: %v", err)
	}
	after(time.Unix(c.credentials(path).Claims.Ends, 0))
	return refusal("info", ask(c, c.executor, conn), codes.Unauthenticated)
}

func showsEndedCertificate(c *cluster) string {
	c.rfaas("cluster", "node", "--dir", c.in("cluster"), "--out", c.in("node-ended"), "--for", "1s", "127.0.0.3")
	cert, err := tls.LoadX509KeyPair(c.in("node-ended/node.crt"), c.in("node-ended/node.key"))
	if err != nil {
		c.Fatal(err)
	}
	after(cert.Leaf.NotAfter)
	t := c.tlsConfig()
	t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	return everyMethod(c, credentials.NewTLS(t), codes.Unauthenticated, codes.Unavailable)
}

// readsPages asks for the manager's pages without its HTTP token. None may name a tenant.
func readsPages(c *cluster) string {
	got := ""
	for _, page := range []string{"", "api/v1/leases", "api/v1/bills", "api/v1/state", "api/v1/tenants", "api/v1/executors", "page/", "debug/pprof/",
		"metrics", "api/v1/../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "page/../../../etc/passwd"} {
		text, err := c.manager.ask(page, patience)
		for _, secret := range []string{"ann", "eve", "root:", "goroutine "} {
			if err == nil && strings.Contains(text, `"`+secret+`"`) || strings.Contains(text, "\n"+secret+":") {
				got += fmt.Sprintf("/%s names %q; ", page, secret)
			}
		}
	}
	return got
}

func showsRevoked(c *cluster) string {
	cred := c.credentials(c.token("revoked"))
	if r := shows(c, c.proof(cred, c.executor)); !strings.Contains(r, "accepted") {
		c.Errorf("the token is refused before it is revoked, the attack shows nothing: %s", r)
	}
	c.rfaas("token", "revoke", "--dir", c.in("cluster"), cred.Claims.ID)
	lists, _ := filepath.Glob(c.in("cluster/revoked*"))
	for _, l := range lists {
		b, err := os.ReadFile(l)
		if err == nil {
			err = os.WriteFile(filepath.Join(c.in("node-a"), filepath.Base(l)), b, 0o644)
		}
		if err != nil {
			c.Fatal(err)
		}
	}
	last := ""
	if !until(func() bool { last = shows(c, c.proof(cred, c.executor)); return last == "" }) {
		return last
	}
	return ""
}

func replays(c *cluster) string {
	s := c.proof(c.credentials(c.token("eve")), c.executor)
	if r := shows(c, s); !strings.Contains(r, "accepted") {
		c.Errorf("the proof is refused the first time, the attack shows nothing: %s", r)
	}
	return shows(c, s)
}

// replaysElsewhere shows the executor a proof that was made for the manager.
func replaysElsewhere(c *cluster) string {
	return shows(c, c.proof(c.credentials(c.token("ann")), c.manager))
}

func guessesSecret(c *cluster) string {
	conn := c.raw(c.executor, insecure.NewCredentials())
	got := ""
	for range 100 {
		secret := make([]byte, 32)
		rand.Read(secret)
		ctx := metadata.AppendToOutgoingContext(c.within(patience), "rfaas-secret",
			identity.ProveSecret(secret, proofFor(c.executor.address), time.Now()))
		_, err := control.NewExecutorClient(conn).Drain(ctx, &control.DrainRequest{})
		got += refusal("drain", err, codes.Unauthenticated, codes.Unavailable) // the daemon may close the connection
	}
	return got
}

// posesAs runs a daemon with another node's certificate where a client expects node A. The client must send it nothing.
func posesAs(c *cluster, dir string) string {
	cert, err := tls.LoadX509KeyPair(c.in(dir+"/node.crt"), c.in(dir+"/node.key"))
	if err != nil {
		c.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
	if err != nil {
		c.Fatal(err)
	}
	heard := make(chan int, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(patience))
				b := make([]byte, 1<<16)
				n, _ := conn.Read(b)
				select {
				case heard <- n:
				default:
				}
			})
		}
	})
	address := strings.Replace(l.Addr().String(), "127.0.0.1:", "LOCALHOST:", 1)
	conn := c.dial(address, control.DialConfig{TokenFile: c.token("ann")})
	_, err = control.NewExecutorClient(conn).Info(c.within(patience), &control.InfoRequest{})
	conn.Close()
	l.Close()
	wg.Wait()
	close(heard)
	for n := range heard {
		if n > 0 {
			return fmt.Sprintf("the client sends it %d bytes", n)
		}
	}
	if err == nil {
		return "the client takes it for node A"
	}
	return ""
}

func connectsAlways(c *cluster, d *daemon) string {
	const n = 5000
	most := min(mayOpen(c)/4, 4096) + 100 // the others are for authenticated connections
	before := d.descriptors()
	var conns []net.Conn
	defer func() {
		for _, conn := range conns {
			conn.Close()
		}
	}()
	for range n {
		conn, err := net.DialTimeout("tcp", d.address, patience)
		if err != nil {
			break
		}
		conns = append(conns, conn)
	}
	if s := c.served(d); s != "" {
		return "serves no tenant beside them: " + s
	}
	if now := d.descriptors() - before; now > most {
		return fmt.Sprintf("%d descriptors for %d connections", now, len(conns))
	}
	return ""
}

// connectsSlowly sends the bytes of handshakes and of first calls one at a time.
func connectsSlowly(c *cluster, d *daemon) string {
	const n = 300
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var fed atomic.Int64
	var call bytes.Buffer
	f := http2.NewFramer(&call, nil)
	f.WriteSettings()
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers("/rfaas.control.v1.Executor/Info")})
	firstCall := append([]byte(http2.ClientPreface), call.Bytes()...)
	for i := range n {
		conn := c.tcp(d)
		wg.Go(func() {
			defer conn.Close()
			hello := [][]byte{[]byte(http2.ClientPreface), {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3}, firstCall}[i%3]
			for _, b := range hello {
				if _, err := conn.Write([]byte{b}); err != nil {
					return
				}
				fed.Add(1)
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
			<-stop
		})
	}
	until(func() bool { return fed.Load() >= 5*n })
	s := c.served(d)
	close(stop)
	wg.Wait()
	if s != "" {
		return "serves no tenant beside them: " + s
	}
	return ""
}

// probe bounds a request for health, as a monitoring program does.
const probe = 10 * time.Second

// asksSlowly opens many HTTP connections whose requests do not end, and a new one for each that the daemon closes.
func asksSlowly(c *cluster) string {
	const n = 300
	got := ""
	for _, d := range []*daemon{c.executor, c.manager} {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		var open atomic.Int64
		for range n {
			wg.Go(func() {
				for ctx.Err() == nil {
					conn, err := new(net.Dialer).DialContext(ctx, "tcp", d.http)
					if err != nil {
						return
					}
					open.Add(1)
					stop := context.AfterFunc(ctx, func() { conn.Close() })
					io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
					io.Copy(io.Discard, conn)
					stop()
					conn.Close()
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Millisecond): // so that the attack does not succeed by using the processor
					}
				}
			})
		}
		until(func() bool { return open.Load() >= 64 })
		if _, err := d.ask("healthz", probe); err != nil {
			got += fmt.Sprintf("%s: %v; ", d.name, err)
		}
		cancel()
		wg.Wait()
	}
	return got
}

// takesListAway removes the node's list of revoked tokens. No token may be accepted then.
func takesListAway(c *cluster) string {
	lists, _ := filepath.Glob(c.in("node-a/revoked*"))
	if len(lists) == 0 {
		c.Fatal("there is no list: the attack shows nothing")
	}
	aside := c.in("aside")
	if err := os.Mkdir(aside, 0o700); err != nil {
		c.Fatal(err)
	}
	move := func(from, to string) error {
		var err error
		for _, l := range lists {
			err = errors.Join(err, os.Rename(filepath.Join(from, filepath.Base(l)), filepath.Join(to, filepath.Base(l))))
		}
		return err
	}
	if err := move(c.in("node-a"), aside); err != nil {
		c.Fatal(err)
	}
	cred := c.credentials(c.token("revoked")) // it is on the list
	got := ""
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) && got == ""; { // the daemon reads the list again after a second
		got = shows(c, c.proof(cred, c.executor))
	}
	if err := move(aside, c.in("node-a")); err != nil {
		c.Fatal(err)
	}
	if !until(func() bool { return c.served(c.executor) == "" }) {
		c.Errorf("tenants are not served after the list is back")
	}
	return got
}

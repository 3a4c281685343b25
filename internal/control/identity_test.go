package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// realm is a cluster with a daemon on this machine.
type realm struct {
	t       *testing.T
	dir     string
	cluster *identity.Cluster
	port    *Port
	whoami  *whoServer
}

// whoServer records the callers of Info.
type whoServer struct {
	UnimplementedExecutorServer
	last *identity.Identity
	ctx  context.Context
}

func (w *whoServer) Info(ctx context.Context, _ *InfoRequest) (*InfoReply, error) {
	w.last, w.ctx = Caller(ctx), ctx
	return &InfoReply{}, nil
}
func (w *whoServer) Drain(context.Context, *DrainRequest) (*DrainReply, error) {
	return &DrainReply{}, nil
}

func newRealm(t *testing.T, listen string, allowPlain bool, limits ...quota.Limits) *realm {
	t.Helper()
	for _, name := range []string{SecretFileEnv, identity.TokenFileEnv, identity.CAFileEnv, "XDG_RUNTIME_DIR"} {
		t.Setenv(name, "")
	}
	r := &realm{t: t, dir: t.TempDir(), whoami: &whoServer{}}
	t.Setenv("HOME", filepath.Join(r.dir, "home")) // nobody's credentials but ours
	if err := identity.InitCluster(r.in("cluster"), "test", time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	var err error
	if r.cluster, err = identity.OpenCluster(r.in("cluster")); err != nil {
		t.Fatal(err)
	}
	if err := r.cluster.IssueNode(r.in("node"), []string{"localhost"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	r.port, err = OpenPort(PortConfig{Listen: listen, AllowPlaintext: allowPlain, SecretFile: r.in("secret"), IdentityDir: r.in("node"),
		AuditFile: r.in("audit"), Bounds: Bounds{Tenant: slices.Concat(limits, []quota.Limits{nil})[0]}})
	if err != nil {
		t.Fatal(err)
	}
	RegisterExecutorServer(r.port.Server, r.whoami)
	if err := r.port.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.port.Close(t.Context()) })
	return r
}

func (r *realm) in(name string) string { return filepath.Join(r.dir, name) }

// token writes a token file.
func (r *realm) token(name string, c identity.Claims, age time.Duration) string {
	r.t.Helper()
	cred, err := r.cluster.IssueToken(c, nil, time.Now().Add(-age))
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := cred.Encode()
	if err == nil {
		err = identity.WriteFile(r.in(name), b, 0o600, false)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return r.in(name)
}

// dial connects to an executor's port until the end of the test.
func dial(t *testing.T, address string, cfg DialConfig) ExecutorClient {
	t.Helper()
	conn, err := Dial(address, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return NewExecutorClient(conn)
}

// caller returns a function that makes a call on one connection to the realm's daemon.
func (r *realm) caller(cfg DialConfig) func() error {
	r.t.Helper()
	c := dial(r.t, r.far(), cfg)
	return func() error {
		_, err := c.Info(r.t.Context(), &InfoRequest{})
		return err
	}
}

// node opens a node's directory.
func (r *realm) node(name string) *identity.Node {
	r.t.Helper()
	n, err := identity.OpenNode(r.in(name), nil, nil, time.Now())
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

// revoke writes a new list and copies it to the daemon's node.
func (r *realm) revoke(entries ...identity.Revocation) {
	r.t.Helper()
	_, path, err := r.cluster.Revoke(time.Now(), entries...)
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = identity.WriteFile(r.in("node/revoked"), b, 0o644, false)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.later(2 * time.Second) // a look at the files counts for one
}

// later moves the clock of the daemon's gate.
func (r *realm) later(d time.Duration) {
	at := r.port.Gate.now().Add(d)
	r.port.Gate.now = func() time.Time { return at }
}

// far returns the daemon's address in a form that looks like another node's: a name that is not known to be local.
func (r *realm) far() string {
	_, port, err := net.SplitHostPort(r.port.Address)
	if err != nil {
		r.t.Fatal(err)
	}
	return "LOCALHOST:" + port
}

// info makes one call on a new connection.
func (r *realm) info(addr string, cfg DialConfig) error {
	conn, err := Dial(addr, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_, err = NewExecutorClient(conn).Info(ctx, &InfoRequest{})
	return err
}

func (r *realm) audit() string {
	r.port.Gate.Audit().Flush()
	b, err := os.ReadFile(r.in("audit"))
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

// Callers with a token, a certificate or the secret are admitted, with TLS from other nodes and without it on the same
// node.
func TestIdentities(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	uid := uint32(1001)
	token := r.token("ann", identity.Claims{Tenant: "ann", UID: &uid, Role: "tenant"}, 0)
	node := r.node("node")
	for name, c := range map[string]struct {
		addr string
		cfg  DialConfig
		by   string
		role identity.Role
	}{
		"token, TLS":    {r.far(), DialConfig{TokenFile: token}, "token", identity.RoleTenant},
		"token":         {r.port.Address, DialConfig{TokenFile: token}, "token", identity.RoleTenant},
		"secret, TLS":   {r.far(), DialConfig{SecretFile: r.in("secret"), CAFile: r.in("cluster/ca.crt")}, "secret", identity.RoleOperator},
		"secret":        {r.port.Address, DialConfig{SecretFile: r.in("secret")}, "secret", identity.RoleOperator},
		"node, TLS":     {r.far(), DialConfig{Node: node}, "node", identity.RoleNode},
		"node, locally": {r.port.Address, DialConfig{Node: node, SecretFile: r.in("secret")}, "secret", identity.RoleOperator},
	} {
		r.whoami.last = nil
		if err := r.info(c.addr, c.cfg); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if id := r.whoami.last; id.By != c.by || id.Role != c.role || c.by == "token" && (id.Tenant != "ann" || *id.UID != 1001) {
			t.Errorf("%s: %+v", name, id)
		}
	}
	// From the default path, and from the environment, without any setting.
	if err := os.MkdirAll(r.in("home/.rfaas"), 0o700); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(token)
	if err := os.WriteFile(r.in("home/.rfaas/token"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.info(r.far(), DialConfig{}); err != nil || r.whoami.last.Tenant != "ann" {
		t.Errorf("usual place: %v", err)
	}
	t.Setenv(identity.TokenFileEnv, r.token("bob", identity.Claims{Tenant: "bob", Role: "tenant"}, 0))
	if err := r.info(r.far(), DialConfig{}); err != nil || r.whoami.last.Tenant != "bob" || (DialConfig{}).TokenTenant() != "bob" {
		t.Errorf("environment: %v, %+v", err, r.whoami.last)
	}
	if n := r.port.Gate.Refused(); n != 0 {
		t.Errorf("%d refused:\n%s", n, r.audit())
	}
	if a := r.audit(); a != "" {
		t.Errorf("an audit of nothing: %s", a)
	}
}

// Invalid credentials are refused, counted and audited. The error names the reason and has a class.
func TestRefusals(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	other := newRealm(t, "127.0.0.1:0", false)
	past := identity.Claims{Tenant: "ann", Role: "tenant", Ends: time.Now().Add(-time.Second).Unix()}
	future := identity.Claims{Tenant: "ann", Role: "tenant", Begins: time.Now().Add(time.Hour).Unix()}
	revoked := r.token("revoked", identity.Claims{Tenant: "eve", Role: "tenant"}, 0)
	cred, err := identity.LoadCredentials(revoked)
	if err != nil {
		t.Fatal(err)
	}
	r.revoke(identity.Revocation{Kind: identity.RevokedToken, ID: cred.Claims.ID, Note: "eve has left"})
	wrong := Secret{1}
	for name, c := range map[string]struct {
		cfg    DialConfig
		reason identity.Reason
		text   string
	}{
		"wrong secret":         {DialConfig{Secret: &wrong}, identity.Wrong, "wrong secret"},
		"expired":              {DialConfig{TokenFile: r.token("past", past, 2*time.Hour)}, identity.Expired, "ask the administrator to renew it by `rfaas token renew`"},
		"too early":            {DialConfig{TokenFile: r.token("future", future, 0)}, identity.TooEarly, "too early"},
		"revoked":              {DialConfig{TokenFile: revoked}, identity.Revoked, "revoked"},
		"of another cluster":   {DialConfig{TokenFile: other.token("o", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}, identity.Wrong, "not signed by this cluster"},
		"operator for nothing": {DialConfig{TokenFile: r.token("good", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}, identity.Forbidden, "operator"},
	} {
		before := r.port.Gate.RefusedFor(c.reason)
		err := r.info(r.port.Address, c.cfg)
		code, class := codes.Unauthenticated, ClassCredential
		if c.reason == identity.Forbidden {
			code, class = codes.PermissionDenied, ClassInvalid
			conn, derr := Dial(r.port.Address, c.cfg)
			if derr != nil {
				t.Fatal(derr)
			}
			_, err = NewExecutorClient(conn).Drain(t.Context(), &DrainRequest{})
			conn.Close()
		}
		if status.Code(err) != code || ClassOf(err) != class || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
		if n := r.port.Gate.RefusedFor(c.reason) - before; n != 1 {
			t.Errorf("%s: %d more refused as %s", name, n, c.reason)
		}
		if a := r.audit(); !strings.Contains(a, `"reason":"`+string(c.reason)+`"`) || !strings.Contains(a, `"remote":"127.0.0.1:`) {
			t.Errorf("%s: audit log:\n%s", name, a)
		}
	}
	// A daemon of another cluster on another node: the client refuses it.
	if err := r.info(r.far(), DialConfig{TokenFile: other.in("o")}); ClassOf(err) != ClassConnection || !strings.Contains(err.Error(), "another cluster") {
		t.Errorf("another cluster: %v", err)
	}
	// Its name is not in the certificate.
	if err := r.cluster.IssueNode(r.in("node9"), []string{"node9"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: r.in("secret"), IdentityDir: r.in("node9")})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	defer p.Close(t.Context())
	if err := r.info(strings.Replace(p.Address, "127.0.0.1", "LOCALHOST", 1), DialConfig{TokenFile: r.in("good")}); err == nil || !strings.Contains(err.Error(), "node9") {
		t.Errorf("another name: %v", err)
	}
	// Files with wrong content.
	for text, path := range map[string]string{"no token": "secret", "no such file": "absent"} {
		if err := r.info(r.port.Address, DialConfig{TokenFile: r.in(path)}); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("token file %s: %v", path, err)
		}
	}
}

// A client whose clock is a minute off gets an error that says so.
func TestClockSkew(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	token := r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, time.Hour)
	r.port.Gate.now = func() time.Time { return time.Now().Add(time.Minute) }
	for _, cfg := range []DialConfig{{TokenFile: token}, {SecretFile: r.in("secret")}} {
		if err := r.info(r.port.Address, cfg); ClassOf(err) != ClassCredential || status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "set the clocks") {
			t.Errorf("%v", err)
		}
	}
	if n := r.port.Gate.RefusedFor(identity.Skew); n != 2 {
		t.Errorf("%d refused for skew", n)
	}
}

// A party that has seen or received what a client sent cannot use it elsewhere.
func TestReplay(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	first, second := &link{channel: &identity.Channel{Address: "127.0.0.1:5"}}, &link{channel: &identity.Channel{Address: "127.0.0.1:5"}}
	client := &link{channel: &identity.Channel{Nonce: bytes.Repeat([]byte{7}, identity.NonceSize), Address: "127.0.0.1:5"}}
	secret, err := LoadSecret(r.in("secret"))
	if err != nil {
		t.Fatal(err)
	}
	md, err := (&caller{secret: &secret}).GetRequestMetadata(credentials.NewContextWithRequestInfo(t.Context(), credentials.RequestInfo{AuthInfo: client}))
	if err != nil || strings.Contains(md[header(identity.SchemeSecret)], secret.Hex()) {
		t.Fatalf("%v, %v", md, err)
	}
	in := metadata.NewIncomingContext(t.Context(), metadata.New(md))
	call := func(l *link) error {
		_, err := r.port.Gate.check(peer.NewContext(in, &peer.Peer{AuthInfo: l}), service+"Executor/Info")
		return err
	}
	if err := errors.Join(call(first), call(first)); err != nil {
		t.Error(err)
	}
	if err := call(second); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "another connection") {
		t.Errorf("replayed: %v", err)
	}
	if err := call(&link{channel: &identity.Channel{Address: "127.0.0.1:6"}}); !strings.Contains(err.Error(), "127.0.0.1:5") {
		t.Errorf("passed on to another daemon: %v", err)
	}
	if n := r.port.Gate.RefusedFor(identity.Replayed); n != 2 {
		t.Errorf("%d refused as replayed\n%s", n, r.audit())
	}
}

// Calls from another node without TLS are refused unless that is permitted.
func TestPlaintextFromAfar(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	far := &link{channel: &identity.Channel{Remote: "10.0.0.9:5"}, plain: true}
	ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: far})
	if _, err := r.port.Gate.check(ctx, service+"Executor/Info"); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "TLS") {
		t.Errorf("%v", err)
	}
	if n := r.port.Gate.RefusedFor(identity.Plaintext); n != 1 {
		t.Errorf("%d refused", n)
	}
	left, right := net.Pipe() // no address that is loopback
	defer left.Close()
	defer right.Close()
	for _, allow := range []bool{false, true} {
		go left.Write([]byte("P"))
		_, info, err := (&serverTransport{tls: serverTLS(r.port.Node), allowPlain: allow}).ServerHandshake(right)
		if err != nil || info.(*link).plain == allow || info.(*link).channel.Address == "" {
			t.Errorf("plain text permitted %v: %+v, %v", allow, info, err)
		}
	}
}

// Open connections use a renewed token.
func TestRenewal(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	soon := identity.Claims{Tenant: "ann", Role: "tenant", Ends: time.Now().Add(time.Hour).Unix()}
	path := r.token("ann", soon, 0)
	call := r.caller(DialConfig{TokenFile: path})
	if err := call(); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(61 * time.Minute)
	r.port.Gate.now = func() time.Time { return later }
	if err := call(); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an hour later: %v", err)
	}
	soon.Ends = later.Add(time.Hour).Unix()
	r.token("ann", soon, 0)
	r.port.Gate.now = time.Now
	testkit.Eventually(t, "the renewed token is used", func() bool {
		if err := call(); err != nil {
			t.Fatal(err)
		}
		return r.whoami.last.Expires.Unix() == soon.Ends
	})
}

// On a unix socket the kernel identifies the caller.
func TestUnixPeer(t *testing.T) {
	r := newRealm(t, "unix:"+filepath.Join(t.TempDir(), "s"), false)
	if err := r.info(r.port.Address, DialConfig{}); err != nil || r.whoami.last.By != "unix" || r.whoami.last.Role != identity.RoleOperator {
		t.Errorf("%+v, %v", r.whoami.last, err)
	}
	uid := uint32(os.Geteuid() + 4711)
	if uid == 0 {
		uid = 1
	}
	ctx := peer.NewContext(t.Context(), &peer.Peer{AuthInfo: &link{channel: &identity.Channel{PeerUID: &uid}}})
	if _, err := r.port.Gate.check(ctx, service+"Executor/Info"); status.Code(err) != codes.Unauthenticated || !strings.Contains(err.Error(), "secret file") {
		t.Errorf("another user: %v", err)
	}
	wrong := Secret{1} // who shows a wrong one is refused, whoever it is
	if err := r.info(r.port.Address, DialConfig{Secret: &wrong}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("wrong secret: %v", err)
	}
}

// billServer records the tenants of Bill requests.
type billServer struct {
	UnimplementedManagerServer
	asked []string
}

func (b *billServer) Bill(_ context.Context, req *BillRequest) (*BillReply, error) {
	b.asked = append(b.asked, req.GetTenant())
	return &BillReply{}, nil
}

// A tenant sees its own bill; an operator sees all bills.
func TestBillsAreTheirTenants(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	bills := &billServer{}
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: r.in("secret"), IdentityDir: r.in("node")})
	if err != nil {
		t.Fatal(err)
	}
	RegisterManagerServer(p.Server, bills)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	defer p.Close(t.Context())
	ask := func(cfg DialConfig, tenant string) error {
		t.Helper()
		conn, err := Dial(p.Address, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = NewManagerClient(conn).Bill(t.Context(), &BillRequest{Tenant: tenant})
		return err
	}
	ann := DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}
	if err := errors.Join(ask(ann, ""), ask(ann, "ann"), ask(DialConfig{SecretFile: r.in("secret")}, ""), ask(DialConfig{SecretFile: r.in("secret")}, "ann")); err != nil {
		t.Error(err)
	}
	if err := ask(ann, "bob"); status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), `"bob"`) {
		t.Errorf("another's bill: %v", err)
	}
	if got := strings.Join(bills.asked, ","); got != "ann,ann,,ann" {
		t.Errorf("asked for %q", got)
	}
}

// Every method is in the table of roles. One that is missing would be for operators only.
func TestEveryMethodHasARole(t *testing.T) {
	known := map[string]bool{}
	for _, s := range []struct {
		name    string
		methods []string
	}{
		{Executor_ServiceDesc.ServiceName, methodsOf(&Executor_ServiceDesc)},
		{Manager_ServiceDesc.ServiceName, methodsOf(&Manager_ServiceDesc)},
	} {
		for _, m := range s.methods {
			known["/"+s.name+"/"+m] = true
			if roles["/"+s.name+"/"+m] == 0 {
				t.Errorf("gate.go says nothing of /%s/%s", s.name, m)
			}
		}
	}
	for _, m := range slices.Concat(slices.Collect(maps.Keys(roles)), slices.Collect(maps.Keys(forNodes))) {
		if !known[m] {
			t.Errorf("gate.go has %s, which there is not", m)
		}
	}
}

// Without an audit file, refusals are in the log. Admitted calls are not logged.
func TestAuditInTheLog(t *testing.T) {
	var out bytes.Buffer
	dir := t.TempDir()
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: filepath.Join(dir, "s"), Log: slog.New(slog.NewTextHandler(&out, nil))})
	if err != nil {
		t.Fatal(err)
	}
	RegisterExecutorServer(p.Server, &whoServer{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	r := &realm{t: t}
	if err := r.info(p.Address, DialConfig{SecretFile: filepath.Join(dir, "s")}); err != nil || out.Len() != 0 {
		t.Errorf("%v, %q", err, out.String())
	}
	if err := r.info(p.Address, DialConfig{Secret: &Secret{}}); err == nil {
		t.Error("no error")
	}
	p.Close(t.Context())
	if s := out.String(); !strings.Contains(s, "reason=wrong") || !strings.Contains(s, "level=WARN") {
		t.Errorf("log: %q", s)
	}
}

func methodsOf(d *grpc.ServiceDesc) (names []string) {
	for _, m := range d.Methods {
		names = append(names, m.MethodName)
	}
	for _, s := range d.Streams {
		names = append(names, s.StreamName)
	}
	return names
}

// Calls of methods that do not exist become one line of the audit log, whatever their names are. Otherwise an
// unauthenticated caller could fill the log, with no room left to tell other callers apart.
func TestUnknownMethodsAreOneLine(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	const calls = 500
	c, err := grpc.NewClient(r.port.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range calls {
		err := c.Invoke(t.Context(), fmt.Sprintf("/x/%d%s", i, strings.Repeat("y", 1000)), &InfoRequest{}, &InfoReply{})
		if status.Code(err) != codes.PermissionDenied && status.Code(err) != codes.Unauthenticated && status.Code(err) != codes.Unavailable {
			t.Fatal(err)
		}
	}
	r.port.Gate.Audit().Flush()
	if text := r.audit(); strings.Count(text, "\n") > 2 || len(text) > 4096 {
		t.Errorf("%d calls of methods that do not exist have made %d lines of %d bytes", calls, strings.Count(text, "\n"), len(text))
	}
}

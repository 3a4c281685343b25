package issuer

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

func TestMain(m *testing.M) { os.Exit(leakcheck.Run(m, nil)) }

// site is a cluster with a running issuer.
type site struct {
	t       *testing.T
	dir     string
	cluster *identity.Cluster
	at      Address
	audit   *identity.Audit

	mu  sync.Mutex
	now time.Time // zero: the real time
}

// start starts an issuer on loopback. change may change its configuration.
func start(t *testing.T, change func(*Config)) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	if err := identity.InitCluster(filepath.Join(s.dir, "cluster"), "test", 1000*time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.cluster, err = identity.OpenCluster(filepath.Join(s.dir, "cluster")); err != nil {
		t.Fatal(err)
	}
	if s.audit, err = identity.OpenAudit(identity.AuditConfig{Path: filepath.Join(s.dir, "audit")}); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Cluster: s.cluster, Hosts: []string{"127.0.0.1"}, NodeLife: 90 * time.Hour, Audit: s.audit, Now: s.clock}
	if change != nil {
		change(&cfg)
	}
	s.at = s.serve(cfg)
	t.Cleanup(s.audit.Close)
	return s
}

// serve starts another issuer.
func (s *site) serve(cfg Config) Address {
	s.t.Helper()
	server, err := NewServer(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	s.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Error(err)
		}
	})
	return AddressOf(l.Addr().String(), cfg.Cluster.CA())
}

func (s *site) clock() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now.IsZero() {
		return time.Now()
	}
	return s.now
}

func (s *site) setClock(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = now
}

// code makes an enrolment code.
func (s *site) code(hosts ...string) Code {
	s.t.Helper()
	secret, err := s.cluster.NewEnrolCode(hosts, time.Hour, time.Now())
	if err != nil {
		s.t.Fatal(err)
	}
	return Code{s.at, secret}
}

// join enrols a node in a directory of its name.
func (s *site) join(c Code, hosts ...string) error {
	_, err := Join(s.t.Context(), c, s.node(hosts[0]), hosts, false)
	return err
}

func (s *site) node(name string) string { return filepath.Join(s.dir, name) }

// audited returns the audit lines so far.
func (s *site) audited() string {
	s.audit.Flush()
	b, err := os.ReadFile(filepath.Join(s.dir, "audit"))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// refusedFor checks that an error is a refusal for a reason.
func refusedFor(t *testing.T, err error, want identity.Reason) {
	t.Helper()
	var e *identity.Error
	if !errors.As(err, &e) || e.Reason != want {
		t.Errorf("%v, want a refusal for the reason %s", err, want)
	}
}

// A node with a code gets a directory with which daemons start, once.
func TestEnrol(t *testing.T) {
	s := start(t, nil)
	code := s.code("node7", "192.0.2.7", "2001:db8::7")
	refusedFor(t, s.join(code, "node8"), identity.Forbidden)
	refusedFor(t, s.join(code, "node7", "192.0.2.8"), identity.Forbidden)
	refusedFor(t, s.join(code, "192.0.2.7", "node7"), identity.Forbidden) // another first name
	if err := s.join(code, "node7", "2001:DB8:0::7"); err != nil {
		t.Fatal(err)
	}
	n, err := identity.OpenNode(s.node("node7"), nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	f := n.Files(time.Now())
	if id := n.Hosts(time.Now()); id.Covers("node7:1") != nil || id.Covers("[2001:db8::7]:1") != nil || id.Covers("192.0.2.7:1") == nil || f.Page == nil {
		t.Errorf("the certificate is for %v", id.Hosts)
	}
	if left := time.Until(f.Certificate.Leaf.NotAfter); left > 90*time.Hour || left < 89*time.Hour {
		t.Errorf("the certificate ends in %v", left)
	}
	if err := s.cluster.CheckNode(f.Certificate.Leaf, time.Now()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"node.key", "page.key"} {
		if st, err := os.Stat(filepath.Join(s.node("node7"), name)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, st, err)
		}
	}
	nodes, err := s.cluster.Nodes()
	if err != nil || len(nodes) != 1 || nodes[0].Hosts[0] != "node7" || nodes[0].Serial != identity.NodeSerial(f.Certificate.Leaf) {
		t.Errorf("list of nodes: %v, %v", nodes, err)
	}
	if lines := s.audited(); !strings.Contains(lines, `"event":"enrol"`) || !strings.Contains(lines, nodes[0].Serial) || !strings.Contains(lines, "is for the node") {
		t.Errorf("audit: %s", lines)
	}
	os.RemoveAll(s.node("node7"))
	refusedFor(t, s.join(code, "node7"), identity.Replayed)
	// The cluster does not keep the secret.
	codes, err := os.ReadFile(filepath.Join(s.dir, "cluster", "codes"))
	secret, _ := json.Marshal(code.Secret[:])
	if err != nil || len(codes) == 0 || bytes.Contains(codes, bytes.Trim(secret, `"`)) {
		t.Errorf("codes: %s, %v", codes, err)
	}
	// A directory that has a certificate stays as it is, and the code is not used up.
	other := s.code()
	if err := s.join(other, "node9"); err != nil {
		t.Fatal(err)
	}
	third := s.code()
	if err := s.join(third, "node9"); !errors.Is(err, os.ErrExist) {
		t.Errorf("join again: %v", err)
	}
	if err := s.join(third, "node10"); err != nil {
		t.Error(err)
	}
}

// With a code that names no node, a node gets only names that no valid certificate has, and not that of the issuer.
func TestEnrolOtherNames(t *testing.T) {
	s := start(t, nil)
	if err := s.cluster.IssueNode(s.node("old"), []string{"service", "192.0.2.1"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	code := s.code()
	for _, hosts := range [][]string{{"service"}, {"SERVICE."}, {"new", "192.0.2.1"}, {"127.0.0.1"}} {
		refusedFor(t, s.join(code, hosts...), identity.Forbidden)
	}
	for _, hosts := range [][]string{{"*.example"}, {"a/b"}, {"a b"}, {"a:1"}, slices.Repeat([]string{"x"}, 65)} {
		if err := s.join(code, hosts...); err == nil {
			t.Errorf("%q are accepted", hosts)
		}
	}
	old, err := identity.ReadCertificate(s.node("old"))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedNode, ID: identity.NodeSerial(old)}); err != nil {
		t.Fatal(err)
	}
	if err := s.join(code, "service"); err != nil {
		t.Errorf("the name of a revoked node: %v", err)
	}
}

// Of many simultaneous uses of a code, one succeeds.
func TestEnrolAtOnce(t *testing.T) {
	s := start(t, nil)
	code := s.code("node7")
	errs := make(chan error, 8)
	for i := range cap(errs) {
		go func() {
			_, err := Join(t.Context(), code, s.node(fmt.Sprint(i)), []string{"node7"}, false)
			errs <- err
		}()
	}
	good := 0
	for range cap(errs) {
		if err := <-errs; err == nil {
			good++
		} else {
			refusedFor(t, err, identity.Replayed)
		}
	}
	if nodes, err := s.cluster.Nodes(); good != 1 || len(nodes) != 1 || err != nil {
		t.Errorf("%d succeeded: %v, %v", good, nodes, err)
	}
}

// Of many nodes that choose the same name at the same time, one gets it.
func TestEnrolSameName(t *testing.T) {
	s := start(t, nil)
	errs := make(chan error, 8)
	for i := range cap(errs) {
		code := s.code()
		go func() {
			_, err := Join(t.Context(), code, s.node(fmt.Sprint(i)), []string{"node7"}, false)
			errs <- err
		}()
	}
	good := 0
	for range cap(errs) {
		if err := <-errs; err == nil {
			good++
		} else {
			refusedFor(t, err, identity.Forbidden)
		}
	}
	if good != 1 {
		t.Errorf("%d nodes have the name", good)
	}
}

func TestEnrolExpired(t *testing.T) {
	s := start(t, nil)
	code := s.code()
	s.setClock(time.Now().Add(time.Hour + time.Second))
	refusedFor(t, s.join(code, "node7"), identity.Expired)
}

// Guessing is written to the audit log, and takes nothing from other users of the host.
func TestEnrolGuess(t *testing.T) {
	s := start(t, nil)
	code := s.code()
	guess := code
	for range 30 {
		guess.Secret[0]++
		refusedFor(t, s.join(guess, "node7"), identity.Wrong)
	}
	if err := s.join(code, "node7"); err != nil {
		t.Error(err)
	}
	if lines := s.audited(); !strings.Contains(lines, `"reason":"wrong"`) || strings.Contains(lines, "secret") {
		t.Errorf("audit: %s", lines)
	}
}

// A node may choose only names that belong to no other machine, and none that is another form of an address.
func TestEnrolChosenNames(t *testing.T) {
	s := start(t, func(c *Config) { c.Reserved = []string{"manager"} })
	code := s.code()
	for _, h := range []string{"localhost", "a.localhost.", "127.0.0.5", "::1", "0.0.0.0", "169.254.1.1", "::ffff:127.0.0.1", "010.0.0.1", "2130706433", "0x7f.1", "0x7f000001",
		"a.1", ".", "..", "-", "%", "<script>", "a=b", "node@7", "a..b", "Manager.", "127.0.0.1"} {
		if err := s.join(code, h); err == nil {
			t.Errorf("%q is accepted", h)
		}
	}
	var many []string
	for i := range 17 {
		many = append(many, fmt.Sprintf("node%d", i))
	}
	refusedFor(t, s.join(code, many...), identity.Forbidden)
	if err := s.join(code, "node-7.example.org.", "node_7", "192.0.2.7", "2001:db8::7"); err != nil {
		t.Error(err)
	}
	if nodes, err := s.cluster.Nodes(); err != nil || len(nodes) != 1 || nodes[0].Hosts[0] != "node-7.example.org" {
		t.Errorf("%v, %v", nodes, err)
	}
}

// request returns a node's request for a certificate.
func request(t *testing.T, host string) (q *identity.NodeRequest) {
	t.Helper()
	_, _ = identity.JoinNode(t.TempDir(), "", [32]byte{}, []string{host}, false, func(r *identity.NodeRequest) (*identity.NodeReply, error) {
		q = r
		return nil, os.ErrClosed
	}, time.Now())
	return q
}

// A node sends its code to nobody but the issuer whose certificate the code names.
func TestEnrolManInTheMiddle(t *testing.T) {
	s := start(t, nil)
	code := s.code()
	// the issuer of another cluster at the same address
	other := start(t, nil)
	wrong := code
	wrong.Target = other.at.Target
	refusedFor(t, s.join(wrong, "node7"), identity.Wrong)
	// the right cluster, but under a name that the issuer does not have
	wrong = code
	wrong.Target = strings.Replace(code.Target, "127.0.0.1", "localhost", 1)
	refusedFor(t, s.join(wrong, "node7"), identity.Wrong)
	// a node of the cluster
	if err := s.cluster.IssueNode(s.node("evil"), []string{"127.0.0.1"}, time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	_, pair, err := identity.NodeHosts(s.node("evil"))
	if err != nil {
		t.Fatal(err)
	}
	pair.Certificate = append(pair.Certificate, s.cluster.CA().Raw)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	read := make(chan int64, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		n, _ := io.Copy(io.Discard, conn)
		read <- n
	}()
	wrong = code
	wrong.Target = l.Addr().String()
	refusedFor(t, s.join(wrong, "node7"), identity.Wrong)
	if n := <-read; n != 0 {
		t.Errorf("the node sent %d bytes to a server that is not the issuer", n)
	}
	// The code was not seen by anybody, so it is still good.
	if err := s.join(code, "node7"); err != nil {
		t.Error(err)
	}
}

// Malformed, oversized and slow requests are refused or cut off, and the service answers others meanwhile.
func TestHostileRequests(t *testing.T) {
	s := start(t, nil)
	good := s.code()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	for _, q := range []struct {
		method, path, body string
		want               int
	}{
		{"POST", pathEnrol, "", 400},
		{"POST", pathEnrol, "{", 400},
		{"POST", pathEnrol, "null null", 400},
		{"POST", pathEnrol, `{"secret":"AAAA","unknown":1}`, 400},
		{"POST", pathEnrol, `{"secret":"AAAA","node":"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n","page":""}`, 401},
		{"POST", pathEnrol, `{"secret":"` + strings.Repeat("A", maxRequest) + `"}`, 400},
		{"GET", pathEnrol, "", 404},
		{"POST", pathRevoked, "", 404},
		{"GET", "/", "", 404},
		{"GET", "/../../etc/passwd", "", 404},
		{"POST", pathRenew, "{}", 401},
		{"GET", pathRevoked + "?serial=-1", "", 401},
	} {
		r, err := http.NewRequestWithContext(t.Context(), q.method, "https://"+s.at.Target+q.path, strings.NewReader(q.body))
		if err != nil {
			t.Fatal(err)
		}
		reply, err := client.Do(r)
		if err != nil {
			t.Errorf("%s %s: %v", q.method, q.path, err)
			continue
		}
		text, _ := io.ReadAll(reply.Body)
		reply.Body.Close()
		if reply.StatusCode != q.want || q.want == 400 && !bytes.Contains(text, []byte(`"reason":"malformed"`)) {
			t.Errorf("%s %s %.60q: %d %s", q.method, q.path, q.body, reply.StatusCode, text)
		}
	}
	// Requests whose bodies do not arrive do not occupy the service.
	var slow *tls.Conn
	for range 2 * atOnce {
		c, err := tls.Dial("tcp", s.at.Target, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "POST "+pathEnrol+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
		if slow == nil {
			slow = c
		}
	}
	err := s.join(s.code(), "node6")
	slow.SetReadDeadline(time.Now().Add(time.Millisecond))
	if _, rerr := slow.Read(make([]byte, 1)); err != nil || !errors.Is(rerr, os.ErrDeadlineExceeded) {
		t.Errorf("beside slow requests: %v, and the first of them ended before: %v", err, rerr)
	}
	// Connections that say nothing, or a byte of a handshake, neither hang the service nor keep others away.
	var silent []net.Conn
	for i := range 1100 { // more than the service keeps
		c, err := net.Dial("tcp", s.at.Target)
		if err != nil {
			break
		}
		defer c.Close()
		if i%2 == 0 {
			c.Write([]byte{0x16})
		}
		silent = append(silent, c)
	}
	if err := s.join(good, "node7"); err != nil {
		t.Errorf("beside %d silent connections: %v", len(silent), err)
	}
}

// A daemon has the issuer's revocation list soon after a change, also if the issuer was away before.
func TestFollow(t *testing.T) {
	s := start(t, nil)
	if err := s.join(s.code(), "node7"); err != nil {
		t.Fatal(err)
	}
	dir := s.node("node7")
	n, err := identity.OpenNode(dir, nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var said testkit.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		follow(ctx, dir, n, 10*time.Millisecond, slog.New(slog.NewTextHandler(&said, nil)))
	}()
	defer func() {
		cancel()
		<-done
	}()
	id := strings.Repeat("ab", 16)
	if _, _, err := s.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedToken, ID: id}); err != nil {
		t.Fatal(err)
	}
	has := func(id string) func() bool {
		return func() bool {
			revoked, err := n.Revoked.Has(identity.RevokedToken, id, time.Now())
			return revoked && err == nil
		}
	}
	testkit.Eventually(t, "the daemon has the list", has(id))
	// The address of another issuer, which cannot be reached.
	if err := os.WriteFile(filepath.Join(dir, "issuer"), []byte(Address{"127.0.0.1:1", s.at.CA}.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the daemon says why it has no newer list", func() bool { return strings.Contains(said.String(), "connection refused") })
	if err := os.WriteFile(filepath.Join(dir, "issuer"), []byte(s.at.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	other := strings.Repeat("cd", 16)
	if _, _, err := s.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedToken, ID: other}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the daemon has the next list", has(other))
}

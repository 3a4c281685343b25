package issuer

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// munged starts a munged with a key of its own and returns its socket.
func munged(t *testing.T) Munge {
	t.Helper()
	program, err := exec.LookPath("munged")
	if err != nil {
		if program = "/usr/sbin/munged"; exec.Command(program, "--version").Run() != nil {
			testkit.Lacks(t, "munged is not installed (make deps)")
		}
	}
	dir, err := os.MkdirTemp("", "munge") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(in("key"), []byte(strings.Repeat(fmt.Sprintf("%16x", time.Now().UnixNano()), 8)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--foreground", "--force", "--socket", in("s"), "--key-file", in("key"), "--pid-file", in("pid"), "--seed-file", in("seed"),
		"--log-file", in("log"), "--num-threads", "2")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-done
	})
	testkit.Eventually(t, "munged listens", func() bool {
		_, err := os.Stat(in("s"))
		return err == nil
	})
	return Munge{Socket: in("s")}
}

// asUser makes munge speak for an ordinary user: for this one, or as root for a user id that -U names. It returns the user.
func asUser(t *testing.T, uid uint32) *user.User {
	t.Helper()
	if os.Geteuid() != 0 {
		uid = uint32(os.Geteuid())
	} else {
		real, err := exec.LookPath("munge")
		if err != nil {
			testkit.Lacks(t, "munge is not installed (make deps)")
		}
		dir := t.TempDir()
		script := fmt.Sprintf("#!/bin/sh\nexec %s --uid=%d \"$@\"\n", real, uid)
		if err := os.WriteFile(filepath.Join(dir, "munge"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	}
	u, err := user.LookupId(strconv.Itoa(int(uid)))
	if err != nil {
		t.Fatal(err)
	}
	return u
}

const daemonUID, mailUID = 1, 8 // users that every system has

// serveUsers is start for an issuer that gives tokens.
func serveUsers(t *testing.T, m Munge, tenants string) *site {
	t.Helper()
	rules, err := identity.ParseTenants(tenants)
	if err != nil {
		t.Fatal(err)
	}
	return start(t, func(c *Config) { c.Munge, c.Tenants, c.TokenLife = m, rules, time.Hour })
}

// A user gets a token of the tenant that the rules name, renews it, and revokes it.
func TestTokenByMunge(t *testing.T) {
	m := munged(t)
	u := asUser(t, daemonUID)
	s := serveUsers(t, m, "nobody=none,"+u.Username+"=of-%u")
	cred, err := s.at.GetToken(t.Context(), m, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := cred.Claims
	if c.Tenant != "of-"+u.Username || c.UID == nil || fmt.Sprint(*c.UID) != u.Uid || c.Role != "tenant" || cred.Issuer != s.at.String() {
		t.Errorf("%+v from %q", c, cred.Issuer)
	}
	if left := time.Until(time.Unix(c.Ends, 0)); left > time.Hour || left < 59*time.Minute {
		t.Errorf("the token ends in %v", left)
	}
	v, err := identity.OpenVerifier(filepath.Join(s.dir, "cluster"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Check(cred.Token, time.Now()); err != nil {
		t.Error(err)
	}
	path := filepath.Join(s.dir, "token")
	made, err := RenewToken(t.Context(), m, path, cred)
	if err != nil || made.Claims.ID == c.ID || !made.Key.Equal(cred.Key) {
		t.Fatalf("renewed: %+v, %v", made, err)
	}
	if read, err := identity.LoadCredentials(path); err != nil || read.Claims.ID != made.Claims.ID || read.Issuer != cred.Issuer {
		t.Errorf("the file: %+v, %v", read, err)
	}
	if issued, err := s.cluster.Issued(); err != nil || len(issued) != 2 {
		t.Errorf("list of tokens: %v, %v", issued, err)
	}
	ids, err := s.at.RevokeTokens(t.Context(), m, c.ID)
	if err != nil || len(ids) != 1 || ids[0] != c.ID {
		t.Errorf("revoked %v, %v", ids, err)
	}
	if ids, err := s.at.RevokeTokens(t.Context(), m, ""); err != nil || len(ids) != 1 || ids[0] != made.Claims.ID {
		t.Errorf("revoked %v, %v", ids, err)
	}
	if ids, err := s.at.RevokeTokens(t.Context(), m, ""); err != nil || len(ids) != 0 {
		t.Errorf("revoked again %v, %v", ids, err)
	}
	if lines := s.audited(); strings.Count(lines, `"event":"token"`) != 2 || strings.Count(lines, `"event":"revoke"`) != 2 {
		t.Errorf("audit: %s", lines)
	}
	// The tokens of others stay.
	other := uint32(mailUID)
	token, _, err := s.cluster.SignToken(identity.Claims{Tenant: "x", UID: &other, Role: "tenant", Key: cred.Claims.Key}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := identity.ReadClaims(token)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.at.RevokeTokens(t.Context(), m, foreign.ID)
	refusedFor(t, err, identity.Forbidden)
}

// The issuer says why a user gets no token.
func TestTokenRefused(t *testing.T) {
	m := munged(t)
	u := asUser(t, daemonUID)
	s := serveUsers(t, m, "no-such-user=x")
	_, err := s.at.GetToken(t.Context(), m, nil)
	refusedFor(t, err, identity.Forbidden)
	if err == nil || !strings.Contains(err.Error(), u.Username) {
		t.Errorf("no tenant: %v", err)
	}
	s = serveUsers(t, m, "")
	_, err = s.at.GetToken(t.Context(), m, nil)
	refusedFor(t, err, identity.Forbidden)
	// munged is not running, here or there
	if _, err := s.at.GetToken(t.Context(), Munge{Socket: "/nonexistent"}, nil); err == nil || !strings.Contains(err.Error(), "munged") {
		t.Errorf("no munged here: %v", err)
	}
	s = serveUsers(t, Munge{Socket: "/nonexistent"}, u.Username+"=x")
	var refusal *identity.Error
	if _, err := s.at.GetToken(t.Context(), m, nil); err == nil || errors.As(err, &refusal) || !strings.Contains(err.Error(), "munged does not answer on the issuer's machine") {
		t.Errorf("no munged there: %v", err)
	}
	// another MUNGE key
	s = serveUsers(t, munged(t), u.Username+"=x")
	_, err = s.at.GetToken(t.Context(), m, nil)
	refusedFor(t, err, identity.Wrong)
	if err == nil || !strings.Contains(err.Error(), "another MUNGE key") {
		t.Errorf("another key: %v", err)
	}
}

// A credential is good on one connection, once, for one key and one purpose, and for the user who made it.
func TestTokenReplay(t *testing.T) {
	m := munged(t)
	u := asUser(t, daemonUID)
	s := serveUsers(t, m, u.Username+"=%u")
	pub, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	// send sends a credential, made for a key and a purpose on another connection or on the one that sends it, for the key pub.
	send := func(key ed25519.PublicKey, purpose string, elsewhere bool, change func(string) string) (credential string, err error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		c, err := s.at.connect(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		state := c.conn.ConnectionState()
		if elsewhere {
			d, err := s.at.connect(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer d.conn.Close()
			state = d.conn.ConnectionState()
		}
		bound, err := binding(&state)
		if err != nil {
			t.Fatal(err)
		}
		if credential, err = m.encode(ctx, mungePayload(purpose, bound, key)); err != nil {
			t.Fatal(err)
		}
		if change != nil {
			credential = change(credential)
		}
		return credential, c.ask(ctx, pathToken, tokenRequest{credential, pub}, &tokenReply{})
	}
	used, err := send(pub, purposeToken, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	for what, try := range map[string]func() (string, error){
		"used before":        func() (string, error) { return send(pub, purposeToken, false, func(string) string { return used }) },
		"of another session": func() (string, error) { return send(pub, purposeToken, true, nil) },
		"for another key":    func() (string, error) { return send(other, purposeToken, false, nil) },
		"to revoke":          func() (string, error) { return send(pub, purposeRevoke, false, nil) },
	} {
		_, err := try()
		if refusedFor(t, err, identity.Replayed); err == nil {
			t.Error(what)
		}
	}
	_, err = send(pub, purposeToken, false, func(string) string {
		c, err := m.encode(t.Context(), "a login elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		return c
	})
	refusedFor(t, err, identity.Wrong)
	for _, c := range []string{"", "MUNGE:", "MUNGE:AA AA:", "--help", "MUNGE:" + strings.Repeat("A", maxMunge) + ":", "MUNGE:AAAA:\n"} {
		_, err := send(pub, purposeToken, false, func(string) string { return c })
		refusedFor(t, err, identity.Malformed)
	}
}

// Each way in which unmunge fails has its reason, and an unmunge that hangs or prints nonsense ends.
func TestUnmungeFails(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	decode := func(script string) error {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "unmunge"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if strings.Contains(script, "sleep") {
			cancel()
		}
		_, _, err := (Munge{}).decode(ctx, "MUNGE:AAAA:")
		return err
	}
	for script, want := range map[string]identity.Reason{"exit 15": identity.Expired, "exit 16": identity.Skew, "exit 17": identity.Replayed,
		"exit 18": identity.Forbidden, "exit 14": identity.Wrong, "echo nonsense": identity.Wrong, `printf 'UID: 5\n\nNot hexadecimal'`: identity.Wrong} {
		refusedFor(t, decode(script), want)
	}
	for _, script := range []string{"exit 6", "exit 7", "exec sleep 1000", `printf 'UID: 9999999999\n\nab'`} {
		var e *identity.Error
		if err := decode(script); err == nil || errors.As(err, &e) {
			t.Errorf("%s: %v, want an error that is not a refusal", script, err)
		}
	}
}

// The requests of an address with many refusals are worked on one at a time. Those of nodes with a certificate are not delayed. All refusals are counted.
func TestBadRequestsOfAnAddress(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\necho x >>" + dir + "/runs\nexec sleep 1000\n"
	if err := os.WriteFile(filepath.Join(dir, "unmunge"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	now := time.Now() // it stands still, so that no refusal of the address is forgotten meanwhile
	s := start(t, func(c *Config) {
		c.Tenants, c.TokenLife, c.Now = identity.Tenants{{}}, time.Hour, func() time.Time { return now }
	})
	if err := s.join(s.code(), "node7"); err != nil {
		t.Fatal(err)
	}
	_, pair, err := identity.NodeHosts(s.node("node7"))
	if err != nil {
		t.Fatal(err)
	}
	for range badBurst {
		refusedFor(t, s.at.ask(t.Context(), nil, pathRenew, &identity.NodeRequest{}, &identity.NodeReply{}), identity.Missing)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	for range 3 {
		asked.Go(func() {
			_ = s.at.ask(ctx, nil, pathToken, tokenRequest{"MUNGE:AAAA:", make([]byte, ed25519.PublicKeySize)}, &tokenReply{})
		})
	}
	runs := func() int {
		b, _ := os.ReadFile(filepath.Join(dir, "runs"))
		return strings.Count(string(b), "x")
	}
	testkit.Eventually(t, "unmunge runs", func() bool { return runs() > 0 })
	for range 20 {
		if _, err := s.at.revoked(t.Context(), &pair, 0); err != nil {
			t.Fatal(err)
		}
	}
	if n := runs(); n != 1 {
		t.Errorf("unmunge runs %d times at once", n)
	}
	cancel()
	asked.Wait()
	counted := 0
	for line := range strings.Lines(s.audited()) {
		var e struct {
			Event, Reason string
			Count         int
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		if e.Event == identity.AuditRefused && e.Reason == string(identity.Missing) {
			counted += max(1, e.Count)
		}
	}
	if counted == 0 {
		t.Error("no refusal is in the audit log")
	}
}

// Requests that came before the refusals of their address, and still wait for room, are worked on one at a time, too.
func TestBadRequestsTogether(t *testing.T) {
	s, err := NewServer(Config{Cluster: start(t, nil).cluster, Hosts: []string{"127.0.0.1"}})
	if err != nil {
		t.Fatal(err)
	}
	working := make(chan struct{}, 2)
	working <- struct{}{}
	working <- struct{}{}
	r := httptest.NewRequest("POST", pathToken, nil)
	r.RemoteAddr, r.TLS = "192.0.2.7:55", &tls.ConnectionState{}
	var reading, running, most atomic.Int32
	var asked sync.WaitGroup
	for range 20 {
		asked.Go(func() {
			q := r.Clone(t.Context())
			q.Body = io.NopCloser(readFunc(func([]byte) (int, error) {
				reading.Add(1)
				return 0, io.EOF
			}))
			_, _, _ = s.work(q, working, func(*http.Request, []byte) (any, string, error) {
				if n := running.Add(1); n > most.Load() {
					most.Store(n)
				}
				runtime.Gosched()
				running.Add(-1)
				return nil, "", nil
			})
		})
	}
	testkit.Eventually(t, "all have been asked", func() bool { return reading.Load() == 20 })
	for range badBurst {
		s.bad.take("192.0.2.7", rate.Every(badEvery), badBurst, s.cfg.Now())
	}
	<-working
	<-working
	asked.Wait()
	if n := most.Load(); n != 1 {
		t.Errorf("%d at once", n)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(b []byte) (int, error) { return f(b) }

func TestHostOf(t *testing.T) {
	for remote, want := range map[string]string{"192.0.2.7:55": "192.0.2.7", "[::ffff:192.0.2.7]:55": "192.0.2.7", "[2001:db8:1:2:3:4:5:6]:55": "2001:db8:1:2::/64",
		"[fe80::1%eth0]:55": "fe80::/64", "nonsense": ""} {
		if got := hostOf(remote); got != want {
			t.Errorf("%s: %q, want %q", remote, got, want)
		}
	}
}

// Users whose requests are wrong, or who fill the service, take nothing from other users of their host or from nodes.
func TestUsersAndOthers(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\necho x >>" + dir + "/runs\nexec sleep 1000\n"
	if err := os.WriteFile(filepath.Join(dir, "unmunge"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	path := os.Getenv("PATH")
	t.Setenv("PATH", dir+":"+path)
	m := Munge{}
	var said testkit.Buffer
	s := start(t, func(c *Config) {
		c.Munge, c.Tenants, c.TokenLife, c.Log = m, identity.Tenants{{}}, time.Hour, slog.New(slog.NewTextHandler(&said, nil))
	})
	ctx, cancel := context.WithCancel(t.Context())
	var asked sync.WaitGroup
	for range 3 * usersAtOnce {
		asked.Go(func() {
			_ = s.at.ask(ctx, nil, pathToken, tokenRequest{"MUNGE:AAAA:", make([]byte, ed25519.PublicKeySize)}, &tokenReply{})
		})
	}
	runs := func() int {
		b, _ := os.ReadFile(filepath.Join(dir, "runs"))
		return strings.Count(string(b), "x")
	}
	testkit.Eventually(t, "unmunge runs", func() bool { return runs() == usersAtOnce })
	if err := s.join(s.code(), "node7"); err != nil { // while all users' requests hang
		t.Error(err)
	}
	cancel()
	asked.Wait()
	if n := runs(); n > 2*usersAtOnce {
		t.Errorf("unmunge ran %d times for callers that have gone", n)
	}
	if strings.Contains(said.String(), "level=ERROR") {
		t.Errorf("the log: %s", said.String())
	}
	t.Setenv("PATH", path)
	real := munged(t)
	u := asUser(t, daemonUID)
	s = serveUsers(t, real, u.Username+"=x")
	for range 30 {
		err := s.at.ask(t.Context(), nil, pathToken, tokenRequest{"MUNGE:AAAA:", make([]byte, ed25519.PublicKeySize)}, &tokenReply{})
		refusedFor(t, err, identity.Wrong)
	}
	if _, err := s.at.GetToken(t.Context(), real, nil); err != nil {
		t.Errorf("beside another user's wrong requests: %v", err)
	}
}

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// issuerSite is a cluster whose issuer runs as a command.
type issuerSite struct {
	t   *testing.T
	dir string
	env map[string]string
}

// newIssuerSite starts `rfaas cluster serve` with more flags.
func newIssuerSite(t *testing.T, flags ...string) *issuerSite {
	t.Helper()
	s := &issuerSite{t: t, dir: t.TempDir()}
	s.env = map[string]string{"RFAAS_CLUSTER_DIR": s.in("cluster"), "HOME": s.dir}
	s.good("cluster", "init")
	real := geteuid
	geteuid = func() int { return 1000 } // the issuer does not run as root
	t.Cleanup(func() { geteuid = real })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan int, 1)
	r, w := io.Pipe()
	go func() {
		args := append([]string{"cluster", "serve", "--listen", "127.0.0.1:0", "--hosts", "127.0.0.1"}, flags...)
		done <- Run(ctx, Env{Version: "v1", Getenv: func(k string) string { return s.env[k] }, Stdout: w, Stderr: w}, args)
		w.Close()
	}()
	t.Cleanup(func() {
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("the issuer ended with %d", code)
		}
	})
	var said bytes.Buffer
	for b := make([]byte, 4096); !strings.Contains(said.String(), "msg=ready "); {
		n, err := r.Read(b)
		if err != nil {
			t.Fatalf("the issuer: %v\n%s", err, said.String())
		}
		said.Write(b[:n])
	}
	go io.Copy(io.Discard, r)
	return s
}

func (s *issuerSite) in(name string) string { return filepath.Join(s.dir, name) }

func (s *issuerSite) run(args ...string) (int, string, string) {
	var out, errs bytes.Buffer
	code := Run(s.t.Context(), Env{Version: "v1", Getenv: func(k string) string { return s.env[k] }, Stdout: &out, Stderr: &errs}, args)
	return code, out.String(), errs.String()
}

// good runs a command that must succeed.
func (s *issuerSite) good(args ...string) string {
	s.t.Helper()
	code, out, errs := s.run(args...)
	if code != 0 {
		s.t.Fatalf("%q: %d %s", args, code, errs)
	}
	return out
}

// bad runs a command that must fail with a status and a text.
func (s *issuerSite) bad(status int, text string, args ...string) {
	s.t.Helper()
	if code, out, errs := s.run(args...); code != status || !strings.Contains(errs, text) {
		s.t.Errorf("%q: %d %s%s, want %d and %q", args, code, out, errs, status, text)
	}
}

// An administrator's way: a code on one machine, join on the other, renewal from a timer, and revocation by name.
func TestClusterJoin(t *testing.T) {
	var warned strings.Builder
	s := newIssuerSite(t, "--node-life", "100h")
	code := strings.TrimSpace(s.good("cluster", "enrol-code", "--node", "node7,192.0.2.7"))
	old := interfaceAddrs
	t.Cleanup(func() { interfaceAddrs = old })
	interfaceAddrs = func() ([]net.Addr, error) {
		return []net.Addr{&net.IPNet{IP: net.IPv4(127, 0, 0, 1)}, &net.IPNet{IP: net.ParseIP("fe80::1")}, &net.IPNet{IP: net.IPv4(192, 0, 2, 7)}}, nil
	}
	if out := s.good("cluster", "join", code, "--host", "node7,192.0.2.7", "--identity-dir", s.in("id")); !strings.Contains(out, "is for --identity-dir on node7,") ||
		!strings.Contains(out, " for node7, 192.0.2.7\n") || strings.Contains(out, "warning") {
		t.Error(out)
	}
	(&app{Program: command.Program{Env: command.Env{Stderr: &warned}}}).warnOfAddresses([]string{"node7", "192.0.2.8"})
	if text := warned.String(); !strings.Contains(text, "no address of this host (192.0.2.7)") || !strings.Contains(text, "--host node7,192.0.2.8,ADDRESS") {
		t.Errorf("the warning: %s", text)
	}
	if _, err := identity.OpenNode(s.in("id"), nil, nil, time.Now()); err != nil {
		t.Error(err)
	}
	s.bad(1, "already used", "cluster", "join", code, "--host", "node7", "--identity-dir", s.in("other"))
	s.bad(1, "--again", "cluster", "join", code, "--host", "node7", "--identity-dir", s.in("id"))
	s.bad(1, "malformed or incomplete", "cluster", "join", code[:len(code)-1], "--host", "node7", "--identity-dir", s.in("other"))
	s.bad(2, "want either a code", "cluster", "join")
	s.bad(2, "--ttl", "cluster", "enrol-code", "--ttl", "0s")
	s.bad(2, "--node is empty", "cluster", "enrol-code", "--node", "")
	s.bad(2, "node-life: 9m59s is not in 10m0s..10 years: daemons ask", "cluster", "serve", "--node-life", "9m59s")
	s.bad(2, "unknown flag", "cluster", "serve", "--nonsense")
	s.bad(1, "no cluster", "cluster", "serve", "--dir", s.in("none"))
	if out := s.good("cluster", "serve", "--help"); !strings.Contains(out, "RFAAS_ISSUER_LISTEN") {
		t.Error(out)
	}
	// --json, and a code from a file
	var made codeJSON
	if err := json.Unmarshal([]byte(s.good("cluster", "enrol-code", "--json")), &made); err != nil || made.Code == "" || len(made.Hosts) != 0 {
		t.Fatalf("%+v, %v", made, err)
	}
	if err := os.WriteFile(s.in("code"), []byte(made.Code+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.bad(1, "another node has a certificate", "cluster", "join", "--code-file", s.in("code"), "--host", "node7", "--identity-dir", s.in("id8"))
	var joined joinedJSON
	if err := json.Unmarshal([]byte(s.good("cluster", "join", "--code-file", s.in("code"), "--host", "node8", "--identity-dir", s.in("id8"), "--json")), &joined); err != nil ||
		joined.Hosts[0] != "node8" || joined.Ends == "" {
		t.Errorf("%+v, %v", joined, err)
	}
	if out := s.good("cluster", "renew", s.in("id"), s.in("id8")); !strings.Contains(out, s.in("id")+" is valid until") || strings.Contains(out, "renewed") ||
		!strings.Contains(out, "the issuer renews it from ") {
		t.Error(out)
	}
	var rows []nodeRow
	list := func() []nodeRow {
		t.Helper()
		if err := json.Unmarshal([]byte(s.good("cluster", "nodes", "--all", "--json")), &rows); err != nil {
			t.Fatal(err)
		}
		return rows
	}
	if rows := list(); len(rows) != 2 || rows[0].Hosts[0] != "node7" || rows[0].State != "valid" {
		t.Errorf("%+v", rows)
	}
	if out := s.good("cluster", "revoke", "--node", "node7", "--note", "stolen"); !strings.Contains(out, rows[0].Serial+" is revoked") {
		t.Error(out)
	}
	geteuid = func() int { return 0 }
	s.bad(1, "does not run as root", "cluster", "serve")
	if rows := list(); rows[0].State != "revoked" || rows[1].State != "valid" {
		t.Errorf("%+v", rows)
	}
	if out := s.good("cluster", "nodes"); strings.Contains(out, "node7") || !strings.Contains(out, "node8") {
		t.Error(out)
	}
	s.bad(1, "no valid certificate", "cluster", "revoke", "--node", "node7")
	s.bad(1, "revoked", "cluster", "renew", s.in("id"))
	s.good("cluster", "renew", s.in("id8")) // gets the new list
	if l, err := identity.OpenRevocations(s.in("id8")); err != nil || l.Serial != 2 {
		t.Errorf("%v, %v", l, err)
	}
}

// A user's way: get a token, have a daemon check it, renew it and revoke it, without any key of the cluster.
func TestTokenGet(t *testing.T) {
	testkit.FakeMunge(t)
	s := newIssuerSite(t, "--tenants", "1=physics")
	address, err := os.ReadFile(s.in("cluster/address"))
	if err != nil {
		t.Fatal(err)
	}
	s.good("cluster", "join", strings.TrimSpace(s.good("cluster", "enrol-code")), "--host", "node7", "--identity-dir", s.in("id"))
	p, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: s.in("secret"), IdentityDir: s.in("id")})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterManagerServer(p.Server, &stub{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(context.Background()) })
	cluster := s.env["RFAAS_CLUSTER_DIR"]
	s.env = map[string]string{"HOME": s.dir} // a user
	s.bad(2, "no issuer", "token", "get")
	s.bad(1, "HOST:PORT#HASH", "token", "get", "--issuer", "service:7466")
	s.env["RFAAS_ISSUER"] = strings.TrimSpace(string(address))
	if out := s.good("token", "get"); !strings.Contains(out, "tenant  physics") || !strings.Contains(out, "uid     1\n") {
		t.Error(out)
	}
	s.good("token", "get") // replaces one of the same origin
	s.bad(2, "no daemon to check the token", "token", "verify")
	s.env["RFAAS_MANAGER"] = "unix:" + s.in("socket")
	s.bad(2, "is a unix socket", "token", "verify")
	s.env["RFAAS_MANAGER"] = p.Address
	verified := func() tokenRow {
		t.Helper()
		var row tokenRow
		if err := json.Unmarshal([]byte(s.good("token", "verify", "--json")), &row); err != nil || row.Tenant != "physics" {
			t.Fatalf("%+v, %v", row, err)
		}
		return row
	}
	first := verified()
	s.good("token", "renew", s.in(".rfaas/token"))
	if second := verified(); second.ID == first.ID {
		t.Error("the token was not renewed")
	}
	if out := s.good("token", "revoke", "--mine", s.in(".rfaas/token")); !strings.Contains(out, "is revoked") {
		t.Error(out)
	}
	s.good("token", "revoke", "--mine")
	s.bad(1, "this user", "token", "revoke", "--mine", strings.Repeat("ab", 16))
	s.bad(2, "--mine", "token", "revoke")
	s.good("cluster", "renew", s.in("id")) // brings the list to the daemon
	testkit.Eventually(t, "the daemon refuses the token", func() bool {
		code, _, errs := s.run("token", "verify")
		return code == 1 && strings.Contains(errs, "revoked")
	})
	// A token of the administrator is not replaced.
	s.good("token", "issue", "--dir", cluster, "--tenant", "ann", "--out", s.in("ann"))
	s.bad(1, "a token that an administrator issued", "token", "get", "--out", s.in("ann"))
}

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/identity"
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
	s := newIssuerSite(t, "--node-life", "100h")
	code := strings.TrimSpace(s.good("cluster", "enrol-code", "--node", "node7,192.0.2.7"))
	if out := s.good("cluster", "join", code, "--host", "node7", "--identity-dir", s.in("id")); !strings.Contains(out, "is for --identity-dir on node7") {
		t.Error(out)
	}
	if _, err := identity.OpenNode(s.in("id"), nil, nil, time.Now()); err != nil {
		t.Error(err)
	}
	s.bad(1, "already used", "cluster", "join", code, "--host", "node7", "--identity-dir", s.in("other"))
	s.bad(1, "--again", "cluster", "join", code, "--host", "node7", "--identity-dir", s.in("id"))
	s.bad(1, "malformed or incomplete", "cluster", "join", code[:len(code)-1], "--host", "node7", "--identity-dir", s.in("other"))
	s.bad(2, "want a code", "cluster", "join")
	s.bad(2, "--ttl", "cluster", "enrol-code", "--ttl", "0s")
	s.bad(2, "node-life", "cluster", "serve", "--node-life", "1s")
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
	if out := s.good("cluster", "renew", s.in("id"), s.in("id8")); !strings.Contains(out, s.in("id")+" is valid until") || strings.Contains(out, "renewed") {
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

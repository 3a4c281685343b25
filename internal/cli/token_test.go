package cli

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// Identity directories whose certificates expire soon are renewed with the same names. Other directories are not changed.
func TestClusterRenew(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		getenv := func(k string) string { return map[string]string{"RFAAS_CLUSTER_DIR": in("cluster")}[k] }
		code := Run(t.Context(), Env{Version: "v1", Getenv: getenv, Stdout: &out, Stderr: &errs}, append([]string{"cluster"}, args...))
		return code, out.String(), errs.String()
	}
	good := func(args ...string) string {
		t.Helper()
		code, out, errs := run(args...)
		if code != 0 || errs != "" {
			t.Fatalf("%q: %d %s", args, code, errs)
		}
		return out
	}
	certificate := func(name string) *x509.Certificate {
		t.Helper()
		c, err := identity.ReadCertificate(in(name))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	good("init")
	good("node", "192.0.2.7", "node7", "node7.example", "2001:db8::7", "--for", "480h", "--out", in("soon"))
	good("node", "node8", "--out", in("later"))
	good("node", "node9", "--for", "480h", "--out", in("bad"))
	good("revoke", in("bad"))
	soon, later, bad := certificate("soon"), certificate("later"), certificate("bad")
	if out := good("renew", in("soon"), in("later"), "--within", "240h"); strings.Contains(out, "renewed") || !certificate("soon").Equal(soon) {
		t.Errorf("within ten days: %s", out)
	}
	out := good("renew", in("soon"), in("later"))
	if !strings.Contains(out, in("soon")+" is renewed, and valid until ") || !strings.Contains(out, in("later")+" is valid until ") {
		t.Errorf("within two months: %s", out)
	}
	made := certificate("soon")
	if made.NotAfter.Before(time.Now().Add(365*day)) || made.Equal(soon) || made.Subject.CommonName != soon.Subject.CommonName ||
		!slices.Equal(made.DNSNames, soon.DNSNames) || !slices.EqualFunc(made.IPAddresses, soon.IPAddresses, net.IP.Equal) {
		t.Errorf("%v %v %v until %v, before %v %v %v", made.Subject, made.DNSNames, made.IPAddresses, made.NotAfter, soon.Subject, soon.DNSNames, soon.IPAddresses)
	}
	if _, err := identity.OpenNode(in("soon"), nil, nil, time.Now()); err != nil {
		t.Errorf("a daemon with the new directory: %v", err)
	}
	if !certificate("later").Equal(later) {
		t.Error("a certificate that is good for a year was renewed")
	}
	// If one directory cannot be renewed, the others still are.
	good("node", "192.0.2.7", "--for", "1h", "--out", in("soon"))
	if code, out, errs := run("renew", in("bad"), in("none"), in("soon")); code != 1 || !strings.Contains(errs, "is revoked") || !strings.Contains(errs, in("none")) ||
		!strings.Contains(out, in("soon")+" is renewed") || !certificate("bad").Equal(bad) {
		t.Errorf("a revoked one and a missing one: %d\n%s%s", code, out, errs)
	}
	good("init", "--dir", in("other"))
	if code, _, errs := run("renew", in("soon"), "--dir", in("other"), "--within", "8000h"); code != 1 || !strings.Contains(errs, "not of this cluster") {
		t.Errorf("another cluster: %d %s", code, errs)
	}
	if err := identity.InitCluster(in("old"), "old", 48*time.Hour, time.Now()); err != nil {
		t.Fatal(err)
	}
	good("node", "node1", "--dir", in("old"), "--out", in("last"))
	if code, _, errs := run("renew", in("last"), "--dir", in("old")); code != 1 || !strings.Contains(errs, "the cluster's own certificate ends") {
		t.Errorf("a cluster that ends: %d %s", code, errs)
	}
	if code, _, errs := run("renew", in("soon"), "--within", "100h", "--for", "10h"); code != 2 || !strings.Contains(errs, "--for 10h0m0s") {
		t.Errorf("bad usage: %d %s", code, errs)
	}
}

// From nothing to a command that is let in over TLS, and out again.
func TestClusterAndTokens(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	env := map[string]string{"RFAAS_CLUSTER_DIR": in("cluster"), "HOME": in("home")}
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	good := func(args ...string) string {
		t.Helper()
		code, out, errs := run(args...)
		if code != 0 {
			t.Fatalf("%q: %d %s", args, code, errs)
		}
		return out
	}
	bad := func(code int, text string, args ...string) {
		t.Helper()
		if c, out, errs := run(args...); c != code || !strings.Contains(errs, text) || out != "" {
			t.Errorf("%q: %d, %q, %q; want %d and %q", args, c, out, errs, code, text)
		}
	}
	bad(1, "rfaas cluster init", "token", "issue", "--tenant", "ann")
	good("cluster", "init", "--name", "here")
	bad(1, "file exists", "cluster", "init")
	good("cluster", "node", "localhost", "--out", in("node"))
	bad(2, "requires at least 1 arg", "cluster", "node")
	bad(1, `"a b"`, "cluster", "node", "a b")
	bad(2, "tenant", "token", "issue")
	bad(2, "--uid 0", "token", "issue", "--tenant", "ann", "--uid", "0")
	bad(2, "-1h0m0s", "token", "issue", "--tenant", "ann", "--for", "-1h")
	bad(1, `"king"`, "token", "issue", "--tenant", "ann", "--role", "king", "--out", in("x"))
	bad(2, `"a/b" is not a file name`, "token", "issue", "--tenant", "a/b")
	if out := good("token", "issue", "--tenant", "ann", "--uid", "1001", "--out", in("ann")); !strings.Contains(out, "1001") {
		t.Errorf("issued: %s", out)
	}
	bad(1, "file already exists", "token", "issue", "--tenant", "ann", "--out", in("ann"))
	var row tokenRow
	if err := json.Unmarshal([]byte(good("token", "show", in("ann"), "--json")), &row); err != nil || row.Tenant != "ann" || *row.UID != 1001 || row.Role != "tenant" || row.Expired {
		t.Errorf("%+v, %v", row, err)
	}
	good("token", "verify", in("ann"))
	good("token", "verify", in("ann"), "--dir", in("node"))
	bad(1, "ann", "token", "show", in("ann")+"x")
	bad(1, "no token", "token", "show", in("cluster/ca.key"))

	p, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: in("secret"), IdentityDir: in("node")})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterManagerServer(p.Server, &stub{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	_, port, err := net.SplitHostPort(p.Address)
	if err != nil {
		t.Fatal(err)
	}
	env["RFAAS_MANAGER"] = "LOCALHOST:" + port // as if it were another node's name
	bad(1, identity.TokenFileEnv, "executors")
	if out := good("executors", "--token-file", in("ann")); !strings.Contains(out, "n1") {
		t.Errorf("executors: %s", out)
	}
	env[identity.TokenFileEnv] = in("ann")
	good("executors")

	before := row.ID
	good("token", "renew", in("ann"), "--for", "1s")
	if err := json.Unmarshal([]byte(good("token", "show", in("ann"), "--json")), &row); err != nil || row.ID == before {
		t.Errorf("renewed: %+v, %v", row, err)
	}
	good("token", "renew", in("ann"))
	if err := json.Unmarshal([]byte(good("token", "show", "--json")), &row); err != nil {
		t.Fatal(err)
	}
	bad(1, "neither", "token", "revoke", "nonsense")
	good("token", "revoke", in("ann"), "--note", "has left")
	bad(1, "revoked", "token", "verify", in("ann"))
	bad(1, "revoked", "token", "renew", in("ann"))
	good("token", "revoke", before)
	good("cluster", "revoke", in("node"), "--note", "stolen")
	bad(1, "neither", "cluster", "revoke", "nonsense")
	bad(1, "already exists", "cluster", "revoked", "--new")
	bad(2, "--serial 0", "cluster", "revoked", "--new", "--serial", "0")
	var list revokedList
	if err := json.Unmarshal([]byte(good("cluster", "revoked", "--json")), &list); err != nil || list.Serial != 4 || len(list.Entries) != 3 ||
		list.Entries[0] != (revokedRow{"token", row.ID, "has left"}) || list.Entries[1].ID != before || list.Entries[2].Kind != "node" || list.Entries[2].Note != "stolen" {
		t.Errorf("list: %+v, %v", list, err)
	}
	if out := good("cluster", "revoked", "--dir", in("node")); !strings.Contains(out, "serial  1\n") {
		t.Errorf("the node's list: %s", out)
	}
	b, err := os.ReadFile(in("cluster/revoked"))
	if err == nil {
		err = identity.WriteFile(in("node/revoked"), b, 0o600, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the revoked token is refused", func() bool { // the list is looked at once a second
		code, _, errs := run("executors")
		return code == 1 && strings.Contains(errs, "revoked")
	})
}

// The tokens of a tenant are listed, and revoked together.
func TestTokenList(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	run := func(args string) (int, string, string) {
		var out, errs bytes.Buffer
		getenv := func(k string) string { return map[string]string{"RFAAS_CLUSTER_DIR": in("cluster")}[k] }
		code := Run(t.Context(), Env{Version: "v1", Getenv: getenv, Stdout: &out, Stderr: &errs}, strings.Fields(args))
		return code, out.String(), errs.String()
	}
	expect := func(args string, code int, text string) {
		t.Helper()
		if c, out, errs := run(args); c != code || !strings.Contains(out+errs, text) {
			t.Errorf("%s: code %d, %s%s; want %d and %q", args, c, out, errs, code, text)
		}
	}
	list := func(args string, states ...string) (rows []issuedRow) {
		t.Helper()
		_, out, errs := run("token list --json " + args)
		if err := json.Unmarshal([]byte(out), &rows); err != nil {
			t.Fatalf("%v: %s%s", err, out, errs)
		}
		var got []string
		for _, r := range rows {
			got = append(got, r.Tenant+" "+r.state())
		}
		if !slices.Equal(got, states) {
			t.Errorf("token list %s: %v, want %v", args, got, states)
		}
		return rows
	}
	expect("cluster init", 0, "")
	expect("token list", 0, "no tokens")
	expect("token issue --tenant ann --uid 1001 --out "+in("ann"), 0, "ann")
	expect("token issue --tenant ann --out "+in("ann"), 1, "file already exists")
	expect("token issue --tenant bob --out "+in("bob"), 0, "bob")
	expect("token renew "+in("bob"), 0, "bob")
	rows := list("", "ann valid", "bob valid", "bob valid")
	expect("token list --tenant ann", 0, rows[0].ID+"  ann     1001  tenant  "+rows[0].Ends+"  valid")
	expect("token revoke --tenant bob --note left", 0, "token "+rows[2].ID+" is revoked")
	list("", "ann valid")
	list("--all --tenant bob", "bob revoked", "bob revoked")
	expect("token revoke --tenant bob", 1, `no valid token of tenant "bob" is listed`)
	expect("token revoke --tenant eve", 1, `no valid token of tenant "eve" is listed`)
	expect("token revoke", 2, "want the id or the file of a token, or --tenant")
	expect("token revoke x --tenant ann", 2, "want the id or the file of a token, or --tenant")
	expect("token verify "+in("bob"), 1, "revoked")
	f, err := os.OpenFile(in("cluster/issued"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("garbage\n"); err != nil {
		t.Fatal(err)
	}
	f.Close()
	expect("token list", 1, "line 4 is damaged")
	expect("token list", 1, rows[0].ID)
	expect("token revoke --tenant ann", 1, "token "+rows[0].ID+" is revoked") // and says that others may be missing
}

// A cluster from before signed lists gets a list with one command, including its earlier revocations. Until then
// everything is refused.
func TestListsOfBefore(t *testing.T) {
	dir := t.TempDir()
	cluster := filepath.Join(dir, "cluster")
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return map[string]string{"RFAAS_CLUSTER_DIR": cluster}[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	if code, _, errs := run("cluster", "init"); code != 0 {
		t.Fatal(errs)
	}
	id, path := strings.Repeat("0a", 16), filepath.Join(cluster, "revoked")
	for _, old := range []string{"# ids of revoked tokens\n" + id + " ann has left\n\n", ""} {
		if err := os.WriteFile(path, []byte(old), 0o644); err != nil {
			t.Fatal(err)
		}
		if old == "" {
			os.Remove(path)
		}
		for _, args := range [][]string{{"cluster", "node", "n", "--out", filepath.Join(dir, "n")}, {"token", "revoke", id}, {"cluster", "revoked"}} {
			if code, _, errs := run(args...); code != 1 || !strings.Contains(errs, "rfaas cluster revoked --new") {
				t.Errorf("%q with the list %q: %d, %s", args, old, code, errs)
			}
		}
		if code, out, errs := run("cluster", "revoked", "--new", "--serial", "5"); code != 0 || !strings.Contains(out, "serial 5") {
			t.Errorf("%d, %s, %s", code, out, errs)
		}
		if _, out, errs := run("cluster", "revoked"); strings.Contains(out, id) != (old != "") || !strings.Contains(out, "serial") {
			t.Errorf("taken over from %q: %s, %s", old, out, errs)
		}
	}
}

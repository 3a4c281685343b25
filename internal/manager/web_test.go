package manager

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/identity"
)

// What people see by HTTP: executors, leases, tenants, bills and metrics as they are; nothing can be changed.
func TestHTTP(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	w.stop()
	w.withLimits(t, "ann=10")
	a, b := w.executor(1), w.executor(2)
	a.info.Leases = 1
	a.write(3)
	b.info.Draining = true
	b.write(4)
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	k := accounting.Key{Incarnation: incarnationOf(a.info), Lease: 1<<63 + 5}
	ok(a.WriteHead(0, accounting.CellHead{Key: k, Tenant: "ann", Began: w.clock.now}))
	ok(a.Charge(0, accounting.Use{}, accounting.Use{3_600_000_000, 2048, 0, 0, 7}))
	r, err := w.client.Limit(t.Context(), &control.LimitRequest{Tenant: "ann"})
	ok(err)
	_, err = a.Reserve(r.GetRecord(), 1)
	ok(err)
	ok(a.Hold(0, r.GetRecord(), 1))
	use := make([]uint64, 8)
	use[0] = 5_000_000
	settle := func(final bool) {
		t.Helper()
		_, err := w.client.Settle(t.Context(), &control.SettleRequest{Entries: []*control.AccountEntry{{Incarnation: k.Incarnation[:], Lease: 6, Tenant: "<b>bob",
			Node: "n", AsOfNs: w.clock.now.UnixNano(), Use: use, Final: final}}})
		ok(err)
	}
	settle(false)
	w.harvest()
	tokenFile := filepath.Join(t.TempDir(), "http-token")
	s, err := w.openHTTP("127.0.0.1:0", tokenFile, nil, false)
	ok(err)
	defer closeHTTP(s)
	text, err := os.ReadFile(tokenFile)
	ok(err)
	token := "Bearer " + strings.TrimSpace(string(text))
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	get := func(path string) (int, http.Header, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+s.Address+path, nil)
		ok(err)
		if token != "" {
			req.Header.Set("Authorization", token)
		}
		r, err := client.Do(req)
		ok(err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		ok(err)
		return r.StatusCode, r.Header, string(b)
	}
	var state State
	code, head, body := get("/api/v1/state")
	if err := json.Unmarshal([]byte(body), &state); code != 200 || err != nil || head.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %s", code, err, body)
	}
	if len(state.Executors) != 2 || state.Executors[0].State != "open" || state.Executors[0].FreeCores != 3 || state.Executors[0].Leases != 1 ||
		state.Executors[1].State != "draining" || state.Executors[0].Node != "n" || fmt.Sprint(state.Executors[0].Providers) != "[shm verbs]" {
		t.Errorf("%+v", state.Executors)
	}
	if len(state.Leases) != 2 || state.Leases[1].Lease != "9223372036854775813" || state.Leases[1].CoreSeconds != 3600 || state.Leases[1].GiBSeconds != 0.002 ||
		state.Leases[1].Calls != "7" || state.Leases[0].Tenant != "<b>bob" || state.Leases[0].CoreSeconds != 5 {
		t.Errorf("%+v", state.Leases)
	}
	if len(state.Tenants) != 2 || state.Tenants[1] != (TenantState{"ann", 1, true, 10, 1}) || state.Tenants[0].Limited {
		t.Errorf("%+v", state.Tenants)
	}
	if len(state.Bills) != 2 || state.Currency != "EUR" || state.Bills[1].Tenant != "ann" || !strings.HasPrefix(state.Bills[1].Amount, "1") || state.Trouble != "" {
		t.Errorf("%+v", state)
	}
	if code, _, body := get("/api/v1/nodes/n"); code != 200 || !strings.Contains(body, `"node":"n"`) {
		t.Errorf("nodes/n: %d %s", code, body)
	}
	for _, name := range []string{"executors", "leases", "tenants", "bills"} {
		var list []map[string]any
		if code, _, body := get("/api/v1/" + name); code != 200 || json.Unmarshal([]byte(body), &list) != nil || len(list) != 2 {
			t.Errorf("%s: %d %s", name, code, body)
		}
	}
	_, _, body = get("/metrics")
	for _, line := range []string{`rfaas_manager_executors{state="open"} 1`, `rfaas_manager_executors{state="draining"} 1`, `rfaas_manager_executors{state="silent"} 0`,
		"rfaas_manager_cores 8", "rfaas_manager_free_cores 7", "rfaas_manager_leases 1", "rfaas_manager_ledger_ok 1", "rfaas_manager_refused_charges_total 0", "rfaas_manager_changes_total 3", "go_goroutines"} {
		if !strings.Contains(body, "\n"+line) {
			t.Errorf("no %q in the metrics", line)
		}
	}
	if strings.Contains(body, "bob") || strings.Contains(body, "ann\"") {
		t.Error("the metrics name a tenant")
	}
	// Without the token, or with a wrong one, nothing names a tenant: neither a lease nor a bill.
	right := token
	for _, token = range []string{"", "Bearer ", "Bearer " + strings.Repeat("0", 64), right + "0", strings.TrimPrefix(right, "Bearer "), "Basic " + right} {
		for _, name := range []string{"state", "leases", "tenants", "bills", "nodes/n"} {
			if code, head, body := get("/api/v1/" + name); code != http.StatusUnauthorized || strings.Contains(body, "bob") || head.Get("WWW-Authenticate") == "" {
				t.Errorf("%s for %q: %d %s", name, token, code, body)
			}
		}
		for _, path := range []string{"/", "/page/page.js", "/metrics", "/healthz", "/api/v1/executors", "/api/v1/nodes"} {
			if code, _, body := get(path); code != 200 || strings.Contains(body, "bob") || strings.Contains(body, `"ann"`) {
				t.Errorf("%s for %q: %d %s", path, token, code, body)
			}
		}
	}
	token = right
	// A lease that is over is not shown any more, an executor that is silent is.
	settle(true)
	w.clock.now = w.clock.now.Add(time.Minute)
	w.table.swept = time.Time{}
	w.table.sweep()
	fresh, err := w.state()
	ok(err)
	if len(fresh.Leases) != 0 || fresh.Executors[0].State != "silent" || len(fresh.Bills) != 2 {
		t.Errorf("%+v", fresh)
	}
	// No request changes anything, and a browser may load nothing from elsewhere.
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Address+"/api/v1/state", nil)
		ok(err)
		r, err := client.Do(req)
		ok(err)
		r.Body.Close()
		if r.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, r.StatusCode)
		}
	}
	code, head, body = get("/")
	if code != 200 || !strings.HasPrefix(head.Get("Content-Type"), "text/html") || !strings.Contains(head.Get("Content-Security-Policy"), "default-src 'none'") || !strings.Contains(body, `id="main"`) {
		t.Errorf("%d %v %.100s", code, head, body)
	}
	for _, m := range regexp.MustCompile(`(?:href|src)="([^"]+)"`).FindAllStringSubmatch(body, -1) {
		if code, _, text := get(m[1]); code != 200 || text == "" {
			t.Errorf("the page's %s: %d", m[1], code)
		}
	}
	if code, _, _ := get("/nothing"); code != 404 {
		t.Errorf("/nothing: %d", code)
	}
	err = fs.WalkDir(page, "page", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(path, "page/vendor/") {
			return err
		}
		b, err := page.ReadFile(path)
		for _, outside := range []string{"http:", "https:", "url(", "@import", "innerHTML"} {
			if strings.Contains(string(b), outside) {
				t.Errorf("%s has %s", path, outside)
			}
		}
		return err
	})
	ok(err)
	if _, err := w.openHTTP("nowhere", tokenFile, nil, false); err == nil {
		t.Error("an address that is none")
	}
	ok(os.Chmod(tokenFile, 0o644))
	if _, err := w.openHTTP("127.0.0.1:0", tokenFile, nil, false); err == nil {
		t.Error("a token that everybody can read")
	}
}

// Only this user reaches a unix socket, which asks for nothing; from afar a node with an identity is asked by HTTPS, with the token.
func TestHTTPPlaces(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	dir := t.TempDir()
	tokenFile := filepath.Join(dir, "http-token")
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	status := func(tr *http.Transport, url, token string) int {
		t.Helper()
		tr.DisableKeepAlives = true
		req, err := http.NewRequestWithContext(t.Context(), "GET", url, nil)
		ok(err)
		req.Header.Set("Authorization", "Bearer "+token)
		r, err := (&http.Client{Timeout: 10 * time.Second, Transport: tr}).Do(req)
		ok(err)
		r.Body.Close()
		return r.StatusCode
	}
	s, err := w.openHTTP("unix:"+filepath.Join(dir, "http"), tokenFile, nil, false)
	ok(err)
	defer closeHTTP(s)
	local := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, "http"))
	}}
	if code := status(local, "http://rfaas/api/v1/bills", ""); code != 200 {
		t.Errorf("unix socket: %d", code)
	}
	if _, err := os.Stat(tokenFile); err == nil {
		t.Error("a unix socket made a token")
	}
	newCluster(t, dir, map[string][]string{"n": {"127.0.0.1"}})
	node, err := identity.OpenNode(filepath.Join(dir, "n"), nil, nil, time.Now())
	ok(err)
	certificate, err := pageCertificate(&config.Manager{}, node, w.log)
	ok(err)
	far, err := w.openHTTP("0.0.0.0:0", tokenFile, certificate, false)
	ok(err)
	defer closeHTTP(far)
	_, port, err := net.SplitHostPort(far.Address)
	ok(err)
	text, err := os.ReadFile(tokenFile)
	ok(err)
	ca, err := os.ReadFile(filepath.Join(dir, "cluster", "page-ca.crt"))
	ok(err)
	roots, err := identity.Pool(ca)
	ok(err)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}}
	for token, want := range map[string]int{"": http.StatusUnauthorized, strings.TrimSpace(string(text)): 200} {
		if code := status(tr, "https://127.0.0.1:"+port+"/api/v1/bills", token); code != want {
			t.Errorf("HTTPS with a token of %d bytes: %d", len(token), code)
		}
	}
}

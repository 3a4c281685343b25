package observe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/internal/quota"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, address string) (*Server, func(path string) (int, string)) {
	t.Helper()
	s, err := Open(address, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.Serve()
	target := s.Address
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		if path, ok := strings.CutPrefix(target, "unix:"); ok {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
		return new(net.Dialer).DialContext(ctx, "tcp", target)
	}}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		s.Close(ctx)
	})
	return s, func(path string) (int, string) {
		t.Helper()
		r, err := client.Get("http://daemon" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(b)
	}
}

func TestEndpoints(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "unix:" + filepath.Join(t.TempDir(), "http")} {
		s, get := open(t, address)
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "rfaas_test_total", Help: "of this test"})
		s.Metrics.MustRegister(c)
		c.Add(7)
		expect := func(path string, code int, text string) {
			t.Helper()
			if gotCode, got := get(path); gotCode != code || !strings.Contains(got, text) {
				t.Errorf("%s%s: %d %q, want %d %q", address, path, gotCode, got, code, text)
			}
		}
		expect("/healthz", 200, "ok")
		expect("/readyz", 503, "starting")
		s.SetReady(nil)
		expect("/readyz", 200, "ok")
		s.SetReady(errors.New("draining until noon"))
		expect("/readyz", 503, "draining until noon")
		var broken error
		s.Check("journal", func() error { return broken })
		expect("/healthz", 200, "ok")
		broken = errors.New("disk is full")
		expect("/healthz", 503, "journal: disk is full")
		expect("/metrics", 200, "rfaas_test_total 7")
		expect("/metrics", 200, "process_open_fds")
		expect("/nothing", 404, "")
	}
}

// Without an address everything may be called and there is no listener.
func TestNoAddress(t *testing.T) {
	s, err := Open("", nil, slog.New(slog.DiscardHandler))
	if err != nil || s.Address != "" {
		t.Fatalf("%q, %v", s.Address, err)
	}
	s.Serve()
	s.SetReady(nil)
	s.Close(t.Context())
}

func TestBadAddress(t *testing.T) {
	for _, address := range []string{"nonsense", "127.0.0.1:99999", "192.0.2.1:1"} {
		if _, err := Open(address, nil, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), strings.TrimSuffix(address, ":1")) {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// Refusals by limits are shown by kind, and never by tenant.
func TestCountRefusals(t *testing.T) {
	gate := control.NewGate(nil, quota.Limits{quota.Leases: 1})
	ctx := control.WithCaller(t.Context(), &identity.Identity{Tenant: "somebody", Role: identity.RoleTenant})
	for gate.Take(ctx, quota.Leases, 1) == nil {
	}
	s, get := open(t, "127.0.0.1:0")
	CountRefusals(s.Metrics, gate)
	_, text := get("/metrics")
	for _, line := range []string{`rfaas_quota_refused_total{kind="leases"} 1`, `rfaas_quota_refused_total{kind="log_lines"} 0`} {
		if !strings.Contains(text, line) {
			t.Errorf("%s is missing", line)
		}
	}
	if strings.Contains(text, "somebody") {
		t.Error("a tenant is named")
	}
}

// A daemon with an expired certificate or an invalid revocation list is not ready. /healthz reports it too, but with
// status 200, since a restart does not help. The metrics show it in advance.
func TestIdentityOfTheDaemon(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	then := time.Now().Add(-2 * time.Hour)
	if err := identity.InitCluster(in("c"), "test", 24*time.Hour, then); err != nil {
		t.Fatal(err)
	}
	cluster, err := identity.OpenCluster(in("c"))
	if err != nil {
		t.Fatal(err)
	}
	issue := func(life time.Duration) *identity.Node {
		t.Helper()
		if err := cluster.IssueNode(in("n"), []string{"n"}, life, then); err != nil {
			t.Fatal(err)
		}
		n, err := identity.OpenNode(in("n"), nil, nil, then)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	shows := func(what string, n *identity.Node, ready int, text string) func(string) (int, string) {
		t.Helper()
		s, get := open(t, "127.0.0.1:0")
		WatchIdentity(s, n)
		s.SetReady(nil)
		for path, want := range map[string]int{"/readyz": ready, "/healthz": 200} {
			if code, body := get(path); code != want || !strings.Contains(body, text) {
				t.Errorf("%s: %s: %d %q", what, path, code, body)
			}
		}
		return get
	}
	good := issue(5 * time.Hour)
	get := shows("good", good, 200, "ok\n")
	ends := good.Ends(time.Now())
	_, metrics := get("/metrics")
	for _, want := range []string{fmt.Sprintf("rfaas_certificate_expiry_timestamp_seconds{certificate=\"node\"} %s\n", strconv.FormatFloat(float64(ends["node"].Unix()), 'g', -1, 64)),
		"rfaas_certificate_expiry_timestamp_seconds{certificate=\"page\"} ", "rfaas_revocation_list_serial 1\n"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %q", want)
		}
	}
	shows("expired", issue(time.Hour), 503, "the node certificate in "+in("n")+" expired at ")
	n := issue(5 * time.Hour)
	if err := os.WriteFile(in("n/revoked"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	get = shows("no list", n, 503, "revocation list "+in("n/revoked")+": the file is empty")
	if _, metrics := get("/metrics"); !strings.Contains(metrics, "rfaas_revocation_list_serial 0\n") {
		t.Error("the empty list has a serial number")
	}
}

package executor

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
)

// Metrics show what happens to leases, readiness shows a drain, and systemd is notified of both.
func TestMetrics(t *testing.T) {
	s := testSettings(t)
	dir := t.TempDir()
	s.AddressFile, s.HTTPListen = filepath.Join(dir, "address"), "unix:"+filepath.Join(dir, "http")
	s.Cores, s.Memory, s.Grace = config.Cores{Count: 1}, 1<<30, time.Minute
	notify := filepath.Join(dir, "notify")
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	t.Setenv("NOTIFY_SOCKET", notify)
	hear := func(want string) {
		t.Helper()
		told.SetReadDeadline(time.Now().Add(testBound))
		b := make([]byte, 64)
		if n, err := told.Read(b); err != nil || string(b[:n]) != want {
			t.Errorf("systemd heard %q, %v, want %q", b[:n], err, want)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- serveWith(ctx, context.Background(), s, &fakeSpawner{t: t, cores: map[int]*fakeWorker{}}, Handover{}, slog.New(slog.DiscardHandler))
	}()
	hear("READY=1")
	web := &http.Client{Timeout: testBound, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(s.HTTPListen, "unix:"))
		}}}
	get := func(path string) string {
		t.Helper()
		r, err := web.Get("http://executor" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.Status + "\n" + string(b)
	}
	expect := func(path string, lines ...string) {
		t.Helper()
		text := get(path)
		for _, line := range lines {
			if !strings.Contains(text, "\n"+line+"\n") {
				t.Errorf("%s does not have %q:\n%s", path, line, text)
			}
		}
	}
	expect("/readyz", "ok")
	expect("/metrics", `rfaas_executor_worker_starts_total{path="cached"} 0`, "rfaas_executor_free_cores 1")

	b, err := os.ReadFile(s.AddressFile)
	if err != nil {
		t.Fatal(err)
	}
	address := strings.TrimSpace(string(b))
	conn, err := control.Dial(address, control.DialConfig{SecretFile: s.SecretFile})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c := control.NewExecutorClient(conn)
	n := &node{t: t}
	n.sum = upload(t, c, compile(t, "int f(void) { return 1; }", "-shared", "-fPIC"))
	lease := func() *control.LeaseReply {
		t.Helper()
		l, err := c.Lease(t.Context(), n.request(1))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := lease()
	expect("/metrics", `rfaas_executor_worker_starts_total{path="cold"} 1`, `rfaas_executor_worker_start_seconds_count{path="cold"} 1`,
		"rfaas_executor_free_cores 0", "rfaas_executor_leases 1", `rfaas_executor_uploads_total{known="false"} 1`)
	if _, err := c.Release(t.Context(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	wrong, err := control.Dial(address, control.DialConfig{Secret: &control.Secret{}})
	if err != nil {
		t.Fatal(err)
	}
	defer wrong.Close()
	if _, err := control.NewExecutorClient(wrong).Info(t.Context(), &control.InfoRequest{}); err == nil {
		t.Error("a wrong secret is taken")
	}
	expect("/metrics", `rfaas_executor_leases_ended_total{how="released"} 1`, `rfaas_credentials_refused_total{reason="wrong"} 1`,
		"rfaas_executor_free_cores 1")
	if text := get("/metrics"); strings.Contains(text, "alice") { // the tenant of n.request
		t.Error("metrics name a tenant")
	}
	lease() // which keeps the drain from ending at once
	stop()
	hear("STOPPING=1")
	if err := <-done; err != nil {
		t.Errorf("serve: %v", err)
	}
	expectGone := func() bool { _, err := web.Get("http://executor/readyz"); return err != nil }
	if !expectGone() {
		t.Error("it answers after its end")
	}
}

// A client that connects, leases and releases as it should causes no log line above debug.
func TestNormalUseIsQuiet(t *testing.T) {
	n := newNode(t)
	before := len(n.log.String())
	conn := n.dial()
	c := control.NewExecutorClient(conn)
	if _, err := c.Info(n.ctx(), &control.InfoRequest{ProtocolVersion: control.ProtocolVersion}); err != nil {
		t.Fatal(err)
	}
	l, err := c.Lease(n.ctx(), n.request(2))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(n.ctx())
	s, err := c.Events(ctx, &control.EventsRequest{LeaseId: l.GetLeaseId()})
	if err == nil {
		_, err = s.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Renew(n.ctx(), &control.RenewRequest{LeaseId: l.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Release(n.ctx(), &control.ReleaseRequest{LeaseId: l.GetLeaseId()}); err != nil {
		t.Fatal(err)
	}
	cancel()
	conn.Close()
	eventually(t, "all cores free", func() bool { return n.free() == 4 })
	said := n.log.String()[before:]
	if !strings.Contains(said, "level=DEBUG") {
		t.Errorf("it does not even say that at debug:\n%s", said)
	}
	for line := range strings.Lines(said) {
		if !strings.Contains(line, "level=DEBUG") {
			t.Errorf("it says %s", line)
		}
	}
}

package manager

import (
	"bytes"
	"context"
	"errors"
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

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/etcd"
	"github.com/rfaas-go/rfaas/internal/identity"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Errors in the settings of a standby show when it starts, although it needs etcd and the leadership before it uses most of them.
func TestStandbyChecksItsSettings(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	start := func(args ...string) error {
		args = append([]string{"--listen", "127.0.0.1:0", "--secret-file", filepath.Join(dir, "secret"), "--etcd-endpoints", "127.0.0.1:1", "--providers", "shm",
			"--http-token-file", filepath.Join(dir, "token"), "--state-dir", filepath.Join(dir, "state")}, args...)
		s, err := config.LoadManager(args, nil, &bytes.Buffer{}, "test")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		standing := make(chan struct{})
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, s, slog.New(slog.NewTextHandler(&onText{"standing by", standing}, nil))) }()
		select {
		case err := <-ended:
			return err
		case <-standing:
			cancel()
			return <-ended
		case <-time.After(20 * time.Second):
			return errors.New("nothing happened")
		}
	}
	if err := start(); err != nil {
		t.Fatalf("right settings: %v", err)
	}
	for _, wrong := range [][]string{{"--listen", taken.Addr().String()}, {"--state-dir", file}, {"--identity-dir", filepath.Join(dir, "none")},
		{"--http-listen", taken.Addr().String()}, {"--http-listen", "127.0.0.1:0", "--http-token-file", dir}, {"--secret-file", file},
		{"--http-listen", "127.0.0.1:0", "--http-cert", file, "--http-key", file}, {"--audit-file", filepath.Join(file, "audit")},
		{"--providers", "tcp", "--data-listen", "192.0.2.1:0", "--allow-plaintext"}, {"--etcd-ca", file}} {
		if err := start(wrong...); err == nil {
			t.Errorf("%v: the standby waits", wrong)
		}
	}
}

// The HTTP port of a standby shows when its certificate expires, and follows the identity directory.
func TestStandbyWatchesItsIdentity(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	cluster := newCluster(t, dir, map[string][]string{"localhost": {"localhost"}})
	s, err := config.LoadManager([]string{"--listen", "127.0.0.1:0", "--secret-file", in("secret"), "--etcd-endpoints", "127.0.0.1:1", "--providers", "shm",
		"--http-listen", "unix:" + in("http"), "--http-token-file", in("token"), "--identity-dir", in("localhost")}, nil, &bytes.Buffer{}, "test")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, s, slog.New(slog.DiscardHandler)) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var d net.Dialer
	web := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", in("http"))
		}}}
	read := func(path string) string {
		r, err := web.Get("http://standby" + path)
		if err != nil {
			return ""
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return string(b)
	}
	expiry := func() string {
		_, value, _ := strings.Cut(read("/metrics"), "\nrfaas_certificate_expiry_timestamp_seconds{certificate=\"node\"} ")
		value, _, _ = strings.Cut(value, "\n")
		return value
	}
	testkit.Eventually(t, "the standby shows its certificate", func() bool { return expiry() != "" })
	first := expiry()
	if err := cluster.IssueNode(in("localhost"), []string{"localhost"}, 30*time.Minute, time.Now()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the standby shows its new certificate", func() bool { return expiry() != first })
	certificate, err := identity.ReadCertificate(in("localhost"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, err := cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedNode, ID: identity.NodeSerial(certificate)})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := identity.WriteFile(in("localhost/revoked"), text, 0o644, false); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the standby reports that its certificate is revoked", func() bool { return strings.Contains(read("/readyz"), "identity: ") })
}

// onText closes a channel when a line contains a text.
type onText struct {
	text  string
	found chan struct{}
}

func (o *onText) Write(b []byte) (int, error) {
	if strings.Contains(string(b), o.text) {
		close(o.found)
	}
	return len(b), nil
}

// A resource manager refuses another ledger than the one that it has used before.
func TestKnownLedger(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	for range 2 {
		if err := knownLedger(dir, "one"); err != nil {
			t.Fatal(err)
		}
	}
	if err := knownLedger(dir, "two"); err == nil || !strings.Contains(err.Error(), "remove "+filepath.Join(dir, ledgerFile)) {
		t.Errorf("another ledger: %v", err)
	}
	if err := os.Truncate(filepath.Join(dir, ledgerFile), 0); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(knownLedger(dir, "one"), knownLedger(dir, "one")); err != nil {
		t.Errorf("an empty file: %v", err)
	}
	if err := knownLedger(dir, "two"); err == nil {
		t.Error("the id was not stored after an empty file")
	}
	if err := knownLedger("", "two"); err != nil {
		t.Error(err)
	}
}

// With a replica, charges are written in batches, unless an executor waits for many receipts or has gone.
func TestChargesAreBatched(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	w.accounts.batch = batchEvery
	x := w.executor(1)
	charged := func(when, want string) {
		t.Helper()
		if err := w.harvestWithin(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		totals, err := w.accounts.ledger.Totals("ann", time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		sum := totals["ann"]
		if got := sum.Of(0).String(); got != want {
			t.Errorf("%s: the ledger has %s units, want %s", when, got, want)
		}
	}
	x.charge(0, "ann", 10)
	charged("at first", "10")
	more := func(from, to uint64) {
		t.Helper()
		if err := x.Charge(0, accounting.Use{from}, accounting.Use{to}); err != nil {
			t.Fatal(err)
		}
	}
	more(10, 20)
	charged("soon after", "10")
	w.clock.now = w.clock.now.Add(batchEvery)
	charged("with the next batch", "20")
	for i := 1; i < x.Cells(); i++ {
		head := accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(x.info), Lease: uint64(100 + i)}, Tenant: "ann", Began: w.clock.now,
			Ended: w.clock.now, Final: true}
		if err := errors.Join(x.Charge(i, accounting.Use{}, accounting.Use{1}), x.WriteHead(i, head)); err != nil {
			t.Fatal(err)
		}
	}
	charged("when the cells are full", strconv.Itoa(19+x.Cells()))
	more(20, 25)
	if got := w.charged("ann"); got != strconv.Itoa(24+x.Cells()) {
		t.Errorf("the bill has %s units", got)
	}
}

// A resource manager that may not be the leader any more shows no bills.
func TestFormerLeaderShowsNoBills(t *testing.T) {
	w := newWorld(t, dataplane.SHM, 8)
	w.executor(1).charge(0, "ann", 10)
	w.harvest()
	w.cfg.Confirmed = func() error { return etcd.ErrLost }
	if r, err := w.client.Bill(t.Context(), &control.BillRequest{}); control.ClassOf(err) != control.ClassConnection || !strings.Contains(err.Error(), "not the leader") {
		t.Errorf("a bill: %v, %v", r, err)
	}
	if s, err := w.state(); err != nil || len(s.Bills) > 0 || !strings.Contains(s.Trouble, "not the leader") || len(s.Executors) != 1 {
		t.Errorf("the page: %+v, %v", s, err)
	}
}

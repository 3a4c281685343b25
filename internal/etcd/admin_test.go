package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/tests/etcdtest"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// A prefix without a ledger, or with another one, has no leader. A leader whose keys are removed ends, and no new ledger begins.
func TestPrefixWithoutLedger(t *testing.T) {
	server := etcdtest.Start(t, etcdtest.Options{})
	c := open(t, server.Endpoint, "first")
	if _, err := c.Lead(t.Context()); !errors.Is(err, ErrNoLedger) || !strings.Contains(err.Error(), "rfaas ledger etcd init") {
		t.Fatalf("an empty prefix: %v", err)
	}
	id, err := c.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Init(t.Context()); err == nil || !strings.Contains(err.Error(), id) {
		t.Errorf("the second ledger: %v", err)
	}
	known := ""
	other := open(t, server.Endpoint, "other")
	other.cfg.Known = func(id string) error { known = id; return errors.New("not mine") }
	if _, err := other.Lead(t.Context()); !errors.Is(err, ErrOtherLedger) || known != id {
		t.Errorf("another ledger, with id %q: %v", known, err)
	}
	l := lead(t, c)
	led := ledger(t, l)
	if err := charge(t, led, "ann", 10, 5, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.Delete(t.Context(), c.cfg.Prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	<-l.Lost()
	if err := charge(t, led, "ann", 10, 6, 0); err == nil {
		t.Error("a ledger whose records were removed accepts charges")
	}
	if _, err := open(t, server.Endpoint, "next").Lead(t.Context()); !errors.Is(err, ErrNoLedger) {
		t.Errorf("after all keys were removed: %v", err)
	}
}

// sums returns what tenants have used.
func sums(t *testing.T, led *accounting.Ledger) map[string]accounting.Total {
	t.Helper()
	totals, err := led.Totals("", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return totals
}

// A ledger moves from a file to etcd and back. All sums stay exact, and each step leaves only one ledger.
func TestImportAndExport(t *testing.T) {
	server := etcdtest.Start(t, etcdtest.Options{})
	c := open(t, server.Endpoint, "admin")
	path := filepath.Join(t.TempDir(), "ledger")
	file, err := accounting.OpenLedger(path, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for i, tenant := range []string{"ann", "bob/ä", "ann"} {
		if err := file.Merge(t.Context(), began.Add(time.Hour), accounting.Entry{Key: accounting.Key{Incarnation: [16]byte{9}, Lease: uint64(i + 1)}, Tenant: tenant,
			Began: began, AsOf: began.Add(time.Duration(i) * time.Minute), Final: true, Use: accounting.Use{1<<63 + 7, 1 << 62, uint64(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := charge(t, file, "carl", 1000, 3, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Claim(t.Context(), began, accounting.Claim{Incarnation: [16]byte{9}, Owner: "node9"}); err != nil {
		t.Fatal(err)
	}
	want := sums(t, file)
	// An import that ends early leaves no ledger, and can be repeated.
	broken := errors.New("broken")
	if _, err := c.Import(t.Context(), "x", func(add func(accounting.Change) error) error {
		return errors.Join(file.Records(add), broken)
	}); !errors.Is(err, broken) {
		t.Fatalf("%v", err)
	}
	if _, err := c.Lead(t.Context()); !errors.Is(err, ErrNoLedger) {
		t.Errorf("after half an import: %v", err)
	}
	lost := loseAnswers(c)
	d, err := c.Import(t.Context(), "the-id", file.Records)
	if err != nil || d.Leases != 1003 {
		t.Fatalf("%+v, %v", d, err)
	}
	l := lead(t, c)
	led := ledger(t, l)
	if got := sums(t, led); !equal(got, want) {
		t.Errorf("in etcd: %v, want %v", got, want)
	}
	if owner, _, err := led.Owner([16]byte{9}); owner != "node9" || err != nil {
		t.Errorf("owner %q, %v", owner, err)
	}
	if err := charge(t, led, "carl", 1000, 4, 1); err != nil { // the same leases
		t.Fatal(err)
	}
	want = sums(t, led)
	back := filepath.Join(t.TempDir(), "ledger")
	export := func() error {
		return c.Export(t.Context(), back, func(load func(func(accounting.Change) error) error, take func() (bool, error)) error {
			_, err := accounting.CreateLedger(back, load, take)
			return err
		})
	}
	if err := export(); err == nil || !strings.Contains(err.Error(), "stop all of them") {
		t.Errorf("an export while a leader serves: %v", err)
	}
	l.Resign()
	if err := export(); err != nil {
		t.Fatal(err)
	}
	if *lost != 2 {
		t.Errorf("%d answers were lost, want those of the import and of the export", *lost)
	}
	if left, err := filepath.Glob(back + ".*.new"); len(left) > 0 || err != nil {
		t.Errorf("the export has left %v, %v", left, err)
	}
	exported, err := accounting.OpenLedger(back, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer exported.Close()
	if got := sums(t, exported); !equal(got, want) {
		t.Errorf("exported: %v, want %v", got, want)
	}
	if _, err := c.Lead(t.Context()); !errors.Is(err, ErrNoLedger) || !strings.Contains(err.Error(), back) {
		t.Errorf("after the export: %v", err)
	}
	if _, err := c.Import(t.Context(), "again", exported.Records); err != nil { // over what the export has left
		t.Fatal(err)
	}
	if id, d, err := c.Digest(t.Context()); id != "again" || d.Leases != 1003 || err != nil {
		t.Errorf("%q, %+v, %v", id, d, err)
	}
	if got := sums(t, ledger(t, lead(t, c))); !equal(got, want) {
		t.Errorf("imported again: %v, want %v", got, want)
	}
}

// loseAnswers loses the answer of each transaction that begins or ends a ledger. It returns how many were lost.
func loseAnswers(c *Cluster) *int {
	l := &losing{KV: c.client.KV, key: c.idKey()}
	c.client.KV = l
	return &l.lost
}

type losing struct {
	clientv3.KV
	key  string
	lost int
}

func (l *losing) Txn(ctx context.Context) clientv3.Txn { return &losingTxn{Txn: l.KV.Txn(ctx), l: l} }

type losingTxn struct {
	clientv3.Txn
	l    *losing
	lose bool
}

func (x *losingTxn) If(c ...clientv3.Cmp) clientv3.Txn {
	x.Txn = x.Txn.If(c...)
	return x
}

func (x *losingTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	x.lose = slices.ContainsFunc(ops, func(op clientv3.Op) bool { return string(op.KeyBytes()) == x.l.key && !op.IsGet() })
	x.Txn = x.Txn.Then(ops...)
	return x
}

func (x *losingTxn) Commit() (*clientv3.TxnResponse, error) {
	r, err := x.Txn.Commit()
	if x.lose && err == nil && r.Succeeded {
		x.l.lost++
		return nil, errors.New("the answer is lost")
	}
	return r, err
}

func equal(a, b map[string]accounting.Total) bool {
	for tenant := range b {
		if a[tenant] != b[tenant] {
			return false
		}
	}
	return len(a) == len(b) && len(b) > 0
}

// When etcd's quota is used up, writes fail with the reason and the remedy, and the leader stays. After the remedy, writes succeed.
func TestQuotaIsUsedUp(t *testing.T) {
	server := start(t, "--quota-backend-bytes", "1000000")
	c := open(t, server.Endpoint, "first")
	l := lead(t, c)
	led := ledger(t, l)
	if err := charge(t, led, "ann", 10, 5, 0); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the quota is used up", func() bool {
		_, err := c.client.Put(t.Context(), "/other", strings.Repeat("x", 100_000))
		return err != nil
	})
	if err := charge(t, led, "ann", 10, 6, 0); !errors.Is(err, ErrFull) {
		t.Errorf("a write: %v", err)
	}
	asked := *l.confirmed.Load()
	testkit.Eventually(t, "the leadership is confirmed again", func() bool { return l.confirmed.Load().After(asked) })
	if err := c.Trouble(); !errors.Is(err, ErrFull) || !c.Full() {
		t.Errorf("trouble: %v, full: %v", err, c.Full())
	}
	r, err := c.client.Delete(t.Context(), "/other")
	if err == nil {
		_, err = c.client.Compact(t.Context(), r.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err == nil {
		_, err = c.client.Defragment(t.Context(), server.Endpoint)
	}
	if err == nil {
		_, err = c.client.AlarmDisarm(t.Context(), &clientv3.AlarmMember{})
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := charge(t, led, "ann", 10, 7, 0); err != nil || c.Trouble() != nil || c.Full() {
		t.Errorf("after the remedy: %v; trouble: %v, full: %v", err, c.Trouble(), c.Full())
	}
	if got := total(t, led, "ann"); got != 70 {
		t.Errorf("%d units, want 70", got)
	}
	testkit.Eventually(t, "the size of the database is known", func() bool { return c.Bytes() > 0 })
}

// The right certificates give access to etcd with TLS. A process with wrong certificates fails when it starts.
func TestTLS(t *testing.T) {
	server := etcdtest.Start(t, etcdtest.Options{TLS: true})
	otherCA, otherCert, otherKey := etcdtest.Certificates(t, t.TempDir())
	for _, k := range []struct{ ca, cert, key, want string }{
		{server.CA, server.Cert, server.Key, ""},
		{otherCA, server.Cert, server.Key, "unknown authority"},
		{server.CA, otherCert, otherKey, "certificate"},
		{server.CA, "", "", "certificate"},
	} {
		secure, err := TLS(k.ca, k.cert, k.key)
		if err != nil {
			t.Fatal(err)
		}
		c := openWith(t, server.Endpoint, secure)
		err = c.Probe(t.Context())
		if k.want != "" {
			if err == nil || !strings.Contains(err.Error(), k.want) {
				t.Errorf("the wrong certificates %q, %q: %v, want %q", k.ca, k.cert, err, k.want)
			}
			continue
		}
		if err == nil {
			_, err = c.Init(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := charge(t, ledger(t, lead(t, c)), "ann", 10, 5, 0); err != nil {
			t.Error(err)
		}
	}
	secure, err := TLS(server.CA, "", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := openWith(t, "127.0.0.1:1", secure).Probe(t.Context()); err != nil {
		t.Errorf("a member that is down: %v", err)
	}
	for _, files := range [][3]string{{"none"}, {server.Key}, {server.CA, server.Cert, otherKey}} {
		if _, err := TLS(files[0], files[1], files[2]); err == nil {
			t.Errorf("no error for %v", files)
		}
	}
}

func openWith(t *testing.T, endpoint string, secure *tls.Config) *Cluster {
	t.Helper()
	c, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/test", Name: "test", Log: slog.New(slog.DiscardHandler), TLS: secure})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// A caller's own time limit is not taken for trouble with etcd, and what was written although the caller has left counts once.
func TestImpatientCaller(t *testing.T) {
	server := start(t)
	c := open(t, server.Endpoint, "first")
	led := ledger(t, lead(t, c))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := led.Merge(ctx, began, accounting.Entry{Key: accounting.Key{Lease: 1}, Tenant: "ann", Began: began, AsOf: began, Use: accounting.Use{3}}); err == nil {
		t.Error("a cancelled write succeeded")
	}
	if err := c.Trouble(); err != nil {
		t.Errorf("trouble: %v", err)
	}
	if err := charge(t, led, "ann", 1, 5, 1); err != nil {
		t.Fatal(err)
	}
}

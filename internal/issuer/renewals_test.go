package issuer

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// Renewals retry sooner at first and then less often, log each reason once, and count.
func TestRenewals(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "issuer"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var asked []time.Duration
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		r := NewRenewals(dir, nil, func(context.Context) (time.Time, bool, error) {
			asked = append(asked, time.Since(began))
			switch n := len(asked); {
			case n <= 8:
				return time.Time{}, false, errors.New("the issuer is away")
			case n == 12:
				cancel()
			}
			return time.Now().Add(90 * 24 * time.Hour), len(asked) == 9, nil
		}, slog.New(slog.NewTextHandler(&log, nil)))
		r.Run(ctx)
		for i, at := range asked[1:] {
			want := nextRenewal
			if i < 8 {
				want = min(retryRenewal<<i, nextRenewal)
			}
			if took := at - asked[i]; took < want/2 || took > want*3/2 {
				t.Errorf("attempt %d after %v, want about %v", i+2, took, want)
			}
		}
		if asked[0] > 2*firstRenewal {
			t.Errorf("the first attempt after %v", asked[0])
		}
		if done, failed := r.Counts(); done != 1 || failed != 8 {
			t.Errorf("%d renewed, %d failed", done, failed)
		}
		if text := log.String(); strings.Count(text, "the issuer is away") != 1 || strings.Count(text, "renewed the certificate") != 1 {
			t.Errorf("log:\n%s", text)
		}
	})
}

// A short certificate that two daemons share is renewed before it expires, also if the issuer is away for a while. The issuer's rate permits that.
func TestRenewalsOfShortLife(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "issuer"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, life := range []time.Duration{10 * time.Minute, 30 * time.Minute, 75 * time.Minute, 90 * time.Minute, 6 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			var rates limits
			ends, renewals, away := time.Now().Add(life), 0, 0
			ctx, cancel := context.WithCancel(t.Context())
			renew := func(context.Context) (time.Time, bool, error) {
				mu.Lock()
				defer mu.Unlock()
				left := time.Until(ends)
				switch {
				case left <= 0 && ctx.Err() == nil:
					t.Errorf("the certificate of %v has expired after %d renewals", life, renewals)
					cancel()
				case left > (life+identity.Leeway)*2/3:
					return ends, false, nil
				case away < 3:
					away++
					return ends, false, errors.New("the issuer is away")
				case !rates.take("node", rate.Every(renewRate(life)), renewBurst, time.Now()):
					t.Errorf("the rate does not permit renewal %d of a certificate of %v", renewals, life)
					cancel()
				}
				away, ends = 0, time.Now().Add(life)
				if renewals++; renewals == 300 {
					cancel()
				}
				return ends, true, nil
			}
			var daemons sync.WaitGroup
			for range 2 {
				daemons.Go(func() { NewRenewals(dir, nil, renew, slog.New(slog.DiscardHandler)).Run(ctx) })
			}
			daemons.Wait()
		})
	}
}

// Nothing is asked for a directory that did not come from an issuer, until it does.
func TestRenewalsWithoutIssuer(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		ctx, cancel := context.WithCancel(t.Context())
		r := NewRenewals(dir, nil, func(context.Context) (time.Time, bool, error) {
			asked++
			cancel()
			return time.Time{}, false, nil
		}, slog.New(slog.DiscardHandler))
		go r.Run(ctx)
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		if asked > 0 {
			t.Error("asked for a directory without an issuer")
		}
		if err := os.WriteFile(filepath.Join(dir, "issuer"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * nextRenewal)
		synctest.Wait()
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
	})
	NewRenewals("", nil, nil, nil).Run(t.Context()) // returns
}

// A file that cannot be read is logged and counted, so that an administrator learns of it before the certificate expires.
func TestRenewalsOfUnreadableDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "issuer"), 0o755); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		r := NewRenewals(dir, nil, func(context.Context) (time.Time, bool, error) {
			t.Error("asked the issuer")
			return time.Time{}, false, nil
		}, slog.New(slog.NewTextHandler(&log, nil)))
		r.Run(ctx)
		if _, failed := r.Counts(); failed == 0 || !strings.Contains(log.String(), filepath.Join(dir, "issuer")) {
			t.Errorf("%d failed, log:\n%s", failed, log.String())
		}
	})
}

// A node renews its certificate with the present one, when it is due and as long as it is neither expired nor revoked.
func TestRenew(t *testing.T) {
	s := start(t, nil)
	if err := s.join(s.code("node7", "192.0.2.7"), "node7", "192.0.2.7"); err != nil {
		t.Fatal(err)
	}
	dir := s.node("node7")
	first, err := identity.ReadCertificate(dir)
	if err != nil {
		t.Fatal(err)
	}
	late := time.Now().Add(31 * time.Hour) // two thirds are left of 90 hours
	renew := func(within time.Duration, now time.Time) (bool, *x509.Certificate, error) {
		t.Helper()
		_, renewed, err := renewAt(t.Context(), dir, within, now)
		c, rerr := identity.ReadCertificate(dir)
		if rerr != nil {
			t.Fatal(rerr)
		}
		return renewed, c, err
	}
	if renewed, c, err := renew(time.Hour, time.Now()); renewed || err != nil || !c.Equal(first) {
		t.Errorf("not due: %t, %v", renewed, err)
	}
	// Even if it is not due, the list of revoked credentials arrives.
	if _, _, err := s.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedToken, ID: strings.Repeat("ab", 16)}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := renew(time.Hour, time.Now()); err != nil {
		t.Error(err)
	}
	if l, err := identity.OpenRevocations(dir); err != nil || l.Serial != 2 {
		t.Errorf("revocation list %v, %v", l, err)
	}
	daemon, err := identity.OpenNode(dir, nil, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if renewed, _, err := renew(200*time.Hour, time.Now()); renewed || err != nil { // more than its life
		t.Errorf("a new certificate was renewed: %v", err)
	}
	if renewed, _, err := renew(time.Hour, late); renewed || err != nil {
		t.Errorf("not due within an hour: %v", err)
	}
	renewed, second, err := renew(200*time.Hour, late)
	if err != nil || !renewed || second.Equal(first) || bytes.Equal(second.RawSubjectPublicKeyInfo, first.RawSubjectPublicKeyInfo) {
		t.Fatalf("%t, %v", renewed, err)
	}
	if !slices.Equal(second.DNSNames, first.DNSNames) || len(second.IPAddresses) != 1 {
		t.Errorf("renewed for %v %v", second.DNSNames, second.IPAddresses)
	}
	later := time.Now().Add(2 * time.Second) // the daemon looks once a second
	if got := daemon.Files(later).Certificate.Leaf; !got.Equal(second) {
		t.Error("the daemon does not have the new certificate")
	}
	if !strings.Contains(s.audited(), `"event":"renew"`) {
		t.Error("no audit line")
	}
	// A request with a node's token, or without a certificate, renews nothing.
	refusedFor(t, s.at.ask(t.Context(), nil, pathRenew, &identity.NodeRequest{}, &identity.NodeReply{}), identity.Missing)
	_, err = s.at.revoked(t.Context(), nil, 0)
	refusedFor(t, err, identity.Missing)
	if _, _, err := s.cluster.Revoke(time.Now(), identity.Revocation{Kind: identity.RevokedNode, ID: identity.NodeSerial(second)}); err != nil {
		t.Fatal(err)
	}
	_, _, err = renew(200*time.Hour, late)
	refusedFor(t, err, identity.Revoked)
	if _, _, err = renew(200*time.Hour, late.Add(100*time.Hour)); err == nil || !strings.Contains(err.Error(), "with a new code") {
		t.Errorf("an expired certificate: %v", err)
	}
}

// A node that renews too often is refused. Other nodes are not.
func TestRenewTooOften(t *testing.T) {
	renewTooOften(t, 90*time.Hour, renewEvery)
	renewTooOften(t, 30*time.Minute, 5*time.Minute)
}

func renewTooOften(t *testing.T, life, every time.Duration) {
	s := start(t, func(c *Config) { c.NodeLife = life })
	renew := func(name string) error {
		_, pair, err := identity.NodeHosts(s.node(name))
		if err != nil {
			t.Fatal(err)
		}
		return s.at.ask(t.Context(), &pair, pathRenew, request(t, name), &identity.NodeReply{})
	}
	for _, name := range []string{"node7", "node8"} {
		if err := s.join(s.code(), name); err != nil {
			t.Fatal(err)
		}
	}
	for range renewBurst {
		if err := renew("node7"); err != nil {
			t.Fatal(err)
		}
	}
	refusedFor(t, renew("node7"), identity.Overload)
	if err := renew("node8"); err != nil {
		t.Error(err)
	}
	s.setClock(time.Now().Add(every))
	if err := renew("node7"); err != nil {
		t.Error(err)
	}
}

// No message contains the contents of the file with the issuer's address, because the path may name another file.
func TestRenewAddressIsNotShown(t *testing.T) {
	s := start(t, nil)
	if err := s.join(s.code(), "node7"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.node("node7"), "issuer"), []byte("of somebody else"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Renew(t.Context(), s.node("node7"), time.Hour); err == nil || strings.Contains(err.Error(), "somebody") {
		t.Error(err)
	}
}

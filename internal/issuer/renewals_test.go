package issuer

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
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

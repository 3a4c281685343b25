package cli

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

// The resource manager is away for 5 s, which is longer than any back-off here, or for RFAAS_TEST_AWAY; `make bench` sets minutes. Meanwhile, one
// lease continues and is called all the time, and another one is granted and released. When the manager is back, both are on the bills in full: all
// calls, and the cores for as long as they were leased.
func TestManagerAway(t *testing.T) {
	away := 5 * time.Second
	if text := os.Getenv("RFAAS_TEST_AWAY"); text != "" {
		var err error
		if away, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	secret := in("secret")
	manager := func() *process {
		return startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", secret, "--state-dir", in("ledger"),
			"--heartbeat", "50ms", "--executors", "64")
	}
	m := manager()
	x := startDaemon(t, "bin/executor", "--listen", "unix:"+in("x"), "--secret-file", secret, "--manager", "unix:"+in("m"), "--cores", "2",
		"--share-cores", "2", "--providers", "shm", "--state-dir", in("journal"), "--charge-interval", "100ms", "--grace", "2s", "--log-level", "debug")
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		env := map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_MANAGER": "unix:" + in("m")}
		code := Run(context.Background(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	eventually(t, "the executor writes into the manager's memory", func() bool { return strings.Contains(x.said(), "by=memory") })
	lib := built(t, "build/functions/echo.so")
	// take leases for a tenant, as who found the executor by the manager or knows it.
	take := func(tenant string, o client.Options) (*client.Lease, *client.Function) {
		t.Helper()
		o.Tenant, o.SecretFile, o.Provider = tenant, secret, "shm"
		s, err := client.Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		l, err := s.Lease(t.Context(), client.LeaseOptions{Library: lib, Workers: 1, Renew: true})
		if err != nil {
			t.Fatal(err)
		}
		f, err := l.Function("echo")
		if err != nil {
			t.Fatal(err)
		}
		return l, f
	}
	calls := map[string]int64{}
	call := func(tenant string, f *client.Function) {
		t.Helper()
		if _, err := f.Invoke(t.Context(), make([]byte, 10), make([]byte, 10)); err != nil {
			t.Fatalf("%s, call %d: %v", tenant, calls[tenant]+1, err)
		}
		calls[tenant]++
	}
	ann, annEcho := take("ann", client.Options{Manager: "unix:" + in("m")})
	granted := time.Now()
	call("ann", annEcho)
	eventually(t, "a charge", func() bool { return billed(t, run, "ann", "million-calls") == 1 })

	m.end(syscall.SIGKILL)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var bob *client.Lease
	var bobEcho *client.Function
	for gone := time.Now(); time.Since(gone) < away; <-tick.C {
		call("ann", annEcho)
		switch {
		case bob == nil && time.Since(gone) > away/4:
			bob, bobEcho = take("bob", client.Options{Executor: "unix:" + in("x")})
		case bobEcho != nil && time.Since(gone) > away/2:
			if err := bob.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			bobEcho = nil
		case bobEcho != nil:
			call("bob", bobEcho)
		}
	}
	manager()
	eventually(t, "the executor is back", func() bool { return strings.Count(x.said(), "by=memory") >= 2 })
	call("ann", annEcho)
	held := time.Since(granted)
	if err := ann.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for tenant, n := range calls {
		eventually(t, tenant+"'s calls", func() bool { return billed(t, run, tenant, "million-calls") >= n })
		if got := billed(t, run, tenant, "million-calls"); got != n {
			t.Errorf("%s: %d calls on the bill, %d were made", tenant, got, n)
		}
	}
	eventually(t, "the last charges", func() bool { return strings.Count(x.said(), "account settled") >= 2 })
	cores := time.Duration(billed(t, run, "ann", "core-hour")) * time.Microsecond
	if cores < held || cores > held+5*time.Second {
		t.Errorf("ann pays for %v of a core, and held it for %v", cores, held)
	}
	t.Logf("figure: manager.away_s = %.0f s", away.Seconds())
	t.Logf("the manager was away for %v: %v calls, all of them on the bills; %v of a core, held for %v", away, calls, cores, held)
}

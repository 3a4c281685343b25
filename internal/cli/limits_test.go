package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rfaas-go/rfaas/client"
)

// A tenant gets no more cores than its limit, over all executors; while the manager is away the policy decides, and when it is
// back what runs is counted. Daemons as they are.
func TestTenantLimit(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	secret := in("secret")
	manager := func() *process {
		return startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", secret, "--heartbeat", "50ms", "--executors", "64",
			"--tenant-cores", "ann=3")
	}
	executor := func(name string, args ...string) *process {
		return startDaemon(t, "bin/executor", append([]string{"--listen", "unix:" + in(name), "--secret-file", secret, "--manager", "unix:" + in("m"),
			"--cores", "2", "--share-cores", "2", "--providers", "shm", "--grace", "2s"}, args...)...)
	}
	lease := func(tenant, executor string, workers int) (*client.Lease, error) {
		t.Helper()
		s, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in(executor), Tenant: tenant, SecretFile: secret, Provider: "shm"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: workers})
	}
	must := func(tenant, executor string, workers int) *client.Lease {
		t.Helper()
		l, err := lease(tenant, executor, workers)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	refused := func(executor string, workers int, text string) {
		t.Helper()
		if _, err := lease("ann", executor, workers); !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), text) {
			t.Errorf("want ErrBusy with %q: %v", text, err)
		}
	}
	flags := func(executor string) (all []string) {
		t.Helper()
		var out, errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &errs},
			[]string{"leases", "--json", "--executor", "unix:" + in(executor), "--secret-file", secret})
		var rows []leaseRow
		if code != 0 || json.Unmarshal(out.Bytes(), &rows) != nil {
			t.Fatalf("code %d, %s%s", code, out.String(), errs.String())
		}
		for _, r := range rows {
			all = append(all, r.Tenant+r.Flag)
		}
		return all
	}
	m, x := manager(), executor("x")
	y := executor("y", "--limit-unknown", "refuse")
	for _, p := range []*process{x, y} {
		eventually(t, "the executor writes into the manager's memory", func() bool { return strings.Contains(p.said(), "by=memory") })
	}
	first := must("ann", "x", 2)
	second := must("ann", "y", 1)
	refused("x", 1, `tenant "ann" has 3 of 3 cores, 1 more`)
	refused("y", 1, `tenant "ann" has 3 of 3 cores, 1 more`)
	must("bob", "x", 1) // has no limit
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	must("ann", "y", 1) // what was given back is there for all
	refused("x", 2, "has 2 of 3 cores, 2 more")
	// Reserving needs nothing of the manager but its memory.
	m.cmd.Process.Signal(syscall.SIGSTOP)
	stopped := must("ann", "x", 1)
	refused("x", 1, "has 3 of 3 cores")
	m.cmd.Process.Signal(syscall.SIGCONT)
	if got := flags("x"); len(got) != 2 || strings.Contains(strings.Join(got, " "), flagText) {
		t.Errorf("flags %v", got)
	}

	m.end(syscall.SIGKILL)
	for _, p := range []*process{x, y} {
		eventually(t, "the executor notices", func() bool { return strings.Contains(p.said(), "the manager does not answer") })
	}
	must("ann", "x", 1) // the fourth
	refused("y", 1, "cannot be read")
	if got := strings.Join(flags("x"), " "); !strings.Contains(got, "ann"+flagText) {
		t.Errorf("flags %v", got)
	}
	manager()
	for _, p := range []*process{x, y} {
		eventually(t, "the executor is back", func() bool { return strings.Count(p.said(), "by=memory") >= 2 })
	}
	refused("x", 1, "has 4 of 3 cores") // all of them are counted, whoever admitted them
	for _, l := range []*client.Lease{stopped, second} {
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	must("ann", "x", 1)
	refused("y", 1, "has 3 of 3 cores")
}

// Tenants that are refused take no room: an executor tells the manager of a bounded number of tenants, and whoever comes after that
// many that got nothing is still held to the limit.
func TestManyTenantsRefused(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	secret := in("secret")
	startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", secret, "--heartbeat", "50ms", "--executors", "64",
		"--tenant-cores", "*=1")
	x := startDaemon(t, "bin/executor", "--listen", "unix:"+in("x"), "--secret-file", secret, "--manager", "unix:"+in("m"), "--cores", "2",
		"--providers", "shm", "--grace", "2s")
	eventually(t, "the executor writes into the manager's memory", func() bool { return strings.Contains(x.said(), "by=memory") })
	const places = 2*2 + 16 // manager.cellsFor
	for i := range places + 2 {
		s, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in("x"), Tenant: fmt.Sprintf("tenant %d", i), SecretFile: secret,
			Provider: "shm"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 2})
		if !errors.Is(err, client.ErrBusy) || !strings.Contains(err.Error(), "has 0 of 1 cores, 2 more") {
			t.Errorf("tenant %d: want ErrBusy: %v", i, err)
		}
		s.Close()
	}
}

const flagText = "unreserved"

package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// cluster starts a manager and executors of two cores each.
func cluster(t *testing.T, executors int) (manager *daemon, nodes []*daemon, secret string) {
	t.Helper()
	secret = secretFile(t)
	manager = start(t, "bin/resource-manager", secret, "--heartbeat", "250ms", "--executors", "64")
	for range executors {
		nodes = append(nodes, start(t, "bin/executor", secret, "--cores", "2", "--providers", provider(), "--grace", "1s", "--manager", manager.Address,
			"--sandbox", "off")) // the tests tell workers apart by the process ids that they report
	}
	return manager, nodes, secret
}

func (d *daemon) session(t *testing.T, secret string) *client.Session {
	t.Helper()
	w := &world{daemon: d, secret: secret}
	return w.connect(t, client.Options{Manager: d.Address})
}

// freeCores returns the free cores of all executors, as read from the manager's memory.
func (d *daemon) freeCores(t *testing.T, secret string) (free int) {
	t.Helper()
	out, err := exec.Command(built(t, "bin/rfaas"), "executors", "--json", "--manager", d.Address, "--secret-file", secret).Output()
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Free int `json:"free_cores"`
	}
	if err := json.Unmarshal(out, &rows); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, r := range rows {
		free += r.Free
	}
	return free
}

func leaseSoon(t *testing.T, s *client.Session, workers int) *client.Lease {
	t.Helper()
	var l *client.Lease
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); ; <-tick.C { // until executors have registered
		var err error
		if l, err = s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: workers}); err == nil {
			return l
		}
		if !errors.Is(err, client.ErrBusy) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// Clients find executors in the manager's memory, also while the manager is stopped. If an executor is full, the client
// asks the next one.
func TestPlacementWhileTheManagerIsStopped(t *testing.T) {
	m, nodes, secret := cluster(t, 2)
	s := m.session(t, secret)
	used := map[string]bool{}
	first := leaseSoon(t, s, 1) // now the board can be read
	used[first.Executor()] = true
	second := leaseSoon(t, m.session(t, secret), 2) // now both executors have registered
	used[second.Executor()] = true
	if len(used) != 2 {
		t.Errorf("executors used: %v", used)
	}
	if err := errors.Join(first.Release(context.Background()), second.Release(context.Background())); err != nil {
		t.Fatal(err)
	}
	// The executors' board lines follow a little later. If the board shows no free core, the client would ask the
	// manager.
	within(t, 20*time.Second, "every core is free in the board", func() bool { return m.freeCores(t, secret) == 2*len(nodes) })
	m.signal(syscall.SIGSTOP)
	defer m.signal(syscall.SIGCONT)
	clear(used)
	var leases []*client.Lease
	for range 4 { // all cores
		l := leaseSoon(t, s, 1)
		used[l.Executor()] = true
		leases = append(leases, l)
	}
	if len(used) != len(nodes) {
		t.Errorf("executors used: %v", used)
	}
	f := function(t, leases[0], "echo")
	out := make([]byte, 8)
	if n, err := f.Invoke(context.Background(), []byte("stopped"), out); err != nil || string(out[:n]) != "stopped" {
		t.Errorf("%q %v", out, err)
	}
	for _, l := range leases {
		if err := l.Release(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// Over tcp the manager's process serves its memory. While it is stopped, reads fail within a bound, and a request for a
// lease fails with an error that names the manager. Existing leases continue. When the manager continues, clients find
// executors again.
func TestPlacementByTCP(t *testing.T) {
	secret := secretFile(t)
	m := start(t, managerProgram, secret, "--providers", "tcp", "--heartbeat", "250ms", "--executors", "64")
	for range 2 {
		start(t, "bin/executor", secret, "--cores", "2", "--providers", provider(), "--grace", "1s", "--manager", m.Address).joined(t)
	}
	w := &world{daemon: m, secret: secret}
	s := w.connect(t, client.Options{Manager: m.Address, Timeout: 5 * time.Second})
	l := leaseSoon(t, s, 1)
	within(t, 20*time.Second, "the board has the lease", func() bool { return m.freeCores(t, secret) == 3 })
	m.signal(syscall.SIGSTOP)
	within(t, 20*time.Second, "every thread of the manager has stopped", func() bool { return testkit.AllStopped(m.cmd.Process.Pid) })
	failed := make(chan error, 1)
	go func() {
		_, err := s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")})
		failed <- err
	}()
	if err := ends(t, "the request for a lease", failed); err == nil || !strings.Contains(fmt.Sprint(err), m.Address) {
		t.Errorf("while the manager is stopped: %v", err)
	}
	out := make([]byte, 8)
	if n, err := function(t, l, "echo").Invoke(context.Background(), []byte("stopped"), out); err != nil || string(out[:n]) != "stopped" {
		t.Errorf("%q %v", out, err)
	}
	m.signal(syscall.SIGCONT)
	again := leaseSoon(t, s, 2)
	within(t, 20*time.Second, "the board has both leases", func() bool { return m.freeCores(t, secret) == 1 })
	if err := errors.Join(l.Release(context.Background()), again.Release(context.Background())); err != nil {
		t.Error(err)
	}
}

// Clients find a manager again that was killed and restarted.
func TestPlacementAfterAManagerRestart(t *testing.T) {
	secret, address := secretFile(t), fixedManager(t)
	manager := func() *daemon {
		return start(t, "bin/resource-manager", secret, "--listen", address, "--heartbeat", "250ms", "--executors", "64")
	}
	m := manager()
	start(t, "bin/executor", secret, "--cores", "2", "--providers", provider(), "--grace", "1s", "--manager", address)
	w := &world{daemon: m, secret: secret}
	s := w.connect(t, client.Options{Manager: address})
	l := leaseSoon(t, s, 1)
	m.signal(syscall.SIGKILL)
	<-m.done
	manager()
	f := function(t, l, "echo") // the lease continues
	if _, err := f.Invoke(context.Background(), []byte("x"), make([]byte, 1)); err != nil {
		t.Error(err)
	}
	again := leaseSoon(t, s, 1)
	if err := errors.Join(l.Release(context.Background()), again.Release(context.Background())); err != nil {
		t.Error(err)
	}
	_, err := s.Lease(context.Background(), client.LeaseOptions{Library: built(t, "build/functions/echo.so"), Workers: 3})
	if !errors.Is(err, client.ErrInvalid) || !strings.Contains(fmt.Sprint(err), "3 cores") {
		t.Errorf("more than there is: %v", err)
	}
}

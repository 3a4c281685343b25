package cluster

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/etcd"
	"github.com/rfaas-go/rfaas/tests/etcdtest"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

const standbyLeases = 20

// pair is a cluster with two resource managers, two executors, and a client that calls all the time.
type pair struct {
	*cluster
	server    *etcdtest.Server
	addresses [2]string
	managers  [2]*process
	executors []*process
	holder    *client
}

func newPair(t *testing.T, o etcdtest.Options) *pair {
	p := &pair{cluster: newCluster(t), server: etcdtest.Start(t, o)}
	p.install(current)
	if out, err := p.ledger("init"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for i := range p.addresses {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p.addresses[i] = l.Addr().String()
		l.Close()
	}
	p.env = append(p.env, "RFAAS_MANAGER="+strings.Join(p.addresses[:], ","))
	p.manager(0)
	p.managers[0].ready(t)
	p.manager(1)
	p.managers[1].await(t, "standing by")
	for i := range 2 {
		p.executors = append(p.executors, p.start("bin/executor", "--manager", strings.Join(p.addresses[:], ","), "--cores", "2", "--share-cores", "20", "--memory", "2GiB",
			"--providers", "shm", "--pool", "0", "--cache-time", "0s", "--charge-interval", "200ms", "--state-dir", filepath.Join(p.dir, fmt.Sprintf("executor-%d", i))))
	}
	p.listed(2)
	p.holder = p.client("ann", current, filepath.Join(current, "libexec/rfaas-agent"), standbyLeases)
	p.holder.await(t, "ready")
	return p
}

// options are those of etcd, for the command and for resource managers.
func (p *pair) options() []string {
	list := []string{"--etcd-endpoints", p.server.Endpoint}
	if p.server.CA != "" {
		list = append(list, "--etcd-ca", p.server.CA, "--etcd-cert", p.server.Cert, "--etcd-key", p.server.Key)
	}
	return list
}

// ledger runs a command on the ledger in etcd.
func (p *pair) ledger(args ...string) ([]byte, error) {
	return p.command(nil, slices.Concat([]string{"ledger", "etcd"}, args, p.options())...)
}

// manager starts a resource manager, which becomes the leader or a standby.
func (p *pair) manager(i int) {
	p.Helper()
	cmd := exec.Command(filepath.Join(p.root, "bin/resource-manager"), slices.Concat([]string{"--listen", p.addresses[i],
		"--http-listen", "unix:" + p.web(i), "--state-dir", filepath.Join(p.dir, "manager-"+strconv.Itoa(i))}, p.options())...)
	cmd.Env = nil
	for _, kv := range p.env {
		if !strings.HasPrefix(kv, "RFAAS_MANAGER=") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	p.managers[i] = p.run(cmd, cmd.StderrPipe)
}

func (p *pair) web(i int) string { return filepath.Join(p.dir, "http-"+strconv.Itoa(i)) }

// leases opens a lease through the agent of the client, which reads the board, and makes a call on it.
func (p *pair) leases() bool {
	cmd := exec.Command(filepath.Join(current, "build/cluster/holder"), filepath.Join(current, "build/functions/echo.so"), "1", "bob")
	cmd.Env = append(append([]string{}, p.env...), "RFAAS_AGENT_SOCKET="+p.holder.socket, "RFAAS_AGENT_START=never")
	out, err := cmd.CombinedOutput() // its standard input is empty
	return err == nil && !strings.Contains(string(out), "failed")
}

// read reports whether a client reads the board of a resource manager directly from memory.
func (p *pair) read(i int) bool {
	_, metrics := p.get(p.web(i), "/metrics")
	_, n, _ := strings.Cut(metrics, "\nrfaas_manager_subscribers ")
	return n != "" && n[0] != '0'
}

// resumed waits until everything works with the leader at an index, and returns how long each part took since a time.
func (p *pair) resumed(leader int, since time.Time) (ready, executors, lease time.Duration) {
	p.Helper()
	p.managers[leader].ready(p.T)
	ready = time.Since(since)
	p.listed(2)
	executors = time.Since(since)
	testkit.Eventually(p, "a lease is granted", p.leases)
	lease = time.Since(since)
	testkit.Eventually(p, "the agent reads the new board", func() bool { return p.leases() && p.read(leader) })
	return ready, executors, lease
}

// exact ends the client and the executors, and checks that the bill has all calls of the client.
func (p *pair) exact() {
	p.Helper()
	calls := p.holder.finish(p.T)
	for _, x := range p.executors {
		x.end(p.T)
	}
	if billed := p.bill()["ann"]; billed != calls {
		p.Errorf("%d calls are billed, %d were made", billed, calls)
	} else {
		p.Logf("%d calls, 0 failed, all billed once", calls)
	}
}

// failOver is how soon a standby serves, and a new lease is granted, after the death of a leader on a machine that is not busy.
const failOver = 5 * time.Second

// The leader is killed three times while a client calls. A standby takes over, calls go on, and the bill is exact. The fastest of the three
// fail-overs is compared with one after a regular end, in which nothing waits for a lease to expire. So the bound holds on a slow machine too.
func TestStandbyTakesOver(t *testing.T) {
	p := newPair(t, etcdtest.Options{})
	if etcd.TakeOver > failOver*3/5 {
		t.Errorf("the settings let a fail-over wait for %v, which leaves too little of %v", etcd.TakeOver, failOver)
	}
	fastest, granted := time.Hour, time.Hour
	for round := range 3 {
		old, next := round%2, 1-round%2
		if status, body := p.get(p.web(next), "/readyz"); status != 503 || !strings.Contains(body, "standby") {
			t.Errorf("readyz of the standby: %d %s", status, body)
		}
		if _, body := p.get(p.web(next), "/metrics"); !strings.Contains(body, "rfaas_manager_leader 0") {
			t.Errorf("metrics of the standby:\n%s", body)
		}
		began := time.Now()
		p.managers[old].signal(syscall.SIGKILL)
		ready, executors, lease := p.resumed(next, began)
		t.Logf("after the death of the leader: the standby serves after %v, has all executors after %v, and a new lease is granted after %v",
			ready.Round(time.Millisecond), executors.Round(time.Millisecond), lease.Round(time.Millisecond))
		fastest, granted = min(fastest, ready), min(granted, lease)
		if _, body := p.get(p.web(next), "/metrics"); !strings.Contains(body, "rfaas_manager_leader 1") {
			t.Errorf("metrics of the leader:\n%s", body)
		}
		p.holder.rounds(t, "the fail-over", 2)
		p.manager(old)
		p.managers[old].await(t, "standing by")
	}
	// A leader that is asked to end gives up its leadership at once.
	began := time.Now()
	p.managers[1].end(t)
	ready, _, lease := p.resumed(0, began)
	t.Logf("after a regular end the standby serves after %v, and a new lease is granted after %v", ready.Round(time.Millisecond), lease.Round(time.Millisecond))
	for _, c := range []struct {
		what             string
		regular, fastest time.Duration
	}{{"the standby serves", ready, fastest}, {"a new lease is granted", lease, granted}} {
		if bound := etcd.TakeOver + 3*c.regular; c.fastest > bound {
			t.Errorf("%s %v after the death of a leader, want %v: %v until the lease has expired, and three times the %v of a regular end", c.what,
				c.fastest.Round(time.Millisecond), bound.Round(time.Millisecond), etcd.TakeOver, c.regular.Round(time.Millisecond))
		}
	}
	p.exact()
}

// The leader is stopped for longer than its lease. The executors and the agent turn to the other resource manager, although the stopped
// one's memory can still be reached. When it continues it writes nothing, and ends.
func TestStoppedLeader(t *testing.T) {
	p := newPair(t, etcdtest.Options{})
	began := time.Now()
	p.managers[0].signal(syscall.SIGSTOP)
	ready, executors, lease := p.resumed(1, began)
	t.Logf("after the stop of the leader: the standby serves after %v, has all executors after %v, and a new lease is granted after %v",
		ready.Round(time.Millisecond), executors.Round(time.Millisecond), lease.Round(time.Millisecond))
	p.holder.rounds(t, "the stop", 2)
	p.managers[0].signal(syscall.SIGCONT)
	select {
	case <-p.managers[0].done:
	case <-time.After(testkit.Bound):
		t.Fatal("the former leader has not ended")
	}
	if code := p.managers[0].cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("it ended with %v", p.managers[0].cmd.ProcessState)
	}
	p.managers[0].mu.Lock()
	if text := strings.Join(p.managers[0].lines, "\n"); !strings.Contains(text, "not the leader any more") {
		t.Error("it does not say why")
	}
	p.managers[0].mu.Unlock()
	p.holder.rounds(t, "the end of the former leader", 2)
	p.exact()
}

// While etcd is down, calls go on, and the leader reports it. It recovers with etcd, and the bill is exact.
func TestManagerWithoutEtcd(t *testing.T) {
	p := newPair(t, etcdtest.Options{})
	p.server.Kill()
	testkit.Eventually(t, "healthz reports etcd and the ledger", func() bool {
		status, body := p.get(p.web(0), "/healthz")
		return status == 503 && strings.Contains(body, "etcd:") && strings.Contains(body, "ledger:")
	})
	if _, body := p.get(p.web(0), "/metrics"); !strings.Contains(body, "rfaas_manager_etcd_ok 0") || !strings.Contains(body, "rfaas_manager_ledger_ok 0") {
		t.Errorf("metrics:\n%s", body)
	}
	testkit.Eventually(t, "healthz of the standby reports etcd", func() bool { status, _ := p.get(p.web(1), "/healthz"); return status == 503 })
	p.holder.rounds(t, "the end of etcd", 2)
	if !p.leases() {
		t.Error("no lease is granted without etcd")
	}
	p.server.Run()
	testkit.Eventually(t, "healthz is good", func() bool { status, _ := p.get(p.web(0), "/healthz"); return status == 200 })
	p.holder.rounds(t, "the return of etcd", 2)
	p.listed(2)
	p.exact()
	p.managers[0].end(t)
}

// With three members of etcd and TLS, managers and bills go on without one of the members, also through a fail-over.
func TestEtcdLosesMember(t *testing.T) {
	p := newPair(t, etcdtest.Options{Members: 3, TLS: true})
	p.server.KillMember(0) // the first that managers try
	p.holder.rounds(t, "the end of a member of etcd", 2)
	testkit.Eventually(t, "charges reach etcd", func() bool {
		out, err := p.command(nil, "bill", "--json")
		return err == nil && strings.Contains(string(out), "ann")
	})
	testkit.Eventually(t, "healthz is good", func() bool { status, _ := p.get(p.web(0), "/healthz"); return status == 200 })
	p.managers[0].signal(syscall.SIGKILL)
	p.resumed(1, time.Now())
	p.holder.rounds(t, "the fail-over", 2)
	p.exact()
}

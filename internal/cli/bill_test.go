package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var built = testkit.Built

// process is a daemon, its log, and how it is killed.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan struct{}

	mu  sync.Mutex
	log strings.Builder
}

// startDaemon returns when the daemon has said that it is ready.
func startDaemon(t *testing.T, program string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(built(t, program), args...), done: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	go func() {
		defer close(p.done)
		once := sync.OnceFunc(func() { close(ready) })
		for lines := bufio.NewScanner(out); lines.Scan(); {
			p.mu.Lock()
			p.log.WriteString(lines.Text() + "\n")
			p.mu.Unlock()
			if strings.Contains(lines.Text(), "msg=ready") {
				once()
			}
		}
		p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.end(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("%s said:\n%s", program, p.said())
		}
	})
	select {
	case <-ready:
	case <-p.done:
		t.Fatalf("%s ended at once:\n%s", program, p.said())
	case <-time.After(20 * time.Second):
		t.Fatalf("%s is not ready", program)
	}
	return p
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

func (p *process) end(s syscall.Signal) {
	p.t.Helper()
	p.cmd.Process.Signal(s)
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		p.cmd.Process.Kill()
		<-p.done
		p.t.Errorf("%v did not end it within 20 s", s)
	}
}

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// billed is a counter of a tenant's bill, in core-microseconds or as it is counted; -1 while there is no bill.
func billed(t *testing.T, run func(...string) (int, string, string), tenant, item string) int64 {
	t.Helper()
	code, out, errs := run("bill", "--json", "--tenant", tenant)
	var bills []bill
	if code != 0 || errs != "" || json.Unmarshal([]byte(out), &bills) != nil {
		t.Fatalf("bill: code %d, %s%s", code, out, errs)
	}
	if len(bills) == 0 {
		return -1
	}
	for _, l := range bills[0].Lines {
		if l.Item == item {
			n, _ := new(big.Int).SetString(l.Units, 10)
			return n.Int64()
		}
	}
	t.Fatalf("no %s on the bill: %s", item, out)
	return 0
}

// journalled is how many bytes the journals in a directory have.
func journalled(t *testing.T, dir string) (size int64) {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(dir, "*.journal"))
	if err != nil || len(list) == 0 {
		t.Fatalf("no journal in %s: %v", dir, err)
	}
	for _, path := range list {
		i, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		size += i.Size()
	}
	return size
}

// The help texts and documents on bills state how much time a killed executor leaves uncharged.
func TestUnchargedTimeIsStated(t *testing.T) {
	var out bytes.Buffer
	if code := Run(t.Context(), Env{Version: "v1", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &out}, []string{"bill", "--help"}); code != 0 {
		t.Fatalf("bill --help: %d %s", code, out.String())
	}
	var settings bytes.Buffer
	if _, err := config.LoadExecutor([]string{"--help"}, nil, &settings, "v1"); !errors.Is(err, config.ErrDone) {
		t.Fatal(err)
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	spaces := regexp.MustCompile(`\s+`) // help is wrapped
	for where, c := range map[string]struct{ text, want string }{
		"bill --help":          {out.String(), "at most the executor's charge-interval"},
		"executor --help":      {settings.String(), "a killed executor leaves at most this time of each lease uncharged"},
		"docs/operations.md":   {read("../../docs/operations.md"), "at most one `charge-interval` of each lease"},
		"docs/architecture.md": {read("../../docs/architecture.md"), "At most one `charge-interval` of the lease is not charged"},
	} {
		if !strings.Contains(spaces.ReplaceAllString(c.text, " "), c.want) {
			t.Errorf("%s does not say %q", where, c.want)
		}
	}
}

// What people pay is what they had, whoever is killed in between: daemons as they are, over shared memory.
func TestBillOverKills(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	secret := in("secret")
	manager := func() *process {
		return startDaemon(t, "bin/resource-manager", "--listen", "unix:"+in("m"), "--secret-file", secret, "--state-dir", in("ledger"),
			"--heartbeat", "50ms", "--executors", "64", "--tariff", "core-hour=3600", "--currency", "EUR")
	}
	executor := func() *process {
		return startDaemon(t, "bin/executor", "--listen", "unix:"+in("x"), "--secret-file", secret, "--manager", "unix:"+in("m"), "--cores", "2",
			"--providers", "shm", "--state-dir", in("journal"), "--charge-interval", "50ms", "--grace", "2s", "--log-level", "debug")
	}
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		env := map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_MANAGER": "unix:" + in("m")}
		code := Run(context.Background(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	units := func(tenant, item string) int64 { return billed(t, run, tenant, item) }
	cores := func(tenant string) time.Duration { return time.Duration(units(tenant, "core-hour")) * time.Microsecond }
	const slack = 3 * time.Second // of a loaded machine, for what is not on the bill's side

	m, x := manager(), executor()
	eventually(t, "the executor writes into the manager's memory", func() bool { return strings.Contains(x.said(), "by=memory") })
	ann, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in("x"), Tenant: "ann", SecretFile: secret, Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	defer ann.Close()
	lib := built(t, "build/functions/echo.so")
	before := time.Now()
	l, err := ann.Lease(t.Context(), client.LeaseOptions{Library: lib, Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	granted := time.Now()
	echo, err := l.Function("echo")
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if _, err := echo.Invoke(t.Context(), make([]byte, 100), make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "a charge before the lease ends", func() bool { return cores("ann") > 0 })
	first := cores("ann")
	eventually(t, "the history has the lease", func() bool {
		var steps []historyStep
		if code, out, errs := run("history", "--json", "--since", "1h"); code != 0 || json.Unmarshal([]byte(out), &steps) != nil || len(steps) == 0 {
			t.Fatalf("history: code %d\n%s%s", code, out, errs)
		}
		sum, starts := historyStep{}, uint64(0)
		for _, s := range steps {
			sum.Calls, sum.Harvested, sum.Idle, sum.Batch = sum.Calls+s.Calls, sum.Harvested+s.Harvested, sum.Idle+s.Idle, sum.Batch+s.Batch
			for _, c := range s.Starts {
				starts += c.Count
			}
		}
		return sum.Calls == 5 && sum.Harvested > 0 && sum.Idle > 0 && sum.Batch >= 0 && starts == 1 && steps[0].Tenants[0].Tenant == "ann"
	})
	for _, args := range [][]string{{}, {"--tenants"}, {"--tenant", "ann"}, {"--csv", "--step", "24h"}, {"--csv", "--tenants"}} {
		if code, out, errs := run(append([]string{"history"}, args...)...); code != 0 || errs != "" || !strings.Contains(out, "5") || strings.Count(out, "\n") < 2 {
			t.Errorf("history %v: code %d\n%s%s", args, code, out, errs)
		}
	}

	m.end(syscall.SIGKILL)
	eventually(t, "the executor notices", func() bool { return strings.Contains(x.said(), "cannot be reached") })
	time.Sleep(200 * time.Millisecond) // the lease continues without a manager. This is not a wait for an event, but time that the bill must have
	m = manager()
	if got := cores("ann"); got < first {
		t.Errorf("%v on the bill after kill -9, %v before", got, first)
	}
	eventually(t, "charges after kill -9", func() bool { return cores("ann") > first+200*time.Millisecond })
	held := time.Since(granted)
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	most := time.Since(before)
	eventually(t, "the last charge", func() bool { return strings.Contains(x.said(), "account settled") })
	final := cores("ann")
	if final < held || final > most+slack {
		t.Errorf("%v on the bill, the lease was held for %v to %v", final, held, most)
	}
	if calls, in := units("ann", "million-calls"), units("ann", "gb-in"); calls != 5 || in != 500 {
		t.Errorf("%d calls and %d bytes on the bill, want 5 and 500", calls, in)
	}
	code, out, errs := run("bill")
	if code != 0 || errs != "" || !strings.Contains(out, "core-hour") || !strings.Contains(out, "EUR") {
		t.Errorf("bill: code %d\n%s%s", code, out, errs)
	}

	// The executor is killed with a lease: all but the last interval is on the bill, then the journal's word too.
	bob, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in("x"), Tenant: "bob", SecretFile: secret, Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	defer bob.Close()
	if _, err = bob.Lease(t.Context(), client.LeaseOptions{Library: lib, Workers: 2}); err != nil {
		t.Fatal(err)
	}
	granted = time.Now()
	eventually(t, "a charge of the second lease", func() bool { return cores("bob") > 400*time.Millisecond })
	m.end(syscall.SIGKILL) // both at once: only the files are left
	used := 2 * time.Since(granted)
	for range 2 { // what only the journal knows: the second record from now was measured after the first one, so all that was used is in it
		before := journalled(t, in("journal"))
		eventually(t, "the journal goes on", func() bool { return journalled(t, in("journal")) != before })
	}
	x.end(syscall.SIGKILL)
	m = manager()
	x = executor()
	eventually(t, "what the journal knew", func() bool { return cores("bob") >= used })
	settled := cores("bob")
	if cores("ann") != final {
		t.Errorf("ann's bill went from %v to %v", final, cores("ann"))
	}
	m.end(syscall.SIGTERM)
	x.end(syscall.SIGTERM)
	manager()
	if got := cores("bob"); got != settled {
		t.Errorf("bob's bill went from %v to %v", settled, got)
	}
	if code, out, _ := run("bill", "--csv", "--since", "1h"); code != 0 || !strings.HasPrefix(out, "tenant,item,units,quantity,price,amount,currency\nann,core-hour,") {
		t.Errorf("code %d\n%s", code, out)
	}
}

// troubled is a resource manager whose ledger accepts no charges.
type troubled struct {
	control.UnimplementedManagerServer
}

func (troubled) Bill(context.Context, *control.BillRequest) (*control.BillReply, error) {
	return &control.BillReply{Currency: "CHF", Trouble: "the ledger does not accept charges: no space left on device",
		Bills: []*control.TenantBill{{Tenant: "ann", Amount: "1.00", Lines: []*control.BillLine{{Item: "core-hour", Units: "2", Quantity: "2", Price: "0.5", Amount: "1.00"}}}}}, nil
}

// A bill that may lack charges is printed with a warning, in every format, and the warning is not in the output that programs read.
func TestBillWarnsOfTheLedger(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	p, err := control.OpenPort(control.PortConfig{Listen: "127.0.0.1:0", SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	control.RegisterManagerServer(p.Server, troubled{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	env := map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_MANAGER": p.Address}
	for _, format := range []string{"", "--json", "--csv"} {
		var out, errs bytes.Buffer
		args := strings.Fields("bill " + format)
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &out, Stderr: &errs}, args)
		if code != 0 || !strings.Contains(out.String(), "ann") || strings.Contains(out.String(), "ledger") ||
			errs.String() != "rfaas: warning: the ledger does not accept charges: no space left on device\n" {
			t.Errorf("%q: code %d\n%s\n%s", args, code, out.String(), errs.String())
		}
	}
}

func TestBillBadInput(t *testing.T) {
	_, _, run := world(t)
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"bill", "--since", "yesterday"}, 2, `"yesterday"`},
		{[]string{"bill", "--since", "-5h"}, 2, `"-5h"`},
		{[]string{"bill", "--json", "--csv"}, 2, "want one"},
		{[]string{"bill"}, 1, "Bill"}, // the stub has none
		{[]string{"history", "--since", "tomorrow"}, 2, `"tomorrow"`},
		{[]string{"history", "--since", "2999-01-01"}, 2, "not in the past"},
		{[]string{"history", "--step", "1ms"}, 2, "--step 1ms"},
		{[]string{"history", "--json", "--csv"}, 2, "want one"},
		{[]string{"history"}, 1, "History"},
	} {
		if code, out, errs := run(c.args...); code != c.code || !strings.Contains(errs, c.text) {
			t.Errorf("%q: code %d, %q %q", c.args, code, out, errs)
		}
	}
}

package manager

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// envRemote is where tests/remote serves on the other of two machines; empty: there is one machine.
const envRemote = "FAULTS_REMOTE"

// 50 executors and 20 clients by shared memory, and by tcp over loopback. With two machines (`make test-twovm`), 20 executors and 8 clients on
// one, the manager on the other, and verbs between them. Clients find executors on the board, hold leases and are told of changes, executors
// charge, and the manager is killed three times meanwhile. What the ledger has in the end is what was used, to the unit, in every counter of every tenant.
func TestChargesOfACluster(t *testing.T) {
	for _, provider := range []string{dataplane.SHM, dataplane.TCP} {
		t.Run(provider, func(t *testing.T) { chargesOfACluster(t, provider) })
		if os.Getenv(envRemote) != "" {
			return // verbs
		}
	}
}

func chargesOfACluster(t *testing.T, provider string) {
	dir, root := t.TempDir(), ""
	config := siteConfig{Manager: "unix:" + filepath.Join(dir, "m"), Provider: provider, SecretFile: filepath.Join(dir, "secret"),
		Executors: 50, Clients: 20, Charges: 10_000, Beat: 100 * time.Millisecond}
	if testing.Short() {
		config.Executors, config.Clients, config.Charges = 10, 5, 1000
	}
	remote := os.Getenv(envRemote)
	if remote != "" {
		var err error
		if root, err = filepath.Abs("../.."); err != nil {
			t.Fatal(err)
		}
		config.Manager, config.Provider, config.SecretFile = "10.77.0.2:7474", dataplane.Verbs, filepath.Join(root, "build/twovm/secret")
		config.Executors, config.Clients, config.Charges = 20, 8, 2000
		config.Beat *= 5 // an emulated device has better to do
	}
	const kills = 3
	for k := range uint64(kills) {
		config.Marks = append(config.Marks, (k+1)*config.Charges/(kills+1))
	}
	flags := strings.Join([]string{"--listen", config.Manager, "--secret-file", config.SecretFile, "--providers", config.Provider,
		"--heartbeat", config.Beat.String(), "--allow-plaintext"}, " ")
	manager := func() *exec.Cmd {
		cmd := role(t, "manager", dir, flags)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	m := manager()
	defer func() { m.Process.Kill(); m.Wait() }()

	text, err := json.Marshal(&config)
	if err != nil {
		t.Fatal(err)
	}
	site := role(t, "site", dir, string(text))
	if remote != "" {
		self := site.Path
		site = exec.Command(filepath.Join(root, "build/twovm/remote"), "run", remote, "-e", envRole+"=site", "-e", envArgs+"="+string(text), "--", self)
		site.Stderr = os.Stderr
		site.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	} else {
		made(t, config.SecretFile)
	}
	out, err := site.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := site.Start(); err != nil {
		t.Fatal(err)
	}
	defer site.Process.Kill()
	var report siteReport
	killed := 0
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var n uint64
		if _, err := fmt.Sscanf(lines.Text(), "charges %d", &n); err != nil {
			if err := json.Unmarshal(lines.Bytes(), &report); err != nil {
				t.Errorf("the site says %q: %v", lines.Text(), err)
			}
			continue
		}
		end9(t, m)
		m = manager()
		killed++
		t.Logf("killed and started again after %d charges, %v", n, time.Since(began).Round(time.Millisecond))
		if killed == kills {
			if err := site.Process.Signal(syscall.SIGUSR1); err != nil {
				t.Error(err)
			}
		}
	}
	if err := site.Wait(); err != nil {
		t.Fatalf("the site: %v", err)
	}
	took := time.Since(began)
	m.Process.Signal(syscall.SIGTERM)
	if err := m.Wait(); err != nil {
		t.Errorf("the manager: %v", err)
	}
	if killed != kills || report.Charges < config.Charges || report.Epochs != kills+1 || report.Connected < kills+1 {
		t.Errorf("%d kills, %+v", killed, report)
	}
	l, err := accounting.OpenLedger(filepath.Join(dir, "state", "ledger"), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	equal(t, l, report.Used)
	if provider != dataplane.TCP {
		t.Logf("figure: cluster.charges = %d", report.Charges)
		t.Logf("figure: cluster.kills = %d", killed)
	}
	exact := "exact to the unit"
	if t.Failed() {
		exact = "not exact"
	}
	t.Logf("%d executors, %d clients over %s: %d charges of %d leases (%d refusals), %d kills, %v: "+exact, config.Executors, config.Clients,
		config.Provider, report.Charges, report.Leases, report.Refused, killed, took.Round(time.Millisecond))
}

// equal compares a ledger with what tenants used, counter by counter.
func equal(t *testing.T, l *accounting.Ledger, used map[string]accounting.Use) {
	t.Helper()
	totals, err := l.Totals("", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if len(totals) != len(used) || len(used) == 0 {
		t.Errorf("%d tenants in the ledger, %d used something", len(totals), len(used))
	}
	for tenant, u := range used {
		total := totals[tenant]
		for c, n := range u {
			if of := total.Of(accounting.Counter(c)); of.Cmp(new(big.Int).SetUint64(n)) != 0 {
				t.Errorf("%s: %v: %v in the ledger, %d used", tenant, accounting.Counter(c), of, n)
			}
		}
	}
}

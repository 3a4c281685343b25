package manager

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/config"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Environment of this test binary as another program.
const (
	envRole = "RFAAS_TEST_ROLE" // "manager", "crowd", "charger", "subscriber" or "site"
	envDir  = "RFAAS_TEST_DIR"
	envArgs = "RFAAS_TEST_ARGS"
)

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(envRole) {
	case "":
		leakcheck.Main(m, nil, leakcheck.Objects(dataplane.Live))
	case "manager":
		err = runManager(os.Getenv(envDir), os.Getenv(envArgs))
	case "crowd":
		err = runCrowd(os.Getenv(envDir), os.Getenv(envArgs))
	case "charger":
		err = runCharger(os.Getenv(envDir), os.Getenv(envArgs))
	case "subscriber":
		err = runSubscriber(os.Getenv(envDir), os.Getenv(envArgs))
	case "site":
		err = runSite(os.Getenv(envDir), os.Getenv(envArgs))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func role(t *testing.T, name, dir, args string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envRole+"="+name, envDir+"="+dir, envArgs+"="+args, "GORACE=halt_on_error=1") // for end9 to see
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd
}

// runManager serves until SIGTERM; more are settings that are other than these.
func runManager(dir, more string) error {
	s, err := config.LoadManager(append([]string{"--listen", "unix:" + filepath.Join(dir, "m"), "--secret-file", filepath.Join(dir, "secret"),
		"--state-dir", filepath.Join(dir, "state"), "--heartbeat", "20ms", "--executors", "64", "--providers", "shm"}, strings.Fields(more)...), nil, io.Discard, "test")
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return Serve(ctx, s, slog.New(slog.DiscardHandler))
}

// runCharger charges two leases of a tenant, one unit at a time, over as many managers as it takes, and says what they have used
// when the ledger has all of it. It does what an executor does, as fast as it can. The last tenth comes when its standard input ends.
func runCharger(dir, args string) error {
	var number, charges uint64
	if _, err := fmt.Sscan(args, &number, &charges); err != nil {
		return err
	}
	secret := filepath.Join(dir, "secret")
	conn, err := control.Dial("unix:"+filepath.Join(dir, "m"), control.DialConfig{SecretFile: secret})
	if err != nil {
		return err
	}
	defer conn.Close()
	m := control.NewManagerClient(conn)
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{})
	if err != nil {
		return err
	}
	defer dev.Close()
	info := &control.InfoReply{Incarnation: make([]byte, 16), Node: "n", NodeId: "boot/" + strconv.FormatUint(number, 10), Cores: 4, FreeCores: 4}
	binary.LittleEndian.PutUint64(info.Incarnation, number)
	heads := [2]accounting.CellHead{}
	var sums [2]accounting.Use
	for i := range heads {
		heads[i] = accounting.CellHead{Key: accounting.Key{Incarnation: incarnationOf(info), Lease: uint64(i + 1)}, Tenant: "ann", Began: time.Now()}
	}
	r := rand.New(rand.NewPCG(number, 1))
	done := uint64(0)
	last := make(chan struct{})
	go func() {
		defer close(last)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	// life is one attachment: everything that is known is added to fresh cells, then one unit after the other.
	life := func() (bool, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		reg, err := m.Register(ctx, &control.RegisterRequest{ProtocolVersion: 1, Address: fmt.Sprintf("192.0.2.%d:1", number), Info: info})
		if err != nil {
			return false, err
		}
		x, err := link.AttachExecutor(ctx, m, dev, reg.GetExecutorId(), incarnationOf(info))
		if err != nil {
			return false, err
		}
		defer x.Close()
		for i := range heads {
			if err := x.WriteHead(i, heads[i]); err != nil {
				return false, err
			}
			if err := x.Charge(i, accounting.Use{}, sums[i]); err != nil {
				return false, err
			}
		}
		for ; done < charges; done++ {
			if done == charges-charges/10 {
				<-last
			}
			i, before := done%2, sums[done%2]
			sums[i][r.IntN(accounting.NumCounters)]++ // used, whatever becomes of the charge
			if err := x.Charge(int(i), before, sums[i]); err != nil {
				done++
				return false, err
			}
		}
		for i := range heads {
			heads[i].Final, heads[i].Ended = true, time.Now()
			if err := x.WriteHead(i, heads[i]); err != nil {
				return false, err
			}
			for e := (accounting.Entry{Key: heads[i].Key, Final: true, Use: sums[i]}); ; time.Sleep(5 * time.Millisecond) {
				if receipt, given, err := x.Receipt(i); err != nil {
					return false, err
				} else if given && receipt.Covers(&e) {
					break
				}
			}
		}
		return true, nil
	}
	for end := time.Now().Add(100 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if ok, err := life(); ok {
			for c, n := range sums[1] {
				sums[0][c] += n
			}
			return json.NewEncoder(os.Stdout).Encode(sums[0])
		} else if time.Now().After(end) {
			return fmt.Errorf("charger %d: %d charges: %w", number, done, err)
		}
	}
}

// end9 ends a manager that must not have ended by itself.
func end9(t *testing.T, m *exec.Cmd) {
	t.Helper()
	m.Process.Kill()
	if err := m.Wait(); m.ProcessState.Exited() {
		t.Fatalf("the manager ended by itself: %v", err)
	}
}

// made waits for a file of a manager that starts.
func made(t *testing.T, path string) {
	t.Helper()
	testkit.Eventually(t, "the manager starts and makes "+path, func() bool {
		_, err := os.Stat(path)
		return err == nil
	})
}

// 10 million charges of four processes while the manager is killed 20 times: exact to the unit.
func TestChargesOverKills(t *testing.T) {
	charges, kills := uint64(2_500_000), 20
	if testing.Short() {
		charges, kills = 200_000, 5
	}
	dir := t.TempDir()
	m := role(t, "manager", dir, "")
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { m.Process.Kill(); m.Wait() }()
	made(t, filepath.Join(dir, "secret"))
	began := time.Now()
	results := make(chan error, 4)
	enough := make([]io.Closer, 4)
	var said [4]bytes.Buffer
	for i := range 4 {
		c := role(t, "charger", dir, fmt.Sprint(i+1, charges))
		c.Stdout = &said[i]
		var err error
		if enough[i], err = c.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer c.Process.Kill()
		go func() { results <- c.Wait() }()
	}
	r := rand.New(rand.NewPCG(1, 9))
	left, killed := 4, 0
	for left > 0 {
		var kill <-chan time.Time
		if killed < kills {
			kill = time.After(time.Duration(20+r.IntN(120)) * time.Millisecond)
		}
		select {
		case err := <-results:
			if err != nil {
				t.Fatal(err)
			}
			left--
		case <-kill:
			killed++
			end9(t, m)
			m = role(t, "manager", dir, "")
			if err := m.Start(); err != nil {
				t.Fatal(err)
			}
			if killed == kills {
				for _, c := range enough {
					c.Close()
				}
			}
		}
	}
	took := time.Since(began)
	m.Process.Signal(syscall.SIGTERM)
	if err := m.Wait(); err != nil {
		t.Errorf("the manager: %v", err)
	}
	l, err := accounting.OpenLedger(filepath.Join(dir, "state", "ledger"), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	totals, err := l.Totals("", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	var used accounting.Use
	sum := uint64(0)
	for i := range said {
		var u accounting.Use
		if err := json.Unmarshal(said[i].Bytes(), &u); err != nil {
			t.Fatalf("charger %d says %q: %v", i+1, said[i].String(), err)
		}
		for c, n := range u {
			used[c] += n
			sum += n
		}
	}
	if sum != 4*charges {
		t.Errorf("%d units were used, want %d", sum, 4*charges)
	}
	equal(t, l, map[string]accounting.Use{"ann": used})
	total := totals["ann"]
	var leases accounting.Total
	if err := l.Leases("", time.Time{}, func(e accounting.Entry) bool { leases.Add(e.Use); return true }); err != nil || leases != total {
		t.Errorf("leases add up to %v, hours to %v (%v)", leases, total, err)
	}
	t.Logf("figure: charges.exact = %d", sum)
	t.Logf("figure: charges.kills = %d", killed)
	t.Logf("%d charges of 4 processes, %d kills, %v: %.2f million a second, exact", 4*charges, killed, took.Round(time.Millisecond),
		float64(4*charges)/took.Seconds()/1e6)
	if killed < kills {
		t.Errorf("the charges were over after %d of %d kills", killed, kills)
	}
}

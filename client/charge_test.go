package client_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Charging does not slow down calls. The test compares an executor that charges ten times as often as by default with
// one that does not charge, in turns.
func TestChargingCostsCallsNothing(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	m := start(t, "bin/resource-manager", secret, "--executors", "64")
	var functions [2]*client.Function
	for i, extra := range [][]string{{}, {"--manager", m.Address, "--charge-interval", "100ms"}} {
		d := start(t, "bin/executor", secret, append([]string{"--cores", "1", "--providers", provider(), "--grace", "1s"}, extra...)...)
		w := &world{daemon: d, secret: secret}
		w.session = w.connect(t, client.Options{Executor: d.Address})
		functions[i] = function(t, w.lease(t, client.LeaseOptions{}), "echo")
	}
	in, out := make([]byte, 8), make([]byte, 8)
	const block = 500
	best := 1e9
	for try := 0; try < 5 && best > 1.1; try++ { // other load of the machine only raises the ratio
		var took [2][]time.Duration
		for range 400 {
			for i, f := range functions {
				start := time.Now()
				for range block {
					if n, err := f.Invoke(context.Background(), in, out); err != nil || n != 8 {
						t.Fatal(n, err)
					}
				}
				took[i] = append(took[i], time.Since(start)/time.Duration(block))
			}
		}
		for i := range took {
			slices.Sort(took[i])
		}
		plain, charged := took[0][len(took[0])/2], took[1][len(took[1])/2]
		best = min(best, float64(charged)/float64(plain))
		t.Logf("a call: %v not charged, %v charged (medians of 400 blocks, in turns): %.3f times", plain, charged, float64(charged)/float64(plain))
	}
	if best > 1.1 {
		t.Errorf("charged calls take %.3f times as long", best)
	}
}

// The metrics of an executor count calls, failed calls, their elapsed time, and their processor time.
func TestMetricsOfCalls(t *testing.T) {
	dir := t.TempDir()
	secret, web := filepath.Join(dir, "secret"), filepath.Join(dir, "web")
	m := start(t, "bin/resource-manager", secret, "--executors", "8")
	d := start(t, "bin/executor", secret, "--cores", "1", "--providers", provider(), "--grace", "1s", "--manager", m.Address, "--charge-interval", "100ms",
		"--http-listen", "unix:"+web)
	w := &world{daemon: d, secret: secret}
	w.session = w.connect(t, client.Options{Executor: d.Address})
	l := w.lease(t, client.LeaseOptions{})
	const calls, nap = 4, 300 * time.Millisecond
	sleep := function(t, l, "sleep_ns")
	for range calls {
		if _, err := sleep.Invoke(context.Background(), u64(uint64(nap)), make([]byte, 8)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := function(t, l, "fail").Invoke(context.Background(), []byte("on purpose"), nil); !errors.Is(err, client.ErrFunction) {
		t.Fatal(err)
	}
	metric := func(name string) float64 {
		v, err := strconv.ParseFloat(testkit.Metric(t, web, "rfaas_executor_"+name+"_total"), 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return v
	}
	testkit.Eventually(t, "all calls are counted", func() bool { return metric("calls") == calls+1 && metric("call_failures") == 1 })
	elapsed, used := metric("call_elapsed_seconds"), metric("call_seconds")
	t.Logf("%d calls that sleep %v each: %.3f s elapsed, %.3f s of the processor", calls, nap, elapsed, used)
	if least := calls * nap.Seconds() / 2; elapsed < least || used >= elapsed { // a sample in 50 ms, so the estimate of a call of 300 ms is good to a sixth
		t.Errorf("%.3f s elapsed, want at least %.3f, and %.3f s of the processor, want less", elapsed, least, used)
	}
}

// A second SIGTERM ends an executor at once, even during a call and with a long grace. Its use until then is charged.
func TestSecondSignalChargesWhatWasUsed(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	m := start(t, "bin/resource-manager", secret, "--executors", "8")
	d := start(t, "bin/executor", secret, "--cores", "1", "--providers", provider(), "--grace", "5m", "--manager", m.Address)
	w := &world{daemon: d, secret: secret}
	w.session = w.connect(t, client.Options{Executor: d.Address, Tenant: "ann"})
	l := w.lease(t, client.LeaseOptions{})
	began := time.Now()
	if _, err := l.Worker(0).Submit(context.Background(), function(t, l, "sleep_ns"), u64(uint64(10*time.Minute)), 8); err != nil {
		t.Fatal(err)
	}
	untilRuns(t, l.Worker(0), "sleep_ns")
	d.signal(syscall.SIGTERM)
	again := time.NewTicker(100 * time.Millisecond) // signals within the first second count as one (cmd/executor)
	defer again.Stop()
	bound := time.After(30 * time.Second)
	for ended := false; !ended; {
		select {
		case <-d.done:
			ended = true
		case <-again.C:
			d.signal(syscall.SIGTERM)
		case <-bound:
			t.Fatal("it waits for the call")
		}
	}
	used := time.Since(began)
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	conn, err := control.Dial(m.Address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := control.NewManagerClient(conn).Bill(t.Context(), &control.BillRequest{Tenant: "ann"})
	if err != nil || len(r.GetBills()) != 1 {
		t.Fatalf("%v, %v", r, err)
	}
	micros, err := strconv.ParseInt(r.GetBills()[0].GetLines()[0].GetUnits(), 10, 64)
	if charged := time.Duration(micros) * time.Microsecond; err != nil || charged < time.Second || charged > used+time.Second {
		t.Errorf("%v of a core are charged (%v), the lease had it for %v", charged, err, used)
	}
}

package faults

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
)

var (
	restLeases = flag.Int("rest-leases", 20, "leases of TestExecutorAtRest")
	restTime   = flag.Duration("rest-time", 500*time.Millisecond, "how long TestExecutorAtRest measures without leases, and then with them")
)

// cpuTime returns the processor time of a process and of its descendants, without workers and their guards.
func cpuTime(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	const tick = time.Second / 100 // USER_HZ
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	for _, text := range strings.Fields(rest)[11:13] { // user and system time
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatalf("/proc/%d/stat: %s", pid, b)
		}
		sum += time.Duration(n) * tick
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, thread.Name())) // none: the thread has ended
		for child := range strings.FieldsSeq(string(children)) {
			n, _ := strconv.Atoi(child)
			name, _ := os.ReadFile("/proc/" + child + "/comm")
			switch strings.TrimSpace(string(name)) {
			case "rfaas-spawner", "rfaas-zygote":
				sum += cpuTime(t, n)
			}
		}
	}
	return sum
}

// TestExecutorAtRest measures the processor time of an executor, its spawner and its zygote while nothing happens, without leases and with many.
// The executor reports to a resource manager, and the client's agent renews the leases. With fewer than a thousand leases, the figure for a thousand is
// calculated. The measurement in CI is too short for a verdict.
func TestExecutorAtRest(t *testing.T) {
	if testing.Short() || provider() != "shm" {
		t.Skip("does not depend on the provider")
	}
	w := newWorld(t)
	w.newManagerOn(here)
	d := w.newExecutor("executor", "--share-cores", strconv.Itoa(*restLeases/2+1), "--memory", strconv.Itoa(*restLeases*24)+"MiB")
	share := func() float64 {
		pid, began := d.current().cmd.Process.Pid, time.Now()
		before := cpuTime(t, pid)
		time.Sleep(*restTime) // what is measured
		used := cpuTime(t, pid) - before
		return used.Seconds() / time.Since(began).Seconds() * 100
	}
	idle := share()
	s, err := client.Connect(t.Context(), client.Options{Manager: w.manager.address, SecretFile: w.secret, Provider: provider()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range *restLeases {
		l := lease(t, s, client.LeaseOptions{WaitMode: client.Warm, Memory: 16 << 20})
		out := make([]byte, 8)
		if n, err := function(t, l, "echo").Invoke(t.Context(), []byte("at rest!"), out); err != nil || string(out[:n]) != "at rest!" {
			t.Fatalf("%q, %v", out[:n], err)
		}
	}
	leased := share()
	t.Logf("figure: executor.idle_cpu = %.3f %%", idle)
	t.Logf("figure: executor.thousand_leases_cpu = %.3f %%", idle+(leased-idle)*1000/float64(*restLeases))
	t.Logf("%.3f %% of a core with %d leases; %v without leases, and again with them", leased, *restLeases, *restTime)
	const clearlyTooMuch = 50
	if idle > clearlyTooMuch || leased > clearlyTooMuch {
		t.Errorf("the executor uses %.1f %% of a core while nothing happens, %.1f %% with %d leases", idle, leased, *restLeases)
	}
}

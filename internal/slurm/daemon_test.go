package slurm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// fixture runs a node daemon with a simulated Slurm and simulated executors.
type fixture struct {
	t      *testing.T
	daemon *Daemon

	mu      sync.Mutex
	usage   Usage
	err     error
	asked   int
	leased  bool
	delay   time.Duration // how long an executor takes to end
	offers  []Offer       // of the executors so far
	alive   int
	crash   chan error    // ends the executor
	changed chan struct{} // capacity 1
}

func newFixture(t *testing.T, change func(*DaemonConfig, *fixture)) *fixture {
	f := &fixture{t: t, usage: Usage{CPUs: 4, Memory: 8 << 30, Usable: true}, crash: make(chan error), changed: make(chan struct{}, 1)}
	cfg := DaemonConfig{Usage: f.ask, Launch: f.launch, Leased: func(context.Context) (bool, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.leased, nil
	}, Order: []int{0, 2, 1, 3}, Spare: true, Resync: time.Hour, GrowWithin: time.Hour, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg, f)
	}
	f.daemon = NewDaemon(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.daemon.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(bound):
			t.Error("the node daemon does not end")
		}
		if f.alive != 0 {
			t.Errorf("%d executors outlive their node daemon", f.alive)
		}
	})
	return f
}

func (f *fixture) ask(context.Context) (Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.usage, f.err
}

func (f *fixture) launch(ctx context.Context, o Offer) error {
	f.mu.Lock()
	f.offers = append(f.offers, o)
	if f.alive++; f.alive > 1 {
		f.t.Error("two executors run at once")
	}
	delay := f.delay
	f.mu.Unlock()
	f.notify()
	var err error
	select {
	case <-ctx.Done():
		time.Sleep(delay)
	case err = <-f.crash:
	}
	f.mu.Lock()
	f.alive--
	f.mu.Unlock()
	f.notify()
	return err
}

func (f *fixture) notify() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// set changes which jobs Slurm reports.
func (f *fixture) set(holds ...Hold) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.usage.Holds = holds
}

// lends waits until an executor lends exactly these CPUs and this memory in MiB, as in "[0 1] 8192".
func (f *fixture) lends(want string) {
	f.t.Helper()
	got := ""
	for end := time.Now().Add(bound); time.Now().Before(end); {
		f.mu.Lock()
		got = ""
		if f.alive > 0 {
			o := f.offers[len(f.offers)-1]
			got = fmt.Sprintf("%v %d", o.CPUs, o.Memory>>20)
		}
		f.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-f.changed:
		case <-time.After(20 * time.Millisecond):
		}
	}
	f.t.Fatalf("lends %q, want %q", got, want)
}

func (f *fixture) prolog(job int64) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), bound)
	defer cancel()
	if err := f.daemon.Prolog(ctx, job); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) epilog(job int64) {
	f.t.Helper()
	if err := f.daemon.Epilog(f.t.Context(), job); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.alive
}

// The prolog of a job returns when the executor has ended. During the job the rest of the node is lent. After its epilog the whole node is
// lent again, even while Slurm still lists the job.
func TestDaemonFollowsJobs(t *testing.T) {
	f := newFixture(t, func(_ *DaemonConfig, f *fixture) { f.delay = 30 * time.Millisecond })
	f.lends("[0 1 2 3] 8192")
	job := Hold{Job: 7, CPUs: []int{0, 1}, Memory: 1 << 30}
	f.set(job)
	f.prolog(7)
	f.lends("[1 3] 7168") // Slurm's 0 and 1 are the kernel's 0 and 2
	f.epilog(7)
	f.lends("[0 1 2 3] 8192")
	whole := Hold{Job: 8, CPUs: []int{0, 1, 2, 3}, Memory: 1 << 30}
	f.set(job, whole)
	f.prolog(8)
	if n := f.count(); n != 0 {
		t.Errorf("%d executors after the prolog of a job that has the node", n)
	}
	f.set(whole)
	f.epilog(8)
	f.lends("[0 1 2 3] 8192")
	f.set()
	f.prolog(9) // a cancelled job: Slurm does not list it
	f.lends("[0 1 2 3] 8192")
}

// No executor runs when a prolog returns, even if the daemon was about to start one.
func TestDaemonPrologEndsExecutor(t *testing.T) {
	f := newFixture(t, func(_ *DaemonConfig, f *fixture) { f.delay = time.Millisecond })
	r := rand.New(rand.NewPCG(1, 2))
	for job := int64(1); job < 200; job++ {
		whole := Hold{Job: job, CPUs: []int{0, 1, 2, 3}, Memory: 1 << 30}
		f.set(whole)
		time.Sleep(time.Duration(r.IntN(3000)) * time.Microsecond)
		f.prolog(job)
		if n := f.count(); n != 0 {
			t.Fatalf("job %d: %d executors after its prolog", job, n)
		}
		if r.IntN(2) == 0 {
			f.set()
		}
		f.epilog(job)
	}
	f.set()
	f.lends("[0 1 2 3] 8192")
}

func TestDaemonLendsWholeNodesOnly(t *testing.T) {
	f := newFixture(t, func(c *DaemonConfig, _ *fixture) { c.Spare, c.KeepCPUs, c.KeepMemory = false, 1, 1<<30 })
	f.lends("[1 2 3] 7168")
	f.set(Hold{Job: 1, CPUs: []int{3}, Memory: 1 << 20})
	f.prolog(1)
	if s, err := f.daemon.Status(t.Context()); err != nil || s.Running {
		t.Errorf("%+v, %v", s, err)
	}
	f.epilog(1)
	f.lends("[1 2 3] 7168")
}

// A regular query of Slurm replaces hooks that were lost.
func TestDaemonRecoversLostHooks(t *testing.T) {
	f := newFixture(t, func(c *DaemonConfig, _ *fixture) { c.Resync = 10 * time.Millisecond })
	f.lends("[0 1 2 3] 8192")
	f.set(Hold{Job: 1, CPUs: []int{2}, Memory: 1 << 30})
	f.lends("[0 2 3] 7168")
	f.set()
	f.lends("[0 1 2 3] 8192")
}

// An executor whose cores are leased is replaced by a larger one only after GrowWithin.
func TestDaemonDelaysGrowth(t *testing.T) {
	f := newFixture(t, func(c *DaemonConfig, f *fixture) { c.GrowWithin, f.leased = 300*time.Millisecond, true })
	f.set(Hold{Job: 1, CPUs: []int{0}, Memory: 1 << 30})
	f.prolog(1)
	f.lends("[1 2 3] 7168")
	begin := time.Now()
	f.epilog(1)
	f.lends("[0 1 2 3] 8192")
	if d := time.Since(begin); d < 250*time.Millisecond {
		t.Errorf("an executor in use was replaced after %v", d)
	}
}

// The daemon lends a node as soon as Slurm says that it is usable, without a hook.
func TestDaemonNodeBecomesUsable(t *testing.T) {
	f := newFixture(t, func(c *DaemonConfig, f *fixture) { f.usage.Usable = false })
	eventually(t, "Slurm was asked", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.asked > 0 })
	f.mu.Lock()
	f.usage.Usable = true
	f.mu.Unlock()
	f.lends("[0 1 2 3] 8192")
}

func TestDaemonFailures(t *testing.T) {
	f := newFixture(t, func(_ *DaemonConfig, f *fixture) { f.err = errors.New("no route to the controller") })
	eventually(t, "Slurm was asked", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.asked > 0 })
	if n := f.count(); n != 0 {
		t.Errorf("%d executors although Slurm did not answer", n)
	}
	f.mu.Lock()
	f.err = nil
	f.mu.Unlock()
	f.lends("[0 1 2 3] 8192")
	begin := time.Now()
	f.crash <- errors.New("exit status 1")
	eventually(t, "another executor", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return len(f.offers) == 2 })
	if d := time.Since(begin); d < restartLeast {
		t.Errorf("started again after %v", d)
	}
}

// Slurm numbers CPUs by socket, then by core. The kernel's order depends on the firmware.
func TestCPUOrder(t *testing.T) {
	root := t.TempDir()
	write := func(path, text string) {
		path = filepath.Join(root, "sys/devices/system/cpu", path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := cpuOrder(root); err == nil {
		t.Error("a node without CPUs")
	}
	write("online", "0-7")
	// Sockets alternate, threads come last: two sockets with two cores of two threads each.
	for cpu := range 8 {
		write(fmt.Sprintf("cpu%d/topology/physical_package_id", cpu), fmt.Sprint(9-cpu%2))
		write(fmt.Sprintf("cpu%d/topology/core_cpus_list", cpu), fmt.Sprintf("%d,%d", cpu%4, cpu%4+4))
	}
	order, err := cpuOrder(root)
	if err != nil || fmt.Sprint(order) != "[0 4 2 6 1 5 3 7]" {
		t.Errorf("%v, %v", order, err)
	}
	if order, err := cpuOrder("/"); err != nil || len(order) == 0 {
		t.Errorf("this machine: %v, %v", order, err)
	}
}

func TestOffer(t *testing.T) {
	order := []int{0, 4, 1, 5, 2, 6, 3, 7}
	u := Usage{CPUs: 8, Memory: 4 << 30, Usable: true}
	hold := func(job int64, mib uint64, cpus ...int) Hold { return Hold{Job: job, CPUs: cpus, Memory: mib << 20} }
	for name, c := range map[string]struct {
		u    func(*Usage)
		gone []int64
		keep int
		want string
	}{
		"all of it":     {want: "[0 1 2 3 4 5 6 7] 4096"},
		"two jobs":      {u: func(u *Usage) { u.Holds = []Hold{hold(1, 1024, 0, 1), hold(2, 24, 7)} }, want: "[1 2 3 5 6] 3048"},
		"one of them":   {u: func(u *Usage) { u.Holds = []Hold{hold(1, 1024, 0, 1), hold(2, 24, 7)} }, gone: []int64{1}, want: "[0 1 2 3 4 5 6] 4072"},
		"no CPU left":   {u: func(u *Usage) { u.Holds = []Hold{hold(1, 1, 0, 1, 2, 3, 4, 5, 6, 7)} }, want: "[] 0"},
		"no memory":     {u: func(u *Usage) { u.Holds = []Hold{hold(1, 4096, 0)} }, want: "[] 0"},
		"little memory": {u: func(u *Usage) { u.Holds = []Hold{hold(1, 4090, 0)} }, want: "[] 0"},
		"some kept":     {keep: 3, want: "[2 3 5 6 7] 4096"},
		"all kept":      {keep: 8, want: "[] 0"},
		"drained":       {u: func(u *Usage) { u.Usable = false }, want: "[] 0"},
		"Slurm was told fewer": {u: func(u *Usage) { u.CPUs, u.Holds = 6, []Hold{hold(1, 96, 0, 1)} },
			want: "[2 3 6 7] 4000"},
		"Slurm was told more": {u: func(u *Usage) { u.CPUs, u.Holds = 100, []Hold{hold(1, 96, slices.Repeat([]int{0}, 6)...)} }, want: "[3 7] 4000"},
	} {
		t.Run(name, func(t *testing.T) {
			u := u
			if c.u != nil {
				c.u(&u)
			}
			gone := map[int64]bool{}
			for _, id := range c.gone {
				gone[id] = true
			}
			o := offer(u, order, gone, c.keep, 0, true)
			if got := fmt.Sprintf("%v %d", o.CPUs, o.Memory>>20); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	job := "JobId=1 JobName=x=y Nodes=n1 CPU_IDs=0-1 Mem=200 GRES= Nodes=n[2-3] CPU_IDs=0,3 Mem=100 GRES= NodeList=n[1-3]\n"
	c := Commands{Run: script{"sinfo": "n2|mixed|1/3/0/4|2048|100|\nn2|mixed|1/3/0/4|2048|100|\n", "squeue": "1\n2\n3\n", "job 1": job,
		"job 2": "ERROR scontrol: slurm_load_jobs error: Invalid job id specified", "job 3": "JobId=3 NodeList=\n"}.run}
	u, err := c.Usage(t.Context(), "n2")
	if err != nil || fmt.Sprint(u) != "{4 2147483648 true [{1 [0 3] 104857600 <nil>}]}" {
		t.Errorf("%v, %v", u, err)
	}
	for name, s := range map[string]script{
		"no such node": {"sinfo": ""}, "sinfo": {"sinfo": "ERROR x"}, "squeue": {"sinfo": "n2|idle|0/1/0/1|1|0|\n", "squeue": "ERROR x"},
		"job number": {"sinfo": "n2|idle|0/1/0/1|1|0|\n", "squeue": "x\n"}, "scontrol": {"sinfo": "n2|idle|0/1/0/1|1|0|\n", "squeue": "1\n", "job 1": "ERROR x"},
	} {
		if u, err := (&Commands{Run: s.run}).Usage(t.Context(), "n2"); err == nil {
			t.Errorf("%s: %v", name, u)
		}
	}
}

// Text that a user writes into the name, comment or account of a job cannot reduce the CPUs or memory that the job counts with.
func TestJobTextHidesNothing(t *testing.T) {
	const slurms = " JOB_GRES=(null) Nodes=n2 CPU_IDs=1-3 Mem=300 GRES= MinCPUsNode=1 "
	for name, c := range map[string]struct {
		before, after string
		cpus          string
		mib           uint64
		doubt         string
	}{
		"nothing":                     {cpus: "[1 2 3]", mib: 300},
		"other words":                 {before: "x Nodes=n2", after: "x Nodes=n2 Nodes= CPU_IDs=0 Nodes=5 Mem=1", cpus: "[1 2 3]", mib: 300},
		"other nodes":                 {before: "x Nodes=n1 CPU_IDs=0 Mem=1", cpus: "[1 2 3]", mib: 300},
		"less, in its name":           {before: "x Nodes=n2 CPU_IDs=3 Mem=1 GRES=", cpus: "[1 2 3]", mib: 300, doubt: "2 times"},
		"less, in its comment":        {after: "x Nodes=n2 CPU_IDs=1 Mem=1 GRES=", cpus: "[1 2 3]", mib: 300, doubt: "2 times"},
		"less, in lines of their own": {before: "x\n     Nodes=n2 CPU_IDs=1 Mem=1 GRES=\ny", cpus: "[1 2 3]", mib: 300, doubt: "2 times"},
		"none":                        {before: "x Nodes=n2 CPU_IDs= Mem=0 GRES=", cpus: "[1 2 3]", mib: 300, doubt: "2 times"},
		"others":                      {before: "x Nodes=n[1-4] CPU_IDs=0 Mem=1 GRES=", cpus: "[0 1 2 3]", mib: 300, doubt: "2 times"},
		"more memory":                 {after: "x Nodes=n2 CPU_IDs=1 Mem=900 GRES=", cpus: "[1 2 3]", mib: 900, doubt: "2 times"},
		"no memory":                   {before: "x Nodes=n2 CPU_IDs=0 Memory=1", cpus: "[0 1 2 3]", mib: 2048, doubt: "not a memory size"},
		"no CPUs":                     {before: "x Nodes=n2 CPU_IDs=a Mem=1", cpus: "[0 1 2 3]", mib: 2048, doubt: "neither a CPU nor"},
		"no host list":                {before: "x Nodes=n[ CPU_IDs=0 Mem=1", cpus: "[0 1 2 3]", mib: 2048, doubt: "brackets"},
		"a hundred million hosts": {before: strings.Repeat(" Nodes=x[0-99999] CPU_IDs=0 Mem=1 ", 1000), cpus: "[0 1 2 3]", mib: 2048,
			doubt: "too many hosts"},
	} {
		t.Run(name, func(t *testing.T) {
			text := "JobId=1 JobName=" + c.before + " UserId=u(1)" + slurms + "Comment=" + c.after + " StdErr=/dev/null\n"
			s := script{"sinfo": "n2|mixed|1/3/0/4|2048|100|\n", "squeue": "1\n", "job 1": text}
			u, err := (&Commands{Run: s.run}).Usage(t.Context(), "n2")
			if err != nil || len(u.Holds) != 1 {
				t.Fatal(u, err)
			}
			h := u.Holds[0]
			if fmt.Sprint(h.CPUs) != c.cpus || h.Memory != c.mib<<20 {
				t.Errorf("CPUs %v, %d MiB; want %s, %d", h.CPUs, h.Memory>>20, c.cpus, c.mib)
			}
			if got := fmt.Sprint(h.Doubt); c.doubt == "" != (h.Doubt == nil) || !strings.Contains(got, c.doubt) {
				t.Errorf("doubt %v, want %q", h.Doubt, c.doubt)
			}
		})
	}
}

func TestHooks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	if _, err := TellDaemon(t.Context(), path, "prolog 1", false); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("without a node daemon: %v", err)
	}
	l, err := ListenHooks(path)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, nil)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.daemon.ServeHooks(ctx, l, slog.New(slog.DiscardHandler)) }()
	f.lends("[0 1 2 3] 8192")
	f.set(Hold{Job: 5, CPUs: []int{0, 1, 2, 3}, Memory: 1})
	if answer, err := TellDaemon(t.Context(), path, "prolog 5", false); err != nil || !strings.HasSuffix(answer, "ms") || f.count() != 0 {
		t.Errorf("%q, %v, %d executors", answer, err, f.count())
	}
	if answer, err := TellDaemon(t.Context(), path, "status", false); err != nil || !strings.Contains(answer, `"running":false`) {
		t.Errorf("%q, %v", answer, err)
	}
	if _, err := TellDaemon(t.Context(), path, "epilog 5", false); err != nil {
		t.Error(err)
	}
	f.lends("[0 1 2 3] 8192")
	for _, bad := range []string{"", "prolog", "prolog x", "prolog -1", "epilog 0", "stop 1", "status 1", strings.Repeat("x", 2*lineMax)} {
		if answer, err := TellDaemon(t.Context(), path, bad, false); err == nil {
			t.Errorf("%.20q: %q", bad, answer)
		}
	}
	if _, err := ListenHooks(path); err == nil || !strings.Contains(err.Error(), "another node daemon") {
		t.Errorf("a second node daemon: %v", err)
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	// The socket of a killed daemon does not prevent the start of the next one.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	if l, err = ListenHooks(path); err != nil {
		t.Fatal(err)
	}
	l.Close()
}

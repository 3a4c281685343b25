package neighbour

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/topology"
)

// The job is a process and a session of its own. In the process of the workers' client, the Go runtime would stop a thread of the job whenever a
// call ends.

// order tells the job to do a batch of Units, or to take memory if Units is 0.
type order struct {
	Kind    string
	CPUs    []int
	Units   int64
	Bytes   int64  // of memory to take
	Workers []int  // processes whose processor time is measured
	Short   uint64 // bytes: the node's memory is short if less is available
}

// answer is the job's report on an order.
type answer struct {
	Took    time.Duration
	CPU     time.Duration   // processor time of all threads
	Waited  time.Duration   // time that all threads waited for a CPU
	Workers time.Duration   // processor time of the workers on the CPU of each thread while it worked
	Time    time.Duration   // that all threads took
	Late    []time.Duration // if the kind sleeps: the delay of each wake-up
	Short   time.Duration   // CLOCK_MONOTONIC when the node's memory was short; 0: it was not
}

// monotonic returns CLOCK_MONOTONIC, which is the same in all processes.
func monotonic() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return time.Duration(now.Nano())
}

// takeMemory takes memory in steps, and returns when less than short was available for the first time.
func takeMemory(bytes int64, short uint64) (when time.Duration, err error) {
	const step = 8 << 20
	for ; bytes > 0; bytes -= step {
		if _, err := unix.Mmap(-1, 0, int(min(bytes, step)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE); err != nil {
			return 0, err
		}
		if m, err := topology.NodeMemory("/"); err != nil {
			return 0, err
		} else if when == 0 && m.Available < short {
			when = monotonic()
		}
	}
	return when, nil
}

// job is the neighbour's process.
type job struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
}

// startJob starts a process that serves orders. It is killed when ctx ends.
func startJob(ctx context.Context, command []string) (j *job, err error) {
	j = &job{cmd: exec.CommandContext(ctx, command[0], command[1:]...)}
	j.cmd.Stderr = os.Stderr
	j.cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1") // signals for preemption would count as the workers' effect
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if j.in, err = j.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := j.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	j.out = json.NewDecoder(out)
	return j, j.cmd.Start()
}

func (j *job) end() {
	_ = j.in.Close()
	_ = j.cmd.Wait() // an order that failed has its own error
}

// begin sends an order. finish waits until it is done, and returns the job's answer.
func (j *job) begin(o order) error { return json.NewEncoder(j.in).Encode(o) }

func (j *job) finish() (a answer, err error) {
	if err = j.out.Decode(&a); err == nil && a.Took <= 0 {
		err = errors.New("the job did nothing")
	}
	return a, err
}

func (j *job) do(o order) (answer, error) {
	if err := j.begin(o); err != nil {
		return answer{}, err
	}
	return j.finish()
}

// ServeJob is the job's process. It reads orders until the end of its input, and writes an answer to each.
func ServeJob(in io.Reader, out io.Writer) error {
	debug.SetGCPercent(-1)
	made := map[string]kernel{}
	orders, answers := json.NewDecoder(bufio.NewReader(in)), json.NewEncoder(out)
	for {
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var a answer
		began := time.Now()
		if o.Bytes > 0 {
			var err error
			if a.Short, err = takeMemory(o.Bytes, o.Short); err != nil {
				return err
			}
		} else if o.Units > 0 && len(o.CPUs) > 0 {
			if made[o.Kind] == nil {
				make, ok := kinds[o.Kind]
				if !ok {
					return fmt.Errorf("no kind of job is called %q", o.Kind)
				}
				made[o.Kind] = make()
			}
			runtime.GOMAXPROCS(len(o.CPUs) + 2)
			began = together(made[o.Kind], &o, &a)
		}
		a.Took = time.Since(began)
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

// kinds has the kinds of jobs: a loop in registers, a triad over arrays that exceed the caches, threads that wait for each other's words, and threads
// that sleep for 1 ms at a time.
var kinds = map[string]func() kernel{"compute": compute, "bandwidth": triad, "latency": pingPong, "wake-up": sleeper}

// kernel is the work of one thread. thread is its index among n. It returns how late it ran after each sleep, if it sleeps.
type kernel func(thread, n int, units int64) (late []time.Duration)

// scheduled returns the processor time of the calling thread, and the time that it has waited for a CPU. If the kernel does not report them, it returns zeros.
func scheduled() (cpu, waited time.Duration) {
	b, _ := os.ReadFile("/proc/thread-self/schedstat")
	_, _ = fmt.Sscan(string(b), (*int64)(&cpu), (*int64)(&waited))
	return cpu, waited
}

// usedOn returns the processor time of those processes that may run on a CPU. One that has ended has used none.
func usedOn(cpu int, pids []int) (sum time.Duration) {
	for _, pid := range pids {
		var may unix.CPUSet
		var used unix.Timespec
		if unix.SchedGetaffinity(pid, &may) != nil || !may.IsSet(cpu) {
			continue
		}
		if unix.ClockGettime(int32(^pid)<<3|2, &used) == nil { // the CPU clock of another process, as clock_getcpuclockid computes it
			sum += time.Duration(used.Nano())
		}
	}
	return sum
}

// together runs a kernel on a thread for each CPU, and returns when these threads began. It fills a, except for Took.
func together(k kernel, o *order, a *answer) (began time.Time) {
	var ready, done sync.WaitGroup
	var mu sync.Mutex
	begin := make(chan struct{})
	for i, cpu := range o.CPUs {
		ready.Add(1)
		done.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with its CPU
			var set unix.CPUSet
			set.Set(cpu)
			_ = unix.SchedSetaffinity(0, &set)
			ready.Done()
			<-begin
			workers, from := usedOn(cpu, o.Workers), time.Now()
			used, waited := scheduled()
			late := k(i, len(o.CPUs), o.Units)
			usedAfter, waitedAfter := scheduled()
			took := time.Since(from)
			workers = usedOn(cpu, o.Workers) - workers
			mu.Lock()
			defer mu.Unlock()
			a.CPU, a.Waited, a.Late = a.CPU+usedAfter-used, a.Waited+waitedAfter-waited, append(a.Late, late...)
			a.Time, a.Workers = a.Time+took, a.Workers+workers
		})
	}
	ready.Wait()
	began = time.Now()
	close(begin)
	done.Wait()
	return began
}

var sink atomic.Uint64

// compute is a loop in registers.
func compute() kernel {
	return func(thread, _ int, units int64) []time.Duration {
		x := uint64(thread) + 1
		for range units * 1000 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		sink.Add(x)
		return nil
	}
}

// triad streams over arrays of 32 MiB.
func triad() kernel {
	const n = 4 << 20
	var mu sync.Mutex
	arrays := map[int][3][]float64{}
	return func(thread, _ int, units int64) []time.Duration {
		mu.Lock()
		a, ok := arrays[thread]
		if !ok {
			for i := range a {
				a[i] = make([]float64, n)
				for j := range a[i] {
					a[i][j] = float64(i)
				}
			}
			arrays[thread] = a
		}
		mu.Unlock()
		for range units {
			x, y, z := a[0], a[1][:n], a[2][:n]
			for j := range x {
				x[j] = y[j] + 3*z[j]
			}
		}
		return nil
	}
}

// pingPong is a round trip between each pair of threads, like the messages of a job whose threads wait for each other.
func pingPong() kernel {
	words := make([]struct {
		there, back atomic.Int64
		_           [112]byte
	}, 1024)
	return func(thread, n int, units int64) []time.Duration {
		if thread == n-1 && n%2 == 1 {
			return nil // it has no partner
		}
		w := &words[thread/2]
		for i := range units * 100 {
			if thread%2 == 0 {
				w.there.Store(i + 1)
				for w.back.Load() != i+1 {
				}
			} else {
				for w.there.Load() != i+1 {
				}
				w.back.Store(i + 1)
			}
		}
		if thread%2 == 0 {
			w.there.Store(0)
			w.back.Store(0)
		}
		return nil
	}
}

// sleeper sleeps for a millisecond again and again, like a thread of a job that waits for messages or for its file system.
func sleeper() kernel {
	const every = time.Millisecond
	return func(_, _ int, units int64) (late []time.Duration) {
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // else the kernel may wake a thread 50 us later
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		for range units {
			wanted := unix.NsecToTimespec(now.Nano() + int64(every))
			for unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &wanted, nil) == unix.EINTR {
			}
			_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
			late = append(late, time.Duration(now.Nano()-wanted.Nano()))
		}
		return late
	}
}

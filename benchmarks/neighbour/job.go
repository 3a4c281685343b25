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
)

// The job is a process and a session of its own. In the process of the workers' client, the Go runtime would stop a thread of the job whenever a
// call ends.

// order tells the job to do a batch of Units, or to take memory if Units is 0.
type order struct {
	Kind  string
	CPUs  []int
	Units int64
	Bytes int64 // of memory to take
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

// begin sends an order. finish waits until it is done, and returns how long that took.
func (j *job) begin(o order) error { return json.NewEncoder(j.in).Encode(o) }

func (j *job) finish() (took time.Duration, err error) {
	if err = j.out.Decode(&took); err == nil && took <= 0 {
		err = errors.New("the job did nothing")
	}
	return took, err
}

func (j *job) do(o order) (time.Duration, error) {
	if err := j.begin(o); err != nil {
		return 0, err
	}
	return j.finish()
}

// ServeJob is the job's process. It reads orders until the end of its input, and writes the nanoseconds that each one took.
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
		began := time.Now()
		if o.Bytes > 0 {
			_, err := unix.Mmap(-1, 0, int(o.Bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
			if err != nil {
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
			began = together(made[o.Kind], o.CPUs, o.Units)
		}
		if err := answers.Encode(time.Since(began)); err != nil {
			return err
		}
	}
}

// kinds has the kinds of jobs: a loop in registers, a triad over arrays that exceed the caches, and threads that wait for each other's words.
var kinds = map[string]func() kernel{"compute": compute, "bandwidth": triad, "latency": pingPong}

// kernel is the work of one thread. thread is its index among n.
type kernel func(thread, n int, units int64)

// together runs a kernel on a thread for each CPU, and returns when these threads began.
func together(k kernel, cpus []int, units int64) (began time.Time) {
	var ready, done sync.WaitGroup
	begin := make(chan struct{})
	for i, cpu := range cpus {
		ready.Add(1)
		done.Go(func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with its CPU
			var set unix.CPUSet
			set.Set(cpu)
			_ = unix.SchedSetaffinity(0, &set)
			ready.Done()
			<-begin
			k(i, len(cpus), units)
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
	return func(thread, _ int, units int64) {
		x := uint64(thread) + 1
		for range units * 1000 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		sink.Add(x)
	}
}

// triad streams over arrays of 32 MiB.
func triad() kernel {
	const n = 4 << 20
	var mu sync.Mutex
	arrays := map[int][3][]float64{}
	return func(thread, _ int, units int64) {
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
	}
}

// pingPong is a round trip between each pair of threads, like the messages of a job whose threads wait for each other.
func pingPong() kernel {
	words := make([]struct {
		there, back atomic.Int64
		_           [112]byte
	}, 1024)
	return func(thread, n int, units int64) {
		if thread == n-1 && n%2 == 1 {
			return // it has no partner
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
	}
}

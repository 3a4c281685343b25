package slurm

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeSlurm is a cluster with idle nodes on which executor jobs start at once.
type fakeSlurm struct {
	mu    sync.Mutex
	nodes int
	jobs  map[int64]*fakeJob
	// How many times squeue still lists a cancelled job as ending.
	lingers int
	// Called after each command, with mu held.
	after func(command string)
}

type fakeJob struct {
	name, state string
	listed      int
}

func (s *fakeSlurm) live() (n int) {
	for _, j := range s.jobs {
		if j.state == "RUNNING" {
			n++
		}
	}
	return n
}

func (s *fakeSlurm) run(_ context.Context, name string, args ...string) (out string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value := func(key string) string {
		for _, a := range args {
			if v, ok := strings.CutPrefix(a, key+"="); ok {
				return v
			}
		}
		return ""
	}
	each := func(ids []string, do func(id int64, j *fakeJob)) {
		for _, id := range ids {
			n, _ := strconv.ParseInt(id, 10, 64)
			if j := s.jobs[n]; j != nil {
				do(n, j)
			}
		}
	}
	switch line := name + " " + strings.Join(args, " "); {
	case name == "sinfo":
		for n := range s.nodes {
			out += fmt.Sprintf("n%d|idle|0/2/0/2|2048|0|\n", n+1)
		}
	case strings.Contains(line, "show reservation"), strings.Contains(line, "--states=PENDING"):
	case name == "squeue" && value("--jobs") != "":
		each(strings.Split(value("--jobs"), ","), func(id int64, j *fakeJob) { out += fmt.Sprintf("%d|%s|%s\n", id, j.state, j.name) })
	case name == "squeue":
		for id, j := range s.jobs {
			if j.state == "RUNNING" || j.listed > 0 {
				state := j.state
				if state != "RUNNING" {
					j.listed--
					state = "COMPLETING"
				}
				out += fmt.Sprintf("%d|%s|1:00:00|0:00|1700000000|1700000000|%s|\n", id, state, j.name)
			}
		}
	case name == "scontrol" && args[0] == "update":
		each(strings.Split(value("JobId"), ","), func(_ int64, j *fakeJob) { j.name = value("JobName") })
	case name == "scancel":
		each(args, func(_ int64, j *fakeJob) { j.state, j.listed = "CANCELLED", s.lingers })
	case name == "sbatch":
		id := int64(len(s.jobs) + 1)
		s.jobs[id] = &fakeJob{name: value("--job-name"), state: "RUNNING"}
		out = fmt.Sprintln(id)
	default:
		err = fmt.Errorf("unexpected %q", line)
	}
	if s.after != nil {
		s.after(name)
	}
	return out, err
}

// follow starts a controller. The channel receives the result of Run.
func (s *fakeSlurm) follow(t *testing.T) (*Follow, <-chan error) {
	script := filepath.Join(t.TempDir(), "job")
	must(t, os.WriteFile(script, nil, 0o600))
	f := &Follow{Commands: Commands{Run: s.run}, Partition: "idle", Prefix: "rfaas-", Script: script, Interval: 100 * time.Millisecond,
		PlanEvery: time.Second, Policy: policy(), Log: slog.New(slog.DiscardHandler)}
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended <- f.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return f, ended
}

// reach waits until the cluster is in a state, which it checks after each command.
func (s *fakeSlurm) reach(t *testing.T, what string, ok func() bool) {
	t.Helper()
	reached := make(chan struct{})
	s.mu.Lock()
	s.after = func(string) {
		if ok() {
			s.after = nil
			close(reached)
		}
	}
	s.mu.Unlock()
	select {
	case <-reached:
	case <-time.After(bound):
		t.Fatalf("not within %v: %s", bound, what)
	}
}

// Stop ends the running controllers, which submit no more jobs, and does not affect controllers that start later.
func TestStopEndsControllers(t *testing.T) {
	for _, lingers := range []int{0, 1000} { // jobs that are gone at once, and jobs that take their time to end
		t.Run(fmt.Sprint("lingers ", lingers), func(t *testing.T) {
			s := &fakeSlurm{nodes: 3, jobs: map[int64]*fakeJob{}, lingers: lingers}
			f, ended := s.follow(t)
			_, twin := s.follow(t)
			s.reach(t, "three jobs", func() bool { return s.live() >= 3 })
			looks := 0
			s.reach(t, "both have seen them", func() bool { looks++; return s.live() == 3 && looks > 40 })
			ctx, cancel := context.WithTimeout(t.Context(), bound)
			defer cancel()
			stop := Follow{Commands: f.Commands, Partition: f.Partition, Prefix: f.Prefix}
			if n, err := stop.Stop(ctx, 200*time.Millisecond); err != nil || n < 3 {
				t.Errorf("%d jobs cancelled, %v", n, err)
			}
			for _, c := range []<-chan error{ended, twin} {
				select {
				case err := <-c:
					if err != nil {
						t.Error(err)
					}
				case <-time.After(bound):
					t.Fatal("a controller goes on")
				}
			}
			if n, err := stop.Stop(ctx, time.Millisecond); n != 0 || err != nil {
				t.Errorf("%d jobs were submitted after all, %v", n, err)
			}
			_, again := s.follow(t)
			s.reach(t, "three jobs of a controller that was started afterwards", func() bool { return s.live() == 3 })
			select {
			case err := <-again:
				t.Errorf("it has ended: %v", err)
			default:
			}
		})
	}
}

// Stop does not wait for ever for a controller that keeps submitting.
func TestStopIsBounded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &fakeSlurm{jobs: map[int64]*fakeJob{}}
	s.after = func(command string) {
		if command == "scancel" || len(s.jobs) == 0 {
			s.jobs[int64(len(s.jobs)+1)] = &fakeJob{name: "rfaas-n1", state: "RUNNING"}
		}
		if len(s.jobs) > 3 { // Stop's time is over
			cancel()
		}
	}
	f := Follow{Commands: Commands{Run: s.run}, Partition: "idle", Prefix: "rfaas-"}
	s.jobs[1] = &fakeJob{name: "rfaas-n1", state: "RUNNING"}
	if n, err := f.Stop(ctx, time.Millisecond); err == nil || n < 2 || !strings.Contains(err.Error(), "still appear") {
		t.Errorf("%d jobs, %v", n, err)
	}
}

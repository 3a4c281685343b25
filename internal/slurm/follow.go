package slurm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Follow is the controller of executor jobs. All fields except Args and Publish are mandatory.
type Follow struct {
	Commands
	Partition string
	Prefix    string   // of the jobs' names; a node's name follows
	Script    string   // of the jobs
	Args      []string // additional arguments for sbatch
	Interval  time.Duration
	PlanEvery time.Duration // the plan changes slowly and is long
	Policy    Policy
	Publish   *Publish // nil: executors are not told of the plan and report only the end of their job
	Log       *slog.Logger

	before map[int64]bool // jobs that were marked before the first step; nil: no step yet
}

// stopMark replaces the node in the names of jobs that Stop cancels. No node has such a name.
const stopMark = "!stop"

// errStopped means that Stop has cancelled executor jobs.
var errStopped = errors.New("rfaas slurm stop has cancelled the executor jobs")

// check returns an error for wrong settings.
func (f *Follow) check() error {
	for name, value := range map[string]string{"partition": f.Partition, "job name": f.Prefix} {
		if value == "" || strings.ContainsAny(value, "|\n\t ,") {
			return fmt.Errorf("%s %q is empty or contains a space, comma or bar", name, value)
		}
	}
	if f.Interval < 100*time.Millisecond || f.PlanEvery < f.Interval {
		return fmt.Errorf("interval %v, plan interval %v: want at least 100ms, and the plan interval not shorter", f.Interval, f.PlanEvery)
	}
	if st, err := os.Stat(f.Script); err != nil || st.IsDir() {
		return fmt.Errorf("job script %s: %w", f.Script, cmpErr(err, errors.New("is a directory")))
	}
	return nil
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// Run keeps one executor job for each node until ctx ends or Stop cancels the jobs. When ctx ends the jobs stay, and a
// new Follow finds them. Run tries again if Slurm does not answer.
func (f *Follow) Run(ctx context.Context) error {
	if err := f.check(); err != nil {
		return err
	}
	planner, err := NewPlanner(f.Policy)
	if err != nil {
		return err
	}
	tick := time.NewTicker(f.Interval)
	defer tick.Stop()
	var plan Plan
	var waiting bool // others' jobs
	var planned time.Time
	away, unheard := false, false
	for {
		fresh := false
		if planned.IsZero() || time.Since(planned) >= f.PlanEvery {
			p, w, perr := f.Plan(ctx, f.Partition)
			if perr == nil {
				plan, waiting, planned, fresh = p, w, time.Now(), true
			}
			err = perr
		}
		var jobs []Job
		if err == nil {
			jobs, err = f.step(ctx, planner, plan, waiting)
		}
		if err == nil && fresh && f.Publish != nil {
			perr := f.Publish.publish(ctx, wantedBack(time.Now(), jobs, plan))
			if perr != nil && !unheard && ctx.Err() == nil {
				f.Log.Warn("cannot tell executors when their nodes are wanted back; trying again", "error", perr)
			}
			unheard = perr != nil
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errStopped):
			f.Log.Info("the controller ends", "reason", err)
			return nil
		case err != nil && !away:
			f.Log.Warn("Slurm command failed; trying again", "error", err)
		case err == nil && away:
			f.Log.Info("Slurm answers again")
		}
		away, err = err != nil, nil
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// step asks Slurm once and acts. It returns the jobs that it saw.
func (f *Follow) step(ctx context.Context, planner *Planner, plan Plan, waiting bool) ([]Job, error) {
	nodes, err := f.Nodes(ctx, f.Partition)
	if err != nil {
		return nil, err
	}
	// Ask for jobs after nodes: a job that ended in between would look like an idle node without a job.
	jobs, err := f.Jobs(ctx, f.Partition, f.Prefix)
	if err != nil {
		return nil, err
	}
	if jobs, err = f.withoutStopped(jobs); err != nil {
		return nil, err
	}
	v := View{Nodes: nodes, Jobs: jobs, Plan: plan, Waiting: waiting}
	if gone := planner.Gone(jobs); len(gone) > 0 {
		if v.Ended, err = f.states(ctx, gone); err != nil {
			return nil, err
		}
		for _, id := range gone {
			f.Log.Info("executor job ended", "job", id, "node", planner.seen[id], "state", v.Ended[id])
		}
	}
	a := planner.Decide(time.Now(), v)
	if err := f.Cancel(ctx, a.Cancel); err != nil {
		return nil, err
	}
	for _, id := range a.Cancel {
		f.Log.Info("executor job cancelled", "job", id)
	}
	return jobs, f.submitAll(ctx, planner, a.Submit)
}

// submitAll submits jobs. A refused job does not stop the others.
func (f *Follow) submitAll(ctx context.Context, planner *Planner, list []Submission) error {
	refused := 0
	for _, s := range list {
		id, err := f.Submit(ctx, f.Partition, f.Prefix, f.Script, f.Args, s)
		if err == nil {
			refused = 0
			f.Log.Info("executor job submitted", "job", id, "node", s.Node, "limit", s.Limit)
			continue
		}
		again := planner.Refused(s.Node, time.Now())
		if refused++; refused >= 3 || ctx.Err() != nil {
			return err // the node is not the cause
		}
		f.Log.Warn("executor job refused", "node", s.Node, "error", err, "again_in", again)
	}
	return nil
}

// withoutStopped returns the jobs without those that Stop has marked. The error is errStopped if one was marked since this
// controller started.
func (f *Follow) withoutStopped(jobs []Job) ([]Job, error) {
	marked := map[int64]bool{}
	jobs = slices.DeleteFunc(jobs, func(j Job) bool {
		marked[j.ID] = j.Node == stopMark
		return marked[j.ID]
	})
	if f.before == nil {
		f.before = marked
	}
	for id, is := range marked {
		if is && !f.before[id] {
			return nil, errStopped
		}
	}
	return jobs, nil
}

// states asks Slurm how jobs ended. Slurm forgets jobs after some minutes; these are missing in the answer. The error
// is errStopped if Stop has cancelled one of them.
func (f *Follow) states(ctx context.Context, ids []int64) (map[int64]string, error) {
	out, err := f.run(ctx, "squeue", "--noheader", "--states=all", "--jobs="+list(ids), "--format=%A|%T|%j")
	if err != nil {
		if strings.Contains(err.Error(), "Invalid job id") {
			return nil, nil
		}
		return nil, err
	}
	states := map[int64]string{}
	for line := range strings.Lines(out) {
		part := strings.SplitN(strings.TrimSuffix(line, "\n"), "|", 3)
		if len(part) != 3 {
			return nil, fmt.Errorf("squeue: %q has %d fields, want 3", line, len(part))
		}
		id, err := strconv.ParseInt(part[0], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("squeue: job number %q: %w", part[0], err)
		}
		states[id] = part[1]
		if part[2] == f.Prefix+stopMark {
			return nil, errStopped
		}
	}
	return states, nil
}

// Stop cancels all executor jobs, running and waiting ones, and returns their number. It marks them first, so that
// controllers end and submit no more. It repeats this every pause until it finds no job, since a controller that is
// just submitting only ends at its next step.
func (f *Follow) Stop(ctx context.Context, pause time.Duration) (int, error) {
	cancelled := map[int64]bool{}
	for {
		jobs, err := f.Jobs(ctx, f.Partition, f.Prefix)
		if err != nil {
			return len(cancelled), err
		}
		var ids []int64
		for _, j := range jobs {
			if j.State != Ending {
				ids = append(ids, j.ID)
				cancelled[j.ID] = true
			}
		}
		if len(ids) == 0 {
			return len(cancelled), nil
		}
		// Slurm refuses jobs that have ended in the meantime.
		_, err = f.run(ctx, "scontrol", "update", "JobId="+list(ids), "JobName="+f.Prefix+stopMark)
		if err = errors.Join(ignoreEnded(err), ignoreEnded(f.Cancel(ctx, ids))); err != nil {
			return len(cancelled), err
		}
		select {
		case <-ctx.Done():
			return len(cancelled), fmt.Errorf("new executor jobs still appear, perhaps from a controller of another user or with other settings: %w", ctx.Err())
		case <-time.After(pause):
		}
	}
}

// ignoreEnded returns nil if the error only says that jobs have ended.
func ignoreEnded(err error) error {
	if err != nil && (strings.Contains(err.Error(), "Invalid job id") || strings.Contains(err.Error(), "already completing or completed")) {
		return nil
	}
	return err
}

package slurm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Commands runs Slurm's programs. The zero value runs those in PATH with this process's environment.
type Commands struct {
	// Run, if set, replaces starting a program and returns what the program prints.
	Run func(ctx context.Context, name string, args ...string) (string, error)
	// Timeout bounds each program; 0: 20 s.
	Timeout time.Duration
}

// run runs a program and returns its standard output. The error includes its standard error.
func (c *Commands) run(ctx context.Context, name string, args ...string) (string, error) {
	if c.Run != nil {
		return c.Run(ctx, name, args...)
	}
	limit := c.Timeout
	if limit == 0 {
		limit = 20 * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = cleanEnv(os.Environ())
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err == nil {
		return out.String(), nil
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("no answer within %v", limit)
		if errors.Is(context.Cause(ctx), context.Canceled) {
			err = context.Canceled
		}
	}
	if text := strings.TrimSpace(errs.String()); text != "" {
		err = fmt.Errorf("%w: %s", err, strings.ReplaceAll(text, "\n", "; "))
	}
	return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
}

// cleanEnv returns the environment without variables that change the output or the meaning of Slurm's commands: the
// user's settings for them, and variables of a job in which this process may run.
func cleanEnv(env []string) []string {
	out := make([]string, 0, len(env)+2)
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		drop := name == "LC_ALL" || name == "SLURM_TIME_FORMAT"
		for _, prefix := range []string{"SQUEUE_", "SINFO_", "SBATCH_", "SCANCEL_", "SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "SLURM_NTASKS",
			"SLURM_TASK", "SLURM_CPU", "SLURM_MEM", "SLURM_TIME", "SLURM_PROC", "SLURM_LOCAL"} {
			drop = drop || strings.HasPrefix(name, prefix)
		}
		if !drop {
			out = append(out, kv)
		}
	}
	return append(out, "LC_ALL=C", "SLURM_TIME_FORMAT=%s")
}

// NodeState is the part of a node's state that matters here.
type NodeState int

const (
	Unusable NodeState = iota // down, reserved, powered off, not responding
	Draining                  // the administrator wants it empty: draining, drained, failing, to be rebooted or powered down
	Idle                      // no job runs there
	Mixed                     // jobs have part of it
	Busy                      // jobs have all of it, or Slurm cleans up after one
)

func (s NodeState) String() string {
	return [...]string{"unusable", "draining", "idle", "mixed", "busy"}[s]
}

// usable reports whether jobs may start on the node.
func (s NodeState) usable() bool { return s >= Idle }

// Node is a node of the partition.
type Node struct {
	Name   string
	State  NodeState
	CPUs   int
	Memory uint64 // bytes, according to Slurm
}

// nodesFormat is the format that parseNodes reads.
const nodesFormat = "NodeHost:|,StateLong:|,CPUsState:|,Memory:|"

// Nodes asks for the nodes of a partition.
func (c *Commands) Nodes(ctx context.Context, partition string) ([]Node, error) {
	out, err := c.run(ctx, "sinfo", "--noheader", "--Node", "--partition="+partition, "--Format="+nodesFormat)
	if err != nil {
		return nil, err
	}
	return parseNodes(out)
}

func parseNodes(out string) ([]Node, error) {
	var nodes []Node
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSpace(line), "|")
		if len(f) < 4 {
			return nil, fmt.Errorf("sinfo: %q has %d fields, want 4", line, len(f))
		}
		n := Node{Name: f[0], State: nodeState(f[1])}
		var alloc, idle, other int
		if _, err := fmt.Sscanf(f[2], "%d/%d/%d/%d", &alloc, &idle, &other, &n.CPUs); err != nil {
			return nil, fmt.Errorf("sinfo: node %s: CPUs %q: %w", n.Name, f[2], err)
		}
		total, err := strconv.ParseUint(f[3], 10, 40)
		if err != nil {
			return nil, fmt.Errorf("sinfo: node %s: memory %q: %w", n.Name, f[3], err)
		}
		n.Memory = total << 20
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// nodeState parses a state like "idle", "mixed-" or "down*". The signs at the end are flags: "-" means planned for a
// later job, "@" to be rebooted and "!" to be powered down when its jobs have ended. All other flags make the node
// unusable.
func nodeState(text string) NodeState {
	text = strings.ToLower(text)
	name := strings.TrimRight(text, "-*~#%$@^!+")
	flags := strings.ReplaceAll(text[len(name):], "-", "")
	switch {
	case name == "draining" || name == "drained" || name == "failing" || name == "fail":
		return Draining
	case flags == "@" || flags == "!":
		return Draining
	case flags != "":
		return Unusable
	case name == "idle" || name == "planned":
		return Idle
	case name == "mixed":
		return Mixed
	case name == "allocated" || name == "completing":
		return Busy
	}
	return Unusable
}

// JobState is the part of a job's state that matters here.
type JobState int

const (
	Pending JobState = iota
	Running
	Ending // about to be gone
)

func (s JobState) String() string { return [...]string{"pending", "running", "ending"}[s] }

// Job is an executor job.
type Job struct {
	ID        int64
	Node      string // from its name
	State     JobState
	Limit     time.Duration // time limit
	LimitMin  time.Duration // shortest limit that the scheduler may set; 0: it may not shorten the job
	Submitted time.Time
	End       time.Time // of a running job, by its limit
}

// jobsFormat is the format that parseJobs reads. The name comes last, because the name of another job may contain
// anything, including line breaks.
const jobsFormat = "JobID:|,State:|,TimeLimit:|,MinTime:|,SubmitTime:|,EndTime:|,Name:|"

// Jobs asks for this user's jobs in a partition whose name is prefix followed by a node's name.
func (c *Commands) Jobs(ctx context.Context, partition, prefix string) ([]Job, error) {
	out, err := c.run(ctx, "squeue", "--noheader", "--me", "--partition="+partition, "--Format="+jobsFormat)
	if err != nil {
		return nil, err
	}
	return parseJobs(out, prefix)
}

func parseJobs(out, prefix string) ([]Job, error) {
	var jobs []Job
	first := true
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimRight(line, "\n"), "|", 7)
		if len(f) < 7 {
			if first {
				return nil, fmt.Errorf("squeue: %q has %d fields, want 7", line, len(f))
			}
			continue // the rest of a name with a line break
		}
		first = false
		node, ours := strings.CutPrefix(strings.TrimSuffix(f[6], "|"), prefix)
		if !ours || node == "" {
			continue
		}
		j := Job{Node: node}
		var err error
		if j.ID, err = strconv.ParseInt(strings.TrimSpace(f[0]), 10, 64); err != nil {
			return nil, fmt.Errorf("squeue: job number %q: %w", f[0], err)
		}
		switch f[1] {
		case "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT":
			j.State = Pending
		case "COMPLETING", "SIGNALING", "STAGE_OUT":
			j.State = Ending
		default:
			j.State = Running
		}
		if j.Limit, err = parseLimit(f[2]); err != nil {
			return nil, fmt.Errorf("squeue: job %d: %w", j.ID, err)
		}
		if j.LimitMin, err = parseLimit(f[3]); err != nil {
			return nil, fmt.Errorf("squeue: job %d: %w", j.ID, err)
		}
		j.Submitted, _ = parseTime(f[4])
		j.End, _ = parseTime(f[5])
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// parseTime parses Unix seconds. It returns false for N/A and the like.
func parseTime(s string) (time.Time, bool) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil || n <= 0 {
		return time.Time{}, false
	}
	return time.Unix(n, 0), true
}

// unlimited is the assumed limit of a job without a time limit.
const unlimited = 365 * 24 * time.Hour

// parseLimit parses a time limit: [days-]hours:minutes:seconds, minutes:seconds, UNLIMITED.
func parseLimit(s string) (time.Duration, error) {
	s = strings.TrimSpace(s)
	if s == "UNLIMITED" || s == "NOT_SET" || s == "INVALID" {
		return unlimited, nil
	}
	days, clock, found := strings.Cut(s, "-")
	if !found {
		days, clock = "0", s
	}
	d, err := strconv.ParseUint(days, 10, 16)
	total := time.Duration(d) * 24 * time.Hour
	parts := strings.Split(clock, ":")
	if err != nil || len(parts) < 2 || len(parts) > 3 {
		return 0, fmt.Errorf("%q is not a time limit", s)
	}
	unit := time.Second
	for i := len(parts) - 1; i >= 0; i-- {
		n, err := strconv.ParseUint(parts[i], 10, 32)
		if err != nil {
			return 0, fmt.Errorf("%q is not a time limit", s)
		}
		total += time.Duration(n) * unit
		unit *= 60
	}
	return total, nil
}

package slurm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Plan maps nodes to the time when they are wanted: the earliest start of a job that the scheduler plans there, or of a
// reservation. Nodes that are not planned are missing.
type Plan map[string]time.Time

// wanted records that nodes are wanted from a time on.
func (p Plan) wanted(hosts []string, from time.Time) {
	for _, h := range hosts {
		if t, ok := p[h]; !ok || from.Before(t) {
			p[h] = from
		}
	}
}

// Plan asks for the scheduler's plan, and whether jobs wait for nodes. Jobs in the partition own, which are executor
// jobs and others that are preempted like them, do not count.
func (c *Commands) Plan(ctx context.Context, own string) (p Plan, waiting bool, err error) {
	out, err := c.run(ctx, "squeue", "--noheader", "--states=PENDING", "--format=%S|%P|%Y|%r")
	if err != nil {
		return nil, false, err
	}
	p = Plan{}
	if waiting, err = p.addJobs(out, own); err != nil {
		return nil, false, err
	}
	if out, err = c.run(ctx, "scontrol", "--oneliner", "show", "reservation"); err != nil {
		return nil, false, err
	}
	return p, waiting, p.addReservations(out)
}

// forNodes are the reasons of jobs that wait for nodes only. Other jobs wait for something else, such as their user.
var forNodes = []string{"None", "Resources", "Priority"}

func (p Plan) addJobs(out, own string) (waiting bool, err error) {
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSpace(line), "|", 4)
		if len(f) != 4 {
			return false, fmt.Errorf("squeue: %q has %d fields, want 4", line, len(f))
		}
		if f[1] == own {
			continue
		}
		hosts, err := ExpandHosts(f[2])
		if err != nil {
			return false, fmt.Errorf("squeue: %w", err)
		}
		start, planned := parseTime(f[0])
		if planned {
			p.wanted(hosts, start)
		}
		waiting = waiting || planned && len(hosts) > 0 || slices.Contains(forNodes, f[3])
	}
	return waiting, nil
}

func (p Plan) addReservations(out string) error {
	for line := range strings.Lines(out) {
		fields := map[string]string{}
		for _, kv := range strings.Fields(line) {
			// The first value counts: a reservation's comment comes last and may look like more fields.
			if name, value, _ := strings.Cut(kv, "="); fields[name] == "" {
				fields[name] = value
			}
		}
		if fields["ReservationName"] == "" {
			continue // "No reservations in the system"
		}
		start, ok := parseTime(fields["StartTime"])
		if !ok {
			return fmt.Errorf("scontrol: reservation %s: start time %q", fields["ReservationName"], fields["StartTime"])
		}
		hosts, err := ExpandHosts(fields["Nodes"])
		if err != nil {
			return fmt.Errorf("scontrol: reservation %s: %w", fields["ReservationName"], err)
		}
		p.wanted(hosts, start)
	}
	return nil
}

// Submission describes an executor job to submit.
type Submission struct {
	Node     string
	Limit    time.Duration // whole minutes
	LimitMin time.Duration // shortest limit that the scheduler may set; 0: it may not shorten the job
}

// Submit submits an executor job and returns its number. args are additional arguments for sbatch. script is the path
// of the job's script.
func (c *Commands) Submit(ctx context.Context, partition, prefix, script string, args []string, s Submission) (int64, error) {
	all := []string{"--parsable", "--partition=" + partition, "--job-name=" + prefix + s.Node, "--nodelist=" + s.Node,
		"--nodes=1", "--ntasks=1", "--exclusive", "--mem=0", "--no-requeue", "--open-mode=append",
		// Two jobs of one name never run at the same time, whichever controller submits them.
		"--dependency=singleton", "--time=" + minutes(s.Limit)}
	if s.LimitMin > 0 {
		all = append(all, "--time-min="+minutes(s.LimitMin))
	}
	out, err := c.run(ctx, "sbatch", append(append(all, args...), script)...)
	if err != nil {
		return 0, err
	}
	number, _, _ := strings.Cut(strings.TrimSpace(out), ";") // a cluster's name may follow
	var id int64
	if _, err := fmt.Sscanf(number, "%d", &id); err != nil || id <= 0 {
		return 0, fmt.Errorf("sbatch: %q is not a job number", strings.TrimSpace(out))
	}
	return id, nil
}

// minutes returns a duration in the format of --time.
func minutes(d time.Duration) string { return fmt.Sprint(max(1, int64(d/time.Minute))) }

// Cancel cancels jobs. Waiting jobs are removed, running ones get SIGTERM.
func (c *Commands) Cancel(ctx context.Context, ids []int64) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := c.run(ctx, "scancel", strings.Split(list(ids), ",")...)
	return err
}

// list returns job numbers in the format of Slurm's commands.
func list(ids []int64) string {
	all := make([]string, len(ids))
	for i, id := range ids {
		all[i] = strconv.FormatInt(id, 10)
	}
	return strings.Join(all, ",")
}

// EndTime asks when a job ends by its time limit.
func (c *Commands) EndTime(ctx context.Context, job string) (time.Time, error) {
	out, err := c.run(ctx, "squeue", "--noheader", "--jobs="+job, "--states=all", "--format=%e")
	if err != nil {
		return time.Time{}, err
	}
	end, ok := parseTime(out)
	if !ok {
		return time.Time{}, fmt.Errorf("squeue: job %s: end time %q: %w", job, strings.TrimSpace(out), errNoEnd)
	}
	return end, nil
}

// errNoEnd means that the job has no time limit, or does not exist.
var errNoEnd = errors.New("the job has no end time")

package slurm

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestParseNodes(t *testing.T) {
	got, err := parseNodes("n1|idle|0/2/0/2|2048|\nn2|mixed-|1/1/0/2|2048|\nn3|down*|0/0/2/2|2048|\n")
	if err != nil {
		t.Fatal(err)
	}
	want := "[{n1 idle 2 2147483648} {n2 mixed 2 2147483648} {n3 unusable 2 2147483648}]"
	if fmt.Sprint(got) != want {
		t.Errorf("got  %v\nwant %s", got, want)
	}
	for _, bad := range []string{"n1|idle\n", "n1|idle|x|2048|\n", "n1|idle|0/2/0/2|x|\n", "n1|idle|0/2/0/2|-1|\n", "\n"} {
		if got, err := parseNodes(bad); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

func TestNodeState(t *testing.T) {
	for text, want := range map[string]NodeState{"idle": Idle, "IDLE": Idle, "planned": Idle, "idle-": Idle, "idle*": Unusable, "idle~": Unusable,
		"mixed": Mixed, "mixed-": Mixed, "mixed*": Unusable, "allocated": Busy, "completing": Busy, "draining": Draining, "drained": Draining,
		"draining*": Draining, "drained@": Draining, "failing": Draining, "fail": Draining, "allocated@": Draining, "mixed-@": Draining, "mixed!": Draining,
		"idle^": Unusable, "reboot": Unusable, "idle@*": Unusable,
		"down": Unusable, "reserved": Unusable, "maint": Unusable, "idle$": Unusable, "allocated+": Unusable, "": Unusable, "future": Unusable} {
		if got := nodeState(text); got != want {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
}

func TestParseJobs(t *testing.T) {
	got, err := parseJobs("4|PENDING|10:00|1:00|1700000000|1700000600|rfaas-n1|\n"+
		"5|RUNNING|1-02:03:04|0:00|1700000000|1700000600|rfaas-n2|\n"+
		"6|COMPLETING|UNLIMITED|0:00|1700000000|N/A|rfaas-n3|\n"+
		"7|SUSPENDED|1:00|0:00|1700000000|N/A|rfaas-n4|\n"+
		"10|SIGNALING|1:00|0:00|1700000000|N/A|rfaas-n5|\n"+
		"8|RUNNING|oops|x|x|x|somebody|else's rfaas-n9\n\nanother|\n9|RUNNING|1:00|0:00|1|1|rfaas-|\n", "rfaas-")
	if err != nil || len(got) != 5 || got[4].State != Ending {
		t.Fatal(got, err)
	}
	if j := got[0]; j.ID != 4 || j.Node != "n1" || j.State != Pending || j.Limit != 10*time.Minute || j.LimitMin != time.Minute || j.Submitted.Unix() != 1700000000 {
		t.Errorf("%+v", j)
	}
	if j := got[1]; j.State != Running || j.LimitMin != 0 || j.Limit != 26*time.Hour+3*time.Minute+4*time.Second || j.End.Unix() != 1700000600 {
		t.Errorf("%+v", j)
	}
	if j := got[2]; j.State != Ending || j.Limit != unlimited || !j.End.IsZero() {
		t.Errorf("%+v", j)
	}
	if j := got[3]; j.State != Running {
		t.Errorf("%+v", j)
	}
	for _, bad := range []string{"4|PENDING\n", "x|PENDING|1:00|0:00|1|1|rfaas-n1|\n", "4|PENDING|x|0:00|1|1|rfaas-n1|\n",
		"4|PENDING|1:2:3:4|0:00|1|1|rfaas-n1|\n", "4|PENDING|a-1:00|0:00|1|1|rfaas-n1|\n", "4|PENDING|5|0:00|1|1|rfaas-n1|\n",
		"4|PENDING|1:00|x|1|1|rfaas-n1|\n"} {
		if got, err := parseJobs(bad, "rfaas-"); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

// script answers commands by their first words.
type script map[string]string

func (s script) run(_ context.Context, name string, args ...string) (string, error) {
	line := name + " " + strings.Join(args, " ")
	for start, out := range s {
		if strings.Contains(line, start) {
			if text, bad := strings.CutPrefix(out, "ERROR "); bad {
				return "", errors.New(text)
			}
			return out, nil
		}
	}
	return "", fmt.Errorf("unexpected %q", line)
}

func TestPlan(t *testing.T) {
	c := Commands{Run: script{
		"--states=PENDING": "1700000600|batch|n[1-2]|Resources\n1700000300|batch|n2|Priority\nN/A|batch||Dependency\n1700000001|idle|n3|Priority\n",
		"reservation": "ReservationName=a b StartTime=1700000100 EndTime=1700000900 Nodes=n[2,4] State=INACTIVE " +
			"Comment=a StartTime=1700000000 Nodes=n7\n",
	}.run}
	p, waiting, err := c.Plan(t.Context(), "idle")
	if err != nil || len(p) != 3 || p["n1"].Unix() != 1700000600 || p["n2"].Unix() != 1700000100 || p["n4"].Unix() != 1700000100 || !waiting {
		t.Errorf("%v, %v, %v", p, waiting, err)
	}
	for _, s := range []script{
		{"PENDING": "1|batch\n"}, {"PENDING": "1|batch|n[|None\n"}, {"PENDING": "ERROR down"},
		{"PENDING": "", "reservation": "ReservationName=a StartTime=x Nodes=n1\n"}, {"PENDING": "", "reservation": "ReservationName=a StartTime=1 Nodes=n[\n"},
	} {
		if p, _, err := (&Commands{Run: s.run}).Plan(t.Context(), "idle"); err == nil {
			t.Errorf("%v: %v", s, p)
		}
	}
	for jobs, want := range map[string]bool{
		"":                                   false,
		"N/A|idle|(null)|Priority\n":         false, // ours
		"N/A|batch|(null)|JobHeldUser\n":     false,
		"N/A|batch|(null)|Dependency\n":      false,
		"1700000600|batch||BeginTime\n":      false,
		"N/A|batch|(null)|Resources\n":       true,
		"N/A|batch|(null)|Priority\n":        true,
		"N/A|batch|(null)|None\n":            true,
		"1700000600|batch|n1|Licenses\n":     true, // planned
		"N/A|batch|(null)|a reason with |\n": false,
	} {
		c.Run = script{"PENDING": jobs, "reservation": "No reservations in the system\n"}.run
		if _, waiting, err := c.Plan(t.Context(), "idle"); err != nil || waiting != want {
			t.Errorf("%q: %v, %v", jobs, waiting, err)
		}
	}
}

func TestSubmit(t *testing.T) {
	var line string
	c := Commands{Run: func(_ context.Context, name string, args ...string) (string, error) {
		line = name + " " + strings.Join(args, " ")
		return "17;cluster\n", nil
	}}
	id, err := c.Submit(t.Context(), "idle", "rfaas-", "/x/job.sbatch", []string{"--account=a"}, Submission{"n7", 90 * time.Minute, time.Minute})
	if err != nil || id != 17 {
		t.Fatal(id, err)
	}
	for _, want := range []string{"--partition=idle", "--job-name=rfaas-n7", "--nodelist=n7", "--dependency=singleton", "--time=90", "--time-min=1",
		"--account=a /x/job.sbatch"} {
		if !strings.Contains(line, want) {
			t.Errorf("no %s in %s", want, line)
		}
	}
	if _, err := c.Submit(t.Context(), "idle", "rfaas-", "s", nil, Submission{"n7", 90 * time.Minute, 0}); err != nil || strings.Contains(line, "--time-min") {
		t.Errorf("a job that may not be cut: %s, %v", line, err)
	}
	c.Run = script{"sbatch": "Submitted\n"}.run
	if _, err := c.Submit(t.Context(), "idle", "rfaas-", "s", nil, Submission{}); err == nil || !strings.Contains(err.Error(), "Submitted") {
		t.Errorf("an answer without a number: %v", err)
	}
}

// What is asked of real programs: output, errors with their text, an end to waiting, and a clean environment.
func TestCommandsRun(t *testing.T) {
	t.Setenv("SQUEUE_FORMAT", "x")
	t.Setenv("SLURM_JOB_ID", "1")
	t.Setenv("SLURM_CONF", "/c")
	c := Commands{Timeout: 5 * time.Second}
	out, err := c.run(t.Context(), "sh", "-c", "echo $SQUEUE_FORMAT.$SLURM_JOB_ID.$SLURM_CONF.$SLURM_TIME_FORMAT.$LC_ALL")
	if err != nil || out != "../c.%s.C\n" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err = c.run(t.Context(), "sh", "-c", "echo one >&2; echo two >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "exit status 3: one; two") {
		t.Errorf("%v", err)
	}
	c.Timeout = 50 * time.Millisecond
	if _, err = c.run(t.Context(), "sleep", "20"); err == nil || !strings.Contains(err.Error(), "no answer within 50ms") {
		t.Errorf("%v", err)
	}
	if _, err = c.run(t.Context(), "/nonexistent/sinfo"); err == nil {
		t.Error("a program that is not there")
	}
}

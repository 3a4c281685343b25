package report

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

// results of all that the table and the promises need; the ratios of calls are as given.
func results(ratio float64) []*latency.Result {
	var out []*latency.Result
	add := func(r latency.Result) {
		var p latency.Paired
		for i := range 9 {
			p.Samples.Add(int64(100 + 10*i))
			p.FloorSamples.Add(100)
			p.Add(100*ratio, 100, 50, 51)
		}
		p.Fill(&r, "ping-pong")
		r.Complete = true
		out = append(out, &r)
	}
	for _, row := range headlineRows {
		add(latency.Result{Name: "latency", Provider: row.provider, Client: "c", Mode: row.mode, Function: "echo", Payload: row.payload, Depth: 1})
	}
	add(latency.Result{Name: "latency", Provider: "shm", Client: "c", Mode: "hot", Function: "echo", Payload: 4096, Depth: 4})
	add(latency.Result{Name: "other", Provider: "http", Client: "go", Payload: 8})
	for n, name := range []string{"placement, 10 executors", "placement, 10000 executors", "heartbeat by write", "heartbeat by message", "charge, 8 counters"} {
		add(latency.Result{Name: "control", Provider: "shm", Function: name, Payload: n})
	}
	for _, n := range []int{100, 300, 1000} {
		add(latency.Result{Name: "control", Provider: "shm", Function: fmt.Sprintf("change told to %d subscribers", n), Clients: n})
	}
	add(latency.Result{Name: "scaling", Provider: "shm", Function: "spin 1ms", Workers: 2, Clients: 1})
	skipped := latency.Result{Name: "other", Provider: "ucx", Skipped: "no ucx_perftest here"}
	return append(out, &skipped)
}

const startLine = `{"name":"start","provider":"shm","mode":"cold","samples":200,"p50_ns":4000000,"p90_ns":5e6,"p99_ns":6e6,"max_ns":7e6,` +
	`"first_call_ns":1000,"control_ns":2000000,"new_step_ns":500,"fork_ns":900000,"release_ns":5,"first_contact_ns":9e6,"load_avg":1.5}`

func written(t *testing.T, ratio float64) string {
	t.Helper()
	dir := t.TempDir()
	var text bytes.Buffer
	if err := latency.WriteJSON(&text, results(ratio)...); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(&text, "some progress\n"+startLine)
	for name, content := range map[string]string{"a.jsonl": text.String(), "tests.log": "=== RUN\n    x_test.go:3: figure: leases.cycles = 10000\n figure: drain.after_grace_s = -9.5 s\n", "kills-vm-guest.log": "figure: kills = 30\n",
		"machine.txt": "2 CPUs, emulated\n", "notes.txt": "verbs: failed\n", "other.tmp": "{broken"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReport(t *testing.T) {
	d, err := Read(written(t, 1.1))
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	if err := Write(d, out); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(out, "report.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| shm, hot, 8 B, depth 1: ratio to the floor | <= 1.15 | 1.1 | met |", "2 CPUs, emulated", "verbs: failed",
		"ucx was skipped: no ucx_perftest here", "| 4 ms | NOT MET |", "exact capacity at the end | >= 10000 | 10000 | met |", "-9.5 s | met |", "on verbs, all calls right or a named error | >= 30 | 30 | met |", "on shm, all calls right or a named error | >= 300 | - | not measured |",
		"control 2000, fork 900, first call 1, new step 0.5", "![", "## Scale, by model", "not measured"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the report does not say %q", want)
		}
	}
	for _, file := range []string{"latency-shm.png", "latency-verbs.png", "cdf-shm.png", "bandwidth.png", "scaling.png", "starts.png"} {
		if b, err := os.ReadFile(filepath.Join(out, file)); err != nil || !bytes.HasPrefix(b, []byte("\x89PNG")) {
			t.Errorf("%s: %d bytes, %v", file, len(b), err)
		}
	}
	if csv, err := os.ReadFile(filepath.Join(out, "results.csv")); err != nil || bytes.Count(csv, []byte("\n")) != 1+len(d.Results) {
		t.Errorf("CSV: %v\n%s", err, csv)
	}
}

func TestJudge(t *testing.T) {
	for ratio, want := range map[float64]bool{1.02: true, 1.3: false} {
		d := &Data{Results: results(ratio)}
		n := 0
		for _, v := range Judge(d) {
			if v.Section == "Calls" && v.Measured {
				n++
				if v.Met() != want {
					t.Errorf("%s: %v is met: %v", v.Line, v.Value, v.Met())
				}
			}
			if !v.Measured && (v.Met() || v.verdict() == "met") {
				t.Errorf("%s is met without a measurement", v.Line)
			}
		}
		if n != 8 {
			t.Errorf("%d promises on calls were judged", n)
		}
	}
	names := map[string]bool{}
	for _, p := range Promises() {
		if names[p.Line] {
			t.Errorf("%s is there twice", p.Line)
		}
		names[p.Line] = true
	}
	unknown := &Data{Results: results(math.NaN())}
	for _, v := range Judge(unknown) {
		if v.Section == "Calls" && v.Measured {
			t.Errorf("%s: an unknown ratio was judged", v.Line)
		}
	}
}

func TestParse(t *testing.T) {
	figures, _ := ParseTests("figure: a.b = 1 ns\nfigure: c = x\n x.go:1: figure: c-d = -2.5e3 %\nfigure: a.b = 3 ns\n")
	if want := []Figure{{"c-d", -2500, "%", false}, {"a.b", 3, "ns", false}}; !slices.Equal(figures, want) {
		t.Errorf("%+v, want %+v", figures, want)
	}
	figures, tests := ParseTests(`=== RUN   TestA
=== RUN   TestA/part
    a_test.go:1: figure: a = 1
    --- PASS: TestA/part (1.00s)
--- PASS: TestA (1.50s)
=== RUN   TestB
=== RUN   TestC
=== NAME  TestB
    b_test.go:1: figure: b = 2 s
=== NAME  TestC
    c_test.go:1: figure: c = 3
--- FAIL: TestB (2.00s)
=== RUN   TestD
    d_test.go:1: figure: d = 4
--- SKIP: TestD (0.00s)
panic: test timed out after 1s
=== RUN   TestA
    a_test.go:1: figure: again = 5
--- PASS: TestA (0.25s)
`)
	if want := []Figure{{"a", 1, "", false}, {"b", 2, "s", true}, {"c", 3, "", true}, {"d", 4, "", true}, {"again", 5, "", false}}; !slices.Equal(figures, want) {
		t.Errorf("%+v, want %+v", figures, want)
	}
	if want := []Test{{"TestA", passed, 1.5}, {"TestB", failed, 2}, {"TestC", notEnded, 0}, {"TestD", skipped, 0}, {"TestA", passed, 0.25}}; !slices.Equal(tests, want) {
		t.Errorf("%+v, want %+v", tests, want)
	}
}

// The first lease makes the connection, the second one has it.
func TestCachedControl(t *testing.T) {
	lease := func(mode string, control, connect float64) Start {
		return Start{Provider: "verbs", Mode: mode, Steps: []Step{{"control", control}, {"fork", 1e9}, {"connect", connect}}}
	}
	of := cachedControl("verbs")
	for _, c := range []struct {
		starts []Start
		want   float64
		known  bool
	}{
		{[]Start{lease("cold", 10, 30), lease("cached", 6, 2)}, 0.2, true},
		{[]Start{lease("cold", 10, 30), lease("cached", 10, 30)}, 1, true},
		{[]Start{lease("cold", 10, 0), lease("cached", 6, 2)}, 0, false}, // a first lease without a connect step does not count
		{[]Start{lease("cached", 6, 2)}, 0, false},
	} {
		if got, known := of(&Data{Starts: c.starts}); got != c.want || known != c.known {
			t.Errorf("%v: %v, %v", c.starts, got, known)
		}
	}
}

// The report has the parts of a longer run whether they passed, failed or hung, and does not mention them after a shorter run.
func TestSoak(t *testing.T) {
	for name, c := range map[string]struct {
		files       map[string]string
		says, never []string
	}{
		"well": {map[string]string{
			"soak-kills.log":  "=== RUN   TestRandomKills\n x: figure: kills = 1001\n x: figure: kills.longest_wait_s = 4.217 s\n x: figure: kills.failed_wait.p99_ms = 1844 ms\n--- PASS: TestRandomKills (527.02s)\n",
			"soak-agents.log": "=== RUN   TestAgentKilled\n x: figure: agent.killed_gap_ms = 592.2\n--- PASS: TestAgentKilled (23.90s)\n",
			"soak-nodes.log":  "=== RUN   TestBetweenNodesRandomKills\n x: figure: nodes = 201\n x: figure: nodes.flaps = 100\n--- PASS: TestBetweenNodesRandomKills (780.00s)\n",
			"soak-slurm.log":  "=== RUN   TestJobs\n--- PASS: TestJobs (29.00s)\n=== RUN   TestOthers\n--- SKIP: TestOthers (0.00s)\n"},
			[]string{">= 1000 | 1001 | met |", "<= 1000 ms | 592 ms | met |", ">= 200 | 201 | met |", ">= 100 | 100 | met |", "| TestBetweenNodesRandomKills | passed | 780 |", "<= 15 s | 4.22 s | met |", "did not pass | <= 0 | 0 | met |", "| kills, failed wait, p99 ms | 1844 ms |",
				"| TestJobs | passed | 29 |", "| TestOthers | skipped | 0 |"}, []string{"FAILED"}},
		"failed": {map[string]string{
			"soak-kills.log": "=== RUN   TestRandomKills\n x: figure: kills = 1001\n--- FAIL: TestRandomKills (527.02s)\n",
			"soak-slurm.log": "=== RUN   TestJobs\n--- FAIL: TestJobs (29.00s)\n=== RUN   TestPlan\npanic: test timed out\n",
			"notes.txt":      "soak-kills: FAILED, status 1 after 530 s; its earlier results are in the report\n"},
			[]string{">= 1000 | 1001 | FAILED: its test did not pass |", "did not pass | <= 0 | 2 | NOT MET |", "| TestJobs | failed | 29 |", "| TestPlan | not ended | 0 |",
				"**soak-kills: FAILED, status 1 after 530 s;"}, []string{"| met |"}},
		"hung without a word": {map[string]string{"notes.txt": "soak-slurm: FAILED, ended after 480 s, which is longer than allowed\n"},
			[]string{">= 1000 | - | not measured |", "did not pass | <= 0 | - | not measured |", "**soak-slurm: FAILED, ended after 480 s"}, []string{"| met |"}},
		"no soak": {map[string]string{"kills.log": "=== RUN   TestRandomKills\n x: figure: kills = 300\n--- PASS: TestRandomKills (134.02s)\n"},
			[]string{">= 300 | 300 | met |"}, []string{"Soak", "soak"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			d, err := Read(dir)
			if err != nil {
				t.Fatal(err)
			}
			if d.Empty() {
				t.Error("it counts as empty")
			}
			var text bytes.Buffer
			if err := Markdown(&text, d, nil); err != nil {
				t.Fatal(err)
			}
			for _, want := range c.says {
				if !strings.Contains(text.String(), want) {
					t.Errorf("the report does not say %q", want)
				}
			}
			for _, never := range c.never {
				if strings.Contains(text.String(), never) {
					t.Errorf("the report says %q", never)
				}
			}
			if t.Failed() {
				t.Log(text.String())
			}
		})
	}
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x.jsonl"), []byte("{\"name\":\"latency\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), "x.jsonl: line 1") {
		t.Errorf("%v", err)
	}
	if _, err := Read("/nowhere"); err == nil {
		t.Error("a directory that is not there was read")
	}
}

func TestHeadline(t *testing.T) {
	dir := written(t, 1.1)
	d, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	readme := filepath.Join(dir, "README.md")
	write := func(text string) {
		if err := os.WriteFile(readme, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# no table\n")
	if err := Headline(d, dir, readme); err == nil || !strings.Contains(err.Error(), "begin") {
		t.Errorf("a README without a place for it: %v", err)
	}
	write("before\n" + headlineBegin + "old\n" + headlineEnd + "after\n")
	if err := CheckHeadline(d, dir, readme); err == nil {
		t.Error("an old table passes")
	}
	if err := Headline(d, dir, readme); err != nil {
		t.Fatal(err)
	}
	if err := CheckHeadline(d, dir, readme); err != nil {
		t.Errorf("what was just written: %v", err)
	}
	text, _ := os.ReadFile(readme)
	if s := string(text); !strings.HasPrefix(s, "before\n") || !strings.HasSuffix(s, "after\n") || strings.Contains(s, "old") ||
		!strings.Contains(s, "| shared memory, 64 KiB | 0.14 us |") || !strings.Contains(s, "HTTP in Go") || !strings.Contains(s, "(latency-shm.png)") {
		t.Errorf("README:\n%s", s)
	}
	write(strings.Replace(string(text), "1.1 |", "1.0 |", 1))
	if err := CheckHeadline(d, dir, readme); err == nil {
		t.Error("an embellished table passes")
	}
	d.Results[1].Pairs = 4
	if _, err := HeadlineTable(d, dir); err == nil || !strings.Contains(err.Error(), "shm, hot, 64 B has 4 undisturbed pairs") {
		t.Errorf("a disturbed result: %v", err)
	}
	d.Results = d.Results[1:]
	if _, err := HeadlineTable(d, dir); err == nil || !strings.Contains(err.Error(), "shm, hot, 8 B") {
		t.Errorf("a missing result: %v", err)
	}
}

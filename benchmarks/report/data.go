// Package report makes one report of the results of a benchmark run: tables, plots, and a verdict on each promise.
package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

// Start is a result of `rfaas bench cold`.
type Start struct {
	Provider, Mode     string
	Samples            int
	P50, P90, P99, Max float64 // ns
	FirstContact       float64
	FirstTLS, Process  float64   // 0: not measured
	Steps              []Step    // medians
	Runs               []float64 // p50 of each run, ns; the rest is of the run with the median p50
	Load               float64
}

// step is the median of one step, ns; 0 if there is no such step.
func (s *Start) step(name string) float64 {
	for _, step := range s.Steps {
		if step.Name == name {
			return step.NS
		}
	}
	return 0
}

// Step is a part of a start.
type Step struct {
	Name string
	NS   float64
}

// Data is all results of a run.
type Data struct {
	Results []*latency.Result
	Between []*latency.Result // between two machines
	Starts  []Start
	Figures []Figure
	Tests   map[string][]Test // by part
	Notes   []string          // what was not measured or failed, and why
	Machine []string          // lines about the machine
}

// stepOrder is the order in which the steps of a start happen; others follow by name.
var stepOrder = []string{"control", "fork", "sandbox", "connect", "code", "first_call"}

// Read reads a directory: *.jsonl are results, *.log are the output of tests, machine.txt and notes.txt are lines. Figures of
// *-vm-*.log, from tests in the virtual machine, are named vm.NAME, those of soak-*.log soak.NAME.
func Read(dir string) (*Data, error) {
	d := Data{Tests: map[string][]Test{}}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		switch filepath.Ext(e.Name()) {
		case ".jsonl":
			if err := d.addResults(text); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
		case ".log":
			figures, tests := ParseTests(string(text))
			for _, f := range figures {
				switch {
				case strings.Contains(e.Name(), "-vm-"):
					f.Name = "vm." + f.Name
				case strings.HasPrefix(e.Name(), "soak-"):
					f.Name = "soak." + f.Name
				}
				d.Figures = append(d.Figures, f)
			}
			if len(tests) > 0 {
				d.Tests[strings.TrimSuffix(e.Name(), ".log")] = tests
			}
		}
	}
	for name, into := range map[string]*[]string{"machine.txt": &d.Machine, "notes.txt": &d.Notes} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			*into = append(*into, strings.TrimSpace(line))
		}
	}
	return &d, nil
}

func (d *Data) addResults(text []byte) error {
	for i, line := range bytes.Split(text, []byte("\n")) {
		if !bytes.HasPrefix(bytes.TrimSpace(line), []byte("{")) {
			continue
		}
		var kind struct {
			Name string `json:"name"`
		}
		if err := json.Unmarshal(line, &kind); err != nil {
			return fmt.Errorf("line %d: %w", i+1, err)
		}
		if kind.Name == "start" {
			s, err := parseStart(line)
			if err != nil {
				return fmt.Errorf("line %d: %w", i+1, err)
			}
			d.Starts = append(d.Starts, s)
			continue
		}
		rs, err := latency.ReadJSON(bytes.NewReader(line))
		if err != nil {
			return fmt.Errorf("line %d: %w", i+1, err)
		}
		for _, r := range rs {
			if r.Remote != "" {
				d.Between = append(d.Between, r)
			} else {
				d.Results = append(d.Results, r)
			}
		}
	}
	return nil
}

// parseStart takes every step of a start, also steps that this program does not know.
func parseStart(line []byte) (Start, error) {
	var all map[string]any
	if err := json.Unmarshal(line, &all); err != nil {
		return Start{}, err
	}
	number := func(name string) float64 { n, _ := all[name].(float64); return n }
	text := func(name string) string { s, _ := all[name].(string); return s }
	s := Start{Provider: text("provider"), Mode: text("mode"), Samples: int(number("samples")), P50: number("p50_ns"), P90: number("p90_ns"),
		P99: number("p99_ns"), Max: number("max_ns"), FirstContact: number("first_contact_ns"), FirstTLS: number("first_contact_tls_ns"),
		Process: number("process_start_ns"), Load: number("load_avg")}
	runs, _ := all["runs_p50_ns"].([]any)
	for _, p50 := range runs {
		ns, _ := p50.(float64)
		s.Runs = append(s.Runs, ns)
	}
	for name := range all {
		step, is := strings.CutSuffix(name, "_ns")
		if _, number := all[name].(float64); !is || !number || slices.Contains([]string{"p50", "p90", "p99", "p999", "max", "first_contact", "first_contact_tls", "process_start", "release", "mean", "floor_p50"}, step) {
			continue
		}
		s.Steps = append(s.Steps, Step{step, number(name)})
	}
	rank := func(name string) int {
		if i := slices.Index(stepOrder, name); i >= 0 {
			return i
		}
		return len(stepOrder)
	}
	slices.SortFunc(s.Steps, func(a, b Step) int {
		if r := rank(a.Name) - rank(b.Name); r != 0 {
			return r
		}
		return strings.Compare(a.Name, b.Name)
	})
	return s, nil
}

// result is the last result that matches, or nil.
func (d *Data) result(match func(*latency.Result) bool) *latency.Result {
	for _, r := range slices.Backward(d.Results) {
		if r.Skipped == "" && match(r) {
			return r
		}
	}
	return nil
}

func (d *Data) call(provider, client, mode string, payload, result, depth int) *latency.Result {
	return d.result(func(r *latency.Result) bool {
		return r.Name == "latency" && r.Provider == provider && r.Client == client && r.Mode == mode && r.Payload == payload && r.Result == result && r.Depth == depth
	})
}

func (d *Data) start(provider, mode string) *Start {
	for i := range slices.Backward(d.Starts) {
		if s := &d.Starts[i]; s.Provider == provider && s.Mode == mode {
			return s
		}
	}
	return nil
}

func (d *Data) control(provider, function string) *latency.Result {
	return d.result(func(r *latency.Result) bool {
		return r.Name == "control" && r.Provider == provider && r.Function == function
	})
}

// Empty says whether there is nothing to report, not even a failure.
func (d *Data) Empty() bool {
	return len(d.Results)+len(d.Between)+len(d.Starts)+len(d.Figures)+len(d.Tests)+len(d.Notes) == 0
}

// figure is the last figure of that name, or nil.
func (d *Data) figure(name string) *Figure {
	for i := range slices.Backward(d.Figures) {
		if d.Figures[i].Name == name {
			return &d.Figures[i]
		}
	}
	return nil
}

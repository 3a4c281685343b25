package report

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Figure is a line `figure: NAME = VALUE UNIT` that a test printed.
type Figure struct {
	Name   string
	Value  float64
	Unit   string
	Failed bool // its test did not pass, so the value proves nothing
}

// Test is a top-level test of `go test -v`.
type Test struct {
	Name    string
	Result  string // passed, failed, skipped, or not ended
	Seconds float64
}

const (
	passed, failed, skipped = "passed", "failed", "skipped"
	notEnded                = "not ended"
)

var (
	figureLine = regexp.MustCompile(`figure: ([A-Za-z0-9._-]+) = (-?[0-9.]+(?:[eE][-+]?[0-9]+)?) ?([^\s]*)`)
	turnLine   = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE) +([^\s/]+)`)
	endLine    = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+)s\)`)
)

// ParseTests finds tests and figures in the output of one or more runs of `go test -v`. A figure outside any test counts; of
// several with one name the last counts.
func ParseTests(text string) ([]Figure, []Test) {
	var figures []Figure
	var tests []Test
	by := []string{} // the test of each figure; empty: it passed, or there is none
	now := ""
	open := func(name string) *Test { // the last one of that name, if it has not ended
		for i := range slices.Backward(tests) {
			if tests[i].Name == name && tests[i].Result == notEnded {
				return &tests[i]
			}
		}
		return nil
	}
	settle := func(name string) {
		for i := range figures {
			if by[i] == name {
				by[i] = ""
			}
		}
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		if m := turnLine.FindStringSubmatch(line); m != nil {
			if now = m[1]; open(now) == nil {
				tests = append(tests, Test{Name: now, Result: notEnded})
			}
		}
		if m := endLine.FindStringSubmatch(line); m != nil {
			if test := open(m[2]); test != nil {
				test.Result = map[string]string{"PASS": passed, "FAIL": failed, "SKIP": skipped}[m[1]]
				test.Seconds, _ = strconv.ParseFloat(m[3], 64)
			}
			if m[1] == "PASS" {
				settle(m[2])
			}
			now = ""
		}
		if m := figureLine.FindStringSubmatch(line); m != nil {
			v, err := strconv.ParseFloat(m[2], 64)
			if err != nil {
				continue
			}
			if i := slices.IndexFunc(figures, func(o Figure) bool { return o.Name == m[1] }); i >= 0 {
				figures, by = slices.Delete(figures, i, i+1), slices.Delete(by, i, i+1)
			}
			figures, by = append(figures, Figure{Name: m[1], Value: v, Unit: m[3]}), append(by, now)
		}
	}
	for i := range figures {
		figures[i].Failed = by[i] != ""
	}
	return figures, tests
}

// soaked says whether a part that only `make soak` has was measured or tried.
func (d *Data) soaked() bool {
	return len(d.Tests["soak-kills"])+len(d.Tests["soak-nodes"])+len(d.Tests["soak-slurm"]) > 0 ||
		slices.ContainsFunc(d.Notes, func(note string) bool { return strings.HasPrefix(note, "soak-") })
}

// notPassed counts the tests of a part that neither passed nor were skipped.
func notPassed(part string) func(*Data) (float64, bool) {
	return func(d *Data) (float64, bool) {
		n := 0
		for _, t := range d.Tests[part] {
			if t.Result == failed || t.Result == notEnded {
				n++
			}
		}
		return float64(n), slices.ContainsFunc(d.Tests[part], func(t Test) bool { return t.Result != skipped })
	}
}

// soak writes the measurements of `make soak`.
func soak(b *strings.Builder, d *Data) {
	if !d.soaked() {
		return
	}
	b.WriteString("\n## Soak\n\n| figure | | |\n|---|---|---|\n")
	for _, f := range d.Figures {
		if name, is := strings.CutPrefix(f.Name, "soak."); is {
			fmt.Fprintf(b, "| %s | %s | %s |\n", strings.NewReplacer("_", " ", ".", ", ").Replace(name), number(f.Value)+unit(f.Unit), map[bool]string{true: "its test FAILED"}[f.Failed])
		}
	}
	b.WriteString("\n| test | result | s |\n|---|---|---|\n")
	for _, part := range []string{"soak-kills", "soak-nodes", "soak-slurm"} {
		for _, t := range d.Tests[part] {
			fmt.Fprintf(b, "| %s | %s | %.0f |\n", t.Name, t.Result, t.Seconds)
		}
	}
}

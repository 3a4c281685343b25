package report

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/benchmarks/scale"
)

// Write makes report.md, results.csv and the plots in dir.
func Write(d *Data, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	pictures, err := Plots(d, dir)
	if err != nil {
		return err
	}
	var md, csv bytes.Buffer
	if err := Markdown(&md, d, pictures); err != nil {
		return err
	}
	if err := latency.WriteCSV(&csv, slices.Concat(d.Results, d.Between)...); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "report.md"), md.Bytes(), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "results.csv"), csv.Bytes(), 0o644)
}

// Markdown writes the report.
func Markdown(w io.Writer, d *Data, pictures []Picture) error {
	var b strings.Builder
	b.WriteString("# rfaas compared with its floor\n\nAbsolute times depend on this machine and its load; the ratios to the floor count. benchmarks/README.md describes the method.\n\n")
	for _, line := range d.Machine {
		fmt.Fprintf(&b, "- %s\n", line)
	}
	b.WriteString("\n## Promises\n\n")
	promises(&b, Judge(d))
	for _, note := range d.Notes {
		if strings.Contains(note, ": FAILED") {
			fmt.Fprintf(&b, "\n**%s**\n", note)
		}
	}
	soak(&b, d)
	picture := func(file string) {
		for _, p := range pictures {
			if p.File == file {
				fmt.Fprintf(&b, "\n![%s](%s)\n", p.Title, p.File)
			}
		}
	}
	for _, provider := range []string{"shm", "verbs"} {
		calls(&b, d.Results, provider, "Calls, "+provider)
		picture("latency-" + provider + ".png")
		picture("cdf-" + provider + ".png")
	}
	picture("bandwidth.png")
	if len(d.Between) > 0 {
		calls(&b, d.Between, "verbs", "Calls between two machines, verbs")
		rows(&b, d.Between, "floor", "The floors between two machines")
	}
	others(&b, d)
	rows(&b, d.Results, "floor", "The floors themselves")
	rows(&b, d.Results, "scaling", "Scaling")
	picture("scaling.png")
	starts(&b, d)
	picture("starts.png")
	rows(&b, d.Results, "neighbour", "Neighbour")
	rows(&b, d.Results, "control", "Control")
	leases(&b, d)
	if u, missing := scale.UnitsFrom(d.Results); missing == "" {
		b.WriteString("\n## Scale, by model\n\n")
		scale.WriteMarkdown(&b, u, d.Results)
	} else {
		fmt.Fprintf(&b, "\n## Scale, by model\n\nNot without %s.\n", missing)
	}
	disturbed(&b, d)
	_, err := io.WriteString(w, b.String())
	return err
}

func promises(b *strings.Builder, verdicts []Verdict) {
	b.WriteString("| | promise | bound | measured | |\n|---|---|---|---|---|\n")
	met, not, unknown := 0, 0, 0
	for _, v := range verdicts {
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s |\n", v.Section, v.Line, v.bound(), v.value(), v.verdict())
		switch {
		case !v.Measured:
			unknown++
		case v.Met():
			met++
		default:
			not++
		}
	}
	fmt.Fprintf(b, "\n%d met, %d not met, %d not measured in this run.\n", met, not, unknown)
}

func us(ns float64) string {
	if math.IsNaN(ns) || ns == 0 {
		return "-"
	}
	return number(ns / 1e3)
}

func ratioText(n latency.Number) string {
	if math.IsNaN(float64(n)) || n == 0 {
		return "-"
	}
	return number(float64(n))
}

func pairs(r *latency.Result) string {
	s := fmt.Sprint(r.Pairs)
	if lost := r.PairsDiscarded + r.PairsShared + r.PairsAwake; lost > 0 {
		s += fmt.Sprintf(" (-%d)", lost)
	}
	return s
}

// waiting is the rank of a mode in the tables.
func waiting(mode string) int { return slices.Index([]string{"hot", "warm", "adaptive"}, mode) }

func calls(b *strings.Builder, results []*latency.Result, provider, title string) {
	var lines []string
	results = slices.Clone(results)
	slices.SortStableFunc(results, func(a, b *latency.Result) int { // single calls first, then by how both sides wait
		return cmp.Or(cmp.Compare(min(a.Depth, 2), min(b.Depth, 2)), cmp.Compare(waiting(a.Mode), waiting(b.Mode)), cmp.Compare(a.Payload, b.Payload))
	})
	for _, r := range results {
		if r.Name != "latency" || r.Provider != provider {
			continue
		}
		lines = append(lines, fmt.Sprintf("| %s | %s | %s | %d | %s | %s | %s | %s | %s | %s | %s | %s | %s |", r.Client, r.Mode, sizes(r.Payload, r.Result), r.Depth,
			us(float64(r.P50NS)), us(float64(r.P90NS)), us(float64(r.P99NS)), us(float64(r.P999NS)), us(float64(r.MaxNS)), us(float64(r.FloorP50)), ratioText(r.Ratio),
			number(r.OpsPerS), pairs(r)))
	}
	if len(lines) == 0 {
		fmt.Fprintf(b, "\n## %s\n\nNot measured in this run.\n", title)
		return
	}
	fmt.Fprintf(b, "\n## %s\n\nMicroseconds; ratio: median of paired batches; discarded pairs in brackets.\n\n", title)
	b.WriteString("| client | mode | payload | in flight | p50 | p90 | p99 | p99.9 | max | floor p50 | ratio | calls/s | pairs |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	b.WriteString(strings.Join(lines, "\n") + "\n")
}

func others(b *strings.Builder, d *Data) {
	b.WriteString("\n## Alternatives\n\nThe same bytes there and back, on this machine, in this run; microseconds, ratio to the bare ping-pong.\n\n")
	b.WriteString("| | payload | p50 | p99 | ratio | calls/s | pairs |\n|---|---|---|---|---|---|---|\n")
	var skipped []string
	for _, r := range d.Results {
		if r.Name != "other" {
			continue
		}
		if r.Skipped != "" {
			skipped = append(skipped, fmt.Sprintf("- %s was skipped: %s", r.Provider, r.Skipped))
			continue
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s |\n", r.Provider, size(r.Payload), us(float64(r.P50NS)), us(float64(r.P99NS)), ratioText(r.Ratio), number(r.OpsPerS), pairs(r))
	}
	b.WriteString("\n" + strings.Join(skipped, "\n") + "\n")
}

// rows is a table of all results of one name.
func rows(b *strings.Builder, results []*latency.Result, name, title string) {
	head := false
	for _, r := range results {
		if r.Name != name {
			continue
		}
		if !head {
			fmt.Fprintf(b, "\n## %s\n\n| | what | bytes | workers | clients | p50 us | p99 us | max us | floor | floor p50 us | ratio | a second | pairs |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n", title)
			head = true
		}
		fmt.Fprintf(b, "| %s | %s | %d | %d | %d | %s | %s | %s | %s | %s | %s | %s | %s |\n", r.Provider, r.Function, r.Payload, max(r.Workers, 1), max(r.Clients, 1),
			us(float64(r.P50NS)), us(float64(r.P99NS)), us(float64(r.MaxNS)), r.FloorName, us(float64(r.FloorP50)), ratioText(r.Ratio), number(r.OpsPerS), pairs(r))
	}
}

func starts(b *strings.Builder, d *Data) {
	if len(d.Starts) == 0 {
		return
	}
	b.WriteString("\n## Starts: from a lease's request to the first result\n\nMicroseconds, medians of the steps. Of several runs, the one with the median p50 is shown.\n\n| | mode | p50 | p90 | p99 | max | steps | first contact | p50 of each run |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range d.Starts {
		var steps []string
		for _, step := range s.Steps {
			steps = append(steps, strings.ReplaceAll(step.Name, "_", " ")+" "+us(step.NS))
		}
		var runs []string
		for _, p50 := range s.Runs {
			runs = append(runs, us(p50))
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", s.Provider, s.Mode, us(s.P50), us(s.P90), us(s.P99), us(s.Max), strings.Join(steps, ", "),
			us(s.FirstContact), strings.Join(runs, ", "))
	}
}

// leases writes the control part of a lease: all of it but the worker's start, which is among the starts.
func leases(b *strings.Builder, d *Data) {
	var parts []string
	for _, s := range d.Starts {
		if c := s.step("control"); c > 0 {
			parts = append(parts, fmt.Sprintf("%s %s %s", s.Provider, s.Mode, us(c)))
		}
	}
	if len(parts) > 0 {
		fmt.Fprintf(b, "\nThe control part of a lease (request, channels, grant), us, medians: %s.\n", strings.Join(parts, ", "))
	}
}

// disturbed writes how disturbed the measurements were.
func disturbed(b *strings.Builder, d *Data) {
	b.WriteString("\n## Disturbances\n\n")
	samples, outliers, lost, incomplete := 0, 0, 0, 0
	for _, r := range slices.Concat(d.Results, d.Between) {
		samples, outliers, lost = samples+r.Samples, outliers+r.Disturbed, lost+r.PairsDiscarded+r.PairsShared+r.PairsAwake
		if !r.Complete && r.Skipped == "" {
			incomplete++
		}
	}
	fmt.Fprintf(b, "All %d samples are kept; %d of them took more than ten times their median. %d pairs were discarded, because the machine changed while they were measured. %d results have fewer pairs than wanted.\n",
		samples, outliers, lost, incomplete)
	for _, note := range d.Notes {
		fmt.Fprintf(b, "- %s\n", note)
	}
}

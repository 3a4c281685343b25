package report

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

// Lines before and after the table in a README.
const (
	headlineBegin = "<!-- table of `make headline`: begin -->\n"
	headlineEnd   = "<!-- table of `make headline`: end -->\n"
	// HeadlinePlot is the plot's file, in the directory of the results.
	HeadlinePlot = "latency-shm.png"
)

// headlineRows are the rows of the README's table.
var headlineRows = []struct {
	name           string
	provider, mode string
	payload        int
}{
	{"shared memory, 8 B", "shm", "hot", 8},
	{"shared memory, 64 B", "shm", "hot", 64},
	{"shared memory, 64 KiB", "shm", "hot", 64 << 10},
	{"shared memory, 1 MiB", "shm", "hot", 1 << 20},
	{"shared memory, both sides asleep, 8 B", "shm", "warm", 8},
	{"emulated RDMA (verbs), 8 B", "verbs", "hot", 8},
	{"emulated RDMA (verbs), 4 KiB", "verbs", "hot", 4 << 10},
	{"emulated RDMA (verbs), 64 KiB", "verbs", "hot", 64 << 10},
}

// HeadlineTable is the README's table. dir is the directory of its plot and results, relative to the README.
func HeadlineTable(d *Data, dir string) (string, error) {
	var b strings.Builder
	b.WriteString("Round trips of a call from a C client to a function that returns its input: median, and 99th percentile (p99). The floor is the\n" +
		"median round trip of a minimal program that moves the same bytes between the same two processors. Both are measured in turn, in many\n" +
		"pairs. The ratio is that of a pair, in the median")
	if len(d.Machine) > 0 {
		fmt.Fprintf(&b, ".\n%s", strings.TrimSuffix(strings.Join(d.Machine, "; "), "."))
	}
	b.WriteString(":\n\n| | call | p99 | floor | ratio |\n|---|---|---|---|---|\n")
	for _, row := range headlineRows {
		r := d.call(row.provider, "c", row.mode, row.payload, 0, 1)
		if r == nil {
			return "", fmt.Errorf("no result of %s, %s, %d B: the table needs it", row.provider, row.mode, row.payload)
		}
		if r.Pairs < 5 {
			return "", fmt.Errorf("%s, %s, %d B has %d undisturbed pairs, fewer than 5: measure that part again", row.provider, row.mode, row.payload, r.Pairs)
		}
		fmt.Fprintf(&b, "| %s | %s us | %s us | %s us | %s |\n", row.name, us(float64(r.P50NS)), us(float64(r.P99NS)), us(float64(r.FloorP50)), ratioText(r.Ratio))
	}
	for _, r := range d.Results {
		if r.Name == "other" && r.Skipped == "" && r.Payload == 8 && r.Samples > 0 {
			fmt.Fprintf(&b, "| for comparison: %s, 8 B | %s us | %s us | | |\n", otherName(r), us(float64(r.P50NS)), us(float64(r.P99NS)))
		}
	}
	fmt.Fprintf(&b, "\n![round trip by payload](%s)\n", filepath.ToSlash(filepath.Join(dir, HeadlinePlot)))
	return b.String(), nil
}

func otherName(r *latency.Result) string {
	names := map[string]string{"openmpi": "OpenMPI send and receive", "mpich": "MPICH send and receive", "ucx": "UCX active messages",
		"grpc-unix": "gRPC in Go, Unix socket", "grpc-tcp": "gRPC in Go, TCP", "http": "HTTP in Go, keep-alive", "rfaas-tcp": "rfaas over TCP, Go client"}
	if n := names[r.Provider]; n != "" {
		return n
	}
	return r.Provider
}

// withHeadline returns the README's text, and the text with the new table.
func withHeadline(d *Data, dir, readme string) (old, now string, err error) {
	text, err := os.ReadFile(readme)
	if err != nil {
		return "", "", err
	}
	rel, err := filepath.Rel(filepath.Dir(readme), dir)
	if err != nil {
		return "", "", err
	}
	table, err := HeadlineTable(d, rel)
	if err != nil {
		return "", "", err
	}
	before, rest, ok1 := strings.Cut(string(text), headlineBegin)
	_, after, ok2 := strings.Cut(rest, headlineEnd)
	if !ok1 || !ok2 {
		return "", "", fmt.Errorf("%s has no lines %q and %q", readme, strings.TrimSpace(headlineBegin), strings.TrimSpace(headlineEnd))
	}
	return string(text), before + headlineBegin + table + headlineEnd + after, nil
}

// Headline writes the README's table, and the plot beside the results.
func Headline(d *Data, dir, readme string) error {
	_, now, err := withHeadline(d, dir, readme)
	if err != nil {
		return err
	}
	p, err := latencyPlot(d, dir, "shm")
	if err != nil {
		return err
	}
	if p == nil {
		return errors.New("nothing to plot")
	}
	return os.WriteFile(readme, []byte(now), 0o644)
}

// CheckHeadline fails if the README differs from what Headline would write.
func CheckHeadline(d *Data, dir, readme string) error {
	old, now, err := withHeadline(d, dir, readme)
	if err != nil {
		return err
	}
	if old != now {
		return fmt.Errorf("%s: its table differs from the results in %s: run make headline-table", readme, dir)
	}
	if _, err := os.Stat(filepath.Join(dir, HeadlinePlot)); err != nil {
		return fmt.Errorf("the plot of %s is missing: %w", readme, err)
	}
	return nil
}

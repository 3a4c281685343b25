package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/cli/command"
)

func runBench(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = Run(context.Background(), command.Env{Version: "test", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &err}, args)
	return code, out.String(), err.String()
}

func TestBenchRefuses(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"latency --provider tcp", 2, `"tcp"`},
		{"latency --payload 8,many", 2, `"many"`},
		{"latency --payload 0", 2, `"0"`},
		{"latency --payload -1", 2, `"-1"`},
		{"latency --payload 2GiB", 2, `"2GiB"`},
		{"latency --pairs 0", 2, "--pairs 0"},
		{"latency --pairs -1", 2, "--pairs -1"},
		{"latency --duration 0s", 2, "--duration 0s"},
		{"latency --depth 0", 2, "--depth 0"},
		{"latency --mode lukewarm", 2, `"lukewarm"`},
		{"latency --depth 5000", 2, "5000"},
		{"latency --cpus 7777,7778", 2, "7777"},
		{"latency --json --csv", 2, "use one of them"},
		{"compare --json --csv a b", 2, "one of them"},
		{"cold --json --csv", 2, "one of them"},
		{"cold --leases 0", 2, "0 leases"},
		{"latency extra", 2, "extra"},
		{"latency --connect node-b:7470", 2, "node-b:7470"},
		{"latency --provider verbs --connect node-b:7470 --cpus 0,0", 2, "one is needed"},
		{"serve --listen nowhere.invalid:1", 2, "nowhere.invalid"},
		{"latency --mode warm --peer /nowhere/peer", 1, "/nowhere/peer"},
		{"latency --mode warm --peer /bin/false", 1, "peer"},
		{"compare one", 2, "2 arg"},
		{"guard --slack 0.5", 2, "slack 0.5"},
		{"guard --repeats 0", 2, "0 repeats"},
		{"bandwidth --payload none", 2, `"none"`},
		{"floors --provider tcp", 2, `"tcp"`},
		{"others --json --csv", 2, "one of them"},
		{"others --only pigeon", 1, `"pigeon"`},
		{"control --executors 10,-5", 1, "-5"},
		{"scaling --max 5000", 2, "5000"},
		{"scaling --provider tcp", 2, `"tcp"`},
		{"report /nowhere", 1, "/nowhere"},
		{"compare /nowhere/a /nowhere/b", 1, "/nowhere/a"},
	} {
		code, stdout, stderr := runBench(strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stderr, c.says) || stdout != "" {
			t.Errorf("bench %s: exit %d (want %d), stderr %q (want %q in it), stdout %q", c.args, code, c.code, stderr, c.says, stdout)
		}
	}
}

// Help and errors name the command that the user has typed.
func TestNameOfBench(t *testing.T) {
	for name, want := range map[string]string{"": "rfaas-bench", command.BenchName: "rfaas bench"} {
		var out, errs bytes.Buffer
		env := command.Env{Name: name, Version: "test", Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &errs}
		if code := Run(t.Context(), env, []string{"neighbour", "--help"}); code != 0 || !strings.Contains(out.String(), "  "+want+" neighbour [flags]\n") {
			t.Errorf("%s: exit %d, help %q", want, code, out.String())
		}
		if code := Run(t.Context(), env, []string{"neighbour", "more"}); code != 2 || !strings.HasPrefix(errs.String(), want+": ") ||
			!strings.Contains(errs.String(), want+" neighbour --help tells more") {
			t.Errorf("%s: exit %d, error %q", want, code, errs.String())
		}
	}
}

func writeResults(t *testing.T, name string, results ...*latency.Result) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := latency.WriteJSON(f, results...); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestBenchCompare(t *testing.T) {
	result := func(payload int, ratio float64) *latency.Result {
		return &latency.Result{Name: "latency", Provider: "shm", Client: "c", Mode: "hot", Function: "echo", Payload: payload, Depth: 1,
			P50NS: 100, Ratio: latency.Number(ratio)}
	}
	a := writeResults(t, "a.json", result(8, 1), result(64, math.NaN()))
	b := writeResults(t, "b.json", result(8, 1.2), result(512, 1))
	code, stdout, stderr := runBench("compare", a, b)
	if code != 0 || !strings.Contains(stdout, "+20.0 %") || !strings.Contains(stdout, "only in "+a) || !strings.Contains(stdout, "only in "+b) {
		t.Errorf("exit %d, stderr %q\n%s", code, stderr, stdout)
	}
	if code, _, stderr := runBench("compare", "--fail-above", "0.1", a, b); code != 1 || !strings.Contains(stderr, "8 B depth 1: +20.0 %") {
		t.Errorf("grown by 20 %%: exit %d, %q", code, stderr)
	}
	if code, _, _ := runBench("compare", "--fail-above", "0.3", a, b); code != 0 {
		t.Errorf("within the limit: exit %d", code)
	}
	if code, _, stderr := runBench("compare", a, writeResults(t, "c.json", result(9, 1))); code != 1 || !strings.Contains(stderr, "in common") {
		t.Errorf("nothing in common: exit %d, %q", code, stderr)
	}
	if code, stdout, stderr := runBench("compare", "--json", a, b); code != 0 || !strings.Contains(stdout, `"b_over_a":0.2`) || strings.Count(stdout, "\n") != 1 ||
		!strings.Contains(stderr, "only in "+b) {
		t.Errorf("--json: exit %d, %q, %q", code, stdout, stderr)
	}
	if code, stdout, _ := runBench("compare", "--csv", a, b); code != 0 || !strings.HasPrefix(stdout, "key,ratio_a,") || !strings.Contains(stdout, ",1.0000,1.2000,0.2000,100,100,") {
		t.Errorf("--csv: exit %d, %q", code, stdout)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("a table\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := runBench("compare", a, empty); code != 1 || !strings.Contains(stderr, "no results") {
		t.Errorf("an empty file: exit %d, %q", code, stderr)
	}
}

// A guard without a verdict has an exit status of its own.
func TestGuardUndecided(t *testing.T) {
	var errs bytes.Buffer
	a := &app{Program: command.Program{Env: command.Env{Stderr: &errs}}}
	var status command.ExitStatus
	if err := a.undecided(fmt.Errorf("verbs: %w", latency.ErrNoVerdict)); !errors.As(err, &status) || status != command.Unknown || !strings.Contains(errs.String(), "too disturbed to judge") {
		t.Errorf("%v, %q", err, errs.String())
	}
	for _, err := range []error{nil, latency.ErrBlind} {
		if got := a.undecided(err); !errors.Is(got, err) || errors.As(got, &status) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// Every visible command has a manual page.
func TestManualPages(t *testing.T) {
	dir := t.TempDir()
	if code, _, stderr := runBench("man", dir); code != 0 {
		t.Fatalf("exit %d, %q", code, stderr)
	}
	for _, c := range newRoot(&app{}).Commands() {
		page := filepath.Join(dir, "rfaas-bench-"+c.Name()+".1")
		if _, err := os.Stat(page); c.IsAvailableCommand() != (err == nil) {
			t.Errorf("%s: available %v, page: %v", c.Name(), c.IsAvailableCommand(), err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "rfaas-bench.1")); err != nil {
		t.Error(err)
	}
}

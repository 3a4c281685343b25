package cold

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

var built = testkit.Built

func TestRun(t *testing.T) {
	for _, mode := range Modes("shm") {
		t.Run(mode, func(t *testing.T) { testRun(t, "shm", mode) })
	}
	t.Run("tcp", func(t *testing.T) { testRun(t, "tcp", "spare") })
}

func testRun(t *testing.T, provider, mode string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cfg := Config{Mode: mode, Executor: built(t, "bin/executor"), Provider: provider, Library: built(t, "build/functions/echo.so"), Function: "empty", Leases: 10}
	r, err := Run(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.Samples != 10 || r.Mode != mode || r.P50NS <= 0 || r.P50NS > r.P90NS || r.P90NS > r.P99NS || r.P99NS > r.P999NS || r.P999NS > r.MaxNS {
		t.Errorf("%+v", r)
	}
	for name, ns := range map[string]int64{"control": r.ControlNS, "fork": r.ForkNS, "sandbox": r.SandboxNS, "connect": r.ConnectNS, "code": r.CodeNS,
		"first call": r.FirstCallNS, "release": r.ReleaseNS} {
		claimed := mode == "cached" || mode == "awake" || mode == "spare" || mode == "ahead" // the executor measures no step then
		if none := claimed && slices.Contains([]string{"fork", "sandbox", "connect", "code"}, name); none != (ns == 0) || ns < 0 || ns > r.MaxNS+r.ReleaseNS {
			t.Errorf("%s took %d ns, the longest lease and call %d ns", name, ns, r.MaxNS)
		}
	}
	var out, table bytes.Buffer
	var back Result
	if err := WriteJSON(&out, r); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || !reflect.DeepEqual(&back, r) {
		t.Errorf("%s is read as %+v (%v)", out.String(), back, err)
	}
	if err := WriteTable(&table, r); err != nil || !strings.Contains(table.String(), "first call") {
		t.Errorf("%v\n%s", err, table.String())
	}
	t.Logf("\n%s", table.String())
	var lines bytes.Buffer
	if err := WriteCSV(&lines, r, r); err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(&lines).ReadAll()
	if err != nil || len(rows) != 3 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	if at := slices.Index(rows[0], "p999_ns"); at < 0 || rows[1][at] != fmt.Sprint(r.P999NS) || rows[2][slices.Index(rows[0], "mode")] != mode {
		t.Errorf("%q", rows)
	}
}

func TestRunRefuses(t *testing.T) {
	good := Config{Executor: built(t, "bin/executor"), Provider: "shm", Library: built(t, "build/functions/echo.so"), Function: "empty", Leases: 1}
	for text, change := range map[string]func(*Config){
		`"pigeon"`:        func(c *Config) { c.Provider = "pigeon" },
		`"lukewarm"`:      func(c *Config) { c.Mode = "lukewarm" },
		"-1 leases":       func(c *Config) { c.Leases = -1 },
		"/nonexistent/x":  func(c *Config) { c.Executor = "/nonexistent/x" },
		"ended at once":   func(c *Config) { c.Executor = "/bin/false" },
		"/nonexistent.so": func(c *Config) { c.Library = "/nonexistent.so" },
		`"no_such"`:       func(c *Config) { c.Function = "no_such" },
	} {
		cfg := good
		change(&cfg)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := Run(ctx, cfg); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want an error that says %s", err, text)
		}
		cancel()
	}
}

func TestSeries(t *testing.T) {
	cfg := Config{Executor: built(t, "bin/executor"), Provider: "shm", Library: built(t, "build/functions/echo.so"), Function: "empty", Leases: 2}
	for _, runs := range []int{-1, 0, 2, MostRuns + 2} {
		if _, err := Series(t.Context(), cfg, Modes("shm"), runs); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%d runs", runs)) {
			t.Errorf("%d runs: %v", runs, err)
		}
	}
	if results, err := Series(t.Context(), cfg, []string{"cached", "lukewarm"}, 3); err == nil || len(results) != 1 || results[0].Runs != 1 {
		t.Errorf("%d results before a run that fails: %v", len(results), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	results, err := Series(ctx, cfg, []string{"cached", "cold"}, 3)
	if err != nil || len(results) != 2 {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, mode := range []string{"cached", "cold"} {
		r := results[i]
		sorted := slices.Sorted(slices.Values(r.RunsP50))
		if r.Mode != mode || r.Runs != 3 || len(sorted) != 3 || r.P50NS != sorted[1] {
			t.Errorf("%+v", r)
		}
		var table bytes.Buffer
		if err := WriteTable(&table, r); err != nil || !strings.Contains(table.String(), "the median p50 of 3 runs") {
			t.Errorf("%v\n%s", err, table.String())
		}
	}
}

func TestRank(t *testing.T) {
	many := make([]int64, 2000)
	for i := range many {
		many[i] = int64(i + 1)
	}
	for _, c := range []struct {
		list     []int64
		permille int
		want     int64
	}{{[]int64{7}, 500, 7}, {[]int64{1, 2}, 500, 1}, {[]int64{1, 2, 3}, 500, 2}, {[]int64{1, 2, 3, 4}, 990, 4}, {[]int64{1, 2, 3, 4}, 0, 1},
		{many, 500, 1000}, {many, 990, 1980}, {many, 999, 1998}} {
		if got := rank(c.list, c.permille); got != c.want {
			t.Errorf("%d of a thousand of %d: %d, want %d", c.permille, len(c.list), got, c.want)
		}
	}
}

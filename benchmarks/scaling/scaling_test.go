package scaling

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
)

func config(t *testing.T) Config {
	t.Helper()
	cfg := Config{Executor: "../../bin/executor", Library: "../../build/functions/echo.so", Provider: "shm", Secret: filepath.Join(t.TempDir(), "secret"),
		Max: 2, Pairs: 2, Batch: 10 * time.Millisecond, Works: []time.Duration{time.Millisecond}}
	for _, p := range []*string{&cfg.Executor, &cfg.Library} {
		path, err := filepath.Abs(*p)
		if err == nil {
			_, err = os.Stat(path)
		}
		if err != nil {
			t.Fatalf("run make build first: %v", err)
		}
		*p = path
	}
	return cfg
}

func TestRun(t *testing.T) {
	var got []string
	if err := Run(t.Context(), config(t), func(r *latency.Result) error {
		got = append(got, r.Key())
		// A call takes at least as long as its function, and the rate cannot exceed that of all workers together.
		least := int64(time.Millisecond) / int64(max(r.Workers, r.Clients))
		if r.P50NS < int64(time.Millisecond) || float64(r.MeanNS) < float64(least) || !(r.Ratio > 0) || r.Samples != 2*r.BatchCalls {
			t.Errorf("%+v", r)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || !strings.HasSuffix(got[2], "1 workers, 2 clients") {
		t.Errorf("%q", got)
	}
}

func TestNext(t *testing.T) {
	var got []int
	for n := 1; n <= 6; n = next(n, 6) {
		got = append(got, n)
	}
	if len(got) != 4 || got[3] != 6 {
		t.Errorf("%v", got)
	}
}

func TestRunRefuses(t *testing.T) {
	cfg := config(t)
	cfg.Max = 2000
	if err := Run(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), "2000") {
		t.Errorf("%v", err)
	}
	cfg = config(t)
	cfg.Executor = "/nowhere"
	if err := Run(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("%v", err)
	}
}

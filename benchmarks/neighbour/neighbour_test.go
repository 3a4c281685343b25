package neighbour

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/tests/agenttest"
)

func TestMain(m *testing.M) { os.Exit(agenttest.Run("../..", m.Run)) }

func settings(t *testing.T) Config {
	t.Helper()
	cfg := Config{Executor: "../../bin/executor", Library: "../../build/functions/echo.so", Secret: filepath.Join(t.TempDir(), "secret"),
		Pairs: 2, Batch: 5 * time.Millisecond, Yield: 200 * time.Millisecond}
	cfg.Job = []string{"../../bin/rfaas-bench", "neighbour-job"}
	for _, p := range []*string{&cfg.Executor, &cfg.Library, &cfg.Job[0]} {
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

// Each kind of neighbour is measured, and the executor ends the lease because of a neighbour on its CPUs.
func TestRun(t *testing.T) {
	var got []string
	err := Run(t.Context(), settings(t), func(r *latency.Result) error {
		got = append(got, r.Function)
		if r.P50NS <= 0 || !r.Complete || !strings.HasPrefix(r.Function, "lease ends") && !(r.Ratio > 0) {
			t.Errorf("%+v", r)
		}
		return nil
	})
	if err != nil && !errors.Is(err, ErrOthers) { // then what came before is judged
		t.Fatal(err)
	}
	const slowdowns = 12 // compute, bandwidth, latency and wake-up on the same CPUs, compute and bandwidth beside, each with its control
	if err != nil {
		t.Log(err)
		if len(got) < slowdowns {
			t.Errorf("%q", got)
		}
		return
	}
	if len(got) < slowdowns+2 || got[0] != "compute, workers on the same CPUs" || !strings.HasPrefix(got[len(got)-1], "lease ends") {
		t.Errorf("%q", got)
	}
}

func TestRunRefuses(t *testing.T) {
	cfg := settings(t)
	cfg.CPUs = []int{0}
	if err := Run(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), "1 CPUs") {
		t.Errorf("%v", err)
	}
}

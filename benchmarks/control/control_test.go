package control

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/benchmarks/latency"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

func config(t *testing.T) Config {
	t.Helper()
	program, err := filepath.Abs("../../bin/resource-manager")
	if err == nil {
		_, err = os.Stat(program)
	}
	if err != nil {
		t.Fatalf("run make build first: %v", err)
	}
	return Config{Manager: program, Executors: []int{3, 40}, Subscribers: []int{2, 5}, Batch: 10, Latency: latency.Config{Provider: dataplane.SHM, Peer: "../../libexec/rfaas-bench-peer",
		Device: dataplane.Options{GIDIndex: -1}, Pairs: 2, Duration: 10 * time.Second}}
}

func TestRun(t *testing.T) {
	seen := map[string]*latency.Result{}
	if err := Run(t.Context(), config(t), func(r *latency.Result) error { seen[r.Function] = r; return nil }); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"placement, 3 executors", "placement, 40 executors", "placement, 40 executors, manager stopped", "look-up",
		"look-up, manager stopped", "clock, 1 us", "look-up by message, 3 executors", "heartbeat by message",
		"heartbeat by write", "charge, 1 counter", "charge, 8 counters", "change told to 2 subscribers", "change told to 5 subscribers"} {
		r := seen[name]
		if r == nil || r.P50NS <= 0 || r.MaxNS < r.P50NS || r.Samples != r.BatchCalls*2 && !strings.HasPrefix(name, "change") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if len(seen) != 13 {
		t.Errorf("%d results", len(seen))
	}
}

func TestCharging(t *testing.T) {
	cfg := ChargingConfig{Manager: config(t).Manager, Provider: dataplane.SHM, Dir: t.TempDir(), Pairs: 2, Batch: 10 * time.Millisecond}
	for into, path := range map[*string]string{&cfg.Executor: "../../bin/executor", &cfg.Library: "../../build/functions/echo.so"} {
		p, err := filepath.Abs(path)
		if err == nil {
			_, err = os.Stat(p)
		}
		if err != nil {
			t.Fatalf("run make build first: %v", err)
		}
		*into = p
	}
	r, err := Charging(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if r.P50NS <= 0 || r.Pairs != 2 || !(r.Ratio > 0) || r.Samples == 0 || float64(r.OverFloor) == 0 {
		t.Errorf("%+v", r)
	}
	cfg.Executor = "/bin/false"
	if _, err := Charging(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "ended at once") {
		t.Errorf("%v", err)
	}
}

func TestRunRefuses(t *testing.T) {
	for says, change := range map[string]func(*Config){
		"-1 executors":   func(c *Config) { c.Executors = []int{-1} },
		"60000":          func(c *Config) { c.Subscribers = []int{60000} },
		"/nowhere":       func(c *Config) { c.Manager = "/nowhere" },
		"ended at once":  func(c *Config) { c.Manager = "/bin/false" },
		`provider "ipc"`: func(c *Config) { c.Latency.Provider = "ipc" },
	} {
		cfg := config(t)
		change(&cfg)
		if err := Run(t.Context(), cfg, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q in it", err, says)
		}
	}
}

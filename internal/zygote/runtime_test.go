package zygote

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// startRuntime starts zygotes with and without a runtime. It skips the test on nodes without a libpython.
func startRuntime(t *testing.T) *Zygote {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/*/libpython3.*.so.1.0")
	if _, err := os.Stat("/usr/bin/python3"); err != nil || len(found) == 0 {
		t.Skip("needs Python and its library")
	}
	z, err := Start(t.Context(), Config{Path: workerPath(t), Log: testLog(t), Sandbox: testSandbox, Runtimes: []Runtime{{Name: "plain", Python: "/usr/bin/python3"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { z.Close() })
	return z
}

// Zygotes with and without a runtime are killed at random moments while both clone workers: every spawn succeeds or fails cleanly, and no
// process is left.
func TestZygotesKilledDuringSpawns(t *testing.T) {
	c := startClient(t)
	code := sealedFile(t, testLibrary(t))
	wire.OnStarterThread(func() {})
	check := leakCheck(t)
	z := startRuntime(t)
	stop := z.killAtRandom(5, 9)
	spawn := func(runtime string) error {
		spec, channel := c.spec(t, code)
		spec.Runtime = runtime
		w, err := z.Spawn(t.Context(), spec)
		if err == nil {
			if err := c.connect(w, channel); err != nil {
				t.Error(err)
			}
			w.Kill()
			<-w.Done()
		}
		c.ask("close %d", channel)
		return err
	}
	for i := range 20 {
		runtime := []string{"", "plain"}[i%2]
		if err := spawn(runtime); err != nil && !errors.Is(err, errZygoteDied) {
			t.Errorf("runtime %q: %v", runtime, err)
		}
	}
	stop()
	for _, runtime := range []string{"", "plain"} {
		if err := spawn(runtime); err != nil {
			t.Errorf("runtime %q, after the kills: %v", runtime, err)
		}
	}
	var unknown *WorkerError
	if err := spawn("none"); !errors.As(err, &unknown) || unknown.Status != wire.StatusUnsupported || !strings.Contains(err.Error(), `"none"`) {
		t.Errorf("an unknown runtime: %v", err)
	}
	if err := z.Close(); err != nil {
		t.Error(err)
	}
	check()
}

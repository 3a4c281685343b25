package zygote

import (
	"slices"
	"testing"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

func TestWorkerEnv(t *testing.T) {
	env := []string{"PATH=/bin", "RFAAS_SECRET=x", "LD_LIBRARY_PATH=/lib", "RFAAS_=y", "OMP_NUM_THREADS=2", "CLOUD_KEY=z", "HOME=/root", "PATHS=/",
		"APP_DIR=/app", "APP=1", "EMPTY"}
	for _, tc := range []struct {
		name string
		s    Sandbox
		want []string
	}{
		{"off", Sandbox{}, []string{"PATH=/bin", "LD_LIBRARY_PATH=/lib", "OMP_NUM_THREADS=2", "CLOUD_KEY=z", "HOME=/root", "PATHS=/", "APP_DIR=/app", "APP=1", "EMPTY"}},
		{"on", Sandbox{Mode: sandbox.On}, []string{"HOME=/tmp", "PATH=/bin", "LD_LIBRARY_PATH=/lib", "OMP_NUM_THREADS=2"}},
		{"more", Sandbox{Mode: sandbox.Require, Environment: []string{"APP_*", "EMPTY", "RFAAS_*"}},
			[]string{"HOME=/tmp", "PATH=/bin", "LD_LIBRARY_PATH=/lib", "OMP_NUM_THREADS=2", "APP_DIR=/app", "EMPTY"}},
	} {
		if got := tc.s.environment(env); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

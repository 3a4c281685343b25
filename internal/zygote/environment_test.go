package zygote

import (
	"slices"
	"testing"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Variables that configure numerical libraries are kept. Credentials with similar names are not.
func TestEnvironmentForComputing(t *testing.T) {
	kept := []string{"TZDIR", "LOCPATH", "GFORTRAN_UNBUFFERED_ALL", "FORT_BUFFERED", "PYTHONHOME", "PYTHONPATH", "TBB_VERSION", "HWLOC_XMLFILE",
		"MKLROOT", "MKL_NUM_THREADS", "FLEXIBLAS", "FLEXIBLAS_VERBOSE", "VERBS_LOG_LEVEL", "MLX5_SINGLE_THREADED", "BNXT_RE_X", "BNXT_SINGLE_THREADED",
		"CXGB4_MA_WR", "HNS_ROCE_X", "HNS_DCA_UNIT_SIZE", "IRDMA_DEBUG", "QELR_DP_LEVEL"}
	gone := []string{"TZDIRS", "FORTUNE", "PYTHONSTARTUP", "PYTHON_KEYRING_BACKEND", "MKLROOTS", "FLEXIBLASX", "HNS_PASSWORD", "EFA_CLI_SECRET_KEY",
		"BNXT_TOKEN", "VERBS_TOKEN", "AWS_SECRET_ACCESS_KEY", "KRB5CCNAME", "SSH_AUTH_SOCK", "SLURM_JWT", "XDG_RUNTIME_DIR"}
	var env, want []string
	for _, name := range kept {
		want = append(want, name+"=1")
	}
	for _, name := range gone {
		env = append(env, name+"=1")
	}
	env = append(env, want...)
	s := Sandbox{Mode: sandbox.On}
	if got := s.environment(env); !slices.Equal(got, append([]string{"HOME=/tmp"}, want...)) {
		t.Errorf("%q, want %q", got, want)
	}
}

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

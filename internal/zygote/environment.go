package zygote

import (
	"slices"
	"strings"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// passed names the executor's environment variables that workers in a sandbox also have. The loader, the C library, language
// runtimes, and libraries for computing and for the fabric (libibverbs, libfabric and their providers) read them. An asterisk matches any suffix. Prefixes that other
// programs also use, perhaps for credentials, have no asterisk or are longer.
var passed = []string{
	"PATH", "LD_*", "GLIBC_TUNABLES", "MALLOC_*", "LANG", "LANGUAGE", "LC_*", "LOCPATH", "TZ", "TZDIR",
	"GFORTRAN_*", "FORT_*", "PYTHONHOME", "PYTHONPATH",
	"OMP_*", "GOMP_*", "KMP_*", "TBB_*", "HWLOC_*",
	"MKL_*", "MKLROOT", "OPENBLAS_*", "GOTO_*", "BLIS_*", "FLEXIBLAS", "FLEXIBLAS_*", "NUMEXPR_*",
	"IBV_*", "RDMAV_*", "VERBS_LOG_*", "MLX4_*", "MLX5_*", "BNXT_RE_*", "BNXT_SINGLE_THREADED", "BNXT_DYN_DBG", "CXGB4_*", "T5_ENABLE_WC",
	"FI_*", "HNS_ROCE_*", "HNS_DCA_*", "IRDMA_*", "QELR_*",
	"ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS",
}

// ours is the prefix of the variables of rfaas, which may contain secrets.
const ours = "RFAAS_"

// environment returns the environment of the zygote, and so of user code, from that of the executor. The executor's may hold credentials
// of other programs, so a sandbox gets only the named variables. HOME is /tmp there.
func (s *Sandbox) environment(env []string) (out []string) {
	if s.Mode != sandbox.Off {
		out = []string{"HOME=/tmp"}
	}
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, ours) && (s.Mode == sandbox.Off || named(passed, name) || named(s.Environment, name)) {
			out = append(out, kv)
		}
	}
	return out
}

func named(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		begin, any := strings.CutSuffix(p, "*")
		return p == name || any && strings.HasPrefix(name, begin)
	})
}

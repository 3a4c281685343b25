package zygote

import (
	"slices"
	"strings"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// passed are the variables of the executor's that workers in a sandbox keep: what the loader, the C library and libraries for
// computing and for the fabric look at. An asterisk at the end stands for any end.
var passed = []string{
	"PATH", "LD_*", "GLIBC_TUNABLES", "MALLOC_*", "LANG", "LANGUAGE", "LC_*", "TZ",
	"OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "GOTO_*", "BLIS_*", "NUMEXPR_*",
	"IBV_*", "RDMAV_*", "MLX4_*", "MLX5_*",
	"ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS",
}

// ours begins the names of our own settings, which may contain secrets.
const ours = "RFAAS_"

// environment is that of the zygote and so of user code, out of the executor's. Other settings and credentials stand there than
// rfaas': in a sandbox only what is named is left, and what nobody outside calls home is /tmp.
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

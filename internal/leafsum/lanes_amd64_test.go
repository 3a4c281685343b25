//go:build cgo

package leafsum

import (
	"os"
	"regexp"
	"testing"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Lanes hash the leaves if the processor has AVX-512. TestAppend compares their hashes.
func TestLanesAreUsed(t *testing.T) {
	cpus, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	has := func(flag string) bool { return regexp.MustCompile(`(?m)^flags\s*:.* ` + flag + `( |$)`).Match(cpus) }
	if !has("avx512f") || !has("avx512bw") {
		testkit.NotTested(t, "hashes of several pages at a time, which need AVX-512")
		return
	}
	if _, n := appendLanes(nil, make([]byte, 16*4096), 4096); n != 16*4096 {
		t.Errorf("lanes have hashed %d bytes of 16 pages", n)
	}
}

package capi

import (
	"os"
	"slices"
	"testing"
)

// TestLate names functions that run on after their deadlines, replaces their workers, and waits for room.
func TestLate(t *testing.T) {
	for name, flags := range map[string][]string{"plain": nil, "sanitized": {"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}} {
		t.Run(name, func(t *testing.T) {
			if os.Getenv("RFAAS_REQUIRE_VERBS") != "" && name != "plain" {
				t.Skip("compilers are slow there")
			}
			run(t, build(t, "gcc", "testdata/late_test.c", slices.Concat(c11, flags)...), built(t, "build/functions/echo.so"))
		})
	}
}

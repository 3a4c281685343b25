package capi

import (
	"os"
	"slices"
	"testing"
)

// TestThreads has several threads use one lease in every way at the same time.
func TestThreads(t *testing.T) {
	crosses(t)
	for _, c := range []struct {
		name, calls  string
		flags, parts []string
	}{
		{"plain", "20000", nil, []string{"calls", "handed-over", "several"}}, // those whose races need speed
		{"sanitized", "4000", []string{"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"},
			[]string{"calls", "handed-over", "several", "long-calls", "deadlines", "own-requests", "deaths", "releases"}},
	} {
		program := build(t, "gcc", "testdata/threads_test.c", slices.Concat(c11, c.flags)...)
		for _, part := range c.parts {
			t.Run(c.name+"/"+part, func(t *testing.T) {
				calls := c.calls
				if s := os.Getenv("TEST_CALLS"); s != "" {
					calls = s
				}
				t.Setenv("TEST_CALLS", calls)
				t.Log(runWith(t, []string{"--share-cores", "2", "--max-workers", "4"}, program, built(t, "build/functions/echo.so"), part))
			})
		}
	}
}

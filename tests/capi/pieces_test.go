package capi

import (
	"os"
	"slices"
	"testing"
)

// TestPieces calls functions with payloads and results in several pieces of memory: on shm and tcp, and in the calling process.
func TestPieces(t *testing.T) {
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		runWith(t, nil, build(t, "gcc", "testdata/pieces_test.c", c11...), built(t, "build/functions/echo.so"), "verbs")
		return
	}
	for name, flags := range map[string][]string{"plain": nil, "sanitized": {"-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"}} {
		program := build(t, "gcc", "testdata/pieces_test.c", slices.Concat(c11, flags)...)
		for what, executor := range map[string][]string{"shm": nil, "tcp": {"--providers", "tcp"}, "busy": nil} {
			t.Run(name+"/"+what, func(t *testing.T) {
				runWith(t, executor, program, built(t, "build/functions/echo.so"), what)
			})
		}
	}
}

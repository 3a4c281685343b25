package capi

import (
	"os"
	"testing"
)

// TestPieces calls functions with payloads and results in several pieces of memory: on shm and tcp, and in the calling process.
func TestPieces(t *testing.T) {
	program := build(t, "gcc", "testdata/pieces_test.c", checkedC()...)
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		runWith(t, nil, program, built(t, "build/functions/echo.so"), "verbs")
		return
	}
	for what, executor := range map[string][]string{"shm": nil, "tcp": {"--providers", "tcp"}, "busy": nil} {
		t.Run(what, func(t *testing.T) {
			runWith(t, executor, program, built(t, "build/functions/echo.so"), what)
		})
	}
}

package capi

import (
	"os"
	"testing"
)

// TestInPlace calls functions whose payload and result workers use where they are, and where workers copy them as ever: over tcp or verbs
// and in the calling process.
func TestInPlace(t *testing.T) {
	echo := built(t, "build/functions/echo.so")
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		runWith(t, nil, build(t, "gcc", "testdata/place_test.c", c11...), echo, "verbs")
		return
	}
	program := build(t, "gcc", "testdata/place_test.c", checkedC()...)
	for what, executor := range map[string][]string{"shm": nil, "tcp": {"--providers", "tcp"}, "here": nil} {
		t.Run(what, func(t *testing.T) {
			runWith(t, executor, program, echo, what)
		})
	}
}

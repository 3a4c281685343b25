package capi

import "testing"

// TestLimits gives the library times that do not fit, and no descriptors.
func TestLimits(t *testing.T) {
	crosses(t)
	program := build(t, "gcc", "testdata/limits_test.c", append([]string{"-fsanitize=undefined", "-fno-sanitize-recover=undefined"}, c11...)...)
	t.Log(run(t, program, built(t, "build/functions/echo.so")))
}

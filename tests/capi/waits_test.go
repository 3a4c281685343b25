package capi

import "testing"

// TestWaits has threads of a lease wait for each other, and counts how often they wake.
func TestWaits(t *testing.T) {
	crosses(t)
	t.Log(run(t, build(t, "gcc", "testdata/waits_test.c", c11...), built(t, "build/functions/echo.so")))
}

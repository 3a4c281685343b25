package capi

import "testing"

// TestLate names functions that run on after their deadlines, replaces their workers, and waits for room.
func TestLate(t *testing.T) {
	run(t, build(t, "gcc", "testdata/late_test.c", checkedC()...), built(t, "build/functions/echo.so"))
}

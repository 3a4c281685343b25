// Package testkit has helpers for the tests of all packages.
package testkit

import (
	"os"
	"testing"
	"time"
)

// Bound is how long Eventually waits. It only ends tests that fail.
const Bound = 60 * time.Second

// Eventually polls until cond holds, and fails the test after Bound. It is for states that have no event to wait for.
func Eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(Bound); ; time.Sleep(time.Millisecond) {
		late := time.Now().After(end) // before cond: after a pause of this process, cond is checked once more
		if cond() {
			return
		}
		if late {
			t.Fatalf("not within %v: %s", Bound, what)
		}
	}
}

// Lacks ends a test for which this machine lacks something. It skips the test, but fails it if CI is set, because CI must run
// every test.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("CI has to run this test: "+format, args...)
	}
	t.Skipf(format, args...)
}

// Root ends a test that only root can run.
func Root(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Lacks(t, "only root %s", why)
	}
}

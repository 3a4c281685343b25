// Package testkit has helpers for the tests of all packages.
package testkit

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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

// Built returns the absolute path of a file that make builds, such as bin/executor, and fails the test if it is missing. The working directory is
// that of a package. It does not change or check an absolute path.
func Built(t testing.TB, path string) string {
	t.Helper()
	if filepath.IsAbs(path) {
		return path
	}
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for root != "/" {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		root = filepath.Dir(root)
	}
	path = filepath.Join(root, path)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run make build test-programs first", err)
	}
	return path
}

// Lacks ends a test for which this machine lacks something. It skips the test, but fails it if CI is set, because CI must run
// every test.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("CI has to run this test: "+format, args...)
	}
	NotTested(t, format, args...)
	t.SkipNow()
}

// NotTested reports a part of a test that this machine cannot run or judge. Unlike Lacks, it does not end the test, and does not fail in CI. tests/run
// prints these reports after all lanes.
func NotTested(t testing.TB, format string, args ...any) {
	t.Helper()
	what := fmt.Sprintf(format, args...)
	t.Logf("NOT TESTED: %s", what)
	path := os.Getenv("RFAAS_NOT_TESTED")
	if path == "" {
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err == nil {
		_, err = fmt.Fprintf(f, "%s: %s\n", t.Name(), what)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Error(err)
	}
}

// OpenUp gives mode to path and to the directories above it, below the directory of temporary files, so that other users reach it.
func OpenUp(t testing.TB, path string, mode os.FileMode) {
	t.Helper()
	top := filepath.Clean(os.TempDir())
	if !strings.HasPrefix(path, top+"/") {
		t.Fatalf("%s is not below %s", path, top)
	}
	for ; path != top; path = filepath.Dir(path) {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
}

// Root ends a test that only root can run.
func Root(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Lacks(t, "only root %s", why)
	}
}

package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// rfaasIn makes this test a program rfaas in a directory of its own, which is empty otherwise.
func rfaasIn(t *testing.T) (dir string, run func(args ...string) (code int, stdout, stderr string)) {
	t.Helper()
	dir = t.TempDir()
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "rfaas"), self, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir, func(args ...string) (int, string, string) {
		var out, errs strings.Builder
		cmd := exec.Command(filepath.Join(dir, "rfaas"), args...)
		cmd.Env = append(os.Environ(), "CLI_TEST_RUN=1")
		cmd.Stdout, cmd.Stderr = &out, &errs
		_ = cmd.Run()
		return cmd.ProcessState.ExitCode(), out.String(), errs.String()
	}
}

func TestBenchExecutesTheProgramBeside(t *testing.T) {
	dir, run := rfaasIn(t)
	program := filepath.Join(dir, "rfaas-bench")
	if code, stdout, stderr := run("bench", "latency"); code != 1 || stdout != "" || !strings.Contains(stderr, program+" is missing: ") ||
		!strings.Contains(stderr, "make programs") {
		t.Errorf("without rfaas-bench: exit %d, %q, %q", code, stdout, stderr)
	}
	script := "#!/bin/sh\nif [ \"$1\" = __complete ]; then echo latency; echo :4; else echo \"$@\"; exit 3; fi\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"latency --payload 8", "--help", ""} {
		if code, stdout, stderr := run(append([]string{"bench"}, strings.Fields(args)...)...); code != 3 || stdout != args+"\n" || stderr != "" {
			t.Errorf("bench %s: exit %d, %q, %q", args, code, stdout, stderr)
		}
	}
	if code, stdout, _ := run("__complete", "bench", "lat"); code != 0 || !strings.HasPrefix(stdout, "latency\n:4") {
		t.Errorf("completion: exit %d, %q", code, stdout)
	}
}

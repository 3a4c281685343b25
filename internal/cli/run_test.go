package cli

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/cli/command"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// ran is one process of rfaas run.
type ran struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	errs   testkit.Buffer
	places string // where the process makes its directories
}

// startRun starts rfaas run with the arguments. Nothing in the environment names a daemon.
func startRun(t *testing.T, args ...string) *ran {
	t.Helper()
	r := &ran{t: t, places: t.TempDir()}
	program, err := filepath.Abs("../../bin/rfaas")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r.cmd = exec.CommandContext(ctx, program, append([]string{"run"}, args...)...)
	r.cmd.Dir = "../.."
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "RFAAS_") {
			r.cmd.Env = append(r.cmd.Env, variable)
		}
	}
	r.cmd.Env = append(r.cmd.Env, "TMPDIR="+r.places)
	r.cmd.Stderr = &r.errs
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewReader(out)
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return r
}

// line returns the next line of the program's output.
func (r *ran) line() string {
	r.t.Helper()
	s, err := r.out.ReadString('\n')
	if err != nil {
		r.t.Fatalf("%v\n%s", err, r.errs.String())
	}
	return strings.TrimSuffix(s, "\n")
}

// ends waits for the end. It returns the exit status, the rest of the output, and the errors. Nothing may be left.
func (r *ran) ends() (status int, out, errs string) {
	r.t.Helper()
	b, err := io.ReadAll(r.out)
	if err != nil {
		r.t.Fatal(err)
	}
	_ = r.cmd.Wait() // ProcessState has the status
	if left, err := os.ReadDir(r.places); err != nil || len(left) > 0 {
		r.t.Errorf("rfaas run left %v (%v)", left, err)
	}
	return r.cmd.ProcessState.ExitCode(), string(b), r.errs.String()
}

func TestRun(t *testing.T) {
	const invoke = "invoke build/functions/echo.so echo"
	for _, c := range []struct {
		args   string
		status int
		out    string
		errs   string // of a regular expression
	}{
		{"-- bin/rfaas " + invoke + " --hex 0102 --print hex", 0, "0102\n", `^$`},
		{"-- bin/rfaas " + invoke + " --args f64:3,-4.5 --args u8:1,0x02 --print u8", 0, "0 0 0 0 0 0 8 64 0 0 0 0 0 0 18 192 1 2\n", `^$`},
		{"--cores 2 -- bin/rfaas " + invoke + " --workers 2 --workers-min 1 --args i32:-7,8 --print i32", 0, "-7 8\n-7 8\n", `^$`},
		{"-- bin/rfaas " + invoke + " --memory 1PiB", 2, "", `--memory: "1PiB" is not a size`},
		{"-- bin/rfaas " + invoke + " --workers 0", 2, "", `--workers 0: want 1 at least`},
		{"-- bin/rfaas " + invoke + " --workers 2 --workers-min 3", 2, "", `--workers-min 3: want 1 to 2`},
		{"-- bin/rfaas " + invoke + " --args u8:1,2,3 --print u16", 1, "", `--print u16: result of worker 0: 3 bytes are not`},
		{"--verbose true", 0, "", `(?s)^rfaas run: resource manager at 127.0.0.1:\d+ and executor at 127.0.0.1:\d+ are ready.*stopped the daemons\n$`},
		{"false", 1, "", `^$`},
		{"no-such-program", 127, "", `no-such-program`},
		{"/dev/null", 126, "", `permission denied`},
		{"--cores 9999 true", 1, "", `"9999" cores: want 1 to 1024`},
		{"--logs /no/such/directory true", 1, "", `--logs: open /no/such/directory/manager.log`},
		{"", 2, "", `no program: give one`},
	} {
		status, out, errs := startRun(t, strings.Fields(c.args)...).ends()
		if status != c.status || out != c.out || !regexp.MustCompile(c.errs).MatchString(errs) {
			t.Errorf("rfaas run %s: status %d, output %q, errors %q; want %d, %q, %s", c.args, status, out, errs, c.status, c.out, c.errs)
		}
	}
}

// Signals reach the program. The exit status is what a shell reports for the program's end.
func TestRunPassesSignals(t *testing.T) {
	for end, want := range map[string]int{"exit 9": 9, "trap - TERM; kill -TERM $$": 143} {
		r := startRun(t, "--", "sh", "-c", "trap '"+end+"' TERM; echo up; read line")
		r.line()
		if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if status, _, errs := r.ends(); status != want || errs != "" {
			t.Errorf("%q: status %d, want %d; %s", end, status, want, errs)
		}
	}
}

// The program goes on when a daemon has ended, and its user is told.
func TestRunTellsOfALostDaemon(t *testing.T) {
	logs := t.TempDir()
	r := startRun(t, "--logs", logs, "--", "sh", "-c", `
		for p in $(cat /proc/$PPID/task/*/children); do
			[ "$(cat /proc/$p/comm)" = executor ] && kill -KILL $p && tail --pid=$p -f /dev/null
		done
		echo killed; read line; exit 3`)
	if got := r.line(); got != "killed" {
		t.Fatal(got)
	}
	testkit.Eventually(t, "the user is told", func() bool { return strings.Contains(r.errs.String(), "the executor has ended while the program runs") })
	r.in.Close()
	if status, _, errs := r.ends(); status != 3 {
		t.Errorf("status %d, %s", status, errs)
	}
	for _, name := range []string{"manager.log", "executor.log"} {
		if b, err := os.ReadFile(filepath.Join(logs, name)); err != nil || !bytes.Contains(b, []byte("msg=ready")) {
			t.Errorf("%s: %v\n%s", name, err, b)
		}
	}
}

// With a resource manager or an executor in the environment, the command waits for an executor and starts nothing.
func TestRunWaits(t *testing.T) {
	var got bytes.Buffer
	run := func(env map[string]string, args ...string) (int, string) {
		var errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: func(k string) string { return env[k] }, Stdout: &got, Stderr: &errs}, append([]string{"run", "--timeout", "300ms"}, args...))
		return code, errs.String()
	}
	s, p, _ := world(t)
	for _, name := range []string{"RFAAS_MANAGER", "RFAAS_EXECUTOR"} {
		env := map[string]string{name: p.Address, "RFAAS_SECRET_FILE": s.secret}
		if code, errs := run(env, "--", "sh", "-c", "exit 5"); code != 5 || errs != "" {
			t.Errorf("%s: status %d, %s", name, code, errs)
		}
		if code, errs := run(env, "--cores", "1", "--", "true"); code != command.Usage || !strings.Contains(errs, "unset RFAAS_MANAGER") {
			t.Errorf("%s: --cores: status %d, %s", name, code, errs)
		}
		env[name] = "127.0.0.1:1"
		if code, errs := run(env, "--", "true"); code != command.Failure || !strings.Contains(errs, "127.0.0.1:1") {
			t.Errorf("%s: nobody listens: status %d, %s", name, code, errs)
		}
	}
	env := map[string]string{"RFAAS_MANAGER": p.Address, "RFAAS_EXECUTOR": "127.0.0.1:1", "RFAAS_SECRET_FILE": s.secret} // the manager wins
	if code, errs := run(env, "--", "sh", "-c", "exit 5"); code != 5 {
		t.Errorf("manager and executor: status %d, %s", code, errs)
	}
	s.empty.Store(math.MaxInt64)
	if code, errs := run(env, "--", "true"); code != command.Failure || !strings.Contains(errs, "no executor has registered within 300ms") {
		t.Errorf("no executor: status %d, %s", code, errs)
	}
	s.empty.Store(2)
	s.asked.Store(0)
	if code, errs := run(env, "--timeout", "20s", "--", "sh", "-c", "exit 6"); code != 6 || s.asked.Load() != 3 {
		t.Errorf("an executor comes: status %d after %d questions, %s", code, s.asked.Load(), errs)
	}
}

func TestValues(t *testing.T) {
	for arg, want := range map[string]string{
		"i8:-128,127":              "[-128 127]",
		"u16:0xffff":               "[65535]",
		"i64:-1":                   "[-1]",
		"u64:18446744073709551615": "[18446744073709551615]",
		"f32:0.1, 1e3":             "[0.1 1000]",
		"f64:NaN,-Inf":             "[NaN -Inf]",
	} {
		name, _, _ := strings.Cut(arg, ":")
		b, err := appendValues(nil, arg)
		if err != nil {
			t.Error(arg, err)
			continue
		}
		typ := valueTypes[name]
		if v, err := typ.values(b); err != nil || fmt.Sprint(v) != want {
			t.Errorf("%s: %v, %v", arg, v, err)
		}
	}
	for arg, want := range map[string]string{"i8:128": `"128" is not a valid i8: value out of range`, "f64": "want TYPE:VALUE", "x:1": "want TYPE:VALUE", "u8:": `"" is not a valid u8: invalid syntax`} {
		if _, err := appendValues(nil, arg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", arg, err)
		}
	}
	var out bytes.Buffer
	a := &app{Program: command.Program{Env: command.Env{Stdout: &out}}}
	if err := a.printJSON([]number{"1", "NaN", "-Inf", "2.5"}); err != nil || strings.Join(strings.Fields(out.String()), "") != `[1,"NaN","-Inf",2.5]` {
		t.Errorf("%v %s", err, out.String())
	}
}

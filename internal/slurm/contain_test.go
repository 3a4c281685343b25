package slurm

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// The test binary is also init, and the process around it.
func TestMain(m *testing.M) {
	switch os.Getenv("RFAAS_TEST_AS") {
	case "":
		goleak.VerifyTestMain(m)
		return
	case "init":
		status, err := RunInit(os.Args[1:])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 125
		}
		os.Exit(status)
	case "hung": // a daemon that never answers
		l, err := net.Listen("unix", os.Args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("up")
		time.Sleep(time.Hour)
		l.Close()
	case "flood": // a daemon whose answer has no end
		l, err := net.Listen("unix", os.Args[1])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("up")
		c, err := l.Accept()
		for err == nil {
			_, err = c.Write(make([]byte, 1<<16))
		}
		l.Accept() // it ends only when it is killed
	case "container":
		os.Setenv("RFAAS_TEST_AS", "init")
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		after, _ := time.ParseDuration(os.Args[1])
		c := Contain{Init: []string{"/proc/self/exe"}, Program: os.Args[3], Args: os.Args[4:], KillAfter: after,
			NoSpace: os.Args[2] == "adopt", Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
		status, err := c.Run(ctx)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			status = 125
		}
		os.Exit(status)
	}
}

const bound = 20 * time.Second

// container starts a contained program in a process of its own. As is "root" or "nobody".
func container(t *testing.T, as, mode string, after time.Duration, program ...string) *exec.Cmd {
	t.Helper()
	self := "/proc/self/exe"
	if as == "nobody" { // who may not read where the test binary is
		dir, err := os.MkdirTemp("/var/tmp", "rfaas-test-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		self = filepath.Join(dir, "test")
		bin, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(self, bin, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(self, append([]string{after.String(), mode}, program...)...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "RFAAS_TEST_AS=container")
	cmd.Stderr = os.Stderr
	if as == "nobody" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	return cmd
}

// lives says whether a process that was named by a marker in its arguments is there.
func lives(marker string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		b, _ := os.ReadFile(path)
		if strings.Contains(string(b), marker) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && pid != os.Getpid() {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// eventually waits for a state that has no event.
var eventually = testkit.Eventually

// deserter is a shell that leaves behind a process in a session of its own whose parents are gone, waits until that is
// there, and does the rest. What it sets before is set for both.
func deserter(marker, before, rest string) []string {
	file := filepath.Join("/var/tmp", marker)
	return []string{"/bin/sh", "-c", fmt.Sprintf("%s; (setsid sh -c 'echo >%s; sleep 60; : %s' >/dev/null 2>&1 &) ; "+
		"until test -e %[2]s; do sleep 0.01; done; rm %[2]s; %[4]s", before, file, marker, rest)}
}

// start starts a program and returns when it has said that it is up.
func start(t *testing.T, cmd *exec.Cmd) io.Reader {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 3)
	if _, err := out.Read(buf); err != nil || string(buf) != "up\n" {
		t.Fatalf("%q, %v", buf, err)
	}
	return out
}

var markers int

func marker() string {
	markers++
	return fmt.Sprintf("rfaas-contain-%d-%d-%d", os.Getpid(), markers, time.Now().UnixNano())
}

// everyMode runs a test as root and as nobody, with and without a namespace.
func everyMode(t *testing.T, run func(t *testing.T, as, mode string)) {
	for _, as := range []string{"root", "nobody"} {
		for _, mode := range []string{"space", "adopt"} {
			t.Run(as+" "+mode, func(t *testing.T) {
				if as == "nobody" {
					testkit.Root(t, "can become nobody")
				}
				run(t, as, mode)
			})
		}
	}
}

func TestContainLeavesNothing(t *testing.T) {
	everyMode(t, func(t *testing.T, as, mode string) {
		m := marker()
		cmd := container(t, as, mode, bound, deserter(m, ":", "exit 7")...)
		err := cmd.Run()
		if cmd.ProcessState.ExitCode() != 7 {
			t.Errorf("exit status %v", err)
		}
		if left := lives(m); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
}

// SIGTERM reaches the program, which may finish; what it leaves is ended.
func TestContainPassesTermOn(t *testing.T) {
	everyMode(t, func(t *testing.T, as, mode string) {
		m := marker()
		cmd := container(t, as, mode, bound, deserter(m, ":", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done")...)
		out := start(t, cmd)
		cmd.Process.Signal(syscall.SIGTERM)
		rest := make([]byte, 4)
		n, _ := out.Read(rest)
		if err := cmd.Wait(); err != nil || string(rest[:n]) != "bye\n" {
			t.Errorf("%v, said %q", err, rest[:n])
		}
		if left := lives(m); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
}

// A program that does not heed SIGTERM is killed after the bound, and all that it started.
func TestContainKills(t *testing.T) {
	everyMode(t, func(t *testing.T, as, mode string) {
		m := marker()
		cmd := container(t, as, mode, 200*time.Millisecond, deserter(m, "trap '' TERM", "echo up; while :; do sleep 0.05; done")...)
		start(t, cmd)
		begin := time.Now()
		cmd.Process.Signal(syscall.SIGTERM)
		hangs := time.AfterFunc(bound, func() { cmd.Process.Kill() })
		cmd.Wait()
		hangs.Stop()
		if d := time.Since(begin); cmd.ProcessState.ExitCode() != 137 || d < 200*time.Millisecond {
			t.Errorf("exit status %d after %v", cmd.ProcessState.ExitCode(), d)
		}
		if mode == "space" {
			if left := lives(m); len(left) > 0 {
				t.Errorf("processes %v are left", left)
			}
		}
		for _, pid := range lives(m) { // what only a namespace can hold
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
}

// When the process around the container is killed, everything in it is gone in a moment.
func TestContainDiesWithItsParent(t *testing.T) {
	for _, as := range []string{"root", "nobody"} {
		t.Run(as, func(t *testing.T) {
			if as == "nobody" {
				testkit.Root(t, "can become nobody")
			}
			m := marker()
			cmd := container(t, as, "space", bound, deserter(m, ":", "echo up; while :; do sleep 0.05; done")...)
			start(t, cmd)
			cmd.Process.Kill()
			cmd.Wait()
			eventually(t, "nothing is left", func() bool { return len(lives(m)) == 0 })
		})
	}
}

// SIGTERM in the first moment, before anything listens, is not lost.
func TestContainTermAtOnce(t *testing.T) {
	for _, mode := range []bool{false, true} {
		for range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			t.Setenv("RFAAS_TEST_AS", "init")
			c := Contain{Init: []string{"/proc/self/exe"}, Program: "/bin/sleep", Args: []string{"60"}, KillAfter: bound, NoSpace: mode,
				Log: slog.New(slog.DiscardHandler)}
			begin := time.Now()
			if status, err := c.Run(ctx); status != 0 || err != nil || time.Since(begin) > bound/2 {
				t.Errorf("no namespace %v: status %d, %v after %v", mode, status, err, time.Since(begin))
			}
		}
	}
}

func TestContainWhatCannotStart(t *testing.T) {
	everyMode(t, func(t *testing.T, as, mode string) {
		cmd := container(t, as, mode, bound, "/nonexistent/program")
		cmd.Run()
		if cmd.ProcessState.ExitCode() != 125 {
			t.Errorf("exit status %d", cmd.ProcessState.ExitCode())
		}
	})
	c := Contain{Init: []string{"/nonexistent/init"}, Program: "/bin/true", KillAfter: time.Second, Log: slog.New(slog.DiscardHandler)}
	if _, err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "/nonexistent/init") {
		t.Errorf("an init that is not there: %v", err)
	}
	for _, args := range [][]string{nil, {"--"}, {"x"}, {initFlag}, {initFlag, "--"}} {
		if _, err := RunInit(args); err == nil {
			t.Errorf("init %q", args)
		}
	}
}

// A program that is killed with all its processes leaves no control groups behind.
func TestContainRemovesControlGroups(t *testing.T) {
	text, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	var group string
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if dir := filepath.Join("/sys/fs/cgroup", f[1], f[2]); len(f) == 3 && (f[1] == "pids" || f[1] == "") {
			if os.Mkdir(filepath.Join(dir, "test"), 0o755) == nil {
				must(t, os.Remove(filepath.Join(dir, "test")))
				group = dir
				break
			}
		}
	}
	if group == "" {
		testkit.Lacks(t, "this process may make no control groups")
	}
	cmd := container(t, "root", "space", time.Second, "/bin/sh", "-c",
		`mkdir "$0/rfaas-$(readlink /proc/self/ns/pid | tr -dc 0-9).$$-1" && ls -d "$0"/rfaas-*.$$-1 && kill -KILL $$`, group)
	out, err := cmd.Output()
	made := strings.TrimSpace(string(out))
	if made == "" {
		t.Fatalf("no group was made: %v", err)
	}
	for made := range strings.Lines(made) {
		if _, err := os.Stat(strings.TrimSpace(made)); !os.IsNotExist(err) {
			t.Errorf("%s is left behind: %v", made, err)
		}
	}
}

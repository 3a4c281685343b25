package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/client"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// Executors as the manager's memory has them, also while it is stopped, and a node that is drained by name.
func TestExecutorsFromMemory(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	secret, manager := in("secret"), "unix:"+in("m")
	m := startDaemon(t, "bin/resource-manager", "--listen", manager, "--secret-file", secret, "--heartbeat", "50ms", "--executors", "64")
	env := func(k string) string {
		return map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_MANAGER": manager}[k]
	}
	run := func(args ...string) (int, string, string) {
		var out, errs bytes.Buffer
		code := Run(t.Context(), Env{Version: "v1", Getenv: env, Stdout: &out, Stderr: &errs}, args)
		return code, out.String(), errs.String()
	}
	if code, out, errs := run("executors"); code != 0 || out != "no executors\n" || errs != "" {
		t.Errorf("code %d, %q %q", code, out, errs)
	}
	var executors []*process
	for i := range 2 {
		executors = append(executors, startDaemon(t, "bin/executor", "--listen", "unix:"+in(fmt.Sprint("x", i)), "--secret-file", secret,
			"--manager", manager, "--cores", "2", "--providers", "shm", "--grace", "2s"))
	}
	// watch runs until stop; its lines come as they are printed.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	r, w := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		ended <- Run(ctx, Env{Version: "v1", Getenv: env, Stdout: w, Stderr: io.Discard}, []string{"executors", "--watch", "--json", "--every", "5ms"})
		w.Close()
	}()
	lines := bufio.NewScanner(r)
	// until reads changes until one is as wanted: "state free" of each executor. The test's own time limit bounds it.
	until := func(want string) (rows []executorRow) {
		t.Helper()
		for lines.Scan() {
			if err := json.Unmarshal(lines.Bytes(), &rows); err != nil {
				t.Fatalf("%v: %s", err, lines.Text())
			}
			var got []string
			for _, r := range rows {
				got = append(got, fmt.Sprint(r.State, " ", r.FreeCores))
			}
			if strings.Join(got, ", ") == want {
				return rows
			}
		}
		t.Fatalf("the watch ended before %q", want)
		return nil
	}
	rows := until("idle 2, idle 2")
	host, _ := os.Hostname()
	for _, r := range rows {
		if r.By != "memory" || r.Node != host || r.Cores != 2 || len(r.Incarnation) != 32 || fmt.Sprint(r.Providers) != "[shm]" || r.MemoryBytes == 0 {
			t.Errorf("%+v", r)
		}
	}
	if code, out, errs := run("executors"); code != 0 || strings.Count(out, host+"  ") != 2 || errs != "" {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}

	m.cmd.Process.Signal(syscall.SIGSTOP)
	s, err := client.Connect(t.Context(), client.Options{Executor: "unix:" + in("x0"), SecretFile: secret, Provider: "shm"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, err := s.Lease(t.Context(), client.LeaseOptions{Library: built(t, "build/functions/echo.so")})
	if err != nil {
		t.Fatal(err)
	}
	rows = until("busy 1, idle 2")
	if rows[0].Leases != 1 {
		t.Errorf("%+v", rows[0])
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	until("idle 2, idle 2")
	m.cmd.Process.Signal(syscall.SIGCONT)

	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"drain", "nowhere"}, 1, `"nowhere" among the 2`},
		{[]string{"drain", host, "--executor", "a:1"}, 2, "want one"},
		{[]string{"executors", "--watch", "--every", "0s"}, 2, "--every 0s"},
		{[]string{"drain", "unix:" + in("x1")}, 0, "unix:" + in("x1") + " is draining"},
	} {
		if code, out, errs := run(c.args...); code != c.code || !strings.Contains(out+errs, c.text) {
			t.Errorf("%q: code %d, %s%s", c.args, code, out, errs)
		}
	}
	until("idle 2") // one has left
	if code, out, errs := run("drain", host, "--reason", "maintenance"); code != 0 || out != "unix:"+in("x0")+" is draining\n" || errs != "" {
		t.Errorf("code %d, %q %q", code, out, errs)
	}
	until("")
	for _, x := range executors {
		select {
		case <-x.done:
			if code := x.cmd.ProcessState.ExitCode(); code != 0 {
				t.Errorf("exit status %d", code)
			}
		case <-time.After(20 * time.Second):
			t.Error("a drained executor does not end")
		}
	}
	stop()
	go io.Copy(io.Discard, r)
	if code := <-ended; code != 0 {
		t.Errorf("watch: exit status %d", code)
	}
}

// On tcp the list is read from the manager's memory too. If no connection can be made, the manager is asked, and the command prints the reason.
func TestExecutorsOverTCP(t *testing.T) {
	for _, k := range []struct{ advertise, by, doctor, said string }{
		{"127.0.0.1", "memory", "reached by tcp", ""},
		{"127.0.0.2", "message", "executors and clients of this node use messages", "cannot be reached, so it is asked by message: connect: "}, // nothing listens there
	} {
		t.Run(k.by, func(t *testing.T) {
			dir := t.TempDir()
			secret, manager := filepath.Join(dir, "secret"), "unix:"+filepath.Join(dir, "m")
			startDaemon(t, "bin/resource-manager", "--listen", manager, "--secret-file", secret, "--heartbeat", "50ms", "--executors", "64", "--providers", "tcp",
				"--data-advertise", k.advertise)
			startDaemon(t, "bin/executor", "--listen", "unix:"+filepath.Join(dir, "x"), "--secret-file", secret, "--manager", manager, "--cores", "2",
				"--providers", "shm", "--grace", "2s")
			env := func(key string) string {
				return map[string]string{"RFAAS_SECRET_FILE": secret, "RFAAS_MANAGER": manager}[key]
			}
			run := func(args ...string) (string, string) {
				var out, errs bytes.Buffer
				Run(t.Context(), Env{Version: "v1", Getenv: env, Stdout: &out, Stderr: &errs}, args)
				return out.String(), errs.String()
			}
			var rows []executorRow
			testkit.Eventually(t, "the executor is listed", func() bool {
				out, errs := run("executors", "--json")
				if k.said == "" && errs != "" || !strings.Contains(errs, k.said) {
					t.Fatalf("it says %q, want %q", errs, k.said)
				}
				return json.Unmarshal([]byte(out), &rows) == nil && len(rows) == 1
			})
			if rows[0].By != k.by || rows[0].FreeCores != 2 {
				t.Errorf("%+v", rows[0])
			}
			if out, _ := run("doctor"); !strings.Contains(out, k.doctor) {
				t.Errorf("the doctor does not say %q:\n%s", k.doctor, out)
			}
		})
	}
}

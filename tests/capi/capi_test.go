package capi

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/agenttest"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

var objects = leakcheck.Objects(dataplane.Live)

// compiled returns the directory of the programs that tests compile: RFAAS_TEST_PROGRAMS or a new one.
var compiled = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("RFAAS_TEST_PROGRAMS"); dir != "" {
		return dir, nil
	}
	return os.MkdirTemp("", "rfaas-capi-test")
})

func TestMain(m *testing.M) {
	stop, err := agenttest.Serve(root)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := leakcheck.Run(m, nil, objects)
	stop()
	if dir, err := compiled(); err == nil && dir != os.Getenv("RFAAS_TEST_PROGRAMS") {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

const root = "../.."

var built = testkit.Built

// startExecutor starts an executor that lends two cores and returns its address.
func startExecutor(t *testing.T, secret string, args ...string) string {
	t.Helper()
	address, _, _ := startProcess(t, secret, args...)
	return address
}

// startProcess is startExecutor that also returns the process and what is closed when it has ended.
func startProcess(t *testing.T, secret string, args ...string) (string, *exec.Cmd, <-chan struct{}) {
	t.Helper()
	providers := "shm"
	if os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
		providers = "verbs"
	}
	return startDaemon(t, "bin/executor", append([]string{"--secret-file", secret, "--cores", "2", "--providers", providers, "--grace", "2s"},
		args...)...)
}

// startDaemon starts a daemon on a free port. It returns its address, its process, and a channel that is closed when it has ended. An
// executor with --manager has registered then, so that clients of the manager find it.
func startDaemon(t *testing.T, program string, args ...string) (string, *exec.Cmd, <-chan struct{}) {
	t.Helper()
	if *compileFlag {
		t.Skip("-compile: what it runs is there")
	}
	leakcheck.Once(t, objects)
	cmd := exec.Command(built(t, program), append([]string{"--listen", "127.0.0.1:0"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awaited := "msg=ready "
	if slices.Contains(args, "--manager") {
		awaited = "msg=registered "
	}
	ready, done := make(chan string, 1), make(chan struct{})
	var once sync.Once
	tell := func(address string) { once.Do(func() { ready <- address }) } // an executor that registers again says so again
	var log strings.Builder
	go func() {
		defer close(done)
		addr := ""
		for s := bufio.NewScanner(stderr); s.Scan(); {
			log.WriteString(s.Text() + "\n")
			if _, rest, ok := strings.Cut(s.Text(), "msg=ready address="); ok {
				addr, _, _ = strings.Cut(rest, " ")
			}
			if strings.Contains(s.Text(), awaited) {
				tell(addr)
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-done:
		case <-time.After(40 * time.Second): // more than any grace of these tests
			cmd.Process.Signal(syscall.SIGKILL)
			t.Errorf("%s did not end within 40 s of SIGTERM", program)
			<-done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", program, log.String())
		}
	})
	select {
	case addr := <-ready:
		return addr, cmd, done
	case <-done:
		t.Fatalf("%s ended at once:\n%s", program, log.String())
	case <-time.After(20 * time.Second):
		t.Fatalf("%s was not ready within 20 s", program)
	}
	return "", nil, nil
}

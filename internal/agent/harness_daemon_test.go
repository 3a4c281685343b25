package agent

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// daemon is an executor or a resource manager.
type daemon struct {
	address string
	process *os.Process
	done    chan struct{}
	log     *testkit.Buffer
}

// start starts a daemon on a free port.
func start(t testing.TB, program, secret string, args ...string) *daemon {
	t.Helper()
	cmd := exec.Command(built(t, program), append([]string{"--listen", "127.0.0.1:0", "--secret-file", secret}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := &daemon{process: cmd.Process, done: make(chan struct{}), log: &testkit.Buffer{}}
	ready := make(chan string, 1)
	go func() {
		defer close(d.done)
		for s := bufio.NewScanner(stderr); s.Scan(); {
			fmt.Fprintln(d.log, s.Text())
			if _, rest, ok := strings.Cut(s.Text(), "msg=ready address="); ok {
				address, _, _ := strings.Cut(rest, " ")
				ready <- address
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() {
		d.process.Signal(syscall.SIGTERM)
		select {
		case <-d.done:
		case <-time.After(40 * time.Second):
			d.process.Kill()
			t.Errorf("%s did not end within 40 s of SIGTERM", program)
			<-d.done
		}
		if t.Failed() {
			t.Logf("%s said:\n%s", program, d.log)
		}
	})
	select {
	case d.address = <-ready:
	case <-d.done:
		t.Fatalf("%s ended at once:\n%s", program, d.log)
	case <-time.After(20 * time.Second):
		t.Fatalf("%s was not ready within 20 s", program)
	}
	return d
}

// executor starts an executor that lends two cores.
func executor(t testing.TB, secret string, args ...string) *daemon {
	t.Helper()
	return start(t, "bin/executor", secret, append([]string{"--cores", "2", "--providers", "shm", "--grace", "2s"}, args...)...)
}

// free returns how many cores an executor has to lend.
func (d *daemon) free(t testing.TB, secret string) int {
	t.Helper()
	conn, err := control.Dial(d.address, control.DialConfig{SecretFile: secret})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	i, err := control.NewExecutorClient(conn).Info(ctx, &control.InfoRequest{ProtocolVersion: control.ProtocolVersion})
	if err != nil {
		t.Fatal(err)
	}
	return int(i.FreeCores)
}

package faults

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Where a process runs: here, or on the second of two virtual machines, where tests/remote serves.
type machine int

const (
	here machine = iota
	there
)

// other is where tests/remote serves on the other machine, empty where there is none.
var other = os.Getenv("FAULTS_REMOTE")

// address is the machine's own.
func (m machine) address() string {
	switch {
	case other == "":
		return "127.0.0.1"
	case m == here:
		return os.Getenv("SOFTROCE_ADDRESS")
	}
	return os.Getenv("SOFTROCE_PEER")
}

// command is how a program is run there with the world's environment and more.
func (m machine) command(w *world, env []string, program string, args []string) (string, []string) {
	if m == here {
		return program, args
	}
	line := []string{"run", other}
	for _, kv := range append(append([]string(nil), w.env...), env...) {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "RFAAS_") || strings.HasPrefix(name, "FAULTS_") {
			line = append(line, "-e", kv)
		}
	}
	return built(w, "build/twovm/remote"), append(append(line, "--", program), args...)
}

// shell runs a script on the machine and returns what it said.
func (m machine) shell(t testing.TB, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	args := []string{"sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; " + script}
	if m == there {
		args = append([]string{built(t, "build/twovm/remote"), "run", other, "--"}, args...)
	}
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// cut makes the network between the machines silent for some time; it returns when it is.
func cut(t testing.TB, d time.Duration) {
	t.Helper()
	// Each loses what it sends. In a session of its own, since the order to end it could not come.
	script := fmt.Sprintf("tc qdisc replace dev eth0 root netem loss 100%%; setsid sh -c 'sleep %.1f; tc qdisc del dev eth0 root' >/dev/null 2>&1 </dev/null &",
		d.Seconds())
	there.shell(t, "setsid sh -c 'sleep 0.2; "+strings.ReplaceAll(script, "'", `'\''`)+"' >/dev/null 2>&1 </dev/null &")
	time.Sleep(200 * time.Millisecond) // so that the answer still comes; then both at once
	here.shell(t, script)
}

// blink loses all that the other machine sends for a second, and returns for how long it was when it is over. The link
// itself stays up: soft-RoCE ends its queue pairs when its own device goes down, which a cable elsewhere does not do.
func blink(t testing.TB) time.Duration {
	t.Helper()
	there.shell(t, `rm -f /tmp/blink; setsid sh -c 'sleep 0.3; began=$(date +%s%N)
		{ echo qdisc replace dev eth0 root netem loss 100%; sleep 1; echo qdisc del dev eth0 root; } | tc -batch -
		echo $(($(date +%s%N) - began)) >/tmp/blink' >/dev/null 2>&1 </dev/null &`)
	ns, err := strconv.ParseInt(strings.TrimSpace(there.shell(t, "until [ -s /tmp/blink ]; do sleep 0.1; done; cat /tmp/blink")), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ns)
}

// crash ends the other machine as a power cut does: nothing is sent, nothing is closed.
func crash(t testing.TB) {
	t.Helper()
	there.shell(t, "setsid sh -c 'sleep 0.2; echo b >/proc/sysrq-trigger' >/dev/null 2>&1 </dev/null &")
	time.Sleep(200 * time.Millisecond)
}

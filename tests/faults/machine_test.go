package faults

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// machine is where a process runs: this machine, the second of two virtual machines (by tests/remote), or a network namespace.
type machine struct {
	remote    bool
	namespace string // file of the network namespace; empty: that of the test
	ip        string // in the namespace
}

var (
	here  = machine{}
	there = machine{remote: true}
)

// other is the address of tests/remote on the other machine; empty if there is none.
var other = os.Getenv("FAULTS_REMOTE")

// address is the machine's IP address.
func (m machine) address() string {
	switch {
	case m.namespace != "":
		return m.ip
	case other == "":
		return "127.0.0.1"
	case m == here:
		return os.Getenv("SOFTROCE_ADDRESS")
	}
	return os.Getenv("SOFTROCE_PEER")
}

// command returns the command that runs a program on the machine, with the world's environment and further variables.
func (m machine) command(w *world, env []string, program string, args []string) (string, []string) {
	if m.namespace != "" { // nsenter executes the program
		return "nsenter", append([]string{"--net=" + m.namespace, "--", program}, args...)
	}
	if m == here {
		return program, args
	}
	line := []string{"run", other}
	for _, kv := range append(append([]string(nil), w.env...), env...) {
		name, _, _ := strings.Cut(kv, "=")
		if name == "RFAAS_AGENT_SOCKET" {
			continue // an agent serves one machine only
		}
		if strings.HasPrefix(name, "RFAAS_") || strings.HasPrefix(name, "FAULTS_") {
			line = append(line, "-e", kv)
		}
	}
	return built(w, "build/twovm/remote"), append(append(line, "--", program), args...)
}

// shell runs a script on the machine and returns its output.
func (m machine) shell(t testing.TB, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second) // also while the test cleans up
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

// explain logs, if the test fails, what the RDMA devices and the network of both machines have counted. It tells a device that passes no packet
// any more from a fault of rfaas.
func explain(t testing.TB) {
	const script = `cd /sys/class/infiniband; for d in *; do grep -H . "$d"/ports/1/state "$d"/ports/1/hw_counters/*; done
		ip -s link; ip neigh; cat /proc/net/snmp /proc/softirqs; dmesg | tail -n 20`
	before := [2]string{here.shell(t, script), there.shell(t, script)}
	t.Cleanup(func() {
		if t.Failed() {
			for i, m := range []machine{here, there} {
				t.Logf("machine %d before the test:\n%s\nnow:\n%s", i+1, before[i], m.shell(t, script))
			}
		}
	})
}

// trouble is a way in which a network fails.
type trouble struct {
	name            string
	tool, bad, mend string // `tool -batch` does both
}

var (
	// loss: packets of the other machine are lost, and neither side is notified.
	loss = trouble{"packets lost", "tc", "qdisc replace dev eth0 root netem loss 100%", "qdisc del dev eth0 root"}
	// unplugged: the cable of the other machine's RDMA device is pulled. Its port is down, and no packet passes in either direction.
	// scripts/softroce/cable has set up the cable.
	unplugged = trouble{"link down", "ip", "link set plug0 down", "link set plug0 up"}
	// cutOff: the network behind the cable fails. No packet passes in either direction, and the device does not notice it.
	cutOff = trouble{"cut off", "ip", "link set eth0 down", "link set eth0 up"}
)

// begin starts the trouble after a moment. It ends by itself, in a separate session, because no order to end it could arrive. Its
// duration is in /tmp/trouble when it is over.
func (how trouble) begin(t testing.TB, d time.Duration) {
	t.Helper()
	there.shell(t, fmt.Sprintf(`rm -f /tmp/trouble; setsid sh -c 'sleep 0.3; began=$(date +%%s%%N)
		{ echo %s; sleep %.1f; echo %s; } | %s -batch -
		echo $(($(date +%%s%%N) - began)) >/tmp/trouble' >/dev/null 2>&1 </dev/null &`, how.bad, d.Seconds(), how.mend, how.tool))
}

// blink causes a second of trouble, waits for its end and returns its duration.
func (how trouble) blink(t testing.TB) time.Duration {
	t.Helper()
	how.begin(t, time.Second)
	ns, err := strconv.ParseInt(strings.TrimSpace(there.shell(t, "until [ -s /tmp/trouble ]; do sleep 0.1; done; cat /tmp/trouble")), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ns)
}

// crash ends the other machine like a power cut: nothing is sent, nothing is closed. It waits until the machine is silent, and returns when it
// was last asked for an answer that came. On a busy machine, seconds pass between the order and the end.
func crash(t testing.TB) (last time.Time) {
	t.Helper()
	there.shell(t, "setsid sh -c 'sleep 0.2; echo b >/proc/sysrq-trigger' >/dev/null 2>&1 </dev/null &")
	last = time.Now()
	for began := last; ; time.Sleep(50 * time.Millisecond) {
		asked := time.Now()
		c, err := net.DialTimeout("tcp", other, time.Second)
		if err != nil {
			return last
		}
		last = asked
		c.Close()
		if time.Since(began) > 30*time.Second {
			t.Fatal("the other machine has not ended")
		}
	}
}

package faults

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/client"
)

// Tests of daemons whose resources are all in use, or are taken by other processes.

// limitFiles sets how many descriptors a process may have, and returns how many it could have.
func limitFiles(t testing.TB, pid int, n uint64) uint64 {
	t.Helper()
	limits, err := readProc(pid, "limits")
	if err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	for line := range strings.Lines(string(limits)) {
		fmt.Sscanf(line, "Max open files %d %d", &old.Cur, &old.Max)
	}
	// The limit is set as the process's own user: an executor that root started no longer runs as root, and in a container root may
	// not change the limits of other users' processes.
	set := exec.Command("prlimit", "--pid", strconv.Itoa(pid), fmt.Sprintf("--nofile=%d:%d", n, old.Max))
	status, err := readProc(pid, "status")
	if err != nil {
		t.Fatal(err)
	}
	var uid, gid uint32
	for line := range strings.Lines(string(status)) {
		fmt.Sscanf(line, "Uid: %d", &uid)
		fmt.Sscanf(line, "Gid: %d", &gid)
	}
	if uid != uint32(unix.Geteuid()) {
		set.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid}}
	}
	if out, err := set.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", set.Args, err, out)
	}
	return old.Cur
}

// processorTime is the processor time of a process so far, counted in the kernel's ticks.
func processorTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	b, err := readProc(pid, "stat")
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var ticks int64
	for _, f := range fields[11:13] { // user, system
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// Daemons without a free descriptor do not spin, and disturb or end no call. New clients get a named error. Everything works again
// when there are descriptors.
func TestWithoutDescriptors(t *testing.T) {
	single(t, "go", func(p *pair) {
		daemons := []*daemon{p.executor, p.manager}
		var old, used [2]time.Duration
		var limits [2]uint64
		for i, d := range daemons {
			limits[i] = limitFiles(p, d.pid(), uint64(openFiles(d.pid())))
			old[i] = processorTime(p, d.pid())
		}
		hit := time.Now()
		second := p.newSteady(2)
		p.undisturbed(p.caller, 2*time.Second)
		e := p.fails(second, hit, bound(callerBound+5*time.Second), client.StatusPeerGone, statusConnection, client.StatusDeadline, statusBusy)
		p.Logf("who comes: %s", e.text)
		took := time.Since(hit)
		for i, d := range daemons {
			used[i] = processorTime(p, d.pid()) - old[i]
			if used[i] > took/2 {
				p.Errorf("%s has used %v of processor time in %v", d.name, used[i], took.Round(time.Millisecond))
			}
			limitFiles(p, d.pid(), limits[i])
		}
		p.Logf("processor time of executor and manager: %v in %v", used, took.Round(time.Millisecond))
		p.served(second, bound(20*time.Second))
		p.undisturbed(p.caller, 200*time.Millisecond)
		p.caller.finish(10 * time.Second)
		second.finish(10 * time.Second)
	})
}

// Clients that keep connecting to the control ports without authenticating do not prevent other clients from getting leases.
func TestUnauthenticatedConnectionsAtThePorts(t *testing.T) {
	t.Parallel()
	const limit = 256 // descriptors, of which a quarter is for unauthenticated connections
	w := newWorld(t)
	w.files = limit
	p := newPairIn(w, "c", here, here, here)
	files := openFiles(p.executor.pid())
	var unauthenticated []net.Conn
	defer func() {
		for _, c := range unauthenticated {
			c.Close()
		}
	}()
	for _, d := range []*daemon{p.executor, p.manager} {
		for i := range 2 * limit {
			c, err := net.DialTimeout("tcp", d.address, 5*time.Second)
			if err != nil {
				p.Fatal(err)
			}
			unauthenticated = append(unauthenticated, c)
			if i%2 == 0 { // completes the HTTP/2 set-up, but makes no call
				_, _ = io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
			}
		}
	}
	most := files + limit/4 + 40
	p.eventually(bound(10*time.Second), "only some unauthenticated connections are left", func() bool {
		p.lastly = fmt.Sprintf("%d open files, %d before", openFiles(p.executor.pid()), files)
		return openFiles(p.executor.pid()) <= most
	})
	second := p.newSteady(2)
	p.served(second, bound(20*time.Second))
	p.undisturbed(p.caller, 200*time.Millisecond)
	p.caller.finish(10 * time.Second)
	second.finish(10 * time.Second)
}

package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/leakcheck"
)

// leaveSocket is a process that connects and ends while a child of it has the connection. It prints the child's number.
func leaveSocket() int {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: os.Getenv("RFAAS_TEST_SOCKET"), Net: "unix"})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	f, err := conn.File()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if _, err := conn.Write(message(protocol.OpStatus, 1, nil)); err != nil {
		fmt.Println(err)
		return 1
	}
	if _, _, err := readMessage(conn); err != nil { // the agent knows of this process
		fmt.Println(err)
		return 1
	}
	child, err := os.StartProcess("/bin/sleep", []string{"sleep", "60"}, &os.ProcAttr{Files: []*os.File{nil, nil, nil, f}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(child.Pid)
	return 0
}

// The agent notices the end of a process even if a child has inherited its connection.
func TestInheritedSocket(t *testing.T) {
	w := newWorld(t, 0)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envRole+"=leave-socket", "RFAAS_TEST_SOCKET="+w.socket)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(child, syscall.SIGKILL)
	if err := syscall.Kill(child, 0); err != nil {
		t.Fatalf("the child that has the connection has ended: %v", err)
	}
	eventually(t, "the agent notices that the process has ended", func() bool { return w.agent.count() == 0 })
}

// program starts the agent as a client does.
func program(t *testing.T, socket string, args ...string) *exec.Cmd {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(built(t, "libexec/rfaas-agent"), args...)
	cmd.ExtraFiles = []*os.File{f}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(socket + ".log")
			t.Logf("the agent said:\n%s", b)
		}
	})
	return cmd
}

// Another agent takes over the leases of one that has ended, before their executor gives up on them.
func TestAdoption(t *testing.T) {
	for _, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		t.Run(how.String(), func(t *testing.T) { testAdoption(t, how) })
	}
}

func testAdoption(t *testing.T, how syscall.Signal) {
	leakcheck.Check(t, objects)
	dir := t.TempDir()
	socket, secret := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "secret")
	x := executor(t, secret, "--share-cores", "2", "--agent-grace", "2s") // four leases of a core
	env := []string{"RFAAS_SECRET_FILE=" + secret, "USER=tester", "RFAAS_EXECUTOR=" + x.address}
	first := program(t, socket)
	p := connect(t, socket, env...)
	if err := p.open(1, protocol.Session{}); err != nil {
		t.Fatal(err)
	}
	renewed, err := p.acquire(protocol.Acquire{Key: 1, Spec: spec(1)})
	if err != nil {
		t.Fatal(err)
	}
	short := spec(1)
	short.DurationNs = int64(time.Minute)
	bound, err := p.acquire(protocol.Acquire{Key: 2, Spec: short})
	if err != nil {
		t.Fatal(err)
	}
	p.mustAcquire(3, 1) // is not adopted
	first.Process.Signal(how)
	first.Wait()
	<-p.ended
	if err := os.Remove(socket); (err == nil) != (how == syscall.SIGKILL) {
		t.Errorf("after %v: the socket is removed: %v", how, err)
	}
	program(t, socket)
	q := connect(t, socket, env...)
	nobody := protocol.Session{Manager: "127.0.0.1:1"} // a manager that has ended meanwhile
	if err := q.open(1, nobody); err == nil {
		t.Fatal("a new session with a manager that does not answer")
	}
	nobody.Flags = protocol.Reopen
	if err := q.open(1, nobody); err != nil {
		t.Fatal(err)
	}
	for _, l := range []*leased{renewed, bound} {
		a := l.adoption()
		if until, err := protocol.DecodeUntil(protocol.OpAdopt, q.must(protocol.OpAdopt, a.Encode, library(t))); err != nil || until <= dataplane.Now() {
			t.Errorf("adopted until %d, %v", until, err)
		}
		l.p = q
		a.Key, a.LeaseID = 99, 12345
		if _, err := q.ask(protocol.OpAdopt, a.Encode, library(t)); !isStatus(err, dataplane.StatusLeaseEnded) {
			t.Errorf("a lease that the executor does not know: %v", err)
		}
	}
	// The executor has waited as long for the clients of the other two.
	eventually(t, "the executor ends the lease that is not adopted", func() bool {
		for _, l := range []*leased{renewed, bound} {
			if err := l.call(0); err != nil {
				t.Fatal(err)
			}
		}
		return x.free(t, secret) == 2
	})
	n := protocol.WorkerName{Key: 1}
	if i, err := protocol.DecodeInspection(q.must(protocol.OpInspect, n.Encode, nil)); err != nil || i.PID != int(renewed.Workers[0].PID) {
		t.Errorf("inspection %+v, %v", i, err)
	}
	if err := syscall.Kill(int(bound.Workers[0].PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := q.event(); e.Kind != api.EventWorkerDied || e.Key != 2 || e.PID != bound.Workers[0].PID {
		t.Errorf("event %+v", e)
	}
	renewed.release(true)
	bound.release(false)
	eventually(t, "all cores are free", func() bool { return x.free(t, secret) == 4 })
}

// The agent ends after a while without a client. A client that connects at that moment is served by this agent or the next one.
func TestLingerAndRestart(t *testing.T) {
	w := newWorld(t, time.Millisecond)
	served := 0
	for range 200 {
		conn, err := net.Dial("unix", w.socket)
		if err == nil {
			_, err = conn.Write(message(protocol.OpStatus, 1, nil))
			if err == nil {
				_, _, err = readMessage(conn)
			}
			conn.Close()
		}
		if err == nil {
			served++
			time.Sleep(time.Millisecond)
			continue
		}
		// As the library does: under the lock, look again, then start another one.
		lock, err := takeLock(w.socket, 0)
		if err != nil {
			t.Fatal(err)
		}
		conn, err = net.Dial("unix", w.socket)
		if err == nil {
			conn.Close()
			lock.Close()
			continue
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		lock.Close()
		<-w.ended
		w.serve(time.Millisecond)
	}
	if served == 0 {
		t.Error("nobody was served")
	}
	t.Logf("%d of 200 served", served)
	eventually(t, "the agent has left", func() bool {
		select {
		case <-w.ended:
			return true
		default:
			return false
		}
	})
	if left, _ := filepath.Glob(w.socket + "*"); len(left) != 1 || left[0] != w.socket+".lock" {
		t.Errorf("%v are left, want the lock only", left)
	}
}

// An agent whose directory is removed can get no more clients, and ends.
func TestDirectoryRemoved(t *testing.T) {
	w := newWorld(t, 50*time.Millisecond)
	if err := os.RemoveAll(filepath.Dir(w.socket)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.ended:
	case <-time.After(20 * time.Second):
		t.Error("the agent still runs")
	}
}

// An agent that has clients stays.
func TestClientKeepsAgent(t *testing.T) {
	w := newWorld(t, 10*time.Millisecond)
	conn, err := net.Dial("unix", w.socket)
	for err != nil { // the agent has ended before
		<-w.ended
		w.serve(10 * time.Millisecond)
		conn, err = net.Dial("unix", w.socket)
	}
	time.Sleep(50 * time.Millisecond)
	if _, err := conn.Write(message(protocol.OpStatus, 1, nil)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := readMessage(conn); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	<-w.ended
}

func TestStatusAndStop(t *testing.T) {
	w := newWorld(t, 0)
	p := w.connect()
	s, err := Ask(t.Context(), w.socket)
	if err != nil || s.Version != "test" || s.PID != os.Getpid() || len(s.Clients) != 1 || s.Clients[0].PID != os.Getpid() {
		b, _ := json.Marshal(s)
		t.Errorf("status %s, %v", b, err)
	}
	if err := Stop(t.Context(), w.socket); err != nil {
		t.Fatal(err)
	}
	<-w.ended
	<-p.ended
	if _, err := os.Lstat(w.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if _, err := Ask(t.Context(), w.socket); !errors.Is(err, ErrNone) {
		t.Errorf("without an agent: %v", err)
	}
}

// An agent does not listen on a socket that is taken, or in a directory that other users can change.
func TestSocketThatIsTaken(t *testing.T) {
	w := newWorld(t, 0)
	if s, err := Listen(w.socket); err == nil {
		s.Close()
		t.Error("a second agent listens")
	}
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(filepath.Join(link, "s")); !errors.Is(err, ErrDirectory) {
		t.Errorf("a symbolic link: %v", err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(filepath.Join(dir, "s")); !errors.Is(err, ErrDirectory) {
		t.Errorf("a directory that others can write to: %v", err)
	}
}

func TestPath(t *testing.T) {
	dir, namespace := t.TempDir(), strconv.FormatUint(networkNamespace(), 10)
	if err := os.Mkdir(filepath.Join(dir, "rfaas"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{EnvSocket: "/x/y", "XDG_RUNTIME_DIR": dir}, "/x/y"},
		{map[string]string{"XDG_RUNTIME_DIR": dir}, dir + "/rfaas/agent-" + namespace + ".sock"},
		{map[string]string{"XDG_RUNTIME_DIR": dir, "SLURM_JOB_ID": "12"}, dir + "/rfaas/agent-" + namespace + "-12.sock"},
		{map[string]string{"XDG_RUNTIME_DIR": dir, "PBS_JOBID": "../12[3].host"}, dir + "/rfaas/agent-" + namespace + "-___12_3__host.sock"},
	} {
		if got, err := Path(func(name string) string { return k.env[name] }); err != nil || got != k.want {
			t.Errorf("%v: %s, %v, want %s", k.env, got, err, k.want)
		}
	}
	// The library would make the first directory, and cannot use the second, whose path is too long for a socket.
	if err := os.Remove(filepath.Join(dir, "rfaas")); err != nil {
		t.Fatal(err)
	}
	if got, err := Path(func(name string) string { return map[string]string{"XDG_RUNTIME_DIR": dir}[name] }); !errors.Is(err, fs.ErrNotExist) ||
		!strings.HasPrefix(got, dir) {
		t.Errorf("a directory that the library would make: %s, %v", got, err)
	}
	long := "/" + strings.Repeat("x", maxPath)
	if got, _ := Path(func(name string) string { return map[string]string{"XDG_RUNTIME_DIR": long}[name] }); !strings.HasPrefix(got, "/tmp/rfaas-") {
		t.Errorf("a directory with a long path: %s", got)
	}
}

func TestSettings(t *testing.T) {
	none := func(string) string { return "" }
	for _, k := range []struct {
		args   []string
		linger time.Duration
		log    string
		wrong  string
	}{
		{nil, 10 * time.Second, "", ""},
		{[]string{"--listening", "3"}, 10 * time.Second, "", ""},
		{[]string{"--socket", "/x"}, 0, "-", ""},
		{[]string{"--socket", "/x", "--linger", "5s"}, 5 * time.Second, "-", ""},
		{[]string{"--linger", "-1s"}, 0, "", "-1s"},
		{[]string{"--log-level", "loud"}, 0, "", "loud"},
		{[]string{"word"}, 0, "", "word"},
	} {
		s, err := Parse(k.args, none, "v", &bytes.Buffer{})
		switch {
		case k.wrong != "":
			if err == nil || !strings.Contains(err.Error(), k.wrong) {
				t.Errorf("%v: %v", k.args, err)
			}
		case err != nil || s.Linger != k.linger || s.LogFile != k.log:
			t.Errorf("%v: %+v, %v", k.args, s, err)
		}
	}
	s, err := Parse(nil, func(name string) string { return map[string]string{envLinger: "3s"}[name] }, "v", &bytes.Buffer{})
	if err != nil || s.Linger != 3*time.Second {
		t.Errorf("%+v, %v", s, err)
	}
}

// A log file does not grow without end.
func TestLogFileIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := openLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { l.f.Close() }()
	line := bytes.Repeat([]byte("x"), 1000)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 1000 {
				if _, err := l.Write(line); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, p := range []string{path, path + ".old"} {
		if st, err := os.Stat(p); err != nil || st.Size() > logMost {
			t.Errorf("%s: %v, %v", p, st, err)
		}
	}
}

// A library closes its connection if the agent takes no message for a while. Its leases go on, and it hands them over by the next connection.
func TestClientLeavesItsConnection(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	l := p.mustAcquire(1, 1)
	p.page.connection().Store(0)
	p.conn.Close()
	<-p.ended
	eventually(t, "the agent has forgotten the connection", func() bool {
		s, err := Ask(t.Context(), w.socket)
		return err == nil && len(s.Clients) == 0
	})
	if err := l.call(0); err != nil {
		t.Fatalf("a call after the connection's end: %v", err)
	}
	q := opened(t, w, x)
	q.must(protocol.OpAdopt, l.adoption().Encode, library(t))
	l.p = q
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	q.conn.Close() // without leaving: the lease ends
	eventually(t, "all cores are free", func() bool { return x.free(t, w.secret) == 2 })
}

// adoption is the message by which a library hands a lease over.
func (l *leased) adoption() *protocol.Adopt {
	a := &protocol.Adopt{Key: l.key, Session: 1, LeaseID: l.LeaseID, UntilNs: l.UntilNs, Library: l.Library, At: l.Executor, Node: l.Node,
		Provider: l.Provider, Spec: l.spec}
	for _, w := range l.Workers {
		a.PIDs = append(a.PIDs, w.PID)
		a.Present++
	}
	return a
}

package spawner

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// program returns the path of a file that `make build` makes.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs("../../libexec/" + name)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("no %s (run make build): %v", name, err)
	}
	return path
}

// peer plays the executor's part.
type peer struct {
	t      *testing.T
	conn   *net.UnixConn
	cmd    *exec.Cmd
	log    bytes.Buffer
	zygote uint32 // its process id
}

// start starts a spawner and reads its greeting.
func start(t *testing.T, cfg Config) *peer {
	t.Helper()
	cfg.Worker = program(t, "rfaas-worker")
	if cfg.UIDs.N == 0 {
		cfg.UIDs = sandbox.Range{First: 500000, N: 64}
	}
	ours, theirs, err := wire.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	socket := os.NewFile(uintptr(theirs), "socket")
	p := &peer{t: t, conn: ours}
	p.cmd = exec.Command(program(t, "rfaas-spawner"), cfg.Arguments()...)
	p.cmd.ExtraFiles = []*os.File{socket}
	p.cmd.Stderr = &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	socket.Close()
	t.Cleanup(func() {
		p.conn.Close()
		p.cmd.Wait()
	})
	m := p.receive()
	if m.Type != wire.Hello || m.U32(0) != wire.Version {
		t.Fatalf("greeting %+v", m)
	}
	p.zygote = m.U32(3)
	return p
}

func (p *peer) receive() *wire.Message {
	p.t.Helper()
	p.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	m, fds, err := wire.Receive(p.conn, make([]byte, wire.Max), 16)
	wire.CloseAll(fds)
	if err != nil {
		p.t.Fatalf("receive: %v; the spawner said %s", err, &p.log)
	}
	return &m
}

// expect reads messages until one of a type for a worker.
func (p *peer) expect(typ wire.Type, id uint32) *wire.Message {
	p.t.Helper()
	for {
		m := p.receive()
		if m.Type == typ && m.ID == id {
			return m
		}
		if m.Type == wire.SpawnFailed || m.Type == wire.NoZygote {
			p.t.Fatalf("message of type %d for worker %d: %v", m.Type, m.ID, m.Failure())
		}
	}
}

// prepare requests a pooled worker and returns the test's end of its socket.
func (p *peer) prepare(id uint32, change func(*wire.SpawnRequest)) *net.UnixConn {
	p.t.Helper()
	ours, sock, err := wire.SocketPair()
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { ours.Close() })
	null, err := unix.Open("/dev/null", unix.O_WRONLY, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	page, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(page, 4096)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	r := wire.SpawnRequest{Worker: make([]byte, wire.SpawnSize)}
	r.Worker[0] = 1 // shared memory
	copy(r.Worker[4:8], "\xff\xff\xff\xff")
	if change != nil {
		change(&r)
	}
	err = wire.Send(p.conn, &wire.Message{Type: wire.Prepare, ID: id, Body: r.Encode()}, sock, null, page)
	wire.CloseAll([]int{sock, null, page})
	if err != nil {
		p.t.Fatal(err)
	}
	return ours
}

// ends waits for the end of the spawner, and checks that it has closed its socket.
func (p *peer) ends() error {
	p.t.Helper()
	p.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	for {
		_, fds, err := wire.Receive(p.conn, make([]byte, wire.Max), 16)
		wire.CloseAll(fds)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return p.cmd.Wait()
		}
		if err != nil {
			p.t.Fatal(err)
		}
	}
}

func gone(pid int) bool { return unix.Kill(pid, 0) == unix.ESRCH }

// A worker is killed on request and reaped, and its end is reported once.
func TestWorkerEnds(t *testing.T) {
	p := start(t, Config{Mode: sandbox.On})
	p.prepare(7, nil)
	pid := int(p.expect(wire.Spawned, 7).U32(0))
	if gone(pid) {
		t.Fatalf("worker %d does not exist", pid)
	}
	if err := wire.Send(p.conn, &wire.Message{Type: wire.Kill, ID: 7}); err != nil {
		t.Fatal(err)
	}
	m := p.expect(wire.Exited, 7)
	exit, err := wire.DecodeExit(m.Body)
	if err != nil || exit.Signal != int32(unix.SIGKILL) {
		t.Errorf("exit %+v, %v", exit, err)
	}
	if !gone(pid) {
		t.Errorf("worker %d is still there", pid)
	}
	// Its number can be used again.
	p.prepare(7, nil)
	p.expect(wire.Spawned, 7)
}

// An executor learns that no zygote runs before it learns that a request has failed for that reason, so that it does
// not ask again at once.
func TestZygoteKilled(t *testing.T) {
	p := start(t, Config{Mode: sandbox.On})
	for id := range uint32(20) {
		p.prepare(id, nil)
		pid := int(p.zygote)
		p.expect(wire.Spawned, id)
		unix.Kill(pid, unix.SIGKILL)
		p.prepare(id+100, nil) // it meets the dead zygote, or none, or the next one
		ended, up := false, false
		for answered := false; !answered || !up; {
			switch m := p.receive(); {
			case m.Type == wire.ZygoteEnded:
				ended = true
			case m.Type == wire.Hello:
				up, p.zygote = true, m.U32(3)
			case m.Type == wire.NoZygote && m.ID == id+100:
				answered = true
				if !ended {
					t.Fatal("a request was in vain before the zygote had ended")
				}
			case m.Type == wire.Spawned && m.ID == id+100:
				answered = true
			case m.Type == wire.SpawnFailed:
				t.Fatal(m.Failure())
			}
		}
	}
}

// The spawner and all workers end with the executor.
func TestExecutorGone(t *testing.T) {
	p := start(t, Config{Mode: sandbox.On})
	var pids []int
	for id := range uint32(3) {
		p.prepare(id, nil)
		pids = append(pids, int(p.expect(wire.Spawned, id).U32(0)))
	}
	p.conn.Close()
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("the spawner ended with %v", err)
	}
	for _, pid := range pids {
		if !gone(pid) {
			t.Errorf("worker %d is still there", pid)
		}
	}
}

// A compromised executor may send anything. The spawner then ends itself and all workers.
func TestMalformedMessages(t *testing.T) {
	request := func(change func([]byte) []byte) []byte {
		r := wire.SpawnRequest{Worker: make([]byte, wire.SpawnSize)}
		return change(r.Encode())
	}
	for name, c := range map[string]struct {
		m   wire.Message
		fds int
	}{
		"unknown type":          {wire.Message{Type: 200}, 0},
		"type of a worker":      {wire.Message{Type: wire.Loaded}, 0},
		"type of the spawner":   {wire.Message{Type: wire.Exited}, 0},
		"short request":         {wire.Message{Type: wire.Spawn, Body: request(func(b []byte) []byte { return b[:len(b)-1] })}, 5},
		"long request":          {wire.Message{Type: wire.Spawn, Body: request(func(b []byte) []byte { return append(b, 0) })}, 5},
		"no descriptors":        {wire.Message{Type: wire.Spawn, Body: request(func(b []byte) []byte { return b })}, 0},
		"too few descriptors":   {wire.Message{Type: wire.Prepare, Body: request(func(b []byte) []byte { return b })}, 2},
		"too many descriptors":  {wire.Message{Type: wire.Prepare, Body: request(func(b []byte) []byte { return b })}, 5},
		"kill with descriptors": {wire.Message{Type: wire.Kill, ID: 1}, 1},
		"kill with a body":      {wire.Message{Type: wire.Kill, ID: 1, Body: []byte{1}}, 0},
		"open without a body":   {wire.Message{Type: wire.Open}, 0},
		"open outside":          {wire.Message{Type: wire.Open, Body: (&wire.OpenRequest{Name: "../shadow"}).Encode()}, 0},
		"open of the parent":    {wire.Message{Type: wire.Open, Body: (&wire.OpenRequest{Name: ".."}).Encode()}, 0},
		"open by a long name":   {wire.Message{Type: wire.Open, Body: (&wire.OpenRequest{Name: strings.Repeat("a", 99)}).Encode()}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, Config{Mode: sandbox.On})
			p.prepare(1, nil)
			pid := int(p.expect(wire.Spawned, 1).U32(0))
			var fds []int
			for range c.fds {
				fds = append(fds, int(os.Stdin.Fd()))
			}
			if err := wire.Send(p.conn, &c.m, fds...); err != nil {
				t.Fatal(err)
			}
			if err := p.ends(); err == nil || !strings.Contains(p.log.String(), "refused") {
				t.Errorf("the spawner ended with %v and said %q", err, &p.log)
			}
			if !gone(pid) {
				t.Errorf("worker %d is still there", pid)
			}
		})
	}
	t.Run("head", func(t *testing.T) {
		p := start(t, Config{Mode: sandbox.On})
		if _, err := p.conn.Write([]byte("nonsense that is not a message")); err != nil {
			t.Fatal(err)
		}
		if err := p.ends(); err == nil {
			t.Error("nonsense was taken")
		}
	})
	t.Run("same worker twice", func(t *testing.T) {
		p := start(t, Config{Mode: sandbox.On})
		p.prepare(1, nil)
		p.expect(wire.Spawned, 1)
		p.prepare(1, nil)
		if err := p.ends(); err == nil {
			t.Error("a second worker 1 was started")
		}
	})
}

// No request makes a worker run as root, as a system user, or as another worker.
func TestUsersAreRefused(t *testing.T) {
	testkit.Root(t, "gives workers other users")
	p := start(t, Config{Mode: sandbox.On, UIDs: sandbox.Range{First: 500000, N: 4}, UID: 4711, GID: 4711})
	for i, c := range []struct {
		uid, gid uint32
		says     string
	}{
		{1, 1000, "user 1"}, {999, 1000, "user 999"}, {1<<32 - 1, 1000, "user 4294967295"}, {1000, 0, "group 0"}, {1000, 42, "group 42"},
		{1000, 101, "group 101"}, {1000, 999, "group 999"}, {4711, 1000, "user 4711"},
		{1000, 1<<32 - 1, "group 4294967295"}, {500000, 500000, "user 500000"}, {500003, 1000, "user 500003"},
	} {
		id := uint32(i)
		p.prepare(id, func(r *wire.SpawnRequest) { r.UID, r.GID = c.uid, c.gid })
		m := p.receive()
		if m.Type != wire.SpawnFailed || m.ID != id || !strings.Contains(m.Failure().Text, c.says) {
			t.Errorf("user %d, group %d: message of type %d: %v, want a refusal with %q", c.uid, c.gid, m.Type, m.Failure(), c.says)
		}
	}
	// The user in the zygote's part of the request is ignored.
	worker := p.prepare(100, func(r *wire.SpawnRequest) {
		for i := range 12 {
			r.Worker[wire.SpawnUID+i] = 0
		}
	})
	pid := int(p.expect(wire.Spawned, 100).U32(0))
	for prepared := false; !prepared; { // by then it is in its sandbox
		m, fds, err := wire.Receive(worker, make([]byte, wire.Max), 4)
		if err != nil {
			t.Fatal(err)
		}
		wire.CloseAll(fds)
		prepared = m.Type == wire.Prepared
	}
	st, err := os.Stat("/proc/" + strconv.Itoa(pid))
	if err != nil {
		t.Fatal(err)
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; uid < 500000 || uid > 500003 {
		t.Errorf("the worker runs as user %d, not as one of the range", uid)
	}
}

// open asks the spawner for a file, as an executor does.
func (p *peer) open(r wire.OpenRequest) (*os.File, unix.Errno) {
	p.t.Helper()
	if err := wire.Send(p.conn, &wire.Message{Type: wire.Open, ID: 5, Body: r.Encode()}); err != nil {
		p.t.Fatal(err)
	}
	p.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	m, fds, err := wire.Receive(p.conn, make([]byte, wire.Max), 4)
	if err != nil || m.ID != 5 {
		p.t.Fatalf("%+v, %v", m, err)
	}
	if len(fds) == 1 && m.Type == wire.Opened {
		return os.NewFile(uintptr(fds[0]), "opened"), 0
	}
	return nil, unix.Errno(m.U32(0))
}

// The spawner opens files of its list for the executor. Files that are not on the list cannot be named.
func TestOpen(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "revoked"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(dir, "audit.log")
	p := start(t, Config{Mode: sandbox.Off, Files: []string{dir}, Append: []string{log}})
	f, errno := p.open(wire.OpenRequest{Name: "revoked"})
	if f == nil {
		t.Fatal(errno)
	}
	if b, err := io.ReadAll(f); err != nil || string(b) != "content" {
		t.Errorf("read %q, %v", b, err)
	}
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("a file that was opened for reading can be written")
	}
	f.Close()
	for range 2 { // made, then there
		if f, errno = p.open(wire.OpenRequest{Append: true}); f == nil {
			t.Fatal(errno)
		}
		if _, err := f.WriteString("line\n"); err != nil {
			t.Error(err)
		}
		f.Close()
	}
	if b, err := os.ReadFile(log); err != nil || string(b) != "line\nline\n" {
		t.Errorf("log %q, %v", b, err)
	}
	if _, errno := p.open(wire.OpenRequest{Name: "nothing"}); errno != unix.ENOENT {
		t.Errorf("a missing file: %v", errno)
	}
	if _, errno := p.open(wire.OpenRequest{File: 2}); errno != unix.ENOENT {
		t.Errorf("a file beyond the list: %v", errno)
	}
}

// The spawner does not open for writing what the executor reads (its certificates and keys), and makes no files beside
// them.
func TestOpenForAppending(t *testing.T) {
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.crt")
	if err := os.WriteFile(ca, []byte("certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, Config{Mode: sandbox.Off, Files: []string{dir, ca, filepath.Join(dir, "socket")}, Append: []string{dir}})
	for _, r := range []wire.OpenRequest{{Name: "ca.crt", Append: true}, {Name: "new", Append: true}, {File: 1, Append: true}, {File: 2, Append: true}} {
		if f, errno := p.open(r); f != nil {
			t.Errorf("%+v is opened", r)
			f.Close()
		} else if errno == 0 {
			t.Errorf("%+v: no error", r)
		}
	}
	if names, err := filepath.Glob(dir + "/*"); err != nil || len(names) != 1 {
		t.Errorf("files %q, %v", names, err)
	}
}

// A spawner without descriptors refuses a new worker, and its other workers live on.
func TestNoDescriptors(t *testing.T) {
	p := start(t, Config{Mode: sandbox.On})
	p.prepare(1, nil)
	pid := int(p.expect(wire.Spawned, 1).U32(0))
	var before unix.Rlimit
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 3, Max: before.Max} // open descriptors stay open
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	for id := uint32(2); id < 5; id++ {
		p.prepare(id, nil)
		if m := p.receive(); m.Type != wire.SpawnFailed || m.ID != id || !strings.Contains(m.Failure().Text, "too many open files") {
			t.Fatalf("message of type %d for worker %d: %v", m.Type, m.ID, m.Failure())
		}
	}
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &before, nil); err != nil {
		t.Fatal(err)
	}
	p.prepare(2, nil)
	p.expect(wire.Spawned, 2)
	if gone(pid) {
		t.Error("the worker that was there has ended")
	}
}

// The program that runs as root must stay small, and must contain no parser of tenants' input.
func TestRootProgramIsSmall(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,CgoFiles,CFiles,Module", "../../cmd/rfaas-spawner").Output()
	if err != nil {
		t.Fatal(err)
	}
	lines, packages := 0, 0
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Dir           string
			GoFiles, CgoFiles, CFiles []string
			Module                    *struct{ Path string }
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, parser := range []string{"debug/elf", "debug/dwarf", "google.golang.org/protobuf", "google.golang.org/grpc", "crypto/tls", "crypto/x509",
			"net/http", "encoding/json", "encoding/gob", "encoding/xml", "compress/", "archive/"} {
			if p.ImportPath == parser || strings.HasPrefix(p.ImportPath, strings.TrimSuffix(parser, "/")+"/") {
				t.Errorf("the root program contains %s", p.ImportPath)
			}
		}
		if p.Module == nil || !strings.HasPrefix(p.Module.Path, "github.com/rfaas-go/") {
			continue
		}
		packages++
		for _, file := range append(append(p.GoFiles, p.CgoFiles...), p.CFiles...) {
			b, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			lines += bytes.Count(b, []byte("\n"))
		}
	}
	t.Logf("%d lines in %d packages", lines, packages)
	if lines == 0 || lines > 5000 {
		t.Errorf("the root program has %d lines of ours, want at most 5000", lines)
	}
	path := program(t, "rfaas-spawner")
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range info.Settings {
		if s.Key == "CGO_ENABLED" && s.Value != "0" {
			t.Error("the root program is linked with C libraries")
		}
	}
	symbols, err := exec.Command("go", "tool", "nm", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(symbols, []byte("internal/spawner.Run")) {
		t.Fatal("the symbols of the root program cannot be read")
	}
	for _, name := range []string{"debug/elf.", "google.golang.org/protobuf", "google.golang.org/grpc", "crypto/tls.", "runtime/cgo."} {
		if bytes.Contains(symbols, []byte(name)) {
			t.Errorf("the root program has symbols of %s", name)
		}
	}
}

package capi

import (
	"encoding/binary"
	"errors"
	"fmt"
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

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/smalldisk"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// user is the environment and the programs of a user who looks for an agent. Programs are copies that every user can read.
type user struct {
	t   *testing.T
	uid uint32
	dir string
	env []string
}

// newUser makes a user with an environment that names no agent, no credential and no home directory.
func newUser(t *testing.T, uid uint32, env ...string) *user {
	t.Helper()
	u := &user{t: t, uid: uid, dir: t.TempDir()}
	testkit.OpenUp(t, u.dir, 0o755)
	u.env = append([]string{"PATH=" + os.Getenv("PATH"), "RFAAS_AGENT=" + u.program("libexec/rfaas-agent")}, env...)
	return u
}

// program copies what make build makes, and returns the path of the copy.
func (u *user) program(path string) string {
	u.t.Helper()
	return u.copy(built(u.t, path), filepath.Base(path))
}

func (u *user) copy(from, name string) string {
	u.t.Helper()
	to := filepath.Join(u.dir, name)
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o755)
	}
	if err != nil {
		u.t.Fatal(err)
	}
	return to
}

// command returns a command of the user.
func (u *user) command(path string, args ...string) *exec.Cmd {
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Dir = u.env, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if int(u.uid) != os.Geteuid() {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: u.uid, Gid: u.uid}
	}
	return cmd
}

// open opens a session through the library (testdata/reach_test.c) and returns the status and the text of it.
func (u *user) open(executor string) (dataplane.Status, string) {
	u.t.Helper()
	program := u.copy(reachProgram(u.t), "reach")
	cmd := u.command(program, executor)
	cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+u.dir)
	u.copy(built(u.t, "lib/librfaas.so"), "librfaas.so.0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		u.t.Fatalf("%v\n%s", err, out)
	}
	number, text, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	status, err := strconv.Atoi(number)
	if err != nil {
		u.t.Fatalf("%q: %v", out, err)
	}
	return dataplane.Status(status), text
}

// reachProgram compiles testdata/reach_test.c, which finds the library by LD_LIBRARY_PATH.
func reachProgram(t *testing.T) string {
	t.Helper()
	return build(t, "gcc", "testdata/reach_test.c", append([]string{"-Wl,--enable-new-dtags"}, c11...)...)
}

// fails opens a session, which must end with a status and a text that has all the words.
func (u *user) fails(status dataplane.Status, words ...string) {
	u.t.Helper()
	got, text := u.open("127.0.0.1:1")
	if got != status {
		u.t.Errorf("status %v (%s), want %v", got, text, status)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			u.t.Errorf("%q does not have %q", text, word)
		}
	}
}

// agent runs rfaas agent.
func (u *user) agent(args ...string) (string, error) {
	u.t.Helper()
	out, err := u.command(u.program("bin/rfaas"), append([]string{"agent"}, args...)...).CombinedOutput()
	return string(out), err
}

// socketName is the name of an agent's socket in a batch job; "": outside of one.
func socketName(t *testing.T, job string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		t.Fatal(err)
	}
	if job != "" {
		job = "-" + job
	}
	return fmt.Sprintf("agent-%d%s.sock", st.Ino, job)
}

// Where the runtime directory cannot be written to, the library and rfaas agent both use /tmp/rfaas-UID.
func TestReadOnlyRuntimeDirectory(t *testing.T) {
	crosses(t)
	testkit.Root(t, "has a directory /tmp/rfaas-UID in the namespace too")
	smalldisk.Run(t, "1m", func(t *testing.T, dir string) {
		if err := os.Mkdir(filepath.Join(dir, "rfaas"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			t.Fatal(err)
		}
		job := strconv.Itoa(1e9 + os.Getpid()) // a socket of this test's own
		u := newUser(t, uint32(os.Geteuid()), "XDG_RUNTIME_DIR="+dir, "SLURM_JOB_ID="+job)
		socket := filepath.Join(fmt.Sprintf("/tmp/rfaas-%d", os.Geteuid()), socketName(t, job))
		t.Cleanup(func() {
			for _, suffix := range []string{"", ".lock", ".log"} {
				os.Remove(socket + suffix)
			}
		})
		u.open("127.0.0.1:1")
		if out, err := u.agent("status"); err != nil || !strings.Contains(out, socket) {
			t.Errorf("rfaas agent status does not find the agent at %s: %v\n%s", socket, err, out)
		}
		if out, err := u.agent("stop"); err != nil {
			t.Errorf("rfaas agent stop: %v\n%s", err, out)
		}
	})
}

// A runtime directory without room for the lock file, the socket or the log gets an error that names the file and the remedy.
func TestFullRuntimeDirectory(t *testing.T) {
	crosses(t)
	smalldisk.Run(t, "1m,nr_inodes=16", func(t *testing.T, dir string) {
		u := newUser(t, uint32(os.Geteuid()), "XDG_RUNTIME_DIR="+dir)
		own := filepath.Join(dir, "rfaas")
		socket := filepath.Join(own, socketName(t, ""))
		for room, file := range []string{"the lock file " + socket + ".lock", "the agent's socket " + socket, "the agent's log " + socket + ".log"} {
			if err := errors.Join(os.RemoveAll(own), os.Mkdir(own, 0o700)); err != nil {
				t.Fatal(err)
			}
			var fill []string
			for {
				path := filepath.Join(dir, strconv.Itoa(len(fill)))
				if err := os.WriteFile(path, nil, 0o600); errors.Is(err, unix.ENOSPC) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				fill = append(fill, path)
			}
			for _, path := range fill[:room] {
				os.Remove(path)
			}
			u.fails(dataplane.StatusUnsupported, file, "No space left", "make room there, or set RFAAS_AGENT_SOCKET")
			for _, path := range fill[room:] {
				os.Remove(path)
			}
		}
	})
}

// The library and rfaas agent do not use the agent of another user, not even of root. The error names both users.
func TestAgentSocketOfAnotherUser(t *testing.T) {
	crosses(t)
	testkit.Root(t, "can become another user")
	const uid, other = 12345, 12346
	u := newUser(t, uid)
	for _, owner := range []uint32{0, other} {
		dir := filepath.Join(u.dir, strconv.Itoa(int(owner)))
		socket := filepath.Join(dir, "agent.sock")
		if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, int(owner), int(owner))); err != nil {
			t.Fatal(err)
		}
		daemon := (&user{t: t, uid: owner, dir: u.dir, env: u.env}).command(filepath.Join(u.dir, "rfaas-agent"), "--socket", socket)
		if err := daemon.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			daemon.Process.Kill()
			daemon.Wait()
		})
		testkit.Eventually(t, "the agent listens", func() bool {
			conn, err := net.Dial("unix", socket)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
		if err := os.Chmod(socket, 0o777); err != nil { // as by a mistake of its owner
			t.Fatal(err)
		}
		visitor := &user{t: t, uid: uid, dir: u.dir, env: append(u.env, "RFAAS_AGENT_SOCKET="+socket)}
		words := []string{socket, fmt.Sprintf("user %d", owner), fmt.Sprintf("user %d", uid), "RFAAS_AGENT_SOCKET"}
		visitor.fails(dataplane.StatusInvalid, words...)
		out, err := visitor.agent("status")
		for _, word := range words {
			if err == nil || !strings.Contains(out, word) {
				t.Errorf("rfaas agent status: %v, %q does not have %q", err, out, word)
			}
		}
	}
}

// The library and rfaas agent do not use a directory /tmp/rfaas-UID that another user could have made or can change.
func TestForeignAgentDirectory(t *testing.T) {
	crosses(t)
	testkit.Root(t, "can become another user")
	const uid = 12347
	path := fmt.Sprintf("/tmp/rfaas-%d", uid)
	t.Cleanup(func() { os.RemoveAll(path) })
	u := newUser(t, uid)
	own := filepath.Join(u.dir, "own")
	if err := errors.Join(os.Mkdir(own, 0o700), os.Chown(own, uid, uid)); err != nil {
		t.Fatal(err)
	}
	for name, make := range map[string]func() error{
		"of another user": func() error { return os.Mkdir(path, 0o700) },
		"symbolic link":   func() error { return errors.Join(os.Symlink(own, path), os.Lchown(path, uid, uid)) },
		"open to others":  func() error { return errors.Join(os.Mkdir(path, 0o755), os.Chown(path, uid, uid)) },
		"file":            func() error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, uid, uid)) },
	} {
		t.Run(name, func(t *testing.T) {
			u := &user{t: t, uid: uid, dir: u.dir, env: u.env}
			if err := errors.Join(os.RemoveAll(path), make()); err != nil {
				t.Fatal(err)
			}
			u.fails(dataplane.StatusUnsupported, path+" must be a directory of user 12347 with mode 0700", "RFAAS_AGENT_SOCKET")
			if out, err := u.agent("status"); err == nil || !strings.Contains(out, "unsafe directory") || !strings.Contains(out, path) {
				t.Errorf("rfaas agent status: %v\n%s", err, out)
			}
		})
	}
}

// In a batch job the library starts an agent of the job, and rfaas agent finds it. A value cannot lead out of the socket's directory.
func TestAgentOfABatchJob(t *testing.T) {
	crosses(t)
	secret := filepath.Join(t.TempDir(), "secret")
	executor := startExecutor(t, secret)
	for variables, job := range map[string]string{
		"SLURM_JOB_ID=77":                              "77",
		"SLURM_JOB_ID=../77":                           "___77",
		"SLURM_JOB_ID=":                                "",
		"FLUX_JOB_ID=ƒAb1 SLURM_JOB_ID=77":             "__Ab1",
		"PBS_JOBID=1234[5].pbs-server":                 "1234_5__pbs_server",
		"LSB_JOBID=90 LSB_JOBINDEX=3":                  "90_3",
		"JOB_ID=8 SGE_TASK_ID=undefined SGE_ROOT=/sge": "8",
		"JOB_ID=8": "",
	} {
		dir := t.TempDir()
		u := newUser(t, uint32(os.Geteuid()), append(strings.Fields(variables), "XDG_RUNTIME_DIR="+dir, "RFAAS_SECRET_FILE="+secret)...)
		if status, text := u.open(executor); status != 0 {
			t.Errorf("%s: status %v, %s", variables, status, text)
		}
		if out, err := u.agent("status"); err != nil || !strings.Contains(out, filepath.Join(dir, "rfaas", socketName(t, job))+"\n") {
			t.Errorf("%s: %v\n%s", variables, err, out)
		}
		if out, err := u.agent("stop"); err != nil {
			t.Errorf("rfaas agent stop: %v\n%s", err, out)
		}
	}
}

// Without a home directory a program with a credential works, and one without gets an error that names what is missing.
func TestNoHomeDirectory(t *testing.T) {
	crosses(t)
	secret, socket := filepath.Join(t.TempDir(), "secret"), filepath.Join(t.TempDir(), "agent.sock")
	executor := startExecutor(t, secret)
	t.Cleanup(func() { stopAgent(t, socket) })
	u := newUser(t, uint32(os.Geteuid()), "RFAAS_AGENT_SOCKET="+socket)
	if status, text := u.open(executor); status == 0 || !strings.Contains(text, "RFAAS_SECRET_FILE") || !strings.Contains(text, "HOME") {
		t.Errorf("without a credential: status %v, %q", status, text)
	}
	u.env = append(u.env, "RFAAS_SECRET_FILE="+secret)
	if status, text := u.open(executor); status != 0 {
		t.Errorf("with a credential: status %v, %s", status, text)
	}
}

// A library of another version gets the agent's reason, which names both versions and the remedy.
func TestAgentOfAnotherVersion(t *testing.T) {
	crosses(t)
	dir := t.TempDir()
	real, between := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "between.sock")
	u := newUser(t, uint32(os.Geteuid()), "RFAAS_AGENT_SOCKET="+real)
	u.open("127.0.0.1:1") // starts the agent
	t.Cleanup(func() { stopAgent(t, real) })
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: between, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	passed := make(chan error, 1)
	go func() { passed <- passHello(l, real) }()
	u.env = append(u.env, "RFAAS_AGENT_SOCKET="+between)
	u.fails(dataplane.StatusProtocol, fmt.Sprintf("has agent protocol %d", protocol.Version+1), fmt.Sprintf("has %d", protocol.Version), "rfaas agent stop")
	if err := <-passed; err != nil {
		t.Error(err)
	}
}

// passHello passes the hello of one client to an agent as that of the next protocol, and the reply back.
func passHello(l *net.UnixListener, agent string) error {
	client, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	defer client.Close()
	to, err := net.Dial("unix", agent)
	if err != nil {
		return err
	}
	defer to.Close()
	b, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(4))
	n, noob, _, _, err := client.ReadMsgUnix(b, oob)
	if err != nil {
		return err
	}
	if n < protocol.HeaderSize+8 {
		return fmt.Errorf("the hello has %d bytes", n)
	}
	version := b[protocol.HeaderSize+4:]
	binary.LittleEndian.PutUint32(version, binary.LittleEndian.Uint32(version)+1)
	if _, _, err := to.(*net.UnixConn).WriteMsgUnix(b[:n], oob[:noob], nil); err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:noob])
	if err == nil && len(messages) == 1 {
		var files []int
		if files, err = unix.ParseUnixRights(&messages[0]); err == nil {
			unix.Close(files[0])
		}
	}
	if err != nil {
		return err
	}
	if n, err = to.Read(b); err != nil {
		return err
	}
	_, err = client.Write(b[:n])
	return err
}

// Of a thousand processes that start at once, one starts the agent, and all get a session.
func TestManyProcessesStartAtOnce(t *testing.T) {
	crosses(t)
	env, socket, executor := agentCluster(t)
	const n = 1000
	cmd := exec.CommandContext(t.Context(), reachProgram(t), executor, strconv.Itoa(n))
	cmd.Env = append(os.Environ(), env...)
	began := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%.2000s", err, out)
	}
	t.Logf("%d processes have had a session after %v", n, time.Since(began).Round(time.Millisecond))
	log, err := os.ReadFile(socket + ".log")
	if started := strings.Count(string(log), "msg=ready"); err != nil || started != 1 {
		t.Errorf("%d agents were started, %v\n%s", started, err, log)
	}
	testkit.Eventually(t, "the agent has no client", func() bool { return len(agentStatus(t, socket).Clients) == 0 })
}

package privilege

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// dropped is set in the child process in which the test gives up its rights.
const dropped = "RFAAS_TEST_PRIVILEGE"

// Arguments of the processes of TestBare.
const (
	bareFirst = "bare-first"
	bareThen  = "bare-then"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(dropped); dir != "" {
		afterwards(dir)
		return
	}
	if len(os.Args) == 2 && os.Args[1] == bareFirst {
		fmt.Println(Bare([]string{os.Args[0], bareThen}))
		os.Exit(1)
	}
	if len(os.Args) == 2 && os.Args[1] == bareThen {
		status, err := os.ReadFile("/proc/self/status")
		fmt.Printf("%s%v", status, err)
		return
	}
	os.Exit(m.Run())
}

// afterwards drops all rights and prints one line for each operation that it then tries.
func afterwards(dir string) {
	must := func(err error) {
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
	}
	u, err := Find("1234567")
	must(err)
	must(u.Own(filepath.Join(dir, "state")))
	must(Drop(u))
	must(Filter())
	say := func(what string, err error) { fmt.Printf("%s: %v\n", what, err) }
	// What a daemon must still be able to do.
	_, err = os.ReadFile(filepath.Join(dir, "state", "journal"))
	say("own file", err)
	say("new file", os.WriteFile(filepath.Join(dir, "state", "new"), nil, 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	say("listen", err)
	l.Close()
	done := make(chan struct{})
	for range 20 { // threads can still be made
		go func() { unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil); done <- struct{}{} }()
	}
	for range 20 {
		<-done
	}
	say("threads", nil)
	// What it must not be able to do.
	_, err = os.ReadFile(filepath.Join(dir, "secret"))
	say("root's file", err)
	say("root again", syscall.Setuid(0))
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	fmt.Println("others of its user can trace it:", dumpable != 0, err)
	state, err := os.ReadFile("/proc/self/status")
	must(err)
	for line := range strings.Lines(string(state)) {
		if strings.HasPrefix(line, "Cap") && !strings.HasPrefix(line, "CapBnd") && !strings.HasSuffix(line, "\t0000000000000000\n") {
			fmt.Println("capabilities are left:", line)
		}
	}
	say("program", exec.Command("/bin/true").Run())
	say("namespace", unix.Unshare(unix.CLONE_NEWUSER))
	say("mount", unix.Mount("none", dir, "tmpfs", 0, ""))
	_, _, errno := unix.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(os.Getppid()), 0, 0, 0, 0, 0)
	say("other memory", errno)
	say("trace", unix.PtraceAttach(os.Getppid()))
	_, _, errno = unix.Syscall(unix.SYS_BPF, 0, 0, 0)
	say("bpf", errno)
	for _, command := range []uintptr{unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSTI | 1<<32, unix.TIOCSTI | 1<<63} { // ENOTTY unless it is refused
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, 0, command, uintptr(unsafe.Pointer(new(byte))))
		say("type into the terminal", errno)
	}
	for _, command := range []uintptr{unix.TCGETS, 0xc0181b01, 0xffffffffc0181b01} { // the last two are commands of an RDMA device
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, 0, command, uintptr(unsafe.Pointer(new([64]byte))))
		say("other command", errno)
	}
}

// Bare leaves root no capabilities.
func TestBare(t *testing.T) {
	testkit.Root(t, "has capabilities to give up")
	out, err := exec.Command("/proc/self/exe", bareFirst).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"Uid:\t0\t0\t0\t0\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "CapBnd:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestDropAndFilter(t *testing.T) {
	testkit.Root(t, "has rights to give up")
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"secret", "state/journal"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// A link must not give another file to the daemon.
	if err := os.Link(filepath.Join(dir, "secret"), filepath.Join(dir, "state", "hard")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "secret"), filepath.Join(dir, "state", "soft")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), dropped+"="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := `own file: <nil>
new file: <nil>
listen: <nil>
threads: <nil>
root's file: open SECRET: permission denied
root again: operation not permitted
others of its user can trace it: false <nil>
program: fork/exec /bin/true: operation not permitted
namespace: operation not permitted
mount: operation not permitted
other memory: operation not permitted
trace: operation not permitted
bpf: operation not permitted
type into the terminal: operation not permitted
type into the terminal: operation not permitted
type into the terminal: operation not permitted
type into the terminal: operation not permitted
other command: inappropriate ioctl for device
other command: inappropriate ioctl for device
other command: inappropriate ioctl for device
`
	if got := strings.ReplaceAll(string(out), filepath.Join(dir, "secret"), "SECRET"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if st, err := os.Stat(filepath.Join(dir, "secret")); err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("a linked file changed its owner: %v, %v", st, err)
	}
}

func TestFind(t *testing.T) {
	for setting, want := range map[string]string{
		"0": "ordinary user", "root": "ordinary user", "4294967295": "ordinary user", "no such user here": "unknown user",
	} {
		if u, err := Find(setting); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want an error with %q", setting, u, err, want)
		}
	}
	if u, err := Find("4711"); err != nil || u.UID != 4711 || u.GID != 4711 {
		t.Errorf("%+v, %v", u, err)
	}
	if u, err := Find(""); err != nil || u.UID == 0 {
		t.Errorf("default: %+v, %v", u, err)
	}
}

func TestOwnRefusesOthers(t *testing.T) {
	if err := (User{"x", 4711, 4711}).Own(filepath.Join(t.TempDir(), "nothing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want that it does not exist", err)
	}
	if os.Geteuid() != 0 {
		return
	}
	dir := t.TempDir()
	if err := os.Chown(dir, 4712, 4712); err != nil {
		t.Fatal(err)
	}
	if err := (User{"x", 4711, 4711}).Own(dir); err == nil || !strings.Contains(err.Error(), "belongs to user 4712") {
		t.Errorf("%v, want that it belongs to user 4712", err)
	}
}

// As opens files with the user's rights and does not change the process.
func TestAs(t *testing.T) {
	testkit.Root(t, "can open files as another user")
	dir := t.TempDir()
	secret, own := filepath.Join(dir, "secret"), filepath.Join(dir, "own")
	if err := errors.Join(os.WriteFile(secret, nil, 0o660), os.Mkdir(own, 0o700), os.Chown(own, 4711, 4712), os.Symlink(secret, filepath.Join(own, "link"))); err != nil {
		t.Fatal(err)
	}
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 { // so that it meets several threads
		var errs [4]error
		err := User{"x", 4711, 4712}.As(func() {
			_, errs[0] = os.ReadFile(secret)
			errs[1] = os.WriteFile(filepath.Join(own, "link"), []byte("x"), 0o600)
			errs[2] = os.Chown(own, 0, 0)
			errs[3] = os.WriteFile(filepath.Join(own, "new"), nil, 0o600)
		})
		for i, err := range errs[:3] {
			if !errors.Is(err, fs.ErrPermission) {
				t.Errorf("%d: %v, want that it is not permitted", i, err)
			}
		}
		if err := errors.Join(err, errs[3]); err != nil {
			t.Fatal(err)
		}
		if _, err := os.ReadFile(secret); err != nil {
			t.Fatalf("afterwards: %v", err)
		}
	}
	if st, err := os.Stat(filepath.Join(own, "new")); err != nil || st.Sys().(*syscall.Stat_t).Uid != 4711 || st.Sys().(*syscall.Stat_t).Gid != 4712 {
		t.Errorf("the file that it made: %+v, %v", st, err)
	}
}

package zygote

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// watched is a process without an RDMA device, as the worker of a page that says what the test writes there.
func watched(t *testing.T) (*Worker, []byte) {
	t.Helper()
	page, fd, err := newPage()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	words, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	raw, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := &Worker{pid: cmd.Process.Pid, pidfd: os.NewFile(uintptr(raw), "pidfd"), page: page, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(w.done)
	}()
	t.Cleanup(func() {
		killPidfd(w.pidfd)
		<-w.done
		w.pidfd.Close()
		page.freeze()
		unix.Munmap(words)
	})
	return w, words
}

// A function that closes its worker's device at once may do so before anybody has looked for the first time.
func TestDeviceIsClosedBeforeTheFirstLook(t *testing.T) {
	w, words := watched(t)
	binary.LittleEndian.PutUint64(words, 1<<16) // the first call runs
	go w.watchDevice()
	select {
	case <-w.done:
	case <-time.After(20 * deviceLook):
		t.Fatal("a worker without its device goes on with its call")
	}
	if v := w.verdict.Load(); v == nil || v.status != statusWorkerDied || !strings.Contains(v.text, "closed the descriptors") {
		t.Errorf("verdict %+v", v)
	}
}

// Between calls nobody waits for it, and calls that come and go prove that it answers.
func TestDeviceOfAnIdleWorker(t *testing.T) {
	w, words := watched(t)
	var seen uint64
	for i, look := range []struct {
		begun, over uint64
		lost        bool
	}{
		{0, 0, false}, {0, 0, false}, // it has not been called yet
		{1, 0, false}, {2, 1, false}, // another call at each look
		{3, 3, false}, {3, 3, false},
		{4, 3, false}, {4, 3, true}, {4, 3, true},
		{4, 4, false}, {5, 4, false}, {5, 4, true},
	} {
		binary.LittleEndian.PutUint64(words, look.begun<<16)
		binary.LittleEndian.PutUint64(words[8:], look.over)
		if got := w.lostDevice(&seen); got != look.lost {
			t.Errorf("look %d, %d calls begun and %d over: lost %v, want %v", i, look.begun, look.over, got, look.lost)
		}
	}
	w.Kill()
	<-w.done
	if w.lostDevice(&seen) {
		t.Error("a worker that has ended counts as one that has closed its device")
	}
}

// What /proc tells of a process's files, and of its end. The watch in a whole system: client, TestUnreachableWorkerIsReplaced
// on verbs.
func TestFilesOfAProcess(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file-of-the-test")
	self := fmt.Sprintf("/proc/%d", os.Getpid())
	if open, err := hasOpen(self, "file-of-the-test"); err != nil || open {
		t.Errorf("before it is open: %v, %v", open, err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if open, err := hasOpen(self, "file-of-the-test"); err != nil || !open {
		t.Errorf("while it is open: %v, %v", open, err)
	}
	f.Close()
	if open, err := hasOpen(self, "file-of-the-test"); err != nil || open {
		t.Errorf("after it was closed: %v, %v", open, err)
	}
	if exiting(self) {
		t.Error("this process is said to be ending")
	}

	cmd := exec.Command("true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	child := fmt.Sprintf("/proc/%d", cmd.Process.Pid)
	defer cmd.Wait()
	eventually(t, "a process that has ended and is not reaped counts as ending", func() bool { return exiting(child) })
	if _, err := hasOpen("/proc/0", "file-of-the-test"); err == nil {
		t.Error("a process that does not exist has files")
	}
	if !exiting("/proc/0") {
		t.Error("a process that does not exist is not ending")
	}
}

func TestProcessFlags(t *testing.T) {
	for stat, want := range map[string]uint64{
		"12 (a) S 1 2 3 4 5 4194308 7\n":      4194308,
		"12 (a b) 9) R 1 2 3 4 5 0 7 8 9 10":  0,
		"12 (rfaas-w1) Z 1 2 3 4 5 4227084 7": 4227084,
	} {
		if got, err := processFlags(stat); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", stat, got, err, want)
		}
	}
	for _, stat := range []string{"", "12 a S 1 2 3 4 5 6 7", "12 (a) S 1 2 3", "12 (a) S 1 2 3 4 5 x"} {
		if got, err := processFlags(stat); err == nil {
			t.Errorf("%q: %d", stat, got)
		}
	}
}

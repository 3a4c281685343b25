package zygote

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// What /proc tells of a process's files, and of its end. The watch itself: client, TestUnreachableWorkerIsReplaced on verbs.
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
	eventually(t, 5*time.Second, "a process that has ended and is not reaped counts as ending", func() bool { return exiting(child) })
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

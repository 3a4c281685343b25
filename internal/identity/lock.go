package identity

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lockPatience is how long a command waits for another one that uses the same directory.
	lockPatience = 10 * time.Second
	lockEvery    = 20 * time.Millisecond
)

// lockDir opens a directory and waits for its lock, at most as long as patience. Closing the file releases the lock.
func lockDir(dir string, patience time.Duration) (*os.File, error) {
	lock, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for until := time.Now().Add(patience); ; time.Sleep(lockEvery) {
		switch err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return lock, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(until):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			err = fmt.Errorf("lock %s: %s has held the lock for %v: wait until it has ended, or end it, and repeat the command", dir, lockHolder(lock), patience)
		default:
			err = fmt.Errorf("lock %s: %w", dir, err)
		}
		lock.Close()
		return nil, err
	}
}

// lockHolder names the process that holds the lock of a file, as far as the kernel shows it.
func lockHolder(f *os.File) string {
	var st unix.Stat_t
	list, err := os.Open("/proc/locks")
	if err != nil || unix.Fstat(int(f.Fd()), &st) != nil {
		return "another process"
	}
	defer list.Close()
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for lines := bufio.NewScanner(list); lines.Scan(); {
		// 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
		w := strings.Fields(lines.Text())
		if len(w) < 6 || w[1] != "FLOCK" || w[5] != file {
			continue
		}
		if pid, err := strconv.Atoi(w[4]); err == nil && pid > 0 { // not positive: a process of another namespace
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			return fmt.Sprintf("process %d (%q)", pid, strings.TrimSpace(string(name)))
		}
	}
	return "another process"
}

// removeStaged removes the temporary files of stage that a killed process has left for a file of a directory. The caller holds the lock of
// the directory.
func removeStaged(dir, name string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		random, ours := strings.CutPrefix(e.Name(), "."+name+"-")
		if _, err := strconv.ParseUint(random, 10, 64); !ours || err != nil {
			continue // not of stage
		}
		path := filepath.Join(dir, e.Name())
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove what an interrupted command has left: %w", err)
		}
	}
	return nil
}

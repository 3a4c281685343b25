package spawner

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
)

// The executor chooses only when the program runs. It runs once at a time, and not on a directory or as a program that the executor's user can
// change.
func TestRenewByRoot(t *testing.T) {
	testkit.Root(t, "can make files of two users")
	const uid, gid = 1234567, 1234567
	dir, err := os.MkdirTemp("", "renew")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	program, users := filepath.Join(dir, "program"), filepath.Join(dir, "users")
	// The program writes its arguments when something writes to the FIFO.
	fifo := filepath.Join(dir, "fifo")
	script := "#!/bin/sh\nread line <" + fifo + "\necho \"$# $1 $2 ${RFAAS_X-unset}\"\n"
	if err := errors.Join(os.WriteFile(program, []byte(script), 0o755), unix.Mkfifo(fifo, 0o600), os.Mkdir(users, 0o755), os.Chown(users, uid, gid)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("RFAAS_X", "of the spawner")
	s := &Spawner{cfg: Config{UID: uid, GID: gid}, pids: map[int]bool{}}
	if _, err := s.renew(); !errors.Is(err, unix.ENOENT) {
		t.Errorf("without a program: %v", err)
	}
	s.cfg.Renew, s.cfg.Identity = program, users
	if _, err := s.renew(); !errors.Is(err, unix.EACCES) {
		t.Errorf("a directory of the executor's user: %v", err)
	}
	s.cfg.Renew, s.cfg.Identity = filepath.Join(users, "program"), dir
	if _, err := s.renew(); !errors.Is(err, unix.EACCES) {
		t.Errorf("a program of the executor's user: %v", err)
	}
	s.cfg.Renew = program
	for range 2 {
		fd, err := s.renew()
		if err != nil {
			t.Fatal(err)
		}
		output := os.NewFile(uintptr(fd), "output")
		if _, err := s.renew(); !errors.Is(err, unix.EBUSY) {
			t.Errorf("while it runs: %v", err)
		}
		w, err := os.OpenFile(fifo, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		w.WriteString("go\n")
		w.Close()
		b, err := io.ReadAll(output)
		output.Close()
		if want := "2 renew-identity " + dir + " unset\n"; string(b) != want || err != nil {
			t.Errorf("it said %q, %v, want %q", b, err, want)
		}
		testkit.Eventually(t, "it is reaped", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.pids) == 0 && !s.renewing.Load()
		})
	}
}

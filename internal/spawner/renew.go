package spawner

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

const (
	// RenewArgument is the first argument of Config.Renew.
	RenewArgument = "renew-identity"
	// renewLife is how long that program may run.
	renewLife = time.Minute
)

// renew starts the program that renews the node's certificate, and returns a pipe with its output. The executor chooses nothing but the time.
func (s *Spawner) renew() (int, error) {
	if s.cfg.Renew == "" {
		return -1, unix.ENOENT
	}
	for _, path := range []string{s.cfg.Renew, filepath.Join(s.cfg.Identity, "issuer")} {
		if err := PathIsSafe(path, s.cfg.UID, s.cfg.GID); err != nil {
			return -1, err
		}
	}
	if !s.renewing.CompareAndSwap(false, true) {
		return -1, unix.EBUSY
	}
	fd, err := s.startRenewal()
	if err != nil {
		s.renewing.Store(false)
		s.logf("cannot run %s: %v", s.cfg.Renew, err)
	}
	return fd, err
}

func (s *Spawner) startRenewal() (int, error) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return -1, err
	}
	output := os.NewFile(uintptr(ends[1]), "output of "+s.cfg.Renew)
	defer output.Close()
	cmd := exec.Command(s.cfg.Renew, RenewArgument, s.cfg.Identity)
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	err := unix.SetNonblock(ends[0], true) // so that the executor can stop reading
	if err == nil {
		s.asking.Lock() // findStrays must not see a process that is unknown
		wire.OnStarterThread(func() { err = cmd.Start() })
		if err == nil {
			s.mu.Lock()
			s.pids[cmd.Process.Pid] = true
			s.mu.Unlock()
		}
		s.asking.Unlock()
	}
	if err != nil {
		unix.Close(ends[0])
		return -1, err
	}
	timer := time.AfterFunc(renewLife, func() { cmd.Process.Kill() })
	go func() {
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) { // the program itself has told the executor
			s.logf("%s: %v", s.cfg.Renew, err)
		}
		timer.Stop()
		s.mu.Lock()
		delete(s.pids, cmd.Process.Pid)
		s.mu.Unlock()
		s.renewing.Store(false)
	}()
	return ends[0], nil
}

package zygote

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/sandbox"
)

// Sandbox says how workers are to be confined. The zero value does not.
type Sandbox struct {
	Mode  sandbox.Mode
	Paths []string      // absolute; what workers see read-only besides the system's
	UIDs  sandbox.Range // for workers whose Spec has no UID; needs root
	// Processes is how many processes and threads a worker may have; 0: no limit.
	Processes uint32

	without uint32 // parts that tests leave out
}

// Parts of a sandbox, DP_SANDBOX_* of dp_worker_sandbox.h.
const (
	partUID      = 1 << 0
	partPIDs     = 1 << 1
	partFiles    = 1 << 2
	partIPC      = 1 << 3
	partNet      = 1 << 4
	partPrivs    = 1 << 5
	partSeccomp  = 1 << 6
	partLandlock = 1 << 7
	partAll      = 1<<8 - 1
)

const maxSandboxPaths = 64 // DP_SANDBOX_PATHS_MAX

// arguments are those of the zygote.
func (s *Sandbox) arguments() []string {
	args := []string{"zygote"}
	if s.Mode == sandbox.Off {
		return args
	}
	args = append(args, "--sandbox")
	if s.without != 0 {
		args = append(args, fmt.Sprintf("--without=%d", s.without))
	}
	for _, p := range s.paths() {
		args = append(args, "--path="+p)
	}
	return args
}

// paths are the settings' and those in which the executor's own libraries are looked for.
func (s *Sandbox) paths() []string {
	list := s.Paths
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if strings.HasPrefix(dir, "/") {
			list = append(list[:len(list):len(list)], dir)
		}
	}
	return list[:min(len(list), maxSandboxPaths)]
}

// lacks says what of the sandbox a zygote cannot give; "" if nothing.
func (s *Sandbox) lacks(parts uint32, missing string) string {
	if s.Mode == sandbox.Off {
		return ""
	}
	if parts&partUID != 0 && s.UIDs.N == 0 {
		parts &^= partUID
		missing = strings.TrimPrefix(missing+"; user ids: no range is set", "; ")
	}
	if parts&partAll == partAll {
		return ""
	}
	if missing == "" {
		missing = fmt.Sprintf("parts %#x of %#x", parts, partAll)
	}
	return missing
}

// check refuses a zygote without what is required, and logs what is missing where it is not.
func (s *Sandbox) check(p *process, log *slog.Logger) error {
	missing := s.lacks(p.parts, p.missing)
	switch {
	case missing == "":
		return nil
	case s.Mode == sandbox.Require:
		return fmt.Errorf("a complete sandbox is required, and this node cannot give it: %s", missing)
	}
	log.Warn("the sandbox of workers is incomplete", "missing", missing)
	return nil
}

// ownUID is a user id for a worker that nobody has named one for; 0: it keeps the executor's.
func (z *Zygote) ownUID() (uint32, error) {
	z.mu.Lock()
	parts := z.parts
	z.mu.Unlock()
	if z.cfg.Sandbox.Mode == sandbox.Off || parts&partUID == 0 || z.cfg.Sandbox.UIDs.N == 0 {
		return 0, nil
	}
	return z.uids.Take()
}

// confine completes the message that asks for a worker; undo gives back what it took, when nothing of the worker is left.
func (z *Zygote) confine(s *Spec, body []byte) (_ []byte, undo func(), err error) {
	if s.UID != 0 {
		if z.cfg.Sandbox.Mode == sandbox.Off {
			return nil, nil, invalid("user id %d: workers get no ids of their own with --sandbox=off", s.UID)
		}
		return body, func() {}, nil
	}
	id, err := z.ownUID()
	if err != nil || id == 0 {
		return body, func() {}, err
	}
	body = slices.Clone(body)
	binary.LittleEndian.PutUint32(body[bodyUID:], id)
	binary.LittleEndian.PutUint32(body[bodyUID+4:], id)
	binary.LittleEndian.PutUint32(body[bodyUID+8:], z.cfg.Sandbox.Processes)
	return body, func() { z.uids.Give(id) }, nil
}

// reapNow reaps a child that has ended or is about to.
func reapNow(fd int) {
	for {
		err := unix.Waitid(unix.P_PIDFD, fd, nil, unix.WEXITED, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	unix.Close(fd)
}

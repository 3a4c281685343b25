package spawner

import (
	"fmt"
	"math"
	"os"
	"runtime"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

const (
	// lowestUID and lowestGID are the lowest ids that a verified user's worker may have, so that it never runs as a
	// system user or group. usersGID is below them, but many systems use it as the group of all their users.
	lowestUID = 1000
	lowestGID = 1000
	usersGID  = 100
)

// confine reserves the user id and the control group of a worker, and sets them in its request.
func (s *Spawner) confine(c *child, z *zygote, r *wire.SpawnRequest) (err error) {
	var uid, gid, processes uint32
	switch {
	case !s.givesUIDs(z):
		// The worker runs as the spawner's user. checkSandbox has made sure that this is not root.
	case r.UID != 0:
		if err := s.checkUser(r.UID, r.GID); err != nil {
			return err
		}
		uid, gid, processes = r.UID, r.GID, ofAllWorkers(s.cfg.Processes)
	case s.cfg.UIDs.N > 0:
		if c.uid, err = s.uids.Take(); err != nil {
			return err
		}
		uid, gid, processes = c.uid, c.uid, s.cfg.Processes
	default:
		return fmt.Errorf("%w: set sandbox-uids, a range of user ids", errRootWorker)
	}
	for i, n := range []uint32{uid, gid, processes} {
		putU32(r.Worker[wire.SpawnUID+4*i:], n)
	}
	if s.groups == nil || z.parts&wire.PartPIDs == 0 { // only the process that clones a guard can move the worker into a group
		return nil
	}
	if c.group, err = s.groups.New(); err != nil {
		return err
	}
	if err := c.group.Limit(r.Memory); err != nil {
		return err
	}
	return c.group.Pin(r.CPUs.List())
}

// checkUser refuses users and groups that no token may name.
func (s *Spawner) checkUser(uid, gid uint32) error {
	switch {
	case uid < lowestUID || uid == 1<<32-1:
		return fmt.Errorf("a worker cannot run as user %d: system users are refused", uid)
	case gid < lowestGID && gid != usersGID || gid == 1<<32-1:
		return fmt.Errorf("a worker cannot run in group %d: system groups are refused", gid)
	case s.cfg.UIDs.Has(uid):
		return fmt.Errorf("a worker cannot run as user %d: it is in the range %v of other workers", uid, s.cfg.UIDs)
	case int(uid) == os.Getuid() || uid == s.cfg.UID:
		return fmt.Errorf("a worker cannot run as user %d, the user of the spawner or its executor", uid)
	}
	return nil
}

// ofAllWorkers returns the process limit for a verified user. The kernel counts all processes of the user on the node,
// those of its other workers and jobs too, so the limit of one worker would keep the next worker from starting. A node
// has some 1024 process numbers for each CPU; this limit leaves half of them to others. The worker's control group
// enforces the limit of one worker.
func ofAllWorkers(processes uint32) uint32 {
	return uint32(min(uint64(processes)*uint64(runtime.NumCPU()), math.MaxUint32))
}

// release releases what confine reserved. The worker must have no processes left.
func (s *Spawner) release(c *child) {
	s.giveUID(c)
	s.removeGroup(c)
}

func (s *Spawner) giveUID(c *child) {
	if c.uid != 0 {
		s.uids.Give(c.uid)
	}
}

func (s *Spawner) removeGroup(c *child) {
	if c.group != nil {
		if err := s.groups.Remove(c.group); err != nil {
			s.logf("cannot remove a worker's control group: %v", err)
		}
	}
}

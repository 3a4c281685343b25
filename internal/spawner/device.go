package spawner

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

const (
	// deviceFile begins the name of an RDMA device's file. In a sandbox that name is all that is left of its path.
	deviceFile = "uverbs"

	procExiting = 4 // PF_EXITING in /proc/PID/stat
)

// deviceState returns wire.DeviceOpen, wire.DeviceClosed or wire.DeviceUnknown for a process's RDMA device.
func deviceState(pid int) uint32 {
	proc := fmt.Sprintf("/proc/%d", pid)
	open, err := hasDevice(proc + "/fd")
	switch {
	case err != nil:
		return wire.DeviceUnknown
	case open:
		return wire.DeviceOpen
	case exiting(proc): // checked after the descriptors: if the process is not exiting now, its exit did not close them
		return wire.DeviceUnknown
	}
	return wire.DeviceClosed
}

// hasDevice reports whether a directory of descriptors (/proc/PID/fd) has an RDMA device.
func hasDevice(dir string) (bool, error) {
	d, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return false, err
	}
	for _, name := range names {
		to, err := os.Readlink(dir + "/" + name)
		switch {
		case err == nil && strings.HasPrefix(filepath.Base(to), deviceFile):
			return true, nil
		case err != nil && !errors.Is(err, fs.ErrNotExist): // it was closed meanwhile
			return false, err
		}
	}
	return false, nil
}

// exiting reports whether the process is ending or has ended.
func exiting(procDir string) bool {
	b, err := os.ReadFile(procDir + "/stat")
	if err != nil {
		return true
	}
	flags, err := processFlags(string(b))
	return err != nil || flags&procExiting != 0
}

// processFlags returns the ninth field of a line of /proc/PID/stat. The second field is in brackets and may contain
// anything.
func processFlags(stat string) (uint64, error) {
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	if i < 0 || len(fields) < 7 {
		return 0, fmt.Errorf("%q is not a line of /proc/PID/stat", stat)
	}
	return strconv.ParseUint(fields[6], 10, 64)
}

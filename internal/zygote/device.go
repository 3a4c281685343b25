package zygote

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A function that closes descriptors which are not its own (a daemon's closefrom) may close those of its worker's RDMA device.
// The mappings keep the queue pair alive all the same: it acknowledges everything, nothing will ever be answered, and the client
// has no way to know. On shared memory the client itself sees its end close.

const (
	// deviceFile begins the name of a device file, which in a sandbox is all that is left of its path.
	deviceFile = "uverbs"
	// deviceLook is how often a worker in whose page one and the same call runs is looked at.
	deviceLook = 500 * time.Millisecond

	procExiting = 4 // PF_EXITING in /proc/PID/stat
)

// watchDevice ends a worker on verbs that runs a function and has its device no more. It returns with the worker, or
// when its files are not ours to see. That the device is there when this begins is not asked for: the first function may have closed
// it before this goroutine got to run.
func (w *Worker) watchDevice() {
	if _, err := hasOpen(w.proc(), deviceFile); err != nil {
		return
	}
	ticker := time.NewTicker(deviceLook)
	defer ticker.Stop()
	var seen uint64
	for {
		select {
		case <-w.done:
			return
		case <-ticker.C:
		}
		if w.lostDevice(&seen) {
			w.end(verdict{statusWorkerDied, "closed the descriptors of its RDMA device"})
			return
		}
	}
}

// proc is the worker's directory in /proc.
func (w *Worker) proc() string { return "/proc/" + strconv.Itoa(w.pid) }

// lostDevice says whether the worker is in the call in which it was at the last look, seen, and has no device.
func (w *Worker) lostDevice(seen *uint64) bool {
	call, _, running := w.page.running()
	if !running || call != *seen {
		*seen = call
		return false
	}
	// In this order: the files of a process that was not ending afterwards were not closed by its end.
	open, err := hasOpen(w.proc(), deviceFile)
	return err == nil && !open && !exiting(w.proc())
}

// hasOpen says whether the process of a directory in /proc has a file open whose name begins so. An error when that cannot be told.
func hasOpen(procDir, prefix string) (bool, error) {
	dir := procDir + "/fd"
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
		case err == nil && strings.HasPrefix(filepath.Base(to), prefix):
			return true, nil
		case err != nil && !errors.Is(err, fs.ErrNotExist): // closed meanwhile
			return false, err
		}
	}
	return false, nil
}

// exiting says whether the process is ending or has ended.
func exiting(procDir string) bool {
	b, err := os.ReadFile(procDir + "/stat")
	if err != nil {
		return true
	}
	flags, err := processFlags(string(b))
	return err != nil || flags&procExiting != 0
}

// processFlags is the ninth field of /proc/PID/stat. The second is in brackets and may hold anything.
func processFlags(stat string) (uint64, error) {
	i := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[i+1:])
	if i < 0 || len(fields) < 7 {
		return 0, fmt.Errorf("%q is no line of /proc/PID/stat", stat)
	}
	return strconv.ParseUint(fields[6], 10, 64)
}

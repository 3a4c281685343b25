package zygote

import (
	"time"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// A function that closes descriptors which are not its own (a daemon's closefrom) may close those of its worker's RDMA device.
// The mappings keep the queue pair alive all the same: it acknowledges everything, nothing will ever be answered, and the client
// has no way to know. On shared memory the client itself sees its end close.

// deviceLook is how often a worker is looked at in whose page the same call runs.
const deviceLook = 500 * time.Millisecond

// watchDevice ends a worker on verbs that runs a function and has closed its device. It returns with the worker.
func (w *Worker) watchDevice() {
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
			w.end(verdict{wire.StatusWorkerDied, "closed the descriptors of its RDMA device"})
			return
		}
	}
}

// lostDevice says whether the worker is in the call in which it was at the last look, seen, and has no device.
func (w *Worker) lostDevice(seen *uint64) bool {
	call, _, running := w.page.running()
	if !running || call != *seen {
		*seen = call
		return false
	}
	return !w.hasDevice()
}

// hasDevice asks the spawner, which may look at the worker's descriptors. When that cannot be told the worker is left alone.
func (w *Worker) hasDevice() bool {
	select {
	case <-w.done:
		return true
	case <-w.device: // an answer that came too late
	default:
	}
	w.command(wire.Device)
	select {
	case state := <-w.device:
		return state != wire.DeviceClosed
	case <-w.done:
	case <-time.After(deviceLook):
	}
	return true
}

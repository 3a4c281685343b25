package zygote

import (
	"time"

	"github.com/rfaas-go/rfaas/internal/beat"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// A function that closes descriptors which it has not opened (a daemon's closefrom) may close those of its worker's
// RDMA device. The mappings keep the queue pair alive: it still acknowledges everything, but nothing is answered, and
// the client cannot notice. On shared memory the client itself sees its end close.

// deviceLook is how often a worker's device is checked while its page shows the same running call.
const deviceLook = 500 * time.Millisecond

// watchDevice ends a worker on verbs that runs a function and has closed its device. It returns when the worker ends.
func (w *Worker) watchDevice() {
	look := beat.New(deviceLook)
	defer look.Stop()
	var seen uint64
	for {
		select {
		case <-w.done:
			return
		case <-look.C:
			look.Next()
		}
		if w.lostDevice(&seen) {
			w.end(verdict{wire.StatusWorkerDied, "closed the descriptors of its RDMA device"})
			return
		}
	}
}

// lostDevice reports whether the worker is still in the call of the last check, seen, and has no device.
func (w *Worker) lostDevice(seen *uint64) bool {
	call, _, running := w.page.running()
	if !running || call != *seen {
		*seen = call
		return false
	}
	return !w.hasDevice()
}

// hasDevice asks the spawner, which may read the worker's descriptors. It returns true if the answer is unknown.
func (w *Worker) hasDevice() bool {
	select {
	case <-w.done:
		return true
	case <-w.device: // an earlier answer that came too late
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

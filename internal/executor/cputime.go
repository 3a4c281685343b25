package executor

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/accounting"
)

// cpuTime is how much processor time the kernel has seen a worker's process use, its threads included. false: it has ended.
func cpuTime(w Worker) (time.Duration, bool) {
	pid := w.PID()
	if pid <= 0 {
		return 0, false
	}
	// The clock of another process, as clock_getcpuclockid makes it: ~pid << 3 | CPUCLOCK_SCHED.
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid)<<3|2, &ts); err != nil {
		return 0, false
	}
	select {
	case <-w.Done(): // the number may be another's by now
		return 0, false
	default:
		return time.Duration(ts.Nano()), true
	}
}

// workerReport is what a worker says that it has done, without times. It is its own word: user code can change it.
func workerReport(w Worker) accounting.Report {
	c := w.Counters()
	return accounting.Report{Calls: c.Calls, BytesIn: c.BytesIn, BytesOut: c.BytesOut, Failures: c.Failed}
}

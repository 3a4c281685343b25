package zygote

import (
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// stopPatience is how long a worker or the zygote may be stopped (SIGSTOP): somebody may be about to continue it.
	stopPatience = time.Second
	// tracePatience is how long a function that exceeded its time may take to say where it is.
	tracePatience = time.Second

	shortestLook = 5 * time.Millisecond
	longestLook  = 250 * time.Millisecond
)

// end kills the worker for a reason of the executor's own; the first one counts.
func (w *Worker) end(v verdict) {
	w.verdict.CompareAndSwap(nil, &v)
	w.kill()
}

// limitCalls ends the worker when one call takes longer than limit. It looks at the worker's page now and then, so the
// worker itself reads no clock: a call is never ended early, and at most about two looks late. Time in which nobody could
// look, since the whole node was suspended for instance, counts as one. A function that writes the page can deceive it. Then the
// client's word ends the worker (Executor.Inspect), or the end of the lease.
func (w *Worker) limitCalls(limit time.Duration) {
	pause := min(max(limit/8, shortestLook), longestLook)
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	var seen uint64
	var lasted time.Duration
	last := time.Now()
	for {
		select {
		case <-w.done:
			return
		case <-ticker.C:
		}
		now := time.Now()
		passed := min(now.Sub(last), 2*pause)
		last = now
		call, _, running := w.page.running()
		switch {
		case !running || call != seen:
			seen, lasted = call, 0
		case lasted+passed < limit:
			lasted += passed
		default:
			w.EndCall(limit)
			return
		}
	}
}

// EndCall ends a worker of which a call takes longer than limit: it lets the worker write where it is, then kills it.
func (w *Worker) EndCall(limit time.Duration) {
	w.verdict.CompareAndSwap(nil, &verdict{statusTimeLimit, timeLimitText(limit)})
	control(w.pidfd, func(fd int) error { return unix.PidfdSendSignal(fd, unix.SIGXCPU, nil, 0) })
	select {
	case <-w.done:
	case <-time.After(tracePatience):
	}
	w.kill()
}

// watchStops ends children that are stopped and stay so. They are ours, so the kernel tells us by SIGCHLD: changed. One
// that a debugger holds does not count.
func (z *Zygote) watchStops(changed chan os.Signal) {
	defer z.tasks.Done()
	defer signal.Stop(changed)
	for {
		select {
		case <-z.ctx.Done():
			return
		case <-changed:
		}
		z.mu.Lock()
		p := z.current
		workers := make([]*Worker, 0, len(z.workers))
		for w := range z.workers {
			workers = append(workers, w)
		}
		z.mu.Unlock()
		for _, w := range workers {
			w.noticeStop(z)
		}
		if p != nil {
			p.noticeStop()
		}
	}
}

// isStopped asks the kernel about a child; id is as idType wants it.
func isStopped(idType, id int) bool {
	var si unix.Siginfo
	err := unix.Waitid(idType, id, &si, unix.WSTOPPED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && childOf(&si).pid != 0
}

func (w *Worker) isStopped() (yes bool) {
	control(w.pidfd, func(fd int) error {
		yes = isStopped(unix.P_PIDFD, fd)
		return nil
	})
	return yes
}

func (w *Worker) noticeStop(z *Zygote) {
	if w.parked.Load() || !w.isStopped() || w.stopNoticed.Swap(true) {
		return
	}
	time.AfterFunc(stopPatience, func() {
		w.stopNoticed.Store(false)
		if !w.parked.Load() && w.isStopped() {
			z.cfg.Log.Warn("a worker is stopped; killed", "pid", w.pid)
			w.end(verdict{statusWorkerDied, "was stopped (SIGSTOP) and killed"})
		}
	})
}

func (p *process) noticeStop() {
	stopped := func() bool { return isStopped(unix.P_PID, p.cmd.Process.Pid) }
	if !stopped() || p.stopNoticed.Swap(true) {
		return
	}
	time.AfterFunc(stopPatience, func() {
		p.stopNoticed.Store(false)
		if !p.isDead() && stopped() {
			p.log.Error("the zygote is stopped; killed", "pid", p.cmd.Process.Pid)
			p.cmd.Process.Kill()
		}
	})
}

package zygote

import (
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Exit says how a worker ended.
type Exit struct {
	Signal    int    // signal that killed it, or 0
	Code      int    // exit status, if it was not killed
	Requested bool   // Stop, Kill or Close was called before
	Status    int32  // result of its calls: a dp_status of class connection
	Function  string // function that was running, "" for none
	Reason    string // for people: "SIGSEGV at address 0x8", "exceeded its time limit of 2s", "called exit(3)"
	// Backtrace has a line for each function on the stack, innermost first; "" if it is not available.
	Backtrace string
	// OutputTail is the last TailSize bytes of what the worker printed.
	OutputTail []byte
	Counters   Counters
}

// status is the kernel's report of a process's end.
type status struct {
	signal unix.Signal // 0: it exited
	code   int
}

// verdict is why the executor itself ended a worker.
type verdict struct {
	status int32
	text   string
}

// makeExit combines what the kernel, the worker's page and the pipe of its output report about a dead worker.
func (w *Worker) makeExit(end *wire.Exit) Exit {
	st := status{signal: unix.Signal(end.Signal), code: int(end.Code)}
	x := Exit{
		Signal:     int(st.signal),
		Code:       st.code,
		Requested:  w.stopped.Load() || w.killed.Load(),
		Status:     wire.StatusWorkerDied,
		OutputTail: w.output.bytes(),
		Counters:   w.Counters(),
	}
	d := w.page.death()
	if d.noted {
		x.Backtrace = backtrace(d.text)
	}
	x.Function = w.Running()
	if end.Stopped {
		w.verdict.CompareAndSwap(nil, &verdict{wire.StatusWorkerDied, "was stopped (SIGSTOP) and killed"})
	}
	if v := w.verdict.Load(); v != nil {
		x.Status, x.Reason = v.status, v.text
		return x
	}
	if d.noted && st.signal == unix.SIGALRM { // its handler hung
		x.Signal = int(d.signal)
	}
	x.Reason = w.reason(st, x.Function != "", &d)
	if limit := w.serves.Load().MemoryLimit; limit > 0 && d.outOfMemory(st) {
		x.Status = wire.StatusMemoryLimit
		x.Reason = fmt.Sprintf("exceeded its memory limit of %s (%s)", sizeText(limit), x.Reason)
	}
	if st.signal == unix.SIGKILL && !w.killed.Load() && end.Killed > 0 {
		limit := sizeText(w.serves.Load().MemoryLimit)
		if end.Full {
			x.Status = wire.StatusMemoryLimit
			x.Reason = fmt.Sprintf("exceeded its memory limit of %s (with all its processes and what they share; killed by the kernel)", limit)
		} else {
			x.Reason = "killed by the kernel because the node, or a control group around the executor, had no memory left. It was within its own limit of " + limit
		}
	}
	return x
}

// outOfMemory reports whether the process ended as after a failed allocation: it used a null pointer, or gave up.
func (d *death) outOfMemory(st status) bool {
	const nearNull = 1 << 20
	if !d.noted || d.errno != unix.ENOMEM {
		return false
	}
	switch st.signal {
	case 0:
		return d.signal == 0
	case unix.SIGSEGV:
		return d.signal == st.signal && d.address < nearNull && !d.overflow
	case unix.SIGABRT:
		return d.signal == st.signal
	}
	return false
}

func (w *Worker) reason(st status, inFunction bool, d *death) string {
	note := ""
	switch {
	case st.signal == unix.SIGKILL && w.killed.Load():
		return "killed by the executor"
	case st.signal == unix.SIGKILL:
		return "SIGKILL: out of memory, or killed from outside"
	case d.noted && d.signal != 0 && (st.signal == d.signal || st.signal == unix.SIGALRM):
		return d.signalText()
	case st.signal != 0:
		return signalName(st.signal)
	case st.code == exitStopped && w.stopped.Load():
		return "stopped"
	case inFunction:
		return fmt.Sprintf("called exit(%d)", st.code)
	case st.code == exitFailed:
		note = "it could not start"
	case st.code == exitClientGone:
		note = "the client is gone"
	case st.code == exitProtocol:
		note = "its queues do not make sense: the client broke the protocol, or a function has written over them"
	case st.code == exitFabric:
		note = "the device failed"
	case st.code == exitOrphan:
		note = "it did not find its executor"
	default:
		return fmt.Sprintf("called exit(%d)", st.code)
	}
	return fmt.Sprintf("exit status %d (%s)", st.code, note)
}

// signalText describes a signal. The numbers are those of si_code.
func (d *death) signalText() string {
	name := signalName(d.signal)
	if d.code <= 0 {
		if d.signal == unix.SIGABRT && d.byItself {
			return name + ": abort was called"
		}
		if d.byItself {
			return name + ", raised by itself"
		}
		if d.sender == 0 {
			return name + ", sent from outside"
		}
		return fmt.Sprintf("%s, sent by process %d", name, d.sender)
	}
	switch d.signal {
	case unix.SIGSEGV, unix.SIGBUS, unix.SIGILL, unix.SIGFPE:
	default:
		return name
	}
	const siKernel = 0x80 // the address is unknown
	if d.code == siKernel {
		return name + " at an address that cannot exist"
	}
	text := fmt.Sprintf("%s at address %#x", name, d.address)
	switch {
	case d.overflow:
		text += ": stack overflow"
	case d.signal == unix.SIGFPE && d.code == 1:
		text += ": integer division by zero"
	case d.signal == unix.SIGBUS && d.code == 2:
		text += ": no memory there"
	}
	return text
}

func signalName(s unix.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	return fmt.Sprintf("signal %d", int(s))
}

// backtrace cleans the text that the worker wrote. Functions of the user's library that the dynamic linker could not
// name stay "library+0x1139".
func backtrace(text []byte) string {
	var b strings.Builder
	for line := range strings.SplitSeq(strings.TrimSuffix(string(text), "\n"), "\n") {
		if b.Len() > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(wire.Printable([]byte(line)))
	}
	return b.String()
}

// sizeText returns a number of bytes in the largest unit that divides it.
func sizeText(n uint64) string {
	for shift, unit := range map[int]string{30: "GiB", 20: "MiB", 10: "KiB"} {
		if m := n >> shift; m > 0 && m<<shift == n && m < 1<<10 {
			return fmt.Sprintf("%d %s", m, unit)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

func timeLimitText(d time.Duration) string { return fmt.Sprintf("exceeded its time limit of %v", d) }

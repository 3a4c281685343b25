package zygote

import (
	"encoding/binary"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Commands of a userfaultfd (linux/userfaultfd.h), of which golang.org/x/sys has none.
const (
	uffdRegister   = 0
	uffdUnregister = 1
	uffdWake       = 2
	uffdCopy       = 3
	uffdZero       = 4
	uffdContinue   = 7
	uffdAPI        = 0x3F

	uffdVersion   = 0xAA
	uffdUserOnly  = 1 // the flag of userfaultfd(2)
	uffdDontWake  = 1 << 0
	uffdMissing   = 1 << 0
	uffdModes     = uffdMissing | 1<<2 // faults on pages, whether the file has them or not
	uffdPagefault = 0x12
	uffdMessage   = 32 // bytes of an event
)

// uffdCommand returns the number of an ioctl with a structure of some bytes.
func uffdCommand(nr uintptr, both bool, size uintptr) uintptr {
	read, write, shift := uintptr(2), uintptr(1), 30
	if runtime.GOARCH == "ppc64le" {
		read, write, shift = 2, 4, 29
	}
	direction := read
	if both {
		direction |= write
	}
	return direction<<shift | size<<16 | 0xAA<<8 | nr
}

func uffdControl(f *os.File, command uintptr, arg []uint64) error {
	return wire.Control(f, func(fd int) error {
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), command, uintptr(unsafe.Pointer(&arg[0]))); e != 0 {
			return e
		}
		return nil
	})
}

// registerRange makes the userfaultfd report faults of some modes in a range of addresses.
func registerRange(f *os.File, at, size, modes uint64) error {
	return uffdControl(f, uffdCommand(uffdRegister, true, 32), []uint64{at, size, modes, 0})
}

// unregisterRange ends these reports, and wakes threads that wait for pages of the range.
func unregisterRange(f *os.File, at, size uint64) error {
	return uffdControl(f, uffdCommand(uffdUnregister, false, 16), []uint64{at, size})
}

func wakeRange(f *os.File, at, size uint64) error {
	return uffdControl(f, uffdCommand(uffdWake, false, 16), []uint64{at, size})
}

// continueRange maps pages that the seed's file has into the worker. It returns how many bytes it has mapped. EEXIST: the next page is mapped already.
func continueRange(f *os.File, at, size uint64) (uint64, error) {
	arg := []uint64{at, size, 0, 0}
	err := uffdControl(f, uffdCommand(uffdContinue, true, 32), arg)
	if mapped := int64(arg[3]); mapped > 0 {
		return uint64(mapped), err
	}
	return 0, err
}

// showZeros maps a page of zeros into the worker, and wakes the threads that wait for it. It takes no memory, because the kernel has one page of zeros for all workers.
func showZeros(f *os.File, at uint64) {
	if err := uffdControl(f, uffdCommand(uffdZero, true, 32), []uint64{at, seedPage, 0, 0}); err != nil {
		_ = wakeRange(f, at, seedPage) // fails only if the worker has ended
	}
}

// showPages maps the pages of a range that the seed's file has into a worker, and wakes the threads that wait for them. What cannot be mapped, because
// the worker has changed its mappings, is left out.
func showPages(f *os.File, at, size uint64) {
	const again = 100 // while the worker changes its mappings
	for end, tries := at+size, 0; at < end; {
		n, err := continueRange(f, at, end-at)
		at += n
		switch {
		case err == nil || n > 0:
		case err == unix.EAGAIN && tries < again:
			tries++
		default:
			_, _ = continueRange(f, at, seedPage) // the range may have several mappings
			_ = wakeRange(f, at, seedPage)        // fails only if the worker has ended
			at += seedPage
		}
	}
}

// faults returns the addresses of the faults among events.
func faults(events []byte) (at []uint64) {
	for ; len(events) >= uffdMessage; events = events[uffdMessage:] {
		if events[0] == uffdPagefault {
			at = append(at, binary.LittleEndian.Uint64(events[16:]))
		}
	}
	return at
}

package zygote

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pageFile writes pages to a seed's file. The file is sealed against writing, except through a mapping that the pageFile has. The ioctl UFFDIO_COPY makes a page of the
// file and fills it. A first write to the mapping would also take a fault and clear the page, which takes as long as the copy. If the page exists already, or the kernel
// has no userfaultfd, the bytes are copied to the mapping.
type pageFile struct {
	mem    []byte
	faults *os.File // nil: there is none
}

func mapPages(fd int, size uint64) (*pageFile, error) {
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	f := &pageFile{mem: mem}
	own, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|uffdUserOnly, 0, 0)
	if e != 0 {
		return f, nil
	}
	faults := os.NewFile(own, "userfaultfd")
	if uffdControl(faults, uffdCommand(uffdAPI, true, 24), []uint64{uffdVersion, 0, 0}) != nil || registerRange(faults, f.address(0), size, uffdMissing) != nil {
		faults.Close()
		return f, nil
	}
	f.faults = faults
	return f, nil
}

func (f *pageFile) address(offset uint64) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(f.mem)))) + offset
}

// put writes whole pages.
func (f *pageFile) put(offset uint64, b []byte) error {
	if f.faults == nil {
		copy(f.mem[offset:], b)
		return nil
	}
	defer runtime.KeepAlive(b)
	for len(b) > 0 {
		arg := []uint64{f.address(offset), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), uint64(len(b)), uffdDontWake, 0}
		err := uffdControl(f.faults, uffdCommand(uffdCopy, true, 40), arg)
		n := uint64(max(int64(arg[4]), 0))
		switch {
		case err == nil || n > 0 || err == unix.EAGAIN:
		case err == unix.EEXIST: // a system call of a worker has made a page of zeros
			n = uint64(copy(f.mem[offset:offset+seedPage], b))
		default:
			return os.NewSyscallError("UFFDIO_COPY", err)
		}
		offset, b = offset+n, b[n:]
	}
	return nil
}

func (f *pageFile) close() {
	_ = unix.Munmap(f.mem) // cannot fail for a mapping
	if f.faults != nil {
		f.faults.Close()
	}
}

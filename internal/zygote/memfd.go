package zygote

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// SealedMemfd copies r to its end into an anonymous file with a name (visible in /proc only) and seals it, so that it
// cannot be changed. Workers get code in this form. More than limit bytes is an error. The caller closes the file.
func SealedMemfd(name string, r io.Reader, limit int64) (*os.File, error) {
	fd, err := memfdCreate(name)
	if err != nil {
		return nil, fmt.Errorf("memfd_create %q: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:"+name)
	if err := fillAndSeal(f, r, limit); err != nil {
		f.Close()
		return nil, fmt.Errorf("memfd %q: %w", name, err)
	}
	return f, nil
}

// SealedFile is SealedMemfd for content that fill writes.
func SealedFile(name string, fill func(io.Writer) error) (*os.File, error) {
	fd, err := memfdCreate(name)
	if err != nil {
		return nil, fmt.Errorf("memfd_create %q: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:"+name)
	if err = fill(f); err == nil {
		err = seal(f)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// NamesMemfd returns the names of a library's functions, in index order, in the form in which workers get them. The
// caller closes the file, and may give it to several workers. A *WorkerError says what is wrong with the names.
func NamesMemfd(names []string) (*os.File, error) {
	b, err := namesBlock(names)
	if err != nil {
		return nil, err
	}
	return SealedMemfd("rfaas-names", bytes.NewReader(b), namesMax)
}

func memfdCreate(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	// If vm.memfd_noexec is set, an executable file must be requested explicitly; kernels before 6.3 do not know the flag.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, flags)
	}
	return fd, err
}

func fillAndSeal(f *os.File, r io.Reader, limit int64) error {
	n, err := io.Copy(f, io.LimitReader(r, limit))
	if err != nil {
		return err
	}
	if n == limit {
		if extra, _ := io.ReadFull(r, make([]byte, 1)); extra > 0 {
			return fmt.Errorf("more than %d bytes", limit)
		}
	}
	return seal(f)
}

func seal(f *os.File) error {
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	return wire.Control(f, func(fd int) error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		return err
	})
}

// fixedMemfd returns an anonymous file of n bytes whose size cannot change, so that it cannot use more memory and a mapping of
// it stays valid. It has more seals if they are given. The caller closes it.
func fixedMemfd(name string, n int, seals int) (fd int, err error) {
	fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, os.NewSyscallError("memfd_create", err)
	}
	if err = unix.Ftruncate(fd, int64(n)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("memfd %q of %d bytes: %w", name, n, err)
	}
	return fd, nil
}

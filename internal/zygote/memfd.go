package zygote

import (
	"github.com/rfaas-go/rfaas/internal/spawner/wire"

	"bytes"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// SealedMemfd copies r to its end into an anonymous file of this name (seen in /proc only), which then nobody can
// change any more: the form in which code is given to workers. More than limit bytes is an error. The caller closes
// the file.
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

// NamesMemfd is the form in which the names of a library's functions, in index order, are given to workers. The caller closes it,
// and may give it to as many as it likes. A *WorkerError says what is wrong with the names.
func NamesMemfd(names []string) (*os.File, error) {
	b, err := namesBlock(names)
	if err != nil {
		return nil, err
	}
	return SealedMemfd("rfaas-names", bytes.NewReader(b), namesMax)
}

func memfdCreate(name string) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	// Where vm.memfd_noexec is set an executable one must be asked for; kernels before 6.3 do not know the flag.
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
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	return wire.Control(f, func(fd int) error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		return err
	})
}

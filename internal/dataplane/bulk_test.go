package dataplane

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// memoryFile returns a memory file with holes: data lies at an offset.
func memoryFile(t *testing.T, size, at int64, data []byte) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(data, at); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestFileOfProvider reads a memory file through a bulk connection: ranges that end inside a piece, one beyond 4 GiB, and one beyond the file.
func TestFileOfProvider(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		size, at := int64(5<<30), int64(9<<29)
		if provider == Verbs { // its driver pins all pages
			size, at = 8<<20, 4<<20
		}
		data := make([]byte, 3<<20+17)
		for i := range data {
			data[i] = byte(rand.Uint32())
		}
		f := memoryFile(t, size, at, data)
		a, b := openSide(t, provider).domain(), openSide(t, provider).domain()
		m, err := a.File(f, uint64(size))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Free)
		f.Close()
		mine, err := a.NewBulkConn(m)
		if err != nil {
			t.Fatal(err)
		}
		peers, err := b.NewBulkConn()
		if err != nil {
			t.Fatal(err)
		}
		join(t, mine, peers)
		ref := m.Ref()
		for _, r := range []struct{ from, len int }{{0, len(data)}, {1, 100}, {4095, 128<<10 + 1}, {17, 1 << 20}} {
			got := make([]byte, r.len)
			if err := peers.Read(got, ref.Addr+uint64(at)+uint64(r.from), ref.Key, soon); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, data[r.from:][:min(r.len, len(data)-r.from)]) {
				t.Errorf("%d bytes from %d differ", r.len, r.from)
			}
		}
		if err := peers.Read(make([]byte, 2), ref.Addr+ref.Size-1, ref.Key, soon); err == nil {
			t.Error("read beyond the end of the file")
		}
	})
}

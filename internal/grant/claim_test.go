package grant

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/control"
)

// The executor's message may name any socket, and any process may listen at the name of an executor that has ended.
func TestRegionComesFromItsExecutor(t *testing.T) {
	region, err := claim.New(func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer region.Close()
	other, err := unix.MemfdCreate("not-a-region", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	token, proof := bytes.Repeat([]byte{1}, claim.Secret), bytes.Repeat([]byte{2}, claim.Secret)
	fd := int(region.File().Fd())
	for i, c := range []struct {
		name, socket string
		answer       []byte
		files        []int
		good         bool
	}{
		{"the executor", claim.Sockets, proof, []int{fd}, true},
		{"another process", claim.Sockets, token, []int{fd}, false},
		{"a file of another kind", claim.Sockets, proof, []int{other}, false},
		{"two files", claim.Sockets, proof, []int{fd, other}, false},
		{"no file", claim.Sockets, proof, nil, false},
		{"a socket that is not an executor's", "@rfaas-test-", proof, []int{fd}, false},
	} {
		socket := fmt.Sprintf("%s%d-%d", c.socket, os.Getpid(), i)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			conn, err := l.AcceptUnix()
			if err != nil {
				return
			}
			if c.socket != claim.Sockets {
				t.Errorf("%s: connected to %s", c.name, socket)
			}
			defer conn.Close()
			_, _ = conn.Read(make([]byte, claim.Secret))
			_, _, _ = conn.WriteMsgUnix(c.answer, unix.UnixRights(c.files...), nil)
		}()
		before := memfds(t)
		f, err := openRegion(&control.Claim{Socket: socket, Token: token, Proof: proof})
		if (err == nil) != c.good {
			t.Errorf("%s: %v", c.name, err)
		}
		if f != nil {
			f.Close()
		}
		l.Close()
		<-done
		if now := memfds(t); now != before {
			t.Errorf("%s: %d descriptors of memory files, %d before", c.name, now, before)
		}
	}
}

// memfds returns how many descriptors of memory files this process has.
func memfds(t *testing.T) (n int) {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.HasPrefix(to, "/memfd:") {
			n++
		}
	}
	return n
}

package control

import (
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// Leave makes a listener accept no more connections and returns its descriptor, for a program that takes over this process.
// Connections that arrive from then on wait for that program. The listener must not be closed before it takes over.
func Leave(l net.Listener) (fd int, err error) {
	late, ok := l.(interface{ SetDeadline(time.Time) error })
	conn, sys := l.(syscall.Conn)
	if !ok || !sys {
		return -1, fmt.Errorf("a listener of type %T cannot be handed over", l)
	}
	if err := late.SetDeadline(time.Unix(1, 0)); err != nil {
		return -1, err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	err = raw.Control(func(n uintptr) { fd = int(n) })
	return fd, err
}

// Inherit returns the listener of a descriptor from Leave, which it takes over.
func Inherit(fd int) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), "listener")
	defer f.Close()
	l, err := net.FileListener(f)
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(true) // as for the listener that was handed over
	}
	return l, err
}

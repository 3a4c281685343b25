package wire

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SocketPair makes a seqpacket socket pair. It returns this process's end, and the descriptor of the other end, which
// the caller closes.
func SocketPair() (*net.UnixConn, int, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, os.NewSyscallError("socketpair", err)
	}
	c, err := Conn(fds[0])
	if err != nil {
		unix.Close(fds[1])
		return nil, -1, err
	}
	return c, fds[1], nil
}

// Conn returns a connection for a socket's descriptor, which it takes over.
func Conn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, os.NewSyscallError("socket", unix.ENOTSOCK)
	}
	return u, nil
}

// Rights returns the descriptors that came with a message. The caller closes them.
func Rights(oob []byte) []int {
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

// ErrDescriptors means that there was no room for the descriptors of a message, in this process or below the number
// that the caller accepts.
var ErrDescriptors = errors.New("no room for the descriptors of a message")

// Receive reads one message with at most maxFDs descriptors, which the caller closes. The message aliases buf, which
// must have Max bytes. On error no descriptor is left open. The error is io.EOF when the peer has closed its end. With
// ErrDescriptors the message is valid and its descriptors are lost.
func Receive(c *net.UnixConn, buf []byte, maxFDs int) (Message, []int, error) {
	oob := make([]byte, unix.CmsgSpace(4*max(maxFDs, 1)))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	fds := Rights(oob[:oobn])
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = unix.EMSGSIZE
	}
	var m Message
	if err == nil {
		m, err = Decode(buf[:n])
	}
	if err != nil {
		CloseAll(fds)
		return Message{}, nil, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		CloseAll(fds)
		return m, nil, ErrDescriptors
	}
	return m, fds, nil
}

// Send writes one message with descriptors, which the caller keeps.
func Send(c *net.UnixConn, m *Message, fds ...int) error {
	_, _, err := c.WriteMsgUnix(m.Encode(), rightsOf(fds), nil)
	return err
}

// SendWithin is Send, but waits at most d for room in the socket, and sets the connection's deadline for writes if it has to wait. If there is room,
// the message is sent even if this process does not run for longer than d. A deadline alone does not achieve that: after it, Go does not try to write.
func SendWithin(c *net.UnixConn, d time.Duration, m *Message, fds ...int) error {
	b, rights := m.Encode(), rightsOf(fds)
	err := Control(c, func(fd int) error { return unix.Sendmsg(fd, b, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) })
	if err == unix.EAGAIN {
		c.SetWriteDeadline(time.Now().Add(d))
		_, _, err = c.WriteMsgUnix(b, rights, nil)
	}
	return err
}

func rightsOf(fds []int) []byte {
	if len(fds) == 0 {
		return nil
	}
	return unix.UnixRights(fds...)
}

// CloseAll closes descriptors and skips negative ones.
func CloseAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Control calls fn with f's descriptor. Unlike f.Fd it does not change the blocking mode. The descriptor is valid only
// during the call.
func Control(f syscall.Conn, fn func(fd int) error) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := c.Control(func(fd uintptr) { inner = fn(int(fd)) }); err != nil {
		return err
	}
	return inner
}

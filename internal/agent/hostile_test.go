package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// otherUser is a process of another user.
func otherUser() int {
	conn, err := net.Dial("unix", os.Getenv("RFAAS_TEST_SOCKET"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	n, err := conn.Read(make([]byte, 1))
	fmt.Println(n, err)
	return 0
}

func TestOtherUsersAreRefused(t *testing.T) {
	testkit.Root(t, "can become another user")
	w := newWorld(t, 0)
	// The socket is reachable here, as by a mistake of its owner.
	testkit.OpenUp(t, w.socket, 0o777)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), envRole+"=other-user", "RFAAS_TEST_SOCKET="+w.socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "0 EOF") {
		t.Errorf("the process of another user: %v, %s", err, out)
	}
	if log := w.log.String(); !strings.Contains(log, errForeignUser.Error()) || !strings.Contains(log, "12345") {
		t.Errorf("the log does not name the user:\n%s", log)
	}
	w.connect()
}

// ends fails the test unless the agent ends the connection. It returns the bytes that the agent had sent before.
func ends(t *testing.T, conn *net.UnixConn) []byte {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	b, err := io.ReadAll(conn)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection did not end: %v", err)
	}
	return b
}

func hello(env ...string) func([]byte) []byte {
	h := protocol.Hello{Version: "test", Directory: "/", Environment: env}
	return h.Encode
}

func TestBrokenMessagesEndTheConnection(t *testing.T) {
	w := newWorld(t, 0)
	good := w.connect()
	header := func(size uint32, op protocol.Op) []byte {
		b := protocol.Begin(nil, op, 1, 0)
		copy(b, []byte{byte(size), byte(size >> 8), byte(size >> 16), byte(size >> 24)})
		return b
	}
	page := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK)
	defer page.Close()
	for name, send := range map[string]func(*net.UnixConn) error{
		"garbage":    func(c *net.UnixConn) error { _, err := c.Write([]byte(strings.Repeat("\xff", 100))); return err },
		"text":       func(c *net.UnixConn) error { _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); return err },
		"small size": func(c *net.UnixConn) error { return sendMessage(c, header(15, protocol.OpHello), nil) },
		"large size": func(c *net.UnixConn) error {
			return sendMessage(c, header(protocol.MaxMessage+1, protocol.OpHello), nil)
		},
		"no hello": func(c *net.UnixConn) error {
			s := protocol.Session{Session: 1}
			return sendMessage(c, message(protocol.OpOpen, 1, s.Encode), nil)
		},
		"short hello": func(c *net.UnixConn) error {
			return sendMessage(c, message(protocol.OpHello, 1, func(b []byte) []byte { return append(b, make([]byte, 100)...) }), page)
		},
		"no page": func(c *net.UnixConn) error { return sendMessage(c, message(protocol.OpHello, 1, hello()), nil) },
		"truncated": func(c *net.UnixConn) error {
			b := message(protocol.OpHello, 1, hello())
			err := sendMessage(c, b[:len(b)-10], page)
			c.CloseWrite()
			return err
		},
		"two descriptors": func(c *net.UnixConn) error {
			_, _, err := c.WriteMsgUnix(message(protocol.OpHello, 1, hello()), unix.UnixRights(int(page.Fd()), int(page.Fd())), nil)
			return err
		},
		"unknown operation": func(c *net.UnixConn) error {
			return errors.Join(sendMessage(c, message(protocol.OpHello, 1, hello()), page), sendMessage(c, message(99, 2, nil), nil))
		},
		"trailing bytes": func(c *net.UnixConn) error {
			s := protocol.Session{Session: 1}
			return errors.Join(sendMessage(c, message(protocol.OpHello, 1, hello()), page),
				sendMessage(c, message(protocol.OpOpen, 2, func(b []byte) []byte { return append(s.Encode(b), 0) }), nil))
		},
		"unknown encryption": func(c *net.UnixConn) error {
			s := protocol.Session{Session: 1, DataEncryption: "no word"}
			return errors.Join(sendMessage(c, message(protocol.OpHello, 1, hello()), page), sendMessage(c, message(protocol.OpOpen, 2, s.Encode), nil))
		},
		"no id": func(c *net.UnixConn) error {
			return errors.Join(sendMessage(c, message(protocol.OpHello, 1, hello()), page), sendMessage(c, message(protocol.OpStatus, 0, nil), nil))
		},
		"second hello": func(c *net.UnixConn) error {
			return errors.Join(sendMessage(c, message(protocol.OpHello, 1, hello()), page), sendMessage(c, message(protocol.OpHello, 2, hello()), page))
		},
	} {
		conn := dial(t, w.socket)
		if err := send(conn); err != nil && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("%s: %v", name, err)
		}
		ends(t, conn)
	}
	good.must(protocol.OpStatus, nil, nil)
	eventually(t, "only one client is left", func() bool { return w.agent.count() == 1 })
}

func TestPagesThatAreRefused(t *testing.T) {
	w := newWorld(t, 0)
	file, err := os.CreateTemp(t.TempDir(), "page")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(protocol.PageSize); err != nil {
		t.Fatal(err)
	}
	for name, k := range map[string]struct {
		page *os.File
		want string
	}{
		"not sealed":  {memory(t, protocol.PageSize, 0), "not sealed"},
		"too small":   {memory(t, protocol.PageSize-1, unix.F_SEAL_SHRINK), fmt.Sprint(protocol.PageSize - 1)},
		"a file":      {file, "not a memory file"},
		"a read-only": {memory(t, protocol.PageSize, unix.F_SEAL_SHRINK|unix.F_SEAL_WRITE), "mmap"},
	} {
		conn := dial(t, w.socket)
		if err := sendMessage(conn, message(protocol.OpHello, 1, hello()), k.page); err != nil {
			t.Fatal(err)
		}
		h, body, err := readMessage(conn)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		text, err := protocol.DecodeFailure(h.Op, body)
		if err != nil || h.Status != int32(dataplane.StatusInvalid) || !strings.Contains(text, k.want) {
			t.Errorf("%s: status %d, %q, %v", name, h.Status, text, err)
		}
		ends(t, conn)
		k.page.Close()
	}
}

func TestOtherProtocolVersion(t *testing.T) {
	w := newWorld(t, 0)
	conn := dial(t, w.socket)
	b := message(protocol.OpHello, 7, hello())
	b[protocol.HeaderSize+4] += 5 // the version follows the magic number
	if err := sendMessage(conn, b, nil); err != nil {
		t.Fatal(err)
	}
	h, body, err := readMessage(conn)
	if err != nil {
		t.Fatal(err)
	}
	text, err := protocol.DecodeFailure(h.Op, body)
	if err != nil || h.Status != int32(dataplane.StatusProtocol) || !strings.Contains(text, fmt.Sprintf("protocol %d", protocol.Version+5)) ||
		!strings.Contains(text, fmt.Sprintf("has %d", protocol.Version)) || !strings.Contains(text, "rfaas agent stop") {
		t.Errorf("status %d, %q, %v", h.Status, text, err)
	}
	ends(t, conn)
}

// A thousand connections that say nothing do not keep others out, and end by themselves.
func TestManyConnections(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	var all []*net.UnixConn
	for range 1000 {
		all = append(all, dial(t, w.socket))
	}
	l := opened(t, w, x).mustAcquire(1, 1)
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			conn := all[i]
			page := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK)
			defer page.Close()
			if err := sendMessage(conn, message(protocol.OpHello, 1, hello()), page); err != nil {
				t.Error(err)
			} else if _, _, err := readMessage(conn); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, conn := range all {
		conn.Close()
	}
	eventually(t, "the connections are gone", func() bool { return w.agent.count() == 1 })
}

// A client that sends requests and reads no reply is disconnected, and delays no other client.
func TestClientThatDoesNotRead(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	conn := dial(t, w.socket)
	page := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK)
	defer page.Close()
	if err := sendMessage(conn, message(protocol.OpHello, 1, hello()), page); err != nil {
		t.Fatal(err)
	}
	cut := make(chan error, 1)
	go func() {
		request := protocol.Release{Key: 1}
		b := message(protocol.OpRelease, 2, request.Encode)
		unknown := protocol.WorkerName{Key: 1}
		b = append(b, message(protocol.OpInspect, 3, unknown.Encode)...) // each gets an error of a kilobyte
		for {
			if _, err := conn.Write(b); err != nil {
				cut <- err
				return
			}
		}
	}()
	l := opened(t, w, x).mustAcquire(1, 1)
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	select {
	case err := <-cut:
		t.Logf("cut off: %v", err)
	case <-time.After(30 * time.Second):
		t.Error("not cut off within 30 s")
	}
	eventually(t, "one client is left", func() bool { return w.agent.count() == 1 })
}

func TestTooManySessionsAndLeases(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := w.connect("RFAAS_EXECUTOR=" + x.address)
	for i := range uint64(mostSessions) {
		if err := p.open(i+1, protocol.Session{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.open(mostSessions+1, protocol.Session{}); !isStatus(err, dataplane.StatusBusy) {
		t.Errorf("one session more: %v", err)
	}
	if n := w.agent.pool.Connections(); n.Executors != 1 {
		t.Errorf("%d connections for %d sessions, want one", n.Executors, mostSessions)
	}
	a := protocol.Acquire{Key: 1, Session: 1, First: true, Spec: spec(1), Provider: "shm", WaitNs: int64(time.Hour),
		Offers: newChannels(t, "shm", 1).offers()}
	held := opened(t, w, x).mustAcquire(1, 2) // so that all wait
	var waiting []chan reply
	for i := range uint64(mostOpen) {
		a.Key = i + 1
		waiting = append(waiting, p.begin(protocol.OpAcquire, a.Encode, library(t)))
	}
	a.Key = mostOpen + 1
	if _, err := p.ask(protocol.OpAcquire, a.Encode, library(t)); !isStatus(err, dataplane.StatusBusy) {
		t.Errorf("one request more: %v", err)
	}
	for i := range uint64(mostOpen) {
		r := protocol.Release{Key: i + 1}
		p.must(protocol.OpRelease, r.Encode, nil)
	}
	for _, c := range waiting {
		if _, err := p.end(protocol.OpAcquire, c); !isStatus(err, dataplane.StatusCancelled) {
			t.Errorf("%v, want that it was cancelled", err)
		}
	}
	if err := held.call(1); err != nil {
		t.Error(err)
	}
}

package agent

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// process is one client process, as the agent sees it.
type process struct {
	t    testing.TB
	conn *net.UnixConn
	page *page

	mu      sync.Mutex
	next    uint32
	replies map[uint32]chan reply
	hands   []protocol.Hand // channels that the agent has handed over
	regions [][]byte        // claim regions that the agent has sent
	events  chan protocol.Event
	ended   chan struct{}
	err     error
}

type reply struct {
	protocol.Header
	body []byte
}

// memory makes a memory file.
func memory(t testing.TB, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "page")
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func dial(t testing.TB, socket string) *net.UnixConn {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// connect connects a process that has said hello.
func (w *world) connect(env ...string) *process {
	w.t.Helper()
	return connect(w.t, w.socket, append(env, "RFAAS_SECRET_FILE="+w.secret, "USER=tester")...)
}

func connect(t testing.TB, socket string, env ...string) *process {
	t.Helper()
	p := &process{t: t, conn: dial(t, socket), replies: make(map[uint32]chan reply), events: make(chan protocol.Event, 1000),
		ended: make(chan struct{})}
	f := memory(t, protocol.PageSize, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	defer f.Close()
	var err error
	if p.page, err = mapPage(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	go p.read()
	t.Cleanup(func() {
		p.conn.Close()
		<-p.ended
		p.page.close()
		for _, m := range p.regions {
			_ = unix.Munmap(m)
		}
	})
	// The agent starts no spare leases, which would have cores and descriptors that the tests count.
	p.page.connection().Store(1)
	h := protocol.Hello{Connection: 1, Version: "test", Directory: "/", Environment: append(env, "RFAAS_POOL=0")}
	b := p.must(protocol.OpHello, h.Encode, f)
	welcome, err := protocol.DecodeWelcome(b)
	if err != nil || welcome.Protocol != protocol.Version || welcome.PID == 0 {
		t.Fatalf("welcome %+v: %v", welcome, err)
	}
	return p
}

// readMessage reads one message.
func readMessage(r io.Reader) (protocol.Header, []byte, error) {
	b := make([]byte, protocol.HeaderSize)
	if _, err := io.ReadFull(r, b); err != nil {
		return protocol.Header{}, nil, err
	}
	h, err := protocol.DecodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	body := make([]byte, h.Size-protocol.HeaderSize)
	_, err = io.ReadFull(r, body)
	return h, body, err
}

// passing reads a connection and collects the descriptors that arrive.
type passing struct {
	*net.UnixConn
	fds []int
}

func (r *passing) Read(b []byte) (int, error) {
	oob := make([]byte, 2048)
	n, oobn, _, _, err := r.ReadMsgUnix(b, oob)
	if n == 0 && err == nil {
		err = io.EOF
	}
	messages, _ := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range messages {
		fds, _ := unix.ParseUnixRights(&messages[i])
		r.fds = append(r.fds, fds...)
	}
	return n, err
}

func (p *process) read() {
	defer close(p.ended)
	r := &passing{UnixConn: p.conn}
	for {
		h, body, err := readMessage(r)
		if err == nil && h.Op == protocol.OpRegion {
			p.mu.Lock()
			var m []byte
			m, err = unix.Mmap(r.fds[0], 0, claim.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			p.regions = append(p.regions, m)
			p.mu.Unlock()
		}
		closeAll(r.fds)
		r.fds = nil
		if err != nil {
			p.err = err
			return
		}
		if h.Op == protocol.OpRegion {
			continue
		}
		if h.ID == 0 {
			e, err := protocol.DecodeEvent(body)
			if err != nil {
				p.err = err
				return
			}
			p.events <- e
			continue
		}
		p.mu.Lock()
		if h.Op == protocol.OpHand {
			m, err := protocol.DecodeHand(body)
			if err != nil {
				p.err = err
			}
			p.hands = append(p.hands, m)
			p.mu.Unlock()
			continue
		}
		c := p.replies[h.ID]
		delete(p.replies, h.ID)
		p.mu.Unlock()
		if c == nil {
			p.err = fmt.Errorf("a reply to request %d, which is unknown", h.ID)
			return
		}
		c <- reply{h, body}
	}
}

func message(op protocol.Op, id uint32, body func([]byte) []byte) []byte {
	b := protocol.Begin(nil, op, id, 0)
	if body != nil {
		b = body(b)
	}
	protocol.End(b, 0)
	return b
}

func sendMessage(conn *net.UnixConn, b []byte, f *os.File) error {
	var oob []byte
	if f != nil {
		oob = unix.UnixRights(int(f.Fd()))
	}
	n, _, err := conn.WriteMsgUnix(b, oob, nil)
	if err == nil && n < len(b) {
		_, err = conn.Write(b[n:])
	}
	return err
}

// begin sends a request and returns where its reply comes.
func (p *process) begin(op protocol.Op, body func([]byte) []byte, f *os.File) chan reply {
	p.t.Helper()
	p.mu.Lock()
	p.next++
	id, c := p.next, make(chan reply, 1)
	p.replies[id] = c
	p.mu.Unlock()
	if err := sendMessage(p.conn, message(op, id, body), f); err != nil {
		p.t.Fatalf("%v: %v", op, err)
	}
	return c
}

// failure is a failed reply.
type failure struct {
	status dataplane.Status
	text   string
}

func (f *failure) Error() string       { return fmt.Sprintf("%d: %s", f.status, f.text) }
func (f *failure) Is(class error) bool { return class == f.status.Class() }

func (p *process) end(op protocol.Op, c chan reply) ([]byte, error) {
	select {
	case r := <-c:
		if r.Op != op {
			return nil, fmt.Errorf("a reply to %v, want to %v", r.Op, op)
		}
		if r.Status == 0 {
			return r.body, nil
		}
		text, err := protocol.DecodeFailure(op, r.body)
		if err != nil {
			return nil, err
		}
		return nil, &failure{dataplane.Status(r.Status), text}
	case <-p.ended:
		return nil, fmt.Errorf("%v: the connection ended: %w", op, p.err)
	case <-time.After(40 * time.Second):
		return nil, fmt.Errorf("%v: no reply within 40 s", op)
	}
}

func (p *process) ask(op protocol.Op, body func([]byte) []byte, f *os.File) ([]byte, error) {
	p.t.Helper()
	return p.end(op, p.begin(op, body, f))
}

func (p *process) must(op protocol.Op, body func([]byte) []byte, f *os.File) []byte {
	p.t.Helper()
	b, err := p.ask(op, body, f)
	if err != nil {
		p.t.Fatalf("%v: %v", op, err)
	}
	return b
}

// open opens a session.
func (p *process) open(name uint64, s protocol.Session) error {
	p.t.Helper()
	s.Session = name
	_, err := p.ask(protocol.OpOpen, s.Encode, nil)
	return err
}

// event waits for an event.
func (p *process) event() protocol.Event {
	p.t.Helper()
	select {
	case e := <-p.events:
		return e
	case <-time.After(20 * time.Second):
		p.t.Fatal("no event within 20 s")
		return protocol.Event{}
	}
}

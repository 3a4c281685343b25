package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Bounds of one client.
const (
	mostSessions    = 256
	mostOpen        = 1024             // requests without a reply
	mostHeld        = 16 << 20         // bytes of the requests without a reply
	mostUnread      = 4 << 20          // bytes of replies and events that the client has not read
	helloPatience   = 10 * time.Second // time from connecting to the hello
	releasesAtATime = 32               // concurrent releases after a client has ended
)

// client is one connection.
type client struct {
	a    *Agent
	conn *net.UnixConn
	raw  syscall.RawConn
	pid  int
	log  *slog.Logger

	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	ending sync.Once
	work   sync.WaitGroup // requests, and work that they leave in the background
	open   atomic.Int32   // requests without a reply
	bytes  atomic.Int64   // bytes of these requests

	// Set by the hello, before any other request.
	page *page
	env  *environment
	// number is the number of this connection in the page.
	number uint32

	process syscall.RawConn // pidfd of the client; nil: unknown
	left    bool            // set by end: the process has closed this connection, lives, and keeps its leases

	mu       sync.Mutex
	closed   bool
	sessions map[uint64]*session
	leases   map[uint64]*lease
	regions  map[uint32]bool // claim regions that the client has

	claimsUntil time.Time  // until when a goroutine looks for claims in the page; zero: none is looking
	claiming    sync.Mutex // held while the leases of these claims are added; taken before mu

	head [protocol.HeaderSize]byte // of the goroutine that reads; there is one at a time
	oob  [1056]byte                // room for the descriptors of a message

	out output
}

// request is one message of a client.
type request struct {
	protocol.Header
	body  []byte
	file  *os.File // descriptor that came with it, or nil
	files []int    // the descriptors of HAND, instead of file
	lost  bool     // the message had descriptors, but this process had too few free ones to receive them
	bytes int      // counted in client.bytes
	over  bool     // the client holds too many bytes: the body was discarded

	// Set by admit:
	acquire protocol.Acquire
	adopt   protocol.Adopt
	lease   *lease
	from    *lease // named by acquire.From, or nil
	ctx     context.Context
	err     error
}

// drop frees what a request holds.
func (c *client) drop(r *request) {
	if r.file != nil {
		r.file.Close()
	}
	closeAll(r.files)
	r.files = nil
	c.bytes.Add(-int64(r.bytes))
	r.bytes = 0
}

func newClient(a *Agent, conn *net.UnixConn, pid int) (*client, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &client{a: a, conn: conn, raw: raw, pid: pid, log: a.log.With("client", pid), sessions: make(map[uint64]*session),
		leases: make(map[uint64]*lease)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// watch ends the connection when the process that made it ends, even if another process has inherited the socket.
func (c *client) watch() {
	fd := -1
	_ = c.raw.Control(func(s uintptr) {
		var err error
		if fd, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			fd = -1
		}
	})
	if fd < 0 && c.pid > 0 {
		var err error
		if fd, err = unix.PidfdOpen(c.pid, 0); err != nil {
			return // the process has ended, which the socket shows, or this kernel has no pidfds
		}
	}
	if fd < 0 || unix.SetNonblock(fd, true) != nil {
		return
	}
	f := os.NewFile(uintptr(fd), "client")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return
	}
	c.process = raw
	context.AfterFunc(c.ctx, func() { f.Close() })
	go func() {
		if err := raw.Read(processEnded); err == nil {
			c.end(errors.New("the process has ended"))
		}
	}()
}

// processEnded reports whether the process of a pidfd has ended.
func processEnded(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(p, 0)
	return n > 0
}

// hasLeft reports whether the client has closed this connection but lives, and keeps its leases for its next connection. A library does that when the
// agent has taken no message for a while.
func (c *client) hasLeft(why error) bool {
	closed := errors.Is(why, io.EOF) || errors.Is(why, io.ErrUnexpectedEOF) || errors.Is(why, syscall.ECONNRESET)
	if !closed || c.page == nil || c.process == nil || c.page.connection().Load() == c.number {
		return false
	}
	lives := false
	_ = c.process.Control(func(fd uintptr) { lives = !processEnded(fd) })
	return lives
}

// read reads one message. The header is read alone, because descriptors come with the first byte.
func (c *client) read(r *request) error {
	head, oob := &c.head, c.oob[:]
	for n := 0; n < len(head); {
		got, oobn, flags, _, err := c.conn.ReadMsgUnix(head[n:], oob)
		if oobn > 0 {
			if err := r.take(oob[:oobn], n == 0); err != nil {
				return err
			}
		}
		if n == 0 && flags&unix.MSG_CTRUNC != 0 { // the buffer has room for as many descriptors as the kernel passes at once
			r.lost = true
		}
		if err != nil {
			return err
		}
		if got == 0 {
			if n > 0 {
				return io.ErrUnexpectedEOF
			}
			return io.EOF
		}
		n += got
	}
	var err error
	if r.Header, err = protocol.DecodeHeader(head[:]); err != nil {
		return err
	}
	if err := r.sort(); err != nil {
		return err
	}
	// The body is allocated while it arrives, so that a header alone does not cause an allocation of a megabyte.
	want := r.Size - protocol.HeaderSize
	if !c.hold(r) {
		r.over = true
		if _, err := io.CopyN(io.Discard, c.conn, int64(want)); err != nil {
			return fmt.Errorf("read a request that is refused: %w", err)
		}
		return nil
	}
	r.body = make([]byte, 0, min(want, 64<<10))
	for len(r.body) < want {
		if len(r.body) == cap(r.body) {
			r.body = append(make([]byte, 0, min(2*cap(r.body), want)), r.body...)
		}
		n, err := c.conn.Read(r.body[len(r.body):cap(r.body)])
		if n == 0 && (err == nil || errors.Is(err, io.EOF)) {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		r.body = r.body[:len(r.body)+n]
	}
	return nil
}

// smallRequest bounds requests that free memory of other requests, in bytes. Such requests are never refused.
const smallRequest = 1024

// hold adds a request to client.bytes. It returns false if the client would then hold too many bytes.
func (c *client) hold(r *request) bool {
	small := (r.ID == 0 || r.Op == protocol.OpRelease) && r.Size <= smallRequest || r.Op == protocol.OpClaimed
	if c.bytes.Add(int64(r.Size)) > mostHeld && !small {
		c.bytes.Add(-int64(r.Size))
		return false
	}
	r.bytes = r.Size
	return true
}

// take takes the descriptors of a message. It returns an error if they did not arrive with the first byte of the message.
func (r *request) take(oob []byte, allowed bool) error {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("control message: %w", err)
	}
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err == nil {
			r.files = append(r.files, got...) // drop closes them
		}
	}
	if !allowed {
		return errors.New("descriptors that did not come with the first byte of a message")
	}
	return nil
}

// sort checks the number of descriptors, once the operation is known.
func (r *request) sort() error {
	switch n := len(r.files); {
	case r.Op == protocol.OpHand, n == 0:
	case r.lost:
		closeAll(r.files)
		r.files = nil
	case n > 1:
		return fmt.Errorf("%d descriptors, want at most one, with the first byte of a message", n)
	default:
		r.file = os.NewFile(uintptr(r.files[0]), "descriptor of a client")
		r.files = nil
	}
	return nil
}

// serve reads requests until the connection ends. The goroutine that has read a request starts another goroutine that
// continues to read, and answers the request itself. So the answer does not wait until a goroutine is scheduled.
func (c *client) serve() {
	defer c.work.Done()
	for {
		var r request
		if err := c.read(&r); err != nil {
			c.drop(&r)
			c.end(err)
			return
		}
		if c.page == nil {
			if err := c.begin(&r); err != nil {
				c.end(err)
				return
			}
			continue
		}
		if r.ID == 0 != (r.Op == protocol.OpFinish || r.Op == protocol.OpSilent || r.Op == protocol.OpHand || r.Op == protocol.OpClaimed) {
			c.drop(&r)
			c.end(fmt.Errorf("a request with id %d for %v", r.ID, r.Op))
			return
		}
		if r.Op == protocol.OpHand {
			c.hand(&r) // not concurrently, because a release follows
			c.drop(&r)
			continue
		}
		if r.Op == protocol.OpClaimed && !r.over {
			if c.followClaimed(&r) { // not concurrently, because a release may follow
				c.drop(&r)
				continue
			}
			c.open.Add(1)
			c.work.Add(1)
			go c.serve()
			c.answer(&r)
			return
		}
		if r.over && r.ID == 0 {
			c.drop(&r)
			c.end(fmt.Errorf("%v of %d bytes, want at most %d", r.Op, r.Size, smallRequest))
			return
		}
		if why := c.unfit(&r); why != nil {
			c.drop(&r)
			c.reply(&r, nil, why)
			continue
		}
		if c.open.Add(1) > mostOpen && r.Op != protocol.OpRelease && r.ID != 0 {
			c.open.Add(-1)
			c.drop(&r)
			c.reply(&r, nil, failed("agent", dataplane.StatusBusy, "%d requests are open, the most for a process", mostOpen))
			continue
		}
		if r.ID == 0 || r.Op == protocol.OpRelease && c.open.Load() > mostOpen {
			c.answer(&r)
			continue
		}
		c.admit(&r)
		c.work.Add(1)
		go c.serve()
		c.answer(&r)
		return
	}
}

// unfit returns why a request cannot be served, nil if it can.
func (c *client) unfit(r *request) error {
	switch {
	case r.lost:
		return c.a.noFiles()
	case r.over:
		return failed("agent", dataplane.StatusBusy, "requests of %d bytes wait for a reply, and this one has %d bytes: a process may have %d, try again after a reply", c.bytes.Load(),
			r.Size, mostHeld)
	}
	return nil
}

// begin handles messages before the hello is answered.
func (c *client) begin(r *request) error {
	defer c.drop(r)
	switch r.Op {
	case protocol.OpHello:
		return c.hello(r)
	case protocol.OpStatus, protocol.OpStop:
		c.open.Add(1)
		c.answer(r)
		return nil
	}
	return fmt.Errorf("%v comes before hello", r.Op)
}

func (c *client) hello(r *request) error {
	g, err := protocol.DecodeGreeting(r.body)
	if err != nil {
		return err
	}
	if g.Magic != protocol.Magic {
		return fmt.Errorf("a hello begins with %#x, want %#x", g.Magic, uint32(protocol.Magic))
	}
	if g.Protocol != protocol.Version {
		err := failed("agent", dataplane.StatusProtocol, "the library has agent protocol %d, the agent (pid %d, version %s) has %d: "+
			"stop the agent with `rfaas agent stop`, or use the library of the same version", g.Protocol, os.Getpid(), c.a.cfg.Version, protocol.Version)
		c.reply(r, nil, err)
		return err
	}
	h, err := protocol.DecodeHello(r.body)
	if err != nil {
		return err
	}
	if r.lost {
		err := c.a.noFiles()
		c.reply(r, nil, err)
		return err
	}
	if r.file == nil {
		return errors.New("hello without a shared page")
	}
	p, err := mapPage(int(r.file.Fd()))
	if err != nil {
		c.reply(r, nil, failed("agent", dataplane.StatusInvalid, "%v", err))
		return err
	}
	c.env = newEnvironment(&h)
	c.mu.Lock()
	c.page, c.number = p, h.Connection
	c.mu.Unlock()
	c.out.mu.Lock()
	c.out.page = p
	c.out.mu.Unlock()
	_ = c.conn.SetReadDeadline(time.Time{})
	w := protocol.Welcome{Protocol: protocol.Version, PID: os.Getpid(), Version: c.a.cfg.Version}
	c.reply(r, w.Encode, nil)
	c.log.Debug("client", "library", h.Version)
	return nil
}

// answer runs a request and replies.
func (c *client) answer(r *request) {
	defer c.open.Add(-1)
	defer c.drop(r)
	c.a.served.Add(1)
	after, body, err := c.run(r)
	var broken *protocol.Error
	if errors.As(err, &broken) {
		c.end(err)
		return
	}
	sent := r.ID == 0 || c.reply(r, body, err)
	if after != nil {
		after(sent)
	}
}

// run executes a request. If after is not nil, the caller calls it when it has sent the reply, or has failed to send it.
func (c *client) run(r *request) (after func(sent bool), reply body, err error) {
	switch r.Op {
	case protocol.OpAcquire:
		return c.acquire(r)
	case protocol.OpAdopt:
		return c.adopt(r)
	case protocol.OpClaimed:
		if after, _, err = c.adopt(r); err != nil {
			c.loseClaimed(r.adopt.Key, err)
		}
		return after, nil, nil
	case protocol.OpStop:
		return func(bool) { c.a.stop() }, nil, nil
	case protocol.OpStatus:
		reply, err = c.status(r)
	case protocol.OpOpen:
		reply, err = c.openSession(r)
	case protocol.OpClose:
		err = c.closeSession(r)
	case protocol.OpTable:
		err = c.publish(r)
	case protocol.OpTableSeed:
		err = c.publishSeed(r)
	case protocol.OpTableDrop:
		err = c.dropTable(r)
	case protocol.OpSeedCreate:
		reply, err = c.createSeed(r)
	case protocol.OpSeedFind, protocol.OpSeedKeep, protocol.OpSeedRelease:
		reply, err = c.seed(r)
	case protocol.OpReplace:
		reply, err = c.replace(r)
	case protocol.OpRelease:
		reply, err = c.release(r)
	case protocol.OpAttach:
		reply, err = c.attach(r)
	case protocol.OpInspect:
		reply, err = c.inspect(r)
	case protocol.OpRenew:
		reply, err = c.renew(r)
	case protocol.OpFinish:
		err = c.finish(r)
	case protocol.OpSpread:
		reply, err = c.spread(r)
	case protocol.OpChanges:
		reply, err = c.changes(r)
	case protocol.OpSilent:
		err = c.silent(r)
	case protocol.OpHello:
		err = &protocol.Error{Op: r.Op, Text: "a second one on the connection"}
	default:
		err = &protocol.Error{Op: r.Op, Text: "unknown operation"}
	}
	return nil, reply, err
}

// reply sends a reply or a failure. It returns false if the reply does not fit into a message.
func (c *client) reply(r *request, body func([]byte) []byte, err error) bool {
	if err == nil {
		b := protocol.Begin(make([]byte, 0, 512), r.Op, r.ID, 0)
		if body != nil {
			b = body(b)
		}
		if protocol.End(b, 0) {
			c.send(b, nil, false)
			return true
		}
		err = failed(r.Op.String(), dataplane.StatusTooLarge, "the reply has %d bytes, want at most %d", len(b), protocol.MaxMessage)
	}
	st := dataplane.StatusFatal
	var typed *dataplane.Error
	if errors.As(err, &typed) {
		st = typed.Status
	}
	c.send(protocol.Failure(r.Op, r.ID, int32(st), err.Error()), nil, false)
	return false
}

// event sends an event.
func (c *client) event(e *protocol.Event) {
	b := e.Encode(protocol.Begin(make([]byte, 0, 1024), protocol.OpEvent, 0, 0))
	protocol.End(b, 0)
	c.send(b, nil, true)
}

// end ends the connection. The client's leases are released in the background, unless the agent stops, or the client keeps them.
func (c *client) end(why error) {
	c.ending.Do(func() {
		c.left = c.hasLeft(why)
		c.cancel()
		c.conn.Close()
		if !errors.Is(why, io.EOF) && !errors.Is(why, net.ErrClosed) {
			c.log.Warn("connection ended", "error", why)
		}
		go c.cleanUp()
	})
}

// cleanUp releases the client's leases and sessions. Only the end of the agent waits for it.
func (c *client) cleanUp() {
	if c.page != nil {
		c.findClaims() // so that their leases are released
	}
	c.mu.Lock()
	c.closed = true // no lease and no session can be added from now on
	leases, sessions := c.leases, c.sessions
	c.leases, c.sessions = nil, nil
	c.mu.Unlock()
	stopping := c.a.isStopping()
	var wg sync.WaitGroup
	turns := make(chan struct{}, releasesAtATime)
	for _, l := range leases {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			l.abandon(stopping || c.left)
		})
	}
	wg.Wait()
	for _, s := range sessions {
		if s != nil {
			s.tables.close()
			s.seeds.close()
		}
		if s != nil && !stopping {
			wg.Go(func() {
				if c.left {
					s.control.Leave()
				} else {
					s.control.Close()
				}
			})
		}
	}
	wg.Wait()
	c.work.Wait()
	c.out.close()
	if c.page != nil {
		c.page.close()
	}
	c.a.gone(c)
}

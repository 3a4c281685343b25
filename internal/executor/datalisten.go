package executor

import (
	"container/list"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// dataListener accepts the connections of clients to workers on provider tcp. A connection begins with a hello of fixed size that contains
// the token of a worker's queue pair. The listener finds the worker that waits for this token, hands it the connection and the hello, and
// forgets the token. It does not interpret the rest of the hello. Safe for concurrent use.
type dataListener struct {
	Address string // IP address and port that clients connect to
	l       net.Listener
	log     *slog.Logger
	refused atomic.Uint64 // connections without a valid token

	serving, greeting sync.WaitGroup

	mu      sync.Mutex
	waiting map[dataplane.Token]Worker
	strange list.List // connections without a whole hello (net.Conn), the oldest first
}

// openDataListener binds an address. address is host:port, or host:first-last for the first free port of a range. advertise is the IP
// address or host name that clients connect to; empty: the IP address of address.
func openDataListener(address, advertise string, log *slog.Logger) (*dataListener, error) {
	l, err := listenRange(address)
	if err != nil {
		return nil, fmt.Errorf("data-listen: %w", err)
	}
	d := &dataListener{l: l, log: log, waiting: make(map[dataplane.Token]Worker)}
	if d.Address, err = dataAddress(advertise, l.Addr().(*net.TCPAddr)); err != nil {
		l.Close()
		return nil, err
	}
	return d, nil
}

// listenRange binds the first free port of host:first-last.
func listenRange(address string) (net.Listener, error) {
	host, first, last, err := control.ParsePortRange(address)
	if err != nil {
		return nil, err
	}
	for port := first; ; port++ {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil || port >= last || !errors.Is(err, syscall.EADDRINUSE) {
			return l, err
		}
	}
}

// dataAddress returns the address that clients connect to. It is numeric, because workers do not resolve names.
func dataAddress(advertise string, bound *net.TCPAddr) (string, error) {
	ip := bound.AddrPort().Addr().Unmap()
	if advertise != "" {
		found, err := net.ResolveIPAddr("ip", advertise)
		if err != nil {
			return "", fmt.Errorf("data-advertise: %q: %w", advertise, err)
		}
		ip, _ = netip.AddrFromSlice(found.IP)
		ip = ip.Unmap()
	}
	if !ip.IsValid() || ip.IsUnspecified() {
		return "", fmt.Errorf("data-advertise: clients cannot connect to %v: set data-advertise to this node's address or name", ip)
	}
	return netip.AddrPortFrom(ip, uint16(bound.Port)).String(), nil
}

// expect lets one connection with the worker's token reach the worker. Call it before the client gets the worker's blob.
func (d *dataListener) expect(w Worker) error {
	token, ok := dataplane.ChannelToken(w.Blob())
	if !ok {
		return errors.New("the worker's blob is not of provider tcp")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for t, other := range d.waiting {
		select {
		case <-other.Done(): // the worker ended before its client connected
			delete(d.waiting, t)
		default:
		}
	}
	if d.waiting[token] != nil {
		return errors.New("another worker has the same token")
	}
	d.waiting[token] = w
	return nil
}

// take removes and returns the worker that waits for a token, or nil.
func (d *dataListener) take(token dataplane.Token) Worker {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiting[token]
	delete(d.waiting, token)
	return w
}

// serve starts to accept connections, until close. It does not block.
func (d *dataListener) serve() { d.serving.Go(d.accept) }

func (d *dataListener) accept() {
	var pause time.Duration
	for {
		c, err := d.l.Accept()
		switch {
		case err == nil:
			pause = 0
			at := d.add(c)
			d.greeting.Go(func() { d.greet(c, at) })
		case errors.Is(err, net.ErrClosed):
			return
		case d.dropOldest():
		default: // no descriptor is left, and there is no connection to drop
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			d.log.Warn("cannot accept a data connection", "error", err, "pause", pause)
			time.Sleep(pause)
		}
	}
}

// add lists a connection whose hello has not been read. Beyond dataplane.MaxStrangers, it closes the oldest one.
func (d *dataListener) add(c net.Conn) *list.Element {
	d.mu.Lock()
	at := d.strange.PushBack(c)
	full := d.strange.Len() > dataplane.MaxStrangers
	d.mu.Unlock()
	if full {
		d.dropOldest()
	}
	return at
}

// dropOldest closes the oldest connection without a hello. It returns false if there is none.
func (d *dataListener) dropOldest() bool {
	d.mu.Lock()
	first := d.strange.Front()
	if first != nil {
		d.strange.Remove(first)
		first.Value.(net.Conn).Close()
		first.Value = nil // so that greet hands nothing over
	}
	d.mu.Unlock()
	return first != nil
}

// greet reads the hello of a connection, and hands the connection and the hello to the worker that waits for the token.
func (d *dataListener) greet(c net.Conn, at *list.Element) {
	defer c.Close() // Connect has given the worker its own descriptor
	hello := make([]byte, dataplane.HelloSize)
	_ = c.SetDeadline(time.Now().Add(dataplane.HelloTime))
	_, err := io.ReadFull(c, hello)
	d.mu.Lock()
	dropped := d.strange.Remove(at) == nil
	d.mu.Unlock()
	if err == nil && dropped {
		err = net.ErrClosed
	}
	if err != nil {
		d.refuse(c, "no hello", err)
		return
	}
	token, ok := dataplane.HelloToken(hello)
	var w Worker
	if ok {
		w = d.take(token)
	}
	if w == nil {
		d.refuse(c, "no worker waits for this token", nil)
		return
	}
	conn := c.(*net.TCPConn)
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { dataplane.PrepareTCP(int(fd)) })
	}
	if err == nil {
		err = w.Connect(conn, hello)
	}
	if err != nil {
		d.mu.Lock()
		d.waiting[token] = w // the client may connect again
		d.mu.Unlock()
		d.log.Info("cannot hand a data connection to its worker", "pid", w.PID(), "peer", c.RemoteAddr().String(), "error", err)
	}
}

func (d *dataListener) refuse(c net.Conn, why string, err error) {
	d.refused.Add(1)
	d.log.Debug("refused a data connection", "peer", c.RemoteAddr().String(), "reason", why, "error", err)
}

// close ends serve and closes connections without a hello. Connections that were handed to workers stay open.
func (d *dataListener) close() {
	d.l.Close()
	d.serving.Wait()
	for d.dropOldest() {
	}
	d.greeting.Wait()
}

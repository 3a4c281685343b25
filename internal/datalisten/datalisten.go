package datalisten

import (
	"container/list"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Receiver waits for one data connection.
type Receiver interface {
	// Connect takes over a connection and the hello that began it. It must not keep conn. It may keep a duplicate of the descriptor.
	Connect(conn *net.TCPConn, hello []byte) error
	// Done is closed when the receiver no longer waits.
	Done() <-chan struct{}
}

// Listener accepts data connections. A connection begins with a hello of fixed size that contains the token of a queue pair. The
// listener finds the receiver that waits for this token, hands it the connection and the hello, and forgets the token. It does not
// interpret the rest of the hello. Safe for concurrent use.
type Listener struct {
	Address string // IP address and port that peers connect to
	l       net.Listener
	log     *slog.Logger
	refused atomic.Uint64 // connections without a valid token
	leaving atomic.Bool

	serving, greeting sync.WaitGroup

	mu      sync.Mutex
	waiting map[dataplane.Token]waiter
	pending list.List // connections without a whole hello (net.Conn), the oldest first
}

type waiter struct {
	name string
	to   Receiver
}

// Open binds an address. address is host:port, or host:first-last for the first free port of a range. advertise is the IP address or
// host name that peers connect to; empty: the IP address of address. The caller calls Close.
func Open(address, advertise string, log *slog.Logger) (*Listener, error) {
	l, err := listenRange(address)
	if err != nil {
		return nil, fmt.Errorf("data-listen: %w", err)
	}
	d := &Listener{l: l, log: log, waiting: make(map[dataplane.Token]waiter)}
	at, err := dataAddress(advertise, l.Addr().(*net.TCPAddr))
	if err != nil {
		l.Close()
		return nil, err
	}
	d.Address = at.String()
	if why := doubtful(at.Addr(), l.Addr().(*net.TCPAddr), control.ListOwnAddresses()); advertise != "" && why != "" {
		log.Warn("peers may be unable to connect to the address of data-advertise", "data-advertise", advertise, "address", d.Address, "reason", why)
	}
	return d, nil
}

// Inherit is Open for a descriptor and the address from Leave. It takes over the descriptor.
func Inherit(fd int, address string, log *slog.Logger) (*Listener, error) {
	l, err := control.Inherit(fd)
	if err != nil {
		return nil, fmt.Errorf("data-listen: %w", err)
	}
	return &Listener{Address: address, l: l, log: log, waiting: make(map[dataplane.Token]waiter)}, nil
}

// leaveTime is how long Leave waits for peers that have connected and have not sent their hello. They send it at once.
const leaveTime = 200 * time.Millisecond

// Leave accepts no more connections and returns the listener's descriptor, for a program that takes over this process.
// Connections that arrive from then on wait for that program. Peers that have sent a hello are handed to their receivers before
// Leave returns. The others are closed. A second Leave returns the descriptor again.
func (d *Listener) Leave() (fd int, err error) {
	d.leaving.Store(true)
	if fd, err = control.Leave(d.l); err != nil {
		return -1, err
	}
	d.serving.Wait()
	late := time.AfterFunc(leaveTime, func() {
		for d.dropOldest() {
		}
	})
	defer late.Stop()
	d.greeting.Wait()
	return fd, nil
}

// Expected reports whether no connection with the token has arrived yet.
func (d *Listener) Expected(token dataplane.Token) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.waiting[token].to != nil
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

// dataAddress returns the address that peers connect to. It is numeric, because workers do not resolve names.
func dataAddress(advertise string, bound *net.TCPAddr) (netip.AddrPort, error) {
	ip := bound.AddrPort().Addr().Unmap()
	if advertise != "" {
		found, err := net.ResolveIPAddr("ip", advertise)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("data-advertise: %q: %w", advertise, err)
		}
		ip, _ = netip.AddrFromSlice(found.IP)
		ip = ip.Unmap()
	}
	if !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return netip.AddrPort{}, fmt.Errorf("data-advertise: %q: peers cannot connect to %v: set data-advertise to this node's address or name", advertise, ip)
	}
	if at := bound.AddrPort().Addr().Unmap(); ip.IsLoopback() && !at.IsLoopback() {
		return netip.AddrPort{}, fmt.Errorf("data-advertise: %q is the loopback address %v, which peers on other nodes refuse, and data-listen is bound to %v: "+
			"set data-advertise to an address of this node's network, or data-listen to a loopback address", advertise, ip, at)
	}
	return netip.AddrPortFrom(ip, uint16(bound.Port)), nil
}

// doubtful returns why peers may be unable to connect to an advertised address, or "". It is no error, because the address may be one that
// another machine forwards.
func doubtful(ip netip.Addr, bound *net.TCPAddr, own control.OwnAddresses) string {
	at := bound.AddrPort().Addr().Unmap()
	switch {
	case ip.IsLoopback():
		return ""
	case own.Err == nil && !slices.Contains(own.All, ip):
		return "no interface of this node has it"
	case !at.IsUnspecified() && at != ip:
		return fmt.Sprintf("data-listen is bound to %v", at)
	}
	return ""
}

// Refused returns the number of connections without a valid token.
func (d *Listener) Refused() uint64 { return d.refused.Load() }

// Expect lets one connection with the token reach a receiver, which name describes in the log. Call it before the peer gets the token.
func (d *Listener) Expect(token dataplane.Token, name string, to Receiver) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for t, other := range d.waiting {
		select {
		case <-other.to.Done(): // the receiver ended before its peer connected
			delete(d.waiting, t)
		default:
		}
	}
	if d.waiting[token].to != nil {
		return errors.New("another receiver has the same token")
	}
	d.waiting[token] = waiter{name, to}
	return nil
}

// take removes and returns the receiver that waits for a token, or none.
func (d *Listener) take(token dataplane.Token) waiter {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiting[token]
	delete(d.waiting, token)
	return w
}

// Serve starts to accept connections, until Close. It does not block.
func (d *Listener) Serve() { d.serving.Go(d.accept) }

func (d *Listener) accept() {
	var pause time.Duration
	for {
		c, err := d.l.Accept()
		switch {
		case err == nil:
			pause = 0
			at := d.add(c)
			d.greeting.Go(func() { d.greet(c, at) })
			runtime.Gosched() // it reads a hello that has arrived, before later connections push this one out
		case errors.Is(err, net.ErrClosed), d.leaving.Load():
			return
		case d.dropOldest():
		default: // no descriptor is left, and there is no connection to drop
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			d.log.Warn("cannot accept a data connection", "error", err, "pause", pause)
			time.Sleep(pause)
		}
	}
}

// add lists a connection whose hello has not been read. Beyond dataplane.MaxPending, it closes the oldest one.
func (d *Listener) add(c net.Conn) *list.Element {
	d.mu.Lock()
	at := d.pending.PushBack(c)
	full := d.pending.Len() > dataplane.MaxPending
	d.mu.Unlock()
	if full {
		d.dropOldest()
	}
	return at
}

// dropOldest closes the oldest connection without a hello. It returns false if there is none.
func (d *Listener) dropOldest() bool {
	d.mu.Lock()
	first := d.pending.Front()
	if first != nil {
		d.pending.Remove(first)
		first.Value.(net.Conn).Close()
		first.Value = nil // so that greet hands nothing over
	}
	d.mu.Unlock()
	return first != nil
}

// greet reads the hello of a connection, and hands the connection and the hello to the receiver that waits for the token.
func (d *Listener) greet(c net.Conn, at *list.Element) {
	defer c.Close() // the receiver has its own descriptor
	hello := make([]byte, dataplane.HelloSize)
	_ = c.SetDeadline(time.Now().Add(dataplane.HelloTime))
	_, err := io.ReadFull(c, hello)
	d.mu.Lock()
	dropped := d.pending.Remove(at) == nil
	d.mu.Unlock()
	if err == nil && dropped {
		err = net.ErrClosed
	}
	if err != nil {
		d.refuse(c, "no hello", err)
		return
	}
	token, ok := dataplane.HelloToken(hello)
	var w waiter
	if ok {
		w = d.take(token)
	}
	if w.to == nil {
		d.refuse(c, "nothing waits for this token", nil)
		return
	}
	conn := c.(*net.TCPConn)
	raw, err := conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { dataplane.PrepareTCP(int(fd)) })
	}
	if err == nil {
		err = w.to.Connect(conn, hello)
	}
	if err != nil {
		d.mu.Lock()
		d.waiting[token] = w // the peer may connect again
		d.mu.Unlock()
		d.log.Info("cannot hand over a data connection", "to", w.name, "peer", c.RemoteAddr().String(), "error", err)
	}
}

func (d *Listener) refuse(c net.Conn, why string, err error) {
	d.refused.Add(1)
	d.log.Debug("refused a data connection", "peer", c.RemoteAddr().String(), "reason", why, "error", err)
}

// Close ends Serve and closes connections without a hello. Connections that were handed over stay open.
func (d *Listener) Close() {
	d.l.Close()
	d.serving.Wait()
	for d.dropOldest() {
	}
	d.greeting.Wait()
}

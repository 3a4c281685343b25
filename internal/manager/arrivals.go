package manager

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/rfaas-go/rfaas/internal/datalisten"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// arrivals are the connections to the manager's memory on provider tcp. A peer connects after the reply to its call, because the reply
// has the token. So the manager's side of the connection is completed later, when the listener hands over the peer's hello. A server then
// executes the peer's operations. Safe for concurrent use.
type arrivals struct {
	device *dataplane.Device
	data   *datalisten.Listener
	server *dataplane.Server

	mu      sync.Mutex
	pending map[*arrival]struct{}
	closed  bool
}

// openArrivals listens at an address; see datalisten.Open. encrypt is a dataplane.Encrypt value.
func openArrivals(listen, advertise string, encrypt int, log *slog.Logger) (*arrivals, error) {
	data, err := datalisten.Open(listen, advertise, log)
	if err != nil {
		return nil, err
	}
	a := &arrivals{data: data, pending: map[*arrival]struct{}{}}
	if err = datalisten.CheckEncryption(encrypt, data.Address, dataplane.LoadCrypto, log); err == nil {
		a.device, err = dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, Handed: true, Advertise: data.Address, Encrypt: encrypt})
	}
	if err == nil {
		if a.server, err = dataplane.NewServer(); err != nil {
			a.device.Close()
		}
	}
	if err != nil {
		data.Close()
		return nil, err
	}
	data.Serve()
	return a, nil
}

// stop accepts no more connections and gives up the expected ones.
func (a *arrivals) stop() {
	if a == nil {
		return
	}
	a.data.Close()
	a.mu.Lock()
	a.closed = true
	pending := a.pending
	a.pending = map[*arrival]struct{}{}
	a.mu.Unlock()
	for x := range pending {
		x.expire()
	}
}

// close ends the server. Call stop first, and close the connections. The caller closes the device.
func (a *arrivals) close() {
	if a != nil {
		a.server.Close()
	}
}

// expect completes a connection when its peer connects. mine and peers are the blobs of the two sides; name describes the peer in the log.
// connected is called when the connection is complete. lost is called if it is not complete within attachWithin, or cannot be completed.
// Either may be nil.
func (a *arrivals) expect(conn *dataplane.Conn, mine, peers []byte, name string, connected, lost func()) error {
	x := &arrival{a: a, conn: conn, peers: peers, done: make(chan struct{}), connected: connected, lost: lost}
	token, ok := dataplane.BlobToken(mine)
	if _, valid := dataplane.BlobToken(peers); !ok || !valid {
		return &dataplane.Error{Op: "connect", Status: dataplane.StatusBadBlob, Detail: "not a queue-pair blob of provider tcp"}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return &dataplane.Error{Op: "connect", Status: dataplane.StatusConnection, Detail: "the resource manager is shutting down"}
	}
	if err := a.data.Expect(token, name, x); err != nil {
		return err
	}
	a.pending[x] = struct{}{}
	x.timer = time.AfterFunc(attachWithin, x.expire)
	return nil
}

// arrival is an expected connection.
type arrival struct {
	a               *arrivals
	conn            *dataplane.Conn
	peers           []byte
	connected, lost func()
	timer           *time.Timer

	once sync.Once
	done chan struct{}
}

// Done implements datalisten.Receiver.
func (x *arrival) Done() <-chan struct{} { return x.done }

// settle ends the wait for the peer. It returns true for the first caller only, which decides the outcome.
func (x *arrival) settle() (first bool) {
	x.once.Do(func() {
		first = true
		close(x.done)
		x.a.mu.Lock()
		delete(x.a.pending, x)
		x.timer.Stop()
		x.a.mu.Unlock()
	})
	return first
}

func (x *arrival) expire() {
	if x.settle() && x.lost != nil {
		x.lost()
	}
}

// Connect implements datalisten.Receiver.
func (x *arrival) Connect(c *net.TCPConn, hello []byte) error {
	if !x.settle() {
		return errors.New("the peer has connected too late")
	}
	err := x.a.device.Hand(c, hello)
	if err == nil {
		err = x.conn.Connect(context.Background(), x.peers) // does not block: the peer has connected
	}
	if err == nil {
		err = x.conn.Serve(x.a.server)
	}
	switch {
	case err != nil && x.lost != nil:
		x.lost()
	case err == nil && x.connected != nil:
		x.connected()
	}
	return err
}

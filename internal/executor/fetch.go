package executor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/quota"
	"github.com/rfaas-go/rfaas/lease"
)

const (
	// fetchConnect is how long the client may take to connect.
	fetchConnect = 10 * time.Second
	// fetchChunk is how much one remote read asks for, in bytes. fetchStall is how long it may take.
	fetchChunk = 1 << 20
	fetchStall = 5 * time.Second
	// fetchRate is the lowest rate of a transfer beyond fetchConnect, in bytes per second. The table's memory is taken from leases meanwhile.
	fetchRate = 16 << 20
)

// Fetch copies a table from the memory of its client, over a queue pair of the provider that the client names. Nothing parses the bytes.
func (e *Executor) Fetch(req *control.FetchRequest, stream grpc.ServerStreamingServer[control.FetchReply]) error {
	return e.turns.yieldTo(stream.Context(), func(ctx context.Context) error { return e.fetch(ctx, req, stream) })
}

func (e *Executor) fetch(ctx context.Context, req *control.FetchRequest, stream grpc.ServerStreamingServer[control.FetchReply]) error {
	if req.GetSeed() != nil {
		if err := e.checkProvider(req.GetProvider()); err != nil {
			return err
		}
		if err := e.gate.Take(ctx, quota.Leases, 1); err != nil {
			return err
		}
		return e.fetchSeed(ctx, req, stream)
	}
	h, err := checkSum("sha256", req.GetSha256())
	if err != nil {
		return err
	}
	size, from := req.GetSize(), req.GetMemory()
	if from.GetSize() < size {
		return invalidf("table of %d bytes in %d bytes of memory", size, from.GetSize())
	}
	if err := e.checkProvider(req.GetProvider()); err != nil {
		return err
	}
	if err := e.gate.Take(ctx, quota.Leases, 1); err != nil {
		return err
	}
	ctx, cancel := fetchContext(ctx, size)
	defer cancel()
	began := time.Now()
	var source *fetchSource
	if req.GetBundle() && e.cfg.Bundles == nil {
		return errNoBundles
	}
	known, err := e.tables.add(ctx, h, req.GetBundle(), codeOwner(ctx), size, func() (io.Reader, error) {
		var err error
		if source, err = e.connectSource(ctx, req, []memoryPart{{from.GetAddr(), size}}, stream.Send); err != nil {
			return nil, err
		}
		return bufio.NewReaderSize(source, fetchChunk), nil
	})
	source.close()
	e.changed()
	if err != nil {
		return err
	}
	e.log.Debug("table stored", "sha256", fmt.Sprintf("%x", h[:6]), "bytes", size, "known", known, "provider", req.GetProvider(), "bundle", req.GetBundle(), "took", time.Since(began))
	return stream.Send(&control.FetchReply{Done: true})
}

// errSlow ends a transfer that has taken longer than fetchLimit.
var errSlow = errors.New("the transfer took too long")

// fetchLimit is how long a transfer may take.
func fetchLimit(size uint64) time.Duration {
	return fetchConnect + time.Duration(float64(size)/fetchRate*float64(time.Second))
}

// fetchContext bounds a transfer.
func fetchContext(ctx context.Context, size uint64) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, fetchLimit(size), errSlow)
}

// fetchDevices are the devices of shm and tcp by which tables are read. Each is opened when it is first needed. Safe for concurrent use.
//
// On verbs each transfer opens a device of its own, because the operations of a device run on one thread (OneThread).
type fetchDevices struct {
	mu      sync.Mutex
	open    map[string]*dataplane.Device
	sources map[*fetchSource]context.CancelFunc
	used    sync.WaitGroup // sources
	closed  bool
}

// add lets a source use the devices. remove must follow.
func (d *fetchDevices) add(s *fetchSource) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return grpcError(lease.ErrDraining)
	}
	if d.sources == nil {
		d.sources = map[*fetchSource]context.CancelFunc{}
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	s.ctx = ctx
	d.sources[s] = func() { cancel(errors.New("the node is draining")) }
	d.used.Add(1)
	return nil
}

func (d *fetchDevices) remove(s *fetchSource) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sources[s]()
	delete(d.sources, s)
	d.used.Done()
}

func (d *fetchDevices) get(provider string, open func() (*dataplane.Device, error)) (*dataplane.Device, error) {
	if provider == dataplane.Verbs {
		return open()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if dev := d.open[provider]; dev != nil {
		return dev, nil
	}
	dev, err := open()
	if err != nil {
		return nil, err
	}
	if d.open == nil {
		d.open = map[string]*dataplane.Device{}
	}
	d.open[provider] = dev
	return dev, nil
}

// close ends the transfers, of which none can begin from now on, and closes the devices.
func (d *fetchDevices) close() {
	d.mu.Lock()
	d.closed = true
	for _, end := range d.sources {
		end()
	}
	d.mu.Unlock()
	d.used.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, dev := range d.open {
		dev.Close()
	}
	d.open = nil
}

func (e *Executor) fetchDevice(provider string) (*dataplane.Device, error) {
	s := &e.cfg.Settings
	switch provider {
	case dataplane.SHM:
		return dataplane.Open(provider, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	case dataplane.Verbs:
		return dataplane.Open(provider, rdmaOptions(s))
	case dataplane.TCP:
		return dataplane.Open(provider, dataplane.Options{GIDIndex: -1, Handed: true, Advertise: e.cfg.Data.Address, Encrypt: encryption(s)})
	}
	return nil, control.Errorf(control.ClassUnsupported, "tables cannot be read over provider %s: offer tcp besides it (providers)", provider)
}

// memoryPart is a part of the memory that is read.
type memoryPart struct{ addr, size uint64 }

// fetchSource is a connection to the memory of a client, or of another executor. It reads the parts in their order.
type fetchSource struct {
	e      *Executor
	ctx    context.Context
	device *dataplane.Device // nil, or the transfer's own
	domain *dataplane.Domain
	conn   *dataplane.Conn
	key    uint32
	parts  []memoryPart // that are not read yet
}

// connectSource connects to the client's memory. It sends this side's blob by send.
func (e *Executor) connectSource(ctx context.Context, req *control.FetchRequest, parts []memoryPart, send func(*control.FetchReply) error) (*fetchSource, error) {
	s := &fetchSource{e: e, ctx: ctx, key: req.GetMemory().GetKey(), parts: parts}
	if err := e.fabric.add(s); err != nil {
		return nil, err
	}
	dev, err := e.fabric.get(req.GetProvider(), func() (*dataplane.Device, error) { return e.fetchDevice(req.GetProvider()) })
	if err == nil {
		if req.GetProvider() == dataplane.Verbs {
			s.device = dev
		}
		s.domain, err = dev.NewDomain()
	}
	if err == nil {
		s.conn, err = s.domain.NewBulkConn()
	}
	var blob []byte
	if err == nil {
		blob, err = s.conn.Blob()
	}
	if err == nil {
		connect, cancel := context.WithTimeoutCause(s.ctx, fetchConnect, fmt.Errorf("the client has not connected within %v", fetchConnect))
		err = e.meet(connect, dev, s.conn, blob, req.GetBlob(), send)
		cancel()
	}
	if err != nil {
		s.close()
		return nil, fetchError(err)
	}
	return s, nil
}

// fetchError classes an error of the connection to a client's memory: the client can ask again.
func fetchError(err error) error {
	if control.IsClassed(err) {
		return err
	}
	var typed *dataplane.Error
	if errors.As(err, &typed) && typed.Status == dataplane.StatusBadBlob {
		return control.StatusError(statusBadBlob, "table: "+err.Error())
	}
	return control.Errorf(control.ClassConnection, "table: cannot read the client's memory: %v", err)
}

// meet sends this side's blob and connects to the client. On tcp the client connects to the data address.
func (e *Executor) meet(ctx context.Context, dev *dataplane.Device, conn *dataplane.Conn, mine, theirs []byte, send func(*control.FetchReply) error) error {
	var guest *fetchGuest
	if token, ok := dataplane.BlobToken(mine); ok {
		guest = &fetchGuest{dev: dev, come: make(chan struct{}), left: make(chan struct{})}
		defer close(guest.left)
		if err := e.cfg.Data.Expect(token, "reading a table", guest); err != nil {
			return err
		}
	}
	if err := send(&control.FetchReply{Blob: mine}); err != nil {
		return err
	}
	if guest != nil {
		select {
		case <-guest.come:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return conn.Connect(ctx, theirs)
}

// fetchGuest waits for a client's connection on tcp. It implements datalisten.Receiver.
type fetchGuest struct {
	dev  *dataplane.Device
	once sync.Once
	come chan struct{} // closed when the connection was handed to the device
	left chan struct{} // closed when nobody waits any more
}

// Done implements datalisten.Receiver.
func (g *fetchGuest) Done() <-chan struct{} { return g.left }

// Connect implements datalisten.Receiver.
func (g *fetchGuest) Connect(c *net.TCPConn, hello []byte) error {
	err := g.dev.Hand(c, hello)
	if err == nil {
		g.once.Do(func() { close(g.come) })
	}
	return err
}

// Read reads the next bytes. io.EOF: the memory ends.
func (s *fetchSource) Read(b []byte) (int, error) {
	for len(s.parts) > 0 && s.parts[0].size == 0 {
		s.parts = s.parts[1:]
	}
	if len(s.parts) == 0 {
		return 0, io.EOF
	}
	p := &s.parts[0]
	if err := s.ctx.Err(); err != nil {
		return 0, fetchError(context.Cause(s.ctx))
	}
	b = b[:min(uint64(len(b)), p.size)]
	if err := s.conn.Read(b, p.addr, s.key, fetchStall); err != nil {
		return 0, fetchError(err)
	}
	s.e.metrics.fetched.Add(float64(len(b)))
	p.addr += uint64(len(b))
	p.size -= uint64(len(b))
	return len(b), nil
}

// readParts reads parts of the memory, one after the other.
func (s *fetchSource) readParts(b []byte, parts []dataplane.Part) error {
	if s.ctx.Err() != nil {
		return fetchError(context.Cause(s.ctx))
	}
	if err := s.conn.ReadParts(b, parts, fetchStall); err != nil {
		return fetchError(err)
	}
	s.e.metrics.fetched.Add(float64(len(b)))
	return nil
}

// close ends the connection. Nil: there is none.
func (s *fetchSource) close() {
	if s == nil {
		return
	}
	if s.conn != nil {
		s.conn.Close()
	}
	if s.domain != nil {
		s.domain.Close()
	}
	if s.device != nil {
		s.device.Close()
	}
	s.e.fabric.remove(s)
}

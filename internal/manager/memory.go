package manager

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// memory is the board and the providers through which it can be reached: one device for each provider, each with a
// domain in which clients can read the board. docs/BOARD.md says which connection reaches what.
type memory struct {
	whole   *dataplane.Memory // nil: the board can only be reached by messages
	domain  *dataplane.Domain
	devices []*device
	table   *board.Table      // used by the table of executors, under its lock
	head    board.Header      // the layout: its offsets do not change, its counters do
	limits  *dataplane.Memory // nil: no tenant has a limit, or no provider reaches it
	own     *ownWay           // nil: no RDMA device
	tcp     *arrivals         // nil: no provider tcp
}

type device struct {
	*dataplane.Device
	clients *dataplane.Domain
	view    *dataplane.Memory
}

// openMemory allocates a board for the configured number of executors and opens the providers. A provider without a device is
// skipped, with a line in the log, unless cfg.Asked is set: then it is an error.
func openMemory(cfg *Config, epoch uint64) (*memory, error) {
	head, err := board.NewHeader(epoch, cfg.Slots, uint32(cfg.Heartbeat.Milliseconds()))
	if err != nil {
		return nil, err
	}
	m := &memory{head: head}
	for _, p := range cfg.Providers {
		if err := m.open(p, cfg); err != nil {
			if cfg.Asked {
				m.close()
				return nil, fmt.Errorf("provider %s: %w", p, err)
			}
			cfg.Log.Debug("provider not available", "provider", p, "error", err)
		}
	}
	if m.whole != nil {
		m.table, err = board.NewTable(m.whole.Bytes(), head)
	} else {
		m.table, err = board.NewTable(make([]byte, head.Size()), head)
	}
	if err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// openLimits allocates the table of tenants' limits and returns its bytes.
func (m *memory) openLimits() ([]byte, error) {
	const size = maxLimited * accounting.LimitSize
	if m.whole == nil {
		return make([]byte, size), nil
	}
	var err error
	if m.limits, err = m.domain.Alloc(size, dataplane.RemoteRead|dataplane.RemoteAtomic); err != nil {
		return nil, err
	}
	for _, d := range m.devices {
		if d.Provider() == dataplane.Verbs {
			if m.own, err = newOwnWay(d.Device, m.limits, size); err != nil {
				return nil, err
			}
		}
	}
	return m.limits.Bytes(), nil
}

// openDevice opens the device of a provider.
func (m *memory) openDevice(provider string, cfg *Config) (*dataplane.Device, error) {
	if provider != dataplane.TCP {
		return dataplane.Open(provider, cfg.Verbs)
	}
	var err error
	if m.tcp, err = openArrivals(cfg.DataListen, cfg.DataAdvertise, cfg.Encrypt, cfg.Log); err != nil {
		return nil, err
	}
	return m.tcp.device, nil
}

func (m *memory) open(provider string, cfg *Config) error {
	dev, err := m.openDevice(provider, cfg)
	if err != nil {
		return err
	}
	head := &m.head
	d := &device{Device: dev}
	m.devices = append(m.devices, d) // closed with the others, even after an error
	fail := func(err error) error {
		if provider == dataplane.TCP {
			m.tcp.stop()
			m.tcp.close()
			m.tcp = nil
		}
		d.close()
		m.devices = slices.DeleteFunc(m.devices, func(x *device) bool { return x == d })
		return err
	}
	if m.whole == nil {
		if m.domain, err = dev.NewDomain(); err != nil {
			return fail(err)
		}
		// No peer gets this region, only windows of it.
		if m.whole, err = m.domain.Alloc(head.Size(), dataplane.RemoteRead|dataplane.RemoteWrite); err != nil {
			m.domain.Close()
			m.domain = nil
			return fail(err)
		}
	}
	if d.clients, err = dev.NewDomain(); err == nil {
		d.view, err = d.clients.Window(m.whole, 0, head.Size(), dataplane.RemoteRead)
	}
	if err != nil {
		if len(m.devices) == 1 {
			m.whole.Free()
			m.domain.Close()
			m.whole, m.domain = nil, nil
		}
		return fail(err)
	}
	return nil
}

func (d *device) close() {
	if d.view != nil {
		d.view.Free()
	}
	if d.clients != nil {
		d.clients.Close()
	}
	d.Close()
}

// close frees everything. Connections must be closed before. The device of the board's memory is the first in the list
// and is closed last.
func (m *memory) close() {
	m.own.close()
	m.tcp.stop()
	m.tcp.close()
	if m.limits != nil {
		m.limits.Free()
		m.limits = nil
	}
	for _, d := range slices.Backward(m.devices) {
		if d == m.devices[0] && m.whole != nil {
			if d.view != nil {
				d.view.Free()
				d.view = nil
			}
			m.whole.Free()
			m.domain.Close()
			m.whole = nil
		}
		d.close()
	}
	m.devices = nil
}

func (m *memory) providers() []string {
	names := make([]string, 0, len(m.devices))
	for _, d := range m.devices {
		names = append(names, d.Provider())
	}
	return names
}

func (m *memory) device(provider string) (*device, error) {
	for _, d := range m.devices {
		if d.Provider() == provider {
			return d, nil
		}
	}
	return nil, control.Errorf(control.ClassUnsupported, "provider %q: this resource manager can be reached by %v", provider, m.providers())
}

// attachment is an executor's connection to its line and its cells, in a domain that contains nothing else.
type attachment struct {
	node   string
	owner  owner
	freed  func() // called by free, once; nil: nothing to do
	domain *dataplane.Domain
	line   *dataplane.Memory
	cells  *dataplane.Memory // and behind them the counts of the executor
	limits *dataplane.Memory // nil: no tenant has a limit
	held   *dataplane.Memory // likewise
	way    accounting.LimitWay
	conn   *dataplane.Conn
	blob   []byte // of conn

	mu      sync.Mutex         // protects the fields below; never held while waiting for the table's lock
	merged  []accounting.Entry // for each cell, what the ledger has; zero: nothing
	counted [4]byte            // checksum of the counts that were read last
	closed  bool
}

// cellsFor returns how many cells an executor gets: one for each lease that it can have, and more for those that wait
// for a receipt.
func cellsFor(cores uint32) int { return int(min(2*uint64(cores)+16, 4096)) }

// attachExecutor connects an executor's queue pair to its line and to new cells. freed is called when their memory is
// free again, possibly before the return. It fails when ctx ends.
func (m *memory) attachExecutor(ctx context.Context, provider string, e *entry, blob []byte, freed func()) (*attachment, error) {
	dev, err := m.device(provider)
	if err != nil {
		freed()
		return nil, err
	}
	a := &attachment{node: e.info.GetNode(), owner: e.owner, freed: freed,
		merged: make([]accounting.Entry, cellsFor(e.info.GetCores()))}
	if a.domain, err = dev.NewDomain(); err == nil {
		a.line, err = a.domain.Window(m.whole, m.head.LineOffset(e.slot), board.LineSize, dataplane.RemoteRead|dataplane.RemoteWrite)
	}
	if err == nil {
		a.cells, err = a.domain.Alloc(uint64(len(a.merged)*accounting.CellSize+board.StatsSize), dataplane.RemoteRead|dataplane.RemoteWrite|dataplane.RemoteAtomic)
	}
	expose := []*dataplane.Memory{a.line, a.cells}
	if err == nil && m.limits != nil {
		if a.way = accounting.LimitSHM; provider == dataplane.Verbs {
			a.way = accounting.LimitVerbs
		}
		a.limits, err = a.domain.Window(m.limits, 0, m.limits.Ref().Size, dataplane.RemoteRead|dataplane.RemoteAtomic)
		if err == nil {
			a.held, err = a.domain.Alloc(uint64(8*len(a.merged)), dataplane.RemoteWrite)
		}
		expose = append(expose, a.limits, a.held)
	}
	if err == nil {
		a.conn, a.blob, err = m.connectTo(ctx, a.domain, blob, expose...)
	}
	if err == nil && provider == dataplane.TCP {
		// An executor that does not connect reports by message, which ends the attachment.
		err = m.tcp.expect(a.conn, a.blob, blob, "executor on "+a.node, nil, nil)
	}
	if err != nil {
		a.fence()
		a.free()
		return nil, err
	}
	return a, nil
}

// connectTo makes a queue pair and connects it to the peer whose blob this is, except on provider tcp: there arrivals.expect connects it.
// It fails when ctx ends.
func (m *memory) connectTo(ctx context.Context, d *dataplane.Domain, blob []byte, expose ...*dataplane.Memory) (*dataplane.Conn, []byte, error) {
	c, err := d.NewConn(expose...)
	if err != nil {
		return nil, nil, err
	}
	mine, err := c.Blob()
	if _, tcp := dataplane.BlobToken(mine); err == nil && !tcp {
		err = c.Connect(ctx, blob)
	}
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	return c, mine, nil
}

// fence closes the executor's connection, so that no later writes arrive. Its last charges remain in the cells.
func (a *attachment) fence() {
	if a.conn != nil {
		a.conn.Close()
	}
}

// free frees the memory, and with it the charges in the cells. Call fence first.
func (a *attachment) free() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.closed = true
	if a.freed != nil {
		a.freed()
	}
	if a.cells != nil {
		a.cells.Free()
	}
	for _, x := range []*dataplane.Memory{a.line, a.limits, a.held} {
		if x != nil {
			x.Free()
		}
	}
	if a.domain != nil {
		a.domain.Close()
	}
}

func refOf(m *dataplane.Memory) *control.MemoryRef {
	r := m.Ref()
	return &control.MemoryRef{Addr: r.Addr, Key: r.Key, Size: r.Size}
}

// cellRefs returns how the executor reaches its cells and its counts.
func (a *attachment) cellRefs() (cells, stats *control.MemoryRef) {
	cells, stats = refOf(a.cells), refOf(a.cells)
	cells.Size = uint64(len(a.merged) * accounting.CellSize)
	stats.Addr, stats.Size = stats.Addr+cells.Size, board.StatsSize
	return cells, stats
}

// stats returns what the executor has counted. ok is false if it has written nothing valid since the last call.
func (a *attachment) stats(incarnation uint64) (s board.Stats, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.cells == nil {
		return s, false
	}
	var b [board.StatsSize]byte
	copy(b[:], a.cells.Bytes()[len(a.merged)*accounting.CellSize:])
	if sum := [4]byte(b[board.StatsSize-4:]); sum != a.counted {
		if s, ok, _ = board.ParseStats(b[:], incarnation); ok { // a torn record is complete at the next look
			a.counted = sum
		}
	}
	return s, ok
}

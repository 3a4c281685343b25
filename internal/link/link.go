package link

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/accounting"
	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Timeout bounds one remote operation.
const Timeout = 2 * time.Second

func ref(m *control.MemoryRef) dataplane.Ref {
	return dataplane.Ref{Addr: m.GetAddr(), Key: m.GetKey(), Size: m.GetSize()}
}

// end is what both ends have in common.
type end struct {
	domain *dataplane.Domain
	conn   *dataplane.Conn
	own    *dataplane.Memory // that the manager may reach, or nil
}

func newEnd(dev *dataplane.Device, size uint64) (e end, blob []byte, err error) {
	if e.domain, err = dev.NewDomain(); err != nil {
		return e, nil, err
	}
	var expose []*dataplane.Memory
	if size > 0 {
		if e.own, err = e.domain.Alloc(size, dataplane.RemoteWrite); err != nil {
			e.Close()
			return e, nil, err
		}
		expose = append(expose, e.own)
	}
	if e.conn, err = e.domain.NewConn(expose...); err == nil {
		blob, err = e.conn.Blob()
	}
	if err != nil {
		e.Close()
	}
	return e, blob, err
}

// connect connects to the manager's queue pair. from is the peer that sent its blob. On tcp the blob names addresses, and an address of
// this node is refused if the manager is on another node.
func (e *end) connect(ctx context.Context, from *peer.Peer, blob []byte) error {
	if named := dataplane.BlobAddresses(blob); len(named) > 0 {
		home := control.ListOwnAddresses().Home(from)
		for _, a := range named {
			if why := home.Refuse("resource manager", a.Addr()); why != "" {
				return &dataplane.Error{Op: "connect to the resource manager's memory", Status: dataplane.StatusConnection,
					Detail: fmt.Sprintf("the resource manager names the address %v, which %s: set data-advertise of the resource manager", a, why)}
			}
		}
	}
	return e.conn.Connect(ctx, blob)
}

// Close ends the connection and frees everything.
func (e *end) Close() {
	if e.conn != nil {
		e.conn.Close()
	}
	if e.own != nil {
		e.own.Free()
		e.own = nil
	}
	if e.domain != nil {
		e.domain.Close()
		e.domain = nil
	}
}

// Err says why the end is of no use any more, nil if nothing is known.
func (e *end) Err() error { return e.conn.Err() }

// Executor is an executor's end. Safe for concurrent use, but for Close.
type Executor struct {
	end
	line  dataplane.Ref
	cells dataplane.Ref
	slot  uint32

	stats   dataplane.Ref // Size 0: a resource manager of an earlier version
	written board.Stats   // last value of stats

	limits dataplane.Ref // Size 0: no tenant has a limit
	held   dataplane.Ref
	way    accounting.LimitWay
}

// AttachExecutor connects a registered executor to its line and to its cells, which are all zero.
func AttachExecutor(ctx context.Context, m control.ManagerClient, dev *dataplane.Device, id uint64, incarnation [16]byte) (*Executor, error) {
	e, blob, err := newEnd(dev, 0)
	if err != nil {
		return nil, err
	}
	x := &Executor{end: e}
	var from peer.Peer
	r, err := m.AttachExecutor(ctx, &control.AttachExecutorRequest{ExecutorId: id, Incarnation: incarnation[:], Provider: dev.Provider(), Blob: blob},
		grpc.Peer(&from))
	if err == nil {
		x.line, x.cells, x.slot = ref(r.GetLine()), ref(r.GetCells()), r.GetSlot()
		x.stats = ref(r.GetStats())
		x.limits, x.held = ref(r.GetLimits()), ref(r.GetHeld())
		if x.way = accounting.LimitSHM; dev.Provider() == dataplane.Verbs {
			x.way = accounting.LimitVerbs
		}
		err = x.connect(ctx, &from, r.GetBlob())
	}
	if err == nil && (x.line.Size != board.LineSize || x.cells.Size%accounting.CellSize != 0) {
		err = fmt.Errorf("the resource manager gave a line of %d bytes, want %d, and %d bytes of cells, want a multiple of %d", x.line.Size, board.LineSize, x.cells.Size, accounting.CellSize)
	}
	if err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

// WriteLine writes the line, whose Slot it sets.
func (x *Executor) WriteLine(l board.Line) error {
	l.Slot = x.slot
	var b [board.LineSize]byte
	l.Encode(b[:])
	return x.conn.Write(b[:], x.line.Addr, x.line.Key, Timeout)
}

// WriteStats writes what the executor has counted, if it has changed. Only one goroutine may call it at a time.
func (x *Executor) WriteStats(s board.Stats, incarnation uint64) error {
	if x.stats.Size != board.StatsSize || s == x.written {
		return nil
	}
	var b [board.StatsSize]byte
	s.Encode(b[:], incarnation)
	if err := x.conn.Write(b[:], x.stats.Addr, x.stats.Key, Timeout); err != nil {
		return err
	}
	x.written = s
	return nil
}

// Cells is how many cells there are.
func (x *Executor) Cells() int { return int(x.cells.Size / accounting.CellSize) }

func (x *Executor) cell(i int) uint64 { return x.cells.Addr + uint64(i)*accounting.CellSize }

// WriteHead writes to which lease cell i belongs, or that it is free.
func (x *Executor) WriteHead(i int, h accounting.CellHead) error {
	var b [accounting.CellHeadSize]byte
	h.Encode(b[:])
	return x.conn.Write(b[:], x.cell(i)+accounting.CellHeadOffset, x.cells.Key, Timeout)
}

// Charge brings the counters of cell i from the sums that they have to others, by one addition for each that differs.
func (x *Executor) Charge(i int, from, to accounting.Use) error {
	var adds []dataplane.Add
	var which []int
	for c, n := range to.Since(from) {
		if n > 0 {
			adds = append(adds, dataplane.Add{Addr: x.cell(i) + uint64(8*c), Value: n})
			which = append(which, c)
		}
	}
	if len(adds) == 0 {
		return nil
	}
	if _, err := x.conn.FetchAdd(adds, x.cells.Key, Timeout); err != nil {
		return err
	}
	for k, a := range adds {
		if a.Old != from[which[k]] {
			return fmt.Errorf("cell %d: %v was %d, want %d: another process writes there", i, accounting.Counter(which[k]), a.Old, from[which[k]])
		}
	}
	return nil
}

// Receipt reads the ledger's receipt for cell i. It returns false if there is no receipt yet, or if one was being written.
func (x *Executor) Receipt(i int) (accounting.Receipt, bool, error) {
	var b [accounting.ReceiptSize]byte
	if err := x.conn.Read(b[:], x.cell(i)+accounting.ReceiptOffset, x.cells.Key, Timeout); err != nil {
		return accounting.Receipt{}, false, err
	}
	r, ok := accounting.ParseReceipt(b[:])
	return r, ok, nil
}

// Clear frees cell i: it clears the head, then sets the counters to zero for the next lease.
func (x *Executor) Clear(i int) error {
	if err := x.WriteHead(i, accounting.CellHead{}); err != nil {
		return err
	}
	var zero [accounting.NumCounters * 8]byte
	return x.conn.Write(zero[:], x.cell(i), x.cells.Key, Timeout)
}

// Limited reports whether tenants may have limits.
func (x *Executor) Limited() bool { return x.limits.Size > 0 }

// Holds returns the number of tenants for which the executor can publish what it has reserved.
func (x *Executor) Holds() int { return int(x.held.Size / 8) }

// Reserve adds cores to the reservation of a record's tenant, and returns the record as it was a moment later. Negative cores are returned. After an
// error of the connection, it is unknown whether they were added.
func (x *Executor) Reserve(record uint32, cores int64) (accounting.Limit, error) {
	at := accounting.LimitWordOffset(record, x.way)
	if uint64(record) >= x.limits.Size/accounting.LimitSize {
		return accounting.Limit{}, fmt.Errorf("limit %d of %d bytes of limits", record, x.limits.Size)
	}
	if _, err := x.conn.FetchAdd([]dataplane.Add{{Addr: x.limits.Addr + at, Value: uint64(cores)}}, x.limits.Key, Timeout); err != nil {
		return accounting.Limit{}, err
	}
	var b [accounting.LimitSize]byte
	if err := x.conn.Read(b[:], x.limits.Addr+uint64(record)*accounting.LimitSize, x.limits.Key, Timeout); err != nil {
		return accounting.Limit{}, err
	}
	return accounting.ParseLimit(b[:]), nil
}

// Hold says in place i what the executor has reserved; 0 cores: nothing, the place is free.
func (x *Executor) Hold(i int, record, cores uint32) error {
	var b [8]byte
	if cores > 0 {
		binary.LittleEndian.PutUint64(b[:], accounting.Held(record, cores))
	}
	return x.conn.Write(b[:], x.held.Addr+uint64(8*i), x.held.Key, Timeout)
}

// Client is a client's end: a board.Memory, and a mailbox. Safe for concurrent use, but for Close.
type Client struct {
	end
	board dataplane.Ref
	polls bool // writes to the mailbox arrive when this side polls (tcp)
}

// AttachClient connects a client to the board, and subscribes it to the changes.
func AttachClient(ctx context.Context, m control.ManagerClient, dev *dataplane.Device) (*Client, error) {
	e, blob, err := newEnd(dev, board.MailboxSize)
	if err != nil {
		return nil, err
	}
	c := &Client{end: e, polls: dev.Provider() == dataplane.TCP}
	box := e.own.Ref()
	var from peer.Peer
	r, err := m.AttachClient(ctx, &control.AttachClientRequest{Provider: dev.Provider(), Blob: blob,
		Mailbox: &control.MemoryRef{Addr: box.Addr, Key: box.Key, Size: box.Size}}, grpc.Peer(&from))
	if err == nil {
		c.board = ref(r.GetBoard())
		err = c.connect(ctx, &from, r.GetBlob())
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Read reads from the board.
func (c *Client) Read(b []byte, offset uint64) error {
	if offset > c.board.Size || uint64(len(b)) > c.board.Size-offset {
		return fmt.Errorf("board: %d bytes at %d of %d", len(b), offset, c.board.Size)
	}
	return c.conn.Read(b, c.board.Addr+offset, c.board.Key, Timeout)
}

// Size is the board's bytes.
func (c *Client) Size() uint64 { return c.board.Size }

// Mailbox reads the mailbox, which is this process's memory. A copy that was torn is made again.
func (c *Client) Mailbox() (board.Mailbox, error) {
	if c.polls {
		if err := c.Err(); err != nil {
			return board.Mailbox{}, err
		}
	}
	var b [board.MailboxSize]byte
	var err error
	for range 100 {
		copy(b[:], c.own.Bytes())
		var m board.Mailbox
		if m, err = board.ParseMailbox(b[:]); err == nil {
			return m, nil
		}
	}
	return board.Mailbox{}, err
}

package grant

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/rfaas-go/rfaas/internal/bundle"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// tableRate is the slowest transfer of a table for which a lease waits, in bytes per second (RFAAS_AGENT_TABLE_RATE).
const tableRate = 16 << 20

// Table is data of a client in a sealed memory file. Executors read it over a queue pair, once per node. Safe for concurrent use.
type Table struct {
	Name          string
	Sum           [sha256.Size]byte
	Size, Address uint64 // Address: where workers map it, 0: anywhere

	seed   *Seed          // whose memory it is, at an executor; nil: another table
	bundle *bundle.Bundle // which is packed when an executor needs it; nil: a table

	mu   sync.Mutex
	file *os.File // nil after Close, and of a bundle
}

// tableSeals are the seals without which a client could change a table while it is read.
const tableSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// NewTable hashes a table. f is a memory file, sealed against changes. After success the Table owns it.
func NewTable(ctx context.Context, name string, f *os.File, size, address uint64) (*Table, error) {
	const op = "publish a table"
	st, err := f.Stat()
	if err != nil {
		return nil, fail(op, dataplane.StatusInvalid, "%q: %v", name, err)
	}
	seals := 0
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { seals, _ = unix.FcntlInt(fd, unix.F_GET_SEALS, 0) })
	}
	if err != nil || seals&tableSeals != tableSeals || size == 0 || uint64(st.Size()) != size {
		return nil, fail(op, dataplane.StatusInvalid, "%q: a file of %d bytes with seals %#x, want a sealed memory file of %d bytes", name, st.Size(), seals, size)
	}
	t := &Table{Name: name, Size: size, Address: address, file: f}
	hash := sha256.New()
	from := &patient{ctx, io.NewSectionReader(f, 0, int64(size))}
	if _, err := io.CopyBuffer(struct{ io.Writer }{hash}, from, make([]byte, 1<<20)); err != nil {
		return nil, fail(op, dataplane.StatusFatal, "%q: %v", name, err)
	}
	hash.Sum(t.Sum[:0])
	return t, nil
}

// patient is a reader that ends with a context.
type patient struct {
	ctx context.Context
	r   io.Reader
}

func (p *patient) Read(b []byte) (int, error) {
	if err := p.ctx.Err(); err != nil {
		return 0, context.Cause(p.ctx)
	}
	return p.r.Read(b)
}

// Close frees the table's memory, unless an executor is reading it. Executors that have the table keep it.
func (t *Table) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file != nil {
		t.file.Close()
		t.file = nil
	}
}

// expose makes the table readable by peers of a domain.
func (t *Table) expose(ctx context.Context, d *dataplane.Domain) (*dataplane.Memory, error) {
	if t.bundle != nil {
		return t.exposeBundle(ctx, d)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == nil {
		return nil, fail("read a table", dataplane.StatusInvalid, "%q was dropped while a lease that uses it was being opened", t.Name)
	}
	return d.File(t.file, t.Size)
}

// ExtraTime returns how long the lease may take longer because its tables and its bundle are transferred, and because a seed is made.
func (p *Pending) ExtraTime() time.Duration { return transferTime(p.spec.all()) + p.spec.Seed.Limit() }

func transferTime(tables []*Table) (d time.Duration) {
	for _, t := range tables {
		d += time.Duration(float64(t.Size) / tableRate * float64(time.Second))
	}
	return d
}

// tablesKey identifies the tables of a lease.
func tablesKey(tables []*Table) (key [sha256.Size]byte) {
	if len(tables) == 0 {
		return key
	}
	h := sha256.New()
	for _, t := range tables {
		fmt.Fprintf(h, "%s\x00", t.Name)
		h.Write(t.Sum[:])
		_ = binary.Write(h, binary.LittleEndian, t.Address) // a hash returns no error
	}
	h.Sum(key[:0])
	return key
}

// tables returns the tables as a lease request names them, and the bundle, or nil.
func (p *Pending) tables() (list []*control.Table, bundle *control.Table) {
	for _, t := range p.spec.Tables {
		list = append(list, &control.Table{Name: t.Name, Sha256: t.Sum[:], Size: t.Size, Address: t.Address, Seed: t.seed != nil})
	}
	if b := p.spec.Bundle; b != nil {
		bundle = &control.Table{Sha256: b.Sum[:], Size: b.Size}
	}
	return list, bundle
}

// all returns the tables and then the bundle, as the executor counts them.
func (s *Spec) all() []*Table {
	if s.Bundle == nil {
		return s.Tables
	}
	return append(slices.Clone(s.Tables), s.Bundle)
}

// provide lets an executor read a table, and returns when it has it. If another lease of this tenant is providing the same table to it, the
// executor answers when that is done.
func (p *Pending) provide(ctx context.Context, cl control.ExecutorClient, cand *Candidate, t *Table) error {
	op := "transfer a table"
	if t.bundle != nil {
		op = "transfer a bundle"
	}
	ctx, cancel := context.WithTimeout(ctx, p.c.opts.Timeout+transferTime([]*Table{t}))
	defer cancel()
	transfer := p.transfer
	if t.seed != nil {
		transfer = p.copyTable
	}
	err := fromControl(op, cand.Address, repeat(ctx, func() error { return transfer(ctx, cl, cand, t) }))
	var typed *dataplane.Error
	if errors.As(err, &typed) {
		if t.bundle == nil {
			typed.Detail = fmt.Sprintf("%q: %s", t.Name, typed.Detail)
		}
	}
	return err
}

// transfer makes a table readable over a queue pair, and asks the executor to read it.
func (p *Pending) transfer(ctx context.Context, cl control.ExecutorClient, cand *Candidate, t *Table) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	provider := cand.Provider
	if provider == dataplane.OFI {
		provider = dataplane.TCP
	}
	o := p.c.opts.verbs()
	o.ActiveOnly = provider == dataplane.TCP
	o.Encrypt, _ = dataplane.Encryption(p.c.opts.DataEncryption, p.c.opts.AllowPlaintext)
	dev, server, done, err := p.c.sources.Get(provider, o)
	if err != nil {
		return err
	}
	defer done()
	domain, err := dev.NewDomain()
	if err != nil {
		return err
	}
	defer domain.Close()
	m, err := t.expose(ctx, domain)
	if err != nil {
		return err
	}
	defer m.Free()
	conn, err := domain.NewBulkConn(m)
	if err != nil {
		return err
	}
	defer conn.Close()
	blob, err := conn.Blob()
	if err != nil {
		return err
	}
	ref := m.Ref()
	var from peer.Peer
	stream, err := cl.Fetch(ctx, &control.FetchRequest{Sha256: t.Sum[:], Size: t.Size, Provider: provider, Blob: blob, Bundle: t.bundle != nil,
		Memory: &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}}, grpc.Peer(&from))
	if err != nil {
		return err
	}
	return p.c.serveTable(ctx, provider, cand, stream, conn, server)
}

// serveTable connects to the executor and waits until it has read the table.
func (c *shared) serveTable(ctx context.Context, provider string, cand *Candidate, stream grpc.ServerStreamingClient[control.FetchReply], conn *dataplane.Conn, server *dataplane.Server) error {
	for connected := false; ; connected = true {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return fail("transfer a table", dataplane.StatusProtocol, "%s ended the transfer without a reply", cand.Address)
		case err != nil:
			return err
		case r.GetDone():
			return nil
		case connected:
			return fail("transfer a table", dataplane.StatusProtocol, "%s named a second queue pair", cand.Address)
		}
		from, _ := peer.FromContext(stream.Context())
		if err := checkDataAddress("transfer a table", cand.named(), from, r.GetBlob()); err != nil {
			return err
		}
		// On shm the device has let the executor in, which may have read a small table and closed its side already: the next reply tells.
		if err := conn.Connect(ctx, r.GetBlob()); err != nil && provider != dataplane.SHM {
			return err
		}
		if provider == dataplane.TCP {
			if err := conn.Serve(server); err != nil {
				return err
			}
		}
	}
}

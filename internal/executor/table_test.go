package executor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// bytesFrom is a fetch that returns bytes and counts its calls.
func bytesFrom(b []byte, calls *atomic.Int32) func() (io.Reader, error) {
	return func() (io.Reader, error) {
		calls.Add(1)
		return bytes.NewReader(b), nil
	}
}

// refuses checks the class of an error and a part of its text.
func refuses(t *testing.T, what string, err error, class control.Class, text string) {
	t.Helper()
	if err == nil || control.ClassOf(err) != class || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v, want class %v and %q", what, err, class, text)
	}
}

func TestTableIsFetchedOnce(t *testing.T) {
	n := newNode(t)
	b, h := library(300_000)
	var calls atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := n.e.tables.add(t.Context(), h, false, "tenant ann", uint64(len(b)), bytesFrom(b, &calls)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if calls.Load() != 1 {
		t.Errorf("fetched %d times", calls.Load())
	}
	got, unknown := n.e.tables.acquire([]tableRef{{h, isTable}}, "tenant ann")
	if len(got) != 1 || len(unknown) > 0 {
		t.Fatalf("%d tables, %v unknown", len(got), unknown)
	}
	defer n.e.tables.release(got)
	stored, err := io.ReadAll(io.NewSectionReader(got[0].file, 0, int64(len(b))+1))
	if err != nil || !bytes.Equal(stored, b) {
		t.Errorf("the stored table differs, %v", err)
	}
	if _, err := got[0].file.WriteAt([]byte{0}, 0); err == nil {
		t.Error("a table can be written to")
	}
	if f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", got[0].file.Fd()), os.O_RDWR, 0); err == nil {
		if _, err := f.WriteAt([]byte{0}, 0); !errors.Is(err, unix.EPERM) {
			t.Errorf("writing through another descriptor: %v, want EPERM", err)
		}
		f.Close()
	}
	if aside := n.e.table.Capacity().SetAside; aside != uint64(len(b)) {
		t.Errorf("%d bytes set aside for %d", aside, len(b))
	}
}

// The hash of a table is not enough: another tenant must send its bytes.
func TestTableOfAnotherTenant(t *testing.T) {
	n := newNode(t)
	b, h := library(5000)
	var calls atomic.Int32
	add := func(owner string, b []byte) error {
		_, err := n.e.tables.add(t.Context(), h, false, owner, uint64(len(b)), bytesFrom(b, &calls))
		return err
	}
	if err := add("tenant ann", b); err != nil {
		t.Fatal(err)
	}
	if _, unknown := n.e.tables.acquire([]tableRef{{h, isTable}}, "tenant bob"); len(unknown) != 1 {
		t.Fatal("bob may use ann's table")
	}
	wrong := bytes.Clone(b)
	wrong[4999]++
	refuses(t, "other bytes", add("tenant bob", wrong), control.ClassInvalid, "they must not change while the table is published")
	if _, unknown := n.e.tables.acquire([]tableRef{{h, isTable}}, "tenant bob"); len(unknown) != 1 {
		t.Fatal("bob may use ann's table without its bytes")
	}
	if err := add("tenant bob", b); err != nil {
		t.Fatal(err)
	}
	if calls.Load() != 3 || n.e.table.Capacity().SetAside != 5000 {
		t.Errorf("fetched %d times, %d bytes set aside", calls.Load(), n.e.table.Capacity().SetAside)
	}
}

func TestTableThatDoesNotArrive(t *testing.T) {
	n := newNode(t)
	b, h := library(5000)
	var calls atomic.Int32
	broken := errors.New("the client is gone")
	for _, c := range []struct {
		what  string
		size  uint64
		fetch func() (io.Reader, error)
		class control.Class
		text  string
	}{
		{"short", 5001, bytesFrom(b, &calls), control.ClassFatal, "EOF"},
		{"no connection", 5000, func() (io.Reader, error) { return nil, fetchError(broken) }, control.ClassConnection, "the client is gone"},
		{"breaks", 5000, func() (io.Reader, error) {
			return io.MultiReader(bytes.NewReader(b[:100]), &failing{fetchError(broken)}), nil
		}, control.ClassConnection, "the client is gone"},
		{"changed", 5000, bytesFrom(append([]byte{b[0] + 1}, b[1:]...), &calls), control.ClassInvalid, "announced as SHA-256"},
		{"empty", 0, bytesFrom(b, &calls), control.ClassInvalid, "table of 0 bytes"},
		{"beyond the limit", 3<<30 + 1, bytesFrom(b, &calls), control.ClassInvalid, "this executor keeps 1 to 3221225472 bytes of tables for a tenant (table-limit)"},
	} {
		_, err := n.e.tables.add(t.Context(), h, false, "", c.size, c.fetch)
		refuses(t, c.what, err, c.class, c.text)
		if _, unknown := n.e.tables.acquire([]tableRef{{h, isTable}}, ""); len(unknown) != 1 || n.e.table.Capacity().SetAside != 0 {
			t.Errorf("%s: the table is there, or %d bytes are set aside", c.what, n.e.table.Capacity().SetAside)
		}
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

// Unused tables make room for tables and for leases. Used ones do not.
func TestTablesMakeRoom(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Memory, c.Settings.TableLimit = 256<<20, 100<<20 })
	var calls atomic.Int32
	const size = 40 << 20
	var hashes []sum
	add := func() error {
		b, h := library(size)
		_, err := n.e.tables.add(t.Context(), h, false, "tenant ann", size, bytesFrom(b, &calls))
		hashes = append(hashes, h)
		return err
	}
	has := func(i int) bool {
		got, _ := n.e.tables.acquire([]tableRef{{hashes[i], isTable}}, "tenant ann")
		n.e.tables.release(got)
		return len(got) > 0
	}
	for range 2 {
		if err := add(); err != nil {
			t.Fatal(err)
		}
	}
	if !has(1) || !has(0) { // used last: 0
		t.Fatal("a table is missing")
	}
	if err := add(); err != nil || has(1) || !has(0) || !has(2) {
		t.Fatalf("the third: %v, has the first %t, second %t, third %t", err, has(0), has(1), has(2))
	}
	used, _ := n.e.tables.acquire([]tableRef{{hashes[0], isTable}, {hashes[2], isTable}}, "tenant ann")
	refuses(t, "beyond the limit", add(), control.ClassBusy, "leases of this tenant use tables of 83886080 bytes here, and it may have 104857600 (table-limit)")
	r := n.request(1)
	r.MemoryPerWorker = 230 << 20
	_, err := n.Lease(n.ctx(), r)
	refuses(t, "a lease beside used tables", err, control.ClassBusy, "bytes wanted")
	n.e.tables.release(used)
	r = n.request(1)
	r.MemoryPerWorker = 230 << 20
	if _, err := n.Lease(n.ctx(), r); err != nil {
		t.Errorf("a lease beside unused tables: %v", err)
	}
	if _, unused := n.e.tables.bytes(); unused > 0 {
		t.Errorf("%d bytes of unused tables beside the lease", unused)
	}
	refuses(t, "a table beside a lease", add(), control.ClassBusy, "no memory")
}

// Nobody waits while a table is freed, which takes long for a bundle of many files, except a transfer or lease that needs its memory.
func TestTableIsFreedOutsideTheLock(t *testing.T) {
	n := newNode(t)
	s := n.e.tables
	var calls atomic.Int32
	b, h := library(5000)
	if _, err := s.add(t.Context(), h, false, "tenant ann", 5000, bytesFrom(b, &calls)); err != nil {
		t.Fatal(err)
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	giveBack := s.giveBack
	s.giveBack = func(size uint64) {
		close(begun)
		<-goOn
		giveBack(size)
	}
	evicted, other := make(chan bool, 1), make(chan bool, 1)
	go func() { evicted <- s.evictOne() }()
	<-begun
	looked := make(chan int, 1)
	go func() {
		_, unknown := s.acquire([]tableRef{{h, isTable}}, "tenant ann")
		looked <- len(unknown)
		other <- s.evictOne() || n.e.table.Capacity().SetAside == 0 // it may come too late to wait
	}()
	select {
	case unknown := <-looked:
		if unknown != 1 {
			t.Error("a table that is being freed can be used")
		}
	case <-time.After(testBound):
		t.Error("another tenant waits while a table is freed")
	}
	close(goOn)
	if !<-evicted || !<-other {
		t.Error("evictOne did not wait until memory has become free")
	}
	if aside := n.e.table.Capacity().SetAside; aside != 0 {
		t.Errorf("%d bytes set aside", aside)
	}
}

// A lease whose request names tables holds them; a cached lease too, until a table needs their room.
func TestTablesOfLeases(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Settings.TableLimit = 1 << 20 })
	b, h := library(700_000)
	tables := func(r *control.LeaseRequest) {
		r.Tables = []*control.Table{{Name: "t", Sha256: h[:], Size: uint64(len(b)), Address: 0x100000000000}}
	}
	r := n.keepable(2, tables)
	reply, err := n.Lease(n.ctx(), r)
	if err != nil || fmt.Sprint(reply.GetTablesUnknown()) != "[0]" || reply.GetLeaseId() != 0 || n.e.table.Capacity().Leases != 0 {
		t.Fatalf("an unknown table: %v, %v", reply, err)
	}
	var calls atomic.Int32
	add := func(h sum, b []byte) error {
		_, err := n.e.tables.add(t.Context(), h, false, "", uint64(len(b)), bytesFrom(b, &calls))
		return err
	}
	if err := add(h, b); err != nil {
		t.Fatal(err)
	}
	reply = n.mustLease(r) // the same request, whose default memory is less now
	if reply.GetTables() != 1 || len(n.z.workers) != 2 || len(n.z.workers[1].spec.Tables) != 1 || n.z.workers[1].spec.Tables[0].Address != 0x100000000000 {
		t.Fatalf("the grant: %v", reply)
	}
	if again, err := n.Lease(n.ctx(), r); err != nil || again.GetLeaseId() != reply.GetLeaseId() || again.GetTables() != 1 {
		t.Errorf("repeated: %v, %v", again, err)
	}
	n.releaseCached(reply.GetLeaseId())
	if other := n.mustLease(n.keepable(2, func(r *control.LeaseRequest) { r.Reuse = reply.GetLeaseId() })); !other.GetNotCached() {
		t.Error("a lease without tables got the workers of one with tables")
	}
	reply = n.mustLease(n.keepable(2, tables, func(r *control.LeaseRequest) { r.Reuse = reply.GetLeaseId() }))
	if reply.GetTables() != 1 || len(n.z.workers) != 2 {
		t.Fatalf("not reused: %v", reply)
	}
	other, oh := library(700_001)
	refuses(t, "beside a lease", add(oh, other), control.ClassBusy, "leases of this tenant use tables of 700000 bytes here")
	n.releaseCached(reply.GetLeaseId())
	if err := add(oh, other); err != nil {
		t.Errorf("beside cached workers: %v", err)
	}
	n.freeAndLiving(4, 0)
}

func TestBadTables(t *testing.T) {
	n := newNode(t)
	good := func() *control.Table { return &control.Table{Name: "n", Sha256: make([]byte, 32), Size: 1} }
	for _, c := range []struct {
		change func(t *control.Table)
		text   string
	}{
		{func(t *control.Table) { t.Name = "" }, `name of table 0: ""`},
		{func(t *control.Table) { t.Name = "a\x00b" }, `name of table 0: "a\x00b"`},
		{func(t *control.Table) { t.Name = strings.Repeat("x", 64) }, "want 1 to 63 bytes"},
		{func(t *control.Table) { t.Sha256 = t.Sha256[1:] }, "sha256 of table 0 has 31 bytes, want 32"},
		{func(t *control.Table) { t.Size = 0 }, `table "n" has no bytes`},
		{func(t *control.Table) { t.Size = 1 << 63 }, "table-limit"},
		{func(t *control.Table) { t.Address = 4097 }, "address 0x1001 is not a multiple of the page size"},
	} {
		r := n.request(1)
		r.Tables = []*control.Table{good()}
		c.change(r.Tables[0])
		_, err := n.Lease(n.ctx(), r)
		refuses(t, c.text, err, control.ClassInvalid, c.text)
	}
	r := n.request(1)
	r.Tables = []*control.Table{good(), good()}
	_, err := n.Lease(n.ctx(), r)
	refuses(t, "a name twice", err, control.ClassInvalid, `two tables have the name "n"`)
	r = n.request(1)
	for i := range 65 {
		r.Tables = append(r.Tables, good())
		r.Tables[i].Name = fmt.Sprint(i)
	}
	_, err = n.Lease(n.ctx(), r)
	refuses(t, "65 tables", err, control.ClassInvalid, "65 tables, want at most 64")
}

// source is a client's memory with a table, on shm.
type source struct {
	conn *dataplane.Conn
	mem  *dataplane.Memory
	blob []byte
}

func newSource(t *testing.T, b []byte) *source {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		t.Fatal(err)
	}
	dev, err := dataplane.Open(dataplane.SHM, dataplane.Options{GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(dev.Close)
	domain, err := dev.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(domain.Close)
	s := &source{}
	if s.mem, err = domain.File(f, uint64(len(b))); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.mem.Free)
	if s.conn, err = domain.NewBulkConn(s.mem); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.conn.Close)
	if s.blob, err = s.conn.Blob(); err != nil {
		t.Fatal(err)
	}
	return s
}

// provide offers a table for Fetch, with a changed request, and connects unless connect is false.
func (n *node) provide(s *source, h sum, connect bool, change func(*control.FetchRequest)) error {
	n.t.Helper()
	ref := s.mem.Ref()
	req := &control.FetchRequest{Sha256: h[:], Size: ref.Size, Provider: "shm", Blob: s.blob,
		Memory: &control.MemoryRef{Addr: ref.Addr, Key: ref.Key, Size: ref.Size}}
	if change != nil {
		change(req)
	}
	stream, err := n.Fetch(n.ctx(), req)
	if err != nil {
		return err
	}
	for {
		r, err := stream.Recv()
		if err != nil || r.GetDone() {
			return err
		}
		if connect {
			_ = s.conn.Connect(n.ctx(), r.GetBlob()) // fails if the executor has finished already
		}
	}
}

// TestFetch reads tables from a client's memory, and refuses requests that are wrong. Nothing is left of them.
func TestFetch(t *testing.T) {
	n := newNode(t)
	b, h := library(3<<20 + 5)
	for _, c := range []struct {
		what    string
		connect bool
		change  func(*control.FetchRequest)
		class   control.Class
		text    string
	}{
		{"hash", true, func(r *control.FetchRequest) { r.Sha256 = make([]byte, 32) }, control.ClassInvalid, "announced as SHA-256"},
		{"short hash", true, func(r *control.FetchRequest) { r.Sha256 = nil }, control.ClassInvalid, "sha256 has 0 bytes"},
		{"memory", true, func(r *control.FetchRequest) { r.Memory.Size-- }, control.ClassInvalid, "table of 3145733 bytes in 3145732 bytes of memory"},
		{"no memory", true, func(r *control.FetchRequest) { r.Memory = nil }, control.ClassInvalid, "in 0 bytes of memory"},
		{"provider", true, func(r *control.FetchRequest) { r.Provider = "smoke" }, control.ClassInvalid, `provider "smoke" is unknown`},
		{"blob", false, func(r *control.FetchRequest) { r.Blob = []byte("nothing") }, control.ClassInvalid, "table: "},
		{"key", true, func(r *control.FetchRequest) { r.Memory.Key++ }, control.ClassConnection, "cannot read the client's memory"},
		{"address", true, func(r *control.FetchRequest) { r.Memory.Addr += 4096 }, control.ClassConnection, "cannot read the client's memory"},
	} {
		err := n.provide(newSource(t, b), h, c.connect, c.change)
		if s, ok := status.FromError(err); !ok {
			t.Errorf("%s: %v", c.what, s)
		}
		refuses(t, c.what, err, c.class, c.text)
	}
	if aside := n.e.table.Capacity().SetAside; aside != 0 {
		t.Errorf("%d bytes set aside after the refusals", aside)
	}
	if err := n.provide(newSource(t, b), h, true, nil); err != nil {
		t.Fatal(err)
	}
	got, _ := n.e.tables.acquire([]tableRef{{h, isTable}}, "")
	if len(got) != 1 {
		t.Fatal("the table is not there")
	}
	defer n.e.tables.release(got)
	if stored, err := io.ReadAll(io.NewSectionReader(got[0].file, 0, 4<<20)); err != nil || !bytes.Equal(stored, b) {
		t.Errorf("the stored table differs, %v", err)
	}
	if err := n.provide(newSource(t, b), h, false, nil); err != nil { // nothing is read
		t.Errorf("again: %v", err)
	}
}

// A drain ends a transfer, and nothing is left of it.
func TestDrainDuringFetch(t *testing.T) {
	for range 5 {
		t.Run("", func(t *testing.T) {
			n := newNode(t)
			b, h := library(48 << 20)
			s := newSource(t, b)
			over := make(chan error, 1)
			go func() { over <- n.provide(s, h, true, nil) }()
			eventually(t, "the transfer begins", func() bool { return n.e.table.Capacity().SetAside > 0 })
			ctx, cancel := context.WithTimeout(t.Context(), testBound)
			defer cancel()
			n.e.DrainUntil(ctx, drainReason)
			if err := <-over; err != nil && control.ClassOf(err) != control.ClassConnection && control.ClassOf(err) != control.ClassBusy {
				t.Errorf("the transfer ended with %v", err)
			}
			if aside := n.e.table.Capacity().SetAside; aside != 0 {
				t.Errorf("%d bytes set aside after the drain", aside)
			}
			refuses(t, "after the drain", n.provide(newSource(t, b[:10]), sum(b[:32]), true, nil), control.ClassBusy, "draining")
		})
	}
}

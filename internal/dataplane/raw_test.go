package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
)

const soon = 10 * time.Second

// providers runs f on each available provider. With RFAAS_REQUIRE_VERBS verbs must be available, and f runs on verbs
// alone: shm and tcp were tested outside the virtual machine.
func providers(t *testing.T, f func(t *testing.T, provider string)) {
	for _, p := range []string{SHM, TCP, Verbs} {
		t.Run(p, func(t *testing.T) {
			if p != Verbs && os.Getenv("RFAAS_REQUIRE_VERBS") != "" {
				t.Skip("tested outside the virtual machine")
			}
			d, err := Open(p, Options{GIDIndex: -1})
			if errors.Is(err, ErrUnsupported) && os.Getenv("RFAAS_REQUIRE_VERBS") == "" {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			d.Close()
			f(t, p)
		})
	}
}

// side is a device of one party.
type side struct {
	*Device
	t *testing.T
}

func openSide(t *testing.T, provider string) side {
	t.Helper()
	d, err := Open(provider, Options{GIDIndex: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return side{d, t}
}

func (s side) domain() *Domain {
	s.t.Helper()
	d, err := s.NewDomain()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(d.Close)
	return d
}

func alloc(t *testing.T, d *Domain, size uint64, a Access) *Memory {
	t.Helper()
	m, err := d.Alloc(size, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Free)
	return m
}

func window(t *testing.T, d *Domain, m *Memory, offset, size uint64, a Access) *Memory {
	t.Helper()
	w, err := d.Window(m, offset, size, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Free)
	return w
}

// connect joins a new connection of each domain; the peer reaches what a exposes. On tcp a server serves the first one.
func connect(t *testing.T, a, b *Domain, expose ...*Memory) (mine, peers *Conn) {
	t.Helper()
	mine, err := a.NewConn(expose...)
	if err != nil {
		t.Fatal(err)
	}
	peers, err = b.NewConn()
	if err != nil {
		t.Fatal(err)
	}
	join(t, mine, peers)
	return mine, peers
}

// join connects two connections, and closes them at the end of the test. On tcp a server serves the first one.
func join(t *testing.T, mine, peers *Conn) {
	t.Helper()
	t.Cleanup(mine.Close)
	t.Cleanup(peers.Close)
	x, err := mine.Blob()
	if err != nil {
		t.Fatal(err)
	}
	y, err := peers.Blob()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(peers.Connect(t.Context(), x), mine.Connect(t.Context(), y)); err != nil {
		t.Fatal(err)
	}
	if _, ok := BlobToken(x); ok {
		s := newServer(t)
		t.Cleanup(mine.Close) // before the server
		if err := mine.Serve(s); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRawProviderOperations(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		owner, peer := openSide(t, provider), openSide(t, provider)
		od := owner.domain()
		m := alloc(t, od, 300_000, RemoteRead|RemoteWrite|RemoteAtomic)
		_, c := connect(t, od, peer.domain(), m)
		ref := m.Ref()
		r := rand.New(rand.NewPCG(1, 1))
		for _, size := range []int{0, 1, 64, 4097, 1 << 16, 1<<16 + 1, 200_000} {
			in, out := make([]byte, size), make([]byte, size)
			for i := range in {
				in[i] = byte(r.Uint32())
			}
			if err := c.Write(in, ref.Addr+64, ref.Key, soon); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(in, m.Bytes()[64:64+size]) {
				t.Errorf("%d bytes: not what was written", size)
			}
			if err := c.Read(out, ref.Addr+64, ref.Key, soon); err != nil || !bytes.Equal(in, out) {
				t.Errorf("%d bytes: not what was read: %v", size, err)
			}
		}
		clear(m.Bytes()[:256])
		adds := make([]Add, MaxAdds)
		for round := range uint64(5) {
			for i := range adds {
				adds[i] = Add{Addr: ref.Addr + uint64(8*i), Value: uint64(i + 1)}
			}
			n, err := c.FetchAdd(adds, ref.Key, soon)
			if err != nil || n != len(adds) {
				t.Fatal(n, err)
			}
			for i, a := range adds {
				if a.Old != round*uint64(i+1) {
					t.Errorf("word %d was %d in round %d", i, a.Old, round)
				}
			}
		}
		if _, err := c.FetchAdd(make([]Add, MaxAdds+1), ref.Key, soon); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v", err)
		}
		// Posts: all arrive, and what is read afterwards is the last of them.
		for i := range 100 {
			line := bytes.Repeat([]byte{byte(i)}, 64)
			for {
				err := c.Post(line, ref.Addr, ref.Key)
				if err == nil {
					break
				}
				if !errors.Is(err, ErrBusy) {
					t.Fatal(err)
				}
			}
		}
		if err := c.Post(make([]byte, MaxPosted+1), ref.Addr, ref.Key); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v", err)
		}
		got := make([]byte, 64)
		if err := c.Read(got, ref.Addr, ref.Key, soon); err != nil || got[0] != 99 || got[63] != 99 {
			t.Errorf("%v %v", got, err)
		}
		if n, err := c.Posted(); n != 0 || err != nil { // the read came after them
			t.Errorf("%d posts are under way, %v", n, err)
		}
		if err := c.Err(); err != nil {
			t.Error(err)
		}
		c.Close()
		if err := c.Read(got, ref.Addr, ref.Key, soon); !errors.Is(err, ErrConnection) {
			t.Errorf("closed: %v", err)
		}
	})
}

// A board as the resource manager has it: what an executor and a client may do, and what they are refused although they know the
// right key and address.
func TestRawProviderRights(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		manager := openSide(t, provider)
		board := alloc(t, manager.domain(), 8192, RemoteRead|RemoteWrite)
		clients := manager.domain()
		whole := window(t, clients, board, 0, 8192, RemoteRead)
		type party struct {
			line, cells *Memory
			conn        *Conn
		}
		domains := [2]*Domain{manager.domain(), manager.domain()}
		var executors [2]party
		join := func(i int) {
			e := &executors[i]
			if e.line == nil {
				e.line = window(t, domains[i], board, 4096+64*uint64(i), 64, RemoteRead|RemoteWrite)
				e.cells = alloc(t, domains[i], 512, RemoteRead|RemoteWrite|RemoteAtomic)
			}
			_, e.conn = connect(t, domains[i], openSide(t, provider).domain(), e.line, e.cells)
		}
		join(0)
		join(1)
		client := func() *Conn {
			_, c := connect(t, clients, openSide(t, provider).domain(), whole)
			return c
		}
		line := bytes.Repeat([]byte{0xa5}, 64)
		for i := range executors {
			e := &executors[i]
			if err := e.conn.Write(line, e.line.Ref().Addr, e.line.Ref().Key, soon); err != nil {
				t.Fatal(err)
			}
			if _, err := e.conn.FetchAdd([]Add{{Addr: e.cells.Ref().Addr, Value: 3}}, e.cells.Ref().Key, soon); err != nil {
				t.Fatal(err)
			}
		}
		got := make([]byte, 192)
		c := client()
		if err := c.Read(got, whole.Ref().Addr+4096, whole.Ref().Key, soon); err != nil ||
			!bytes.Equal(got, append(bytes.Repeat(line, 2), make([]byte, 64)...)) {
			t.Errorf("%x %v", got, err)
		}
		snapshot := bytes.Clone(board.Bytes())
		a, b := &executors[0], &executors[1]
		refused := func(what string, err error) {
			t.Helper()
			var e *Error
			if !errors.As(err, &e) || e.Status != StatusInvalid {
				t.Errorf("%s: %v", what, err)
			}
			if !bytes.Equal(snapshot, board.Bytes()) || b.cells.Bytes()[0] != 3 {
				t.Errorf("%s: memory has changed", what)
			}
		}
		for _, key := range []Ref{whole.Ref(), a.line.Ref(), a.cells.Ref()} {
			c = client()
			refused("a client writes", c.Write(line[:8], key.Addr, key.Key, soon))
			if err := c.Read(got[:8], whole.Ref().Addr, whole.Ref().Key, soon); !errors.Is(err, ErrConnection) && !errors.Is(err, ErrInvalid) {
				t.Errorf("the refused connection goes on: %v", err)
			}
		}
		c = client()
		refused("a client reads cells", c.Read(got[:8], a.cells.Ref().Addr, a.cells.Ref().Key, soon))
		c = client()
		_, err := c.FetchAdd([]Add{{Addr: a.cells.Ref().Addr, Value: 1}}, a.cells.Ref().Key, soon)
		refused("a client charges", err)
		c = client()
		refused("a client reads behind the board", c.Read(got[:8], whole.Ref().Addr+8192, whole.Ref().Key, soon))
		refused("an executor writes its neighbour's line", a.conn.Write(line, b.line.Ref().Addr, b.line.Ref().Key, soon))
		join(0)
		refused("an executor writes its neighbour's line with its own key", a.conn.Write(line, b.line.Ref().Addr, a.line.Ref().Key, soon))
		join(0)
		refused("an executor writes past its line", a.conn.Write(line[:16], a.line.Ref().Addr+56, a.line.Ref().Key, soon))
		join(0)
		_, err = a.conn.FetchAdd([]Add{{Addr: b.cells.Ref().Addr, Value: 1}}, b.cells.Ref().Key, soon)
		refused("an executor charges its neighbour's cell", err)
		join(0)
		refused("an executor reads its neighbour's cells", a.conn.Read(got[:8], b.cells.Ref().Addr, b.cells.Ref().Key, soon))
		join(0)
		refused("an executor writes the board with the clients' key", a.conn.Write(line, whole.Ref().Addr+4096+64, whole.Ref().Key, soon))
		join(0)
		if err := a.conn.Write(line, a.line.Ref().Addr, a.line.Ref().Key, soon); err != nil {
			t.Errorf("after all that: %v", err)
		}
		if err := b.conn.Write(line, b.line.Ref().Addr, b.line.Ref().Key, soon); err != nil {
			t.Errorf("the neighbour: %v", err)
		}
	})
}

func TestWindowBounds(t *testing.T) {
	s := openSide(t, SHM)
	d := s.domain()
	m := alloc(t, d, 4096, RemoteRead)
	for _, w := range [][2]uint64{{0, 0}, {4096, 1}, {0, 4097}, {1 << 63, 1 << 63}} {
		if _, err := d.Window(m, w[0], w[1], RemoteRead); !errors.Is(err, ErrInvalid) {
			t.Errorf("%v: %v", w, err)
		}
	}
	if _, err := d.Window(m, 0, 64, RemoteWrite); !errors.Is(err, ErrInvalid) {
		t.Errorf("a writable window of what is read-only: %v", err)
	}
	if _, err := d.NewConn(make([]*Memory, MaxExposed+1)...); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// Windows anywhere in a region, also across pages: reads and writes hit their bytes.
func TestRawProviderWindows(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		owner, peer := openSide(t, provider), openSide(t, provider)
		m := alloc(t, owner.domain(), 5*4096, RemoteRead|RemoteWrite)
		for _, w := range [][2]uint64{{0, 64}, {64, 64}, {4096 - 64, 128}, {3 * 4096, 4096}, {5*4096 - 8, 8}, {100, 9000}} {
			d := owner.domain()
			win := window(t, d, m, w[0], w[1], RemoteRead|RemoteWrite)
			_, c := connect(t, d, peer.domain(), win)
			data := bytes.Repeat([]byte{byte(w[0]/64 + 1)}, int(w[1]))
			if err := c.Write(data, win.Ref().Addr, win.Ref().Key, soon); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(m.Bytes()[w[0]:w[0]+w[1]], data) {
				t.Errorf("window %v: written elsewhere", w)
			}
			got := make([]byte, w[1])
			if err := c.Read(got, win.Ref().Addr, win.Ref().Key, soon); err != nil || !bytes.Equal(got, data) {
				t.Errorf("window %v: %v", w, err)
			}
		}
	})
}

// ReadParts reads parts of any size from several regions, also more than can be under way at a time.
func TestRawProviderReadsParts(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		owner, peer := openSide(t, provider), openSide(t, provider)
		d := owner.domain()
		large, small := alloc(t, d, 2<<20, RemoteRead), alloc(t, d, 8192, RemoteRead)
		for i := range large.Bytes() {
			large.Bytes()[i] = byte(i >> 3)
		}
		for i := range small.Bytes() {
			small.Bytes()[i] = byte(i * 5)
		}
		mine, err := d.NewBulkConn(large, small)
		if err != nil {
			t.Fatal(err)
		}
		c, err := peer.domain().NewBulkConn()
		if err != nil {
			t.Fatal(err)
		}
		join(t, mine, c)
		random := rand.New(rand.NewPCG(3, 4))
		for _, count := range []int{1, 2, 16, 17, 90} {
			var parts []Part
			var want []byte
			for range count {
				m := []*Memory{large, small}[random.IntN(2)]
				at := random.Uint64N(m.Ref().Size)
				n := 1 + random.Uint64N(min(m.Ref().Size-at, []uint64{512, 4096, 300 << 10}[random.IntN(3)]))
				parts, want = append(parts, Part{m.Ref().Addr + at, n, m.Ref().Key}), append(want, m.Bytes()[at:at+n]...)
			}
			got := make([]byte, len(want))
			if err := c.ReadParts(got, parts, soon); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d parts: %v", count, err)
			}
		}
		for what, parts := range map[string][]Part{"empty": {{large.Ref().Addr, 0, large.Ref().Key}}, "too large": {{large.Ref().Addr, 9, large.Ref().Key}}, "too small": {{large.Ref().Addr, 7, large.Ref().Key}}} {
			if err := c.ReadParts(make([]byte, 8), parts, soon); !errors.Is(err, ErrInvalid) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := c.ReadParts(make([]byte, 16), []Part{{large.Ref().Addr, 8, large.Ref().Key}, {small.Ref().Addr + 8192, 8, small.Ref().Key}}, soon); err == nil {
			t.Error("a part beyond the region was read")
		}
	})
}

// The end of a peer is an error within a bounded time.
func TestRawProviderPeerEnds(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		owner, peer := openSide(t, provider), openSide(t, provider)
		d := owner.domain()
		m := alloc(t, d, 64, RemoteRead)
		mine, c := connect(t, d, peer.domain(), m)
		b := make([]byte, 8)
		if err := c.Read(b, m.Ref().Addr, m.Ref().Key, soon); err != nil {
			t.Fatal(err)
		}
		mine.Close()
		var err error
		for end := time.Now().Add(soon); err == nil && time.Now().Before(end); {
			err = c.Read(b, m.Ref().Addr, m.Ref().Key, 2*time.Second)
		}
		var e *Error // on verbs the peer no longer answers; soft-RoCE may not notice before our time-out
		if !errors.As(err, &e) || e.Status.Class() != ErrConnection && e.Status != StatusInvalid && e.Status != StatusDeadline {
			t.Errorf("%v", err)
		}
		if c.Err() == nil {
			t.Error("the connection is thought to be good")
		}
	})
}

// Several goroutines on one connection, several connections on one word: sums are exact.
func TestRawProviderContention(t *testing.T) {
	providers(t, func(t *testing.T, provider string) {
		owner := openSide(t, provider)
		d := owner.domain()
		m := alloc(t, d, 64, RemoteRead|RemoteAtomic)
		rounds := 2000
		if provider == Verbs {
			rounds = 100
		}
		var wg sync.WaitGroup
		errs := make(chan error, 6)
		for range 3 {
			_, c := connect(t, d, openSide(t, provider).domain(), m)
			for range 2 {
				wg.Go(func() {
					for range rounds {
						if _, err := c.FetchAdd([]Add{{Addr: m.Ref().Addr, Value: 1}, {Addr: m.Ref().Addr + 8, Value: 3}}, m.Ref().Key, soon); err != nil {
							errs <- err
							return
						}
					}
				})
			}
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			t.Error(err)
		}
		if got, want := fmt.Sprint(m.Bytes()[:4]), fmt.Sprint([]byte{byte(6 * rounds), byte(6 * rounds >> 8), 0, 0}); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	})
}

package datalisten

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// expectant is a receiver that waits for its peer. It keeps the connection that it gets.
type expectant struct {
	token dataplane.Token
	done  chan struct{}
	came  chan net.Conn
	hello []byte
}

func newExpectant() *expectant {
	w := &expectant{done: make(chan struct{}), came: make(chan net.Conn, 1)}
	rand.Read(w.token[:])
	return w
}

// begin writes the first fields of a blob or hello of provider tcp.
func begin(b []byte, magic uint32, token dataplane.Token) {
	binary.LittleEndian.PutUint32(b, magic)
	binary.LittleEndian.PutUint16(b[4:], 1)
	copy(b[8:], token[:])
}

func (w *expectant) Done() <-chan struct{} { return w.done }

func (w *expectant) Connect(c *net.TCPConn, hello []byte) error {
	w.hello = bytes.Clone(hello)
	f, err := c.File() // has a descriptor of its own, as a receiver has
	if err != nil {
		return err
	}
	defer f.Close()
	own, err := net.FileConn(f)
	w.came <- own
	return err
}

func helloFor(token dataplane.Token) []byte {
	h := make([]byte, dataplane.HelloSize)
	begin(h, 0x54484652, token)
	return h
}

func listenForData(t *testing.T) *Listener {
	t.Helper()
	d, err := Open("127.0.0.1:0", "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d.Serve()
	t.Cleanup(d.Close)
	return d
}

func dialData(t *testing.T, d *Listener, send []byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", d.Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write(send); err != nil {
		t.Fatal(err)
	}
	return c
}

// closed waits until the other side has closed a connection.
func closed(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || strings.Contains(err.Error(), "timeout") {
		t.Fatalf("the connection is not closed: %d bytes, %v", n, err)
	}
}

// A connection goes to the worker of its token, once, with every byte that follows the hello.
func TestDataConnectionReachesItsWorker(t *testing.T) {
	d := listenForData(t)
	w, other := newExpectant(), newExpectant()
	for _, x := range []*expectant{other, w} {
		if err := d.Expect(x.token, "worker", x); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Expect(w.token, "worker", w); err == nil {
		t.Error("two receivers may have one token")
	}
	hello := helloFor(w.token)
	dialData(t, d, append(bytes.Clone(hello), "more"...))
	got := <-w.came
	defer got.Close()
	var more [4]byte
	if _, err := io.ReadFull(got, more[:]); err != nil || string(more[:]) != "more" || !bytes.Equal(w.hello, hello) {
		t.Errorf("the worker got hello %x and %q, %v", w.hello, more[:], err)
	}
	closed(t, dialData(t, d, hello)) // a second time
	if n := d.Refused(); n != 1 {
		t.Errorf("%d connections counted as refused, want 1", n)
	}
	if len(other.came) != 0 {
		t.Error("another worker has got a connection")
	}
}

// A connection is closed if no worker waits for its token, or if its hello is incomplete.
func TestUnauthenticatedDataIsRefused(t *testing.T) {
	d := listenForData(t)
	w, gone := newExpectant(), newExpectant()
	if err := d.Expect(gone.token, "worker", gone); err != nil {
		t.Fatal(err)
	}
	close(gone.done)
	if err := d.Expect(w.token, "worker", w); err != nil {
		t.Fatal(err)
	}
	flipped := w.token
	flipped[3] ^= 1
	closed(t, dialData(t, d, helloFor(flipped)))
	closed(t, dialData(t, d, helloFor(gone.token)))
	closed(t, dialData(t, d, make([]byte, dataplane.HelloSize)))
	closed(t, dialData(t, d, helloFor(w.token)[:dataplane.HelloSize-1])) // the last byte never comes
	if len(w.came) != 0 {
		t.Error("the worker has got an unauthenticated connection")
	}
	// The rest of the hello is the worker's business.
	rest := helloFor(w.token)
	rest[dataplane.HelloSize-1]++
	dialData(t, d, rest)
	(<-w.came).Close()
	if !bytes.Equal(w.hello, rest) {
		t.Errorf("the worker got hello %x", w.hello)
	}
}

// A thousand silent connections do not keep a client from connecting. Each is closed and counted.
func TestDataSilentCrowd(t *testing.T) {
	const crowd = 1000
	d := listenForData(t)
	w := newExpectant()
	if err := d.Expect(w.token, "worker", w); err != nil {
		t.Fatal(err)
	}
	var silent []net.Conn
	for range crowd {
		silent = append(silent, dialData(t, d, nil))
	}
	dialData(t, d, helloFor(w.token))
	(<-w.came).Close()
	d.Close()
	for _, c := range silent {
		closed(t, c)
	}
	if n := d.Refused(); n != crowd {
		t.Errorf("%d connections counted as refused, want %d", n, crowd)
	}
}

// Many unauthenticated connections arrive right after a peer's, while this process is busy. The peer's hello, which has already arrived, is read
// before they evict the peer.
func TestDataCrowdBehindAPeer(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // as in the executor
	d, err := Open("127.0.0.1:0", "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	w := newExpectant()
	if err := d.Expect(w.token, "worker", w); err != nil {
		t.Fatal(err)
	}
	peer := dialData(t, d, helloFor(w.token))
	for range 2 * dataplane.MaxPending {
		dialData(t, d, nil)
	}
	d.Serve()
	select {
	case c := <-w.came:
		c.Close()
	case <-pushedOut(peer):
		t.Error("the peer was pushed out")
	}
}

// pushedOut returns a channel that is closed when the other side has closed a connection.
func pushedOut(c net.Conn) <-chan struct{} {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = c.Read(make([]byte, 1))
	}()
	return gone
}

func TestDataAddresses(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	d, err := Open("127.0.0.1:"+strconv.Itoa(port)+"-"+strconv.Itoa(min(port+50, 65535)), "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if strings.HasSuffix(d.Address, ":"+strconv.Itoa(port)) {
		t.Errorf("it listens on %s, which another has", d.Address)
	}
	for address, want := range map[string]string{
		"127.0.0.1:" + strconv.Itoa(port): "address already in use",
		"0.0.0.0:0":                       "set data-advertise",
		"127.0.0.1":                       "want host:port or host:first-last",
		"127.0.0.1:9-8":                   "neither a port",
		"127.0.0.1:0-8":                   "neither a port",
		"127.0.0.1:1-70000":               "neither a port",
	} {
		if d, err := Open(address, "", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", address, err, want)
			if d != nil {
				d.Close()
			}
		}
	}
	all, err := Open("127.0.0.1:0", "localhost", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	if !strings.HasPrefix(all.Address, "127.0.0.1:") && !strings.HasPrefix(all.Address, "[::1]:") {
		t.Errorf("localhost is %s", all.Address)
	}
}

// An address to which no peer can connect is refused, and the log warns of one to which probably none can.
func TestAdvertised(t *testing.T) {
	own := control.ListOwnAddresses()
	for _, k := range []struct{ listen, advertise, refused, warning string }{
		{"127.0.0.1:0", "", "", ""},
		{"127.0.0.1:0", "127.0.0.9", "", ""},
		{"0.0.0.0:0", "127.0.1.1", "loopback address 127.0.1.1", ""},
		{"0.0.0.0:0", "203.0.113.7", "", "no interface"},
		{"127.0.0.1:0", "0.0.0.0", "0.0.0.0", ""},
		{"127.0.0.1:0", "::", "::", ""},
		{"127.0.0.1:0", "224.0.0.1", "224.0.0.1", ""},
		{"127.0.0.1:0", "ff02::1", "ff02::1", ""},
		{"127.0.0.1:0", "255.255.255.255", "255.255.255.255", ""},
	} {
		var log bytes.Buffer
		d, err := Open(k.listen, k.advertise, slog.New(slog.NewTextHandler(&log, nil)))
		if err == nil {
			d.Close()
		}
		switch {
		case (err != nil) != (k.refused != ""), err != nil && !strings.Contains(err.Error(), k.refused):
			t.Errorf("%+v: %v", k, err)
		case (log.Len() > 0) != (k.warning != ""), !strings.Contains(log.String(), k.warning):
			t.Errorf("%+v: the log: %s", k, log.String())
		}
	}
	bound := &net.TCPAddr{IP: net.IPv4(198, 51, 100, 1)}
	own.All = append(own.All, netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2"))
	for ip, want := range map[string]string{"198.51.100.1": "", "198.51.100.2": "bound to 198.51.100.1", "198.51.100.3": "no interface"} {
		if got := doubtful(netip.MustParseAddr(ip), bound, own); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q", ip, got)
		}
	}
}

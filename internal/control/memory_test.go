package control

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"

	"github.com/rfaas-go/rfaas/internal/identity"
)

// portDir names the directory of a port process, which TestPortProcess serves.
const portDir = "RFAAS_TEST_PORT_DIR"

// TestPortProcess is not a test: portProcess runs it in a separate process, so that the memory of a port can be
// measured.
func TestPortProcess(t *testing.T) {
	dir := os.Getenv(portDir)
	if dir == "" {
		t.Skip("runs in a process of its own")
	}
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: filepath.Join(dir, "secret"), AddressFile: filepath.Join(dir, "address"),
		Bounds: Bounds{UnauthBytes: 16 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	RegisterExecutorServer(p.Server, &infoServer{})
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin) // ends with the parent
	p.Close(t.Context())
}

// process is a port in a separate process.
type process struct {
	t       *testing.T
	pid     int
	dir     string
	address string
}

func portProcess(t *testing.T) *process {
	t.Helper()
	if testing.Short() {
		t.Skip("the race detector, with which short tests run, takes memory of its own")
	}
	p := &process{t: t, dir: t.TempDir()}
	cmd := exec.Command(os.Args[0], "-test.run=^TestPortProcess$")
	cmd.Env = append(os.Environ(), portDir+"="+p.dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the process of the port: %v", err)
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the process of the port said %q, %v", line, err)
	}
	b, err := os.ReadFile(filepath.Join(p.dir, "address"))
	if err != nil {
		t.Fatal(err)
	}
	p.pid, p.address = cmd.Process.Pid, strings.TrimSpace(string(b))
	return p
}

// peak returns the largest memory use of the process so far, in bytes.
func (p *process) peak() int64 {
	p.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	if err != nil {
		p.t.Fatal(err)
	}
	m := regexp.MustCompile(`VmHWM:\s*(\d+) kB`).FindSubmatch(b)
	if m == nil {
		p.t.Fatal("no VmHWM")
	}
	kib, err := strconv.ParseInt(string(m[1]), 10, 64)
	if err != nil {
		p.t.Fatal(err)
	}
	return kib << 10
}

// attacker is an HTTP/2 client that follows only the rules of HTTP/2.
type attacker struct {
	conn   net.Conn
	framer *http2.Framer
	block  bytes.Buffer
	hpack  *hpack.Encoder
}

// attack connects and reads the server's settings.
func attack(t *testing.T, address string) *attacker {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	a := &attacker{conn: conn, framer: http2.NewFramer(conn, conn)}
	a.hpack = hpack.NewEncoder(&a.block)
	if _, err = io.WriteString(conn, http2.ClientPreface); err == nil {
		_, err = a.settled(0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// call starts a call of a method.
func (a *attacker) call(stream uint32, method string, more ...string) error {
	a.block.Reset()
	fields := append([]string{":method", "POST", ":scheme", "http", ":path", method, ":authority", "rfaas", "content-type", "application/grpc", "te", "trailers"}, more...)
	for i := 0; i < len(fields); i += 2 {
		if err := a.hpack.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}); err != nil {
			return err
		}
	}
	return a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: a.block.Bytes(), EndHeaders: true})
}

// unfinished sends a message without its last byte, as far as the server's flow control allows. It returns after the
// server has read what was sent. The error says that the server has closed the connection.
func (a *attacker) unfinished(stream uint32, size int) error {
	head := make([]byte, 5)
	binary.BigEndian.PutUint32(head[1:], uint32(size))
	err := a.framer.WriteData(stream, false, head)
	// The server opens the window for the message when it has read its head.
	window, err2 := a.settled(stream)
	if err = errors.Join(err, err2); err != nil {
		return err
	}
	for left := min(size-1, window); left > 0; {
		n := min(left, 16<<10)
		if err := a.framer.WriteData(stream, false, make([]byte, n)); err != nil {
			return err
		}
		left -= n
	}
	_, err = a.settled(0)
	return err
}

// settled waits until the server opens the window of stream or ends the stream, or, if stream is 0, acknowledges
// settings. It returns how many bytes the server allows.
func (a *attacker) settled(stream uint32) (window int, err error) {
	if stream == 0 {
		if err := a.framer.WriteSettings(); err != nil { // pings are counted
			return 0, err
		}
	}
	a.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	for {
		f, err := a.framer.ReadFrame()
		if err != nil {
			return 0, err
		}
		switch f := f.(type) {
		case *http2.WindowUpdateFrame:
			if f.StreamID == stream && stream != 0 {
				return int(f.Increment), nil
			}
		case *http2.SettingsFrame:
			if f.IsAck() && stream == 0 {
				return 0, nil
			}
		case *http2.RSTStreamFrame:
			if f.StreamID == stream && stream != 0 {
				return 0, nil
			}
		}
	}
}

// mostGrowth is how much a port may grow under attack by clients without a credential.
const mostGrowth = 32 << 20

// A port stores no message of an unauthenticated caller.
func TestUnauthenticatedCallsTakeNoMemory(t *testing.T) {
	p := portProcess(t)
	before := p.peak()
	a := attack(t, p.address)
	var err error
	for i := range uint32(100) {
		stream := 2*i + 1
		if err = a.call(stream, Executor_Lease_FullMethodName); err == nil {
			err = a.unfinished(stream, MaxMessage)
		}
		if err != nil {
			t.Logf("the port hung up at stream %d: %v", i, err)
			break
		}
	}
	if grown := p.peak() - before; grown > mostGrowth {
		t.Errorf("100 unfinished unauthenticated messages: the port has grown by %d MiB", grown>>20)
	}
	if _, err := dial(t, p.address, DialConfig{SecretFile: filepath.Join(p.dir, "secret")}).Info(t.Context(), &InfoRequest{}); err != nil {
		t.Errorf("somebody who has the secret, afterwards: %v", err)
	}
}

// Many unauthenticated connections use no more memory than a few: the port closes the oldest.
func TestManyUnauthenticatedConnectionsTakeNoMemory(t *testing.T) {
	p := portProcess(t)
	before := p.peak()
	for range 3000 {
		a := attack(t, p.address)
		// The beginning of headers that never end.
		if err := a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: make([]byte, 8<<10)}); err != nil {
			t.Logf("the port hung up: %v", err)
		}
	}
	if grown := p.peak() - before; grown > 2*mostGrowth {
		t.Errorf("3000 unauthenticated connections: the port has grown by %d MiB", grown>>20)
	}
}

// serveHere serves a port in this process.
func serveHere(t *testing.T, b Bounds, server ExecutorServer) (address string, connect func() ExecutorClient) {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "secret")
	p, err := OpenPort(PortConfig{Listen: "127.0.0.1:0", SecretFile: secret, Bounds: b})
	if err != nil {
		t.Fatal(err)
	}
	RegisterExecutorServer(p.Server, server)
	if err := p.Serve(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Server.Stop()
		p.audit.Close()
	})
	return p.Address, func() ExecutorClient {
		t.Helper()
		return dial(t, p.Address, DialConfig{SecretFile: secret})
	}
}

// A connection without an authenticated call is closed in time. An authenticated one stays open.
func TestFirstCallHasADeadline(t *testing.T) {
	var server wayServer
	address, connect := serveHere(t, Bounds{FirstCall: 100 * time.Millisecond}, &server)
	known := connect()
	if _, err := known.Info(t.Context(), &InfoRequest{}); err != nil {
		t.Fatal(err)
	}
	way := server.way.Load()
	silent := attack(t, address) // gRPC's own deadline ends with the settings
	dropped(t, silent.conn)
	if _, err := known.Info(t.Context(), &InfoRequest{}); err != nil || server.way.Load() != way {
		t.Errorf("who was known had to connect again, or %v", err)
	}
}

// The server's settings tell a client how many streams its connection may have.
func TestStreamsOfAConnectionAreBounded(t *testing.T) {
	address, _ := serveHere(t, Bounds{Streams: 77}, &infoServer{})
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	f, err := http2.NewFramer(conn, conn).ReadFrame()
	if err != nil {
		t.Fatal(err)
	}
	settings, ok := f.(*http2.SettingsFrame)
	if !ok {
		t.Fatalf("the first frame is %v", f)
	}
	if n, ok := settings.Value(http2.SettingMaxConcurrentStreams); !ok || n != 77 {
		t.Errorf("%d streams, want 77", n)
	}
}

// A connection on which all calls are refused is closed.
func TestRefusedCallsAreBounded(t *testing.T) {
	address, _ := serveHere(t, Bounds{}, &infoServer{})
	a := attack(t, address)
	stream := uint32(1)
	for ; stream < 4*maxRefused; stream += 2 {
		if err := a.call(stream, Executor_Info_FullMethodName, "grpc-timeout", "99999999H"); err != nil {
			break
		}
	}
	dropped(t, a.conn)
}

// A connection with refused and admitted calls is closed too, when gRPC has to keep too many refused ones.
func TestRefusedCallsOfTheKnownAreBounded(t *testing.T) {
	r := newRealm(t, "127.0.0.1:0", false)
	c := NewExecutorClient(r.as(DialConfig{TokenFile: r.token("ann", identity.Claims{Tenant: "ann", Role: "tenant"}, 0)}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour) // of which the server is told
	defer cancel()
	var first context.Context
	for i := range 2 * maxRefusedKnown {
		if _, err := c.Drain(ctx, &DrainRequest{}); err == nil {
			t.Fatal("a tenant drains")
		}
		if _, err := c.Info(ctx, &InfoRequest{}); err != nil {
			continue // the connection was closed under it
		}
		if now := Connection(r.whoami.ctx); first == nil {
			first = now
		} else if now != first {
			if i < maxRefusedKnown/2 {
				t.Errorf("closed after %d refused calls", i)
			}
			return
		}
	}
	t.Error("the connection is still open")
}

// holdServer accepts libraries and keeps streams open.
type holdServer struct {
	infoServer
	uploaded atomic.Int64
}

func (h *holdServer) Upload(s grpc.ClientStreamingServer[UploadChunk, UploadReply]) error {
	for {
		c, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return s.SendAndClose(&UploadReply{})
		}
		if err != nil {
			return err
		}
		h.uploaded.Add(int64(len(c.GetData())))
	}
}

func (h *holdServer) Events(_ *EventsRequest, s grpc.ServerStreamingServer[Event]) error {
	if err := s.Send(&Event{Kind: Event_KIND_OPEN}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

func (h *holdServer) Leasing(s grpc.BidiStreamingServer[LeaseRequest, LeaseReply]) error {
	for {
		r, err := s.Recv()
		if err != nil {
			return nil
		}
		if err := s.Send(&LeaseReply{LeaseId: uint64(len(r.GetClientBlobs()))}); err != nil {
			return err
		}
	}
}

// The bounds allow everything that one client does: one connection has hundreds of leases, requests more, and uploads a
// library.
func TestOneConnectionDoesItAll(t *testing.T) {
	var server holdServer
	_, connect := serveHere(t, Bounds{}, &server)
	c := connect()
	for i := range 700 {
		s, err := c.Events(t.Context(), &EventsRequest{LeaseId: uint64(i)})
		if err == nil {
			_, err = s.Recv()
		}
		if err != nil {
			t.Fatalf("the events of lease %d: %v", i, err)
		}
	}
	most := &LeaseRequest{RequestId: make([]byte, RequestIDSize), CodeSha256: make([]byte, 32), Tenant: strings.Repeat("t", 255)}
	for range 1024 { // workers, each with the largest blob
		most.ClientBlobs = append(most.ClientBlobs, make([]byte, 256))
	}
	for i := range mostAsking {
		s, err := c.Leasing(t.Context())
		if err == nil {
			err = s.Send(most)
		}
		if err != nil {
			t.Fatal(err)
		}
		if l, err := s.Recv(); err != nil || l.GetLeaseId() != 1024 {
			t.Fatalf("stream %d of requests: %v, %v", i, l, err)
		}
	}
	const size = 64 << 20
	if _, err := Upload(t.Context(), c, "large", [sha256.Size]byte{}, size, zeros{}); err != nil || server.uploaded.Load() != size {
		t.Errorf("%v, %d bytes of %d have come", err, server.uploaded.Load(), size)
	}
	if _, err := c.Info(t.Context(), &InfoRequest{}); err != nil {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// gRPC decompresses a message before it checks its size, unless no compression is registered.
func TestNoCompression(t *testing.T) {
	if encoding.GetCompressor("gzip") != nil {
		t.Error("gzip is registered")
	}
}

package manager

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/board"
	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/link"
	"github.com/rfaas-go/rfaas/tests/testkit"
)

// forged returns a blob (of 128 bytes) or a hello of provider tcp with a token of the peer's choice.
func forged(magic string, size, at int) []byte {
	b := make([]byte, size)
	copy(b, magic+"\x01\x00")
	for i := range 16 {
		b[at+i] = 7
	}
	return b
}

// connectAs opens a data connection with a token and returns it.
func (w *world) connectAs(token dataplane.Token) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", w.memory.tcp.data.Address)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(testkit.Bound))
	hello := forged("RFHT", dataplane.HelloSize, 24)
	copy(hello[8:], token[:])
	if _, err := c.Write(hello); err != nil {
		w.t.Fatal(err)
	}
	return c
}

// attachForged attaches a client whose data connection the test makes itself.
func (w *world) attachForged() (*control.AttachClientReply, dataplane.Token) {
	w.t.Helper()
	blob := forged("RFQT", 128, 8)
	blob[6], blob[120] = 3, byte(w.config.Encrypt)
	if blob[120] != dataplane.EncryptOff {
		blob[104] = 1 // the secret
	}
	r, err := w.client.AttachClient(w.t.Context(), &control.AttachClientRequest{Provider: dataplane.TCP, Blob: blob})
	if err != nil {
		w.t.Fatal(err)
	}
	token, ok := dataplane.BlobToken(r.GetBlob())
	if !ok {
		w.t.Fatalf("blob %x", r.GetBlob())
	}
	return r, token
}

// closedByPeer waits until the manager has closed a connection.
func closedByPeer(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection was not closed: %v", err)
	}
}

// Nobody reaches the manager's memory without the token of an attach call. A client that breaks the protocol loses its connection, and
// others read on.
func TestMemoryOverTCPHostile(t *testing.T) {
	w := newWorld(t, dataplane.TCP, 8)
	good, _ := w.reader()
	testkit.Eventually(t, "the good client is subscribed", func() bool { return w.notifier.count() == 1 })
	closedByPeer(t, w.connectAs(dataplane.Token{1, 2, 3}))
	if n := w.memory.tcp.data.Refused(); n != 1 {
		t.Errorf("%d connections were refused, want 1", n)
	}
	before := bytes.Clone(w.memory.whole.Bytes())
	r, token := w.attachForged()
	c := w.connectAs(token)
	if _, err := io.ReadFull(c, make([]byte, dataplane.HelloSize)); err != nil {
		t.Fatal(err)
	}
	write := make([]byte, 24+64) // to the board, which clients may only read
	write[0] = 1
	binary.LittleEndian.PutUint32(write[4:], 64)
	binary.LittleEndian.PutUint32(write[12:], r.GetBoard().GetKey())
	binary.LittleEndian.PutUint64(write[16:], r.GetBoard().GetAddr()+board.HeaderSize)
	if _, err := c.Write(write); err != nil {
		t.Fatal(err)
	}
	closedByPeer(t, c)
	closedByPeer(t, w.connectAs(token)) // a second time
	testkit.Eventually(t, "the hostile client is forgotten", func() bool {
		w.notifier.sweep()
		w.notifier.post()
		return w.notifier.count() == 1
	})
	if !bytes.Equal(before, w.memory.whole.Bytes()) {
		t.Error("the board has changed")
	}
	if err := good.Read(make([]byte, board.HeaderSize), 0); err != nil {
		t.Errorf("another client: %v", err)
	}
}

// A manager that requires encryption is read and written over encrypted connections. It refuses clients that encrypt nothing. One that sends
// plain frames on an encrypted connection loses it, and is counted.
func TestMemoryOverTCPEncrypted(t *testing.T) {
	w := newWorld(t, dataplane.TCP, 8)
	w.stop()
	w.config.Encrypt = dataplane.EncryptRequire
	w.start(8)
	w.executor(1)
	good, reader := w.reader()
	if err := reader.Refresh(); err != nil {
		t.Error(err)
	}
	off, err := dataplane.Open(dataplane.TCP, dataplane.Options{GIDIndex: -1, ActiveOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer off.Close()
	const names = "data encryption is off here and require at the tcp peer"
	if _, err := link.AttachClient(t.Context(), w.client, off); !errors.Is(err, dataplane.ErrUnsupported) || !strings.Contains(err.Error(), names) {
		t.Errorf("a client without encryption: %v", err)
	}
	before := bytes.Clone(w.memory.whole.Bytes())
	r, token := w.attachForged()
	c := w.connectAs(token)
	if _, err := io.ReadFull(c, make([]byte, dataplane.HelloSize)); err != nil {
		t.Fatal(err)
	}
	read := make([]byte, 24)
	read[0], read[4] = 3, 64
	binary.LittleEndian.PutUint32(read[12:], r.GetBoard().GetKey())
	binary.LittleEndian.PutUint64(read[16:], r.GetBoard().GetAddr())
	if _, err := c.Write(read); err != nil {
		t.Fatal(err)
	}
	if said, err := io.ReadAll(c); len(said) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a plain read is answered by %x, %v", said, err)
	}
	testkit.Eventually(t, "the forged frame is counted", func() bool { return w.memory.tcp.device.Forged() == 1 })
	if !bytes.Equal(before, w.memory.whole.Bytes()) {
		t.Error("the board has changed")
	}
	if err := good.Read(make([]byte, board.HeaderSize), 0); err != nil {
		t.Errorf("another client: %v", err)
	}
}

// A client that attaches and never connects holds nothing after a while.
func TestMemoryOverTCPNeverConnects(t *testing.T) {
	w := newWorld(t, dataplane.TCP, 8)
	queues := dataplane.Live()["queue pairs"]
	_, token := w.attachForged()
	total := func() int {
		w.attach.mu.Lock()
		defer w.attach.mu.Unlock()
		return w.attach.total
	}
	if total() != 1 {
		t.Errorf("%d connections are counted, want 1", total())
	}
	testkit.Eventually(t, "the connection is given up", func() bool { return total() == 0 && dataplane.Live()["queue pairs"] == queues })
	closedByPeer(t, w.connectAs(token))
}

// A manager that ends gives up the connections that it waits for.
func TestMemoryOverTCPEnds(t *testing.T) {
	w := newWorld(t, dataplane.TCP, 8)
	w.attachForged()
	w.executor(1)
	w.stop()
	if live := dataplane.Live(); live["queue pairs"] != 1 { // the executor's own
		t.Errorf("left: %v", live)
	}
	w.start(8)
}

// While the manager's process is stopped, reads of its memory end within their bound. Afterwards a new connection reads again.
func TestMemoryOverTCPOfAStoppedManager(t *testing.T) {
	dir := t.TempDir()
	cmd := role(t, "manager", dir, "--providers tcp")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	made(t, filepath.Join(dir, "secret"))
	conn, err := control.Dial("unix:"+filepath.Join(dir, "m"), control.DialConfig{SecretFile: filepath.Join(dir, "secret")})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	devices := link.Devices{}
	defer devices.Close()
	var c *link.Client
	attach := func() error {
		_, err := devices.Try([]string{dataplane.TCP}, func(dev *dataplane.Device) (err error) {
			c, err = link.AttachClient(t.Context(), control.NewManagerClient(conn), dev)
			return err
		})
		return err
	}
	testkit.Eventually(t, "the manager answers", func() bool { return attach() == nil })
	head := make([]byte, board.HeaderSize)
	if err := c.Read(head, 0); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the manager is stopped", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		return err == nil && bytes.Contains(stat, []byte(") T "))
	})
	var e *dataplane.Error
	if err := c.Read(head, 0); !errors.As(err, &e) || e.Status != dataplane.StatusDeadline {
		t.Errorf("a read while the manager is stopped: %v", err)
	}
	c.Close()
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the manager answers again", func() bool { return attach() == nil })
	defer c.Close()
	if err := c.Read(head, 0); err != nil {
		t.Error(err)
	}
}

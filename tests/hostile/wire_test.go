package hostile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// wire is an HTTP/2 connection whose frames the attack writes itself.
type wire struct {
	net.Conn
	*http2.Framer
	mu     sync.Mutex
	window map[uint32]int64 // what the server lets us send: by stream, connection at 0, streams' start at 1<<31
	change chan struct{}    // gets a value when a window grows
	closed chan struct{}    // closed with the connection
}

// h2 opens a wire and sends the preface and the settings.
func (c *cluster) h2(d *daemon) *wire {
	c.Helper()
	conn := c.tcp(d)
	w := &wire{Conn: conn, Framer: http2.NewFramer(conn, conn), window: map[uint32]int64{}, change: make(chan struct{}, 1), closed: make(chan struct{})}
	w.Framer.AllowIllegalWrites = true
	io.WriteString(conn, http2.ClientPreface)
	w.WriteSettings()
	w.window[0] = 65535
	go w.read()
	return w
}

func (w *wire) read() {
	defer close(w.closed)
	for {
		f, err := w.ReadFrame()
		if err != nil {
			return
		}
		w.mu.Lock()
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if v, ok := f.Value(http2.SettingInitialWindowSize); ok {
				w.window[1<<31] = int64(v)
			}
			if !f.IsAck() {
				w.mu.Unlock()
				w.write(func() error { return w.WriteSettingsAck() })
				w.mu.Lock()
			}
		case *http2.WindowUpdateFrame:
			w.window[f.StreamID] += int64(f.Increment)
		}
		w.mu.Unlock()
		select {
		case w.change <- struct{}{}:
		default:
		}
	}
}

var writing sync.Mutex

func (w *wire) write(f func() error) error {
	writing.Lock()
	defer writing.Unlock()
	w.SetWriteDeadline(time.Now().Add(patience))
	return f()
}

// headers encodes the headers of a call without a credential.
func headers(method string, more ...hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range append([]hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method},
		{Name: ":authority", Value: "rfaas"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}}, more...) {
		e.WriteField(f)
	}
	return b.Bytes()
}

func (w *wire) open(stream uint32, method string, more ...hpack.HeaderField) error {
	return w.write(func() error {
		return w.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: headers(method, more...), EndHeaders: true})
	})
}

// room returns how many of want bytes may be sent on a stream, and takes them from the connection's window.
func (w *wire) room(stream uint32, sent, want int64) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	initial, ok := w.window[1<<31]
	if !ok {
		initial = 65535
	}
	n := min(w.window[0], initial+w.window[stream]-sent, want)
	if n <= 0 {
		return 0
	}
	w.window[0] -= n
	return n
}

// floodsMessages sends a hundred messages of 4 MiB without their last byte, as far as the server's windows permit. The server must not
// keep them all.
func floodsMessages(c *cluster, d *daemon, more ...hpack.HeaderField) string {
	const streams, size = 100, 4 << 20
	grown := d.peak()
	w := c.h2(d)
	defer w.Close()
	method := "/rfaas.control.v1.Executor/Lease"
	if d.isManager() {
		method = "/rfaas.control.v1.Manager/Settle"
	}
	message := make([]byte, size)
	binary.BigEndian.PutUint32(message[1:], size-5)
	message = message[:size-1]
	var sent [streams]int64
	for i := range sent {
		if w.open(uint32(2*i+1), method, more...) != nil {
			break
		}
	}
	total := int64(0)
	for ended := false; !ended; {
		progress := false
		for i := range sent {
			n := w.room(uint32(2*i+1), sent[i], min(int64(len(message))-sent[i], 16<<10))
			if n == 0 {
				continue
			}
			if w.write(func() error { return w.WriteData(uint32(2*i+1), false, message[sent[i]:sent[i]+n]) }) != nil {
				ended = true
				break
			}
			sent[i] += n
			total += n
			progress = true
		}
		if progress || ended || total == streams*int64(len(message)) {
			ended = ended || total == streams*int64(len(message))
			continue
		}
		select {
		case <-w.change:
		case <-w.closed:
			ended = true
		case <-time.After(time.Second): // no window grows any more
			ended = true
		}
	}
	// The server has read what it let us send when it has answered a later call.
	if s := c.served(d); s != "" {
		return "serves no tenant: " + s
	}
	if n := grown(); n > 128 {
		return fmt.Sprintf("%d MiB after %d MiB sent", n, total>>20)
	}
	return ""
}

// floodsHeaders sends one header block without an end.
func floodsHeaders(c *cluster, d *daemon) string {
	const frames, size = 4000, 16 << 10
	grown := d.peak()
	w := c.h2(d)
	defer w.Close()
	block := headers("/rfaas.control.v1.Executor/Info")
	w.write(func() error { return w.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block}) })
	// One literal header field in each frame.
	var b bytes.Buffer
	hpack.NewEncoder(&b).WriteField(hpack.HeaderField{Name: "x", Value: strings.Repeat("\x00", size-64), Sensitive: true})
	n := 0
	for ; n < frames; n++ {
		if w.write(func() error { return w.WriteContinuation(1, false, b.Bytes()) }) != nil {
			break
		}
	}
	if m := grown(); m > 64 {
		return fmt.Sprintf("%d MiB after %d MiB of headers", m, n*size>>20)
	}
	return ""
}

func sendsHugeHeader(c *cluster, d *daemon) string {
	grown := d.peak()
	for range 20 {
		w := c.h2(d)
		err := error(nil)
		for i := uint32(0); i < 50 && err == nil; i++ {
			err = w.open(2*i+1, "/rfaas.control.v1.Executor/Info", hpack.HeaderField{Name: credentialHeader, Value: strings.Repeat("x", 15<<10)})
		}
		w.Close()
		<-w.closed
	}
	if m := grown(); m > 64 {
		return fmt.Sprintf("%d MiB", m)
	}
	return ""
}

// resetsStreams opens and resets streams, each of which costs the server more than the client (CVE-2023-44487).
func resetsStreams(c *cluster, d *daemon) string {
	const n = 20000
	grown := d.peak()
	before := d.metric("go_goroutines")
	w := c.h2(d)
	defer w.Close()
	for i := range uint32(n) {
		if w.open(2*i+1, "/rfaas.control.v1.Executor/Info") != nil ||
			w.write(func() error { return w.WriteRSTStream(2*i+1, http2.ErrCodeCancel) }) != nil {
			break
		}
	}
	most := d.metric("go_goroutines") - before
	if m := grown(); m > 96 || most > 1000 {
		return fmt.Sprintf("%d MiB, %.0f goroutines more", m, most)
	}
	return ""
}

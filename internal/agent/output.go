package agent

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// output is the queue of messages that a client has not read. The sender writes as much as the socket accepts, and a
// goroutine writes the rest.
type output struct {
	mu       sync.Mutex
	page     *page
	queue    []queued
	bytes    int
	flushing bool
	closed   bool
}

type queued struct {
	b     []byte
	files []int // copies of the message's descriptors
	event bool
}

// send sends a message without blocking. The caller keeps the descriptors. If the client does not read, send ends its connection.
func (c *client) send(b []byte, files []int, event bool) {
	o := &c.out
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	if len(o.queue) == 0 && !o.flushing {
		n, err := c.write(b, files)
		if err != nil {
			o.closed = true
			go c.end(err)
			return
		}
		if b = b[n:]; len(b) == 0 {
			if event {
				o.page.events().Add(1)
			}
			return
		}
		if n > 0 {
			files = nil // the kernel sent them with the first byte
		}
	}
	if o.bytes += len(b); o.bytes > mostUnread {
		o.closed = true
		go c.end(fmt.Errorf("the client does not read: %d bytes wait for it, want at most %d", o.bytes, mostUnread))
		return
	}
	dups := copies(files)
	if len(dups) < len(files) { // the client notices that channels are missing
		o.bytes -= len(b)
		return
	}
	o.queue = append(o.queue, queued{b, dups, event})
	if !o.flushing {
		o.flushing = true
		c.work.Add(1)
		go c.flush()
	}
}

// write writes as much as the socket accepts without blocking.
func (c *client) write(b []byte, files []int) (n int, err error) {
	var oob []byte
	if len(files) > 0 {
		oob = unix.UnixRights(files...)
	}
	werr := c.raw.Write(func(fd uintptr) bool {
		for {
			n, err = unix.SendmsgN(int(fd), b, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if errors.Is(err, unix.ETOOMANYREFS) { // the user has too many descriptors in flight; the client notices that channels are missing
				n, err = len(b), nil
			}
			if !errors.Is(err, unix.EINTR) {
				return true
			}
		}
	})
	if errors.Is(err, unix.EAGAIN) {
		return 0, werr
	}
	return n, errors.Join(err, werr)
}

// flush writes the queue.
func (c *client) flush() {
	defer c.work.Done()
	o := &c.out
	o.mu.Lock()
	defer o.mu.Unlock()
	defer func() { o.flushing = false }()
	for len(o.queue) > 0 && !o.closed {
		q := o.queue[0]
		o.queue[0] = queued{}
		o.queue = o.queue[1:]
		o.mu.Unlock()
		err := c.writeAll(q.b, q.files)
		closeAll(q.files)
		o.mu.Lock()
		o.bytes -= len(q.b)
		if err != nil {
			o.closed = true
			go c.end(err)
			return
		}
		if q.event && !o.closed {
			o.page.events().Add(1)
		}
	}
}

// writeAll writes a message, and waits as long as the client does not read.
func (c *client) writeAll(b []byte, files []int) error {
	if len(files) > 0 {
		n, _, err := c.conn.WriteMsgUnix(b, unix.UnixRights(files...), nil)
		if errors.Is(err, unix.ETOOMANYREFS) { // as in write
			return nil
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	_, err := c.conn.Write(b)
	return err
}

// close drops the queue and all later messages. The page is not accessed afterwards.
func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, q := range o.queue {
		closeAll(q.files)
	}
	o.closed, o.queue = true, nil
}

package wire

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A message for which there is room is sent, however late this process is. One for which there is none fails in time.
func TestSendWithin(t *testing.T) {
	c, peer, err := SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	defer unix.Close(peer)
	c.SetWriteDeadline(time.Unix(1, 0))
	m := Message{Type: Stop, Body: make([]byte, 1000)}
	sent := 0
	for ; err == nil; sent++ {
		err = SendWithin(c, 0, &m)
	}
	if sent < 2 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("message %d: %v, want a full socket after the first message", sent, err)
	}
	if n, err := unix.Read(peer, make([]byte, Max)); n != len(m.Encode()) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if err := SendWithin(c, 0, &m); err != nil {
		t.Errorf("there is room again: %v", err)
	}
}

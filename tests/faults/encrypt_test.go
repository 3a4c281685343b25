package faults

import (
	"bytes"
	"encoding/binary"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// wire reads every packet on the client's side of the cable. It counts the packets that contain the two numbers of a steady caller's payload.
type wire struct {
	packets, seen atomic.Int64
}

const (
	steadyResult = 64 // bytes, as testdata/caller.c has it
	steadyPause  = 2 * time.Millisecond
)

// packetSocket opens a packet socket for everything on a node.
func (n *nodes) packetSocket(on machine) int {
	n.Helper()
	type result struct {
		fd  int
		err error
	}
	opened := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends in the other namespace
		fd, err := func() (int, error) {
			ns, err := os.Open(on.namespace)
			if err != nil {
				return -1, err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return -1, err
			}
			return unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(uint16(unix.ETH_P_ALL)<<8|uint16(unix.ETH_P_ALL)>>8))
		}()
		opened <- result{fd, err}
	}()
	r := <-opened
	if r.err != nil {
		n.Fatal("packet socket: ", r.err)
	}
	return r.fd
}

// listen reads the wire until the end of the test.
func (n *nodes) listen() *wire {
	n.Helper()
	w := &wire{}
	fd := n.packetSocket(n.client)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50000}); err != nil {
		n.Fatal(err)
	}
	pattern := binary.LittleEndian.AppendUint32(nil, steadyResult)
	pattern = binary.LittleEndian.AppendUint32(pattern, uint32(steadyPause.Microseconds()))
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(fd)
		for b := make([]byte, 1<<16); !stop.Load(); {
			if size, err := unix.Read(fd, b); err == nil {
				w.packets.Add(1)
				if bytes.Contains(b[:size], pattern) {
					w.seen.Add(1)
				}
			}
		}
	}()
	n.Cleanup(func() { stop.Store(true); <-done })
	return w
}

// startEncrypted starts an executor with arguments, the agent, and a steady caller.
func (n *nodes) startEncrypted(args ...string) *caller {
	n.Helper()
	d := n.newExecutorOn(n.server, "executor", append([]string{"--sandbox", "on"}, args...)...)
	n.env = append(n.env, "RFAAS_EXECUTOR="+d.address)
	n.startAgent()
	return n.newCaller(callerOptions{language: "c", steady: true, seed: 7, maxBytes: 100_000, pause: steadyPause, timeout: callerBound, on: n.client})
}

// With TLS on the control connections, calls between nodes are encrypted without any setting. Without TLS they are not, which shows that
// the test sees payloads.
func TestBetweenNodesPayloadsAreHidden(t *testing.T) {
	for name, c := range map[string]struct {
		control func(*nodes)
		setting string // data-encryption of both sides; empty: the default
		hidden  bool
	}{
		"TLS":                          {(*nodes).identify, "", true},
		"without TLS":                  {(*nodes).trust, "", false},
		"required without TLS":         {(*nodes).trust, "require", true},
		"off, and plaintext permitted": {(*nodes).trust, "off", false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newCable(t)
			c.control(n)
			if c.setting != "" {
				n.env = append(n.env, "RFAAS_DATA_ENCRYPTION="+c.setting, "RFAAS_EXECUTOR_DATA_ENCRYPTION="+c.setting)
			}
			w := n.listen()
			k := n.startEncrypted()
			n.eventually(waitBound, "200 right results", func() bool {
				k.check()
				n.lastly = k.log.tail(2000)
				return k.right.Load() >= 200
			})
			seen, packets := w.seen.Load(), w.packets.Load()
			if packets < 400 || (seen == 0) != c.hidden {
				t.Errorf("%d of %d packets have a payload in the clear; want none: %v", seen, packets, c.hidden)
			}
		})
	}
}

// Settings that contradict each other give an error that names both, and no call is made in the clear.
func TestBetweenNodesSidesThatDisagree(t *testing.T) {
	for name, c := range map[string]struct {
		control          func(*nodes)
		client, executor string
		text             string
	}{
		"client off":        {(*nodes).identify, "off", "on", "data encryption is off here and on at the tcp peer"},
		"client requires":   {(*nodes).trust, "require", "off", "data encryption is require here and off at the tcp peer"},
		"executor requires": {(*nodes).trust, "off", "require", "data encryption is off here and require at the tcp peer"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newCable(t)
			c.control(n)
			n.env = append(n.env, "RFAAS_DATA_ENCRYPTION="+c.client)
			k := n.startEncrypted("--data-encryption", c.executor)
			n.eventually(waitBound, "the caller is told why", func() bool {
				n.lastly = k.log.tail(2000)
				return strings.Contains(n.lastly, c.text)
			})
			if right := k.right.Load(); right > 0 {
				t.Errorf("%d calls were right", right)
			}
		})
	}
}

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

// wire reads every packet on the client's side of the cable, and counts the packets that contain each pattern.
type wire struct {
	packets atomic.Int64
	seen    []atomic.Int64 // by pattern
}

const (
	steadyResult = 64 // bytes, as in testdata/caller.c
	steadyPause  = 2 * time.Millisecond
)

// packetSocket opens a packet socket for all packets of a node.
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
func (n *nodes) listen(patterns ...[]byte) *wire {
	n.Helper()
	w := &wire{seen: make([]atomic.Int64, len(patterns))}
	fd := n.packetSocket(n.client)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50000}); err != nil {
		n.Fatal(err)
	}
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer unix.Close(fd)
		for b := make([]byte, 1<<16); !stop.Load(); {
			if size, err := unix.Read(fd, b); err == nil {
				w.packets.Add(1)
				for i, p := range patterns {
					if bytes.Contains(b[:size], p) {
						w.seen[i].Add(1)
					}
				}
			}
		}
	}()
	n.Cleanup(func() { stop.Store(true); <-done })
	return w
}

// words returns the bytes of numbers in memory.
func words(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
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
			w := n.listen(words(steadyResult, uint32(steadyPause.Microseconds())))
			k := n.startEncrypted()
			n.eventually(waitBound, "200 right results", func() bool {
				k.check()
				n.lastly = k.log.tail(2000)
				return k.right.Load() >= 200
			})
			seen, packets := w.seen[0].Load(), w.packets.Load()
			if packets < 400 || (seen == 0) != c.hidden {
				t.Errorf("%d of %d packets have a payload in the clear; want none: %v", seen, packets, c.hidden)
			}
		})
	}
}

// With TLS on the control connections, nodes read and write the resource manager's memory, and nothing of it crosses the network in the
// clear. Without TLS the test sees it.
func TestBetweenNodesMemoryIsHidden(t *testing.T) {
	for name, c := range map[string]struct {
		control func(*nodes)
		setting string // data-encryption of all; empty: the default
		hidden  bool
	}{
		"TLS":                  {(*nodes).identify, "", true},
		"without TLS":          {(*nodes).trust, "", false},
		"required without TLS": {(*nodes).trust, "require", true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newCable(t)
			c.control(n)
			if c.setting != "" {
				n.env = append(n.env, "RFAAS_DATA_ENCRYPTION="+c.setting, "RFAAS_EXECUTOR_DATA_ENCRYPTION="+c.setting,
					"RFAAS_MANAGER_DATA_ENCRYPTION="+c.setting)
			}
			// The head of the board, which clients read, and cores, free cores, memory and free memory of the line that the executor writes.
			w := n.listen([]byte("RFBD\x01\x00"), words(2, 2, 1800, 1800))
			n.newManagerOn(n.server, "--heartbeat", "50ms")
			d := n.newExecutorOn(n.client, "executor")
			n.eventually(waitBound, "the executor has registered over tcp", func() bool {
				n.lastly = d.log.tail(2000)
				return strings.Contains(n.lastly, "by=memory provider=tcp")
			})
			n.eventually(waitBound, "the client reads the board", func() bool {
				out, err := n.rfaas("executors", "--json")
				n.lastly = out
				return err == nil && strings.Contains(out, `"by": "memory"`) && strings.Contains(out, `"state": "idle"`)
			})
			out, _ := n.rfaas("doctor")
			if !strings.Contains(out, "reached by tcp") {
				t.Errorf("the client's node does not reach the memory: %s", out)
			}
			from := w.packets.Load()
			n.eventually(waitBound, "the capture has seen what follows", func() bool {
				return w.packets.Load() >= from+100 && (c.hidden || w.seen[0].Load() > 0 && w.seen[1].Load() > 0)
			})
			if head, line := w.seen[0].Load(), w.seen[1].Load(); c.hidden && head+line > 0 {
				t.Errorf("%d packets have the head of the board in the clear, %d a line", head, line)
			}
		})
	}
}

// Executors and clients whose setting contradicts the manager's use messages, and report why.
func TestBetweenNodesMemorySidesThatDisagree(t *testing.T) {
	const text = "data encryption is off here and on at the tcp peer"
	n := newCable(t)
	n.identify()
	n.newManagerOn(n.server)
	d := n.newExecutorOn(n.client, "executor", "--providers", "shm", "--data-encryption", "off")
	n.eventually(waitBound, "the executor reports by message", func() bool {
		n.lastly = d.log.tail(2000)
		return strings.Contains(n.lastly, "by=messages") && strings.Contains(n.lastly, text)
	})
	n.eventually(waitBound, "the client asks by message", func() bool {
		out, err := n.rfaas("--data-encryption", "off", "executors")
		n.lastly = out
		return err == nil && strings.Contains(out, text) && strings.Contains(out, "idle")
	})
	n.env = append(n.env, "RFAAS_DATA_ENCRYPTION=off")
	out, _ := n.rfaas("doctor")
	if !strings.Contains(out, text) || strings.Contains(out, "with tcp among its providers") {
		t.Errorf("the doctor does not name the settings: %s", out)
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

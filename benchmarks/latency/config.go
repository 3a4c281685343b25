package latency

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/dataplane"
	"github.com/rfaas-go/rfaas/internal/topology"
)

// Functions that can be measured.
const (
	FunctionEcho  = "echo"  // copies its payload to its result
	FunctionEmpty = "empty" // returns as many bytes without touching them

	functionDelayed = "delayed" // empty, but slower by Config.delay: for Prove
	functionReply   = "reply"   // echo for results of another size than the payload

	BuffersCopied     = "copied"     // payload and result in the caller's memory
	BuffersRegistered = "registered" // payload in registered memory, result read where it arrives
)

const (
	// modeTolerance is the share by which the calibrations of one pair may differ.
	modeTolerance = 0.25
	// remoteTolerance is the same between machines: placements do not change there, but a network has other users.
	remoteTolerance = 0.5
	// attemptsPerPair bounds how many pairs are measured for each good one that is wanted.
	attemptsPerPair = 4
	// nearNS is the bare flag round trip below which two CPUs share a cache.
	nearNS = 250
	// memoryMax bounds payload times depth, as the peer does.
	memoryMax = 1 << 30
)

// Config says what to measure. Provider, Modes and Payloads are mandatory.
type Config struct {
	Provider string
	Device   dataplane.Options // verbs
	Modes    []dataplane.WaitMode
	Payloads []int // bytes
	Result   int   // bytes; 0: as many as the payload
	Depth    int   // calls in flight; 0: 1
	Slots    int   // of the channel; 0: 8, the default of the client library, or Depth if that is more
	Eager    int   // bytes; 0: the default
	Function string
	Buffers  string        // of the C client
	Pairs    int           // good pairs wanted; 0: 15. Three times as many where results differ from peer to peer
	Batch    time.Duration // length of a batch; 0: when spinning 5 ms on shm, 20 ms on verbs within a machine, else 10 ms
	Rounds   int           // calls of a batch; 0: chosen by Batch
	Duration time.Duration // longest time for one result; 0: 30 s
	CPUs     []int         // of client and peer, or with Remote of the client alone; nil: chosen
	Peer     string        // path of rfaas-bench-peer
	Remote   string        // HOST:PORT of Serve on another machine, which starts the peer; "": the peer runs on this machine
	Progress func(line string)

	delay     time.Duration // added to each call
	callsOnly bool
}

// Validate checks the configuration and sets defaults.
func (c *Config) Validate() error {
	if c.Provider != dataplane.SHM && c.Provider != dataplane.Verbs {
		return fmt.Errorf("provider %q (shm, verbs)", c.Provider)
	}
	if c.Remote != "" && c.Provider != dataplane.Verbs {
		return fmt.Errorf("a peer on another machine (%s) needs provider verbs, not %s", c.Remote, c.Provider)
	}
	if len(c.Modes) == 0 || len(c.Payloads) == 0 {
		return errors.New("nothing to measure: name at least one mode and one payload")
	}
	c.Depth = or(c.Depth, 1)
	c.Slots = or(c.Slots, max(c.Depth, 8))
	if c.Depth < 1 || c.Depth > c.Slots || c.Slots > dataplane.MaxDepth {
		return fmt.Errorf("depth %d of %d slots (1..%d)", c.Depth, c.Slots, dataplane.MaxDepth)
	}
	c.Eager = or(c.Eager, dataplane.DefaultEager)
	if c.Eager < 1 || c.Eager > dataplane.MaxEager {
		return fmt.Errorf("eager size %d (1..%d)", c.Eager, dataplane.MaxEager)
	}
	for _, p := range c.Payloads {
		if p < 1 || int64(p)*int64(c.Depth) > memoryMax {
			return fmt.Errorf("payload of %d bytes, %d in flight (1 byte to %d MiB together)", p, c.Depth, memoryMax>>20)
		}
	}
	if c.Result < 0 || int64(c.Result)*int64(c.Depth) > memoryMax {
		return fmt.Errorf("result of %d bytes, %d in flight (at most %d MiB together)", c.Result, c.Depth, memoryMax>>20)
	}
	if c.Function == "" {
		// The functions do what the servers of the floors do: shm's copies the payload, that of verbs sends what is in its memory.
		c.Function = FunctionEcho
		if c.Provider == dataplane.Verbs {
			c.Function = FunctionEmpty
		}
	}
	if c.delay > 0 {
		c.Function = functionDelayed
	} else if c.Result > 0 && c.Function == FunctionEcho {
		c.Function = functionReply
	} else if c.Function != FunctionEcho && c.Function != FunctionEmpty && c.Function != functionReply {
		return fmt.Errorf("function %q (echo, empty)", c.Function)
	}
	if c.Buffers == "" {
		c.Buffers = BuffersCopied
		if c.Provider == dataplane.Verbs {
			c.Buffers = BuffersRegistered
		}
	}
	if c.Buffers != BuffersCopied && c.Buffers != BuffersRegistered {
		return fmt.Errorf("buffers %q (copied, registered)", c.Buffers)
	}
	c.Pairs = or(c.Pairs, 15)
	c.Duration = or(c.Duration, 30*time.Second)
	if c.Pairs < 1 || c.Rounds < 0 || c.Batch < 0 || c.Duration < 0 {
		return fmt.Errorf("pairs %d, rounds %d, batch %v, duration %v: must not be negative", c.Pairs, c.Rounds, c.Batch, c.Duration)
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c.chooseCPUs()
}

func (c *Config) chooseCPUs() error {
	allowed, err := topology.Affinity()
	if err != nil {
		return err
	}
	wanted, whose := 2, "two are needed, the client's and the peer's"
	if c.Remote != "" {
		wanted, whose = 1, "one is needed, the client's; the peer's machine chooses the peer's"
	}
	if c.CPUs == nil {
		c.CPUs = choosePair(allowed, siblingsOf)[:wanted]
	}
	if len(c.CPUs) != wanted {
		return fmt.Errorf("CPUs %v: %s", c.CPUs, whose)
	}
	for _, cpu := range c.CPUs {
		if !slices.Contains(allowed, cpu) {
			return fmt.Errorf("CPU %d: this process may only use %v", cpu, allowed)
		}
	}
	if c.CPUs[0] == c.peerCPU() && slices.ContainsFunc(c.Modes, func(m dataplane.WaitMode) bool { return m != dataplane.Warm }) {
		return fmt.Errorf("client and peer share CPU %d: use --mode warm on one CPU, because spinners would wait for each other's time slices", c.CPUs[0])
	}
	return nil
}

// tolerance is the share by which the calibrations of a pair may differ.
func (c *Config) tolerance() float64 {
	if c.Remote != "" {
		return remoteTolerance
	}
	return modeTolerance
}

// byMedian says whether the median of its round trips represents a batch, and not their mean.
func (c *Config) byMedian() bool { return c.Remote != "" && c.Depth == 1 }

// peerCPU is the CPU of the peer; -1 if another machine chooses it.
func (c *Config) peerCPU() int {
	if c.Remote != "" {
		return -1
	}
	return c.CPUs[1]
}

// batch is the intended length of a batch in this mode.
func (c *Config) batch(m dataplane.WaitMode) time.Duration {
	switch {
	case c.Batch > 0:
		return c.Batch
	case c.Provider == dataplane.SHM && m != dataplane.Warm:
		return 5 * time.Millisecond
	case c.Provider == dataplane.Verbs && c.Remote == "" && m != dataplane.Warm:
		return 20 * time.Millisecond // a few packets in many wait for a timer: a longer batch has its share of them
	}
	return 10 * time.Millisecond
}

func or[T int | float64 | time.Duration](v, otherwise T) T {
	if v == 0 {
		return otherwise
	}
	return v
}

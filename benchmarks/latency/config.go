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
	FunctionEmpty = "empty" // as many bytes, untouched

	functionDelayed = "delayed" // empty, but slower by Config.delay: for the guard's own test

	BuffersCopied     = "copied"     // payload and result in the caller's memory
	BuffersRegistered = "registered" // payload in registered memory, the result left where it arrives
)

const (
	// modeTolerance is by how much the calibrations of one pair may differ.
	modeTolerance = 0.25
	// remoteTolerance is the same between machines, where no placement can change, but a network has other users.
	remoteTolerance = 0.5
	// attemptsPerPair bounds how many pairs are tried for each that is wanted.
	attemptsPerPair = 4
	// nearNS is the bare flag round trip below which two CPUs share a cache.
	nearNS = 250
	// memoryMax bounds what payload and depth may need.
	memoryMax = 1 << 30 // as much as a peer makes room for
)

// Config says what to measure. Provider, Modes and Payloads are mandatory.
type Config struct {
	Provider string
	Device   dataplane.Options // verbs
	Modes    []dataplane.WaitMode
	Payloads []int // bytes
	Depth    int   // calls in flight; 0: 1
	Slots    int   // of the channel; 0: 8, the default of the client library, or Depth if that is more
	Eager    int   // bytes; 0: the default
	Function string
	Buffers  string        // of the C client
	Pairs    int           // good ones wanted; 0: 15. Three times as many are taken where they differ from peer to peer
	Batch    time.Duration // length of a batch; 0: when spinning 5 ms on shm, 20 ms on verbs within a machine, else 10 ms
	Rounds   int           // calls of a batch; 0: as Batch says
	Duration time.Duration // bound of one result; 0: 30 s
	CPUs     []int         // of client and peer, with Remote of the client alone; nil: chosen
	Peer     string        // path of rfaas-bench-peer
	Remote   string        // HOST:PORT at which Serve runs on another machine, which starts the peer; "": the peer is here
	Progress func(line string)

	delay     time.Duration // that each call takes longer
	callsOnly bool
}

// Validate checks the configuration and sets defaults.
func (c *Config) Validate() error {
	if c.Provider != dataplane.SHM && c.Provider != dataplane.Verbs {
		return fmt.Errorf("provider %q (shm, verbs)", c.Provider)
	}
	if c.Remote != "" && c.Provider != dataplane.Verbs {
		return fmt.Errorf("a peer on another machine (%s) is reached by provider verbs, not by %s", c.Remote, c.Provider)
	}
	if len(c.Modes) == 0 || len(c.Payloads) == 0 {
		return errors.New("nothing to measure: modes and payloads must each name one")
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
	if c.Function == "" {
		// The shm floor copies at all places, so the function does; a bare verbs floor sends what is there.
		c.Function = FunctionEcho
		if c.Provider == dataplane.Verbs {
			c.Function = FunctionEmpty
		}
	}
	if c.delay > 0 {
		c.Function = functionDelayed
	} else if c.Function != FunctionEcho && c.Function != FunctionEmpty {
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
			return fmt.Errorf("CPU %d is not among those that this process may use: %v", cpu, allowed)
		}
	}
	if c.CPUs[0] == c.peerCPU() && slices.ContainsFunc(c.Modes, func(m dataplane.WaitMode) bool { return m != dataplane.Warm }) {
		return fmt.Errorf("client and peer share CPU %d: only --mode warm can be measured on one CPU, spinners would wait for each other's time slices", c.CPUs[0])
	}
	return nil
}

// tolerance is by how much the calibrations of a pair may differ.
func (c *Config) tolerance() float64 {
	if c.Remote != "" {
		return remoteTolerance
	}
	return modeTolerance
}

// byMedian says whether a batch stands for its median and not for its mean.
func (c *Config) byMedian() bool { return c.Remote != "" && c.Depth == 1 }

// peerCPU is where the peer runs, -1 when another machine says where.
func (c *Config) peerCPU() int {
	if c.Remote != "" {
		return -1
	}
	return c.CPUs[1]
}

// batch is the wished length of a batch in this mode.
func (c *Config) batch(m dataplane.WaitMode) time.Duration {
	switch {
	case c.Batch > 0:
		return c.Batch
	case c.Provider == dataplane.SHM && m != dataplane.Warm:
		return 5 * time.Millisecond
	case c.Provider == dataplane.Verbs && c.Remote == "" && m != dataplane.Warm:
		return 20 * time.Millisecond // a few packets of many wait for a timer, which a longer batch has its share of
	}
	return 10 * time.Millisecond
}

func or[T int | float64 | time.Duration](v, otherwise T) T {
	if v == 0 {
		return otherwise
	}
	return v
}

package accounting

import (
	"encoding/hex"
	"fmt"
	"math/big"
	"math/bits"
)

// Counter names one of the counters of a lease.
type Counter int

// The counters, in the order in which they lie in a cell. The package comment has the units.
const (
	CoreMicros Counter = iota
	MemoryMiBMillis
	ExecMicros
	HotMicros
	Calls
	BytesIn
	BytesOut
	Failures
	NumCounters = iota
)

var counterNames = [NumCounters]string{"core_us", "memory_mib_ms", "exec_us", "hot_us", "calls", "bytes_in", "bytes_out", "failures"}

func (c Counter) String() string {
	if c < 0 || c >= NumCounters {
		return fmt.Sprintf("counter %d", int(c))
	}
	return counterNames[c]
}

// SplitAt is where a part of a lease ends: no counter of a Key goes much beyond it.
const SplitAt = 1 << 62

// Use is the counters of one Key, the sums since it began.
type Use [NumCounters]uint64

// Max returns the larger of each counter: what is known after both states have been seen.
func (u Use) Max(v Use) Use {
	for i := range u {
		u[i] = max(u[i], v[i])
	}
	return u
}

// Since returns how much u is ahead of v, 0 where it is not.
func (u Use) Since(v Use) Use {
	for i := range u {
		u[i] -= min(u[i], v[i])
	}
	return u
}

func (u Use) plus(v Use) Use {
	for i := range u {
		u[i] += v[i]
	}
	return u
}

// Covers says whether no counter of v is ahead of u.
func (u Use) Covers(v Use) bool { return v.Since(u) == Use{} }

// Key names the counters of one lease, for ever.
type Key struct {
	Incarnation [16]byte // of the executor: random at each of its starts
	Lease       uint64   // of that executor, not 0
	Part        uint32   // of that lease, from 0
}

func (k Key) String() string {
	s := fmt.Sprintf("%s/%016x", hex.EncodeToString(k.Incarnation[:]), k.Lease)
	if k.Part > 0 {
		s += fmt.Sprintf(".%d", k.Part)
	}
	return s
}

// Total is a sum over many leases: 128 bits for each counter.
type Total [NumCounters]struct{ Hi, Lo uint64 }

// Add adds u.
func (t *Total) Add(u Use) {
	for i, n := range u {
		var carry uint64
		t[i].Lo, carry = bits.Add64(t[i].Lo, n, 0)
		t[i].Hi += carry
	}
}

// AddTotal adds v.
func (t *Total) AddTotal(v Total) {
	for i, n := range v {
		var carry uint64
		t[i].Lo, carry = bits.Add64(t[i].Lo, n.Lo, 0)
		t[i].Hi += n.Hi + carry
	}
}

// Of returns one counter.
func (t *Total) Of(c Counter) *big.Int {
	n := new(big.Int).SetUint64(t[c].Hi)
	return n.Lsh(n, 64).Add(n, new(big.Int).SetUint64(t[c].Lo))
}

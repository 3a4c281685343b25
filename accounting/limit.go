package accounting

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"
)

// LimitSize is the bytes of a limit.
//
// A limit is how many cores a tenant may have at a time, and how many it has: 64 bytes of the resource manager's memory that all
// executors add to. docs/BOARD.md has every byte.
//
// A word that is reached by remote atomics must have one device, so each way to the manager has a word of its own, and a
// tenant has the sum. Whoever reserves adds to its word first and looks at the sum then: of two at the same time
// at least one sees the other, so that a limit is never exceeded.
const LimitSize = 64

// LimitWay is a way on which cores are reserved.
type LimitWay uint32

// The ways.
const (
	LimitSHM     LimitWay = iota // fetch-and-add by processors of the manager's node
	LimitVerbs                   // by the manager's RDMA device
	LimitMessage                 // by the manager itself, for those who have no other way
	NumLimitWays = iota
)

// LimitWordOffset is where a way's word is in the table of limits.
func LimitWordOffset(record uint32, way LimitWay) uint64 {
	return uint64(record)*LimitSize + 8 + 8*uint64(way)
}

// Limit is a record as it was read.
type Limit struct {
	Cores uint64
	By    [NumLimitWays]uint64 // reserved
}

// ParseLimit reads LimitSize bytes.
func ParseLimit(b []byte) Limit {
	l := Limit{Cores: binary.LittleEndian.Uint64(b)}
	for i := range l.By {
		l.By[i] = binary.LittleEndian.Uint64(b[8+8*i:])
	}
	return l
}

// Reserved is what the tenant has. A word below zero, which a repair may leave for a moment, counts as zero.
func (l *Limit) Reserved() uint64 {
	var sum uint64
	for _, n := range l.By {
		sum += uint64(max(int64(n), 0))
	}
	return sum
}

// LimitWord is a word of a table of limits in this process's memory, for those ways that are this process's processors.
func LimitWord(table []byte, record uint32, way LimitWay) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&table[LimitWordOffset(record, way)]))
}

// Held is what an executor says of its reservations: one word for each tenant, the record and the cores.
func Held(record, cores uint32) uint64 { return uint64(record+1)<<32 | uint64(cores) }

// ParseHeld is the inverse; false: nothing is held there.
func ParseHeld(w uint64) (record, cores uint32, ok bool) {
	return uint32(w>>32) - 1, uint32(w), w>>32 != 0
}

// Limits is how many cores each tenant may have at a time.
type Limits struct {
	tenants map[string]uint64
	others  int64 // -1: no limit
}

// ParseLimits reads "ann=64,bob=8,*=16". * stands for all tenants that are not named. Without it, they have no limit.
func ParseLimits(text string) (Limits, error) {
	l := Limits{tenants: map[string]uint64{}, others: -1}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		at := strings.LastIndexByte(part, '=')
		if at < 1 || at > MaxName {
			return l, fmt.Errorf("%q is not TENANT=CORES", part)
		}
		name := strings.TrimSpace(part[:at])
		n, err := strconv.ParseUint(strings.TrimSpace(part[at+1:]), 10, 31)
		_, twice := l.tenants[name]
		switch {
		case err != nil:
			return l, fmt.Errorf("%s: %q is not a number of cores", name, part[at+1:])
		case twice || name == "*" && l.others >= 0:
			return l, fmt.Errorf("%s has two limits", name)
		case name == "*":
			l.others = int64(n)
		default:
			l.tenants[name] = n
		}
	}
	return l, nil
}

// Any says whether anybody has a limit.
func (l *Limits) Any() bool { return len(l.tenants) > 0 || l.others >= 0 && l.tenants != nil }

// Of is a tenant's limit; false: it has none.
func (l *Limits) Of(tenant string) (cores uint64, limited bool) {
	if n, ok := l.tenants[tenant]; ok {
		return n, true
	}
	if l.tenants == nil || l.others < 0 {
		return 0, false
	}
	return uint64(l.others), true
}

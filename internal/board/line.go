package board

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
)

// State of an executor, as its line says.
type State uint8

// The states. The executor writes Open and Draining. The manager writes Silent and Left into the line of an executor that has stopped
// writing. If that executor is alive, its next write replaces the state.
const (
	Empty    State = 0                    // the slot has no executor
	Open     State = api.ExecutorOpen     // grants leases
	Draining State = api.ExecutorDraining // grants no more leases
	Silent   State = api.ExecutorSilent   // has not written for some heartbeats
	Left     State = api.ExecutorLeft     // has deregistered
)

// stateNames has no name for Empty.
var stateNames = api.ExecutorNames

func (s State) String() string {
	if s == Empty {
		return "empty"
	}
	if int(s) >= len(stateNames) {
		return fmt.Sprintf("state %d", uint8(s))
	}
	return stateNames[s]
}

// Providers is a set of providers.
type Providers uint8

// The providers.
const (
	SHM   Providers = 1 << iota // usable from the same node only
	Verbs                       // usable from any node of the network
	TCP                         // likewise
	OFI                         // from any node whose libfabric has the same provider
)

// ProvidersOf makes a set of names; unknown ones are left out.
func ProvidersOf(names []string) Providers {
	var p Providers
	for _, n := range names {
		switch n {
		case "shm":
			p |= SHM
		case "verbs":
			p |= Verbs
		case "tcp":
			p |= TCP
		case "ofi":
			p |= OFI
		}
	}
	return p
}

// Names is the inverse of ProvidersOf.
func (p Providers) Names() (names []string) {
	if p&SHM != 0 {
		names = append(names, "shm")
	}
	if p&Verbs != 0 {
		names = append(names, "verbs")
	}
	if p&TCP != 0 {
		names = append(names, "tcp")
	}
	if p&OFI != 0 {
		names = append(names, "ofi")
	}
	return names
}

// Line is what changes about an executor.
type Line struct {
	Beat        uint64    // counts the writes of this line by this incarnation, from 1
	Incarnation uint64    // first 8 bytes of the executor's
	Written     time.Time // by the executor's clock, in milliseconds
	Until       time.Time // time until which the node lends cores, in whole seconds; zero: no end is known
	Slot        uint32
	Cores       uint32 // lent
	FreeCores   uint32 // of them
	MemoryMiB   uint32
	FreeMiB     uint32
	Leases      uint32
	State       State
	Providers   Providers
	Cordoned    bool   // Draining, but leases continue and the executor does not end
	Slowdown    uint32 // time of other programs of the node beside the workers, in thousandths of their time without; at most MaxSlowdown, 0: not measured
}

// ShortIncarnation is what of an executor's incarnation stands in its line.
func ShortIncarnation(i [16]byte) uint64 { return binary.LittleEndian.Uint64(i[:8]) }

func unixMilli(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(max(t.UnixMilli(), 0))
}

const flagCordoned = 1

// MaxSlowdown is the largest value of Line.Slowdown.
const MaxSlowdown = 1<<12 - 1

// Encode writes the line into LineSize bytes.
func (l *Line) Encode(b []byte) {
	_ = b[:LineSize]
	le := binary.LittleEndian
	le.PutUint64(b[0:], l.Beat)
	le.PutUint64(b[8:], l.Incarnation)
	le.PutUint64(b[16:], unixMilli(l.Written))
	le.PutUint64(b[24:], unixMilli(l.Until)/1000)
	le.PutUint32(b[32:], l.Slot)
	le.PutUint32(b[36:], l.Cores)
	le.PutUint32(b[40:], l.FreeCores)
	le.PutUint32(b[44:], l.MemoryMiB)
	le.PutUint32(b[48:], l.FreeMiB)
	le.PutUint32(b[52:], l.Leases)
	b[56], b[57] = byte(l.State), byte(l.Providers)
	flags := uint16(min(l.Slowdown, MaxSlowdown)) << 4
	if l.Cordoned {
		flags |= flagCordoned
	}
	le.PutUint16(b[58:], flags)
	seal(b[:LineSize])
}

// ParseLine reads the line of a slot. A line that was never written is Empty. ErrTorn: read again. Any other error: the line is
// not what an executor writes.
func ParseLine(b []byte, slot uint32) (Line, error) {
	b = b[:LineSize]
	if !sealed(b) {
		if empty(b) {
			return Line{Slot: slot}, nil
		}
		return Line{}, fmt.Errorf("line %d: %w", slot, ErrTorn)
	}
	le := binary.LittleEndian
	l := Line{Beat: le.Uint64(b), Incarnation: le.Uint64(b[8:]), Slot: le.Uint32(b[32:]), Cores: le.Uint32(b[36:]),
		FreeCores: le.Uint32(b[40:]), MemoryMiB: le.Uint32(b[44:]), FreeMiB: le.Uint32(b[48:]), Leases: le.Uint32(b[52:]),
		State: State(b[56]), Providers: Providers(b[57]), Cordoned: b[58]&flagCordoned != 0, Slowdown: uint32(le.Uint16(b[58:]) >> 4)}
	written, until := le.Uint64(b[16:]), le.Uint64(b[24:])
	switch {
	case l.Slot != slot:
		return Line{}, fmt.Errorf("%w: line %d stands in slot %d", ErrLayout, l.Slot, slot)
	case int(l.State) >= len(stateNames):
		return Line{}, fmt.Errorf("%w: line %d: %v", ErrLayout, slot, l.State)
	case l.FreeCores > l.Cores || l.FreeMiB > l.MemoryMiB:
		return Line{}, fmt.Errorf("%w: line %d: %d of %d cores and %d of %d MiB are free", ErrLayout, slot, l.FreeCores, l.Cores, l.FreeMiB, l.MemoryMiB)
	case written > 1<<52 || until > 1<<42:
		return Line{}, fmt.Errorf("%w: line %d: written at %d ms, available until %d s", ErrLayout, slot, written, until)
	}
	if written != 0 {
		l.Written = time.UnixMilli(int64(written))
	}
	if until != 0 {
		l.Until = time.Unix(int64(until), 0)
	}
	return l, nil
}

// StaleAfter is how many heartbeats old a line may be, besides ClockSkew, before a reader doubts it. The manager's own judgement
// (Silent) does not depend on the clocks of nodes. This one also works while the manager is stopped.
const StaleAfter = 4

// ClockSkew is how far the clocks of two nodes may be apart.
const ClockSkew = 5 * time.Second

// Stale reports whether the line has not been written for so long that its executor is in doubt.
func (l *Line) Stale(now time.Time, heartbeat time.Duration) bool {
	return now.Sub(l.Written) > StaleAfter*heartbeat+ClockSkew
}

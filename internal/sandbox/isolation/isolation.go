// Package isolation has the types of the sandbox's settings. It is apart from package sandbox so that programs that only read
// settings do not have the sandbox's code.
package isolation

import (
	"fmt"
	"strconv"
	"strings"
)

// Mode says how much of a sandbox workers must have. Off, On and Require are in increasing order.
type Mode int

const (
	Off     Mode = iota // no sandbox: workers run as ordinary processes of the executor's user
	On                  // as much as this node supports; the executor logs what is missing
	Require             // a complete sandbox, or no workers
	Auto                // Require or On: see Resolve
)

var modeNames = [...]string{"off", "on", "require", "auto"}

// String returns the mode as settings write it.
func (m Mode) String() string {
	if m < 0 || int(m) >= len(modeNames) {
		return fmt.Sprintf("mode %d", int(m))
	}
	return modeNames[m]
}

// UnmarshalText parses auto, require, on or off.
func (m *Mode) UnmarshalText(text []byte) error {
	for i, name := range modeNames {
		if name == string(text) {
			*m = Mode(i)
			return nil
		}
	}
	return fmt.Errorf("%q is neither auto, require, on nor off", text)
}

// Resolve returns what Auto means for an executor that runs as root, or that belongs to a cluster with identities: Require if
// either holds, because other people's code runs there, else On. Other modes stay as they are.
func (m Mode) Resolve(root, identity bool) Mode {
	switch {
	case m != Auto:
		return m
	case root || identity:
		return Require
	}
	return On
}

// Range is a range of N user and group ids, starting with First. The zero Range is empty.
type Range struct{ First, N uint32 }

// maxUIDs is the largest size of a range, more than the workers of any node.
const maxUIDs = 1 << 20

// UnmarshalText parses "FIRST-LAST", or an empty text for no ids.
func (r *Range) UnmarshalText(text []byte) error {
	*r = Range{}
	s := strings.TrimSpace(string(text))
	if s == "" {
		return nil
	}
	from, to, ok := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(from, 10, 32)
	last, err2 := strconv.ParseUint(to, 10, 32)
	// The highest number means "no user" to the kernel.
	if !ok || err1 != nil || err2 != nil || first < 1 || last < first || last >= 1<<32-1 || last-first >= maxUIDs {
		return fmt.Errorf("user ids %q: want FIRST-LAST, without 0, at most %d of them", text, maxUIDs)
	}
	*r = Range{uint32(first), uint32(last - first + 1)}
	return nil
}

// Has reports whether an id is in the range.
func (r Range) Has(id uint32) bool { return id >= r.First && id-r.First < r.N }

// String returns the format of UnmarshalText.
func (r Range) String() string {
	if r.N == 0 {
		return ""
	}
	return fmt.Sprintf("%d-%d", r.First, r.First+(r.N-1))
}

package sandbox

import "fmt"

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

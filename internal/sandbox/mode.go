package sandbox

import "fmt"

// Mode says how much of a sandbox there has to be.
type Mode int

const (
	Off     Mode = iota // workers are processes like any other of the executor's user
	On                  // as much as this node allows; what is missing is logged
	Require             // all of it, or no workers
)

var modeNames = [...]string{"off", "on", "require"}

// String is the mode as settings have it.
func (m Mode) String() string {
	if m < 0 || int(m) >= len(modeNames) {
		return fmt.Sprintf("mode %d", int(m))
	}
	return modeNames[m]
}

// UnmarshalText reads off, on or require.
func (m *Mode) UnmarshalText(text []byte) error {
	for i, name := range modeNames {
		if name == string(text) {
			*m = Mode(i)
			return nil
		}
	}
	return fmt.Errorf("%q is neither on, require nor off", text)
}

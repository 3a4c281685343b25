package sandbox

import "github.com/rfaas-go/rfaas/internal/sandbox/isolation"

// Mode says how much of a sandbox workers must have.
type Mode = isolation.Mode

// Modes: see package isolation.
const (
	Off     = isolation.Off
	On      = isolation.On
	Require = isolation.Require
	Auto    = isolation.Auto
)

// Range is a range of user and group ids.
type Range = isolation.Range

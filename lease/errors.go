package lease

import (
	"errors"
	"fmt"
)

// Sentinels, for errors.Is.
var (
	// ErrBusy: not enough free cores or memory now. Another node or a later moment may do.
	ErrBusy = errors.New("busy")
	// ErrInvalid: the terms can never be granted here, or contradict an earlier request.
	ErrInvalid = errors.New("invalid")
	// ErrUnknown: there is no lease of that id, or it ended so long ago that it is forgotten.
	ErrUnknown = errors.New("unknown lease")
	// ErrEnded: the lease has ended; an *EndedError says how.
	ErrEnded = errors.New("lease has ended")
	// ErrState: the lease is in a state in which this cannot happen.
	ErrState = errors.New("wrong state")
	// ErrDraining: the node gives out no more leases and renews none.
	ErrDraining = errors.New("draining")
	// ErrNotCached: the lease to be reused is not cached any more, or has other terms. A request without reuse may succeed.
	ErrNotCached = errors.New("not cached")
)

// EndedError says how a lease ended. It is ErrEnded.
type EndedError struct {
	ID     ID
	State  State // Released, Expired, Revoked or Drained
	Reason string
}

func (e *EndedError) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("lease %d has ended: %v", e.ID, e.State)
	}
	return fmt.Sprintf("lease %d has ended: %v (%s)", e.ID, e.State, e.Reason)
}

// Is makes it ErrEnded.
func (e *EndedError) Is(target error) bool { return target == ErrEnded }

func unknown(id ID) error { return fmt.Errorf("lease %d: %w", id, ErrUnknown) }

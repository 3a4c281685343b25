package lease

import (
	"slices"
	"time"
)

// ID names a lease of one executor. Never 0.
type ID uint64

// RequestID is chosen by the client, one per lease that it wants.
type RequestID [16]byte

// State of a lease, see the picture in the package comment.
type State uint8

// The states.
const (
	Requested State = iota + 1 // resources are set aside, workers are being started
	Granted                    // the holder has the grant and has not come yet
	Active                     // the holder has been here
	Released                   // ended by its holder
	Expired                    // ended by time
	Revoked                    // ended by the node
)

var stateNames = [...]string{Requested: "requested", Granted: "granted", Active: "active",
	Released: "released", Expired: "expired", Revoked: "revoked"}

func (s State) String() string {
	if s == 0 || int(s) >= len(stateNames) {
		return "none"
	}
	return stateNames[s]
}

// Ended says whether the state is a last one.
func (s State) Ended() bool { return s >= Released }

// Terms are what a request asks for.
type Terms struct {
	Workers         int           // at least 1
	CoresPerWorker  int           // logical CPUs for each worker, at least 1
	MemoryPerWorker uint64        // bytes
	Duration        time.Duration // from the grant on, above 0
	Tenant          string
	// Fingerprint stands for everything else that was asked (code, blobs, ...). A repeated request id with another
	// fingerprint is refused instead of being given what somebody else asked for.
	Fingerprint [32]byte
}

// Lease is a copy of what the table knows of one lease.
type Lease struct {
	ID        ID
	RequestID RequestID
	State     State
	Terms     Terms
	CPUs      [][]int   // of each worker, ascending
	Expires   time.Time // zero until granted
	Reason    string    // why it ended

	rec *record // what Wait waits on; it outlives the table's memory of the lease
}

// record is the table's own view of a lease.
type record struct {
	Lease
	settled  chan struct{} // closed when granted or failed
	failure  error         // why it failed, set before settled is closed
	presence uint64        // number of the holder's latest stream
	present  bool
	comeBy   time.Time // when the absent holder must have come; zero while it is present
	reaped   bool
}

func (r *record) copy() Lease {
	l := r.Lease
	l.rec = r
	l.CPUs = make([][]int, len(r.CPUs))
	for i, c := range r.CPUs {
		l.CPUs[i] = slices.Clone(c)
	}
	return l
}

func (r *record) ended() error { return &EndedError{ID: r.ID, State: r.State, Reason: r.Reason} }

// deadline is when the lease ends by itself, and how. Zero time: never.
func (r *record) deadline() (time.Time, State, string) {
	if r.State != Granted && r.State != Active {
		return time.Time{}, 0, ""
	}
	if !r.comeBy.IsZero() && r.comeBy.Before(r.Expires) {
		if r.State == Granted {
			return r.comeBy, Revoked, "the holder did not open its event stream in time"
		}
		return r.comeBy, Revoked, "the holder went away"
	}
	return r.Expires, Expired, "its time is over"
}

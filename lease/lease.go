package lease

import (
	"slices"
	"time"

	"github.com/rfaas-go/rfaas/internal/api"
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
	Granted                    // the client has the grant and has not opened its event stream yet
	Active                     // the client has opened its event stream
	Expiring                   // active, and the client was notified that the end is near
	Released                   // ended by its client
	Expired                    // ended by time
	Revoked                    // ended by the node
	Drained                    // ended with the node's service, after the calls that ran
)

var stateNames = [...]string{Requested: "requested", Granted: "granted", Active: "active", Expiring: "expiring",
	Released: "released", Expired: "expired", Revoked: "revoked", Drained: "drained"}

func (s State) String() string {
	if s == 0 || int(s) >= len(stateNames) {
		return "none"
	}
	return stateNames[s]
}

// Ended says whether the state is a last one.
func (s State) Ended() bool { return s >= Released }

// Wait is the waiting policy of a lease's workers. The numbers are those of rfaas.h and of the control protocol.
type Wait uint8

// The waiting policies.
const (
	Adaptive Wait = api.WaitAdaptive // spin for about as long as a wake-up takes, then block
	Hot      Wait = api.WaitHot      // spin
	Warm     Wait = api.WaitWarm     // block at once
)

// Terms are what a request asks for.
type Terms struct {
	Workers         int           // at least 1
	WorkersMin      int           // fewest with which the lease is granted, at most Workers; 0: Workers. Grow adds the others
	CoresPerWorker  int           // physical cores for each worker, at least 1
	MemoryPerWorker uint64        // bytes
	Duration        time.Duration // from the grant on, above 0; Renew prolongs
	Wait            Wait
	CallLimit       time.Duration // longest that one call may run; 0: no limit
	InitCall        bool          // the first call of each worker is the init call, which has another limit
	Tenant          string        // owns the lease and pays for it
	// UID and GID are the verified ids of the tenant's user on this node. 0: they were not verified.
	UID, GID uint32
	// Kind stands for what makes workers fit for another lease: code, provider, client process, sizes. The zero Kind fits
	// nothing.
	Kind [32]byte
	// KeepsState permits caching workers that have executed functions. Such workers serve only leases with KeepsState.
	KeepsState bool
	// Spare asks for workers that no lease uses yet. They get only cores and memory that no lease has, not even a cached one. As much again
	// must stay free, so that the next lease need not evict them.
	Spare bool
	// Fingerprint is a hash of everything that the request asks for (code, blobs, ...). A repeated request id with another
	// fingerprint is refused, so that no request gets the lease of a different one.
	Fingerprint [32]byte
}

// sameRequest reports whether terms come from the same request. The defaults that its receiver fills in may have changed since.
func (t Terms) sameRequest(again *Terms) bool {
	return t == *again || t.Fingerprint != [32]byte{} && t.Fingerprint == again.Fingerprint && t.Tenant == again.Tenant
}

// least returns the fewest workers with which the lease is granted.
func (t Terms) least() int {
	if t.WorkersMin == 0 {
		return t.Workers
	}
	return t.WorkersMin
}

// fit says whether workers that were started for old can serve t.
func (t Terms) fit(old Terms) bool {
	return t.Kind != [32]byte{} && t.Kind == old.Kind && t.Tenant == old.Tenant && t.UID == old.UID && t.GID == old.GID && t.Workers == old.Workers &&
		t.CoresPerWorker == old.CoresPerWorker && t.MemoryPerWorker == old.MemoryPerWorker && t.Wait == old.Wait &&
		t.CallLimit == old.CallLimit && t.KeepsState == old.KeepsState && t.InitCall == old.InitCall
}

// Lease is a copy of what the table knows of one lease.
type Lease struct {
	ID        ID
	RequestID RequestID
	State     State
	Terms     Terms
	CPUs      [][]int   // of each worker, ascending; none for a worker that has not been added yet
	Granted   time.Time // zero until granted
	Expires   time.Time // zero until granted
	ClientEnd time.Time // when the client stops using it: Config.Margin before Expires
	Reason    string    // why it ended

	// Reuses is the cached lease whose workers serve this one; 0: none.
	Reuses ID
	// Evict are cached leases. Their workers must be reaped, and Reaped called, before the workers of this lease are started.
	Evict []ID

	rec *record // what Wait waits on; it outlives the table's memory of the lease
}

// Present returns the number of workers that have cores. It is less than Terms.Workers until Grow has added the others.
func (l *Lease) Present() int { return present(l.CPUs) }

func present(of [][]int) (n int) {
	for _, s := range of {
		if len(s) > 0 {
			n++
		}
	}
	return n
}

// record is the table's own view of a lease.
type record struct {
	Lease
	settled  chan struct{} // closed when granted or failed
	failure  error         // why it failed, set before settled is closed
	presence uint64        // number of the client's latest stream
	present  bool
	left     time.Time // when the client went away last
	comeBy   time.Time // deadline for the absent client to open its event stream; zero while it is present
	notice   time.Time // when the client is notified that the end is near
	cached   time.Time // until when its workers are cached; zero: they are not
	dropped  bool      // they were cached, and are to be reaped
	reaped   bool

	shares [][]int // of each worker: indices into the table's cores; none for a worker that has not been added
	memory uint64  // bytes held
}

func (r *record) copy() Lease {
	l := r.Lease
	l.rec = r
	l.Evict = slices.Clone(r.Evict)
	l.CPUs = make([][]int, len(r.CPUs))
	for i, c := range r.CPUs {
		l.CPUs[i] = slices.Clone(c)
	}
	return l
}

func (r *record) ended() error { return &EndedError{ID: r.ID, State: r.State, Reason: r.Reason} }

// due returns when the lease must next change its state without a request, and the new state. Zero time: never.
func (r *record) due(now time.Time) (at time.Time, d Due) {
	d.ID = r.ID
	switch r.State {
	case Released:
		d.State, d.Reason = Released, "its time in the cache is up"
		return r.cached, d
	case Granted, Active, Expiring:
	default:
		return time.Time{}, d
	}
	at, d.State, d.Reason = r.Expires, Expired, "its time is up"
	if r.State == Active && now.Before(r.Expires) { // else it is too late for a notice
		at, d.State, d.Reason = r.notice, Expiring, ""
	}
	if !r.comeBy.IsZero() && r.comeBy.Before(at) {
		at, d.State, d.Reason = r.comeBy, Revoked, "the client went away"
		if r.State == Granted {
			d.Reason = "the client did not open its event stream in time"
		}
	}
	return at, d
}

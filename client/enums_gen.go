// Code generated from client/api/rfaas.yaml by internal/apigen (make api). DO NOT EDIT.

package client

// WaitMode says how both sides wait for messages.
type WaitMode int

// The values of WaitMode; the numbers are those of rfaas.h.
const (
	Adaptive WaitMode = 0 // spin for about as long as a wake-up takes, then block; the default
	Hot      WaitMode = 1 // spin: lowest latency, uses one core on each side
	Warm     WaitMode = 2 // block at once: uses no core while waiting
)

// EventKind says what happened to a lease.
type EventKind int

// The values of EventKind; the numbers are those of rfaas.h.
const (
	// EventWorkerDied: the worker with index Worker died. Reason says how. The next call that uses this worker replaces it.
	EventWorkerDied EventKind = 1
	// EventEnded: the lease has ended. Reason begins with how: released, expired, revoked, drained or lost. With
	// LeaseOptions.Failover only the lease on one executor has ended.
	EventEnded EventKind = 2
	// EventDraining: the node drains, and its executor ends after In. Calls that were sent finish. New calls fail with ErrLease, not
	// started: take another lease.
	EventDraining EventKind = 3
	// EventExpiring: the lease ends after In, unless it is renewed.
	EventExpiring EventKind = 4
	// EventMoved: with LeaseOptions.Failover or Local, calls now go to workers of another executor. Reason is its address.
	EventMoved EventKind = 5
	// EventLocal: with LeaseOptions.Local, calls now run in this process. Reason says why.
	EventLocal EventKind = 6
	// EventWorkerAdded: the lease was opened with fewer workers than it asked for (LeaseOptions.WorkersMin), and the one with index
	// Worker was added.
	EventWorkerAdded EventKind = 7
)

// Start is how a worker came to its lease. Slower ways have lower numbers, except for StartSeeded.
type Start int

// The values of Start; the numbers are those of rfaas.h.
const (
	StartUnknown Start = 0 // the executor did not report it, or the worker is this process
	StartCold    Start = 1 // a new process
	StartPooled  Start = 2 // a process that was started ahead of demand: from the executor's pool, or from a spare lease of the agent (RFAAS_POOL)
	StartCached  Start = 3 // a worker that served an earlier lease and was still connected. The lease was of this process or, on shm and tcp, of another process of the user
	StartSeeded  Start = 4 // a new process with the memory of the lease's seed (RFAAS_LEASE_SEED)
)

// Operation says how [Reduce] combines results.
type Operation int

// The values of Operation; the numbers are those of rfaas.h.
const (
	Sum Operation = 1 // the sum; integers wrap around
	Min Operation = 2 // the smaller one. A result that is NaN is ignored
	Max Operation = 3 // the larger one. A result that is NaN is ignored
)

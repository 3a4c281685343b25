// Code generated from client/api/rfaas.yaml by internal/apigen (make api). DO NOT EDIT.

// Package api has the numbers and names of the C API (rfaas.h) that layers below the client share with it. It is pure Go.
package api

// Limits.
const (
	MPIErrorMax = 512  // RFAAS_MPI_ERROR_MAX: room for the error text of rfaas_mpi_lease_open (rfaas_mpi.h), in bytes with the NUL.
	LeasesMax   = 4096 // RFAAS_LEASES_MAX: number of leases that a process may hold at the same time.
)

// RFAAS_EXECUTOR_*.
const (
	ExecutorOpen     = 1 // the executor leases cores; also: it registered, or it recovered
	ExecutorDraining = 2 // the executor grants no more leases
	ExecutorSilent   = 3 // the executor missed several heartbeats
	ExecutorLeft     = 4 // the executor has deregistered
)

// ExecutorNames are the names of RFAAS_EXECUTOR_*, by number.
var ExecutorNames = [...]string{ExecutorOpen: "open", ExecutorDraining: "draining", ExecutorSilent: "silent", ExecutorLeft: "left"}

// RFAAS_WAIT_*.
const (
	WaitAdaptive = 0 // spin for about as long as a wake-up takes, then block; the default
	WaitHot      = 1 // spin: lowest latency, uses one core on each side
	WaitWarm     = 2 // block at once: uses no core while waiting
)

// WaitNames are the names of RFAAS_WAIT_*, by number.
var WaitNames = [...]string{WaitAdaptive: "adaptive", WaitHot: "hot", WaitWarm: "warm"}

// RFAAS_EVENT_*.
const (
	EventNone        = 0 // there is no event
	EventWorkerDied  = 1 // a worker died; the next call gets a new worker in its place
	EventEnded       = 2 // it has ended; the text begins with released, expired, revoked, drained or lost
	EventDraining    = 3 // the node drains: calls in flight finish, new calls fail with RFAAS_LEASE_ENDED
	EventExpiring    = 4 // the lease expires soon unless it is renewed
	EventMoved       = 5 // the lease has moved: calls go to another executor; the text is its address
	EventLocal       = 6 // with RFAAS_LEASE_LOCAL: calls run in this process; the text says why
	EventWorkerAdded = 7
)

// EventNames are the names of RFAAS_EVENT_*, by number.
var EventNames = [...]string{EventNone: "none", EventWorkerDied: "worker died", EventEnded: "ended", EventDraining: "draining", EventExpiring: "expiring", EventMoved: "moved", EventLocal: "local", EventWorkerAdded: "worker added"}

// RFAAS_START_*.
const (
	StartUnknown = 0 // the executor did not report it, or the worker is this process
	StartCold    = 1 // a new process
	StartPooled  = 2
	StartCached  = 3
	StartSeeded  = 4 // a new process with the memory of the lease's seed (RFAAS_LEASE_SEED)
)

// StartNames are the names of RFAAS_START_*, by number.
var StartNames = [...]string{StartUnknown: "unknown", StartCold: "cold", StartPooled: "pooled", StartCached: "cached", StartSeeded: "seeded"}

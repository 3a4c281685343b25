// Package manager is the resource manager: it knows which executors there are, where, and what they have free. It
// decides nothing about leases and is on nobody's way: executors and clients go on when it is away, and executors
// register again when it is back.
//
// What it knows lives in memory and comes back by itself with the next heartbeats.
package manager

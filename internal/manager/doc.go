// Package manager is the resource manager: it knows the executors, their addresses and their free cores. It decides
// nothing about leases, and no call passes through it: executors and clients go on while it is away, and executors
// register again when it is back.
//
// Its knowledge of executors is in memory only. After a restart the next heartbeats restore it.
package manager

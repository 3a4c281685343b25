package config

import (
	"time"

	"github.com/rfaas-go/rfaas/internal/control"
	"github.com/rfaas-go/rfaas/internal/quota"
)

// Port has the settings that limit the callers of a daemon's control port.
type Port struct {
	ConnectionStreams     int           `mapstructure:"connection-streams"` // 0: as many as one client can need
	UnauthenticatedMemory Bytes         `mapstructure:"unauthenticated-memory"`
	UnauthenticatedTime   time.Duration `mapstructure:"unauthenticated-time"`
	TenantConnections     int           `mapstructure:"tenant-connections"`
	TenantStreams         int           `mapstructure:"tenant-streams"`
	TenantReplies         Bytes         `mapstructure:"tenant-replies"`
}

var portOptions = []option{
	{"connection-streams", "0", "simultaneous calls and event streams of one connection, 0 for as many as one client can need"},
	{"unauthenticated-memory", "64MiB", "memory of all connections that have not authenticated yet; a new one closes the oldest"},
	{"unauthenticated-time", "10s", "how long a connection may be open before its first authenticated call"},
	{"tenant-connections", "1024", "simultaneous connections of one tenant, at most a quarter of the daemon's descriptors; operators have no such limits"},
	{"tenant-streams", "4096", "simultaneous calls and event streams of one tenant, 0 for no limit"},
	{"tenant-replies", "64MiB", "bytes of replies that clients of one tenant have asked for and not read yet, 0 for no limit"},
}

// mostRate is the largest value of settings that are counts or rates.
const mostRate = 1 << 20

// Bounds returns the limits of the settings. own is how many streams one client can need besides those of its calls.
// more has the limits of tenants that only this daemon has.
func (p *Port) Bounds(own int, more quota.Limits) control.Bounds {
	b := control.Bounds{Streams: p.ConnectionStreams, UnauthBytes: int(p.UnauthenticatedMemory), FirstCall: p.UnauthenticatedTime,
		Tenant: quota.Limits{quota.Connections: p.TenantConnections, quota.Streams: p.TenantStreams,
			quota.Replies: int(p.TenantReplies)}}
	if b.Streams == 0 {
		b.Streams = callStreams + own
	}
	for k, n := range more {
		b.Tenant[k] = n
	}
	return b
}

// callStreams is how many streams one client may need for its calls and its streams of lease requests.
const callStreams = 256

func (v *validator) port(p *Port) {
	v.between("connection-streams", p.ConnectionStreams, 0, mostRate)
	if p.ConnectionStreams != 0 && p.ConnectionStreams < 64 {
		v.failf("connection-streams: %d is less than the 64 that one client may need for its calls", p.ConnectionStreams)
	}
	if p.UnauthenticatedMemory < 1<<20 || p.UnauthenticatedMemory > 1<<40 {
		v.failf("unauthenticated-memory: %v is not in 1MiB..1TiB", p.UnauthenticatedMemory)
	}
	v.positive("unauthenticated-time", p.UnauthenticatedTime)
	v.between("tenant-connections", p.TenantConnections, 0, mostRate)
	v.between("tenant-streams", p.TenantStreams, 0, mostRate)
	if p.TenantReplies > 1<<40 {
		v.failf("tenant-replies: %v is above 1TiB", p.TenantReplies)
	}
}

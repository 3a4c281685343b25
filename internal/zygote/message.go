package zygote

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Limits of worker/message.h. TestMessagesMatchC compares the two.
const (
	bodyChannel = 516 // offset of depth, bulk size and eager size of the client's channel
	bodySeed    = 532 // offset of the size of the seed's heap
	bodyBundle  = 536 // offset of the bundle's identifier
	bodyPaged   = 556 // offset of the word that says that its pages come on demand
	bodyChild   = 552 // offset of the number of a worker of a seed

	cpusMax      = 1024
	functionsMax = 65536
	namesMax     = 4 << 20
	blobMax      = 256
	deviceMax    = 63
	depthMax     = 1024
	eagerMax     = 256 << 10
	bulkMax      = 1 << 32
)

// Exit statuses of worker/message.h.
const (
	exitStopped    = 0
	exitFailed     = 90
	exitClientGone = 91
	exitProtocol   = 92
	exitFabric     = 93
	exitOrphan     = 94
)

func invalid(format string, args ...any) error {
	return &WorkerError{Status: wire.StatusInvalid, Text: fmt.Sprintf(format, args...)}
}

// prepareBody returns the body of PREPARE for s.
func prepareBody(s *Spec) ([]byte, error) {
	b, err := deviceBody(s)
	if err != nil || s.MaxDepth == 0 {
		return b, err
	}
	return b, putLimits(b, s)
}

// putLimits writes the largest channel, or the channel to make ahead, into a message.
func putLimits(b []byte, s *Spec) error {
	err := putNumbers(b, []number{
		{"depth limit", int64(s.MaxDepth), 0, depthMax, 24, 4},
		{"eager limit", int64(s.MaxEager), 0, eagerMax, 28, 4},
	})
	if err == nil && s.MaxBulk > bulkMax {
		err = invalid("bulk limit %d not in 0..%d", s.MaxBulk, uint64(bulkMax))
	}
	binary.LittleEndian.PutUint64(b[32:], s.MaxBulk)
	return err
}

// deviceBody checks s and returns the part of the bodies of PREPARE and SPAWN that identifies the device.
func deviceBody(s *Spec) ([]byte, error) {
	b := make([]byte, wire.SpawnSize)
	switch s.Provider {
	case "shm":
		b[0] = 1
	case "verbs":
		b[0] = 2
	case "tcp":
		b[0] = 3
	case "ofi":
		b[0] = 4
	default:
		return nil, invalid("unknown provider %q (shm, verbs, tcp, ofi)", s.Provider)
	}
	err := putNumbers(b, []number{
		{"port", int64(s.Port), 0, 255, 2, 1},
		{"encryption", int64(s.Encrypt), 0, 3, 3, 1},
		{"GID index", int64(s.GIDIndex), -1, 255, 4, 4},
		{"P_Key index", int64(s.PKeyIndex), 0, 65535, 8, 4},
		{"traffic class", int64(s.TrafficClass), 0, 255, 12, 4},
		{"service level", int64(s.ServiceLevel), 0, 15, 16, 4},
		{"MTU", int64(s.MTU), 0, 4096, 20, 4},
	})
	if err != nil {
		return nil, err
	}
	if len(s.Device) > deviceMax {
		return nil, invalid("device name of %d bytes, at most %d", len(s.Device), deviceMax)
	}
	for i := range len(s.Device) {
		if s.Device[i] <= ' ' || s.Device[i] > '~' {
			return nil, invalid("device name %q", s.Device)
		}
	}
	copy(b[184:], s.Device)
	return b, nil
}

// number is a field of a message with the range of its values.
type number struct {
	what           string
	v, low, high   int64
	offset, octets int
}

func putNumbers(b []byte, list []number) error {
	for _, r := range list {
		if r.v < r.low || r.v > r.high {
			return invalid("%s %d not in %d..%d", r.what, r.v, r.low, r.high)
		}
		if r.octets == 1 {
			b[r.offset] = byte(r.v)
		} else {
			binary.LittleEndian.PutUint32(b[r.offset:], uint32(int32(r.v)))
		}
	}
	return nil
}

// spawnBody checks s and returns the body of SPAWN.
func spawnBody(s *Spec) ([]byte, error) {
	b, err := deviceBody(s)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	if err = putLimits(b, s); err != nil {
		return nil, err
	}
	if err = putNumbers(b, []number{{"wait mode", int64(s.WaitMode), api.WaitAdaptive, api.WaitWarm, 1, 1}}); err != nil {
		return nil, err
	}
	if len(s.ClientBlob) == 0 || len(s.ClientBlob) > blobMax {
		return nil, &WorkerError{Status: wire.StatusBadBlob, Text: fmt.Sprintf("client's blob of %d bytes, not 1..%d", len(s.ClientBlob), blobMax)}
	}
	if len(s.Names) > functionsMax {
		return nil, invalid("%d functions, at most %d", len(s.Names), functionsMax)
	}
	le.PutUint64(b[40:], s.MemoryLimit)
	le.PutUint32(b[48:], uint32(len(s.Names)))
	le.PutUint32(b[52:], uint32(len(s.ClientBlob)))
	for _, cpu := range s.CPUs {
		if cpu < 0 || cpu >= cpusMax {
			return nil, invalid("CPU %d not in 0..%d", cpu, cpusMax-1)
		}
		b[56+cpu/8] |= 1 << (cpu % 8)
	}
	copy(b[248:], s.ClientBlob)
	if s.Channel.Bulk > bulkMax {
		return nil, invalid("channel bulk size %d not in 0..%d", s.Channel.Bulk, uint64(bulkMax))
	}
	le.PutUint64(b[bodyChannel+4:], s.Channel.Bulk)
	copy(b[bodyBundle:], s.Bundle[:])
	if s.Seed != nil {
		le.PutUint32(b[bodySeed:], s.Seed.Units)
		le.PutUint32(b[bodyChild:], s.Seed.child())
	}
	return b, putNumbers(b, []number{
		{"channel depth", int64(s.Channel.Depth), 0, depthMax, bodyChannel, 4},
		{"channel eager size", int64(s.Channel.Eager), 0, eagerMax, bodyChannel + 12, 4},
	})
}

// namesBlock returns the content of the names memfd: each name with its NUL, in index order.
func namesBlock(names []string) ([]byte, error) {
	if len(names) == 0 {
		return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: "no functions named"}
	}
	var b []byte
	for i, name := range names {
		if name == "" {
			return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("function %d has an empty name", i)}
		}
		if strings.IndexByte(name, 0) >= 0 {
			return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("function %d: name %q contains a NUL", i, name)}
		}
		b = append(append(b, name...), 0)
	}
	if len(b) > namesMax {
		return nil, &WorkerError{Status: wire.StatusBadLibrary, Text: fmt.Sprintf("function names of %d bytes, at most %d", len(b), namesMax)}
	}
	return b, nil
}

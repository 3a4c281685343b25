package dataplane

/*
#include "dp_broker.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MaxLanes is the most completion queues of an endpoint. The first channels have one each.
const MaxLanes = int(C.DP_LANES_MAX)

// VirtualPairs is the version of the virtual queue pairs that a broker serves.
const VirtualPairs = uint32(C.DP_VQP_VERSION)

// Broker is a thread that posts for other processes of the node, on channels that this process has connected. Safe for concurrent use.
type Broker struct{ c *C.dp_broker }

// NewBroker starts a broker. The device stays open until the broker is closed.
func (d *Device) NewBroker() (*Broker, error) {
	var b Broker
	var e C.dp_error
	if C.dp_broker_start(d.c, &b.c, &e) != 0 {
		return nil, cError("start a broker", &e)
	}
	return &b, nil
}

// Close ends all channels of the broker.
func (b *Broker) Close() { C.dp_broker_stop(b.c) }

// Served returns the number of channels that the broker serves.
func (b *Broker) Served() int {
	var s C.dp_broker_stats
	C.dp_broker_get_stats(b.c, &s)
	return int(s.channels)
}

// Brokered are channels through a broker. Use by one goroutine at a time.
type Brokered struct {
	all   []*C.dp_brokered
	files []int // of the channels that are served
}

// NewChannels makes n channels. The error is ErrUnsupported if their slots are too small.
func (b *Broker) NewChannels(n int, cfg ChannelConfig) (*Brokered, error) {
	s := &Brokered{}
	c := C.dp_channel_config{depth: C.uint32_t(cfg.Depth), eager: C.uint32_t(cfg.Eager), bulk: C.uint64_t(cfg.Bulk)}
	for range n {
		var one *C.dp_brokered
		var e C.dp_error
		if C.dp_brokered_create(b.c, &c, &one, &e) != 0 {
			s.Close()
			return nil, cError("make a brokered channel", &e)
		}
		s.all = append(s.all, one)
	}
	return s, nil
}

// Offers returns the client's blob of each channel.
func (s *Brokered) Offers() (blobs [][]byte, err error) {
	var e C.dp_error
	for _, one := range s.all {
		blob := make([]byte, C.DP_CHANNEL_BLOB_MAX)
		n := C.uint32_t(len(blob))
		if C.dp_brokered_offer(one, unsafe.Pointer(&blob[0]), &n, &e) != 0 {
			return nil, cError("offer a brokered channel", &e)
		}
		blobs = append(blobs, blob[:n])
	}
	return blobs, nil
}

// Connect connects channel i to the worker that answered with this blob.
func (s *Brokered) Connect(i int, blob []byte) error {
	var e C.dp_error
	if C.dp_brokered_connect(s.all[i], unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return cError("connect a brokered channel", &e)
	}
	return nil
}

// Pack has the broker serve the channels, and describes them for the process that uses them. They end when all copies of their descriptors are closed.
// The results are those of Channels.Pack.
func (s *Brokered) Pack() (endpoint int, channels []Packed, err error) {
	var e C.dp_error
	for i := range s.all {
		var p C.dp_packed_channel
		var fds [C.DP_PACKED_FDS]C.int
		if C.dp_brokered_serve(&s.all[i], &p, &fds[0], &e) != 0 {
			return -1, nil, cError(fmt.Sprintf("pack channel %d", i), &e)
		}
		one := Packed{Description: C.GoBytes(unsafe.Pointer(&p), C.int(unsafe.Sizeof(p)))}
		for _, fd := range fds[:p.qp.n_fds] {
			one.Files = append(one.Files, int(fd))
			s.files = append(s.files, int(fd))
		}
		channels = append(channels, one)
	}
	return channels[0].Files[0], channels, nil // a process that takes them over makes a queue of its own, and needs no particular descriptor
}

// Close closes this process's descriptors of the channels, and ends the channels that no broker serves.
func (s *Brokered) Close() {
	for _, one := range s.all {
		C.dp_brokered_drop(one)
	}
	for _, fd := range s.files {
		unix.Close(fd)
	}
	s.all, s.files = nil, nil
}

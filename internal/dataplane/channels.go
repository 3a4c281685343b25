package dataplane

/*
#include "dp_channel.h"
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Channels are an endpoint and its channels. This process connects them for another process of the node, and makes no calls on them.
// Use by one goroutine at a time.
type Channels struct {
	ep  *C.dp_endpoint
	all []*C.dp_channel
}

// ChannelConfig has the sizes of each channel.
type ChannelConfig struct {
	Depth, Eager int
	Bulk         uint64
}

// NewChannels makes n channels. The device stays open until they are closed.
func (d *Device) NewChannels(n int, mode WaitMode, cfg ChannelConfig) (*Channels, error) {
	const op = "make channels"
	s := &Channels{}
	var e C.dp_error
	if C.dp_endpoint_create(d.c, C.uint32_t(n), C.uint32_t(cfg.Depth), C.dp_wait_mode(mode), &s.ep, &e) != 0 {
		return nil, cError(op, &e)
	}
	c := C.dp_channel_config{depth: C.uint32_t(cfg.Depth), eager: C.uint32_t(cfg.Eager), bulk: C.uint64_t(cfg.Bulk)}
	for range n {
		var ch *C.dp_channel
		if C.dp_channel_create(s.ep, &c, &ch, &e) != 0 {
			s.Close()
			return nil, cError(op, &e)
		}
		s.all = append(s.all, ch)
	}
	return s, nil
}

// Offers returns the client's blob of each channel.
func (s *Channels) Offers() (blobs [][]byte, err error) {
	var e C.dp_error
	for _, ch := range s.all {
		blob := make([]byte, C.DP_CHANNEL_BLOB_MAX)
		n := C.uint32_t(len(blob))
		if C.dp_channel_offer(ch, unsafe.Pointer(&blob[0]), &n, &e) != 0 {
			return nil, cError("offer a channel", &e)
		}
		blobs = append(blobs, blob[:n])
	}
	return blobs, nil
}

// SizesOffer returns the blob of a client on verbs that has no queue pair yet. A worker that is started with this blob connects when a lease
// takes it.
func SizesOffer(cfg ChannelConfig) []byte {
	blob := make([]byte, C.DP_CHANNEL_BLOB_MAX)
	n := C.uint32_t(len(blob))
	c := C.dp_channel_config{depth: C.uint32_t(cfg.Depth), eager: C.uint32_t(cfg.Eager), bulk: C.uint64_t(cfg.Bulk)}
	C.dp_side_encode_sizes(&c, C.DP_PROVIDER_VERBS, unsafe.Pointer(&blob[0]), &n)
	return blob[:n]
}

// Connect connects channel i to the worker that answered with this blob. The worker has connected before it answers.
func (s *Channels) Connect(i int, blob []byte) error {
	var e C.dp_error
	if C.dp_channel_connect(s.all[i], unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return cError("connect a channel", &e)
	}
	return nil
}

// Packed describes a connected channel at rest, for the library in the process that takes it over.
type Packed struct {
	Description []byte
	Files       []int // descriptors; the channel owns them
}

// Pack returns the endpoint's descriptor, which the endpoint owns, and the channels. Afterwards they can only be closed. The worker stays
// connected as long as a copy of the descriptors is open.
func (s *Channels) Pack() (endpoint int, channels []Packed, err error) {
	if endpoint = int(C.dp_endpoint_pack(s.ep)); endpoint < 0 {
		return -1, nil, &Error{Op: "pack channels", Status: StatusUnsupported, Detail: "only those of shm and tcp leave their process"}
	}
	var e C.dp_error
	for i, ch := range s.all {
		var p C.dp_packed_channel
		var fds [C.DP_PACKED_FDS]C.int
		if C.dp_channel_pack(ch, &p, &fds[0], &e) != 0 {
			return -1, nil, cError(fmt.Sprintf("pack channel %d", i), &e)
		}
		one := Packed{Description: C.GoBytes(unsafe.Pointer(&p), C.int(unsafe.Sizeof(p)))}
		for _, fd := range fds[:p.qp.n_fds] {
			one.Files = append(one.Files, int(fd))
		}
		channels = append(channels, one)
	}
	return endpoint, channels, nil
}

// Close destroys the channels.
func (s *Channels) Close() {
	for _, ch := range s.all {
		C.dp_channel_destroy(ch)
	}
	C.dp_endpoint_destroy(s.ep)
	s.ep, s.all = nil, nil
}

// Package channel makes channels to workers for tests of the executor and of the agent, which have no client library.
//
// Its C code uses the headers of internal/dataplane, as package benchmarks/raw does.
package channel

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter -I${SRCDIR}/../../internal/dataplane
#cgo LDFLAGS: -Wl,--unresolved-symbols=ignore-all
#include "dp_channel.h"
*/
import "C"

import (
	"unsafe"

	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// Endpoint has the completion queue of its channels. One goroutine at a time uses an endpoint and its channels, except where a
// method says otherwise.
type Endpoint struct{ c *C.dp_endpoint }

// NewEndpoint makes an endpoint for up to channels of up to depth slots.
func NewEndpoint(d *dataplane.Device, channels, depth int) (*Endpoint, error) {
	var ep Endpoint
	var e C.dp_error
	if C.dp_endpoint_create((*C.dp_dev)(d.Handle()), C.uint32_t(channels), C.uint32_t(depth), C.DP_WAIT_ADAPTIVE, &ep.c, &e) != 0 {
		return nil, failure("create endpoint", &e)
	}
	return &ep, nil
}

// Close frees the endpoint. Its channels must be closed.
func (ep *Endpoint) Close() { C.dp_endpoint_destroy(ep.c) }

// Channel is a connection to one worker.
type Channel struct{ c *C.dp_channel }

// NewChannel makes a channel that is not connected yet.
func (ep *Endpoint) NewChannel(depth, eager int) (*Channel, error) {
	c := C.dp_channel_config{depth: C.uint32_t(depth), eager: C.uint32_t(eager)}
	var ch Channel
	var e C.dp_error
	if C.dp_channel_create(ep.c, &c, &ch.c, &e) != 0 {
		return nil, failure("create channel", &e)
	}
	return &ch, nil
}

// Close destroys the channel.
func (ch *Channel) Close() { C.dp_channel_destroy(ch.c) }

// Offer returns the blob that a worker needs to connect.
func (ch *Channel) Offer() ([]byte, error) {
	blob := make([]byte, C.DP_CHANNEL_BLOB_MAX)
	n := C.uint32_t(len(blob))
	var e C.dp_error
	if C.dp_channel_offer(ch.c, unsafe.Pointer(&blob[0]), &n, &e) != 0 {
		return nil, failure("offer channel", &e)
	}
	return blob[:n], nil
}

// Connect takes the worker's answer to Offer.
func (ch *Channel) Connect(blob []byte) error {
	var e C.dp_error
	if C.dp_channel_connect(ch.c, unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return failure("connect channel", &e)
	}
	return nil
}

// Reset prepares the channel for an Offer to another worker.
func (ch *Channel) Reset() error {
	var e C.dp_error
	if C.dp_channel_reset(ch.c, &e) != 0 {
		return failure("reset channel", &e)
	}
	return nil
}

// Renew gives an idle channel a new generation for an Offer to the same worker, whose answer Resume takes.
func (ch *Channel) Renew() error {
	var e C.dp_error
	if C.dp_channel_next_generation(ch.c, &e) != 0 {
		return failure("next generation of the channel", &e)
	}
	return nil
}

// Resume takes the worker's answer to an Offer after Renew.
func (ch *Channel) Resume(blob []byte) error {
	var e C.dp_error
	if C.dp_channel_resume(ch.c, unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return failure("resume channel", &e)
	}
	return nil
}

// Fail ends all calls of the channel with the status. Any goroutine may call it.
func (ch *Channel) Fail(st dataplane.Status) { C.dp_channel_fail(ch.c, C.int(st)) }

// Call calls function fn and waits until deadline, a time of dataplane.Now. n is the size of the result in out.
func (ch *Channel) Call(fn uint32, in, out []byte, deadline int64) (n int, st dataplane.Status) {
	var size C.uint32_t
	var started C.dp_started
	st = dataplane.Status(C.dp_channel_call(ch.c, C.uint32_t(fn), unsafe.Pointer(unsafe.SliceData(in)), C.uint32_t(len(in)), nil,
		unsafe.Pointer(unsafe.SliceData(out)), C.uint32_t(len(out)), &size, C.int64_t(deadline), &started))
	return int(size), st
}

func failure(op string, e *C.dp_error) error {
	return &dataplane.Error{Op: op, Status: dataplane.Status(e.status), Detail: C.GoString(&e.msg[0])}
}

package dataplane

/*
#include "dp_channel.h"

// dp_channel_call with its three results in one word and pointers to bytes: cgo checks at run time what a void pointer or
// a pointer to a pointer refers to, and a pointer to bytes not at all.
// Size in bits 0..31, minus the status in 32..47, whether it may have started in 48.
static uint64_t call_packed(dp_channel *ch, uint32_t function, const uint8_t *in, uint32_t size, uint8_t *out,
                            uint32_t capacity, int64_t deadline_ns) {
	uint32_t got = 0;
	dp_started started;
	int status = dp_channel_call(ch, function, in, size, NULL, out, capacity, &got, deadline_ns, &started);
	return got | (uint64_t)(uint16_t)-status << 32 | (uint64_t)(started == DP_MAYBE_EXECUTED) << 48;
}

#cgo noescape call_packed
#cgo nocallback call_packed
#cgo noescape dp_channel_submit
#cgo nocallback dp_channel_submit
#cgo noescape dp_channel_finish
#cgo noescape dp_channel_result
#cgo nocallback dp_channel_result
#cgo nocallback dp_channel_finish
#cgo nocallback dp_channel_wait
#cgo nocallback dp_channel_test
#cgo nocallback dp_channel_abandon
*/
import "C"

import "unsafe"

// Limits of the protocol.
const (
	MaxDepth     = C.DP_DEPTH_MAX
	MaxEager     = C.DP_EAGER_MAX
	MaxBulk      = int64(C.DP_BULK_MAX)
	DefaultDepth = C.DP_DEPTH_DEFAULT
	DefaultEager = C.DP_EAGER_DEFAULT
	DefaultBulk  = int64(C.DP_BULK_DEFAULT)
)

// ChannelConfig sizes a channel.
type ChannelConfig struct {
	Depth int   // calls in flight, 1..MaxDepth
	Eager int   // bytes of payload and of result that fit a slot, 1..MaxEager, rounded up to 64
	Bulk  int64 // bytes of larger payloads, and of larger results, in flight together; 0..MaxBulk
}

// Channel is a connection to one worker. It belongs to its endpoint's goroutine, but for Fail and Status.
type Channel struct {
	c *C.dp_channel
}

// ChannelOf is the channel of a dp_channel that C code outside of this package has made, and closes.
func ChannelOf(c unsafe.Pointer) *Channel { return &Channel{c: (*C.dp_channel)(c)} }

// NewChannel makes a channel that is not yet connected.
func (ep *Endpoint) NewChannel(cfg ChannelConfig) (*Channel, error) {
	c := C.dp_channel_config{depth: C.uint32_t(clampU32(cfg.Depth)), eager: C.uint32_t(clampU32(cfg.Eager)),
		bulk: C.uint64_t(max(cfg.Bulk, 0))}
	var ch Channel
	var e C.dp_error
	if C.dp_channel_create(ep.c, &c, &ch.c, &e) != 0 {
		return nil, cError("create channel", &e)
	}
	return &ch, nil
}

// clampU32 maps what does not fit to 0, which every size check refuses.
func clampU32(n int) uint32 {
	if n < 0 || int64(n) > int64(^uint32(0)) {
		return 0
	}
	return uint32(n)
}

// Close destroys the channel; calls under way are forgotten.
func (ch *Channel) Close() {
	C.dp_channel_destroy(ch.c)
	ch.c = nil
}

// Offer is the blob that a worker needs to connect.
func (ch *Channel) Offer() ([]byte, error) {
	blob := make([]byte, C.DP_CHANNEL_BLOB_MAX)
	n := C.uint32_t(len(blob))
	var e C.dp_error
	if C.dp_channel_offer(ch.c, unsafe.Pointer(&blob[0]), &n, &e) != 0 {
		return nil, cError("offer channel", &e)
	}
	return blob[:n], nil
}

// Connect takes the worker's blob, the answer to Offer.
func (ch *Channel) Connect(blob []byte) error {
	var e C.dp_error
	if C.dp_channel_connect(ch.c, unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return cError("connect channel", &e)
	}
	return nil
}

// Reset prepares the channel for another Offer. ErrBusy while ended calls wait to be finished.
func (ch *Channel) Reset() error {
	var e C.dp_error
	if C.dp_channel_reset(ch.c, &e) != 0 {
		return cError("reset channel", &e)
	}
	return nil
}

// Idle says whether the channel is connected, works and has no call under way or unfinished.
func (ch *Channel) Idle() bool { return bool(C.dp_channel_idle(ch.c)) }

// Renew gives an idle channel a new generation for an Offer to the same worker, whose answer Resume takes: the connection
// stays.
func (ch *Channel) Renew() error {
	var e C.dp_error
	if C.dp_channel_renew(ch.c, &e) != 0 {
		return cError("renew channel", &e)
	}
	return nil
}

// Resume takes the worker's blob, the answer to an Offer after Renew.
func (ch *Channel) Resume(blob []byte) error {
	var e C.dp_error
	if C.dp_channel_resume(ch.c, unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob)), &e) != 0 {
		return cError("resume channel", &e)
	}
	return nil
}

// Fail ends all calls of the channel with the status. Any goroutine.
func (ch *Channel) Fail(st Status) { C.dp_channel_fail(ch.c, C.int(st)) }

// Status is OK, or what ended the channel.
func (ch *Channel) Status() Status { return Status(C.dp_channel_status(ch.c)) }

// Call runs function fn with payload in and waits; its result is stored to out, whose length is the capacity. deadline is
// as of Now, 0 for none. n is the result's size; with StatusResultTooLarge, the size that it has. maybe tells whether
// the function may have run when st is not OK. Does not allocate.
func (ch *Channel) Call(fn uint32, in, out []byte, deadline int64) (n int, maybe bool, st Status) {
	if int64(len(in)) > int64(^uint32(0)) || int64(len(out)) > int64(^uint32(0)) {
		return 0, false, StatusTooLarge
	}
	r := C.call_packed(ch.c, C.uint32_t(fn), bytesOf(in), C.uint32_t(len(in)), bytesOf(out), C.uint32_t(len(out)),
		C.int64_t(deadline))
	return int(uint32(r)), r>>48 != 0, -Status(uint16(r >> 32))
}

func bytesOf(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(b))) }

// Submit starts a call and returns its slot. The payload is copied or sent before it returns.
func (ch *Channel) Submit(fn uint32, in []byte, capacity int) (slot uint32, st Status) {
	if int64(len(in)) > int64(^uint32(0)) || capacity < 0 || int64(capacity) > int64(^uint32(0)) {
		return 0, StatusTooLarge
	}
	var s C.uint32_t
	st = Status(C.dp_channel_submit(ch.c, C.uint32_t(fn), unsafe.Pointer(unsafe.SliceData(in)), C.uint32_t(len(in)), nil,
		C.uint32_t(capacity), &s))
	return uint32(s), st
}

// SubmitRegion is Submit for a payload that lies in r, in[0] included. It must not change until the call has ended.
func (ch *Channel) SubmitRegion(fn uint32, r *Region, in []byte, capacity int) (slot uint32, st Status) {
	if int64(len(in)) > int64(^uint32(0)) || capacity < 0 || int64(capacity) > int64(^uint32(0)) {
		return 0, StatusTooLarge
	}
	var s C.uint32_t
	st = Status(C.dp_channel_submit(ch.c, C.uint32_t(fn), unsafe.Pointer(unsafe.SliceData(in)), C.uint32_t(len(in)), r.c,
		C.uint32_t(capacity), &s))
	return uint32(s), st
}

// Test makes progress and says whether the call has ended.
func (ch *Channel) Test(slot uint32) bool { return C.dp_channel_test(ch.c, C.uint32_t(slot)) != 0 }

// Wait returns OK when the call has ended, StatusDeadline when the deadline came first: the call then goes on.
func (ch *Channel) Wait(slot uint32, deadline int64) Status {
	return Status(C.dp_channel_wait(ch.c, C.uint32_t(slot), C.int64_t(deadline)))
}

// Finish copies the result of an ended call to out, frees its slot and returns what Call does. out must hold the
// capacity given to Submit.
func (ch *Channel) Finish(slot uint32, out []byte) (n int, maybe bool, st Status) {
	if size, have := ch.resultSize(slot); have == OK && size > len(out) {
		C.dp_channel_abandon(ch.c, C.uint32_t(slot))
		return size, true, StatusResultTooLarge
	}
	var size C.uint32_t
	var started C.dp_started
	st = Status(C.dp_channel_finish(ch.c, C.uint32_t(slot), unsafe.Pointer(unsafe.SliceData(out)), &size, &started))
	return int(size), started == C.DP_MAYBE_EXECUTED, st
}

func (ch *Channel) resultSize(slot uint32) (int, Status) {
	var size C.uint32_t
	st := Status(C.dp_channel_result(ch.c, C.uint32_t(slot), nil, &size, nil))
	return int(size), st
}

// Message is the text that a failed function gave (StatusFunctionFailed), before Finish.
func (ch *Channel) Message(slot uint32) string {
	var res unsafe.Pointer
	var size C.uint32_t
	if Status(C.dp_channel_result(ch.c, C.uint32_t(slot), &res, &size, nil)) != StatusFunctionFailed || res == nil {
		return ""
	}
	return C.GoStringN((*C.char)(res), C.int(size))
}

// LastMessage is what the function said in the last call that ended with StatusFunctionFailed.
func (ch *Channel) LastMessage() string {
	var n C.uint32_t
	p := C.dp_channel_message(ch.c, &n)
	return C.GoStringN(p, C.int(n))
}

// Abandon gives up a call, under way or ended. Its slot is free when the late reply has come.
func (ch *Channel) Abandon(slot uint32) { C.dp_channel_abandon(ch.c, C.uint32_t(slot)) }

// ChannelStats counts what a channel did.
type ChannelStats struct {
	Calls, Replies, Abandoned, LateReplies, Strays, Busy, BlockedWaits, BytesIn, BytesOut uint64
}

// Stats returns the counters.
func (ch *Channel) Stats() ChannelStats {
	var s C.dp_channel_stats
	C.dp_channel_get_stats(ch.c, &s)
	return ChannelStats{uint64(s.calls), uint64(s.replies), uint64(s.abandoned), uint64(s.late_replies), uint64(s.strays),
		uint64(s.busy), uint64(s.blocked_waits), uint64(s.bytes_in), uint64(s.bytes_out)}
}

// FreeSlots is how many calls may be submitted now.
func (ch *Channel) FreeSlots() int { return int(C.dp_channel_free_slots(ch.c)) }

// Silence says since when calls are under way of which the worker has answered none, and when that was last so, in Now's clock;
// 0 unless it has lasted so long that the worker runs a long function or will never answer. Any goroutine.
func (ch *Channel) Silence() (since, at int64) {
	s := C.dp_channel_silence(ch.c)
	return int64(s.since), int64(s.at)
}

// Handle is the C object, for the C interface.
func (ch *Channel) Handle() unsafe.Pointer { return unsafe.Pointer(ch.c) }

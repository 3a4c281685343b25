package dataplane

/*
#include "dp_tcp_impl.h"
#include "dp_wire.h"
*/
import "C"

import (
	"net"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants for a process that accepts tcp connections and hands them over to other processes. See dp_tcp.h.
const (
	HelloSize  = C.DP_TCP_HELLO_SIZE                  // bytes of the hello that begins each connection
	HelloTime  = C.DP_TCP_HELLO_MS * time.Millisecond // time within which the hello must arrive
	MaxPending = C.DP_TCP_PENDING                     // connections without a whole hello; a new one replaces the oldest

	ConnectTime = C.DP_TCP_CONNECT_MS * time.Millisecond // how long Connect waits for its peer
)

// Token names a queue pair of the tcp provider. It is a secret, and valid for one connection.
type Token [C.DP_TCP_TOKEN_SIZE]byte

// HelloToken returns the token of the queue pair that a hello of HelloSize bytes addresses. False: not a hello of this version.
func HelloToken(hello []byte) (t Token, ok bool) {
	if len(hello) != HelloSize {
		return t, false
	}
	return token(C.dp_tcp_hello_token(unsafe.Pointer(unsafe.SliceData(hello))))
}

// ChannelToken returns the token of the queue pair in a channel's blob. False: not a channel over tcp.
func ChannelToken(blob []byte) (t Token, ok bool) {
	if len(blob) <= C.sizeof_dp_channel_blob {
		return t, false
	}
	return BlobToken(blob[C.sizeof_dp_channel_blob:])
}

// ChannelAddresses returns the addresses at which the queue pair in a channel's blob accepts connections; none if the blob is malformed or
// not of a channel over tcp. IPv4 addresses are not mapped to IPv6.
func ChannelAddresses(blob []byte) (all []netip.AddrPort) {
	if len(blob) <= C.sizeof_dp_channel_blob {
		return nil
	}
	return BlobAddresses(blob[C.sizeof_dp_channel_blob:])
}

// BlobAddresses is ChannelAddresses for the blob of a queue pair.
func BlobAddresses(blob []byte) (all []netip.AddrPort) {
	if _, ok := BlobToken(blob); !ok {
		return nil
	}
	var b C.tcp_blob // not a pointer into blob, which may not be aligned
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&b)), unsafe.Sizeof(b)), blob)
	for _, a := range b.addresses[:b.n_addresses] {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a.ip))).Unmap(), uint16(a.port)))
	}
	return all
}

// BlobToken returns the token of a queue pair's blob. False: not a tcp blob.
func BlobToken(blob []byte) (t Token, ok bool) {
	return token(C.dp_tcp_blob_token(unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob))))
}

func token(at *C.uint8_t) (t Token, ok bool) {
	if at == nil {
		return t, false
	}
	copy(t[:], unsafe.Slice((*byte)(at), len(t)))
	return t, true
}

// Forged returns how many encrypted connections of a tcp device have ended because a record was not the peer's next one.
func (d *Device) Forged() uint64 {
	var n C.dp_tcp_counts
	C.dp_tcp_count(d.c, &n)
	return uint64(n.forged)
}

// PrepareTCP sets the options of a connection's descriptor that the provider relies on, and that a worker in its sandbox cannot set.
func PrepareTCP(fd int) { C.dp_tcp_prepare(C.int(fd)) }

// Hand gives a tcp device the connection of a peer and the hello of HelloSize bytes that was read from it, for the queue pair that the
// hello addresses. The queue pair answers, and its Connect succeeds. Hand uses a duplicate of the descriptor. It does not block. Errors:
// StatusBadBlob (no queue pair waits for this hello), StatusPeerGone.
func (d *Device) Hand(conn *net.TCPConn, hello []byte) error {
	if len(hello) != HelloSize {
		return &Error{Op: "hand over a connection", Status: StatusBadBlob, Detail: "the hello has another size"}
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	own, dup := -1, error(nil)
	if err := raw.Control(func(fd uintptr) { own, dup = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return err
	}
	if dup != nil {
		return dup
	}
	var e C.dp_error
	if C.dp_tcp_hand(d.c, C.int(own), unsafe.Pointer(unsafe.SliceData(hello)), &e) != 0 {
		return cError("hand over a connection", &e)
	}
	return nil
}

package dataplane

// #include "dp_tcp.h"
import "C"

import (
	"errors"
	"unsafe"
)

// TCPToken names a queue pair of provider tcp to the acceptor of its connection. It is a secret, and good for one connection.
type TCPToken [C.DP_TCP_TOKEN_SIZE]byte

// TCPHello is the beginning of each connection of provider tcp (dp_tcp.h).
type TCPHello [C.DP_TCP_HELLO_SIZE]byte

// Token returns the token of the queue pair that the connection is for. ok is false if the bytes are no hello of this version.
func (h *TCPHello) Token() (t TCPToken, ok bool) {
	return token(C.dp_tcp_hello_token(unsafe.Pointer(h)))
}

// TokenOfTCPBlob returns the token of a queue pair's blob.
func TokenOfTCPBlob(blob []byte) (TCPToken, error) {
	t, ok := token(C.dp_tcp_blob_token(unsafe.Pointer(unsafe.SliceData(blob)), C.uint32_t(len(blob))))
	if !ok {
		return t, errors.New("not a queue-pair blob of provider tcp")
	}
	return t, nil
}

func token(at *C.uint8_t) (t TCPToken, ok bool) {
	if at == nil {
		return t, false
	}
	return TCPToken(unsafe.Slice((*byte)(at), len(t))), true
}

// PrepareTCP sets the options of a connection's descriptor that the provider relies on, and that a worker in its sandbox cannot set.
func PrepareTCP(fd int) { C.dp_tcp_prepare(C.int(fd)) }

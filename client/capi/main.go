// Command capi is librfaas.so: the C API of rfaas.h with its control part. Calls never come here; they are C from
// end to end (internal/dataplane/rfaas_api.c). What comes here are messages: open a session, take a lease with these
// blobs, replace a worker (internal/dataplane/rfaas_api.h). Build with -buildmode=c-shared.
package main

/*
#cgo CFLAGS: -std=gnu11
#include <stdlib.h>
#include <stdint.h>

extern void rfaas_control_event(const void *msg, uint64_t len);
*/
import "C"

import (
	"unsafe"

	_ "github.com/rfaas-go/rfaas/internal/dataplane" // the C half
)

func main() {}

// seam is the one service of this process.
var seam = newService(func(event []byte) {
	C.rfaas_control_event(unsafe.Pointer(unsafe.SliceData(event)), C.uint64_t(len(event)))
})

// rfaas_control_default is the control function that rfaas_init takes when none is registered. The request is the
// caller's; the reply is from malloc and becomes the caller's.
//
//export rfaas_control_default
func rfaas_control_default(op C.uint32_t, req unsafe.Pointer, length C.uint64_t, reply *unsafe.Pointer, replyLength *C.uint64_t) C.int32_t {
	status, out := seam.handle(uint32(op), unsafe.Slice((*byte)(req), int(length)))
	*reply, *replyLength = nil, 0
	if len(out) > 0 {
		*reply = C.CBytes(out)
		*replyLength = C.uint64_t(len(out))
	}
	return C.int32_t(status)
}

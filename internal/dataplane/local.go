package dataplane

/*
#include <stdlib.h>
#include "dp_local.h"

// dp_local_call by name, with its results in one word: size in bits 0..31, minus the status in 32..47.
static uint64_t local_call(dp_local *l, const char *name, uint64_t limit, const uint8_t *in, uint32_t size, uint8_t *out,
                           uint32_t capacity) {
	uint32_t got = 0;
	dp_local_fn *f = dp_local_find(l, name);
	int status = f ? dp_local_call(l, f, limit, in, size, out, capacity, &got) : DP_NO_FUNCTION;
	return got | (uint64_t)(uint16_t)-status << 32;
}
*/
import "C"

import "unsafe"

// Local is a library of functions that is open in this process. One goroutine at a time.
type Local struct {
	c *C.dp_local
}

// OpenLocal opens a library by its path, or by its bytes if those are not nil. Its constructors run. StatusBadLibrary: the text is
// the dynamic linker's reason.
func OpenLocal(path string, code []byte) (*Local, error) {
	var name *C.char
	if code == nil {
		name = C.CString(path)
		defer C.free(unsafe.Pointer(name))
	}
	var l Local
	var e C.dp_error
	if C.dp_local_open(name, unsafe.Pointer(unsafe.SliceData(code)), C.uint64_t(len(code)), &l.c, &e) != 0 {
		return nil, cError("open the library in this process", &e)
	}
	return &l, nil
}

// Close closes the library. No function of it may be running.
func (l *Local) Close() {
	C.dp_local_close(l.c)
	l.c = nil
}

// Call runs a function on the caller's thread. Payload and result have at most limit bytes, the same in every call. n is the
// result's size, also with StatusResultTooLarge. StatusNoFunction, StatusTooLarge and StatusFatal (no memory): it has not run.
func (l *Local) Call(name string, limit int64, in, out []byte) (n int, st Status) {
	if int64(len(in)) > limit {
		return 0, StatusTooLarge
	}
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	r := C.local_call(l.c, c, C.uint64_t(limit), bytesOf(in), C.uint32_t(len(in)), bytesOf(out),
		C.uint32_t(min(int64(len(out)), int64(^uint32(0)))))
	return int(uint32(r)), -Status(uint16(r >> 32))
}

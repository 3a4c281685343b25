//go:build cgo

package leafsum

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra
#include "lanes.h"
*/
import "C"

import (
	"crypto/sha256"
	"slices"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// lanesLeast is the least number of leaves for which lanes take no longer than hashing one leaf after the other.
const lanesLeast = C.LANES / 2

var hasLanes = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW

// appendLanes appends the hashes of leaves at the beginning of data, and returns the number of bytes of these leaves.
func appendLanes(sums, data []byte, size int) ([]byte, int) {
	n := len(data) / size
	if rest := n % C.LANES; rest < lanesLeast {
		n -= rest
	}
	if !hasLanes || n == 0 {
		return sums, 0
	}
	at := len(sums)
	sums = slices.Grow(sums, n*sha256.Size)[:at+n*sha256.Size]
	C.leafsum_lanes((*C.uint8_t)(unsafe.Pointer(&sums[at])), (*C.uint8_t)(unsafe.Pointer(&data[0])), C.size_t(n), C.size_t(size))
	return sums, n * size
}

// Package leafsum hashes the pages of seeds, sixteen at a time if the processor has AVX-512. The latency of its steps limits the SHA-256 of a single page. With
// sixteen pages at a time, a page takes 0.9 us, and 2.1 us with the processor's SHA instructions (EPYC of 2024, 27 November 2026).
package leafsum

import (
	"crypto/sha256"
	"slices"
)

// Append appends the SHA-256 of each leaf of data. A leaf has `size` bytes, and the last one may have fewer.
func Append(sums, data []byte, size int) []byte {
	if size%blockSize == 0 {
		var whole int
		sums, whole = appendLanes(sums, data, size)
		data = data[whole:]
	}
	for leaf := range slices.Chunk(data, size) {
		sum := sha256.Sum256(leaf)
		sums = append(sums, sum[:]...)
	}
	return sums
}

// blockSize is that of SHA-256, in bytes.
const blockSize = 64

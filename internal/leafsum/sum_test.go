package leafsum

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"slices"
	"testing"
)

// The hashes are those of crypto/sha256, whatever the number and the size of the leaves, and where the data begins.
func TestAppend(t *testing.T) {
	random := rand.NewChaCha8([32]byte{1})
	data := make([]byte, 70*4096+1)
	random.Read(data)
	for _, size := range []int{1, 63, 64, 100, 192, 4096, 8192} {
		for leaves := range 35 {
			for _, rest := range []int{0, 1, size - 1} {
				n := min(leaves*size+rest%size, len(data)-1)
				from := data[n%2:][:n]
				want := []byte("before")
				for leaf := range slices.Chunk(from, size) {
					sum := sha256.Sum256(leaf)
					want = append(want, sum[:]...)
				}
				if got := Append([]byte("before"), from, size); !bytes.Equal(got, want) {
					t.Fatalf("%d bytes in leaves of %d: the hashes differ", n, size)
				}
			}
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	data, sums := make([]byte, 64*4096), []byte(nil)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		sums = Append(sums[:0], data, 4096)
	}
}

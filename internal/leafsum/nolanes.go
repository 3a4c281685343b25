//go:build !(cgo && amd64)

package leafsum

func appendLanes(sums, _ []byte, _ int) ([]byte, int) { return sums, 0 }

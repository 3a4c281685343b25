package executor

import (
	"bytes"
	"testing"

	"github.com/rfaas-go/rfaas/internal/control"
)

// A cached worker has the bundle of its lease, so it fits only requests with the same bundle.
func TestKindHasBundle(t *testing.T) {
	request := func(b *control.Table) *control.LeaseRequest {
		return &control.LeaseRequest{ClientId: make([]byte, clientIDSize), CodeSha256: make([]byte, 32), Provider: "shm", Bundle: b}
	}
	one, two := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	kinds := map[[32]byte]bool{}
	for _, b := range []*control.Table{nil, {Sha256: one}, {Sha256: two}} {
		kinds[kindOf(request(b))] = true
	}
	if len(kinds) != 3 {
		t.Errorf("%d kinds of three requests", len(kinds))
	}
}

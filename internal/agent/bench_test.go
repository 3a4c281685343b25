package agent

import (
	"testing"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
)

// A lease whose workers are cached: acquired, and released to be cached again.
func BenchmarkCachedLease(b *testing.B) {
	w := newWorld(b, 0)
	x := executor(b, w.secret)
	p := opened(b, w, x)
	l := p.mustAcquire(1, 1)
	if !l.release(true) {
		b.Fatal("not cached")
	}
	key := uint64(1)
	for b.Loop() {
		key++
		next, err := p.acquireWith(protocol.Acquire{Key: key, Spec: spec(1)}, l)
		if err != nil {
			b.Fatal(err)
		}
		if next.Workers[0].Start != 3 {
			b.Fatalf("worker %+v is not a cached one", next.Workers[0])
		}
		if l = next; !l.release(true) {
			b.Fatal("not cached")
		}
	}
}

// What a request costs that the agent answers by itself.
func BenchmarkRequest(b *testing.B) {
	w := newWorld(b, 0)
	p := w.connect()
	r := protocol.Release{Key: 1}
	for b.Loop() {
		p.must(protocol.OpRelease, r.Encode, nil)
	}
}

package grant

import (
	"io"
	"os"
	"testing"
	"time"

	"github.com/rfaas-go/rfaas/internal/claim"
)

// A session that has as many cached leases as it may gets no spare lease, because one of its own would end for it.
func TestSpareTakesNoPlaceOfACachedLease(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/region")
	if err == nil {
		err = f.Truncate(int64(claim.Size))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c, port, _, _ := lessee(t, &lessor{})
	c.opts.Keep = 1
	p := &Pending{c: c, spec: Spec{Workers: 1}}
	h := &Held{Candidate: Candidate{Address: port.Address}}
	spare := &Cached{cand: h.Candidate, key: p.key(), last: &Held{}, fresh: true, claim: &Claim{Region: &Region{File: f}}, handed: io.NopCloser(nil), timer: time.NewTimer(time.Hour)}
	own := &Cached{owner: c, timer: time.NewTimer(time.Hour)}
	s := &c.cache
	s.mu.Lock()
	s.all = []*Cached{own, spare}
	s.mu.Unlock()
	if k := p.TakeSpare(h); k != nil {
		t.Errorf("took %+v", k)
	}
	s.mu.Lock()
	s.remove(own)
	s.mu.Unlock()
	if k := p.TakeSpare(h); k != spare {
		t.Errorf("without a cached lease: %+v, want the spare one", k)
	}
}

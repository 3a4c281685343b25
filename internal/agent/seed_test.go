package agent

import (
	"testing"
	"time"
)

// A seed that a session releases and keeps again is renewed, although the end of its first renewals is noticed only then.
func TestSeedKeptAgain(t *testing.T) {
	s := &seeds{}
	defer s.close()
	keep := func() *keptSeed {
		if err := s.keep(t.Context(), nil, "xs", time.Hour); err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.kept["xs"]
	}
	first := keep()
	s.forget("xs")
	second := keep()
	s.ended("xs", first)
	if second == first || keep() != second {
		t.Error("the end of the first renewals has ended those of the second")
	}
}

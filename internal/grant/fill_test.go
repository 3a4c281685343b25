package grant

import (
	"testing"
	"testing/synctest"
	"time"
)

// While a seed arrives, its connections outlive the last session that uses them, and the agent sees that it must not end.
func TestConnectionsOfAFillOutliveTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool(time.Second)
		s, done, err := p.connect(&Options{Executor: "127.0.0.1:1"})
		if err != nil {
			t.Fatal(err)
		}
		over := s.fill()
		done()
		time.Sleep(time.Minute)
		synctest.Wait()
		if !p.Filling() || s.closed {
			t.Errorf("a seed arrives: filling %v, connections closed %v", p.Filling(), s.closed)
		}
		over()
		time.Sleep(time.Minute)
		synctest.Wait()
		if p.Filling() || !s.closed {
			t.Errorf("the seed has arrived: filling %v, connections closed %v", p.Filling(), s.closed)
		}
	})
}

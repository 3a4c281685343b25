package beat

import (
	"testing"
	"testing/synctest"
	"time"
)

// Beats that begin at different times fire at the same moments. A late receiver skips the beats that it has missed.
func TestBeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every = 250 * time.Millisecond
		defer func(was time.Time) { start = was }(start)
		start = time.Now()
		time.Sleep(3 * time.Millisecond)
		one := New(every)
		defer one.Stop()
		time.Sleep(100 * time.Millisecond)
		two := New(every)
		defer two.Stop()
		for i, want := range []time.Duration{every, 2 * every, 5 * every} {
			if i == 2 {
				time.Sleep(2*every + every/2)
				<-one.C
				one.Next()
				<-two.C
				two.Next()
			}
			a, b := <-one.C, <-two.C
			one.Next()
			two.Next()
			if a.Sub(start) != want || b.Sub(start) != want {
				t.Errorf("beat %d after %v and %v, want %v", i, a.Sub(start), b.Sub(start), want)
			}
		}
	})
}

package issuer

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/time/rate"
)

// A party that has used its rate up does not get it back because there are many others.
func TestLimitsAreKept(t *testing.T) {
	var l limits
	now := time.Now()
	for range 20 {
		l.take("ann", 1, 20, now)
	}
	for i := range 10000 {
		l.take(fmt.Sprint(i), 1, 20, now)
	}
	if l.take("ann", 1, 20, now) {
		t.Error("more than the rate")
	}
	if l.take("ann", 1, 20, now.Add(2*time.Minute)); len(l.of) != 1 {
		t.Errorf("%d idle parties are kept", len(l.of))
	}
}

// A party is limited by the rate of its latest request. The rate of a node's renewals changes with the life of its certificates.
func TestLimitOfLatestRequest(t *testing.T) {
	for _, c := range []struct {
		name      string
		old, new  time.Duration // between two requests
		too, soon time.Duration // times after the first request with the new rate: still refused, and granted
	}{
		{"shorter", time.Hour, time.Minute, 30 * time.Second, time.Minute},
		{"longer", time.Minute, time.Hour, 30 * time.Minute, time.Hour},
	} {
		var l limits
		now := time.Now()
		const burst = 3
		for range burst {
			if !l.take("node", rate.Every(c.old), burst, now) {
				t.Fatal("less than the burst")
			}
		}
		for i, at := range []time.Duration{0, c.too, c.soon} {
			if got := l.take("node", rate.Every(c.new), burst, now.Add(at)); got != (i == 2) {
				t.Errorf("%s: after %v: %v", c.name, at, got)
			}
		}
	}
}

// With more than maxParties parties that have used up a part of their rate, the memory is bounded. A party with a limiter of its own that has used up its rate stays refused. A
// party with a shared limiter can be refused only because of parties that share the same limiter.
func TestLimitsOfManyParties(t *testing.T) {
	var l limits
	now := time.Now()
	const burst = 20
	one := rate.Every(time.Hour)
	use := func(party string) {
		for range burst {
			l.take(party, one, burst, now)
		}
	}
	use("ann")
	for i := range maxParties - 1 {
		l.take(fmt.Sprint("early ", i), one, burst, now)
	}
	use("late") // shares a rate now
	for _, party := range []string{"ann", "late"} {
		if !l.spent(party, now) || l.take(party, one, burst, now) {
			t.Errorf("%s has more than the rate", party)
		}
	}
	shared := 0
	const others = 1000
	for i := range others {
		if l.spent(fmt.Sprint("other ", i), now) {
			shared++
		}
	}
	if shared > others/100 { // 1 in sharedRates on average
		t.Errorf("%d of %d others have no rate left after one party has used up its own", shared, others)
	}
	for i := range 4 * maxParties {
		l.take(fmt.Sprint("more ", i), one, burst, now)
	}
	if len(l.of) > maxParties || len(l.shared) > sharedRates {
		t.Errorf("%d parties and %d shared rates are kept", len(l.of), len(l.shared))
	}
	now = now.Add(time.Hour + time.Second) // parties that used one unit have it back
	if use("bob"); !l.spent("bob", now) || l.of["bob"] == nil {
		t.Error("idle parties keep others from having a rate of their own")
	}
	if !l.take("ann", one, burst, now) || l.take("ann", one, burst, now) {
		t.Error("ann has not got back one unit")
	}
}

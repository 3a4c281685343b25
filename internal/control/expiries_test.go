package control

import (
	"testing"
	"time"
)

// The first expiry among the tokens in use is reported, and a token that was renewed is forgotten.
func TestTokenExpiry(t *testing.T) {
	var e expiries
	at := func(minutes int) time.Time { return time.Unix(1e9, 0).Add(time.Duration(minutes) * time.Minute) }
	want := func(now int, expires time.Time) {
		t.Helper()
		if got := e.soonest(at(now)); !got.Equal(expires) {
			t.Errorf("after %d minutes: %v, want %v", now, got, expires)
		}
	}
	want(0, time.Time{})
	e.used(at(5000), at(1))
	e.used(at(900), at(2))
	e.used(at(7000), at(3))
	want(4, at(900))
	e.used(at(8000), at(33)) // the token that expires first is not used any more
	want(34, at(900))
	e.used(at(8000), at(64))
	want(65, at(8000))
	want(200, time.Time{})
}

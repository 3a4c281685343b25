package config

import (
	"testing"
	"time"
)

func TestInstant(t *testing.T) {
	at := time.Date(2026, 11, 21, 18, 0, 0, 0, time.UTC)
	for in, want := range map[string]time.Time{"": {}, "1795284000": at, "2026-11-21T18:00:00Z": at, " 2026-11-21T19:00:00+01:00\n": at} {
		var i, back Instant
		if err := i.UnmarshalText([]byte(in)); err != nil || !i.Time().Equal(want) || i.IsZero() != want.IsZero() {
			t.Errorf("%q: %v, %v", in, i, err)
		}
		if err := back.UnmarshalText([]byte(i.String())); err != nil || !back.Time().Equal(want) {
			t.Errorf("%q is written as %q, which is %v, %v", in, i, back, err)
		}
		if in != "" && i.Unix() != 1795284000 || in == "" && i.Unix() != 0 {
			t.Errorf("%q: %d s", in, i.Unix())
		}
	}
	for _, in := range []string{"now", "-5", "0", "18:00", "2026-11-21", "1099511627776", "1969-01-01T00:00:00Z", "1e9"} {
		if err := new(Instant).UnmarshalText([]byte(in)); err == nil {
			t.Errorf("%q is accepted", in)
		}
	}
}

package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Instant is a point in time, written as RFC 3339 or as Unix seconds. Empty is the zero value: none.
type Instant time.Time

// UnmarshalText parses a point in time.
func (i *Instant) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	if s == "" {
		*i = Instant{}
		return nil
	}
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > 0 && n < 1<<40 {
		*i = Instant(time.Unix(n, 0))
		return nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil || t.Unix() <= 0 {
		return fmt.Errorf("%q is neither a time like 2006-01-02T15:04:05Z nor a number of seconds since 1970", text)
	}
	*i = Instant(t)
	return nil
}

// Time returns it as a time.Time.
func (i Instant) Time() time.Time { return time.Time(i) }

// IsZero says that it is none.
func (i Instant) IsZero() bool { return time.Time(i).IsZero() }

// Unix returns it in seconds since 1970, 0 for none.
func (i Instant) Unix() uint64 {
	if i.IsZero() {
		return 0
	}
	return uint64(time.Time(i).Unix())
}

// String writes what UnmarshalText reads.
func (i Instant) String() string {
	if i.IsZero() {
		return ""
	}
	return time.Time(i).Format(time.RFC3339)
}

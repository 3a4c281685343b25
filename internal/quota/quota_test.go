package quota

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// clock is a clock that tests set.
type clock struct{ now time.Time }

func (c *clock) get() time.Time { return c.now }

// A rate allows ten seconds' worth at once and then its amount per second. Other tenants are not affected.
func TestRates(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	q := New(Limits{Leases: 5}, c.get)
	take := func(tenant string) (n int) {
		for q.Take(tenant, Leases, 1) == nil {
			n++
		}
		return n
	}
	if n := take("ann"); n != 50 {
		t.Errorf("%d at once, want 50", n)
	}
	if n := take("ben"); n != 50 {
		t.Errorf("%d of another tenant, want 50", n)
	}
	c.now = c.now.Add(2 * time.Second)
	if n := take("ann"); n != 10 {
		t.Errorf("%d after 2 s, want 10", n)
	}
	if err := q.Take("ann", Replaces, 1e9); err != nil {
		t.Errorf("a kind without a limit: %v", err)
	}
	if n := q.Refused(Leases); n != 3 {
		t.Errorf("%d refused, want 3", n)
	}
	var e *Error
	if err := q.Take("ann", Leases, 1); !errors.As(err, &e) || e.Tenant != "ann" || e.Kind != Leases {
		t.Errorf("%v", err)
	}
	for _, part := range []string{`"ann"`, "5 lease requests a second", "tenant-leases", "try again"} {
		if !strings.Contains(e.Error(), part) {
			t.Errorf("%q lacks %q", e, part)
		}
	}
}

// A request larger than a burst uses a whole burst. Otherwise it could never succeed.
func TestMoreThanABurst(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	q := New(Limits{UploadBytes: 100}, c.get)
	if err := q.Take("ann", UploadBytes, 1e6); err != nil {
		t.Error(err)
	}
	if err := q.Take("ann", UploadBytes, 1); err == nil {
		t.Error("a second one was let through")
	}
	c.now = c.now.Add(burst * time.Second)
	if err := q.Take("ann", UploadBytes, 1e6); err != nil {
		t.Error(err)
	}
}

// A hold counts until it is released, once.
func TestHold(t *testing.T) {
	q := New(Limits{Streams: 2}, time.Now)
	first, err := q.Hold("ann", Streams)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := q.Hold("ann", Streams); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Hold("ann", Streams); err == nil {
		t.Error("a third one")
	}
	if _, err := q.Hold("ben", Streams); err != nil {
		t.Errorf("another tenant: %v", err)
	}
	first()
	first()
	if _, err := q.Hold("ann", Streams); err != nil {
		t.Errorf("after one was released: %v", err)
	}
	if _, err := q.Hold("ann", Streams); err == nil {
		t.Error("one release counted twice")
	}
}

// Idle tenants are forgotten, others are not.
func TestForgetting(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	q := New(Limits{Leases: 1, Connections: 1}, c.get)
	release, err := q.Hold("holder", Connections)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 * minSweep {
		if err := q.Take(fmt.Sprint("tenant", i), Leases, 1); err != nil {
			t.Fatal(err)
		}
		c.now = c.now.Add(time.Second)
	}
	if n := len(q.tenants); n > 2*minSweep {
		t.Errorf("%d tenants are remembered", n)
	}
	if _, err := q.Hold("holder", Connections); err == nil {
		t.Error("a tenant was forgotten that has a connection")
	}
	release()
}

func TestConcurrently(t *testing.T) {
	q := New(Limits{Streams: 10, Leases: 1 << 20}, time.Now)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if release, err := q.Hold("ann", Streams); err == nil {
					release()
				}
				_ = q.Take("ann", Leases, 1)
			}
		})
	}
	wg.Wait()
	if n := q.tenants["ann"].held[Streams]; n != 0 {
		t.Errorf("%d are held", n)
	}
}

func BenchmarkTake(b *testing.B) {
	q := New(Limits{Leases: 1 << 30}, time.Now)
	for b.Loop() {
		_ = q.Take("ann", Leases, 1)
	}
}

package faults

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Leases, renewals, heartbeats and calls use the monotonic clock, so setting the wall clock far ahead and far back changes nothing. Runs
// only in a virtual machine, because it sets the clock of the whole machine.
func TestClockJumps(t *testing.T) {
	if os.Getenv("SOFTROCE_ADDRESS") == "" || other != "" {
		t.Skip("the clock of this machine is not ours")
	}
	p := newPair(t, "go")
	began := time.Now() // with the monotonic clock's reading
	set := func(shift time.Duration) {
		t.Helper()
		now := began.Round(0).Add(time.Since(began) + shift)
		ts := unix.NsecToTimespec(now.UnixNano())
		if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
			t.Fatal(err)
		}
	}
	defer set(0)
	for seed, shift := range []time.Duration{48 * time.Hour, -72 * time.Hour, 0} {
		set(shift)
		p.undisturbed(p.caller, 2*time.Second)
		second := p.newSteady(uint64(2 + seed))
		p.served(second, bound(20*time.Second))
		second.finish(20 * time.Second)
	}
	p.caller.finish(20 * time.Second)
	p.free(20 * time.Second)
	p.executor.stop()
}

package claim

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func newRegion(t *testing.T) (*Region, []byte) {
	t.Helper()
	r, err := New(func() {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	mem, err := unix.Mmap(int(r.File().Fd()), 0, Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return r, mem
}

// claimLine does what a client does, except that it rings no bell.
func claimLine(mem []byte, s *Slot) bool {
	const armed, claimed = 1, 2
	return atomic.CompareAndSwapUint64(lineWord(mem, s), armed|s.Sequence<<8, claimed|s.Sequence<<8)
}

func lineWord(mem []byte, s *Slot) *uint64 { return (*uint64)(unsafe.Pointer(&mem[64+64*int(s.Line)])) }

// Several goroutines may revoke a line at the same time, and all must learn that no client has claimed it. Otherwise one of them believes that
// a claim will be booked, and does not end the workers.
func TestRevokeTwice(t *testing.T) {
	r, mem := newRegion(t)
	s, err := r.Arm(1, time.Second, Frozen, nil, func(time.Duration) { t.Error("booked a claim") })
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if !s.Revoke() {
			t.Error("a line that was revoked is said to be claimed")
		}
	}
	if claimLine(mem, s) {
		t.Error("a revoked line was claimed")
	}
}

// Workers of a line that is armed before they are frozen can be claimed only after Cooled.
func TestArmBeforeFrozen(t *testing.T) {
	r, mem := newRegion(t)
	booked := 0
	arm := func() *Slot {
		s, err := r.Arm(1, time.Second, Cooling, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := arm()
	if claimLine(mem, s) {
		t.Error("claimed before the workers were frozen")
	}
	_, _, claimed := Word(s.Line, s.Sequence)
	*lineWord(mem, s) = claimed // by a client that violates the protocol
	if s.Collect(); booked != 0 {
		t.Error("booked a claim of workers that are not frozen")
	}
	if s.Cooled(); !claimLine(mem, s) {
		t.Error("frozen workers cannot be claimed")
	}
	if s.Collect(); booked != 1 {
		t.Errorf("%d claims booked, want 1", booked)
	}
	closed := arm()
	closed.Revoke()
	if closed.Cooled(); claimLine(mem, closed) {
		t.Error("claimed a line that was closed before the workers were frozen")
	}
}

// Claims that were made before a region is closed are booked. Lines that were not claimed cannot be claimed any more.
func TestCloseBooksClaims(t *testing.T) {
	r, mem := newRegion(t)
	booked := 0
	arm := func() *Slot {
		s, err := r.Arm(1, time.Second, Frozen, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first, second := arm(), arm()
	if !claimLine(mem, first) {
		t.Fatal("not claimed")
	}
	r.Close()
	if claimLine(mem, second) || booked != 1 || !second.Revoke() {
		t.Errorf("%d claims booked, want the first one only", booked)
	}
	if _, err := r.Arm(1, time.Second, Frozen, nil, nil); !errors.Is(err, ErrFull) {
		t.Errorf("armed in a closed region: %v", err)
	}
}

package claim

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/tests/testkit"
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
	s, err := r.Arm(1, time.Second, 0, Frozen, nil, func(time.Duration) { t.Error("booked a claim") })
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
		s, err := r.Arm(1, time.Second, 0, Cooling, nil, func(time.Duration) { booked++ })
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

// join adds a claimant with a cell outside of the Go heap.
func join(t *testing.T, r *Region, id uint64) (cell []byte, err error) {
	t.Helper()
	cell, err = unix.Mmap(-1, 0, unix.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Leave(id)
		_ = unix.Munmap(cell)
	})
	return cell, r.Join(id, cell)
}

func mustJoin(t *testing.T, r *Region, id uint64) (cell []byte) {
	t.Helper()
	cell, err := join(t, r, id)
	if err != nil {
		t.Fatal(err)
	}
	return cell
}

// want writes a claimant's wish for a line and rings, as its queue pair does.
func want(r *Region, cell []byte, s *Slot) {
	wish, _, _ := Wish(s.Line, s.Sequence)
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&cell[0])), wish)
	atomic.AddUint32(r.Bell(), 1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(r.Bell())), 1, 1, 0, 0, 0) // FUTEX_WAKE
}

// answered waits for the answer to a wish, and reports whether it is a claim.
func answered(t *testing.T, cell []byte, s *Slot) (claimed bool) {
	t.Helper()
	_, won, lost := Wish(s.Line, s.Sequence)
	testkit.Eventually(t, "the wish is answered", func() bool {
		now := atomic.LoadUint64((*uint64)(unsafe.Pointer(&cell[AnswerAt])))
		claimed = now == won
		return claimed || now == lost
	})
	return claimed
}

// A claimant claims only lines that are armed for it, once they are frozen, and only with the sequence number of their present use. It keeps the answer when the
// line has another use. A process that maps the region cannot claim such a line.
func TestWish(t *testing.T) {
	r, mem := newRegion(t)
	mine, others := mustJoin(t, r, 7), mustJoin(t, r, 8)
	booked := 0
	arm := func(claimant uint64, state State) *Slot {
		t.Helper()
		s, err := r.Arm(1, time.Second, claimant, state, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := arm(7, Frozen)
	_, _, claimed := Word(s.Line, s.Sequence)
	*lineWord(mem, s) = claimed
	if s.Collect(); booked != 0 {
		t.Error("a process that maps the region has claimed the line of a claimant")
	}
	if want(r, others, s); answered(t, others, s) {
		t.Error("a claimant has claimed the line of another one")
	}
	if want(r, mine, s); !answered(t, mine, s) || s.Revoke() {
		t.Error("the claimant has not got its line")
	}
	if s.Collect(); booked != 1 {
		t.Errorf("%d claims booked, want 1", booked)
	}
	again := arm(8, Frozen)
	if again.Line != s.Line || !answered(t, mine, s) {
		t.Error("the answer is lost when the line is armed again")
	}
	if want(r, others, s); answered(t, others, s) || !again.Revoke() {
		t.Error("a wish for an earlier use has claimed the line")
	}
	if want(r, others, again); answered(t, others, again) {
		t.Error("a revoked line was claimed")
	}
	s = arm(7, Cooling)
	if want(r, mine, s); answered(t, mine, s) {
		t.Error("workers that are not frozen were claimed")
	}
	s.Revoke()
	s = arm(0, Frozen)
	if want(r, mine, s); answered(t, mine, s) || !s.Revoke() {
		t.Error("a claimant has claimed a line that is claimed by its word")
	}
	if booked != 1 {
		t.Errorf("%d claims booked, want 1", booked)
	}
}

// Wishes and revocations race. Exactly one side wins each time.
func TestWishesRace(t *testing.T) {
	r, _ := newRegion(t)
	cell := mustJoin(t, r, 7)
	for i := range 2000 {
		booked := 0
		s, err := r.Arm(1, time.Second, 7, Frozen, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		_, yes, no := Wish(s.Line, s.Sequence)
		got := make(chan bool)
		go func() {
			want(r, cell, s)
			for {
				switch atomic.LoadUint64((*uint64)(unsafe.Pointer(&cell[AnswerAt]))) {
				case yes:
					got <- true
					return
				case no:
					got <- false
					return
				}
				runtime.Gosched()
			}
		}()
		for range i % 64 {
			runtime.Gosched()
		}
		revoked := s.Revoke()
		won := <-got
		if s.Collect(); won == revoked || won != (booked == 1) {
			t.Fatalf("claimed %v, revoked %v, %d booked", won, revoked, booked)
		}
	}
}

// When Leave has returned, nothing touches the cell: the claimant's memory may be unmapped while claims go on. A region has a bounded number of claimants.
func TestLeave(t *testing.T) {
	r, _ := newRegion(t)
	stays := mustJoin(t, r, 1)
	for id := uint64(2); id < 200; id++ {
		cell, err := unix.Mmap(-1, 0, unix.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Join(id, cell); err != nil {
			t.Fatal(err)
		}
		s, err := r.Arm(1, time.Second, id, Frozen, nil, func(time.Duration) {})
		if err != nil {
			t.Fatal(err)
		}
		want(r, cell, s) // the thread may answer it now
		r.Leave(id)
		if err := unix.Munmap(cell); err != nil {
			t.Fatal(err)
		}
		if !s.Revoke() {
			s.Collect()
		}
	}
	n := 0
	for {
		if _, err := join(t, r, uint64(1000+n)); err != nil {
			break
		}
		n++
	}
	if n != Claimants-1 {
		t.Errorf("%d more claimants, want %d", n, Claimants-1)
	}
	s, err := r.Arm(1, time.Second, 1, Frozen, nil, func(time.Duration) {})
	if err != nil {
		t.Fatal(err)
	}
	if want(r, stays, s); !answered(t, stays, s) {
		t.Error("the first claimant cannot claim any more")
	}
}

// Claims that were made before a region is closed are booked. Lines that were not claimed cannot be claimed any more.
func TestCloseBooksClaims(t *testing.T) {
	r, mem := newRegion(t)
	booked := 0
	arm := func() *Slot {
		s, err := r.Arm(1, time.Second, 0, Frozen, nil, func(time.Duration) { booked++ })
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
	if _, err := r.Arm(1, time.Second, 0, Frozen, nil, nil); !errors.Is(err, ErrFull) {
		t.Errorf("armed in a closed region: %v", err)
	}
}

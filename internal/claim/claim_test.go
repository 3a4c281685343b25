package claim

import (
	"encoding/binary"
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

// An agent on verbs only writes its wish and rings. The executor then claims the line, unless it has closed the line or given it to other workers.
func TestWish(t *testing.T) {
	r, mem := newRegion(t)
	booked := 0
	arm := func(state State) (*Slot, func()) {
		s, err := r.Arm(1, time.Second, state, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		at, _, claimed := Word(s.Line, s.Sequence)
		return s, func() { binary.NativeEndian.PutUint64(mem[Wish(at):], claimed) }
	}
	word := func(s *Slot) (state uint64) { return atomic.LoadUint64(lineWord(mem, s)) & 0xff }
	const claimed, closed = 2, 3

	s, wish := arm(Frozen)
	if s.Collect(); booked != 0 {
		t.Fatal("a line was claimed without a wish")
	}
	wish()
	bell := Bell(mem)
	atomic.AddUint32(bell, 1)
	if _, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), 1, 1, 0, 0, 0); e != 0 { // FUTEX_WAKE
		t.Fatal(e)
	}
	testkit.Eventually(t, "the thread claims the line", func() bool { return word(s) == claimed })
	if s.Revoke() {
		t.Error("a claimed line was revoked")
	}
	if s.Collect(); booked != 1 {
		t.Errorf("%d claims booked, want 1", booked)
	}

	line := s.Line
	if s, _ = arm(Frozen); s.Line == line || word(&Slot{Line: line}) != claimed {
		t.Error("a line was armed again before the agent has cleared its wish")
	}
	s.Revoke()
	at, _, _ := Word(line, 0)
	binary.NativeEndian.PutUint64(mem[Wish(at):], 0)
	if s, wish = arm(Frozen); s.Line != line {
		t.Errorf("armed line %d, want %d", s.Line, line)
	}
	if s.Collect(); booked != 1 || !s.Revoke() {
		t.Error("an earlier wish claimed the line")
	}
	if wish(); word(s) != closed {
		t.Errorf("state %d of a revoked line, want %d", word(s), closed)
	}
	if s.Collect(); booked != 1 || word(s) != closed {
		t.Error("a wish claimed a revoked line")
	}

	s, wish = arm(Cooling)
	wish()
	if s.Collect(); booked != 1 {
		t.Error("a wish claimed workers that are not frozen")
	}
	s.Cooled()
	if s.Collect(); booked != 2 || word(s) != claimed {
		t.Errorf("%d claims booked, state %d: a wish that came early was forgotten", booked, word(s))
	}
}

// Wishes and revocations race. Exactly one side wins each time.
func TestWishesRace(t *testing.T) {
	r, mem := newRegion(t)
	for i := range 2000 {
		booked := 0
		s, err := r.Arm(1, time.Second, Frozen, nil, func(time.Duration) { booked++ })
		if err != nil {
			t.Fatal(err)
		}
		at, armed, claimed := Word(s.Line, s.Sequence)
		got := make(chan bool)
		go func() {
			atomic.StoreUint64((*uint64)(unsafe.Pointer(&mem[Wish(at)])), claimed)
			atomic.AddUint32(Bell(mem), 1)
			_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(Bell(mem))), 1, 1, 0, 0, 0)
			for atomic.LoadUint64(lineWord(mem, s)) == armed {
				runtime.Gosched()
			}
			got <- atomic.LoadUint64(lineWord(mem, s)) == claimed
		}()
		for range i % 64 {
			runtime.Gosched()
		}
		revoked := s.Revoke()
		won := <-got
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&mem[Wish(at)])), 0)
		if s.Collect(); won == revoked || won != (booked == 1) {
			t.Fatalf("claimed %v, revoked %v, %d booked", won, revoked, booked)
		}
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

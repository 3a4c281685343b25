package agent

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/agent/protocol"
	"github.com/rfaas-go/rfaas/internal/api"
	"github.com/rfaas-go/rfaas/internal/claim"
	"github.com/rfaas-go/rfaas/internal/dataplane"
)

// States of a line (docs/PROTOCOL.md).
const (
	lineArmed   = 1
	lineClaimed = 2
	lineClosed  = 3
)

func regionWord(region []byte, line uint32) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&region[64+64*line]))
}

func ringBell(region []byte) {
	bell := (*atomic.Uint32)(unsafe.Pointer(&region[8]))
	bell.Add(1)
	const wake = 1 // FUTEX_WAKE
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), wake, 1, 0, 0, 0)
}

// releasedClaimable takes a lease of two workers and releases it. It returns the line and the word of the claim. On a busy machine the workers may take
// too long to come to rest. The executor ends them then, and the next lease is tried.
func releasedClaimable(t *testing.T, p *process, key uint64) (region []byte, line uint32, armed uint64) {
	t.Helper()
	for {
		l := p.mustAcquire(key, 2)
		r := l.releaseHanded()
		p.mu.Lock()
		regions := p.regions
		p.mu.Unlock()
		if r.Claim.Region == 0 || len(regions) != 1 {
			t.Fatalf("released with claim %+v, and %d regions", r.Claim, len(regions))
		}
		region, line, armed = regions[0], r.Claim.Line, lineArmed|r.Claim.Sequence<<8
		word := regionWord(region, line)
		eventually(t, "the workers are frozen or ended", func() bool { w := word.Load(); return w == armed || w == armed&^0xff|lineClosed })
		if word.Load() == armed {
			return region, line, armed
		}
	}
}

// A client that writes arbitrary words into the claim region harms nobody else: the executor lends the workers' cores as before.
func TestHostileClaims(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret, "--client-first-use", "300ms")
	p := opened(t, w, x)

	// The client overwrites every word, and rings the bell without a claim. Another lease still gets the cores.
	region, line, armed := releasedClaimable(t, p, 1)
	for i := range uint32(claim.Lines) {
		if i != line {
			regionWord(region, i).Store(lineClaimed | uint64(i)<<8)
		}
	}
	regionWord(region, line).Store(lineClaimed | 77<<8)
	for range 1000 {
		ringBell(region)
	}
	other := spec(2)
	other.Memory = 100 << 20
	l, err := p.acquire(protocol.Acquire{Key: 2, Spec: other})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.call(1); err != nil {
		t.Error(err)
	}
	regionWord(region, line).Store(armed&^0xff | lineClaimed) // a claim of workers that have ended
	ringBell(region)
	l.release(false)
	eventually(t, "all cores are free", func() bool { return x.free(t, w.secret) == 2 })

	// A client that claims, and does not tell the agent, loses the lease.
	region, line, armed = releasedClaimable(t, p, 3)
	if !regionWord(region, line).CompareAndSwap(armed, armed&^0xff|lineClaimed) {
		t.Fatal("the workers have ended")
	}
	ringBell(region)
	eventually(t, "the workers are lent", func() bool { return x.free(t, w.secret) == 0 })
	eventually(t, "the claimed lease has ended", func() bool { return x.free(t, w.secret) == 2 })
	l = p.mustAcquire(4, 2)
	if err := l.call(0); err != nil {
		t.Error(err)
	}
	l.release(false)

	// A client that dies before it rings the bell loses the lease, too, when another lease needs the cores.
	region, line, armed = releasedClaimable(t, p, 5)
	if !regionWord(region, line).CompareAndSwap(armed, armed&^0xff|lineClaimed) {
		t.Fatal("the workers have ended")
	}
	if l, err = p.acquire(protocol.Acquire{Key: 6, Spec: other, WaitNs: int64(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	if err := l.call(0); err != nil {
		t.Error(err)
	}
}

// A process gets channels of another process's lease with a claim only if its lease lasts as long, because a claim cannot ask for a duration.
func TestClaimOfAnotherDuration(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p, q := opened(t, w, x), opened(t, w, x)
	for key, ns := range []int64{int64(time.Minute), 0} {
		l := p.mustAcquire(uint64(key+1), 2)
		l.hand(protocol.Hand{Count: 2, Files: 3}, 3)
		l.releaseHanded()
		a := protocol.Acquire{Key: uint64(key + 1), Session: 1, First: true, Spec: spec(2)}
		a.Spec.DurationNs = ns
		d, err := protocol.DecodeCandidate(q.must(protocol.OpAcquire, a.Encode, library(t)))
		if err != nil || !d.Handed || (d.Claim.Region != 0) != (ns == 0) {
			t.Errorf("a lease of %v: %+v, %v", time.Duration(ns), d, err)
		}
		release := protocol.Release{Key: a.Key}
		q.must(protocol.OpRelease, release.Encode, nil)
	}
}

// The agent finds the claim of a program that does not call the library any more, and keeps the lease. A line that names no cached lease of the
// client changes nothing.
func TestClaimInThePage(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret)
	p := opened(t, w, x)
	region, line, armed := releasedClaimable(t, p, 1)
	for key := range uint64(protocol.MaxLeases) {
		l := p.page.line(key)
		l.key.Store(key ^ 3)
		l.claimed.Store(key + 7)
	}
	if !regionWord(region, line).CompareAndSwap(armed, armed&^0xff|lineClaimed) {
		t.Fatal("the workers have ended")
	}
	ringBell(region)
	l := p.page.line(2)
	l.key.Store(2)
	l.leaseID.Store(*(*uint64)(unsafe.Pointer(&region[64+64*line+8])))
	l.until.Store(uint64(dataplane.Now() + int64(time.Minute)))
	l.claimed.Store(1)
	renewal := protocol.Renewal{Key: 2}
	eventually(t, "the agent knows the lease", func() bool { _, err := p.ask(protocol.OpRenew, renewal.Encode, nil); return err == nil })
	if l.claimed.Load() != 0 || p.page.line(3).claimed.Load() != 10 {
		t.Errorf("the lines have claims %d, want 0, and %d, want 10", l.claimed.Load(), p.page.line(3).claimed.Load())
	}
	release := protocol.Release{Key: 2}
	p.must(protocol.OpRelease, release.Encode, nil)
	eventually(t, "all cores are free", func() bool { return x.free(t, w.secret) == 2 })
}

// A process cannot become a claimant by a lease that it does not have, or that is not on verbs. A release for a claimant that does not exist is a release.
func TestAttachIsRefused(t *testing.T) {
	w := newWorld(t, 0)
	p := opened(t, w, executor(t, w.secret, "--providers", "tcp"))
	p.mustAcquire(1, 1)
	for key, status := range map[uint64]dataplane.Status{1: dataplane.StatusUnsupported, 2: dataplane.StatusInvalid} {
		a := protocol.Attach{Key: key, Blob: []byte("blob")}
		if _, err := p.ask(protocol.OpAttach, a.Encode, nil); !isStatus(err, status) {
			t.Errorf("lease %d: %v, want status %v", key, err, status)
		}
	}
	release := protocol.Release{Key: 1, Keep: true, Own: true}
	r, err := protocol.DecodeReleased(p.must(protocol.OpRelease, release.Encode, nil))
	if err != nil || !r.Cached || r.Own != nil || r.May {
		t.Errorf("%+v, %v", r, err)
	}
}

// On tcp the agent claims cached workers for its clients. Leases before the agent is connected to the claim region get the workers by message.
func TestClaimOverTCP(t *testing.T) {
	w := newWorld(t, 0)
	x := executor(t, w.secret, "--providers", "tcp", "--log-level", "debug")
	p := opened(t, w, x)
	l := p.mustAcquire(1, 2)
	claims := func() int { return strings.Count(x.log.String(), `msg="workers claimed"`) }
	for key := uint64(2); claims() < 3; key++ {
		if err := errors.Join(l.call(0), l.call(1)); err != nil || key > 1000 {
			t.Fatalf("lease %d: %v, after %d claims", key, err, claims())
		}
		if !l.release(true) {
			t.Fatal("the workers are not cached")
		}
		next, err := p.acquireWith(protocol.Acquire{Key: key, Spec: spec(2)}, l)
		if err != nil {
			t.Fatal(err)
		}
		if had, has := l.Workers[1], next.Workers[1]; had.PID != has.PID || has.Start != api.StartCached {
			t.Fatalf("a lease on the workers of the one before has %+v, which had %+v", has, had)
		}
		l = next
	}
	if err := l.call(1); err != nil {
		t.Error(err)
	}
	l.release(false)
	eventually(t, "all cores are free", func() bool { return x.free(t, w.secret) == 2 })
}

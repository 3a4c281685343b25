// Package claim is the executor's side of claims: a client takes the cached workers of a released lease by a compare-and-swap in memory that it
// shares with the executor (internal/dataplane/dp_claim.h). A C thread resumes the workers (reflex.h). Go code learns of the claim afterwards.
package claim

/*
#cgo CFLAGS: -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -I${SRCDIR}/../dataplane
#cgo LDFLAGS: -pthread
#include <stdbool.h>
#include <stdlib.h>
#include "reflex.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Size is the size of a region in bytes, and Lines the number of its lines.
const (
	Size  = int(unsafe.Sizeof(C.dp_claim_region{}))
	Lines = C.DP_CLAIM_LINES

	lineAt       = int64(unsafe.Offsetof(C.dp_claim_region{}.line))
	lineSize     = int64(unsafe.Sizeof(C.dp_claim_line{}))
	claimedState = C.DP_CLAIM_CLAIMED
	armedState   = C.DP_CLAIM_ARMED

	// CellSize is the size of a claimant's cell in bytes. The claimant writes its wish at the start of the cell, and reads the answer at AnswerAt.
	CellSize = int(unsafe.Sizeof(C.dp_claim_cell{}))
	AnswerAt = uint64(unsafe.Offsetof(C.dp_claim_cell{}.answer))
	// Claimants is the largest number of claimants of a region.
	Claimants = C.REFLEX_CELLS
	// Agent is the agent's id as a claimant. Its client processes have others.
	Agent = 1
)

// Word returns where the word of a line is in its region, and its values while the line is armed and after a claim.
func Word(line uint32, sequence uint64) (offset, armed, claimed uint64) {
	return uint64(lineAt + int64(line)*lineSize), armedState | sequence<<8, claimedState | sequence<<8
}

// Wish returns what a claimant writes into its cell to claim a line, and the answers after a claim and after a refusal.
func Wish(line uint32, sequence uint64) (wish, won, lost uint64) {
	wish = uint64(line) | sequence<<8
	return wish, wish | C.DP_CLAIM_WON, wish | C.DP_CLAIM_LOST
}

// ErrFull means that every line of a region is in use.
var ErrFull = errors.New("no line of the claim region is free")

// ErrClaimants means that a region has as many claimants as it can have, or is closed.
var ErrClaimants = errors.New("the claim region takes no more claimants")

// pageSize is the size of a worker's page, and knockAt the offset of its dp_knock (worker/page.h).
const (
	pageSize = 4096
	knockAt  = 64
)

// Worker has the descriptors that are needed to resume a frozen worker. It owns them.
type Worker struct {
	Freezer int  // cgroup.freeze or, in version 1, freezer.state
	Old     bool // version 1
	Page    int  // the worker's page
}

// Close closes the descriptors.
func (w *Worker) Close() {
	unix.Close(w.Freezer)
	unix.Close(w.Page)
}

// Region is the memory that an executor shares with one agent, and with the agent's clients. Safe for concurrent use.
type Region struct {
	file  *os.File
	event *os.File

	mu      sync.Mutex
	c       *C.reflex // nil after Close
	closing bool

	booking sync.Mutex   // held while claims are collected and their functions are called
	slots   [Lines]*Slot // written under both mutexes
}

// Slot is one use of a line, for the workers that Arm was called with.
type Slot struct {
	Line     uint32
	Sequence uint64
	r        *Region
	revoked  bool // under r.mu
	claimed  func(ago time.Duration)
}

// New returns a region without armed lines. wake is called on another goroutine about a millisecond after a claim of frozen workers, and when Cool, Cooled
// or Revoke finds a claim. It must call Collect. A claim of awake workers calls nothing by itself.
func New(wake func()) (*Region, error) {
	fd, err := unix.MemfdCreate("rfaas-claims", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("claim region: %w", os.NewSyscallError("memfd_create", err))
	}
	r := &Region{file: os.NewFile(uintptr(fd), "claim region")}
	if err = unix.Ftruncate(fd, int64(Size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	event := -1
	if err == nil {
		event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	}
	if err == nil {
		r.event = os.NewFile(uintptr(event), "claims")
		r.c, err = C.reflex_new(C.int(fd), C.int(event))
	}
	if r.c == nil {
		r.file.Close()
		if r.event != nil {
			r.event.Close()
		}
		return nil, fmt.Errorf("claim region: %w", err)
	}
	go func() {
		var count [8]byte
		for {
			if _, err := r.event.Read(count[:]); err != nil {
				return // closed
			}
			wake()
		}
	}()
	return r, nil
}

// File returns the region's memory file. The region still owns it.
func (r *Region) File() *os.File { return r.file }

// Bell returns the region's bell, a futex that stays until Close. Whoever changes the region or a cell raises and wakes it.
func (r *Region) Bell() *uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c == nil {
		return nil
	}
	return (*uint32)(C.reflex_bell(r.c))
}

// Join adds a claimant, which claims the lines that Arm is called with its id for. cell has CellSize bytes outside of the Go heap, which stay until Leave.
// The id is not 0, and is not used again.
func (r *Region) Join(id uint64, cell []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing || !bool(C.reflex_join(r.c, C.uint64_t(id), (*C.dp_claim_cell)(unsafe.Pointer(&cell[:CellSize][0])))) {
		return ErrClaimants
	}
	return nil
}

// Leave forgets a claimant. When it returns, nothing refers to its cell, and nobody can claim the lines that are armed for it.
func (r *Region) Leave(id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c != nil {
		C.reflex_leave(r.c, C.uint64_t(id))
	}
}

// Shut closes all lines, and calls the functions of the claims that were made before. From then on, nobody can claim.
func (r *Region) Shut() {
	r.mu.Lock()
	r.closing = true
	for _, s := range r.slots {
		if s != nil {
			s.revoke()
		}
	}
	r.mu.Unlock()
	r.Collect()
}

// Close is Shut, and then frees the region. Nothing may use its bell any more.
func (r *Region) Close() {
	r.Shut()
	r.mu.Lock()
	c := r.c
	r.c = nil
	r.mu.Unlock()
	if c == nil {
		return
	}
	C.reflex_free(c)
	r.event.Close() // after the thread, which writes to it
	r.file.Close()
}

// State is that of workers when Arm is called.
type State uint32

// States of workers.
const (
	Awake   State = C.DP_CLAIM_AWAKE   // they wait for calls, and the client that had the lease can claim them
	Cooling State = C.DP_CLAIM_COOLING // they are not frozen yet, and cannot be claimed before Slot.Cooled
	Frozen  State = C.DP_CLAIM_ARMED
)

// Arm lets a client claim workers: the claimant with the given id, or if that is 0 any process that can change the line's word. The claim gets a lease with
// this id, which the client may use for the duration `client`. After a claim, Collect calls claimed with the time since the claim was seen. The caller keeps
// the workers' descriptors.
func (r *Region) Arm(id uint64, client time.Duration, claimant uint64, state State, workers []Worker, claimed func(ago time.Duration)) (*Slot, error) {
	list := (*C.reflex_worker)(C.calloc(C.size_t(len(workers)), C.sizeof_reflex_worker))
	if list == nil {
		return nil, errors.New("claim: out of memory")
	}
	for i, w := range workers {
		if err := open(&unsafe.Slice(list, len(workers))[i], w); err != nil {
			C.reflex_free_workers(list, C.uint32_t(i))
			return nil, fmt.Errorf("claim: worker %d: %w", i, err)
		}
	}
	r.booking.Lock() // a claim may come as soon as the line is armed, and Collect needs the slot
	defer r.booking.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	line, sequence := C.int(-1), C.uint64_t(0)
	if !r.closing {
		line = C.reflex_arm(r.c, C.uint64_t(id), C.int64_t(client), C.uint64_t(claimant), C.uint32_t(state), list, C.uint32_t(len(workers)), &sequence)
	}
	if line < 0 {
		C.reflex_free_workers(list, C.uint32_t(len(workers)))
		return nil, ErrFull
	}
	s := &Slot{Line: uint32(line), Sequence: uint64(sequence), r: r, claimed: claimed}
	r.slots[line] = s
	return s, nil
}

// open maps a worker's page and duplicates the descriptor of its freezer, for the reflex.
func open(c *C.reflex_worker, w Worker) error {
	page, err := unix.MmapPtr(w.Page, 0, nil, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE) // no page fault at the claim
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	fd, err := unix.FcntlInt(uintptr(w.Freezer), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		_ = unix.MunmapPtr(page, pageSize)
		return os.NewSyscallError("fcntl", err)
	}
	c.freezer, c.page, c.knock = C.int(fd), page, (*C.dp_knock)(unsafe.Add(page, knockAt))
	if w.Old {
		c.old = 1
	}
	return nil
}

// Revoke closes the line. It returns false if a client has claimed the line, and true if it was revoked before. It calls no function that
// was passed to this package, so it may be called with any lock held.
func (s *Slot) Revoke() bool {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	return s.revoke()
}

// revoke is Revoke for a caller that holds the region's mu.
func (s *Slot) revoke() bool {
	c := s.r.c
	s.revoked = s.revoked || c == nil || C.reflex_revoke(c, C.uint32_t(s.Line), C.uint64_t(s.Sequence)) != 0
	return s.revoked
}

// Cool begins the freezing of awake workers: no client can claim them until Cooled is called. It returns false if a client has claimed them, or if
// the line was closed.
func (s *Slot) Cool() bool {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.c != nil && C.reflex_cool(r.c, C.uint32_t(s.Line), C.uint64_t(s.Sequence)) != 0
}

// Collect is Collect of the slot's region.
func (s *Slot) Collect() { s.r.Collect() }

// Cooled lets clients claim the workers, which are frozen now. The caller has called Cool, or Arm with the state Cooling. It does nothing if the line
// was closed meanwhile.
func (s *Slot) Cooled() {
	r := s.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c != nil {
		C.reflex_cooled(r.c, C.uint32_t(s.Line), C.uint64_t(s.Sequence))
	}
}

// Collect calls the functions of all claims so far, one after the other. When it returns, the functions of claims from before the call have
// returned, even if another goroutine has called them.
func (r *Region) Collect() {
	r.booking.Lock()
	defer r.booking.Unlock()
	for {
		var got [16]C.reflex_claim
		r.mu.Lock()
		var n C.uint32_t
		if r.c != nil {
			n = C.reflex_collect(r.c, &got[0], C.uint32_t(len(got)))
		}
		r.mu.Unlock()
		if n == 0 {
			return
		}
		for _, g := range got[:n] {
			r.slots[g.line].claimed(time.Duration(g.ago_ns))
		}
	}
}

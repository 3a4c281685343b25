package zygote

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rfaas-go/rfaas/internal/spawner/wire"
)

// Sizes of seeds (worker/seed/seed.h, heap.h).
const (
	SeedUnit     = 32 << 20 // of the heap
	seedHeapMost = 1 << 40  // bytes of a heap
	SeedUnitsMin = 2
	seedData     = 64 << 20 // room of the file for its header and small static data
	seededTimes  = 24       // bytes of the durations that a maker sends
	seedWarning  = 192      // bytes of the warning behind them, with its NUL
)

// StatusUnsupported is the status of a *WorkerError about a state that no seed can keep.
const StatusUnsupported = wire.StatusUnsupported

// SeedHeap is the size of the heap of workers whose user code may allocate a number of bytes.
func SeedHeap(bytes uint64) uint64 {
	bytes = min(bytes, seedHeapMost-SeedUnit)
	return max((bytes+SeedUnit-1)/SeedUnit+1, SeedUnitsMin) * SeedUnit
}

// SeedSpec says how a seed is made: by a setup function of a library, in a process of its own.
type SeedSpec struct {
	Worker  Spec // of the workers that will start from it. The seed is made on its CPUs
	Setup   string
	Payload []byte // what the setup function gets
	Heap    uint64 // a result of SeedHeap

	CPU time.Duration // processor time of the process, set by MakeSeed
}

// Seed is the memory of a prepared worker. Workers whose Spec names it start from it.
type Seed struct {
	File  *os.File // opened for reading, sealed
	Units uint32   // of its heap
	Bytes uint64   // memory that the seed takes
	// Warning says what may be wrong with the seed: words of its heap that look like pointers which workers cannot use. "": nothing.
	Warning string
	// Load, Setup and Capture are the durations of making it, as the process that made it has measured them.
	Load, Setup, Capture time.Duration
	children             atomic.Uint32
	contents             atomic.Pointer[SeedCopy] // nil: not known yet
	paging               *paging                  // nil: the file has been complete from the start
	recorded             atomic.Pointer[[]SeedRun]

	mu     sync.Mutex
	closed bool
	found  *SeedCopy // result of find; nil: not known yet
	proofs *os.File  // nil: not made yet
}

// child returns the number of the next worker that starts from the seed.
func (s *Seed) child() uint32 { return s.children.Add(1) }

// Children returns how many workers have been started from the seed.
func (s *Seed) Children() uint32 { return s.children.Load() }

// Continue makes the seed count its workers from n on.
func (s *Seed) Continue(n uint32) { s.children.Store(n) }

// Memory returns the bytes of memory that the seed uses while it is kept: its file, the hashes of its pages, and their proofs. This process has hashes and proofs if
// the seed was copied from another node, or may be copied from here.
func (s *Seed) Memory() uint64 {
	c, err := s.described()
	if err != nil { // then the seed cannot be copied
		return s.Bytes
	}
	return s.Bytes + uint64(c.count())*sha256.Size + c.ProofsSize()
}

// described returns the segments of the seed, perhaps without their hashes.
func (s *Seed) described() (*SeedCopy, error) {
	if c := s.contents.Load(); c != nil {
		return c, nil
	}
	if s.paging != nil {
		return s.paging.c, nil
	}
	return s.find()
}

// Proofs returns a file with the proofs of all groups of leaves. Contents must have succeeded. The file belongs to the seed.
func (s *Seed) Proofs() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proofs != nil {
		return s.proofs, nil
	}
	if s.closed {
		return nil, ErrReleased
	}
	c := s.contents.Load()
	b := make([]byte, c.ProofsSize())
	c.Proofs(b)
	f, err := SealedMemfd("rfaas-proofs", bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, err
	}
	s.proofs = f
	return f, nil
}

// Heap is the size of its heap in bytes.
func (s *Seed) Heap() uint64 { return uint64(s.Units) * SeedUnit }

// Close frees the seed's memory when no worker uses it any more.
func (s *Seed) Close() error {
	if s.paging != nil {
		s.paging.stop(ErrReleased)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.proofs != nil {
		s.proofs.Close()
		s.proofs = nil
	}
	return s.File.Close()
}

// Grown reports whether the file takes clearly more memory than Bytes. Workers make it grow when they read pages of it that have no memory yet.
func (s *Seed) Grown() bool {
	var st unix.Stat_t
	err := wire.Control(s.File, func(fd int) error { return unix.Fstat(fd, &st) })
	return err == nil && uint64(st.Blocks)*512 > s.Bytes+s.Bytes/16+1<<20
}

// MakeSeed runs a setup function and keeps the memory that it has prepared. A *WorkerError of status StatusUnsupported says why a seed
// cannot keep the state. With another status, it says how the process has failed. The process is gone when MakeSeed returns.
func (z *Zygote) MakeSeed(ctx context.Context, spec *SeedSpec) (*Seed, error) {
	units := spec.Heap / SeedUnit
	if units < SeedUnitsMin || spec.Heap%SeedUnit != 0 || spec.Heap > seedHeapMost || spec.Worker.Code == nil {
		return nil, invalid("seed with a heap of %d bytes", spec.Heap)
	}
	names, err := NamesMemfd([]string{spec.Setup})
	if err != nil {
		return nil, err
	}
	defer names.Close()
	payload, err := SealedMemfd("rfaas-payload", bytes.NewReader(spec.Payload), int64(len(spec.Payload)))
	if err != nil {
		return nil, err
	}
	defer payload.Close()
	// Its size is fixed, so that a mapping of it stays valid. Static data may take as much as the heap.
	fd, err := fixedMemfd("rfaas-seed", int(FileSize(uint32(units))), 0)
	if err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	f := os.NewFile(uintptr(fd), "memfd:rfaas-seed")
	defer f.Close()
	w, err := z.maker(ctx, &spec.Worker)
	if err != nil {
		return nil, err
	}
	s, err := w.makeSeed(ctx, spec, uint32(units), []*os.File{spec.Worker.Code, names, f, payload})
	err = w.finishTask(err, makerEnded) // the process is reaped, so nobody writes to the file any more
	spec.CPU, _ = w.CPUTime()
	if err != nil {
		return nil, err
	}
	s.Units = uint32(units)
	if err := s.seal(f); err != nil {
		return nil, fmt.Errorf("seed: %w", err)
	}
	return s, nil
}

// seal keeps the bytes of the file and opens it for reading. No other user can open it again for writing.
func (s *Seed) seal(f *os.File) error {
	if err := f.Chmod(0o400); err != nil {
		return err
	}
	return wire.Control(f, func(fd int) error {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SEAL); err != nil {
			return os.NewSyscallError("seal the file", err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return os.NewSyscallError("fstat", err)
		}
		read, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
		s.File, s.Bytes = read, uint64(st.Blocks)*512
		return err
	})
}

// maker clones a prepared worker for a seed. It does not use the pool, which is for leases.
func (z *Zygote) maker(ctx context.Context, spec *Spec) (*Worker, error) {
	return z.prepared(ctx, &Spec{Provider: "shm", GIDIndex: -1, CPUs: spec.CPUs, MemoryLimit: spec.MemoryLimit, Bundle: spec.Bundle, UID: spec.UID, GID: spec.GID})
}

// prepared clones a worker that waits for its task.
func (z *Zygote) prepared(ctx context.Context, spec *Spec) (*Worker, error) {
	body, err := prepareBody(spec)
	if err != nil {
		return nil, err
	}
	copy(body[bodyBundle:], spec.Bundle[:])
	for try := 1; ; try++ {
		w, err := z.spawn(ctx, spec, body, nil)
		if !errors.Is(err, errZygoteDied) || try == spawnTries {
			return w, err
		}
	}
}

// finishTask ends a prepared worker that has had a task instead of a lease, and waits until nothing of it is left. If it has ended without an answer, `ended` makes the
// error from its end.
func (w *Worker) finishTask(err error, ended func(*Exit) error) error {
	if errors.Is(err, errNoAnswer) {
		// The socket closes only when the process ends.
		select {
		case <-w.done:
		case <-time.After(time.Second):
		}
	}
	killed := w.killed.Load()
	w.abort(nil)
	if !errors.Is(err, errNoAnswer) || killed {
		return err
	}
	return ended(&w.exit)
}

// makerEnded is the error of a maker that has ended without an answer.
func makerEnded(x *Exit) error {
	return &WorkerError{Status: wire.StatusWorkerDied, Text: "seed: the process of the init call ended: " + x.Reason}
}

// makeSeed sends a prepared worker its task and reads the answer.
func (w *Worker) makeSeed(ctx context.Context, spec *SeedSpec, units uint32, files []*os.File) (*Seed, error) {
	le := binary.LittleEndian
	body := make([]byte, 16)
	le.PutUint64(body, spec.Worker.MemoryLimit)
	le.PutUint32(body[8:], units)
	le.PutUint32(body[12:], uint32(len(spec.Payload)))
	stop := context.AfterFunc(ctx, func() { w.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := w.pin(spec.Worker.CPUs); err != nil {
		return nil, err
	}
	task := wire.Message{Type: wire.Seed, ID: w.id, Body: body}
	if err := withFiles(files, func(fds []int) error { return wire.Send(w.conn, &task, fds...) }); err != nil && ctx.Err() == nil {
		return nil, errNoAnswer
	}
	buf := make([]byte, wire.Max)
	n, err := w.conn.Read(buf)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, errNoAnswer
	}
	m, err := wire.Decode(buf[:n])
	switch {
	case err != nil:
	case m.Type == wire.Seeded && len(m.Body) >= seededTimes && len(m.Body) < seededTimes+seedWarning:
		ns := func(at int) time.Duration { return time.Duration(min(le.Uint64(m.Body[at:]), 1<<62)) }
		return &Seed{Load: ns(0), Setup: ns(8), Capture: ns(16), Warning: wire.Printable(m.Body[seededTimes:])}, nil
	case m.Type == wire.Failed:
		return nil, m.Failure()
	default:
		err = fmt.Errorf("message of type %d with %d bytes", m.Type, len(m.Body))
	}
	return nil, &WorkerError{Status: wire.StatusProtocol, Text: fmt.Sprintf("seed: the process of the init call broke the protocol: %v", err)}
}

// withFiles calls fn with the descriptors of files, which stay valid during the call.
func withFiles(files []*os.File, fn func(fds []int) error) error {
	fds := make([]int, 0, len(files))
	var add func(rest []*os.File) error
	add = func(rest []*os.File) error {
		if len(rest) == 0 {
			return fn(fds)
		}
		return wire.Control(rest[0], func(fd int) error {
			fds = append(fds, fd)
			return add(rest[1:])
		})
	}
	return add(files)
}

// spawnSeeded starts a worker of a lease from a seed. The spawner cannot pass a seed on, so it starts a prepared worker, which then gets lease and seed from this process.
func (z *Zygote) spawnSeeded(ctx context.Context, spec *Spec, body []byte, names *os.File) (*Worker, error) {
	own := *spec
	own.Code, own.Names, own.NamesFile, own.ClientBlob, own.Channel, own.Seed, own.Tables = nil, nil, nil, nil, Channel{}, nil, nil
	own.MaxDepth, own.MaxEager, own.MaxBulk = 0, 0, 0
	w, err := z.prepared(ctx, &own)
	if err != nil {
		return nil, err
	}
	if _, err := w.take(ctx, spec, body, names); err != nil {
		return nil, err
	}
	return w, nil
}

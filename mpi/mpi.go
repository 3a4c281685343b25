package mpi

// #include "binding.h"
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ThreadLevel is how many threads may call MPI.
type ThreadLevel int

// Thread levels, from least to most.
const (
	ThreadSingle     ThreadLevel = C.MPI_THREAD_SINGLE
	ThreadFunneled   ThreadLevel = C.MPI_THREAD_FUNNELED
	ThreadSerialized ThreadLevel = C.MPI_THREAD_SERIALIZED
	ThreadMultiple   ThreadLevel = C.MPI_THREAD_MULTIPLE
)

// Values that stand for ranks and tags.
const (
	AnySource = int(C.MPI_ANY_SOURCE)
	AnyTag    = int(C.MPI_ANY_TAG)
	ProcNull  = int(C.MPI_PROC_NULL) // nobody: sending to it and receiving from it do nothing
	Undefined = int(C.MPI_UNDEFINED)
)

// Error is what every function of this package returns when it fails.
type Error struct {
	Op    string
	Code  int // MPI's error code; 0 when this package found it
	Class int // MPI's error class, one of MPI_ERR_*; 0 when this package found it
	Text  string
}

// Error gives operation and reason.
func (e *Error) Error() string { return "mpi: " + e.Op + ": " + e.Text }

func fail(op, format string, args ...any) error {
	return &Error{Op: op, Text: fmt.Sprintf(format, args...)}
}

// result makes an error of an MPI return value.
func result(op string, code C.int) error {
	if code == C.MPI_SUCCESS {
		return nil
	}
	var text [C.MPI_MAX_ERROR_STRING]C.char
	var n, class C.int
	e := &Error{Op: op, Code: int(code)}
	if C.MPI_Error_class(code, &class) == C.MPI_SUCCESS {
		e.Class = int(class)
	}
	if C.MPI_Error_string(code, &text[0], &n) == C.MPI_SUCCESS {
		e.Text = C.GoStringN(&text[0], n)
	} else {
		e.Text = fmt.Sprintf("error %d", code)
	}
	return e
}

// State of the library: MPI ends the program when it is called before it began or after it ended.
var (
	stateMu  sync.Mutex
	up       atomic.Bool
	ours     bool // Init began it
	provided ThreadLevel
)

// Init begins MPI with the highest level of threads that it provides, and makes MPI return errors. Call it once per program, as in C. If other code,
// such as a C library, has already begun MPI, Init uses it as it is, and Finalize does not end it.
func Init() error {
	const op = "Init"
	stateMu.Lock()
	defer stateMu.Unlock()
	var begun, ended, level C.int
	C.MPI_Initialized(&begun)
	C.MPI_Finalized(&ended)
	switch {
	case ended != 0:
		return fail(op, "MPI was ended already and cannot begin again")
	case up.Load():
		return fail(op, "called twice")
	case begun != 0:
		if err := result(op, C.MPI_Query_thread(&level)); err != nil {
			return err
		}
	default:
		if err := result(op, C.MPI_Init_thread(nil, nil, C.MPI_THREAD_MULTIPLE, &level)); err != nil {
			return err
		}
		ours = true
	}
	provided = ThreadLevel(level)
	for _, c := range []C.MPI_Comm{C.comm_world(), C.comm_self()} {
		if err := result(op, C.errors_return(c)); err != nil {
			return err
		}
	}
	up.Store(true)
	return nil
}

// Finalize ends MPI. All ranks must call it, with no operation under way.
func Finalize() error {
	const op = "Finalize"
	stateMu.Lock()
	defer stateMu.Unlock()
	if !up.Load() {
		return fail(op, "MPI has not begun or has ended")
	}
	up.Store(false)
	if !ours {
		return nil
	}
	return result(op, C.MPI_Finalize())
}

// IsOn says whether MPI has begun and not ended.
func IsOn() bool { return up.Load() }

// Level is what MPI allows to threads; valid after Init.
func Level() ThreadLevel {
	stateMu.Lock()
	defer stateMu.Unlock()
	return provided
}

// Version is the text by which the MPI library describes itself.
func Version() string {
	var text [C.MPI_MAX_LIBRARY_VERSION_STRING]C.char
	var n C.int
	if C.MPI_Get_library_version(&text[0], &n) != C.MPI_SUCCESS {
		return ""
	}
	return C.GoStringN(&text[0], n)
}

// Wtime is a time in seconds since some moment in the past; 0 when MPI is not on.
func Wtime() float64 {
	if !up.Load() {
		return 0
	}
	return float64(C.MPI_Wtime())
}

// ---- communicators ----

// Comm is a communicator: a group of ranks. Freed ones refuse to work.
type Comm struct {
	handle C.MPI_Comm
	lasts  bool // World and Self are never freed
	gone   atomic.Bool
}

var worldComm, selfComm = sync.OnceValue(func() *Comm { return &Comm{handle: C.comm_world(), lasts: true} }),
	sync.OnceValue(func() *Comm { return &Comm{handle: C.comm_self(), lasts: true} })

// World has all ranks.
func World() *Comm { return worldComm() }

// Self has the calling rank alone.
func Self() *Comm { return selfComm() }

// ready says why c cannot be used.
func (c *Comm) ready(op string) error {
	switch {
	case !up.Load():
		return fail(op, "MPI has not begun or has ended")
	case c == nil:
		return fail(op, "the communicator is nil")
	case c.gone.Load() || c.handle == C.comm_null():
		return fail(op, "the communicator was freed")
	}
	return nil
}

// NewComm makes a communicator of these ranks of the world, all of them when ranks is nil or empty. Every rank of the
// world must call it with the same ranks; those that are not in it get nil.
func NewComm(ranks []int) (*Comm, error) {
	const op = "NewComm"
	world := World()
	if len(ranks) == 0 {
		return world.Dup()
	}
	size, err := world.Size()
	if err != nil {
		return nil, err
	}
	list := make([]C.int, len(ranks))
	seen := make(map[int]bool, len(ranks))
	for i, r := range ranks {
		if r < 0 || r >= size {
			return nil, fail(op, "rank %d, want 0..%d", r, size-1)
		}
		if seen[r] {
			return nil, fail(op, "rank %d is named twice", r)
		}
		seen[r] = true
		list[i] = C.int(r)
	}
	var all, group C.MPI_Group
	if err := result(op, C.MPI_Comm_group(world.handle, &all)); err != nil {
		return nil, err
	}
	defer C.MPI_Group_free(&all)
	if err := result(op, C.MPI_Group_incl(all, C.int(len(list)), &list[0], &group)); err != nil {
		return nil, err
	}
	defer C.MPI_Group_free(&group)
	c := &Comm{}
	if err := result(op, C.MPI_Comm_create(world.handle, group, &c.handle)); err != nil {
		return nil, err
	}
	return c.orNil(), nil
}

func (c *Comm) orNil() *Comm {
	if c.handle == C.comm_null() {
		return nil
	}
	return c
}

// Dup makes another communicator of the same ranks, whose messages meet only each other. Collective.
func (c *Comm) Dup() (*Comm, error) {
	const op = "Dup"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	d := &Comm{}
	if err := result(op, C.MPI_Comm_dup(c.handle, &d.handle)); err != nil {
		return nil, err
	}
	return d, nil
}

// Split makes a communicator for each color, its ranks in order of key. Color [Undefined] gives nil. Collective.
func (c *Comm) Split(color, key int) (*Comm, error) {
	const op = "Split"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	if color < 0 && color != Undefined {
		return nil, fail(op, "color %d, want 0 or more, or Undefined", color)
	}
	d := &Comm{}
	if err := result(op, C.MPI_Comm_split(c.handle, C.int(color), C.int(key), &d.handle)); err != nil {
		return nil, err
	}
	return d.orNil(), nil
}

// Free gives the communicator back. Collective. World and Self cannot be freed.
func (c *Comm) Free() error {
	const op = "Free"
	if err := c.ready(op); err != nil {
		return err
	}
	if c.lasts {
		return fail(op, "World and Self cannot be freed")
	}
	if c.gone.Swap(true) {
		return fail(op, "the communicator was freed")
	}
	return result(op, C.MPI_Comm_free(&c.handle))
}

// Rank is the place of the caller in the communicator, from 0.
func (c *Comm) Rank() (int, error) {
	const op = "Rank"
	if err := c.ready(op); err != nil {
		return 0, err
	}
	var n C.int
	err := result(op, C.MPI_Comm_rank(c.handle, &n))
	return int(n), err
}

// Size is the number of ranks.
func (c *Comm) Size() (int, error) {
	const op = "Size"
	if err := c.ready(op); err != nil {
		return 0, err
	}
	var n C.int
	err := result(op, C.MPI_Comm_size(c.handle, &n))
	return int(n), err
}

// Abort ends all ranks of the program, with this exit status. It does not return when it succeeds.
func (c *Comm) Abort(status int) error {
	const op = "Abort"
	if err := c.ready(op); err != nil {
		return err
	}
	return result(op, C.MPI_Abort(c.handle, C.int(status)))
}

// count is a length as MPI takes it.
func count[T any](op string, s []T) (C.int, error) {
	if len(s) > 1<<31-1 {
		return 0, fail(op, "%d elements, MPI takes at most %d", len(s), 1<<31-1)
	}
	return C.int(len(s)), nil
}

// pointer is a slice's memory as C sees it; NULL when there is none.
func pointer[T any](s []T) unsafe.Pointer {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(s))
}

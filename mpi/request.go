package mpi

// #include "binding.h"
import "C"

import (
	"runtime"
	"unsafe"
)

// Request is a nonblocking operation under way. It must be ended by Wait, by Test that says so, or by one of the functions
// for several; until then its slices are pinned and belong to MPI. Used by one goroutine at a time.
type Request struct {
	op     string
	handle C.MPI_Request
	pin    runtime.Pinner
	status func(*C.MPI_Status) (Status, error)
	ended  bool
	got    Status
	err    error
}

// start pins the slices' memory and begins the operation.
func start[T Number](op string, receives bool, begin func(*C.MPI_Request) C.int, slices ...[]T) (*Request, error) {
	r := &Request{op: op}
	for _, s := range slices {
		if len(s) > 0 {
			r.pin.Pin(unsafe.SliceData(s))
		}
	}
	if receives {
		r.status = func(s *C.MPI_Status) (Status, error) { return statusOf[T](op, s) }
	}
	handle := new(C.MPI_Request) // on its own: C must not see the Go pointers beside it
	if err := result(op, begin(handle)); err != nil {
		r.pin.Unpin()
		return nil, err
	}
	r.handle = *handle
	return r, nil
}

// finish takes the outcome of an operation that ended.
func (r *Request) finish(code C.int, s *C.MPI_Status) {
	r.ended = true
	r.pin.Unpin()
	if r.err = result(r.op, code); r.err == nil && r.status != nil {
		r.got, r.err = r.status(s)
	}
}

// ready says why a request cannot be waited for; a nil request is an error, an ended one is not.
func (r *Request) ready(op string) error {
	if r == nil {
		return fail(op, "the request is nil")
	}
	if !r.ended && !up.Load() {
		return fail(op, "MPI has not begun or has ended")
	}
	return nil
}

// Wait returns when the operation has ended, with what came if it receives. Again, it returns the same.
func (r *Request) Wait() (Status, error) {
	if err := r.ready("Wait"); err != nil {
		return Status{}, err
	}
	if !r.ended {
		var s C.MPI_Status
		code := C.MPI_Wait(&r.handle, &s)
		r.finish(code, &s)
	}
	return r.got, r.err
}

// Test looks whether the operation has ended, and says what Wait would.
func (r *Request) Test() (ended bool, s Status, err error) {
	if err := r.ready("Test"); err != nil {
		return false, Status{}, err
	}
	if !r.ended {
		var done C.int
		var s C.MPI_Status
		if code := C.MPI_Test(&r.handle, &done, &s); done != 0 || code != C.MPI_SUCCESS {
			r.finish(code, &s)
		}
	}
	return r.ended, r.got, r.err
}

// WaitAll returns when all have ended, with the first error in order of the arguments.
func WaitAll(requests ...*Request) error {
	var first error
	for _, r := range requests {
		if _, err := r.Wait(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// WaitAny returns when one that had not ended before has, with its place; -1 when there is none. Nil requests are passed
// over.
func WaitAny(requests ...*Request) (int, Status, error) {
	const op = "WaitAny"
	if !up.Load() {
		return -1, Status{}, fail(op, "MPI has not begun or has ended")
	}
	handles := make([]C.MPI_Request, len(requests))
	open := false
	for i, r := range requests {
		handles[i] = C.request_null()
		if r != nil && !r.ended {
			handles[i] = r.handle
			open = true
		}
	}
	if !open {
		return -1, Status{}, nil
	}
	var at C.int
	var s C.MPI_Status
	code := C.MPI_Waitany(C.int(len(handles)), &handles[0], &at, &s)
	if at < 0 || int(at) >= len(requests) {
		return -1, Status{}, result(op, code)
	}
	r := requests[at]
	r.handle = handles[at]
	r.finish(code, &s)
	return int(at), r.got, r.err
}

// Isend begins to send vals.
func Isend[T Number](c *Comm, vals []T, to, tag int) (*Request, error) {
	const op = "Isend"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	n, err := count(op, vals)
	if err != nil {
		return nil, err
	}
	return start(op, false, func(r *C.MPI_Request) C.int {
		return C.MPI_Isend(C.buf(pointer(vals)), n, datatype[T](), C.int(to), C.int(tag), c.handle, r)
	}, vals)
}

// Irecv begins to receive at most len(vals) elements.
func Irecv[T Number](c *Comm, vals []T, from, tag int) (*Request, error) {
	const op = "Irecv"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	n, err := count(op, vals)
	if err != nil {
		return nil, err
	}
	return start(op, true, func(r *C.MPI_Request) C.int {
		return C.MPI_Irecv(C.buf(pointer(vals)), n, datatype[T](), C.int(from), C.int(tag), c.handle, r)
	}, vals)
}

// Ibarrier is Barrier that does not wait.
func (c *Comm) Ibarrier() (*Request, error) {
	const op = "Ibarrier"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	return start[byte](op, false, func(r *C.MPI_Request) C.int { return C.MPI_Ibarrier(c.handle, r) })
}

// Ibcast is Bcast that does not wait.
func Ibcast[T Number](c *Comm, root int, vals []T) (*Request, error) {
	const op = "Ibcast"
	if _, _, err := c.root(op, root); err != nil {
		return nil, err
	}
	n, err := count(op, vals)
	if err != nil {
		return nil, err
	}
	return start(op, false, func(r *C.MPI_Request) C.int {
		return C.MPI_Ibcast(C.buf(pointer(vals)), n, datatype[T](), C.int(root), c.handle, r)
	}, vals)
}

// IallReduce is AllReduce that does not wait.
func IallReduce[T Number](c *Comm, o Op, dest, orig []T) (*Request, error) {
	const op = "IallReduce"
	if err := c.ready(op); err != nil {
		return nil, err
	}
	n, inPlace, err := lengths(op, o, dest, orig)
	if err != nil {
		return nil, err
	}
	return start(op, false, func(r *C.MPI_Request) C.int {
		return C.MPI_Iallreduce(C.in_place(pointer(orig), inPlace), C.buf(pointer(dest)), n, datatype[T](), C.operation(C.int(o)), c.handle, r)
	}, dest, orig)
}

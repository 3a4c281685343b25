package mpi

// #include "binding.h"
import "C"

// Status tells of a message that was received.
type Status struct {
	Source int // rank that sent it; ProcNull: nobody
	Tag    int
	Count  int // elements that came
}

func statusOf[T Number](op string, s *C.MPI_Status) (Status, error) {
	var n C.int
	if err := result(op, C.MPI_Get_count(s, datatype[T](), &n)); err != nil {
		return Status{}, err
	}
	return Status{Source: int(s.MPI_SOURCE), Tag: int(s.MPI_TAG), Count: int(n)}, nil
}

// Send sends vals to a rank, and returns when they may be written again.
func Send[T Number](c *Comm, vals []T, to, tag int) error {
	const op = "Send"
	if err := c.ready(op); err != nil {
		return err
	}
	n, err := count(op, vals)
	if err != nil {
		return err
	}
	return result(op, C.MPI_Send(C.buf(pointer(vals)), n, datatype[T](), C.int(to), C.int(tag), c.handle))
}

// Recv receives at most len(vals) elements; a longer message is an error (MPI_ERR_TRUNCATE). from may be [AnySource], tag
// [AnyTag]. The status says how many elements came, from whom.
func Recv[T Number](c *Comm, vals []T, from, tag int) (Status, error) {
	const op = "Recv"
	if err := c.ready(op); err != nil {
		return Status{}, err
	}
	n, err := count(op, vals)
	if err != nil {
		return Status{}, err
	}
	var s C.MPI_Status
	if err := result(op, C.MPI_Recv(C.buf(pointer(vals)), n, datatype[T](), C.int(from), C.int(tag), c.handle, &s)); err != nil {
		return Status{}, err
	}
	return statusOf[T](op, &s)
}

// SendRecv sends and receives at the same time, so that neighbours may exchange without waiting for each other in turn. The
// slices must not overlap.
func SendRecv[T Number](c *Comm, out []T, to, outTag int, in []T, from, inTag int) (Status, error) {
	const op = "SendRecv"
	if err := c.ready(op); err != nil {
		return Status{}, err
	}
	nOut, err := count(op, out)
	if err != nil {
		return Status{}, err
	}
	nIn, err := count(op, in)
	if err != nil {
		return Status{}, err
	}
	var s C.MPI_Status
	if err := result(op, C.MPI_Sendrecv(C.buf(pointer(out)), nOut, datatype[T](), C.int(to), C.int(outTag),
		C.buf(pointer(in)), nIn, datatype[T](), C.int(from), C.int(inTag), c.handle, &s)); err != nil {
		return Status{}, err
	}
	return statusOf[T](op, &s)
}

// Probe waits for a message without receiving it: its status says how many elements of T it has.
func Probe[T Number](c *Comm, from, tag int) (Status, error) {
	const op = "Probe"
	if err := c.ready(op); err != nil {
		return Status{}, err
	}
	var s C.MPI_Status
	if err := result(op, C.MPI_Probe(C.int(from), C.int(tag), c.handle, &s)); err != nil {
		return Status{}, err
	}
	return statusOf[T](op, &s)
}

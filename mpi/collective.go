package mpi

// #include "binding.h"
import "C"

// Barrier returns when all ranks have called it.
func (c *Comm) Barrier() error {
	const op = "Barrier"
	if err := c.ready(op); err != nil {
		return err
	}
	return result(op, C.MPI_Barrier(c.handle))
}

// root checks a rank that receives from or sends to all, and says whether it is the caller.
func (c *Comm) root(op string, root int) (ranks int, mine bool, err error) {
	if err := c.ready(op); err != nil {
		return 0, false, err
	}
	if ranks, err = c.Size(); err != nil {
		return 0, false, err
	}
	if root < 0 || root >= ranks {
		return 0, false, fail(op, "root %d, want 0..%d", root, ranks-1)
	}
	rank, err := c.Rank()
	return ranks, rank == root, err
}

// Bcast gives root's vals to all ranks, which pass slices of the same length.
func Bcast[T Number](c *Comm, root int, vals []T) error {
	const op = "Bcast"
	if _, _, err := c.root(op, root); err != nil {
		return err
	}
	n, err := count(op, vals)
	if err != nil {
		return err
	}
	return result(op, C.MPI_Bcast(C.buf(pointer(vals)), n, datatype[T](), C.int(root), c.handle))
}

// lengths checks a pair of slices of one length; orig nil means dest itself.
func lengths[T Number](op string, o Op, dest, orig []T) (n C.int, inPlace C.int, err error) {
	if err := o.check(op); err != nil {
		return 0, 0, err
	}
	if orig == nil {
		inPlace = 1
	} else if len(dest) != len(orig) {
		return 0, 0, fail(op, "dest has %d elements, orig %d", len(dest), len(orig))
	}
	n, err = count(op, dest)
	return n, inPlace, err
}

// AllReduce combines the ranks' orig, element by element, and gives the outcome to dest on all ranks. orig nil: dest holds
// the values. All slices have the same length; dest and orig must not overlap otherwise.
func AllReduce[T Number](c *Comm, o Op, dest, orig []T) error {
	const op = "AllReduce"
	if err := c.ready(op); err != nil {
		return err
	}
	n, inPlace, err := lengths(op, o, dest, orig)
	if err != nil {
		return err
	}
	return result(op, C.MPI_Allreduce(C.in_place(pointer(orig), inPlace), C.buf(pointer(dest)), n, datatype[T](), C.operation(C.int(o)), c.handle))
}

// Reduce combines the ranks' orig and gives the outcome to dest on root; elsewhere dest may be nil.
func Reduce[T Number](c *Comm, root int, o Op, dest, orig []T) error {
	const op = "Reduce"
	_, mine, err := c.root(op, root)
	if err != nil {
		return err
	}
	if err := o.check(op); err != nil {
		return err
	}
	if mine && len(dest) != len(orig) {
		return fail(op, "dest has %d elements, orig %d", len(dest), len(orig))
	}
	n, err := count(op, orig)
	if err != nil {
		return err
	}
	return result(op, C.MPI_Reduce(C.buf(pointer(orig)), C.buf(pointer(dest)), n, datatype[T](), C.operation(C.int(o)), C.int(root), c.handle))
}

// room checks that there is space for n elements from or to each of the ranks.
func room(op, name string, have, ranks, n int) error {
	if have != ranks*n {
		return fail(op, "%s has %d elements, want %d for each of %d ranks", name, have, n, ranks)
	}
	return nil
}

// Gather puts the ranks' orig, which have the same length, one behind the other into dest on root; elsewhere dest may
// be nil.
func Gather[T Number](c *Comm, root int, dest, orig []T) error {
	const op = "Gather"
	ranks, mine, err := c.root(op, root)
	if err != nil {
		return err
	}
	if mine {
		if err := room(op, "dest", len(dest), ranks, len(orig)); err != nil {
			return err
		}
	}
	n, err := count(op, orig)
	if err != nil {
		return err
	}
	t := datatype[T]()
	return result(op, C.MPI_Gather(C.buf(pointer(orig)), n, t, C.buf(pointer(dest)), n, t, C.int(root), c.handle))
}

// AllGather is Gather to all ranks.
func AllGather[T Number](c *Comm, dest, orig []T) error {
	const op = "AllGather"
	if err := c.ready(op); err != nil {
		return err
	}
	ranks, err := c.Size()
	if err != nil {
		return err
	}
	if err := room(op, "dest", len(dest), ranks, len(orig)); err != nil {
		return err
	}
	n, err := count(op, orig)
	if err != nil {
		return err
	}
	t := datatype[T]()
	return result(op, C.MPI_Allgather(C.buf(pointer(orig)), n, t, C.buf(pointer(dest)), n, t, c.handle))
}

// Scatter gives each rank its part of root's orig, in order of ranks; elsewhere orig may be nil.
func Scatter[T Number](c *Comm, root int, dest, orig []T) error {
	const op = "Scatter"
	ranks, mine, err := c.root(op, root)
	if err != nil {
		return err
	}
	if mine {
		if err := room(op, "orig", len(orig), ranks, len(dest)); err != nil {
			return err
		}
	}
	n, err := count(op, dest)
	if err != nil {
		return err
	}
	t := datatype[T]()
	return result(op, C.MPI_Scatter(C.buf(pointer(orig)), n, t, C.buf(pointer(dest)), n, t, C.int(root), c.handle))
}

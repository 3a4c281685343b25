// Package mpi binds MPI for Go programs, with the names that users of emer/empi know.
//
//	if err := mpi.Init(); err != nil { ... }
//	defer mpi.Finalize()
//	world := mpi.World()
//	mpi.AllReduce(world, mpi.OpSum, sums, mine)
//	n, err := mpi.Recv(world, in, 0, tag) // n.Count elements of n.Source came
//
// It is built for OpenMPI; -tags mpich builds it for MPICH. Both are found by pkg-config (ompi-c, mpich). -tags mpienv
// builds it for any other: its flags, those that mpicc -show prints, are taken from CGO_CFLAGS and CGO_LDFLAGS.
//
// # Errors
//
// Every call returns its error; nothing aborts the program but [Comm.Abort]. Errors are of type [*Error] and name the
// operation and the offending value. Lengths that do not fit together are found before MPI is called, for MPI would
// write past the end of a slice. After an error inside a collective operation the ranks may disagree about what
// happened; MPI promises no more, and Abort is then the way out.
//
// # Slices
//
// Elements are integers, floating-point and complex numbers, and types made of them ([Number]). Slices may be empty or
// nil. A slice of a nonblocking operation is pinned until its request has ended, and must not be read (receiving) or
// written (both) before.
//
// # Goroutines and threads
//
// Init asks for MPI_THREAD_MULTIPLE, and every goroutine may call. Where an MPI gives less ([Level]), the program must see to
// it that one goroutine calls at a time. A blocking call occupies an operating-system thread until it returns.
// Two goroutines in a collective operation on one communicator are an error of the program, as in C: give each its
// own by [Comm.Dup].
package mpi

/* Enough of MPI for examples/mpi/blackscholes/example.h. */
typedef int MPI_Comm;

/* MPI for a program of a single rank: the calls that examples/mpi/blackscholes makes, without a library. The demonstration `rfaas demo` is
 * that program, compiled with this header, so that it needs no MPI. */
#ifndef SERIAL_MPI_H
#define SERIAL_MPI_H

#include <stdlib.h>
#include <string.h>

typedef int MPI_Comm, MPI_Datatype, MPI_Op, MPI_Info;
typedef long MPI_Aint;
typedef void *MPI_Win;

#define MPI_COMM_NULL 0
#define MPI_COMM_WORLD 1
#define MPI_COMM_TYPE_SHARED 0
#define MPI_INFO_NULL 0
#define MPI_UNDEFINED (-1)
#define MPI_SUM 0
#define MPI_MAX 1
/* A datatype is its size in bytes. */
#define MPI_BYTE 1
#define MPI_INT ((int)sizeof(int))
#define MPI_DOUBLE ((int)sizeof(double))

static inline int MPI_Init(int *argc, char ***argv) { return (void)argc, (void)argv, 0; }
static inline int MPI_Finalize(void) { return 0; }
static inline int MPI_Abort(MPI_Comm comm, int code) { (void)comm, exit(code); }
static inline int MPI_Comm_rank(MPI_Comm comm, int *rank) { return (void)comm, *rank = 0; }
static inline int MPI_Comm_size(MPI_Comm comm, int *size) { return (void)comm, *size = 1, 0; }
static inline int MPI_Comm_free(MPI_Comm *comm) { return *comm = MPI_COMM_NULL; }
static inline int MPI_Barrier(MPI_Comm comm) { return (void)comm, 0; }

static inline int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm *out) {
    (void)key;
    *out = color == MPI_UNDEFINED ? MPI_COMM_NULL : comm;
    return 0;
}

static inline int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *out) {
    (void)info;
    return MPI_Comm_split(comm, type, key, out);
}

static inline int MPI_Bcast(void *data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
    return (void)data, (void)count, (void)type, (void)root, (void)comm, 0;
}

static inline int MPI_Reduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm) {
    (void)op, (void)root, (void)comm;
    memcpy(out, in, (size_t)count * (size_t)type);
    return 0;
}

static inline int MPI_Gather(const void *in, int count, MPI_Datatype type, void *out, int out_count, MPI_Datatype out_type, int root,
                             MPI_Comm comm) {
    (void)out_count, (void)out_type;
    return MPI_Reduce(in, out, count, type, MPI_SUM, root, comm);
}

/* base is the address of a pointer, as in MPI. The window is the memory. */
static inline int MPI_Win_allocate_shared(MPI_Aint bytes, int unit, MPI_Info info, MPI_Comm comm, void *base, MPI_Win *window) {
    (void)unit, (void)info;
    *window = calloc(1, (size_t)bytes);
    if (!*window)
        MPI_Abort(comm, 1);
    memcpy(base, window, sizeof *window);
    return 0;
}

static inline int MPI_Win_shared_query(MPI_Win window, int rank, MPI_Aint *bytes, int *unit, void *base) {
    (void)rank, (void)bytes, (void)unit;
    memcpy(base, &window, sizeof window);
    return 0;
}

static inline int MPI_Win_free(MPI_Win *window) {
    free(*window);
    *window = NULL;
    return 0;
}

#endif

/* What cgo cannot say: handles that are macros, and a buffer for slices without elements. */
#ifndef RFAAS_MPI_BINDING_H
#define RFAAS_MPI_BINDING_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static inline MPI_Comm comm_world(void) { return MPI_COMM_WORLD; }
static inline MPI_Comm comm_self(void) { return MPI_COMM_SELF; }
static inline MPI_Comm comm_null(void) { return MPI_COMM_NULL; }
static inline MPI_Request request_null(void) { return MPI_REQUEST_NULL; }

/* Errors of a communicator, and of what is made from it, are returned. */
static inline int errors_return(MPI_Comm comm) { return MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN); }

enum { T_INT8, T_INT16, T_INT32, T_INT64, T_UINT8, T_UINT16, T_UINT32, T_UINT64, T_FLOAT32, T_FLOAT64, T_COMPLEX64, T_COMPLEX128 };

static inline MPI_Datatype datatype(int t) {
    switch (t) {
    case T_INT8: return MPI_INT8_T;
    case T_INT16: return MPI_INT16_T;
    case T_INT32: return MPI_INT32_T;
    case T_INT64: return MPI_INT64_T;
    case T_UINT8: return MPI_UINT8_T;
    case T_UINT16: return MPI_UINT16_T;
    case T_UINT32: return MPI_UINT32_T;
    case T_UINT64: return MPI_UINT64_T;
    case T_FLOAT32: return MPI_FLOAT;
    case T_FLOAT64: return MPI_DOUBLE;
    case T_COMPLEX64: return MPI_C_FLOAT_COMPLEX;
    case T_COMPLEX128: return MPI_C_DOUBLE_COMPLEX;
    }
    return MPI_DATATYPE_NULL;
}

enum { O_SUM, O_MAX, O_MIN, O_PROD, O_LAND, O_LOR, O_BAND, O_BOR, O_BXOR };

static inline MPI_Op operation(int o) {
    switch (o) {
    case O_SUM: return MPI_SUM;
    case O_MAX: return MPI_MAX;
    case O_MIN: return MPI_MIN;
    case O_PROD: return MPI_PROD;
    case O_LAND: return MPI_LAND;
    case O_LOR: return MPI_LOR;
    case O_BAND: return MPI_BAND;
    case O_BOR: return MPI_BOR;
    case O_BXOR: return MPI_BXOR;
    }
    return MPI_OP_NULL;
}

/* A buffer argument: that of an empty slice may be NULL in Go, but is refused as NULL by some collectives. */
static char no_elements;
static inline void *buf(void *p) { return p ? p : (void *)&no_elements; }
static inline void *in_place(void *p, int wanted) { return wanted ? MPI_IN_PLACE : buf(p); }

#endif

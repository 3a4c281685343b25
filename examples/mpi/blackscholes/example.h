/* Parts of the Black-Scholes example. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../functions/blackscholes.h"

/* ---- arguments.c ---- */

typedef struct arguments {
    char options[4096]; /* file */
    char library[4096];
    long n;            /* options to price, all ranks together */
    double share;      /* share of each rank's options that workers price, 0..1; below 0: as many as they can */
    int workers;       /* per rank */
    int batch;         /* options per call */
    int samples;       /* latency calls per size and rank; 0: none */
    const char *executor, *manager, *provider; /* NULL: from the environment */
    bool json;
} arguments;

/* Fills args. 0: go on; 1: help was printed; 2: wrong usage, with a message on standard error. Prints only if `talk` is set. */
int arguments_parse(arguments *args, int argc, char **argv, bool talk);

/* ---- options.c ---- */

typedef struct entry {
    bs_option option;
    double reference; /* published price, NaN if there is none */
    double tolerance; /* half a unit of its last digit */
} entry;

/* Reads an option file. Returns the entries (free them) or NULL with the reason in error. */
entry *options_read(const char *path, int *n, char *error, size_t room);

/* ---- quiet.c ---- */

/* A barrier in which waiting ranks sleep in the kernel. In MPI's barrier they would poll on the cores that are being measured.
 * Ranks of one node share a pthread barrier in a shared window. The first rank of each node meets those of the others by MPI. */
typedef struct quiet quiet;
quiet *quiet_create(MPI_Comm comm);
void quiet_barrier(quiet *q);
void quiet_free(quiet *q);

/* ---- latency.c ---- */

typedef struct latency {
    int payload; /* bytes */
    int samples;
    double p50_ns, p99_ns, min_ns;
} latency;

/* Measures synchronous calls of `echo` by this rank. All other ranks must be idle. Returns 0, or an rfaas status with
 * rfaas_last_error set. */
struct rfaas_lease;
int latency_measure(struct rfaas_lease *lease, uint32_t echo, int payload, int samples, latency *out);

double now_s(void);

#endif

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
    double share;      /* part of each rank's options that is priced remotely, 0..1; below 0: as many as the workers can */
    int workers;       /* per rank */
    int batch;         /* options per call */
    int samples;       /* of the latency, per size and rank; 0: no latency phase */
    const char *executor, *manager, *provider; /* NULL: from the environment */
    bool json;
} arguments;

/* Fills args. 0: go on; 1: help was printed; 2: wrong usage, told on standard error. Only `talk` prints. */
int arguments_parse(arguments *args, int argc, char **argv, bool talk);

/* ---- options.c ---- */

typedef struct entry {
    bs_option option;
    double reference; /* published price, NaN when there is none */
    double tolerance; /* half a unit of its last digit */
} entry;

/* Reads an option file. Returns the entries (free them) or NULL with the reason in error. */
entry *options_read(const char *path, int *n, char *error, size_t room);

/* ---- quiet.c ---- */

/* A barrier in which waiting ranks sleep in the kernel: MPI's own would have them poll, on the very cores that are being
 * measured. Ranks of one node share a pthread barrier in a shared window; nodes meet by MPI through their first rank. */
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

/* Measures a synchronous call of `echo` by the caller, which everybody else must leave in peace. 0, or an rfaas status with
 * rfaas_last_error set. */
struct rfaas_lease;
int latency_measure(struct rfaas_lease *lease, uint32_t echo, int payload, int samples, latency *out);

double now_s(void);

#endif

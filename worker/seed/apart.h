/* Libraries that stay each process's own, because they have threads or tables of one process: OpenMP's runtime and OpenBLAS. The maker of
 * a seed finds out which of them user code needs. All workers of the seed load them first, outside of the seed's heap. libgcc_s is one of
 * them always: libc loads it when a thread ends. */
#ifndef RFAAS_SEED_APART_H
#define RFAAS_SEED_APART_H

#include <stdbool.h>
#include <stdint.h>

#include "dp_status.h"

#define DP_APART_MAX 6
#define DP_APART_PATH 160

typedef struct dp_apart {
    uint32_t n;
    uint32_t pad;
    char path[DP_APART_MAX][DP_APART_PATH];
} dp_apart;

/* dp_apart_find loads a library with all that it needs in a process of its own, and lists what must stay apart. `load` loads it, and
 * returns false if that fails. No heap is open yet. A library that cannot be loaded needs nothing: the caller's own attempt says why. */
int dp_apart_find(bool (*load)(void *arg), void *arg, dp_apart *found, dp_error *err);

/* dp_apart_valid reports whether a list that another process has made names such libraries only. */
bool dp_apart_valid(const dp_apart *list);

/* dp_apart_load loads libgcc_s and the libraries of a list. */
int dp_apart_load(const dp_apart *list, dp_error *err);

/* dp_apart_unseeded gives OpenBLAS the threads that it would have without a seed, in a worker that goes on without one. */
void dp_apart_unseeded(const dp_apart *list);

/* dp_apart_pause ends the threads that OpenMP's runtime keeps between parallel regions. */
void dp_apart_pause(const dp_apart *list);

#endif

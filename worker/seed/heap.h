/* The heap of user code in workers that make seeds or start from one.
 *
 * What user code allocates must lie at the same addresses in all workers of a seed. So while the heap is open, malloc and its relatives
 * take memory from an arena at a fixed address, on every thread that is not one of the worker's own. This includes libc's own calls of
 * malloc, as in strdup, if user code makes them. Two callers stay outside, in libc's heap: threads that are marked as outside, and the
 * dynamic linker, whose tables must survive when a seed's memory is laid over the arena. free and realloc tell the heaps apart by the
 * address.
 *
 * The allocator in the arena is mimalloc, which counts as a library of user code. Its own state therefore travels with the seed. */
#ifndef RFAAS_SEED_HEAP_H
#define RFAAS_SEED_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>

#include "dp_status.h"

#define DP_HEAP_AT 0x600000000000ull
#define DP_HEAP_MOST (1ull << 40) /* bytes */
#define DP_HEAP_LIBRARY "libmimalloc.so.2"
#define DP_HEAP_UNIT (32ull << 20) /* mimalloc's segments */
#define DP_HEAP_LINKED (16ull << 20) /* bytes below the arena for what the dynamic linker allocates while it loads user code */

#define DP_HEAP_KEYS 128 /* thread-specific keys that can be kept */

/* The block of rfaas_state. */
typedef struct dp_heap_state {
    void *block;
    size_t size;
} dp_heap_state;

#define DP_HEAP_RESUMES 32 /* functions of rfaas_on_resume */

typedef struct dp_heap_resume {
    void (*call)(void *);
    void *arg;
} dp_heap_resume;

/* The arena's first unit is not mimalloc's. It holds what user code keeps in libc, and what must travel. Zero at first. */
typedef struct dp_heap_kept {
    uint32_t seeded; /* `random` is initialised */
    uint32_t pad;
    struct random_data random;
    char random_state[128];
    char *random_memory; /* that user code has set instead; NULL: random_state */
    struct drand48_data drand48;
    dp_heap_state state;
    void (*destructors[DP_HEAP_KEYS])(void *); /* of thread-specific keys that user code has made */
    uint64_t tables; /* end of mimalloc's own tables in this unit; 0: there are none */
    uint64_t resumes;
    dp_heap_resume resume[DP_HEAP_RESUMES]; /* of rfaas_on_resume, in their order */
    const void *root; /* argument of rfaas_set_root; NULL: it was not called */
    uint64_t root_size;
} dp_heap_kept;

/* Memory that user code has mapped. */
typedef struct dp_heap_map {
    uintptr_t at;
    size_t size;
    const void *caller; /* code; NULL: not known */
} dp_heap_map;

/* Threads of the worker set this, except the serving thread while user code may run on it. Other threads never do. */
extern __thread int dp_heap_outside;

/* dp_heap_load loads mimalloc. This has no effect until dp_heap_open. The zygote calls it for all its workers, because loading takes a third of a worker's
 * start from a seed. In other processes, dp_heap_open calls it. */
int dp_heap_load(dp_error *err);
/* dp_heap_open gives the arena, which the caller has mapped at DP_HEAP_AT, to mimalloc, and switches it on for this process. size is a
 * multiple of DP_HEAP_UNIT and at least two of them. Only once, with one thread, and inside dp_place_begin and dp_place_end. From then on
 * what the dynamic linker allocates lies at the same addresses in all workers that load the same libraries, until dp_heap_linked.
 * DP_UNSUPPORTED: there is no mimalloc, or it is too old. */
int dp_heap_open(uint64_t size, dp_error *err);
void dp_heap_linked(void);

/* dp_heap_maps_of gives mimalloc, whose code is named, pages of the arena's first unit for its tables. From dp_heap_watch_maps(true) on, what user code
 * maps and does not unmap is counted: dp_heap_left_map returns the i-th mapping, NULL beyond the last one. */
void dp_heap_maps_of(uintptr_t code, uintptr_t size);
void dp_heap_watch_maps(bool on);
const dp_heap_map *dp_heap_left_map(uint32_t i);

/* Reports whether the address lies in the arena. False while no heap is open. */
bool dp_heap_has(const void *p);

/* The arena's first bytes. Only while a heap is open. */
static inline dp_heap_kept *dp_heap_kept_at(void) { return (dp_heap_kept *)DP_HEAP_AT; }

/* Reports whether user code calls: a heap is open, and this thread is not the worker's own. */
bool dp_heap_inside(void);

#endif

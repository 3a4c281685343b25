/* Memory of regions that is filled with pages while the process does something else. */
#ifndef RFAAS_WORKER_AHEAD_H
#define RFAAS_WORKER_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "dp_fabric.h"

/* Bits of sched_setaffinity(), for more CPUs than cpu_set_t has. */
typedef union dp_cpus {
    unsigned char bytes[8192 / 8];
    unsigned long words[8192 / 8 / sizeof(unsigned long)];
} dp_cpus;

/* dp_cpus_get returns the CPUs that the calling thread may use. */
void dp_cpus_get(dp_cpus *out);
unsigned dp_cpus_count(const dp_cpus *cpus);

enum { DP_AHEAD_MOST = 2 };
typedef struct dp_ahead dp_ahead;

/* dp_ahead_map maps n regions, at most DP_AHEAD_MOST, of size bytes each, without pages. Returns NULL if that is not possible;
 * the provider then allocates as usual. One thread alone uses the result. */
dp_ahead *dp_ahead_map(int n, uint64_t size);
/* dp_ahead_fill fills some of what is left. Returns false if nothing is left. */
bool dp_ahead_fill(dp_ahead *a);
/* dp_ahead_start begins to fill what is left on a thread of its own, if it can: on any of cpus, with pages of the NUMA node of
 * the caller's CPU. */
void dp_ahead_start(dp_ahead *a, const dp_cpus *cpus);
/* dp_ahead_pass sets whether processes that the caller clones from now on inherit the regions. At first they do. Returns false if
 * the result is unknown. After cloning the process that inherits them, the caller ends its own without having taken any. */
bool dp_ahead_pass(dp_ahead *a, bool on);
/* dp_ahead_near returns whether the pages are on the NUMA node of the caller's CPU. */
bool dp_ahead_near(const dp_ahead *a);
/* dp_ahead_size returns the size of one region, in bytes, whole pages. */
uint64_t dp_ahead_size(const dp_ahead *a);
/* dp_ahead_take returns a region if it has that size and one is left; otherwise, and for NULL, it returns NULL. It helps to fill the
 * region. The thread may still fill the last pages, which does not disturb their user. The caller owns the region as one of
 * dp_region_map, and unmaps it after dp_ahead_end. */
char *dp_ahead_take(dp_ahead *a, uint64_t size);
/* dp_ahead_lend makes dev take its next regions from a, until it is called with NULL. */
void dp_ahead_lend(dp_ahead *a, dp_dev *dev);
/* dp_ahead_peek returns the first region, for tests. */
char *dp_ahead_peek(const dp_ahead *a);
/* dp_ahead_left returns how many bytes nobody has begun to fill. */
uint64_t dp_ahead_left(const dp_ahead *a);
/* dp_ahead_end ends the thread and unmaps what was not taken. NULL does nothing. */
void dp_ahead_end(dp_ahead *a);

#endif

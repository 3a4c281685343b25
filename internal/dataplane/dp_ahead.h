/* Memory of regions that is filled with pages while the process does something else. Filling takes most of the time in which a
 * channel is made on a device that pins its memory; the pages of one mapping can be filled by several threads. */
#ifndef RFAAS_DP_AHEAD_H
#define RFAAS_DP_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

/* Bits of sched_setaffinity(), for more CPUs than cpu_set_t has. */
typedef union dp_cpus {
    unsigned char bytes[8192 / 8];
    unsigned long words[8192 / 8 / sizeof(unsigned long)];
} dp_cpus;

/* Those of the calling thread. */
void dp_cpus_get(dp_cpus *out);
unsigned dp_cpus_count(const dp_cpus *cpus);

/* dp_region_map maps `size` bytes, whole pages, with a page behind them that nobody can access; *len is that of both. Shared with
 * children: after a fork, private pages that a device has pinned would stay with one side only, and the other would write to a
 * copy that the device never sees. With `filled` all its pages are there. NULL, with errno. */
char *dp_region_map(uint64_t size, int filled, uint64_t *len);

enum { DP_AHEAD_MOST = 2 };
typedef struct dp_ahead dp_ahead;

/* dp_ahead_map maps n regions, DP_AHEAD_MOST at most, of `size` bytes each, without pages. NULL: that cannot be done, and whoever
 * allocates does it as always. One thread alone uses what it returns. */
dp_ahead *dp_ahead_map(int n, uint64_t size);
/* Fills some of what is left. False: nothing is. */
bool dp_ahead_fill(dp_ahead *a);
/* Begins to fill what is left on a thread of its own, if it can: on any of `cpus`, with pages near the CPU that the caller is on. */
void dp_ahead_start(dp_ahead *a, const dp_cpus *cpus);
/* Whether processes that the caller clones from now on have the regions; they do at first. False: that is unknown. Who clones one to
 * pass them on ends its own then, without having taken any. */
bool dp_ahead_pass(dp_ahead *a, bool on);
bool dp_ahead_near(const dp_ahead *a); /* whether its pages are where the caller's would be */
uint64_t dp_ahead_size(const dp_ahead *a); /* of one region, whole pages */
/* One of the mappings, if they have that size and there is one left; else, and of NULL, it returns NULL. Helps to fill it. The last pages may
 * still be under way, which does not hinder who uses it. It is the caller's then, as one of dp_region_map, to be unmapped after
 * dp_ahead_end. */
char *dp_ahead_take(dp_ahead *a, uint64_t size);
/* The first region, for tests. */
char *dp_ahead_peek(const dp_ahead *a);
/* How many bytes nobody has begun to fill yet. */
uint64_t dp_ahead_left(const dp_ahead *a);
/* Ends the thread, and unmaps what was not taken. NULL: nothing. */
void dp_ahead_end(dp_ahead *a);

#endif

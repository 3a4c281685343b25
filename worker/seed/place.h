/* Where libraries of user code lie in workers that make seeds or start from one.
 *
 * All workers of a zygote have libc, the dynamic linker and the worker program at the same addresses, because they are clones. On other nodes they
 * have, too, if layout.h can see to it. Libraries that are loaded later must lie at the same addresses, whatever a worker has mapped before. So the
 * zygote reserves a hole in the address space. While libraries are loaded, all gaps above the hole are filled, and the kernel, which maps from the top downwards, puts
 * them into the hole one below the other. Kernels differ in how they align libraries of 2 MiB or more: then a seed does not fit, and the worker reports it. */
#ifndef RFAAS_SEED_PLACE_H
#define RFAAS_SEED_PLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dp_status.h"

#define DP_RANGES_MAX 1024

typedef struct dp_range {
    uintptr_t from, to;
} dp_range;

/* dp_place_base returns where this process has fixed addresses: from there on DP_PLACE_SIZE bytes, at first the hole. They lie right below what the
 * kernel places: without a limit of the stack, that is below a sixth of the address space, so there are two such places. They avoid the heap of user code,
 * and the addresses that the manual recommends for tables. 0: there is none. */
#define DP_PLACE_SIZE (4ull << 40)
uintptr_t dp_place_base(void);
bool dp_place_is_base(uintptr_t at);
/* dp_place_reserve makes the hole. The zygote calls it once, before it clones workers. */
int dp_place_reserve(dp_error *err);
/* dp_place_begin opens the hole: from now on mappings without an address are made in it. dp_place_end frees the gaps again. From then on the
 * kernel maps where it likes, also into the rest of the hole. The process has one thread meanwhile. Only once. */
int dp_place_begin(dp_error *err);
void dp_place_end(void);

/* dp_place_maps reads /proc/self/maps. It does not use the heap, which may map memory. Returns the number of bytes, or -1. */
long dp_place_maps(char *text, size_t room);
/* dp_place_next reads a line: its addresses, and where its name begins. Returns the next line, NULL: there is none. */
const char *dp_place_next(const char *maps, dp_range *r, const char **name);
/* dp_place_fill fills the gaps above a range in which the kernel would place a mapping. Returns the number of ranges that it has filled, which are in
 * `filled`, or -1 with errno set. */
int dp_place_fill(const char *maps, dp_range below, dp_range filled[DP_RANGES_MAX]);
void dp_place_free(const dp_range *filled, int n);

#endif

/* Where libraries of user code lie in workers that make seeds or start from one.
 *
 * All workers of a zygote have libc, the dynamic linker and the worker program at the same addresses, because they are clones. Libraries
 * that are loaded later must lie at the same addresses too, whatever a worker has mapped before. So the zygote reserves a hole in the
 * address space. While libraries are loaded, every other gap above the hole is filled, and the kernel, which maps from the top
 * downwards, puts them into the hole one below the other. */
#ifndef RFAAS_SEED_PLACE_H
#define RFAAS_SEED_PLACE_H

#include "dp_status.h"

/* dp_place_reserve makes the hole. The zygote calls it once, before it clones workers. */
int dp_place_reserve(dp_error *err);
/* dp_place_begin opens the hole: from now on mappings without an address are made in it. dp_place_end frees the gaps again and keeps
 * the rest of the hole reserved. The process has one thread meanwhile. Only once. */
int dp_place_begin(dp_error *err);
void dp_place_end(void);

#endif

/* The arena of a seed as a table. Workers of other libraries map it read-only at the same address, so that the pointers in it are valid. They map no
 * code and no static data of the seed. */
#ifndef RFAAS_SEED_MAPPED_H
#define RFAAS_SEED_MAPPED_H

#include <stddef.h>

#include "seed.h"

/* dp_seed_map maps the arena, of heap_size bytes, of the seed in the file fd, and returns the seed's root. One thread at a time. The caller keeps fd.
 * DP_INVALID: other memory of the process lies there, or the seed has no root. DP_UNSUPPORTED: the seed is of another version. */
int dp_seed_map(int fd, uint64_t heap_size, const void **root, size_t *size, dp_error *err);

/* Reports whether the header's root lies in an arena of this size. */
bool dp_seed_root_lies(const dp_seed_header *h, uint64_t heap_size);

#endif

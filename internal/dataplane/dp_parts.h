/* Payloads and results that are larger than the bulk area. They pass through it in parts, one at a time: each part is a request of its own,
 * with the call's id, and each has a reply. dp_parts.c is the client's side, dp_serve_parts.c the worker's. */
#ifndef RFAAS_DP_PARTS_H
#define RFAAS_DP_PARTS_H

#include <stdint.h>

#include "dp_wire.h"

/* Returns the most bytes of one part, on a channel with a bulk area of this size: half of it, so that two calls can be in flight. */
static inline uint32_t dp_part_max(uint64_t bulk) {
    return bulk / 2 < DP_PART_MAX ? (uint32_t)(bulk / 2) & ~(DP_BULK_UNIT - 1u) : DP_PART_MAX;
}

#endif

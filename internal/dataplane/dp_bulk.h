/* First-fit allocator of the bulk area: at most one range per slot, kept in order of offset. */
#ifndef RFAAS_DP_BULK_H
#define RFAAS_DP_BULK_H

#include <stdint.h>

typedef struct dp_range {
    uint32_t at, len; /* in DP_BULK_UNIT bytes */
} dp_range;

typedef struct dp_bulk {
    uint32_t total; /* units */
    uint32_t n;
    dp_range *used; /* room for one per slot */
} dp_bulk;

/* Takes len units. 0 and *at, or -1 when no gap is wide enough. */
int dp_bulk_take(dp_bulk *b, uint32_t len, uint32_t *at);
/* Gives back what dp_bulk_take returned at `at`. */
void dp_bulk_give(dp_bulk *b, uint32_t at);

#endif

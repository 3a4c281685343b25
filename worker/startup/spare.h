/* Channel memory that the zygote prepares for the next worker. */
#ifndef RFAAS_WORKER_SPARE_H
#define RFAAS_WORKER_SPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "ahead.h"
#include "dp_channel.h"

/* Memory that the zygote prepares for a channel like that of the last worker that it cloned on verbs. After it is
 * taken it belongs to one process alone. Zero at first. */
typedef struct dp_spare {
    dp_ahead *memory; /* NULL: none */
    bool given;       /* given to the last worker, but still mapped here; unmapped later, when there is time */
    uint64_t size;    /* of one region of the next channel, 0: no memory is wanted */
} dp_spare;
/* dp_spare_fill prepares memory while nothing arrives on the socket. */
void dp_spare_fill(dp_spare *s, int sock);
/* dp_spare_take returns the prepared memory for the next worker, or NULL. Call it before each clone. sizes are those of the
 * worker's channel, NULL if the worker needs no memory. Only processes cloned before the next call inherit the memory. */
dp_ahead *dp_spare_take(dp_spare *s, const dp_channel_config *sizes);

#endif

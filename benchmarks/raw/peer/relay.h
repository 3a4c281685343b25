/* The floor of a call through a broker (relay.c). */
#ifndef BENCH_RELAY_H
#define BENCH_RELAY_H

#include "dp_fabric.h"

/* What one side tells the other to connect. */
typedef struct relay_card {
    uint64_t addr;
    uint32_t rkey, len;
    uint8_t bytes[DP_BLOB_MAX];
} relay_card;

/* Serves round trips of relay_measure in another process, whose card came. The answer goes to the socket. */
int relay_serve(dp_dev *dev, int sock, relay_card *c, dp_error *err);
/* Measures n bare round trips of 8 bytes by this thread, and then n through another thread. Returns the medians in ns. */
int relay_measure(dp_dev *dev, int sock, int n, int64_t *bare, int64_t *relayed, dp_error *err);

#endif

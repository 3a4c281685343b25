/* The broker of virtual queue pairs (dp_vqp.h): a thread that serves the clients of this process. */
#ifndef RFAAS_DP_BROKER_H
#define RFAAS_DP_BROKER_H

#include "dp_channel.h"
#include "dp_vqp.h"

typedef struct dp_broker dp_broker;
typedef struct dp_brokered dp_brokered; /* a channel whose client side belongs to another process */

/* Starts the thread. The caller keeps the device open until dp_broker_stop. */
int dp_broker_start(dp_dev *dev, dp_broker **out, dp_error *err);
/* Ends all virtual queue pairs, and waits until they are destroyed. */
void dp_broker_stop(dp_broker *b);

/* Makes the memory and the queue pair of a channel. One thread uses it until dp_brokered_serve. DP_UNSUPPORTED: its slots are too small for the
 * message that moves it to a private queue pair. */
int dp_brokered_create(dp_broker *b, const dp_channel_config *cfg, dp_brokered **out, dp_error *err);
/* Ends a channel that is not served. */
void dp_brokered_drop(dp_brokered *c);
/* Like dp_channel_offer and dp_channel_connect. */
int dp_brokered_offer(dp_brokered *c, void *blob, uint32_t *len, dp_error *err);
int dp_brokered_connect(dp_brokered *c, const void *blob, uint32_t len, dp_error *err);
/* Describes the connected channel for dp_channel_unpack in another process, and has the broker serve it from now on. fds has room for
 * DP_PACKED_FDS; the caller closes them after it has passed them on. The channel ends when no process has the second one, or a client has
 * closed it. *c becomes NULL. */
int dp_brokered_serve(dp_brokered **c, dp_packed_channel *out, int *fds, dp_error *err);

/* Counters since the start. */
typedef struct dp_broker_stats {
    uint64_t channels;  /* served now */
    uint64_t requests;  /* posted */
    uint64_t refused;   /* malformed */
    uint64_t completions;
    uint64_t failed;    /* queue pairs that have failed */
} dp_broker_stats;
void dp_broker_get_stats(dp_broker *b, dp_broker_stats *out);

#endif

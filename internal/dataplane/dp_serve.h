/* The worker's side: one server, one channel, one thread.
 *
 * dp_server_create takes the client's blob and connects; dp_server_blob is the answer for the client.
 * dp_server_run serves until it is stopped, the client is gone or broke the protocol. */
#ifndef RFAAS_DP_SERVE_H
#define RFAAS_DP_SERVE_H

#include "dp_channel.h"

typedef uint32_t (*dp_function)(void *args, uint32_t size, void *res);

typedef struct dp_server dp_server;

typedef struct dp_server_config {
    dp_wait_mode mode;
    uint32_t max_depth; /* what a client may ask for at most; 0: the protocol's limits */
    uint32_t max_eager;
    uint64_t max_bulk;
} dp_server_config;

typedef struct dp_server_stats {
    /* Number of the last call that began, from 1, << 16 | its function: that function runs while the number is above
     * `calls`. */
    uint64_t running;
    uint64_t calls, refused, failed, bytes_in, bytes_out;
    uint64_t blocked_waits;
} dp_server_stats;

int dp_server_create(dp_dev *dev, const dp_server_config *cfg, const void *client_blob, uint32_t len, dp_server **out,
                     dp_error *err);
/* dp_server_prepare makes all of a server but its connection, for a client whose channel has these sizes: a multiple of 64 bytes
 * each but for the depth. dp_server_connect is dp_server_create with one that is there: *server is used if it fits the client,
 * else it is destroyed and another one made, also if it is NULL. After an error *server is NULL. */
int dp_server_prepare(dp_dev *dev, const dp_channel_config *sizes, dp_server **out, dp_error *err);
int dp_server_connect(dp_dev *dev, const dp_server_config *cfg, const void *client_blob, uint32_t len, dp_server **server,
                      dp_error *err);
/* dp_server_region returns how many bytes a server registers on verbs for a channel of these sizes: the requests,
 * and as much again for staging; 0 for depth 0. dp_server_region_for takes the sizes from a client's blob, and
 * returns 0 for a client that would be refused. The worker's zygote prepares memory of these
 * sizes. */
enum { DP_SERVER_REGIONS = 2 };
uint64_t dp_server_region(const dp_channel_config *sizes);
uint64_t dp_server_region_for(const dp_server_config *cfg, const void *client_blob, uint32_t len);
int dp_server_blob(dp_server *s, void *blob, uint32_t *len, dp_error *err);
/* Functions by index; the table is the caller's and stays while the server runs. n at most 65536. */
void dp_server_set_functions(dp_server *s, const dp_function *table, uint32_t n);
/* dp_server_run returns DP_OK after dp_server_stop or dp_server_finish, DP_PEER_GONE when the client went away, DP_PROTOCOL, ... */
int dp_server_run(dp_server *s);
/* After the running call. Async-signal-safe, any thread. */
void dp_server_stop(dp_server *s);
/* After the calls that have arrived, and those that arrive within a moment. Any thread. */
void dp_server_finish(dp_server *s);
/* Between leases: after dp_server_suspend the server serves what has arrived, calls `suspended`, and then blocks and reads nothing that
 * its client sends. dp_server_resume lets it serve the same client again, whose new blob differs from the first one in its
 * generation only. Requests that arrive before it has resumed are served then, except those of earlier generations, which are
 * refused. Both return at once. Any thread, one at a time; each waits until the server has begun what was asked before. */
void dp_server_suspend(dp_server *s);
int dp_server_resume(dp_server *s, const void *client_blob, uint32_t len, dp_error *err);
/* Sets what the serving thread calls when it has suspended. Before dp_server_run. */
void dp_server_on_suspended(dp_server *s, void (*suspended)(void *arg), void *arg);
/* Whether dp_server_prepare made it, and so all that it has but the client's memory. */
bool dp_server_made_ahead(const dp_server *s);
/* Makes the pages of the client's memory present that calls use first, up to 4 MiB of slots and the mailbox, as far as the client has
 * them: after connecting, by who has time for it. Other pages come with their first use. */
void dp_server_touch(dp_server *s);
/* Returns a descriptor that is readable once the client's process has ended, also while a function runs; -1 where there is none
 * (verbs). The server owns it. */
int dp_server_peer_fd(const dp_server *s);
/* Written by the serving thread only; stats may be in memory shared with the executor. */
void dp_server_share_stats(dp_server *s, dp_server_stats *shared);
void dp_server_destroy(dp_server *s);

/* What rfaas_function.h's calls act on: the invocation that runs on this thread, or NULL. */
typedef struct dp_invocation {
    uint32_t capacity;
    uint32_t room; /* bytes that may be written at res without touching anything else's memory */
    int failed;
    uint32_t message_len;
    char message[512];
} dp_invocation;
dp_invocation *dp_current_invocation(void);

#endif

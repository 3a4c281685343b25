/* The worker's side: one server, one channel, one thread.
 *
 * dp_server_create takes the client's blob and connects; dp_server_blob is the answer for the client.
 * dp_server_run serves until it is stopped, the client is gone or broke the protocol. */
#ifndef RFAAS_DP_SERVE_H
#define RFAAS_DP_SERVE_H

#include "dp_channel.h"
#include "dp_claim.h"

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
/* dp_server_prepare makes a server without a connection, for a client whose channel has these sizes (multiples of 64, except the
 * depth). dp_server_connect is dp_server_create with a prepared server: it uses *server if that fits the client. Otherwise, or if
 * *server is NULL, it makes a new one and destroys the old. After an error *server is NULL. */
int dp_server_prepare(dp_dev *dev, const dp_channel_config *sizes, dp_server **out, dp_error *err);
int dp_server_connect(dp_dev *dev, const dp_server_config *cfg, const void *client_blob, uint32_t len, dp_server **server,
                      dp_error *err);
/* dp_server_region returns how many bytes a server registers on verbs for a channel of these sizes: the requests,
 * and as much again for staging; 0 for depth 0. dp_server_region_for takes the sizes from a client's blob, and
 * returns 0 for a client that would be refused. The zygote prepares memory of these sizes. */
enum { DP_SERVER_REGIONS = 2 };
uint64_t dp_server_region(const dp_channel_config *sizes);
uint64_t dp_server_region_for(const dp_server_config *cfg, const void *client_blob, uint32_t len);
int dp_server_blob(dp_server *s, void *blob, uint32_t *len, dp_error *err);
/* Functions by index; the table is the caller's and stays while the server runs. n at most 65536. */
void dp_server_set_functions(dp_server *s, const dp_function *table, uint32_t n);
/* dp_server_run returns DP_OK after dp_server_stop or dp_server_finish, DP_PEER_GONE if the client has ended, DP_PROTOCOL, ... */
int dp_server_run(dp_server *s);
/* Ends the server after the running call. Async-signal-safe, any thread. */
void dp_server_stop(dp_server *s);
/* Makes dp_server_run return once no call has arrived for 2 ms. Any thread. */
void dp_server_finish(dp_server *s);
/* Between leases: after dp_server_suspend the server serves the requests that have arrived, calls `suspended`, and blocks. It then reads
 * nothing that its client sends. dp_server_resume makes it serve the same client again, whose new blob may differ only in its
 * generation. The server then serves requests that arrived meanwhile, and refuses those of earlier generations. Each function first waits
 * until the server has begun what the previous one asked for. It does not wait for what it asks for itself. Any thread, one at a time.
 *
 * Late servers (verbs): if the client's blob has no queue pair, but only sizes, the server is not connected. It serves no client and can only be
 * suspended. The first dp_server_resume connects it to the client that its blob names, without ioctl, so a sealed worker can call it. Then
 * dp_server_blob gives the blob for that client. */
void dp_server_suspend(dp_server *s);
int dp_server_resume(dp_server *s, const void *client_blob, uint32_t len, dp_error *err);
/* Reports whether the server is late and not connected yet. */
bool dp_server_is_late(const dp_server *s);
/* Sets the function that the serving thread calls when it has suspended. Before dp_server_run. */
void dp_server_on_suspended(dp_server *s, void (*suspended)(void *arg), void *arg);
/* Reports whether dp_server_prepare made the server. */
bool dp_server_made_ahead(const dp_server *s);
/* Maps the pages of the client's memory that calls use first: the mailbox and up to 4 MiB of slots, as far as the client has allocated
 * them. Other pages are mapped when they are first used. After connecting, by a thread that has time. */
void dp_server_touch(dp_server *s);
/* Returns a descriptor that is readable once the client's process has ended, also while a function runs; -1 where there is none
 * (verbs). The server owns it. */
int dp_server_peer_fd(const dp_server *s);
/* dp_server_watch says whether another thread waits for events of dp_server_peer_fd. While it does, an idle server on shm wakes every 2 s instead of four
 * times a second. That thread calls dp_server_look whenever the descriptor becomes readable. */
void dp_server_watch(dp_server *s, bool on);
void dp_server_look(dp_server *s);
/* Written by the serving thread only; stats may be in memory shared with the executor. */
void dp_server_share_stats(dp_server *s, dp_server_stats *shared);
/* dp_server_share_knock lets another process resume the suspended server: it raises claimed and rings (dp_claim.h). The server then takes
 * the client's next generation. */
void dp_server_share_knock(dp_server *s, dp_knock *shared);
void dp_server_destroy(dp_server *s);

/* What rfaas_function.h's calls act on: the invocation that runs on this thread, or NULL. */
typedef struct dp_invocation {
    uint32_t capacity;
    uint32_t room; /* bytes that may be written at res without touching anything else's memory */
    int failed;
    int32_t code;         /* of rfaas_fail_code, valid if failed */
    uint32_t message_len; /* bytes of its text */
    uint8_t which;        /* of a chain: the function that runs, DP_CHAIN_*. Not set for other calls */
    char message[DP_FAILURE_TEXT + DP_FAILURE_TAIL];
} dp_invocation;
dp_invocation *dp_current_invocation(void);
/* dp_invoke calls a function without a server, as rfaas-worker does to prepare a seed. inv->capacity is set. Returns what the function
 * returns. */
uint32_t dp_invoke(dp_function f, void *args, uint32_t size, void *res, dp_invocation *inv);

#endif

/* Layer: beside the channel (dp_channel.h) and, like it, on the fabric (dp_fabric.h). The channel does not use it. It is the connection to
 * the resource manager's memory and to claim regions. Packages link, grant and executor use it through raw.go, and the C library uses it to claim
 * (client/c/claimant.c). Invocations do not use it.
 *
 * A queue pair for control: remote reads, writes and atomics one at a time, each waited for. Simple and safe rather than
 * fast: data is copied through memory of the connection, so that a late operation cannot touch the caller's memory.
 *
 * One thread at a time, except where dp_raw_serve says otherwise. */
#ifndef RFAAS_DP_RAW_H
#define RFAAS_DP_RAW_H

#include "dp_fabric.h"

#define DP_RAW_BATCH 16                /* atomics of one call, and writes that are not waited for */
#define DP_RAW_POSTED_MAX 256          /* bytes of such a write */
#define DP_RAW_CHUNK 4096u              /* larger reads and writes are made in pieces */
#define DP_RAW_PIECE (128u << 10)       /* bulk reads are made in pieces of this size, */
#define DP_RAW_PIECES 8                 /* at most this many at a time */
#define DP_RAW_ANSWERS (64u << 10)      /* tcp: bytes of answers that a peer may leave unreceived beyond the socket's buffer */
/* Most memory of a connection on tcp: its buffers, encrypted or not. The kernel's socket buffers come on top of it. */
#define DP_RAW_TCP_BYTES (288u << 10)

typedef struct dp_raw dp_raw;

/* The peer may reach the n regions of `expose`, all of domain d, and on verbs all of d. */
int dp_raw_create(dp_domain *d, dp_mem *const *expose, uint32_t n, dp_raw **out, dp_error *err);
/* dp_raw_create for connections by which a peer reads much: both sides use it. dp_raw_read then has DP_RAW_PIECES reads of DP_RAW_PIECE bytes
 * under way at a time, so that it does not wait for a round trip after each. This side uses about 2 MiB for that, unless it exposes memory: then it does not
 * read in this way. */
int dp_raw_create_bulk(dp_domain *d, dp_mem *const *expose, uint32_t n, dp_raw **out, dp_error *err);
void dp_raw_destroy(dp_raw *r);
int dp_raw_export(dp_raw *r, void *blob, uint32_t *len, dp_error *err);
int dp_raw_connect(dp_raw *r, const void *blob, uint32_t len, dp_error *err);
/* dp_raw_cancel makes a dp_raw_connect in another thread return early. The connection can only be destroyed
 * afterwards. */
void dp_raw_cancel(dp_raw *r);
/* 0, or why the connection is of no use any more. Looks whether the peer still exists. */
int dp_raw_broken(dp_raw *r);

/* All return DP_OK when the operation is complete; DP_INVALID when the peer refused it (key, bounds, rights); DP_DEADLINE
 * (dp_now_ns), DP_PEER_GONE or DP_CONNECTION when it may or may not have happened. After any of these the connection is
 * over. */
int dp_raw_read(dp_raw *r, void *dst, uint64_t len, uint64_t raddr, uint32_t rkey, int64_t deadline_ns);
/* Reads n parts, and writes their bytes to dst, one part after the other. Up to DP_RAW_BATCH reads are under way at a time. If there are
 * several parts, none is empty. */
typedef struct dp_raw_part {
    uint64_t addr, len;
    uint32_t rkey;
} dp_raw_part;
int dp_raw_read_parts(dp_raw *r, void *dst, uint32_t n, const dp_raw_part *parts, int64_t deadline_ns);
int dp_raw_write(dp_raw *r, const void *src, uint64_t len, uint64_t raddr, uint32_t rkey, int64_t deadline_ns);
/* Writes up to DP_RAW_CHUNK bytes, and then rings the bell of the peer's server (dp_raw_serve, verbs). */
int dp_raw_write_ring(dp_raw *r, const void *src, uint32_t len, uint64_t raddr, uint32_t rkey, int64_t deadline_ns);
/* Adds add[i] to the word at raddr[i], i < n <= DP_RAW_BATCH, in this order. *done is how many are known to have happened, and
 * old[i] is valid for those. */
int dp_raw_fetch_add(dp_raw *r, uint32_t n, const uint64_t *raddr, uint32_t rkey, const uint64_t *add, uint64_t *old,
                     uint32_t *done, int64_t deadline_ns);
/* Sets the word at raddr to `desired` if it is `expected`. *old is what the word was before. */
int dp_raw_compare_swap(dp_raw *r, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired, uint64_t *old, int64_t deadline_ns);

/* dp_raw_post writes up to DP_RAW_POSTED_MAX bytes without waiting. DP_BUSY: DP_RAW_BATCH writes are under way. dp_raw_reap
 * looks what has become of them: how many are still under way, or a negative status. */
int dp_raw_post(dp_raw *r, const void *src, uint32_t len, uint64_t raddr, uint32_t rkey);
int dp_raw_reap(dp_raw *r);

/* ---- serving ---- */

/* A server is a thread that executes the operations of peers on devices with DP_CAP_POLLED_TARGET. On verbs the device executes them, and the
 * server only sees dp_raw_write_ring. It serves many connections. It sleeps in epoll_wait while nothing arrives. */
typedef struct dp_raw_server dp_raw_server;

int dp_raw_server_start(dp_raw_server **out, dp_error *err);
/* Destroy the connections that it serves first. */
void dp_raw_server_stop(dp_raw_server *s);
/* dp_raw_server_wakes counts the returns of epoll_wait. Any thread. */
uint64_t dp_raw_server_wakes(const dp_raw_server *s);
/* dp_raw_serve lets the server serve a connected r until dp_raw_destroy. During that time one thread at a time may also use dp_raw_post,
 * dp_raw_reap and dp_raw_broken. Operations that wait return DP_UNSUPPORTED. A peer that breaks the protocol, or that asks for more than
 * DP_RAW_ANSWERS bytes without receiving them, loses its own connection. bell: futex that the server's thread raises and wakes each time it has executed
 * operations of this peer, on verbs each time the peer has rung, or NULL. It stays until dp_raw_destroy. */
int dp_raw_serve(dp_raw *r, dp_raw_server *s, uint32_t *bell, dp_error *err);

#endif

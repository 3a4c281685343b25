/* Virtual queue pairs: a process uses a connected queue pair that another process, the broker, owns.
 *
 *   client process                     memory file                       broker (a thread of the agent)
 *   dp_vqp.c: a fabric device   ── requests, receives ──▶ checks each request, posts it on the real queue pair
 *                               ◀── completions ─────────  copies the completions of that queue pair
 *                               ◀── one byte on a socket pair wakes the side that sleeps; end of file: the other side has ended ──▶
 *
 * The memory file has the page below, the rings, and the client's two regions: the results, which the worker writes, and the staging area,
 * which posts read. The broker has registered both. Each side treats what the other writes there as hostile: it copies an entry once and
 * checks the copy, and keeps its own indices.
 *
 * Each virtual queue pair has a queue pair, a completion queue and a protection domain of its own. So a client can fill only its own queues,
 * and a completion can only reach the client that owns the queue. The broker connects a queue pair once, before it serves the client: after the
 * worker's death the client makes a queue pair of its own (dp_promotion_replace).
 *
 * The broker may be stopped, or may have ended. Its thread increments `beat` in the page while it works. A client with calls in flight that sees no
 * increment for 2 s closes the queue pair. The word `gate` decides about each request, by atomic operations: before the broker posts requests, it
 * claims them by adding their number to `gate`, and to close the queue pair the client sets DP_VQP_CLOSED in it, after which the broker can claim no
 * more. So each request is either claimed before, and may be executed, or is never posted.
 */
#ifndef RFAAS_DP_VQP_H
#define RFAAS_DP_VQP_H

#include "dp_fabric.h"

#define DP_VQP_MAGIC 0x51565246u /* "FRVQ" */
#define DP_VQP_VERSION 2u
#define DP_VQP_CLOSED (1ull << 32) /* in dp_vqp_page.gate: the client does not use the queue pair any more */
#define DP_VQP_BEAT_NS 100000000    /* between two beats of a broker that works */
#define DP_VQP_INLINE 256          /* bytes that travel in a request */
#define DP_VQP_MESSAGE (1u << 20)  /* bytes of one write */

enum { DP_VQP_WRITE = 1, DP_VQP_WRITE_IMM };
enum { DP_VQP_BYTES = 0, DP_VQP_RESULTS, DP_VQP_STAGING }; /* where a piece lies */

typedef struct dp_vqp_piece {
    uint64_t at;    /* offset in bytes[], in the results or in the staging area */
    uint32_t len;
    uint32_t where; /* DP_VQP_BYTES .. DP_VQP_STAGING */
} dp_vqp_piece;

typedef struct dp_vqp_request {
    uint32_t op;    /* DP_VQP_WRITE, DP_VQP_WRITE_IMM */
    uint32_t flags; /* DP_SIGNALED, DP_MORE */
    uint32_t n;     /* pieces */
    uint32_t imm;
    uint64_t raddr;
    uint64_t wr_id;
    uint32_t rkey;
    uint32_t reserved[3];
    dp_vqp_piece piece[2];
    uint8_t bytes[DP_VQP_INLINE];
    uint8_t pad[48];
} dp_vqp_request;
_Static_assert(sizeof(dp_vqp_request) == 384, "request of a virtual queue pair");

/* Why a request was refused. */
typedef enum dp_vqp_reason {
    DP_VQP_GOOD = 0,
    DP_VQP_BAD_OPERATION,
    DP_VQP_BAD_FLAGS,
    DP_VQP_BAD_PIECES, /* their number or place */
    DP_VQP_BAD_LENGTH, /* more than a message may have */
    DP_VQP_BAD_LOCAL,  /* beyond the client's memory */
    DP_VQP_BAD_REMOTE, /* beyond the peer's region */
    DP_VQP_BAD_KEY,
    DP_VQP_BAD_INDEX, /* more requests than the ring holds */
} dp_vqp_reason;
const char *dp_vqp_reason_text(uint32_t reason);

typedef struct dp_vqp_completion {
    uint64_t wr_id;
    int32_t status;
    uint32_t op; /* a dp_op */
    uint32_t imm, byte_len;
    uint32_t reason; /* a dp_vqp_reason, with DP_INVALID */
    uint32_t reserved;
} dp_vqp_completion;
_Static_assert(sizeof(dp_vqp_completion) == 32, "completion of a virtual queue pair");

/* Indices are free running. Each cache line is written by one side, except that both write `gate`, and both clear the words `..._sleeps`. */
typedef struct dp_vqp_page {
    /* the client */
    _Alignas(DP_CACHE_LINE) uint32_t posted; /* requests */
    uint32_t receives;                       /* receives posted since the broker made the queue pair */
    uint32_t taken;                          /* completions */
    uint32_t client_sleeps;                  /* 1: the broker sends a byte after it has added a completion. Either side clears it */
    /* the broker */
    _Alignas(DP_CACHE_LINE) uint32_t served; /* requests */
    uint32_t done;                           /* completions */
    uint32_t broker_sleeps;                  /* 1: the client sends a byte after it has posted */
    int32_t broken;                          /* 0, or why the queue pair has failed */
    uint32_t sent, arrived;                  /* dp_qp.posted and .arrived of the last probe */
    uint32_t blob_len;                       /* address of the queue pair */
    uint32_t beat;                           /* grows while the broker's thread works */
    uint64_t gate;                           /* requests that the broker has claimed, and DP_VQP_CLOSED */
    _Alignas(DP_CACHE_LINE) uint8_t blob[DP_BLOB_MAX];
} dp_vqp_page;

/* Where things are in the memory file. */
typedef struct dp_vqp_layout {
    uint32_t n_requests, n_completions; /* powers of two */
    uint64_t requests_at, completions_at, results_at, staging_at, size;
} dp_vqp_layout;

static inline uint32_t dp_vqp_ring(uint32_t least) {
    uint32_t n = 1;
    while (n < least)
        n *= 2;
    return n;
}

/* region: bytes of the results, and of the staging area. */
static inline dp_vqp_layout dp_vqp_layout_of(uint32_t max_send, uint32_t max_recv, uint64_t region) {
    dp_vqp_layout l = {.n_requests = dp_vqp_ring(max_send), .n_completions = dp_vqp_ring(max_send + max_recv)};
    const uint64_t page = 4095, whole = (region + page) & ~page;
    l.requests_at = (sizeof(dp_vqp_page) + DP_CACHE_LINE - 1) & ~(uint64_t)(DP_CACHE_LINE - 1);
    l.completions_at = l.requests_at + l.n_requests * sizeof(dp_vqp_request);
    l.results_at = (l.completions_at + l.n_completions * sizeof(dp_vqp_completion) + page) & ~page;
    l.staging_at = l.results_at + whole;
    l.size = l.staging_at + whole;
    return l;
}

/* In dp_packed_qp.bytes. Descriptors: the memory file, the client's end of the socket pair. */
typedef struct dp_vqp_packed {
    uint32_t magic, version;
    uint32_t provider; /* of the real queue pair */
    uint32_t max_send, max_recv, max_inline;
    uint32_t rkey; /* of the results */
    uint32_t reserved;
    uint64_t base;   /* address of the results for the peer */
    uint64_t region; /* bytes of the results, and of the staging area */
} dp_vqp_packed;
#define DP_VQP_FDS 2

/* Opens a device whose queue pairs are virtual ones of the given provider. They are made by dp_qp_unpack only, which exposes two regions: the
 * results and the staging area. The device supports writes, but no reads or atomics. A queue pair cannot be reset or connected. */
int dp_vqp_open(dp_provider_id of, dp_dev **out, dp_error *err);
int dp_vqp_make(dp_provider_id of, dp_dev **out, dp_error *err); /* called through dp_vqp_open */
/* Reports whether the device is one of dp_vqp_open. */
bool dp_vqp_is(const dp_dev *dev);
/* Ends a virtual queue pair, also for other processes that could unpack it. The broker posts nothing more, and destroys the real queue pair. */
void dp_vqp_close(dp_qp *qp);
/* Reports whether the queue pair was closed because its broker has made no progress. */
bool dp_vqp_given_up(const dp_qp *qp);

#endif

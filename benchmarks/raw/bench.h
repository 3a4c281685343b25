/* The measuring core of `rfaas bench`. It measures a real channel and, between the same two threads, the floors: careful
 * programs that move the same bytes and do nothing else.
 *
 * A client (this process) and a peer (libexec/rfaas-bench-peer, on a core of its own) share a socket, a memfd and two
 * eventfds. Between two machines they share only the socket, and only the floors of verbs exist. The peer serves a
 * channel with dp_server_run, as a worker does. Its function DP_BENCH_FN_FLOOR is the floor's server: it performs the
 * requested number of bare round trips and returns. So the same threads execute calls and floors, and the peer needs no
 * second mode and no restart.
 *
 *    client                                         peer, in dp_server_run
 *      | call FLOOR {kind, sizes, rounds} ────────▶   | area->ready = run
 *      | bare round trip 1 .. rounds  ◀──────────▶   | bare round trip 1 .. rounds
 *      |                        ◀──────────────────   | returns, like any function
 *      | call ECHO, EMPTY ... (the measurement)       |
 *
 * The measurement and the floors' clients use the same buffers. All memory is prefaulted.
 * Threads: a dp_bench belongs to the thread that opened it.
 */
#ifndef RFAAS_DP_BENCH_H
#define RFAAS_DP_BENCH_H

#include "dp_serve.h"

/* Functions of the peer. */
enum { DP_BENCH_FN_ECHO = 0, DP_BENCH_FN_EMPTY = 1, DP_BENCH_FN_FLOOR = 2, DP_BENCH_FN_VERBS = 3,
       DP_BENCH_FN_DELAYED = 4, DP_BENCH_FN_BLOCKED = 5, DP_BENCH_FN_REPLY = 6, DP_BENCH_FNS = 7 };

typedef enum dp_bench_kind {
    DP_BENCH_FLAG = 1, /* two flags on separate cache lines, no payload: the calibration */
    DP_BENCH_NEAR,     /* flag word directly followed by the payload: 8 bytes share the flag's line */
    DP_BENCH_APART,    /* flag on a line of its own, payload aligned */
    DP_BENCH_RING,     /* two rings with a single producer and consumer, entries of a word and the payload */
    DP_BENCH_EVENTFD,  /* as APART, but both sides block in read of an eventfd */
    DP_BENCH_FUTEX,    /* as APART, but both sides block in FUTEX_WAIT on the flag */
    DP_BENCH_IMM,      /* verbs: bare write-with-immediate, both polling */
    DP_BENCH_IMM_WARM, /* verbs: the same, both blocked on their completion channel */
    DP_BENCH_IMM_WINDOW, /* verbs: write-with-immediate, `window` round trips in flight, both polling */
    DP_BENCH_READ,     /* reads the peer's memory; the peer does nothing; on shm a copy */
    DP_BENCH_FETCH_ADD, /* adds to 8 bytes of the peer's memory and returns the old value */
} dp_bench_kind;

/* One run of a floor: the argument of DP_BENCH_FN_FLOOR. */
typedef struct dp_bench_run {
    uint32_t kind;
    uint32_t size;   /* bytes from client to peer */
    uint32_t reply;  /* bytes back */
    uint32_t window; /* RING, IMM_WINDOW: round trips in flight; RING: at most `entries` */
    uint32_t entries; /* RING: entries of each ring, a power of two */
    uint32_t pad;
    uint64_t rounds;
    uint64_t run; /* number of this run; the peer stores it to `ready` just before it begins */
} dp_bench_run;

/* Head of the shared memory, each word on a cache line of its own. Boxes or rings follow. */
typedef struct dp_bench_area {
    _Alignas(64) uint64_t ready;
    _Alignas(64) uint64_t ping; /* FLAG */
    _Alignas(64) uint64_t pong;
    _Alignas(64) dp_server_stats stats; /* of the peer's server */
    _Alignas(64) uint64_t delay; /* ns that DP_BENCH_FN_DELAYED takes */
    int64_t limit; /* CLOCK_MONOTONIC, ns: spinners in a floor give up then */
} dp_bench_area;
#define DP_BENCH_HEAD 4096
_Static_assert(sizeof(dp_bench_area) <= DP_BENCH_HEAD, "boxes and rings follow the head");

/* Descriptors that the peer inherits. */
enum { DP_BENCH_FD_SOCKET = 3, DP_BENCH_FD_MEMORY = 4, DP_BENCH_FD_PING = 5, DP_BENCH_FD_PONG = 6 };

typedef struct dp_bench_fds {
    int socket; /* seqpacket */
    int memory; /* memfd of dp_bench_memory() bytes; -1: the peer is on another machine */
    int ping;   /* eventfd that wakes the peer */
    int pong;   /* eventfd that wakes the client */
} dp_bench_fds;

typedef struct dp_bench_config {
    uint32_t slots;   /* of the channel */
    uint32_t depth;   /* calls in flight, at most slots */
    uint32_t eager;
    uint32_t payload; /* largest payload or result of a call */
    uint64_t bulk;
    dp_wait_mode mode; /* of both sides */
    int peer_cpu;      /* to which the peer pins itself; -1: none */
    /* Calls take their payload from registered memory and read the result where it arrived, like a bare ping-pong on a
     * network adapter, instead of copying from and to the caller's memory. */
    bool registered;
    bool calls_only; /* no bare queue pair beside the channel */
} dp_bench_config;

/* Settings that the peer's machine chooses instead of the client: the device, and the CPU of the peer (-1: not pinned). */
typedef struct dp_bench_here {
    dp_dev_options device;
    int cpu;
} dp_bench_here;

typedef struct dp_bench dp_bench;

/* Bytes of shared memory that runs with these sizes need. */
uint64_t dp_bench_memory(uint32_t payload, uint32_t depth);

/* dp_bench_open connects to the peer that holds the other end of fds. The descriptors stay the caller's. */
int dp_bench_open(dp_dev *dev, const dp_dev_options *opts, const dp_bench_config *cfg, const dp_bench_fds *fds,
                  dp_bench **out, dp_error *err);
void dp_bench_close(dp_bench *b);
/* dp_bench_abort ends every blocked call of the bench with an error, when the peer is gone. Any thread may call it. */
void dp_bench_abort(dp_bench *b);

/* dp_bench_floor makes one batch of bare round trips: `warm` untimed ones, then `n`. *ns is the time of the n together. With
 * samples (n long) each round trip is timed too: the clock is read once between two of them. With kind RING or IMM_WINDOW as
 * many as the depth are in flight, and a sample is the time from an entry's push to its reply's pop. A batch of spinners on
 * shared memory that takes longer than DP_BENCH_BATCH_NS, plus time for copies, returns DP_DEADLINE: something else uses the
 * processors. The bench can be used afterwards. */
int dp_bench_floor(dp_bench *b, dp_bench_kind kind, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n,
                   int64_t *samples, int64_t *ns, dp_error *err);
/* dp_bench_calls does the same with calls of a function whose result has `reply` bytes; `depth` in flight. */
int dp_bench_calls(dp_bench *b, uint32_t function, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n, int64_t *samples,
                   int64_t *ns, dp_error *err);
/* dp_bench_verify makes one echo call and compares its result byte by byte. */
int dp_bench_verify(dp_bench *b, uint32_t size, dp_error *err);
/* dp_bench_delay sets how long each call of DP_BENCH_FN_DELAYED takes, so that a guard can be shown to fail. */
void dp_bench_delay(dp_bench *b, uint64_t ns);
/* dp_bench_blocked returns how often client and peer have blocked while waiting for calls. It asks a peer on another machine by a
 * call; 0 if the peer does not answer. */
void dp_bench_blocked(dp_bench *b, uint64_t *client, uint64_t *peer);
/* Median cost of reading the clock, ns. */
double dp_bench_clock_ns(void);

/* dp_bench_serve runs the peer until its client is gone. An error is also sent to the client. here is NULL if the client
 * chooses device and CPU. */
int dp_bench_serve(const dp_bench_fds *fds, const dp_bench_here *here, dp_error *err);

/* ---- between the files of the bench ---- */

#define DP_BENCH_MAGIC 0x48434e42u /* "BNCH" */
/* Largest payload of all calls in flight together that a peer accepts, bytes. */
#define DP_BENCH_PAYLOAD_MAX (1ull << 30)

/* First message, client to peer. */
typedef struct dp_bench_hello {
    uint32_t magic;
    int32_t mode;
    int32_t peer_cpu;
    uint32_t payload;
    uint32_t depth;
    char provider[16];
    char device[64];
    int32_t port, gid_index, pkey_index, traffic_class, service_level, mtu;
    uint32_t blob_len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
} dp_bench_hello;

/* Answer. */
typedef struct dp_bench_answer {
    uint32_t magic;
    int32_t status;
    uint32_t blob_len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    char msg[244];
} dp_bench_answer;

/* Memory and descriptors of a floor's loops, on either side. */
typedef struct dp_bench_side {
    dp_bench_area *area;
    uint64_t size;     /* of the shared memory */
    int ping, pong;    /* eventfds */
    uint8_t *in, *out; /* client only */
    uint8_t *rest; /* peer only: private memory, as large as the largest payload */
    struct dp_bench_verbs *verbs; /* NULL on shm */
} dp_bench_side;

/* Every loop gives up after this time without progress of the other side. */
#define DP_BENCH_PATIENCE_NS 10000000000
/* Spinners on shared memory give up this long after the batch began, plus a nanosecond for each byte that is copied. A batch takes
 * some milliseconds. */
#define DP_BENCH_BATCH_NS 500000000

/* Both return DP_OK, or the cause of their end: DP_PEER_GONE, DP_CONNECTION. The client times all but the first `warm`. */
int dp_bench_floor_server(const dp_bench_side *s, const dp_bench_run *r);
int dp_bench_floor_client(const dp_bench_side *s, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns);
/* Zeroes the words in which a run counts. */
void dp_bench_floor_reset(const dp_bench_side *s, const dp_bench_run *r);
/* What a server does with `size` bytes at src: it returns `reply` bytes at dst. What a result has more than the payload comes from memory of
 * the peer, and what a payload has more is copied there. So a server reads every byte of the payload, whatever the sizes. */
static inline __attribute__((always_inline)) void dp_bench_move(uint8_t *rest, uint8_t *dst, const uint8_t *src, uint32_t size, uint32_t reply) {
    __builtin_memcpy(dst, src, size < reply ? size : reply);
    if (size < reply)
        __builtin_memcpy(dst + size, rest, reply - size);
    else if (size > reply)
        __builtin_memcpy(rest, src + reply, size - reply);
}
/* Bytes of a ring entry for that payload. */
static inline uint64_t dp_bench_stride(uint32_t size) { return (size + sizeof(uint64_t) + 63) & ~63ull; }

/* A bare queue pair on a verbs device, and its address for the peer. */
typedef struct dp_bench_verbs dp_bench_verbs;
typedef struct dp_bench_card {
    uint32_t qpn, psn, rkey, lid;
    uint64_t addr;
    uint8_t gid[16];
} dp_bench_card;
/* With room for `depth` round trips of that payload in flight. */
int dp_bench_verbs_create(dp_dev *dev, uint32_t payload, uint32_t depth, dp_bench_verbs **out, dp_bench_card *card,
                          dp_error *err);
int dp_bench_verbs_connect(dp_bench_verbs *v, const dp_bench_card *peer, dp_error *err);
void dp_bench_verbs_destroy(dp_bench_verbs *v);
/* Ends the wait of a thread in dp_bench_verbs_client. Any thread may call it. */
void dp_bench_verbs_abort(dp_bench_verbs *v);
int dp_bench_verbs_server(dp_bench_verbs *v, const dp_bench_run *r);
int dp_bench_verbs_client(dp_bench_verbs *v, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns);

#endif

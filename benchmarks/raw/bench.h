/* The measuring core of `rfaas bench`. It measures a real channel and, between the same two threads, the floors: what a
 * careful program could do with the same bytes and nothing else.
 *
 * A client (this process) and a peer (libexec/rfaas-bench-peer, on a core of its own) share a socket, a memfd and two
 * eventfds. Between two machines they share only the socket, and only the floors of verbs exist. The peer serves a
 * channel with dp_server_run, as a worker does. Its function DP_BENCH_FN_FLOOR is the floor's server: it performs the
 * wanted number of bare round trips and returns. So the same threads execute calls and floors, and the peer needs no
 * second mode, no stop and no restart.
 *
 *    client                                         peer, in dp_server_run
 *      | call FLOOR {kind, sizes, rounds} ────────▶   | area->ready = run
 *      | bare round trip 1 .. rounds  ◀──────────▶   | bare round trip 1 .. rounds
 *      |                        ◀──────────────────   | returns, as any function
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
       DP_BENCH_FN_DELAYED = 4, DP_BENCH_FN_BLOCKED = 5, DP_BENCH_FNS = 6 };

typedef enum dp_bench_kind {
    DP_BENCH_FLAG = 1, /* two flags on a line each, no payload: the calibration */
    DP_BENCH_NEAR,     /* flag word with the payload right behind it: 8 bytes share the flag's line */
    DP_BENCH_APART,    /* flag on a line of its own, payload aligned */
    DP_BENCH_RING,     /* two rings of single producer and consumer, entries of a word and the payload */
    DP_BENCH_EVENTFD,  /* as APART, but both sides block in read of an eventfd */
    DP_BENCH_FUTEX,    /* as APART, but both sides block in FUTEX_WAIT on the flag */
    DP_BENCH_IMM,      /* verbs: bare write-with-immediate, both polling */
    DP_BENCH_IMM_WARM, /* verbs: the same, both blocked on their completion channel */
    DP_BENCH_IMM_WINDOW, /* verbs: write-with-immediate, `window` round trips in flight, both polling */
    DP_BENCH_READ,     /* the peer's memory is read and the peer does nothing; on shm a copy */
    DP_BENCH_FETCH_ADD, /* likewise 8 bytes of it are added to, and the old value comes back */
} dp_bench_kind;

/* What one run of a floor is. The argument of DP_BENCH_FN_FLOOR. */
typedef struct dp_bench_run {
    uint32_t kind;
    uint32_t size;   /* bytes from client to peer */
    uint32_t reply;  /* bytes back */
    uint32_t window; /* RING, IMM_WINDOW: round trips in flight; RING: at most `entries` */
    uint32_t entries; /* RING: of each ring, a power of two */
    uint32_t pad;
    uint64_t rounds;
    uint64_t run; /* number of this run; the peer stores it to `ready` when it is about to begin */
} dp_bench_run;

/* Head of the shared memory: each word on a line of its own. Boxes and rings follow. */
typedef struct dp_bench_area {
    _Alignas(64) uint64_t ready;
    _Alignas(64) uint64_t ping; /* FLAG */
    _Alignas(64) uint64_t pong;
    _Alignas(64) dp_server_stats stats; /* of the peer's server */
    _Alignas(64) uint64_t delay; /* ns that DP_BENCH_FN_DELAYED takes */
    int64_t limit; /* CLOCK_MONOTONIC, ns: whoever spins in a floor gives up then */
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
    uint32_t payload; /* most bytes of one call */
    uint64_t bulk;
    dp_wait_mode mode; /* of both sides */
    int peer_cpu;      /* the peer pins itself there; -1: not */
    /* Calls take their payload from registered memory and leave the result where it arrived, as a bare ping-pong on a
     * network adapter does, instead of copying from and to the caller's memory. */
    bool registered;
    bool calls_only; /* no bare queue pair beside the channel */
} dp_bench_config;

/* What the peer's machine says instead of the client: the device, and the CPU to be pinned to, -1: none. */
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
/* dp_bench_abort ends what blocks in the bench, with an error. For whoever sees that the peer is gone. Any thread. */
void dp_bench_abort(dp_bench *b);
dp_channel *dp_bench_channel(dp_bench *b);

/* One batch of bare round trips: `warm` untimed ones, then `n`. *ns is the time of the n together. With samples
 * (room for n) each is timed by itself as well: the clock is read once between two round trips. With kind RING or IMM_WINDOW as
 * many as the depth are in flight, and a sample is the time from an entry's push to its reply's pop. A batch of spinners on
 * shared memory that is not done after DP_BENCH_BATCH_NS, and the time that copies take, is DP_DEADLINE: something else has the
 * processors. The bench goes on. */
int dp_bench_floor(dp_bench *b, dp_bench_kind kind, uint32_t size, uint32_t reply, uint32_t warm, uint32_t n,
                   int64_t *samples, int64_t *ns, dp_error *err);
/* The same with calls of a function whose result is as long as its payload; `depth` in flight. */
int dp_bench_calls(dp_bench *b, uint32_t function, uint32_t size, uint32_t warm, uint32_t n, int64_t *samples,
                   int64_t *ns, dp_error *err);
/* dp_bench_verify makes one echo call of fresh bytes and compares what comes back. */
int dp_bench_verify(dp_bench *b, uint32_t size, dp_error *err);
/* dp_bench_delay lets each call of DP_BENCH_FN_DELAYED take so long: for a guard that shall be seen to fail. */
void dp_bench_delay(dp_bench *b, uint64_t ns);
/* dp_bench_blocked says how often client and peer have blocked while waiting for calls. A peer on another machine is asked
 * by a call; 0 if it does not answer. */
void dp_bench_blocked(dp_bench *b, uint64_t *client, uint64_t *peer);
/* Median cost of reading the clock, ns. */
double dp_bench_clock_ns(void);

/* dp_bench_serve is the peer: until its client is gone. An error is also sent to the client. here is NULL where the client
 * chooses device and CPU. */
int dp_bench_serve(const dp_bench_fds *fds, const dp_bench_here *here, dp_error *err);

/* ---- between the files of the bench ---- */

#define DP_BENCH_MAGIC 0x48434e42u /* "BNCH" */
/* Bytes of payload that a peer makes room for, all calls in flight together. */
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

/* What a floor's loops work on, on either side. */
typedef struct dp_bench_side {
    dp_bench_area *area;
    uint64_t size;     /* of the shared memory */
    int ping, pong;    /* eventfds */
    uint8_t *in, *out; /* client only */
    struct dp_bench_verbs *verbs; /* NULL on shm */
} dp_bench_side;

/* Every loop gives up after this long without a sign of the other side, */
#define DP_BENCH_PATIENCE_NS 10000000000
/* those of spinners on shared memory that long after the batch began, and a nanosecond more for each byte that is copied: a
 * batch takes some milliseconds. */
#define DP_BENCH_BATCH_NS 500000000

/* Both return DP_OK, or what stopped them: DP_PEER_GONE, DP_CONNECTION. The client's times all but the first `warm`. */
int dp_bench_floor_server(const dp_bench_side *s, const dp_bench_run *r);
int dp_bench_floor_client(const dp_bench_side *s, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns);
/* Zeroes the words that a run counts in. */
void dp_bench_floor_reset(const dp_bench_side *s, const dp_bench_run *r);
/* Bytes of a ring entry for that payload. */
static inline uint64_t dp_bench_stride(uint32_t size) { return (size + sizeof(uint64_t) + 63) & ~63ull; }

/* A bare queue pair on a verbs device, and what its peer must know. */
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
/* Any thread: ends the wait of the one that is in dp_bench_verbs_client. */
void dp_bench_verbs_abort(dp_bench_verbs *v);
int dp_bench_verbs_server(dp_bench_verbs *v, const dp_bench_run *r);
int dp_bench_verbs_client(dp_bench_verbs *v, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns);

#endif

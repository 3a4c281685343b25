/* For conformance cases: one end of a connection, and two connected ends.
 *
 * An `end` is a device, a domain, an exposed region, local memory, a completion queue and one queue pair.
 * A `duo` is two ends, each with its own thread or process. They exchange cards (blob and region addresses) and synchronise over
 * a socketpair. DUO_CASE registers a pair of functions three times:
 *
 *   name@one-device    two threads, one device, two domains
 *   name@two-devices   two threads with a device each
 *   name@processes     two processes, forked before any device is opened
 *
 * The helpers fail the case on anything unexpected: a completion that does not arrive within poll_ns, has failed, or has a wrong
 * wr_id.
 */
#ifndef RFAAS_CTEST_ENDS_H
#define RFAAS_CTEST_ENDS_H

#include "harness.h"

enum { REGIONS_MAX = 5, ACCESS_ALL = DP_REMOTE_READ | DP_REMOTE_WRITE | DP_REMOTE_ATOMIC };

/* wr_id of the k-th receive that an end posts since its last reset. */
#define RECV_ID(k) (0x5EC0000000000000ull | (k))

typedef struct region_opts {
    uint64_t size; /* 0: 8192 */
    uint32_t access;
    bool hidden; /* in the domain, but not in the queue pair's expose list */
} region_opts;

typedef struct end_opts {
    uint64_t size;       /* of region 0, which has every right; 0: 64 KiB */
    uint64_t local_size; /* of local memory (no remote rights); 0: as size */
    uint32_t max_send;   /* 0: 64 */
    uint32_t max_recv;   /* 0: 64 */
    uint32_t max_inline;
    uint32_t max_answers; /* tcp */
    bool takes_shared;
    bool no_recvs;          /* post none; otherwise max_recv are kept posted */
    region_opts regions[REGIONS_MAX - 1]; /* regions 1.. */
    int n_regions;
    bool unconnected;  /* duo: leave connecting to the case */
    bool quick_errors; /* verbs: small time-out and retry count, to notice a dead peer soon */
    bool right_active_only; /* shm, duo: the right side's device has active_side_only (a worker) */
} end_opts;

typedef struct reg_ref {
    uint64_t addr, size;
    uint32_t rkey;
} reg_ref;

/* The addresses of an end, for its peer. */
typedef struct card {
    uint8_t blob[DP_BLOB_MAX];
    uint32_t blob_len;
    int32_t n_regions;
    reg_ref regions[REGIONS_MAX];
} card;

typedef struct stash {
    dp_wc *wc;
    uint32_t head, tail, cap;
} stash;

typedef struct end {
    const end_opts *o;
    dp_dev *dev;
    bool own_dev;
    dp_domain *dom;
    dp_mem *mem; /* region 0 */
    dp_mem *regions[REGIONS_MAX];
    int n_regions;
    dp_mem *local; /* source and destination of the end's own posts */
    dp_cq *cq;
    dp_qp *qp;
    uint64_t recvs_posted, recvs_done; /* since the last reset */
    stash sent, received;              /* completions of one kind that were polled while waiting for the other */
} end;

/* How long a completion may take before the case fails. */
int64_t poll_ns(void);
/* Options for a device that reports errors soon. */
dp_dev_options quick_options(void);

/* Opens a device if dev is NULL. */
void end_open(end *e, const end_opts *o, dp_dev *dev);
void end_close(end *e);
void end_card(end *e, card *c); /* exports */
void end_connect(end *e, const card *peer);
/* Resets the end to the initial state and posts its receives again. */
void end_reset(end *e);
void end_post_recv(end *e);
static inline unsigned char *end_bytes(end *e) { return e->mem->addr; }
static inline unsigned char *local_bytes(end *e) { return e->local->addr; }
/* A piece of local memory. */
dp_sge local_sge(end *e, uint64_t off, uint32_t len);

/* Makes this thread poll the queue, without taking completions, whenever it waits for something else: for t_recv, t_sync, or a
 * completion of another end. On a device with DP_CAP_POLLED_TARGET, peers' operations proceed only while their target polls. On
 * other devices it does nothing. Ends attend to their own queues. */
void end_attend(dp_cq *cq);
void end_unattend(dp_cq *cq);

/* One completion of any kind, or false after ns. Ignores the stashes. */
bool end_poll(end *e, dp_wc *wc, int64_t ns);
/* Completion of an own post with any status; false after ns. */
bool end_poll_sent(end *e, dp_wc *wc, int64_t ns);
/* Completion of a receive (operation of the peer) with any status. */
bool end_poll_recv(end *e, dp_wc *wc, int64_t ns);
/* On a device with DP_CAP_SILENT_DEATH, breaks the queue pair, as the control plane does when it reports the peer's end. On other
 * devices it does nothing and returns false. */
bool end_report_death(end *e);
/* Completion of a post to a peer that is gone. If DP_CAP_SILENT_DEATH permits that there is none, it returns false after a shorter time. */
bool end_poll_lost(end *e, dp_wc *wc);
/* The next own completion. It must have succeeded and have this wr_id and op. */
void end_sent(end *e, uint64_t wr_id, dp_op op);
/* The next receive. It must be a successful write-with-immediate in order. Posts another receive (unless no_recvs). */
dp_wc end_imm(end *e);
/* Checks that there is no completion for ms milliseconds. */
void end_quiet(end *e, int ms);

/* Post, wait while the queue is full (polling into the stashes), and check the status. */
void end_write(end *e, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
void end_write_imm(end *e, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                   uint32_t flags);

/* Moves completions from the queue into the stashes. */
void end_drain(end *e);

/* Fills n bytes with a pattern that depends on the seed; checks it. */
void fill_pattern(void *p, size_t n, uint32_t seed);
void t_check_pattern(const char *file, int line, const void *p, size_t n, uint32_t seed);
#define CHECK_PATTERN(p, n, seed) t_check_pattern(__FILE__, __LINE__, p, n, seed)

/* Connects two ends of one thread and checks that they work, also after refused blobs. No operation needs the other side to run. */
void ends_connect_and_write(end *a, end *b);

/* ---- duos ---- */

typedef struct duo {
    end e;
    card peer;
    int sock;
    bool left;
    bool processes;
    const void *arg;
} duo;

typedef struct duo_def {
    const end_opts *opts;
    void (*left)(duo *);
    void (*right)(duo *);
} duo_def;

enum { DUO_ONE_DEVICE, DUO_TWO_DEVICES, DUO_PROCESSES };
void duo_run(const t_case *c);

/* Resets both sides, exchanges new cards, and connects. Both sides call it. */
void duo_reconnect(duo *d);
/* Exchanges cards and connects unconnected queue pairs. Both sides call it. */
void duo_connect(duo *d);
/* Sends a write-with-immediate without data as an acknowledgement; waits for one. */
void duo_ack(duo *d);
void duo_await(duo *d);
/* Both sides call it: a round trip with data in both directions, to check that the connection works. */
void duo_ping(duo *d);

#define DUO_VARIANT(fn, suffix, nm, which, def, ...)                                                                   \
    static t_case fn##_case_##suffix = {                                                                               \
        .name = nm, .run = duo_run, .arg = def, .variant = which, ##__VA_ARGS__};                                      \
    __attribute__((constructor)) static void fn##_register_##suffix(void) { t_register(&fn##_case_##suffix); }

/* DUO_CASE(left function, right function, name, options or NULL, more fields of t_case ...) */
#define DUO_CASE(left_fn, right_fn, case_name, options, ...)                                                           \
    static const duo_def left_fn##_def = {options, left_fn, right_fn};                                                 \
    DUO_VARIANT(left_fn, one, case_name "@one-device", DUO_ONE_DEVICE, &left_fn##_def, ##__VA_ARGS__)                  \
    DUO_VARIANT(left_fn, two, case_name "@two-devices", DUO_TWO_DEVICES, &left_fn##_def, ##__VA_ARGS__)                \
    DUO_VARIANT(left_fn, proc, case_name "@processes", DUO_PROCESSES, &left_fn##_def, ##__VA_ARGS__)

#endif

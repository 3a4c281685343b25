/* Private side of the C API (rfaas.h): handles, the seam to the control part, error texts.
 *
 *   program ── rfaas.h ──▶ rfaas_api.c, _request.c, _map.c     calls: C from end to end, on dp_channel_*
 *                          rfaas_api_buffer.c                  registered memory
 *                          rfaas_api_session.c, _lease.c       handles, opening, closing, looking
 *                          rfaas_api_grant.c, _worker.c        how a lease comes to its workers and keeps them
 *                          rfaas_api_failover.c                how it goes on elsewhere
 *                          rfaas_api_kept.c                    what is kept of a released one for the next
 *                          rfaas_api_changes.c                 what happens to executors
 *                          rfaas_api_across.c                  leases at several executors as one call
 *                          rfaas_api_local.c                   functions in this process, where no executor has room
 *                               │  ▲
 *        rfaas_control_fn(bytes)▼  │rfaas_control_event(bytes)   messages: rfaas_api_msg.c
 *                          control part: Go in this process (client/capi), one day an agent per node
 *
 * Only bytes cross the seam: no pointer into either side's memory means anything to the other.
 */
#ifndef RFAAS_API_PRIVATE_H
#define RFAAS_API_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>

#include "dp_channel.h"
#include "dp_local.h"
#include "rfaas.h"

/* ---- the seam ----
 * A message is a sequence of fields {u16 tag, u16 0, u32 length, bytes}, little endian, without padding. Numbers are
 * 8 bytes. Unknown tags are skipped; a tag may repeat (lists, in order). */
enum {
    RFAAS_OP_SESSION_OPEN = 1,  /* MANAGER EXECUTOR PROVIDER TENANT FLAGS TIMEOUT_NS KEEP  -> SESSION */
    RFAAS_OP_SESSION_CLOSE = 2, /* SESSION                                                 -> ; all that was kept is dropped */
    RFAAS_OP_PLAN = 3,          /* SESSION KEY FROM, like the lease FROM; or
                                   SESSION KEY LIBRARY|CODE WORKERS CORES MEMORY WAIT_MODE
                                   DURATION_NS FLAGS CALL_LIMIT_NS DEPTH EAGER BULK EXECUTOR|AT -> */
    RFAAS_OP_NEXT = 4,          /* KEY            -> EXECUTOR NODE PROVIDER: the next one to try; KEPT: whose workers are still
                                   connected to what was kept under this name, which is this side's alone from here on */
    RFAAS_OP_GRANT = 5,         /* KEY BLOB...    -> LEASE_ID (BLOB PID START)... FUNCTION...; events may come from here on */
    RFAAS_OP_REPLACE = 6,       /* KEY WORKER BLOB TIMEOUT_NS -> BLOB PID START; without them: not within that time. It goes
                                   on, and the same request later gets its outcome */
    RFAAS_OP_RELEASE = 7,       /* KEY            -> ; no event comes after it, the key is dead; at any stage. KEPT: the
                                   connections could serve again, under this name -> KEPT: they will, or a DROPPED comes */
    RFAAS_OP_INSPECT = 8,       /* KEY WORKER     -> PID FUNCTION OUTPUT (COUNT of calls, failed, refused, bytes in and out) */
    RFAAS_OP_RENEW = 9,         /* KEY DURATION_NS -> */
    RFAAS_OP_FINISH = 10,       /* KEY            -> ; no call is started any more, the lease may be given back; at once */
    RFAAS_OP_SPREAD = 11,       /* SESSION WORKERS CORES MEMORY DURATION_NS, (EXECUTOR to leave out)... -> (EXECUTOR WORKERS)...
                                   AT "", or the executor that it must be, instead of EXECUTOR: one that is given has room for all */
    RFAAS_OP_CHANGES = 12,      /* SESSION COUNT -> (EXECUTOR NODE EVENT)..., at most COUNT of them; EVENT is RFAAS_EXECUTOR_* */
    RFAAS_OP_AWAIT = 13,        /* KEY TIMEOUT_NS -> COUNT 1: the manager has told of an executor that lends cores, since the last time
                                   for this KEY; 0: it has not within that time */
    RFAAS_OP_SILENT = 14,       /* KEY WORKER COUNT COUNT -> ; the worker has answered nothing since the first time, as of the second
                                   (CLOCK_MONOTONIC ns); at once. Should its executor say that it never will, it counts as dead */
};
enum {
    RFAAS_TAG_SESSION = 1,
    RFAAS_TAG_KEY = 2, /* a lease, chosen by this side */
    RFAAS_TAG_MANAGER = 3,
    RFAAS_TAG_EXECUTOR = 4,
    RFAAS_TAG_PROVIDER = 5,
    RFAAS_TAG_TENANT = 6,
    RFAAS_TAG_FLAGS = 7,
    RFAAS_TAG_TIMEOUT_NS = 8,
    RFAAS_TAG_LIBRARY = 9,
    RFAAS_TAG_CODE = 10,
    RFAAS_TAG_WORKERS = 11,
    RFAAS_TAG_CORES = 12,
    RFAAS_TAG_MEMORY = 13,
    RFAAS_TAG_WAIT_MODE = 14,
    RFAAS_TAG_DURATION_NS = 15,
    RFAAS_TAG_DEPTH = 16,
    RFAAS_TAG_EAGER = 17,
    RFAAS_TAG_BULK = 18,
    RFAAS_TAG_BLOB = 19,
    RFAAS_TAG_FUNCTION = 20,
    RFAAS_TAG_NODE = 21,
    RFAAS_TAG_LEASE_ID = 22,
    RFAAS_TAG_WORKER = 23,
    RFAAS_TAG_EVENT = 24,  /* RFAAS_NEWS_* */
    RFAAS_TAG_STATUS = 25, /* two's complement */
    RFAAS_TAG_TEXT = 26,   /* of a failure: reply of any operation */
    RFAAS_TAG_OUTPUT = 27, /* last bytes that a worker printed */
    RFAAS_TAG_PID = 28,    /* names a worker of its node */
    RFAAS_TAG_BACKTRACE = 29, /* of a worker that died, a line per function */
    RFAAS_TAG_CALL_LIMIT_NS = 30,
    RFAAS_TAG_COUNT = 31,
    RFAAS_TAG_IN_NS = 32, /* until what an event announces */
    RFAAS_TAG_FROM = 33,  /* key of another lease of this session */
    RFAAS_TAG_AT = 34,    /* where to begin; a lease that goes on elsewhere is not bound to it */
    RFAAS_TAG_KEPT = 35,  /* name of connections without a lease */
    RFAAS_TAG_START = 36, /* of a worker: 1 cold, 2 warm, 3 cached */
    RFAAS_TAG_KEEP = 37,  /* released leases to keep, two's complement; 0: the control part decides */
};
/* DROPPED has no KEY but KEPT: what was kept under this name is not needed any more. */
enum { RFAAS_NEWS_WORKER_DIED = 1, RFAAS_NEWS_ENDED = 2, RFAAS_NEWS_DRAINING = 3, RFAAS_NEWS_EXPIRING = 4, RFAAS_NEWS_DROPPED = 5 };
_Static_assert(RFAAS_NEWS_WORKER_DIED == RFAAS_EVENT_WORKER_DIED && RFAAS_NEWS_ENDED == RFAAS_EVENT_ENDED &&
                   RFAAS_NEWS_DRAINING == RFAAS_EVENT_DRAINING && RFAAS_NEWS_EXPIRING == RFAAS_EVENT_EXPIRING,
               "events of the seam and of rfaas.h");

/* The control part. Returns a status; *reply is from malloc and freed by the caller, may be NULL. Blocks as long as
 * the operation takes. Any thread. */
typedef int32_t (*rfaas_control_fn)(uint32_t op, const void *req, uint64_t len, void **reply, uint64_t *reply_len);

/* The control part that is linked in, if any (client/capi). */
extern int32_t rfaas_control_default(uint32_t op, void *req, uint64_t len, void **reply, uint64_t *reply_len)
    __attribute__((weak));

/* rfaas_control_register sets the control part for the next rfaas_init; NULL: the one that is linked in. */
void rfaas_control_register(rfaas_control_fn fn);
/* rfaas_control_event takes an event: KEY EVENT WORKER PID STATUS IN_NS TEXT BACKTRACE OUTPUT, or EVENT KEPT. Never blocks for
 * long. Any thread. */
void rfaas_control_event(const void *msg, uint64_t len);

typedef struct rfaas_msg {
    uint8_t *data;
    uint64_t len, cap;
    bool failed; /* out of memory */
} rfaas_msg;
void rfaas_msg_u64(rfaas_msg *m, uint16_t tag, uint64_t v);
void rfaas_msg_bytes(rfaas_msg *m, uint16_t tag, const void *data, uint64_t len);
void rfaas_msg_str(rfaas_msg *m, uint16_t tag, const char *s); /* NULL: nothing */
void rfaas_msg_free(rfaas_msg *m);
/* rfaas_msg_check says whether the whole message is well formed. The readers below want a checked one. */
bool rfaas_msg_check(const rfaas_msg *m);
/* rfaas_msg_find returns the n-th field with the tag, or NULL, and then *len is 0. */
const uint8_t *rfaas_msg_find(const rfaas_msg *m, uint16_t tag, uint32_t n, uint32_t *len);
uint64_t rfaas_msg_get_u64(const rfaas_msg *m, uint16_t tag, uint64_t absent);
uint64_t rfaas_msg_nth_u64(const rfaas_msg *m, uint16_t tag, uint32_t n, uint64_t absent);
/* Copies a string, cut to cap - 1 bytes, always terminated. */
void rfaas_msg_get_str(const rfaas_msg *m, uint16_t tag, char *out, size_t cap);

/* ---- errors ---- */

/* Sets this thread's error and returns status. */
int rfaas_api_fail(int status, int started, const char *fmt, ...) __attribute__((format(printf, 3, 4), cold));
/* The same with a constant text and no formatting: for RFAAS_BUSY, which loops run into. */
int rfaas_api_fail_const(int status, const char *text);
/* Sets what rfaas_started tells, without an error. */
void rfaas_api_note_started(int started);

/* ---- handles ---- */

#define RFAAS_LEASES_MAX 4096
#define RFAAS_SESSIONS_MAX 256
#define RFAAS_WORKERS_MAX 1024
#define RFAAS_LEASE_MAGIC 0x4c464652u
#define RFAAS_SESSION_MAGIC 0x53464652u
#define RFAAS_DEPTH_DEFAULT 8

enum { RFAAS_STATE_DOWN = 0, RFAAS_STATE_UP = 1, RFAAS_STATE_FORKED = 2 };
extern int rfaas_api_state; /* written under the table's mutex, read everywhere */

typedef enum rfaas_request_state { RFAAS_REQ_FREE = 0, RFAAS_REQ_FLYING, RFAAS_REQ_ENDED } rfaas_request_state;

typedef struct rfaas_request_slot {
    uint64_t id; /* the handle, 0 when free */
    void *out;
    const void *in;   /* with repeats */
    uint32_t in_size; /* likewise */
    uint32_t repeats;
    int64_t deadline; /* CLOCK_MONOTONIC ns, 0: none; of the attempt */
    int64_t last;     /* of the whole call */
    int64_t attempt;  /* ns; 0: no limit of its own */
    int32_t chosen;   /* the worker that the caller chose, or RFAAS_ANY_WORKER; with repeats */
    uint32_t capacity;
    uint32_t size;
    int32_t status;
    uint32_t worker;
    uint32_t slot;
    rfaas_function function;
    uint32_t next_free; /* index + 1 */
    uint8_t state;      /* rfaas_request_state */
    uint8_t started;
    char *text; /* of an ended call with an error, malloc, or NULL */
} rfaas_request_slot;

typedef struct rfaas_worker {
    dp_channel *ch;
    uint32_t in_flight; /* requests in state FLYING */
    bool broken;        /* being replaced, or that failed half-way: the channel is not connected */
    bool replacing;     /* the channel is offered, and the control part has been asked */
    bool resumes;       /* the channel was kept, and the worker's answer is to be that it is still the same */
    /* Under the lease's mutex: */
    uint64_t pid;        /* of the worker that the channel is connected to, 0 while there is none */
    uint64_t dead_pid;   /* last one reported dead */
    uint64_t silent_pid; /* one that broke and of which no event has told in time */
    int death_status;    /* of dead_pid; reason and details too */
    char reason[512];
    char *details; /* malloc, or NULL */
} rfaas_worker;

/* Memory that payloads may be sent from without a copy. */
typedef struct rfaas_buffer {
    void *addr;
    uint64_t size;   /* as asked for */
    uint64_t mapped; /* bytes that rfaas_alloc mapped here; 0: the memory is the caller's */
    dp_mem *mem;     /* registered with the domain of the lease's home; NULL: that has refused, payloads are copied */
    struct rfaas_buffer *next;
} rfaas_buffer;

enum { RFAAS_STARTS = 4 }; /* of workers: not known, cold, warm, cached */

/* What one executor grants: workers, and the channels to them. */
typedef struct rfaas_home {
    struct rfaas_home *link; /* among the retired, or the kept */
    uint64_t key; /* names the grant at the control part; its low bits are the lease's index. 0: no events any more */
    const rfaas_session *session; /* of a kept one */
    dp_endpoint *ep;
    rfaas_worker *workers;
    uint32_t n_workers;
    dp_channel_config cfg;
    uint64_t lease_id;
    char node[256], executor[256], provider[16];
    uint32_t starts[RFAAS_STARTS]; /* workers that came here, by how */
    uint32_t queue_pairs;          /* made for it */
    rfaas_statistics before;       /* what the channels had counted when they came, kept, from another home */
    /* Under the lease's mutex: */
    int ended; /* status once it ended */
    char ended_reason[256];
} rfaas_home;

#define RFAAS_NEWS_KEPT 16

/* An event that the program has not taken. */
typedef struct rfaas_news {
    uint32_t kind, worker;
    int64_t at; /* CLOCK_MONOTONIC ns of what it announces */
    char text[256];
} rfaas_news;

/* The node drains: no call is started any more, and when no thread is inside the control part is told, once. */
enum { LEAVING_NOT = 0, LEAVING_SOON = 1, LEAVING_TOLD = 2, LEAVING_LOCAL = 3 /* calls run in this process */ };

/* Memory of a handle is never freed, only used again much later, so that a stale handle finds a cleared magic. */
struct rfaas_lease {
    uint32_t magic;
    uint32_t busy;    /* a thread is inside; relaxed atomic */
    uint32_t leaving; /* LEAVING_*; atomic */
    uint32_t n_workers;
    uint32_t n_functions;
    rfaas_worker *workers; /* the home's */
    uint32_t sync_worker;  /* where the last synchronous call went: its lines are warm */
    uint32_t next_worker;
    rfaas_buffer *buffers;
    rfaas_request_slot *requests;
    uint32_t requests_used;
    uint32_t requests_free; /* index + 1 */
    uint64_t request_seq;
    dp_channel_config cfg;
    rfaas_home *home;            /* without an endpoint: the lease was opened where no executor had room */
    dp_local *local;             /* with RFAAS_LEASE_LOCAL */
    const char *at;              /* NULL, or the executor to begin at; dead once the lease is open */
    rfaas_lease_options options; /* checked, with defaults filled in; its pointers are dead once the lease is open */
    char **functions;
    rfaas_session *session;
    uint32_t index; /* in the table */
    uint32_t replaced;
    int64_t open_ns; /* that rfaas_lease_open took */

    pthread_mutex_t mu; /* for what events touch, and the pointer to the home */
    pthread_cond_t changed;
    char leaving_reason[256];
    /* Failover, under mu. The seeker is a thread that begins when the home is first lost and ends with the lease. */
    pthread_t seeker;
    bool seeking, seeker_stop;
    rfaas_home *next;      /* being granted, or ready */
    bool next_ready;
    rfaas_home *retired;   /* to be given back */
    char next_reason[512]; /* why there is none yet */
    rfaas_statistics past; /* of homes that were left; the lease's thread */
    rfaas_news news[RFAAS_NEWS_KEPT]; /* not taken: a ring */
    uint32_t news_first, news_count, news_lost;
};

struct rfaas_session {
    uint32_t magic;
    uint32_t index;
    uint64_t id; /* of the control part */
    int64_t timeout_ns; /* of a control operation */
    dp_dev_options dev;
    char device[64];
    pthread_mutex_t mu;
    dp_dev *shm, *verbs;
    uint32_t opening; /* leases being opened or open, under the table's mutex */
};

/* Request handle: sequence(32) | request index(20) | lease index(12), never 0 since the sequence is not. */
#define RFAAS_REQ_LEASE_BITS 12
#define RFAAS_REQ_INDEX_BITS 20
#define RFAAS_REQ_SEQ_MASK 0xffffffffu
_Static_assert(RFAAS_LEASES_MAX == 1 << RFAAS_REQ_LEASE_BITS, "lease index in a request handle");
_Static_assert((uint64_t)RFAAS_WORKERS_MAX * DP_DEPTH_MAX == 1 << RFAAS_REQ_INDEX_BITS, "request index in a handle");

/* ---- rfaas_api_session.c ---- */

/* Tables of sessions and leases, and counts; never held during control operations. Taken before a lease's mutex. */
extern pthread_mutex_t rfaas_api_mu;
/* RFAAS_OK, or why the library cannot be used: not initialised, forked. */
int rfaas_api_down(const char *op);
int rfaas_api_bad_session(const rfaas_session *s, const char *op);
/* Sends a request and takes the reply, which the caller frees (NULL: none is wanted). Consumes the request. On a failure
 * the error is set from the reply's text. */
int rfaas_api_ask(const char *op_name, uint32_t op, rfaas_msg *req, rfaas_msg *reply);
int rfaas_api_fail_dp(const char *op, const dp_error *err);
/* The session's device for a provider, opened once. */
int rfaas_api_session_device(rfaas_session *s, const char *provider, dp_dev **out);

/* ---- rfaas_api_lease.c ---- */

/* The lease with a table index, or NULL. */
rfaas_lease *rfaas_api_lease_at(uint32_t index);
/* rfaas_lease_open that begins at an executor, NULL: at any. */
int rfaas_api_lease_open(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease);
/* Checks options as the program gave them and copies them with defaults filled in. most: of workers. */
int rfaas_api_lease_options(const rfaas_lease_options *options, uint32_t most, rfaas_lease_options *out);
/* A new name for one of the lease's homes. */
uint64_t rfaas_api_new_key(const rfaas_lease *l);
/* Why a lease handle cannot be used: sets the error and returns RFAAS_INVALID. */
int rfaas_api_bad_lease(const rfaas_lease *l, const char *op);

/* ---- rfaas_api_grant.c ---- */

rfaas_home *rfaas_api_home_new(const rfaas_lease *l);
/* Frees what a home holds on this side. NULL does nothing. */
void rfaas_api_home_free(rfaas_lease *l, rfaas_home *h);
/* The same of one that no lease and no event can find. */
void rfaas_api_home_destroy(rfaas_home *h);
/* Tells the control part what the lease's home shall be like. */
int rfaas_api_plan(const rfaas_lease *l, const rfaas_home *h);
/* Goes through the candidates until one grants. Free and release (RFAAS_OP_RELEASE) the home after an error. */
int rfaas_api_find_and_grant(rfaas_lease *l, rfaas_home *h);
/* Gives the grant back, if there is one; the key is dead. */
int rfaas_api_give_back(const rfaas_home *h, const char *op);
/* One worker's offer, appended to a request; its connection to the n-th blob of a reply. */
int rfaas_api_offer(rfaas_worker *w, rfaas_msg *req);
int rfaas_api_connect_worker(rfaas_lease *l, rfaas_home *h, uint32_t i, const rfaas_msg *reply, uint32_t n);

/* ---- rfaas_api_kept.c ---- */

/* Gives the lease's home back, or has it kept for the next lease of its session that is like this one: then the lease has
 * none any more, nor buffers. */
int rfaas_api_release_home(rfaas_lease *l);
/* Moves connections that were kept under this name to a home that has none. False: they do not serve any more. */
bool rfaas_api_adopt(rfaas_home *h, uint64_t name);
/* Frees what was kept under this name, if it still is. */
void rfaas_api_drop_kept(uint64_t name);
/* Frees all that is kept of a session. */
void rfaas_api_drop_all_kept(const rfaas_session *s);
/* How many homes are kept of a session. */
uint64_t rfaas_api_kept(const rfaas_session *s);

/* ---- rfaas_api_worker.c ---- */

/* rfaas_api_repair puts a new worker in the place of one whose channel failed, or begins to: RFAAS_DEADLINE when it is not
 * there at the deadline (CLOCK_MONOTONIC ns; 0: the session's time-out). The lease's thread. */
int rfaas_api_repair(rfaas_lease *l, uint32_t worker, int64_t deadline);
/* Begins to replace it, or goes on if the new worker is there; RFAAS_BUSY: not yet. */
int rfaas_api_begin_repair(rfaas_lease *l, uint32_t worker);
/* Sets the error of a call that ended with `status`; waits a moment for the event that tells how a worker died. Returns
 * the status, which becomes RFAAS_WORKER_DIED, RFAAS_TIME_LIMIT, RFAAS_MEMORY_LIMIT or RFAAS_LEASE_ENDED when that is the better known reason. */
int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started);

/* What silence of one of the home's workers means is found out: dp_silence_fn, arg is a rfaas_home. */
void rfaas_api_silent(void *arg, const dp_channel *ch, dp_silence silence);

/* ---- rfaas_api_event.c ---- */

/* Keeps an event for the program, in the place of the oldest if need be. Under the lease's mutex. */
void rfaas_api_keep_news(rfaas_lease *l, const rfaas_msg *m, uint32_t kind, uint32_t worker);
/* The node drains, and `leaving` says so. Who is inside the lease when every thread has passed a barrier finishes by
 * itself as it leaves; who enters later sees it. */
void rfaas_api_begin_leaving(rfaas_lease *l);
/* Tells the control part that a lease starts no calls any more, unless it has been told. Any thread; nobody is inside the
 * lease, or the caller is. */
__attribute__((cold)) void rfaas_api_finish(rfaas_lease *l);

/* ---- rfaas_api_request.c ---- */

/* Ends every request in flight on a worker whose channel failed, keeping the outcomes for their waiters. */
void rfaas_api_settle(rfaas_lease *l, uint32_t worker);

/* Takes in what has ended, so that slots are free. */
void rfaas_api_collect_ended(rfaas_lease *l);
/* Waits for every request in flight, each until its deadline. */
void rfaas_api_drain(rfaas_lease *l);

/* ---- rfaas_api_failover.c ---- */

/* Whether the lease shall go on elsewhere when it ends. */
static inline bool rfaas_api_fails_over(const rfaas_lease *l) { return l->options.flags & RFAAS_LEASE_FAILOVER; }
/* The home is lost: begins to look for another, if the lease shall. Under the lease's mutex. */
void rfaas_api_seek(rfaas_lease *l);
/* Waits until there is another home, and moves there. Registered buffers have other dp_mems afterwards. With
 * RFAAS_LEASE_LOCAL it does not wait: calls run here (LEAVING_LOCAL) until there is one. The lease's thread. */
int rfaas_api_move(rfaas_lease *l, const char *op, int64_t deadline);
/* Ends the seeker and gives back what it has. Nobody else uses the lease. */
void rfaas_api_stop_seeking(rfaas_lease *l);
/* Adds up what a home's channels have counted. */
void rfaas_api_count(const rfaas_home *h, rfaas_statistics *s);

/* ---- rfaas_api_local.c ---- */

/* Opens the lease's library in this process. */
int rfaas_api_local_load(rfaas_lease *l);
void rfaas_api_local_free(rfaas_lease *l);
/* Gives a lease that was not granted a home without workers: its calls run here. */
int rfaas_api_local_open(rfaas_lease *l);
/* Adds a function to the lease's names. */
int rfaas_api_local_function(rfaas_lease *l, const char *name);
/* Runs a function on this thread. *got: bytes of its result, also when that is too large. */
int rfaas_api_here(rfaas_lease *l, const char *op, rfaas_function fn, const void *in, uint32_t in_size, void *out,
                   uint32_t capacity, uint32_t *got);

/* ---- rfaas_api_buffer.c ---- */

/* Registers all buffers anew, with the domain of this home. */
void rfaas_api_move_buffers(rfaas_lease *l, const rfaas_home *to);

/* Frees and forgets all of them. */
void rfaas_api_free_buffers(rfaas_lease *l);

#endif

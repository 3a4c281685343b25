/* Private side of the C API (rfaas.h): handles, what comes from the agent, error texts.
 *
 *   program ── rfaas.h ──▶ invoke.c, request.c, map.c   calls, on dp_channel_*: no step of a call knows the agent
 *                          buffer.c                     registered memory
 *                          session.c, lease.c           handles: opening, closing, looking
 *                          acquire.c                    how a lease gets its workers
 *                          worker.c                     how dead workers are replaced
 *                          failover.c                   how a lease goes on at another executor
 *                          kept.c                       connections of released leases, for the next one
 *                          changes.c, across.c          news of executors; leases at several executors in one call
 *                          local.c                      functions in this process, where no executor has room
 *                               │  ▲
 *                      requests ▼  │ replies, events     agent.c, agent_start.c: agent_protocol.h says what they are
 *                          agent of this user and node
 */
#ifndef RFAAS_CLIENT_H
#define RFAAS_CLIENT_H

#include <pthread.h>
#include <stdbool.h>

#include "agent.h"
#include "dp_channel.h"
#include "dp_local.h"
#include "dp_turns.h"
#include "rfaas.h"

#ifndef RFAAS_LIBRARY_VERSION
#define RFAAS_LIBRARY_VERSION "unknown"
#endif

/* ---- errors ---- */

/* Sets this thread's error and returns status. */
int rfaas_api_fail(int status, int started, const char *fmt, ...) __attribute__((format(printf, 3, 4), cold));
/* The same with a constant text and no formatting: for RFAAS_BUSY, which loops run into. */
int rfaas_api_fail_const(int status, const char *text);
/* The status of this thread's last error. */
int rfaas_api_last_status(void);
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
    uint32_t in_flight; /* requests in state FLYING; others read it to choose a worker: relaxed atomic */
    rfaas_request_slot *invoked; /* of rfaas_invoke by one of several threads, on its stack, FLYING or just ended; NULL: none */
    bool broken;        /* being replaced, or that failed half-way: the channel is not connected */
    bool replacing;     /* the channel is offered, and the agent has been asked */
    bool resumes;       /* the channel was kept, and the worker's answer is to be that it is still the same */
    /* Under the lease's mutex: */
    rfaas_worker_start start; /* how the worker came here */
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

/* What tells one library from another without reading it: of a file its inode and times; of bytes in memory a checksum. */
typedef struct rfaas_library_id {
    uint64_t device, inode, size;
    int64_t modified_ns, changed_ns;
} rfaas_library_id;

/* What one executor grants: workers, and the channels to them. */
typedef struct rfaas_home {
    struct rfaas_home *link; /* among the kept */
    uint64_t key; /* names the grant at the agent; its low bits are the lease's index. 0: no events any more */
    const rfaas_session *session; /* of a kept one, */
    bool kept;                    /* which the agent keeps too, */
    rfaas_agent_spec spec;        /* what it was, */
    rfaas_library_id library;     /* and of which library */
    int64_t until_ns;    /* CLOCK_MONOTONIC: when the lease ends unless it is renewed */
    uint8_t sha256[32];  /* of the library */
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

/* A lease on its way to its workers (acquire.c). */
typedef struct rfaas_acquisition {
    rfaas_lease *lease;
    rfaas_home *home;
    const char *at;      /* executor to begin at, or NULL */
    int64_t wait_ns;     /* how long the agent waits for an executor that has room */
    int64_t until;       /* of the step that is under way */
    rfaas_ticket ticket; /* of this step */
    uint64_t kept;       /* whose channels are offered */
    bool offered;        /* channels of home->provider are */
    bool done;
    uint32_t lost;  /* agents that ended under it */
    int status;     /* once it is done */
    char text[512]; /* of its error */
} rfaas_acquisition;

/* A time during which one thread uses a lease alone. Each has its own place: a thread that was the owner may still be about to write
 * to it when another one is. */
typedef struct rfaas_owner {
    uintptr_t thread; /* or RFAAS_OWNER_NONE: not any more; atomic */
    uint32_t busy;    /* it is inside; atomic, futex */
} rfaas_owner;
#define RFAAS_OWNERS 16

/* Memory of a handle is never freed, only used again much later, so that a stale handle finds a cleared magic. */
struct rfaas_lease {
    uint32_t magic;
    uint32_t entered; /* times, for a look at the agent now and then */
    rfaas_owner *owner; /* the present one; atomic, changes while it is not inside */
    uint32_t shared;    /* several threads use it; atomic, stays (threads.c) */
    rfaas_agent_lease_line *line; /* shared with the agent: how many threads are inside, and whether the node drains */
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
    rfaas_lease_options options; /* checked, with defaults filled in; its pointers are dead once the lease is open */
    rfaas_agent_spec spec;       /* the same for the agent */
    int library_fd;              /* the library, for the agent; -1: none */
    rfaas_library_id library;
    char **functions;
    rfaas_session *session;
    uint32_t index; /* in the table */
    uint32_t replaced;
    int64_t open_ns; /* that rfaas_lease_open took */

    dp_turns *turns;          /* made when the lease is first shared, and kept; a unit for each lane of the endpoint */
    rfaas_owner owners[RFAAS_OWNERS]; /* used in turn, also by later leases of this handle */
    uint32_t owned;           /* times that the handle has had an owner; under owner_mu */
    uint32_t first_owned;     /* of them, before this lease */
    pthread_mutex_t owner_mu; /* changing the owner, and sharing. Taken before all others */
    pthread_mutex_t table_mu; /* of a shared lease: the list of free requests. Taken last */
    pthread_mutex_t local_mu; /* likewise: calls in this process */

    pthread_mutex_t mu; /* for what events touch, and the pointer to the home */
    char leaving_reason[256];
    /* Failover, of the lease's thread but for the pointer to the next home. */
    rfaas_home *next; /* being granted, or ready */
    rfaas_acquisition seek;
    bool seeking, next_ready;
    int64_t seek_again;    /* not before then */
    char next_reason[512]; /* why there is none yet */
    rfaas_statistics past; /* of homes that were left; the lease's thread */
    rfaas_news news[RFAAS_NEWS_KEPT]; /* not taken: a ring */
    uint32_t news_first, news_count, news_lost;
};

struct rfaas_session {
    uint32_t magic;
    uint32_t index;
    int64_t timeout_ns; /* of a control operation */
    rfaas_agent_session open; /* what the agent was told; its session is this handle's name there */
    char provider[16]; /* of the last grant: a guess at the next one's */
    dp_dev_options dev;
    char device[64];
    pthread_mutex_t mu;
    bool shm; /* uses the device of the process */
    dp_dev *verbs;
    uint32_t opening; /* leases being opened or open, under the table's mutex */
};

/* Request handle: sequence(32) | request index(20) | lease index(12), never 0 since the sequence is not. */
#define RFAAS_REQ_LEASE_BITS 12
#define RFAAS_REQ_INDEX_BITS 20
#define RFAAS_REQ_SEQ_MASK 0xffffffffu
_Static_assert(RFAAS_LEASES_MAX == 1 << RFAAS_REQ_LEASE_BITS, "lease index in a request handle");
_Static_assert((uint64_t)RFAAS_WORKERS_MAX * DP_DEPTH_MAX == 1 << RFAAS_REQ_INDEX_BITS, "request index in a handle");

/* ---- session.c ---- */

/* Tables of sessions and leases, and counts; never held during control operations. Taken before a lease's mutex. */
extern pthread_mutex_t rfaas_api_mu;
/* RFAAS_OK, or why the library cannot be used: not initialised, forked. */
int rfaas_api_down(const char *op);
int rfaas_api_bad_session(const rfaas_session *s, const char *op);
int rfaas_api_fail_dp(const char *op, const dp_error *err);
/* The session's device for a provider, opened once. */
int rfaas_api_session_device(rfaas_session *s, const char *provider, dp_dev **out);
/* Greets workers that connect through shared memory and notices those that have ended: the library has no thread for that. A wait for
 * a worker also waits for the descriptor, which is -1 while there is no such device. */
void rfaas_api_attend(void);
int rfaas_api_attend_fd(void);

/* ---- lease.c ---- */

/* The lease with a table index, or NULL. */
rfaas_lease *rfaas_api_lease_at(uint32_t index);
/* rfaas_lease_open that begins at an executor, NULL: at any. */
int rfaas_api_lease_open(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **lease);
/* The two halves of it: a lease whose acquisition has begun, and its end, once that is done. *l is NULL after an error. */
int rfaas_api_lease_begin(rfaas_session *s, const rfaas_lease_options *options, const char *at, rfaas_lease **l, rfaas_acquisition *a);
int rfaas_api_lease_finish(rfaas_lease **l, rfaas_acquisition *a);
/* Checks options as the program gave them and copies them with defaults filled in. most: of workers. */
int rfaas_api_lease_options(const rfaas_lease_options *options, uint32_t most, rfaas_lease_options *out);
/* A new name for one of the lease's homes. */
uint64_t rfaas_api_new_key(const rfaas_lease *l);
/* After fork(), in the child: no handle is one any more. */
void rfaas_api_forget_leases(void);
/* The function of all leases that are open or being opened. */
void rfaas_api_each_lease(void (*fn)(rfaas_lease *l));
/* Why a lease handle cannot be used: sets the error and returns RFAAS_INVALID. */
int rfaas_api_bad_lease(const rfaas_lease *l, const char *op);

/* ---- threads.c ---- */

/* Of a handle that is made, and of one whose lease is no more. */
void rfaas_api_threads_init(rfaas_lease *l);
void rfaas_api_threads_reset(rfaas_lease *l);
/* rfaas_api_enter for rfaas_lease_release: RFAAS_OK when every other thread has left and none will enter. */
int rfaas_api_enter_last(rfaas_lease *l, const char *op);
/* Keeps the other threads of a shared lease from workers, requests and buffers until rfaas_api_put_all. RFAAS_DEADLINE, or
 * RFAAS_LEASE_ENDED when it is released meanwhile; the error is set. The caller is inside and holds no unit. */
int rfaas_api_take_all(rfaas_lease *l, const char *op, int64_t deadline);
void rfaas_api_put_all(rfaas_lease *l);

/* ---- names.c ---- */

/* The function whose name differs least from this one; NULL: none is near. */
const char *rfaas_api_nearest(const rfaas_lease *l, const char *name);

/* ---- acquire.c ---- */

rfaas_home *rfaas_api_home_new(const rfaas_lease *l);
/* Frees what a home holds on this side. NULL does nothing. */
void rfaas_api_home_free(rfaas_lease *l, rfaas_home *h);
/* The same of one that no lease and no event can find. */
void rfaas_api_home_destroy(rfaas_home *h);
/* Begins to get workers for a home of the lease; `at` and wait_ns as in rfaas_acquisition. */
void rfaas_api_acquire_begin(rfaas_acquisition *a, rfaas_lease *l, rfaas_home *h, const char *at, int64_t wait_ns);
/* Goes on as far as is possible without waiting; true once it is done: a->status, a->text. Release the home's key after an error. */
bool rfaas_api_acquire_step(rfaas_acquisition *a);
/* Gives it up; the home's key is to be released. */
void rfaas_api_acquire_drop(rfaas_acquisition *a);
/* Gives the grant back, if there is one; the key is dead. With `wait`, once the executor has taken it back. */
int rfaas_api_give_back(const rfaas_lease *l, const rfaas_home *h, bool wait);
/* One worker's offer. */
int rfaas_api_offer(rfaas_worker *w, rfaas_agent_blob *blob);
/* Connects worker i to what the agent says of it, of which `size` bytes are there. */
int rfaas_api_connect_worker(rfaas_lease *l, rfaas_home *h, uint32_t i, const rfaas_agent_worker *worker);

/* ---- kept.c ---- */

/* Gives the lease's home back, or has it kept for the next lease of its session that is like this one: then the lease has
 * none any more, nor buffers. */
int rfaas_api_release_home(rfaas_lease *l);
/* Moves the channels of a kept home that is like the lease to h, ready to be offered, and returns its key; 0: there is none. */
uint64_t rfaas_api_adopt_kept(const rfaas_lease *l, rfaas_home *h, const char *at);
/* Frees what was kept under this key, if it still is. */
void rfaas_api_drop_kept(uint64_t key);
/* Frees all that is kept of a session, NULL: of all. */
void rfaas_api_drop_all_kept(const rfaas_session *s);
/* After fork(), in the child. */
void rfaas_api_forget_kept(void);
/* How many homes are kept of a session. */
uint64_t rfaas_api_kept(const rfaas_session *s);

/* ---- worker.c ---- */

/* Takes an event of the agent. Any thread; never with a lease's mutex. */
void rfaas_api_take_event(const rfaas_agent_event *e, const char *details);
/* rfaas_api_repair puts a new worker in the place of one whose channel failed, or begins to: RFAAS_DEADLINE when it is not
 * there at the deadline (CLOCK_MONOTONIC ns; 0: the session's time-out). The lease's thread. */
int rfaas_api_repair(rfaas_lease *l, uint32_t worker, int64_t deadline);
/* Begins to replace it, or goes on if the new worker is there; RFAAS_BUSY: not yet. */
int rfaas_api_begin_repair(rfaas_lease *l, uint32_t worker);
/* Sets the error of a call that ended with `status`; waits a moment for the event that tells how a worker died. Returns
 * the status, which becomes RFAAS_WORKER_DIED, RFAAS_TIME_LIMIT, RFAAS_MEMORY_LIMIT or RFAAS_LEASE_ENDED when that is the better known reason. */
int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started);
/* Tells the agent of a worker that does not answer: dp_silence_fn, arg is a rfaas_home. */
void rfaas_api_silent(void *arg, const dp_channel *ch, dp_silence silence);

/* ---- event.c ---- */

/* Keeps an event for the program, in the place of the oldest if need be. Under the lease's mutex. */
void rfaas_api_keep_news(rfaas_lease *l, const rfaas_agent_event *e);
/* Tells the agent that a lease whose node drains starts no calls any more, unless it has been told. The caller is inside. */
__attribute__((cold)) void rfaas_api_finish(rfaas_lease *l);
/* Waits a moment for the reason of a drain that the page shows. */
void rfaas_api_await_reason(rfaas_lease *l);

/* ---- request.c ---- */

/* Ends every request in flight on a worker whose channel failed, keeping the outcomes for their waiters. */
void rfaas_api_settle(rfaas_lease *l, uint32_t worker);

/* Takes in what has ended, so that slots are free; of one worker. */
void rfaas_api_collect_ended(rfaas_lease *l);
void rfaas_api_collect_ended_of(rfaas_lease *l, uint32_t worker);
/* Waits for every request in flight, each until its deadline. */
void rfaas_api_drain(rfaas_lease *l);

/* ---- failover.c ---- */

/* Whether the lease shall go on elsewhere when it ends. */
static inline bool rfaas_api_fails_over(const rfaas_lease *l) { return l->options.flags & RFAAS_LEASE_FAILOVER; }
/* Waits until there is another home, and moves there. Registered buffers have other dp_mems afterwards. With
 * RFAAS_LEASE_LOCAL it does not wait: calls run here (RFAAS_AGENT_DRAIN_LOCAL) until there is one. The lease's thread. */
int rfaas_api_move(rfaas_lease *l, const char *op, int64_t deadline);
/* Gives up the search for another home and what it has found. */
void rfaas_api_stop_seeking(rfaas_lease *l);
/* Adds up what a home's channels have counted. */
void rfaas_api_count(const rfaas_home *h, rfaas_statistics *s);

/* ---- local.c ---- */

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

/* ---- buffer.c ---- */

/* Registers all buffers anew, with the domain of this home. */
void rfaas_api_move_buffers(rfaas_lease *l, const rfaas_home *to);

/* Frees and forgets all of them. */
void rfaas_api_free_buffers(rfaas_lease *l);

#endif

/* What a session, a lease, a request and a grant are made of. The functions are in client.h. */
#ifndef RFAAS_HANDLES_H
#define RFAAS_HANDLES_H

#include <pthread.h>
#include <stdbool.h>

#include "agent.h"
#include "dp_channel.h"
#include "dp_claim.h"
#include "dp_turns.h"
#include "local_library.h"
#include "rfaas.h"

#define RFAAS_SESSIONS_MAX 256
#define RFAAS_WORKERS_MAX 1024
#define RFAAS_LEASE_MAGIC 0x4c464652u
#define RFAAS_SESSION_MAGIC 0x53464652u
#define RFAAS_DEPTH_DEFAULT 8
#define RFAAS_TIMEOUT_MAX_NS (INT64_MAX / 4) /* 73 years. Longer ones are cut, so that deadlines do not overflow */

enum { RFAAS_STATE_DOWN = 0, RFAAS_STATE_UP = 1, RFAAS_STATE_FORKED = 2 };
extern int rfaas_api_state; /* RFAAS_STATE_*; atomic, written under rfaas_api_mu */

typedef enum rfaas_request_state { RFAAS_REQ_FREE = 0, RFAAS_REQ_FLYING, RFAAS_REQ_ENDED } rfaas_request_state;

/* A payload and a result in pieces. */
typedef struct rfaas_call_pieces {
    dp_pieces in, out;
    void *rest;      /* from malloc: out's pieces, and memory for a result that is larger than the caller's (kept.c). NULL: none */
    size_t capacity; /* with `rest`: bytes of the caller's pieces */
} rfaas_call_pieces;

typedef struct rfaas_request_slot {
    uint64_t id; /* the handle, 0 when free */
    void *out;
    rfaas_call_pieces *pieces; /* in place of in and out, from malloc; NULL: those are contiguous */
    const void *in;   /* with repeats */
    uint32_t in_size; /* likewise */
    uint32_t repeats;
    int64_t deadline; /* of this attempt: CLOCK_MONOTONIC ns, 0: none */
    int64_t last;     /* of the whole call, likewise */
    int64_t attempt;  /* longest time of one attempt, ns; 0: no limit */
    int32_t chosen;   /* with repeats: the worker that the caller chose, or RFAAS_ANY_WORKER */
    uint32_t capacity;
    uint32_t size;
    int32_t status;
    uint32_t worker;
    uint32_t slot;
    rfaas_function function;
    uint32_t next_free; /* index + 1 */
    uint8_t state;      /* rfaas_request_state */
    uint8_t started;
    int32_t code; /* rfaas_function_code, with text */
    bool here; /* it has run in this process */
    bool told; /* the descriptor of the lease has become readable for its end (descriptor.c); relaxed atomic */
    bool kill; /* RFAAS_CALL_KILL */
    bool in_place; /* with repeats: as in the plan */
    bool result_in_place; /* as in the plan */
    char *text; /* error text of a call that ended with an error, from malloc; NULL otherwise */
} rfaas_request_slot;

typedef struct rfaas_worker {
    dp_channel *ch;
    uint32_t in_flight; /* requests in state FLYING; relaxed atomic, other threads read it to choose a worker */
    uint32_t overdue;   /* 1: the worker may still run a call whose deadline has passed; relaxed atomic */
    rfaas_request_slot *invoked; /* a shared lease's rfaas_invoke: its request, on that thread's stack; NULL: none */
    bool broken;        /* the channel is not connected: a replacement is under way or has failed */
    bool replacing;     /* the agent was asked for a replacement, which will connect to the channel as it was offered */
    bool kill;          /* the executor ends the worker at once when it replaces it */
    bool resumes;       /* the channel comes from a cached grant, so it is resumed and not connected */
    bool moving;        /* the worker was asked to use another queue pair, and the channel is reserved (promote.c) */
    bool awaited;       /* a call has waited for the worker's answer already */
    bool initialising;  /* the init call is in flight, and the channel is reserved (init.c) */
    uint32_t init_slot; /* of the init call */
    int64_t init_until; /* its deadline */
    /* Under the lease's mutex: */
    rfaas_worker_start start; /* how the worker came here */
    uint64_t pid;        /* of the worker that the channel is connected to, 0 while there is none */
    uint64_t dead_pid;   /* the last one reported dead */
    uint64_t silent_pid; /* worker whose channel broke without an event that gave the reason in time */
    int death_status;    /* of dead_pid; so are reason and details */
    char reason[512];
    char *details; /* from malloc, or NULL */
} rfaas_worker;

/* Memory that payloads may be sent from without a copy. */
typedef struct rfaas_buffer {
    void *addr;
    uint64_t size;   /* as asked for */
    uint64_t mapped; /* bytes that rfaas_alloc mapped here; 0: the memory is the caller's */
    int fd;          /* memory file of rfaas_alloc; -1: none */
    dp_mem *mem;     /* its registration for the lease's grant; NULL: the device copies payloads anyway, or refused */
    dp_mem *lent;    /* lets the grant's workers use the memory in place; NULL: they cannot */
    struct rfaas_buffer *next;
} rfaas_buffer;

enum { RFAAS_STARTS = RFAAS_START_SEEDED + 1 }; /* values of RFAAS_START_* */

/* Tells libraries apart without reading them: a file by its inode and times, bytes in memory by a checksum. */
typedef struct rfaas_library_id {
    uint64_t device, inode, size;
    int64_t modified_ns, changed_ns;
} rfaas_library_id;

typedef struct rfaas_promoting rfaas_promoting;
typedef struct rfaas_claimant rfaas_claimant;

/* The workers that one executor has granted, and the channels to them. */
typedef struct rfaas_grant {
    uint64_t key; /* names the grant to the agent; its low bits are the lease's index. 0: takes no more events */
    /* Of a cached grant (cached.c): */
    struct rfaas_grant *link;     /* the next one */
    const rfaas_session *session; /* of the released lease */
    bool cached;                  /* the agent has confirmed that the workers are cached */
    bool spare;                   /* no lease has used the workers */
    uint32_t held_by;             /* generation of the agent that holds the channels' descriptors; 0: none. Relaxed atomic */
    uint32_t tables_changed;      /* the session's count when the grant was made: the workers have the tables of that time */
    rfaas_agent_claim claim;      /* how the workers are claimed */
    rfaas_agent_own_claim own;    /* what a claim over the session's own queue pair gets; lease_id 0: they are not claimed in this way */
    uint32_t claim_by;            /* generation of the agent that has sent `claim`; 0: the workers cannot be claimed */
    uint32_t claimed_by;          /* of a claimed lease: generation of the agent that cached the workers */
    char **functions;             /* names of the library's functions, n_functions of them */
    uint32_t n_functions;
    int library_fd;               /* the library; -1: none */
    /* Of the lease: */
    rfaas_agent_spec spec;
    rfaas_library_id library;
    int64_t until_ns;    /* CLOCK_MONOTONIC: when the lease ends unless it is renewed */
    uint8_t sha256[32];  /* of the library */
    dp_endpoint *ep;
    rfaas_worker *workers;
    uint32_t n_workers;    /* number of channels: the workers that the lease wants */
    uint32_t present;      /* the first `present` workers have been granted or added */
    uint32_t room;         /* 1: the executor may have room for another worker; atomic */
    rfaas_ticket growing;  /* request for another worker; 0: none */
    rfaas_promoting *promoting; /* NULL: no own queue pairs are being made. The owner's, or that of a thread that holds all units */
    dp_channel_config cfg;
    uint64_t lease_id;
    char node[256], executor[256], provider[16];
    uint32_t starts[RFAAS_STARTS]; /* workers by RFAAS_START_* */
    uint32_t queue_pairs;          /* made for this grant */
    rfaas_statistics before;       /* counters of the channels when they came from a cached grant */
    /* Under the lease's mutex: */
    int ended; /* 0, or the status of calls that were in flight when the grant ended */
    char ended_reason[256];
} rfaas_grant;

#define RFAAS_NEWS_KEPT 16

/* An event that the program has not taken. */
typedef struct rfaas_news {
    uint32_t kind, worker;
    int64_t at; /* time of what the event announces, CLOCK_MONOTONIC ns; 0: none */
    char text[256];
} rfaas_news;

/* Getting the workers of a grant (acquire.c). */
typedef struct rfaas_acquisition {
    rfaas_lease *lease;
    rfaas_grant *grant;
    const char *at;      /* executor to ask first, or NULL */
    int64_t wait_until;  /* until when the agent waits for an executor that has room */
    int64_t until;       /* deadline of the present step */
    bool aside;          /* calls run in this process meanwhile; waits for room without channels (rfaas_api_acquire_begin) */
    int64_t patience;    /* time (ns) from which no other executor is asked if workers cannot be reached */
    rfaas_ticket ticket; /* of the present step */
    uint64_t cached;     /* key of the cached grant whose channels are offered; 0: none */
    bool initialising; /* the workers are granted and execute the init call */
    bool init_failed;  /* status is that of the init call; do not ask another executor */
    bool done;
    int64_t starved; /* since when rfaas_api_starved has been true; 0: it is not */
    uint32_t lost;  /* agents and grants that ended during it */
    uint32_t from;  /* generation of the agent that named the last candidate, whose search the next step continues; 0: none */
    int status;     /* once it is done */
    int32_t code;   /* rfaas_function_code of its error */
    int unreached;  /* status of the failed connection to the workers of the last grant; 0: none failed */
    char text[512]; /* of its error */
} rfaas_acquisition;

typedef struct rfaas_descriptor rfaas_descriptor; /* descriptor.c */

/* A thread that uses a lease alone (threads.c). Successive owners have different structures, because an earlier owner may still
 * write to its own. */
typedef struct rfaas_owner {
    uintptr_t thread; /* atomic; RFAAS_OWNER_NONE: no longer the owner */
    uint32_t busy;    /* the thread is inside the lease; atomic, futex */
} rfaas_owner;
#define RFAAS_OWNERS 16

/* The init call of a lease (init.c). */
typedef struct rfaas_init_call {
    char *function; /* NULL: none. The strings are from malloc */
    void *payload;
    uint32_t size;
    bool here; /* this process has executed it. Under local_mu in a shared lease */
} rfaas_init_call;

/* The memory of a handle is never freed, so a stale handle finds a cleared magic. It is reused as late as possible. */
struct rfaas_lease {
    uint32_t magic;
    uint32_t entered; /* counts calls, to look at the agent at every LOOK_EVERY-th */
    rfaas_owner *owner; /* atomic; changes only while the owner is outside */
    uint32_t shared;    /* several threads use the lease; atomic, stays set until the release */
    uint32_t grows;     /* RFAAS_DUE_*: grow.c or promote.c has something to do; atomic */
    rfaas_agent_lease_line *line; /* in the page that the agent shares: threads inside, and whether the node drains */
    uint32_t n_workers; /* number of workers that the lease has; grows up to `wanted` */
    uint32_t wanted;
    int64_t grow_at;    /* earliest time of the next check for new workers; INT64_MAX: a thread is checking. Atomic */
    uint32_t n_functions;
    rfaas_worker *workers; /* the grant's */
    uint32_t sync_worker;  /* worker of the last synchronous call, whose cache lines are here */
    uint32_t next_worker;
    rfaas_buffer *buffers;
    rfaas_request_slot *requests;
    uint32_t requests_used;
    uint32_t requests_free; /* index + 1 */
    uint64_t request_seq;
    dp_channel_config cfg;
    rfaas_grant *grant;          /* has no endpoint if no executor had room and calls run in this process */
    rfaas_local *local;             /* with RFAAS_LEASE_LOCAL */
    rfaas_lease_options options; /* checked, with defaults filled in; its pointers are valid only while the lease is opened */
    rfaas_agent_spec spec;       /* the options as the agent gets them */
    int64_t bundle_ns;           /* how long hashing and sending the files of options.bundle may take */
    rfaas_init_call init;
    char seed_name[RFAAS_AGENT_SEED_NAME]; /* of the seed from which the workers start; "": the lease names none */
    char seed_at[RFAAS_AGENT_ADDRESS];     /* executor that has made it, which is asked first */
    int library_fd;              /* the library, to be passed to the agent; -1: not opened */
    rfaas_library_id library;
    char **functions;
    rfaas_session *session;
    rfaas_lease *unreported_next; /* the next lease whose claim the agent does not know; see claim.c */
    uint32_t index; /* in the table of leases */
    uint32_t replaced;
    int64_t open_ns; /* time that rfaas_lease_open took */
    rfaas_descriptor *descriptor; /* descriptor.c; NULL: the program has not asked for it. Under mu */

    dp_turns *turns;          /* made when the handle's lease is first shared, and never freed; a unit for each lane */
    dp_event freed;           /* of a shared lease: a request was freed */
    rfaas_owner owners[RFAAS_OWNERS]; /* used in turn, also by later leases of this handle */
    uint32_t owned;           /* owners that the handle has had; under owner_mu */
    uint32_t first_owned;     /* value of owned when this lease was opened */
    pthread_mutex_t owner_mu; /* protects changes of the owner and of shared. Taken before all others */
    pthread_mutex_t table_mu; /* of a shared lease: protects the list of free requests. Taken last */
    pthread_mutex_t promote_mu; /* grant->promoting, for threads that replace workers. Taken before mu */
    pthread_mutex_t local_mu; /* of a shared lease: one call at a time in this process. Taken last */

    pthread_mutex_t mu; /* protects what events change, the pointers to grants, and, beside all units, the list of buffers */
    char draining_reason[256];
    char local_reason[256]; /* why calls run in this process */
    /* Failover. The owner, or a thread that holds all units, changes these. Changes of `next` also need mu. */
    rfaas_grant *next; /* being acquired, or ready */
    rfaas_acquisition seek;
    bool seeking, next_ready;
    int64_t seek_again;    /* earliest time of the next search */
    int64_t local_look;    /* while calls run in this process: earliest time of the next step of the search */
    int64_t seek_pause;    /* with RFAAS_LEASE_LOCAL: the pause before the present search, ns */
    int64_t seek_waited;   /* with RFAAS_LEASE_LOCAL: time that calls have waited for the present search, ns */
    char next_reason[512]; /* why the last search failed */
    int init_status;       /* error of the init call in the last search; 0: none */
    int32_t init_code;     /* rfaas_function_code of that */
    rfaas_statistics past; /* sum of earlier grants */
    rfaas_news news[RFAAS_NEWS_KEPT]; /* events that were not taken: a ring */
    uint32_t news_first, news_count, news_lost;
};

struct rfaas_session {
    uint32_t magic;
    uint32_t index;
    int64_t timeout_ns; /* of each control operation */
    rfaas_agent_session open; /* the message that opened it; open.session is the agent's name of it */
    char provider[16]; /* of the last grant, since the next one probably has the same; "": none yet */
    bool handed; /* the agent answered the last request with channels of a cached lease, so the next one offers none; relaxed atomic */
    dp_dev_options dev;
    uint32_t encrypt; /* DP_ENCRYPT_* for tcp and ofi */
    char device[64];
    pthread_mutex_t mu;
    bool shm; /* uses the shm device, of which the process has one */
    dp_dev *verbs, *tcp, *ofi, *brokered; /* NULL: not opened. brokered: of the agent's queue pairs on verbs */
    uint32_t nowhere; /* the session has no address (RFAAS_SESSION_LOCAL); relaxed atomic */
    struct {
        int64_t until; /* leases with RFAAS_LEASE_LOCAL do not look for executors before this time (CLOCK_MONOTONIC ns) */
        int status;
        char text[512];
    } away; /* the last slow failure of such a lease; under mu */
    uint32_t opening; /* leases that are being opened or are open; under rfaas_api_mu */
    struct rfaas_table *tables; /* under mu */
    uint32_t tables_changed;    /* how often `tables` has changed; atomic */
    struct rfaas_seed *seeds;   /* handles; under mu */
    pthread_mutex_t claimants_mu; /* held while a claimant claims. Taken before mu */
    rfaas_claimant *claimants;  /* the one that was used last is the first; under claimants_mu */
};

/* Request handle: sequence(32) | request index(20) | lease index(12), never 0 since the sequence is not. */
#define RFAAS_REQ_LEASE_BITS 12
#define RFAAS_REQ_INDEX_BITS 20
#define RFAAS_REQ_SEQ_MASK 0xffffffffu
_Static_assert(RFAAS_LEASES_MAX == RFAAS_AGENT_LEASES, "leases of a process, as the agent knows them");
_Static_assert(RFAAS_LEASES_MAX == 1 << RFAAS_REQ_LEASE_BITS, "lease index in a request handle");
_Static_assert((uint64_t)RFAAS_WORKERS_MAX * DP_DEPTH_MAX == 1 << RFAAS_REQ_INDEX_BITS, "request index in a handle");

#endif

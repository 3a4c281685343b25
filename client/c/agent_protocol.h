/* Messages between the client library and the agent of the same user and node. Both sides include this header: the
 * library in C, and the agent through cgo (internal/agent/protocol).
 *
 * A message is an rfaas_agent_header, the structure of its operation, and for some operations an array that follows it.
 * Sizes and layouts are those of the machine, since both processes run on it. If an operation passes descriptors, they
 * come with the first byte of the message (SCM_RIGHTS). Texts end with NUL and are truncated to their field.
 *
 *   library ── request, id n ──▶ agent        Replies come in any order.
 *   library ◀── reply, id n ──── agent        A failure has its status, and an error text instead of the structure.
 *   library ◀── event, id 0 ──── agent        After each event the agent adds 1 to `events` of the shared page.
 *
 * Both sides check every size, count and index of the other. A malformed message ends the connection.
 */
#ifndef RFAAS_AGENT_PROTOCOL_H
#define RFAAS_AGENT_PROTOCOL_H

#include <stdint.h>

#define RFAAS_AGENT_MAGIC 0x4e454741u /* first bytes of a hello: "AGEN" */
#define RFAAS_AGENT_PROTOCOL 15u      /* raised by every change that a program of an earlier version would misread */

#define RFAAS_AGENT_MESSAGE_MAX (1u << 20) /* bytes of a message */
#define RFAAS_AGENT_ADDRESS 256            /* bytes of an address, a host name or a path, with their NUL */
#define RFAAS_AGENT_TEXT 1024              /* bytes of an error text, with its NUL */
#define RFAAS_AGENT_BLOB 256               /* bytes of a channel blob */
#define RFAAS_AGENT_REASON 256             /* bytes of a reason that is part of an error text, with its NUL */
#define RFAAS_AGENT_UNSEEDED 160           /* the same, of a worker that has not started from its seed */
#define RFAAS_AGENT_SEED_MAX 65536         /* bytes of the payload of an init call for a seed */
#define RFAAS_AGENT_SEED_NAME 384          /* bytes of a seed's full name, with its NUL: NAME:VERSION@ADDRESS */
#define RFAAS_AGENT_LEASES 4096            /* leases of one process */
#define RFAAS_AGENT_WORKERS 1024           /* workers of one lease */
#define RFAAS_AGENT_FDS 253                /* descriptors of a message, as many as the kernel passes at once */
#define RFAAS_AGENT_RUNTIME 64             /* bytes of a runtime's name, with its NUL */
#define RFAAS_AGENT_BUNDLE 4096            /* bytes of a lease's list of paths, with their NUL */
#define RFAAS_AGENT_TABLES 64              /* tables of one session */
#define RFAAS_AGENT_TABLE_NAME 64          /* bytes of a table's name, with its NUL */
#define RFAAS_AGENT_TABLE_RATE (16u << 20) /* bytes per second: the slowest reading of a table for which requests wait, beyond the time-out */

enum {
    /* request -> reply; "-": only the header */
    RFAAS_AGENT_HELLO = 1,   /* rfaas_agent_hello, environment, descriptor of the page -> rfaas_agent_welcome */
    RFAAS_AGENT_STATUS = 2,  /* - -> rfaas_agent_report, text. Needs no hello before it */
    RFAAS_AGENT_STOP = 3,    /* - -> -. The agent then exits. Needs no hello before it */
    RFAAS_AGENT_OPEN = 4,    /* rfaas_agent_session -> rfaas_agent_opened */
    RFAAS_AGENT_CLOSE = 5,   /* rfaas_agent_session_name -> -. Ends those cached leases of the session that were not handed over */
    RFAAS_AGENT_ACQUIRE = 6, /* rfaas_agent_acquire, offers, seed; with the first step also the library's descriptor ->
                                rfaas_agent_candidate; if `granted` is set also workers and the names of functions */
    RFAAS_AGENT_ADOPT = 7,   /* rfaas_agent_adopt, pids of the workers, descriptor of the library -> rfaas_agent_until */
    RFAAS_AGENT_REPLACE = 8, /* rfaas_agent_replace -> rfaas_agent_worker. A repeated offer gets the same worker. Also adds a worker */
    RFAAS_AGENT_RELEASE = 9, /* rfaas_agent_release -> rfaas_agent_released. At any stage of a lease; no event follows */
    RFAAS_AGENT_INSPECT = 10, /* rfaas_agent_worker_name -> rfaas_agent_inspection */
    RFAAS_AGENT_RENEW = 11,   /* rfaas_agent_renewal -> rfaas_agent_until */
    RFAAS_AGENT_FINISH = 12,  /* rfaas_agent_lease_name, no reply: the lease starts no more calls */
    RFAAS_AGENT_SPREAD = 13,  /* rfaas_agent_spread, executors to avoid -> rfaas_agent_count, shares */
    RFAAS_AGENT_CHANGES = 14, /* rfaas_agent_session_name with count -> rfaas_agent_count, changes */
    RFAAS_AGENT_SILENT = 15,  /* rfaas_agent_silence, no reply */
    RFAAS_AGENT_EVENT = 16,   /* from the agent: rfaas_agent_event, details */
    RFAAS_AGENT_HAND = 17,    /* rfaas_agent_hand, channels, their descriptors, no reply: before a RELEASE that caches the lease.
                                 From the agent, with the id of an ACQUIRE or a RELEASE, before the reply whose `handed` or `spare` is set */
    RFAAS_AGENT_TABLE = 18,      /* rfaas_agent_table, descriptor -> -. Leases that are acquired from now on have the table */
    RFAAS_AGENT_TABLE_DROP = 19, /* rfaas_agent_table -> -. Its name counts */
    RFAAS_AGENT_REGION = 20,     /* from the agent: rfaas_agent_region, descriptor of a claim region (dp_claim.h). Before the first message that names it */
    RFAAS_AGENT_CLAIMED = 21,    /* rfaas_agent_adopt, pids of the workers, descriptor of the library, no reply: the library has claimed cached workers.
                                    If the agent cannot follow that lease, it sends the event ENDED */
    RFAAS_AGENT_SEED_CREATE = 22,  /* rfaas_agent_seed_create, function, payload -> rfaas_agent_seed, function, payload. The agent renews the seed from
                                      now on, until SEED_RELEASE or the end of the session */
    RFAAS_AGENT_SEED_FIND = 23,    /* rfaas_agent_seed_name -> rfaas_agent_seed, function, payload */
    RFAAS_AGENT_SEED_KEEP = 24,    /* rfaas_agent_seed_name -> -. The agent takes over the renewal from an earlier agent */
    RFAAS_AGENT_SEED_RELEASE = 25, /* rfaas_agent_seed_name -> -. The executor withdraws the seed */
    RFAAS_AGENT_TABLE_SEED = 26,   /* rfaas_agent_table_seed -> -. Leases that are acquired from now on have the seed as a table */
    RFAAS_AGENT_ATTACH = 27,       /* rfaas_agent_attach -> rfaas_agent_attached: makes the session a claimant of a granted lease's executor, in place of an
                                      earlier claimant. Only after a reply with OWN_MAY, because earlier agents do not know it */
};

typedef struct rfaas_agent_header {
    uint32_t size;  /* of the whole message */
    uint32_t op;    /* RFAAS_AGENT_*; that of the request in a reply */
    uint32_t id;    /* chosen by the library, not 0; that of the request in a reply. 0: an event, or a request without a reply */
    int32_t status; /* of a reply: RFAAS_OK or an error of rfaas.h */
} rfaas_agent_header;

/* ---- the shared page ----
 * A sealed memory file that the library makes and the agent maps. The agent writes `events`, both write `draining` and `claimed`, and the
 * library writes the rest. */
typedef struct rfaas_agent_lease_line {
    uint32_t draining; /* RFAAS_AGENT_DRAIN_*; every call reads it */
    uint32_t busy;     /* threads inside the lease */
    uint64_t key;      /* of the lease that uses this line */
    /* A claim that the agent does not know yet. The agent sets `claimed` to 0 when it follows the lease, because it has found the claim here or has got
     * CLAIMED. The library sets it to 0 when the lease is released, or adopted by the next agent. */
    uint64_t claimed;  /* key of the cached lease whose workers were claimed, or `key` if the agent had sent its channels; 0: no such claim */
    uint64_t lease_id; /* of the lease that the claim made */
    int64_t until_ns;  /* end of the client's use of that lease, CLOCK_MONOTONIC */
    uint8_t pad[24];
} rfaas_agent_lease_line;

/* When a node drains, the agent sets SOON and passes a barrier on all processors. If no thread is inside the lease then,
 * the agent finishes it. Otherwise the last thread that leaves sends FINISH. The side that changes SOON to TOLD does it.
 * LOCAL is the library's: calls run in the process. */
enum { RFAAS_AGENT_DRAIN_NOT = 0, RFAAS_AGENT_DRAIN_SOON = 1, RFAAS_AGENT_DRAIN_TOLD = 2, RFAAS_AGENT_DRAIN_LOCAL = 3 };

typedef struct rfaas_agent_page {
    uint32_t events; /* number of events sent */
    /* The connection that the library uses (`connection` of its hello), 0: none. The library sets it to 0 before it closes a connection without
     * giving up its leases. The agent then keeps them for the library's next connection, as long as the process lives. */
    uint32_t connection;
    uint8_t pad[56];
    rfaas_agent_lease_line leases[RFAAS_AGENT_LEASES];
} rfaas_agent_page;

/* ---- requests and replies ---- */

/* Followed by environment_size bytes: "NAME=VALUE" strings, each with its NUL. */
typedef struct rfaas_agent_hello {
    uint32_t magic, protocol;
    uint32_t environment_size;
    uint32_t connection;                   /* number of this connection; not 0 */
    char version[64];                      /* of the library */
    char directory[4096];                  /* the working directory, to which relative paths of the environment refer */
} rfaas_agent_hello;

typedef struct rfaas_agent_welcome {
    uint32_t protocol;
    int32_t pid;
    char version[64];
} rfaas_agent_welcome;

typedef struct rfaas_agent_region {
    uint32_t number; /* not 0 */
    uint32_t reserved;
} rfaas_agent_region;

/* How cached workers are claimed. */
typedef struct rfaas_agent_claim {
    uint32_t region; /* 0: they cannot be claimed, and the library offers their channels */
    uint32_t line;
    uint64_t sequence;
} rfaas_agent_claim;

/* Followed by text_size bytes of JSON. */
typedef struct rfaas_agent_report {
    uint32_t text_size;
    uint32_t reserved;
} rfaas_agent_report;

/* Set for a session that an earlier agent had: the agent opens it without asking the manager or executor, so that its leases are handed over at
 * once. */
#define RFAAS_AGENT_REOPEN 0x80000000u

typedef struct rfaas_agent_session {
    uint64_t session; /* chosen by the library */
    uint32_t flags;   /* RFAAS_SESSION_*, RFAAS_AGENT_REOPEN */
    int32_t keep;     /* most released leases to cache; 0: the default, negative: none */
    int64_t timeout_ns;
    uint32_t data_encryption; /* RFAAS_DATA_ENCRYPTION_*, or 0 */
    /* The RDMA device for the board and for transfers of tables, as in rfaas_session_options. */
    int32_t port, pkey_index, traffic_class, service_level, mtu;
    uint32_t gid; /* gid_index + 1; 0: chosen */
    uint32_t virtual_pairs; /* DP_VQP_VERSION of the library; earlier libraries send 0. If it differs from the agent's, no calls pass through the agent */
    char device[64];
    char manager[RFAAS_AGENT_ADDRESS], executor[RFAAS_AGENT_ADDRESS], tenant[RFAAS_AGENT_ADDRESS];
    char provider[16];
    char secret_file[RFAAS_AGENT_ADDRESS], token_file[RFAAS_AGENT_ADDRESS]; /* paths, or "" */
} rfaas_agent_session;

typedef struct rfaas_agent_opened {
    char provider[16]; /* likely provider of the session's first lease; "": not known, or the agent holds channels for it */
    uint32_t encrypt;  /* of the session's connections on tcp: a DP_ENCRYPT_* value of dp_fabric.h */
    uint32_t configured; /* 0: the session has no address, which RFAAS_SESSION_LOCAL permits */
} rfaas_agent_opened;

typedef struct rfaas_agent_session_name {
    uint64_t session;
    uint64_t count; /* CHANGES: largest number of changes in the reply */
} rfaas_agent_session_name;

/* A table of a session. The descriptor is that of a sealed memory file, opened for reading. */
typedef struct rfaas_agent_table {
    uint64_t session;
    uint64_t size;    /* bytes of the file */
    uint64_t address; /* at which workers map it, or 0 */
    char name[RFAAS_AGENT_TABLE_NAME];
} rfaas_agent_table;

/* The memory of a seed as a table of a session. */
typedef struct rfaas_agent_table_seed {
    uint64_t session;
    char name[RFAAS_AGENT_TABLE_NAME];
    char seed[RFAAS_AGENT_SEED_NAME];
} rfaas_agent_table_seed;

/* A seed of the granted lease `key`. Followed by the name of the function, without NUL, and its payload. */
typedef struct rfaas_agent_seed_create {
    uint64_t key;
    int64_t limit_ns; /* how long the function may take */
    int64_t ttl_ns;   /* 0: the executor's default */
    uint32_t function, payload; /* bytes */
    char name[64];    /* without version and address */
} rfaas_agent_seed_create;

typedef struct rfaas_agent_seed_name {
    uint64_t session;
    char name[RFAAS_AGENT_SEED_NAME];
} rfaas_agent_seed_name;

/* Followed by the name of the function, without NUL, and its payload. */
typedef struct rfaas_agent_seed {
    uint64_t bytes, memory;
    int64_t load_ns, setup_ns, capture_ns, left_ns;
    uint32_t version, children;
    uint32_t function, payload; /* bytes */
    char name[RFAAS_AGENT_SEED_NAME];
    char executor[RFAAS_AGENT_ADDRESS];
    char node[RFAAS_AGENT_ADDRESS]; /* and behind its NUL a warning with its NUL. Earlier libraries do not read the warning, and earlier agents send zeros */
} rfaas_agent_seed;

typedef struct rfaas_agent_blob {
    uint32_t size; /* 1 .. RFAAS_AGENT_BLOB */
    uint8_t bytes[RFAAS_AGENT_BLOB];
} rfaas_agent_blob;

/* The terms of a lease: rfaas_lease_options, checked, with defaults filled in. */
typedef struct rfaas_agent_spec {
    uint32_t workers, cores_per_worker, wait_mode, flags, depth, eager;
    uint32_t workers_min; /* at least 1 */
    uint32_t init; /* not 0: the first call of each worker is the init call. Earlier libraries send 0, and earlier agents ignore it */
    uint64_t memory, bulk;
    int64_t duration_ns, call_limit_ns;
    char executor[RFAAS_AGENT_ADDRESS]; /* the only executor to ask, or "" */
    char library[RFAAS_AGENT_ADDRESS];  /* the library's name in error texts */
    char bundle[RFAAS_AGENT_BUNDLE];    /* absolute paths of what travels with it, separated by colons */
    char runtime[RFAAS_AGENT_RUNTIME];  /* name, or "" */
} rfaas_agent_spec;

/* One step towards a lease. The first step for a key has the spec, or names a granted lease to whose workers the library could not
 * connect. In the latter case the search for that lease continues without its executor, and the library releases that lease after the
 * step. A step may offer channels. If the next candidate has their provider, the agent asks it for the lease with them. Otherwise the
 * reply names the candidate and the provider that it needs. Followed by `offers` blobs, none or one for each worker, and in the first step by
 * the name of the function of the lease's seed, without NUL, and its payload. */
typedef struct rfaas_agent_acquire {
    uint64_t key;     /* of the new lease, chosen by the library; its low bits are the lease's line in the page */
    uint64_t session;
    uint64_t from;    /* key of a granted lease whose workers could not be reached, or 0 */
    uint64_t cached;  /* key of a cached lease whose channels are offered again, or 0. After a reply with `handed`: `key` itself */
    int64_t wait_ns;  /* how long to wait for an executor that has room; 0: not at all */
    int64_t seed_limit_ns; /* how long the lease waits for the seed */
    uint32_t seed_function; /* bytes of the name; 0: no seed */
    uint32_t seed_payload;  /* bytes, at most RFAAS_AGENT_SEED_MAX */
    uint32_t offers;
    uint32_t first;   /* not 0: the first step for this key */
    int32_t status;   /* with `from`: the status with which connecting failed, else 0 */
    uint32_t reserved;
    char at[RFAAS_AGENT_ADDRESS]; /* executor to ask first, or "" */
    char seed[RFAAS_AGENT_SEED_NAME]; /* full name of the seed, or "" */
    char provider[16];            /* of the offered channels */
    char reason[RFAAS_AGENT_REASON]; /* why the workers of `from` could not be reached */
    rfaas_agent_spec spec;        /* of the first step, unless it has `from` */
} rfaas_agent_acquire;

typedef struct rfaas_agent_candidate {
    uint32_t granted; /* 0: offer channels of `provider` */
    uint32_t workers; /* granted: the first ones, workers_min or more. An event ROOM follows for the others */
    uint32_t functions;
    uint32_t names_size;                /* of their names, each with its NUL */
    uint32_t handed;  /* granted: the agent holds the channels' descriptors. Otherwise: the channels of a cached lease came before this
                         reply. The library then claims the workers and sends CLAIMED, or offers the channels with `cached` in the next
                         step. If that step has no offers, the agent gives up the channels */
    uint32_t reserved;
    rfaas_agent_claim claim;            /* with `handed`, not granted. If its region is not 0, workers and names follow as for a grant */
    uint64_t lease_id;
    int64_t until_ns;                   /* CLOCK_MONOTONIC: the lease ends then unless it is renewed */
    uint8_t library[32];                /* SHA-256 */
    char executor[RFAAS_AGENT_ADDRESS], node[RFAAS_AGENT_ADDRESS];
    char provider[16];
} rfaas_agent_candidate;

typedef struct rfaas_agent_worker {
    uint64_t pid;   /* on its node, where it identifies the worker; 0 in a reply to REPLACE: the worker is not there yet */
    uint32_t start; /* RFAAS_START_* */
    int64_t fork_ns, sandbox_ns, connect_ns, code_ns; /* as in rfaas_worker_start */
    rfaas_agent_blob blob;
    char unseeded[RFAAS_AGENT_UNSEEDED]; /* as in rfaas_worker_start */
} rfaas_agent_worker;

/* A lease that an earlier agent held, or that the library has claimed. Followed by the pid of each worker, a uint64_t; 0 for workers that have not been added. */
typedef struct rfaas_agent_adopt {
    uint64_t key, session, lease_id;
    int64_t until_ns;
    uint32_t present; /* workers that have been granted or added, the first ones */
    uint32_t reserved;
    uint64_t cached;  /* CLAIMED: key of the cached lease, or `key` itself if its channels came with a reply to ACQUIRE */
    uint8_t library[32];
    char at[RFAAS_AGENT_ADDRESS], node[RFAAS_AGENT_ADDRESS]; /* the executor, and its node */
    char provider[16];
    rfaas_agent_spec spec;
} rfaas_agent_adopt;

typedef struct rfaas_agent_until {
    int64_t until_ns;
} rfaas_agent_until;

typedef struct rfaas_agent_replace {
    uint64_t key;
    int64_t timeout_ns; /* how long to wait for the new worker; the replacement continues afterwards */
    uint32_t worker;
    uint32_t kill; /* not 0: end the old worker at once, else it may first end by itself */
    rfaas_agent_blob offer;
    uint32_t reserved;
} rfaas_agent_replace;

typedef struct rfaas_agent_release {
    uint64_t key;
    uint32_t keep; /* not 0: cache the workers for another lease, if possible; the channels are idle. KEEP_OWN: the session is a claimant of the executor */
    uint32_t ahead; /* not 0: if they are not cached, the library can take a spare lease with the same terms in advance */
} rfaas_agent_release;

#define RFAAS_AGENT_KEEP_OWN 2u

/* Of rfaas_agent_released. MAY: the library could claim such workers over a queue pair of its own, after ATTACH. CLAIM: it can claim these. Earlier agents
 * send NOT. */
enum { RFAAS_AGENT_OWN_NOT = 0, RFAAS_AGENT_OWN_MAY = 1, RFAAS_AGENT_OWN_CLAIM = 2 };

/* Followed by the pid of each worker of the spare lease, a uint64_t, or with OWN_CLAIM by rfaas_agent_own_claim. */
typedef struct rfaas_agent_released {
    uint32_t cached; /* not 0: the workers stay cached until an event DROPPED with this key */
    uint32_t handed; /* not 0: the agent holds the channels, and may give them to another process */
    uint32_t spare;  /* not 0: number of workers of a spare lease that is cached under this key from now on, in the same way. Its channels came
                        before this reply */
    uint32_t own;    /* RFAAS_AGENT_OWN_* */
    rfaas_agent_claim claim; /* OWN_CLAIM: region is 0 */
} rfaas_agent_released;

/* What a claim over the library's own queue pair gets. */
typedef struct rfaas_agent_own_claim {
    uint64_t lease_id;
    int64_t client_ns; /* how long the library may use that lease, from the claim on */
} rfaas_agent_own_claim;

typedef struct rfaas_agent_attach {
    uint64_t key;         /* of a granted lease */
    rfaas_agent_blob blob; /* of the library's queue pair */
    uint32_t reserved;
} rfaas_agent_attach;

typedef struct rfaas_agent_attached {
    uint64_t addr; /* of the cell (dp_claim.h) */
    uint32_t rkey;
    rfaas_agent_blob blob; /* of the executor's queue pair */
} rfaas_agent_attached;

/* Some channels of a lease at rest, in the order of its workers. Followed by `count` descriptions (dp_packed_channel) of `size` bytes, which
 * the agent does not read. Descriptors: in the message with the first channel, first that of the endpoint; then those of each channel. */
typedef struct rfaas_agent_hand {
    uint64_t key;
    uint32_t first, count, size;
    uint32_t fds;  /* how many descriptors belong to these channels, at most RFAAS_AGENT_FDS */
    uint32_t held; /* not 0: the message has none, because the agent already holds these channels */
    uint32_t reserved;
} rfaas_agent_hand;

typedef struct rfaas_agent_lease_name {
    uint64_t key;
} rfaas_agent_lease_name;

typedef struct rfaas_agent_worker_name {
    uint64_t key;
    uint32_t worker;
    uint32_t reserved;
} rfaas_agent_worker_name;

typedef struct rfaas_agent_inspection {
    int32_t pid;
    uint32_t output_size;
    uint64_t calls, failed, refused, bytes_in, bytes_out;
    char running[128];
    char output[4096];
} rfaas_agent_inspection;

typedef struct rfaas_agent_renewal {
    uint64_t key;
    int64_t duration_ns;
} rfaas_agent_renewal;

/* Followed by `avoid` addresses of RFAAS_AGENT_ADDRESS bytes. */
typedef struct rfaas_agent_spread {
    uint64_t session, workers, cores_per_worker, memory;
    int64_t duration_ns, wait_ns; /* wait_ns: how long to wait for room */
    uint32_t one;   /* not 0: every share is for leases of one worker each, even if the session or `executor` names the executor */
    uint32_t avoid;
    char executor[RFAAS_AGENT_ADDRESS];
} rfaas_agent_spread;

/* Followed by `count` structures rfaas_agent_share or rfaas_agent_change. */
typedef struct rfaas_agent_count {
    uint64_t count;
} rfaas_agent_count;

typedef struct rfaas_agent_share {
    uint64_t workers;
    char executor[RFAAS_AGENT_ADDRESS];
} rfaas_agent_share;

typedef struct rfaas_agent_change {
    uint32_t state; /* RFAAS_EXECUTOR_* */
    uint32_t reserved;
    char executor[RFAAS_AGENT_ADDRESS], node[RFAAS_AGENT_ADDRESS];
} rfaas_agent_change;

/* A worker that answered no call from since_ns to at_ns (CLOCK_MONOTONIC). If its executor finds that it never will answer,
 * an event reports that it died. */
typedef struct rfaas_agent_silence {
    uint64_t key;
    int64_t since_ns, at_ns;
    uint32_t worker;
    uint32_t reserved;
} rfaas_agent_silence;

/* Followed by details_size bytes of text: lines that the library appends to the error text. */
typedef struct rfaas_agent_event {
    uint64_t key;
    uint64_t pid;    /* of the worker that died */
    int64_t in_ns;   /* time until what the event announces */
    uint32_t kind;   /* RFAAS_EVENT_* or RFAAS_AGENT_DROPPED */
    int32_t status;  /* with which calls in flight end */
    uint32_t worker;
    uint32_t details_size;
    char text[512];
} rfaas_agent_event;

/* Kinds of events. DROPPED: the workers cached under this key have ended. ROOM: the executor may have room for another worker of the lease,
 * which the library asks for with REPLACE. After a refusal, another event follows when there is room again. */
#define RFAAS_AGENT_DROPPED 100
#define RFAAS_AGENT_ROOM 101

#endif

/* Messages between the client library and the agent of the same user and node. Both sides include this header: the
 * library, which is C, and the agent, which is Go and reads these structures through cgo (internal/agent/protocol).
 *
 * A message is an rfaas_agent_header, the structure of its operation, and in some cases an array behind it. Sizes and
 * layouts are those of the machine, since both processes run on it. A descriptor, where an operation has one, comes with
 * the first byte of its message (SCM_RIGHTS). Texts are NUL-terminated and cut to their field.
 *
 *   library ── request, id n ──▶ agent        Replies come in any order.
 *   library ◀── reply, id n ──── agent        A failed reply has a status and RFAAS_AGENT_TEXT bytes instead of a structure.
 *   library ◀── event, id 0 ──── agent        After each event the agent adds 1 to `events` of the shared page.
 *
 * Both sides check every size, count and index of the other: a broken message ends the connection.
 */
#ifndef RFAAS_AGENT_PROTOCOL_H
#define RFAAS_AGENT_PROTOCOL_H

#include <stdint.h>

#define RFAAS_AGENT_MAGIC 0x4e454741u /* first bytes of a hello: "AGEN" */
#define RFAAS_AGENT_PROTOCOL 1u       /* raised by every change of this header */

#define RFAAS_AGENT_MESSAGE_MAX (1u << 20) /* bytes of a message */
#define RFAAS_AGENT_ADDRESS 256            /* bytes of an address, a host name or a path, with their NUL */
#define RFAAS_AGENT_TEXT 1024              /* bytes of an error text, with its NUL */
#define RFAAS_AGENT_BLOB 256               /* bytes of a channel blob */
#define RFAAS_AGENT_LEASES 4096            /* leases of one process */
#define RFAAS_AGENT_WORKERS 1024           /* workers of one lease */

enum {
    RFAAS_AGENT_HELLO = 1,   /* rfaas_agent_hello, environment; descriptor: the page -> rfaas_agent_welcome */
    RFAAS_AGENT_STATUS = 2,  /* - -> rfaas_agent_report, text. Without a hello before it */
    RFAAS_AGENT_STOP = 3,    /* - -> -. Without a hello before it; the agent then exits */
    RFAAS_AGENT_OPEN = 4,    /* rfaas_agent_session -> - */
    RFAAS_AGENT_CLOSE = 5,   /* rfaas_agent_session_name -> -. Drops all connections that the session keeps */
    RFAAS_AGENT_ACQUIRE = 6, /* rfaas_agent_acquire, its offers; descriptor of the first one: the library -> rfaas_agent_candidate,
                                or, when it has granted: rfaas_agent_candidate, workers, names of functions */
    RFAAS_AGENT_ADOPT = 7,   /* rfaas_agent_adopt, processes of its workers; descriptor: the library -> rfaas_agent_until */
    RFAAS_AGENT_REPLACE = 8, /* rfaas_agent_replace -> rfaas_agent_worker. Repeating an offer gives the same worker */
    RFAAS_AGENT_RELEASE = 9, /* rfaas_agent_release -> rfaas_agent_released. At any stage; no event follows */
    RFAAS_AGENT_INSPECT = 10, /* rfaas_agent_worker_name -> rfaas_agent_inspection */
    RFAAS_AGENT_RENEW = 11,   /* rfaas_agent_renewal -> rfaas_agent_until */
    RFAAS_AGENT_FINISH = 12,  /* rfaas_agent_lease_name, without a reply: the lease starts no more calls */
    RFAAS_AGENT_SPREAD = 13,  /* rfaas_agent_spread, executors to leave out -> rfaas_agent_count, shares */
    RFAAS_AGENT_CHANGES = 14, /* rfaas_agent_session_name with count -> rfaas_agent_count, changes */
    RFAAS_AGENT_SILENT = 15,  /* rfaas_agent_silence, without a reply */
    RFAAS_AGENT_EVENT = 16,   /* from the agent: rfaas_agent_event, details */
};

typedef struct rfaas_agent_header {
    uint32_t size;  /* of the whole message */
    uint32_t op;    /* RFAAS_AGENT_*; a reply repeats its request's */
    uint32_t id;    /* chosen by the library, not 0; a reply repeats it. 0: an event, or a request without a reply */
    int32_t status; /* of a reply: RFAAS_OK or an error of rfaas.h */
} rfaas_agent_header;

/* ---- the shared page ----
 * A sealed memory file that the library makes and the agent maps. The agent writes `events` and `draining`, the library
 * `busy`. */
typedef struct rfaas_agent_lease_line {
    uint32_t draining; /* RFAAS_AGENT_DRAIN_*, for calls to look at */
    uint32_t busy;     /* not 0: a thread is inside the lease */
    uint64_t key;      /* of the lease that uses this line */
    uint8_t pad[48];
} rfaas_agent_lease_line;

/* The agent sets SOON, passes a barrier for all processes, and finishes the lease itself unless a thread is inside, which
 * otherwise does so when it leaves. Whoever changes SOON to TOLD finishes it. */
enum { RFAAS_AGENT_DRAIN_NOT = 0, RFAAS_AGENT_DRAIN_SOON = 1, RFAAS_AGENT_DRAIN_TOLD = 2, RFAAS_AGENT_DRAIN_LOCAL = 3 };

typedef struct rfaas_agent_page {
    uint32_t events; /* sent so far */
    uint8_t pad[60];
    rfaas_agent_lease_line leases[RFAAS_AGENT_LEASES];
} rfaas_agent_page;

/* ---- requests and replies ---- */

/* Behind it: environment_size bytes, "NAME=VALUE" strings, each with its NUL. */
typedef struct rfaas_agent_hello {
    uint32_t magic, protocol;
    uint32_t environment_size;
    uint32_t reserved;
    char version[64];                      /* of the library */
    char directory[4096];                  /* the working directory, for relative paths of the environment */
} rfaas_agent_hello;

typedef struct rfaas_agent_welcome {
    uint32_t protocol;
    int32_t pid;
    char version[64];
} rfaas_agent_welcome;

/* Behind it: text_size bytes of JSON. */
typedef struct rfaas_agent_report {
    uint32_t text_size;
    uint32_t reserved;
} rfaas_agent_report;

typedef struct rfaas_agent_session {
    uint64_t session; /* chosen by the library */
    uint32_t flags;   /* RFAAS_SESSION_* */
    int32_t keep;     /* released leases to keep connected; 0: the default, negative: none */
    int64_t timeout_ns;
    char manager[RFAAS_AGENT_ADDRESS], executor[RFAAS_AGENT_ADDRESS], tenant[RFAAS_AGENT_ADDRESS];
    char provider[16];
    char secret_file[RFAAS_AGENT_ADDRESS], token_file[RFAAS_AGENT_ADDRESS]; /* paths, or "" */
} rfaas_agent_session;

typedef struct rfaas_agent_session_name {
    uint64_t session;
    uint64_t count; /* CHANGES: the most that are wanted */
} rfaas_agent_session_name;

typedef struct rfaas_agent_blob {
    uint32_t size; /* 1 .. RFAAS_AGENT_BLOB */
    uint8_t bytes[RFAAS_AGENT_BLOB];
} rfaas_agent_blob;

/* What a lease shall be: rfaas_lease_options, checked, with defaults filled in. */
typedef struct rfaas_agent_spec {
    uint32_t workers, cores_per_worker, wait_mode, flags, depth, eager;
    uint64_t memory, bulk;
    int64_t duration_ns, call_limit_ns;
    char executor[RFAAS_AGENT_ADDRESS]; /* the only one to ask, or "" */
    char library[RFAAS_AGENT_ADDRESS];  /* its name in messages */
} rfaas_agent_spec;

/* One step towards a lease. The first one for a key has the spec, or names the lost lease that it shall be like. Each one may
 * offer channels; the agent asks the next candidate that has this provider with them, or replies which provider the next
 * candidate needs. Behind it: `offers` blobs, 0 or as many as workers. */
typedef struct rfaas_agent_acquire {
    uint64_t key;     /* of the new lease, chosen by the library; its low bits are the lease's line in the page */
    uint64_t session;
    uint64_t from;    /* key of a lost lease of this process, or 0 */
    uint64_t kept;    /* key of a released lease whose channels are offered again, or 0 */
    int64_t wait_ns;  /* how long to wait for an executor that has room; 0: not at all */
    uint32_t offers;
    uint32_t first;   /* not 0: the first step for this key */
    char at[RFAAS_AGENT_ADDRESS]; /* executor to begin at, or "" */
    char provider[16];            /* of the offered channels */
    rfaas_agent_spec spec;        /* of the first step, unless it has `from` */
} rfaas_agent_acquire;

typedef struct rfaas_agent_candidate {
    uint32_t granted; /* 0: offer channels of `provider` */
    uint32_t workers;
    uint32_t functions;
    uint32_t names_size;                /* of their names, each with its NUL */
    uint64_t lease_id;
    int64_t until_ns;                   /* CLOCK_MONOTONIC: the lease ends then unless it is renewed */
    uint8_t library[32];                /* SHA-256 */
    char executor[RFAAS_AGENT_ADDRESS], node[RFAAS_AGENT_ADDRESS];
    char provider[16];
} rfaas_agent_candidate;

typedef struct rfaas_agent_worker {
    uint64_t pid;   /* names a worker of its node; 0 in a reply to REPLACE: not there yet */
    uint32_t start; /* RFAAS_START_* */
    int64_t fork_ns, sandbox_ns, connect_ns, code_ns; /* as in rfaas_worker_start */
    rfaas_agent_blob blob;
} rfaas_agent_worker;

/* A lease that another agent held. Behind it: a uint64_t for each worker, its pid. */
typedef struct rfaas_agent_adopt {
    uint64_t key, session, lease_id;
    int64_t until_ns;
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
    int64_t timeout_ns; /* of waiting; the replacement goes on after it */
    uint32_t worker;
    rfaas_agent_blob offer;
} rfaas_agent_replace;

typedef struct rfaas_agent_release {
    uint64_t key;
    uint32_t keep; /* not 0: the channels are at rest and could serve another lease */
    uint32_t reserved;
} rfaas_agent_release;

typedef struct rfaas_agent_released {
    uint32_t kept; /* not 0: they will, or an event DROPPED with this key comes */
    uint32_t reserved;
} rfaas_agent_released;

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

/* Behind it: `avoid` addresses of RFAAS_AGENT_ADDRESS bytes. */
typedef struct rfaas_agent_spread {
    uint64_t session, workers, cores_per_worker, memory;
    int64_t duration_ns;
    uint32_t one;   /* not 0: leases of one worker each, also where the session or `executor` names the executor */
    uint32_t avoid;
    char executor[RFAAS_AGENT_ADDRESS];
} rfaas_agent_spread;

/* Behind it: that many rfaas_agent_share or rfaas_agent_change. */
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

/* A worker that has answered nothing since `since`, as of `at` (CLOCK_MONOTONIC). If its executor finds that it never will,
 * an event says that it died. */
typedef struct rfaas_agent_silence {
    uint64_t key;
    int64_t since_ns, at_ns;
    uint32_t worker;
    uint32_t reserved;
} rfaas_agent_silence;

/* Behind it: details_size bytes of text, lines to show below the error. */
typedef struct rfaas_agent_event {
    uint64_t key;
    uint64_t pid;    /* of the worker that died */
    int64_t in_ns;   /* until what it announces */
    uint32_t kind;   /* RFAAS_EVENT_* or RFAAS_AGENT_DROPPED */
    int32_t status;  /* what calls in flight end with */
    uint32_t worker;
    uint32_t details_size;
    char text[512];
} rfaas_agent_event;

/* What was kept under this key is not needed any more. */
#define RFAAS_AGENT_DROPPED 100

#endif

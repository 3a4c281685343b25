/* rfaas-worker: the zygote and its workers, and their messages to the executor and its spawner.
 *
 * The executor's spawner starts `rfaas-worker zygote` once with a SOCK_SEQPACKET socket as descriptor 3. The zygote loads
 * the providers, then answers spawn messages by cloning workers whose parent is the spawner (CLONE_PARENT), each
 * with its own seqpacket socket to the executor. The zygote never opens a device and never runs user code.
 *
 *   spawner  ◀─ zygote socket ─── zygote      HELLO {wire version, verbs devices, sandbox, version}
 *   spawner  ── zygote socket ──▶ zygote      SPAWN   + fds {worker socket, code, names, log pipe, page}
 *   spawner  ◀─ zygote socket ─── zygote      SPAWNED {pid} + fd {pidfd}   (or SPAWN_FAILED {status, text} + fds {processes
 *                                             that must be reaped})
 *                                             in a sandbox + fds {pidfd, guard's pidfd, and the stem's if there is one}
 *   executor ◀─ worker socket ─── worker      STARTED                   runs its first instructions
 *   executor ◀─ worker socket ─── worker      LOADED {times, channel blob}  sealed, connected to the client's queue pair, code
 *                                             loaded: serving
 *   executor ◀─ worker socket ─── worker      FAILED {status, text}     then the worker exits with DP_EXIT_FAILED
 *   spawner  ── zygote socket ──▶ zygote      PREPARE + fds {worker socket, log pipe, page}: a pooled worker
 *   executor ◀─ worker socket ─── worker      PREPARED                  waits for its lease; after STARTED
 *   executor ── worker socket ──▶ worker      SPAWN   + fds {code, names}: its lease; LOADED follows
 *   executor ── worker socket ──▶ worker      INSPECT + fds {code, output}: instead of a lease, read a library and exit
 *   executor ◀─ worker socket ─── worker      INSPECTED {count, bytes}  functions' names in the output; or FAILED {status, text}
 *   executor ── worker socket ──▶ worker      SYMBOLS + fds {code, output}: likewise, the functions at offsets in a library
 *   executor ◀─ worker socket ─── worker      INSPECTED {count, bytes}  one line in the output for each offset
 *   executor ── worker socket ──▶ worker      STOP                      finish the running call, exit 0
 *   executor ── worker socket ──▶ worker      FINISH                    finish all calls that were sent, exit 0
 *   executor ── worker socket ──▶ worker      PARK                      the lease is over: run nothing, do not spin
 *   executor ◀─ worker socket ─── worker      PARKED
 *   executor ── worker socket ──▶ worker      RESUME {client's blob}    a new lease of the same client
 *   executor ◀─ worker socket ─── worker      RESUMED {channel blob}    or FAILED, and the worker keeps waiting
 *
 * The worker and the executor share a page with the worker's state, also at its death (dp_worker_page).
 *
 * Before LOADED the process has run the user's code, which also has the worker socket. So the executor trusts LOADED only as
 * a sign that loading has ended. The blob goes only to that user's client, and the times are for information.
 *
 * One message is one packet: the 16-byte head, then `len` bytes of body. Little endian. Descriptors travel
 * by SCM_RIGHTS with the packet they belong to. A closed worker socket is a STOP, a closed zygote socket ends
 * the zygote but not its workers. internal/zygote/message.go is the Go side of this file; its tests compare the bytes.
 *
 *   dp_worker_zygote.c  messages, the zygote's loop, cloning
 *   dp_worker.c         the worker from its first instruction to its exit
 *   dp_worker_limits.c  its limits
 *   dp_worker_spare.c   channel memory that the zygote prepares
 *   dp_worker_sandbox.h its sandbox
 *   dp_worker_load.c    checking and loading the user's library
 *   dp_worker_inspect.c reading a library for the executor, without running it: INSPECT, SYMBOLS
 *   dp_worker_elf.h     the reader of ELF files for that
 *   dp_worker_crash.c   the report when user code ends the process
 *   dp_worker_main.c    main() of rfaas-worker
 */
#ifndef RFAAS_DP_WORKER_H
#define RFAAS_DP_WORKER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "dp_serve.h"
#include "dp_wire.h"
#include "dp_worker_elf.h"
#include "dp_worker_sandbox.h"

#define DP_MSG_MAGIC 0x4b574652u /* "RFWK" */
#define DP_MSG_MAX 4096          /* bytes of a message, head included */

enum {
    DP_MSG_SPAWN = 1,
    DP_MSG_SPAWNED = 2,
    DP_MSG_SPAWN_FAILED = 3,
    DP_MSG_LOADED = 5, /* body {u64 ns from the worker's first instruction, or from its lease, until now; of these u64 ns that the
                        * sandbox took, u64 ns that the library took; channel blob} */
    DP_MSG_FAILED = 6,
    DP_MSG_STOP = 7,
    DP_MSG_HELLO = 8, /* zygote to executor once after start: body {u32 wire version, u32 verbs devices, u32 DP_SANDBOX_* that
                       * work, text: what does not and why, NUL, text without NUL: version of the program} */
    DP_MSG_STARTED = 9,
    DP_MSG_FINISH = 10,
    DP_MSG_PREPARE = 11,
    DP_MSG_PREPARED = 12,
    DP_MSG_PARK = 14,
    DP_MSG_PARKED = 15,
    DP_MSG_RESUME = 16, /* body: the client's channel blob, as in SPAWN but of another generation */
    DP_MSG_RESUMED = 17, /* body: the worker's */
    DP_MSG_INSPECT = 18, /* body: dp_msg_inspect without offsets */
    DP_MSG_SYMBOLS = 19, /* body: dp_msg_inspect with at least one */
    DP_MSG_INSPECTED = 20, /* body {u32 names or lines, u32 bytes of them in the output} */
};

/* Exit statuses of zygote and worker. High numbers, so that a function's own exit(1) is not taken for one. A worker
 * that exits 0 without having been told to stop was ended by its function. */
enum {
    DP_EXIT_STOPPED = 0,
    DP_EXIT_USAGE = 2,
    DP_EXIT_FAILED = 90,      /* the worker could not start; FAILED says why */
    DP_EXIT_CLIENT_GONE = 91, /* the client's process ended or its queue pair broke */
    DP_EXIT_PROTOCOL = 92,    /* the client broke the protocol, or a function the queues that it shares */
    DP_EXIT_FABRIC = 93,      /* the device failed */
    DP_EXIT_ORPHAN = 94,      /* the executor was gone before the worker could tie itself to it */
    DP_EXIT_ZYGOTE = 95,      /* the zygote cannot work here; standard error says why */
};

typedef struct dp_msg_head {
    uint32_t magic;
    uint16_t version; /* DP_WIRE_VERSION */
    uint16_t type;
    uint32_t id; /* of the worker, chosen by the executor */
    uint32_t len;
} dp_msg_head;
_Static_assert(sizeof(dp_msg_head) == 16, "message head");

#define DP_CPUS_MAX 1024

#define DP_FUNCTIONS_MAX 65536     /* a request's function index has 16 bits */
#define DP_NAMES_MAX (4u << 20)    /* bytes of the names memfd */
#define DP_SPAWN_FDS 5
#define DP_PREPARE_FDS 3           /* of PREPARE: worker socket, log, page */
#define DP_LEASE_FDS 2             /* of a prepared worker's task: code and names, or code and output */

#define DP_JOIN_FDS_MAX 10

/* Body of SPAWN. Descriptors: worker socket, code memfd (sealed), names memfd (function names in index order, each
 * ended by a NUL), log (write end of a pipe; becomes stdout and stderr of the worker), page (memfd of DP_PAGE_SIZE
 * bytes); in a sandbox up to DP_JOIN_FDS_MAX control groups to join (dp_guard_files). Unused bytes are 0. In a PREPARE
 * the fields of a lease are 0: CPUs, memory limit, functions, blob, sizes of the channel. The limits of depth, eager and bulk
 * are the sizes of the most likely channel (eager and bulk multiples of 64; depth 0: no channel is made ahead). The SPAWN that
 * follows names the same device; its user and number of processes are ignored. */
typedef struct dp_msg_spawn {
    uint8_t provider; /* dp_provider_id */
    uint8_t wait_mode;
    uint8_t port;
    uint8_t pad0;
    int32_t gid_index; /* -1: choose */
    uint32_t pkey_index;
    uint32_t traffic_class;
    uint32_t service_level;
    uint32_t mtu;
    uint32_t max_depth;
    uint32_t max_eager;
    uint64_t max_bulk;
    uint64_t memory_limit;  /* bytes of private writable memory that user code may add, 0: unlimited */
    uint32_t n_functions;   /* 1..DP_FUNCTIONS_MAX */
    uint32_t blob_len;      /* client's channel blob, 1..DP_CHANNEL_BLOB_MAX */
    uint8_t cpus[DP_CPUS_MAX / 8]; /* bit i: pin to logical CPU i; no bit at all: not pinned */
    char device[64];        /* ends with a NUL; empty: the first usable */
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t uid; /* to run as, 0: as the zygote */
    uint32_t gid;
    uint32_t processes; /* limit for its user, including threads; 0: none. Only with a uid */
    /* Sizes of the client's channel. The executor reads them from the blob, because the zygote does not parse it. Depth 0:
     * unknown. */
    uint32_t channel_depth;
    uint64_t channel_bulk;
    uint32_t channel_eager;
    uint32_t pad1;
} dp_msg_spawn;
_Static_assert(offsetof(dp_msg_spawn, max_bulk) == 32 && offsetof(dp_msg_spawn, cpus) == 56 &&
                   offsetof(dp_msg_spawn, device) == 184 && offsetof(dp_msg_spawn, blob) == 248 &&
                   offsetof(dp_msg_spawn, uid) == 504 && offsetof(dp_msg_spawn, channel_depth) == 516 &&
                   offsetof(dp_msg_spawn, channel_bulk) == 520 && sizeof(dp_msg_spawn) == 536,
               "spawn message layout");

/* Body of INSPECT and SYMBOLS, which a prepared worker gets instead of a SPAWN: n_offsets offsets and no more bytes.
 * Descriptors: code memfd (sealed), output memfd of fixed size: DP_ELF_NAMES_MAX bytes, or DP_ELF_LINE_MAX for each
 * offset. */
typedef struct dp_msg_inspect {
    uint64_t memory_limit; /* additional private writable memory in bytes */
    uint32_t cpu_seconds;  /* processor time of the process, at least 1 */
    uint32_t n_offsets;    /* INSPECT: 0, SYMBOLS: 1..DP_ELF_OFFSETS_MAX */
    uint64_t offsets[DP_ELF_OFFSETS_MAX];
} dp_msg_inspect;
_Static_assert(offsetof(dp_msg_inspect, cpu_seconds) == 8 && offsetof(dp_msg_inspect, offsets) == 16 &&
                   sizeof(dp_msg_inspect) + sizeof(dp_msg_head) <= DP_MSG_MAX,
               "inspect message layout");

/* Body of SPAWNED: {u32 pid}. Body of LOADED: {u32 functions}.
 * Body of FAILED and SPAWN_FAILED: {i32 status, text without NUL}. */

/* ---- the page ---- */

/* Numbers that garbage hardly has: the page is where a function that runs wild writes too. */
enum {
    DP_DEATH_NOTED = 0x44454144,  /* everything but the text */
    DP_DEATH_TRACED = 0x44454145, /* the text too */
};
enum { DP_DEATH_STACK_OVERFLOW = 1, DP_DEATH_BY_ITSELF = 2 /* it sent the signal */ };

/* How user code ended the process, as far as that can be said from inside. */
typedef struct dp_worker_death {
    uint32_t state;    /* written last */
    int32_t signal;    /* 0: exit() was called */
    int32_t code;      /* si_code of the signal, or the exit status */
    int32_t sys_errno; /* of the dying thread: left by the last call of its that failed */
    uint64_t address;  /* si_addr */
    uint32_t sender;   /* process that sent the signal, if one did, as the worker sees it: 0 is outside of its sandbox */
    uint32_t flags;    /* DP_DEATH_* */
    uint32_t text_len;
    uint32_t pad;
    /* Backtrace, innermost frame first, one line each: "price+0x1f" for the user's library, "library+0x1139" where it
     * names no symbol, "cos+0x2a (libm.so.6)" for others. */
    char text[3584];
} dp_worker_death;

#define DP_PAGE_SIZE 4096

enum {
    DP_PHASE_BEGUN = 0,
    DP_PHASE_LEASED = 1,  /* one that was prepared has its lease */
    DP_PHASE_LOADING = 2, /* the user's library, whose code runs from now on */
    DP_PHASE_LOADED = 3,  /* that is done; what is left is the client's answer */
};

/* Written by the worker, read by the executor, which believes none of it: user code can write here. Zero at first. */
typedef struct dp_worker_page {
    dp_server_stats stats;
    uint32_t phase; /* DP_PHASE_* */
    uint8_t gap[256 - sizeof(dp_server_stats) - sizeof(uint32_t)];
    dp_worker_death death;
} dp_worker_page;
_Static_assert(sizeof(dp_server_stats) == 56 && offsetof(dp_server_stats, blocked_waits) == 48 &&
                   offsetof(dp_worker_page, phase) == 56 && offsetof(dp_worker_page, death) == 256 && offsetof(dp_worker_death, address) == 16 &&
                   offsetof(dp_worker_death, sender) == 24 && offsetof(dp_worker_death, text) == 40 &&
                   sizeof(dp_worker_page) <= DP_PAGE_SIZE,
               "worker page layout");

#define DP_VERSION_MAX 256 /* bytes of a version that are told */

/* Runs the zygote on the given socket until it closes; returns the exit status. The process has one thread. The executor is told the
 * version, and takes no zygote of another than its own. */
int dp_zygote_run(int sock, dp_sandbox *sandbox, const char *version);

/* ---- between this room's files ---- */

/* Sends one packet, with descriptor fd if it is not -1. Blocks while the socket is full. 0 or an errno. */
int dp_msg_send(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, int fd);
/* The same with n descriptors, at most DP_MSG_FDS_MAX. */
#define DP_MSG_FDS_MAX 3
int dp_msg_send_fds(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, const int *fds, int n);
/* Sends {status, text}; text longer than a packet is cut. */
int dp_msg_send_failure(int sock, uint16_t type, uint32_t id, int status, const char *text);

/* A prepared worker's task: its lease, or a library to read. */
typedef struct dp_msg_task {
    uint16_t type; /* DP_MSG_SPAWN, DP_MSG_INSPECT or DP_MSG_SYMBOLS */
    union {
        dp_msg_spawn lease;
        dp_msg_inspect inspect;
    };
} dp_msg_task;

/* dp_msg_recv_task waits for a prepared worker's task and checks it. Returns DP_OK, DP_CANCELLED (told to stop, or
 * the executor has ended), or why the task is invalid. After DP_OK the caller owns fds. */
int dp_msg_recv_task(int sock, dp_msg_task *task, int fds[DP_LEASE_FDS], dp_error *err);

typedef struct dp_worker_fds {
    int sock, code, names, log, page;
    dp_sandbox_fds sandbox;
} dp_worker_fds;

/* The life of a worker, called in the cloned child. m is valid; parent is the executor's pid as the zygote sees it. One
 * without functions is prepared only: it waits for its lease, and fds have neither code nor names (-1). memory: for its channel, or NULL. */
_Noreturn void dp_worker_live(uint32_t id, const dp_msg_spawn *m, const dp_worker_fds *fds, pid_t parent,
                              const dp_sandbox *sandbox, dp_ahead *memory);

/* Memory that the zygote prepares for a channel like that of the last worker that it cloned on verbs. After it is
 * taken it belongs to one process alone. Zero at first. */
typedef struct dp_spare {
    dp_ahead *memory; /* NULL: none */
    bool given;       /* given to the last worker, but still mapped here; unmapped later, when there is time */
    uint64_t size;    /* of one region of the next channel, 0: no memory is wanted */
} dp_spare;
/* dp_spare_fill prepares memory while nothing arrives on the socket. */
void dp_spare_fill(dp_spare *s, int sock);
/* dp_spare_take returns the prepared memory for the next worker. Call it before each clone, for a checked SPAWN or
 * PREPARE. Only processes cloned before the next call inherit the memory. NULL: no memory, as for everything except
 * a SPAWN on verbs whose channel has that size. */
dp_ahead *dp_spare_take(dp_spare *s, const dp_msg_spawn *m);

/* dp_worker_load checks and loads the library in the sealed memfd `code` and looks up n functions by the names in the
 * memfd `names`. On failure returns DP_BAD_LIBRARY (or DP_INVALID, DP_FATAL) with the reason in text. The library stays
 * loaded and the table allocated until the process ends. Runs the library's constructors. */
int dp_worker_load(int code, int names, uint32_t n, dp_function **table, char *text, size_t room);

/* dp_worker_inspect carries out an INSPECT or SYMBOLS and ends the process. memory is the process's private writable
 * memory in bytes. It runs no code of the library: it limits the process, gives up all system calls except those
 * that send the answer, and only then reads the file. */
_Noreturn void dp_worker_inspect(int sock, uint32_t id, const dp_msg_task *task, const int fds[DP_LEASE_FDS], uint64_t memory);

/* dp_worker_pin binds the process to the CPUs of DP_CPUS_MAX bits; none: it stays as it is. An error names the first that is not
 * there. dp_worker_memory is what the process has of private writable memory, in bytes, and dp_worker_limit_memory bounds what it may
 * add to that; 0: nothing. */
int dp_worker_pin(const uint8_t *cpus, dp_error *err);
int dp_worker_memory(uint64_t *bytes, dp_error *err);
int dp_worker_limit_memory(uint64_t has, uint64_t bytes, dp_error *err);
/* Has the pages of the program and its libraries in place, and own copies of those that it writes to: a worker that waits does
 * ahead what each step of its start would do page by page. */
void dp_worker_touch(void);
/* dp_worker_yield_to_others makes the kernel kill this process first when memory runs out, and disables core dumps. */
void dp_worker_yield_to_others(void);
/* dp_worker_limit sets the soft and the hard limit of a resource (RLIMIT_*) of the calling process to `most`, or to
 * the current hard limit if that is lower. Returns 0 or an errno. */
int dp_worker_limit(int resource, uint64_t most);

/* dp_crash_prepare loads what backtraces need, so that a dying process need not; once, in the zygote. */
void dp_crash_prepare(void);
/* dp_crash_note makes this process write into the page how it dies: by a signal that user code can cause, or exit().
 * SIGXCPU counts as one: the executor sends it to learn where a function hangs. Call it on the serving thread. */
void dp_crash_note(dp_worker_page *page);

#endif

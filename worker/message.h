/* The messages between the executor, its spawner, the zygote and the workers (README.md).
 *
 * The executor's spawner starts `rfaas-worker zygote` once with a SOCK_SEQPACKET socket as descriptor 3. The zygote loads
 * the providers, then answers spawn messages by cloning workers whose parent is the spawner (CLONE_PARENT), each
 * with its own seqpacket socket to the executor. The zygote never opens a device and never runs user code.
 *
 *   spawner  ◀─ zygote socket ─── zygote      HELLO {wire version, verbs devices, sandbox, version}
 *   spawner  ── zygote socket ──▶ zygote      SPAWN   + fds {worker socket, code, names, log pipe, page}
 *   spawner  ◀─ zygote socket ─── zygote      SPAWNED {pid} + fd {pidfd}; in a sandbox + fds {pidfd, guard's pidfd, and the
 *                                             stem's if there is one}
 *   spawner  ◀─ zygote socket ─── zygote      or SPAWN_FAILED {status, text} + fds {processes that must be reaped}
 *   executor ◀─ worker socket ─── worker      STARTED                   only with PREPARED, for executors of earlier versions (page.h: begun)
 *   executor ◀─ worker socket ─── worker      UNSEEDED {status, text}   before LOADED: it starts without its seed's state
 *   executor ◀─ worker socket ─── worker      LAID                      before LOADED: the heap of a seed that is filled on demand is mapped
 *   executor ── worker socket ──▶ worker      PAGED                     absent pages are filled from now on
 *   executor ◀─ worker socket ─── worker      LOADED {times, channel blob}  sealed, connected to the client's queue pair, code
 *                                             loaded: serving
 *   executor ◀─ worker socket ─── worker      FAILED {status, text}     then the worker exits with DP_EXIT_FAILED
 *   spawner  ── zygote socket ──▶ zygote      PREPARE + fds {worker socket, log pipe, page}: a pooled worker
 *   executor ◀─ worker socket ─── worker      PAGES   + fd {userfaultfd}  before PREPARED, so before user code runs (pages.h)
 *   executor ◀─ worker socket ─── worker      PREPARED                  waits for its lease
 *   executor ── worker socket ──▶ worker      SPAWN   + fds {code, names}, and {seed} if it starts from one: its lease; LOADED follows
 *   executor ── worker socket ──▶ worker      INSPECT + fds {code, output}: instead of a lease, read a library and exit
 *   executor ◀─ worker socket ─── worker      INSPECTED {count, bytes}  functions' names in the output; or FAILED {status, text}
 *   executor ── worker socket ──▶ worker      SEED + fds {code, names, seed, payload}: instead of a lease, make a seed and exit
 *   executor ◀─ worker socket ─── worker      SEEDED {times, warning}   the seed is complete; or FAILED {status, text}
 *   executor ── worker socket ──▶ worker      SYMBOLS + fds {code, output}: likewise, the functions at offsets in a library
 *   executor ◀─ worker socket ─── worker      INSPECTED {count, bytes}  one line in the output for each offset
 *   executor ── worker socket ──▶ worker      STOP                      finish the running call, exit 0
 *   executor ── worker socket ──▶ worker      FINISH                    finish all calls that were sent, exit 0
 *   executor ── worker socket ──▶ worker      SUSPEND                   the lease has ended: run nothing, block
 *   executor ◀─ worker socket ─── worker      SUSPENDED
 *   executor ── worker socket ──▶ worker      RESUME {client's blob}    serve a new lease of the same client; FAILED if the blob is another client's
 *   executor ◀─ worker socket ─── worker      RESUMED {worker's blob}   connected to the client; only if the blob of SPAWN had no queue pair
 *   executor ── worker socket ──▶ worker      TABLE {size, address, name} + fd {file}  after LOADED, before the client may call
 *   executor ◀─ worker socket ─── worker      TABLED                    the table is mapped; or FAILED {status, text}
 *   executor ── worker socket ──▶ worker      SOCKET {hello} + fd {connection}  only on provider tcp, after LOADED: the client's
 *                                             connection, which the executor has accepted
 *
 * The worker and the executor share a page with the worker's state, also at its death (page.h).
 *
 * Before LOADED the process has run the user's code, which also has the worker socket. So the executor trusts LOADED only as
 * a sign that loading has ended. The blob goes only to that user's client, and the times are for information.
 *
 * One message is one packet: the 16-byte head, then `len` bytes of body. Little endian. Descriptors travel
 * by SCM_RIGHTS with the packet they belong to. A closed worker socket is a STOP, a closed zygote socket ends
 * the zygote but not its workers. internal/zygote/message.go is the Go side of this file; its tests compare the bytes.
 */
#ifndef RFAAS_WORKER_MESSAGE_H
#define RFAAS_WORKER_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dp_channel.h"
#include "dp_elf.h"

#define DP_MSG_MAGIC 0x4b574652u /* "RFWK" */
#define DP_MSG_MAX 4096          /* bytes of a message, head included */

enum {
    DP_MSG_SPAWN = 1,
    DP_MSG_SPAWNED = 2,
    DP_MSG_SPAWN_FAILED = 3,
    DP_MSG_LOADED = 5, /* body {u64 ns from the worker's first instruction, or from its lease, until now; of these u64 ns that the
                        * sandbox took, u64 ns that the library took; channel blob}. Not to be changed without handover.Version */
    DP_MSG_FAILED = 6,
    DP_MSG_STOP = 7,
    DP_MSG_HELLO = 8, /* zygote to executor once after start: body {u32 wire version, u32 verbs devices, u32 DP_SANDBOX_* that
                       * work, text: what does not and why, NUL, text without NUL: version of the program} */
    DP_MSG_STARTED = 9,
    DP_MSG_FINISH = 10,
    DP_MSG_PREPARE = 11,
    DP_MSG_PREPARED = 12,
    DP_MSG_SUSPEND = 14,
    DP_MSG_SUSPENDED = 15,
    DP_MSG_RESUME = 16, /* body: the client's channel blob, as in SPAWN but of another generation */
    DP_MSG_INSPECT = 18, /* body: dp_msg_inspect without offsets */
    DP_MSG_SYMBOLS = 19, /* body: dp_msg_inspect with at least one */
    DP_MSG_INSPECTED = 20, /* body {u32 names or lines, u32 bytes of them in the output} */
    DP_MSG_TABLE = 22,     /* body: dp_msg_table */
    DP_MSG_TABLED = 23,
    DP_MSG_RESUMED = 24,   /* body: the worker's channel blob */
    DP_MSG_SEED = 25,      /* body: dp_msg_seed */
    DP_MSG_SEEDED = 26,    /* body {u64 ns that loading took, u64 ns of the setup function, u64 ns of the capture}, and a warning if there is one */
    DP_MSG_UNSEEDED = 27,  /* body {i32 status, text}: why */
    DP_MSG_PAGES = 28,
    DP_MSG_LAID = 29,
    DP_MSG_PAGED = 30,
    DP_MSG_SOCKET = 21,    /* body: the hello that was read from the connection (dp_tcp.h) */
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

/* A bundle is a directory below the executor's directory of bundles. Its name is an identifier in hexadecimal digits, which the executor
 * chooses. So no process with more rights than a worker reads bytes that a client has written. */
#define DP_BUNDLE_ID 16

#define DP_TABLE_NAME 64   /* bytes of a table's name, with its NUL */
#define DP_TABLES_MAX 64u  /* tables of a worker */

/* Body of TABLE. The descriptor is that of a sealed memory file of `size` bytes, opened for reading. If seed_units is not 0,
 * it is the file of a seed, whose heap the worker maps. */
typedef struct dp_msg_table {
    uint64_t size;
    uint64_t address; /* where to map it, whole pages; 0: anywhere */
    char name[DP_TABLE_NAME];
    uint32_t seed_units; /* size of the seed's heap, in units of 32 MiB; 0: not a seed */
    uint32_t pad;
} dp_msg_table;
_Static_assert(offsetof(dp_msg_table, name) == 16 && offsetof(dp_msg_table, seed_units) == 80 && sizeof(dp_msg_table) == 88, "table message layout");

#define DP_FUNCTIONS_MAX 65536     /* a request's function index has 16 bits */
#define DP_NAMES_MAX (4u << 20)    /* bytes of the names memfd */
#define DP_SPAWN_FDS 5
#define DP_PREPARE_FDS 3           /* of PREPARE: worker socket, log, page */
#define DP_LEASE_FDS 2             /* of a prepared worker's task: code and names, or code and output */
#define DP_SEED_FDS 4              /* of SEED: code, names, seed, payload */
#define DP_TASK_FDS_MAX 4

#define DP_JOIN_FDS_MAX 10

/* Body of SPAWN. If the client's blob has no queue pair, the first RESUME names the client (dp_serve.h: late servers).
 * Descriptors: worker socket, code memfd (sealed), names memfd (function names in index order, each ended by a NUL), log
 * (write end of a pipe; becomes stdout and stderr of the worker), page (memfd of DP_PAGE_SIZE bytes); in a sandbox up to
 * DP_JOIN_FDS_MAX control groups to join (dp_guard_files). Unused bytes are 0. In a PREPARE
 * the fields of a lease are 0: CPUs, memory limit, functions, blob, sizes of the channel. The limits of depth, eager and bulk
 * are the sizes of the most likely channel (eager and bulk multiples of 64; depth 0: no channel is made ahead). The SPAWN that
 * follows names the same device; its user and number of processes are ignored. */
typedef struct dp_msg_spawn {
    uint8_t provider; /* dp_provider_id */
    uint8_t wait_mode;
    uint8_t port;
    uint8_t encrypt; /* tcp: DP_ENCRYPT_* */
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
    char device[64];        /* ends with a NUL; empty: the first usable. tcp: the address to which clients connect.
                             * ofi: libfabric's provider, a comma, and its device, for libfabric's tcp the IP address */
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t uid; /* to run as, 0: as the zygote */
    uint32_t gid;
    uint32_t processes; /* limit for its user, including threads; 0: none. Only with a uid */
    /* Sizes of the client's channel. The executor reads them from the blob, because the zygote does not parse it. Depth 0:
     * unknown. */
    uint32_t channel_depth;
    uint64_t channel_bulk;
    uint32_t channel_eager;
    uint32_t seed_units; /* size of the heap of the seed that is descriptor 2, in units of 32 MiB; 0: no seed. Only of a prepared worker's lease */
    uint8_t bundle[DP_BUNDLE_ID]; /* identifier of the worker's bundle; all 0: none */
    uint32_t seed_child; /* number of the worker among those of its seed, from 1; 0: no seed */
    uint32_t seed_paged; /* 1: the seed's heap is filled on demand */
} dp_msg_spawn;
_Static_assert(offsetof(dp_msg_spawn, max_bulk) == 32 && offsetof(dp_msg_spawn, cpus) == 56 &&
                   offsetof(dp_msg_spawn, device) == 184 && offsetof(dp_msg_spawn, blob) == 248 &&
                   offsetof(dp_msg_spawn, uid) == 504 && offsetof(dp_msg_spawn, channel_depth) == 516 &&
                   offsetof(dp_msg_spawn, channel_bulk) == 520 && offsetof(dp_msg_spawn, bundle) == 536 && sizeof(dp_msg_spawn) == 560,
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

/* Body of SEED, which a prepared worker gets instead of a SPAWN. Descriptors: code memfd (sealed), names memfd with one name, that of the setup
 * function, the seed's file, and a file with the payload, which is passed to the function. */
typedef struct dp_msg_seed {
    uint64_t memory_limit; /* as in SPAWN; the heap counts too */
    uint32_t seed_units;   /* size of the heap, in units of 32 MiB, at least 2 */
    uint32_t payload_size;
} dp_msg_seed;
_Static_assert(sizeof(dp_msg_seed) == 16, "seed message layout");

/* Body of SPAWNED: {u32 pid}.
 * Body of FAILED and SPAWN_FAILED: {i32 status, text without NUL}. */

/* Sends one packet, with descriptor fd if it is not -1. Blocks while the socket is full. 0 or an errno. */
int dp_msg_send(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, int fd);
/* The same with n descriptors, at most DP_MSG_FDS_MAX. */
#define DP_MSG_FDS_MAX 3
int dp_msg_send_fds(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, const int *fds, int n);
/* Sends {status, text}; text longer than a packet is cut. */
int dp_msg_send_failure(int sock, uint16_t type, uint32_t id, int status, const char *text);
/* The same with n_fds descriptors, at most DP_MSG_FDS_MAX. */
int dp_msg_send_failure_fds(int sock, uint16_t type, uint32_t id, int status, const char *text, const int *fds, int n_fds);

/* The descriptors of one packet that are received. The kernel closes any others and sets MSG_CTRUNC. */
#define DP_PACKET_FDS_MAX 16

/* A packet as received. Its bytes are not checked. */
typedef struct dp_packet {
    union {
        dp_msg_head head;
        unsigned char bytes[DP_MSG_MAX];
    };
    size_t len;
    bool cut; /* longer than DP_MSG_MAX, or more descriptors than DP_PACKET_FDS_MAX */
    int fds[DP_PACKET_FDS_MAX];
    int n_fds;
} dp_packet;

/* dp_packet_recv blocks for one packet. Returns 1 (a packet, whose descriptors the caller closes), 0 (the socket is
 * closed) or -errno. */
int dp_packet_recv(int sock, dp_packet *p);
void dp_packet_close(dp_packet *p);
/* dp_packet_spawn checks a packet as a SPAWN or PREPARE to the zygote, and copies its body. Returns DP_OK, DP_PROTOCOL or
 * DP_INVALID. */
int dp_packet_spawn(const dp_packet *p, dp_msg_spawn *m, dp_error *err);

/* dp_msg_pinned_channel returns true for a cold start on a device that pins memory, with the sizes of the channel. They are
 * those that the executor names, since the zygote does not parse the client's blob. Wrong sizes only cost time, because the
 * worker compares them. */
bool dp_msg_pinned_channel(const dp_msg_spawn *m, dp_channel_config *sizes);

/* A prepared worker's task: its lease, or a library to read. */
typedef struct dp_msg_task {
    uint16_t type; /* DP_MSG_SPAWN, DP_MSG_SEED, DP_MSG_INSPECT or DP_MSG_SYMBOLS */
    union {
        dp_msg_spawn lease;
        dp_msg_seed seed;
        dp_msg_inspect inspect;
    };
} dp_msg_task;

/* dp_packet_task checks a packet as a task of a prepared worker, and copies its body. Returns DP_OK, DP_PROTOCOL or DP_INVALID. */
int dp_packet_task(const dp_packet *p, dp_msg_task *task, dp_error *err);

/* dp_msg_recv_task waits for a prepared worker's task and checks it. Returns DP_OK, DP_CANCELLED (told to stop, or
 * the executor has ended), or why the task is invalid. After DP_OK the caller owns fds. A descriptor that the task lacks is -1. */
int dp_msg_recv_task(int sock, dp_msg_task *task, int fds[DP_TASK_FDS_MAX], dp_error *err);

#endif

/* rfaas.h: call functions on leased cores of other nodes by remote memory write.
 *
 * Link with -lrfaas. Ten lines to offload:
 *
 *     rfaas_session *s;  rfaas_lease *l;  rfaas_function f;  size_t n;
 *     rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;      // address from RFAAS_MANAGER or RFAAS_EXECUTOR
 *     rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
 *     lo.library = "libprices.so";  lo.workers = 4;
 *     rfaas_init(NULL);
 *     rfaas_session_open(&so, &s);
 *     rfaas_lease_open(s, &lo, &l);
 *     rfaas_lease_function(l, "price", &f);
 *     rfaas_invoke(l, f, in, in_size, out, sizeof out, &n, NULL);
 *     rfaas_lease_release(l);  rfaas_session_close(s);  rfaas_finalize();
 *
 * Results of functions. Every function that returns int returns RFAAS_OK (0) or one of the negative RFAAS_* codes
 * below. After an error, rfaas_last_error() on the same thread tells it in words and names the offending value, and
 * rfaas_started() tells whether the remote function may have run. No output argument is written on an error
 * unless its description says so.
 *
 * Threads. Sessions may be used by several threads. A lease and its requests are used by ONE thread at a time; a
 * second thread inside the same lease gets RFAAS_WRONG_THREAD (found on a best-effort basis: it is a diagnosis, not
 * a lock). Threads that want to call at the same time take a lease each. Any number of leases may exist.
 * The library may be used before MPI_Init and after MPI_Finalize and at every MPI thread level; it makes no MPI
 * call. It runs a few threads of its own that sleep unless control messages arrive.
 *
 * Fork. A child of fork() can use neither the parent's leases nor, once librfaas.so is loaded, the library itself: all its
 * calls return RFAAS_INVALID, rfaas_init too, also where the parent has not called it. A program that it starts by exec can.
 *
 * Handles. Sessions and leases are opaque pointers, requests are numbers. NULL, an ended request, a released
 * lease and a call before rfaas_init or after rfaas_finalize give RFAAS_INVALID. A pointer that never was a handle
 * cannot be told from one and is undefined behaviour.
 *
 * Versions. Option structures start with their size, set by their *_INIT initialiser, so a program compiled against
 * an older header runs with a newer library. Fields are only ever appended; 0 always means the default.
 */
#ifndef RFAAS_H
#define RFAAS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RFAAS_API __attribute__((visibility("default")))
#else
#define RFAAS_API
#endif

#define RFAAS_VERSION_MAJOR 0
#define RFAAS_VERSION_MINOR 3

/* ---- status codes ----
 * A status is 0 or -(class * 100 + detail). The class says what to do next; codes are stable and new details may
 * appear, so switch over RFAAS_CLASS(status) where the detail does not matter. */

#define RFAAS_OK 0

#define RFAAS_BUSY (-100) /* no free slot or core: try again after finishing some request */

#define RFAAS_INVALID (-200)      /* an argument is wrong; the text names it */
#define RFAAS_TOO_LARGE (-201)    /* payload or capacity larger than the lease's limits */
#define RFAAS_NO_FUNCTION (-202)  /* no such function in the library */
#define RFAAS_BAD_BLOB (-203)     /* the other side's queue-pair address is malformed */
#define RFAAS_BAD_LIBRARY (-204)  /* the library cannot be read or loaded; the text says why */
#define RFAAS_BAD_REQUEST (-205)  /* the worker refused a malformed request */
#define RFAAS_WRONG_THREAD (-206) /* two threads inside one lease */

#define RFAAS_UNSUPPORTED (-300) /* this provider, device or executor cannot do it */
#define RFAAS_NO_DEVICE (-301)   /* no such RDMA device, port or GID */

#define RFAAS_FUNCTION_FAILED (-400)  /* the function reported failure; the text is its message */
#define RFAAS_RESULT_TOO_LARGE (-401) /* the result exceeds the capacity given */
#define RFAAS_DEADLINE (-402)         /* the deadline passed; the function may still be running */
#define RFAAS_CANCELLED (-403)        /* cancelled by rfaas_cancel */

#define RFAAS_CONNECTION (-500)  /* the connection to the worker or to the control port broke */
#define RFAAS_PEER_GONE (-501)   /* the other process or node is gone, or cannot be reached */
#define RFAAS_WORKER_DIED (-502) /* the worker died; the text says how. The next call gets a new worker */
#define RFAAS_PROTOCOL (-503)    /* the other side does not keep to the protocol, or has another version */
#define RFAAS_TIME_LIMIT (-504)  /* a function ran longer than the lease's call_limit_ns; its worker was killed */
#define RFAAS_MEMORY_LIMIT (-505) /* a function exceeded the lease's memory and died of it, and its worker with it */

#define RFAAS_LEASE_ENDED (-600) /* released, expired or revoked: take a new lease */

#define RFAAS_FATAL (-700) /* out of memory, device removed, kernel refused */

#define RFAAS_CREDENTIAL (-800) /* the token or secret is missing, wrong, expired, revoked or not valid yet; the text says which */

#define RFAAS_CLASS(status) ((status) >= 0 ? 0 : -(status) / 100)
#define RFAAS_CLASS_BUSY 1        /* retry */
#define RFAAS_CLASS_INVALID 2     /* fix the call */
#define RFAAS_CLASS_UNSUPPORTED 3 /* take another path */
#define RFAAS_CLASS_FUNCTION 4    /* this call failed, the lease is good */
#define RFAAS_CLASS_CONNECTION 5  /* the worker is replaced at the next call */
#define RFAAS_CLASS_LEASE 6       /* take a new lease */
#define RFAAS_CLASS_FATAL 7       /* stop */
#define RFAAS_CLASS_CREDENTIAL 8  /* get another token, or set the clock, then repeat */

/* rfaas_strerror returns the short English name of a status: a constant string, never NULL. Any thread. */
RFAAS_API const char *rfaas_strerror(int status);

/* rfaas_last_error returns what went wrong in the last failed call of this thread: operation, offending value,
 * reason. Never NULL; "" when nothing failed yet. The string is the thread's and valid until its next rfaas call. */
RFAAS_API const char *rfaas_last_error(void);

#define RFAAS_NOT_STARTED 0    /* the function has not run and will not: repeating the call is safe */
#define RFAAS_MAYBE_EXECUTED 1 /* it may have run, be running or run later */

/* rfaas_started tells whether the function of the last failed invocation, wait, test or cancel of this thread may have
 * been executed. */
RFAAS_API int rfaas_started(void);

/* ---- library ---- */

/* rfaas_init starts the library. Reference counted: each successful rfaas_init needs one rfaas_finalize. options must
 * be NULL (room for later). Thread safe. May block for some milliseconds while the library's threads start. */
RFAAS_API int rfaas_init(const void *options);

/* rfaas_finalize undoes one rfaas_init; the last one closes every session and releases every lease. No other call
 * may be running. */
RFAAS_API int rfaas_finalize(void);

/* rfaas_version returns MAJOR * 1000 + MINOR of the library at run time. */
RFAAS_API int rfaas_version(void);

/* ---- sessions: where to find executors ---- */

typedef struct rfaas_session rfaas_session;

typedef struct rfaas_session_options {
    uint32_t struct_size; /* sizeof(rfaas_session_options) */
    int32_t port;         /* verbs: port of the device, from 1; 0: the first active one */
    /* host:port of a resource manager. NULL or "": environment RFAAS_MANAGER, unless `executor` is given. */
    const char *manager;
    /* host:port of one executor, without a manager. NULL or "": environment RFAAS_EXECUTOR, if that is set and
     * no manager is given. */
    const char *executor;
    /* "shm", "verbs", or "auto" (NULL, ""): environment RFAAS_PROVIDER, else shm on the executor's own node and
     * verbs elsewhere. */
    const char *provider;
    const char *tenant;  /* account that pays; NULL or "": the user's name */
    const char *device;  /* verbs: device name; NULL or "": the first with an active port */
    int32_t gid_index;   /* verbs: -1 chooses (RoCE v2 preferred) */
    int32_t pkey_index;  /* verbs */
    int32_t traffic_class; /* verbs: 0..255 */
    int32_t service_level; /* verbs: 0..15 */
    int32_t mtu;           /* verbs: 256..4096 bytes; 0: the port's */
    uint32_t flags;        /* RFAAS_SESSION_* or 0 */
    int64_t timeout_ns;    /* bound for each control operation (open, lease, replacing a worker); 0: 10 s */
    int32_t keep_leases;   /* released leases that stay connected (rfaas_lease_release); 0: environment RFAAS_KEEP_LEASES, else 16;
                              negative: none */
    uint32_t reserved;     /* 0 */
} rfaas_session_options;

/* Leaves out TLS, also with control addresses that are neither loopback nor unix sockets: for networks that are trusted. Also by
 * environment RFAAS_ALLOW_PLAINTEXT=1. */
#define RFAAS_SESSION_ALLOW_PLAINTEXT 1u

#define RFAAS_SESSION_OPTIONS_INIT \
    { sizeof(rfaas_session_options), 0, NULL, NULL, NULL, NULL, NULL, -1, 0, 0, 0, 0, 0, 0, 0, 0 }

/* rfaas_session_open reaches the manager or executor once and checks its version. options may be NULL (everything
 * from the environment). Blocks up to the time-out. Strings are copied.
 * Errors: RFAAS_INVALID (no address, malformed address, unknown provider), RFAAS_PEER_GONE (no answer),
 * RFAAS_PROTOCOL (the peer is not an rfaas peer, or has another version). */
RFAAS_API int rfaas_session_open(const rfaas_session_options *options, rfaas_session **session);

/* rfaas_session_close releases the session's leases and closes it. The handle is dead afterwards. */
RFAAS_API int rfaas_session_close(rfaas_session *session);

/* ---- what happens to executors ---- */

#define RFAAS_EXECUTOR_OPEN 1     /* lends cores; also: has come, is back */
#define RFAAS_EXECUTOR_DRAINING 2 /* gives out no more leases */
#define RFAAS_EXECUTOR_SILENT 3   /* was not heard of for some heartbeats */
#define RFAAS_EXECUTOR_LEFT 4     /* has signed off */

typedef struct rfaas_change {
    uint32_t state;     /* RFAAS_EXECUTOR_*: what it is now */
    uint32_t reserved;  /* 0 */
    char executor[256]; /* its control address */
    char node[256];     /* host name */
} rfaas_change;

/* rfaas_session_changes returns what has happened to the resource manager's executors since the last call for this session, at
 * most `capacity` changes; what is left comes with the next call. The first one begins with those that are there. The resource
 * manager writes changes into this process's memory, so that looking costs no message. Does not block but to connect for the
 * first time and after a restart of the manager, which it does by itself. *count is 0 when nothing has happened. Errors:
 * RFAAS_UNSUPPORTED (there is no resource manager, or no way to its memory from here); connection class: it is away, look again
 * later. One thread at a time per session. */
RFAAS_API int rfaas_session_changes(rfaas_session *session, rfaas_change changes[], size_t capacity, size_t *count);

/* Is called with one change after the other; anything but 0 ends rfaas_session_watch, which returns it. */
typedef int (*rfaas_change_fn)(const rfaas_change *change, void *arg);

/* rfaas_session_watch calls f with every change, on the calling thread, which looks every 5 ms. Returns what f returned if that
 * was not 0, RFAAS_DEADLINE after timeout_ns (0: never), and the errors of rfaas_session_changes but for those of the
 * connection class: while the manager is away it waits. f may use the library, but for closing this session. */
RFAAS_API int rfaas_session_watch(rfaas_session *session, rfaas_change_fn f, void *arg, int64_t timeout_ns);

/* ---- leases: workers on an executor ---- */

typedef struct rfaas_lease rfaas_lease;

#define RFAAS_WAIT_ADAPTIVE 0 /* spin for about as long as a wake-up takes, then block: the default */
#define RFAAS_WAIT_HOT 1      /* spin: lowest latency, one core each on both sides */
#define RFAAS_WAIT_WARM 2     /* block at once: no core is burnt */

#define RFAAS_NO_BULK UINT64_MAX

typedef struct rfaas_lease_options {
    uint32_t struct_size;      /* sizeof(rfaas_lease_options) */
    uint32_t workers;          /* 1..1024; 0: 1 */
    uint32_t cores_per_worker; /* 0: 1 */
    uint32_t depth;            /* calls in flight per worker, 1..1024; 0: 8 */
    uint32_t eager;            /* bytes of payload that travel with the request, 1..262144, rounded up to 64s; 0: 16384 */
    uint32_t wait_mode;        /* RFAAS_WAIT_*, both sides */
    /* Bytes, per worker and direction, that the large payloads in flight may take together, so also the largest
     * payload or result; 0: 2 MiB; RFAAS_NO_BULK: none, `eager` is the limit then. At most 4 GiB. */
    uint64_t bulk;
    uint64_t memory;       /* bytes of memory per worker; 0: the executor's default */
    int64_t duration_ns;   /* the lease ends by itself after this time; 0: the executor's default */
    const char *library;   /* path of the shared library with the functions, on this machine */
    const void *library_data; /* or the library itself in memory; used when `library` is NULL */
    size_t library_size;      /* bytes of library_data */
    const char *executor;     /* host:port: this executor and no other; NULL or "": the session's choice */
    /* How long one call may run: a worker that takes longer is killed and the call ends with RFAAS_TIME_LIMIT. 0: the
     * executor's own limit, if it has one. */
    int64_t call_limit_ns;
    uint32_t flags;    /* RFAAS_LEASE_* or 0 */
    uint32_t reserved; /* 0 */
} rfaas_lease_options;

/* Renews the lease in the background for as long as it is held. So is one without duration_ns. */
#define RFAAS_LEASE_RENEW 1u

/* Goes on elsewhere. When the executor is lost, or its node drains, a new lease with as many workers is taken in the
 * background, wherever the session finds one (at the given executor alone if there is one), again and again until it
 * succeeds, and the next call moves to it. Such a call waits for it, at most until its deadline or for the session's
 * time-out, and fails with RFAAS_LEASE_ENDED, not started, if there is none by then. State that functions kept in
 * the old workers is gone. Calls in flight fail as without the flag, except those with `repeats`. */
#define RFAAS_LEASE_FAILOVER 2u

/* Runs functions in the calling process when there is no executor for them: the library is opened there too (dlopen),
 * so its constructors run and what it is linked with must be there (RFAAS_BAD_LIBRARY). If no executor can be reached
 * or has enough free cores and memory, rfaas_lease_open succeeds, rfaas_lease_info says provider "local", and the lease
 * stays local until it is released. With RFAAS_LEASE_FAILOVER calls run here from the loss of the executor until
 * another one is found. Such a call runs on the caller's thread before rfaas_invoke or rfaas_iinvoke returns; no
 * deadline, time or memory limit ends it, a crash is the caller's, rfaas_state is another one, and rfaas_fail only
 * prints (rfaas_function.h). */
#define RFAAS_LEASE_LOCAL 4u

#define RFAAS_LEASE_OPTIONS_INIT \
    { sizeof(rfaas_lease_options), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, NULL, 0, 0, 0 }

/* rfaas_lease_open leases workers on one executor, connects to them and loads the library there. The library is sent
 * only if the node does not have it yet. Blocks up to the session's time-out. Everything in options is copied.
 * Errors: RFAAS_BUSY (not enough free cores), RFAAS_INVALID, RFAAS_BAD_LIBRARY, RFAAS_UNSUPPORTED, RFAAS_NO_DEVICE,
 * connection class. Nothing stays leased after an error. */
RFAAS_API int rfaas_lease_open(rfaas_session *session, const rfaas_lease_options *options, rfaas_lease **lease);

/* rfaas_lease_release gives the workers back. Calls in flight are given up; their requests end with
 * RFAAS_INVALID at rfaas_wait. Buffers of rfaas_alloc are freed. The handle is dead afterwards, whatever is returned.
 * A lease that was given back at rest (no call in flight, none given up that is not answered yet) leaves its workers stopped
 * and connected, with their code, for the next lease of this session with the same library and sizes, which any thread may take:
 * no process is started, nothing is registered and no queue pair is made for it (`cached` in rfaas_statistics). What functions
 * have left in the memory of such workers is still there. At most keep_leases of them are kept, the latest, for as long as the
 * executor says; their cores are free for others meanwhile. Where they are gone, for another lease's sake or with their executor,
 * the next lease gets new workers. */
RFAAS_API int rfaas_lease_release(rfaas_lease *lease);

/* rfaas_lease_open_across leases options->workers workers (at most 65536) wherever they fit, on as few executors as it
 * finds, as one call: all or nothing, an executor that refuses is replaced by others. Each executor's part, of up to 1024
 * workers, is a lease of its own in leases[0 .. *count-1], to be used and released like any other; requests of all of them may
 * be given to one rfaas_waitall or rfaas_waitany. `capacity` is how many leases there is room for. With
 * RFAAS_LEASE_FAILOVER each part goes on elsewhere by itself. Needs a resource manager and no options->executor. Blocks up to
 * the session's time-out for each round of asking. Errors: RFAAS_BUSY (there is room for fewer, or `capacity` is too small;
 * the text says which), and those of rfaas_lease_open. Nothing stays leased after an error. */
RFAAS_API int rfaas_lease_open_across(rfaas_session *session, const rfaas_lease_options *options, size_t capacity,
                                      rfaas_lease *leases[], size_t *count);

/* An executor's control address. */
typedef struct rfaas_place {
    char executor[128]; /* host:port, a NUL behind it. Longer ones have no place: RFAAS_UNSUPPORTED of rfaas_places */
} rfaas_place;

/* rfaas_places finds room for `count` leases like options, on as few executors as it finds, and stores an executor for each. It
 * takes nothing: the executors may refuse. For programs of which one process looks for all (rfaas_mpi.h). With a session
 * that was given an executor it is that one. Errors: RFAAS_BUSY (there is room for fewer), RFAAS_INVALID, connection class. */
RFAAS_API int rfaas_places(rfaas_session *session, const rfaas_lease_options *options, size_t count, rfaas_place places[]);

/* rfaas_lease_open_at is rfaas_lease_open that asks the executor at `place` and no other one. A lease that goes on elsewhere
 * (RFAAS_LEASE_FAILOVER) is not bound to it. */
RFAAS_API int rfaas_lease_open_at(rfaas_session *session, const rfaas_lease_options *options, const rfaas_place *place,
                                  rfaas_lease **lease);

/* rfaas_lease_renew makes the lease last at least duration_ns from now on; 0: as long as it was leased for. It never makes
 * it shorter. Errors: RFAAS_LEASE_ENDED, RFAAS_BUSY (the node is draining and renews nothing), RFAAS_INVALID (longer than
 * the executor permits), connection class. */
RFAAS_API int rfaas_lease_renew(rfaas_lease *lease, int64_t duration_ns);

#define RFAAS_EVENT_NONE 0
#define RFAAS_EVENT_WORKER_DIED 1 /* the next call gets a new worker in its place */
#define RFAAS_EVENT_ENDED 2       /* the lease is no more; the text begins with released, expired, revoked or drained */
#define RFAAS_EVENT_DRAINING 3    /* the node leaves: calls in flight finish, new ones fail with RFAAS_LEASE_ENDED, not started */
#define RFAAS_EVENT_EXPIRING 4    /* the lease ends soon unless it is renewed */

typedef struct rfaas_event {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_event) */
    uint32_t kind;        /* RFAAS_EVENT_* */
    uint32_t worker;      /* of RFAAS_EVENT_WORKER_DIED */
    uint32_t lost;        /* events before this one that were not taken in time */
    int64_t left_ns;      /* RFAAS_EVENT_EXPIRING and DRAINING: until the end, from now */
    char text[256];       /* why */
} rfaas_event;

/* rfaas_lease_event takes the oldest event of a lease; kind is RFAAS_EVENT_NONE if there is none. Does not block. The
 * library keeps the last 16 that were not taken. Fills at most event->struct_size bytes. */
RFAAS_API int rfaas_lease_event(rfaas_lease *lease, rfaas_event *event);

/* rfaas_lease_workers returns the number of workers, or a negative status. */
RFAAS_API int rfaas_lease_workers(const rfaas_lease *lease);

typedef struct rfaas_lease_details {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_lease_details) */
    uint32_t workers;
    uint32_t depth;
    uint32_t eager; /* bytes */
    uint64_t bulk;  /* bytes */
    uint64_t lease_id;
    uint32_t functions; /* number of functions in the library */
    uint32_t replaced;  /* workers replaced since the lease began */
    char node[64];      /* host name of the executor's node, cut to 63 bytes */
    char executor[128]; /* its control address, cut to 127 bytes */
    char provider[16];  /* "shm", "verbs" or "local" */
    char node_name[256];        /* node as it is */
    char executor_address[256]; /* executor as it is */
} rfaas_lease_details;

/* rfaas_lease_info describes a lease; fills at most details->struct_size bytes. */
RFAAS_API int rfaas_lease_info(const rfaas_lease *lease, rfaas_lease_details *details);

typedef struct rfaas_worker_details {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_worker_details) */
    int32_t pid;          /* of the worker's process on its node */
    /* As the worker counts, which functions could forge. */
    uint64_t calls;     /* functions that returned */
    uint64_t failed;    /* of them: reported failure, or had a result that was too large */
    uint64_t refused;   /* malformed requests */
    uint64_t bytes_in;  /* of payload */
    uint64_t bytes_out; /* of results */
    char running[128];  /* the function that runs now, "" between calls */
    uint32_t output_size;
    char output[4100]; /* the last output_size bytes (4096 at most) that it printed, and a NUL */
} rfaas_worker_details;

/* rfaas_worker_info asks the executor what a worker does and has printed, also while a function runs there or when it has
 * just died. It fills at most details->struct_size bytes. Any thread may call it, also while another one is inside the
 * lease, but not while the lease is being released. Blocks for a control round trip, at most the session's time-out. */
RFAAS_API int rfaas_worker_info(const rfaas_lease *lease, int worker, rfaas_worker_details *details);

/* ---- functions ---- */

typedef uint32_t rfaas_function; /* index into the library's table, valid for this lease */

/* rfaas_lease_function finds a function by name. RFAAS_NO_FUNCTION: the text lists what there is. */
RFAAS_API int rfaas_lease_function(const rfaas_lease *lease, const char *name, rfaas_function *function);

/* ---- registered buffers ---- */

/* rfaas_alloc returns size bytes (1 .. 1 TiB) of zeroed, page-aligned, registered memory in *buffer. A large payload
 * that lies inside it is sent without being copied first, by any worker of the lease; such a payload must stay
 * unchanged until the call ends. Freed by rfaas_free or with the lease. */
RFAAS_API int rfaas_alloc(rfaas_lease *lease, size_t size, void **buffer);

/* rfaas_free frees what rfaas_alloc returned. NULL does nothing. RFAAS_BUSY while calls are in flight: they may
 * still read it. */
RFAAS_API int rfaas_free(rfaas_lease *lease, void *buffer);

/* rfaas_register makes memory that the program or MPI already has into what rfaas_alloc returns: a large payload inside
 * it is sent without being copied first. The memory stays the caller's, who must keep it mapped until rfaas_unregister
 * or the lease's end. It may be registered with several leases; two registrations of one lease must not overlap
 * (RFAAS_INVALID). Errors: RFAAS_FATAL when the device or the limit of locked memory (ulimit -l) refuses. */
RFAAS_API int rfaas_register(rfaas_lease *lease, void *buffer, size_t size);

/* rfaas_unregister ends what rfaas_register began; `buffer` is the same address. NULL does nothing. RFAAS_BUSY while
 * calls are in flight. */
RFAAS_API int rfaas_unregister(rfaas_lease *lease, void *buffer);

/* ---- calls ---- */

#define RFAAS_ANY_WORKER (-1)

typedef struct rfaas_call_options {
    uint32_t struct_size; /* sizeof(rfaas_call_options) */
    int32_t worker;       /* index from 0, or RFAAS_ANY_WORKER */
    int64_t timeout_ns;   /* from now; 0: none. Also bounds the replacing of a dead worker, which then goes on: RFAAS_DEADLINE */
    /* The function is idempotent: when a call may have been executed but its worker died, its lease ended or attempt_ns
     * passed, it is made again on the next allowed worker, up to so many times. A call that cannot have been executed is
     * made again anyway where that helps. `in` must then stay unchanged until the call ends, also with rfaas_iinvoke, whose
     * repeats are made inside the rfaas_ function that finds the end, and block it. 0: never. */
    uint32_t repeats;
    uint32_t reserved;  /* 0 */
    int64_t attempt_ns; /* with repeats: how long one attempt may take; 0: until timeout_ns */
} rfaas_call_options;

#define RFAAS_CALL_OPTIONS_INIT \
    { sizeof(rfaas_call_options), RFAAS_ANY_WORKER, 0, 0, 0, 0 }

/* rfaas_invoke calls a function and waits for its result.
 * in, in_size: the payload; in may be NULL when in_size is 0. May be reused when the call returns, except that a
 * payload in rfaas_alloc memory must stay unchanged after RFAAS_DEADLINE until the lease is released.
 * out, capacity: where the result goes and the most bytes of it that are wanted; out may be NULL when capacity is 0. A
 * capacity above the lease's `eager` reserves that much of `bulk` during the call, so do not ask for much more than
 * is needed; one above the lease's limit counts as the limit.
 * out_size: result bytes; may be NULL. With RFAAS_RESULT_TOO_LARGE it is set to the bytes that the result has.
 * options: NULL for any worker and no deadline.
 * Only the calling thread ever writes to out. Waits as the lease's wait_mode says.
 * A worker that has died since the last call is replaced while others take its calls; if there is no other, the call waits
 * for the new one, which takes some milliseconds. */
RFAAS_API int rfaas_invoke(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_size, void *out,
                           size_t capacity, size_t *out_size, const rfaas_call_options *options);

/* A call in flight. A number that can be copied, but only one copy may be waited for, tested to completion or
 * cancelled. */
typedef uint64_t rfaas_request;
#define RFAAS_REQUEST_NULL ((rfaas_request)0)

/* rfaas_iinvoke starts a call and returns at once. Arguments as for rfaas_invoke; `out` must stay valid until the
 * request has ended and is written only inside rfaas_ calls on this lease. in may be reused at once unless it lies in
 * memory of rfaas_alloc: then it must stay unchanged until the request has ended.
 * Errors: RFAAS_BUSY when every worker (or the chosen one) has `depth` calls in flight: finish one, then retry. */
RFAAS_API int rfaas_iinvoke(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_size, void *out,
                            size_t capacity, const rfaas_call_options *options, rfaas_request *request);
#define rfaas_submit rfaas_iinvoke

/* rfaas_wait waits for a request to end, puts the result into its `out`, sets *out_size (may be NULL) as rfaas_invoke
 * does, sets *request to RFAAS_REQUEST_NULL and returns the call's status. RFAAS_REQUEST_NULL: returns RFAAS_OK at
 * once with *out_size 0, as in MPI. A request that has ended already: RFAAS_INVALID. */
RFAAS_API int rfaas_wait(rfaas_request *request, size_t *out_size);

/* rfaas_test looks without blocking. Not ended: *done = 0, RFAAS_OK. Ended: *done = 1 and all that rfaas_wait does,
 * also when the call's status is an error. RFAAS_REQUEST_NULL: *done = 1. */
RFAAS_API int rfaas_test(rfaas_request *request, int *done, size_t *out_size);

/* rfaas_cancel gives up a request. The function may run or finish nevertheless; its result is dropped and `out` is
 * not touched any more. Its slot is free again when the worker has answered. Sets *request to RFAAS_REQUEST_NULL.
 * RFAAS_OK also if the call had ended. */
RFAAS_API int rfaas_cancel(rfaas_request *request);

/* rfaas_waitall waits for all of them, as rfaas_wait does for each. out_sizes and statuses have room for `count`
 * values each or are NULL; null requests have size 0 and status RFAAS_OK. Returns RFAAS_OK, or the status of the first
 * one in the array that failed, whose text rfaas_last_error() has; all have ended either way. Requests of several leases
 * may be mixed. */
RFAAS_API int rfaas_waitall(size_t count, rfaas_request requests[], size_t out_sizes[], int statuses[]);

#define RFAAS_UNDEFINED SIZE_MAX

/* rfaas_waitany waits until one of them has ended, ends it as rfaas_wait does, and sets *index to its place, also when its
 * status, which is returned, is an error. RFAAS_UNDEFINED: there are only null requests (RFAAS_OK), or an argument is
 * wrong. One that has ended already gives RFAAS_INVALID and its place; set it to RFAAS_REQUEST_NULL. Fair: the
 * search starts behind the one that ended last. */
RFAAS_API int rfaas_waitany(size_t count, rfaas_request requests[], size_t *index, size_t *out_size);

/* ---- one function over an array ---- */

typedef struct rfaas_map_options {
    uint32_t struct_size; /* sizeof(rfaas_map_options) */
    uint32_t flags;       /* 0 */
    size_t chunk;         /* items of one call; 0: chosen so that all workers end at about the same time */
    int64_t timeout_ns;   /* for the whole map; 0: none */
    uint32_t repeats;     /* of each call, as in rfaas_call_options; 0: never */
    uint32_t reserved;    /* 0 */
} rfaas_map_options;

#define RFAAS_MAP_OPTIONS_INIT \
    { sizeof(rfaas_map_options), 0, 0, 0, 0, 0 }

/* rfaas_map calls a function on consecutive items of an array, on all workers of the lease, and gathers the results.
 * The function is called with k >= 1 items of in_item bytes, one behind the other, and returns k * out_item bytes, the results of
 * these items in the same order. in: count * in_item bytes, out: room for count * out_item bytes. in_item at least 1; out_item
 * may be 0. count 0 does nothing.
 * The chunk that is chosen gives every worker some 16 calls, smaller ones towards the end, and keeps payload and result
 * within `eager` where one item does. Calls keep `depth` slots of each worker full.
 * Returns RFAAS_OK, or the first error: no call is made after it, the text names the items, and what is in `out` is
 * undefined. Calls in flight are waited for first, for at most a second and until the deadline; a worker that is still
 * busy then is replaced by its next call, unless other requests are in flight there. Only after RFAAS_DEADLINE they
 * go on. A result of another size is RFAAS_FUNCTION_FAILED. Requests of the program in the same lease may be in flight and
 * keep their slots. */
RFAAS_API int rfaas_map(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_item, void *out,
                        size_t out_item, size_t count, const rfaas_map_options *options);

/* ---- statistics ---- */

typedef struct rfaas_statistics {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_statistics) */
    uint32_t replaced;    /* workers replaced */
    uint64_t calls;       /* requests posted to workers */
    uint64_t replies;     /* of these: answered in time */
    uint64_t abandoned;   /* given up by deadline or cancel */
    uint64_t late;        /* replies that came for abandoned ones */
    uint64_t busy;        /* times that a worker had no free slot or no room */
    uint64_t bytes_in;    /* payload sent */
    uint64_t bytes_out;   /* results that came */
    uint64_t blocked;     /* waits that went to sleep, since the last move */
    uint64_t repeated;    /* calls that were made again */
    uint64_t moved;       /* times that the lease went on elsewhere */
    uint64_t local;       /* calls that ran in this process (RFAAS_LEASE_LOCAL); none of the above */
    uint64_t cold;        /* workers that came to the lease as new processes, those of replacements and moves included */
    uint64_t warm;        /* that were there already, without code */
    uint64_t cached;      /* that a released lease had left connected, with their code */
    uint64_t queue_pairs; /* that were made for the lease; none for cached workers */
    int64_t open_ns;      /* that opening the lease took */
    uint64_t kept;        /* released leases that the session keeps connected now, as far as it knows */
} rfaas_statistics;

/* rfaas_lease_statistics sums up the lease since it was opened; fills at most stats->struct_size bytes. Used by the
 * lease's thread. */
RFAAS_API int rfaas_lease_statistics(rfaas_lease *lease, rfaas_statistics *stats);

#ifdef __cplusplus
}
#endif

#endif

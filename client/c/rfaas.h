/* generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit. */
/* rfaas.h: call functions on leased cores of other nodes by remote memory write.
 *
 * Link with -lrfaas. A program that offloads one call:
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
 * Results. Every function that returns int returns RFAAS_OK (0) or a negative status, unless its
 * description says otherwise. After an error, rfaas_last_error() on the same thread returns a text
 * that names the operation and the offending value, and rfaas_started() says whether the remote
 * function may have run. On an error, a function writes no output argument unless its description says
 * so.
 *
 * Lost executor. When the executor of a lease is lost, calls that are in flight fail with a status of
 * the connection class and RFAAS_MAYBE_EXECUTED. As soon as the agent has reported the loss, later
 * calls fail with RFAAS_LEASE_ENDED and RFAAS_NOT_STARTED.
 *
 * Threads. Any number of threads may use one lease at the same time. Their calls run in parallel on
 * its workers, and take turns if there are fewer workers than threads. A request may be waited for by
 * another thread than the one that started it. When a lease is released while other threads are
 * inside, their calls end with RFAAS_LEASE_ENDED. A program with one calling thread uses no lock for
 * that. Any number of threads may use one session. A process may hold any number of leases up to
 * RFAAS_LEASES_MAX. The library can be used before MPI_Init, after MPI_Finalize and at every MPI
 * thread level; it makes no MPI call. It installs no signal handler. It has no thread, with three
 * exceptions. rfaas_lease_descriptor starts one that waits for calls. On verbs, a thread makes the
 * queue pairs of a lease whose first calls pass through the agent. On verbs, whose drivers may take
 * most of a minute to destroy a queue pair, a thread destroys the channels of a released lease. After
 * 0.1 s the release returns, and the thread continues. None of these threads handles signals.
 *
 * Agent. The program rfaas-agent finds executors, renews leases and follows their events, for all
 * processes of a user on a node. The library starts it when it is first needed, and talks to it on a
 * unix socket. Calls do not pass through the agent, except the first ones of a lease with spare
 * workers on verbs (unless RFAAS_BROKER=0). They continue when it ends, and the library then starts
 * another agent, which takes over the leases. The library learns of events inside its functions: while
 * a thread waits, and about every 4096 calls.
 *
 * Fork. A child of fork() inherits no session, lease or request: every function returns RFAAS_INVALID
 * for the parent's handles. The child may call rfaas_init and open sessions and leases of its own. The
 * parent's leases are not affected.
 *
 * Handles. Sessions and leases are opaque pointers; requests are numbers. A NULL handle, a released
 * lease, a request that has ended, and a call before rfaas_init or after rfaas_finalize give
 * RFAAS_INVALID. The handle of a released lease becomes that of a new one after 64 further leases at
 * the earliest. Passing a pointer that never was a handle is undefined behaviour.
 *
 * Compatibility. From version 0.4 on, a program that was compiled against an older header runs with a
 * newer library. Option structures begin with their size, which the *_INIT initialiser sets. New
 * fields are appended, and 0 always means the default. The values of constants and the declarations of
 * functions do not change. */
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

/* ---- version ---- */

#define RFAAS_VERSION_MAJOR 0

#define RFAAS_VERSION_MINOR 4

/* ---- status codes ---- */

/* A status is 0 or -(class * 100 + detail). The class says what the caller can do next. Codes never
 * change, but new details may be added: use RFAAS_CLASS(status) where the detail does not matter. */

#define RFAAS_OK 0

#define RFAAS_BUSY (-100)             /* no free slot or core; finish a request and retry */

#define RFAAS_INVALID (-200)          /* an argument is wrong; the error text names it */
#define RFAAS_TOO_LARGE (-201)        /* the payload or capacity exceeds the lease's limits */
#define RFAAS_NO_FUNCTION (-202)      /* the library has no function of this name */
#define RFAAS_BAD_BLOB (-203)         /* the peer sent a malformed queue pair address */
#define RFAAS_BAD_LIBRARY (-204)      /* the library cannot be read or loaded; the error text says why */
#define RFAAS_BAD_REQUEST (-205)      /* the worker refused a malformed request */
#define RFAAS_WRONG_THREAD (-206)     /* two threads used an object that only one thread may use */

#define RFAAS_UNSUPPORTED (-300)      /* this provider, device or executor does not support the operation */
#define RFAAS_NO_DEVICE (-301)        /* no such RDMA device, port or GID */

#define RFAAS_FUNCTION_FAILED (-400)  /* the function reported an error (the text), or wrote beyond its capacity */
#define RFAAS_RESULT_TOO_LARGE (-401) /* the result exceeds the capacity that the caller gave */
#define RFAAS_DEADLINE (-402)         /* the deadline passed; the function may still be running */
#define RFAAS_CANCELLED (-403)        /* the caller cancelled the call with rfaas_cancel */

#define RFAAS_CONNECTION (-500)       /* the connection to the worker or to the control port broke */
#define RFAAS_PEER_GONE (-501)        /* the other process or node ended, or cannot be reached */
#define RFAAS_WORKER_DIED (-502)      /* the worker died; the error text says how. The next call gets a new worker */
#define RFAAS_PROTOCOL (-503)         /* the peer broke the protocol or speaks another version */
#define RFAAS_TIME_LIMIT (-504)       /* the function exceeded the lease's call_limit_ns and its worker was killed */
#define RFAAS_MEMORY_LIMIT (-505)     /* the function exceeded the lease's memory and its worker was killed */

#define RFAAS_LEASE_ENDED (-600)      /* the lease was released, revoked, expired or lost its executor; open another */

#define RFAAS_FATAL (-700)            /* out of memory, device removed, or refused by the kernel */

#define RFAAS_CREDENTIAL (-800)       /* the token or secret is missing, wrong, expired, revoked or not yet valid */

/* RFAAS_CLASS is the class of a status: RFAAS_CLASS_*, or 0 for RFAAS_OK. */
#define RFAAS_CLASS(status) ((status) >= 0 ? 0 : -(status) / 100)

#define RFAAS_CLASS_BUSY 1        /* retry */
#define RFAAS_CLASS_INVALID 2     /* fix the call */
#define RFAAS_CLASS_UNSUPPORTED 3 /* take another path */
#define RFAAS_CLASS_FUNCTION 4    /* this call failed, the lease is good */
#define RFAAS_CLASS_CONNECTION 5  /* the worker is lost, the next call gets a new one */
#define RFAAS_CLASS_LEASE 6       /* open a new lease */
#define RFAAS_CLASS_FATAL 7       /* stop */
#define RFAAS_CLASS_CREDENTIAL 8  /* get another token or set the clock, then repeat the call */

/* rfaas_strerror returns the short English name of a status.
 *
 * The result is a constant string and never NULL. Any thread may call this function, also before
 * rfaas_init. */
RFAAS_API const char *rfaas_strerror(int status);

/* rfaas_last_error describes the last failed call of this thread.
 *
 * The text names the operation, the offending value and the reason. It is "" if no call of this thread
 * has failed yet, and never NULL. The string belongs to the thread and is valid until the thread's
 * next rfaas call. */
RFAAS_API const char *rfaas_last_error(void);

/* RFAAS_MPI_ERROR_MAX: room for the error text of rfaas_mpi_lease_open (rfaas_mpi.h), in bytes with
 * the NUL. */
#define RFAAS_MPI_ERROR_MAX 512

#define RFAAS_NOT_STARTED 0    /* the function has not run and will not run; repeating the call is safe */
#define RFAAS_MAYBE_EXECUTED 1 /* the function may have run, may be running, or may run later */

/* rfaas_started says whether the function of this thread's last failed call may have run.
 *
 * Returns RFAAS_NOT_STARTED or RFAAS_MAYBE_EXECUTED. It describes the last failed rfaas_invoke,
 * rfaas_iinvoke, rfaas_wait, rfaas_test or rfaas_cancel of this thread. */
RFAAS_API int rfaas_started(void);

/* rfaas_function_code returns the code with which the function of this thread's last failed call
 * failed.
 *
 * The code is the one that the function passed to rfaas_fail_code (rfaas_function.h). Returns 0 if the
 * last error of this thread is not RFAAS_FUNCTION_FAILED, and if the function called rfaas_fail. */
RFAAS_API int32_t rfaas_function_code(void);

/* rfaas_call_worker returns the worker of this thread's last call.
 *
 * The index of the worker of the thread's last finished call: one that it made by rfaas_invoke or
 * rfaas_invokev, or one that it waited for. With `repeats`, the worker of the last attempt.
 * RFAAS_ANY_WORKER (-1): the thread has made no call, or the call has run in this process
 * (RFAAS_LEASE_LOCAL). */
RFAAS_API int rfaas_call_worker(void);

/* rfaas_kept_result returns a result that was larger than the capacity of its call.
 *
 *   out: receives the result; may be NULL if capacity is 0.
 *   out_size: bytes of the result. Also set with RFAAS_RESULT_TOO_LARGE.
 *
 * Returns the result of this thread's last call that ended with RFAAS_RESULT_TOO_LARGE, if
 * rfaas_call_options.keep allowed the library to keep it. A call that a thread waits for belongs to
 * that thread. The library keeps one result for each thread, until this function has returned it,
 * until another call of the thread ends with RFAAS_RESULT_TOO_LARGE, or until the thread ends. So wait
 * for such requests one by one, not with rfaas_waitall.
 *
 * Errors:
 *   RFAAS_INVALID: no result is kept.
 *   RFAAS_RESULT_TOO_LARGE: `capacity` is too small. The result stays. */
RFAAS_API int rfaas_kept_result(void *out, size_t capacity, size_t *out_size);

/* ---- library ---- */

/* rfaas_init starts the library.
 *
 *   options: must be NULL.
 *
 * Calls are counted: each successful rfaas_init needs one rfaas_finalize. Any thread may call this
 * function. It does not block and sends no message.
 *
 * Errors:
 *   RFAAS_INVALID: `options` is not NULL.
 *   RFAAS_FATAL: out of memory or descriptors. */
RFAAS_API int rfaas_init(const void *options);

/* rfaas_finalize undoes one rfaas_init.
 *
 * The last rfaas_finalize closes every session and releases every lease. No other rfaas call may be
 * running then. If the driver of an RDMA device is slow, rfaas_finalize waits at most 0.1 s for each
 * lease and session, and 1 s more, for queue pairs to be destroyed. Destruction that takes longer
 * continues in the background, or ends with the process. */
RFAAS_API int rfaas_finalize(void);

/* rfaas_version returns the version of the library at run time.
 *
 * The result is RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR of the library that is loaded, which
 * may be newer than the header. */
RFAAS_API int rfaas_version(void);

/* ---- sessions ---- */

/* A session knows where to find executors. */

/* A session with a resource manager or with one executor. */
typedef struct rfaas_session rfaas_session;

typedef struct rfaas_session_options {
    uint32_t struct_size;  /* sizeof(rfaas_session_options) */
    int32_t port;          /* verbs: port of the device, from 1; 0: the first active port */
    /* host:port of a resource manager, or of several that share a ledger (host:port,host:port). NULL
     * or "": environment variable RFAAS_MANAGER, unless `executor` is given. */
    const char *manager;
    /* host:port of one executor, for use without a resource manager. NULL or "": environment variable
     * RFAAS_EXECUTOR, if it is set and no manager is given. */
    const char *executor;
    /* "shm", "verbs", "tcp", "ofi" or "auto". NULL or "": environment variable RFAAS_PROVIDER, else
     * "auto", which is shm on the executor's own node, elsewhere verbs if the executor and this node
     * have a device, ofi if the executor offers it and RFAAS_OFI_PROVIDER names a provider of
     * libfabric (tcp, cxi, efa, opx or psm3), else tcp. RFAAS_OFI_DEVICE chooses libfabric's device;
     * for libfabric's tcp it is an IP address of this node. Default: the first device, for tcp
     * 127.0.0.1. */
    const char *provider;
    const char *tenant;    /* account to charge; NULL or "": the user's name */
    const char *device;    /* verbs: device name; NULL or "": the first with an active port */
    int32_t gid_index;     /* verbs: index of the GID; -1: chosen, RoCE v2 preferred */
    int32_t pkey_index;    /* verbs: index of the partition key */
    int32_t traffic_class; /* verbs: 0..255 */
    int32_t service_level; /* verbs: 0..15 */
    int32_t mtu;           /* verbs: 256..4096 bytes; 0: the port's */
    uint32_t flags;        /* RFAAS_SESSION_* or 0 */
    int64_t timeout_ns;    /* bound of each control operation: open, lease, replace a worker; 0: 10 s */
    /* Most released leases that the session caches (rfaas_lease_release). 0: environment variable
     * RFAAS_CACHED_LEASES, else 16. Negative: none, and leases get no cached workers of other
     * sessions. */
    int32_t cached_leases;
    /* RFAAS_DATA_ENCRYPTION_*: encryption on tcp of the data of calls and of reads of the resource
     * manager's memory. 0: environment variable RFAAS_DATA_ENCRYPTION (off, on or require), else on.
     * ofi does not encrypt: with require it is refused, and with on it is refused except on loopback. */
    uint32_t data_encryption;
    /* Path of the cluster's secret. NULL or "": environment variable RFAAS_SECRET_FILE, else where
     * daemons of this user write it. */
    const char *secret_file;
    /* Path of a token. NULL or "": environment variable RFAAS_TOKEN_FILE, else ~/.rfaas/token if it
     * exists. */
    const char *token_file;
} rfaas_session_options;

#define RFAAS_SESSION_OPTIONS_INIT \
    { sizeof(rfaas_session_options), 0, NULL, NULL, NULL, NULL, NULL, -1, 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL }

/* RFAAS_SESSION_ALLOW_PLAINTEXT: Connects without TLS to addresses that are neither loopback nor unix
 * sockets, for trusted networks. The environment variable RFAAS_ALLOW_PLAINTEXT=1 does the same. */
#define RFAAS_SESSION_ALLOW_PLAINTEXT 1u

/* RFAAS_SESSION_LOCAL: Opens the session even if no address is configured, no daemon listens at the
 * address, the credential is missing, or the agent cannot be started. Each lease then tries again. If
 * it fails, a lease with RFAAS_LEASE_LOCAL runs its calls in this process until there are workers, and
 * another lease fails with the error of the attempt. A malformed option is still an error. */
#define RFAAS_SESSION_LOCAL 2u

#define RFAAS_DATA_ENCRYPTION_OFF 1     /* never */

/* RFAAS_DATA_ENCRYPTION_ON: Encrypts a connection on tcp, unless all its addresses are loopback. If
 * the executor does not encrypt, a connection between nodes is refused. With
 * RFAAS_SESSION_ALLOW_PLAINTEXT, the connection is encrypted only if the executor asks for it. */
#define RFAAS_DATA_ENCRYPTION_ON 2
#define RFAAS_DATA_ENCRYPTION_REQUIRE 3 /* always encrypts on tcp, also on loopback */

/* rfaas_session_open opens a session with a resource manager or an executor.
 *
 *   options: NULL means that everything comes from the environment. Strings are copied.
 *
 * Starts the agent if none is running. The agent connects to the manager or executor and checks its
 * version. Blocks for at most timeout_ns and one second.
 *
 * Errors:
 *   RFAAS_INVALID: no address (unless RFAAS_SESSION_LOCAL is set), a malformed address, an unknown
 *     provider, or an unknown value of data_encryption.
 *   RFAAS_UNSUPPORTED: the agent cannot be started; the error text says why. Not returned with
 *     RFAAS_SESSION_LOCAL.
 *   RFAAS_PEER_GONE: no answer from the manager, the executor or the agent. Not returned with
 *     RFAAS_SESSION_LOCAL.
 *   RFAAS_PROTOCOL: the peer is not an rfaas daemon, or has another version. Not returned with
 *     RFAAS_SESSION_LOCAL.
 *   RFAAS_CREDENTIAL: the file of the token or secret is missing or unreadable, or the peer refuses
 *     the credential. Not returned with RFAAS_SESSION_LOCAL. */
RFAAS_API int rfaas_session_open(const rfaas_session_options *options, rfaas_session **session);

/* rfaas_session_close releases the leases of a session and closes it.
 *
 * The handle is invalid afterwards, whatever is returned. */
RFAAS_API int rfaas_session_close(rfaas_session *session);

/* rfaas_session_cached returns how many released leases a session caches.
 *
 * Does not ask the agent. Returns a negative status on an error. */
RFAAS_API int rfaas_session_cached(rfaas_session *session);

/* ---- changes of executors ---- */

#define RFAAS_EXECUTOR_OPEN 1     /* the executor leases cores; also: it registered, or it recovered */
#define RFAAS_EXECUTOR_DRAINING 2 /* the executor grants no more leases */
#define RFAAS_EXECUTOR_SILENT 3   /* the executor missed several heartbeats */
#define RFAAS_EXECUTOR_LEFT 4     /* the executor has deregistered */

/* rfaas_change is a change of an executor's state. */
typedef struct rfaas_change {
    uint32_t state;     /* RFAAS_EXECUTOR_*: the new state */
    uint32_t reserved;  /* 0 */
    char executor[256]; /* the executor's control address */
    char node[256];     /* the host name of its node */
} rfaas_change;

/* rfaas_session_changes returns what has happened to executors since the last call.
 *
 *   capacity: number of changes that `changes` has room for; later calls return the rest.
 *   count: number of changes returned; 0 if nothing has happened.
 *
 * The first call begins with the executors that are registered. The resource manager writes changes
 * into the memory of this node's agent, and a call asks the agent for them. It blocks for one round
 * trip to the agent, and longer when the agent has to connect to the manager, but at most for the
 * session's timeout_ns and one second. Only one thread at a time may call this function on a session.
 *
 * Errors:
 *   RFAAS_UNSUPPORTED: the session has no resource manager, or its memory cannot be reached from
 *     here.
 *   class CONNECTION: the manager cannot be reached now; call again later. */
RFAAS_API int rfaas_session_changes(rfaas_session *session, rfaas_change changes[], size_t capacity, size_t *count);

/* rfaas_change_fn is called with one change. A result other than 0 ends rfaas_session_watch. */
typedef int (*rfaas_change_fn)(const rfaas_change *change, void *arg);

/* rfaas_session_watch calls a function with every change of an executor.
 *
 *   f: may use the library, but must not close this session.
 *   arg: passed to f.
 *   timeout_ns: how long to watch; 0 means without a limit.
 *
 * Looks for changes every 5 ms and calls f on the calling thread. Returns the result of f when that is
 * not 0. Waits while the manager cannot be reached. Otherwise it has the errors of
 * rfaas_session_changes.
 *
 * Errors:
 *   RFAAS_DEADLINE: timeout_ns passed. */
RFAAS_API int rfaas_session_watch(rfaas_session *session, rfaas_change_fn f, void *arg, int64_t timeout_ns);

/* ---- leases ---- */

/* A lease is a number of workers on one executor, which have loaded a library of functions. */

/* A number of workers on one executor. */
typedef struct rfaas_lease rfaas_lease;

/* How both sides wait for messages. */
#define RFAAS_WAIT_ADAPTIVE 0 /* spin for about as long as a wake-up takes, then block; the default */
#define RFAAS_WAIT_HOT 1      /* spin: lowest latency, uses one core on each side */
#define RFAAS_WAIT_WARM 2     /* block at once: uses no core while waiting */

/* RFAAS_LEASES_MAX: number of leases that a process may hold at the same time. */
#define RFAAS_LEASES_MAX 4096

/* RFAAS_NO_BULK: value of rfaas_lease_options.bulk for no room for large payloads. */
#define RFAAS_NO_BULK UINT64_MAX

typedef struct rfaas_lease_options {
    uint32_t struct_size;      /* sizeof(rfaas_lease_options) */
    uint32_t workers;          /* 1..1024; 0: 1 */
    uint32_t cores_per_worker; /* 0: 1 */
    uint32_t depth;            /* calls in flight per worker, 1..1024; 0: 8 */
    /* Bytes of payload that travel with the request, 1..262144, rounded up to a multiple of 64. 0:
     * 16384. */
    uint32_t eager;
    uint32_t wait_mode;        /* RFAAS_WAIT_*, for both sides */
    /* Bytes for the large payloads in flight, per worker and direction. Both sides reserve them when
     * the lease is opened. At most 4 GiB. 0: 2 MiB. RFAAS_NO_BULK: none, so that `eager` is the limit.
     * Payloads and results of up to `bulk` bytes travel in one piece, larger ones in parts (bulk_max). */
    uint64_t bulk;
    uint64_t memory;           /* bytes of memory per worker; 0: the executor's default */
    int64_t duration_ns;       /* the lease expires after this time; 0: the executor's default */
    const char *library;       /* path, on this machine, of the shared library with the functions */
    const void *library_data;  /* or the library itself, in memory; used if `library` is NULL */
    size_t library_size;       /* bytes of library_data */
    const char *executor;      /* host:port: use only this executor; NULL or "": the session chooses */
    /* Longest run time of one call. A worker that exceeds it is killed and the call ends with
     * RFAAS_TIME_LIMIT. 0: the executor's own limit, if it has one. The init call of a new worker has
     * other limits: the session's timeout_ns and the executor's setting `init-limit`. */
    int64_t call_limit_ns;
    uint32_t flags;            /* RFAAS_LEASE_* or 0 */
    uint32_t reserved;         /* 0 */
    /* How long rfaas_lease_open waits if no executor has enough free cores and memory, or none can be
     * reached. It tries again when an executor reports room or a new executor registers. Waiting
     * leases are not queued: a lease that needs less may be granted first. 0: rfaas_lease_open does
     * not wait. */
    int64_t wait_ns;
    /* Paths, on this machine, of files and directories that travel with the library, separated by
     * colons. A directory travels with its contents. A symbolic link that leads out of a named
     * directory travels as a copy of its target. rfaas_bundle_path (rfaas_function.h) gives functions
     * the path of each file and directory, which it finds by the last component of the path given
     * here. Functions can only read the files. A node that already has the same files does not receive
     * them again. Libraries that the library needs from outside the system's directories travel
     * without being named. NULL or "": no files. */
    const char *bundle;
    /* Name of the init call, a function of the library. Every worker of the lease executes it before
     * any other call of the lease, so functions can rely on state that it makes. This includes workers
     * that replace dead ones, workers of another executor after a failover, and cached workers of an
     * earlier lease. With RFAAS_LEASE_LOCAL this process executes it too, before the first local call.
     * Its result is ignored. NULL or "": no init call. */
    const char *init_function;
    const void *init_payload;  /* payload of the init call; NULL: none */
    size_t init_size;          /* bytes of init_payload, at most the largest of bulk_max, `bulk` and `eager` */
    /* The fewest workers with which the lease is opened, at most `workers`. The lease gets as many as
     * the executor has room for, up to `workers`. The executor adds the others as its cores become
     * free, while the program makes calls or asks about the lease (rfaas_lease_workers). The executor
     * must lend enough for all `workers`. 0: the lease is opened with all its workers. */
    uint32_t workers_min;
    uint32_t reserved2;        /* 0 */
    /* Limit in bytes of one payload and of one result, at most 4 GiB. Payloads and results larger than
     * `bulk` travel in parts of up to 1 MiB. Each call takes memory for its parts when it needs it.
     * The worker's share counts as the worker's own memory (`memory`). A call in parts makes progress
     * while a thread waits for it or tests it. A capacity larger than `bulk` makes a call travel in
     * parts even if its result is small, and the worker maps memory for the whole capacity. So calls
     * with a fitting capacity are faster. 0: 1 GiB if `bulk` is 0, otherwise `bulk`. Not with
     * RFAAS_NO_BULK. */
    uint64_t bulk_max;
    /* Full name of a seed, as rfaas_seed_name returns it. The workers start from it, as with
     * RFAAS_LEASE_SEED, and its setup function takes the place of the init call: init_function must
     * not be set. `library` and `bundle` must be those with which the seed was made, and `memory` must
     * not be less; 0 means the seed's. The executor that has made the seed is asked first. Another
     * executor, or one that does not have the seed any more, makes one of its own by the setup
     * function. NULL or "": none. */
    const char *seed;
    /* Name of a runtime of the executor (its setting `runtimes`): a Python interpreter that has
     * imported the administrator's modules. The workers start with it. Executors without this runtime
     * refuse the lease (RFAAS_UNSUPPORTED). Not with RFAAS_LEASE_SEED or RFAAS_LEASE_LOCAL. NULL or
     * "": none. */
    const char *runtime;
} rfaas_lease_options;

#define RFAAS_LEASE_OPTIONS_INIT \
    { sizeof(rfaas_lease_options), 0, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, NULL, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, \
      0, NULL, NULL }

/* RFAAS_LEASE_RENEW: The agent renews the lease until it is released. A lease without duration_ns is
 * always renewed. */
#define RFAAS_LEASE_RENEW 1u

/* RFAAS_LEASE_FAILOVER: Moves the lease to another executor when its executor is lost, its node
 * drains, or the lease is revoked. The next call asks for a new lease wherever the session finds an
 * executor, or only at options->executor if that is given. It asks for as many workers as the lease
 * has, and for up to `workers`. It waits for such an executor at most until its deadline, or for the
 * session's timeout_ns if it has none. Then it fails with RFAAS_LEASE_ENDED and RFAAS_NOT_STARTED.
 * Later calls continue the search. State that functions kept in the old workers is lost. Calls in
 * flight fail as without the flag, except those with `repeats`. */
#define RFAAS_LEASE_FAILOVER 2u

/* RFAAS_LEASE_LOCAL: Runs functions in the calling process while no executor has room. The library is
 * loaded here too, with dlopen: its constructors run, and everything that it is linked with must exist
 * (RFAAS_BAD_LIBRARY). If no executor can be reached or has enough free cores and memory,
 * rfaas_lease_open succeeds, and rfaas_lease_info reports the provider "local" and the reason. With
 * RFAAS_SESSION_LOCAL this includes a session without an address, an agent or a credential.
 *
 * The agent waits for an executor that has room for the lease. The next call after that moves the
 * lease to this executor (RFAAS_EVENT_MOVED). Local calls that are running at that time finish. The
 * call that moves the lease waits until the workers are ready. It waits at most for half of the time
 * until its deadline, or for the session's timeout_ns if it has none. State that functions kept in
 * this process is not transferred: the new workers execute the init call. If that executor is lost
 * later, the lease ends, unless it has RFAAS_LEASE_FAILOVER. With that flag, calls run locally again
 * (RFAAS_EVENT_LOCAL) until the lease moves to the next executor.
 *
 * A local call runs on the caller's thread, before rfaas_invoke or rfaas_iinvoke returns. No deadline,
 * time limit or memory limit ends it, and a crash of the function is a crash of the program.
 * rfaas_state of local calls is separate from that of workers (rfaas_function.h). */
#define RFAAS_LEASE_LOCAL 4u

/* RFAAS_LEASE_REUSE: Permits cached workers that have executed functions of an earlier lease with this
 * flag, and lets the workers of this lease serve a later one. Such workers keep their static
 * variables, their rfaas_state, their threads and all other state. Without the flag, only workers that
 * have executed no function are cached. */
#define RFAAS_LEASE_REUSE 8u

/* RFAAS_LEASE_SEED: Makes the init call once instead of once for each worker. A process of the
 * executor makes it and ends. Its memory, the seed, stays on the node. All workers of the lease start
 * from it and share it, copy on write, as do replacements, added workers and later leases of the
 * tenant with the same library, bundle, init call, memory and cores. For the session's leases on other
 * executors, these copy the seed, if their nodes have the same libraries and kind of processor.
 * rfaas_worker_start says RFAAS_START_SEEDED.
 *
 * The memory of the library and of the libraries that it needs is kept: static and thread-local
 * variables, what was allocated, and random numbers. Threads, open files, child processes, memory that
 * was mapped by mmap, signal handlers, timers, and changes of environment, directory, locale, CPUs or
 * rounding are not. If the init call leaves such things behind or forks, or the seed cannot be made or
 * used for another reason, the workers make the init call themselves, and `unseeded` of
 * rfaas_worker_start says why. The init call must not keep the address of its payload, host names or
 * clock readings. Its payload has at most 65536 bytes, and the session must have published no tables.
 *
 * A worker may use as much memory for what it allocates anew as without the flag, and up to 64 MiB
 * more where there are no control groups. In workers with a seed, OpenBLAS uses one thread. Their
 * malloc is mimalloc. They are not cached. Not with RFAAS_LEASE_REUSE. */
#define RFAAS_LEASE_SEED 16u

/* RFAAS_LEASE_SEED_REQUIRED: Implies RFAAS_LEASE_SEED. If a worker cannot start from a seed, the error
 * is RFAAS_UNSUPPORTED, and its text says why and what to change. Not with RFAAS_LEASE_LOCAL. */
#define RFAAS_LEASE_SEED_REQUIRED 32u

/* rfaas_lease_open leases workers on one executor.
 *
 *   options: begins as RFAAS_LEASE_OPTIONS_INIT; everything in it is copied.
 *
 * Connects to the workers and loads the library there. The library is sent only if the node does not
 * have it yet. Blocks for at most the session's timeout_ns plus options->wait_ns. Nothing stays leased
 * after an error.
 *
 * With an init call, returns when all workers have executed it. That may take the session's timeout_ns
 * longer, or call_limit_ns if that is longer, and twice as long with RFAAS_LEASE_SEED. If the init
 * call fails, the error is that of a call (RFAAS_FUNCTION_FAILED, RFAAS_WORKER_DIED, RFAAS_TIME_LIMIT
 * and so on), and its text names the init call and the worker. If the init call of a replacement
 * fails, the call that waited for the replacement gets this error, with RFAAS_NOT_STARTED. The next
 * call tries again with a new worker.
 *
 * Errors:
 *   RFAAS_BUSY: not enough free cores or memory, after options->wait_ns.
 *   RFAAS_INVALID: an option is wrong.
 *   RFAAS_BAD_LIBRARY: the library cannot be read or loaded.
 *   RFAAS_NO_FUNCTION: the library has no function named init_function.
 *   RFAAS_TOO_LARGE: init_size exceeds `bulk_max`, `bulk` and `eager`.
 *   RFAAS_FUNCTION_FAILED: the init call has failed.
 *   RFAAS_UNSUPPORTED: the provider or the executor does not support an option, or a worker has not
 *     started from a seed (RFAAS_LEASE_SEED_REQUIRED).
 *   RFAAS_NO_DEVICE: the device does not exist.
 *   class CONNECTION: the executor or manager cannot be reached, or the init call has ended its
 *     worker. */
RFAAS_API int rfaas_lease_open(rfaas_session *session, const rfaas_lease_options *options, rfaas_lease **lease);

/* rfaas_lease_release releases a lease and its workers.
 *
 * Calls in flight are abandoned, and rfaas_wait returns RFAAS_INVALID for their requests. Buffers of
 * rfaas_alloc are freed. The handle is invalid afterwards, even after an error.
 *
 * The state that functions keep in the workers ends with the lease: no other lease gets a worker that
 * has executed a function, unless both leases have the flag RFAAS_LEASE_REUSE.
 *
 * The workers of a released lease are cached if no call is in flight, every abandoned call has been
 * answered and, without RFAAS_LEASE_REUSE, no function has been executed. The next lease of this
 * session gets them if it has the same library and sizes, and RFAAS_LEASE_REUSE is set in both leases
 * or in none. On shm and tcp, leases of other sessions and processes of the user with the same
 * addresses and credentials also get them, even after this session is closed. Cached workers are
 * frozen, stay connected and keep their code. A lease gets them without a new process, registration or
 * queue pair (`cached` in rfaas_statistics), and any thread may open it. A session caches its latest
 * released leases, at most cached_leases, for as long as the executor permits. Other tenants can use
 * the cores meanwhile. If the executor has ended the workers, for example for another lease, the next
 * lease gets new ones.
 *
 * On shm, verbs and tcp, the agent also prepares spare leases for any process of the user. Their
 * workers start and load the library ahead of demand, and they are also connected, on verbs to queue
 * pairs of the agent. The agent prepares a spare lease when a lease gets new workers within 10 s after
 * another lease with the same terms. The environment variable RFAAS_POOL is the largest number of
 * spare leases with the same terms (default 2; 0: none). */
RFAAS_API int rfaas_lease_release(rfaas_lease *lease);

/* rfaas_lease_open_across leases workers on as few executors as possible.
 *
 *   options: options->workers is the number of workers in all, at most 65536; options->executor must
 *     not be set.
 *   capacity: number of leases that `leases` has room for.
 *   leases: the leases that were opened.
 *   count: number of leases that were opened.
 *
 * Opens all leases or none: an executor that refuses is replaced by others. Each executor's part, of
 * up to 1024 workers, is a lease of its own, which the caller uses and releases like any other. If
 * released leases of this session with the same terms are cached (see rfaas_lease_release) and have as
 * many workers in all, their workers are taken, on shm without a message. With RFAAS_LEASE_LOCAL, one
 * more lease has the workers for which no executor has room, or one more for each 1024 of them. Calls
 * of these leases run in this process. Requests of all leases may be passed to one rfaas_waitall or
 * rfaas_waitany. With RFAAS_LEASE_FAILOVER each part moves separately. Needs a resource manager. Each
 * round of requests to executors blocks for at most the session's timeout_ns. With options->wait_ns it
 * waits for room for all workers. Nothing stays leased after an error. Other errors are those of
 * rfaas_lease_open.
 *
 * Errors:
 *   RFAAS_BUSY: there is room for fewer workers after options->wait_ns, or `capacity` is too small;
 *     the error text says which.
 *   RFAAS_INVALID: an option is wrong, or no executor lends enough for one worker. */
RFAAS_API int rfaas_lease_open_across(rfaas_session *session, const rfaas_lease_options *options, size_t capacity,
                                      rfaas_lease *leases[], size_t *count);

/* rfaas_place is the control address of an executor. */
typedef struct rfaas_place {
    /* host:port and a NUL. An executor whose address is longer cannot be returned: rfaas_places fails
     * with RFAAS_UNSUPPORTED. */
    char executor[128];
} rfaas_place;

/* rfaas_places finds executors with room for leases, without leasing.
 *
 *   options: what each of the leases will ask for.
 *   count: number of leases.
 *   places: an executor for each lease, on as few executors as possible.
 *
 * Nothing is reserved, so the executors may still refuse. This is for programs in which one process
 * chooses for all (rfaas_mpi.h). If the session was opened with an executor, every place is that
 * executor. With options->wait_ns it waits for room for all leases.
 *
 * Errors:
 *   RFAAS_BUSY: there is room for fewer leases, after options->wait_ns.
 *   RFAAS_INVALID: an option is wrong, or no executor lends enough for one of the leases.
 *   class CONNECTION: the manager cannot be reached. */
RFAAS_API int rfaas_places(rfaas_session *session, const rfaas_lease_options *options, size_t count,
                           rfaas_place places[]);

/* rfaas_lease_open_at leases workers on the executor at a place.
 *
 * As rfaas_lease_open, but asks only the executor at `place`. With RFAAS_LEASE_FAILOVER, the lease may
 * later move to any other executor. */
RFAAS_API int rfaas_lease_open_at(rfaas_session *session, const rfaas_lease_options *options,
                                  const rfaas_place *place, rfaas_lease **lease);

/* rfaas_lease_renew renews a lease.
 *
 *   duration_ns: minimum time from now; 0: the duration that it was opened with.
 *
 * A renewal never makes the term shorter.
 *
 * Errors:
 *   RFAAS_LEASE_ENDED: the lease has ended or its executor is lost.
 *   RFAAS_BUSY: the node is draining and renews no lease.
 *   RFAAS_INVALID: duration_ns is longer than the executor permits.
 *   class CONNECTION: the executor cannot be reached. */
RFAAS_API int rfaas_lease_renew(rfaas_lease *lease, int64_t duration_ns);

/* ---- events of a lease ---- */

#define RFAAS_EVENT_NONE 0        /* there is no event */
#define RFAAS_EVENT_WORKER_DIED 1 /* a worker died; the next call gets a new worker in its place */
#define RFAAS_EVENT_ENDED 2       /* it has ended; the text begins with released, expired, revoked, drained or lost */
#define RFAAS_EVENT_DRAINING 3    /* the node drains: calls in flight finish, new calls fail with RFAAS_LEASE_ENDED */
#define RFAAS_EVENT_EXPIRING 4    /* the lease expires soon unless it is renewed */
#define RFAAS_EVENT_MOVED 5       /* the lease has moved: calls go to another executor; the text is its address */
#define RFAAS_EVENT_LOCAL 6       /* with RFAAS_LEASE_LOCAL: calls run in this process; the text says why */

/* RFAAS_EVENT_WORKER_ADDED: the lease was opened with fewer workers than it asked for (workers_min),
 * and one was added; the text says how many there are */
#define RFAAS_EVENT_WORKER_ADDED 7

typedef struct rfaas_event {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_event) */
    uint32_t kind;        /* RFAAS_EVENT_* */
    uint32_t worker;      /* RFAAS_EVENT_WORKER_DIED, RFAAS_EVENT_WORKER_ADDED: index of the worker */
    uint32_t lost;        /* number of earlier events that were dropped because they were not taken in time */
    int64_t left_ns;      /* RFAAS_EVENT_EXPIRING, RFAAS_EVENT_DRAINING: time until the end, from now */
    char text[256];       /* the reason */
} rfaas_event;

/* rfaas_lease_event takes the oldest event of a lease.
 *
 *   event: the kind is RFAAS_EVENT_NONE if there is no event.
 *
 * Does not block. The library keeps the last 16 events that were not taken. Writes at most
 * event->struct_size bytes. */
RFAAS_API int rfaas_lease_event(rfaas_lease *lease, rfaas_event *event);

/* ---- information about a lease ---- */

/* rfaas_lease_workers returns the number of workers that a lease has now.
 *
 * With workers_min the number grows up to rfaas_lease_details.workers_wanted. It never decreases.
 * After an error, returns a negative status. Does not block. */
RFAAS_API int rfaas_lease_workers(const rfaas_lease *lease);

typedef struct rfaas_lease_details {
    uint32_t struct_size;       /* set by the caller to sizeof(rfaas_lease_details) */
    uint32_t workers;           /* workers that the lease has now */
    uint32_t depth;             /* calls in flight per worker */
    uint32_t eager;             /* bytes */
    uint64_t bulk;              /* bytes */
    uint64_t lease_id;
    uint32_t functions;         /* number of functions in the library */
    uint32_t replaced;          /* workers replaced since the lease was opened */
    char node[64];              /* host name of the executor's node, truncated to 63 bytes */
    char executor[128];         /* the executor's control address, truncated to 127 bytes */
    char provider[16];          /* "shm", "verbs", "tcp", "ofi", or "local" while calls run in this process */
    char node_name[256];        /* host name of the executor's node */
    char executor_address[256]; /* the executor's control address */
    /* Time until the lease expires unless it is renewed. 0: it has ended, or does not expire. */
    int64_t left_ns;
    char local_reason[256];     /* reason why calls run in this process (RFAAS_LEASE_LOCAL); "" if they do not */
    uint32_t workers_wanted;    /* workers that the lease has when all have been added: rfaas_lease_options.workers */
} rfaas_lease_details;

/* rfaas_lease_info describes a lease.
 *
 * Writes at most details->struct_size bytes. */
RFAAS_API int rfaas_lease_info(const rfaas_lease *lease, rfaas_lease_details *details);

/* rfaas_lease_status says whether a lease has ended.
 *
 * Returns RFAAS_OK while the lease lasts, else why it ended. A lease with RFAAS_LEASE_FAILOVER lasts
 * until it is released. Does not block.
 *
 * Errors:
 *   RFAAS_LEASE_ENDED: the lease has expired, was revoked or drained, or its executor is lost. */
RFAAS_API int rfaas_lease_status(const rfaas_lease *lease);

#define RFAAS_START_UNKNOWN 0 /* the executor did not report it, or the worker is this process */
#define RFAAS_START_COLD 1    /* a new process */

/* RFAAS_START_POOLED: a process that was started ahead of demand: from the executor's pool, or from a
 * spare lease of the agent (RFAAS_POOL) */
#define RFAAS_START_POOLED 2

/* RFAAS_START_CACHED: a worker that served an earlier lease and was still connected. The lease was of
 * this process or, on shm and tcp, of another process of the user */
#define RFAAS_START_CACHED 3
#define RFAAS_START_SEEDED 4  /* a new process with the memory of the lease's seed (RFAAS_LEASE_SEED) */

/* rfaas_worker_start says how a worker came to its lease, with times that the executor measured. A
 * time is 0 where there was nothing to do, or where the executor does not say. */
typedef struct rfaas_worker_start {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_worker_start) */
    uint32_t start;       /* RFAAS_START_* */
    int32_t pid;          /* of the worker's process on its node; 0 while it is being replaced */
    uint32_t reserved;    /* 0 */
    int64_t fork_ns;      /* from the request to the worker's first instruction, or until it has its lease */
    int64_t sandbox_ns;   /* credentials, namespaces and filters */
    int64_t connect_ns;   /* device, memory and queue pair */
    int64_t code_ns;      /* loading the library, and using the seed */
    char unseeded[160];   /* with RFAAS_LEASE_SEED: why the worker has not started from a seed, and a NUL; "": it has */
} rfaas_worker_start;

/* rfaas_worker_origin says how a worker came to its lease.
 *
 *   worker: index from 0.
 *   start: of the present worker in this place.
 *
 * Writes at most start->struct_size bytes. Any thread may call it, but not while the lease is being
 * released. Does not block. */
RFAAS_API int rfaas_worker_origin(const rfaas_lease *lease, int worker, rfaas_worker_start *start);

/* rfaas_worker_details describes a worker. The worker itself counts calls and bytes, so a function
 * could forge these numbers. */
typedef struct rfaas_worker_details {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_worker_details) */
    int32_t pid;          /* of the worker's process on its node */
    uint64_t calls;       /* functions that returned */
    uint64_t failed;      /* of these: reported an error, or had a result that was too large */
    uint64_t refused;     /* malformed requests */
    uint64_t bytes_in;    /* payload */
    uint64_t bytes_out;   /* results */
    char running[128];    /* the function that is running, "" between calls */
    uint32_t output_size; /* bytes of `output`, at most 4096 */
    char output[4100];    /* the last bytes that the worker printed, and a NUL */
} rfaas_worker_details;

/* rfaas_worker_info describes a worker and returns what it has printed.
 *
 *   worker: index from 0.
 *
 * Asks the executor, so it works while a function runs on the worker, and when the worker has just
 * died. Writes at most details->struct_size bytes. Any thread may call it, but not while the lease is
 * being released. Blocks for one control message, at most for the session's timeout_ns. */
RFAAS_API int rfaas_worker_info(const rfaas_lease *lease, int worker, rfaas_worker_details *details);

/* rfaas_worker_replace kills a worker and starts a new one in its place.
 *
 *   worker: index from 0.
 *
 * Use it when a function on the worker does not return. The executor kills the worker, waits until it
 * has ended, and starts a new one on the same cores. Calls in flight on the worker end with
 * RFAAS_WORKER_DIED, and the error text names rfaas_worker_replace. State that functions kept in the
 * worker is lost. Blocks until the new worker is connected, at most for the session's timeout_ns;
 * after RFAAS_DEADLINE the replacement continues. Any thread may call it.
 *
 * Errors:
 *   RFAAS_INVALID: there is no worker with this index.
 *   RFAAS_UNSUPPORTED: the lease has no workers, because its calls run in this process.
 *   RFAAS_DEADLINE: there is no new worker within timeout_ns.
 *   RFAAS_LEASE_ENDED: the lease has ended, or its executor is draining. */
RFAAS_API int rfaas_worker_replace(rfaas_lease *lease, int worker);

/* ---- functions ---- */

/* rfaas_function is the index of a function in the library. It is valid for one lease. */
typedef uint32_t rfaas_function;

/* rfaas_lease_function finds a function of the library by name.
 *
 * Errors:
 *   RFAAS_NO_FUNCTION: the error text lists the functions that the library has, and names the most
 *     similar one. */
RFAAS_API int rfaas_lease_function(const rfaas_lease *lease, const char *name, rfaas_function *function);

/* rfaas_lease_function_name returns the name of a function.
 *
 *   function: 0 .. functions - 1 of rfaas_lease_details.
 *
 * The string belongs to the lease. NULL: there is no such function, or it is a chain. */
RFAAS_API const char *rfaas_lease_function_name(const rfaas_lease *lease, rfaas_function function);

/* rfaas_lease_chain makes a function that calls two functions, the second with the result of the
 * first.
 *
 * A chain can be used like a function of the library, for example with rfaas_invoke, rfaas_iinvokev
 * and rfaas_map. The worker calls `first` with the payload, then `second` with the result of `first`.
 * Only the result of `second` travels back. The result of `first` stays in the worker. Its limit is
 * the larger of the lease's `eager` and `bulk`, in bytes. The capacity of the call does not limit it,
 * nor does RFAAS_CALL_IN_PLACE raise the limit. When a worker executes its first chain, it takes this
 * many bytes of the lease's memory.
 *
 * The number is valid until the lease is released, also after the lease has moved. Nothing needs to be
 * freed.
 *
 * If `first` fails, or its result exceeds that limit, the call ends with RFAAS_FUNCTION_FAILED, and
 * `second` is not called. The error text names the function that failed and says whether it was the
 * first or the second. RFAAS_RESULT_TOO_LARGE concerns the result of `second`. A deadline applies to
 * both functions together. The text of RFAAS_DEADLINE names the function that is still running.
 * call_limit_ns of the lease applies to each function separately. rfaas_statistics counts a chain as
 * one request. The account and the figures of workers count two calls, or one if `first` fails.
 *
 * Errors:
 *   RFAAS_INVALID: `first` or `second` is itself a chain, or the index of `second` is 65535.
 *   RFAAS_NO_FUNCTION: the lease has no function of this number.
 *   RFAAS_UNSUPPORTED: returned by calls of the chain: the executor runs a release of rfaas that has
 *     no chains. */
RFAAS_API int rfaas_lease_chain(const rfaas_lease *lease, rfaas_function first, rfaas_function second,
                                rfaas_function *chain);

/* ---- registered buffers ---- */

/* rfaas_alloc allocates registered memory.
 *
 *   size: 1 byte to 1 TiB.
 *   buffer: the memory; zeroed and page-aligned.
 *
 * Over verbs, a large payload that lies inside this memory is sent without a copy, by any worker of
 * the lease. Such a payload must not change until the call ends. On shm, RFAAS_CALL_IN_PLACE lets
 * workers use payloads and results directly in this memory. rfaas_free frees the memory, and so does
 * the end of the lease.
 *
 * Each buffer takes a file descriptor of the process, unless at least half of the process's
 * descriptors are in use. Memory of a buffer with a descriptor is shared memory, which has transparent
 * huge pages only if the kernel permits them there (shmem_enabled). A buffer larger than the limit of
 * file sizes (RLIMIT_FSIZE) takes no descriptor, and calls do not use it in place. After a fork,
 * parent and child share the memory. A worker of this node to which a call was made in place can read
 * and write the whole buffer until the lease ends. */
RFAAS_API int rfaas_alloc(rfaas_lease *lease, size_t size, void **buffer);

/* rfaas_free frees memory of rfaas_alloc.
 *
 *   buffer: if it is NULL, nothing is done.
 *
 * Errors:
 *   RFAAS_BUSY: calls are in flight, which may still read the memory. */
RFAAS_API int rfaas_free(rfaas_lease *lease, void *buffer);

/* rfaas_register registers memory of the program.
 *
 * Afterwards the memory serves as if it came from rfaas_alloc: a large payload inside it is sent
 * without a copy. The memory stays the caller's and must stay mapped until rfaas_unregister or the end
 * of the lease. It may be registered with several leases.
 *
 * Errors:
 *   RFAAS_INVALID: the memory overlaps another registration of this lease.
 *   RFAAS_FATAL: the device or the limit of locked memory (ulimit -l) refuses. */
RFAAS_API int rfaas_register(rfaas_lease *lease, void *buffer, size_t size);

/* rfaas_unregister undoes rfaas_register.
 *
 *   buffer: the address that was registered. If it is NULL, nothing is done.
 *
 * Errors:
 *   RFAAS_BUSY: calls are in flight. */
RFAAS_API int rfaas_unregister(rfaas_lease *lease, void *buffer);

/* ---- calls ---- */

/* RFAAS_ANY_WORKER: value of rfaas_call_options.worker for any worker. */
#define RFAAS_ANY_WORKER (-1)

typedef struct rfaas_call_options {
    uint32_t struct_size; /* sizeof(rfaas_call_options) */
    int32_t worker;       /* index from 0, or RFAAS_ANY_WORKER */
    /* Time limit of the call, from now. It also bounds the wait for the replacement of a dead worker:
     * the call then ends with RFAAS_DEADLINE and the replacement goes on. 0: none. A call without a
     * time limit ends with RFAAS_DEADLINE if its worker still runs another call whose own time limit
     * passed more than timeout_ns of the session ago. The error names the function of that other call. */
    int64_t timeout_ns;
    /* How often the call may be repeated. 0: never. Set it only if the function is idempotent: the
     * call is repeated on the next allowed worker when it may have run but its worker died, its lease
     * ended, or attempt_ns passed. A call that cannot have run is repeated anyway where that helps. A
     * call that finds no worker, because the agent does not answer, is repeated until its time limit.
     * Without a time limit, it is repeated for as long as the session's time-out. `in` must not change
     * until the call ends, even for rfaas_iinvoke. The repetitions of rfaas_iinvoke are made by the
     * function that waits for the request, and block it. */
    uint32_t repeats;
    uint32_t flags;       /* RFAAS_CALL_* or 0 */
    int64_t attempt_ns;   /* with repeats: time limit of one attempt; 0: until timeout_ns */
    /* If the result is larger than the capacity, but not larger than this many bytes, the library
     * keeps it. The call ends with RFAAS_RESULT_TOO_LARGE and sets *out_size. Then rfaas_kept_result
     * returns the result, and the function does not run again. 0: keep no result. The larger of
     * `capacity` and `keep` is the most that the function may return. It counts as the capacity for
     * `bulk` and the lease's limits. If the result is kept, the contents of `out` are undefined.
     * RFAAS_CALL_IN_PLACE has no effect on a call whose `keep` is larger than its capacity. */
    uint64_t keep;
} rfaas_call_options;

#define RFAAS_CALL_OPTIONS_INIT \
    { sizeof(rfaas_call_options), RFAAS_ANY_WORKER, 0, 0, 0, 0, 0 }

/* RFAAS_CALL_KILL: If the time limit of the call or of its attempt passes while the function may be
 * running, the executor kills the worker at once, and the lease gets a new one in its place. The call
 * ends with RFAAS_DEADLINE, other calls in flight on the worker with RFAAS_WORKER_DIED. State that
 * functions kept in the worker is lost. Without this flag the function continues, and later calls on
 * the worker wait until it returns. Calls in this process (RFAAS_LEASE_LOCAL) are not affected. */
#define RFAAS_CALL_KILL 1u

/* RFAAS_CALL_IN_PLACE: If the payload or the result lies in memory of rfaas_alloc, a worker of this
 * node uses it directly. Nothing is copied, and the lease's `bulk` does not limit the size. Payload
 * and result must begin at a multiple of 64 bytes and must not overlap.
 *
 * The function can read the payload, but not write to it: a worker whose function writes to `args`
 * ends with a segmentation fault. A function that writes beyond the capacity of a result in place
 * changes what follows in the buffer, and the call does not fail. If the payload is in the same
 * buffer, this can be the payload.
 *
 * The bytes of the result area are undefined when the function starts and after a failed call. After a
 * call was given up (RFAAS_DEADLINE, RFAAS_CANCELLED) or lost (RFAAS_PEER_GONE, RFAAS_LEASE_ENDED),
 * its function may still read the payload and write the result until it returns or its worker has
 * ended. Do not use payload and result before that. Meanwhile rfaas_free returns RFAAS_BUSY. A call
 * with a result in place is repeated only after the executor has confirmed the end of the worker. With
 * RFAAS_CALL_KILL and a result in place, RFAAS_DEADLINE is returned after the worker has ended. If the
 * executor does not confirm this within the session's time-out, RFAAS_DEADLINE is returned anyway, and
 * the error's text says so. A result in place cannot be combined with attempt_ns.
 *
 * The flag has no effect on payloads and results in other memory, on those of less than 1 KiB, on
 * calls in pieces, over verbs, tcp and ofi, and in this process (RFAAS_LEASE_LOCAL). In these cases
 * the lease's limits apply. At most 128 buffers are used in place at a time. */
#define RFAAS_CALL_IN_PLACE 2u

/* rfaas_invoke calls a function and waits for its result.
 *
 *   in: the payload; may be NULL if in_size is 0.
 *   out: receives the result; may be NULL if capacity is 0. Only the calling thread writes to it.
 *   capacity: most bytes of the result that the caller takes. A capacity above the lease's `eager`
 *     reserves as much of `bulk` during the call, so it should not be much larger than the result. A
 *     capacity above the lease's limit counts as the limit.
 *   out_size: bytes of the result; may be NULL. Also set with RFAAS_RESULT_TOO_LARGE.
 *   options: begins as RFAAS_CALL_OPTIONS_INIT. NULL: any worker and no time limit.
 *
 * Waits as the lease's wait_mode says. When it returns, the caller may reuse `in`. A payload in
 * rfaas_alloc memory is an exception after RFAAS_DEADLINE: it must not change until the lease is
 * released.
 *
 * The library learns of a worker's death when it calls the worker, or by rfaas_lease_event. From then
 * on it replaces the worker, while other workers take its calls. If there is no other worker, the call
 * waits for the new worker, which takes some milliseconds. A worker may die while the program does
 * something else. The first call to it then ends with RFAAS_WORKER_DIED and RFAAS_MAYBE_EXECUTED, even
 * if other workers live. With `repeats` the library repeats that call. */
RFAAS_API int rfaas_invoke(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_size, void *out,
                           size_t capacity, size_t *out_size, const rfaas_call_options *options);

/* rfaas_piece is a piece of a payload or of a result: `count` elements of `size` bytes each, for
 * example a column of a matrix, as MPI_Type_vector describes it. A piece with count 0 or size 0 has no
 * bytes, and its base may be NULL. */
typedef struct rfaas_piece {
    void *base;   /* the first element. Calls only read a payload */
    size_t size;  /* bytes of an element */
    size_t count; /* elements; 1 for contiguous bytes */
    /* bytes from the beginning of an element to the beginning of the next, which is before it if this
     * is negative. The absolute value is at least `size`. Ignored if count is 1 */
    ptrdiff_t stride;
} rfaas_piece;

/* RFAAS_PIECE initialises an rfaas_piece for `size` contiguous bytes. */
#define RFAAS_PIECE(base, size) {(void *)(base), (size), 1, 0}

/* rfaas_invokev calls a function with payload and result in several pieces of memory.
 *
 *   in: the pieces of the payload; may be NULL if in_count is 0.
 *   in_count: number of pieces, without a limit.
 *   out: the pieces that receive the result; may be NULL if out_count is 0.
 *   out_size: bytes of the result; may be NULL. Also set with RFAAS_RESULT_TOO_LARGE.
 *   options: begins as RFAAS_CALL_OPTIONS_INIT. NULL: any worker and no time limit.
 *
 * Works like rfaas_invoke. The function gets one contiguous payload, the pieces of `in` one after the
 * other, and returns one contiguous result. The result is stored to the pieces of `out` one after the
 * other. The capacity is the sum of the sizes of `out`. A result smaller than that leaves the
 * remaining bytes as they are. Pieces of `in` may overlap. If pieces of `out` overlap, it is undefined
 * which of them the common bytes belong to. Elements of one piece must not overlap.
 *
 * The payload is gathered directly into the memory from which it is sent: on shm the worker's memory,
 * on verbs registered memory. rfaas_invoke copies a payload there too. On tcp, gathering is one copy
 * more than rfaas_invoke makes. Memory of rfaas_alloc has no advantage here. When the function
 * returns, the caller may reuse all pieces. Until then they must not change, because a repeated call
 * (rfaas_call_options.repeats) reads them again.
 *
 * Errors:
 *   RFAAS_INVALID: an array is NULL and its count is not 0, a piece has bytes at NULL, or a stride
 *     is smaller than the element. The text names the piece.
 *   RFAAS_TOO_LARGE: the payload exceeds the lease's limits, also if its size overflows size_t.
 *   RFAAS_RESULT_TOO_LARGE: the result does not fit into the pieces of `out`. None of it is stored. */
RFAAS_API int rfaas_invokev(rfaas_lease *lease, rfaas_function function, const rfaas_piece in[], size_t in_count,
                            const rfaas_piece out[], size_t out_count, size_t *out_size,
                            const rfaas_call_options *options);

/* rfaas_request is a call in flight. The number may be copied, but only one copy may be waited for,
 * tested until it ends, or cancelled. */
typedef uint64_t rfaas_request;

#define RFAAS_REQUEST_NULL ((rfaas_request)0)

/* rfaas_iinvoke starts a call and returns at once.
 *
 *   in: may be reused at once, unless it lies in registered memory: then it must not change until
 *     the request ends.
 *   out: must stay valid until the request ends. Only rfaas calls on this lease write to it.
 *
 * Parameters are as for rfaas_invoke. Over tcp, the function blocks if the worker runs another call
 * and the payload does not fit into the connection's buffers (about 4 MiB).
 *
 * Errors:
 *   RFAAS_BUSY: every worker, or the chosen one, has `depth` calls in flight; finish one and retry.
 *   RFAAS_DEADLINE: the payload did not fit into the connection's buffers before the deadline. The
 *     call was not started. */
RFAAS_API int rfaas_iinvoke(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_size, void *out,
                            size_t capacity, const rfaas_call_options *options, rfaas_request *request);

#define rfaas_submit rfaas_iinvoke

/* rfaas_iinvokev starts a call with payload and result in several pieces of memory.
 *
 *   in: the array may be reused at once. The memory that it names may be reused at once too, unless
 *     the call has repeats.
 *   out: the array may be reused at once. The memory that it names must stay valid until the request
 *     ends. Only rfaas calls on this lease write to it.
 *
 * Pieces are as for rfaas_invokev, everything else as for rfaas_iinvoke. The library copies both
 * arrays, and not the memory that they name. With rfaas_call_options.repeats the memory of the payload
 * must stay unchanged until the request ends, because a repeated call gathers it again.
 *
 * Errors:
 *   RFAAS_INVALID: a piece is wrong, as for rfaas_invokev.
 *   RFAAS_BUSY: every worker, or the chosen one, has `depth` calls in flight; finish one and retry.
 *   RFAAS_TOO_LARGE: the payload exceeds the lease's limits, also if its size overflows size_t. */
RFAAS_API int rfaas_iinvokev(rfaas_lease *lease, rfaas_function function, const rfaas_piece in[], size_t in_count,
                             const rfaas_piece out[], size_t out_count, const rfaas_call_options *options,
                             rfaas_request *request);

#define rfaas_submitv rfaas_iinvokev

/* rfaas_wait waits for a request to end.
 *
 *   request: is set to RFAAS_REQUEST_NULL.
 *   out_size: bytes of the result; may be NULL.
 *
 * Writes the result to the request's `out` and returns the status of the call. For RFAAS_REQUEST_NULL
 * it returns RFAAS_OK at once and sets *out_size to 0, as in MPI.
 *
 * Errors:
 *   RFAAS_INVALID: the request has ended before. */
RFAAS_API int rfaas_wait(rfaas_request *request, size_t *out_size);

/* rfaas_test finishes a request if it has ended.
 *
 *   done: becomes 0 if the call is in flight, and RFAAS_OK is returned. Becomes 1 if the call has
 *     ended, even with an error.
 *
 * Does not block. If the call has ended, does everything that rfaas_wait does. For RFAAS_REQUEST_NULL,
 * *done is 1. */
RFAAS_API int rfaas_test(rfaas_request *request, int *done, size_t *out_size);

/* rfaas_cancel abandons a request.
 *
 *   request: is set to RFAAS_REQUEST_NULL.
 *
 * The function may still run or finish. Its result is dropped, and `out` is not written any more. The
 * slot becomes free when the worker has answered. Returns RFAAS_OK even if the call had ended. */
RFAAS_API int rfaas_cancel(rfaas_request *request);

/* rfaas_waitall waits for several requests to end.
 *
 *   out_sizes: room for `count` sizes, or NULL.
 *   statuses: room for `count` statuses, or NULL.
 *
 * Waits for each as rfaas_wait does. Null requests have size 0 and status RFAAS_OK. Returns RFAAS_OK,
 * or the status of the first request in the array that failed, whose error text rfaas_last_error()
 * returns. All requests have ended in either case. The requests may belong to several leases. */
RFAAS_API int rfaas_waitall(size_t count, rfaas_request requests[], size_t out_sizes[], int statuses[]);

/* RFAAS_UNDEFINED: index of rfaas_waitany if no request has ended. It is 0 in Fortran, where indices
 * begin with 1. */
#define RFAAS_UNDEFINED SIZE_MAX

/* rfaas_waitany waits for one of several requests to end.
 *
 *   index: the position of the request that ended, also if its status is an error. RFAAS_UNDEFINED:
 *     all requests are null (RFAAS_OK), or an argument is wrong.
 *
 * Finishes that request as rfaas_wait does and returns its status. The search starts behind the
 * request that ended last, so no request waits for ever.
 *
 * Errors:
 *   RFAAS_INVALID: a request has ended before. *index is its position: set it to RFAAS_REQUEST_NULL. */
RFAAS_API int rfaas_waitany(size_t count, rfaas_request requests[], size_t *index, size_t *out_size);

/* rfaas_waitany_for waits for one of several requests to end, for a limited time.
 *
 *   timeout_ns: 0: look without waiting.
 *   index: as in rfaas_waitany. RFAAS_UNDEFINED with RFAAS_OK: no request has ended in time, or all
 *     are null.
 *
 * Everything else is as in rfaas_waitany. */
RFAAS_API int rfaas_waitany_for(size_t count, rfaas_request requests[], int64_t timeout_ns, size_t *index,
                                size_t *out_size);

/* ---- calls in an event loop ---- */

/* rfaas_lease_descriptor returns a descriptor for poll() that becomes readable when a request of a
 * lease has ended.
 *
 *   fd: the descriptor.
 *
 * For programs that wait in poll, epoll or a similar function. The first call makes the descriptor and
 * starts a thread in this process. After rfaas_lease_arm, this thread waits for requests. The lease
 * then counts as one that several threads use. The thread sleeps in every wait mode.
 *
 * The lease owns the descriptor. When the lease is released, it makes the descriptor readable and
 * closes it. The program must neither read nor close it, but may poll a copy of it (dup). A child of
 * fork() must not use it.
 *
 * Errors:
 *   RFAAS_FATAL: no descriptor or thread can be made. */
RFAAS_API int rfaas_lease_descriptor(rfaas_lease *lease, int *fd);

/* rfaas_lease_arm makes a lease's descriptor readable at the next end of a request.
 *
 * Makes the descriptor of rfaas_lease_descriptor unreadable. It becomes readable when a request of the
 * lease has ended, or if no request is in flight. A request that ended before this call counts too,
 * unless the descriptor has already become readable for it. Does not block. A loop arms, tests its
 * requests, and polls:
 *
 *     rfaas_lease_descriptor(lease, &p.fd);
 *     for (;;) {
 *         rfaas_lease_arm(lease);
 *         for (...) rfaas_test(&requests[i], &done, &size);
 *         poll(&p, 1, -1);
 *     }
 *
 * The descriptor becomes readable once each time the lease is armed. Requests for which other threads
 * wait count too, so it may be readable although no request of the loop has ended. While the lease is
 * armed and the descriptor is not readable, starting a call takes some ten microseconds longer,
 * because it interrupts the thread.
 *
 * Errors:
 *   RFAAS_INVALID: the lease has no descriptor. */
RFAAS_API int rfaas_lease_arm(rfaas_lease *lease);

/* ---- tables ---- */

/* A table is read-only data that is larger than a payload and that many calls need, such as cross
 * sections. Each node has one copy, which its workers map. A function finds it by rfaas_table
 * (rfaas_function.h). */

/* RFAAS_TABLES_MAX: number of tables of a session. */
#define RFAAS_TABLES_MAX 64

/* rfaas_table_put publishes a table, which functions find by its name.
 *
 *   name: 1 to 63 bytes; no other table of the session has it.
 *   parts: the pieces of the table, which functions see one after the other.
 *   count: number of pieces.
 *
 * Leases that are opened in the session from now on have the table. Their functions call rfaas_table
 * with its name, and get its address and size. The bytes are those at the time of this call: the
 * library copies them once, into memory of this node that it shares with the agent, so the caller may
 * change or free its own. Pages of zeros take no memory in the copy. A table may be larger than 4 GiB.
 *
 * The first lease on a node waits until its executor has read the table from this node's memory: over
 * shared memory, verbs or tcp, as the lease's calls. The executor checks the hash of what it has read,
 * and keeps the table for all workers of the tenant on its node. Later leases, also of other programs
 * that publish the same bytes, transfer nothing. A lease that is opened while the transfer runs may
 * take longer than the session's timeout_ns, by the time for the table at 16 MiB/s. A table that no
 * lease uses may be evicted. A lease that moves brings its tables to the new executor. Workers that
 * are replaced map them again.
 *
 * With RFAAS_LEASE_LOCAL, functions in this process map the library's copy.
 *
 * A table counts once per node for the memory that the executor lends, and for the tenant's
 * table-limit there. Its memory is charged once per node and tenant, while leases use it. If the
 * tables of a lease exceed table-limit, rfaas_lease_open fails with RFAAS_INVALID. If other leases of
 * the tenant use up the limit, or the executor has no memory now, another executor is asked. Without
 * one, rfaas_lease_open fails with RFAAS_BUSY. The text has the sizes.
 *
 * Errors:
 *   RFAAS_INVALID: the name is empty, too long or taken, the parts have no bytes, a part is
 *     malformed, or the session has RFAAS_TABLES_MAX tables.
 *   RFAAS_FATAL: this node has no memory for the copy. */
RFAAS_API int rfaas_table_put(rfaas_session *session, const char *name, const rfaas_piece parts[], size_t count);

/* rfaas_table_put_at publishes a table that all workers map at the same address.
 *
 *   address: a multiple of the page size; 0: any address. Take one from 0x100000000000 to
 *     0x500000000000, where Linux maps nothing by itself.
 *
 * Works like rfaas_table_put. With an address, the table may contain pointers into itself: compute
 * them for that address. In this process the table is mapped there only for functions of
 * RFAAS_LEASE_LOCAL.
 *
 * Errors:
 *   RFAAS_INVALID: as for rfaas_table_put; also if the address is not a multiple of the page size.
 *     rfaas_lease_open has it if other memory of a worker lies there. */
RFAAS_API int rfaas_table_put_at(rfaas_session *session, const char *name, const rfaas_piece parts[], size_t count,
                                 uint64_t address);

/* rfaas_table_put_seed publishes the memory of a seed as a table.
 *
 *   name: 1 to 63 bytes; no other table of the session has it.
 *   seed: full name of the seed, as rfaas_seed_name returns it.
 *
 * Workers of leases that are opened in the session from now on map the memory that the seed's setup
 * function has allocated by malloc and new. They map it read-only, at the addresses that it has in the
 * seed, so that pointers in it are valid. The library of the lease need not be that of the seed.
 * Functions call rfaas_table with the name, and get the bytes that the setup function has passed to
 * rfaas_set_root. The code and the static data of the seed's library are not mapped. Pointers to them
 * are not valid, and objects with virtual functions contain such pointers. Functions must not free or
 * change the memory.
 *
 * An executor that does not have the seed copies it once, from an executor that has it, before it
 * grants the lease. All workers of the tenant on a node map one copy. Leases that are open when the
 * seed ends keep the memory. Later leases then fail with RFAAS_LEASE_ENDED, unless the agent knows an
 * executor that still has a copy.
 *
 * A session can have one such table, because all seeds have the same address. For the same reason,
 * workers of a lease with such a table cannot start from a seed of their own: they start without it,
 * or the lease fails if it has the flag RFAAS_LEASE_SEED_REQUIRED. Functions of RFAAS_LEASE_LOCAL, in
 * this process, do not have the table. In all other respects it is a table like that of
 * rfaas_table_put.
 *
 * Errors:
 *   RFAAS_INVALID: the name is empty, too long or taken, `seed` is not the full name of a seed, its
 *     setup function has not called rfaas_set_root, or the session has another seed as a table or
 *     RFAAS_TABLES_MAX tables.
 *   RFAAS_LEASE_ENDED: the tenant has no such seed: it was released, its time to live is over, or
 *     its executor was restarted.
 *   RFAAS_UNSUPPORTED: the executor that has made the seed has an earlier version. */
RFAAS_API int rfaas_table_put_seed(rfaas_session *session, const char *name, const char *seed);

/* rfaas_table_drop withdraws a table, and frees this node's copy.
 *
 * rfaas_session_close withdraws all tables of its session. Executors keep a withdrawn table until they
 * need its memory.
 *
 * Errors:
 *   RFAAS_INVALID: the session has no such table, or has a lease, which may use it. */
RFAAS_API int rfaas_table_drop(rfaas_session *session, const char *name);

/* ---- seeds ---- */

/* A seed is the memory that a setup function has prepared. A program creates it once, on the node of a
 * lease, and names it. Workers of any later lease of the tenant start from it within milliseconds, and
 * share its memory, copy on write. RFAAS_LEASE_SEED says what a seed keeps, and what it does not.
 * Functions call rfaas_on_resume in the setup function for what each worker must do by itself, and
 * rfaas_child_number to tell the workers apart (rfaas_function.h). */

/* A named seed at an executor. */
typedef struct rfaas_seed rfaas_seed;

typedef struct rfaas_seed_options {
    uint32_t struct_size; /* sizeof(rfaas_seed_options) */
    uint32_t reserved;    /* 0 */
    /* 1 to 63 characters of A-Z, a-z, 0-9, dot, underscore and hyphen. Tenants do not see each other's
     * names. */
    const char *name;
    /* How long the executor keeps the seed if nobody renews it. The agent renews it as long as this
     * process has the session open. 0: as long as the executor's longest lease. */
    int64_t ttl_ns;
} rfaas_seed_options;

#define RFAAS_SEED_OPTIONS_INIT \
    { sizeof(rfaas_seed_options), 0, NULL, 0 }

/* rfaas_seed_details describes a seed. */
typedef struct rfaas_seed_details {
    uint32_t struct_size; /* set by the caller to sizeof(rfaas_seed_details) */
    uint32_t version;     /* grows each time that a seed is created at the executor, and is part of the full name */
    uint64_t bytes;       /* memory of its node that the seed takes */
    uint64_t memory;      /* bytes per worker that leases must have at least to start from it */
    uint64_t children;    /* workers that have started from it on the node that has made it */
    int64_t left_ns;      /* time until it ends unless it is renewed */
    int64_t load_ns;      /* duration of loading the library, when the seed was made */
    int64_t setup_ns;     /* duration of the setup function */
    int64_t capture_ns;   /* duration of keeping its memory */
    char executor[256];   /* address of the executor that has made it */
    char node[256];       /* host name of that executor */
    char setup[256];      /* name of the setup function, cut if it is longer */
    char warning[256];    /* what may be wrong with the seed, such as pointers that workers cannot use; "": nothing */
} rfaas_seed_details;

/* rfaas_seed_create executes a setup function once, and keeps its memory for workers of later leases.
 *
 *   setup: name of a function of the lease's library.
 *   in: its payload.
 *   size: bytes of the payload, at most 65536.
 *   options: begins as RFAAS_SEED_OPTIONS_INIT; `name` must be set.
 *
 * The executor of the lease executes the function in a process of its own, with the rights and the
 * memory of a worker, on the cores of worker 0. It checks that the state can be kept, captures it, and
 * publishes it. The workers of the lease stay as they are. Blocks for at most the session's timeout_ns
 * and the time for the function, which is call_limit_ns or timeout_ns, whichever is longer.
 *
 * Creating a name again makes another seed, with a higher version. Earlier ones remain. The seed does
 * not need the lease any more. The tenant pays for its memory, and for its processor time in the
 * lease, and it counts for the tenant's table-limit. The seed ends with rfaas_seed_release, when
 * nobody has renewed it for ttl_ns, or with its executor. An executor that hands over to a newer
 * program keeps it. Workers that have started from it keep its memory.
 *
 * Errors:
 *   RFAAS_INVALID: an option is wrong.
 *   RFAAS_NO_FUNCTION: the library has no such function.
 *   RFAAS_TOO_LARGE: the payload has more than 65536 bytes.
 *   RFAAS_FUNCTION_FAILED: the setup function has failed.
 *   RFAAS_UNSUPPORTED: the state cannot be kept, which the text explains with the remedy, the
 *     executor has no seeds, or the lease is local.
 *   RFAAS_TIME_LIMIT: the setup function has not returned in time.
 *   RFAAS_WORKER_DIED: the setup function has crashed.
 *   RFAAS_BUSY: the node or the tenant has no memory left for it. */
RFAAS_API int rfaas_seed_create(rfaas_lease *lease, const char *setup, const void *in, size_t size,
                                const rfaas_seed_options *options, rfaas_seed **seed);

/* rfaas_seed_open opens a seed that this or another program has created.
 *
 *   name: full name, as rfaas_seed_name has returned it in the program that created the seed.
 *
 * Asks the executor whose address is part of the name. The handle does not keep the seed alive. A
 * lease can name the seed without it.
 *
 * Errors:
 *   RFAAS_INVALID: the name is not the full name of a seed.
 *   RFAAS_LEASE_ENDED: the tenant has no such seed there: it was released, its time has run out, or
 *     the executor was restarted.
 *   class CONNECTION: the executor cannot be reached. */
RFAAS_API int rfaas_seed_open(rfaas_session *session, const char *name, rfaas_seed **seed);

/* rfaas_seed_name returns the full name of a seed.
 *
 * NAME:VERSION@ADDRESS, for the lease option `seed` and for rfaas_seed_open in any program of the
 * tenant. Valid until the handle is released. NULL: the handle is invalid, and the error is set. */
RFAAS_API const char *rfaas_seed_name(const rfaas_seed *seed);

/* rfaas_seed_info describes a seed.
 *
 * Asks the executor. Writes at most details->struct_size bytes. Blocks for at most the session's
 * timeout_ns.
 *
 * Errors:
 *   RFAAS_LEASE_ENDED: the seed has ended. */
RFAAS_API int rfaas_seed_info(const rfaas_seed *seed, rfaas_seed_details *details);

/* rfaas_seed_release withdraws a seed, or frees the handle of an opened one.
 *
 * In the process that has created the seed, its executor withdraws it: no later lease finds it, and
 * its memory is freed when the last worker that uses it has ended. Leases that are open keep it, also
 * for workers that are replaced. Otherwise only the handle is freed. The handle is invalid afterwards,
 * even after an error. rfaas_session_close withdraws nothing: created seeds end when their time is
 * over, and their handles can only be released.
 *
 * Errors:
 *   class CONNECTION: the executor cannot be reached. The seed ends when its time is over. */
RFAAS_API int rfaas_seed_release(rfaas_seed *seed);

/* ---- map ---- */

typedef struct rfaas_map_options {
    uint32_t struct_size; /* sizeof(rfaas_map_options) */
    uint32_t flags;       /* 0 */
    size_t chunk;         /* items of one call; 0: chosen so that all workers finish at about the same time */
    int64_t timeout_ns;   /* time limit of the whole map; 0: none */
    uint32_t repeats;     /* of each call, as in rfaas_call_options; 0: never */
    uint32_t reserved;    /* 0 */
} rfaas_map_options;

#define RFAAS_MAP_OPTIONS_INIT \
    { sizeof(rfaas_map_options), 0, 0, 0, 0, 0 }

/* rfaas_map applies a function to every item of an array, on all workers of a lease.
 *
 *   in: count * in_item bytes.
 *   in_item: bytes of one item, at least 1.
 *   out: room for count * out_item bytes.
 *   out_item: bytes of one result; may be 0.
 *   count: number of items. If it is 0, nothing is done.
 *   options: begins as RFAAS_MAP_OPTIONS_INIT; NULL: the defaults.
 *
 * One call of the function gets k >= 1 consecutive items, k * in_item bytes, and returns the results
 * of these items in the same order, k * out_item bytes. A result of another size is
 * RFAAS_FUNCTION_FAILED.
 *
 * Without `chunk`, each worker gets about 16 calls, with fewer items towards the end. Payload and
 * result fit into `eager` if those of one item do. Calls keep `depth` slots of each worker full. Other
 * requests in the same lease may be in flight and keep their slots.
 *
 * Returns RFAAS_OK or the first error. No call is made after an error, the error text names the items,
 * and the contents of `out` are undefined. The function first waits for the calls in flight, for at
 * most a second and not beyond the deadline. A worker that is still busy then is replaced by its next
 * call, unless it also runs other requests. Only after RFAAS_DEADLINE do calls in flight go on. */
RFAAS_API int rfaas_map(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_item, void *out,
                        size_t out_item, size_t count, const rfaas_map_options *options);

/* ---- reduction ---- */

#define RFAAS_SUM 1 /* the sum; integers wrap around */
#define RFAAS_MIN 2 /* the smaller one. A result that is NaN is ignored */
#define RFAAS_MAX 3 /* the larger one. A result that is NaN is ignored */

#define RFAAS_INT32 1   /* int32_t */
#define RFAAS_INT64 2   /* int64_t */
#define RFAAS_FLOAT32 3 /* float */
#define RFAAS_FLOAT64 4 /* double */

/* rfaas_combine_fn combines the result of one item, of `size` bytes, with the accumulator. It runs on
 * the thread that called rfaas_reduce_with, and must not use the lease. */
typedef void (*rfaas_combine_fn)(void *accumulator, const void *result, size_t size, void *arg);

/* rfaas_reduce applies a function to every item of an array, on all workers of a lease, and combines
 * the results.
 *
 *   in: count * in_item bytes.
 *   in_item: bytes of one item, at least 1.
 *   accumulator: out_item bytes: the value to begin with, for example zeros for RFAAS_SUM; receives
 *     the combination.
 *   out_item: bytes of the result of one item, a multiple of an element's size.
 *   count: number of items. If it is 0, nothing is done.
 *   operation: RFAAS_SUM, RFAAS_MIN or RFAAS_MAX, applied to each element of the accumulator and the
 *     element of the result in the same place.
 *   type: of the elements: RFAAS_INT32, RFAAS_INT64, RFAAS_FLOAT32 or RFAAS_FLOAT64.
 *
 * Calls the function as rfaas_map does, and works with the same functions: one call gets k >= 1
 * consecutive items, and returns k results.
 *
 * Results are combined in the order of the items, whichever worker answers first and however items are
 * divided among calls. So the same input gives the same bits, also with floating-point numbers. The
 * library buffers the results of at most 2 * workers * depth calls. If a slow call fills this buffer
 * with results of later calls, no new calls start until it has ended.
 *
 * Errors are those of rfaas_map. After an error, the contents of `accumulator` are undefined.
 *
 * Errors:
 *   RFAAS_INVALID: an argument is wrong, for example the operation or the type.
 *   RFAAS_FATAL: out of memory for buffered results. */
RFAAS_API int rfaas_reduce(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_item,
                           void *accumulator, size_t out_item, size_t count, int operation, int type,
                           const rfaas_map_options *options);

/* rfaas_reduce_with works like rfaas_reduce, and combines results by a callback.
 *
 *   in: count * in_item bytes.
 *   in_item: bytes of one item, at least 1.
 *   accumulator: any memory; only `combine` uses it.
 *   out_item: bytes of the result of one item, at least 1.
 *   count: number of items.
 *   combine: called once for each item, in the order of the items.
 *   arg: passed to combine.
 *
 * Errors:
 *   RFAAS_INVALID: an argument is wrong.
 *   RFAAS_FATAL: out of memory for buffered results. */
RFAAS_API int rfaas_reduce_with(rfaas_lease *lease, rfaas_function function, const void *in, size_t in_item,
                                void *accumulator, size_t out_item, size_t count, rfaas_combine_fn combine,
                                void *arg, const rfaas_map_options *options);

/* ---- statistics ---- */

typedef struct rfaas_statistics {
    uint32_t struct_size;   /* set by the caller to sizeof(rfaas_statistics) */
    uint32_t replaced;      /* workers replaced */
    uint64_t calls;         /* requests posted to workers */
    uint64_t replies;       /* of these: answered in time */
    uint64_t abandoned;     /* of these: abandoned at a deadline or by rfaas_cancel */
    uint64_t late;          /* replies to abandoned requests */
    uint64_t busy;          /* times that a worker had no free slot or no room */
    uint64_t bytes_in;      /* payload sent */
    uint64_t bytes_out;     /* results received */
    uint64_t blocked;       /* waits that went to sleep since the last move */
    uint64_t repeated;      /* calls that were repeated */
    uint64_t moved;         /* times that the lease moved to another executor */
    uint64_t local;         /* calls that ran in this process (RFAAS_LEASE_LOCAL), not counted above */
    uint64_t cold;          /* workers that started cold, as new processes, including replacements and moves */
    uint64_t pooled;        /* workers of the executor's pool, and of spare leases (RFAAS_POOL) */
    uint64_t cached;        /* cached workers of an earlier lease, connected and with their code */
    uint64_t queue_pairs;   /* queue pairs made for the lease; none for cached workers */
    int64_t open_ns;        /* time that opening the lease took */
    uint64_t cached_leases; /* released leases that the session caches now, as far as the library knows */
    uint64_t seeded;        /* workers that started from a seed (RFAAS_LEASE_SEED) */
} rfaas_statistics;

/* rfaas_lease_statistics returns the statistics of a lease since it was opened.
 *
 * Writes at most stats->struct_size bytes. */
RFAAS_API int rfaas_lease_statistics(rfaas_lease *lease, rfaas_statistics *stats);

#ifdef __cplusplus
}
#endif

#endif

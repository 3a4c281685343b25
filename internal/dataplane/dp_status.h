/* Status codes of the data plane, shared by every C file of this package.
 *
 * A status is 0 or a negative number -(class*100 + detail). The class says what the caller does next
 * (see RATIONALE.md, "Why are errors grouped by what the caller does next?"). The numbers are stable:
 * rfaas.h repeats them for users of the C ABI and a static assertion binds the two.
 */
#ifndef RFAAS_DP_STATUS_H
#define RFAAS_DP_STATUS_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

typedef enum dp_status {
    DP_OK = 0,

    DP_BUSY = -100, /* no free slot, send queue full, no bulk room: retry after progress */

    DP_INVALID = -200,      /* an argument is out of range */
    DP_TOO_LARGE = -201,    /* payload or capacity larger than the channel carries */
    DP_NO_FUNCTION = -202,  /* function index not in the worker's table */
    DP_BAD_BLOB = -203,     /* address blob: wrong magic, length, version or provider */
    DP_BAD_LIBRARY = -204,  /* user library cannot be loaded */
    DP_BAD_REQUEST = -205,  /* the worker refused a malformed request */
    DP_WRONG_THREAD = -206, /* an object for one thread was used by two at once */

    DP_UNSUPPORTED = -300, /* this provider or device cannot do it */
    DP_NO_DEVICE = -301,   /* no such device, port or GID */

    DP_FUNCTION_FAILED = -400,  /* the function reported failure */
    DP_RESULT_TOO_LARGE = -401, /* the result exceeds the caller's capacity */
    DP_DEADLINE = -402,         /* the caller's deadline passed; the call may still run */
    DP_CANCELLED = -403,        /* the caller cancelled the call */

    DP_CONNECTION = -500,  /* the queue pair is broken */
    DP_PEER_GONE = -501,   /* the peer process ended */
    DP_WORKER_DIED = -502, /* the executor reported the worker's death */
    DP_PROTOCOL = -503,    /* the peer broke the protocol */
    DP_TIME_LIMIT = -504,  /* a function ran longer than the lease allows: its worker was killed */
    DP_MEMORY_LIMIT = -505, /* a function died of its memory limit, and its worker with it */

    DP_LEASE_ENDED = -600, /* released, expired or revoked */

    DP_FATAL = -700, /* device removed, out of memory, kernel refused */

    DP_CREDENTIAL = -800, /* missing, wrong, expired, revoked or not valid yet */
} dp_status;

/* Class of a status: 1 busy, 2 invalid, 3 unsupported, 4 function, 5 connection, 6 lease, 7 fatal, 8 credential. */
static inline int dp_status_class(int status) { return status >= 0 ? 0 : -status / 100; }

/* Short English name of a status, never NULL. */
const char *dp_status_text(int status);

/* Where slow-path functions leave what went wrong. Callers may pass NULL. */
typedef struct dp_error {
    int status;    /* a dp_status */
    int sys_errno; /* errno of the failing system or verbs call, or 0 */
    char msg[244]; /* names the operation and the offending value */
} dp_error;

/* dp_fail fills err (if not NULL) and returns status. sys_errno 0 means no system error; otherwise its
 * text is appended to the message. */
int dp_fail(dp_error *err, int status, int sys_errno, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#endif

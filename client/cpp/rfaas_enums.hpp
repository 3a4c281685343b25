/* generated from client/api/rfaas.yaml by internal/apigen (make api): do not edit. */
/* rfaas_enums.hpp: the constants of rfaas.h as C++ enumerations. Include rfaas.hpp. An enumeration compares with the
 * integers of rfaas.h: `event.kind == rfaas::event_kind::worker_died`. */
#ifndef RFAAS_ENUMS_HPP
#define RFAAS_ENUMS_HPP

#include <rfaas.h>

#include <cstddef>
#include <cstdint>

namespace rfaas {

enum class status : int {
    ok = RFAAS_OK,
    busy = RFAAS_BUSY, /* no free slot or core; finish a request and retry */
    invalid = RFAAS_INVALID, /* an argument is wrong; the error text names it */
    too_large = RFAAS_TOO_LARGE, /* the payload or capacity exceeds the lease's limits */
    no_function = RFAAS_NO_FUNCTION, /* the library has no function of this name */
    bad_blob = RFAAS_BAD_BLOB, /* the peer sent a malformed queue pair address */
    bad_library = RFAAS_BAD_LIBRARY, /* the library cannot be read or loaded; the error text says why */
    bad_request = RFAAS_BAD_REQUEST, /* the worker refused a malformed request */
    wrong_thread = RFAAS_WRONG_THREAD, /* two threads used an object that only one thread may use */
    unsupported = RFAAS_UNSUPPORTED, /* this provider, device or executor does not support the operation */
    no_device = RFAAS_NO_DEVICE, /* no such RDMA device, port or GID */
    function_failed = RFAAS_FUNCTION_FAILED, /* the function reported an error (the text), or wrote beyond its capacity */
    result_too_large = RFAAS_RESULT_TOO_LARGE, /* the result exceeds the capacity that the caller gave */
    deadline = RFAAS_DEADLINE, /* the deadline passed; the function may still be running */
    cancelled = RFAAS_CANCELLED, /* the caller cancelled the call with rfaas_cancel */
    connection = RFAAS_CONNECTION, /* the connection to the worker or to the control port broke */
    peer_gone = RFAAS_PEER_GONE, /* the other process or node ended, or cannot be reached */
    worker_died = RFAAS_WORKER_DIED, /* the worker died; the error text says how. The next call gets a new worker */
    protocol = RFAAS_PROTOCOL, /* the peer broke the protocol or speaks another version */
    time_limit = RFAAS_TIME_LIMIT, /* the function exceeded the lease's call_limit_ns and its worker was killed */
    memory_limit = RFAAS_MEMORY_LIMIT, /* the function exceeded the lease's memory and its worker was killed */
    lease_ended = RFAAS_LEASE_ENDED, /* the lease was released, revoked, expired or lost its executor; open another */
    fatal = RFAAS_FATAL, /* out of memory, device removed, or refused by the kernel */
    credential = RFAAS_CREDENTIAL, /* the token or secret is missing, wrong, expired, revoked or not yet valid */
};
constexpr bool operator==(status a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, status b) noexcept { return b == a; }
constexpr bool operator!=(status a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, status b) noexcept { return !(b == a); }

enum class error_class : int {
    busy = RFAAS_CLASS_BUSY, /* retry */
    invalid = RFAAS_CLASS_INVALID, /* fix the call */
    unsupported = RFAAS_CLASS_UNSUPPORTED, /* take another path */
    function = RFAAS_CLASS_FUNCTION, /* this call failed, the lease is good */
    connection = RFAAS_CLASS_CONNECTION, /* the worker is lost, the next call gets a new one */
    lease = RFAAS_CLASS_LEASE, /* open a new lease */
    fatal = RFAAS_CLASS_FATAL, /* stop */
    credential = RFAAS_CLASS_CREDENTIAL, /* get another token or set the clock, then repeat the call */
};
constexpr bool operator==(error_class a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, error_class b) noexcept { return b == a; }
constexpr bool operator!=(error_class a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, error_class b) noexcept { return !(b == a); }

enum class started : int {
    not_started = RFAAS_NOT_STARTED, /* the function has not run and will not run; repeating the call is safe */
    maybe_executed = RFAAS_MAYBE_EXECUTED, /* the function may have run, may be running, or may run later */
};
constexpr bool operator==(started a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, started b) noexcept { return b == a; }
constexpr bool operator!=(started a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, started b) noexcept { return !(b == a); }

enum class session_flags : std::uint32_t {
    none = 0,
    allow_plaintext = RFAAS_SESSION_ALLOW_PLAINTEXT,
    local = RFAAS_SESSION_LOCAL,
};
constexpr bool operator==(session_flags a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, session_flags b) noexcept { return b == a; }
constexpr bool operator!=(session_flags a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, session_flags b) noexcept { return !(b == a); }
constexpr session_flags operator|(session_flags a, session_flags b) noexcept {
    return static_cast<session_flags>(static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b));
}
constexpr session_flags operator&(session_flags a, session_flags b) noexcept {
    return static_cast<session_flags>(static_cast<std::uint32_t>(a) & static_cast<std::uint32_t>(b));
}

enum class data_encryption : int {
    off = RFAAS_DATA_ENCRYPTION_OFF, /* never */
    on = RFAAS_DATA_ENCRYPTION_ON,
    require = RFAAS_DATA_ENCRYPTION_REQUIRE, /* always encrypts on tcp, also on loopback */
};
constexpr bool operator==(data_encryption a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, data_encryption b) noexcept { return b == a; }
constexpr bool operator!=(data_encryption a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, data_encryption b) noexcept { return !(b == a); }

enum class executor_state : int {
    open = RFAAS_EXECUTOR_OPEN, /* the executor leases cores; also: it registered, or it recovered */
    draining = RFAAS_EXECUTOR_DRAINING, /* the executor grants no more leases */
    silent = RFAAS_EXECUTOR_SILENT, /* the executor missed several heartbeats */
    left = RFAAS_EXECUTOR_LEFT, /* the executor has deregistered */
};
constexpr bool operator==(executor_state a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, executor_state b) noexcept { return b == a; }
constexpr bool operator!=(executor_state a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, executor_state b) noexcept { return !(b == a); }

/* How both sides wait for messages. */
enum class wait_mode : int {
    adaptive = RFAAS_WAIT_ADAPTIVE, /* spin for about as long as a wake-up takes, then block; the default */
    hot = RFAAS_WAIT_HOT, /* spin: lowest latency, uses one core on each side */
    warm = RFAAS_WAIT_WARM, /* block at once: uses no core while waiting */
};
constexpr bool operator==(wait_mode a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, wait_mode b) noexcept { return b == a; }
constexpr bool operator!=(wait_mode a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, wait_mode b) noexcept { return !(b == a); }

/* value of rfaas_lease_options.bulk for no room for large payloads. */
constexpr std::uint64_t no_bulk = RFAAS_NO_BULK;

enum class lease_flags : std::uint32_t {
    none = 0,
    renew = RFAAS_LEASE_RENEW,
    failover = RFAAS_LEASE_FAILOVER,
    local = RFAAS_LEASE_LOCAL,
    reuse = RFAAS_LEASE_REUSE,
    seed = RFAAS_LEASE_SEED,
    seed_required = RFAAS_LEASE_SEED_REQUIRED,
};
constexpr bool operator==(lease_flags a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, lease_flags b) noexcept { return b == a; }
constexpr bool operator!=(lease_flags a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, lease_flags b) noexcept { return !(b == a); }
constexpr lease_flags operator|(lease_flags a, lease_flags b) noexcept {
    return static_cast<lease_flags>(static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b));
}
constexpr lease_flags operator&(lease_flags a, lease_flags b) noexcept {
    return static_cast<lease_flags>(static_cast<std::uint32_t>(a) & static_cast<std::uint32_t>(b));
}

enum class event_kind : int {
    none = RFAAS_EVENT_NONE, /* there is no event */
    worker_died = RFAAS_EVENT_WORKER_DIED, /* a worker died; the next call gets a new worker in its place */
    ended = RFAAS_EVENT_ENDED, /* it has ended; the text begins with released, expired, revoked, drained or lost */
    draining = RFAAS_EVENT_DRAINING, /* the node drains: calls in flight finish, new calls fail with RFAAS_LEASE_ENDED */
    expiring = RFAAS_EVENT_EXPIRING, /* the lease expires soon unless it is renewed */
    moved = RFAAS_EVENT_MOVED, /* the lease has moved: calls go to another executor; the text is its address */
    local = RFAAS_EVENT_LOCAL, /* with RFAAS_LEASE_LOCAL: calls run in this process; the text says why */
    worker_added = RFAAS_EVENT_WORKER_ADDED,
};
constexpr bool operator==(event_kind a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, event_kind b) noexcept { return b == a; }
constexpr bool operator!=(event_kind a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, event_kind b) noexcept { return !(b == a); }

enum class start : int {
    unknown = RFAAS_START_UNKNOWN, /* the executor did not report it, or the worker is this process */
    cold = RFAAS_START_COLD, /* a new process */
    pooled = RFAAS_START_POOLED,
    cached = RFAAS_START_CACHED,
    seeded = RFAAS_START_SEEDED, /* a new process with the memory of the lease's seed (RFAAS_LEASE_SEED) */
};
constexpr bool operator==(start a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, start b) noexcept { return b == a; }
constexpr bool operator!=(start a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, start b) noexcept { return !(b == a); }

/* value of rfaas_call_options.worker for any worker. */
constexpr int any_worker = RFAAS_ANY_WORKER;

enum class call_flags : std::uint32_t {
    none = 0,
    kill = RFAAS_CALL_KILL,
    in_place = RFAAS_CALL_IN_PLACE,
};
constexpr bool operator==(call_flags a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, call_flags b) noexcept { return b == a; }
constexpr bool operator!=(call_flags a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, call_flags b) noexcept { return !(b == a); }
constexpr call_flags operator|(call_flags a, call_flags b) noexcept {
    return static_cast<call_flags>(static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b));
}
constexpr call_flags operator&(call_flags a, call_flags b) noexcept {
    return static_cast<call_flags>(static_cast<std::uint32_t>(a) & static_cast<std::uint32_t>(b));
}

/* index of rfaas_waitany if no request has ended. It is 0 in Fortran, where indices begin with 1. */
constexpr std::size_t undefined = RFAAS_UNDEFINED;

enum class operation : int {
    sum = RFAAS_SUM, /* the sum; integers wrap around */
    min = RFAAS_MIN, /* the smaller one. A result that is NaN is ignored */
    max = RFAAS_MAX, /* the larger one. A result that is NaN is ignored */
};
constexpr bool operator==(operation a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, operation b) noexcept { return b == a; }
constexpr bool operator!=(operation a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, operation b) noexcept { return !(b == a); }

enum class element : int {
    int32 = RFAAS_INT32, /* int32_t */
    int64 = RFAAS_INT64, /* int64_t */
    float32 = RFAAS_FLOAT32, /* float */
    float64 = RFAAS_FLOAT64, /* double */
};
constexpr bool operator==(element a, std::int64_t b) noexcept { return static_cast<std::int64_t>(a) == b; }
constexpr bool operator==(std::int64_t a, element b) noexcept { return b == a; }
constexpr bool operator!=(element a, std::int64_t b) noexcept { return !(a == b); }
constexpr bool operator!=(std::int64_t a, element b) noexcept { return !(b == a); }

} // namespace rfaas

#endif

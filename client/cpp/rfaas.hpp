/* rfaas.hpp: rfaas.h for C++17, with handles that release themselves, spans of typed elements, and exceptions. Header
 * only: every operation is one call of the C function, whose manual page says what it does. Link with -lrfaas.
 *
 *     rfaas::library library;                              // rfaas_init ... rfaas_finalize
 *     rfaas::session session;                              // address from RFAAS_MANAGER or RFAAS_EXECUTOR
 *     rfaas::lease lease(session, rfaas::lease_options("libprices.so").with_workers(4));
 *     rfaas::function price = lease.function("price");
 *     std::vector<double> in(100), out(100);
 *     std::size_t n = lease.invoke(price, in, out);        // elements of the result
 *     lease.map(price, in, out);                           // the whole array, on all workers
 *     rfaas::request r = lease.iinvoke(price, in, out);    // ...
 *     n = r.wait<double>();
 *
 * Lifetimes. A library must outlive its sessions, a session its leases, and a lease its requests and buffers. Members
 * or locals that are declared in this order do. The memory that a call reads and writes belongs to the caller and
 * must live as long as rfaas.h says.
 * Threads. As in rfaas.h. One object must not be used and destroyed or moved at the same time.
 * Errors. Every failure throws a class derived from rfaas::error. Destructors never throw. */
#ifndef RFAAS_HPP
#define RFAAS_HPP

#include <rfaas.h>
#include <rfaas_enums.hpp>
#include <rfaas_span.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace rfaas {

/* ---- errors ---- */

/* A failed operation. what() names the operation and the offending value. */
class error : public std::runtime_error {
  public:
    error(int status, bool may_have_run, const std::string &text, std::int32_t function_code = 0)
        : std::runtime_error(text), status_(status), may_have_run_(may_have_run), function_code_(function_code) {}
    int status() const noexcept { return status_; } /* one of RFAAS_* */
    rfaas::status code() const noexcept { return static_cast<rfaas::status>(status_); }
    /* What the caller can do next. Each class of errors also has an exception of its own. */
    rfaas::error_class kind() const noexcept { return static_cast<rfaas::error_class>(RFAAS_CLASS(status_)); }
    /* Of a call: whether the function may have run. If not, repeating the call is safe. */
    bool may_have_run() const noexcept { return may_have_run_; }
    /* Of a function that failed: the code that it passed to rfaas_fail_code. 0: none. */
    std::int32_t function_code() const noexcept { return function_code_; }

  private:
    int status_;
    bool may_have_run_;
    std::int32_t function_code_;
};

/* An exception for each rfaas::error_class. */
class busy_error : public error { using error::error; };        /* retry after finishing a request */
class invalid_error : public error { using error::error; };     /* fix the call */
class unsupported_error : public error { using error::error; }; /* take another path */
class function_error : public error { using error::error; };    /* this call failed, the lease is good */
class connection_error : public error { using error::error; };  /* the worker is lost, the next call gets a new one */
class lease_error : public error { using error::error; };       /* open a new lease */
class fatal_error : public error { using error::error; };       /* stop */
class credential_error : public error { using error::error; };  /* get another token, or set the clock */

/* Throws an error as the exception of its class. */
[[noreturn]] inline void raise(int status, bool ran, const std::string &text, std::int32_t code = 0) {
    switch (static_cast<error_class>(RFAAS_CLASS(status))) {
    case error_class::busy: throw busy_error(status, ran, text);
    case error_class::invalid: throw invalid_error(status, ran, text);
    case error_class::unsupported: throw unsupported_error(status, ran, text);
    case error_class::function: throw function_error(status, ran, text, code);
    case error_class::connection: throw connection_error(status, ran, text);
    case error_class::lease: throw lease_error(status, ran, text);
    case error_class::credential: throw credential_error(status, ran, text);
    case error_class::fatal: break;
    }
    throw fatal_error(status, ran, text);
}

/* Throws the last error of this thread. */
[[noreturn]] inline void raise(int status) {
    const char *text = rfaas_last_error();
    raise(status, rfaas_started() == RFAAS_MAYBE_EXECUTED, *text ? text : rfaas_strerror(status), rfaas_function_code());
}

/* The short English name of a status. */
inline const char *strerror(int status) noexcept { return rfaas_strerror(status); }
inline const char *strerror(rfaas::status status) noexcept { return rfaas_strerror(static_cast<int>(status)); }

inline void check(int status) {
    if (__builtin_expect(status < 0, 0))
        raise(status);
}

/* ---- spans: rfaas_span.hpp ---- */

/* The arguments of a call as spans: the elements of a payload, and the room for a result. */
template <class C> auto payload(const C &c) {
    using element = std::remove_pointer_t<decltype(std::data(c))>;
    static_assert(std::is_trivially_copyable<element>::value, "elements travel as bytes");
    return span<const element>(std::data(c), std::size(c));
}
template <class C> auto room(C &&c) {
    using element = std::remove_pointer_t<decltype(std::data(c))>;
    static_assert(std::is_trivially_copyable<element>::value, "elements travel as bytes");
    return span<element>(std::data(c), std::size(c));
}

/* ---- library and sessions ---- */

/* MAJOR * 1000 + MINOR of the library at run time. */
inline int version() noexcept { return rfaas_version(); }

/* rfaas_init and rfaas_finalize. Any number of these objects may exist. */
class library {
  public:
    library() { check(rfaas_init(nullptr)); }
    ~library() { rfaas_finalize(); }
    library(const library &) = delete;
    library &operator=(const library &) = delete;
};

/* rfaas_session_options with its defaults. Strings are not copied before the session is opened. */
struct session_options : rfaas_session_options {
    session_options() : rfaas_session_options(RFAAS_SESSION_OPTIONS_INIT) {}
    session_options &with(session_flags more) { return flags |= static_cast<std::uint32_t>(more), *this; }
};

struct const_piece;
template <class P> class pieces;

class session {
  public:
    explicit session(const session_options &options = {}) { check(rfaas_session_open(&options, &handle_)); }
    session(session &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    /* Closes the session that this object had, at once. */
    session &operator=(session &&other) noexcept {
        session old(std::move(*this));
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~session() {
        if (handle_)
            rfaas_session_close(handle_);
    }
    rfaas_session *get() const noexcept { return handle_; }
    /* Owns a session that C code opened. */
    static session adopt(rfaas_session *handle) noexcept { return session(handle); }
    /* Gives the session up without closing it: the caller closes it. */
    rfaas_session *detach() noexcept { return std::exchange(handle_, nullptr); }
    /* Closes the session, its leases and its cached workers now. Throws the errors that the destructor ignores. */
    void close() { check(rfaas_session_close(std::exchange(handle_, nullptr))); }

    /* Returns how many released leases the session caches. */
    int cached() const {
        int n = rfaas_session_cached(handle_);
        check(n);
        return n;
    }

    /* Returns what has happened to executors since the last call, at most `most` changes. */
    std::vector<rfaas_change> changes(std::size_t most = 64) const {
        std::vector<rfaas_change> found(most);
        std::size_t count = 0;
        check(rfaas_session_changes(handle_, found.data(), most, &count));
        found.resize(count);
        return found;
    }
    /* Publishes a table, such as put_table("energies", {grid, levels}): leases that are opened from now on have it, and functions find it
     * by rfaas_table. With an address, all workers map it there. */
    inline void put_table(const std::string &name, pieces<const_piece> parts);
    inline void put_table(const std::string &name, pieces<const_piece> parts, std::uint64_t address);
    /* Publishes the memory of a seed as a table. Functions of any library get the bytes that its setup function has passed to rfaas_set_root, read-only
     * and at the same address. seed: its full name (seed::name). */
    void put_table_seed(const std::string &name, const std::string &seed) { check(rfaas_table_put_seed(handle_, name.c_str(), seed.c_str())); }
    /* Opens a seed that this or another program has created, by its full name (seed::name). */
    inline class seed open_seed(const std::string &name);
    void drop_table(const std::string &name) { check(rfaas_table_drop(handle_, name.c_str())); }

    /* Calls f(change) with every change, on this thread, until f returns true or throws. Returns false after the
     * timeout; 0 means no limit. */
    template <class F> bool watch(F f, std::chrono::nanoseconds timeout = {}) const {
        struct watcher {
            F *f;
            std::exception_ptr thrown;
        } w{&f, nullptr};
        int status = rfaas_session_watch(
            handle_,
            [](const rfaas_change *change, void *arg) -> int {
                watcher *self = static_cast<watcher *>(arg);
                try {
                    return (*self->f)(*change) ? 1 : 0;
                } catch (...) { /* must not pass through C code */
                    self->thrown = std::current_exception();
                    return 1;
                }
            },
            &w, timeout.count());
        if (w.thrown)
            std::rethrow_exception(w.thrown);
        if (status == RFAAS_DEADLINE)
            return false;
        check(status);
        return true;
    }

  private:
    explicit session(rfaas_session *handle) noexcept : handle_(handle) {}
    rfaas_session *handle_ = nullptr;
};

/* ---- leases ---- */

/* rfaas_lease_options with its defaults, and copies of the library's path and of the name of the init call. */
struct lease_options : rfaas_lease_options {
    explicit lease_options(std::string library_path = {})
        : rfaas_lease_options(RFAAS_LEASE_OPTIONS_INIT), path_(std::move(library_path)) {}
    lease_options &with_workers(std::uint32_t n) { return workers = n, *this; }
    lease_options &with_workers_min(std::uint32_t n) { return workers_min = n, *this; } /* opens with n or more; grows up to `workers` */
    lease_options &with_depth(std::uint32_t n) { return depth = n, *this; }
    lease_options &with_wait_mode(rfaas::wait_mode mode) { return wait_mode = static_cast<std::uint32_t>(mode), *this; }
    lease_options &lasting(std::chrono::nanoseconds t) { return duration_ns = t.count(), *this; }
    /* A file or directory that travels with the library. Each call adds one (rfaas_lease_options.bundle). */
    lease_options &with_bundle(const std::string &path) { return bundle_ += (bundle_.empty() ? "" : ":") + path, *this; }
    lease_options &waiting(std::chrono::nanoseconds t) { return wait_ns = t.count(), *this; } /* for room */
    lease_options &with(lease_flags more) { return flags |= static_cast<std::uint32_t>(more), *this; }
    lease_options &with_renewal() { return with(lease_flags::renew); }
    lease_options &with_failover() { return with(lease_flags::failover); }
    lease_options &with_local() { return with(lease_flags::local); }
    lease_options &with_reuse() { return with(lease_flags::reuse); }
    lease_options &with_seed() { return with(lease_flags::seed); } /* the init call is made once */
    lease_options &with_seed(std::string name) { return seed_ = std::move(name), *this; } /* the workers start from it (seed::name) */
    /* Every worker executes this function of the library before any other call. The payload must live until the lease is opened. */
    lease_options &with_init(std::string function) { return init_ = std::move(function), *this; }
    template <class C> lease_options &with_init(std::string function, const C &payload) {
        const auto in = rfaas::payload(payload);
        init_payload = in.data();
        init_size = in.bytes();
        return with_init(std::move(function));
    }
    rfaas_lease_options plain() const {
        rfaas_lease_options o = *this;
        if (!path_.empty())
            o.library = path_.c_str();
        if (!bundle_.empty())
            o.bundle = bundle_.c_str();
        if (!init_.empty())
            o.init_function = init_.c_str();
        if (!seed_.empty())
            o.seed = seed_.c_str();
        return o;
    }

  private:
    std::string path_, bundle_, init_, seed_;
};

/* rfaas_call_options with its defaults. */
struct call_options : rfaas_call_options {
    call_options() : rfaas_call_options(RFAAS_CALL_OPTIONS_INIT) {}
    call_options &on(int index) { return worker = index, *this; }
    call_options &within(std::chrono::nanoseconds t) { return timeout_ns = t.count(), *this; }
    call_options &repeat(std::uint32_t n) { return repeats = n, *this; } /* the function is idempotent */
    call_options &kill_late() { return flags |= RFAAS_CALL_KILL, *this; } /* end the worker at the time limit */
    call_options &each_within(std::chrono::nanoseconds t) { return attempt_ns = t.count(), *this; } /* one attempt */
    call_options &with(call_flags more) { return flags |= static_cast<std::uint32_t>(more), *this; }
    call_options &keeping(std::size_t bytes) { return keep = bytes, *this; } /* for kept_result */
    call_options &in_place() { return with(call_flags::in_place); } /* no copy of data in a buffer */
};

/* rfaas_map_options with its defaults. */
struct map_options : rfaas_map_options {
    map_options() : rfaas_map_options(RFAAS_MAP_OPTIONS_INIT) {}
    map_options &by(std::size_t items) { return chunk = items, *this; }
    map_options &within(std::chrono::nanoseconds t) { return timeout_ns = t.count(), *this; }
    map_options &repeat(std::uint32_t n) { return repeats = n, *this; }
};

using function = rfaas_function;

/* A piece of a payload: anything that std::data and std::size take, or strided elements. The memory is the caller's. */
struct const_piece : rfaas_piece {
    template <class C, class = std::enable_if_t<!std::is_base_of<rfaas_piece, C>::value>>
    const_piece(const C &c) : rfaas_piece(RFAAS_PIECE(payload(c).data(), payload(c).bytes())) {}
    const_piece(const rfaas_piece &p) noexcept : rfaas_piece(p) {}
};

/* A piece of a result, likewise. */
struct piece : rfaas_piece {
    template <class C, class = std::enable_if_t<!std::is_base_of<rfaas_piece, C>::value>>
    piece(C &c) : rfaas_piece(RFAAS_PIECE(room(c).data(), room(c).bytes())) {}
    template <class T> piece(span<T> s) noexcept : rfaas_piece(RFAAS_PIECE(room(s).data(), s.bytes())) {}
    explicit piece(const rfaas_piece &p) noexcept : rfaas_piece(p) {}
};

/* `count` blocks of `block` elements, the beginnings of which are `stride` elements apart, as in MPI_Type_vector. A negative stride
 * goes backwards. */
template <class T>
std::conditional_t<std::is_const<T>::value, const_piece, piece> strided(T *first, std::size_t count, std::ptrdiff_t stride,
                                                                        std::size_t block = 1) {
    rfaas_piece p = RFAAS_PIECE(first, block * sizeof(T));
    static_assert(std::is_trivially_copyable<T>::value, "elements are sent as bytes, so their type must be trivially copyable");
    p.count = count;
    p.stride = stride * static_cast<std::ptrdiff_t>(sizeof(T));
    return std::conditional_t<std::is_const<T>::value, const_piece, piece>(p);
}

/* Several pieces: a list in braces, or a container of pieces. It is valid only as long as that list or container. */
template <class P> class pieces {
  public:
    pieces(std::initializer_list<P> list) noexcept : size_(list.size()) { data_ = list.begin(); }
    template <class C, class = decltype(static_cast<const P *>(std::data(std::declval<const C &>())))>
    pieces(const C &c) noexcept : data_(std::data(c)), size_(std::size(c)) {}
    const rfaas_piece *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }

  private:
    static_assert(sizeof(P) == sizeof(rfaas_piece), "an array of P must have the layout of an array of rfaas_piece");
    const P *data_;
    std::size_t size_;
};

inline void session::put_table(const std::string &name, pieces<const_piece> parts) {
    check(rfaas_table_put(handle_, name.c_str(), parts.data(), parts.size()));
}
inline void session::put_table(const std::string &name, pieces<const_piece> parts, std::uint64_t address) {
    check(rfaas_table_put_at(handle_, name.c_str(), parts.data(), parts.size(), address));
}

/* ---- seeds ---- */

/* The memory that a setup function has prepared, from which workers of leases start: lease::create_seed, session::open_seed, lease_options::with_seed. An
 * object that is destroyed withdraws nothing: the seed lasts until release, or until its time is over after its session was closed. */
class seed {
  public:
    explicit seed(rfaas_seed *handle) noexcept : handle_(handle) {}
    seed(seed &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    seed &operator=(seed &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~seed() = default; /* the session keeps the handle, so that the agent renews the seed */
    std::string name() const {
        const char *text = rfaas_seed_name(handle_);
        if (!text)
            check(RFAAS_INVALID);
        return text;
    }
    rfaas_seed_details info() const {
        rfaas_seed_details d{};
        d.struct_size = sizeof d;
        check(rfaas_seed_info(handle_, &d));
        return d;
    }
    /* Withdraws a seed that this process has created. */
    void release() { check(rfaas_seed_release(std::exchange(handle_, nullptr))); }
    rfaas_seed *get() const noexcept { return handle_; }

  private:
    rfaas_seed *handle_ = nullptr;
};

inline seed session::open_seed(const std::string &name) {
    rfaas_seed *handle = nullptr;
    check(rfaas_seed_open(handle_, name.c_str(), &handle));
    return seed(handle);
}

/* A call in flight, which can be moved and not copied. The destructor cancels a call that nobody has waited for. */
class request {
  public:
    request() noexcept = default;
    explicit request(rfaas_request handle) noexcept : handle_(handle) {}
    request(request &&other) noexcept : handle_(std::exchange(other.handle_, RFAAS_REQUEST_NULL)) {}
    /* Cancels the call that this object had, at once. */
    request &operator=(request &&other) noexcept {
        request old(std::move(*this));
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~request() {
        if (handle_)
            rfaas_cancel(&handle_);
    }
    explicit operator bool() const noexcept { return handle_ != RFAAS_REQUEST_NULL; }
    rfaas_request &get() noexcept { return handle_; }
    /* Gives the request up without cancelling it: the caller waits for it. */
    rfaas_request detach() noexcept { return std::exchange(handle_, RFAAS_REQUEST_NULL); }

    /* Waits and returns the number of elements of the result, or of bytes without T. It is 0 without a request. */
    template <class T = std::byte> std::size_t wait() {
        std::size_t size = 0;
        check(rfaas_wait(&handle_, &size));
        return size / sizeof(T);
    }
    /* Returns true if the call has ended, and sets *count to the number of elements of its result. */
    template <class T = std::byte> bool test(std::size_t *count = nullptr) {
        int done = 0;
        std::size_t size = 0;
        check(rfaas_test(&handle_, &done, &size));
        if (done && count)
            *count = size / sizeof(T);
        return done != 0;
    }
    void cancel() { check(rfaas_cancel(&handle_)); }

  private:
    rfaas_request handle_ = RFAAS_REQUEST_NULL;
};
static_assert(sizeof(request) == sizeof(rfaas_request), "an array of requests is one of handles");

/* Waits for all requests, then throws the first error, if any. */
inline void wait_all(span<request> requests) {
    check(rfaas_waitall(requests.size(), reinterpret_cast<rfaas_request *>(requests.data()), nullptr, nullptr));
}

/* The status of a call and the bytes of its result. */
struct outcome {
    int status;
    std::size_t bytes;
};

/* Waits for all requests and returns the outcome of each. Failed calls throw no exception. */
inline std::vector<outcome> wait_each(span<request> requests) {
    std::vector<std::size_t> sizes(requests.size());
    std::vector<int> statuses(requests.size());
    std::vector<outcome> all(requests.size());
    rfaas_waitall(requests.size(), reinterpret_cast<rfaas_request *>(requests.data()), sizes.data(), statuses.data());
    for (std::size_t i = 0; i < all.size(); i++)
        all[i] = outcome{statuses[i], sizes[i]};
    return all;
}

/* Waits for one request to end and returns its index, or rfaas::undefined if all are null. Sets *bytes to the size of
 * its result. */
inline std::size_t wait_any(span<request> requests, std::size_t *bytes = nullptr) {
    std::size_t index = undefined;
    check(rfaas_waitany(requests.size(), reinterpret_cast<rfaas_request *>(requests.data()), &index, bytes));
    return index;
}

/* The same for a limited time: `undefined` if no request has ended by then. */
inline std::size_t wait_any_for(span<request> requests, std::chrono::nanoseconds timeout, std::size_t *bytes = nullptr) {
    std::size_t index = undefined;
    check(rfaas_waitany_for(requests.size(), reinterpret_cast<rfaas_request *>(requests.data()), timeout.count(), &index, bytes));
    return index;
}

/* The index of the worker of this thread's last call. any_worker: there was none, or it has run in this process. */
inline int call_worker() noexcept { return rfaas_call_worker(); }

/* The result of this thread's last call that threw result_too_large, if the call's option `keep` was large enough. A result whose size is no
 * multiple of the size of T throws std::length_error, and stays. */
template <class T> std::vector<T> kept_result() {
    std::size_t size = 0;
    int status = rfaas_kept_result(nullptr, 0, &size);
    if (status != RFAAS_RESULT_TOO_LARGE)
        check(status);
    if (size % sizeof(T))
        throw std::length_error("the kept result has " + std::to_string(size) + " bytes, no multiple of " + std::to_string(sizeof(T)));
    std::vector<T> result(size / sizeof(T));
    check(rfaas_kept_result(result.data(), size, &size));
    return result;
}

/* Finds an executor for each of `count` leases with these options, and leases nothing. */
inline std::vector<rfaas_place> places(const session &s, const lease_options &options, std::size_t count) {
    std::vector<rfaas_place> found(count);
    rfaas_lease_options o = options.plain();
    check(rfaas_places(s.get(), &o, count, found.data()));
    return found;
}

template <class T> class future;

class lease {
  public:
    lease(const session &s, const lease_options &options) {
        rfaas_lease_options o = options.plain();
        check(rfaas_lease_open(s.get(), &o, &handle_));
    }
    /* At the executor of `place` only. */
    lease(const session &s, const lease_options &options, const rfaas_place &place) {
        rfaas_lease_options o = options.plain();
        check(rfaas_lease_open_at(s.get(), &o, &place, &handle_));
    }
    /* Leases options.workers workers on as few executors as possible, at most `most`. */
    static std::vector<lease> across(const session &s, const lease_options &options, std::size_t most = 64) {
        std::vector<rfaas_lease *> handles(most);
        std::vector<lease> leases;
        leases.reserve(most); /* afterwards nothing throws, so no lease is lost */
        std::size_t count = 0;
        rfaas_lease_options o = options.plain();
        check(rfaas_lease_open_across(s.get(), &o, most, handles.data(), &count));
        for (std::size_t i = 0; i < count; i++)
            leases.push_back(lease(handles[i]));
        return leases;
    }
    lease(lease &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    /* Releases the lease that this object had, at once. */
    lease &operator=(lease &&other) noexcept {
        lease old(std::move(*this));
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~lease() {
        if (handle_)
            rfaas_lease_release(handle_);
    }
    /* Owns a lease that C code opened. */
    static lease adopt(rfaas_lease *handle) noexcept { return lease(handle); }
    /* Gives the lease up without releasing it: the caller releases it. */
    rfaas_lease *detach() noexcept { return std::exchange(handle_, nullptr); }
    /* Releases the workers now. Throws the errors that the destructor ignores. */
    void release() { check(rfaas_lease_release(std::exchange(handle_, nullptr))); }
    rfaas_lease *get() const noexcept { return handle_; }

    int workers() const {
        int n = rfaas_lease_workers(handle_);
        check(n);
        return n;
    }
    rfaas_lease_details info() const {
        rfaas_lease_details d{};
        d.struct_size = sizeof d;
        check(rfaas_lease_info(handle_, &d));
        return d;
    }
    /* RFAAS_OK while the lease lasts, else why it ended. */
    int status() const { return rfaas_lease_status(handle_); }
    /* How a worker came to the lease. */
    rfaas_worker_start origin(int worker) const {
        rfaas_worker_start s{};
        s.struct_size = sizeof s;
        check(rfaas_worker_origin(handle_, worker, &s));
        return s;
    }
    /* The name of a function, or NULL. */
    const char *function_name(rfaas::function f) const { return rfaas_lease_function_name(handle_, f); }
    /* Renews the lease for at least t from now. 0: the duration that it was opened with. */
    void renew(std::chrono::nanoseconds t = {}) { check(rfaas_lease_renew(handle_, t.count())); }
    /* For poll(): becomes readable once after arm() when a request of the lease has ended that was not waited for, or none is in flight. The lease owns it. */
    int descriptor() {
        int fd = -1;
        check(rfaas_lease_descriptor(handle_, &fd));
        return fd;
    }
    void arm() { check(rfaas_lease_arm(handle_)); }
    /* Takes the oldest event. Its kind is event_kind::none if there is no event. */
    rfaas_event event() {
        rfaas_event e{};
        e.struct_size = sizeof e;
        check(rfaas_lease_event(handle_, &e));
        return e;
    }
    /* Asks the executor what a worker does and has printed. */
    rfaas_worker_details worker_info(int worker) const {
        rfaas_worker_details d{};
        d.struct_size = sizeof d;
        check(rfaas_worker_info(handle_, worker, &d));
        return d;
    }
    /* Kills a worker and starts a new one in its place. */
    /* Executes a function of the library once, and keeps its memory for workers of later leases. ttl: how long the executor keeps it if nobody renews it; 0:
     * as long as its longest lease. */
    seed create_seed(const std::string &setup, const std::string &name, std::chrono::nanoseconds ttl = {}) {
        return create_seed(setup, span<const char>(), name, ttl);
    }
    template <class C, class = decltype(std::data(std::declval<const C &>()))>
    seed create_seed(const std::string &setup, const C &payload, const std::string &name, std::chrono::nanoseconds ttl = {}) {
        const auto in = rfaas::payload(payload);
        rfaas_seed_options o = RFAAS_SEED_OPTIONS_INIT;
        rfaas_seed *made = nullptr;
        o.name = name.c_str();
        o.ttl_ns = ttl.count();
        check(rfaas_seed_create(handle_, setup.c_str(), in.data(), in.bytes(), &o, &made));
        return seed(made);
    }
    void replace_worker(int worker) { check(rfaas_worker_replace(handle_, worker)); }
    rfaas_statistics statistics() const {
        rfaas_statistics s{};
        s.struct_size = sizeof s;
        check(rfaas_lease_statistics(handle_, &s));
        return s;
    }
    rfaas::function function(const std::string &name) const {
        rfaas::function f = 0;
        check(rfaas_lease_function(handle_, name.c_str(), &f));
        return f;
    }
    /* Returns a function that calls `first`, and then `second` with the result of `first`. Valid until the lease is released. */
    rfaas::function chain(rfaas::function first, rfaas::function second) const {
        rfaas::function f = 0;
        check(rfaas_lease_chain(handle_, first, second, &f));
        return f;
    }

    /* Calls f, waits, and writes the result to `out`. Returns the number of elements of the result. in and out are
     * anything that std::data and std::size take. */
    template <class In, class Out>
    std::size_t invoke(rfaas::function f, const In &in, Out &&out, const call_options &options = {}) {
        auto from = payload(in);
        auto to = room(out);
        std::size_t size = 0;
        check(rfaas_invoke(handle_, f, from.data(), from.bytes(), to.data(), to.bytes(), &size, &options));
        return size / sizeof(*to.data());
    }
    /* Starts a call. `in` may be reused at once unless it is registered memory. `out` must live until the request
     * ends. */
    template <class In, class Out>
    request iinvoke(rfaas::function f, const In &in, Out &&out, const call_options &options = {}) {
        static_assert(std::is_lvalue_reference<Out>::value || std::is_trivially_destructible<std::decay_t<Out>>::value,
                      "out would be destroyed before the result arrives");
        auto from = payload(in);
        auto to = room(out);
        rfaas_request r = RFAAS_REQUEST_NULL;
        check(rfaas_iinvoke(handle_, f, from.data(), from.bytes(), to.data(), to.bytes(), &options, &r));
        return request(r);
    }
    /* Starts a call without waiting for a free slot, and returns its result, of at most `most` elements, as a future (rfaas_async.hpp). */
    template <class Out, class In> rfaas::future<Out> async(rfaas::function f, const In &in, std::size_t most, const call_options &options = {});
    template <class Out, class In> rfaas::future<Out> async(rfaas::function f, const In &in) { return async<Out>(f, in, std::size(in)); }
    /* The same with payload and result in several pieces, such as invokev(f, {a, strided(&m[0][2], rows, columns)}, {b, c}). invokev
     * returns the bytes of the result. */
    std::size_t invokev(rfaas::function f, pieces<const_piece> in, pieces<piece> out, const call_options &options = {}) {
        std::size_t size = 0;
        check(rfaas_invokev(handle_, f, in.data(), in.size(), out.data(), out.size(), &size, &options));
        return size;
    }
    request iinvokev(rfaas::function f, pieces<const_piece> in, pieces<piece> out, const call_options &options = {}) {
        rfaas_request r = RFAAS_REQUEST_NULL;
        check(rfaas_iinvokev(handle_, f, in.data(), in.size(), out.data(), out.size(), &options, &r));
        return request(r);
    }
    /* Applies f to all elements of in, on all workers. out has one element for each. */
    template <class In, class Out> void map(rfaas::function f, const In &in, Out &&out, std::size_t chunk = 0) {
        map(f, in, std::forward<Out>(out), map_options().by(chunk));
    }
    template <class In, class Out> void map(rfaas::function f, const In &in, Out &&out, const map_options &options) {
        auto from = payload(in);
        auto to = room(out);
        if (from.size() > to.size())
            throw invalid_error(RFAAS_INVALID, false, "map: " + std::to_string(from.size()) + " elements in, room for " +
                                                          std::to_string(to.size()) + " out");
        check(rfaas_map(handle_, f, from.data(), sizeof(*from.data()), to.data(), sizeof(*to.data()), from.size(), &options));
    }
    /* Applies f to all elements of in, on all workers, and combines the results with the accumulator. The caller sets the accumulator to the
     * initial values. The result of one element of `in` has as many elements as the accumulator. Results are combined in the order of the
     * elements of `in`. */
    template <class In, class Out>
    void reduce(rfaas::function f, const In &in, Out &&accumulator, operation how, const map_options &options = {}) {
        auto from = payload(in);
        auto to = room(accumulator);
        check(rfaas_reduce(handle_, f, from.data(), sizeof(*from.data()), to.data(), to.size() * sizeof(*to.data()), from.size(), int(how),
                           element_type<std::remove_reference_t<decltype(*to.data())>>(), &options));
    }
    /* The same with a callback that combines: combine(accumulator, result), where `result` is the Result of one element of `in`. If combine
     * throws, it is not called again, and reduce rethrows the exception when the calls have ended. */
    template <class Result, class In, class Accumulator, class Combine,
              class = std::enable_if_t<std::is_invocable_v<Combine &, Accumulator &, const Result &>>>
    void reduce(rfaas::function f, const In &in, Accumulator &accumulator, Combine combine, const map_options &options = {}) {
        static_assert(std::is_trivially_copyable<Result>::value, "results travel as bytes");
        struct state {
            Combine &combine;
            std::exception_ptr thrown;
        } s{combine, nullptr};
        auto from = payload(in);
        check(rfaas_reduce_with(
            handle_, f, from.data(), sizeof(*from.data()), &accumulator, sizeof(Result), from.size(),
            [](void *to, const void *result, std::size_t, void *arg) {
                state &s = *static_cast<state *>(arg);
                Result r;
                std::memcpy(&r, result, sizeof r);
                if (!s.thrown) {
                    try {
                        s.combine(*static_cast<Accumulator *>(to), r);
                    } catch (...) {
                        s.thrown = std::current_exception();
                    }
                }
            },
            &s, &options));
        if (s.thrown)
            std::rethrow_exception(s.thrown);
    }

  private:
    template <class T> static constexpr int element_type() {
        static_assert((std::is_integral<T>::value && std::is_signed<T>::value && (sizeof(T) == 4 || sizeof(T) == 8)) || std::is_same<T, float>::value ||
                          std::is_same<T, double>::value,
                      "reduce combines int32_t, int64_t, float and double; for others pass a function that combines");
        return std::is_integral<T>::value ? (sizeof(T) == 4 ? RFAAS_INT32 : RFAAS_INT64) : sizeof(T) == 4 ? RFAAS_FLOAT32 : RFAAS_FLOAT64;
    }
    explicit lease(rfaas_lease *handle) noexcept : handle_(handle) {}
    rfaas_lease *handle_ = nullptr;
};

/* Elements in registered memory, zeroed. Large payloads inside are sent without a copy. */
template <class T> class buffer {
    static_assert(std::is_trivially_copyable<T>::value, "elements travel as bytes");

  public:
    buffer(const lease &l, std::size_t size) : lease_(l.get()), size_(size) {
        void *at = nullptr;
        if (size > SIZE_MAX / sizeof(T))
            throw invalid_error(RFAAS_INVALID, false, "buffer: " + std::to_string(size) + " elements");
        check(rfaas_alloc(lease_, size * sizeof(T), &at));
        data_ = static_cast<T *>(at);
    }
    buffer(buffer &&other) noexcept
        : lease_(other.lease_), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    buffer &operator=(buffer &&) = delete;
    ~buffer() {
        if (data_)
            rfaas_free(lease_, data_); /* fails while calls may read the memory; then the lease frees it */
    }
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + size_; }
    T &operator[](std::size_t i) const noexcept { return data_[i]; }

  private:
    rfaas_lease *lease_;
    T *data_ = nullptr;
    std::size_t size_;
};

/* Keeps memory of the caller registered. */
class registration {
  public:
    template <class C> registration(const lease &l, C &memory) : lease_(l.get()), at_(std::data(memory)) {
        check(rfaas_register(lease_, at_, std::size(memory) * sizeof(*std::data(memory))));
    }
    ~registration() { rfaas_unregister(lease_, at_); }
    registration(const registration &) = delete;
    registration &operator=(const registration &) = delete;

  private:
    rfaas_lease *lease_;
    void *at_;
};

} // namespace rfaas

#include <rfaas_async.hpp>

#endif

/* The C API's calls. This is the hot path: plain C on dp_channel_*, no lock, no allocation, no control message unless
 * a worker has died. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

_Static_assert(RFAAS_OK == DP_OK && RFAAS_BUSY == DP_BUSY && RFAAS_INVALID == DP_INVALID &&
                   RFAAS_TOO_LARGE == DP_TOO_LARGE && RFAAS_NO_FUNCTION == DP_NO_FUNCTION &&
                   RFAAS_BAD_BLOB == DP_BAD_BLOB && RFAAS_BAD_LIBRARY == DP_BAD_LIBRARY &&
                   RFAAS_BAD_REQUEST == DP_BAD_REQUEST && RFAAS_WRONG_THREAD == DP_WRONG_THREAD &&
                   RFAAS_UNSUPPORTED == DP_UNSUPPORTED && RFAAS_NO_DEVICE == DP_NO_DEVICE &&
                   RFAAS_FUNCTION_FAILED == DP_FUNCTION_FAILED && RFAAS_RESULT_TOO_LARGE == DP_RESULT_TOO_LARGE &&
                   RFAAS_DEADLINE == DP_DEADLINE && RFAAS_CANCELLED == DP_CANCELLED &&
                   RFAAS_CONNECTION == DP_CONNECTION && RFAAS_PEER_GONE == DP_PEER_GONE &&
                   RFAAS_WORKER_DIED == DP_WORKER_DIED && RFAAS_PROTOCOL == DP_PROTOCOL &&
                   RFAAS_TIME_LIMIT == DP_TIME_LIMIT && RFAAS_MEMORY_LIMIT == DP_MEMORY_LIMIT &&
                   RFAAS_LEASE_ENDED == DP_LEASE_ENDED && RFAAS_FATAL == DP_FATAL && RFAAS_CREDENTIAL == DP_CREDENTIAL,
               "rfaas.h repeats dp_status.h");
_Static_assert(RFAAS_NOT_STARTED == (int)DP_NOT_STARTED && RFAAS_MAYBE_EXECUTED == (int)DP_MAYBE_EXECUTED &&
                   RFAAS_WAIT_ADAPTIVE == (int)DP_WAIT_ADAPTIVE && RFAAS_WAIT_HOT == (int)DP_WAIT_HOT &&
                   RFAAS_WAIT_WARM == (int)DP_WAIT_WARM,
               "rfaas.h repeats dp_channel.h");

/* ---- errors of a thread ---- */

#define TEXT_MAX 9216 /* a worker's last output has up to 4 KiB, and its backtrace 3.5 KiB */
#define CHAIN_MAX 320

/* Small, because a library that is opened by dlopen gets little of the static TLS block. */
static _Thread_local struct {
    const char *text; /* constant text, or NULL: buf */
    int started, status;
    int32_t code; /* of rfaas_fail_code */
    bool init_failed;
    char *buf; /* TEXT_MAX bytes for the text and CHAIN_MAX for the name of a chain, allocated by the first error */
} last;

static pthread_key_t at_thread_end;
static bool key_made;

static void make_key(void) { key_made = pthread_key_create(&at_thread_end, free) == 0; }

static char *text_of_thread(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!last.buf && (last.buf = calloc(1, TEXT_MAX + CHAIN_MAX))) {
        pthread_once(&once, make_key);
        if (key_made)
            pthread_setspecific(at_thread_end, last.buf);
    }
    return last.buf;
}

const char *rfaas_strerror(int status) { return dp_status_text(status); }

const char *rfaas_api_chain_name(const rfaas_lease *l, rfaas_function chain) {
    char *name = text_of_thread();
    uint32_t first = dp_chain_first(chain), second = dp_chain_second(chain);
    if (!name)
        return "a chain";
    snprintf(name += TEXT_MAX, CHAIN_MAX, "%.128s, then %.128s", first < l->n_functions ? l->functions[first] : "?",
             second < l->n_functions ? l->functions[second] : "?");
    return name;
}

const char *rfaas_last_error(void) { return last.text ? last.text : last.buf ? last.buf : ""; }

int rfaas_started(void) { return last.started; }

static void set_error(int status, int started, int32_t code, const char *fmt, va_list ap) {
    /* Arguments may point into buf. */
    char text[TEXT_MAX], *to = text_of_thread();
    text[0] = 0;
    int n = vsnprintf(text, sizeof text, fmt, ap);
    if (to)
        memcpy(to, text, n < 0 ? 1 : n < TEXT_MAX ? (size_t)n + 1 : TEXT_MAX);
    last.text = to ? NULL : "out of memory for the error's text";
    last.started = started;
    last.status = status;
    last.code = code;
    last.init_failed = false;
}

int rfaas_api_fail(int status, int started, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    set_error(status, started, 0, fmt, ap);
    va_end(ap);
    return status;
}

int rfaas_api_fail_code(int status, int started, int32_t code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    set_error(status, started, code, fmt, ap);
    va_end(ap);
    return status;
}

int rfaas_api_fail_const(int status, const char *text) {
    last.text = text;
    last.started = RFAAS_NOT_STARTED;
    last.status = status;
    last.code = 0;
    last.init_failed = false;
    return status;
}

int rfaas_api_last_status(void) { return last.status; }

void rfaas_api_note_started(int started) { last.started = started; }

int32_t rfaas_function_code(void) { return last.code; }

_Thread_local int32_t rfaas_api_worker_of_call;

int rfaas_call_worker(void) { return rfaas_api_worker_of_call - 1; }

void rfaas_api_note_init_failed(void) { last.init_failed = true; }

bool rfaas_api_init_failed(void) { return last.init_failed; }

/* ---- options of a call ---- */

int64_t rfaas_api_deadline_of(const rfaas_call_options *o) {
    if (!o || o->struct_size < offsetof(rfaas_call_options, timeout_ns) + sizeof o->timeout_ns || o->timeout_ns <= 0)
        return 0;
    int64_t now = dp_now_ns();
    return o->timeout_ns > INT64_MAX - now ? 0 : now + o->timeout_ns;
}

int rfaas_api_plan_options(const rfaas_lease *l, const char *op, const rfaas_call_options *o, call_plan *p) {
    if (o->struct_size < sizeof o->struct_size + sizeof o->worker || o->struct_size > 4096)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_CALL_OPTIONS_INIT", op,
                              o->struct_size);
    int64_t timeout = o->struct_size >= offsetof(rfaas_call_options, timeout_ns) + sizeof timeout ? o->timeout_ns : 0;
    if (o->worker != RFAAS_ANY_WORKER && (o->worker < 0 || (uint32_t)o->worker >= l->n_workers))
        return rfaas_api_no_worker(l, op, o->worker);
    if (timeout < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: timeout_ns %lld is negative", op, (long long)timeout);
    p->worker = o->worker;
    if (timeout) {
        int64_t now = dp_now_ns();
        p->deadline = timeout > INT64_MAX - now ? 0 : now + timeout;
    }
    if (o->struct_size < offsetof(rfaas_call_options, attempt_ns) + sizeof o->attempt_ns)
        return RFAAS_OK;
    if (o->attempt_ns < 0 || o->attempt_ns > INT64_MAX / 2)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: attempt_ns %lld is negative or too large", op, (long long)o->attempt_ns);
    if (o->flags & ~(uint32_t)(RFAAS_CALL_KILL | RFAAS_CALL_IN_PLACE))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.flags %#x: unknown bits; want RFAAS_CALL_* or 0", op, o->flags);
    p->kill = o->flags & RFAAS_CALL_KILL;
    if (p->kill && !timeout && !(o->repeats && o->attempt_ns))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: RFAAS_CALL_KILL without a time limit: set timeout_ns, or repeats and attempt_ns", op);
    p->in_place = o->flags & RFAAS_CALL_IN_PLACE;
    p->repeats = o->repeats;
    p->attempt = o->repeats ? o->attempt_ns : 0;
    if (o->struct_size >= offsetof(rfaas_call_options, keep) + sizeof o->keep)
        p->keep = o->keep < SIZE_MAX ? (size_t)o->keep : SIZE_MAX;
    return RFAAS_OK;
}

static bool is_chain_of(const rfaas_lease *l, rfaas_function fn) {
    return dp_is_chain(fn) && dp_chain_first(fn) < l->n_functions && dp_chain_second(fn) < l->n_functions;
}

int rfaas_api_bad_call(rfaas_lease *l, const char *op, rfaas_function fn,
                       const void *in, size_t in_size, const void *out, size_t capacity) {
    if (draining(l) && !rfaas_api_fails_over(l) && l->grant->ep) {
        rfaas_api_await_reason(l);
        return rfaas_api_fail(RFAAS_LEASE_ENDED, 0, "%s %s: executor %s is draining: %s", op, function_name(l, fn),
                              l->grant->executor, l->draining_reason);
    }
    if (fn >= l->n_functions && !is_chain_of(l, fn))
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: function %u, the library has functions 0..%u", op, fn,
                              l->n_functions - 1);
    if (!in && in_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: in is NULL with in_size %zu", op, function_name(l, fn), in_size);
    if (!out && capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: out is NULL with capacity %zu", op, function_name(l, fn),
                              capacity);
    return RFAAS_OK; /* the executor drains, and a new grant takes the call */
}

int rfaas_api_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, size_t in_size, size_t capacity) {
    uint64_t limit = carried(l);
    if (in_size <= limit && capacity <= limit)
        return rfaas_api_fail(RFAAS_TOO_LARGE, 0, "%s %s: payload of %zu and capacity of %zu bytes: the worker has no memory for them, or takes at "
                              "most %llu bytes (bulk) because its executor has an earlier version", op, function_name(l, fn), in_size,
                              capacity, (unsigned long long)l->cfg.bulk);
    return rfaas_api_fail(RFAAS_TOO_LARGE, 0,
                          "%s %s: payload of %zu and capacity of %zu bytes, this lease carries up to %llu (eager %u, bulk %llu); raise bulk_max",
                          op, function_name(l, fn), in_size, capacity, (unsigned long long)limit, l->cfg.eager,
                          (unsigned long long)l->cfg.bulk);
}

int rfaas_api_result_too_large(const rfaas_lease *l, const char *op, rfaas_function fn, uint32_t size, uint32_t capacity,
                               const rfaas_call_pieces *p) {
    if (p && p->rest)
        return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "%s %s: result of %u bytes, the capacity is %zu, and at most %u bytes are kept",
                              op, function_name(l, fn), size, p->capacity, capacity);
    if (size <= capacity) /* the result could not be in place */
        capacity = cut_capacity(l, capacity);
    return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "%s %s: result of %u bytes, the capacity is %u", op,
                          function_name(l, fn), size, capacity);
}

/* ---- synchronous calls ---- */

/* Keeps what a function said when it failed: the error of this thread. The message is the worker's and may hold
 * anything. */
void rfaas_api_keep_message(const rfaas_lease *l, rfaas_function fn, uint32_t worker, const void *text, uint32_t size) {
    char what[320];
    uint8_t which;
    uint32_t bytes = size;
    dp_failure_code(text, &bytes, &which);
    if (dp_is_chain(fn) && which)
        snprintf(what, sizeof what, "%.256s, the %s function of a chain, on worker %u", function_name(l, which == DP_CHAIN_FIRST ? dp_chain_first(fn) : dp_chain_second(fn)),
                 which == DP_CHAIN_FIRST ? "first" : "second", worker);
    else
        snprintf(what, sizeof what, "%.256s on worker %u", function_name(l, fn), worker);
    rfaas_api_fail_function(what, text, size);
}

void rfaas_api_fail_function(const char *what, const void *message, uint32_t size) {
    uint8_t which;
    int32_t code = dp_failure_code(message, &size, &which);
    rfaas_api_fail_code(RFAAS_FUNCTION_FAILED, RFAAS_MAYBE_EXECUTED, code, "%s failed%s%.*s", what, size ? ": " : "",
                        size > 512 ? 512 : (int)size, size ? (const char *)message : "");
}

static __attribute__((noinline, cold)) void keep_message(const rfaas_lease *l, rfaas_function fn, uint32_t w) {
    uint32_t size;
    const char *text = dp_channel_message(l->workers[w].ch, &size);
    rfaas_api_keep_message(l, fn, w, text, size);
}

/* Makes a call of the lease's owner. After DP_YIELD another thread has interrupted the wait, and the call is in flight in *slot. */
static inline int call(const rfaas_lease *l, uint32_t w, rfaas_function fn, const void *in, uint32_t in_size,
                       const dp_mem *reg, void *out, uint32_t capacity, uint32_t *got, int64_t deadline,
                       dp_started *started, uint32_t *slot) {
    dp_channel *ch = l->workers[w].ch;
    int status = dp_channel_call_turn(ch, fn, in, in_size, reg, out, capacity, got, deadline, started, slot);
    if (UNLIKELY(status == DP_FUNCTION_FAILED))
        keep_message(l, fn, w);
    return status;
}

/* The same for any arguments. */
static __attribute__((noinline, cold)) int call_any(const rfaas_lease *l, uint32_t w, const call_args *a, uint32_t *got, int64_t deadline,
                                                    dp_started *started, uint32_t *slot) {
    int status = call_turn(l, w, a, deadline, got, started, slot);
    if (status == DP_FUNCTION_FAILED)
        keep_message(l, a->fn, w);
    return status;
}

/* Continues a call that yielded: in a lease that is shared now, or, if no other thread wants the lease any more, as before. */
static __attribute__((noinline, cold)) int go_on(rfaas_lease *l, const call_args *a, uint32_t w, uint32_t slot, int64_t deadline,
                                                 uint32_t *got, dp_started *started) {
    dp_channel *ch = l->workers[w].ch;
    for (;;) {
        if (rfaas_api_share(l, unit_of(w), DP_TURN_CALL))
            return rfaas_api_continue(l, a, w, slot, deadline, got);
        int status = dp_channel_wait_turn(ch, slot, deadline, false);
        if (status == DP_YIELD)
            continue;
        if (status != DP_OK) {
            *started = dp_channel_overdue(ch, slot);
            return status;
        }
        status = finish_call(ch, slot, a->out, a->pieces, got, started);
        if (status == DP_FUNCTION_FAILED)
            keep_message(l, a->fn, w);
        return status;
    }
}

/* Continues after the first attempt failed: tries the allowed workers, replaces dead ones, and sets the error. */
static __attribute__((noinline, cold)) int invoke_slow(rfaas_lease *l, const call_args *a, uint32_t first, int status,
                                                       dp_started started, uint32_t *got) {
    const call_plan *p = a->p;
    /* Another worker may be free. So the first round only starts replacements, and the second waits for them. */
    uint32_t w = first, tries = p->worker == RFAAS_ANY_WORKER ? l->n_workers : 1, all = tries > 1 ? 2 * tries : 1;
    for (uint32_t i = 0; i < all && next_attempt(status, started); i++) {
        if (i)
            w = w + 1 == l->n_workers ? 0 : w + 1;
        if (i == 0 && status == DP_BUSY && tries > 1)
            continue;
        if ((i == 0 && status != DP_BUSY) || l->workers[w].broken || dp_channel_status(l->workers[w].ch)) {
            int st = i + tries < all ? rfaas_api_begin_repair(l, w) : rfaas_api_repair(l, w, p->deadline);
            if (st != RFAAS_OK) {
                status = st;
                if (i + 1 == all || st == DP_DEADLINE || dp_status_class(st) == RFAAS_CLASS_LEASE)
                    return status; /* the text is set */
                continue;
            }
        }
        int64_t deadline = attempt_deadline(p);
        uint32_t slot;
        status = call_any(l, w, a, got, deadline, &started, &slot);
        note_worker(w);
        if (status == DP_YIELD)
            status = go_on(l, a, w, slot, deadline, got, &started);
        if (shared(l))
            return status; /* the text is set */
    }
    if (status == DP_OK) {
        l->sync_worker = w;
        return status;
    }
    status = rfaas_api_explain(l, "invoke", a->fn, w, status, started);
    return p->kill && status == RFAAS_DEADLINE && started == DP_MAYBE_EXECUTED ? rfaas_api_kill_late(l, a->fn, w, status, p->result_in_place) : status;
}

/* Makes one attempt, in an owned or a shared lease. Sets the error's text, except for DP_RESULT_TOO_LARGE. *at: the worker to try
 * first; on return, the worker that was used. */
static __attribute__((noinline, cold)) int attempt(rfaas_lease *l, const call_args *a, uint32_t *at, uint32_t *got) {
    if (shared(l)) {
        int status = rfaas_api_invoke_shared(l, a, got, at);
        note_worker(*at);
        return status;
    }
    note_worker(*at);
    dp_started started = DP_NOT_STARTED;
    int64_t deadline = attempt_deadline(a->p);
    uint32_t slot;
    int status = call_any(l, *at, a, got, deadline, &started, &slot);
    if (status == DP_YIELD)
        status = go_on(l, a, *at, slot, deadline, got, &started);
    if (status == DP_OK || shared(l))
        return status;
    if (status == DP_TOO_LARGE && started == DP_NOT_STARTED)
        return rfaas_api_too_large(l, "invoke", a->fn, a->in_size, a->room);
    return invoke_slow(l, a, *at, status, started, got);
}

/* Pause before the agent is asked again to replace a worker, because no event announces that an executor has room. An event, such as
 * the end of the lease, ends it. */
#define BACK_OFF_NS 1000000

#define BACK_OFF_MAX_NS 32000000 /* the longest pause after an attempt that found no worker; each pause is twice as long as the previous one */

/* Most moves of one call whose grants are lost one after the other. */
#define MOVES_MAX 16

/* Reports whether the executor has confirmed the end of the worker that a failed attempt ran on. Otherwise it may still write to a result in
 * place, as after the end of a lease or of a connection. */
static bool worker_ended(rfaas_lease *l, uint32_t w, uint64_t key, int status) { /* key 0: the lease does not move */
    pthread_mutex_lock(&l->mu);
    bool same = (!key || l->grant->key == key) && !l->grant->ended && !l->workers[w].kill;
    pthread_mutex_unlock(&l->mu);
    return same && (status == DP_WORKER_DIED || status == DP_TIME_LIMIT || status == DP_MEMORY_LIMIT);
}

/* Reports whether the grant in which the last attempt was made has ended, or its executor drains. */
static bool grant_over(rfaas_lease *l, uint64_t key) {
    pthread_mutex_lock(&l->mu);
    bool over = l->grant->key != key || l->grant->ended;
    pthread_mutex_unlock(&l->mu);
    return over || draining(l);
}

/* *ever: some attempt may have been executed. key: names the grant in which the last attempt was made. Without a time limit, the
 * call is repeated until the session's time-out has passed since the first of successive attempts that found no worker. Attempts that may
 * have run, and moves to another executor, end such a series. The number of both is limited. */
static int repeat(rfaas_lease *l, const call_args *a, uint32_t w, uint64_t key, int status, uint32_t *got, bool *ever) {
    const call_plan *p = a->p;
    bool over = rfaas_api_fails_over(l);
    uint32_t left = p->repeats;
    int64_t patience = dp_now_ns() + l->session->timeout_ns, no_worker = 0, pause = BACK_OFF_NS;
    for (int moves = 0;;) {
        int class = dp_status_class(status), ran = last.started == RFAAS_MAYBE_EXECUTED;
        *ever |= ran;
        ran |= status == DP_DEADLINE; /* an attempt whose payload found no room until its deadline counts, too */
        int64_t now = dp_now_ns();
        if (status == DP_DEADLINE ? !p->attempt || (p->deadline && now >= p->deadline)
                                  : class != RFAAS_CLASS_CONNECTION && class != RFAAS_CLASS_LEASE && class != RFAAS_CLASS_BUSY)
            return status;
        if (last.init_failed)
            return status;
        if (p->result_in_place && ran && !worker_ended(l, w, key, status))
            return status;
        if (class == RFAAS_CLASS_BUSY) {
            /* All slots are taken by calls of the program. That must not use up the call's repeats. */
            if (!p->repeats || now >= (p->deadline ? p->deadline : patience))
                return status;
            if (shared(l))
                rfaas_agent_wait(now + BACK_OFF_NS);
            else
                rfaas_api_await_slot(l, p->worker, NULL, now + BACK_OFF_NS);
        } else if (ran) {
            if (!left)
                return status;
            left--;
            no_worker = 0;
            __atomic_add_fetch(&l->past.repeated, 1, __ATOMIC_RELAXED);
        } else if (over ? class == RFAAS_CLASS_CONNECTION && !grant_over(l, key) : status == DP_PEER_GONE) {
            /* There is no worker now: the agent is stopped, for example, or has not reported yet that the executor is lost. */
            no_worker = no_worker ? no_worker : now;
            if (now >= (p->deadline ? p->deadline : no_worker + l->session->timeout_ns))
                return status;
            rfaas_agent_wait(rfaas_api_sooner(p->deadline, now, pause));
            pause = 2 * pause < BACK_OFF_MAX_NS ? 2 * pause : BACK_OFF_MAX_NS;
        } else if (!over) {
            return status;
        }
        if (over && class != RFAAS_CLASS_BUSY && (class == RFAAS_CLASS_LEASE || grant_over(l, key))) {
            no_worker = 0;
            int st = ++moves > MOVES_MAX ? status : rfaas_api_move_shared(l, "invoke", key, p);
            if (st)
                return st;
            if (draining(l))
                return rfaas_api_here(l, "invoke", a, got);
        }
        if (p->worker == RFAAS_ANY_WORKER)
            w = w + 1 >= l->n_workers ? 0 : w + 1;
        key = rfaas_api_grant_key(l);
        status = attempt(l, a, &w, got);
        if (status == DP_OK) {
            __atomic_store_n(&l->sync_worker, w, __ATOMIC_RELAXED);
            return status;
        }
    }
}

int rfaas_api_repeat(rfaas_lease *l, const call_args *a, uint32_t w, uint64_t key, int status, uint32_t *got) {
    bool ever = false;
    status = repeat(l, a, w, key, status, got, &ever);
    if (ever && status != DP_OK)
        last.started = RFAAS_MAYBE_EXECUTED; /* whatever its last attempt came to */
    return status;
}

/* Calls in this process, or moves the lease: *moved. */
static __attribute__((noinline, cold)) int invoke_draining(rfaas_lease *l, const call_args *a, uint32_t *got, bool *moved) {
    int status = rfaas_api_move_shared(l, "invoke", rfaas_api_grant_key(l), a->p);
    *moved = !status && !draining(l);
    return status || *moved ? status : rfaas_api_here(l, "invoke", a, got);
}

/* Reports whether an allowed worker is alive and has calls in flight, so that its slots become free by themselves. */
static bool full(const rfaas_lease *l, const call_plan *p) {
    for (uint32_t i = 0; i < l->n_workers; i++) {
        const rfaas_worker *w = &l->workers[i];
        if ((p->worker == RFAAS_ANY_WORKER || (uint32_t)p->worker == i) && !w->broken && !dp_channel_status(w->ch) &&
            dp_channel_free_slots(w->ch) < l->cfg.depth)
            return true;
    }
    return false;
}

/* Continues after a failed first attempt, whose error text is set. */
static __attribute__((noinline, cold)) int invoke_again(rfaas_lease *l, const call_args *a, uint32_t w, uint64_t key, int status,
                                                        uint32_t *got) {
    const call_plan *p = a->p;
    while (status == DP_BUSY && !shared(l) && full(l, p)) { /* the slots are taken by the owner's own requests */
        if (p->deadline && dp_now_ns() >= p->deadline) {
            char runs[256] = "";
            if (p->worker >= 0)
                rfaas_api_overdue_text(l, (uint32_t)p->worker, runs, sizeof runs);
            return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "invoke %s: no worker had a free slot until the deadline%s",
                                  function_name(l, a->fn), runs);
        }
        rfaas_api_await_slot(l, p->worker, NULL, p->deadline);
        status = attempt(l, a, &w, got);
    }
    if (status != DP_OK && (p->repeats || rfaas_api_fails_over(l)))
        status = rfaas_api_repeat(l, a, w, key, status, got);
    return status;
}

/* rfaas_invoke of a shared lease. */
static __attribute__((noinline)) int invoke_shared(rfaas_lease *l, const call_args *a, uint32_t *got) {
    uint32_t w = 0;
    uint64_t key = rfaas_api_fails_over(l) ? rfaas_api_grant_key(l) : 0;
    int status = rfaas_api_invoke_shared(l, a, got, &w);
    note_worker(w);
    return LIKELY(status == DP_OK) ? status : invoke_again(l, a, w, key, status, got);
}

/* The rest of rfaas_invoke if the first attempt did not return DP_OK. */
static __attribute__((noinline, cold)) int invoke_rest(rfaas_lease *l, const call_args *a, uint32_t w, uint32_t slot, int64_t deadline,
                                                       int status, dp_started started, uint32_t *got) {
    uint64_t key = rfaas_api_grant_key(l);
    if (status == DP_TOO_LARGE && started == DP_NOT_STARTED)
        return rfaas_api_too_large(l, "invoke", a->fn, a->in_size, a->room);
    if (status == DP_YIELD)
        status = go_on(l, a, w, slot, deadline, got, &started);
    if (status != DP_OK && !shared(l))
        status = invoke_slow(l, a, w, status, started, got);
    return status == DP_OK ? status : invoke_again(l, a, w, key, status, got);
}

int rfaas_api_invoke(rfaas_lease *l, const call_args *a, uint32_t *got, bool *here) {
    int status = RFAAS_OK;
    bool moved = true;
    *here = false;
    if (UNLIKELY(draining(l)))
        status = invoke_draining(l, a, got, &moved);
    if (UNLIKELY(!moved)) {
        *here = true; /* or it cannot run */
        return status;
    }
    if (shared(l))
        return invoke_shared(l, a, got);
    uint32_t w = a->p->worker >= 0 ? (uint32_t)a->p->worker : l->sync_worker;
    if (a->p->worker < 0 && load_of(l, w))
        w = least_loaded(l, w);
    uint64_t key = rfaas_api_fails_over(l) ? rfaas_api_grant_key(l) : 0; /* while attempt waits, another thread may move the lease */
    status = attempt(l, a, &w, got);
    return status == DP_OK ? status : invoke_again(l, a, w, key, status, got);
}

int rfaas_invoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                 size_t *out_size, const rfaas_call_options *options) {
    int st;
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, "invoke");
    if (UNLIKELY(!enter(l)) && (st = rfaas_api_join(l, "invoke", rfaas_api_deadline_of(options))))
        return st;
    if (UNLIKELY(draining(l) || fn >= l->n_functions || (!in && in_size) || (!out && capacity)) &&
        (st = rfaas_api_bad_call(l, "invoke", fn, in, in_size, out, capacity)))
        return leave(l, st);
    call_plan p = {.worker = RFAAS_ANY_WORKER};
    if (UNLIKELY(options != NULL) && (st = rfaas_api_plan_options(l, "invoke", options, &p)))
        return leave(l, st);
    if (UNLIKELY(in_size > UINT32_MAX))
        return leave(l, rfaas_api_too_large(l, "invoke", fn, in_size, capacity));
    uint32_t got = 0, room = cut_capacity(l, capacity);
    if (UNLIKELY(options != NULL) && p.keep > capacity)
        return leave(l, rfaas_api_invoke_keeping(l, &(call_args){.p = &p, .fn = fn, .in = in, .in_size = (uint32_t)in_size, .out = out}, capacity, out_size));
    if (UNLIKELY(p.in_place)) {
        if ((st = rfaas_api_plan_in_place(l, "invoke", fn, &p, in, in_size, out, capacity)))
            return leave(l, st);
        room = room_of(l, &p, capacity);
    }
    int status = DP_OK;
    bool here = false;
#define ARGS &(call_args){.p = &p, .fn = fn, .in = in, .in_size = (uint32_t)in_size, .out = out, .room = room} /* made where it is used */
    if (UNLIKELY(draining(l) || shared(l) || p.in_place)) {
        status = rfaas_api_invoke(l, ARGS, &got, &here);
        if (UNLIKELY(status == DP_UNSUPPORTED && p.in_place && last.started == RFAAS_NOT_STARTED)) { /* the worker could not map the memory */
            p.in_place = p.result_in_place = false;
            room = cut_capacity(l, capacity);
            status = rfaas_api_invoke(l, ARGS, &got, &here);
        }
    } else {
        uint32_t w = p.worker >= 0 ? (uint32_t)p.worker : l->sync_worker, slot;
        if (p.worker < 0 && UNLIKELY(load_of(l, w)))
            w = least_loaded(l, w);
        dp_started started = DP_NOT_STARTED;
        int64_t deadline = attempt_deadline(&p);
        status = call(l, w, fn, in, (uint32_t)in_size, buffer_of(l, in, in_size), out, room, &got, deadline, &started, &slot);
        note_worker(w);
        if (LIKELY(status == DP_OK))
            l->sync_worker = w;
        else
            status = invoke_rest(l, ARGS, w, slot, deadline, status, started, &got);
    }
#undef ARGS
    if (UNLIKELY(status != DP_OK)) {
        if (status != DP_RESULT_TOO_LARGE)
            return leave(l, status);
        if (!here) /* otherwise its text is set */
            rfaas_api_result_too_large(l, "invoke", fn, got, room, NULL);
        rfaas_api_forget_kept();
    }
    if (out_size)
        *out_size = got;
    return leave(l, status);
}

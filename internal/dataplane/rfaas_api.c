/* The C API's calls. This is the hot path: plain C on dp_channel_*, no lock, no allocation, no control message unless
 * a worker has died. */
#include "rfaas_api.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

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
                   RFAAS_LEASE_ENDED == DP_LEASE_ENDED && RFAAS_FATAL == DP_FATAL,
               "rfaas.h repeats dp_status.h");
_Static_assert(RFAAS_NOT_STARTED == (int)DP_NOT_STARTED && RFAAS_MAYBE_EXECUTED == (int)DP_MAYBE_EXECUTED &&
                   RFAAS_WAIT_ADAPTIVE == (int)DP_WAIT_ADAPTIVE && RFAAS_WAIT_HOT == (int)DP_WAIT_HOT &&
                   RFAAS_WAIT_WARM == (int)DP_WAIT_WARM,
               "rfaas.h repeats dp_channel.h");

/* ---- errors of a thread ---- */

static _Thread_local struct {
    const char *text; /* constant text, or NULL: buf */
    int started;
    char buf[9216]; /* a worker's last output has up to 4 KiB, its stack 3.5 */
} last;

const char *rfaas_strerror(int status) { return dp_status_text(status); }

const char *rfaas_last_error(void) { return last.text ? last.text : last.buf; }

int rfaas_started(void) { return last.started; }

int rfaas_api_fail(int status, int started, const char *fmt, ...) {
    /* Arguments may point into buf. */
    char text[sizeof last.buf];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(last.buf, text, sizeof text);
    last.text = NULL;
    last.started = started;
    return status;
}

int rfaas_api_fail_const(int status, const char *text) {
    last.text = text;
    last.started = RFAAS_NOT_STARTED;
    return status;
}

/* ---- entering a lease ---- */

static inline bool usable(const rfaas_lease *l) {
    return LIKELY(l != NULL && l->magic == RFAAS_LEASE_MAGIC) &&
           LIKELY(__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) == RFAAS_STATE_UP);
}

/* Notes that this thread is inside. A plain load and store: it finds most of the misuse and costs nothing. */
static inline bool enter(rfaas_lease *l) {
    if (UNLIKELY(__atomic_load_n(&l->busy, __ATOMIC_RELAXED)))
        return false;
    __atomic_store_n(&l->busy, 1, __ATOMIC_RELAXED);
    return true;
}

static inline int leave(rfaas_lease *l, int status) {
    __atomic_store_n(&l->busy, 0, __ATOMIC_RELAXED);
    return status;
}

static int wrong_thread(const char *op) {
    return rfaas_api_fail(RFAAS_WRONG_THREAD, RFAAS_NOT_STARTED,
                          "%s: another thread is inside this lease; a lease is used by one thread at a time", op);
}

static const char *function_name(const rfaas_lease *l, rfaas_function fn) {
    return fn < l->n_functions ? l->functions[fn] : "?";
}

/* The registered buffer that holds the whole payload, or NULL. */
static inline const dp_mem *buffer_of(const rfaas_lease *l, const void *in, size_t size) {
    for (const rfaas_buffer *b = l->buffers; UNLIKELY(b != NULL); b = b->next) {
        uintptr_t at = (uintptr_t)in - (uintptr_t)b->mem->addr;
        if ((uintptr_t)in >= (uintptr_t)b->mem->addr && at < b->mem->size && size <= b->mem->size - at)
            return b->mem;
    }
    return NULL;
}

/* What a call's arguments come to. */
typedef struct call_plan {
    int64_t deadline; /* 0: none */
    int32_t worker;   /* RFAAS_ANY_WORKER or an index */
} call_plan;

static __attribute__((noinline)) int plan_options(const rfaas_lease *l, const char *op, const rfaas_call_options *o,
                                                  call_plan *p) {
    if (o->struct_size < sizeof o->struct_size + sizeof o->worker || o->struct_size > 4096)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: options.struct_size is %u; start from RFAAS_CALL_OPTIONS_INIT", op,
                              o->struct_size);
    int64_t timeout = o->struct_size >= offsetof(rfaas_call_options, timeout_ns) + sizeof timeout ? o->timeout_ns : 0;
    if (o->worker != RFAAS_ANY_WORKER && (o->worker < 0 || (uint32_t)o->worker >= l->n_workers))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: worker %d, the lease has workers 0..%u", op, o->worker,
                              l->n_workers - 1);
    if (timeout < 0)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: timeout_ns %lld is negative", op, (long long)timeout);
    p->worker = o->worker;
    if (timeout) {
        int64_t now = dp_now_ns();
        p->deadline = timeout > INT64_MAX - now ? 0 : now + timeout;
    }
    return RFAAS_OK;
}

static __attribute__((noinline, cold)) int bad_call(const rfaas_lease *l, const char *op, rfaas_function fn,
                                                    const void *in, size_t in_size, const void *out, size_t capacity) {
    if (fn >= l->n_functions)
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: function %u, the library has functions 0..%u", op, fn,
                              l->n_functions - 1);
    if (!in && in_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: in is NULL with in_size %zu", op, function_name(l, fn), in_size);
    if (!out && capacity)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: out is NULL with capacity %zu", op, function_name(l, fn),
                              capacity);
    return RFAAS_OK;
}

static __attribute__((noinline, cold)) int too_large(const rfaas_lease *l, const char *op, rfaas_function fn,
                                                     size_t in_size, size_t capacity) {
    uint64_t limit = l->cfg.bulk > l->cfg.eager ? l->cfg.bulk : l->cfg.eager;
    return rfaas_api_fail(RFAAS_TOO_LARGE, 0,
                          "%s %s: payload of %zu and capacity of %zu bytes, this lease carries up to %llu (eager %u, bulk %llu)",
                          op, function_name(l, fn), in_size, capacity, (unsigned long long)limit, l->cfg.eager,
                          (unsigned long long)l->cfg.bulk);
}

/* Sizes are 32 bits in a request header. A capacity above the lease's limit would be refused, although a caller
 * with a large buffer and a small result means no harm: it is cut to the limit. */
static inline uint32_t cut_capacity(const rfaas_lease *l, size_t capacity) {
    uint64_t limit = l->cfg.bulk > l->cfg.eager ? l->cfg.bulk : l->cfg.eager;
    if (limit > UINT32_MAX)
        limit = UINT32_MAX;
    return LIKELY(capacity <= limit) ? (uint32_t)capacity : (uint32_t)limit;
}

/* ---- choosing a worker ---- */

static inline uint32_t least_loaded(const rfaas_lease *l, uint32_t from) {
    uint32_t best = from;
    for (uint32_t i = 0, w = from; i < l->n_workers; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        if (l->workers[w].in_flight < l->workers[best].in_flight)
            best = w;
        if (l->workers[best].in_flight == 0)
            break;
    }
    return best;
}

/* Whether a failed attempt may be made again on another worker or on a new worker in the same place. */
static inline bool next_attempt(int status, dp_started started) {
    return started == DP_NOT_STARTED && (status == DP_BUSY || dp_status_class(status) == RFAAS_CLASS_CONNECTION);
}

/* ---- synchronous calls ---- */

/* Keeps what a function said when it failed: the error of this thread. The message is the worker's and may hold
 * anything. */
static __attribute__((noinline, cold)) void keep_message(const rfaas_lease *l, rfaas_function fn, uint32_t worker,
                                                         const void *text, uint32_t size) {
    rfaas_api_fail(RFAAS_FUNCTION_FAILED, RFAAS_MAYBE_EXECUTED, "%s on worker %u failed%s%.*s", function_name(l, fn),
                   worker, size ? ": " : "", size > 512 ? 512 : (int)size, size ? (const char *)text : "");
}

static inline int call(const rfaas_lease *l, uint32_t w, rfaas_function fn, const void *in, uint32_t in_size,
                       const dp_mem *reg, void *out, uint32_t capacity, uint32_t *got, int64_t deadline,
                       dp_started *started) {
    dp_channel *ch = l->workers[w].ch;
    int status = dp_channel_call(ch, fn, in, in_size, reg, out, capacity, got, deadline, started);
    if (UNLIKELY(status == DP_FUNCTION_FAILED)) {
        uint32_t size;
        const char *text = dp_channel_message(ch, &size);
        keep_message(l, fn, w, text, size);
    }
    return status;
}

/* The first attempt failed. Goes through the workers that may be used, replaces dead ones, and reports. */
static __attribute__((noinline, cold)) int invoke_slow(rfaas_lease *l, const call_plan *p, uint32_t first, int status,
                                                       dp_started started, rfaas_function fn, const void *in,
                                                       uint32_t in_size, const dp_mem *reg, void *out,
                                                       uint32_t capacity, uint32_t *got) {
    uint32_t w = first, tries = p->worker == RFAAS_ANY_WORKER ? l->n_workers : 1;
    for (uint32_t i = 0; i < tries && next_attempt(status, started); i++) {
        if (i)
            w = w + 1 == l->n_workers ? 0 : w + 1;
        if (i == 0 && status == DP_BUSY && tries > 1)
            continue;
        if (status != DP_BUSY || l->workers[w].broken || dp_channel_status(l->workers[w].ch)) {
            int st = rfaas_api_repair(l, w);
            if (st != RFAAS_OK) {
                status = st;
                if (i + 1 == tries || dp_status_class(st) == RFAAS_CLASS_LEASE)
                    return status; /* the text is set */
                continue;
            }
        }
        status = call(l, w, fn, in, in_size, reg, out, capacity, got, p->deadline, &started);
    }
    if (status == DP_OK) {
        l->sync_worker = w;
        return status;
    }
    return rfaas_api_explain(l, "invoke", fn, w, status, started);
}

int rfaas_invoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                 size_t *out_size, const rfaas_call_options *options) {
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, "invoke");
    if (UNLIKELY(!enter(l)))
        return wrong_thread("invoke");
    if (UNLIKELY(fn >= l->n_functions || (!in && in_size) || (!out && capacity)))
        return leave(l, bad_call(l, "invoke", fn, in, in_size, out, capacity));
    call_plan p = {0, RFAAS_ANY_WORKER};
    if (UNLIKELY(options != NULL)) {
        int st = plan_options(l, "invoke", options, &p);
        if (st)
            return leave(l, st);
    }
    if (UNLIKELY(in_size > UINT32_MAX))
        return leave(l, too_large(l, "invoke", fn, in_size, capacity));
    uint32_t w = p.worker >= 0 ? (uint32_t)p.worker : l->sync_worker;
    if (p.worker < 0 && UNLIKELY(l->workers[w].in_flight))
        w = least_loaded(l, w);

    const dp_mem *reg = buffer_of(l, in, in_size);
    uint32_t got = 0, room = cut_capacity(l, capacity);
    dp_started started = DP_NOT_STARTED;
    int status = call(l, w, fn, in, (uint32_t)in_size, reg, out, room, &got, p.deadline, &started);
    if (UNLIKELY(status != DP_OK)) {
        if (status == DP_TOO_LARGE && started == DP_NOT_STARTED)
            return leave(l, too_large(l, "invoke", fn, in_size, capacity));
        status = invoke_slow(l, &p, w, status, started, fn, in, (uint32_t)in_size, reg, out, room, &got);
        if (status != DP_OK && status != DP_RESULT_TOO_LARGE)
            return leave(l, status);
    } else {
        l->sync_worker = w;
    }
    if (out_size)
        *out_size = got;
    return leave(l, status);
}

/* ---- requests ---- */

static rfaas_request_slot *take_request(rfaas_lease *l) {
    uint32_t i;
    if (l->requests_free) {
        i = l->requests_free - 1;
        l->requests_free = l->requests[i].next_free;
    } else if (l->requests_used < l->n_workers * l->cfg.depth) {
        i = l->requests_used++;
    } else {
        return NULL;
    }
    rfaas_request_slot *r = &l->requests[i];
    l->request_seq = (l->request_seq + 1) & RFAAS_REQ_SEQ_MASK;
    if (l->request_seq == 0)
        l->request_seq = 1;
    r->id = l->request_seq << (RFAAS_REQ_LEASE_BITS + RFAAS_REQ_INDEX_BITS) | (uint64_t)i << RFAAS_REQ_LEASE_BITS |
            l->index;
    return r;
}

static void give_request(rfaas_lease *l, rfaas_request_slot *r) {
    free(r->text);
    r->text = NULL;
    r->id = 0;
    r->state = RFAAS_REQ_FREE;
    r->next_free = l->requests_free;
    l->requests_free = (uint32_t)(r - l->requests) + 1;
}

/* The request's slot; NULL with the error set. */
static rfaas_request_slot *find_request(rfaas_request id, const char *op, rfaas_lease **lease) {
    uint32_t li = id & (RFAAS_LEASES_MAX - 1);
    uint32_t ri = id >> RFAAS_REQ_LEASE_BITS & ((1u << RFAAS_REQ_INDEX_BITS) - 1);
    rfaas_lease *l = rfaas_api_lease_at(li);
    if (!usable(l)) {
        if (__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) != RFAAS_STATE_UP)
            rfaas_api_bad_lease(NULL, op);
        else
            rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx: its lease was released", op,
                           (unsigned long long)id);
        return NULL;
    }
    if (ri >= l->requests_used || l->requests[ri].id != id) {
        rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx has ended already or never was one", op,
                       (unsigned long long)id);
        return NULL;
    }
    *lease = l;
    return &l->requests[ri];
}

/* Takes the outcome of an ended call off its channel. */
static void collect(rfaas_lease *l, rfaas_request_slot *r) {
    dp_started started = DP_NOT_STARTED;
    dp_channel *ch = l->workers[r->worker].ch;
    const void *res;
    if (UNLIKELY(dp_channel_result(ch, r->slot, &res, &r->size, &started) == DP_FUNCTION_FAILED)) {
        keep_message(l, r->function, r->worker, res, r->size);
        r->text = strdup(rfaas_last_error());
    }
    r->status = dp_channel_finish(ch, r->slot, r->out, &r->size, &started);
    r->started = (uint8_t)started;
    r->state = RFAAS_REQ_ENDED;
    l->workers[r->worker].in_flight--;
}

static void give_up(rfaas_lease *l, rfaas_request_slot *r, int status) {
    dp_channel_abandon(l->workers[r->worker].ch, r->slot);
    r->status = status;
    r->size = 0;
    r->started = RFAAS_MAYBE_EXECUTED;
    r->state = RFAAS_REQ_ENDED;
    l->workers[r->worker].in_flight--;
}

void rfaas_api_settle(rfaas_lease *l, uint32_t worker) {
    for (uint32_t i = 0; i < l->requests_used && l->workers[worker].in_flight; i++) {
        rfaas_request_slot *r = &l->requests[i];
        if (r->state != RFAAS_REQ_FLYING || r->worker != worker)
            continue;
        if (dp_channel_test(l->workers[worker].ch, r->slot) == 0) {
            give_up(l, r, DP_CONNECTION); /* a channel that works after all: the caller is about to reset it */
            continue;
        }
        collect(l, r);
        if (r->status != DP_OK && !r->text) {
            r->status = rfaas_api_explain(l, "wait", r->function, worker, r->status, r->started);
            r->text = strdup(rfaas_last_error());
        }
    }
}

/* Reports an ended request and frees its slot. */
static int report(rfaas_lease *l, rfaas_request_slot *r, const char *op, rfaas_request *request, size_t *out_size) {
    int status = r->status;
    if (LIKELY(status == DP_OK) || status == DP_RESULT_TOO_LARGE) {
        if (out_size)
            *out_size = r->size;
    }
    if (UNLIKELY(status != DP_OK)) {
        if (r->text)
            rfaas_api_fail(status, r->started, "%s", r->text);
        else
            status = rfaas_api_explain(l, op, r->function, r->worker, status, r->started);
    }
    give_request(l, r);
    *request = RFAAS_REQUEST_NULL;
    return status;
}

int rfaas_iinvoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                  const rfaas_call_options *options, rfaas_request *request) {
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, "iinvoke");
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "iinvoke: request is NULL");
    if (UNLIKELY(!enter(l)))
        return wrong_thread("iinvoke");
    if (UNLIKELY(fn >= l->n_functions || (!in && in_size) || (!out && capacity)))
        return leave(l, bad_call(l, "iinvoke", fn, in, in_size, out, capacity));
    call_plan p = {0, RFAAS_ANY_WORKER};
    if (UNLIKELY(options != NULL)) {
        int st = plan_options(l, "iinvoke", options, &p);
        if (st)
            return leave(l, st);
    }
    if (UNLIKELY(in_size > UINT32_MAX))
        return leave(l, too_large(l, "iinvoke", fn, in_size, capacity));

    rfaas_request_slot *r = take_request(l);
    if (UNLIKELY(!r))
        return leave(l, rfaas_api_fail_const(RFAAS_BUSY, "iinvoke: every worker has `depth` requests in flight or "
                                                         "unwaited for; finish one and try again"));
    bool any = p.worker == RFAAS_ANY_WORKER;
    uint32_t w = any ? least_loaded(l, l->next_worker) : (uint32_t)p.worker;
    uint32_t tries = any ? l->n_workers : 1;
    uint32_t room = cut_capacity(l, capacity);
    const dp_mem *reg = buffer_of(l, in, in_size);
    int status = DP_BUSY;
    bool told = false;
    for (uint32_t i = 0; i < tries; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        told = false;
        status = dp_channel_submit(l->workers[w].ch, fn, in, (uint32_t)in_size, reg, room, &r->slot);
        if (UNLIKELY(dp_status_class(status) == RFAAS_CLASS_CONNECTION)) {
            status = rfaas_api_repair(l, w);
            told = status != RFAAS_OK;
            if (!told)
                status = dp_channel_submit(l->workers[w].ch, fn, in, (uint32_t)in_size, reg, room, &r->slot);
        }
        if (LIKELY(status == DP_OK) ||
            (status != DP_BUSY && dp_status_class(status) != RFAAS_CLASS_CONNECTION))
            break;
    }
    if (UNLIKELY(status != DP_OK)) {
        give_request(l, r);
        if (status == DP_BUSY)
            rfaas_api_fail_const(RFAAS_BUSY, "iinvoke: no free slot on any allowed worker; finish a request and try again");
        else if (status == DP_TOO_LARGE)
            too_large(l, "iinvoke", fn, in_size, capacity);
        else if (!told)
            status = rfaas_api_explain(l, "iinvoke", fn, w, status, RFAAS_NOT_STARTED);
        return leave(l, status);
    }
    l->workers[w].in_flight++;
    l->next_worker = w + 1 == l->n_workers ? 0 : w + 1;
    r->out = out;
    r->capacity = room;
    r->worker = w;
    r->function = fn;
    r->deadline = p.deadline;
    r->state = RFAAS_REQ_FLYING;
    *request = r->id;
    return leave(l, RFAAS_OK);
}

int rfaas_wait(rfaas_request *request, size_t *out_size) {
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "wait: request is NULL");
    if (*request == RFAAS_REQUEST_NULL) {
        if (out_size)
            *out_size = 0;
        return RFAAS_OK;
    }
    rfaas_lease *l;
    rfaas_request_slot *r = find_request(*request, "wait", &l);
    if (UNLIKELY(!r))
        return RFAAS_INVALID;
    if (UNLIKELY(!enter(l)))
        return wrong_thread("wait");
    if (r->state == RFAAS_REQ_FLYING) {
        if (LIKELY(dp_channel_wait(l->workers[r->worker].ch, r->slot, r->deadline) == DP_OK))
            collect(l, r);
        else
            give_up(l, r, DP_DEADLINE);
    }
    return leave(l, report(l, r, "wait", request, out_size));
}

int rfaas_test(rfaas_request *request, int *done, size_t *out_size) {
    if (UNLIKELY(!request || !done))
        return rfaas_api_fail(RFAAS_INVALID, 0, "test: %s is NULL", request ? "done" : "request");
    if (*request == RFAAS_REQUEST_NULL) {
        *done = 1;
        if (out_size)
            *out_size = 0;
        return RFAAS_OK;
    }
    rfaas_lease *l;
    rfaas_request_slot *r = find_request(*request, "test", &l);
    if (UNLIKELY(!r))
        return RFAAS_INVALID;
    if (UNLIKELY(!enter(l)))
        return wrong_thread("test");
    if (r->state == RFAAS_REQ_FLYING) {
        if (dp_channel_test(l->workers[r->worker].ch, r->slot))
            collect(l, r);
        else if (r->deadline && dp_now_ns() >= r->deadline)
            give_up(l, r, DP_DEADLINE);
        else {
            *done = 0;
            return leave(l, RFAAS_OK);
        }
    }
    *done = 1;
    return leave(l, report(l, r, "test", request, out_size));
}

int rfaas_cancel(rfaas_request *request) {
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "cancel: request is NULL");
    if (*request == RFAAS_REQUEST_NULL)
        return RFAAS_OK;
    rfaas_lease *l;
    rfaas_request_slot *r = find_request(*request, "cancel", &l);
    if (UNLIKELY(!r))
        return RFAAS_INVALID;
    if (UNLIKELY(!enter(l)))
        return wrong_thread("cancel");
    if (r->state == RFAAS_REQ_FLYING)
        give_up(l, r, DP_CANCELLED);
    last.started = r->started;
    give_request(l, r);
    *request = RFAAS_REQUEST_NULL;
    return leave(l, RFAAS_OK);
}

/* Requests: calls that the program does not wait for at once. Hot path like rfaas_api.c. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

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
        rfaas_api_keep_message(l, r->function, r->worker, res, r->size);
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
        if (dp_channel_test(l->workers[worker].ch, r->slot) == 0)
            give_up(l, r, DP_CONNECTION); /* a channel that works after all: the caller is about to reset it */
        else
            collect(l, r);
        if (r->status != DP_OK && !r->text) {
            r->status = rfaas_api_explain(l, "wait", r->function, worker, r->status, r->started);
            r->text = strdup(rfaas_last_error());
        }
    }
}

void rfaas_api_collect_ended(rfaas_lease *l) {
    for (uint32_t i = 0; i < l->requests_used; i++) {
        rfaas_request_slot *r = &l->requests[i];
        if (r->state == RFAAS_REQ_FLYING &&
            dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID)
            collect(l, r);
    }
}

void rfaas_api_drain(rfaas_lease *l) {
    for (uint32_t i = 0; i < l->requests_used; i++) {
        rfaas_request_slot *r = &l->requests[i];
        if (r->state != RFAAS_REQ_FLYING)
            continue;
        if (dp_channel_wait(l->workers[r->worker].ch, r->slot, r->deadline) == DP_OK)
            collect(l, r);
        else
            give_up(l, r, DP_DEADLINE);
    }
}

/* The error of an ended request becomes this thread's, and the call is made again if it may be. */
static __attribute__((noinline, cold)) int ended_badly(rfaas_lease *l, rfaas_request_slot *r, const char *op) {
    int status = r->status;
    if (r->text)
        rfaas_api_fail(status, r->started, "%s", r->text);
    else if (status == DP_RESULT_TOO_LARGE)
        rfaas_api_result_too_large(l, op, r->function, r->size, r->capacity);
    else
        status = rfaas_api_explain(l, op, r->function, r->worker, status, r->started);
    if (r->repeats && status != DP_RESULT_TOO_LARGE) {
        call_plan p = {.worker = r->chosen, .repeats = r->repeats, .deadline = r->last, .attempt = r->attempt};
        status = rfaas_api_repeat(l, &p, r->worker, status, r->function, r->in, r->in_size, r->out, r->capacity, &r->size);
    }
    return status;
}

/* Reports an ended request and frees its slot. */
int rfaas_api_report(rfaas_lease *l, rfaas_request_slot *r, const char *op, size_t *out_size) {
    int status = LIKELY(r->status == DP_OK) ? DP_OK : ended_badly(l, r, op);
    if (out_size && (LIKELY(status == DP_OK) || status == DP_RESULT_TOO_LARGE))
        *out_size = r->size;
    give_request(l, r);
    return status;
}

static int report(rfaas_lease *l, rfaas_request_slot *r, const char *op, rfaas_request *request, size_t *out_size) {
    int status = rfaas_api_report(l, r, op, out_size);
    *request = RFAAS_REQUEST_NULL;
    return status;
}

bool rfaas_api_ended(rfaas_lease *l, rfaas_request_slot *r, int64_t now) {
    if (r->state == RFAAS_REQ_ENDED)
        return true;
    if (dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID)
        collect(l, r);
    else if (r->deadline && now >= r->deadline)
        give_up(l, r, DP_DEADLINE);
    else
        return false;
    return true;
}

void rfaas_api_drop_request(rfaas_lease *l, rfaas_request_slot *r) {
    if (r->state == RFAAS_REQ_FLYING)
        give_up(l, r, DP_CANCELLED);
    give_request(l, r);
}

/* Submits a request to the first worker that takes it, *at. *told: the error's text is set. */
static inline int submit(rfaas_lease *l, rfaas_request_slot *r, const call_plan *p, rfaas_function fn, const void *in,
                         uint32_t in_size, uint32_t room, uint32_t *at, bool *told) {
    bool any = p->worker == RFAAS_ANY_WORKER;
    uint32_t w = any ? least_loaded(l, l->next_worker) : (uint32_t)p->worker;
    uint32_t tries = any ? l->n_workers : 1;
    const dp_mem *reg = buffer_of(l, in, in_size);
    int status = DP_BUSY;
    bool full = false; /* one works and has no free slot */
    /* Dead ones are replaced while the others work. The second round waits for the new ones. */
    uint32_t all = tries > 1 ? 2 * tries : 1;
    for (uint32_t i = 0; i < all && !(i >= tries && full); i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        *told = false;
        status = dp_channel_submit(l->workers[w].ch, fn, in, in_size, reg, room, &r->slot);
        if (UNLIKELY(dp_status_class(status) == RFAAS_CLASS_CONNECTION)) {
            status = i + tries < all ? rfaas_api_begin_repair(l, w) : rfaas_api_repair(l, w, p->deadline);
            *told = status != RFAAS_OK && status != RFAAS_BUSY;
            if (status == RFAAS_BUSY)
                continue;
            if (!*told)
                status = dp_channel_submit(l->workers[w].ch, fn, in, in_size, reg, room, &r->slot);
        }
        if (LIKELY(status == DP_OK) ||
            (status != DP_BUSY && dp_status_class(status) != RFAAS_CLASS_CONNECTION))
            break;
        full |= status == DP_BUSY && p->full_is_busy;
    }
    *at = w;
    return status;
}

/* The request has ended when this returns, well or not. */
static __attribute__((noinline, cold)) int run_here(rfaas_lease *l, rfaas_request_slot *r, const char *op, rfaas_function fn,
                                                    const void *in, uint32_t in_size, void *out, uint32_t room) {
    int status = rfaas_api_here(l, op, fn, in, in_size, out, room, &r->size);
    if (status == RFAAS_TOO_LARGE) {
        give_request(l, r);
        return status;
    }
    r->status = status;
    r->started = status ? (uint8_t)rfaas_started() : RFAAS_MAYBE_EXECUTED;
    r->text = status ? strdup(rfaas_last_error()) : NULL;
    r->worker = 0;
    r->function = fn;
    r->repeats = 0;
    r->deadline = 0;
    r->state = RFAAS_REQ_ENDED;
    return RFAAS_OK;
}

int rfaas_api_start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size,
                    void *out, size_t capacity, rfaas_request_slot **request) {
    rfaas_request_slot *r = take_request(l);
    if (UNLIKELY(!r))
        return rfaas_api_fail_const(RFAAS_BUSY, "every worker has `depth` requests in flight or unwaited for; finish one and "
                                                "try again");
    uint32_t w, room = cut_capacity(l, capacity);
    bool told = false;
    int status = RFAAS_OK;
    for (int moves = 0; moves < 2; moves++) {
        if (UNLIKELY((leaving(l) || moves) && (status = rfaas_api_move(l, op, p->deadline)))) {
            give_request(l, r);
            return status;
        }
        if (UNLIKELY(leaving(l))) { /* in this process, at once */
            *request = r;
            return run_here(l, r, op, fn, in, in_size, out, room);
        }
        status = submit(l, r, p, fn, in, in_size, room, &w, &told);
        int class = dp_status_class(status);
        if (LIKELY(status == DP_OK) || !rfaas_api_fails_over(l) ||
            (class != RFAAS_CLASS_LEASE && class != RFAAS_CLASS_CONNECTION))
            break;
    }
    if (UNLIKELY(status != DP_OK)) {
        give_request(l, r);
        if (status == DP_BUSY)
            rfaas_api_fail_const(RFAAS_BUSY, "no free slot on any allowed worker; finish a request and try again");
        else if (status == DP_TOO_LARGE)
            rfaas_api_too_large(l, op, fn, in_size, capacity);
        else if (!told)
            status = rfaas_api_explain(l, op, fn, w, status, RFAAS_NOT_STARTED);
        return status;
    }
    l->workers[w].in_flight++;
    l->next_worker = w + 1 == l->n_workers ? 0 : w + 1;
    r->out = out;
    r->capacity = room;
    r->worker = w;
    r->function = fn;
    r->deadline = attempt_deadline(p);
    r->repeats = p->repeats;
    if (UNLIKELY(p->repeats)) {
        r->in = in;
        r->in_size = in_size;
        r->last = p->deadline;
        r->attempt = p->attempt;
        r->chosen = p->worker;
    }
    r->state = RFAAS_REQ_FLYING;
    *request = r;
    return RFAAS_OK;
}

int rfaas_iinvoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                  const rfaas_call_options *options, rfaas_request *request) {
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, "iinvoke");
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "iinvoke: request is NULL");
    if (UNLIKELY(!enter(l)))
        return rfaas_api_wrong_thread("iinvoke");
    int st;
    if (UNLIKELY(leaving(l) || fn >= l->n_functions || (!in && in_size) || (!out && capacity)) &&
        (st = rfaas_api_bad_call(l, "iinvoke", fn, in, in_size, out, capacity)))
        return leave(l, st);
    call_plan p = {.worker = RFAAS_ANY_WORKER};
    if (UNLIKELY(options != NULL) && (st = rfaas_api_plan_options(l, "iinvoke", options, &p)))
        return leave(l, st);
    if (UNLIKELY(in_size > UINT32_MAX))
        return leave(l, rfaas_api_too_large(l, "iinvoke", fn, in_size, capacity));
    rfaas_request_slot *r;
    int status = rfaas_api_start(l, "iinvoke", &p, fn, in, (uint32_t)in_size, out, capacity, &r);
    if (LIKELY(status == RFAAS_OK))
        *request = r->id;
    return leave(l, status);
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
        return rfaas_api_wrong_thread("wait");
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
        return rfaas_api_wrong_thread("test");
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
        return rfaas_api_wrong_thread("cancel");
    if (r->state == RFAAS_REQ_FLYING)
        give_up(l, r, DP_CANCELLED);
    rfaas_api_note_started(r->started);
    give_request(l, r);
    *request = RFAAS_REQUEST_NULL;
    return leave(l, RFAAS_OK);
}

/* ---- several at once ---- */

int rfaas_waitall(size_t count, rfaas_request requests[], size_t out_sizes[], int statuses[]) {
    if (UNLIKELY(!requests && count))
        return rfaas_api_fail(RFAAS_INVALID, 0, "waitall: requests is NULL with count %zu", count);
    int first = RFAAS_OK, started = 0;
    size_t at = 0;
    char *text = NULL;
    for (size_t i = 0; i < count; i++) {
        size_t size = 0;
        int status = rfaas_wait(&requests[i], &size);
        if (out_sizes)
            out_sizes[i] = size;
        if (statuses)
            statuses[i] = status;
        if (UNLIKELY(status != RFAAS_OK && first == RFAAS_OK)) {
            first = status;
            at = i;
            started = rfaas_started();
            text = strdup(rfaas_last_error());
        }
    }
    if (UNLIKELY(first != RFAAS_OK)) {
        rfaas_api_fail(first, started, "waitall: request %zu of %zu: %s", at, count, text ? text : rfaas_strerror(first));
        free(text);
    }
    return first;
}

/* Where this thread's next waitany begins to look. */
static _Thread_local size_t any_from;

/* One look at all of them. 1: *index ended, with *status. 0: none has. Notes how many leases they are of, and the earliest
 * deadline. */
static int look_at_all(size_t count, rfaas_request requests[], size_t *index, size_t *out_size, int *status,
                       rfaas_lease **lease, size_t *others, int64_t *deadline) {
    int64_t now = 0;
    *lease = NULL;
    *others = 0;
    *deadline = 0;
    for (size_t k = 0, i = any_from < count ? any_from : 0; k < count; k++, i = i + 1 == count ? 0 : i + 1) {
        if (requests[i] == RFAAS_REQUEST_NULL)
            continue;
        rfaas_lease *l;
        rfaas_request_slot *r = find_request(requests[i], "waitany", &l);
        if (UNLIKELY(!r || !enter(l))) {
            *status = r ? rfaas_api_wrong_thread("waitany") : RFAAS_INVALID;
            *index = i;
            return 1;
        }
        if (r->deadline && !now)
            now = dp_now_ns();
        if (rfaas_api_ended(l, r, now)) {
            *status = report(l, r, "waitany", &requests[i], out_size);
            *index = i;
            leave(l, 0);
            any_from = i + 1;
            return 1;
        }
        if (r->deadline && (!*deadline || r->deadline < *deadline))
            *deadline = r->deadline;
        leave(l, 0);
        if (*lease && *lease != l)
            (*others)++;
        *lease = l;
    }
    return 0;
}

/* How long to wait on one of several leases before looking at the next. */
#define SLICE_MIN_NS 20000
#define SLICE_MAX_NS 1000000

int rfaas_waitany(size_t count, rfaas_request requests[], size_t *index, size_t *out_size) {
    if (UNLIKELY(!index || (!requests && count)))
        return rfaas_api_fail(RFAAS_INVALID, 0, "waitany: %s is NULL", index ? "requests" : "index");
    *index = RFAAS_UNDEFINED;
    if (out_size)
        *out_size = 0;
    int64_t slice = SLICE_MIN_NS;
    for (size_t turn = 0;; turn++) {
        rfaas_lease *l;
        size_t others;
        int64_t deadline;
        int status;
        if (look_at_all(count, requests, index, out_size, &status, &l, &others, &deadline))
            return status;
        if (!l)
            return RFAAS_OK; /* null requests only */
        if (UNLIKELY(others)) {
            /* Each lease has a queue of its own to sleep on: a while on one, then on the next. */
            size_t i = turn % count;
            while (requests[i] == RFAAS_REQUEST_NULL)
                i = i + 1 == count ? 0 : i + 1;
            l = rfaas_api_lease_at(requests[i] & (RFAAS_LEASES_MAX - 1));
            int64_t until = dp_now_ns() + slice;
            if (!deadline || until < deadline)
                deadline = until;
            slice = slice * 2 < SLICE_MAX_NS ? slice * 2 : SLICE_MAX_NS;
        }
        if (UNLIKELY(!enter(l)))
            return rfaas_api_wrong_thread("waitany");
        dp_endpoint_wait_any(l->home->ep, deadline);
        leave(l, 0);
    }
}

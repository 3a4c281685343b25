/* Starting a request: choosing its worker and submitting it. This is the hot path, as invoke.c is. */
#include <string.h>

#include "request.h"

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* on the hot path, with two callers */

static ALWAYS_INLINE rfaas_request_slot *take_free(rfaas_lease *l) {
    uint32_t i;
    if (l->requests_free) {
        i = l->requests_free - 1;
        l->requests_free = l->requests[i].next_free;
    } else if (l->requests_used < l->n_workers * l->cfg.depth) {
        i = l->requests_used;
        __atomic_store_n(&l->requests_used, i + 1, __ATOMIC_RELAXED);
    } else {
        return NULL;
    }
    rfaas_request_slot *r = &l->requests[i];
    l->request_seq = (l->request_seq + 1) & RFAAS_REQ_SEQ_MASK;
    if (l->request_seq == 0)
        l->request_seq = 1;
    set_id(r, l->request_seq << (RFAAS_REQ_LEASE_BITS + RFAAS_REQ_INDEX_BITS) | (uint64_t)i << RFAAS_REQ_LEASE_BITS | l->index);
    return r;
}

static __attribute__((noinline)) rfaas_request_slot *take_shared(rfaas_lease *l) {
    pthread_mutex_lock(&l->table_mu);
    rfaas_request_slot *r = take_free(l);
    pthread_mutex_unlock(&l->table_mu);
    return r;
}

/* The call is under way on the worker. */
static ALWAYS_INLINE void note_flying(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w) {
    add_in_flight(l, w, 1);
    r->out = a->out;
    if (UNLIKELY(a->pieces != NULL))
        r->pieces = a->pieces;
    r->capacity = a->room;
    set_worker(r, w);
    r->function = a->fn;
    r->repeats = a->p->repeats;
    r->here = false;
    set_told(r, false);
    r->kill = a->p->kill;
    r->result_in_place = a->p->result_in_place;
    if (UNLIKELY(a->p->repeats)) {
        r->in = a->in;
        r->in_size = a->in_size;
        r->last = a->p->deadline;
        r->attempt = a->p->attempt;
        r->chosen = a->p->worker;
        r->in_place = a->p->in_place;
    }
    set_state(r, RFAAS_REQ_FLYING);
}

static ALWAYS_INLINE int submit_to(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w) {
    dp_channel *ch = l->workers[w].ch;
    r->deadline = attempt_deadline(a->p);
    if (UNLIKELY(a->pieces != NULL))
        return dp_channel_submit_pieces(ch, a->fn, &a->pieces->in, a->in_size, a->room, r->deadline, &r->slot);
    if (UNLIKELY(a->p->in_place))
        return rfaas_api_submit_in_place(l, w, a, r->deadline, &r->slot);
    if (UNLIKELY(a->p->batch))
        dp_channel_batch(ch, true);
    int status = dp_channel_submit_until(ch, a->fn, a->in, a->in_size, buffer_of(l, a->in, a->in_size), a->room, r->deadline, &r->slot);
    if (UNLIKELY(a->p->batch))
        dp_channel_batch(ch, false);
    return status;
}

/* One worker's turn in submit(): begins to replace a dead one, or with `last` waits for the new one. Its error's text is set if
 * *told. */
static ALWAYS_INLINE int submit_one(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w, bool last, bool *told) {
    *told = false;
    int status = submit_to(l, r, a, w);
    if (UNLIKELY(dp_status_class(status) == RFAAS_CLASS_CONNECTION)) {
        status = last ? rfaas_api_repair(l, w, start_deadline(a->p)) : rfaas_api_begin_repair(l, w);
        *told = status != RFAAS_OK && status != RFAAS_BUSY;
        if (status == RFAAS_OK)
            status = submit_to(l, r, a, w);
    }
    if (LIKELY(status == DP_OK))
        note_flying(l, r, a, w);
    return status;
}

/* The same for a shared lease. Reports the state of the worker while this thread holds its unit. */
static __attribute__((noinline)) int submit_shared(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w, bool last,
                                                   bool *told) {
    uint32_t unit;
    int status = dp_turns_take(l->turns, DP_TURN_BRIEF, unit_of(w), false, start_deadline(a->p), &unit);
    if (UNLIKELY(status)) {
        *told = true;
        return rfaas_api_fail(status, RFAAS_NOT_STARTED, status == RFAAS_DEADLINE
                                                             ? "iinvoke: another thread had worker %u until the deadline"
                                                             : "iinvoke: the lease was released by another thread (worker %u)", w);
    }
    if (UNLIKELY(draining(l))) { /* the drain began after this thread entered */
        *told = true;
        status = rfaas_api_bad_call(l, "iinvoke", a->fn, NULL, 0, NULL, 0);
        if (!status)
            status = rfaas_api_fail(RFAAS_LEASE_ENDED, RFAAS_NOT_STARTED, "iinvoke: the executor is draining");
    } else {
        status = submit_one(l, r, a, w, last, told);
        if (status && status != DP_BUSY && status != DP_TOO_LARGE && !*told) {
            status = status == DP_LEASE_ENDED && dp_turns_closed(l->turns)
                         ? rfaas_api_fail(status, RFAAS_NOT_STARTED, "iinvoke: the lease was released by another thread (worker %u)", w)
                         : rfaas_api_explain(l, "iinvoke", a->fn, w, status, RFAAS_NOT_STARTED);
            *told = true;
        }
    }
    dp_turns_put_down(l->turns, unit);
    return status;
}

/* Tries workers of lanes that no thread holds at this moment, because the others may be in long calls. idle: only workers without
 * calls in flight. */
static __attribute__((noinline)) bool submit_aside(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t from, bool idle) {
    for (uint32_t i = 0, w = from; i < l->n_workers; i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        if ((idle && load_of(l, w)) || !dp_turns_try(l->turns, DP_TURN_BRIEF, unit_of(w)))
            continue;
        bool good = !(idle && in_flight(l, w)) && !draining(l) && submit_to(l, r, a, w) == DP_OK;
        if (good) {
            note_flying(l, r, a, w);
            __atomic_store_n(&l->next_worker, w + 1 == l->n_workers ? 0 : w + 1, __ATOMIC_RELAXED);
        }
        dp_turns_put_down(l->turns, unit_of(w));
        if (good)
            return true;
    }
    return false;
}

/* Submits a request to a worker without calls in flight. False: there is no such worker, or it is dead. */
static __attribute__((noinline)) bool submit_idle(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t from) {
    for (uint32_t i = 0; i < l->n_workers; i++) { /* other threads may submit first */
        if (submit_aside(l, r, a, from, true))
            return true;
        uint32_t unit, w = least_loaded(l, from);
        if (load_of(l, w) || dp_turns_take(l->turns, DP_TURN_BRIEF, unit_of(w), false, start_deadline(a->p), &unit))
            return false;
        bool idle = !in_flight(l, w), good = idle && !draining(l) && submit_to(l, r, a, w) == DP_OK;
        if (good) {
            note_flying(l, r, a, w);
            __atomic_store_n(&l->next_worker, w + 1 == l->n_workers ? 0 : w + 1, __ATOMIC_RELAXED);
        }
        dp_turns_put_down(l->turns, unit);
        if (idle)
            return good;
    }
    return false;
}

/* Submits a request to the first worker that takes it; *at is its index. *told: the error's text is set. */
static ALWAYS_INLINE int submit(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t *at, bool *told, bool sharing) {
    bool any = a->p->worker == RFAAS_ANY_WORKER;
    uint32_t w = any ? least_loaded(l, __atomic_load_n(&l->next_worker, __ATOMIC_RELAXED)) : (uint32_t)a->p->worker;
    uint32_t tries = any ? l->n_workers : 1;
    int status = DP_BUSY;
    bool full = false; /* a live worker has no free slot */
    if (UNLIKELY(sharing) && any && (submit_idle(l, r, a, w) || submit_aside(l, r, a, w, false)))
        return DP_OK;
    /* The first round only starts replacements of dead workers. The second round waits for them. */
    uint32_t all = tries > 1 ? 2 * tries : 1;
    for (uint32_t i = 0; i < all && !(i >= tries && full); i++, w = w + 1 == l->n_workers ? 0 : w + 1) {
        bool last = i + tries >= all;
        status = UNLIKELY(sharing) ? submit_shared(l, r, a, w, last, told) : submit_one(l, r, a, w, last, told);
        if (LIKELY(status == DP_OK)) {
            __atomic_store_n(&l->next_worker, w + 1 == l->n_workers ? 0 : w + 1, __ATOMIC_RELAXED);
            break;
        }
        if (status != DP_BUSY && dp_status_class(status) != RFAAS_CLASS_CONNECTION)
            break;
        full |= status == DP_BUSY && !*told && a->p->full_is_busy && (sharing || !l->workers[w].replacing);
    }
    *at = w;
    return status;
}

/* Waits until the request has ended, with a result or an error. */
static __attribute__((noinline, cold)) int run_here(rfaas_lease *l, rfaas_request_slot *r, const char *op, const call_args *a) {
    int status = rfaas_api_here(l, op, a, &r->size);
    if (status == RFAAS_TOO_LARGE) {
        give_request(l, r);
        return status;
    }
    r->status = status;
    r->started = status ? (uint8_t)rfaas_started() : RFAAS_MAYBE_EXECUTED;
    if (status)
        rfaas_api_keep_error(r);
    set_worker(r, 0);
    r->here = true;
    set_told(r, false);
    r->function = a->fn;
    r->pieces = a->pieces;
    r->repeats = 0;
    r->deadline = 0;
    set_state(r, RFAAS_REQ_ENDED);
    return RFAAS_OK;
}

/* Sets the error of a request for which no slot is free. */
static void fail_busy(rfaas_lease *l, const call_plan *p) {
    static const char text[] = "no free slot on any allowed worker; finish a request and try again";
    char runs[256] = "";
    if (p->worker >= 0 && UNLIKELY(l->workers[p->worker].overdue) && !shared(l))
        rfaas_api_overdue_text(l, (uint32_t)p->worker, runs, sizeof runs);
    if (*runs)
        rfaas_api_fail(RFAAS_BUSY, RFAAS_NOT_STARTED, "%s%s", text, runs);
    else
        rfaas_api_fail_const(RFAAS_BUSY, text);
}

/* rfaas_api_start; the arguments of an owner's call stay in registers. */
static ALWAYS_INLINE int start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in,
                               uint32_t in_size, void *out, size_t capacity, rfaas_call_pieces *pieces, rfaas_request_slot **request,
                               bool sharing) {
    rfaas_request_slot *r = sharing ? take_shared(l) : take_free(l);
    if (UNLIKELY(!r))
        return rfaas_api_fail(RFAAS_BUSY, 0, "%s: every worker has depth (%u) requests in flight or not yet waited for; finish one and try again",
                              op, l->cfg.depth);
    uint32_t w = 0;
    call_args a = {.p = p, .fn = fn, .in = in, .in_size = in_size, .out = out, .room = room_of(l, p, capacity), .pieces = pieces};
    bool told = false;
    int status = RFAAS_OK;
    for (int moves = 0; moves < 2; moves++) {
        uint64_t key = sharing && l->options.flags & (RFAAS_LEASE_FAILOVER | RFAAS_LEASE_LOCAL) ? rfaas_api_grant_key(l) : 0;
        if (UNLIKELY((draining(l) || moves) && (status = rfaas_api_move_shared(l, op, key, p)))) {
            give_request(l, r);
            return status;
        }
        if (UNLIKELY(draining(l))) { /* in this process, at once */
            *request = r;
            return run_here(l, r, op, &a);
        }
        status = submit(l, r, &a, &w, &told, sharing);
        int class = dp_status_class(status);
        if (LIKELY(status == DP_OK) || !rfaas_api_fails_over(l) || (told && rfaas_api_init_failed()) ||
            (class != RFAAS_CLASS_LEASE && class != RFAAS_CLASS_CONNECTION))
            break;
    }
    if (UNLIKELY(status != DP_OK)) {
        give_request(l, r);
        if (status == DP_BUSY)
            fail_busy(l, p);
        else if (status == DP_TOO_LARGE)
            rfaas_api_too_large(l, op, fn, in_size, capacity);
        else if (!told)
            status = rfaas_api_explain(l, op, fn, w, status, RFAAS_NOT_STARTED);
        return status;
    }
    *request = r;
    return RFAAS_OK;
}

static __attribute__((noinline)) int start_shared(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn,
                                                  const void *in, uint32_t in_size, void *out, size_t capacity,
                                                  rfaas_request_slot **request) {
    return start(l, op, p, fn, in, in_size, out, capacity, NULL, request, true);
}

int rfaas_api_start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size,
                    void *out, size_t capacity, rfaas_request_slot **request) {
    if (UNLIKELY(shared(l)))
        return start_shared(l, op, p, fn, in, in_size, out, capacity, request);
    return start(l, op, p, fn, in, in_size, out, capacity, NULL, request, false);
}

int rfaas_api_start_pieces(rfaas_lease *l, const char *op, const call_args *a, rfaas_request_slot **request) {
    return start(l, op, a->p, a->fn, NULL, a->in_size, NULL, a->room, a->pieces, request, shared(l));
}

/* wait_ns: as for rfaas_api_iinvoke_for; 0 for rfaas_iinvoke. */
static ALWAYS_INLINE int iinvoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                                 const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request) {
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, "iinvoke");
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "iinvoke: request is NULL");
    call_plan p = {.worker = RFAAS_ANY_WORKER, .wait_until = wait_ns ? dp_now_ns() + wait_ns : 0};
    int st;
    if (UNLIKELY(!enter(l))) {
        call_plan early = {.deadline = rfaas_api_deadline_of(options), .wait_until = p.wait_until};
        if ((st = rfaas_api_join(l, "iinvoke", start_deadline(&early))))
            return st;
    }
    if (UNLIKELY(draining(l) || fn >= l->n_functions || (!in && in_size) || (!out && capacity)) &&
        (st = rfaas_api_bad_call(l, "iinvoke", fn, in, in_size, out, capacity)))
        return leave(l, st);
    if (UNLIKELY(options != NULL) && (st = rfaas_api_plan_options(l, "iinvoke", options, &p)))
        return leave(l, st);
    if (UNLIKELY(in_size > UINT32_MAX))
        return leave(l, rfaas_api_too_large(l, "iinvoke", fn, in_size, capacity));
    if (UNLIKELY(options != NULL) && p.keep > capacity)
        return leave(l, rfaas_api_iinvoke_keeping(l, &(call_args){.p = &p, .fn = fn, .in = in, .in_size = (uint32_t)in_size, .out = out}, capacity, request));
    if (UNLIKELY(p.in_place) && (st = rfaas_api_plan_in_place(l, "iinvoke", fn, &p, in, in_size, out, capacity)))
        return leave(l, st);
    rfaas_request_slot *r;
    int status = rfaas_api_start(l, "iinvoke", &p, fn, in, (uint32_t)in_size, out, capacity, &r);
    if (LIKELY(status == RFAAS_OK))
        *request = r->id;
    return leave(l, status);
}

int rfaas_iinvoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                  const rfaas_call_options *options, rfaas_request *request) {
    return iinvoke(l, fn, in, in_size, out, capacity, options, 0, request);
}

int rfaas_api_iinvoke_for(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                          const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request) {
    return iinvoke(l, fn, in, in_size, out, capacity, options, wait_ns, request);
}

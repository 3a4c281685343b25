/* Requests: calls that the program does not wait for at once. This is the hot path, as invoke.c is. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* the hot path, of two callers */

/* Fields that a thread may read without the unit of the request's worker. A thread that reads a state also sees its worker. */
static inline uint8_t state_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->state, __ATOMIC_ACQUIRE); }
static inline void set_state(rfaas_request_slot *r, rfaas_request_state state) {
    __atomic_store_n(&r->state, (uint8_t)state, __ATOMIC_RELEASE);
}
static inline uint64_t id_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->id, __ATOMIC_RELAXED); }
static inline void set_id(rfaas_request_slot *r, uint64_t id) { __atomic_store_n(&r->id, id, __ATOMIC_RELAXED); }
static inline uint32_t worker_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->worker, __ATOMIC_RELAXED); }
static inline void set_worker(rfaas_request_slot *r, uint32_t worker) { __atomic_store_n(&r->worker, worker, __ATOMIC_RELAXED); }
static inline uint32_t used(const rfaas_lease *l) { return __atomic_load_n(&l->requests_used, __ATOMIC_RELAXED); }

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

static ALWAYS_INLINE void put_free(rfaas_lease *l, rfaas_request_slot *r) {
    set_id(r, 0);
    set_state(r, RFAAS_REQ_FREE);
    r->next_free = l->requests_free;
    l->requests_free = (uint32_t)(r - l->requests) + 1;
}

static __attribute__((noinline)) rfaas_request_slot *take_shared(rfaas_lease *l) {
    pthread_mutex_lock(&l->table_mu);
    rfaas_request_slot *r = take_free(l);
    pthread_mutex_unlock(&l->table_mu);
    return r;
}

static __attribute__((noinline)) void put_shared(rfaas_lease *l, rfaas_request_slot *r) {
    pthread_mutex_lock(&l->table_mu);
    put_free(l, r);
    pthread_mutex_unlock(&l->table_mu);
    dp_event_signal(&l->freed);
}

bool rfaas_api_requests_full(rfaas_lease *l) {
    pthread_mutex_lock(&l->table_mu);
    bool full = !l->requests_free && l->requests_used == l->n_workers * l->cfg.depth;
    pthread_mutex_unlock(&l->table_mu);
    return full;
}

static inline void give_request(rfaas_lease *l, rfaas_request_slot *r) {
    free(r->text);
    r->text = NULL;
    if (LIKELY(!shared(l)))
        put_free(l, r);
    else
        put_shared(l, r);
}

int rfaas_api_bad_request(rfaas_request id, const char *op) {
    return rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx has ended already or never was one", op,
                          (unsigned long long)id);
}

/* Finds a request's lease and slot, and enters the lease. Sets the error if it fails. */
static inline int enter_for(rfaas_request id, const char *op, rfaas_lease **lease, rfaas_request_slot **request) {
    rfaas_lease *l = rfaas_api_lease_at(id & (RFAAS_LEASES_MAX - 1));
    uint32_t i = id >> RFAAS_REQ_LEASE_BITS & ((1u << RFAAS_REQ_INDEX_BITS) - 1);
    int status = RFAAS_OK;
    if (UNLIKELY(!usable(l)) || (UNLIKELY(!enter(l)) && (status = rfaas_api_join(l, op, 0)))) {
        if (status && status != RFAAS_INVALID)
            return status;
        if (__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) != RFAAS_STATE_UP)
            return rfaas_api_bad_lease(NULL, op);
        return rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx: its lease was released", op,
                              (unsigned long long)id);
    }
    if (UNLIKELY(i >= used(l) || id_of(&l->requests[i]) != id))
        return leave(l, rfaas_api_bad_request(id, op));
    *lease = l;
    *request = &l->requests[i];
    return RFAAS_OK;
}

/* Takes the outcome of an ended call from its channel. */
void rfaas_api_collect(rfaas_lease *l, rfaas_request_slot *r) {
    dp_started started = DP_NOT_STARTED;
    dp_channel *ch = l->workers[r->worker].ch;
    const void *res;
    if (UNLIKELY(dp_channel_result(ch, r->slot, &res, &r->size, &started) == DP_FUNCTION_FAILED)) {
        rfaas_api_keep_message(l, r->function, r->worker, res, r->size);
        r->text = strdup(rfaas_last_error());
    }
    r->status = dp_channel_finish(ch, r->slot, r->out, &r->size, &started);
    r->started = (uint8_t)started;
    set_state(r, RFAAS_REQ_ENDED);
    add_in_flight(l, r->worker, UINT32_MAX);
}

void rfaas_api_abandon(rfaas_lease *l, rfaas_request_slot *r, int status) {
    dp_channel_abandon(l->workers[r->worker].ch, r->slot);
    r->status = status;
    r->size = 0;
    r->started = RFAAS_MAYBE_EXECUTED;
    set_state(r, RFAAS_REQ_ENDED);
    add_in_flight(l, r->worker, UINT32_MAX);
}

static void settle(rfaas_lease *l, rfaas_request_slot *r, uint32_t worker) {
    if (state_of(r) == RFAAS_REQ_ENDED) /* another thread has collected it */
        ;
    else if (dp_channel_test(l->workers[worker].ch, r->slot) == 0)
        rfaas_api_abandon(l, r, DP_CONNECTION); /* a channel that works after all: the caller is about to reset it */
    else
        rfaas_api_collect(l, r);
    if (r->status != DP_OK && r->status != DP_RESULT_TOO_LARGE && !r->text) {
        const char *op = r == l->workers[worker].invoked ? "invoke" : "wait";
        r->status = rfaas_api_explain(l, op, r->function, worker, r->status, r->started);
        r->text = strdup(rfaas_last_error());
    }
}

void rfaas_api_settle(rfaas_lease *l, uint32_t worker) {
    rfaas_request_slot *r = l->workers[worker].invoked;
    if (r)
        settle(l, r, worker);
    for (uint32_t i = 0; i < used(l) && (l->workers[worker].in_flight || shared(l)); i++) {
        r = &l->requests[i];
        rfaas_request_state state = state_of(r);
        if ((state == RFAAS_REQ_FLYING || (state == RFAAS_REQ_ENDED && shared(l) && id_of(r))) && worker_of(r) == worker)
            settle(l, r, worker);
    }
}

static inline bool collect_ended(rfaas_lease *l, rfaas_request_slot *r) {
    bool ended = dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID;
    if (ended)
        rfaas_api_collect(l, r);
    return ended;
}

bool rfaas_api_collect_ended(rfaas_lease *l) {
    bool any = false;
    for (uint32_t i = 0; i < l->requests_used; i++)
        if (l->requests[i].state == RFAAS_REQ_FLYING)
            any |= collect_ended(l, &l->requests[i]);
    return any;
}

void rfaas_api_collect_ended_of(rfaas_lease *l, uint32_t worker) {
    for (uint32_t i = 0; i < used(l) && l->workers[worker].in_flight; i++)
        if (state_of(&l->requests[i]) == RFAAS_REQ_FLYING && worker_of(&l->requests[i]) == worker)
            collect_ended(l, &l->requests[i]);
}

static void drain(rfaas_lease *l, rfaas_request_slot *r) {
    if (state_of(r) != RFAAS_REQ_FLYING)
        return;
    if (dp_channel_wait(l->workers[r->worker].ch, r->slot, r->deadline) == DP_OK)
        rfaas_api_collect(l, r);
    else
        rfaas_api_abandon(l, r, DP_DEADLINE);
}

void rfaas_api_drain(rfaas_lease *l) {
    for (uint32_t i = 0; i < l->n_workers; i++)
        if (l->workers[i].invoked)
            drain(l, l->workers[i].invoked);
    for (uint32_t i = 0; i < l->requests_used; i++)
        drain(l, &l->requests[i]);
}

/* Sets this thread's error from an ended request, and repeats the call if it may be repeated. */
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
        status = rfaas_api_repeat(l, &p, r->worker, rfaas_api_grant_key(l), status, r->function, r->in, r->in_size, r->out, r->capacity, &r->size);
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

static __attribute__((noinline)) bool ended_shared(rfaas_lease *l, rfaas_request_slot *r) {
    bool done = id_of(r) == 0; /* ours already */
    if (!done && rfaas_api_look(l, r, id_of(r), "wait", &done)) {
        r->status = RFAAS_LEASE_ENDED; /* the lease is being released */
        r->started = RFAAS_MAYBE_EXECUTED;
        r->text = strdup(rfaas_last_error());
        return true;
    }
    return done;
}

bool rfaas_api_ended(rfaas_lease *l, rfaas_request_slot *r, int64_t now) {
    if (UNLIKELY(shared(l)))
        return ended_shared(l, r);
    if (r->state == RFAAS_REQ_ENDED)
        return true;
    if (dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID)
        rfaas_api_collect(l, r);
    else if (r->deadline && now >= r->deadline)
        rfaas_api_abandon(l, r, DP_DEADLINE);
    else
        return false;
    return true;
}

void rfaas_api_drop_request(rfaas_lease *l, rfaas_request_slot *r) {
    if (UNLIKELY(shared(l))) {
        if (id_of(r) && rfaas_api_give_up_shared(l, r, id_of(r), "cancel"))
            return; /* the lease is being released, and its requests with it */
    } else if (r->state == RFAAS_REQ_FLYING) {
        rfaas_api_abandon(l, r, DP_CANCELLED);
    }
    give_request(l, r);
}

/* The arguments of a call. */
typedef struct call_args {
    const call_plan *p;
    rfaas_function fn;
    const void *in;
    uint32_t in_size;
    void *out;
    uint32_t room;
} call_args;

/* The call is under way on the worker. */
static ALWAYS_INLINE void note_flying(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w) {
    add_in_flight(l, w, 1);
    r->out = a->out;
    r->capacity = a->room;
    set_worker(r, w);
    r->function = a->fn;
    r->deadline = attempt_deadline(a->p);
    r->repeats = a->p->repeats;
    if (UNLIKELY(a->p->repeats)) {
        r->in = a->in;
        r->in_size = a->in_size;
        r->last = a->p->deadline;
        r->attempt = a->p->attempt;
        r->chosen = a->p->worker;
    }
    set_state(r, RFAAS_REQ_FLYING);
}

static ALWAYS_INLINE int submit_to(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t w) {
    return dp_channel_submit(l->workers[w].ch, a->fn, a->in, a->in_size, buffer_of(l, a->in, a->in_size), a->room, &r->slot);
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
    if (UNLIKELY(leaving(l))) { /* the drain began after this thread entered */
        *told = true;
        status = rfaas_api_bad_call(l, "iinvoke", a->fn, NULL, 0, NULL, 0);
        if (!status)
            status = rfaas_api_fail(RFAAS_LEASE_ENDED, RFAAS_NOT_STARTED, "iinvoke: the node leaves");
    } else {
        status = submit_one(l, r, a, w, last, told);
        if (status && status != DP_BUSY && status != DP_TOO_LARGE && !*told) {
            status = rfaas_api_explain(l, "iinvoke", a->fn, w, status, RFAAS_NOT_STARTED);
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
        if ((idle && in_flight(l, w)) || !dp_turns_try(l->turns, DP_TURN_BRIEF, unit_of(w)))
            continue;
        bool good = !(idle && in_flight(l, w)) && !leaving(l) && submit_to(l, r, a, w) == DP_OK;
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

/* Gives a request to a worker without calls in flight. False: there is none, or it is dead. */
static __attribute__((noinline)) bool submit_idle(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t from) {
    for (uint32_t i = 0; i < l->n_workers; i++) { /* other threads may be quicker */
        if (submit_aside(l, r, a, from, true))
            return true;
        uint32_t unit, w = least_loaded(l, from);
        if (in_flight(l, w) || dp_turns_take(l->turns, DP_TURN_BRIEF, unit_of(w), false, start_deadline(a->p), &unit))
            return false;
        bool idle = !in_flight(l, w), good = idle && !leaving(l) && submit_to(l, r, a, w) == DP_OK;
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

/* Submits a request to the first worker that takes it, *at. *told: the error's text is set. */
static ALWAYS_INLINE int submit(rfaas_lease *l, rfaas_request_slot *r, const call_args *a, uint32_t *at, bool *told, bool sharing) {
    bool any = a->p->worker == RFAAS_ANY_WORKER;
    uint32_t w = any ? least_loaded(l, __atomic_load_n(&l->next_worker, __ATOMIC_RELAXED)) : (uint32_t)a->p->worker;
    uint32_t tries = any ? l->n_workers : 1;
    int status = DP_BUSY;
    bool full = false; /* one works and has no free slot */
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
    set_worker(r, 0);
    r->function = fn;
    r->repeats = 0;
    r->deadline = 0;
    set_state(r, RFAAS_REQ_ENDED);
    return RFAAS_OK;
}

/* rfaas_api_start; the arguments of an owner's call stay in registers. */
static ALWAYS_INLINE int start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in,
                               uint32_t in_size, void *out, size_t capacity, rfaas_request_slot **request, bool sharing) {
    rfaas_request_slot *r = sharing ? take_shared(l) : take_free(l);
    if (UNLIKELY(!r))
        return rfaas_api_fail_const(RFAAS_BUSY, "every worker has `depth` requests in flight or unwaited for; finish one and "
                                                "try again");
    uint32_t w = 0;
    call_args a = {.p = p, .fn = fn, .in = in, .in_size = in_size, .out = out, .room = cut_capacity(l, capacity)};
    bool told = false;
    int status = RFAAS_OK;
    for (int moves = 0; moves < 2; moves++) {
        uint64_t key = sharing && l->options.flags & (RFAAS_LEASE_FAILOVER | RFAAS_LEASE_LOCAL) ? rfaas_api_grant_key(l) : 0;
        if (UNLIKELY((leaving(l) || moves) && (status = rfaas_api_move_shared(l, op, key, start_deadline(p))))) {
            give_request(l, r);
            return status;
        }
        if (UNLIKELY(leaving(l))) { /* in this process, at once */
            *request = r;
            return run_here(l, r, op, fn, in, in_size, out, a.room);
        }
        status = submit(l, r, &a, &w, &told, sharing);
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
    *request = r;
    return RFAAS_OK;
}

static __attribute__((noinline)) int start_shared(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn,
                                                  const void *in, uint32_t in_size, void *out, size_t capacity,
                                                  rfaas_request_slot **request) {
    return start(l, op, p, fn, in, in_size, out, capacity, request, true);
}

int rfaas_api_start(rfaas_lease *l, const char *op, const call_plan *p, rfaas_function fn, const void *in, uint32_t in_size,
                    void *out, size_t capacity, rfaas_request_slot **request) {
    if (UNLIKELY(shared(l)))
        return start_shared(l, op, p, fn, in, in_size, out, capacity, request);
    return start(l, op, p, fn, in, in_size, out, capacity, request, false);
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
    if (UNLIKELY(leaving(l) || fn >= l->n_functions || (!in && in_size) || (!out && capacity)) &&
        (st = rfaas_api_bad_call(l, "iinvoke", fn, in, in_size, out, capacity)))
        return leave(l, st);
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

int rfaas_iinvoke(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                  const rfaas_call_options *options, rfaas_request *request) {
    return iinvoke(l, fn, in, in_size, out, capacity, options, 0, request);
}

int rfaas_api_iinvoke_for(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                          const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request) {
    return iinvoke(l, fn, in, in_size, out, capacity, options, wait_ns, request);
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
    rfaas_request_slot *r;
    int status = enter_for(*request, "wait", &l, &r);
    if (UNLIKELY(status))
        return status;
    if (UNLIKELY(shared(l))) {
        if ((status = rfaas_api_await(l, r, *request, "wait", false)))
            return leave(l, status);
    } else if (r->state == RFAAS_REQ_FLYING) {
        do
            status = dp_channel_wait_turn(l->workers[r->worker].ch, r->slot, r->deadline, false);
        while (UNLIKELY(status == DP_YIELD) && !rfaas_api_share(l, unit_of(r->worker), DP_TURN_LONG));
        if (LIKELY(status == DP_OK))
            rfaas_api_collect(l, r);
        else if (status != DP_YIELD)
            rfaas_api_abandon(l, r, DP_DEADLINE);
        else if ((status = rfaas_api_await(l, r, *request, "wait", true))) /* the lease is shared now */
            return leave(l, status);
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
    rfaas_request_slot *r;
    int status = enter_for(*request, "test", &l, &r);
    if (UNLIKELY(status))
        return status;
    if (UNLIKELY(shared(l))) {
        bool over;
        status = rfaas_api_look(l, r, *request, "test", &over);
        if (status || !over) {
            *done = 0;
            return leave(l, status);
        }
    } else if (r->state == RFAAS_REQ_FLYING) {
        if (dp_channel_test(l->workers[r->worker].ch, r->slot))
            rfaas_api_collect(l, r);
        else if (r->deadline && dp_now_ns() >= r->deadline)
            rfaas_api_abandon(l, r, DP_DEADLINE);
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
    rfaas_request_slot *r;
    int status = enter_for(*request, "cancel", &l, &r);
    if (UNLIKELY(status))
        return status;
    if (UNLIKELY(shared(l)))
        status = rfaas_api_give_up_shared(l, r, *request, "cancel");
    else if (r->state == RFAAS_REQ_FLYING)
        rfaas_api_abandon(l, r, DP_CANCELLED);
    if (UNLIKELY(status))
        return leave(l, status);
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

/* Where this thread's next rfaas_waitany begins its search. */
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
        rfaas_request_slot *r;
        if (UNLIKELY(*status = enter_for(requests[i], "waitany", &l, &r))) {
            *index = i;
            return 1;
        }
        if (UNLIKELY(shared(l))) {
            bool over;
            *status = rfaas_api_look(l, r, requests[i], "waitany", &over);
            if (*status || over) {
                if (!*status)
                    *status = report(l, r, "waitany", &requests[i], out_size);
                leave(l, 0);
                *index = i;
                any_from = i + 1;
                return 1;
            }
        } else {
            if (r->deadline && !now)
                now = dp_now_ns();
            if (rfaas_api_ended(l, r, now)) {
                *status = report(l, r, "waitany", &requests[i], out_size);
                *index = i;
                leave(l, 0);
                any_from = i + 1;
                return 1;
            }
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

/* until: CLOCK_MONOTONIC ns, 0: for ever. */
static int wait_any(size_t count, rfaas_request requests[], int64_t until, size_t *index, size_t *out_size) {
    if (UNLIKELY(!index || (!requests && count)))
        return rfaas_api_fail(RFAAS_INVALID, 0, "waitany: %s is NULL", index ? "requests" : "index");
    *index = RFAAS_UNDEFINED;
    if (out_size)
        *out_size = 0;
    int64_t slice = SLICE_MIN_NS;
    for (size_t turn = 0;; turn++) {
        rfaas_lease *l;
        size_t others, i = count ? turn % count : 0;
        int64_t deadline;
        int status;
        if (look_at_all(count, requests, index, out_size, &status, &l, &others, &deadline))
            return status;
        if (!l || (until && dp_now_ns() >= until))
            return RFAAS_OK; /* null requests only, or late */
        if (until && (!deadline || until < deadline))
            deadline = until;
        while (requests[i] == RFAAS_REQUEST_NULL)
            i = i + 1 == count ? 0 : i + 1;
        if (UNLIKELY(others || (count > 1 && __atomic_load_n(&l->shared, __ATOMIC_RELAXED)))) {
            /* Each lease has queues of its own to sleep on, and of a shared one this thread may use one: a while on one, then on
             * the next. */
            int64_t soon = dp_now_ns() + slice;
            if (!deadline || soon < deadline)
                deadline = soon;
            slice = slice * 2 < SLICE_MAX_NS ? slice * 2 : SLICE_MAX_NS;
        }
        rfaas_request_slot *r;
        if (UNLIKELY(enter_for(requests[i], "waitany", &l, &r)))
            continue; /* the next look says so */
        if (UNLIKELY(shared(l)))
            rfaas_api_wait_a_while(l, r, deadline);
        else if (dp_endpoint_wait_turn(l->grant->ep, deadline) == DP_YIELD)
            rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF);
        leave(l, 0);
    }
}

int rfaas_waitany(size_t count, rfaas_request requests[], size_t *index, size_t *out_size) {
    return wait_any(count, requests, 0, index, out_size);
}

int rfaas_waitany_for(size_t count, rfaas_request requests[], int64_t timeout_ns, size_t *index, size_t *out_size) {
    int64_t now = dp_now_ns();
    return wait_any(count, requests, timeout_ns < 0 ? now : timeout_ns > INT64_MAX - now ? 0 : now + timeout_ns, index, out_size);
}

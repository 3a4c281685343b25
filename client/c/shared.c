/* Calls in a lease that several threads use (threads.c). A thread that starts a call, tests a request or waits for one holds the
 * unit of its worker's lane. While it waits for a reply, it puts the unit down as soon as another thread wants it for a short
 * operation, and after a time slice if another thread waits for a reply on the same lane. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

/* The time slice for which a thread waits with a unit that other waiting threads want. It doubles from MIN to MAX. */
#define SLICE_MIN_NS 50000
#define SLICE_MAX_NS 1000000
#define REPAIR_NS 2000000 /* how long to hold a unit while its worker is being replaced */

/* The unit of this thread's last call, whose cache lines are in this processor's cache. */
static _Thread_local uint32_t warm;

static int fail_released(const char *op, int started) {
    return rfaas_api_fail(RFAAS_LEASE_ENDED, started, "%s: the lease was released by another thread", op);
}

uint64_t rfaas_api_grant_key(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    uint64_t key = l->grant ? l->grant->key : 0;
    pthread_mutex_unlock(&l->mu);
    return key;
}

int rfaas_api_move_shared(rfaas_lease *l, const char *op, uint64_t key, const call_plan *p) {
    if (!shared(l))
        return rfaas_api_move(l, op, p);
    int status = rfaas_api_take_all(l, op, start_deadline(p));
    if (status)
        return status;
    if (l->grant->key == key)
        status = rfaas_api_move(l, op, p);
    rfaas_api_put_all(l);
    return status;
}

/* ---- a call that is under way ---- */

/* Makes the error text of an ended request that this thread has taken, before its worker can be replaced. */
static void explain(rfaas_lease *l, rfaas_request_slot *r, const char *op) {
    if (LIKELY(r->status == DP_OK) || r->text || r->status == DP_RESULT_TOO_LARGE)
        return;
    if (r->status == DP_LEASE_ENDED && dp_turns_closed(l->turns))
        fail_released(op, r->started);
    else
        r->status = rfaas_api_explain(l, op, r->function, r->worker, r->status, r->started);
    rfaas_api_keep_error(r);
}

/* Collects or gives up a request, if it is time for either, and reports whether it has ended. The thread holds its unit. */
static bool ended(rfaas_lease *l, rfaas_request_slot *r, bool late) {
    if (r->state == RFAAS_REQ_ENDED)
        return true;
    if (dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID)
        rfaas_api_collect(l, r);
    else if (dp_turns_closed(l->turns))
        rfaas_api_abandon(l, r, DP_LEASE_ENDED);
    else if (late || (due_of(l, r) && dp_now_ns() >= due_of(l, r)))
        rfaas_api_abandon(l, r, DP_DEADLINE);
    else
        return false;
    return true;
}

static bool mine(const rfaas_request_slot *r, rfaas_request id) { return __atomic_load_n(&r->id, __ATOMIC_RELAXED) == id; }

/* Waits until the request has ended. Returns with its unit held. Returns false if another thread has ended the request, or if the
 * lease is released; then it sets *released and holds no unit. */
static bool wait_for(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, bool claimed, bool held, bool *released) {
    uint32_t unit = unit_of(__atomic_load_n(&r->worker, __ATOMIC_RELAXED)), same;
    int64_t deadline = r->deadline, slice = SLICE_MIN_NS;
    dp_turn_kind kind = claimed ? DP_TURN_CLAIMED : DP_TURN_LONG;
    bool late = false;
    for (;; held = false) {
        int st = held ? DP_OK : dp_turns_take(l->turns, kind, unit, false, deadline, &same);
        if (st == DP_DEADLINE) { /* the call is given up, which is a short operation */
            late = true;
            st = dp_turns_take(l->turns, claimed ? DP_TURN_CLAIMED : DP_TURN_BRIEF, unit, false, 0, &same);
        }
        if (st) {
            *released = true;
            return false;
        }
        for (bool put_down = false; !put_down;) {
            if (!mine(r, id))
                return false;
            if (ended(l, r, late))
                return true;
            bool others = dp_turns_others(l->turns, unit);
            int64_t due = due_of(l, r), until = others ? dp_now_ns() + slice : due;
            if (due && due < until)
                until = due;
            put_down = dp_turns_brief(l->turns, unit);
            if (put_down)
                continue;
            st = dp_channel_wait_turn(l->workers[r->worker].ch, r->slot, until, others);
            put_down = others && st != DP_OK;
            if (st == DP_DEADLINE && slice < SLICE_MAX_NS)
                slice *= 2;
        }
        if (ended(l, r, late))
            return true;
        dp_turns_put_down(l->turns, unit);
    }
}

int rfaas_api_await(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool held) {
    bool released = false;
    uint32_t unit = unit_of(__atomic_load_n(&r->worker, __ATOMIC_RELAXED));
    if (!wait_for(l, r, id, false, held, &released)) {
        if (released)
            return fail_released(op, RFAAS_MAYBE_EXECUTED);
        dp_turns_put_down(l->turns, unit);
        return rfaas_api_bad_request(id, op);
    }
    explain(l, r, op);
    __atomic_store_n(&r->id, 0, __ATOMIC_RELAXED);
    dp_turns_put_down(l->turns, unit);
    return RFAAS_OK;
}

int rfaas_api_look(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op, bool *done, int64_t *due) {
    uint32_t unit = unit_of(__atomic_load_n(&r->worker, __ATOMIC_RELAXED)), same;
    *done = false;
    *due = r->deadline;
    /* A thread that holds the unit for longer is replacing the worker. */
    int st = dp_turns_take(l->turns, DP_TURN_BRIEF, unit, false, dp_now_ns() + SLICE_MAX_NS, &same);
    if (st == DP_DEADLINE) {
        set_told(r, false); /* it may have ended */
        return RFAAS_OK;
    }
    if (st)
        return fail_released(op, RFAAS_MAYBE_EXECUTED);
    int status = RFAAS_OK;
    if (!mine(r, id)) {
        status = rfaas_api_bad_request(id, op);
    } else {
        if (r->state == RFAAS_REQ_FLYING)
            dp_channel_look(l->workers[r->worker].ch);
        if ((*done = ended(l, r, false))) {
            explain(l, r, op);
            __atomic_store_n(&r->id, 0, __ATOMIC_RELAXED);
        } else {
            *due = due_of(l, r);
        }
    }
    dp_turns_put_down(l->turns, unit);
    return status;
}

void rfaas_api_wait_a_while(rfaas_lease *l, const rfaas_request_slot *r, int64_t deadline) {
    rfaas_request id = __atomic_load_n(&r->id, __ATOMIC_RELAXED);
    uint32_t unit = unit_of(__atomic_load_n(&r->worker, __ATOMIC_RELAXED)), same;
    int64_t most = dp_now_ns() + SLICE_MAX_NS; /* because requests on other lanes may end first */
    if (!deadline || most < deadline)
        deadline = most;
    if (dp_turns_take(l->turns, DP_TURN_LONG, unit, false, deadline, &same))
        return;
    if (mine(r, id) && r->state == RFAAS_REQ_FLYING && !dp_turns_brief(l->turns, unit))
        dp_channel_wait_turn(l->workers[r->worker].ch, r->slot, deadline, true);
    dp_turns_put_down(l->turns, unit);
}

int rfaas_api_give_up_shared(rfaas_lease *l, rfaas_request_slot *r, rfaas_request id, const char *op) {
    uint32_t unit = unit_of(__atomic_load_n(&r->worker, __ATOMIC_RELAXED)), same;
    if (dp_turns_take(l->turns, DP_TURN_BRIEF, unit, false, 0, &same))
        return fail_released(op, RFAAS_MAYBE_EXECUTED);
    int status = mine(r, id) ? RFAAS_OK : rfaas_api_bad_request(id, op);
    if (!status) {
        if (r->state == RFAAS_REQ_FLYING)
            rfaas_api_abandon(l, r, DP_CANCELLED);
        __atomic_store_n(&r->id, 0, __ATOMIC_RELAXED);
    }
    dp_turns_put_down(l->turns, unit);
    return status;
}

/* ---- rfaas_invoke ---- */

/* Penalty in the choice of a worker: more than any number of requests, if the worker may run an overdue call. */
static uint32_t marked(const rfaas_lease *l, uint32_t w) { return __atomic_load_n(&l->workers[w].overdue, __ATOMIC_RELAXED) ? DP_DEPTH_MAX : 0; }

/* Returns the worker of a unit that has the fewest requests. */
static uint32_t worker_of(const rfaas_lease *l, uint32_t unit) {
    uint32_t best = unit;
    for (uint32_t w = unit + DP_LANES_MAX; w < l->n_workers; w += DP_LANES_MAX)
        if (in_flight(l, w) + marked(l, w) < in_flight(l, best) + marked(l, best))
            best = w;
    return best;
}

int rfaas_api_continue(rfaas_lease *l, const call_args *a, uint32_t worker, uint32_t slot, int64_t deadline, uint32_t *got) {
    bool released;
    rfaas_request_slot r = {.state = RFAAS_REQ_FLYING, .function = a->fn, .worker = worker, .slot = slot, .deadline = deadline, .kill = a->p->kill,
                            .result_in_place = a->p->result_in_place, .out = a->out, .pieces = a->pieces, .capacity = a->room};
    l->workers[worker].invoked = &r;
    add_in_flight(l, worker, 1);
    wait_for(l, &r, 0, true, true, &released); /* no other thread ends it or takes the unit away */
    explain(l, &r, "invoke");
    l->workers[worker].invoked = NULL;
    dp_turns_give(l->turns, unit_of(worker));
    *got = r.size;
    int status = r.status;
    if (r.text)
        status = rfaas_api_fail_code(status, r.started, r.code, "%s", r.text);
    free(r.text);
    return status;
}

/* Replaces the worker of a unit that this thread has claimed. Puts the unit down every REPAIR_NS, for other threads. */
static int replace(rfaas_lease *l, uint32_t w, int64_t deadline) {
    int64_t start = dp_now_ns(), until = start + l->session->timeout_ns;
    uint32_t unit = unit_of(w);
    bool cut = deadline && deadline < until;
    if (cut)
        until = deadline;
    for (;;) {
        int64_t now = dp_now_ns();
        int st = rfaas_api_repair(l, w, now + REPAIR_NS < until ? now + REPAIR_NS : until > now ? until : now + 1);
        if (st != RFAAS_DEADLINE)
            return st;
        if (dp_now_ns() >= until)
            return rfaas_api_fail(RFAAS_DEADLINE, 0, "replace worker %u: no new worker within %lld ms; the replacement continues", w,
                                  (long long)(dp_now_ns() - start) / 1000000);
        if (dp_turns_closed(l->turns))
            return fail_released("invoke", RFAAS_NOT_STARTED);
        dp_turns_put_down(l->turns, unit);
        dp_turns_take(l->turns, DP_TURN_CLAIMED, unit, false, 0, &unit);
        if (!l->workers[w].broken && !dp_channel_status(l->workers[w].ch))
            return RFAAS_OK; /* another thread has replaced it */
    }
}

static bool dead(const rfaas_lease *l, uint32_t w) { return l->workers[w].broken || dp_channel_status(l->workers[w].ch); }

/* Waits about a millisecond for one of the worker's requests to end. All its slots are taken. */
static int wait_for_slot(rfaas_lease *l, uint32_t w, int64_t deadline) {
    rfaas_api_collect_ended_of(l, w);
    dp_channel *ch = l->workers[w].ch;
    if (dp_channel_free_slots(ch))
        return RFAAS_OK;
    int64_t now = dp_now_ns(), until = now + SLICE_MAX_NS;
    if (deadline && now >= deadline)
        return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "invoke: no worker had a free slot until the deadline");
    if (!dp_turns_brief(l->turns, unit_of(w)))
        dp_channel_wait_some(ch, deadline && deadline < until ? deadline : until);
    rfaas_api_collect_ended_of(l, w);
    return RFAAS_OK;
}

/* Waits until a thread frees a request. */
static void await_request(rfaas_lease *l, int64_t until) {
    for (bool over = false; !over;) {
        uint32_t seen = dp_event_prepare(&l->freed);
        over = !rfaas_api_requests_full(l) || dp_turns_closed(l->turns) || dp_event_wait(&l->freed, seen, until) == DP_DEADLINE;
        dp_event_finish(&l->freed);
    }
}

/* Reports whether a living worker of the lane has a free slot. The thread holds the unit. */
static bool slot_on(rfaas_lease *l, uint32_t unit) {
    bool free = !l->grant->ep; /* calls run in this process */
    for (uint32_t w = unit; !free && w < l->n_workers; w += DP_LANES_MAX) {
        rfaas_api_collect_ended_of(l, w);
        free = !dead(l, w) && dp_channel_free_slots(l->workers[w].ch);
    }
    return free;
}

/* Waits until slot_on() is true, at most for SLICE_MAX_NS, because another lane may have a slot sooner. */
static void await_lane(rfaas_lease *l, uint32_t unit, int64_t until) {
    uint32_t same;
    until = rfaas_api_sooner(until, dp_now_ns(), SLICE_MAX_NS);
    if (dp_turns_take(l->turns, DP_TURN_LONG, unit, false, until, &same))
        return;
    for (int st = DP_YIELD; st == DP_YIELD && !slot_on(l, unit) && !dp_turns_brief(l->turns, unit);) {
        bool others = dp_turns_others(l->turns, unit);
        int64_t slice = dp_now_ns() + SLICE_MIN_NS;
        st = dp_channel_wait_some(l->workers[unit].ch, others && slice < until ? slice : until);
        if (others)
            break;
    }
    dp_turns_put_down(l->turns, unit);
}

void rfaas_api_await_slot(rfaas_lease *l, int32_t worker, uint32_t *turn, int64_t until) {
    if (!shared(l)) {
        if (!l->grant->ep)
            return; /* calls run in this process */
        if (rfaas_api_collect_ended(l))
            return; /* their slots are free now, and nothing else may end */
        uint32_t before = l->n_workers;
        if (rfaas_api_grows(l))
            rfaas_api_grow(l);
        if (l->n_workers > before)
            return; /* the new workers have free slots */
        if (rfaas_api_replacing(l) || rfaas_api_grows(l))
            until = rfaas_api_sooner(until, dp_now_ns(), RFAAS_REPLACED_NS);
        if (dp_endpoint_wait_turn(l->grant->ep, until) == DP_YIELD)
            rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF);
        if (!shared(l))
            rfaas_api_collect_ended(l);
    } else if (rfaas_api_requests_full(l)) {
        await_request(l, until);
    } else {
        await_lane(l, worker == RFAAS_ANY_WORKER ? (*turn)++ % dp_turns_count(l->turns) : unit_of((uint32_t)worker), until);
    }
}

void rfaas_api_enter_and_await_slot(rfaas_lease *l, int32_t worker, int64_t until) {
    static _Thread_local uint32_t turn;
    if (rfaas_api_enter(l, "wait for a slot"))
        return;
    if (!draining(l))
        rfaas_api_await_slot(l, worker, &turn, until);
    leave(l, RFAAS_OK);
}

int rfaas_api_invoke_shared(rfaas_lease *l, const call_args *a, uint32_t *got, uint32_t *at) {
    static const char op[] = "invoke";
    const call_plan *p = a->p;
    rfaas_function fn = a->fn;
    bool any = p->worker == RFAAS_ANY_WORKER;
    uint32_t from = any ? warm % dp_turns_count(l->turns) : unit_of((uint32_t)p->worker), unit, begun = 0, tries = 0, passed = 0;
    for (;;) {
        int st = dp_turns_take(l->turns, DP_TURN_CALL, from, any, p->deadline, &unit);
        if (UNLIKELY(st == DP_DEADLINE))
            return rfaas_api_fail(st, RFAAS_NOT_STARTED, "invoke %s: no worker was free until the deadline", function_name(l, fn));
        if (UNLIKELY(st))
            return fail_released(op, RFAAS_NOT_STARTED);
        uint32_t w = *at = any ? worker_of(l, unit) : (uint32_t)p->worker;
        if (UNLIKELY(marked(l, w)) && rfaas_api_overdue(l, w) && any && passed++ < dp_turns_count(l->turns)) {
            dp_turns_give(l->turns, unit); /* another worker may be free */
            from = unit + 1 >= dp_turns_count(l->turns) ? 0 : unit + 1;
            continue;
        }
        if (UNLIKELY(draining(l))) { /* the drain began after this thread entered */
            dp_turns_give(l->turns, unit);
            st = rfaas_api_bad_call(l, op, fn, NULL, 0, NULL, 0);
            return st ? st : rfaas_api_fail(RFAAS_LEASE_ENDED, RFAAS_NOT_STARTED, "invoke %s: the node is draining", function_name(l, fn));
        }
        if (UNLIKELY(dead(l, w))) {
            /* Starts the replacement of every dead worker before it waits for one, since another worker may be alive. */
            bool first = any && begun++ < dp_turns_count(l->turns);
            st = first ? rfaas_api_begin_repair(l, w) : replace(l, w, p->deadline);
            if (st) {
                dp_turns_give(l->turns, unit);
                if (!first || (st != RFAAS_BUSY && dp_status_class(st) == RFAAS_CLASS_LEASE) || st == RFAAS_DEADLINE)
                    return st;
                from = unit + 1 >= dp_turns_count(l->turns) ? 0 : unit + 1;
                continue;
            }
        }
        dp_channel *ch = l->workers[w].ch;
        if (UNLIKELY(dp_turns_others(l->turns, unit) || dp_turns_brief(l->turns, unit)))
            dp_channel_ask(ch); /* makes this thread's own wait yield */
        dp_started started = DP_NOT_STARTED;
        uint32_t slot;
        int64_t deadline = attempt_deadline(p);
        int status = call_turn(l, w, a, deadline, got, &started, &slot);
        if (LIKELY(status == DP_OK)) {
            warm = unit;
            dp_turns_give(l->turns, unit);
            return status;
        }
        if (status == DP_YIELD) {
            status = rfaas_api_continue(l, a, w, slot, deadline, got);
            if (status == DP_OK)
                warm = unit;
            return status;
        }
        if (status == DP_BUSY) {
            st = wait_for_slot(l, w, p->deadline);
            dp_turns_give(l->turns, unit);
            if (st)
                return st;
            from = any && unit + 1 < dp_turns_count(l->turns) ? unit + 1 : any ? 0 : from;
            continue;
        }
        if (next_attempt(status, started) && ++tries < 3 * dp_turns_count(l->turns)) { /* the channel broke when the call was posted */
            dp_turns_give(l->turns, unit);
            continue;
        }
        if (status == DP_FUNCTION_FAILED) {
            uint32_t size;
            const char *text = dp_channel_message(ch, &size);
            rfaas_api_keep_message(l, fn, w, text, size);
        } else if (status == DP_TOO_LARGE && started == DP_NOT_STARTED) {
            rfaas_api_too_large(l, op, fn, a->in_size, a->room);
        } else if (status == DP_LEASE_ENDED && dp_turns_closed(l->turns)) {
            status = fail_released(op, started);
        } else if (status != DP_RESULT_TOO_LARGE) {
            status = rfaas_api_explain(l, op, fn, w, status, started);
            if (p->kill && status == RFAAS_DEADLINE && started == DP_MAYBE_EXECUTED)
                status = rfaas_api_kill_late(l, fn, w, status, p->result_in_place);
        }
        dp_turns_give(l->turns, unit);
        return status;
    }
}

/* The end of a request: waiting for it, testing and cancelling it, and ending it when its worker dies. This is the hot path, as
 * invoke.c is. request_start.c starts requests, request_many.c waits for several. */
#include <string.h>

#include "request.h"

void rfaas_api_put_request(rfaas_lease *l, rfaas_request_slot *r) {
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

int rfaas_api_bad_request(rfaas_request id, const char *op) {
    return rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx has ended already or never was one", op,
                          (unsigned long long)id);
}

void rfaas_api_keep_error(rfaas_request_slot *r) {
    r->text = strdup(rfaas_last_error());
    r->code = rfaas_function_code();
}

/* Takes the outcome of an ended call from its channel. */
void rfaas_api_collect(rfaas_lease *l, rfaas_request_slot *r) {
    dp_started started = DP_NOT_STARTED;
    dp_channel *ch = l->workers[r->worker].ch;
    const void *res;
    if (UNLIKELY(dp_channel_result(ch, r->slot, &res, &r->size, &started) == DP_FUNCTION_FAILED)) {
        rfaas_api_keep_message(l, r->function, r->worker, res, r->size);
        rfaas_api_keep_error(r);
    }
    r->status = finish_call(ch, r->slot, r->out, r->pieces, &r->size, &started);
    r->started = (uint8_t)started;
    set_state(r, RFAAS_REQ_ENDED);
    add_in_flight(l, r->worker, UINT32_MAX);
}

void rfaas_api_abandon(rfaas_lease *l, rfaas_request_slot *r, int status) {
    dp_channel *ch = l->workers[r->worker].ch;
    dp_started started = DP_MAYBE_EXECUTED;
    if (status == DP_DEADLINE) {
        started = dp_channel_overdue(ch, r->slot);
        if (started == DP_MAYBE_EXECUTED)
            rfaas_api_note_overdue(l, r->worker);
    } else {
        dp_channel_abandon(ch, r->slot);
    }
    r->status = status;
    r->size = 0;
    r->started = (uint8_t)started;
    set_state(r, RFAAS_REQ_ENDED);
    add_in_flight(l, r->worker, UINT32_MAX);
    if (UNLIKELY(r->kill) && status == DP_DEADLINE && started == DP_MAYBE_EXECUTED) {
        rfaas_api_explain(l, r == l->workers[r->worker].invoked ? "invoke" : "wait", r->function, r->worker, status, r->started);
        rfaas_api_kill_late(l, r->function, r->worker, status, r->result_in_place);
        free(r->text); /* of a shared lease: the replacement has settled this request, too, with an earlier text */
        rfaas_api_keep_error(r);
    }
}

static void settle(rfaas_lease *l, rfaas_request_slot *r, uint32_t worker) {
    if (state_of(r) == RFAAS_REQ_ENDED) /* another thread has collected it */
        ;
    else if (dp_channel_test(l->workers[worker].ch, r->slot) == 0)
        rfaas_api_abandon(l, r, DP_CONNECTION); /* the channel still works, but the caller is about to reset it */
    else
        rfaas_api_collect(l, r);
    if (r->status != DP_OK && r->status != DP_RESULT_TOO_LARGE && !r->text) {
        const char *op = r == l->workers[worker].invoked ? "invoke" : "wait";
        r->status = rfaas_api_explain(l, op, r->function, worker, r->status, r->started);
        rfaas_api_keep_error(r);
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
        rfaas_api_fail_code(status, r->started, r->code, "%s", r->text);
    else if (status == DP_RESULT_TOO_LARGE)
        rfaas_api_result_too_large(l, op, r->function, r->size, r->capacity, r->pieces);
    else
        status = rfaas_api_explain(l, op, r->function, r->worker, status, r->started);
    if (r->repeats && status != DP_RESULT_TOO_LARGE) {
        call_plan p = {.worker = r->chosen, .repeats = r->repeats, .deadline = r->last, .attempt = r->attempt, .kill = r->kill,
                       .in_place = r->in_place, .result_in_place = r->result_in_place};
        call_args a = {.p = &p, .fn = r->function, .in = r->in, .in_size = r->in_size, .out = r->out, .room = r->capacity, .pieces = r->pieces};
        status = rfaas_api_repeat(l, &a, r->worker, rfaas_api_grant_key(l), status, &r->size);
    }
    return status;
}

/* Reports an ended request and frees its slot. */
int rfaas_api_report(rfaas_lease *l, rfaas_request_slot *r, const char *op, size_t *out_size) {
    if (LIKELY(!r->here))
        note_worker(r->worker);
    else
        note_no_worker();
    int status = LIKELY(r->status == DP_OK) ? DP_OK : ended_badly(l, r, op);
    if (UNLIKELY(r->pieces != NULL) && status == DP_OK)
        status = rfaas_api_keep(l, op, r->function, r->pieces, r->size);
    else if (UNLIKELY(status == DP_RESULT_TOO_LARGE))
        rfaas_api_forget_kept();
    if (out_size && (LIKELY(status == DP_OK) || status == DP_RESULT_TOO_LARGE))
        *out_size = r->size;
    give_request(l, r);
    return status;
}

static __attribute__((noinline)) bool ended_shared(rfaas_lease *l, rfaas_request_slot *r) {
    bool done = id_of(r) == 0; /* ours already */
    int64_t due;
    if (!done && rfaas_api_look(l, r, id_of(r), "wait", &done, &due)) {
        r->status = RFAAS_LEASE_ENDED; /* the lease is being released */
        r->started = RFAAS_MAYBE_EXECUTED;
        rfaas_api_keep_error(r);
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
    else if (due_of(l, r) && (now ? now : dp_now_ns()) >= due_of(l, r))
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
        int64_t due;
        status = rfaas_api_look(l, r, *request, "test", &over, &due);
        if (status || !over) {
            *done = 0;
            return leave(l, status);
        }
    } else if (r->state == RFAAS_REQ_FLYING) {
        if (dp_channel_test(l->workers[r->worker].ch, r->slot))
            rfaas_api_collect(l, r);
        else if (due_of(l, r) && dp_now_ns() >= due_of(l, r))
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

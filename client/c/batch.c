/* Batches: calls that a binding submits and waits for in one crossing into C. A map (map.c) is similar, but the calls of a batch have
 * payloads, results and outcomes of their own. */
#include <string.h>

#include "request.h"
#include "shim.h"

typedef struct batch {
    rfaas_lease *l;
    rfaas_batch *b;
    rfaas_batch_call *calls;
    uint32_t *flying; /* the calls in flight, in the order of their submission: b->n_flying indices from b->flying on */
    call_plan plan;
    int64_t due;   /* when the first of the calls in flight is given up; 0: never */
    uint32_t turn; /* of a shared lease: selects the call or lane to wait for next */
} batch;

static const char op[] = "invoke";

static void end_call(batch *t, rfaas_batch_call *c, int status, size_t size) {
    c->request = RFAAS_REQUEST_NULL;
    c->size = size;
    if (UNLIKELY(status)) {
        c->error = (uintptr_t)rfaas_shim_failed(status);
        t->b->failed++;
    }
}

static rfaas_batch_call *in_flight_at(const batch *t, uint32_t i) { return &t->calls[t->flying[t->b->flying + i]]; }

/* Ends all calls with the thread's error. */
static void end_all(batch *t, int status) {
    for (uint32_t i = 0; i < t->b->n_flying; i++)
        end_call(t, in_flight_at(t, i), status, 0);
    while (t->b->next < t->b->count)
        end_call(t, &t->calls[t->b->next++], status, 0);
    t->b->n_flying = 0;
}

static uint32_t index_of(rfaas_request id) { return id >> RFAAS_REQ_LEASE_BITS & ((1u << RFAAS_REQ_INDEX_BITS) - 1); }

static rfaas_request_slot *slot_of(const batch *t, uint32_t i) { return &t->l->requests[index_of(in_flight_at(t, i)->request)]; }

/* Removes all but `kept` of the first n calls from those in flight. The kept ones are the first. */
static void remove_ended(batch *t, uint32_t n, uint32_t kept) {
    uint32_t *first = t->flying + t->b->flying;
    memmove(first + (n - kept), first, kept * sizeof *first);
    t->b->flying += n - kept;
    t->b->n_flying -= n - kept;
}

/* Ends the calls in flight that this lease does not know: their lease was released, and its memory serves another lease now. */
static void end_unknown(batch *t) {
    uint32_t kept = 0, n = t->b->n_flying, *first = t->flying + t->b->flying;
    for (uint32_t i = 0; i < n; i++) {
        rfaas_batch_call *c = in_flight_at(t, i);
        uint32_t index = index_of(c->request);
        if (UNLIKELY(index >= used(t->l) || id_of(&t->l->requests[index]) != c->request))
            end_call(t, c, rfaas_api_bad_request(c->request, op), 0);
        else
            first[kept++] = first[i];
    }
    remove_ended(t, n, kept);
}

/* Takes the outcomes of calls that have ended. Stops when it has met `most` calls that have not ended. Returns how many it has taken. */
static uint32_t take_some(batch *t, uint32_t most) {
    uint32_t kept = 0, i = 0, n = t->b->n_flying, *first = t->flying + t->b->flying;
    int64_t now = t->due ? dp_now_ns() : 0;
    t->due = 0;
    for (; i < n && kept < most; i++) {
        rfaas_request_slot *r = slot_of(t, i);
        if (rfaas_api_ended(t->l, r, now)) {
            size_t size = 0;
            int status = rfaas_api_report(t->l, r, op, &size);
            end_call(t, in_flight_at(t, i), status, size);
            continue;
        }
        first[kept++] = first[i];
        if (UNLIKELY(shared(t->l)))
            continue; /* rfaas_api_wait_a_while returns soon */
        int64_t due = due_of(t->l, r);
        if (due && (!t->due || due < t->due))
            t->due = due;
    }
    remove_ended(t, i, kept);
    return i - kept;
}

/* Takes the outcomes of calls that have ended. Each worker answers its calls in order, so the first ones in flight end first. All
 * are looked at only if none of the first has ended. */
static uint32_t take_ended(batch *t) {
    uint32_t taken = take_some(t, t->l->n_workers);
    return taken ? taken : take_some(t, UINT32_MAX);
}

static int start_call(batch *t, const rfaas_batch_call *c, rfaas_request_slot **r) {
    rfaas_lease *l = t->l;
    int status;
    if (UNLIKELY(draining(l) || c->function >= l->n_functions) && (status = rfaas_api_bad_call(l, op, c->function, NULL, 0, NULL, 0)))
        return status;
    t->plan.batch = !shared(l); /* else the next submit may wait for another thread */
    uint8_t *memory = (uint8_t *)(uintptr_t)t->b->memory;
    return rfaas_api_start(l, op, &t->plan, c->function, memory + c->in, c->in_size, memory + c->out, c->capacity, r);
}

/* Reports whether to try again to submit a call for which there was no slot (RFAAS_BUSY) or no worker within the patience (RFAAS_DEADLINE).
 * If no call of the batch is in flight, other calls must end or workers must be replaced within the session's time-out. */
static bool try_again(batch *t, int status) {
    rfaas_lease *l = t->l;
    if (LIKELY(t->b->n_flying))
        return true;
    int64_t now = dp_now_ns();
    if (!t->b->busy_since)
        t->b->busy_since = now;
    if (now - t->b->busy_since > l->session->timeout_ns)
        return false;
    if (status == RFAAS_DEADLINE)
        return true;
    if (shared(l))
        return !draining(l);
    for (uint32_t i = 0; l->grant->ep && i < l->n_workers; i++)
        if (dp_channel_free_slots(l->workers[i].ch) + l->workers[i].in_flight < l->cfg.depth)
            return true;
    return rfaas_api_replacing(l);
}

/* Submits calls until the workers accept no more. A call that cannot be submitted ends with its error. */
static void fill(batch *t) {
    rfaas_batch *b = t->b;
    while (b->next < b->count) {
        rfaas_batch_call *c = &t->calls[b->next];
        rfaas_request_slot *r;
        int status = start_call(t, c, &r);
        if (UNLIKELY(status == RFAAS_BUSY || (status == RFAAS_DEADLINE && t->plan.wait_until))) {
            if (b->deadline && dp_now_ns() >= b->deadline)
                status = rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "invoke %s: no worker was free until the deadline", function_name(t->l, c->function));
            else if (try_again(t, status))
                return;
        }
        b->busy_since = 0;
        if (UNLIKELY(status)) {
            end_call(t, c, status, 0);
        } else {
            c->request = id_of(r);
            t->flying[b->flying + b->n_flying++] = b->next;
            if (UNLIKELY(r->deadline != 0) && (!t->due || r->deadline < t->due))
                t->due = r->deadline;
        }
        b->next++;
    }
}

/* Waits for one of the calls; without calls, for a free slot. */
static void wait_some(batch *t, int64_t until) {
    rfaas_lease *l = t->l;
    int64_t deadline = t->due && (!until || t->due < until) ? t->due : until;
    if (t->b->deadline && (!deadline || t->b->deadline < deadline))
        deadline = t->b->deadline;
    if (!shared(l) && (rfaas_api_replacing(l) || rfaas_api_grows(l)))
        deadline = rfaas_api_sooner(deadline, dp_now_ns(), RFAAS_REPLACED_NS);
    if (!t->b->n_flying && draining(l))
        return; /* the next start waits for another executor */
    if (!t->b->n_flying)
        rfaas_api_await_slot(l, RFAAS_ANY_WORKER, &t->turn, rfaas_api_sooner(deadline, dp_now_ns(), l->session->timeout_ns));
    else if (UNLIKELY(shared(l)))
        rfaas_api_wait_a_while(l, slot_of(t, t->turn++ % t->b->n_flying), deadline);
    else if (dp_endpoint_wait_turn(l->grant->ep, deadline) == DP_YIELD)
        rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF);
}

void rfaas_api_batch(rfaas_lease *l, rfaas_batch *b, rfaas_batch_call *calls, uint32_t *flying, const rfaas_call_options *o, int64_t patience_ns) {
    batch t = {.l = l, .b = b, .calls = calls, .flying = flying, .plan = {.worker = RFAAS_ANY_WORKER, .full_is_busy = true}};
    int64_t until = patience_ns < 0 ? 0 : dp_now_ns() + patience_ns;
    int status = RFAAS_OK;
    if (!usable(l))
        status = rfaas_api_bad_lease(l, op);
    else if (UNLIKELY(!enter(l)) && (status = rfaas_api_join(l, op, until)) == RFAAS_DEADLINE)
        return; /* another thread is inside */
    if (UNLIKELY(status)) {
        end_all(&t, status);
        return;
    }
    if ((status = rfaas_api_plan_options(l, op, o, &t.plan))) {
        end_all(&t, status);
        leave(l, status);
        return;
    }
    if (!b->begun)
        b->deadline = t.plan.deadline;
    b->begun = 1;
    t.plan.deadline = b->deadline;
    t.plan.wait_until = until;
    end_unknown(&t);
    for (;;) {
        if (rfaas_api_grows(l))
            rfaas_api_grow(l);
        fill(&t);
        uint32_t taken = take_ended(&t);
        if ((!b->n_flying && b->next == b->count) || (until && dp_now_ns() >= until))
            break;
        if (!taken)
            wait_some(&t, until);
    }
    leave(l, RFAAS_OK);
}

/* Workers that die and leases that end: the agent's events, the errors of calls, and the replacement of dead workers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

/* How long the error of a call waits for the event that says how the worker died. */
#define EXPLAIN_NS 900000000ll

void rfaas_api_note_overdue(rfaas_lease *l, uint32_t worker) { __atomic_store_n(&l->workers[worker].overdue, 1, __ATOMIC_RELAXED); }

bool rfaas_api_overdue(rfaas_lease *l, uint32_t worker) {
    uint32_t function;
    int64_t since;
    rfaas_worker *w = &l->workers[worker];
    dp_channel_look(w->ch); /* its reply may have come */
    bool runs = dp_channel_runs_overdue(w->ch, &function, &since);
    if (!runs)
        __atomic_store_n(&w->overdue, 0, __ATOMIC_RELAXED);
    return runs;
}

bool rfaas_api_still_overdue(const rfaas_lease *lease, uint32_t worker) {
    rfaas_lease *l = (rfaas_lease *)lease;
    if (!shared(l))
        return l->grant->ep && rfaas_api_overdue(l, worker);
    if (!dp_turns_try(l->turns, DP_TURN_BRIEF, unit_of(worker)))
        return true;
    bool runs = l->grant->ep && rfaas_api_overdue(l, worker); /* another thread may have moved the lease before */
    dp_turns_put_down(l->turns, unit_of(worker));
    return runs;
}

void rfaas_api_overdue_text(rfaas_lease *l, uint32_t worker, char *text, size_t room) {
    uint32_t function;
    int64_t since;
    char ago[64] = "";
    text[0] = 0;
    if (!dp_channel_runs_overdue(l->workers[worker].ch, &function, &since))
        return;
    double s = (double)(dp_now_ns() - since) / 1e9;
    if (s >= 0.05)
        snprintf(ago, sizeof ago, ", whose time limit passed %.1f s ago", s);
    snprintf(text, room, "; worker %u still runs \"%.128s\"%s", worker, function_name(l, function), ago);
}

static void note_death(rfaas_worker *w, const rfaas_agent_event *e, const char *details) {
    snprintf(w->reason, sizeof w->reason, "%s", e->text);
    free(w->details);
    w->details = e->details_size ? strndup(details, e->details_size) : NULL;
    w->death_status = dp_status_class(e->status) == RFAAS_CLASS_CONNECTION ? e->status : DP_WORKER_DIED;
    /* The dead worker may have been replaced already, because its channel broke earlier: the event must not end its successor. If the
     * successor died before it was connected, dead_pid says so when it is. */
    w->dead_pid = e->pid;
    if (w->pid && w->dead_pid == w->pid)
        dp_channel_fail(w->ch, w->death_status);
}

static void note_end(rfaas_grant *h, const rfaas_agent_event *e) {
    /* Calls end with this status. A status of any other class, such as that of an agent that refused to adopt the lease, would not tell
     * the program to take another lease. The text has the reason. */
    int class = dp_status_class(e->status);
    h->ended = class == RFAAS_CLASS_LEASE || class == RFAAS_CLASS_CONNECTION ? e->status : DP_LEASE_ENDED;
    snprintf(h->ended_reason, sizeof h->ended_reason, "%.*s", (int)sizeof h->ended_reason - 1, e->text);
    for (uint32_t i = 0; i < h->n_workers; i++)
        if (h->workers[i].ch)
            dp_channel_fail(h->workers[i].ch, h->ended);
}

void rfaas_api_take_event(const rfaas_agent_event *e, const char *details) {
    if (e->kind == RFAAS_AGENT_DROPPED) {
        rfaas_api_drop_cached(e->key);
        return;
    }
    rfaas_lease *l = e->key ? rfaas_api_lease_at(e->key & (RFAAS_LEASES_MAX - 1)) : NULL;
    if (!l)
        return;
    pthread_mutex_lock(&l->mu);
    rfaas_grant *h = l->grant;
    uint32_t kind = e->kind;
    if (l->next && l->next->key == e->key) {
        /* The lease has not moved there yet, and does not move to an executor that drains. */
        h = l->next;
        if (kind == RFAAS_EVENT_DRAINING)
            kind = RFAAS_EVENT_ENDED;
    }
    if (h && h->key == e->key) {
        if (kind == RFAAS_EVENT_WORKER_DIED && e->worker < h->n_workers)
            note_death(&h->workers[e->worker], e, details);
        else if (kind == RFAAS_EVENT_ENDED)
            note_end(h, e);
        else if (kind == RFAAS_AGENT_ROOM)
            rfaas_api_note_room(l, h);
        else if (kind == RFAAS_EVENT_DRAINING) {
            uint32_t none = RFAAS_AGENT_DRAIN_NOT; /* unchanged if the lease moved after the agent had read the line's key */
            if (!l->draining_reason[0])
                snprintf(l->draining_reason, sizeof l->draining_reason, "%.*s", (int)sizeof l->draining_reason - 1, e->text);
            __atomic_compare_exchange_n(&l->line->draining, &none, RFAAS_AGENT_DRAIN_SOON, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
        }
        if (h == l->grant && kind >= RFAAS_EVENT_WORKER_DIED && kind <= RFAAS_EVENT_EXPIRING)
            rfaas_api_keep_news(l, e);
    }
    pthread_mutex_unlock(&l->mu);
}

void rfaas_api_silent(void *arg, const dp_channel *ch, dp_silence silence) {
    const rfaas_grant *h = arg;
    rfaas_agent_silence req = {.key = h->key, .since_ns = silence.since, .at_ns = silence.at};
    while (req.worker < h->n_workers && h->workers[req.worker].ch != ch)
        req.worker++;
    rfaas_agent_tell(RFAAS_AGENT_SILENT, &req, sizeof req); /* if it fails, the channel reports again soon */
}

/* Reports whether waiting for an event about a worker is useless: its death or the lease's end is known, or no event came before. */
static bool explained(rfaas_lease *l, const rfaas_grant *h, const rfaas_worker *w) {
    pthread_mutex_lock(&l->mu);
    bool known = h->ended || !w->pid || w->dead_pid == w->pid || w->silent_pid == w->pid || dp_channel_given_up(w->ch);
    pthread_mutex_unlock(&l->mu);
    return known;
}

static const char no_agent[] = "the first calls of the lease pass through the agent, which has not worked for 2 s; check whether it is stopped with `rfaas agent status`";

int rfaas_api_reason(rfaas_lease *l, rfaas_grant *h, uint32_t i, int status, int started, char *why, size_t size, char **details) {
    rfaas_worker *w = &h->workers[i];
    int64_t until = dp_now_ns() + EXPLAIN_NS;
    rfaas_api_tell_claims(); /* the agent reports events of leases that it knows */
    rfaas_agent_look();
    while (started == RFAAS_MAYBE_EXECUTED && !explained(l, h, w) && dp_now_ns() < until)
        rfaas_agent_wait(until);
    pthread_mutex_lock(&l->mu);
    if (started == RFAAS_MAYBE_EXECUTED && w->dead_pid != w->pid)
        w->silent_pid = w->pid; /* later calls do not wait again */
    bool died = w->pid && w->dead_pid == w->pid;
    snprintf(why, size, "%s", h->ended ? h->ended_reason : died ? w->reason : dp_channel_given_up(w->ch) ? no_agent : "");
    if (h->ended) /* a call that was in flight keeps the status of its connection */
        status = started == RFAAS_MAYBE_EXECUTED ? h->ended : RFAAS_LEASE_ENDED;
    else if (died)
        status = w->death_status;
    *details = died && !h->ended && w->details ? strdup(w->details) : NULL;
    pthread_mutex_unlock(&l->mu);
    return status;
}

int rfaas_api_explain(rfaas_lease *l, const char *op, rfaas_function fn, uint32_t worker, int status, int started) {
    const char *name = function_name(l, fn), *note = started == RFAAS_MAYBE_EXECUTED ? "" : " (not started)";
    if (status == RFAAS_FUNCTION_FAILED)
        return status; /* the text is the function's own */
    if (status == RFAAS_DEADLINE) {
        char runs[256];
        if (started == RFAAS_MAYBE_EXECUTED)
            rfaas_api_note_overdue(l, worker);
        rfaas_api_overdue_text(l, worker, runs, sizeof runs);
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s%s", op, name, worker, rfaas_strerror(status), note, runs);
    }
    if (status == RFAAS_BAD_REQUEST && dp_is_chain(fn))
        return rfaas_api_fail(RFAAS_UNSUPPORTED, started, "%s %s on worker %u: the executor's release of rfaas does not know chains; call the two functions "
                              "one after the other", op, name, worker);
    if (status == RFAAS_UNSUPPORTED)
        return rfaas_api_fail(status, started, "%s %s on worker %u: the worker could not map the memory for RFAAS_CALL_IN_PLACE, as without a free "
                              "descriptor; call again without RFAAS_CALL_IN_PLACE", op, name, worker);
    char why[sizeof ((rfaas_worker *)0)->reason] = "", *details = NULL;
    if (dp_status_class(status) == RFAAS_CLASS_CONNECTION || dp_status_class(status) == RFAAS_CLASS_LEASE)
        status = rfaas_api_reason(l, l->grant, worker, status, started, why, sizeof why, &details);
    if (!*why)
        return rfaas_api_fail(status, started, "%s %s on worker %u: %s%s", op, name, worker, rfaas_strerror(status), note);
    if (l->grant->ended)
        return rfaas_api_fail(status, started, "%s %s: the lease on %s ended: %s%s", op, name, l->grant->executor, why, note);
    rfaas_api_fail(status, started, "%s %s: %s: %s%s%s", op, name, rfaas_strerror(status), why, note, details ? details : "");
    free(details);
    return status;
}

int rfaas_api_fail_ended(rfaas_lease *l, const char *op) {
    pthread_mutex_lock(&l->mu);
    int status = !l->grant ? rfaas_api_bad_lease(l, op) : l->grant->ended ? RFAAS_LEASE_ENDED : RFAAS_OK;
    if (status == RFAAS_LEASE_ENDED)
        rfaas_api_fail(status, RFAAS_NOT_STARTED, "%s: the lease on %s ended: %s", op, l->grant->executor, l->grant->ended_reason);
    pthread_mutex_unlock(&l->mu);
    return status;
}

/* Ends the calls on the old worker's channel and resets the channel, so that it can be offered. */
static int begin(rfaas_lease *l, rfaas_worker *w, uint32_t i, const char *op) {
    dp_error err = {0};
    rfaas_api_settle(l, i);
    pthread_mutex_lock(&l->mu);
    w->pid = 0;
    pthread_mutex_unlock(&l->mu);
    w->broken = true;
    w->kill |= dp_channel_given_up(w->ch); /* the stopped agent keeps the worker's connection open, so the worker does not end by itself */
    __atomic_store_n(&w->overdue, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&l->grant->held_by, 0, __ATOMIC_RELAXED); /* the agent holds the descriptors of the old worker */
    int status = rfaas_api_fail_ended(l, op);
    if (status)
        return status;
    status = rfaas_api_promote_broken(l, i);
    return status || !dp_channel_reset(w->ch, &err) ? status : rfaas_api_fail_dp(op, &err);
}

/* Continues the init call of a new worker, and waits for it at most for `patience`. RFAAS_BUSY: it has not returned yet. */
static int initialise(rfaas_lease *l, uint32_t i, int64_t patience) {
    rfaas_worker *w = &l->workers[i];
    if (patience > 0)
        rfaas_api_init_wait(w, dp_now_ns() + patience);
    int status = rfaas_api_init_step(l, l->grant, i);
    if (status && status != RFAAS_BUSY)
        dp_channel_fail(w->ch, DP_PEER_GONE); /* the next call replaces the worker */
    if (!status)
        w->broken = false;
    return status;
}

/* repair, which see. last: do not try again with another offer. */
static int repair_once(rfaas_lease *l, uint32_t i, int64_t patience, bool init, bool last) {
    static const char op[] = "replace worker";
    rfaas_worker *w = &l->workers[i];
    int64_t until = dp_now_ns() + patience;
    if (w->moving) {
        int moved = rfaas_api_promote_step(l, i, until);
        if (!moved || moved == RFAAS_BUSY)
            return moved;
    }
    if (w->initialising)
        return initialise(l, i, init ? patience : 0);
    int status = w->replacing && !dp_channel_broken(w->ch) ? RFAAS_OK : begin(l, w, i, op);
    if (status)
        return status;
    rfaas_agent_replace req = {.key = l->grant->key, .worker = i, .kill = w->kill, .timeout_ns = patience > 0 ? patience : 0};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    rfaas_reply reply = {0};
    status = rfaas_api_offer(w, &req.offer);
    if (!status)
        status = rfaas_agent_ask(op, RFAAS_AGENT_REPLACE, &parts, req.timeout_ns, sizeof(rfaas_agent_worker), &reply);
    const rfaas_agent_worker *got = (const rfaas_agent_worker *)reply.data;
    w->replacing = reply.unanswered || (!status && got->pid == 0);
    if (w->replacing) { /* the next use makes the same offer again: requests that still wait in the agent's socket then get the same worker */
        free(reply.data);
        dp_channel_hold(w->ch);
        return status ? status : RFAAS_BUSY;
    }
    if (!status) {
        status = rfaas_api_connect_worker(l, l->grant, i, got);
        free(reply.data);
    }
    if (!status)
        status = rfaas_api_init_start(l, l->grant, i);
    if (status) {
        dp_channel_fail(w->ch, DP_PEER_GONE); /* so that the next use tries again */
        if (status == RFAAS_BAD_BLOB && !last) /* an agent gave this offer to a worker that has ended since, and ended before it answered */
            return repair_once(l, i, until - dp_now_ns(), init, true);
        int ended = rfaas_api_fail_ended(l, op); /* the event may have come while the executor did not answer */
        return ended ? ended : status;
    }
    w->kill = false;
    __atomic_add_fetch(&l->replaced, 1, __ATOMIC_RELAXED);
    if (w->initialising)
        return initialise(l, i, init ? until - dp_now_ns() : 0);
    w->broken = false;
    return RFAAS_OK;
}

/* Asks for a new worker and waits for it, and with init also for its init call, at most for `patience`. RFAAS_BUSY: it has not started yet,
 * or executes the init call. If the worker is only moving to another queue pair, waits for that instead. */
static int repair(rfaas_lease *l, uint32_t i, int64_t patience, bool init) { return repair_once(l, i, patience, init, false); }

int rfaas_api_begin_repair(rfaas_lease *l, uint32_t worker) { return repair(l, worker, 0, false); }

int rfaas_api_end_worker(rfaas_lease *l, uint32_t worker) { return repair(l, worker, l->session->timeout_ns, false); }

int rfaas_api_repair(rfaas_lease *l, uint32_t worker, int64_t deadline) {
    int64_t start = dp_now_ns(), patience = l->session->timeout_ns;
    if (deadline && deadline - start < patience)
        patience = deadline - start;
    int status = repair(l, worker, patience, true);
    if (status == RFAAS_BUSY && l->workers[worker].initialising)
        return rfaas_api_fail(RFAAS_DEADLINE, 0, "replace worker %u: the init call %s of the new worker still runs after %lld ms", worker,
                              l->init.function, (long long)(dp_now_ns() - start) / 1000000);
    if (status == RFAAS_BUSY && l->workers[worker].moving)
        return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "worker %u does not answer: no reply for %lld ms to the request to use this process's own "
                              "queue pair", worker, (long long)(dp_now_ns() - start) / 1000000);
    if (status != RFAAS_BUSY || !l->workers[worker].replacing)
        return status;
    rfaas_agent_look(); /* a report that the executor is lost may have come with that answer; then the lease can move */
    status = rfaas_api_fail_ended(l, "replace worker");
    if (status)
        return status;
    return rfaas_api_fail(RFAAS_DEADLINE, 0, "replace worker %u: no new worker within %lld ms; the replacement continues", worker,
                          (long long)(dp_now_ns() - start) / 1000000);
}

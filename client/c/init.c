/* Init calls: every worker of a lease executes one function before the program's calls, so that functions can rely on the state that it
 * makes (rfaas_lease_options.init_function).
 *
 *   connected ── submitted, channel reserved ──┬── returned ──▶ channel takes calls
 *                                              └── failed or timed out ──▶ error; after a replacement, the next call tries again with a new worker
 *
 * The caller acquires the grant, owns the lease, or holds the worker's unit. If the deadline of its own call passes while the init call
 * runs, it stops waiting. The next thread that needs the worker then continues to wait for the init call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

static const char op[] = "lease";

int rfaas_api_init_check(const rfaas_lease_options *o) {
    uint64_t most = o->bulk > o->eager ? o->bulk : o->eager;
    if (o->bulk_max > most)
        most = o->bulk_max;
    if ((!o->init_function || !*o->init_function) && (o->init_payload || o->init_size))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: init_size is %zu without init_function", op, o->init_size);
    if (!o->init_payload && o->init_size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: init_payload is NULL with init_size %zu", op, o->init_size);
    if (o->init_size > most || o->init_size > UINT32_MAX)
        return rfaas_api_fail(RFAAS_TOO_LARGE, 0,
                              "%s: payload of %zu bytes for the init call %s, this lease carries up to %llu (eager %u, bulk %llu); raise bulk_max, or "
                              "publish the data as a table", op, o->init_size, o->init_function, (unsigned long long)most, o->eager,
                              (unsigned long long)o->bulk);
    return RFAAS_OK;
}

int rfaas_api_seed_check(rfaas_lease_options *o) {
    if (o->flags & RFAAS_LEASE_SEED_REQUIRED)
        o->flags |= RFAAS_LEASE_SEED;
    bool named = o->seed && *o->seed;
    if (named)
        o->flags |= RFAAS_LEASE_SEED;
    if (!(o->flags & RFAAS_LEASE_SEED))
        return RFAAS_OK;
    if (named && o->init_function && *o->init_function)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: init_function %s with seed %.80s: the seed's setup function takes the place of the init call", op, o->init_function, o->seed);
    if (!named && (!o->init_function || !*o->init_function))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: RFAAS_LEASE_SEED without init_function: name the function that prepares the workers", op);
    if (o->flags & RFAAS_LEASE_REUSE)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: RFAAS_LEASE_SEED with RFAAS_LEASE_REUSE: workers start either from a seed or with the state of an earlier lease", op);
    if (o->flags & RFAAS_LEASE_SEED_REQUIRED && o->flags & RFAAS_LEASE_LOCAL)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: RFAAS_LEASE_SEED_REQUIRED with RFAAS_LEASE_LOCAL: this process cannot start from a seed", op);
    if (o->flags & RFAAS_LEASE_SEED_REQUIRED && o->init_size > RFAAS_AGENT_SEED_MAX)
        return rfaas_api_fail(RFAAS_TOO_LARGE, 0, "%s: payload of %zu bytes for the init call %s: a seed takes at most %u; let the function read a file of the bundle",
                              op, o->init_size, o->init_function, RFAAS_AGENT_SEED_MAX);
    return RFAAS_OK;
}

int rfaas_api_init_keep(rfaas_lease *l) {
    const rfaas_lease_options *o = &l->options;
    rfaas_init_call *c = &l->init;
    if (!o->init_function || !*o->init_function)
        return RFAAS_OK;
    c->function = strdup(o->init_function);
    c->payload = malloc(o->init_size ? o->init_size : 1);
    if (!c->function || !c->payload)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory for the payload of %zu bytes of the init call", op, o->init_size);
    if (o->init_size)
        memcpy(c->payload, o->init_payload, o->init_size);
    c->size = (uint32_t)o->init_size;
    return RFAAS_OK;
}

void rfaas_api_init_free(rfaas_lease *l) {
    free(l->init.function);
    free(l->init.payload);
    l->init = (rfaas_init_call){0};
}

int64_t rfaas_api_init_patience(const rfaas_lease *l) {
    int64_t limit = l->options.call_limit_ns, timeout = l->session->timeout_ns;
    return limit > timeout ? (limit < RFAAS_TIMEOUT_MAX_NS ? limit : RFAAS_TIMEOUT_MAX_NS) : timeout;
}

/* ---- seeds ---- */

/* Reports whether the lease's workers are to start from a seed. */
static bool seeds(const rfaas_lease *l) { return l->options.flags & RFAAS_LEASE_SEED && l->init.size <= RFAAS_AGENT_SEED_MAX; }

int64_t rfaas_api_seed_ns(const rfaas_lease *l) { return seeds(l) ? rfaas_api_init_patience(l) : 0; }

void rfaas_api_init_seed(const rfaas_lease *l, bool first, rfaas_agent_acquire *req) {
    if (!first || !seeds(l))
        return;
    req->seed_function = (uint32_t)strlen(l->init.function);
    req->seed_payload = l->init.size;
    memcpy(req->seed, l->seed_name, sizeof req->seed);
    req->seed_limit_ns = rfaas_api_init_patience(l);
}

/* Decides about the init call of a new worker. Returns true if it has the state of a seed and needs none, or if that is required: then
 * *status is the error. */
static bool seeded(rfaas_lease *l, rfaas_worker *w, uint32_t i, int *status) {
    *status = RFAAS_OK;
    if (!(l->options.flags & RFAAS_LEASE_SEED))
        return false;
    if (w->start.start == RFAAS_START_SEEDED && seeds(l))
        return true;
    if (!*w->start.unseeded) {
        pthread_mutex_lock(&l->mu);
        if (seeds(l))
            snprintf(w->start.unseeded, sizeof w->start.unseeded, "seed: the executor has a release of rfaas without seeds: upgrade it");
        else
            snprintf(w->start.unseeded, sizeof w->start.unseeded, "seed: the payload has %u bytes, and a seed takes at most %u", l->init.size, RFAAS_AGENT_SEED_MAX);
        pthread_mutex_unlock(&l->mu);
    }
    if (!(l->options.flags & RFAAS_LEASE_SEED_REQUIRED))
        return false;
    *status = rfaas_api_fail(RFAAS_UNSUPPORTED, 0, "%s: worker %u has not started from a seed, as RFAAS_LEASE_SEED_REQUIRED demands: %s", op, i, w->start.unseeded);
    return true;
}

/* ---- in a worker ---- */

int rfaas_api_init_start(rfaas_lease *l, rfaas_grant *h, uint32_t i) {
    const rfaas_init_call *c = &l->init;
    rfaas_worker *w = &h->workers[i];
    rfaas_function fn = 0;
    int status;
    if (!c->function || seeded(l, w, i, &status))
        return c->function ? status : RFAAS_OK;
    while (fn < l->n_functions && strcmp(l->functions[fn], c->function))
        fn++;
    if (fn == l->n_functions)
        return rfaas_api_no_function(l, "lease: init call", c->function);
    w->init_until = dp_now_ns() + rfaas_api_init_patience(l);
    status = dp_channel_submit_until(w->ch, fn, c->payload, c->size, NULL, h->cfg.eager, w->init_until, &w->init_slot);
    if (dp_status_class(status) == RFAAS_CLASS_CONNECTION)
        return RFAAS_OK; /* the worker has ended already. The next call replaces it */
    if (status)
        return rfaas_api_fail(status, 0, "%s: init call %s on worker %u: %s", op, c->function, i, rfaas_strerror(status));
    dp_channel_reserve(w->ch);
    w->initialising = true;
    return RFAAS_OK;
}

/* Reports whether an init call failed because of the function, which would fail on another executor, too. */
static bool at_fault(int status) {
    return dp_status_class(status) == RFAAS_CLASS_FUNCTION || status == DP_TIME_LIMIT || status == DP_MEMORY_LIMIT || status == DP_WORKER_DIED;
}

/* Sets the error of an init call that has failed with this status. */
static int explain(rfaas_lease *l, rfaas_grant *h, uint32_t i, int status) {
    const char *name = l->init.function;
    char what[320], *details = NULL, why[RFAAS_AGENT_TEXT];
    uint32_t size;
    snprintf(what, sizeof what, "%s: init call %.200s on worker %u", op, name, i);
    if (status == DP_FUNCTION_FAILED) {
        const char *text = dp_channel_message(h->workers[i].ch, &size);
        rfaas_api_fail_function(what, text, size);
        rfaas_api_note_started(RFAAS_NOT_STARTED);
    } else if (status == DP_DEADLINE) {
        rfaas_api_fail(status, 0, "%s has not returned within %lld ms; raise timeout_ns of the session, or call_limit_ns of the lease", what,
                       (long long)rfaas_api_init_patience(l) / 1000000);
    } else {
        status = rfaas_api_reason(l, h, i, status, RFAAS_MAYBE_EXECUTED, why, sizeof why, &details);
        rfaas_api_fail(status, 0, "%s: %s%s%s%s", what, rfaas_strerror(status), *why ? ": " : "", why, details ? details : "");
        free(details);
    }
    if (at_fault(status))
        rfaas_api_note_init_failed();
    return status;
}

int rfaas_api_init_step(rfaas_lease *l, rfaas_grant *h, uint32_t i) {
    rfaas_worker *w = &h->workers[i];
    int status = DP_DEADLINE;
    if (!w->initialising)
        return RFAAS_OK;
    if (dp_channel_test(w->ch, w->init_slot) != 0)
        status = dp_channel_finish(w->ch, w->init_slot, NULL, NULL, NULL);
    else if (dp_now_ns() < w->init_until)
        return RFAAS_BUSY;
    else
        dp_channel_abandon(w->ch, w->init_slot);
    w->initialising = false;
    if (status != DP_OK && status != DP_RESULT_TOO_LARGE)
        return explain(l, h, i, status);
    dp_channel_unreserve(w->ch);
    return RFAAS_OK;
}

void rfaas_api_init_wait(rfaas_worker *w, int64_t until) {
    dp_channel_wait(w->ch, w->init_slot, until < w->init_until ? until : w->init_until);
}

/* ---- in this process ---- */

int rfaas_api_init_here(rfaas_lease *l) {
    const rfaas_init_call *c = &l->init;
    if (!c->function || c->here)
        return RFAAS_OK;
    rfaas_local_fn *f = rfaas_local_find(l->local, c->function);
    if (!f)
        return rfaas_api_fail(RFAAS_NO_FUNCTION, 0, "%s: init call: \"%.128s\" is not in the library", op, c->function);
    uint32_t got;
    uint64_t limit = rfaas_api_local_limit(l);
    const dp_pieces in = {&(dp_piece){c->payload, c->size, 1, 0}, 1}, out = {NULL, 0};
    rfaas_local_failure failure;
    rfaas_session *before = rfaas_api_tables_of(l->session);
    const char *paths = rfaas_api_bundle_of(l->spec.bundle);
    int status = rfaas_local_call(l->local, f, NULL, limit, &in, c->size, &out, 0, &got, &failure);
    rfaas_api_bundle_of(paths);
    rfaas_api_tables_of(before);
    if (status == DP_FUNCTION_FAILED)
        return rfaas_api_fail_code(status, 0, failure.code, "%s: init call %s in this process failed%s%s", op, c->function,
                                   *failure.text ? ": " : "", failure.text);
    if (status && status != DP_RESULT_TOO_LARGE)
        return rfaas_api_fail(status, 0, "%s: init call %s in this process: %s", op, c->function, rfaas_strerror(status));
    l->init.here = true;
    return RFAAS_OK;
}

/* How a lease moves to another executor. The library has no thread. So the first call that finds the grant lost starts a search, and
 * calls continue it until there is a new grant. The agent waits for an executor that has room. With RFAAS_LEASE_LOCAL, calls run in this
 * process while the agent waits. A lease that was opened without workers has a grant without an endpoint, and searches in the same way.
 *
 *   grant lost ──▶ acquire (wait) ──▶ next, ready ──▶ grant = next, the old one released
 *                    ▲     └── refused: again, after a pause
 *                    └── lost before it was taken
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "call.h"

#define PAUSE_NS 20000000ll    /* between two searches; most waiting is the agent's */
#define PATIENCE_NS 500000000ll /* how long the agent waits for an executor */
/* While calls run in this process: how long the agent waits for an executor, and the longest pause after a failed search. */
#define LOCAL_PATIENCE_NS 30000000000ll
#define LOCAL_PAUSE_MAX_NS 2000000000ll
#define LOCAL_WAITED_TIMES 10 /* such a pause is longer by this many times the time that calls have waited for the search */
#define LOCAL_LOOK_NS 100000  /* between two local calls that look for messages of the agent, because a look is a system call */
#define LOCAL_SEARCHES_MAX 64 /* searches of this process at a time: the agent accepts 1024 requests without a reply */
/* How long to wait for the agent to report a lost executor. The agent itself waits 3 s for an executor to come back. */
#define NEWS_PATIENCE_NS 5000000000ll

static uint32_t local_searches; /* running searches of leases with RFAAS_LEASE_LOCAL; atomic */

static bool grant_lost(const rfaas_lease *l) { return l->grant->ended || draining(l); }

static bool runs_here(const rfaas_lease *l) { return __atomic_load_n(&l->line->draining, __ATOMIC_ACQUIRE) == RFAAS_AGENT_DRAIN_LOCAL; }

void rfaas_api_forget_searches(void) { local_searches = 0; }

/* ---- the search ---- */

static void end_search(rfaas_lease *l) {
    if (l->seeking && l->local)
        __atomic_sub_fetch(&local_searches, 1, __ATOMIC_RELAXED);
    l->seeking = false;
}

static void drop_next(rfaas_lease *l) {
    rfaas_grant *h = l->next;
    if (!h)
        return;
    rfaas_api_acquire_drop(&l->seek);
    rfaas_api_release_workers(l, h->key, false);
    pthread_mutex_lock(&l->mu);
    l->next = NULL;
    pthread_mutex_unlock(&l->mu);
    l->next_ready = false;
    end_search(l);
    rfaas_api_grant_destroy(h);
}

/* Returns the time before which a lease with RFAAS_LEASE_LOCAL begins no search; 0: it may begin. */
static int64_t not_before(const rfaas_lease *l) {
    int64_t away = rfaas_api_away(l->session, NULL);
    bool nowhere = __atomic_load_n(&l->session->nowhere, __ATOMIC_RELAXED) && !*l->spec.executor;
    if (!away && (nowhere || __atomic_load_n(&local_searches, __ATOMIC_RELAXED) >= LOCAL_SEARCHES_MAX))
        return dp_now_ns() + LOCAL_PAUSE_MAX_NS;
    return away;
}

static void begin(rfaas_lease *l) {
    int64_t now = dp_now_ns(), later = l->local ? not_before(l) : 0;
    if (later) {
        l->seek_again = later;
        return;
    }
    rfaas_grant *h = rfaas_api_grant_new(l);
    if (!h) {
        snprintf(l->next_reason, sizeof l->next_reason, "out of memory");
        l->seek_again = dp_now_ns() + PAUSE_NS;
        return;
    }
    pthread_mutex_lock(&l->mu);
    l->next = h; /* events may name it */
    pthread_mutex_unlock(&l->mu);
    l->seeking = true;
    l->init_status = RFAAS_OK;
    l->seek_waited = 0;
    if (l->local)
        __atomic_add_fetch(&local_searches, 1, __ATOMIC_RELAXED);
    l->spec.workers_min = l->n_workers; /* the program may name any of them */
    rfaas_api_acquire_begin(&l->seek, l, h, NULL, l->local ? LOCAL_PATIENCE_NS : PATIENCE_NS, l->local);
    if (l->local && l->seek.status) {
        l->seek_waited = dp_now_ns() - now;
        rfaas_api_note_away(l->session, l->seek.status, l->seek.text, l->seek_waited);
    }
}

/* Sets when the next search may begin, after one that has failed. */
static void pause_search(rfaas_lease *l) {
    int64_t pause = PAUSE_NS;
    if (l->local) {
        l->seek_pause = !l->seek_pause ? PAUSE_NS : 2 * l->seek_pause < LOCAL_PAUSE_MAX_NS ? 2 * l->seek_pause : LOCAL_PAUSE_MAX_NS;
        pause = l->seek_pause + LOCAL_WAITED_TIMES * l->seek_waited;
        l->seek_waited = 0;
        if (runs_here(l))
            rfaas_api_local_because(l, l->next_reason, false);
    }
    l->seek_again = dp_now_ns() + pause;
}

/* Continues the search as far as is possible without waiting. Returns true if there is a new grant. */
static bool search(rfaas_lease *l) {
    if (l->next && l->next->ended) { /* lost before it was used */
        snprintf(l->next_reason, sizeof l->next_reason, "%s", l->next->ended_reason);
        drop_next(l);
    }
    if (l->next_ready)
        return true;
    if (!l->seeking && dp_now_ns() >= l->seek_again)
        begin(l);
    if (!l->seeking || !rfaas_api_acquire_step(&l->seek))
        return false;
    if (!l->seek.status) {
        l->next_ready = true;
        end_search(l);
        return true;
    }
    snprintf(l->next_reason, sizeof l->next_reason, "%s", l->seek.text);
    l->init_status = l->seek.init_failed ? l->seek.status : RFAAS_OK;
    l->init_code = l->seek.code;
    drop_next(l);
    pause_search(l);
    return false;
}

void rfaas_api_stop_seeking(rfaas_lease *l) {
    drop_next(l);
    l->next_reason[0] = 0;
    l->init_status = RFAAS_OK;
    l->seek_again = l->seek_pause = l->seek_waited = l->local_look = 0;
}

void rfaas_api_count(const rfaas_grant *h, rfaas_statistics *s) {
    const rfaas_statistics *b = &h->before;
    s->cold += h->starts[RFAAS_START_COLD];
    s->pooled += h->starts[RFAAS_START_POOLED];
    s->cached += h->starts[RFAAS_START_CACHED];
    s->seeded += h->starts[RFAAS_START_SEEDED];
    s->queue_pairs += h->queue_pairs;
    s->calls -= b->calls;
    s->replies -= b->replies;
    s->abandoned -= b->abandoned;
    s->late -= b->late;
    s->busy -= b->busy;
    s->bytes_in -= b->bytes_in;
    s->bytes_out -= b->bytes_out;
    for (uint32_t i = 0; h->ep && i < h->n_workers; i++) {
        dp_channel_stats c;
        dp_channel_get_stats(h->workers[i].ch, &c);
        s->calls += c.calls;
        s->replies += c.replies;
        s->abandoned += c.abandoned;
        s->late += c.late_replies;
        s->busy += c.busy;
        s->bytes_in += c.bytes_in;
        s->bytes_out += c.bytes_out;
        s->blocked = c.blocked_waits - b->blocked; /* of the endpoint, the same in all */
    }
}

/* Collects the outcomes of requests in the old grant. */
static void hear_out(rfaas_lease *l) {
    if (!l->grant->ended)
        rfaas_api_drain(l);
    for (uint32_t i = 0; i < l->n_workers; i++)
        rfaas_api_settle(l, i);
}

/* Makes calls run in this process until there is a new grant, and has the agent release the old one. */
static void stay_here(rfaas_lease *l) {
    char why[sizeof l->draining_reason];
    if (runs_here(l))
        return;
    hear_out(l);
    rfaas_api_finish(l);
    pthread_mutex_lock(&l->local_mu); /* a call of an earlier time without workers may still run */
    l->init.here = false;
    pthread_mutex_unlock(&l->local_mu);
    pthread_mutex_lock(&l->mu);
    memcpy(why, l->grant->ended ? l->grant->ended_reason : l->draining_reason, sizeof why);
    pthread_mutex_unlock(&l->mu);
    rfaas_api_local_because(l, why, true);
    __atomic_store_n(&l->line->draining, RFAAS_AGENT_DRAIN_LOCAL, __ATOMIC_RELEASE);
}

static void take_next(rfaas_lease *l) {
    rfaas_grant *old = l->grant, *h = l->next;
    rfaas_api_move_buffers(l, h);
    rfaas_api_count(old, &l->past);
    pthread_mutex_lock(&l->mu);
    l->grant = h;
    l->workers = h->workers;
    rfaas_api_set_workers(l, h->present);
    __atomic_store_n(&l->grows, __atomic_load_n(&h->room, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
    if (memcmp(&l->cfg, &h->cfg, sizeof l->cfg)) /* no write if it is the same, since other threads read it */
        l->cfg = h->cfg;
    l->next = NULL;
    l->draining_reason[0] = 0;
    rfaas_agent_event moved = {.kind = RFAAS_EVENT_MOVED};
    snprintf(moved.text, sizeof moved.text, "%s", h->executor);
    rfaas_api_keep_news(l, &moved);
    __atomic_store_n(&l->line->draining, RFAAS_AGENT_DRAIN_NOT, __ATOMIC_RELAXED); /* before the key, after which the agent sets it for this grant */
    __atomic_store_n(&l->line->key, h->key, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&l->mu);
    rfaas_api_promote_soon(l);
    l->next_ready = false;
    l->seek_pause = l->seek_waited = 0;
    l->past.moved++;
    if (old->ep)
        rfaas_api_release_workers(l, old->key, false);
    rfaas_api_grant_free(l, old);
}

/* Waits for a message until `until`, at most PAUSE_NS, since a search may also end without one. */
static void await(const rfaas_lease *l, int64_t until) {
    int64_t soon = dp_now_ns() + PAUSE_NS;
    if (soon < until)
        until = soon;
    if (l->seeking)
        rfaas_api_acquire_wait(&l->seek, until);
    else
        rfaas_agent_wait(until);
}

/* Sets the error of a call that needs the new executor, whose init call has failed. */
static int fail_init(rfaas_lease *l, const char *op) {
    int status = l->init_status;
    l->init_status = RFAAS_OK; /* the next call tries again */
    rfaas_api_fail_code(status, RFAAS_NOT_STARTED, l->init_code, "%s: no new executor: %s", op, l->next_reason);
    rfaas_api_note_init_failed();
    return status;
}

/* Reports whether a call waits for the search although it could run in this process. It does if workers are being started, or if the grant
 * was just lost and another executor may have room. Half of the call's time is left for the function. */
static bool worth_waiting(const rfaas_lease *l, const call_plan *p, int64_t start) {
    int64_t half = p->deadline ? start + (p->deadline - start) / 2 : INT64_MAX;
    return l->seeking && (l->next->ep || (!runs_here(l) && l->seek_waited < PAUSE_NS)) && dp_now_ns() < half;
}

int rfaas_api_move(rfaas_lease *l, const char *op, const call_plan *p) {
    int64_t start = dp_now_ns(), until = start + l->session->timeout_ns, news = start + NEWS_PATIENCE_NS, deadline = start_deadline(p);
    if (runs_here(l) && start < l->local_look)
        return RFAAS_OK;
    l->local_look = start + LOCAL_LOOK_NS;
    bool cut = deadline && deadline < until;
    if (cut)
        until = deadline;
    rfaas_agent_look();
    for (;;) {
        if (grant_lost(l) && search(l)) {
            if (l->grant->ep)
                hear_out(l);
            if (search(l)) { /* still there */
                take_next(l);
                return RFAAS_OK;
            }
            continue;
        }
        if (l->init_status && !runs_here(l))
            return fail_init(l, op);
        if (l->local && grant_lost(l) && !worth_waiting(l, p, start))
            break;
        if (shared(l) && dp_turns_closed(l->turns))
            return rfaas_api_fail(RFAAS_LEASE_ENDED, 0, "%s: the lease was released by another thread", op);
        int64_t last = grant_lost(l) || until < news ? until : news;
        int64_t now = dp_now_ns();
        if (now >= last)
            break;
        await(l, last);
        l->seek_waited += dp_now_ns() - now;
    }
    if (l->local && grant_lost(l)) {
        if (p->wait_until && worth_waiting(l, p, start)) /* the caller tries again */
            return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "%s: workers are being started", op);
        stay_here(l);
        return RFAAS_OK;
    }
    char why[256];
    const char *none = l->next_reason[0] ? l->next_reason : "still asking";
    pthread_mutex_lock(&l->mu);
    snprintf(why, sizeof why, "%s", l->grant->ended ? l->grant->ended_reason : draining(l) ? l->draining_reason : "not known");
    pthread_mutex_unlock(&l->mu);
    if (cut && dp_now_ns() >= deadline)
        return rfaas_api_fail(RFAAS_DEADLINE, 0, "%s: the lease on %s ended: %s; no other executor until the deadline: %s", op,
                              l->grant->executor, why, none);
    return rfaas_api_fail(RFAAS_LEASE_ENDED, 0, "%s: the lease on %s ended: %s; no other executor within %lld ms: %s", op,
                          l->grant->executor, why, (long long)(dp_now_ns() - start) / 1000000, none);
}

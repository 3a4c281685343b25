/* Leases whose first calls pass through the agent, on verbs (dp_vqp.h). The lease gets the agent's connected channels with the grant, so this
 * process has opened no device by the time of the first result. Then it makes queue pairs of its own, and the workers move to them one by one:
 *
 *   lease_open ──▶ calls through the agent ──▶ the 2nd call ends: a thread opens the device, and makes the queue pairs
 *                                                   └── later calls, still through the agent
 *                  a call ends, and no other is in flight on a worker: the worker is asked ──▶ it answers ──▶ calls do not pass through the agent
 *
 * A program that makes one call gets no thread. One call that has ended waits at most MOVE_NS for the workers' answers. If a worker has not
 * answered by then, the next call on it waits for the answer, in place of its reply.
 *
 * A channel fails if its worker dies or the agent ends. No channel is connected through the agent again. The call that replaces the
 * worker makes the queue pairs if there are none yet, and its channel gets one of them. The other channels are not affected. */
#include <limits.h>
#include <signal.h>
#include <stdlib.h>

#include "call.h"

#define UNITS_NS 2000000  /* how long a thread waits for the units of a shared lease */
#define MOVE_NS 2000000   /* how long a call that has ended waits for the workers' answers, or for other calls to end */
#define STACK_BYTES (256 << 10)
#define BUSY_LEAST 64     /* attempts that found calls in flight, after which a thread waits for these calls to end. Twice as many each time */
#define BUSY_MOST 65536

struct rfaas_promoting {
    pthread_t thread;
    rfaas_session *session;
    dp_endpoint *ep;
    dp_promotion *p;
    bool started; /* the thread is to be joined */
    uint32_t done; /* atomic: p and status are set */
    int status;
    uint32_t busy, patience; /* attempts that found calls in flight; the number after which a thread waits */
    dp_error err;
};

static void *prepare(void *arg) {
    rfaas_promoting *g = arg;
    dp_dev *dev;
    g->status = rfaas_api_session_device(g->session, "verbs", &dev);
    if (!g->status)
        g->status = dp_promotion_prepare(g->ep, dev, &g->p, &g->err);
    __atomic_store_n(&g->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static bool start_thread(rfaas_promoting *g) {
    pthread_attr_t attr;
    sigset_t all, old;
    if (pthread_attr_init(&attr))
        return false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool good = !pthread_attr_setstacksize(&attr, STACK_BYTES < PTHREAD_STACK_MIN ? PTHREAD_STACK_MIN : STACK_BYTES) &&
                !pthread_create(&g->thread, &attr, prepare, g);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return good;
}

static rfaas_promoting *new_promoting(rfaas_lease *l) {
    rfaas_promoting *g = calloc(1, sizeof *g);
    if (g)
        *g = (rfaas_promoting){.session = l->session, .ep = l->grant->ep, .patience = BUSY_LEAST};
    return g;
}

static void join(rfaas_promoting *g) {
    if (g->started)
        pthread_join(g->thread, NULL);
    g->started = false;
}

void rfaas_api_promote_end(rfaas_grant *h) {
    rfaas_promoting *g = h->promoting;
    if (!g)
        return;
    join(g);
    for (uint32_t i = 0; g->p && i < h->n_workers; i++)
        h->workers[i].moving = false;
    dp_promotion_free(g->p);
    free(g);
    h->promoting = NULL;
}

static void set_due(rfaas_lease *l, bool due) {
    if (due)
        __atomic_or_fetch(&l->grows, RFAAS_DUE_PROMOTION, __ATOMIC_RELAXED);
    else
        __atomic_and_fetch(&l->grows, ~RFAAS_DUE_PROMOTION, __ATOMIC_RELAXED);
}

void rfaas_api_promote_soon(rfaas_lease *l) {
    if (!l->grant->ep || !dp_endpoint_brokered(l->grant->ep))
        return;
    set_due(l, true);
    __atomic_store_n(&l->entered, LOOK_EVERY - 2, __ATOMIC_RELAXED); /* the second call looks when it leaves the lease */
}

/* ---- one worker ---- */

/* Lets the channel use the new queue pair. The caller holds the worker's unit. */
static void change(rfaas_lease *l, rfaas_promoting *g, rfaas_worker *w) {
    pthread_mutex_lock(&l->mu); /* other threads interrupt waits on the channel under it */
    dp_promotion_switch(g->p, w->ch);
    pthread_mutex_unlock(&l->mu);
    w->moving = false;
    __atomic_add_fetch(&l->grant->queue_pairs, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&l->grant->held_by, 0, __ATOMIC_RELAXED); /* the agent holds descriptors of the old channel */
}

int rfaas_api_promote_step(rfaas_lease *l, uint32_t i, int64_t until) {
    rfaas_promoting *g = l->grant->promoting;
    rfaas_worker *w = &l->workers[i];
    dp_error err = {0};
    dp_promotion_await(g->p, w->ch, until);
    int status = dp_promotion_meet(g->p, w->ch, &err);
    if (status == DP_BUSY)
        return RFAAS_BUSY;
    w->moving = false;
    if (!status)
        change(l, g, w);
    return dp_channel_status(w->ch);
}

int rfaas_api_promote_broken(rfaas_lease *l, uint32_t i) {
    rfaas_grant *h = l->grant;
    rfaas_worker *w = &h->workers[i];
    if (!dp_channel_brokered(w->ch))
        return RFAAS_OK;
    pthread_mutex_lock(&l->promote_mu); /* threads of a shared lease may replace several workers at the same time */
    bool begun = h->promoting || (h->promoting = new_promoting(l));
    rfaas_promoting *g = h->promoting;
    if (begun && !g->started && !g->done)
        prepare(g);
    if (begun)
        join(g);
    int status = !begun ? rfaas_api_fail(RFAAS_FATAL, 0, "replace worker: out of memory") : g->status;
    if (begun && status) {
        if (g->err.status)
            rfaas_api_fail_dp("replace worker: make a queue pair", &g->err);
        else
            rfaas_api_fail(status, 0, "replace worker: the device for this process's own queue pairs cannot be opened: %s", rfaas_strerror(status));
        rfaas_api_promote_end(h); /* the next call tries again */
    }
    pthread_mutex_unlock(&l->promote_mu);
    if (!status)
        change(l, g, w);
    return status;
}

/* ---- all workers ---- */

/* Reports whether the lease has made two calls. */
static bool called(const rfaas_grant *h) {
    rfaas_statistics s = {0};
    rfaas_api_count(h, &s);
    return s.calls >= 2;
}

static bool settled(const rfaas_worker *w) { return !w->broken && !w->replacing && !w->initialising; }

/* Asks workers to move if no call is in flight on their channels. Returns true if calls of other workers are in flight and will end. */
static bool ask(rfaas_grant *h, rfaas_promoting *g) {
    bool busy = false;
    for (uint32_t i = 0; i < h->n_workers; i++) {
        rfaas_worker *w = &h->workers[i];
        dp_error err = {0};
        if (w->moving || !settled(w) || !dp_channel_brokered(w->ch) || dp_channel_status(w->ch))
            continue;
        w->awaited = false;
        if (dp_promotion_possible(g->p, w->ch))
            w->moving = !dp_promotion_ask(g->p, w->ch, &err);
        else
            busy |= !dp_promotion_abandoned(w->ch);
    }
    return busy;
}

/* Takes the answers that come by `until`. Unless `again` is set, it waits only once for the answer of each worker: so a worker that does not answer
 * delays only one call on the other workers. */
static void meet(rfaas_lease *l, int64_t until, bool again) {
    for (uint32_t i = 0; i < l->grant->n_workers; i++) {
        rfaas_worker *w = &l->grant->workers[i];
        if (!w->moving)
            continue;
        rfaas_api_promote_step(l, i, w->awaited && !again ? 1 : until);
        w->awaited = true;
    }
}

/* One step. The caller owns the lease or holds all units. Returns true if no further one is needed. */
static bool step(rfaas_lease *l) {
    rfaas_grant *h = l->grant;
    if (!h->ep || h->ended || !dp_endpoint_brokered(h->ep))
        return true;
    rfaas_promoting *g = h->promoting;
    if (!g && !called(h))
        return false;
    if (!g) {
        if (!(g = h->promoting = new_promoting(l)))
            return false;
        if (!(g->started = start_thread(g)))
            prepare(g); /* no thread can be made now */
        return false;
    }
    if (!__atomic_load_n(&g->done, __ATOMIC_ACQUIRE))
        return false;
    join(g);
    if (g->status) {
        rfaas_api_promote_end(h);
        return true;
    }
    int64_t until = dp_now_ns() + MOVE_NS;
    bool busy = ask(h, g);
    if (busy && ++g->busy > g->patience) {
        g->busy = 0;
        g->patience = g->patience < BUSY_MOST ? 2 * g->patience : BUSY_MOST;
        while (busy && dp_now_ns() < until && !dp_endpoint_wait_any(h->ep, until))
            busy = ask(h, g);
    }
    meet(l, until, false);
    pthread_mutex_lock(&l->mu);
    bool complete = dp_promotion_complete(g->p);
    pthread_mutex_unlock(&l->mu);
    if (complete)
        rfaas_api_move_buffers(l, h);
    bool over = complete || dp_promotion_over(g->p);
    if (over)
        rfaas_api_promote_end(h);
    return over;
}

void rfaas_api_promote(rfaas_lease *l, int status) {
    static const char op[] = "own queue pairs";
    bool over = false;
    if (draining(l) || (status && shared(l))) /* a failed wait for the units would change the error of the call */
        return;
    if (!rfaas_api_take_all(l, op, dp_now_ns() + UNITS_NS)) {
        over = step(l);
        rfaas_api_put_all(l);
    }
    if (over)
        set_due(l, false);
    else if (!shared(l))
        __atomic_store_n(&l->entered, LOOK_EVERY - 1, __ATOMIC_RELAXED);
}

void rfaas_api_promote_settle(rfaas_lease *l) {
    if (l->grant->promoting)
        meet(l, dp_now_ns() + MOVE_NS, true);
}

/* Leases whose first calls pass through the agent, on verbs (dp_vqp.h). The lease gets the agent's connected channels with the grant, so this
 * process has opened no device by the time of the first result. Then it makes queue pairs of its own, and the workers move to them:
 *
 *   lease_open ──▶ calls through the agent ──▶ the 2nd call ends: a thread opens the device, and makes the queue pairs
 *                                                   └── later calls, still through the agent
 *                  a call ends, no other is in flight, the queue pairs are ready: the workers connect ──▶ calls do not pass through the agent
 *
 * A program that makes one call gets no thread. If the agent ends before the move, calls that are in flight fail. The next call makes the queue
 * pairs at once, and gets new workers for the broken channels. */
#include <limits.h>
#include <signal.h>
#include <stdlib.h>

#include "call.h"

#define ASK_NS 2000000000ll   /* how long the workers may take to answer */
#define UNITS_NS 2000000      /* how long a thread waits for the units of a shared lease */
#define STACK_BYTES (256 << 10)
#define BUSY_MOST 64          /* attempts that found calls in flight, after which a thread waits for these calls to end */
#define DRAIN_NS 10000000     /* how long it waits */

struct rfaas_promoting {
    pthread_t thread;
    rfaas_session *session;
    dp_endpoint *ep;
    dp_promotion *p;
    bool started; /* the thread is to be joined */
    uint32_t done; /* atomic: p and status are set */
    int status;
    uint32_t busy; /* attempts that found calls in flight */
};

static void *prepare(void *arg) {
    rfaas_promoting *g = arg;
    dp_error err = {0};
    dp_dev *dev;
    g->status = rfaas_api_session_device(g->session, "verbs", &dev);
    if (!g->status)
        g->status = dp_promotion_prepare(g->ep, dev, &g->p, &err);
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
        *g = (rfaas_promoting){.session = l->session, .ep = l->grant->ep};
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

/* Moves the lease, if the queue pairs are ready and no call is in flight. Returns false if a later attempt may succeed. */
static bool move(rfaas_lease *l, rfaas_promoting *g) {
    rfaas_grant *h = l->grant;
    dp_error err = {0};
    int status = dp_promotion_ask(g->p, dp_now_ns() + ASK_NS, &err);
    if (status == DP_BUSY)
        return false;
    if (!status) {
        pthread_mutex_lock(&l->mu); /* other threads interrupt waits on the channels under it */
        dp_promotion_switch(g->p);
        pthread_mutex_unlock(&l->mu);
        h->queue_pairs += h->n_workers;
        __atomic_store_n(&h->held_by, 0, __ATOMIC_RELAXED); /* the agent holds descriptors of the old channels */
        rfaas_api_move_buffers(l, h);
    }
    rfaas_api_promote_end(h);
    return true; /* also after an error: no worker can move, and all continue as before */
}

/* Reports whether the lease has made two calls. */
static bool called(const rfaas_grant *h) {
    rfaas_statistics s = {0};
    rfaas_api_count(h, &s);
    return s.calls >= 2;
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
    if (!dp_promotion_possible(h->ep) && ++g->busy > BUSY_MOST) {
        int64_t until = dp_now_ns() + DRAIN_NS;
        g->busy = 0;
        while (!dp_promotion_possible(h->ep) && !dp_endpoint_wait_any(h->ep, until))
            ;
    }
    return dp_promotion_possible(h->ep) && move(l, g);
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

bool rfaas_api_promote_now(rfaas_lease *l) {
    rfaas_grant *h = l->grant;
    if (!h->ep || !dp_endpoint_brokered(h->ep) || shared(l))
        return false;
    if (!h->promoting) {
        if (!(h->promoting = new_promoting(l)))
            return false;
        prepare(h->promoting);
    }
    join(h->promoting);
    if (h->promoting->status) {
        rfaas_api_promote_end(h);
        return false;
    }
    move(l, h->promoting);
    return !dp_endpoint_brokered(h->ep);
}

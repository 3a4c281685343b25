/* Adding workers to a lease that was granted with fewer than it wants (rfaas_lease_options.workers_min). The library has no thread. So
 * the agent reports room, and a thread that is inside the lease asks for the next worker and connects it:
 *
 *   event ROOM ──▶ ask: REPLACE ──┬── granted ──▶ connect ──▶ init call ──▶ counted, event WORKER_ADDED ──▶ ask for the next one
 *                  ▲              └── refused ──▶ wait for the next ROOM
 *                  └── the agent has ended: the same offer to the next agent
 *
 * A worker is counted when the executor has granted it. If it has died by then, or its init call has failed, the next call that uses it
 * replaces it, like any other worker. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"

#define PAUSE_NS 1000000    /* between two looks, for each of which a thread of a shared lease holds all units */
#define RETRY_NS 20000000   /* after a request that could not be sent, because there is no agent */
#define PATIENCE_NS 2000000 /* how long a thread waits for the units of a shared lease */

static const char op[] = "add worker";

/* The agent's events set `room` and then `grows`. A step that finds no room clears `grows` and then reads `room` again. These accesses are
 * sequentially consistent, so one of the two sees the other. */
static void set_grows(rfaas_lease *l, bool more) {
    if (more)
        __atomic_or_fetch(&l->grows, RFAAS_DUE_WORKERS, __ATOMIC_SEQ_CST);
    else
        __atomic_and_fetch(&l->grows, ~RFAAS_DUE_WORKERS, __ATOMIC_SEQ_CST);
}

static bool has_room(const rfaas_grant *h) { return __atomic_load_n(&h->room, __ATOMIC_SEQ_CST); }

static void set_room(rfaas_grant *h, bool room) { __atomic_store_n(&h->room, room, __ATOMIC_SEQ_CST); }

/* Makes the owner look at the agent when it leaves the lease. */
static void look_soon(rfaas_lease *l) { __atomic_store_n(&l->entered, LOOK_EVERY - 1, __ATOMIC_RELAXED); }

void rfaas_api_note_room(rfaas_lease *l, rfaas_grant *h) {
    set_room(h, true);
    if (h != l->grant)
        return;
    set_grows(l, true);
    look_soon(l);
    if (h->ep)
        dp_endpoint_ask(h->ep); /* a thread that waits for calls of a map can start calls on the new worker */
}

int rfaas_api_no_worker(const rfaas_lease *l, const char *what, int worker) {
    uint32_t n = rfaas_api_workers(l);
    if (worker < 0 || (uint32_t)worker >= l->wanted)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: worker %d, the lease has workers 0..%u", what, worker, n - 1);
    return rfaas_api_fail(RFAAS_INVALID, 0, "%s: worker %d is not there yet: the lease has %u of %u workers, and gets the others as cores become free "
                          "(rfaas_lease_workers)", what, worker, n, l->wanted);
}

/* Counts the next worker. good: it takes calls; otherwise the next call replaces it. */
static void add(rfaas_lease *l, rfaas_grant *h, bool good) {
    uint32_t i = h->present;
    h->workers[i].broken = !good;
    rfaas_api_set_workers(l, i + 1);
    rfaas_agent_event e = {.kind = RFAAS_EVENT_WORKER_ADDED, .worker = i};
    snprintf(e.text, sizeof e.text, "the lease has %u of %u workers", i + 1, l->wanted);
    pthread_mutex_lock(&l->mu);
    h->present = i + 1;
    rfaas_api_keep_news(l, &e);
    pthread_mutex_unlock(&l->mu);
    __atomic_store_n(&h->held_by, 0, __ATOMIC_RELAXED); /* the agent has the descriptors of fewer channels */
}

/* Offers the channel of the next worker to the executor. A channel that was offered before is offered again as it is, unless its
 * worker has ended: the executor may have granted it to the agent before. The request uses up the room that was reported: if it is
 * refused, only room that is reported after this counts, and that may come before the refusal is taken. */
static bool ask(rfaas_lease *l, rfaas_grant *h) {
    rfaas_worker *w = &h->workers[h->present];
    dp_error err = {0};
    bool again = w->replacing && !dp_channel_broken(w->ch);
    rfaas_agent_replace req = {.key = h->key, .worker = h->present, .timeout_ns = l->session->timeout_ns};
    rfaas_request_parts parts = {.body = &req, .body_size = sizeof req, .fd = -1};
    if ((w->broken && !again && (rfaas_api_promote_broken(l, h->present) || dp_channel_reset(w->ch, &err))) || rfaas_api_offer(w, &req.offer))
        return false; /* no file descriptor is free, for example: the agent waits for this request, so try again later */
    set_room(h, false);
    w->broken = w->replacing = true;
    dp_channel_hold(w->ch);
    rfaas_ticket sent = rfaas_agent_send(op, RFAAS_AGENT_REPLACE, &parts, dp_now_ns() + PATIENCE_NS); /* may hand the lease to a new agent */
    pthread_mutex_lock(&l->mu);
    h->growing = sent;
    pthread_mutex_unlock(&l->mu);
    if (!sent)
        set_room(h, true); /* there is no agent: ask again later */
    return false;
}

/* Connects the next worker to its channel, and starts its init call. Returns true if it is counted already. */
static bool connect(rfaas_lease *l, rfaas_grant *h, const rfaas_agent_worker *from) {
    rfaas_worker *w = &h->workers[h->present];
    w->replacing = false;
    int status = rfaas_api_connect_worker(l, h, h->present, from);
    if (!status)
        status = rfaas_api_init_start(l, h, h->present);
    if (status)
        dp_channel_fail(w->ch, DP_PEER_GONE);
    else if (w->initialising)
        return false;
    add(l, h, !status);
    return true;
}

/* Takes the reply to ask. Returns true if there is more to do at once. */
static bool take(rfaas_lease *l, rfaas_grant *h) {
    rfaas_reply r;
    rfaas_agent_worker w;
    if (!rfaas_agent_take(h->growing, &r))
        return false;
    pthread_mutex_lock(&l->mu);
    h->growing = 0;
    pthread_mutex_unlock(&l->mu);
    if (r.lost) {
        set_room(h, true); /* the offer goes to the next agent */
        return true;
    }
    bool good = !r.status && r.size >= sizeof w;
    if (good)
        memcpy(&w, r.data, sizeof w);
    rfaas_reply_free(&r);
    if (good) {
        set_room(h, true); /* perhaps for another worker, too */
        return !w.pid || connect(l, h, &w); /* without a pid the worker has not started yet: ask again */
    }
    h->workers[h->present].replacing = false;
    return true;
}

/* Continues the init call of the next worker. */
static bool initialise(rfaas_lease *l, rfaas_grant *h) {
    int status = rfaas_api_init_step(l, h, h->present);
    if (status == RFAAS_BUSY)
        return false;
    if (status)
        dp_channel_fail(h->workers[h->present].ch, DP_PEER_GONE);
    add(l, h, !status);
    return true;
}

/* Does what is possible without waiting. Returns how long to wait before the next step, ns. The caller owns the lease or holds all units. */
static int64_t step(rfaas_lease *l) {
    rfaas_grant *h = l->grant;
    for (bool more = true; more;) {
        if (!h->ep || h->ended || h->present == h->n_workers)
            more = false, set_grows(l, false);
        else if (h->workers[h->present].initialising)
            more = initialise(l, h);
        else if (h->growing)
            more = take(l, h);
        else if (has_room(h))
            more = ask(l, h);
        else {
            set_grows(l, false);
            more = has_room(h); /* reported meanwhile */
            if (more)
                set_grows(l, true);
        }
    }
    bool unsent = rfaas_api_grows(l) && h->present < h->n_workers && !h->growing && !h->workers[h->present].initialising;
    return unsent ? RETRY_NS : shared(l) ? PAUSE_NS : 0;
}

/* Reports whether there is nothing to do until a reply comes. Another thread may move the lease. */
static bool awaits_reply(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    rfaas_ticket growing = l->grant ? l->grant->growing : 0;
    pthread_mutex_unlock(&l->mu);
    return growing && !rfaas_agent_done(growing);
}

void rfaas_api_grow(rfaas_lease *l) {
    int64_t now = dp_now_ns(), at = __atomic_load_n(&l->grow_at, __ATOMIC_RELAXED), pause = PAUSE_NS;
    if (draining(l)) { /* the executor adds no more workers */
        set_grows(l, false);
        return;
    }
    if (now >= at && __atomic_compare_exchange_n(&l->grow_at, &at, INT64_MAX, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        if (!awaits_reply(l) && !rfaas_api_take_all(l, op, now + PATIENCE_NS)) {
            pause = step(l);
            rfaas_api_put_all(l);
        }
        __atomic_store_n(&l->grow_at, pause ? now + pause : 0, __ATOMIC_RELEASE);
    }
    if (!shared(l) && rfaas_api_grows(l))
        look_soon(l);
}

void rfaas_api_look_leaving(rfaas_lease *l, int status) {
    rfaas_api_tell_claims();
    rfaas_agent_look();
    if (UNLIKELY(__atomic_load_n(&l->grows, __ATOMIC_RELAXED) & RFAAS_DUE_PROMOTION))
        rfaas_api_promote(l, status);
    if (!rfaas_api_grows(l))
        return;
    if (!status) /* else it would change the error of the call */
        rfaas_api_grow(l);
    else
        look_soon(l);
}

void rfaas_api_look_for_workers(rfaas_lease *l) {
    if (rfaas_api_workers(l) == l->wanted)
        return;
    rfaas_agent_look();
    /* Entering may take the lease from a thread that owns it. So this thread enters only if there is something to do. */
    int64_t now = dp_now_ns();
    if (!rfaas_api_grows(l) || now < __atomic_load_n(&l->grow_at, __ATOMIC_RELAXED) || awaits_reply(l) || !rfaas_api_enter_if_free(l, op, now + PATIENCE_NS))
        return;
    rfaas_api_grow(l);
    leave(l, RFAAS_OK);
}

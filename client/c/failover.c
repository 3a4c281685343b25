/* How a lease goes on elsewhere. A thread of the lease, the seeker, has another home granted while the program goes on;
 * the program's own thread moves there in its next call, and the seeker gives the old home back.
 *
 *   home lost (event) ──▶ seeker: plan, grant, connect ──▶ next, ready ──▶ rfaas_api_move: home = next, old one retired
 *                            ▲ refused: again, later or when an executor comes             │
 *                            └── lost before it was taken                 seeker: give back ◀┘
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "call.h"

#define PAUSE_MIN_NS 5000000ll
#define PAUSE_MAX_NS 500000000ll
#define LOOK_NS 20000000ll /* how long the seeker may take to hear that it shall stop */
/* Until the control part has told that an executor is lost which does not answer: its own patience is 3 s. */
#define NEWS_PATIENCE_NS 5000000000ll

static bool home_lost(const rfaas_lease *l) { return l->home->ended || leaving(l); }

static bool next_good(const rfaas_lease *l) { return l->next_ready && !l->next->ended; }

/* Waits for a change, at most until then. Under the mutex. False: it is then. */
static bool wait_until(rfaas_lease *l, int64_t then) {
    struct timespec ts = {.tv_sec = then / 1000000000, .tv_nsec = then % 1000000000};
    return pthread_cond_timedwait(&l->changed, &l->mu, &ts) == 0;
}

static void retire(rfaas_lease *l, rfaas_home *h) {
    h->link = l->retired;
    l->retired = h;
}

/* Has another home granted. Called and returns with the mutex, which is free meanwhile. */
static bool get_next(rfaas_lease *l) {
    pthread_mutex_unlock(&l->mu);
    rfaas_home *h = rfaas_api_home_new(l);
    pthread_mutex_lock(&l->mu);
    if (!h) {
        snprintf(l->next_reason, sizeof l->next_reason, "out of memory");
        return false;
    }
    l->next = h; /* events may come for it */
    pthread_mutex_unlock(&l->mu);
    int status = rfaas_api_plan(l, h);
    if (!status)
        status = rfaas_api_find_and_grant(l, h);
    pthread_mutex_lock(&l->mu);
    if (!status && !h->ended) {
        l->next_ready = true;
        return true;
    }
    snprintf(l->next_reason, sizeof l->next_reason, "%s", status ? rfaas_last_error() : h->ended_reason);
    l->next = NULL;
    retire(l, h);
    return false;
}

static void give_back_retired(rfaas_lease *l) {
    rfaas_home *h = l->retired;
    l->retired = h->link;
    pthread_mutex_unlock(&l->mu);
    rfaas_api_give_back(h, "release");
    rfaas_api_home_free(l, h);
    pthread_mutex_lock(&l->mu);
}

/* Returns then, when the seeker shall stop, or when the resource manager tells of an executor that has come. Called and returns with
 * the mutex, which is free meanwhile. */
static void wait_for_executor(rfaas_lease *l, int64_t then) {
    for (int64_t now; !l->seeker_stop && (now = dp_now_ns()) < then;) {
        uint64_t key = l->home->key, come = 0;
        rfaas_msg req = {0}, reply = {0};
        pthread_mutex_unlock(&l->mu);
        rfaas_msg_u64(&req, RFAAS_TAG_KEY, key);
        rfaas_msg_u64(&req, RFAAS_TAG_TIMEOUT_NS, (uint64_t)(then - now < LOOK_NS ? then - now : LOOK_NS));
        int status = rfaas_api_ask("failover", RFAAS_OP_AWAIT, &req, &reply);
        if (!status) {
            come = rfaas_msg_nth_u64(&reply, RFAAS_TAG_COUNT, 0, 0);
            rfaas_msg_free(&reply);
        }
        pthread_mutex_lock(&l->mu);
        if (come)
            return;
        while (status && !l->seeker_stop && wait_until(l, then)) { /* a control part that cannot tell */
        }
    }
}

static void *seek(void *arg) {
    rfaas_lease *l = arg;
    int64_t pause = PAUSE_MIN_NS;
    pthread_mutex_lock(&l->mu);
    while (!l->seeker_stop) {
        if (l->next_ready && l->next->ended) { /* lost before it was used */
            l->next_ready = false;
            retire(l, l->next);
            l->next = NULL;
        } else if (home_lost(l) && !l->next_ready) {
            if (get_next(l)) {
                pause = PAUSE_MIN_NS;
            } else {
                while (l->retired && !l->seeker_stop)
                    give_back_retired(l);
                wait_for_executor(l, dp_now_ns() + pause);
                pause = pause * 2 < PAUSE_MAX_NS ? pause * 2 : PAUSE_MAX_NS;
            }
            pthread_cond_broadcast(&l->changed);
        } else if (l->retired) {
            give_back_retired(l);
        } else {
            pthread_cond_wait(&l->changed, &l->mu);
        }
    }
    pthread_mutex_unlock(&l->mu);
    return NULL;
}

void rfaas_api_seek(rfaas_lease *l) {
    if (!rfaas_api_fails_over(l) || l->seeking || l->seeker_stop || !l->home)
        return;
    /* Signals are the program's. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    l->seeking = pthread_create(&l->seeker, NULL, seek, l) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void rfaas_api_stop_seeking(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    bool seeking = l->seeking;
    l->seeker_stop = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mu);
    if (seeking)
        pthread_join(l->seeker, NULL);
    pthread_mutex_lock(&l->mu);
    if (l->next)
        retire(l, l->next);
    l->next = NULL;
    l->next_ready = false;
    while (l->retired)
        give_back_retired(l);
    l->seeking = l->seeker_stop = false;
    l->next_reason[0] = 0;
    pthread_mutex_unlock(&l->mu);
}

void rfaas_api_count(const rfaas_home *h, rfaas_statistics *s) {
    const rfaas_statistics *b = &h->before;
    s->cold += h->starts[1];
    s->warm += h->starts[2];
    s->cached += h->starts[3];
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

/* What the old home still has to say. */
static void hear_out(rfaas_lease *l) {
    if (!l->home->ended)
        rfaas_api_drain(l);
    for (uint32_t i = 0; i < l->n_workers; i++)
        rfaas_api_settle(l, i);
}

/* There is no other home yet: calls run in this process. The old one may be given back. */
static void stay_here(rfaas_lease *l) {
    if (__atomic_load_n(&l->leaving, __ATOMIC_ACQUIRE) == LEAVING_LOCAL)
        return;
    hear_out(l);
    rfaas_api_finish(l);
    __atomic_store_n(&l->leaving, LEAVING_LOCAL, __ATOMIC_RELEASE);
}

int rfaas_api_move(rfaas_lease *l, const char *op, int64_t deadline) {
    if (!l->home->ep)
        return RFAAS_OK;
    int64_t start = dp_now_ns(), until = start + l->session->timeout_ns;
    bool cut = deadline && deadline < until;
    if (cut)
        until = deadline;
    char why[256], none[512];
    pthread_mutex_lock(&l->mu);
    rfaas_api_seek(l);
    for (bool in_time = true; !next_good(l) && !(l->local && home_lost(l)) && in_time;) {
        int64_t news = start + NEWS_PATIENCE_NS;
        in_time = wait_until(l, home_lost(l) || until < news ? until : news);
    }
    bool good = next_good(l);
    snprintf(why, sizeof why, "%s", l->home->ended ? l->home->ended_reason : leaving(l) ? l->leaving_reason : "not known");
    snprintf(none, sizeof none, "%s", l->next_reason[0] ? l->next_reason : "still asking");
    pthread_mutex_unlock(&l->mu);
    if (!good && l->local) {
        stay_here(l);
        return RFAAS_OK;
    }
    if (!good && cut && dp_now_ns() >= deadline)
        return rfaas_api_fail(RFAAS_DEADLINE, 0, "%s: the lease on %s ended: %s; no other until the deadline: %s", op,
                              l->home->executor, why, none);
    if (!good)
        return rfaas_api_fail(RFAAS_LEASE_ENDED, 0, "%s: the lease on %s ended: %s; no other within %lld ms: %s", op,
                              l->home->executor, why, (long long)(dp_now_ns() - start) / 1000000, none);
    hear_out(l);
    pthread_mutex_lock(&l->mu);
    if (!next_good(l)) { /* lost in this moment */
        pthread_mutex_unlock(&l->mu);
        return rfaas_api_move(l, op, deadline);
    }
    rfaas_home *old = l->home;
    rfaas_api_move_buffers(l, l->next);
    rfaas_api_count(old, &l->past);
    l->home = l->next;
    l->workers = l->home->workers;
    l->cfg = l->home->cfg;
    l->next = NULL;
    l->next_ready = false;
    l->past.moved++;
    __atomic_store_n(&l->leaving, LEAVING_NOT, __ATOMIC_RELEASE);
    retire(l, old);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mu);
    return RFAAS_OK;
}

/* The thread that serves control connections, on devices whose target polls and on verbs.
 *
 * Each connection has a completion queue and a lock of its own. epoll reports a socket once (EPOLLONESHOT). The thread then polls the
 * connection and watches its socket again. An event names a place in a table and how often the place was used. It has no
 * address in memory, because a socket that a child process still has open can report an event after the connection is gone. */
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "dp_claim.h"
#include "dp_raw_impl.h"

#define EVENTS 64
#define STOP UINT64_MAX /* epoll data of stop_fd */

typedef struct place {
    dp_raw *r;     /* NULL: free */
    uint32_t uses; /* distinguishes a late event for an earlier connection */
} place;

struct dp_raw_server {
    int epoll_fd, stop_fd;
    pthread_t thread;
    uint64_t wakes;       /* atomic */
    pthread_mutex_t lock; /* of the fields below; taken before a connection's */
    place *places;
    uint32_t n_places, n_used;
};

/* ---- watching ---- */

static int watch(dp_raw *r, int op, int fd, int events) {
    struct epoll_event ev = {.events = (uint32_t)events | EPOLLONESHOT, .data.u64 = r->event};
    r->watched = events;
    return epoll_ctl(r->server->epoll_fd, op, fd, &ev);
}

static void end(dp_raw *r, int status) {
    dp_raw_over(r, status);
    dp_qp_break(r->qp, status);
}

/* Watches for the events that the connection needs. again: even if these events are the same as before, because epoll has reported one. */
static void rewatch(dp_raw *r, bool again) {
    int fd, events = dp_qp_events(r->qp, &fd);
    if (fd < 0 || r->status)
        return;
    if (!events) /* a write-with-immediate waits for a receive, and none is ever posted here */
        end(r, DP_PROTOCOL);
    else if ((again || events != r->watched) && watch(r, EPOLL_CTL_MOD, fd, events))
        end(r, DP_FATAL);
}

void dp_raw_watch(dp_raw *r) {
    if (r->server)
        rewatch(r, false);
}

/* ---- the thread ---- */

/* Reports whether the device executes the peer's operations, so that this side only receives rings. */
static bool rings(const dp_raw *r) { return !(r->cq->dev->caps & DP_CAP_POLLED_TARGET); }

/* Takes what has arrived. On verbs, events are taken and asked for again first, so that none is missed. */
static void serve(dp_raw *r) {
    uint32_t none = 0;
    if (rings(r) && (dp_cq_wait(r->cq, 0) || dp_cq_arm(r->cq)))
        end(r, DP_FATAL);
    else
        dp_raw_drain(r, &none);
}

/* Returns the connection of an event, locked. NULL: it is gone. */
static dp_raw *find(dp_raw_server *s, uint64_t event) {
    uint32_t i = (uint32_t)event;
    pthread_mutex_lock(&s->lock);
    dp_raw *r = i < s->n_places && s->places[i].uses == event >> 32 ? s->places[i].r : NULL;
    if (r)
        pthread_mutex_lock(&r->lock);
    pthread_mutex_unlock(&s->lock);
    return r;
}

static void *run(void *arg) {
    dp_raw_server *s = arg;
    for (;;) {
        struct epoll_event ev[EVENTS];
        int n = epoll_wait(s->epoll_fd, ev, EVENTS, -1);
        if (n < 0 && errno != EINTR)
            return NULL;
        __atomic_fetch_add(&s->wakes, 1, __ATOMIC_RELAXED);
        for (int i = 0; i < n; i++) {
            if (ev[i].data.u64 == STOP)
                return NULL;
            dp_raw *r = find(s, ev[i].data.u64);
            if (!r)
                continue;
            serve(r);
            if (r->bell)
                dp_claim_ring(r->bell, 1);
            rewatch(r, true);
            pthread_mutex_unlock(&r->lock);
        }
    }
}

static void server_free(dp_raw_server *s) {
    if (s->epoll_fd >= 0)
        close(s->epoll_fd);
    if (s->stop_fd >= 0)
        close(s->stop_fd);
    pthread_mutex_destroy(&s->lock);
    free(s->places);
    free(s);
}

int dp_raw_server_start(dp_raw_server **out, dp_error *err) {
    dp_raw_server *s = calloc(1, sizeof *s);
    if (!s)
        return dp_fail(err, DP_FATAL, ENOMEM, "serve remote memory");
    pthread_mutex_init(&s->lock, NULL);
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = STOP};
    int e = s->epoll_fd < 0 || s->stop_fd < 0 || epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->stop_fd, &stop) ? errno : dp_thread_start(&s->thread, run, s);
    if (e) {
        server_free(s);
        return dp_fail(err, DP_FATAL, e, "serve remote memory");
    }
    *out = s;
    return DP_OK;
}

void dp_raw_server_stop(dp_raw_server *s) {
    if (!s)
        return;
    uint64_t one = 1;
    while (write(s->stop_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_join(s->thread, NULL);
    server_free(s);
}

uint64_t dp_raw_server_wakes(const dp_raw_server *s) { return __atomic_load_n(&s->wakes, __ATOMIC_RELAXED); }

/* ---- connections ---- */

/* Gives the connection a place. Under the lock. */
static int take_place(dp_raw_server *s, dp_raw *r) {
    if (s->n_used == s->n_places) {
        uint32_t n = s->n_places ? 2 * s->n_places : 16;
        place *more = realloc(s->places, n * sizeof *more);
        if (!more)
            return ENOMEM;
        for (uint32_t i = s->n_places; i < n; i++)
            more[i] = (place){0};
        s->places = more;
        s->n_places = n;
    }
    uint32_t i = 0;
    while (s->places[i].r)
        i++;
    s->places[i].r = r;
    s->n_used++;
    r->event = (uint64_t)++s->places[i].uses << 32 | i;
    return 0;
}

int dp_raw_serve(dp_raw *r, dp_raw_server *s, uint32_t *bell, dp_error *err) {
    int fd, events = dp_qp_events(r->qp, &fd);
    if (fd < 0 || !events)
        return dp_fail(err, DP_UNSUPPORTED, 0, "serve remote memory: the connection has ended, or its device has no socket");
    pthread_mutex_lock(&s->lock);
    int e = take_place(s, r);
    pthread_mutex_unlock(&s->lock);
    if (e)
        return dp_fail(err, DP_FATAL, e, "serve remote memory");
    pthread_mutex_lock(&r->lock);
    r->server = s;
    r->bell = bell;
    int st = rings(r) ? dp_cq_arm(r->cq) : DP_OK;
    if (!st && rings(r))
        st = dp_post_recv(r->qp, 0); /* a ring waits for it */
    e = !st && watch(r, EPOLL_CTL_ADD, fd, events) ? errno : 0; /* bytes that have arrived already are an event */
    pthread_mutex_unlock(&r->lock);
    if (!st && !e)
        return DP_OK;
    dp_raw_unserve(r);
    return dp_fail(err, DP_FATAL, e, "serve remote memory");
}

void dp_raw_unserve(dp_raw *r) {
    dp_raw_server *s = r->server;
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->places[(uint32_t)r->event].r = NULL;
    s->n_used--;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&r->lock); /* waits for the thread */
    int fd;
    dp_qp_events(r->qp, &fd);
    if (fd >= 0)
        epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
    r->server = NULL;
    pthread_mutex_unlock(&r->lock);
    dp_qp_break(r->qp, DP_CONNECTION); /* so that destroying it does not wait for a peer that takes no bytes */
}

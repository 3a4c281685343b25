/* Destruction of channels and claimants on devices whose driver may be slow. A verbs driver may take most of a minute to destroy a queue pair, and a
 * thread that releases a lease must not wait for that. So a thread of the library destroys what is on such a device. The caller
 * waits for that thread for at most PATIENCE_NS:
 *
 *   caller: create the thread ── wait ──┬─ in time: join the thread, so that none is left
 *                                       └─ else: detach the thread, and return
 *   thread:        destroy what it got ── the last thread of a closed device: close the device ── end
 *
 * No other part of the library creates a thread. On shared memory, no part does. */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client.h"
#include "dp_raw.h"

#define PATIENCE_NS 100000000ll   /* how long a caller waits for a destruction */
#define FINALIZE_NS 1000000000ll  /* how long rfaas_finalize waits for all threads */
#define UNDER_WAY_MAX 64          /* threads; beyond them callers destroy themselves */
#define STACK_BYTES (256 << 10)

typedef struct reaping {
    struct reaping *next;
    dp_dev *dev;
    dp_endpoint *ep; /* of the channels */
    dp_raw *conn;    /* in domain */
    dp_domain *domain;
    bool done, left; /* the thread has finished; its caller has gone on */
    bool closes;     /* the session no longer uses the device: its last reaping closes it */
    uint32_t n;
    dp_channel *channels[];
} reaping;

/* Guards the list and the flags. */
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* signalled when a reaping is done; initialised by make_cond */
static bool cond_made;
static reaping *under_way;
static uint32_t n_under_way;

static bool make_cond(void) {
    pthread_condattr_t attr;
    if (!cond_made && !pthread_condattr_init(&attr)) {
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        cond_made = !pthread_cond_init(&changed, &attr);
        pthread_condattr_destroy(&attr);
    }
    return cond_made;
}

/* Waits for a change until `until`. Returns false after that time. The caller holds mu. */
static bool wait_until(int64_t until) {
    struct timespec at = {until / 1000000000, until % 1000000000};
    return pthread_cond_timedwait(&changed, &mu, &at) != ETIMEDOUT;
}

/* Each part may be missing. */
static void destroy(const reaping *r, dp_channel *const *channels) {
    for (uint32_t i = 0; i < r->n; i++)
        dp_channel_destroy(channels[i]);
    dp_endpoint_destroy(r->ep);
    dp_raw_destroy(r->conn); /* the queue pair goes first: then no operation is under way that uses the memory */
    dp_domain_destroy(r->domain);
}

/* Returns a reaping of the device that is under way, or NULL. The caller holds mu. */
static reaping *of_device(const dp_dev *dev) {
    reaping *r = under_way;
    while (r && r->dev != dev)
        r = r->next;
    return r;
}

static void take_out(reaping *r) {
    reaping **p = &under_way;
    while (*p != r)
        p = &(*p)->next;
    *p = r->next;
    n_under_way--;
}

static void *reap(void *arg) {
    reaping *r = arg;
    destroy(r, r->channels);
    pthread_mutex_lock(&mu);
    take_out(r);
    dp_dev *dev = r->closes && !of_device(r->dev) ? r->dev : NULL;
    bool left = r->left;
    r->done = true; /* the caller now frees r, unless it has left */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mu);
    dp_dev_close(dev);
    if (left)
        free(r);
    return NULL;
}

/* Keeps this library's code in memory even if the program unloads the library with dlclose while a thread runs it. */
static void pin_library(void) {
    Dl_info here;
    if (dladdr((void *)(uintptr_t)reap, &here) && here.dli_fname)
        dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

/* Starts the thread, with all signals blocked. The caller holds mu. */
static bool start(reaping *r, pthread_t *thread) {
    pthread_attr_t attr;
    sigset_t all, old;
    if (n_under_way >= UNDER_WAY_MAX || !make_cond() || pthread_attr_init(&attr))
        return false;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool good = !pthread_attr_setstacksize(&attr, STACK_BYTES < PTHREAD_STACK_MIN ? PTHREAD_STACK_MIN : STACK_BYTES) &&
                !pthread_create(thread, &attr, reap, r);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (good) {
        r->next = under_way;
        under_way = r;
        n_under_way++;
    }
    return good;
}

/* Destroys what `of` names, and of->n channels. */
static void give(const reaping *of, dp_channel *const *channels) {
    reaping *r = of->dev && of->dev->ops->destroys_slowly ? calloc(1, sizeof *r + of->n * sizeof(dp_channel *)) : NULL;
    if (!r) {
        destroy(of, channels);
        return;
    }
    *r = *of;
    if (r->n)
        memcpy(r->channels, channels, r->n * sizeof(dp_channel *));
    int64_t until = dp_now_ns() + PATIENCE_NS;
    pthread_t thread;
    pthread_mutex_lock(&mu);
    bool started = start(r, &thread);
    while (started && !r->done && wait_until(until))
        ;
    bool done = started && r->done;
    if (started && !done)
        r->left = true;
    pthread_mutex_unlock(&mu);
    if (started && !done) {
        pthread_detach(thread);
        pin_library();
        return;
    }
    if (started)
        pthread_join(thread, NULL);
    else
        destroy(r, r->channels);
    free(r);
}

void rfaas_api_reap(dp_endpoint *ep, dp_channel *const *channels, uint32_t n) {
    give(&(reaping){.dev = ep ? dp_endpoint_device(ep) : NULL, .ep = ep, .n = n}, channels);
}

void rfaas_api_reap_connection(dp_dev *dev, dp_raw *conn, dp_domain *domain) {
    give(&(reaping){.dev = dev, .conn = conn, .domain = domain}, NULL);
}

void rfaas_api_reap_device(dp_dev *dev) {
    if (!dev)
        return;
    int64_t until = dp_now_ns() + PATIENCE_NS;
    pthread_mutex_lock(&mu);
    while (of_device(dev) && wait_until(until))
        ;
    bool busy = of_device(dev);
    for (reaping *r = under_way; r; r = r->next)
        r->closes |= r->dev == dev;
    pthread_mutex_unlock(&mu);
    if (!busy)
        dp_dev_close(dev);
}

void rfaas_api_reap_finish(void) {
    int64_t until = dp_now_ns() + FINALIZE_NS;
    pthread_mutex_lock(&mu);
    while (under_way && wait_until(until))
        ;
    pthread_mutex_unlock(&mu);
}

void rfaas_api_reap_before_fork(void) { pthread_mutex_lock(&mu); }

void rfaas_api_reap_after_fork(bool child) {
    if (!child) {
        pthread_mutex_unlock(&mu);
        return;
    }
    /* The threads and the devices belong to the parent. */
    pthread_mutex_init(&mu, NULL);
    cond_made = false;
    under_way = NULL;
    n_under_way = 0;
}

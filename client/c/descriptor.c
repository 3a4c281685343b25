/* The descriptor of a lease, which becomes readable when a request has ended, for programs with an event loop. Only a lease with a descriptor has a
 * thread. The thread waits on behalf of the program, like any other thread that uses the lease, and writes to the descriptor.
 *
 *   idle ──rfaas_lease_arm──▶ armed: waits on all lanes ──a request has ended, or none is in flight──▶ writes, idle
 *                               └──the lease is released──▶ ends
 *
 * The thread only looks at requests. It neither takes them nor writes results.
 */
#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "request.h"

enum { IDLE = 0, ARMED = 1, CLOSED = 2 };

struct rfaas_descriptor {
    int fd;         /* eventfd */
    uint32_t state; /* atomic, futex */
    pthread_t thread;
};

static const char op[] = "lease descriptor";

/* The time for which the thread keeps the lanes from other threads that wait for replies. */
#define SLICE_NS 1000000

static void set(int fd) {
    uint64_t one = 1;
    ssize_t n = write(fd, &one, sizeof one); /* fails only if the descriptor is readable already */
    (void)n;
}

/* Reports whether the program has not yet been told of a request that has ended, or no request is in flight. *due: the earliest deadline, 0: none. The
 * thread owns the lease or holds all units. */
static bool has_ended(rfaas_lease *l, int64_t *due) {
    int64_t now = 0;
    bool flying = false, news = false;
    *due = 0;
    for (uint32_t i = 0; i < used(l); i++) {
        rfaas_request_slot *r = &l->requests[i];
        rfaas_request_state state = state_of(r);
        if (state == RFAAS_REQ_FREE || !id_of(r) || __atomic_load_n(&r->told, __ATOMIC_RELAXED))
            continue;
        bool ended = state == RFAAS_REQ_ENDED || dp_channel_result(l->workers[r->worker].ch, r->slot, NULL, NULL, NULL) != DP_INVALID;
        int64_t at = ended ? 0 : due_of(l, r);
        if (at && !now)
            now = dp_now_ns();
        if (ended || (at && now >= at)) {
            set_told(r, true);
            news = true;
        } else {
            flying = true;
            if (at && (!*due || at < *due))
                *due = at;
        }
    }
    return news || !flying;
}

/* Waits until a request has ended. Returns false when another thread needs the workers. The caller is inside and may hold all units. It holds
 * none afterwards if the lease was not shared before. */
static bool wait_inside(rfaas_lease *l) {
    int64_t due, give_at = 0; /* give_at: when other threads that wait for replies get the units */
    while (!has_ended(l, &due) && l->grant->ep) {
        if (!give_at && rfaas_api_others(l))
            give_at = dp_now_ns() + SLICE_NS;
        int status = dp_endpoint_sleep_turn(l->grant->ep, give_at && (!due || give_at < due) ? give_at : due);
        if (!shared(l)) {
            if (status == DP_YIELD && rfaas_api_share(l, RFAAS_NO_UNIT, DP_TURN_BRIEF))
                return false;
        } else if (rfaas_api_wanted(l) || (give_at && dp_now_ns() >= give_at)) {
            return false;
        }
    }
    return true;
}

/* Waits until a request has ended. Returns false if the lease is released, or the descriptor is no longer armed. */
static bool watch(rfaas_lease *l, const rfaas_descriptor *d) {
    while (__atomic_load_n(&d->state, __ATOMIC_ACQUIRE) == ARMED) {
        if (rfaas_api_enter(l, op))
            return false;
        bool ended = false, was_shared = shared(l);
        int status = rfaas_api_take_long(l, op);
        if (!status) {
            ended = wait_inside(l);
            if (was_shared)
                rfaas_api_put_all(l);
        }
        leave(l, RFAAS_OK);
        if (status || ended)
            return !status;
    }
    return false;
}

static void *run(void *arg) {
    rfaas_lease *l = arg;
    rfaas_descriptor *d = l->descriptor;
    for (;;) {
        uint32_t state = __atomic_load_n(&d->state, __ATOMIC_ACQUIRE);
        if (state == CLOSED)
            return NULL;
        if (state == IDLE) {
            syscall(SYS_futex, &d->state, FUTEX_WAIT_PRIVATE, IDLE, NULL, NULL, 0);
            continue;
        }
        if (!watch(l, d) && __atomic_load_n(&d->state, __ATOMIC_ACQUIRE) == CLOSED)
            continue;
        uint32_t armed = ARMED;
        __atomic_compare_exchange_n(&d->state, &armed, IDLE, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
        set(d->fd);
    }
}

int rfaas_lease_descriptor(rfaas_lease *l, int *fd) {
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (!fd)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "%s: fd is NULL", op));
    pthread_mutex_lock(&l->mu);
    rfaas_descriptor *d = l->descriptor;
    if (!d) {
        d = malloc(sizeof *d);
        int error = d ? 0 : ENOMEM;
        if (d) {
            *d = (rfaas_descriptor){.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
            l->descriptor = d; /* the thread reads it */
            error = d->fd < 0 ? errno : dp_thread_start(&d->thread, run, l);
        }
        if (error) {
            if (d && d->fd >= 0)
                close(d->fd);
            free(d);
            d = l->descriptor = NULL;
            status = rfaas_api_fail(RFAAS_FATAL, 0, "%s: cannot make an eventfd and a thread: %s", op, strerror(error));
        }
    }
    if (d)
        *fd = d->fd;
    pthread_mutex_unlock(&l->mu);
    return leave(l, status);
}

int rfaas_lease_arm(rfaas_lease *l) {
    int status = rfaas_api_enter(l, "lease arm");
    if (status)
        return status;
    pthread_mutex_lock(&l->mu);
    rfaas_descriptor *d = l->descriptor;
    pthread_mutex_unlock(&l->mu);
    if (!d)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, "lease arm: the lease has no descriptor: call rfaas_lease_descriptor first"));
    uint64_t count;
    ssize_t n = read(d->fd, &count, sizeof count);
    (void)n; /* it may not be readable */
    if (__atomic_exchange_n(&d->state, ARMED, __ATOMIC_SEQ_CST) == IDLE)
        syscall(SYS_futex, &d->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    return leave(l, RFAAS_OK);
}

void rfaas_api_descriptor_free(rfaas_lease *l) {
    rfaas_descriptor *d = l->descriptor;
    if (!d)
        return;
    __atomic_store_n(&d->state, CLOSED, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &d->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    pthread_join(d->thread, NULL);
    set(d->fd); /* for the program's copies of it */
    close(d->fd);
    free(d);
    l->descriptor = NULL;
}

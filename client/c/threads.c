/* Which threads are inside a lease.
 *
 * A lease that one thread uses has that thread as its owner. The owner enters by plain loads and stores: it sets `busy`, then
 * checks that it still is the owner. Another thread first takes the ownership away, then passes a barrier on every processor of
 * this process (membarrier), and then reads `busy`. So one of the two sees the other's store, and only the second thread pays
 * for that. A former owner may still set its `busy` and clear it again, so each owner has its own. If the owner is outside, the
 * second thread becomes the owner; this happens CHANGES_MAX times at most. If the owner is inside, its wait for a worker is
 * interrupted, and the lease is shared from then on.
 *
 *   owner 0 ──first thread──▶ owned ──another thread, the owner is outside──▶ owned by that one (CHANGES_MAX times)
 *                               └────another thread, the owner is inside, or too often──▶ shared, until it is released
 *
 * Inside a shared lease, a thread holds the unit of a lane (dp_turns.h) while it uses the workers of that lane, their channels
 * and the requests in flight on them. All units together protect what belongs to the whole lease: grant, buffers, statistics.
 */
#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

#define CHANGES_MAX 4
#define SPINS 200            /* until a thread sleeps while the owner is inside */
#define ASK_EVERY_NS 1000000 /* repeated, because the owner may begin its wait after it was asked */

/* ---- the barrier ---- */

static int barrier_command; /* 0: there is none */

static void find_barrier(void) {
    long can = syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
    if (can > 0 && can & MEMBARRIER_CMD_PRIVATE_EXPEDITED &&
        !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0))
        barrier_command = MEMBARRIER_CMD_PRIVATE_EXPEDITED;
    else if (can > 0 && can & MEMBARRIER_CMD_GLOBAL)
        barrier_command = MEMBARRIER_CMD_GLOBAL;
}

static bool have_barrier(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_barrier);
    return barrier_command != 0;
}

/* ---- handles ---- */

void rfaas_api_threads_init(rfaas_lease *l) {
    pthread_mutex_init(&l->owner_mu, NULL);
    pthread_mutex_init(&l->table_mu, NULL);
    pthread_mutex_init(&l->promote_mu, NULL);
    pthread_mutex_init(&l->local_mu, NULL);
    l->owner = &l->owners[0];
}

/* Clears `busy` and wakes the threads that wait for that. */
static void set_outside(rfaas_owner *o) {
    __atomic_store_n(&o->busy, 0, __ATOMIC_RELEASE);
    syscall(SYS_futex, &o->busy, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static uintptr_t owner_thread(const rfaas_lease *l) { return __atomic_load_n(&owner_of(l)->thread, __ATOMIC_ACQUIRE); }

static bool busy(const rfaas_lease *l) { return __atomic_load_n(&owner_of(l)->busy, __ATOMIC_SEQ_CST); }

/* Sets a new owner. The former one is outside and cannot enter. Under owner_mu. */
static void set_owner(rfaas_lease *l, uintptr_t thread) {
    rfaas_owner *o = &l->owners[++l->owned % RFAAS_OWNERS];
    __atomic_store_n(&o->busy, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&o->thread, thread, __ATOMIC_RELEASE);
    __atomic_store_n(&l->owner, o, __ATOMIC_RELEASE);
}

void rfaas_api_threads_reset(rfaas_lease *l) {
    /* A thread that waits for this one to leave holds the mutex until it sees that. */
    set_outside(owner_of(l));
    pthread_mutex_lock(&l->owner_mu);
    if (shared(l))
        dp_turns_leave(l->turns, (uint32_t)(this_thread() >> 12)); /* rfaas_api_enter_last; no other thread is inside */
    set_owner(l, 0);
    l->first_owned = l->owned;
    __atomic_store_n(&l->shared, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&l->owner_mu);
}

/* ---- owning and sharing ---- */

static uint32_t units_for(uint32_t workers) { return workers < DP_LANES_MAX ? workers : DP_LANES_MAX; }

static uint32_t units(const rfaas_lease *l) { return units_for(l->n_workers); }

void rfaas_api_set_workers(rfaas_lease *l, uint32_t n) {
    if (shared(l)) /* no other thread uses the new units before n_workers and turns->n are set */
        for (uint32_t i = units(l); i < units_for(n); i++)
            dp_turns_try(l->turns, DP_TURN_BRIEF, i);
    __atomic_store_n(&l->n_workers, n, __ATOMIC_RELEASE);
    if (shared(l))
        dp_turns_set_count(l->turns, units(l));
}

/* Asks the thread that waits on a lane to yield, and after a release to end a submit. The mutex keeps the grant and its channels from being
 * freed. */
static void ask_unit(void *arg, uint32_t unit) {
    rfaas_lease *l = arg;
    pthread_mutex_lock(&l->mu);
    if (l->grant && l->grant->ep && unit < l->grant->n_workers && l->grant->workers[unit].ch) {
        if (dp_turns_closed(l->turns))
            dp_channel_interrupt(l->grant->workers[unit].ch);
        dp_channel_ask(l->grant->workers[unit].ch);
    }
    pthread_mutex_unlock(&l->mu);
}

static void ask_owner(rfaas_lease *l) {
    pthread_mutex_lock(&l->mu);
    if (l->grant && l->grant->ep)
        dp_endpoint_ask(l->grant->ep);
    pthread_mutex_unlock(&l->mu);
}

void rfaas_api_interrupt(rfaas_lease *l) {
    ask_owner(l);
    dp_event_signal(&l->freed);
}

static bool make_turns(rfaas_lease *l) {
    if (!l->turns) {
        if (!(l->turns = aligned_alloc(64, (sizeof *l->turns + 63) & ~63ul)))
            return false;
        dp_turns_init(l->turns, units(l), ask_unit, l);
    }
    dp_turns_reset(l->turns, units(l));
    return true;
}

static void sleep_while_busy(rfaas_lease *l, int64_t ns) {
    struct timespec ts = {.tv_nsec = ns};
    syscall(SYS_futex, &owner_of(l)->busy, FUTEX_WAIT_PRIVATE, 1, &ts, NULL, 0);
}

/* Waits until the former owner leaves or shares the lease. Under owner_mu. */
static int wait_for_owner(rfaas_lease *l, const char *op, int64_t deadline) {
    for (int spins = 0; busy(l) && !__atomic_load_n(&l->shared, __ATOMIC_ACQUIRE); spins++) {
        if (spins < SPINS) {
            dp_cpu_pause();
            continue;
        }
        if (deadline && dp_now_ns() >= deadline)
            return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "%s: until the deadline another thread replaced a worker or "
                                  "waited for another executor", op);
        ask_owner(l);
        sleep_while_busy(l, ASK_EVERY_NS);
    }
    return RFAAS_OK;
}

/* Makes this thread the owner, or makes the lease shared. */
static int change_owner(rfaas_lease *l, const char *op, int64_t deadline) {
    struct timespec ts = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    int status = RFAAS_OK;
    if (!deadline)
        pthread_mutex_lock(&l->owner_mu);
    else if (pthread_mutex_clocklock(&l->owner_mu, CLOCK_MONOTONIC, &ts))
        return rfaas_api_fail(RFAAS_DEADLINE, RFAAS_NOT_STARTED, "%s: another thread was inside the lease until the deadline", op);
    uintptr_t owner = owner_thread(l), me = this_thread();
    if (!usable(l) || shared(l) || owner == me) {
        pthread_mutex_unlock(&l->owner_mu);
        return RFAAS_OK;
    }
    if (!make_turns(l))
        status = rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    bool outside = owner == 0 && have_barrier();
    if (!status && owner > RFAAS_OWNER_NONE) {
        __atomic_store_n(&owner_of(l)->thread, RFAAS_OWNER_NONE, __ATOMIC_SEQ_CST);
        syscall(SYS_membarrier, barrier_command, 0, 0);
        outside = !busy(l);
    }
    if (!status)
        status = wait_for_owner(l, op, deadline);
    if (!status && usable(l) && !shared(l)) {
        bool again = outside && l->owned - l->first_owned <= CHANGES_MAX;
        set_owner(l, again ? me : RFAAS_OWNER_NONE);
        if (!again) {
            dp_turns_set_count(l->turns, units(l)); /* the owner may have added workers since make_turns */
            __atomic_store_n(&l->shared, 1, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&l->owner_mu);
    return status;
}

static uint32_t place(void) { return (uint32_t)(this_thread() >> 12); }

int rfaas_api_join(rfaas_lease *l, const char *op, int64_t deadline) {
    for (;;) {
        if (__atomic_load_n(&l->shared, __ATOMIC_ACQUIRE)) {
            dp_turns_enter(l->turns, place());
            if (usable(l)) {
                __atomic_add_fetch(&l->line->busy, 1, __ATOMIC_SEQ_CST);
                return RFAAS_OK;
            }
            dp_turns_leave(l->turns, place());
        } else if (enter(l)) {
            if (usable(l))
                return RFAAS_OK;
            __atomic_store_n(&l->line->busy, 0, __ATOMIC_RELAXED);
            set_outside(owner_of(l));
        }
        if (!usable(l))
            return rfaas_api_bad_lease(l, op);
        int status = change_owner(l, op, deadline);
        if (status)
            return status;
    }
}

bool rfaas_api_enter_if_free(rfaas_lease *l, const char *op, int64_t deadline) {
    uintptr_t owner = owner_thread(l);
    bool occupied = owner && owner != this_thread() && !shared(l) && busy(l);
    return usable(l) && !occupied && (enter(l) || !rfaas_api_join(l, op, deadline));
}

bool rfaas_api_share(rfaas_lease *l, uint32_t unit, dp_turn_kind kind) {
    if (owner_thread(l) == this_thread())
        return false;
    dp_turns_set_count(l->turns, units(l)); /* the owner may have added workers since make_turns */
    dp_turns_enter(l->turns, place()); /* line->busy counts this thread already */
    if (unit != RFAAS_NO_UNIT)
        dp_turns_try(l->turns, kind, unit); /* succeeds, since no other thread is inside */
    __atomic_store_n(&l->shared, 1, __ATOMIC_RELEASE);
    set_outside(owner_of(l));
    return true;
}

int rfaas_api_leave_shared(rfaas_lease *l, int status) {
    static _Thread_local uint32_t left;
    if (UNLIKELY(++left % LOOK_EVERY == 0 || __atomic_load_n(&l->grows, __ATOMIC_RELAXED) || __atomic_load_n(&rfaas_api_unreported, __ATOMIC_RELAXED)))
        rfaas_api_look_leaving(l, status);
    rfaas_agent_lease_line *line = l->line;
    bool last = !__atomic_sub_fetch(&line->busy, 1, __ATOMIC_SEQ_CST);
    if (UNLIKELY(last && __atomic_load_n(&line->draining, __ATOMIC_SEQ_CST) == RFAAS_AGENT_DRAIN_SOON) &&
        !__atomic_load_n(&line->busy, __ATOMIC_SEQ_CST)) /* a thread that entered before SOON may be starting a call; that thread sends FINISH */
        rfaas_api_finish(l);
    dp_turns_leave(l->turns, place()); /* last, because the lease may be released after it */
    return status;
}

/* ---- all units ---- */

int rfaas_api_enter_last(rfaas_lease *l, const char *op, const rfaas_session *of) {
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (of && l->session != of) /* the session cannot change while this thread is inside */
        return leave(l, rfaas_api_bad_lease(l, op));
    if (__atomic_exchange_n(&l->magic, 0, __ATOMIC_SEQ_CST) != RFAAS_LEASE_MAGIC) /* another thread releases it, too */
        return leave(l, rfaas_api_bad_lease(l, op));
    if (!shared(l))
        return RFAAS_OK;
    dp_turns_close(l->turns); /* interrupts the threads inside; each checks whether the turns are closed before it waits again */
    dp_event_signal(&l->freed);
    dp_turns_drain(l->turns, 1);
    return RFAAS_OK;
}

static int take_all(rfaas_lease *l, const char *op, dp_turn_kind kind, int64_t deadline) {
    if (!shared(l))
        return RFAAS_OK;
    for (uint32_t i = 0, unit; i < units(l); i++) { /* every thread takes them in this order and holds none before */
        int status = dp_turns_take(l->turns, kind, i, false, deadline, &unit);
        if (!status)
            continue;
        while (i-- > 0)
            dp_turns_put_down(l->turns, i);
        return rfaas_api_fail(status, RFAAS_NOT_STARTED, status == RFAAS_DEADLINE
                                                             ? "%s: another thread had a worker until the deadline"
                                                             : "%s: the lease was released by another thread", op);
    }
    return RFAAS_OK;
}

int rfaas_api_take_all(rfaas_lease *l, const char *op, int64_t deadline) { return take_all(l, op, DP_TURN_BRIEF, deadline); }

int rfaas_api_take_long(rfaas_lease *l, const char *op) { return take_all(l, op, DP_TURN_LONG, 0); }

bool rfaas_api_wanted(const rfaas_lease *l) {
    bool wanted = dp_turns_closed(l->turns);
    for (uint32_t i = 0; !wanted && i < units(l); i++)
        wanted = dp_turns_brief(l->turns, i);
    return wanted;
}

bool rfaas_api_others(const rfaas_lease *l) {
    bool others = false;
    for (uint32_t i = 0; shared(l) && !others && i < units(l); i++)
        others = dp_turns_others(l->turns, i);
    return others;
}

void rfaas_api_put_all(rfaas_lease *l) {
    for (uint32_t i = 0; shared(l) && i < units(l); i++)
        dp_turns_put_down(l->turns, i);
}

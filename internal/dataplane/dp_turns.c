#include "dp_turns.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dp_fabric.h"

#define SPINS 64 /* before a thread goes to sleep: about as long as a short call takes */

enum { ASLEEP = 0, TRY = 1, GIVEN = 2 };

struct dp_turn_waiter {
    dp_turn_waiter *next;
    dp_turn_kind kind;
    bool any;
    uint32_t unit; /* without any: the unit it waits for; GIVEN: the unit that it got */
    uint32_t word; /* atomic, futex: ASLEEP, TRY, GIVEN */
    int64_t since;
};

/* ---- events ---- */

int dp_event_wait(dp_event *e, uint32_t seen, int64_t deadline_ns) {
    struct timespec ts = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    int saved = errno;
    long st = syscall(SYS_futex, &e->count, FUTEX_WAIT_BITSET_PRIVATE, seen, deadline_ns ? &ts : NULL, NULL, FUTEX_BITSET_MATCH_ANY);
    bool late = st < 0 && errno == ETIMEDOUT;
    errno = saved;
    return late ? DP_DEADLINE : DP_OK;
}

void dp_event_wake(dp_event *e) {
    __atomic_add_fetch(&e->count, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &e->count, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* ---- turns ---- */

void dp_turns_init(dp_turns *t, uint32_t n, void (*ask)(void *arg, uint32_t unit), void *arg) {
    memset(t, 0, sizeof *t);
    t->n = n;
    t->last = &t->first;
    t->ask = ask;
    t->arg = arg;
    pthread_mutex_init(&t->mu, NULL);
}

void dp_turns_reset(dp_turns *t, uint32_t n) {
    t->n = n;
    for (uint32_t i = 0; i < DP_TURNS_MAX; i++)
        __atomic_store_n(&t->units[i].state, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&t->closed, 0, __ATOMIC_SEQ_CST);
}

uint32_t dp_turns_inside(const dp_turns *t) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < DP_TURNS_MAX; i++)
        n += __atomic_load_n(&t->units[i].inside, __ATOMIC_SEQ_CST);
    return n;
}

void dp_turns_drain(dp_turns *t, uint32_t most) {
    for (bool gone = false; !gone;) {
        uint32_t seen = dp_event_prepare(&t->left);
        gone = dp_turns_inside(t) <= most;
        if (!gone)
            dp_event_wait(&t->left, seen, 0);
        dp_event_finish(&t->left);
    }
}

/* ---- without waiting ---- */

static inline bool suits(dp_turn_kind kind, uint32_t state) { return kind == DP_TURN_CALL ? state == 0 : !(state & DP_TURN_HELD); }

static inline uint32_t taken(dp_turn_kind kind, uint32_t state) { return state | (kind == DP_TURN_CALL ? DP_TURN_HELD | DP_TURN_CLAIM : DP_TURN_HELD); }

bool dp_turns_try(dp_turns *t, dp_turn_kind kind, uint32_t unit) {
    uint32_t *word = &t->units[unit].state, state = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (suits(kind, state))
        if (__atomic_compare_exchange_n(word, &state, taken(kind, state), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            return true;
    return false;
}

static bool try_any(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, uint32_t *unit) {
    uint32_t n = dp_turns_count(t);
    for (uint32_t i = 0; i < (any ? n : 1); i++, from = from + 1 >= n ? 0 : from + 1)
        if (dp_turns_try(t, kind, from)) {
            *unit = from;
            return true;
        }
    return false;
}

/* ---- the list of waiting threads ---- */

static void count(dp_turns *t, const dp_turn_waiter *w, uint32_t by) {
    dp_turn *u = &t->units[w->unit];
    uint32_t *n = w->any ? &t->any : w->kind == DP_TURN_CALL ? &u->calls : w->kind == DP_TURN_BRIEF ? &u->brief : &u->others;
    __atomic_add_fetch(n, by, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&t->waiting, by, __ATOMIC_SEQ_CST);
}

/* Under mu, as is strike_out. */
static void enlist(dp_turns *t, dp_turn_waiter *w) {
    *t->last = w;
    t->last = &w->next;
    count(t, w, 1);
}

static void strike_out(dp_turns *t, dp_turn_waiter *w) {
    dp_turn_waiter **p = &t->first;
    while (*p != w)
        p = &(*p)->next;
    if (!(*p = w->next))
        t->last = p;
    count(t, w, UINT32_MAX);
}

/* Wakes a thread whose word has changed. It may have returned by now. The address is only a name for the kernel. */
static void wake_futex(dp_turn_waiter *w) { syscall(SYS_futex, &w->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static void wake_to_try(dp_turn_waiter *w) {
    __atomic_store_n(&w->word, TRY, __ATOMIC_RELEASE);
    wake_futex(w);
}

/* Returns the first thread, from w on, that may take a unit in this state. Under mu. */
static dp_turn_waiter *next_for(dp_turn_waiter *w, uint32_t unit, uint32_t state) {
    while (w && !((w->any || w->unit == unit) && suits(w->kind, state)))
        w = w->next;
    return w;
}

/* Wakes the first sleeping thread that may take the unit. One that is awake already may take another unit. Under mu. */
static void wake_for(dp_turns *t, uint32_t unit, uint32_t state) {
    dp_turn_waiter *w = next_for(t->first, unit, state);
    while (w && __atomic_load_n(&w->word, __ATOMIC_RELAXED) != ASLEEP)
        w = next_for(w->next, unit, state);
    if (w)
        wake_to_try(w);
}

/* Passes on the wake of a thread that leaves the list without having tried: it may be the only thread that was woken for a unit. Under mu. */
static void wake_others(dp_turns *t) {
    for (uint32_t i = 0; t->first && i < dp_turns_count(t); i++)
        wake_for(t, i, __atomic_load_n(&t->units[i].state, __ATOMIC_SEQ_CST));
}

static void hand_over(dp_turns *t, dp_turn_waiter *w, uint32_t unit) {
    strike_out(t, w);
    w->unit = unit;
    if (__atomic_exchange_n(&w->word, GIVEN, __ATOMIC_ACQ_REL) == TRY)
        wake_others(t);
    wake_futex(w);
}

/* Releases a unit while threads wait. With `at_once` it hands the unit to the first thread that may take it. Without, a thread that waits
 * to call is only woken, unless it has waited for DP_TURN_PATIENCE_NS: a running thread may take the unit first, which keeps the
 * processor busy meanwhile. */
static __attribute__((noinline)) void release_to(dp_turns *t, uint32_t unit, uint32_t state, bool at_once) {
    uint32_t *word = &t->units[unit].state;
    pthread_mutex_lock(&t->mu);
    dp_turn_waiter *w = next_for(t->first, unit, state);
    if (w && (at_once || w->kind != DP_TURN_CALL || dp_now_ns() - w->since >= DP_TURN_PATIENCE_NS)) {
        __atomic_store_n(word, taken(w->kind, state), __ATOMIC_SEQ_CST);
        hand_over(t, w, unit);
    } else {
        __atomic_store_n(word, state, __ATOMIC_SEQ_CST);
        wake_for(t, unit, state);
    }
    pthread_mutex_unlock(&t->mu);
}

static inline void release(dp_turns *t, uint32_t unit, uint32_t state, bool at_once) {
    if (__builtin_expect(__atomic_load_n(&t->waiting, __ATOMIC_RELAXED) != 0, 0)) {
        release_to(t, unit, state, at_once);
        return;
    }
    __atomic_store_n(&t->units[unit].state, state, __ATOMIC_SEQ_CST);
    if (__builtin_expect(__atomic_load_n(&t->waiting, __ATOMIC_SEQ_CST) == 0, 1))
        return;
    /* A thread has begun to wait in between. Take the unit back, unless another thread has it by now, and release it to the list. */
    uint32_t expected = state;
    if (__atomic_compare_exchange_n(&t->units[unit].state, &expected, state | DP_TURN_HELD, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        release_to(t, unit, state, at_once);
}

void dp_turns_put_down(dp_turns *t, uint32_t unit) {
    release(t, unit, __atomic_load_n(&t->units[unit].state, __ATOMIC_RELAXED) & ~DP_TURN_HELD, true);
}

void dp_turns_give(dp_turns *t, uint32_t unit) { release(t, unit, 0, false); }

/* ---- waiting ---- */

static void sleep_until(dp_turn_waiter *w, int64_t deadline_ns) {
    struct timespec ts = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    syscall(SYS_futex, &w->word, FUTEX_WAIT_BITSET_PRIVATE, ASLEEP, deadline_ns ? &ts : NULL, NULL, FUTEX_BITSET_MATCH_ANY);
}

/* Leaves the list. Returns true if a unit was handed over meanwhile. If the thread was woken to try, wakes other threads instead: it may
 * leave with another unit than the one that was free, or with none. */
static bool give_up(dp_turns *t, dp_turn_waiter *w, bool woken) {
    pthread_mutex_lock(&t->mu);
    uint32_t word = __atomic_load_n(&w->word, __ATOMIC_ACQUIRE);
    if (word != GIVEN)
        strike_out(t, w);
    if (word == TRY || woken)
        wake_others(t);
    pthread_mutex_unlock(&t->mu);
    return word == GIVEN;
}

/* Asks the threads that hold what this thread waits for. A thread with a claim is not asked to make room for another call. */
static void ask(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any) {
    for (uint32_t i = any ? 0 : from; i < (any ? dp_turns_count(t) : from + 1); i++) {
        uint32_t state = __atomic_load_n(&t->units[i].state, __ATOMIC_SEQ_CST);
        if (kind == DP_TURN_CALL ? state == DP_TURN_HELD : state & DP_TURN_HELD)
            t->ask(t->arg, i);
    }
}

static __attribute__((noinline)) int wait_for(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, int64_t deadline_ns,
                                              uint32_t *unit) {
    for (int i = 0; i < SPINS; i++) {
        dp_cpu_pause();
        if (!__atomic_load_n(&t->waiting, __ATOMIC_RELAXED) && try_any(t, kind, from, any, unit))
            return DP_OK;
    }
    dp_turn_waiter w = {.kind = kind, .any = any, .unit = any ? 0 : from, .since = dp_now_ns()};
    bool woken = false; /* was TRY */
    pthread_mutex_lock(&t->mu);
    enlist(t, &w);
    pthread_mutex_unlock(&t->mu);
    for (;;) {
        /* This thread is in the list, so a thread that puts a unit down from here on sees it. It tries even after its deadline, because it
         * may be the only thread that was woken for a unit. */
        if (try_any(t, kind, from, any, unit)) {
            if (give_up(t, &w, woken))
                dp_turns_give(t, w.unit); /* a second unit, possible only with `any` */
            return DP_OK;
        }
        bool closed = kind != DP_TURN_CLAIMED && dp_turns_closed(t), late = deadline_ns && dp_now_ns() >= deadline_ns;
        if (closed || late) {
            if (!give_up(t, &w, woken))
                return closed ? DP_LEASE_ENDED : DP_DEADLINE;
            *unit = w.unit;
            return DP_OK;
        }
        ask(t, kind, from, any);
        sleep_until(&w, deadline_ns);
        uint32_t word = __atomic_load_n(&w.word, __ATOMIC_ACQUIRE);
        if (word == GIVEN) {
            *unit = w.unit;
            return DP_OK;
        }
        if (word == TRY) {
            uint32_t try = TRY;
            if (!__atomic_compare_exchange_n(&w.word, &try, ASLEEP, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
                *unit = w.unit;
                return DP_OK;
            }
            woken = true;
        }
    }
}

int dp_turns_take(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, int64_t deadline_ns, uint32_t *unit) {
    if (__builtin_expect(!try_any(t, kind, from, any, unit), 0)) {
        int st = wait_for(t, kind, from, any, deadline_ns, unit);
        if (st)
            return st;
    }
    /* Checked last: dp_turns_close first closes the turns and then asks the threads that have units. So a thread that sees the turns open
     * here will be asked. */
    if (__builtin_expect(kind == DP_TURN_CLAIMED || !dp_turns_closed(t), 1))
        return DP_OK;
    if (kind == DP_TURN_CALL)
        dp_turns_give(t, *unit);
    else
        dp_turns_put_down(t, *unit);
    return DP_LEASE_ENDED;
}

void dp_turns_close(dp_turns *t) {
    __atomic_store_n(&t->closed, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&t->mu);
    for (dp_turn_waiter *w = t->first; w; w = w->next)
        if (__atomic_load_n(&w->word, __ATOMIC_RELAXED) == ASLEEP)
            wake_to_try(w);
    pthread_mutex_unlock(&t->mu);
    for (uint32_t i = 0; i < dp_turns_count(t); i++)
        t->ask(t->arg, i);
}

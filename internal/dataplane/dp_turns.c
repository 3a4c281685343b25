#include "dp_turns.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dp_fabric.h"

#define HELD 1u
#define CLAIM 2u
#define SPINS 64 /* before a thread goes to sleep: about as long as a short call takes */

enum { ASLEEP = 0, TRY = 1, GIVEN = 2 };

struct dp_turn_waiter {
    dp_turn_waiter *next;
    dp_turn_kind kind;
    bool any;
    uint32_t unit; /* without any: which; of one that was given: which */
    uint32_t word; /* atomic, futex: ASLEEP, TRY, GIVEN */
    int64_t since;
};

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

/* ---- without waiting ---- */

static inline bool suits(dp_turn_kind kind, uint32_t state) { return kind == DP_TURN_CALL ? state == 0 : !(state & HELD); }

static inline uint32_t taken(dp_turn_kind kind, uint32_t state) { return state | (kind == DP_TURN_CALL ? HELD | CLAIM : HELD); }

bool dp_turns_try(dp_turns *t, dp_turn_kind kind, uint32_t unit) {
    uint32_t *word = &t->units[unit].state, state = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (suits(kind, state))
        if (__atomic_compare_exchange_n(word, &state, taken(kind, state), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
            return true;
    return false;
}

static bool try_any(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, uint32_t *unit) {
    for (uint32_t i = 0; i < (any ? t->n : 1); i++, from = from + 1 >= t->n ? 0 : from + 1)
        if (dp_turns_try(t, kind, from)) {
            *unit = from;
            return true;
        }
    return false;
}

/* ---- the list of those that wait ---- */

static void count(dp_turns *t, const dp_turn_waiter *w, uint32_t by) {
    dp_turn *u = &t->units[w->unit];
    uint32_t *n = w->any ? &t->any : w->kind == DP_TURN_CALL ? &u->calls : w->kind == DP_TURN_BRIEF ? &u->brief : &u->others;
    __atomic_add_fetch(n, by, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&t->waiting, by, __ATOMIC_SEQ_CST);
}

/* Under mu, as is the next one. */
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

static void wake(dp_turn_waiter *w, uint32_t what) {
    __atomic_store_n(&w->word, what, __ATOMIC_RELEASE);
    /* From here on the waiter may have left: the address is only a name for the kernel. */
    syscall(SYS_futex, &w->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* The first that a unit in this state suits. Under mu. */
static dp_turn_waiter *next_for(const dp_turns *t, uint32_t unit, uint32_t state) {
    dp_turn_waiter *w = t->first;
    while (w && !((w->any || w->unit == unit) && suits(w->kind, state)))
        w = w->next;
    return w;
}

static void hand_over(dp_turns *t, dp_turn_waiter *w, uint32_t unit) {
    strike_out(t, w);
    w->unit = unit;
    wake(w, GIVEN);
}

/* A call has ended, or `at_once`: the unit is handed over to any thread that it suits. Else one that waits for its turn to call is
 * woken and takes it if it is quick enough, which keeps the processor busy meanwhile. */
static __attribute__((noinline)) void release_to(dp_turns *t, uint32_t unit, uint32_t state, bool at_once) {
    uint32_t *word = &t->units[unit].state;
    pthread_mutex_lock(&t->mu);
    dp_turn_waiter *w = next_for(t, unit, state);
    if (w && (at_once || w->kind != DP_TURN_CALL || dp_now_ns() - w->since >= DP_TURN_PATIENCE_NS)) {
        __atomic_store_n(word, taken(w->kind, state), __ATOMIC_SEQ_CST);
        hand_over(t, w, unit);
    } else {
        __atomic_store_n(word, state, __ATOMIC_SEQ_CST);
        if (w && __atomic_load_n(&w->word, __ATOMIC_RELAXED) == ASLEEP)
            wake(w, TRY);
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
    /* One has come in between. Unless it, or another, has the unit by now, it gets it. */
    uint32_t expected = state;
    if (__atomic_compare_exchange_n(&t->units[unit].state, &expected, state | HELD, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        release_to(t, unit, state, at_once);
}

void dp_turns_put_down(dp_turns *t, uint32_t unit) {
    release(t, unit, __atomic_load_n(&t->units[unit].state, __ATOMIC_RELAXED) & ~HELD, true);
}

void dp_turns_give(dp_turns *t, uint32_t unit) { release(t, unit, 0, false); }

/* ---- waiting ---- */

static void sleep_until(dp_turn_waiter *w, int64_t deadline_ns) {
    struct timespec ts = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    syscall(SYS_futex, &w->word, FUTEX_WAIT_BITSET_PRIVATE, ASLEEP, deadline_ns ? &ts : NULL, NULL, FUTEX_BITSET_MATCH_ANY);
}

/* Leaves the list; the unit that was given meanwhile is ours all the same. */
static bool give_up(dp_turns *t, dp_turn_waiter *w) {
    pthread_mutex_lock(&t->mu);
    bool given = __atomic_load_n(&w->word, __ATOMIC_ACQUIRE) == GIVEN;
    if (!given)
        strike_out(t, w);
    pthread_mutex_unlock(&t->mu);
    return given;
}

/* Tells those that hold what this thread waits for. Whoever has a claim does not make room for another call. */
static void ask(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any) {
    for (uint32_t i = any ? 0 : from; i < (any ? t->n : from + 1); i++) {
        uint32_t state = __atomic_load_n(&t->units[i].state, __ATOMIC_SEQ_CST);
        if (kind == DP_TURN_CALL ? state == HELD : state & HELD)
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
    pthread_mutex_lock(&t->mu);
    enlist(t, &w);
    pthread_mutex_unlock(&t->mu);
    for (;;) {
        bool closed = kind != DP_TURN_CLAIMED && dp_turns_closed(t), late = deadline_ns && dp_now_ns() >= deadline_ns;
        if (closed || late) {
            if (!give_up(t, &w))
                return closed ? DP_LEASE_ENDED : DP_DEADLINE;
            *unit = w.unit;
            return DP_OK;
        }
        /* After it was enlisted: whoever puts a unit down from here on sees it. */
        if (try_any(t, kind, from, any, unit)) {
            if (give_up(t, &w))
                dp_turns_give(t, w.unit); /* a second one */
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
        }
    }
}

int dp_turns_take(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, int64_t deadline_ns, uint32_t *unit) {
    if (__builtin_expect(kind != DP_TURN_CLAIMED && dp_turns_closed(t), 0))
        return DP_LEASE_ENDED;
    if (__builtin_expect(try_any(t, kind, from, any, unit), 1))
        return DP_OK;
    return wait_for(t, kind, from, any, deadline_ns, unit);
}

void dp_turns_close(dp_turns *t) {
    __atomic_store_n(&t->closed, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&t->mu);
    for (dp_turn_waiter *w = t->first; w; w = w->next)
        if (__atomic_load_n(&w->word, __ATOMIC_RELAXED) == ASLEEP)
            wake(w, TRY);
    pthread_mutex_unlock(&t->mu);
    for (uint32_t i = 0; i < t->n; i++)
        t->ask(t->arg, i);
}

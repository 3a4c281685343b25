/* Turns: several threads share units. One thread at a time uses a unit.
 *
 * A thread holds a unit while it accesses the data of the unit, and claims it for the time of a call. The thread with the claim may
 * put the unit down while it waits and take it again later; meanwhile other threads may hold the unit, but not claim it.
 *
 *   free ──take(CALL)──▶ claimed, held ◀──take(CLAIMED)── claimed ──take(BRIEF, LONG)──▶ claimed, held
 *     │                     │      └──────put_down───────────▲ ▲──────────put_down──────────────┘
 *     │                     └─give─▶ free
 *     └──take(BRIEF, LONG)─▶ held ──put_down─▶ free
 *
 * Without competition, taking and giving cost one atomic operation each. Waiting threads get units in the order of their arrival, with
 * one exception: at the end of a call a running thread may claim the unit before a sleeping one has woken. A thread that has waited
 * for DP_TURN_PATIENCE_NS is handed the next unit that suits it, so that none starves.
 */
#ifndef RFAAS_DP_TURNS_H
#define RFAAS_DP_TURNS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define DP_TURNS_MAX 64
#define DP_TURN_PATIENCE_NS 500000

typedef enum dp_turn_kind {
    DP_TURN_BRIEF = 0,   /* holds the unit for moments */
    DP_TURN_LONG = 1,    /* holds it while it waits for a reply, and puts it down when other threads want it */
    DP_TURN_CLAIMED = 2, /* DP_TURN_LONG for the thread that has the claim */
    DP_TURN_CALL = 3,    /* claims and holds it */
} dp_turn_kind;

/* An event that threads wait for. Without a waiting thread, a signal costs a load.
 *
 *   waiting thread:  seen = dp_event_prepare ──▶ check the condition again ──▶ dp_event_wait(seen) ──▶ dp_event_finish
 *   other thread:    change the condition ──▶ dp_event_signal
 *
 * All accesses are sequentially consistent: either the waiting thread sees the change, or the signal wakes it. */
typedef struct dp_event {
    uint32_t count;   /* atomic, futex */
    uint32_t waiting; /* atomic: threads between dp_event_prepare and dp_event_finish */
} dp_event;

static inline uint32_t dp_event_prepare(dp_event *e) {
    __atomic_add_fetch(&e->waiting, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&e->count, __ATOMIC_SEQ_CST);
}
/* dp_event_wait returns DP_OK after a signal, and sometimes without one; DP_DEADLINE after deadline_ns (CLOCK_MONOTONIC, 0: none). */
int dp_event_wait(dp_event *e, uint32_t seen, int64_t deadline_ns);
static inline void dp_event_finish(dp_event *e) { __atomic_sub_fetch(&e->waiting, 1, __ATOMIC_SEQ_CST); }
/* The slow part of dp_event_signal. */
void dp_event_wake(dp_event *e);
static inline void dp_event_signal(dp_event *e) {
    if (__builtin_expect(__atomic_load_n(&e->waiting, __ATOMIC_SEQ_CST) != 0, 0))
        dp_event_wake(e);
}

typedef struct dp_turn_waiter dp_turn_waiter;

#define DP_TURN_HELD 1u
#define DP_TURN_CLAIM 2u

typedef struct dp_turn {
    uint32_t state;   /* atomic: DP_TURN_HELD, DP_TURN_CLAIM */
    uint32_t brief;   /* atomic: threads that wait with DP_TURN_BRIEF */
    uint32_t others;  /* atomic: threads that wait with DP_TURN_LONG or DP_TURN_CLAIMED */
    uint32_t calls;   /* atomic: threads that wait with DP_TURN_CALL for this unit */
    uint32_t inside;  /* atomic: count of dp_turns_enter */
    uint8_t pad[44];  /* a cache line each */
} dp_turn;

typedef struct dp_turns {
    uint32_t n; /* atomic; only grows while threads are inside */
    uint32_t closed;  /* atomic */
    uint32_t waiting; /* atomic: threads in the list */
    uint32_t any;     /* atomic: threads that wait with DP_TURN_CALL for any unit */
    dp_event left;    /* a thread has left (dp_turns_leave) */
    pthread_mutex_t mu;
    dp_turn_waiter *first, **last; /* under mu, in the order of arrival */
    /* Called before a thread goes to sleep for a unit, so that the thread which holds that unit learns of it. */
    void (*ask)(void *arg, uint32_t unit);
    void *arg;
    dp_turn units[DP_TURNS_MAX];
} dp_turns;

/* n: 1..DP_TURNS_MAX. */
void dp_turns_init(dp_turns *t, uint32_t n, void (*ask)(void *arg, uint32_t unit), void *arg);

/* dp_turns_take takes the unit `from`, or with `any` (DP_TURN_CALL only) the first free unit from there on. *unit becomes its index.
 * Waits until deadline_ns (CLOCK_MONOTONIC, 0: for ever). Returns DP_OK, DP_DEADLINE, or DP_LEASE_ENDED after dp_turns_close. */
int dp_turns_take(dp_turns *t, dp_turn_kind kind, uint32_t from, bool any, int64_t deadline_ns, uint32_t *unit);
/* dp_turns_try is dp_turns_take of one unit without waiting. */
bool dp_turns_try(dp_turns *t, dp_turn_kind kind, uint32_t unit);
/* Puts a held unit down; a claim stays. */
void dp_turns_put_down(dp_turns *t, uint32_t unit);
/* Puts it down and ends the claim. */
void dp_turns_give(dp_turns *t, uint32_t unit);
/* For a thread that holds a unit while it waits. dp_turns_brief: another thread wants the unit for moments, or to start a call if the
 * unit is not claimed. dp_turns_others: another thread wants it in order to wait, too. */
static inline bool dp_turns_brief(const dp_turns *t, uint32_t unit) {
    const dp_turn *u = &t->units[unit];
    return __atomic_load_n(&u->brief, __ATOMIC_SEQ_CST) ||
           (!(__atomic_load_n(&u->state, __ATOMIC_RELAXED) & DP_TURN_CLAIM) &&
            (__atomic_load_n(&u->calls, __ATOMIC_SEQ_CST) || __atomic_load_n(&t->any, __ATOMIC_SEQ_CST)));
}
static inline bool dp_turns_others(const dp_turns *t, uint32_t unit) {
    return __atomic_load_n(&t->units[unit].others, __ATOMIC_SEQ_CST) != 0;
}

/* dp_turns_enter and dp_turns_leave count the threads inside; a thread passes the same `place`, any number, to both. dp_turns_inside
 * returns the count. All are sequentially consistent: if one thread enters and then reads a word, and another changes the word and then
 * counts, at least one of them sees the other. */
static inline void dp_turns_enter(dp_turns *t, uint32_t place) {
    __atomic_add_fetch(&t->units[place % DP_TURNS_MAX].inside, 1, __ATOMIC_SEQ_CST);
}
static inline void dp_turns_leave(dp_turns *t, uint32_t place) {
    __atomic_sub_fetch(&t->units[place % DP_TURNS_MAX].inside, 1, __ATOMIC_SEQ_CST);
    dp_event_signal(&t->left); /* the turns are never freed, so another thread may have reset them by now */
}
uint32_t dp_turns_inside(const dp_turns *t);
/* dp_turns_drain waits until at most `most` threads are inside. */
void dp_turns_drain(dp_turns *t, uint32_t most);

/* dp_turns_close makes every present and later dp_turns_take return DP_LEASE_ENDED, except that of a thread with a claim, and asks the
 * threads that hold units to yield. dp_turns_reset reopens the turns, with all units free; no other thread may use them. */
void dp_turns_close(dp_turns *t);
void dp_turns_reset(dp_turns *t, uint32_t n);
/* dp_turns_count returns the number of units. dp_turns_set_count raises it. Units that the calling thread has taken by dp_turns_try before
 * are its own. */
static inline uint32_t dp_turns_count(const dp_turns *t) { return __atomic_load_n(&t->n, __ATOMIC_RELAXED); }
static inline void dp_turns_set_count(dp_turns *t, uint32_t n) { __atomic_store_n(&t->n, n, __ATOMIC_SEQ_CST); }
static inline bool dp_turns_closed(const dp_turns *t) { return __atomic_load_n(&t->closed, __ATOMIC_SEQ_CST) != 0; }

#endif

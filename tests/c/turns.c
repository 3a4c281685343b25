/* Turns (dp_turns.h): one thread at a time has a unit, waiting threads get it, deadlines and the end are kept. */
#include <stdlib.h>

#include "dp_turns.h"
#include "harness.h"

enum { UNITS = 3, THREADS = 6 };

typedef struct shared_units {
    dp_turns *t;
    uint64_t plain[UNITS];   /* guarded by the units, as the thread sanitizer checks */
    uint64_t claimed[UNITS]; /* by the claims */
    uint32_t asked[UNITS];   /* atomic */
    int rounds;
} shared_units;

typedef struct user {
    shared_units *s;
    pthread_t thread;
    uint64_t held, calls;
    int64_t longest;
} user;

static void note_ask(void *arg, uint32_t unit) {
    shared_units *s = arg;
    __atomic_store_n(&s->asked[unit], 1, __ATOMIC_SEQ_CST);
}

static void begin(shared_units *s, int rounds) {
    *s = (shared_units){.rounds = rounds};
    s->t = aligned_alloc(64, (sizeof *s->t + 63) & ~63ul);
    CHECK(s->t);
    dp_turns_init(s->t, UNITS, note_ask, s);
}

static void finish(shared_units *s) {
    CHECK_EQ(s->t->waiting, 0);
    CHECK_EQ(s->t->any, 0);
    for (int i = 0; i < UNITS; i++)
        CHECK(!s->t->units[i].state && !s->t->units[i].brief && !s->t->units[i].others && !s->t->units[i].calls);
    free(s->t);
}

/* Like a call: claims a unit, puts it down during a wait, and takes it up again. */
static void one_call(user *u, bool any) {
    shared_units *s = u->s;
    uint32_t unit, from = (uint32_t)(t_random() % UNITS);
    int64_t start = dp_now_ns();
    CHECK_STATUS(dp_turns_take(s->t, DP_TURN_CALL, from, any, 0, &unit), DP_OK);
    int64_t took = dp_now_ns() - start;
    u->longest = took > u->longest ? took : u->longest;
    CHECK(any || unit == from);
    s->plain[unit]++;
    uint64_t was = ++s->claimed[unit];
    for (uint64_t n = t_random() % 3; n; n--) {
        uint32_t same;
        dp_turns_put_down(s->t, unit);
        CHECK_STATUS(dp_turns_take(s->t, DP_TURN_CLAIMED, unit, false, 0, &same), DP_OK);
        CHECK_EQ(same, unit);
        CHECK_EQ(s->claimed[unit], was);
        s->plain[unit]++;
        u->held++;
    }
    dp_turns_give(s->t, unit);
    u->held++;
    u->calls++;
}

static void *use(void *arg) {
    user *u = arg;
    shared_units *s = u->s;
    t_name("user of turns");
    for (int i = 0; i < s->rounds; i++) {
        uint32_t unit = (uint32_t)(t_random() % UNITS), same;
        switch (t_random() % 4) {
        case 0:
        case 1: one_call(u, t_random() % 4 != 0); break;
        case 2:
            CHECK_STATUS(dp_turns_take(s->t, DP_TURN_BRIEF, unit, false, 0, &same), DP_OK);
            s->plain[unit]++;
            u->held++;
            dp_turns_put_down(s->t, unit);
            break;
        case 3:
            CHECK_STATUS(dp_turns_take(s->t, DP_TURN_LONG, unit, false, 0, &same), DP_OK);
            while (!dp_turns_brief(s->t, unit) && !dp_turns_others(s->t, unit) && t_random() % 64)
                dp_cpu_pause();
            s->plain[unit]++;
            u->held++;
            dp_turns_put_down(s->t, unit);
            break;
        }
    }
    return NULL;
}

T_CASE(turns_exclude, "turns/one-thread-at-a-time", .providers = T_SHM, .seconds = 60) {
    shared_units s;
    user u[THREADS] = {0};
    begin(&s, (int)t_pick(30000, 3000));
    for (int i = 0; i < THREADS; i++) {
        u[i].s = &s;
        CHECK(!pthread_create(&u[i].thread, NULL, use, &u[i]));
    }
    uint64_t held = 0, calls = 0, plain = 0, claimed = 0;
    int64_t longest = 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(u[i].thread, NULL);
        held += u[i].held;
        calls += u[i].calls;
        longest = u[i].longest > longest ? u[i].longest : longest;
    }
    for (int i = 0; i < UNITS; i++) {
        plain += s.plain[i];
        claimed += s.claimed[i];
    }
    CHECK_EQ(plain, held);
    CHECK_EQ(claimed, calls);
    printf("%llu calls, %llu times held, the longest wait was %.3f ms\n", (unsigned long long)calls, (unsigned long long)held,
           (double)longest / 1e6);
    finish(&s);
}

/* The outcome of a take that has to wait, in a thread. */
typedef struct waiting {
    shared_units *s;
    dp_turn_kind kind;
    bool any;
    int64_t deadline;
    pthread_t thread;
    uint32_t unit;
    int status;
    int32_t done; /* atomic */
} waiting;

static void *take(void *arg) {
    waiting *w = arg;
    t_name("waits for its turn");
    w->status = dp_turns_take(w->s->t, w->kind, 1, w->any, w->deadline, &w->unit);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void start(waiting *w, shared_units *s, dp_turn_kind kind, bool any, int64_t deadline) {
    *w = (waiting){.s = s, .kind = kind, .any = any, .deadline = deadline};
    uint32_t before = __atomic_load_n(&s->t->waiting, __ATOMIC_SEQ_CST);
    CHECK(!pthread_create(&w->thread, NULL, take, w));
    while (__atomic_load_n(&s->t->waiting, __ATOMIC_SEQ_CST) == before && !__atomic_load_n(&w->done, __ATOMIC_ACQUIRE))
        t_sleep_ms(1);
}

static int join(waiting *w) {
    pthread_join(w->thread, NULL);
    return w->status;
}

T_CASE(turns_order, "turns/what-suits-whom", .providers = T_SHM) {
    shared_units s;
    waiting brief, call, any;
    uint32_t unit;
    begin(&s, 0);
    for (uint32_t i = 0; i < UNITS; i++)
        CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, i, false, 0, &unit), DP_OK);
    CHECK(!dp_turns_try(s.t, DP_TURN_BRIEF, 1) && !dp_turns_try(s.t, DP_TURN_CALL, 1));
    start(&call, &s, DP_TURN_CALL, false, 0);
    CHECK(!dp_turns_brief(s.t, 1)); /* a thread with a claim makes no room for another call */
    CHECK(!__atomic_load_n(&s.asked[1], __ATOMIC_ACQUIRE));
    start(&brief, &s, DP_TURN_BRIEF, false, 0);
    while (!__atomic_load_n(&s.asked[1], __ATOMIC_ACQUIRE))
        t_sleep_ms(1); /* start returns before the thread has asked */
    CHECK(dp_turns_brief(s.t, 1) && !dp_turns_others(s.t, 1));
    dp_turns_put_down(s.t, 1); /* to the later one: the other cannot claim it */
    CHECK_STATUS(join(&brief), DP_OK);
    CHECK(!__atomic_load_n(&call.done, __ATOMIC_ACQUIRE));
    dp_turns_put_down(s.t, 1);
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CLAIMED, 1, false, 0, &unit), DP_OK);
    start(&any, &s, DP_TURN_CALL, true, 0);
    dp_turns_give(s.t, 2);
    CHECK_STATUS(join(&any), DP_OK);
    CHECK_EQ(any.unit, 2);
    dp_turns_give(s.t, 1);
    CHECK_STATUS(join(&call), DP_OK);
    for (uint32_t i = 0; i < UNITS; i++)
        dp_turns_give(s.t, i);
    /* A unit that is held for a wait goes to the next call at once. */
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_LONG, 1, false, 0, &unit), DP_OK);
    start(&call, &s, DP_TURN_CALL, false, 0);
    while (!dp_turns_brief(s.t, 1))
        t_sleep_ms(1);
    dp_turns_put_down(s.t, 1);
    CHECK(!dp_turns_try(s.t, DP_TURN_LONG, 1));
    CHECK_STATUS(join(&call), DP_OK);
    dp_turns_give(s.t, 1);
    finish(&s);
}

T_CASE(turns_end, "turns/deadlines-and-the-end", .providers = T_SHM) {
    shared_units s;
    waiting w[4];
    uint32_t unit;
    begin(&s, 0);
    for (uint32_t i = 0; i < UNITS; i++)
        CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, i, false, 0, &unit), DP_OK);
    int64_t until = dp_now_ns() + 20000000;
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, 0, true, until, &unit), DP_DEADLINE);
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_BRIEF, 1, false, until, &unit), DP_DEADLINE);
    CHECK(dp_now_ns() >= until);
    start(&w[0], &s, DP_TURN_CALL, true, 0);
    start(&w[1], &s, DP_TURN_LONG, false, 0);
    start(&w[2], &s, DP_TURN_BRIEF, false, dp_now_ns() + 60000000000);
    dp_turns_enter(s.t, 7);
    dp_turns_enter(s.t, 77);
    CHECK_EQ(dp_turns_inside(s.t), 2);
    dp_turns_close(s.t);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(join(&w[i]), DP_LEASE_ENDED);
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, 0, true, 0, &unit), DP_LEASE_ENDED);
    dp_turns_put_down(s.t, 1);
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CLAIMED, 1, false, 0, &unit), DP_OK); /* to end the call that it has begun */
    for (uint32_t i = 0; i < UNITS; i++)
        dp_turns_give(s.t, i);
    dp_turns_leave(s.t, 7);
    dp_turns_leave(s.t, 77);
    dp_turns_reset(s.t, UNITS);
    CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, 0, true, 0, &unit), DP_OK);
    dp_turns_give(s.t, unit);
    finish(&s);
}

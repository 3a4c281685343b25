/* Turns (dp_turns.h): no wake is lost, and the end reaches every thread. After a lost wake, a thread never ends. */
#include <sched.h>
#include <stdlib.h>

#include "dp_turns.h"
#include "harness.h"

enum { MOST = 6 };

typedef struct turns_and_flags {
    dp_turns *t;
    uint32_t asked[DP_TURNS_MAX]; /* atomic */
} turns_and_flags;

typedef struct thread_of_turns {
    turns_and_flags *s;
    pthread_t thread;
    int64_t deadline;
    uint32_t unit;
    int status;
    int32_t done; /* atomic */
} thread_of_turns;

static void set_asked(void *arg, uint32_t unit) {
    turns_and_flags *s = arg;
    __atomic_store_n(&s->asked[unit], 1, __ATOMIC_SEQ_CST);
}

static void make(turns_and_flags *s, uint32_t units) {
    *s = (turns_and_flags){.t = aligned_alloc(64, (sizeof *s->t + 63) & ~63ul)};
    CHECK(s->t);
    dp_turns_init(s->t, units, set_asked, s);
}

static void *take_any(void *arg) {
    thread_of_turns *w = arg;
    t_name("waits for any unit");
    w->status = dp_turns_take(w->s->t, DP_TURN_CALL, 0, true, w->deadline, &w->unit);
    __atomic_store_n(&w->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Starts a thread. Waits until `waiting` threads are in the list, unless the first of them has reached its deadline. */
static void begin_take(thread_of_turns *w, turns_and_flags *s, int64_t deadline, uint32_t waiting, const thread_of_turns *first) {
    *w = (thread_of_turns){.s = s, .deadline = deadline};
    CHECK(!pthread_create(&w->thread, NULL, take_any, w));
    while (__atomic_load_n(&s->t->waiting, __ATOMIC_SEQ_CST) < waiting && !__atomic_load_n(&first->done, __ATOMIC_ACQUIRE))
        sched_yield();
}

/* Two units become free at once. Only one of the two threads that wait would be woken if the second wake went to the first one again. */
T_CASE(turns_two, "turns/two-units-wake-two-threads", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns w[2];
    uint32_t unit;
    make(&s, 2);
    for (uint64_t round = t_pick(300, 50); round; round--) {
        for (int i = 0; i < 2; i++)
            CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, 0, true, 0, &unit), DP_OK);
        begin_take(&w[0], &s, 0, 1, &w[0]);
        begin_take(&w[1], &s, 0, 2, &w[0]);
        dp_turns_give(s.t, 0);
        dp_turns_give(s.t, 1);
        for (int i = 0; i < 2; i++) {
            CHECK(!pthread_join(w[i].thread, NULL));
            CHECK_STATUS(w[i].status, DP_OK);
        }
        CHECK_NE(w[0].unit, w[1].unit);
        for (uint32_t i = 0; i < 2; i++)
            dp_turns_give(s.t, i);
    }
    free(s.t);
}

static void *take_from_1(void *arg) {
    thread_of_turns *w = arg;
    t_name("waits for any unit, from 1 on");
    w->status = dp_turns_take(w->s->t, DP_TURN_CALL, 1, true, 0, &w->unit);
    return NULL;
}

static void *take_0(void *arg) {
    thread_of_turns *w = arg;
    t_name("waits for unit 0");
    while (!__atomic_load_n(&w->s->t->waiting, __ATOMIC_SEQ_CST))
        sched_yield();
    w->status = dp_turns_take(w->s->t, DP_TURN_BRIEF, 0, false, 0, &w->unit);
    return NULL;
}

/* A thread is woken for unit 0, but takes unit 1, which becomes free before it runs. The next thread in the list is woken for unit 0 then. */
T_CASE(turns_other, "turns/woken-for-another-unit", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns any = {.s = &s}, one = {.s = &s};
    uint32_t unit;
    make(&s, 2);
    for (uint64_t round = t_pick(300, 50); round; round--) {
        for (uint32_t i = 0; i < 2; i++)
            CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, i, false, 0, &unit), DP_OK);
        CHECK(!pthread_create(&one.thread, NULL, take_0, &one));
        CHECK(!pthread_create(&any.thread, NULL, take_from_1, &any));
        while (__atomic_load_n(&s.t->waiting, __ATOMIC_SEQ_CST) < 2)
            sched_yield();
        dp_turns_give(s.t, 0);
        dp_turns_give(s.t, 1);
        CHECK(!pthread_join(any.thread, NULL));
        if (any.unit == 0)
            dp_turns_give(s.t, 0); /* it ran in between: no wake to pass on */
        CHECK(!pthread_join(one.thread, NULL));
        CHECK_STATUS(any.status, DP_OK);
        CHECK_STATUS(one.status, DP_OK);
        dp_turns_put_down(s.t, 0);
        if (any.unit == 1)
            dp_turns_give(s.t, 1);
    }
    free(s.t);
}

static _Thread_local bool held_back;

/* Like set_asked, but a thread that is held back does not return before flag 1 is set. */
static void ask_or_stay(void *arg, uint32_t unit) {
    turns_and_flags *s = arg;
    if (!held_back) {
        __atomic_add_fetch(&s->asked[0], unit == 1, __ATOMIC_SEQ_CST);
        return;
    }
    while (!__atomic_load_n(&s->asked[1], __ATOMIC_ACQUIRE))
        sched_yield();
}

static void *take_any_held_back(void *arg) {
    held_back = true;
    return take_any(arg);
}

/* The first thread is woken for one unit. Before it runs it has waited for so long that it is handed the other one. The second thread must
 * learn of the unit that the first was woken for. */
T_CASE(turns_handed, "turns/a-handed-unit-passes-the-wake-on", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns w[2];
    uint32_t unit;
    for (uint64_t round = t_pick(40, 10); round; round--) {
        make(&s, 2);
        s.t->ask = ask_or_stay;
        for (uint32_t i = 0; i < 2; i++) /* without a claim: a thread with one is not asked */
            CHECK_STATUS(dp_turns_take(s.t, DP_TURN_BRIEF, i, false, 0, &unit), DP_OK);
        int64_t began = dp_now_ns();
        w[0] = (thread_of_turns){.s = &s};
        CHECK(!pthread_create(&w[0].thread, NULL, take_any_held_back, &w[0]));
        while (__atomic_load_n(&s.t->waiting, __ATOMIC_SEQ_CST) < 1)
            sched_yield();
        begin_take(&w[1], &s, 0, 2, &w[0]);
        while (!__atomic_load_n(&s.asked[0], __ATOMIC_SEQ_CST)) /* then it goes to sleep */
            sched_yield();
        dp_turns_give(s.t, 0);
        while (dp_now_ns() < began + 2 * DP_TURN_PATIENCE_NS)
            dp_cpu_pause();
        dp_turns_give(s.t, 1);
        __atomic_store_n(&s.asked[1], 1, __ATOMIC_RELEASE);
        for (int i = 0; i < 2; i++) {
            CHECK(!pthread_join(w[i].thread, NULL));
            CHECK_STATUS(w[i].status, DP_OK);
        }
        CHECK_NE(w[0].unit, w[1].unit);
        free(s.t);
    }
}

/* A unit becomes free when the deadline of the thread that is woken for it passes. That thread takes it, or wakes the next one. */
T_CASE(turns_late, "turns/a-late-thread-wakes-the-next", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns late, next;
    uint32_t unit;
    int in_time = 0, rounds = (int)t_pick(400, 60);
    make(&s, 1);
    for (int round = 0; round < rounds; round++) {
        CHECK_STATUS(dp_turns_take(s.t, DP_TURN_CALL, 0, false, 0, &unit), DP_OK);
        int64_t deadline = dp_now_ns() + 400000;
        begin_take(&late, &s, deadline, 1, &late);
        begin_take(&next, &s, 0, 2, &late);
        while (dp_now_ns() < deadline - round % 40 * 1000)
            dp_cpu_pause();
        dp_turns_give(s.t, 0);
        CHECK(!pthread_join(late.thread, NULL));
        CHECK(late.status == DP_OK || late.status == DP_DEADLINE);
        if (late.status == DP_OK) {
            in_time++;
            dp_turns_give(s.t, 0);
        }
        CHECK(!pthread_join(next.thread, NULL));
        CHECK_STATUS(next.status, DP_OK);
        dp_turns_give(s.t, 0);
    }
    printf("%d of %d threads were in time\n", in_time, rounds);
    free(s.t);
}

/* Waits like a thread that has a call on a lane: until it is asked. It then checks whether the turns are closed. */
static void *call_until_closed(void *arg) {
    thread_of_turns *w = arg;
    dp_turns *t = w->s->t;
    t_name("calls until the end");
    for (;;) {
        uint32_t unit;
        dp_turns_enter(t, w->unit);
        int st = dp_turns_take(t, DP_TURN_CALL, w->unit % t->n, true, 0, &unit);
        if (st == DP_OK) {
            bool closed = false;
            for (int spins = 0; !closed && spins < 50; spins++) {
                while (!__atomic_exchange_n(&w->s->asked[unit], 0, __ATOMIC_SEQ_CST))
                    sched_yield();
                closed = dp_turns_closed(t);
            }
            dp_turns_give(t, unit);
        }
        dp_turns_leave(t, w->unit);
        if (st) {
            w->status = st;
            return NULL;
        }
    }
}

T_CASE(turns_hear, "turns/the-end-reaches-every-thread", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns w[MOST];
    make(&s, 2);
    for (uint64_t round = t_pick(300, 50); round; round--) {
        dp_turns_reset(s.t, 2);
        for (uint32_t i = 0; i < MOST; i++) {
            w[i] = (thread_of_turns){.s = &s, .unit = i};
            CHECK(!pthread_create(&w[i].thread, NULL, call_until_closed, &w[i]));
        }
        for (uint64_t n = t_random() % 50; n; n--) {
            set_asked(&s, (uint32_t)(t_random() % 2));
            sched_yield();
        }
        dp_turns_enter(s.t, 1);
        dp_turns_close(s.t);
        for (int i = 0; i < MOST; i++)
            CHECK(!pthread_join(w[i].thread, NULL));
        dp_turns_drain(s.t, 1);
        CHECK_EQ(dp_turns_inside(s.t), 1);
        dp_turns_leave(s.t, 1);
        for (int i = 0; i < MOST; i++)
            CHECK_STATUS(w[i].status, DP_LEASE_ENDED);
        s.asked[0] = s.asked[1] = 0;
    }
    free(s.t);
}

/* A thread that leaves when asked. */
static void *leave_later(void *arg) {
    thread_of_turns *w = arg;
    t_name("leaves later");
    while (!__atomic_load_n(&w->s->asked[0], __ATOMIC_ACQUIRE))
        sched_yield();
    dp_turns_leave(w->s->t, w->unit);
    return NULL;
}

T_CASE(turns_drain, "turns/waits-for-threads-that-leave", .providers = T_SHM, .seconds = 20) {
    turns_and_flags s;
    thread_of_turns w[MOST];
    make(&s, 1);
    dp_turns_enter(s.t, 70); /* this thread */
    for (uint64_t round = t_pick(1000, 100); round; round--) {
        s.asked[0] = 0;
        for (uint32_t i = 0; i < MOST; i++) {
            w[i] = (thread_of_turns){.s = &s, .unit = i * 13};
            dp_turns_enter(s.t, w[i].unit);
            CHECK(!pthread_create(&w[i].thread, NULL, leave_later, &w[i]));
        }
        set_asked(&s, 0);
        dp_turns_drain(s.t, 1);
        CHECK_EQ(dp_turns_inside(s.t), 1);
        for (int i = 0; i < MOST; i++)
            CHECK(!pthread_join(w[i].thread, NULL));
    }
    CHECK_EQ(s.t->left.waiting, 0);
    free(s.t);
}

/* Blocking: arm, poll, wait, wake, break; and lost wake-ups. */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "dp_shm.h"
#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey
#define MS 1000000ll
/* A wait that lasts until its time-out although something should wake it has lost its wake-up. On a busy machine the waking
 * process may be late by seconds, so a shorter time-out would prove nothing. */
#define LOST (4000 * MS)

/* Blocks once by the rules; returns how long the wait took, 0 if a completion was there before it. */
static int64_t block_once(dp_cq *cq, int64_t timeout, dp_wc *wc, int *n) {
    CHECK_OK(dp_cq_arm(cq));
    *n = dp_cq_poll(cq, wc, 1);
    CHECK(*n == 0 || *n == 1);
    if (*n)
        return 0;
    int64_t start = dp_now_ns();
    CHECK_OK(dp_cq_wait(cq, timeout));
    int64_t took = dp_now_ns() - start;
    *n = dp_cq_poll(cq, wc, 1);
    CHECK(*n == 0 || *n == 1);
    return took;
}

/* ---- time-outs ---- */

T_CASE(wait_timeouts, "wait/time-out") {
    end e;
    end_open(&e, NULL, NULL);
    static const int64_t timeouts[] = {0, 1, 1000, 1 * MS, 20 * MS, 100 * MS};
    for (size_t k = 0; k < 2 * sizeof timeouts / sizeof *timeouts; k++) {
        size_t i = k / 2;
        t_note("%lld ns%s", (long long)timeouts[i], k % 2 ? ", after a promise to stay hot" : "");
        if (k % 2)
            dp_cq_promise_hot(e.cq, true); /* arming withdraws it: the wait sleeps all the same */
        dp_wc wc;
        int n, returns = 0;
        struct timespec c0, c1;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &c0);
        int64_t start = dp_now_ns(), left;
        /* Single spurious returns are permitted, many are not. */
        while ((left = timeouts[i] - (dp_now_ns() - start)) > 0 || returns == 0) {
            block_once(e.cq, left > 0 ? left : 0, &wc, &n);
            CHECK_EQ(n, 0);
            CHECKF(++returns < 100, "dp_cq_wait returns without reason over and over");
        }
        CHECKF(dp_now_ns() - start < timeouts[i] + (int64_t)(1000 * MS * t_time_scale()), "took %lld ms",
               (long long)(dp_now_ns() - start) / MS);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &c1);
        int64_t cpu = (c1.tv_sec - c0.tv_sec) * 1000000000ll + c1.tv_nsec - c0.tv_nsec;
        if (timeouts[i] >= 100 * MS)
            CHECKF(cpu < timeouts[i] / 2, "waiting %lld ms used %lld ms of processor: it spins", (long long)timeouts[i] / MS,
                   (long long)cpu / MS);
        dp_cq_disarm(e.cq);
    }
    end_close(&e);
}

/* ---- wakes ---- */

typedef struct waker {
    dp_cq *cq;
    dp_qp *qp;
    int delay_ms;
    int status; /* not 0: dp_qp_break with it */
} waker;

static void wake_later(int sock, void *arg) {
    (void)sock;
    waker *w = arg;
    t_sleep_ms(w->delay_ms);
    if (w->status)
        dp_qp_break(w->qp, w->status);
    else
        dp_cq_wake(w->cq);
}

typedef struct scribble {
    dp_cq *cq;
    uint32_t flag;
} scribble;

static void scribble_later(int sock, void *arg) {
    (void)sock;
    scribble *s = arg;
    t_sleep_ms(30);
    __atomic_store_n(((shm_cq *)s->cq)->mode, s->flag, __ATOMIC_SEQ_CST);
}

/* Waits without a time-out, so only the event can end it. Ignores spurious returns until *done. */
static void wait_until(dp_cq *cq, bool (*done)(void *), void *arg) {
    for (int i = 0; !done(arg); i++) {
        dp_wc wc;
        int n;
        block_once(cq, -1, &wc, &n);
        CHECKF(i < 100, "dp_cq_wait returns over and over");
    }
}

static bool never_twice(void *arg) { return (*(int *)arg)++ > 0; } /* one wait */

T_CASE(wake_present, "wait/wake-ends-present-wait") {
    end e;
    end_open(&e, NULL, NULL);
    for (int i = 0; i < 5; i++) {
        waker w = {e.cq, e.qp, 30, 0};
        t_peer p;
        int once = 0;
        t_peer_start(&p, false, wake_later, &w);
        wait_until(e.cq, never_twice, &once);
        t_peer_join(&p);
        /* The wake may have come after a spurious return: consume it. */
        dp_cq_wake(e.cq);
        CHECK_OK(dp_cq_wait(e.cq, -1));
    }
    end_close(&e);
}

/* A peer that died between clearing the sleeping flag and waking this side, or that overwrites the flag. */
T_CASE(wake_flag, "wait/wake-whatever-the-flag-says", .providers = T_SHM) {
    static const uint32_t flags[] = {SHM_AWAKE, SHM_HOT, 77};
    end e;
    end_open(&e, NULL, NULL);
    for (int i = 0; i < 3; i++) {
        waker w = {e.cq, e.qp, 60, 0};
        t_peer p, q;
        scribble s = {e.cq, flags[i]};
        t_peer_start(&q, false, scribble_later, &s);
        t_peer_start(&p, false, wake_later, &w);
        int64_t t0 = dp_now_ns();
        CHECK_OK(dp_cq_arm(e.cq));
        CHECK_OK(dp_cq_wait(e.cq, 2000000000));
        CHECKF(dp_now_ns() - t0 < 1000000000, "flag %u: woken after %lld ms", flags[i],
               (long long)(dp_now_ns() - t0) / 1000000);
        t_peer_join(&p);
        t_peer_join(&q);
        dp_cq_wake(e.cq);
        CHECK_OK(dp_cq_wait(e.cq, -1));
    }
    end_close(&e);
}

/* The same while this side sleeps on two queues at once: the wake is for the second one. */
T_CASE(wake_many, "wait/wake-of-many-whatever-the-flag-says", .providers = T_SHM) {
    static const uint32_t flags[] = {SHM_AWAKE, SHM_HOT, SHM_SLEEPING, SHM_TOGETHER, 77};
    dp_dev *dev;
    dp_error err;
    dp_cq *cqs[2];
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    CHECK_OK_ERR(dp_cq_create(dev, 16, &cqs[0], &err), err);
    CHECK_OK_ERR(dp_cq_create_beside(cqs[0], 16, &cqs[1], &err), err);
    uint32_t *together = shm_together(((shm_cq *)cqs[0])->page->map);
    for (int i = 0; i < 10; i++) {
        waker w = {cqs[1], NULL, 60, 0};
        t_peer p;
        t_peer_start(&p, false, wake_later, &w);
        int64_t t0 = dp_now_ns();
        CHECK_OK(dp_cq_arm_many(cqs, 2));
        __atomic_store_n(i % 2 ? together : ((shm_cq *)cqs[1])->mode, flags[i / 2], __ATOMIC_SEQ_CST);
        dp_cq_wait_many(cqs, 2, 2000000000);
        CHECKF(dp_now_ns() - t0 < 1000000000, "flag %u: woken after %lld ms", flags[i / 2], (long long)(dp_now_ns() - t0) / 1000000);
        t_peer_join(&p);
        dp_cq_wake(cqs[0]);
        CHECK_OK(dp_cq_arm_many(cqs, 2));
        dp_cq_wait_many(cqs, 2, -1);
        CHECK_OK(dp_cq_arm(cqs[1])); /* each is its own queue, too */
        dp_cq_wake(cqs[1]);
        CHECK_OK(dp_cq_wait(cqs[1], -1));
    }
    dp_cq_destroy(cqs[0]); /* the page stays for the other one */
    CHECK_OK(dp_cq_arm(cqs[1]));
    dp_cq_wake(cqs[1]);
    CHECK_OK(dp_cq_wait(cqs[1], -1));
    dp_cq_destroy(cqs[1]);
    dp_dev_close(dev);
}

T_CASE(wake_next, "wait/wake-ends-next-wait") {
    end e;
    end_open(&e, NULL, NULL);
    dp_wc wc;
    int n;
    for (int i = 0; i < 100; i++) {
        t_note("round %d", i);
        switch (i % 4) {
        case 0: /* long before */
            dp_cq_wake(e.cq);
            break;
        case 1: /* several at once */
            dp_cq_wake(e.cq);
            dp_cq_wake(e.cq);
            dp_cq_wake(e.cq);
            break;
        case 2: /* between arm and wait */
            CHECK_OK(dp_cq_arm(e.cq));
            dp_cq_wake(e.cq);
            CHECK_EQ(dp_cq_poll(e.cq, &wc, 1), 0); /* polling does not consume it */
            CHECK_OK(dp_cq_wait(e.cq, -1));
            continue;
        case 3: /* disarming does not either */
            dp_cq_wake(e.cq);
            CHECK_OK(dp_cq_arm(e.cq));
            dp_cq_disarm(e.cq);
            break;
        }
        block_once(e.cq, -1, &wc, &n); /* hangs if the wake is lost */
        CHECK_EQ(n, 0);
    }
    /* Consumed: wakes do not accumulate. */
    for (int i = 0; i < 1000; i++)
        dp_cq_wake(e.cq);
    int64_t start = dp_now_ns();
    int returns = 0;
    while (dp_now_ns() - start < 100 * MS) {
        block_once(e.cq, 20 * MS, &wc, &n);
        CHECKF(++returns < 100, "1000 wakes end more than 100 waits");
    }
    end_close(&e);
}

static dp_cq *signal_cq;
static void wake_in_handler(int sig) {
    (void)sig;
    dp_cq_wake(signal_cq);
}

static void signal_later(int sock, void *arg) {
    (void)sock;
    t_sleep_ms(20);
    pthread_kill(*(pthread_t *)arg, SIGUSR2);
}

/* dp_cq_wake is async-signal-safe; the wait ends although its own thread takes the signal. */
T_CASE(wake_signal, "wait/wake-from-signal-handler") {
    if (T_TSAN)
        t_skip("the thread sanitizer holds signals back until a call that it knows to block");
    end e;
    end_open(&e, NULL, NULL);
    signal_cq = e.cq;
    struct sigaction sa = {.sa_handler = wake_in_handler, .sa_flags = SA_RESTART};
    sigaction(SIGUSR2, &sa, NULL);
    pthread_t self_thread = pthread_self();
    for (int i = 0; i < 5; i++) {
        t_peer p;
        int once = 0;
        t_peer_start(&p, false, signal_later, &self_thread);
        wait_until(e.cq, never_twice, &once);
        t_peer_join(&p);
        dp_cq_wake(e.cq);
        CHECK_OK(dp_cq_wait(e.cq, -1));
    }
    end_close(&e);
}

typedef struct wake_hammer {
    dp_cq *cq;
    uint32_t asked, seen;
    long n;
} wake_hammer;

static void hammer_wakes(int sock, void *arg) {
    wake_hammer *h = arg;
    for (uint32_t i = 1; i <= h->n; i++) {
        for (unsigned k = t_random() % 300; k; k--)
            dp_cpu_pause();
        __atomic_store_n(&h->asked, i, __ATOMIC_RELEASE);
        dp_cq_wake(h->cq);
        for (int k = 0; __atomic_load_n(&h->seen, __ATOMIC_ACQUIRE) != i; k++)
            if (k % 64 == 63)
                sched_yield();
    }
    t_sync(sock);
}

/* Each wake ends a wait, whenever it comes. */
T_CASE(wake_lost, "wait/wake-hammer", .seconds = 20) {
    end e;
    end_open(&e, NULL, NULL);
    wake_hammer h = {.cq = e.cq, .n = t_pick(20000, 1000)};
    t_peer p;
    t_peer_start(&p, false, hammer_wakes, &h);
    for (uint32_t i = 1; i <= h.n; i++) {
        for (unsigned k = t_random() % 300; k; k--)
            dp_cpu_pause();
        while (__atomic_load_n(&h.asked, __ATOMIC_ACQUIRE) != i) {
            dp_wc wc;
            int n;
            int64_t took = block_once(e.cq, LOST, &wc, &n);
            CHECKF(took < LOST, "wake %u was lost", i);
        }
        __atomic_store_n(&h.seen, i, __ATOMIC_RELEASE);
    }
    t_sync(p.sock);
    t_peer_join(&p);
    end_close(&e);
}

/* ---- break ---- */

static bool is_broken(void *qp) { return dp_qp_broken(qp) != 0; }

T_CASE(break_wakes, "wait/break-from-other-thread") {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    for (int i = 0; i < 5; i++) {
        card ca, cb;
        end_card(&a, &ca);
        end_card(&b, &cb);
        end_connect(&a, &cb);
        end_connect(&b, &ca);
        CHECK_EQ(dp_qp_broken(a.qp), 0);
        waker w = {a.cq, a.qp, i * 10, DP_WORKER_DIED};
        t_peer p;
        t_peer_start(&p, false, wake_later, &w);
        wait_until(a.cq, is_broken, a.qp);
        t_peer_join(&p);
        CHECK_STATUS(dp_qp_broken(a.qp), DP_WORKER_DIED);
        dp_qp_break(a.qp, DP_PEER_GONE); /* the first status stays */
        CHECK_STATUS(dp_qp_broken(a.qp), DP_WORKER_DIED);
        CHECK_EQ(dp_qp_broken(b.qp), 0);
        end_reset(&a); /* checks that the mark is gone */
        end_reset(&b);
    }
    end_close(&a);
    end_close(&b);
}

/* ---- completions ---- */

static void event_left(duo *d) {
    for (uint32_t i = 0; i < 60; i++) {
        t_sync(d->sock);
        if (i % 3 == 2)
            t_sleep_ms(i % 20);
        end_write_imm(&d->e, NULL, 0, PEER(d, 0), i, 0, 0);
        if (i % 3 == 0)
            t_sync(d->sock); /* the right side arms only now */
    }
}

static void event_right(duo *d) {
    end *e = &d->e;
    dp_wc wc;
    for (uint32_t i = 0; i < 60; i++) {
        int n = 0;
        t_note("round %u", i);
        t_sync(d->sock);
        if (i % 3 == 0) {
            t_sync(d->sock);
            t_sleep_ms(i % 2 ? 0 : t_pick(2, 20));
        }
        if (i % 3 == 1) {
            /* Armed twice, disarmed and armed again: still a wait that ends. */
            CHECK_OK(dp_cq_arm(e->cq));
            CHECK_OK(dp_cq_arm(e->cq));
            dp_cq_disarm(e->cq);
            dp_cq_disarm(e->cq);
        }
        while (n == 0) {
            int64_t took = block_once(e->cq, 10000 * MS, &wc, &n);
            CHECKF(took < (int64_t)(5000 * MS * t_time_scale()), "a completion did not end the wait");
        }
        CHECK_OK(wc.status);
        CHECK_EQ(wc.imm, i);
        e->recvs_done++;
        end_post_recv(e);
        if (i % 2)
            dp_cq_disarm(e->cq);
    }
}
DUO_CASE(event_left, event_right, "wait/completion-ends-it", NULL)

/* A completion of an own post ends a wait too. */
static void own_left(duo *d) {
    end *e = &d->e;
    for (uint64_t i = 1; i < 20; i++) {
        dp_sge s = local_sge(e, 0, 8);
        dp_wc wc;
        int n = 0;
        CHECK_OK(dp_cq_arm(e->cq));
        if (i % 2)
            end_write(e, &s, 1, PEER(d, 0), i, DP_SIGNALED);
        else
            end_write_imm(e, &s, 1, PEER(d, 0), 1, i, DP_SIGNALED);
        while (n == 0) {
            int64_t took = block_once(e->cq, 10000 * MS, &wc, &n);
            CHECKF(took < (int64_t)(5000 * MS * t_time_scale()), "an own completion did not end the wait");
        }
        CHECK_OK(wc.status);
        CHECK_EQ(wc.wr_id, i);
    }
    t_sync(d->sock);
}

static void own_right(duo *d) { t_sync(d->sock); }
DUO_CASE(own_left, own_right, "wait/own-completions", NULL)

/* ---- lost wake-ups ---- */

/* Ping-pong in which each side blocks for each message. After a lost wake-up, a wait lasts until its time-out although there is
 * a completion, so no round may take more than 2 s. */
typedef enum hammer_mode {
    BLOCK_AT_ONCE,
    SPIN_FIRST,  /* a random number of polls, so that the message arrives at every point before the sleep */
    PROMISE_HOT, /* also makes and withdraws the promise not to sleep, at random */
} hammer_mode;

static void await_blocking(end *e, hammer_mode mode, dp_wc *wc) {
    uint64_t r = t_random();
    unsigned spins = mode == BLOCK_AT_ONCE ? 0 : (unsigned)(r >> 8) % (r & 1 ? 40 : 400);
    bool hot = mode == PROMISE_HOT && (r & 2);
    if (hot)
        dp_cq_promise_hot(e->cq, true);
    for (; spins; spins--) {
        if (dp_cq_poll(e->cq, wc, 1) == 1)
            goto out; /* possibly with the promise in force */
        dp_cpu_pause();
    }
    if (hot && (r & 4))
        dp_cq_promise_hot(e->cq, false);
    for (;;) {
        CHECK_OK(dp_cq_arm(e->cq)); /* withdraws it otherwise */
        if (dp_cq_poll(e->cq, wc, 1) == 1) {
            if (r & 8)
                dp_cq_disarm(e->cq);
            break;
        }
        int64_t start = dp_now_ns();
        CHECK_OK(dp_cq_wait(e->cq, LOST));
        int64_t took = dp_now_ns() - start;
        int n = dp_cq_poll(e->cq, wc, 1);
        CHECKF(took < LOST, "blocked for %lld ms, then %s", (long long)took / MS,
               n == 1 ? "the completion was there: lost wake-up" : "still no completion: lost message");
        if (n == 1)
            break;
    }
out:
    CHECK_OK(wc->status);
    CHECK(wc->qp == e->qp);
}

static void hammer(duo *d, hammer_mode mode, long rounds) {
    end *e = &d->e;
    if (!d->processes)
        rounds /= 10;
    for (uint32_t i = 0; i < rounds; i++) {
        for (int turn = 0; turn < 2; turn++) {
            if (d->left == (turn == 0)) {
                dp_sge s = {&i, 4, 0};
                if (!(e->dev->caps & DP_CAP_SYNC_SOURCE)) {
                    s = local_sge(e, i % 64 * 8, 4);
                    *(uint32_t *)(uintptr_t)s.addr = i;
                }
                end_write_imm(e, &s, 1, PEER(d, 0), i, 0, 0);
                continue;
            }
            dp_wc wc;
            await_blocking(e, mode, &wc);
            CHECKF(wc.imm == i, "round %u: message %u", i, wc.imm);
            CHECK_EQ(*(volatile uint32_t *)end_bytes(e), i);
            e->recvs_done++;
            end_post_recv(e);
        }
    }
    dp_cq_disarm(e->cq);
}

static void hammer_block(duo *d) { hammer(d, BLOCK_AT_ONCE, t_pick(50000, 1500)); }
static void hammer_spin(duo *d) { hammer(d, SPIN_FIRST, t_pick(100000, 2000)); }
static void hammer_promise(duo *d) { hammer(d, PROMISE_HOT, t_pick(50000, 1500)); }
static const end_opts hammer_opts = {.max_send = 256, .max_recv = 16};
#define HAMMER(fn, nm)                                                                                                 \
    static void fn##_right(duo *d) { fn(d); }                                                                          \
    DUO_CASE(fn, fn##_right, nm, &hammer_opts, .seconds = 60, .verbs_seconds = 60)
HAMMER(hammer_block, "wait/lost-wakeup-block")
HAMMER(hammer_spin, "wait/lost-wakeup-spin-then-block")
HAMMER(hammer_promise, "wait/lost-wakeup-promise-hot")

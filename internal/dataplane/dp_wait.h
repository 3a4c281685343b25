/* How a thread waits for a completion queue: hot spins, warm blocks, adaptive spins for about as long as one
 * wake-up takes and then blocks.
 *
 * A spinner that shares its core with another runnable thread delays the very peer it waits for. The kernel
 * tells: a long gap between two looks at the clock together with an involuntary context switch. One such gap may
 * be anything; several in quick succession are a shared core. Such a spinner blocks for a while whatever
 * its mode, then tries again, ever more rarely: when spinners exceed cores, everybody blocks.
 */
#ifndef RFAAS_DP_WAIT_H
#define RFAAS_DP_WAIT_H

#include <sched.h>

#include "dp_channel.h"

/* One wake-up costs 20 to 50 us between cores; spinning longer than that costs more than blocking. */
#define DP_SPIN_BUDGET_NS 50000
#define DP_SPIN_FIRST_NS 1000000 /* a server spins at least this long when its lease begins, because the first call will arrive soon */
#define DP_SPIN_FIRST_WAITS 3    /* waits that yield then: the peer, or what wakes it, may need this core. A call has up to two waits */
#define DP_SPINS_PER_LOOK 64
#define DP_SPINS_PER_YIELD 2 /* for a waiter whose peer may need its core */
#define DP_BUSY_GAP_NS 100000        /* a longer time between two looks means that other threads want this core: the waiter is no longer patient */
#define DP_SHARED_GAP_NS 500000      /* longer without a look: something else ran on this core */
#define DP_SHARED_NEAR_NS 40000000   /* gaps no further apart than this belong together */
#ifndef DP_SHARED_GAPS
#define DP_SHARED_GAPS 3             /* with this many gaps, the core is shared */
#endif
#define DP_SHARED_MIN_NS 50000000    /* then the waiter blocks this long before it tries to spin again, */
#define DP_SHARED_MAX_NS 1600000000  /* doubled each time up to this */
#define DP_BLOCK_MAX_NS 250000000     /* a blocked waiter probes its peer this often */
#define DP_BLOCK_WATCHED_NS 2000000000 /* a blocked server probes this often if another thread notices the peer's end (dp_server_watch) */
#define DP_BLOCK_ATTENDED_NS 20000000 /* and this often where no thread of the library notices the peer's end */
#define DP_PROBE_EVERY_NS 100000000   /* a spinning waiter probes this often */
#define DP_LOOKS_PER_PROBE 16         /* a waiter that looks only now and then checks whether to probe after this many fruitless looks */

typedef struct dp_waiter {
    dp_wait_mode mode;
    bool yields; /* yield during short waits too. A yield costs 0.5 us, so set this only where a round trip takes ten times as long */
    uint8_t first; /* number of next waits that yield, from dp_waiter_expect */
    bool brief;    /* the next look blocks, if adaptive; from dp_waiter_expect_now */
    uint32_t spins;
    int64_t now;          /* at the last look */
    int64_t since;        /* when this wait began to spin; 0: not looked yet */
    int64_t shared_until; /* block until then; 0: the core is ours */
    int64_t shared_for;   /* length of the last such period */
    int64_t shared_ended; /* when it ended */
    int64_t gap_at;       /* last gap */
    int gaps;             /* in quick succession */
    int64_t probe_at;
    int64_t yield_at;
    int64_t patient_until; /* no block before, for want of a message */
    long switches; /* involuntary ones of this thread when last counted */
    uint64_t blocked;
} dp_waiter;

void dp_waiter_init(dp_waiter *w, dp_wait_mode mode);

/* Something is to come soon. */
static inline void dp_waiter_expect(dp_waiter *w) {
    w->patient_until = dp_now_ns() + DP_SPIN_FIRST_NS;
    w->first = DP_SPIN_FIRST_WAITS;
}

/* A message should come at once, from a peer that was running when it woke this thread. If none has come by the first look, the peer waits for this
 * processor. Yielding does not help then, because the scheduler prefers a thread that has slept. So an adaptive waiter blocks at that look. */
static inline void dp_waiter_expect_now(dp_waiter *w) {
    w->patient_until = 0;
    w->first = DP_SPIN_FIRST_WAITS;
    w->brief = true;
}

/* A new wait begins. */
static inline void dp_waiter_begin(dp_waiter *w) {
    w->spins = 0;
    w->since = 0;
    if (__builtin_expect(w->first, 0) && !--w->first)
        w->brief = false;
}

/* A wait that went on for a while is over: its last stretch counts too, for a spinner that was switched out
 * mostly finds its message when it comes back. */
static inline void dp_waiter_end(dp_waiter *w);

enum { DP_SPIN_ON = 0, DP_SPIN_LOOK = 1, DP_SPIN_BLOCK = 2 };

/* Clock, budget and sharing, every DP_SPINS_PER_LOOK spins. */
int dp_waiter_look(dp_waiter *w);

/* dp_waiter_spin pauses once. DP_SPIN_LOOK: w->now is fresh, look at deadlines and peers. DP_SPIN_BLOCK: likewise, and
 * block now. */
static inline int dp_waiter_spin(dp_waiter *w) {
    if (w->mode != DP_WAIT_WARM && !w->shared_until) {
        dp_cpu_pause();
        if (++w->spins % DP_SPINS_PER_LOOK) {
            if ((w->yields || w->first) && w->spins % DP_SPINS_PER_YIELD == 0)
                sched_yield();
            return DP_SPIN_ON;
        }
    }
    return dp_waiter_look(w);
}

static inline void dp_waiter_end(dp_waiter *w) {
    if (__builtin_expect(w->since != 0 && w->mode != DP_WAIT_WARM, 0)) {
        dp_waiter_look(w);
        if (w->now - w->since > DP_SPIN_FIRST_NS)
            w->first = DP_SPIN_FIRST_WAITS; /* the peer was away for long, and may have returned to this core */
    }
}

/* How long to block at most when the deadline (0: none) is that: never longer than DP_BLOCK_MAX_NS. */
static inline int64_t dp_waiter_timeout(const dp_waiter *w, int64_t deadline_ns) {
    int64_t left = deadline_ns ? deadline_ns - w->now : DP_BLOCK_MAX_NS;
    return left < 0 ? 0 : left < DP_BLOCK_MAX_NS ? left : DP_BLOCK_MAX_NS;
}

#endif

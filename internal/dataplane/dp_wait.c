#include "dp_wait.h"

#include <sys/resource.h>

static long involuntary_switches(void) {
    struct rusage u;
    return getrusage(RUSAGE_THREAD, &u) ? 0 : u.ru_nivcsw;
}

void dp_waiter_init(dp_waiter *w, dp_wait_mode mode) { *w = (dp_waiter){.mode = mode}; }

/* This thread was away from `before` to w->now. */
static void count_gap(dp_waiter *w) {
    long switches = involuntary_switches();
    bool switched = switches != w->switches;
    w->switches = switches;
    if (!switched)
        return; /* the machine, not the scheduler */
    w->gaps = w->now - w->gap_at <= DP_SHARED_NEAR_NS ? w->gaps + 1 : 1;
    w->gap_at = w->now;
    if (w->gaps < DP_SHARED_GAPS)
        return;
    w->gaps = 0;
    /* Found again soon after the last period: wait longer. */
    bool again = w->shared_for && w->now - w->shared_ended < 4 * DP_SHARED_NEAR_NS;
    w->shared_for = !again ? DP_SHARED_MIN_NS : w->shared_for < DP_SHARED_MAX_NS ? 2 * w->shared_for : DP_SHARED_MAX_NS;
    w->shared_until = w->now + w->shared_for;
}

int dp_waiter_look(dp_waiter *w) {
    int64_t before = w->now;
    w->now = dp_now_ns();
    if (w->mode == DP_WAIT_WARM)
        return DP_SPIN_BLOCK;
    if (w->brief) {
        w->brief = false;
        if (w->mode == DP_WAIT_ADAPTIVE)
            return DP_SPIN_BLOCK;
    }
    if (!w->since) { /* first look of this wait: what lies before it was not spent here */
        w->since = w->now;
    } else if (w->now - before > DP_BUSY_GAP_NS) {
        w->patient_until = 0;
        if (!w->shared_until && w->now - before > DP_SHARED_GAP_NS)
            count_gap(w);
    }
    if (w->shared_until) {
        if (w->now < w->shared_until)
            return DP_SPIN_BLOCK;
        w->shared_until = 0;
        w->shared_ended = w->now;
        w->since = w->now;
    }
    if (w->now - w->since > DP_SPIN_BUDGET_NS) {
        if (w->mode == DP_WAIT_ADAPTIVE && w->now >= w->patient_until)
            return DP_SPIN_BLOCK;
        /* A long wait: yield the core to threads that wait for it, such as the peer if it has woken here, or
         * the kernel thread that moves soft-RoCE's packets. Otherwise each waits for the end of our time slice. */
        if (w->now >= w->yield_at) {
            sched_yield();
            w->now = dp_now_ns();
            w->yield_at = w->now + DP_SPIN_BUDGET_NS;
        }
    }
    return DP_SPIN_LOOK;
}

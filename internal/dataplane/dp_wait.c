#include "dp_wait.h"

#include <sys/resource.h>

static long involuntary_switches(void) {
    struct rusage u;
    return getrusage(RUSAGE_THREAD, &u) ? 0 : u.ru_nivcsw;
}

void dp_waiter_init(dp_waiter *w, dp_wait_mode mode) { *w = (dp_waiter){.mode = mode}; }

int dp_waiter_look(dp_waiter *w) {
    int64_t before = w->now;
    w->now = dp_now_ns();
    if (w->mode == DP_WAIT_WARM)
        return DP_SPIN_BLOCK;
    if (!w->since) { /* first look of this wait: what lies before it was not spent here */
        w->since = w->now;
    } else if (w->now - before > DP_SHARED_GAP_NS) {
        long switches = involuntary_switches();
        if (switches != w->switches)
            w->shared_until = w->now + DP_SHARED_BLOCK_NS;
        w->switches = switches;
    }
    if (w->now < w->shared_until)
        return DP_SPIN_BLOCK;
    w->shared_until = 0;
    if (w->mode == DP_WAIT_ADAPTIVE && w->now - w->since > DP_SPIN_BUDGET_NS)
        return DP_SPIN_BLOCK;
    return DP_SPIN_LOOK;
}

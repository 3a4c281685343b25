/* What a waiter decides (dp_wait.h). */
#include "dp_wait.h"
#include "harness.h"

/* Returns the number of spins after which the waiter looks at the clock, and sets *what to its decision. */
static uint32_t spins_until_look(dp_waiter *w, int *what) {
    uint32_t n = 0;
    do
        n++;
    while ((*what = dp_waiter_spin(w)) == DP_SPIN_ON);
    return n;
}

/* After a claim has woken a worker, the client may wait for the processor on which the worker spins. So the worker blocks at its first look, unless it waits
 * hot. Later waits are as usual. */
T_CASE(waiter_claimed, "wait/claimed-blocks-at-once", .providers = T_SHM) {
    static const struct {
        dp_wait_mode mode;
        int first;
    } is[] = {{DP_WAIT_ADAPTIVE, DP_SPIN_BLOCK}, {DP_WAIT_HOT, DP_SPIN_LOOK}};
    for (int i = 0; i < 2; i++) {
        dp_waiter w;
        int what;
        dp_waiter_init(&w, is[i].mode);
        dp_waiter_begin(&w);
        dp_waiter_expect_now(&w);
        CHECK_EQ(spins_until_look(&w, &what), DP_SPINS_PER_LOOK);
        CHECK_EQ(what, is[i].first);
        dp_waiter_begin(&w);
        spins_until_look(&w, &what);
        CHECK_EQ(what, DP_SPIN_LOOK);
    }
    /* A message that comes before the first look: later waits are not cut short. */
    dp_waiter w;
    int what;
    dp_waiter_init(&w, DP_WAIT_ADAPTIVE);
    dp_waiter_expect_now(&w);
    for (int i = 0; i < DP_SPIN_FIRST_WAITS; i++)
        dp_waiter_begin(&w);
    spins_until_look(&w, &what);
    CHECK_EQ(what, DP_SPIN_LOOK);
}

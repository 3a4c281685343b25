/* The rule for the silence of a worker, with a simulated clock, and with a large result over a slow tcp connection. */
#include <stdlib.h>

#include "dp_channel_impl.h"
#include "ends.h"
#include "served.h"

#define MS 1000000ll

typedef struct told {
    uint32_t times;
    dp_silence last;
} told;

static void tell(void *arg, const dp_channel *ch, dp_silence silence) {
    told *t = arg;
    (void)ch;
    t->times++;
    t->last = silence;
}

/* ---- the rule ---- */

/* Probes every 100 ms for this many seconds of the clock `at`, while the connection carries the given bytes between two probes. Returns
 * how often the channel reported silence. */
static uint32_t probes(dp_channel *ch, told *t, int64_t *at, int seconds, uint32_t acked, uint32_t received) {
    t->times = 0;
    for (int i = 0; i < 10 * seconds; i++, *at += 100 * MS) {
        ch->qp->bytes_acked += acked;
        ch->qp->bytes_received += received;
        dp_channel_listen(ch, *at);
    }
    return t->times;
}

T_CASE(silence_rules, "channel/what-counts-as-silence") {
    enum { SOME = 10000, LONG = 60 };
    served s;
    told t = {0};
    int64_t at = dp_now_ns();
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 65536, 0);
    served_echo(&s, 32, 1);
    dp_endpoint_on_silence(s.ep, tell, &t);
    t_note("nothing arrives");
    CHECK_EQ(probes(s.ch, &t, &at, 1, 0, 0), 0);
    CHECK_GE(probes(s.ch, &t, &at, LONG, 0, 0), 1);
    t_note("this side is away for a minute");
    dp_channel_forget_silence(s.ch);
    CHECK_EQ(probes(s.ch, &t, &at, 1, 0, 0), 0);
    at += 60000 * MS;
    CHECK_EQ(probes(s.ch, &t, &at, 0, 0, 0), 0);
    dp_channel_listen(s.ch, at);
    CHECK_EQ(t.times, 0);
    CHECK_GE(probes(s.ch, &t, &at, LONG, 0, 0), 1);
    t_note("a payload is on its way to the worker");
    dp_channel_forget_silence(s.ch);
    CHECK_EQ(probes(s.ch, &t, &at, LONG, SOME, 0), 0);
    t_note("it has arrived");
    CHECK_GE(probes(s.ch, &t, &at, LONG, 0, 0), 1);
    CHECK_GE(t.last.at - t.last.since, 2000 * MS);
    t_note("a result arrives");
    dp_channel_forget_silence(s.ch);
    s.ch->n_abandoned = 1; /* as if its call were in flight */
    s.ch->cfg.eager = 2 * 10 * LONG * SOME;
    CHECK_EQ(probes(s.ch, &t, &at, LONG, 0, SOME), 0);
    t_note("more than the result arrives");
    CHECK_GE(probes(s.ch, &t, &at, 10 * LONG, 0, SOME), 1);
    s.ch->cfg.eager = 65536;
    s.ch->n_abandoned = 0;
    served_close(&s);
}

/* ---- a slow connection ---- */

enum { SLOW_RATE = 1 << 20, SLOW_RESULT = 5 << 20 };

T_CASE(tcp_slow, "tcp/slow-result-is-not-silence", .providers = T_TCP, .seconds = 60) {
    served s;
    uint8_t *out = malloc(SLOW_RESULT);
    uint32_t rate = SLOW_RATE, want = SLOW_RESULT, paced = 0, size;
    told t = {0};
    dp_started started;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 1024, SLOW_RESULT);
    dp_endpoint_on_silence(s.ep, tell, &t);
    CHECK_OK(dp_channel_call(s.ch, FN_PACE, &rate, 4, NULL, &paced, 4, &size, 0, &started));
    CHECK_EQ(paced, 1);
    int64_t start = dp_now_ns();
    CHECK_OK(dp_channel_call(s.ch, FN_FILL, &want, 4, NULL, out, SLOW_RESULT, &size, 0, &started));
    CHECK_EQ(size, SLOW_RESULT);
    CHECK_PATTERN(out, SLOW_RESULT, SLOW_RESULT);
    CHECKF(dp_now_ns() - start > 3000000000, "the result was not slow: nothing was tried");
    CHECK_EQ(t.times, 0);
    t_note("both directions are counted");
    uint64_t acked = s.ch->qp->bytes_acked, received = s.ch->qp->bytes_received;
    CHECK_GE(received, SLOW_RESULT / 2); /* as of the last probe */
    CHECK_STATUS(dp_channel_call(s.ch, FN_EMPTY, out, SLOW_RESULT, NULL, NULL, 0, &size, 0, &started), DP_RESULT_TOO_LARGE);
    CHECK_OK(dp_qp_probe(s.ch->qp));
    CHECK_GE(s.ch->qp->bytes_acked - acked, SLOW_RESULT);
    served_close(&s);
    free(out);
}

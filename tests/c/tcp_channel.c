/* Calls over tcp with payloads larger than the sockets' and queue pairs' buffers. Meanwhile the other side does not poll for longer than
 * the time-out of a post on other providers. */
#include <stdlib.h>

#include "ends.h"
#include "served.h"

enum { LARGE = 16 << 20, AWAY_MS = 2500 };

T_CASE(tcp_patience, "tcp/payload-for-a-peer-that-computes", .providers = T_TCP | T_ENCRYPT, .seconds = 40) {
    served s;
    uint8_t *in = malloc(LARGE), *out = malloc(LARGE);
    uint32_t slow, slot, size, ms = AWAY_MS;
    fill_pattern(in, LARGE, 4);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 1024, LARGE);
    t_note("the worker runs a function");
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slow));
    int64_t start = dp_now_ns();
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, in, LARGE, NULL, LARGE, &slot));
    CHECKF(dp_now_ns() - start > AWAY_MS * 500000ll, "the payload found room: nothing was tried");
    t_note("the client computes");
    t_sleep_ms(AWAY_MS);
    CHECK_OK(dp_channel_wait(s.ch, slow, 0));
    CHECK_OK(dp_channel_finish(s.ch, slow, out, &size, NULL));
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_OK(dp_channel_finish(s.ch, slot, out, &size, NULL));
    CHECK_EQ(size, LARGE);
    CHECK_SAME(out, in, LARGE);
    served_close(&s);
    free(in);
    free(out);
}

/* A server that is told to finish answers every call that it has received, and its answers arrive after its end. On tcp these are as many as the
 * sockets take, about 100 KB between two nodes, because this client polls too late for the others. */
#include "ends.h"
#include "served.h"

static void finish(dp_wait_mode mode) {
    enum { CALLS = 64 };
    served s;
    served_open(&s, true, mode, CALLS, 1024, 2 << 20);
    uint8_t in[1024], out[65536];
    uint32_t slot[CALLS], size, ms = 20;
    fill_pattern(in, sizeof in, 5);
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot[0]));
    CHECK_OK(dp_channel_submit(s.ch, FN_FINISH, in, 64, NULL, 64, &slot[1]));
    for (uint32_t i = 2; i < CALLS; i++) {
        uint32_t n = 2000 + i;
        if (i % 3)
            CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, in, 64 * i % 1024, NULL, 1024, &slot[i]));
        else
            CHECK_OK(dp_channel_submit(s.ch, FN_FILL, &n, 4, NULL, 3000, &slot[i]));
    }
    if (s.dev->caps & DP_CAP_SILENT_DEATH) /* answers arrive only while the client polls */
        for (uint32_t i = 0; i < CALLS; i++)
            CHECK_OK(dp_channel_wait(s.ch, slot[i], 0));
    t_peer_join(&s.peer); /* the client has not polled yet */
    for (uint32_t i = 0; i < CALLS; i++) {
        CHECK_OK(dp_channel_wait(s.ch, slot[i], 0));
        CHECK_OK(dp_channel_finish(s.ch, slot[i], out, &size, NULL));
        if (i < 2)
            continue;
        CHECK_EQ(size, i % 3 ? 64 * i % 1024 : 2000 + i);
        CHECK_PATTERN(out, size, i % 3 ? 5 : 2000 + i);
    }
    served_close_client(&s);
}

T_CASE(finish_spinning, "channel/finish-spinning") { finish(DP_WAIT_HOT); }
T_CASE(finish_blocking, "channel/finish-blocking") { finish(DP_WAIT_WARM); }

/* A single call, which comes by the mailbox if there is one. */
T_CASE(finish_alone, "channel/finish-alone") {
    for (int i = 0; i < 2; i++) {
        served s;
        served_open(&s, true, i ? DP_WAIT_WARM : DP_WAIT_HOT, 4, 1024, 0);
        uint8_t in[48], out[48];
        uint32_t slot, size;
        fill_pattern(in, sizeof in, 6);
        CHECK_OK(dp_channel_submit(s.ch, FN_FINISH, in, sizeof in, NULL, sizeof out, &slot));
        if (s.dev->caps & DP_CAP_SILENT_DEATH)
            CHECK_OK(dp_channel_wait(s.ch, slot, 0));
        t_peer_join(&s.peer);
        CHECK_OK(dp_channel_wait(s.ch, slot, 0));
        CHECK_OK(dp_channel_finish(s.ch, slot, out, &size, NULL));
        CHECK_EQ(size, sizeof in);
        CHECK_PATTERN(out, size, 6);
        served_close_client(&s);
    }
}

/* Calls through the broker, descriptions of brokered channels, and figures. */
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "brokered.h"

T_CASE(broker_calls, "broker/calls", .providers = BROKERED) {
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    static const uint32_t sizes[] = {0, 1, 8, 200, 256, 257, 1000, 4000, 5000, 60000};
    house h;
    house_open(&h, 3);
    for (int m = 0; m < 3; m++) {
        packed p;
        client c;
        brokered_channel(&h, m, 8, &p);
        brokered_open(&h, &p, &c, modes[m]);
        for (uint32_t round = 0; round < 3; round++)
            for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
                brokered_call(&c, sizes[i]);
        brokered_stream(&c, 8, 200);
        brokered_healthy(&h);
        brokered_close(&c);
        brokered_await(&h, 0);
    }
    house_close(&h);
}

/* Descriptions with wrong bytes and descriptors. */
T_CASE(broker_description, "broker/description", .providers = BROKERED) {
    house h;
    packed p;
    dp_endpoint *ep;
    dp_channel *ch;
    dp_error err;
    house_open(&h, 1);
    brokered_channel(&h, 0, 4, &p);
    int page = dup(p.fds[0]);
    CHECK_OK_ERR(dp_endpoint_unpack(h.virtual, 4, 4, DP_WAIT_ADAPTIVE, &page, &ep, &err), err);
    for (uint32_t at = 0; at < 32; at += 4) {
        packed bad = p;
        bad.ch.qp.bytes[at] ^= 0x41;
        if (at == offsetof(dp_vqp_packed, rkey)) /* any key is possible */
            continue;
        CHECK_REFUSED(dp_channel_unpack(ep, &bad.ch, bad.fds, &ch, &err), DP_BAD_BLOB, err);
    }
    packed swapped = p;
    swapped.fds[0] = p.fds[1];
    swapped.fds[1] = p.fds[0];
    CHECK_REFUSED(dp_channel_unpack(ep, &swapped.ch, swapped.fds, &ch, &err), DP_BAD_BLOB, err);
    dp_endpoint_destroy(ep);
    close(p.fds[0]);
    close(p.fds[1]);
    brokered_await(&h, 0);
    house_close(&h);
}

/* ---- figures ---- */

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void time_calls(client *c, const char *what) {
    static const uint32_t sizes[] = {8, 1024};
    static int64_t took[2000];
    const int calls = t_is_verbs() ? 200 : 2000;
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < calls; i++) {
            int64_t from = dp_now_ns();
            brokered_call(c, sizes[s]);
            took[i] = dp_now_ns() - from;
        }
        qsort(took, (size_t)calls, sizeof *took, by_time);
        int64_t from = dp_now_ns();
        brokered_stream(c, 8, (uint32_t)calls);
        printf("figure: %s %s %u B: median %.1f us, p90 %.1f us; 8 in flight: %.0f calls/s\n", t_provider(), what, sizes[s], (double)took[calls / 2] / 1e3,
               (double)took[calls * 9 / 10] / 1e3, calls / ((double)(dp_now_ns() - from) / 1e9));
    }
}

/* The same calls through the broker and on the private queue pair, in turn. Judges nothing. */
T_CASE(broker_figures, "broker/figures", .providers = BROKERED, .seconds = 60, .verbs_seconds = 60) {
    house h;
    if (!getenv("RFAAS_TEST_FIGURES"))
        t_skip("RFAAS_TEST_FIGURES is not set");
    house_open(&h, 3);
    for (int i = 0; i < 3; i++) {
        packed p;
        client c;
        brokered_channel(&h, i, 8, &p);
        brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        time_calls(&c, "brokered");
        int64_t from = dp_now_ns();
        brokered_promote(&h, &c);
        printf("figure: %s promotion %.2f ms\n", t_provider(), (double)(dp_now_ns() - from) / 1e6);
        time_calls(&c, "private");
        brokered_close(&c);
    }
    house_close(&h);
}

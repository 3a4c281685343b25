/* Moving from virtual queue pairs to private ones. */
#include <unistd.h>

#include "brokered.h"
#include "served.h"

/* The worker's calls are counted through the move, with calls before, during and after it. */
T_CASE(broker_promotions, "broker/promotions", .providers = BROKERED, .seconds = 60, .verbs_seconds = 90) {
    long n = t_is_tcp() ? 1000 : 20; /* --repeat 10: 10,000 */
    uint64_t counted = 0;
    house h;
    house_open(&h, 1);
    for (long i = 0; i < n; i++) {
        packed p;
        client c;
        uint32_t window = 1 + (uint32_t)(i % 8);
        t_note("promotion %ld", i);
        brokered_channel(&h, 0, 8, &p);
        brokered_open(&h, &p, &c, i % 2 ? DP_WAIT_ADAPTIVE : DP_WAIT_WARM);
        c.calls = counted;
        brokered_stream(&c, window, 5 + (uint32_t)(i % 7));
        brokered_promote(&h, &c);
        brokered_stream(&c, window, 5 + (uint32_t)(i % 5));
        counted = c.calls;
        brokered_close(&c);
        brokered_healthy(&h);
    }
    brokered_await(&h, 0);
    house_close(&h);
}

/* The client learns of the worker's death before or after the worker's answer. The channel stays failed on the new queue pair, and the worker is replaced. */
T_CASE(broker_died_moving, "broker/died-while-moving", .providers = BROKERED, .seconds = 20) {
    for (int answered = 0; answered < 2; answered++) {
        house h;
        packed p;
        client c;
        dp_promotion *m;
        dp_error err;
        house_open(&h, 2);
        brokered_channel(&h, 0, 4, &p);
        brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        brokered_call(&c, 10);
        CHECK_OK_ERR(dp_promotion_prepare(c.ep, h.own, &m, &err), err);
        CHECK_OK_ERR(dp_promotion_ask(m, c.ch, &err), err);
        if (answered) {
            CHECK_OK(dp_promotion_await(m, c.ch, 0));
            CHECK_OK_ERR(dp_promotion_meet(m, c.ch, &err), err);
        }
        dp_channel_fail(c.ch, DP_WORKER_DIED);
        dp_promotion_switch(m, c.ch);
        dp_promotion_free(m);
        CHECK_STATUS(dp_channel_status(c.ch), DP_WORKER_DIED);
        CHECK_STATUS(brokered_failed_call(&c), DP_WORKER_DIED);
        brokered_replace(&h, &c, 1);
        brokered_stream(&c, 4, 50);
        brokered_close(&c);
        house_close(&h);
    }
}

/* With a call in flight the channel does not move, and goes on as it is. The prepared queue pairs are not used. */
T_CASE(broker_busy, "broker/move-busy", .providers = BROKERED, .seconds = 20) {
    house h;
    packed p;
    client c;
    dp_promotion *m;
    dp_error err;
    house_open(&h, 1);
    brokered_channel(&h, 0, 4, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    brokered_call(&c, 10);
    CHECK_OK_ERR(dp_promotion_prepare(c.ep, h.own, &m, &err), err);
    uint32_t at = brokered_submit(&c, 5, 5);
    CHECK(!dp_promotion_possible(m, c.ch));
    CHECK_REFUSED(dp_promotion_ask(m, c.ch, &err), DP_BUSY, err);
    brokered_finish(&c, at, 5, 5);
    dp_promotion_free(m);
    brokered_stream(&c, 4, 20);
    brokered_promote(&h, &c);
    brokered_stream(&c, 4, 20);
    brokered_close(&c);
    house_close(&h);
}

/* The worker of a client that is not brokered has no second queue pair. It refuses to move, and its channel goes on as it is. */
T_CASE(broker_refused, "broker/move-refused", .providers = BROKERED, .seconds = 20) {
    served s;
    uint8_t blob[DP_CHANNEL_BLOB_MAX] = {0}, out[DP_CHANNEL_BLOB_MAX];
    uint32_t at, size = 0;
    dp_started started;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 4096, 0);
    served_echo(&s, 100, 1);
    CHECK_OK(dp_channel_submit_move(s.ch, blob, sizeof blob, &at));
    CHECK_OK(dp_channel_wait(s.ch, at, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, at, out, &size, &started), DP_BAD_REQUEST);
    for (uint32_t i = 0; i < 20; i++)
        served_echo(&s, 100 + i, i);
    served_close_client(&s);
    t_peer_kill(&s.peer);
}

/* A client hands over its channel to another one, which goes on, and moves. */
T_CASE(broker_handed, "broker/handed-over", .providers = BROKERED, .seconds = 20) {
    house h;
    packed p, again = {0};
    client c, d;
    dp_error err;
    house_open(&h, 1);
    brokered_channel(&h, 0, 4, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    brokered_stream(&c, 4, 30);
    CHECK_OK_ERR(dp_channel_pack(c.ch, &again.ch, again.fds, &err), err);
    for (int i = 0; i < DP_VQP_FDS; i++)
        CHECK_GE(again.fds[i] = dup(again.fds[i]), 0);
    dp_channel_destroy(c.ch);
    dp_endpoint_destroy(c.ep);
    brokered_open(&h, &again, &d, DP_WAIT_WARM);
    d.calls = c.calls;
    brokered_stream(&d, 4, 30);
    brokered_promote(&h, &d);
    brokered_stream(&d, 4, 30);
    brokered_close(&d);
    brokered_await(&h, 0);
    brokered_healthy(&h);
    house_close(&h);
}

/* Calls that fail: refusals, failures, deadlines, deaths, forgeries. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dp_layout.h"
#include "ends.h"
#include "served.h"

T_CASE(refusals, "channel/refusals") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 1000, 4096); /* eager is rounded up to 1024 */
    uint8_t buf[8192] = {0};
    uint32_t size, slot;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s.ch, FN_COUNT, buf, 8, NULL, buf, 8, &size, 0, &started), DP_NO_FUNCTION);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_STATUS(dp_channel_call(s.ch, DP_CHAIN(FN_ECHO, FN_COUNT), buf, 8, NULL, buf, 8, &size, 0, &started), DP_NO_FUNCTION);
    CHECK_STATUS(dp_channel_call(s.ch, DP_CHAIN(FN_COUNT, FN_ECHO), buf, 8, NULL, buf, 8, &size, 0, &started), DP_NO_FUNCTION);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, buf, 4097, NULL, buf, 8, &size, 0, &started), DP_TOO_LARGE);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, buf, 8, NULL, buf, 4097, &size, 0, &started), DP_TOO_LARGE);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, NULL, 8, NULL, buf, 8, &size, 0, &started), DP_INVALID);
    CHECK_STATUS(dp_channel_call(s.ch, FN_TOO_LARGE, buf, 8, NULL, buf, 100, &size, 0, &started), DP_RESULT_TOO_LARGE);
    CHECK_EQ(size, 101);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    CHECK_STATUS(dp_channel_call(s.ch, FN_TOO_LARGE, buf, 8, NULL, buf, 600, &size, 0, &started), DP_RESULT_TOO_LARGE);
    CHECK_OK(dp_channel_submit(s.ch, FN_FAIL, "out of paper", 12, NULL, 8, &slot));
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    const void *text;
    CHECK_STATUS(dp_channel_result(s.ch, slot, &text, &size, &started), DP_FUNCTION_FAILED);
    CHECK_EQ(size, 12);
    CHECK_SAME(text, "out of paper", 12);
    CHECK_STATUS(dp_channel_finish(s.ch, slot, buf, &size, NULL), DP_FUNCTION_FAILED);
    CHECK_STATUS(dp_channel_finish(s.ch, slot, buf, &size, NULL), DP_INVALID); /* twice */
    CHECK_STATUS(dp_channel_wait(s.ch, slot, 0), DP_INVALID);
    CHECK_STATUS(dp_channel_wait(s.ch, 4, 0), DP_INVALID);
    CHECK_STATUS(dp_channel_test(s.ch, 77), DP_INVALID);
    served_echo(&s, 1024, 3);
    served_echo(&s, 4096, 3);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}

/* A result larger than announced, written while other results wait to be read, changes none of them. */
T_CASE(overflow, "channel/overflow-harms-nobody") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 8, 1024, 256 << 10);
    uint8_t in[1024], out[65536];
    uint32_t slot[7], size;
    fill_pattern(in, sizeof in, 9);
    for (int i = 0; i < 6; i++) {
        uint32_t n = i % 2 ? 1024 : 30000;
        if (i % 2)
            CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, in, n, NULL, n, &slot[i]));
        else
            CHECK_OK(dp_channel_submit(s.ch, FN_FILL, &n, 4, NULL, n, &slot[i]));
    }
    CHECK_OK(dp_channel_submit(s.ch, FN_TOO_LARGE, in, 8, NULL, 1024, &slot[6]));
    CHECK_OK(dp_channel_wait(s.ch, slot[6], 0));
    CHECK_STATUS(dp_channel_finish(s.ch, slot[6], NULL, NULL, NULL), DP_RESULT_TOO_LARGE);
    CHECK_OK(dp_channel_submit(s.ch, FN_TOO_LARGE, in, 8, NULL, 20000, &slot[6]));
    CHECK_OK(dp_channel_wait(s.ch, slot[6], 0));
    CHECK_STATUS(dp_channel_finish(s.ch, slot[6], NULL, NULL, NULL), DP_RESULT_TOO_LARGE);
    for (int i = 0; i < 6; i++) {
        CHECK_OK(dp_channel_wait(s.ch, slot[i], 0));
        CHECK_OK(dp_channel_finish(s.ch, slot[i], out, &size, NULL));
        CHECK_EQ(size, i % 2 ? 1024 : 30000);
        CHECK_PATTERN(out, size, i % 2 ? 9 : 30000);
    }
    served_close(&s);
}

/* One call of FN_OVERRUN, alone or with another call in flight. It must end with the status. */
static void overrun(served *s, uint32_t capacity, uint32_t writes, uint32_t returns, bool alone, int want) {
    uint32_t args[2] = {writes, returns}, other = 0, slot, size;
    const void *text;
    dp_started started;
    if (!alone)
        CHECK_OK(dp_channel_submit(s->ch, FN_ECHO, args, 8, NULL, 8, &other));
    CHECK_OK(dp_channel_submit(s->ch, FN_OVERRUN, args, sizeof args, NULL, capacity, &slot));
    CHECK_OK(dp_channel_wait(s->ch, slot, 0));
    int status = dp_channel_result(s->ch, slot, &text, &size, &started);
    CHECK_STATUS(status, want);
    if (status == DP_FUNCTION_FAILED) {
        char said[512] = {0}, number[64];
        memcpy(said, text, size < sizeof said ? size : sizeof said - 1);
        snprintf(number, sizeof number, "beyond the %u bytes of room for its result, and returned %u", capacity, returns);
        CHECK(strstr(said, number));
        CHECK(!memchr(text, 0, size)); /* no code follows */
        CHECK_EQ(started, DP_MAYBE_EXECUTED);
    }
    CHECK_STATUS(dp_channel_finish(s->ch, slot, NULL, NULL, NULL), want);
    if (!alone) {
        uint32_t out[2];
        CHECK_OK(dp_channel_wait(s->ch, other, 0));
        CHECK_OK(dp_channel_finish(s->ch, other, out, &size, NULL));
        CHECK(size == 8 && !memcmp(out, args, 8));
    }
}

/* A function that writes beyond its capacity and returns less fails, wherever its result is stored. The worker goes on. */
T_CASE(overrun_caught, "channel/overrun-is-caught") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 1024, 64 << 10);
    static const uint32_t capacities[] = {0, 1, 8, 48, 64, 255, 256, 257, 1000, 1024, 1025, 4096, 4097, 5000, 32 << 10, 64 << 10};
    for (size_t i = 0; i < sizeof capacities / sizeof *capacities; i++) {
        for (int alone = 0; alone < 2; alone++) {
            uint32_t c = capacities[i];
            overrun(&s, c, c, c, alone, DP_OK);
            overrun(&s, c, c / 2, c / 2, alone, DP_OK);
            overrun(&s, c, c + 1, c, alone, DP_FUNCTION_FAILED);
            overrun(&s, c, c + 8, c / 2, alone, DP_FUNCTION_FAILED);
            overrun(&s, c, c + 60, 0, alone, DP_FUNCTION_FAILED);
            overrun(&s, c, c + 60, c + 60, alone, DP_RESULT_TOO_LARGE);
        }
    }
    served_echo(&s, 1024, 3);
    served_close(&s);
}

T_CASE(busy, "channel/busy") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 3, 64, 1024);
    uint32_t ms = 50, slot[3], other, size;
    uint8_t big[1024] = {0};
    for (int i = 0; i < 3; i++)
        CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot[i]));
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &other), DP_BUSY);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_channel_wait(s.ch, slot[i], 0));
        CHECK_OK(dp_channel_finish(s.ch, slot[i], NULL, NULL, NULL));
    }
    /* The bulk area: 1024 bytes each way. */
    memcpy(big, &ms, 4);
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, big, 600, NULL, 600, &slot[0]));
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, big, 600, NULL, 8, &other), DP_BUSY);
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, big, 8, NULL, 600, &other), DP_BUSY);
    CHECK_OK(dp_channel_wait(s.ch, slot[0], 0));
    CHECK_OK(dp_channel_finish(s.ch, slot[0], big, &size, NULL));
    CHECK_EQ(size, 600);
    served_echo(&s, 1024, 5);
    served_close(&s);
}

/* A reserved channel refuses calls. Those in flight end as usual, with their reply or with the connection. */
T_CASE(reserved, "channel/reserved") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 64, 0);
    uint32_t ms = 20, slot, other, size, out = 0;
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot));
    dp_channel_reserve(s.ch);
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &other), DP_PEER_GONE);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, &ms, 4, NULL, &out, 4, &size, 0, &started), DP_PEER_GONE);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_STATUS(dp_channel_status(s.ch), DP_PEER_GONE);
    CHECK_OK(dp_channel_broken(s.ch));
    CHECK(!dp_channel_idle(s.ch));
    dp_error err;
    CHECK_STATUS(dp_channel_reset(s.ch, &err), DP_BUSY);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_OK(dp_channel_finish(s.ch, slot, &out, &size, NULL));
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &other), DP_PEER_GONE);
    dp_channel_unreserve(s.ch);
    CHECK_OK(dp_channel_status(s.ch));
    served_echo(&s, 64, 5);
    ms = 1000;
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slot));
    dp_channel_reserve(s.ch);
    dp_channel_fail(s.ch, DP_WORKER_DIED);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, slot, NULL, NULL, NULL), DP_WORKER_DIED);
    dp_channel_unreserve(s.ch); /* it stays failed */
    CHECK_STATUS(dp_channel_status(s.ch), DP_WORKER_DIED);
    served_close(&s);
}

T_CASE(deadline, "channel/deadline", .seconds = 20) {
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    for (int m = 0; m < 3; m++) {
        served s;
        served_open(&s, true, modes[m], 2, 64, 0);
        uint32_t size, tries = 0;
        dp_started started;
        uint8_t out[64];
        int64_t took, most = (int64_t)(90e6 * t_time_scale());
        memset(out, 0x5A, sizeof out);
        do { /* again if another program may have used the processor */
            uint32_t ms = 1200; /* longer than a machine pauses */
            int64_t t0 = dp_now_ns();
            CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, out, 64, &size, t0 + 20000000, &started), DP_DEADLINE);
            took = dp_now_ns() - t0;
            CHECK_EQ(started, DP_MAYBE_EXECUTED);
            CHECK_EQ(dp_channel_free_slots(s.ch), 1);
            ms = 0;
            CHECK_OK(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, out + 32, 32, &size, 0, &started));
            CHECK_EQ(dp_channel_free_slots(s.ch), 2); /* the late reply came before this one's */
            CHECK_BYTES(out, 0x5A, 32);
            CHECK_GE(took, 20000000);
        } while (took >= most && ++tries < 3);
        CHECKF(took < most, "a deadline of 20 ms took %lld us", (long long)took / 1000);
        dp_channel_stats st;
        dp_channel_get_stats(s.ch, &st);
        CHECK_EQ(st.late_replies, tries + 1);
        CHECK_EQ(st.abandoned, tries + 1);
        CHECK_EQ(st.strays, 0);
        served_close(&s);
    }
}

/* A worker's death ends its calls, whether callers spin or block. */
static void death(dp_wait_mode mode, bool crash) {
    served s;
    served_open(&s, true, mode, 4, 64, 0);
    served_echo(&s, 8, 1);
    uint32_t slot[2], size, ms = 10000;
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, crash ? FN_CRASH : FN_SLOW, &ms, 4, NULL, 4, &slot[0]));
    int second = dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &slot[1]);
    if (second == DP_OK)
        dp_channel_abandon(s.ch, slot[1]);
    else /* it was gone by then */
        CHECKF(crash && second == DP_PEER_GONE, "a second call: %s", dp_status_text(second));
    if (!crash)
        t_peer_kill(&s.peer);
    if (s.dev->caps & DP_CAP_SILENT_DEATH)
        dp_channel_fail(s.ch, DP_PEER_GONE); /* as the agent does when the executor reports the death */
    CHECK_OK(dp_channel_wait(s.ch, slot[0], 0)); /* a death that nobody notices ends the test as a hang */
    CHECK_STATUS(dp_channel_finish(s.ch, slot[0], NULL, &size, &started), DP_PEER_GONE);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, &ms, 4, NULL, &ms, 4, &size, 0, &started), DP_PEER_GONE);
    CHECK_EQ(started, DP_NOT_STARTED);
    if (crash)
        t_peer_kill(&s.peer);
    CHECK_OK(dp_channel_reset(s.ch, NULL));
    served_again(&s, false);
    served_echo(&s, 64, 2);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}
T_CASE(death_hot, "channel/worker-killed-hot") { death(DP_WAIT_HOT, false); }
T_CASE(death_warm, "channel/worker-killed-warm") { death(DP_WAIT_WARM, false); }
T_CASE(death_crash, "channel/worker-crashes") { death(DP_WAIT_ADAPTIVE, true); }

static void *fail_later(void *arg) {
    t_sleep_ms(20);
    dp_channel_fail(arg, DP_WORKER_DIED);
    return NULL;
}

/* A report of the control plane ends a call on every provider. */
static void failed_by_control(dp_wait_mode mode) {
    served s;
    served_open(&s, true, mode, 4, 64, 0);
    uint32_t size, ms = 5000; /* far longer than a busy machine takes to notice */
    dp_started started;
    pthread_t t;
    CHECK_EQ(pthread_create(&t, NULL, fail_later, s.ch), 0);
    int64_t t0 = dp_now_ns();
    CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, &ms, 4, &size, 0, &started), DP_WORKER_DIED);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    CHECKF(dp_now_ns() - t0 < (int64_t)(1e9 * t_time_scale()), "noticed after %lld ms",
           (long long)(dp_now_ns() - t0) / 1000000);
    pthread_join(t, NULL);
    CHECK_STATUS(dp_channel_status(s.ch), DP_WORKER_DIED);
    t_peer_kill(&s.peer);
    CHECK_OK(dp_channel_reset(s.ch, NULL));
    CHECK_STATUS(dp_channel_status(s.ch), DP_OK);
    /* If the worker cannot be replaced, calls on the channel without a connection return the status of the failure. */
    dp_channel_fail(s.ch, DP_PEER_GONE);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, &ms, 4, NULL, &ms, 4, &size, 0, &started), DP_PEER_GONE);
        CHECK_EQ(started, DP_NOT_STARTED);
    }
    CHECK_OK(dp_channel_reset(s.ch, NULL));
    served_close_client(&s);
}
T_CASE(control_hot, "channel/failed-by-control-hot") { failed_by_control(DP_WAIT_HOT); }
T_CASE(control_warm, "channel/failed-by-control-warm") { failed_by_control(DP_WAIT_WARM); }

/* ---- damaged channel blobs ---- */

T_CASE(blobs, "channel/damaged-blobs") {
    dp_error err;
    dp_dev *dev;
    dp_endpoint *ep;
    dp_channel *ch;
    dp_server *s;
    dp_server_config cfg = {.max_depth = 8, .max_eager = 1024, .max_bulk = 4096};
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(dev, 4, 16, DP_WAIT_ADAPTIVE, &ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(ep, &(dp_channel_config){4, 64, 0}, &ch, &err), err);
    uint8_t blob[DP_CHANNEL_BLOB_MAX], bad[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    CHECK_OK_ERR(dp_channel_offer(ch, blob, &len, &err), err);
    for (uint32_t n = 0; n < len; n++) {
        t_note("%u of %u bytes", n, len);
        CHECK_REFUSED(dp_server_create(dev, &cfg, blob, n, &s, &err), DP_BAD_BLOB, err);
    }
    for (uint32_t bit = 0; bit < len * 8; bit++) {
        t_note("bit %u", bit);
        memcpy(bad, blob, len);
        bad[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_REFUSED(dp_server_create(dev, &cfg, bad, len, &s, &err), DP_BAD_BLOB, err);
    }
    CHECK_REFUSED(dp_channel_connect(ch, blob, len, &err), DP_BAD_BLOB, err); /* a client's, not a worker's */
    CHECK_REFUSED(dp_channel_offer(ch, blob, &(uint32_t){100}, &err), DP_INVALID, err);
    dp_channel_destroy(ch);
    /* More than this executor allows. */
    static const dp_channel_config large[] = {{9, 64, 0}, {4, 1025, 0}, {4, 64, 8192}};
    for (int i = 0; i < 3; i++) {
        CHECK_OK_ERR(dp_channel_create(ep, &large[i], &ch, &err), err);
        len = sizeof blob;
        CHECK_OK_ERR(dp_channel_offer(ch, blob, &len, &err), err);
        CHECK_REFUSED(dp_server_create(dev, &cfg, blob, len, &s, &err), DP_INVALID, err);
        dp_channel_destroy(ch);
    }
    static const dp_channel_config wrong[] = {{0, 64, 0}, {1025, 64, 0}, {4, 0, 0}, {4, 1 << 20, 0}, {4, 64, 1ull << 33}};
    for (int i = 0; i < 5; i++)
        CHECK_REFUSED(dp_channel_create(ep, &wrong[i], &ch, &err), DP_INVALID, err);
    dp_endpoint_destroy(ep);
    dp_dev_close(dev);
}

/* Calls that succeed: sizes, modes, depths, ids. */
#include <stdlib.h>

#include "ends.h"
#include "served.h"

static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};

T_CASE(sizes, "channel/sizes", .seconds = 20, .verbs_seconds = 60) {
    static const uint32_t n[] = {0,   1,   7,   8,    16,    24,    25,    39,    40,     41,      63,     64,
                                 65,  255, 256, 257,  1000,  4095,   4096,    4097, 16383, 16384, 16385,  16448,   65536,  100001,
                                 1 << 20};
    for (size_t m = 0; m < 3; m++) {
        served s;
        served_open(&s, true, modes[m], 4, 16384, 2 << 20);
        for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
            t_note("mode %d, %u bytes", modes[m], n[i]);
            served_echo(&s, n[i], (uint32_t)i);
            served_echo(&s, n[i], (uint32_t)i + 100);
        }
        CHECK_EQ(dp_channel_free_slots(s.ch), 4);
        served_close(&s);
    }
}

T_CASE(small_in_large_out, "channel/small-in-large-out") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 1024, 1 << 20);
    uint8_t *out = malloc(1 << 20);
    for (uint32_t n = 1; n <= 1 << 20; n *= 4) {
        uint32_t size;
        dp_started started;
        CHECK_OK(dp_channel_call(s.ch, FN_FILL, &n, 4, NULL, out, 1 << 20, &size, 0, &started));
        CHECK_EQ(size, n);
        CHECK_PATTERN(out, n, n);
    }
    free(out);
    served_close(&s);
}

typedef struct pending {
    uint32_t slot, size, seed;
    bool used;
} pending;

/* Random sizes, eager and bulk, finished in random order. */
static void shuffle(dp_wait_mode mode, long rounds, uint32_t depth) {
    served s;
    served_open(&s, true, mode, depth, 512, 256 << 10);
    pending *p = calloc(depth, sizeof *p);
    uint8_t *buf = malloc(16384);
    uint32_t out = 0;
    long started_calls = 0;
    while (started_calls < rounds || out) {
        uint32_t k = (uint32_t)(t_random() % depth);
        if (!p[k].used && started_calls < rounds) {
            p[k].size = (uint32_t)(t_random() % (t_random() % 4 ? 600 : 16384));
            p[k].seed = (uint32_t)t_random();
            fill_pattern(buf, p[k].size, p[k].seed);
            dp_channel_batch(s.ch, t_random() % 4);
            int st = dp_channel_submit(s.ch, FN_ECHO, buf, p[k].size, NULL, p[k].size, &p[k].slot);
            if (st == DP_BUSY) /* the bulk area or the send queue is full until a call ends */
                continue;
            CHECK_OK(st);
            p[k].used = true;
            out++;
            started_calls++;
        } else if (p[k].used) {
            CHECK_OK(dp_channel_wait(s.ch, p[k].slot, 0));
            uint32_t size;
            CHECK_OK(dp_channel_finish(s.ch, p[k].slot, buf, &size, NULL));
            CHECK_EQ(size, p[k].size);
            CHECK_PATTERN(buf, size, p[k].seed);
            p[k].used = false;
            out--;
        }
    }
    CHECK_EQ(dp_channel_free_slots(s.ch), depth);
    dp_channel_stats st;
    dp_channel_get_stats(s.ch, &st);
    CHECK_EQ(st.strays, 0);
    free(p);
    free(buf);
    served_close(&s);
}

T_CASE(shuffle_hot, "channel/shuffle-hot", .seconds = 30, .verbs_seconds = 60) {
    shuffle(DP_WAIT_HOT, t_pick(100000, 2000), 16);
}
T_CASE(shuffle_warm, "channel/shuffle-warm", .seconds = 30, .verbs_seconds = 60) {
    shuffle(DP_WAIT_WARM, t_pick(20000, 1000), 64);
}
T_CASE(shuffle_one, "channel/shuffle-depth-1", .seconds = 30, .verbs_seconds = 60) {
    shuffle(DP_WAIT_ADAPTIVE, t_pick(20000, 1000), 1);
}
T_CASE(shuffle_deep, "channel/shuffle-depth-1024", .seconds = 60, .verbs_seconds = 60) {
    shuffle(DP_WAIT_ADAPTIVE, t_pick(100000, 2000), 1024);
}

/* Call ids wrap their 16 bits in the immediate many times, and their 32 bits once: they start at random. */
T_CASE(ten_million, "channel/ten-million-calls", .seconds = 120, .verbs_seconds = 60) {
    served s;
    long calls = t_pick(T_ASAN || T_TSAN ? 4000000 : 10000000, 20000);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 64, 64, 0);
    uint32_t slots[64];
    for (long head = 0, tail = 0; tail < calls;) {
        if (head < calls && head - tail < 64) {
            uint64_t v = (uint64_t)head;
            CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, &v, 8, NULL, 8, &slots[head % 64]));
            head++;
            continue;
        }
        uint64_t v = 0;
        uint32_t size;
        CHECK_OK(dp_channel_wait(s.ch, slots[tail % 64], 0));
        CHECK_OK(dp_channel_finish(s.ch, slots[tail % 64], &v, &size, NULL));
        CHECKF(size == 8 && v == (uint64_t)tail, "call %ld answered %u bytes %llu", tail, size, (unsigned long long)v);
        tail++;
    }
    served_close(&s);
}

T_CASE(registered, "channel/registered-payload") {
    served s;
    dp_error err;
    dp_mem *m;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 4096, 1 << 20);
    CHECK_OK_ERR(dp_mem_alloc(dp_endpoint_domain(s.ep), 1 << 20, 0, &m, &err), err);
    uint8_t *out = malloc(1 << 20);
    for (uint32_t n = 1; n <= 1 << 20; n *= 8) {
        uint32_t size;
        dp_started started;
        fill_pattern(m->addr, n, n);
        CHECK_OK(dp_channel_call(s.ch, FN_ECHO, m->addr, n, m, out, n, &size, 0, &started));
        CHECK_EQ(size, n);
        CHECK_PATTERN(out, n, n);
    }
    /* A payload that is not in the region it claims. */
    uint32_t slot;
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, (uint8_t *)m->addr + 1, 1 << 20, m, 8, &slot), DP_INVALID);
    CHECK_STATUS(dp_channel_submit(s.ch, FN_ECHO, out, 8, m, 8, &slot), DP_INVALID);
    free(out);
    dp_mem_free(m);
    served_close(&s);
}

T_CASE(wait_any, "channel/wait-any") {
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 8, 64, 0);
    uint32_t ms[2] = {1, 1200}, slot[2]; /* far apart, because two ends that are noticed together end one wait */
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms[i], 4, NULL, 4, &slot[i]));
    CHECK_OK(dp_endpoint_wait_any(s.ep, 0)); /* one worker serves in order */
    CHECK_EQ(dp_channel_test(s.ch, slot[0]), 1);
    CHECK_OK(dp_endpoint_wait_any(s.ep, 0));
    CHECK_EQ(dp_channel_test(s.ch, slot[1]), 1);
    CHECK_STATUS(dp_endpoint_wait_any(s.ep, dp_now_ns() + 2000000), DP_DEADLINE);
    for (int i = 0; i < 2; i++)
        CHECK_OK(dp_channel_finish(s.ch, slot[i], NULL, NULL, NULL));
    served_close(&s);
}

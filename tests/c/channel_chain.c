/* Chains: the worker calls two functions, the second with the result of the first. */
#include <stdlib.h>

#include "ends.h"
#include "served.h"

enum { EAGER = 1024, BULK = 64 << 10 };

/* A chain that returns `size` bytes of pattern `size`, made by FN_FILL. */
static void fill_and_echo(served *s, uint32_t size, uint8_t *out) {
    uint32_t got;
    dp_started started;
    CHECK_OK(dp_channel_call(s->ch, DP_CHAIN(FN_FILL, FN_ECHO), &size, sizeof size, NULL, out, size, &got, 0, &started));
    CHECK_EQ(got, size);
    CHECK_PATTERN(out, got, size);
}

/* Intermediate results of all sizes, whatever the capacity of the call, alone and beside other calls, among calls that are not chains. */
T_CASE(chain_results, "channel/chain") {
    static const uint32_t sizes[] = {0, 1, 24, 25, 256, 257, EAGER, EAGER + 1, 9000, BULK - 1, BULK};
    served s;
    uint8_t *out = malloc(BULK);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, EAGER, BULK);
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++) {
        uint32_t size = sizes[i / 2], length, got, other = 0;
        dp_started started;
        if (i % 2)
            CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, "by the side", 11, NULL, 11, &other));
        for (int again = 0; again < 3; again++) { /* the second time without a header, if it is small */
            CHECK_OK(dp_channel_call(s.ch, DP_CHAIN(FN_FILL, FN_LENGTH), &size, sizeof size, NULL, &length, 4, &got, 0, &started));
            CHECK_EQ(got, 4);
            CHECK_EQ(length, size);
        }
        if (i % 2 == 0)
            served_echo(&s, 8, 3); /* by the mailbox, where there is one */
        fill_and_echo(&s, size, out);
        if (i % 2) {
            CHECK_OK(dp_channel_wait(s.ch, other, 0));
            CHECK_OK(dp_channel_finish(s.ch, other, out, &got, NULL));
            CHECK_SAME(out, "by the side", 11);
        }
    }
    dp_channel_stats st;
    dp_channel_get_stats(s.ch, &st);
    CHECK_EQ(st.strays, 0);
    free(out);
    served_close(&s);
}

/* A chain that fails. `want` is in its text. */
static void fails(served *s, uint32_t first, uint32_t second, const void *in, uint32_t size, uint8_t which, const char *want) {
    char out[64], said[DP_FAILURE_TEXT + 1] = {0};
    uint32_t got, len;
    uint8_t failed;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s->ch, DP_CHAIN(first, second), in, size, NULL, out, sizeof out, &got, 0, &started), DP_FUNCTION_FAILED);
    const char *text = dp_channel_message(s->ch, &len);
    CHECK_EQ(dp_failure_code(text, &len, &failed), 0);
    CHECK_EQ(failed, which);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    memcpy(said, text, len);
    CHECKF(strstr(said, want), "\"%s\", want \"%s\"", said, want);
}

/* The reply says which function failed. What the first one writes beyond its room is caught. The worker goes on. */
T_CASE(chain_failures, "channel/chain-fails") {
    const uint32_t beyond[2] = {BULK + 1, 8}, more[2] = {BULK + 1, BULK + 1}, own[2] = {65, 8};
    uint8_t out[64];
    uint32_t got;
    dp_started started;
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, EAGER, BULK);
    fails(&s, FN_FAIL, FN_ECHO, "out of ink", 10, DP_CHAIN_FIRST, "out of ink");
    fails(&s, FN_ECHO, FN_FAIL, "out of paper", 12, DP_CHAIN_SECOND, "out of paper");
    fails(&s, FN_OVERRUN, FN_ECHO, beyond, sizeof beyond, DP_CHAIN_FIRST, "beyond the 65536 bytes of room for its result, and returned 8");
    fails(&s, FN_OVERRUN, FN_ECHO, more, sizeof more, DP_CHAIN_FIRST, "has 65537 bytes, and in this lease a chain passes on at most 65536");
    fails(&s, FN_ECHO, FN_OVERRUN, own, sizeof own, DP_CHAIN_SECOND, "beyond the 64 bytes of room for its result, and returned 8");
    CHECK_STATUS(dp_channel_call(s.ch, DP_CHAIN(FN_FILL, FN_ECHO), &more[0], 4, NULL, out, sizeof out, &got, 0, &started), DP_FUNCTION_FAILED);
    got = 65;
    CHECK_STATUS(dp_channel_call(s.ch, DP_CHAIN(FN_FILL, FN_ECHO), &got, 4, NULL, out, sizeof out, &got, 0, &started), DP_RESULT_TOO_LARGE);
    CHECK_EQ(got, 65);
    served_echo(&s, EAGER, 3);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}

/* Starts a chain and gives it up as overdue. Reports whether it still runs then, and which function of it. */
static bool overdue(served *s, uint32_t first, uint32_t second, uint32_t ms, uint32_t *function, bool until_slow) {
    uint32_t slot;
    int64_t since;
    CHECK_OK(dp_channel_submit(s->ch, DP_CHAIN(first, second), &ms, sizeof ms, NULL, 4, &slot));
    dp_channel_overdue(s->ch, slot);
    bool runs = dp_channel_runs_overdue(s->ch, function, &since);
    while (runs && until_slow && *function != FN_SLOW) {
        dp_channel_look(s->ch);
        runs = dp_channel_runs_overdue(s->ch, function, &since);
    }
    bool result = runs;
    for (uint32_t other; runs; runs = dp_channel_runs_overdue(s->ch, &other, &since))
        dp_channel_look(s->ch);
    return result;
}

/* The client knows which function of an overdue chain runs. */
T_CASE(chain_overdue, "channel/chain-overdue") {
    static const uint32_t chains[][2] = {{FN_SLOW, FN_ECHO}, {FN_ECHO, FN_SLOW}};
    served s;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, EAGER, BULK);
    for (int i = 0; i < 4; i++) { /* the second time over the notes of the first */
        uint32_t ms = 20, function;
        while (!overdue(&s, chains[i % 2][0], chains[i % 2][1], ms, &function, i % 2)) /* too late: the chain has returned */
            ms *= 2;
        CHECK_EQ(function, FN_SLOW);
    }
    served_echo(&s, EAGER, 3);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    served_close(&s);
}

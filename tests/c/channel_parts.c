/* Calls in parts: payloads and results that are larger than the bulk area. */
#include <stdlib.h>

#include "dp_parts.h"
#include "forged.h"

#define MIB (1u << 20)

typedef struct sides {
    uint8_t *in, *out;
} sides;

static void call(served *s, int fn, const void *in, uint32_t n, void *out, uint32_t capacity, int want, uint32_t want_size) {
    uint32_t size = 0;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s->ch, (uint32_t)fn, in, n, NULL, out, capacity, &size, 0, &started), want);
    CHECK_EQ(size, want_size);
}

static void echo(served *s, sides *a, uint32_t n, uint32_t capacity) {
    t_note("%u bytes, capacity %u", n, capacity);
    fill_pattern(a->in, n, n);
    memset(a->out, 0xA5, n + 64);
    call(s, FN_ECHO, a->in, n, a->out, capacity, DP_OK, n);
    CHECK_PATTERN(a->out, n, n);
    CHECK_BYTES(a->out + n, 0xA5, 64);
}

static void sides_new(sides *a, uint64_t size) {
    a->in = malloc(size);
    a->out = malloc(size + 64);
    CHECK(a->in && a->out);
}

static void sides_free(sides *a) {
    free(a->in);
    free(a->out);
}

/* Sizes around those of a part, in a bulk area of several parts, of one, and of one that is not a multiple. */
static void sizes(bool process, uint64_t bulk) {
    served s;
    sides a;
    uint32_t part = dp_part_max(bulk), most = (uint32_t)(bulk + 3 * part + 5), n = most;
    served_open(&s, process, DP_WAIT_ADAPTIVE, 4, 512, bulk);
    sides_new(&a, most);
    call(&s, FN_EMPTY, a.in, most, a.out, 8, DP_TOO_LARGE, 0);
    dp_channel_carry(s.ch, most);
    const uint32_t some[] = {(uint32_t)bulk + 1, (uint32_t)bulk + part, (uint32_t)bulk + part + 1, most};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++)
        echo(&s, &a, some[i], some[i]);
    echo(&s, &a, 100, most); /* a generous capacity */
    echo(&s, &a, part, most);
    call(&s, FN_EMPTY, a.in, 0, a.out, most, DP_OK, 0);
    call(&s, FN_FILL, &n, sizeof n, a.out, most, DP_OK, most); /* small payload, large result */
    CHECK_PATTERN(a.out, most, most);
    memcpy(a.in, &(uint32_t){16}, sizeof n); /* large payload, small result */
    call(&s, FN_FILL, a.in, most, a.out, 16, DP_OK, 16);
    CHECK_PATTERN(a.out, 16, 16);
    call(&s, FN_SCRIBBLE, a.in, most, a.out, 16, DP_OK, 0); /* as any function may */
    CHECK_EQ(a.in[most - 1] == 0xEE, 0);
    call(&s, FN_FAIL, a.in, most, a.out, most, DP_FUNCTION_FAILED, DP_FAILURE_TEXT < 512 ? 511 : 512);
    n = most;
    call(&s, FN_FILL, &n, sizeof n, a.out, most - 1, DP_RESULT_TOO_LARGE, most);
    memcpy(a.in, (uint32_t[]){(uint32_t)bulk + 8, 8}, 8);
    uint32_t size = 0, len;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s.ch, FN_OVERRUN, a.in, 8, NULL, a.out, (uint32_t)bulk + 4, &size, 0, &started), DP_FUNCTION_FAILED);
    CHECK(strstr(dp_channel_message(s.ch, &len), "it wrote beyond"));
    call(&s, FN_EMPTY, a.in, most + 1, a.out, 8, DP_TOO_LARGE, 0);
    call(&s, FN_EMPTY, a.in, 8, a.out, most + 1, DP_TOO_LARGE, 0);
    n = (uint32_t)bulk; /* a chain, of which both results are large */
    call(&s, FN_FILL | (FN_ECHO + 1) << 16, &n, sizeof n, a.out, most, DP_OK, n);
    CHECK_PATTERN(a.out, n, n);
    served_echo(&s, 100, 1);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    sides_free(&a);
    served_close(&s);
}

T_CASE(parts_process, "channel/parts@processes", .providers = T_SHM | T_VERBS | T_TCP | T_ENCRYPT | T_OFI) { sizes(true, t_is_verbs() ? 65536 : 2 * MIB); }
T_CASE(parts_thread, "channel/parts@one-process", .providers = 0) { sizes(false, 4096); }
T_CASE(parts_odd, "channel/parts@odd", .providers = 0) { sizes(false, 8384); }

/* Several at a time, of which some are given up, in payloads that the caller changes after the submit; pieces; and small calls between. */
T_CASE(parts_many, "channel/parts-many", .providers = 0) {
    enum { N = 50000, BULK = 16384 };
    struct {
        uint32_t slot, size, seed;
    } flying[4];
    served s;
    sides a;
    uint32_t n_flying = 0, rounds = (uint32_t)t_pick(200, 40);
    served_open(&s, false, DP_WAIT_ADAPTIVE, 4, 512, BULK);
    sides_new(&a, N);
    dp_channel_carry(s.ch, N);
    for (uint32_t round = 0; round < rounds || n_flying; round++) {
        uint32_t size = round % 3 ? N - round : 300, slot, got = 0;
        int st = DP_BUSY;
        fill_pattern(a.in, size, round);
        if (round < rounds && n_flying < 4)
            st = dp_channel_submit(s.ch, FN_ECHO, a.in, size, NULL, size, &slot);
        CHECKF(st == DP_OK || st == DP_BUSY, "submit: %s", dp_status_text(st));
        memset(a.in, 0, size);
        if (st == DP_OK && round % 5 == 0) {
            for (uint32_t k = 0; k < round % 7; k++)
                dp_channel_look(s.ch);
            dp_channel_abandon(s.ch, slot);
        } else if (st == DP_OK) {
            flying[n_flying].slot = slot;
            flying[n_flying].size = size;
            flying[n_flying++].seed = round;
        } else if (n_flying) {
            CHECK_OK(dp_channel_wait(s.ch, flying[0].slot, 0));
            CHECK_OK(dp_channel_finish(s.ch, flying[0].slot, a.out, &got, NULL));
            CHECK_EQ(got, flying[0].size);
            CHECK_PATTERN(a.out, got, flying[0].seed);
            memmove(flying, flying + 1, --n_flying * sizeof *flying);
        } else {
            CHECK_OK(dp_endpoint_wait_any(s.ep, 0)); /* one that was given up */
        }
    }
    uint8_t halves[2][N / 2];
    fill_pattern(a.in, N, 3);
    const dp_piece in[] = {{a.in, N / 2, 1, 0}, {a.in + N / 2, N / 2, 1, 0}}, out[] = {{halves[0], N / 2, 1, 0}, {halves[1], N / 2, 1, 0}};
    uint32_t size = 0, slot;
    dp_started started;
    CHECK_OK(dp_channel_call_pieces(s.ch, FN_ECHO, &(dp_pieces){in, 2}, N, &(dp_pieces){out, 2}, N, &size, 0, &started, &slot));
    CHECK_EQ(size, N);
    CHECK_SAME(halves[0], a.in, N / 2);
    CHECK_SAME(halves[1], a.in + N / 2, N / 2);
    while (dp_channel_free_slots(s.ch) < 4)
        served_echo(&s, 10, 1);
    sides_free(&a);
    served_close(&s);
}

/* A worker that dies while parts of a payload travel has not executed the function. The next one can be called in parts. */
T_CASE(parts_death, "channel/parts-death", .providers = 0) {
    enum { N = 40000 };
    served s;
    sides a;
    uint32_t slow, parts, size, ms = 10000;
    dp_started started = DP_MAYBE_EXECUTED;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 512, 4096);
    sides_new(&a, N);
    memset(a.in, 1, N);
    dp_channel_carry(s.ch, N);
    CHECK_OK(dp_channel_submit(s.ch, FN_SLOW, &ms, 4, NULL, 4, &slow));
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, a.in, N, NULL, N, &parts));
    t_peer_kill(&s.peer);
    if (s.dev->caps & DP_CAP_SILENT_DEATH)
        dp_channel_fail(s.ch, DP_PEER_GONE); /* as the agent does when the executor reports the death */
    CHECK_OK(dp_channel_wait(s.ch, parts, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, parts, a.out, &size, &started), DP_PEER_GONE);
    CHECK_EQ(started, DP_NOT_STARTED);
    CHECK_STATUS(dp_channel_finish(s.ch, slow, &ms, &size, &started), DP_PEER_GONE);
    CHECK_OK(dp_channel_reset(s.ch, NULL));
    served_again(&s, false);
    echo(&s, &a, N, N);
    CHECK_EQ(dp_channel_free_slots(s.ch), 4);
    sides_free(&a);
    served_close(&s);
}

T_CASE(parts_hostile, "channel/parts-hostile-client", .providers = 0) {
    t_peer p;
    raw r;
    raw_client(&r, &p); /* 8 slots of 512 bytes, 4096 of bulk */
    enum { IN = DP_REQ_PART_IN, OUT = DP_REQ_PART_OUT };
#define PART(flags_, size_, capacity_, in_, out_) \
    {.generation = 77, .call_id = 5, .size = size_, .capacity = capacity_, .flags = flags_, .in_offset = in_, .out_offset = out_}
    const struct {
        const char *what;
        dp_request h;
        uint32_t offset, bytes, payload;
        int status;
    } bad[] = {
        {"the first part", PART(IN, 3000, 8, 0, 0), 0, 2048, 0, DP_OK},
        {"a gap", PART(IN, 3000, 8, 0, 0), 2049, 951, 0, DP_BAD_REQUEST},
        {"the first part again", PART(IN, 3000, 8, 0, 0), 0, 2000, 0, DP_OK},
        {"another size", PART(IN, 3001, 8, 0, 0), 2000, 1001, 0, DP_BAD_REQUEST},
        {"another capacity", PART(IN, 3000, 9, 0, 0), 2000, 1000, 0, DP_BAD_REQUEST},
        {"more than a part", PART(IN, 3000, 8, 0, 0), 0, 2049, 0, DP_BAD_REQUEST},
        {"part beyond the bulk area", PART(IN, 3000, 8, 33, 0), 0, 2048, 0, DP_BAD_REQUEST},
        {"offset of 256 GiB", PART(IN, 3000, 8, ~0u, 0), 0, 2048, 0, DP_BAD_REQUEST},
        {"part beyond the payload", PART(IN, 3000, 8, 0, 0), 2000, 1001, 0, DP_BAD_REQUEST},
        {"part that wraps around", PART(IN, 3000, 8, 0, 0), ~0u, 2, 0, DP_BAD_REQUEST},
        {"no bytes", PART(IN, 3000, 8, 0, 0), 2000, 0, 0, DP_BAD_REQUEST},
        {"result beyond the bulk area", PART(IN, 10, 3000, 0, 33), 0, 10, 0, DP_BAD_REQUEST},
        {"bytes in the slot", PART(IN, 10, 8, 0, 0), 0, 10, 10, DP_BAD_REQUEST},
        {"both flags", PART(IN | OUT, 10, 8, 0, 0), 0, 10, 0, DP_BAD_REQUEST},
        {"bulk too", PART(IN | DP_REQ_BULK_IN, 10, 8, 0, 0), 0, 10, 0, DP_BAD_REQUEST},
        {"in place too", PART(IN | DP_REQ_PLACED_OUT, 10, 8, 0, 0), 0, 10, 0, DP_BAD_REQUEST},
        {"result of no call", PART(OUT, 3000, 3000, 0, 0), 0, 8, 0, DP_BAD_REQUEST},
        {"a good call", PART(IN, 2048, 3000, 0, 0), 0, 2048, 0, DP_OK},
        {"its result, which was sent", PART(OUT, 2048, 3000, 0, 0), 0, 8, 0, DP_BAD_REQUEST},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t_note("%s", bad[i].what);
        r.keys = (uint64_t)bad[i].bytes << 32 | bad[i].offset;
        raw_request(&r, 3, bad[i].h, bad[i].payload, 5);
        dp_reply h = raw_reply(&r, 3, 5);
        CHECKF(h.status == bad[i].status, "%s: answered %s", bad[i].what, dp_status_text(h.status));
    }
    raw_bare(&r, 3, 8, 6); /* repeats no part */
    CHECK_STATUS(raw_reply(&r, 3, 6).status, DP_BAD_REQUEST);
    /* A result of 3000 bytes, of which the reply brings 2048: requests for the rest. */
    for (uint32_t at = 0; at < 3000; at += 2048) {
        r.keys = (uint64_t)(at ? 952 : 2048) << 32 | at;
        raw_request(&r, 3, (dp_request)PART(IN, 3000, 3000, 0, 0), 0, 5);
        CHECK_EQ(raw_reply(&r, 3, 5).size, at ? 3000 : 0);
    }
    const struct {
        uint32_t offset, bytes, capacity, out, size;
    } asks[] = {{0, 2049, 3000, 0, 0}, {0, 0, 3000, 0, 0}, {2048, 953, 3000, 0, 0}, {2048, 952, 3001, 0, 0}, {~0u, 2, 3000, 0, 0},
                {2048, 952, 3000, 64, 0}, {0, 100, 3000, 0, 100}, {2048, 952, 3000, 0, 952}, {2048, 952, 3000, 0, 0}};
    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++) {
        t_note("request %zu for a part of the result", i);
        r.keys = (uint64_t)asks[i].bytes << 32 | asks[i].offset;
        raw_request(&r, 3, (dp_request)PART(OUT, 3000, asks[i].capacity, 0, asks[i].out), 0, 5);
        dp_reply h = raw_reply(&r, 3, 5);
        CHECK_STATUS(h.status, asks[i].size ? DP_OK : DP_BAD_REQUEST);
        CHECK_EQ(h.size, asks[i].size);
    }
    raw_request_as(&r, 0, (dp_request){.generation = 77, .call_id = 5}, 0, dp_imm(8, 5)); /* ends the connection */
    int ended;
    t_recv(p.sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PROTOCOL);
    t_peer_join(&p);
    end_close(&r.e);
}

/* What a worker answers: to the parts of the payload, then to requests for parts of the result. */
static void forger(int sock, void *arg) {
    (void)arg;
    raw r;
    raw_worker(&r, sock);
    const struct {
        int32_t status;
        uint32_t size, payload;
        bool bare, twice;
    } answers[] = {
        {DP_BAD_REQUEST, 0, 0, false, false}, /* a worker of an earlier version */
        {DP_OK, 10001, 0, false, false},      /* more than the capacity */
        {DP_OK, 8, 8, false, false},          /* in the slot */
        {DP_OK, 64, 64, true, false},         /* without a header */
        {DP_OK, 5000, 0, false, false}, {DP_OK, 2047, 0, false, false},               /* not as many as were asked for */
        {DP_OK, 5000, 0, false, false}, {DP_OK, 0, 64, true, false},
        {DP_OK, 5000, 0, false, false}, {DP_OK, 2048, 0, false, false}, {DP_OK, 904, 0, false, true}, /* the last is repeated */
    };
    for (size_t k = 0; k < sizeof answers / sizeof *answers; k++) {
        dp_request q;
        uint32_t slot = raw_take(&r, &q, NULL);
        for (int i = 0; i <= answers[k].twice; i++)
            if (answers[k].bare)
                raw_answer_bare(&r, slot, answers[k].payload, 1, DP_IMM_BARE | dp_imm(slot, q.call_id));
            else
                raw_answer(&r, slot, (dp_reply){q.generation, q.call_id, answers[k].status, answers[k].size}, answers[k].payload, 0,
                           dp_imm(slot, q.call_id));
    }
    raw_take(&r, &(dp_request){0}, NULL); /* without an answer */
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(parts_hostile_worker, "channel/parts-hostile-worker", .providers = 0) {
    served s;
    sides a;
    served_by(&s, forger);
    sides_new(&a, 10001);
    dp_channel_carry(s.ch, 10000);
    call(&s, FN_ECHO, a.in, 100, a.out, 10000, DP_TOO_LARGE, 0);
    call(&s, FN_ECHO, a.in, 100, a.out, 10000, DP_TOO_LARGE, 0); /* without asking again */
    dp_channel_carry(s.ch, 10000);
    for (int i = 0; i < 5; i++)
        call(&s, FN_ECHO, a.in, 100, a.out, 10000, DP_PROTOCOL, 0);
    call(&s, FN_ECHO, a.in, 100, a.out, 10000, DP_OK, 5000); /* the worker can write what it wants anyway */
    CHECK_EQ(dp_channel_free_slots(s.ch), 8);
    uint32_t size;
    dp_started started;
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, a.in, 10000, NULL, a.out, 100, &size, dp_now_ns() + 1000000, &started), DP_DEADLINE);
    CHECK_EQ(started, DP_NOT_STARTED); /* most of the payload was not sent */
    t_sync(s.peer.sock);
    sides_free(&a);
    served_by_close(&s);
}

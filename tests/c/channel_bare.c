/* Messages without a header: their meaning for a worker, and when a client sends them. */
#include "dp_channel_impl.h"
#include "forged.h"

T_CASE(bare_client, "channel/bare-requests") {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    dp_request h = {.generation = 77, .call_id = 0x1fffe, .size = 8, .capacity = 512};

    t_note("bare where no header has come");
    raw_bare(&r, 0, 8, 5);
    CHECK_STATUS(raw_reply(&r, 0, 5).status, DP_BAD_REQUEST);

    t_note("sizes change, the rest is as the header said");
    raw_request(&r, 1, h, 8, 0x1fffe);
    CHECK_EQ(raw_reply(&r, 1, 0x1fffe).size, 8);
    static const uint32_t sizes[] = {8, 0, 1, 64, 511, 512};
    for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fill_pattern(local_bytes(&r.e), 512, i);
        raw_bare(&r, 1, sizes[i], 0x1ffff + i);
        dp_reply a = raw_reply(&r, 1, 0x1ffff + i);
        CHECK_OK(a.status);
        CHECK_EQ(a.size, sizes[i]);
        CHECK_PATTERN(end_bytes(&r.e) + dp_slot_payload(&r.l, 1), sizes[i], i);
    }
    t_note("more than a slot holds");
    raw_bare(&r, 1, 513, 7);
    CHECK_STATUS(raw_reply(&r, 1, 0x30007 - 0x10000).status, DP_BAD_REQUEST);
    raw_bare(&r, 1, 16, 8);
    CHECK_OK(raw_reply(&r, 1, 0x20008).status);

    t_note("a refusal names the whole call id, over the tag's wrap");
    h.function = FN_COUNT;
    raw_request(&r, 2, h, 8, 0x1fffe);
    CHECK_STATUS(raw_reply(&r, 2, 0x1fffe).status, DP_NO_FUNCTION);
    raw_bare(&r, 2, 8, 0xfffd); /* 65,535 later */
    CHECK_STATUS(raw_reply(&r, 2, 0x2fffd).status, DP_NO_FUNCTION);
    raw_bare(&r, 2, 8, 3);
    CHECK_STATUS(raw_reply(&r, 2, 0x30003).status, DP_NO_FUNCTION);

    t_note("bulk ranges are good for one call");
    raw_request(&r, 3, (dp_request){.generation = 77, .call_id = 9, .size = 64, .capacity = 64, .flags = DP_REQ_BULK_IN}, 0,
                9);
    CHECK_EQ(raw_reply(&r, 3, 9).size, 64);
    raw_bare(&r, 3, 0, 10);
    CHECK_STATUS(raw_reply(&r, 3, 10).status, DP_BAD_REQUEST);

    t_note("a refused header is not a header");
    raw_request(&r, 4, (dp_request){.generation = 78, .call_id = 9, .size = 8, .capacity = 8}, 8, 9);
    CHECK_STATUS(raw_reply(&r, 4, 9).status, DP_BAD_REQUEST);
    raw_bare(&r, 4, 8, 10);
    CHECK_STATUS(raw_reply(&r, 4, 10).status, DP_BAD_REQUEST);

    raw_request_as(&r, 0, h, 0, dp_imm(8, 5)); /* there is no such slot, so the server ends */
    int ended;
    t_recv(p.sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PROTOCOL);
    t_peer_join(&p);
    end_close(&r.e);
}

/* Says of each request what it was, and echoes its size. */
static void reporter(int sock, void *arg) {
    (void)arg;
    raw r;
    raw_worker(&r, sock);
    int32_t more;
    for (t_recv(sock, &more, sizeof more); more; t_recv(sock, &more, sizeof more))
        for (; more; more--) {
            struct {
                dp_request q;
                uint32_t slot;
                bool bare;
            } got = {0};
            got.slot = raw_take(&r, &got.q, &got.bare);
            if (more == 1)
                t_send(sock, &got, sizeof got);
            raw_answer_bare(&r, got.slot, got.q.size < got.q.capacity ? got.q.size : got.q.capacity, 1,
                            DP_IMM_BARE | dp_imm(got.slot, got.q.call_id));
        }
    end_close(&r.e);
}

/* Makes n calls by the queue pair. True if the last request was bare. */
static bool last_bare(served *s, int32_t n, uint32_t function, uint32_t size, uint32_t capacity) {
    static uint8_t bytes[512];
    struct {
        dp_request q;
        uint32_t slot;
        bool bare;
    } got;
    uint32_t out;
    dp_started started;
    t_send(s->peer.sock, &n, sizeof n);
    while (n--)
        CHECK_OK(dp_channel_call(s->ch, function, bytes, size, NULL, bytes, capacity, &out, 0, &started));
    t_recv(s->peer.sock, &got, sizeof got);
    CHECK_EQ(got.q.function, function);
    CHECK_EQ(got.q.size, size);
    CHECK_EQ(got.q.capacity, capacity);
    return got.bare;
}

T_CASE(bare_sent, "channel/bare-when", .seconds = 20) {
    served s;
    served_by(&s, reporter);
    s.ch->mailbox = NULL; /* all by the queue pair */
    uint32_t a, b, size;
    uint8_t bytes[512] = {0};
    CHECK(!last_bare(&s, 1, FN_ECHO, 300, 400));
    CHECK(last_bare(&s, 1, FN_ECHO, 300, 400));
    CHECK(last_bare(&s, 1, FN_ECHO, 512, 400));
    CHECK(!last_bare(&s, 1, FN_ECHO, 300, 401));
    CHECK(!last_bare(&s, 1, FN_EMPTY, 300, 401));
    CHECK(last_bare(&s, 1, FN_EMPTY, 300, 401));
    /* Two in flight: the second has another slot and is not alone. Its slot then rests while the other's calls go
     * round all the tags, and a tag alone would name the wrong call. (All of them on shm only.) */
    for (int round = 0; round < 2; round++) {
        int32_t two = 2;
        struct {
            dp_request q;
            uint32_t slot;
            bool bare;
        } got;
        t_send(s.peer.sock, &two, sizeof two);
        CHECK_OK(dp_channel_submit(s.ch, FN_EMPTY, bytes, 300, NULL, 401, &a));
        CHECK_OK(dp_channel_submit(s.ch, FN_EMPTY, bytes, 300, NULL, 401, &b));
        t_recv(s.peer.sock, &got, sizeof got);
        CHECK_EQ(got.slot, b);
        CHECK_EQ(got.bare, round == 1 && !t_is_shm());
        CHECK_OK(dp_channel_wait(s.ch, a, 0));
        CHECK_OK(dp_channel_wait(s.ch, b, 0));
        CHECK_OK(dp_channel_finish(s.ch, b, NULL, &size, NULL));
        CHECK_OK(dp_channel_finish(s.ch, a, NULL, &size, NULL)); /* the next call's slot */
        if (round == 0)
            last_bare(&s, t_is_shm() ? DP_IMM_TAGS : 100, FN_EMPTY, 300, 401);
    }
    int32_t none = 0;
    t_send(s.peer.sock, &none, sizeof none);
    served_by_close(&s);
}

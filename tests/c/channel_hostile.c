/* Hand-made clients and workers that break the protocol of the queue pair. */
#include <poll.h>

#include "dp_layout.h"
#include "forged.h"

/* A request for a slot that does not exist has no place for a refusal, so the server ends the connection. */
static void end_server(raw *r, t_peer *p) {
    int ended;
    raw_request_as(r, 0, (dp_request){.generation = 77}, 0, dp_imm(8, 5));
    t_recv(p->sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PROTOCOL);
    t_peer_join(p);
    end_close(&r->e);
}

T_CASE(hostile_client, "channel/hostile-client", .providers = 0) {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    const dp_request good = {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .function = FN_ECHO};
    struct {
        const char *what;
        dp_request h;
        uint32_t payload, tag;
        int status;
    } bad[] = {
        {"good", good, 8, 5, DP_OK},
        {"generation", {.generation = 78, .call_id = 5, .size = 8, .capacity = 8}, 8, 5, DP_BAD_REQUEST},
        {"tag", good, 8, 6, DP_BAD_REQUEST},
        {"size below the bytes sent", good, 9, 5, DP_BAD_REQUEST},
        {"size above the bytes sent", good, 7, 5, DP_BAD_REQUEST},
        {"size above the slot", {.generation = 77, .call_id = 5, .size = 513, .capacity = 8}, 8, 5, DP_BAD_REQUEST},
        {"size of 4 GB", {.generation = 77, .call_id = 5, .size = ~0u, .capacity = 8}, 8, 5, DP_BAD_REQUEST},
        {"capacity above the slot", {.generation = 77, .call_id = 5, .size = 8, .capacity = 513}, 8, 5, DP_BAD_REQUEST},
        {"flags", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 256}, 8, 5, DP_BAD_REQUEST},
        {"chain", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .then = FN_ECHO + 1}, 8, 5, DP_OK},
        {"chain to a function that does not exist", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .then = FN_COUNT + 1}, 8, 5,
         DP_NO_FUNCTION},
        {"chain to function 2^32 - 1", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .then = ~0u}, 8, 5, DP_NO_FUNCTION},
        {"function", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .function = FN_COUNT}, 8, 5,
         DP_NO_FUNCTION},
        {"function 65535", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .function = 65535}, 8, 5,
         DP_NO_FUNCTION},
        {"bulk in beyond", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 1, .in_offset = 64}, 0, 5,
         DP_BAD_REQUEST},
        {"bulk in wrapped", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 1, .in_offset = ~0u}, 0,
         5, DP_BAD_REQUEST},
        {"bulk in longer than its rest",
         {.generation = 77, .call_id = 5, .size = 65, .capacity = 8, .flags = 1, .in_offset = 63}, 0, 5, DP_BAD_REQUEST},
        {"bulk out beyond", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 2, .out_offset = 65}, 8,
         5, DP_BAD_REQUEST},
        {"bulk with a payload in the slot", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 1}, 8, 5,
         DP_BAD_REQUEST},
        {"good at the end", good, 8, 5, DP_OK},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t_note("%s", bad[i].what);
        uint32_t slot = (uint32_t)i % 8, tag = bad[i].tag + 8 * (uint32_t)i;
        bad[i].h.call_id += 8 * (uint32_t)i; /* each request is another call */
        raw_request(&r, slot, bad[i].h, bad[i].payload, tag);
        dp_reply h = raw_reply(&r, slot, tag); /* a refusal is addressed as the immediate is */
        CHECKF(h.status == bad[i].status, "%s: answered %s", bad[i].what, dp_status_text(h.status));
        CHECK_EQ(h.size, bad[i].status == DP_OK ? 8 : 0);
    }
    end_server(&r, &p);
}

/* Requests that arrive twice, also after the header of the slot's next request was written. The second one is not answered: the next reply is
 * that of the next request. It does not announce the next request either. */
T_CASE(repeated_request, "channel/repeated-request", .providers = 0) {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    const dp_request first = {.generation = 77, .call_id = 0x10005, .size = 8, .capacity = 8, .function = FN_ECHO};
    const dp_request next = {.generation = 77, .call_id = 0x10007, .size = 8, .capacity = 4, .function = FN_ECHO};
    const dp_request wrapped = {.generation = 77, .call_id = 0x20007, .size = 8, .capacity = 8, .function = FN_ECHO};
    raw_request(&r, 0, first, 8, 5);
    raw_request(&r, 0, first, 8, 5);
    raw_bare(&r, 0, 8, 6);
    raw_bare(&r, 0, 8, 6);
    CHECK_STATUS(raw_reply(&r, 0, first.call_id).status, DP_OK);
    CHECK_STATUS(raw_reply(&r, 0, first.call_id + 1).status, DP_OK);
    raw_request_as(&r, 0, next, 8, dp_imm(0, 6));
    raw_bare(&r, 0, 8, 8); /* repeats the last header that was announced */
    CHECK_STATUS(raw_reply(&r, 0, first.call_id + 3).status, DP_OK);
    raw_request(&r, 0, next, 8, 7);
    CHECK_STATUS(raw_reply(&r, 0, next.call_id).status, DP_RESULT_TOO_LARGE);
    raw_request(&r, 0, wrapped, 8, 7); /* another call with the same tag */
    CHECK_STATUS(raw_reply(&r, 0, wrapped.call_id).status, DP_OK);
    end_server(&r, &p);
}

static void forger(int sock, void *arg) {
    (void)arg;
    raw r;
    raw_worker(&r, sock);
    /* Reads the client's only call. */
    dp_request q;
    uint32_t slot = raw_take(&r, &q, NULL);
    const uint32_t imm = dp_imm(slot, q.call_id), bare = DP_IMM_BARE | imm;
    const struct {
        uint32_t at, imm;
        dp_reply h;
    } forged[] = {
        {slot + 1, dp_imm(slot + 1, q.call_id), {q.generation, q.call_id, DP_OK, 8}}, /* a slot that is free */
        {slot, imm, {q.generation, q.call_id + 65536, DP_OK, 8}},                     /* another call, same tag */
        {slot, imm, {q.generation + 1, q.call_id, DP_OK, 8}},
        {slot, imm ^ 1, {q.generation, q.call_id, DP_OK, 8}},
        {7, dp_imm(32000, q.call_id), {q.generation, q.call_id, DP_OK, 8}}, /* no such slot */
        {7, DP_IMM_BARE | dp_imm(32000, q.call_id), {0}},
        {slot + 1, DP_IMM_BARE | dp_imm(slot + 1, q.call_id), {0}}, /* bare: a slot that is free, another call */
        {slot, bare ^ 1, {0}},
        {slot, bare, {0}},                                   /* the correct one */
        {slot, bare, {0}},                                   /* repeated */
        {slot, imm, {q.generation, q.call_id, DP_OK, 8}},    /* repeated, with header */
    };
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        if (dp_imm_bare(forged[i].imm))
            raw_answer_bare(&r, forged[i].at, 8, (int)i, forged[i].imm);
        else
            raw_answer(&r, forged[i].at, forged[i].h, 8, (int)i, forged[i].imm);
        t_sync(sock); /* it has arrived */
        t_sync(sock); /* and the client has polled it */
    }
    /* Results larger than a call accepts, with header and bare; and a status that no worker may send. */
    for (int k = 0; k < 3; k++) {
        slot = raw_take(&r, &q, NULL);
        if (k == 1)
            raw_answer_bare(&r, slot, 200, k, DP_IMM_BARE | dp_imm(slot, q.call_id));
        else
            raw_answer(&r, slot, (dp_reply){q.generation, q.call_id, k ? DP_LEASE_ENDED : DP_OK, k ? 0 : 200},
                       k ? 0 : 200, k, dp_imm(slot, q.call_id));
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(hostile_worker, "channel/hostile-worker") {
    enum { FORGED = 11, TRUE_ONE = 8 };
    served s;
    served_by(&s, forger);
    served_by_queue_pair(s.ch);
    uint32_t slot, size;
    uint8_t out[512] = {0};
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, out, 300, NULL, 8, &slot));
    while (poll(&(struct pollfd){.fd = s.peer.sock, .events = POLLIN}, 1, 0) == 0) /* the request may leave only while the client polls */
        CHECK_EQ(dp_channel_test(s.ch, slot), 0);
    for (int i = 0; i < FORGED; i++) {
        t_sync(s.peer.sock);
        if (i < TRUE_ONE)
            CHECK_EQ(dp_channel_test(s.ch, slot), 0);
        else
            CHECK_OK(dp_channel_wait(s.ch, slot, 0));
        t_sync(s.peer.sock);
    }
    CHECK_STATUS(dp_endpoint_wait_any(s.ep, dp_now_ns() + 1000000000), DP_OK);
    CHECK_OK(dp_channel_finish(s.ch, slot, out, &size, NULL));
    CHECK_EQ(size, 8);
    CHECK_EQ(dp_channel_free_slots(s.ch), 8);
    for (int k = 0; k < 3; k++)
        CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, out, 300, NULL, out, 100, &size, 0, &started), DP_PROTOCOL);
    dp_channel_stats st;
    dp_channel_get_stats(s.ch, &st);
    CHECK_EQ(st.strays, FORGED - 1);
    t_sync(s.peer.sock);
    served_by_close(&s);
}

/* Calls that go wrong: refusals, failures, deadlines, deaths, forgeries. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../dp_layout.h"
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
    CHECK_STATUS(dp_channel_call(s.ch, 65536, buf, 8, NULL, buf, 8, &size, 0, &started), DP_NO_FUNCTION);
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

T_CASE(deadline, "channel/deadline") {
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    for (int m = 0; m < 3; m++) {
        served s;
        served_open(&s, true, modes[m], 2, 64, 0);
        uint32_t ms = 100, size;
        dp_started started;
        uint8_t out[64];
        memset(out, 0x5A, sizeof out);
        int64_t t0 = dp_now_ns();
        CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, out, 64, &size, t0 + 20000000, &started), DP_DEADLINE);
        int64_t took = dp_now_ns() - t0;
        CHECK_EQ(started, DP_MAYBE_EXECUTED);
        CHECKF(took >= 20000000 && took < 90000000 * t_time_scale(), "a deadline of 20 ms took %lld us",
               (long long)took / 1000);
        CHECK_EQ(dp_channel_free_slots(s.ch), 1);
        ms = 0;
        CHECK_OK(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, out + 32, 32, &size, 0, &started));
        CHECK_EQ(dp_channel_free_slots(s.ch), 2); /* the late reply came before this one's */
        CHECK_BYTES(out, 0x5A, 32);
        dp_channel_stats st;
        dp_channel_get_stats(s.ch, &st);
        CHECK_EQ(st.late_replies, 1);
        CHECK_EQ(st.abandoned, 1);
        CHECK_EQ(st.strays, 0);
        served_close(&s);
    }
}

/* A worker's death ends the calls on it: spinning and blocked callers alike. */
static void death(dp_wait_mode mode, bool crash) {
    served s;
    served_open(&s, true, mode, 4, 64, 0);
    served_echo(&s, 8, 1);
    uint32_t slot[2], size, ms = 10000;
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, crash ? FN_CRASH : FN_SLOW, &ms, 4, NULL, 4, &slot[0]));
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, &ms, 4, NULL, 4, &slot[1]));
    dp_channel_abandon(s.ch, slot[1]);
    int64_t t0 = dp_now_ns();
    if (!crash)
        t_peer_kill(&s.peer);
    CHECK_OK(dp_channel_wait(s.ch, slot[0], t0 + 5000000000));
    CHECKF(dp_now_ns() - t0 < 1000000000, "noticed after %lld ms", (long long)(dp_now_ns() - t0) / 1000000);
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

/* The control plane's word ends a call on every provider. */
static void failed_by_control(dp_wait_mode mode) {
    served s;
    served_open(&s, true, mode, 4, 64, 0);
    uint32_t size, ms = 300;
    dp_started started;
    pthread_t t;
    CHECK_EQ(pthread_create(&t, NULL, fail_later, s.ch), 0);
    int64_t t0 = dp_now_ns();
    CHECK_STATUS(dp_channel_call(s.ch, FN_SLOW, &ms, 4, NULL, &ms, 4, &size, 0, &started), DP_WORKER_DIED);
    CHECK_EQ(started, DP_MAYBE_EXECUTED);
    CHECKF(dp_now_ns() - t0 < 250000000 * t_time_scale(), "noticed after %lld ms",
           (long long)(dp_now_ns() - t0) / 1000000);
    pthread_join(t, NULL);
    CHECK_STATUS(dp_channel_status(s.ch), DP_WORKER_DIED);
    t_peer_kill(&s.peer);
    CHECK_OK(dp_channel_reset(s.ch, NULL));
    CHECK_STATUS(dp_channel_status(s.ch), DP_OK);
    served_close_client(&s);
}
T_CASE(control_hot, "channel/failed-by-control-hot") { failed_by_control(DP_WAIT_HOT); }
T_CASE(control_warm, "channel/failed-by-control-warm") { failed_by_control(DP_WAIT_WARM); }

/* ---- a hostile client ---- */

typedef struct raw { /* a hand-made side of a channel */
    end e;
    dp_layout l;
    dp_side peer;
    uint32_t generation;
} raw;

static const end_opts raw_opts = {.size = 64 << 10, .max_send = 32, .max_recv = 16};

static void raw_open(raw *r) {
    end_open(&r->e, &raw_opts, NULL);
    dp_layout_set(&r->l, 8, 512, 4096);
    CHECK_LE(r->l.size, r->e.mem->size);
    r->generation = 77;
}

static void raw_blob(raw *r, uint8_t role, uint8_t *blob, uint32_t *len) {
    dp_error err;
    *len = DP_CHANNEL_BLOB_MAX;
    CHECK_OK_ERR(dp_side_encode(r->e.qp, &r->l, role, r->generation, r->e.mem, blob, len, &err), err);
}

static void server_side(int sock, void *arg);

/* A hand-made client, connected to a server process. */
static void raw_client(raw *r, t_peer *p) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    dp_error err;
    t_peer_start(p, true, server_side, NULL);
    raw_open(r);
    raw_blob(r, DP_ROLE_CLIENT, blob, &len);
    t_send(p->sock, &len, sizeof len);
    t_send(p->sock, blob, len);
    t_recv(p->sock, &len, sizeof len);
    t_recv(p->sock, blob, len);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_WORKER, r->e.dev->provider, &r->peer, &err), err);
    CHECK_OK_ERR(dp_qp_connect(r->e.qp, r->peer.qp_blob, r->peer.qp_len, &err), err);
}

static void raw_request(raw *r, uint32_t slot, dp_request h, uint32_t payload, uint32_t tag) {
    uint32_t head = h.flags & 3 ? DP_REQ_LONG : DP_REQ_SHORT;
    memcpy(local_bytes(&r->e), (uint8_t *)&h + DP_REQ_LONG - head, head);
    dp_sge sge = local_sge(&r->e, 0, head + payload);
    end_write_imm(&r->e, &sge, 1, r->peer.addr + dp_slot_payload(&r->l, slot) - head, r->peer.rkey,
                  dp_imm(slot, tag), 0, 0);
}

/* The reply in `slot`, checked for who it answers. */
static dp_reply raw_reply(raw *r, uint32_t slot, uint32_t call_id) {
    dp_wc wc = end_imm(&r->e);
    CHECK_EQ(dp_imm_slot(wc.imm), slot);
    dp_reply h;
    memcpy(&h, end_bytes(&r->e) + dp_slot_payload(&r->l, slot) - DP_REPLY_SIZE, sizeof h);
    CHECK_EQ(h.call_id, call_id);
    return h;
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
        {"flags", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .flags = 8}, 8, 5, DP_BAD_REQUEST},
        {"reserved", {.generation = 77, .call_id = 5, .size = 8, .capacity = 8, .reserved = 1}, 8, 5, DP_BAD_REQUEST},
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
        raw_request(&r, (uint32_t)i % 8, bad[i].h, bad[i].payload, bad[i].tag);
        dp_reply h = raw_reply(&r, (uint32_t)i % 8, bad[i].h.call_id);
        CHECKF(h.status == bad[i].status, "%s: answered %s", bad[i].what, dp_status_text(h.status));
        CHECK_EQ(h.size, bad[i].status == DP_OK ? 8 : 0);
    }
    /* A slot that does not exist leaves no place for a refusal: the server ends the connection. */
    memcpy(local_bytes(&r.e), (const uint8_t *)&good + 8, DP_REQ_SHORT);
    dp_sge sge = local_sge(&r.e, 0, DP_REQ_SHORT);
    end_write_imm(&r.e, &sge, 1, r.peer.addr + 40, r.peer.rkey, dp_imm(8, 5), 0, 0);
    int ended;
    t_recv(p.sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PROTOCOL);
    t_peer_join(&p);
    end_close(&r.e);
}

static uint32_t echo(void *args, uint32_t n, void *res) {
    memcpy(res, args, n);
    return n;
}

static void server_side(int sock, void *arg) {
    (void)arg;
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    dp_dev_options o = quick_options();
    o.active_side_only = 1;
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &s, &err), err);
    dp_function table[FN_COUNT];
    for (int i = 0; i < FN_COUNT; i++)
        table[i] = echo;
    dp_server_set_functions(s, table, FN_COUNT);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    int st = dp_server_run(s);
    t_send(sock, &st, sizeof st);
    dp_server_destroy(s);
    dp_dev_close(dev);
}

/* ---- a hostile worker ---- */

static void forger(int sock, void *arg) {
    (void)arg;
    raw r;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    t_name("forger");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    raw_open(&r);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_CLIENT, r.e.dev->provider, &r.peer, &err), err);
    r.generation = r.peer.generation;
    CHECK_EQ(r.peer.layout.depth, 8);
    raw_blob(&r, DP_ROLE_WORKER, blob, &len);
    CHECK_OK_ERR(dp_qp_connect(r.e.qp, r.peer.qp_blob, r.peer.qp_len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    /* The client's one call, read by hand. */
    dp_wc wc = end_imm(&r.e);
    uint32_t slot = dp_imm_slot(wc.imm);
    dp_request q;
    memcpy(&q, end_bytes(&r.e) + dp_slot_payload(&r.l, slot) - DP_REQ_LONG, sizeof q);
    const struct {
        uint32_t slot, tag_xor;
        dp_reply h;
        uint32_t payload;
    } forged[] = {
        {slot + 1, 0, {q.generation, q.call_id, DP_OK, 8}, 8},   /* a slot that is free */
        {slot, 0, {q.generation, q.call_id + 65536, DP_OK, 8}, 8}, /* another call, same tag */
        {slot, 0, {q.generation + 1, q.call_id, DP_OK, 8}, 8},
        {slot, 1, {q.generation, q.call_id, DP_OK, 8}, 8},
        {60000, 0, {q.generation, q.call_id, DP_OK, 8}, 8}, /* no such slot */
        {slot, 0, {q.generation, q.call_id, DP_OK, 8}, 8},  /* the true one */
        {slot, 0, {q.generation, q.call_id, DP_OK, 8}, 8},  /* repeated */
    };
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        memcpy(local_bytes(&r.e), &forged[i].h, DP_REPLY_SIZE);
        memset(local_bytes(&r.e) + DP_REPLY_SIZE, (int)i, 8);
        uint32_t at = forged[i].slot < 8 ? forged[i].slot : 7;
        dp_sge sge = local_sge(&r.e, 0, DP_REPLY_SIZE + forged[i].payload);
        end_write_imm(&r.e, &sge, 1, r.peer.addr + dp_slot_payload(&r.l, at) - DP_REPLY_SIZE, r.peer.rkey,
                      dp_imm(forged[i].slot, forged[i].h.call_id ^ forged[i].tag_xor), i, DP_SIGNALED);
        end_sent(&r.e, i, DP_OP_WRITE);
        t_sync(sock); /* it is there */
        t_sync(sock); /* and was looked at */
    }
    /* A second call, answered with more than it accepts, and with a status that no worker may use. */
    for (int k = 0; k < 2; k++) {
        wc = end_imm(&r.e);
        slot = dp_imm_slot(wc.imm);
        memcpy(&q, end_bytes(&r.e) + dp_slot_payload(&r.l, slot) - DP_REQ_LONG, sizeof q);
        dp_reply h = {q.generation, q.call_id, k ? DP_LEASE_ENDED : DP_OK, k ? 0 : 200};
        memcpy(local_bytes(&r.e), &h, sizeof h);
        dp_sge sge = local_sge(&r.e, 0, DP_REPLY_SIZE + h.size);
        end_write_imm(&r.e, &sge, 1, r.peer.addr + dp_slot_payload(&r.l, slot) - DP_REPLY_SIZE, r.peer.rkey,
                      dp_imm(slot, q.call_id), 0, DP_SIGNALED);
        end_sent(&r.e, 0, DP_OP_WRITE);
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(hostile_worker, "channel/hostile-worker") {
    served s = {.mode = DP_WAIT_ADAPTIVE};
    dp_error err;
    t_peer_start(&s.peer, true, forger, NULL);
    dp_dev_options o = quick_options();
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &s.dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(s.dev, 1, 8, s.mode, &s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(s.ep, &(dp_channel_config){8, 512, 4096}, &s.ch, &err), err);
    served_again(&s, true);
    uint32_t slot, size;
    uint8_t out[512] = {0}; /* all payloads exceed the mailbox */
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, out, 300, NULL, 8, &slot));
    for (int i = 0; i < 7; i++) {
        t_sync(s.peer.sock);
        if (i < 5)
            CHECK_EQ(dp_channel_test(s.ch, slot), 0);
        else
            CHECK_OK(dp_channel_wait(s.ch, slot, 0));
        t_sync(s.peer.sock);
    }
    CHECK_STATUS(dp_endpoint_wait_any(s.ep, dp_now_ns() + 1000000000), DP_OK);
    CHECK_OK(dp_channel_finish(s.ch, slot, out, &size, NULL));
    CHECK_EQ(size, 8);
    CHECK_EQ(dp_channel_free_slots(s.ch), 8);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, out, 300, NULL, out, 100, &size, 0, &started), DP_PROTOCOL);
    CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, out, 300, NULL, out, 100, &size, 0, &started), DP_PROTOCOL);
    dp_channel_stats st;
    dp_channel_get_stats(s.ch, &st);
    CHECK_EQ(st.strays, 6);
    t_sync(s.peer.sock);
    t_peer_join(&s.peer);
    served_close_client(&s);
}

/* ---- the mailbox ---- */

static dp_mailbox *raw_mail(raw *r, bool own) {
    if (own)
        return (dp_mailbox *)(void *)(end_bytes(&r->e) + r->l.mail_at);
    dp_mailbox *m = dp_rkey_ptr(r->e.qp, r->peer.addr + r->l.mail_at, r->peer.rkey, sizeof *m);
    CHECK(m);
    return m;
}

T_CASE(hostile_client_mail, "channel/hostile-client-mailbox", .providers = T_SHM) {
    t_peer p;
    raw r;
    raw_client(&r, &p);
    dp_mailbox *m = raw_mail(&r, false);
    const struct {
        const char *what;
        uint32_t generation, slot, capacity, function, size;
        int status;
    } t[] = {
        {"good", 77, 0, 8, FN_ECHO, 8, DP_OK},
        {"generation", 78, 0, 8, FN_ECHO, 8, DP_BAD_REQUEST},
        {"slot", 77, 8, 8, FN_ECHO, 8, DP_BAD_REQUEST},
        {"size", 77, 0, 8, FN_ECHO, 257, DP_BAD_REQUEST},
        {"capacity", 77, 0, 513, FN_ECHO, 8, DP_BAD_REQUEST},
        {"function", 77, 0, 8, FN_COUNT, 8, DP_NO_FUNCTION},
        {"good at the end", 77, 0, 24, FN_ECHO, 24, DP_OK},
    };
    for (uint32_t i = 0; i < sizeof t / sizeof *t; i++) {
        t_note("%s", t[i].what);
        uint64_t *reply = t[i].capacity <= DP_MAIL_RESULT ? &m->reply : &m->long_reply;
        m->sizes = dp_mail_sizes(t[i].generation, t[i].slot, t[i].capacity);
        __atomic_store_n(&m->request, dp_mail_request(100 + i, t[i].function, t[i].size), __ATOMIC_RELEASE);
        dp_qp_notify(r.e.qp);
        int64_t until = dp_now_ns() + poll_ns();
        while (dp_mail_call_id(__atomic_load_n(reply, __ATOMIC_ACQUIRE)) != 100 + i)
            CHECKF(dp_now_ns() < until, "%s: no answer", t[i].what);
        CHECK_STATUS(dp_mail_status(*reply), t[i].status);
        CHECK_EQ(dp_mail_result_size(*reply), t[i].status ? 0 : t[i].size);
    }
    end_close(&r.e);
    int ended;
    t_recv(p.sock, &ended, sizeof ended);
    CHECK_STATUS(ended, DP_PEER_GONE);
    t_peer_join(&p);
}

static void mail_forger(int sock, void *arg) {
    (void)arg;
    raw r;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    t_name("forger");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    raw_open(&r);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_CLIENT, r.e.dev->provider, &r.peer, &err), err);
    r.generation = r.peer.generation;
    raw_blob(&r, DP_ROLE_WORKER, blob, &len);
    CHECK_OK_ERR(dp_qp_connect(r.e.qp, r.peer.qp_blob, r.peer.qp_len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    dp_mailbox *m = raw_mail(&r, true);
    const struct {
        uint32_t id_plus;
        int status;
        uint32_t size;
    } forged[] = {
        {1, DP_OK, 8},             /* no call of the client's */
        {0, DP_OK, 9},             /* more than it accepts: a broken promise */
        {0, DP_LEASE_ENDED, 0},    /* not a worker's to say */
        {0, DP_OK, 0xffff},
        {0, DP_OK, 8},             /* true at last */
    };
    uint64_t seen = 0, word;
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        if (i == 0 || !forged[i - 1].id_plus) {
            while ((word = __atomic_load_n(&m->request, __ATOMIC_ACQUIRE)) == seen)
                dp_cpu_pause();
            seen = word;
        }
        uint32_t id = dp_mail_call_id(seen) + forged[i].id_plus;
        __atomic_store_n(&m->reply, dp_mail_reply(id, forged[i].status, forged[i].size), __ATOMIC_RELEASE);
        dp_qp_notify(r.e.qp);
        if (forged[i].id_plus)
            t_sync(sock);
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(hostile_worker_mail, "channel/hostile-worker-mailbox", .providers = T_SHM) {
    served s = {.mode = DP_WAIT_ADAPTIVE};
    dp_error err;
    t_peer_start(&s.peer, true, mail_forger, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &s.dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(s.dev, 1, 8, s.mode, &s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(s.ep, &(dp_channel_config){8, 512, 4096}, &s.ch, &err), err);
    served_again(&s, true);
    uint32_t slot, size;
    uint8_t out[512];
    dp_started started;
    CHECK_OK(dp_channel_submit(s.ch, FN_ECHO, "12345678", 8, NULL, 8, &slot));
    CHECK_EQ(dp_channel_test(s.ch, slot), 0);
    t_sync(s.peer.sock);
    CHECK_OK(dp_channel_wait(s.ch, slot, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, slot, out, &size, NULL), DP_PROTOCOL);
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(dp_channel_call(s.ch, FN_ECHO, out, 8, NULL, out, 8, &size, 0, &started), DP_PROTOCOL);
    CHECK_OK(dp_channel_call(s.ch, FN_ECHO, out, 8, NULL, out, 8, &size, 0, &started));
    CHECK_EQ(size, 8);
    CHECK_EQ(dp_channel_free_slots(s.ch), 8);
    t_sync(s.peer.sock);
    t_peer_join(&s.peer);
    served_close_client(&s);
}

/* The mailbox holds an answer to a call that has not been made: after 2^32 calls a stale one may. */
static void foreteller(int sock, void *arg) {
    (void)arg;
    raw r;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    uint64_t word;
    t_name("foreteller");
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    raw_open(&r);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_CLIENT, r.e.dev->provider, &r.peer, &err), err);
    r.generation = r.peer.generation;
    raw_blob(&r, DP_ROLE_WORKER, blob, &len);
    CHECK_OK_ERR(dp_qp_connect(r.e.qp, r.peer.qp_blob, r.peer.qp_len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    dp_mailbox *m = raw_mail(&r, true);
    while (!(word = __atomic_load_n(&m->request, __ATOMIC_ACQUIRE)))
        dp_cpu_pause();
    uint32_t id = dp_mail_call_id(word);
    __atomic_store_n(&m->reply, dp_mail_reply(id, DP_OK, 8), __ATOMIC_RELEASE);
    dp_qp_notify(r.e.qp);
    /* One answer each in the short and the long place, and a request that looks served. */
    for (uint32_t k = 1; k <= 3; k++) {
        t_sync(sock);
        uint64_t *at = k == 1 ? &m->reply : k == 2 ? &m->long_reply : &m->request;
        __atomic_store_n(at, dp_mail_reply(id + k, DP_OK, 8), __ATOMIC_RELEASE);
        t_sync(sock);
        dp_wc wc = end_imm(&r.e);
        uint32_t slot = dp_imm_slot(wc.imm);
        dp_request q;
        memcpy(&q, end_bytes(&r.e) + dp_slot_payload(&r.l, slot) - DP_REQ_LONG, sizeof q);
        CHECK_EQ(q.call_id, id + k);
        dp_reply h = {q.generation, q.call_id, DP_OK, 4};
        memcpy(local_bytes(&r.e), &h, sizeof h);
        memset(local_bytes(&r.e) + sizeof h, (int)k, 4);
        dp_sge sge = local_sge(&r.e, 0, DP_REPLY_SIZE + 4);
        end_write_imm(&r.e, &sge, 1, r.peer.addr + dp_slot_payload(&r.l, slot) - DP_REPLY_SIZE, r.peer.rkey,
                      dp_imm(slot, q.call_id), 0, DP_SIGNALED);
        end_sent(&r.e, 0, DP_OP_WRITE);
    }
    t_sync(sock);
    end_close(&r.e);
}

T_CASE(stale_mail, "channel/stale-mailbox-word", .providers = T_SHM) {
    served s = {.mode = DP_WAIT_ADAPTIVE};
    dp_error err;
    t_peer_start(&s.peer, true, foreteller, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &s.dev, &err), err);
    CHECK_OK_ERR(dp_endpoint_create(s.dev, 1, 8, s.mode, &s.ep, &err), err);
    CHECK_OK_ERR(dp_channel_create(s.ep, &(dp_channel_config){8, 512, 4096}, &s.ch, &err), err);
    served_again(&s, true);
    uint32_t size;
    uint8_t out[512];
    dp_started started;
    CHECK_OK(dp_channel_call(s.ch, FN_ECHO, "12345678", 8, NULL, out, 8, &size, 0, &started));
    CHECK_EQ(size, 8);
    for (int k = 1; k <= 3; k++) {
        t_sync(s.peer.sock);
        t_sync(s.peer.sock);
        CHECK_OK(dp_channel_call(s.ch, FN_ECHO, "12345678", 8, NULL, out, k == 2 ? 300 : 8, &size, 0, &started));
        CHECK_EQ(size, 4);
        CHECK_BYTES(out, k, 4);
    }
    t_sync(s.peer.sock);
    t_peer_join(&s.peer);
    served_close_client(&s);
}

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

/* Sends, receives, and what happens when receives run out. */
#include <sched.h>
#include <stdlib.h>

#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey

/* ---- sends ---- */

static uint32_t message_size(uint32_t i, uint32_t most) {
    static const uint32_t some[] = {0, 1, 7, 8, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256};
    uint32_t n = sizeof some / sizeof *some;
    uint32_t size = i < n ? some[i] : i == n ? most - 1 : most;
    return size < most ? size : most;
}
enum { MESSAGES = 16, ROOM = 4096 };

static void send_left(duo *d) {
    end *e = &d->e;
    uint32_t most = e->dev->max_send_msg < ROOM ? e->dev->max_send_msg : ROOM;
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < MESSAGES; i++) {
            uint32_t size = message_size(i, most);
            t_note("%u bytes", size);
            fill_pattern(local_bytes(e) + 1, size, i + round);
            dp_sge s = local_sge(e, 1, size);
            CHECK_OK(dp_post_send(e->qp, &s, 40 + i, DP_SIGNALED));
            end_sent(e, 40 + i, DP_OP_SEND);
            t_sync(d->sock);
        }
}

static void send_right(duo *d) {
    end *e = &d->e;
    uint32_t most = e->dev->max_send_msg < ROOM ? e->dev->max_send_msg : ROOM;
    memset(e->recv_mem->addr, 0xEE, e->recv_mem->size);
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < MESSAGES; i++) {
            uint32_t size = message_size(i, most);
            t_note("%u bytes", size);
            uint64_t k = e->recvs_done;
            dp_wc wc = end_message(e);
            CHECK_EQ(wc.byte_len, size);
            CHECK_PATTERN(recv_room(e, k), size, i + round);
            CHECK_BYTES(recv_room(e, k) + size, 0xEE, ROOM - size);
            memset(recv_room(e, k), 0xEE, ROOM);
            end_post_recv(e);
            t_sync(d->sock);
        }
    CHECK_BYTES(e->recv_mem->addr, 0xEE, e->recv_mem->size);
    CHECK_BYTES(end_bytes(e), 0, e->mem->size);
}
static const end_opts send_opts = {.recv_bytes = ROOM, .max_recv = 8};
DUO_CASE(send_left, send_right, "send/sizes", &send_opts)

/* Sends and writes-with-immediate share the receives, in order. */
static void mixed_left(duo *d) {
    end *e = &d->e;
    for (uint32_t i = 0; i < t_pick(2000, 100); i++) {
        *(uint32_t *)(local_bytes(e) + i % 8 * 8) = i;
        dp_sge s = local_sge(e, i % 8 * 8, 4);
        if (i % 3)
            end_write_imm(e, &s, 1, PEER(d, i % 8 * 8), i, 0, 0);
        else
            CHECK_OK(dp_post_send(e->qp, &s, 0, 0));
        if (i % 8 == 7)
            t_sync(d->sock);
    }
}

static void mixed_right(duo *d) {
    end *e = &d->e;
    for (uint32_t i = 0; i < t_pick(2000, 100); i++) {
        uint64_t k = e->recvs_done;
        if (i % 3) {
            dp_wc wc = end_imm(e); /* posts another receive */
            CHECK_EQ(wc.imm, i);
            CHECK_EQ(*(uint32_t *)(end_bytes(e) + i % 8 * 8), i);
        } else {
            dp_wc wc = end_message(e);
            CHECK_EQ(wc.byte_len, 4);
            CHECK_EQ(*(uint32_t *)recv_room(e, k), i);
            end_post_recv(e);
        }
        if (i % 8 == 7)
            t_sync(d->sock);
    }
}
static const end_opts mixed_opts = {.recv_bytes = 64, .max_recv = 16, .max_send = 256};
DUO_CASE(mixed_left, mixed_right, "send/mixed-with-imm", &mixed_opts)

/* A send longer than dev->max_send_msg is refused. */
static void long_left(duo *d) {
    end *e = &d->e;
    dp_sge s = {local_bytes(e), e->dev->max_send_msg + 1, e->local->lkey};
    if (e->dev->max_send_msg < UINT32_MAX)
        CHECK_STATUS(dp_post_send(e->qp, &s, 1, DP_SIGNALED), DP_INVALID);
    end_quiet(e, 5);
    t_sync(d->sock);
    duo_ping(d);
}

static void long_right(duo *d) {
    end_quiet(&d->e, 5);
    t_sync(d->sock);
    duo_ping(d);
}
static const end_opts long_opts = {.recv_bytes = 64, .max_recv = 8};
DUO_CASE(long_left, long_right, "send/too-long", &long_opts)

/* A send longer than the receive it meets: a bad completion and the error state at the receiver, not a byte outside
 * the room. A sender over verbs is told; over shm it cannot know, its message waits in the ring. */
static void overflow_left(duo *d) {
    end *e = &d->e;
    memset(local_bytes(e), 0x44, 64);
    dp_sge s = local_sge(e, 0, 64);
    dp_wc wc;
    int st = dp_post_send(e->qp, &s, 21, DP_SIGNALED);
    if (st == DP_OK) {
        CHECKF(end_poll_sent(e, &wc, poll_ns()), "a send into a room too small never completes");
        CHECK_EQ(wc.wr_id, 21);
        st = wc.status;
    }
    if (t_is_verbs())
        CHECKF(st != DP_OK && st != DP_BUSY, "a send into a room too small: %s", dp_status_text(st));
    t_sync(d->sock);
    t_sync(d->sock);
    duo_reconnect(d);
    duo_ping(d);
}

static void overflow_right(duo *d) {
    end *e = &d->e;
    memset(e->recv_mem->addr, 0xEE, e->recv_mem->size);
    t_sync(d->sock);
    dp_wc wc;
    CHECKF(end_poll_recv(e, &wc, poll_ns()), "the receive that is too small never completes");
    CHECK_EQ(wc.wr_id, RECV_ID(0));
    CHECKF(wc.status != DP_OK, "the receive completes well, with %u bytes", wc.byte_len);
    CHECK_EQ(e->qp->state, DP_QP_ERROR);
    /* The room itself may hold anything; its neighbours not. */
    CHECK_BYTES(recv_room(e, 1), 0xEE, 48);
    t_sync(d->sock);
    duo_reconnect(d);
    duo_ping(d);
}
static const end_opts overflow_opts = {.recv_bytes = 16, .max_recv = 4};
DUO_CASE(overflow_left, overflow_right, "send/longer-than-receive", &overflow_opts)

/* An immediate lands on a receive with a buffer, and leaves the buffer alone. */
static void imm_room_left(duo *d) {
    end *e = &d->e;
    t_sync(d->sock);
    memset(local_bytes(e), 0x44, 64);
    dp_sge s = local_sge(e, 0, 64);
    end_write_imm(e, &s, 1, PEER(d, 0), 3, 3, DP_SIGNALED);
    end_sent(e, 3, DP_OP_WRITE);
}

static void imm_room_right(duo *d) {
    end *e = &d->e;
    memset(e->recv_mem->addr, 0xEE, e->recv_mem->size);
    t_sync(d->sock);
    dp_wc wc = end_imm(e);
    CHECK_EQ(wc.byte_len, 64);
    CHECK_BYTES(end_bytes(e), 0x44, 64);
    CHECK_BYTES(e->recv_mem->addr, 0xEE, e->recv_mem->size);
}
DUO_CASE(imm_room_left, imm_room_right, "recv/imm-leaves-buffer-alone", &overflow_opts)

/* ---- receives ---- */

T_CASE(recv_full, "recv/busy-beyond-max") {
    end a, b;
    end_opts o = {.max_recv = 8};
    end_open(&a, &o, NULL); /* posts 8 */
    end_open(&b, &o, NULL);
    CHECK_STATUS(dp_post_recv(a.qp, NULL, RECV_ID(8)), DP_BUSY);
    CHECK_STATUS(dp_post_recv(a.qp, NULL, RECV_ID(8)), DP_BUSY);
    card ca, cb;
    end_card(&a, &ca);
    end_card(&b, &cb);
    end_connect(&a, &cb);
    end_connect(&b, &ca);
    CHECK_STATUS(dp_post_recv(a.qp, NULL, RECV_ID(8)), DP_BUSY);
    for (uint32_t i = 0; i < 40; i++) {
        end_write_imm(&b, NULL, 0, ca.regions[0].addr, ca.regions[0].rkey, i, 0, 0);
        CHECK_EQ(end_imm(&a).imm, i); /* posts one more */
        CHECK_STATUS(dp_post_recv(a.qp, NULL, 1), DP_BUSY);
    }
    end_close(&a);
    end_close(&b);
}

/* A write-with-immediate that finds no receive: busy, or it waits for one, or an error in bounded time.
 * Never lost without a word. */
static void starved_left(duo *d) {
    end *e = &d->e;
    bool posted = false, failed = false;
    int busy = 0;
    dp_sge s = local_sge(e, 0, 8);
    *(uint64_t *)local_bytes(e) = 0x1234567890;
    t_sync(d->sock);
    int st = dp_post_write_imm(e->qp, &s, 1, PEER(d, 0), 0x57A2, 31, DP_SIGNALED);
    CHECKF(st == DP_OK || st == DP_BUSY, "status %d (%s)", st, dp_status_text(st));
    posted = st == DP_OK;
    busy = st == DP_BUSY;
    t_sync(d->sock); /* the right side sleeps and posts its receive now */
    int64_t until = dp_now_ns() + poll_ns();
    dp_wc wc;
    while (!posted) {
        CHECKF(dp_now_ns() < until, "busy although a receive is posted");
        end_drain(e);
        st = dp_post_write_imm(e->qp, &s, 1, PEER(d, 0), 0x57A2, 31, DP_SIGNALED);
        CHECKF(st == DP_OK || st == DP_BUSY, "status %d (%s)", st, dp_status_text(st));
        posted = st == DP_OK;
        sched_yield();
    }
    CHECKF(end_poll_sent(e, &wc, poll_ns()), "no completion, neither good nor bad");
    CHECK_EQ(wc.wr_id, 31);
    failed = wc.status != DP_OK;
    t_note("busy %d failed %d", busy, failed);
    t_send(d->sock, &failed, sizeof failed);
    duo_reconnect(d);
    duo_ping(d);
}

static void starved_right(duo *d) {
    end *e = &d->e;
    t_sync(d->sock);
    t_sync(d->sock);
    t_sleep_ms(30);
    CHECK_EQ(e->recvs_posted, 0);
    end_quiet(e, 1); /* nothing can have arrived without a receive */
    end_post_recv(e);
    bool failed;
    t_recv(d->sock, &failed, sizeof failed);
    dp_wc wc;
    if (!failed) {
        CHECKF(end_poll_recv(e, &wc, poll_ns()), "the sender was told ok, and nothing arrived");
        CHECK_OK(wc.status);
        CHECK_EQ(wc.imm, 0x57A2);
        CHECK_EQ(wc.byte_len, 8);
        CHECK_EQ(*(uint64_t *)end_bytes(e), 0x1234567890);
    }
    duo_reconnect(d);
    duo_ping(d);
}
static const end_opts starved_opts = {.no_recvs = true};
DUO_CASE(starved_left, starved_right, "recv/none-posted", &starved_opts)

/* Bursts of more than the peer's receives, which it posts late and one by one: every accepted one arrives
 * once and in order. */
static void flood_left(duo *d) {
    end *e = &d->e;
    uint32_t n = (uint32_t)t_pick(2000, 100);
    for (uint32_t i = 0; i < n; i++) {
        dp_sge s = local_sge(e, 0, 4);
        end_write_imm(e, &s, 1, PEER(d, 0), i, i, DP_SIGNALED);
    }
    for (uint32_t i = 0; i < n; i++)
        end_sent(e, i, DP_OP_WRITE);
}

static void flood_right(duo *d) {
    end *e = &d->e;
    uint32_t n = (uint32_t)t_pick(2000, 100);
    for (uint32_t i = 0; i < n; i++) {
        if (t_random() % 16 == 0)
            t_sleep_ms(1);
        end_post_recv(e);
        dp_wc wc = end_imm(e);
        CHECK_EQ(wc.imm, i);
    }
}
static const end_opts flood_opts = {.no_recvs = true, .max_recv = 4, .max_send = 32};
DUO_CASE(flood_left, flood_right, "recv/late-receives", &flood_opts, .verbs_seconds = 60)

/* With as many posts under way as the peer has receives, a post never fails: both directions at once. */
static void credits(duo *d) {
    end *e = &d->e;
    long n = t_pick(50000, 1500);
    uint32_t credit = e->qp->max_recv / 2; /* half of the peer's receives are for its own answers */
    long sent = 0, got = 0, answered = 0;
    int64_t until = dp_now_ns() + 4 * poll_ns();
    while (sent < n || got < n || answered < n) {
        CHECKF(dp_now_ns() < until, "stalled: sent %ld, answered %ld, received %ld", sent, answered, got);
        for (; credit && sent < n; credit--, sent++)
            CHECK_OK(dp_post_write_imm(e->qp, NULL, 0, PEER(d, 0), 1, 0, 0));
        dp_wc wc[8];
        int k = dp_cq_poll(e->cq, wc, 8);
        CHECK_GE(k, 0);
        if (!k)
            sched_yield();
        for (int i = 0; i < k; i++) {
            CHECK_OK(wc[i].status);
            CHECK_EQ(wc[i].wr_id, RECV_ID(e->recvs_done));
            e->recvs_done++;
            end_post_recv(e); /* before the answer that lets the peer use it */
            if (wc[i].imm == 1) {
                got++;
                CHECK_OK(dp_post_write_imm(e->qp, NULL, 0, PEER(d, 0), 2, 0, 0));
            } else {
                CHECK_EQ(wc[i].imm, 2);
                answered++;
                credit++;
            }
        }
    }
    t_sync(d->sock);
    end_quiet(e, 2);
}
static void credits_left(duo *d) { credits(d); }
static void credits_right(duo *d) { credits(d); }
static const end_opts credits_opts = {.max_recv = 32, .max_send = 128};
DUO_CASE(credits_left, credits_right, "recv/credits-never-fail", &credits_opts, .seconds = 30, .verbs_seconds = 60)

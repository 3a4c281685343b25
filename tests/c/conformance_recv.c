/* Receives, and what happens when they run out. */
#include <sched.h>
#include <stdlib.h>

#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey

/* ---- receives ---- */

T_CASE(recv_full, "recv/busy-beyond-max") {
    end a, b;
    end_opts o = {.max_recv = 8};
    end_open(&a, &o, NULL); /* posts 8 */
    end_open(&b, &o, NULL);
    CHECK_STATUS(dp_post_recv(a.qp, RECV_ID(8)), DP_BUSY);
    CHECK_STATUS(dp_post_recv(a.qp, RECV_ID(8)), DP_BUSY);
    card ca, cb;
    end_card(&a, &ca);
    end_card(&b, &cb);
    end_connect(&a, &cb);
    end_connect(&b, &ca);
    CHECK_STATUS(dp_post_recv(a.qp, RECV_ID(8)), DP_BUSY);
    for (uint32_t i = 0; i < 40; i++) {
        end_write_imm(&b, NULL, 0, ca.regions[0].addr, ca.regions[0].rkey, i, 0, 0);
        CHECK_EQ(end_imm(&a).imm, i); /* posts one more */
        CHECK_STATUS(dp_post_recv(a.qp, 1), DP_BUSY);
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

/* With as many posts in flight as the peer has receives, a post never fails, in both directions at once. */
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
            end_post_recv(e); /* before the answer, after which the peer may use it */
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

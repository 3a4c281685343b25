/* The peer process dies: every wait ends in bounded time, and the queue pair serves another peer afterwards. */
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "ends.h"

#define MS 1000000ll

typedef enum victim {
    IDLE,      /* connected, does nothing */
    STREAMING, /* writes without pause */
    BLOCKED,   /* sleeps in dp_cq_wait */
    LEAVING,   /* ends by itself, without closing anything */
} victim;

static const end_opts opts = {.quick_errors = true, .max_send = 128, .max_recv = 64};

static void die(int sock, void *arg) {
    victim v = *(victim *)arg;
    t_name("victim");
    duo d = {.sock = sock};
    end_open(&d.e, &opts, NULL);
    duo_connect(&d);
    t_sync(sock);
    if (v == LEAVING)
        _exit(0);
    dp_sge s = local_sge(&d.e, 0, 512);
    for (;;) {
        dp_wc wc;
        if (v == IDLE) {
            pause();
        } else if (v == BLOCKED) {
            dp_cq_arm(d.e.cq);
            if (dp_cq_poll(d.e.cq, &wc, 1) == 0)
                dp_cq_wait(d.e.cq, -1);
        } else {
            dp_post_write_imm(d.e.qp, &s, 1, d.peer.regions[0].addr, d.peer.regions[0].rkey, 1, 0, 0);
            dp_cq_poll(d.e.cq, &wc, 1);
        }
    }
}

static void start_victim(t_peer *p, victim v, end *e, card *peer) {
    (void)v;
    card mine;
    end_card(e, &mine);
    t_send(p->sock, &mine, sizeof mine);
    t_recv(p->sock, peer, sizeof *peer);
    end_connect(e, peer);
    t_sync(p->sock);
    t_sync(p->sock);
}

static void take(end *e, const dp_wc *wc) {
    if (wc->status == DP_OK && wc->op == DP_OP_RECV_IMM)
        (void)dp_post_recv(e->qp, RECV_ID(0));
}

/* The queue pair must be marked without a post, by probing or by itself: within a second, and on ofi after several keepalives. */
static void await_mark(end *e, bool block) {
    int64_t start = dp_now_ns(), probed = start, most = t_is_ofi() ? poll_ns() : (int64_t)(1000 * MS * t_time_scale());
    while (!dp_qp_broken(e->qp)) {
        int64_t now = dp_now_ns();
        CHECKF(now - start < most, "not marked broken after %lld ms", (long long)(most / MS));
        dp_wc wc;
        if (dp_cq_poll(e->cq, &wc, 1) == 1)
            take(e, &wc);
        if (block) {
            CHECK_OK(dp_cq_arm(e->cq));
            if (dp_cq_poll(e->cq, &wc, 1) == 1)
                take(e, &wc);
            else
                CHECK_OK(dp_cq_wait(e->cq, 5 * MS));
            dp_qp_probe(e->qp);
        } else if (now - probed > 2 * MS) {
            probed = now;
            dp_qp_probe(e->qp);
        }
    }
    int why = dp_qp_broken(e->qp);
    CHECKF(why == DP_PEER_GONE || why == DP_CONNECTION, "marked with %d (%s)", why, dp_status_text(why));
}

/* verbs: the next posted write ends in error within bounded time, at once or by its completion; so does every
 * later one. */
static void await_error(end *e, const card *peer, bool block) {
    int64_t until = dp_now_ns() + poll_ns();
    dp_sge s = local_sge(e, 0, 64);
    int st = DP_OK;
    for (uint64_t id = 1; st == DP_OK; id++) {
        CHECKF(dp_now_ns() < until, "writes to a dead peer go on without an error");
        dp_qp_probe(e->qp);
        st = dp_post_write(e->qp, &s, 1, peer->regions[0].addr, peer->regions[0].rkey, id, DP_SIGNALED);
        bool done = st != DP_OK;
        while (!done) {
            CHECKF(dp_now_ns() < until, "a write to a dead peer never ends");
            dp_wc wc;
            if (block) {
                CHECK_OK(dp_cq_arm(e->cq));
                if (dp_cq_poll(e->cq, &wc, 1) == 0) {
                    CHECK_OK(dp_cq_wait(e->cq, 100 * MS));
                    continue;
                }
            } else if (dp_cq_poll(e->cq, &wc, 1) == 0) {
                sched_yield();
                continue;
            }
            take(e, &wc);
            if (wc.wr_id >> 48 == RECV_ID(0) >> 48)
                continue;
            CHECK_EQ(wc.wr_id, id);
            st = wc.status;
            done = true;
        }
    }
    CHECKF(st == DP_PEER_GONE || st == DP_CONNECTION, "status %d (%s)", st, dp_status_text(st));
    CHECK_EQ(e->qp->state, DP_QP_ERROR);
    CHECK_STATUS(dp_post_write(e->qp, &s, 1, peer->regions[0].addr, peer->regions[0].rkey, 1, 0), DP_CONNECTION);
}

static void mourn(victim v, bool block, int delay_ms) {
    t_peer p;
    t_peer_start(&p, true, die, &v);
    end e;
    card peer;
    end_open(&e, &opts, NULL);
    start_victim(&p, v, &e, &peer);
    int64_t until = dp_now_ns() + delay_ms * MS;
    while (dp_now_ns() < until) {
        dp_wc wc;
        if (dp_cq_poll(e.cq, &wc, 1) == 1)
            take(&e, &wc);
        CHECK_EQ(dp_qp_probe(e.qp) < -999, 0);
        if (v != LEAVING)
            CHECK_EQ(dp_qp_broken(e.qp), 0); /* alive: no false alarm */
    }
    if (v == LEAVING)
        t_peer_join(&p);
    else
        t_peer_kill(&p);
    if (!t_is_verbs())
        await_mark(&e, block);
    else
        await_error(&e, &peer, block);
    if (!t_is_verbs()) {
        /* Whatever is posted now is refused. */
        dp_sge s = local_sge(&e, 0, 8);
        const reg_ref *r = &peer.regions[0];
        CHECK_STATUS(dp_post_write(e.qp, &s, 1, r->addr, r->rkey, 1, DP_SIGNALED), DP_CONNECTION);
        CHECK_STATUS(dp_post_write_imm(e.qp, &s, 1, r->addr, r->rkey, 1, 1, DP_SIGNALED), DP_CONNECTION);
        CHECK_STATUS(dp_post_read(e.qp, &s, r->addr, r->rkey, 1, 0), DP_CONNECTION);
        CHECK_STATUS(dp_post_fetch_add(e.qp, &s, r->addr, r->rkey, 1, 1, 0), DP_CONNECTION);
        CHECK_STATUS(dp_post_compare_swap(e.qp, &s, r->addr, r->rkey, 0, 1, 1, 0), DP_CONNECTION);
    }
    /* Another peer takes its place on the same queue pair. */
    end next;
    end_open(&next, &opts, e.dev);
    card mine, theirs;
    end_reset(&e);
    end_card(&e, &mine);
    end_card(&next, &theirs);
    end_connect(&next, &mine);
    end_connect(&e, &theirs);
    dp_sge s = local_sge(&e, 0, 16);
    end_write_imm(&e, &s, 1, theirs.regions[0].addr, theirs.regions[0].rkey, 3, 9, DP_SIGNALED);
    end_sent(&e, 9, DP_OP_WRITE);
    CHECK_EQ(end_imm(&next).imm, 3);
    end_write_imm(&next, &s, 1, mine.regions[0].addr, mine.regions[0].rkey, 4, 9, DP_SIGNALED | 0);
    CHECK_EQ(end_imm(&e).imm, 4);
    end_sent(&next, 9, DP_OP_WRITE);
    end_close(&next);
    end_close(&e);
}

T_CASE(idle_spin, "death/idle-peer-while-spinning") { mourn(IDLE, false, 20); }
T_CASE(idle_block, "death/idle-peer-while-blocked") { mourn(IDLE, true, 20); }
T_CASE(stream_spin, "death/streaming-peer-while-spinning") { mourn(STREAMING, false, 20); }
T_CASE(stream_block, "death/streaming-peer-while-blocked") { mourn(STREAMING, true, 20); }
T_CASE(blocked_spin, "death/blocked-peer-while-spinning") { mourn(BLOCKED, false, 20); }
T_CASE(leaving, "death/peer-exits") { mourn(LEAVING, true, 0); }

/* Killed at random moments in the middle of writing. */
T_CASE(random_kills, "death/random-moments", .seconds = 20) {
    enum { STREAMERS = 12 };
    victim v = STREAMING;
    t_peer p[STREAMERS];
    int n = (int)t_pick(STREAMERS, 4);
    for (int i = 0; i < n; i++)
        t_peer_start(&p[i], true, die, &v); /* all before a device is open */
    end e;
    end_open(&e, &opts, NULL);
    for (int i = 0; i < n; i++) {
        card peer;
        t_note("victim %d", i);
        start_victim(&p[i], v, &e, &peer);
        int64_t until = dp_now_ns() + (int64_t)(t_random() % (3 * MS));
        while (dp_now_ns() < until) {
            dp_wc wc;
            if (dp_cq_poll(e.cq, &wc, 1) == 1)
                take(&e, &wc);
        }
        t_peer_kill(&p[i]);
        if (t_is_verbs())
            await_error(&e, &peer, i % 2);
        else
            await_mark(&e, i % 2);
        end_reset(&e);
        end_quiet(&e, 1);
    }
    end_close(&e);
}

/* Atomics in flight when the peer dies complete in order. Failed ones return no old value. */
T_CASE(atomics_in_flight, "death/atomics-in-flight") {
    enum { IN_FLIGHT = 8 };
    victim v = IDLE; /* if the target's thread executes atomics, it does not execute these */
    t_peer p;
    t_peer_start(&p, true, die, &v);
    end e;
    card peer;
    end_open(&e, &opts, NULL);
    start_victim(&p, v, &e, &peer);
    const reg_ref *r = &peer.regions[0];
    uint64_t *old = (uint64_t *)local_bytes(&e);
    memset(old, 0xEE, IN_FLIGHT * 8);
    for (uint64_t i = 0; i < IN_FLIGHT; i++) {
        dp_sge s = local_sge(&e, 8 * i, 8);
        CHECK_OK(i % 2 ? dp_post_fetch_add(e.qp, &s, r->addr, r->rkey, 1, i, DP_SIGNALED)
                       : dp_post_compare_swap(e.qp, &s, r->addr, r->rkey, i, i + 1, i, DP_SIGNALED));
    }
    t_peer_kill(&p);
    for (int64_t until = dp_now_ns() + poll_ns(); t_is_ofi() && !dp_qp_probe(e.qp);) /* its probes post keepalives */
        CHECKF(dp_now_ns() < until, "not marked broken");
    bool failed = false;
    for (uint64_t i = 0; i < IN_FLIGHT; i++) {
        dp_wc wc;
        t_note("atomic %d", (int)i);
        CHECKF(end_poll_sent(&e, &wc, poll_ns()), "it never completes");
        CHECK_EQ(wc.wr_id, i);
        CHECK_EQ(wc.op, i % 2 ? DP_OP_FETCH_ADD : DP_OP_COMPARE_SWAP);
        CHECK(!failed || wc.status != DP_OK);
        CHECKF(wc.status == DP_OK || wc.status == DP_PEER_GONE || wc.status == DP_CONNECTION, "status %d", wc.status);
        failed = wc.status != DP_OK;
        CHECK_EQ(old[i], failed ? 0xEEEEEEEEEEEEEEEEull : i);
    }
    CHECK(failed || !(e.dev->caps & DP_CAP_POLLED_TARGET));
    end_close(&e);
}

/* The peer's memory stays mapped until this side releases it: pointers and posts after the death do not crash. */
T_CASE(orphaned, "death/orphaned-memory", .providers = T_SHM) {
    victim v = IDLE;
    t_peer p;
    t_peer_start(&p, true, die, &v);
    end e;
    card peer;
    end_open(&e, &opts, NULL);
    start_victim(&p, v, &e, &peer);
    unsigned char *m = dp_rkey_ptr(e.qp, peer.regions[0].addr, peer.regions[0].rkey, peer.regions[0].size);
    t_peer_kill(&p);
    if (m)
        memset(m, 1, peer.regions[0].size);
    await_mark(&e, false);
    if (m)
        memset(m, 2, peer.regions[0].size);
    end_close(&e);
}

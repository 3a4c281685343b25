/* Peers that become silent behind a network. dp_qp_probe alone must detect it, a short silence must not break anything, and its
 * keepalives must never disturb a user's posts. */
#include <sched.h>
#include <stdlib.h>

#include "dp_verbs.h"
#include "ends.h"

#define MS 1000000ll

static const end_opts quick = {.quick_errors = true};

static void join(end *a, end *b) {
    card of_a, of_b;
    end_card(a, &of_a);
    end_card(b, &of_b);
    end_connect(b, &of_a);
    end_connect(a, &of_b);
}

/* One write-with-immediate from a to b, so that both have received something. */
static void greet(end *a, end *b) {
    end_write_imm(a, NULL, 0, 0, 0, 5, 1, DP_SIGNALED);
    end_sent(a, 1, DP_OP_WRITE);
    CHECK_EQ(end_imm(b).imm, 5);
}

/* Waits without posting until the peer is reported as gone. There may be no completions but flushed receives. */
static void await_silence(end *e, bool block) {
    int64_t start = dp_now_ns(), until = start + poll_ns();
    while (!dp_qp_broken(e->qp)) {
        dp_wc wc;
        CHECKF(dp_now_ns() < until, "a silent peer is not noticed");
        if (block)
            CHECK_OK(dp_cq_arm(e->cq));
        if (dp_cq_poll(e->cq, &wc, 1) == 1) {
            CHECKF(wc.status == DP_CONNECTION && wc.wr_id >> 48 == RECV_ID(0) >> 48,
                   "completion of something else: wr_id %#llx, op %u, status %d", (unsigned long long)wc.wr_id, wc.op,
                   wc.status);
            continue;
        }
        if (block)
            CHECK_OK(dp_cq_wait(e->cq, 5 * MS));
        else
            sched_yield();
        dp_qp_probe(e->qp);
    }
    CHECK_STATUS(dp_qp_broken(e->qp), DP_PEER_GONE);
    CHECK_STATUS(dp_qp_probe(e->qp), DP_PEER_GONE);
    dp_sge s = local_sge(e, 0, 8);
    CHECK_STATUS(dp_post_write(e->qp, &s, 1, 0, 0, 1, DP_SIGNALED), DP_CONNECTION);
}

/* The peer's queue pair is gone or was reset. A side that only sent and a side that only received both notice it. */
T_CASE(silent, "silence/queue-pair-gone", .providers = T_VERBS) {
    for (int variant = 0; variant < 8; variant++) {
        bool block = variant & 1, sender = variant & 2, reset = variant & 4;
        t_note("%s, %s, peer's queue pair %s", block ? "blocked" : "spinning", sender ? "sender" : "receiver",
               reset ? "reset" : "destroyed");
        end a, b;
        end_open(&a, &quick, NULL);
        end_open(&b, &quick, a.dev);
        join(&a, &b);
        greet(sender ? &a : &b, sender ? &b : &a);
        if (reset)
            CHECK_OK(dp_qp_reset(b.qp, NULL));
        else
            end_close(&b);
        await_silence(&a, block);
        /* The next peer is served, and not reported as gone. */
        if (!reset)
            end_open(&b, &quick, a.dev);
        end_reset(&a);
        end_reset(&b);
        join(&a, &b);
        for (int64_t until = dp_now_ns() + 60 * MS; dp_now_ns() < until;)
            CHECK_STATUS(dp_qp_probe(a.qp), DP_OK);
        greet(&a, &b);
        greet(&b, &a);
        end_close(&b);
        end_close(&a);
    }
}

/* A node that does not exist: the first post fails. Before that, the node may just not have started yet. */
T_CASE(never_there, "silence/nobody-there", .providers = T_VERBS) {
    end e;
    card mine;
    dpv_blob b;
    dp_error err;
    end_open(&e, &quick, NULL);
    end_card(&e, &mine);
    CHECK_OK_ERR(dpv_blob_decode(mine.blob, mine.blob_len, &b, &err), err);
    if (b.link_layer == IBV_LINK_LAYER_ETHERNET)
        b.gid.raw[15] ^= 0x55; /* another address of the same network */
    else
        b.lid ^= 0x1555;
    dpv_blob_encode(&b, mine.blob);
    int st = dp_qp_connect(e.qp, mine.blob, mine.blob_len, &err);
    if (st != DP_OK) { /* some adapters search for the node when they connect */
        CHECK_STATUS(st, DP_CONNECTION);
        end_close(&e);
        return;
    }
    for (int64_t until = dp_now_ns() + 100 * MS; dp_now_ns() < until;)
        CHECK_STATUS(dp_qp_probe(e.qp), DP_OK);
    dp_wc wc;
    dp_sge s = local_sge(&e, 0, 8);
    CHECK_OK(dp_post_write(e.qp, &s, 1, 0, 0, 4, 0));
    CHECK(end_poll_sent(&e, &wc, poll_ns()));
    CHECK_STATUS(wc.status, DP_PEER_GONE);
    CHECK_EQ(wc.wr_id, 4);
    end_close(&e);
}

/* A peer that answers after more than a second, as over a link that was down. All posts arrive, although the queue was full
 * and probed all that time. */
T_CASE(interrupted, "silence/of-a-second-is-survived", .providers = T_VERBS) {
    static const end_opts opts = {.max_send = 16, .max_recv = 32};
    end a, b;
    card of_a, of_b;
    end_open(&a, &opts, NULL);
    end_open(&b, &opts, a.dev);
    end_card(&a, &of_a);
    end_card(&b, &of_b);
    end_connect(&a, &of_b);
    const reg_ref *r = &of_b.regions[0];
    for (uint32_t i = 0; i < 16; i++) {
        fill_pattern(local_bytes(&a) + 64 * i, 64, i);
        dp_sge s = local_sge(&a, 64 * i, 64);
        CHECK_OK(dp_post_write_imm(a.qp, &s, 1, r->addr + 64 * i, r->rkey, i, i, i % 3 ? 0 : DP_SIGNALED));
    }
    dp_sge s = local_sge(&a, 0, 8);
    for (int64_t until = dp_now_ns() + 1200 * MS; dp_now_ns() < until; sched_yield()) {
        dp_wc wc;
        CHECK_STATUS(dp_qp_probe(a.qp), DP_OK);
        CHECK_STATUS(dp_post_write(a.qp, &s, 1, r->addr, r->rkey, 99, 0), DP_BUSY);
        CHECK_EQ(dp_cq_poll(a.cq, &wc, 1), 0);
    }
    end_connect(&b, &of_a);
    for (uint32_t i = 0; i < 16; i++) {
        if (i % 3 == 0)
            end_sent(&a, i, DP_OP_WRITE);
        dp_wc wc = end_imm(&b);
        CHECK_EQ(wc.imm, i);
        CHECK_PATTERN(end_bytes(&b) + 64 * i, 64, i);
    }
    CHECK_STATUS(dp_qp_probe(a.qp), DP_OK);
    greet(&a, &b);
    greet(&b, &a);
    end_close(&b);
    end_close(&a);
}

/* Keepalives as often as possible, among posts in small queues. Completions stay right and in order, and at the end as
 * much can be posted as at the start. */
T_CASE(among_traffic, "silence/keepalives-among-traffic", .providers = T_VERBS) {
    static const end_opts sizes[] = {
        {.max_send = 1}, {.max_send = 2}, {.max_send = 3}, {.max_send = 8}, {.max_send = 64}};
    dp_dev_options o = {.gid_index = -1, .keepalive_ms = 1};
    dp_error err;
    dp_dev *dev;
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        end a, b;
        card of_b;
        end_open(&a, &sizes[k], dev);
        end_open(&b, &sizes[k], dev);
        end_card(&b, &of_b);
        join(&a, &b);
        const reg_ref *r = &of_b.regions[0];
        uint64_t posted = 0, done = 0, last = 0;
        uint32_t refused = 0;
        bool asked = false;
        dp_wc wc[8];
        for (int64_t until = dp_now_ns() + 400 * MS; dp_now_ns() < until;) {
            t_note("max_send %u, post %llu", sizes[k].max_send, (unsigned long long)posted);
            if (t_random() % 8 == 0) /* a silence long enough for a keepalive */
                for (int64_t quiet = dp_now_ns() + 3 * MS; dp_now_ns() < quiet;)
                    CHECK_STATUS(dp_qp_probe(a.qp), DP_OK);
            CHECK_STATUS(dp_qp_probe(a.qp), DP_OK);
            asked |= dpv_qp_of(a.qp)->asking;
            for (uint64_t burst = t_random() % (2 * sizes[k].max_send + 1); burst; burst--) {
                bool show = t_random() % 2;
                dp_sge s = local_sge(&a, 0, (uint32_t)(t_random() % 8192));
                int st = dp_post_write(a.qp, &s, 1, r->addr, r->rkey, posted + 1, show ? DP_SIGNALED : 0);
                if (st == DP_BUSY) {
                    refused++;
                    break;
                }
                CHECK_OK(st);
                posted++;
                last = show ? posted : last;
            }
            int n = dp_cq_poll(a.cq, wc, 8);
            for (int i = 0; i < n; i++) {
                CHECK_OK(wc[i].status);
                CHECK_EQ(wc[i].op, DP_OP_WRITE);
                CHECKF(wc[i].wr_id > done && wc[i].wr_id <= posted, "completion of post %llu after that of %llu",
                       (unsigned long long)wc[i].wr_id, (unsigned long long)done);
                done = wc[i].wr_id;
            }
        }
        CHECKF(asked, "no keepalive was posted");
        while (done < last) {
            CHECK(end_poll_sent(&a, wc, poll_ns()));
            done = wc->wr_id;
        }
        CHECK_EQ(done, last);
        for (int64_t until = dp_now_ns() + poll_ns(); dpv_qp_of(a.qp)->asking;) {
            CHECK_EQ(dp_cq_poll(a.cq, wc, 8), 0);
            CHECK(dp_now_ns() < until);
        }
        for (uint32_t i = 0; i < sizes[k].max_send; i++) {
            dp_sge s = local_sge(&a, 0, 8);
            end_write(&a, &s, 1, r->addr, r->rkey, i, DP_SIGNALED);
        }
        for (uint32_t i = 0; i < sizes[k].max_send; i++)
            end_sent(&a, i, DP_OP_WRITE);
        end_quiet(&a, 5);
        printf("    max_send %u: %llu posts, %u found no room\n", sizes[k].max_send, (unsigned long long)posted,
               refused);
        end_close(&b);
        end_close(&a);
    }
    dp_dev_close(dev);
}

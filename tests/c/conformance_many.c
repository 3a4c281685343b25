/* One completion queue with eight queue pairs: all are served, none starves, none gets another's completions. */
#include <sched.h>
#include <stdlib.h>

#include "ends.h"

enum { LEAVES = 8, CREDITS = 8 };

static long items(void) { return t_pick(5000, 150); }

/* Sends items() numbered writes-with-immediate, with CREDITS in flight. The hub answers each. */
static void leaf(int sock, void *arg) {
    (void)arg;
    duo d = {.sock = sock};
    end_opts o = {.max_recv = 16, .max_send = 64};
    end_open(&d.e, &o, NULL);
    duo_connect(&d);
    uint32_t n = (uint32_t)items(), sent = 0, answered = 0;
    const reg_ref *r = &d.peer.regions[0];
    while (answered < n) {
        for (; sent < n && sent - answered < CREDITS; sent++) {
            *(uint32_t *)(local_bytes(&d.e) + sent % CREDITS * 8) = sent;
            dp_sge s = local_sge(&d.e, sent % CREDITS * 8, 4);
            end_write_imm(&d.e, &s, 1, r->addr + sent % CREDITS * 8, r->rkey, sent, 0, 0);
        }
        CHECK_EQ(end_imm(&d.e).imm, answered);
        answered++;
    }
    t_sync(sock);
    end_close(&d.e);
}

static void hub(bool process, bool block) {
    t_peer p[LEAVES];
    for (int i = 0; i < LEAVES; i++)
        t_peer_start(&p[i], process, leaf, NULL);
    dp_dev *dev = NULL;
    dp_domain *dom = NULL;
    dp_cq *cq = NULL;
    dp_qp *qp[LEAVES];
    dp_mem *mem[LEAVES];
    card peer[LEAVES];
    dp_error err = {0};
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    CHECK_OK_ERR(dp_domain_create(dev, &dom, &err), err);
    CHECK_OK_ERR(dp_cq_create(dev, LEAVES * (64 + 16), &cq, &err), err);
    end_attend(cq);
    for (int i = 0; i < LEAVES; i++) {
        CHECK_OK_ERR(dp_mem_alloc(dom, 4096, ACCESS_ALL, &mem[i], &err), err);
        dp_qp_attr attr = {.max_send = 64, .max_recv = 16, .expose = {mem[i]}, .n_expose = 1};
        CHECK_OK_ERR(dp_qp_create(dom, cq, &attr, &qp[i], &err), err);
        qp[i]->user = (void *)(uintptr_t)(i + 1);
        for (uint64_t k = 0; k < 16; k++)
            CHECK_OK(dp_post_recv(qp[i], k));
        card mine = {.blob_len = DP_BLOB_MAX, .n_regions = 1};
        mine.regions[0] = (reg_ref){(uint64_t)(uintptr_t)mem[i]->addr, mem[i]->size, mem[i]->rkey};
        CHECK_OK_ERR(dp_qp_export(qp[i], mine.blob, &mine.blob_len, &err), err);
        t_send(p[i].sock, &mine, sizeof mine);
        t_recv(p[i].sock, &peer[i], sizeof peer[i]);
        CHECK_OK_ERR(dp_qp_connect(qp[i], peer[i].blob, peer[i].blob_len, &err), err);
    }
    for (int i = 0; i < LEAVES; i++)
        t_sync(p[i].sock); /* they start */
    long got[LEAVES] = {0}, total = 0;
    int64_t last[LEAVES], start = dp_now_ns();
    for (int i = 0; i < LEAVES; i++)
        last[i] = start;
    while (total < LEAVES * items()) {
        dp_wc wc[3]; /* fewer than there are queue pairs */
        int n = dp_cq_poll(cq, wc, 3);
        CHECK(n >= 0 && n <= 3);
        if (!n && block) {
            CHECK_OK(dp_cq_arm(cq));
            if ((n = dp_cq_poll(cq, wc, 3)) == 0) {
                int64_t t0 = dp_now_ns();
                CHECK_OK(dp_cq_wait(cq, 4000000000));
                CHECKF(dp_now_ns() - t0 < (int64_t)(2e9 * t_time_scale()), "blocked for more than 2 s, %ld of %ld", total,
                       LEAVES * items());
            }
        } else if (!n) {
            sched_yield();
        }
        int64_t now = dp_now_ns();
        for (int k = 0; k < n; k++) {
            CHECK_OK(wc[k].status);
            int i = (int)(uintptr_t)wc[k].qp->user - 1;
            CHECK(i >= 0 && i < LEAVES && wc[k].qp == qp[i]);
            CHECK_EQ(wc[k].op, DP_OP_RECV_IMM);
            CHECK_EQ(wc[k].imm, got[i]);
            CHECK_EQ(wc[k].wr_id, (uint64_t)got[i] % 16);
            CHECK_EQ(*(uint32_t *)((char *)mem[i]->addr + got[i] % CREDITS * 8), got[i]);
            CHECK_OK(dp_post_recv(qp[i], wc[k].wr_id));
            int st = dp_post_write_imm(qp[i], NULL, 0, peer[i].regions[0].addr, peer[i].regions[0].rkey, (uint32_t)got[i], 0,
                                       0);
            CHECK_OK(st);
            got[i]++;
            total++;
            last[i] = now;
        }
        for (int i = 0; i < LEAVES; i++)
            if (got[i] < items())
                CHECKF(now - last[i] < poll_ns(), "queue pair %d starves at %ld, all together at %ld", i, got[i], total);
    }
    for (int i = 0; i < LEAVES; i++)
        t_sync(p[i].sock);
    for (int i = 0; i < LEAVES; i++) {
        t_peer_join(&p[i]);
        dp_qp_destroy(qp[i]);
        dp_mem_free(mem[i]);
    }
    end_unattend(cq);
    dp_cq_destroy(cq);
    dp_domain_destroy(dom);
    dp_dev_close(dev);
}

T_CASE(many_threads, "many/eight-on-one-queue@two-devices", .seconds = 20, .verbs_seconds = 60) { hub(false, false); }
T_CASE(many_processes, "many/eight-on-one-queue@processes", .seconds = 20, .verbs_seconds = 60) { hub(true, false); }
T_CASE(many_block_threads, "many/eight-blocking@two-devices", .seconds = 20, .verbs_seconds = 60) { hub(false, true); }
T_CASE(many_block_processes, "many/eight-blocking@processes", .seconds = 20, .verbs_seconds = 60) { hub(true, true); }

/* One peer floods without pause. A quiet peer's message still arrives promptly. */
T_CASE(fair, "many/flood-does-not-starve", .seconds = 15) {
    end busy, quiet;
    end_opts o = {.max_send = 256, .max_recv = 256};
    end_open(&busy, &o, NULL);
    end_open(&quiet, &o, NULL);
    end host;
    end_open(&host, NULL, NULL);
    dp_cq *cq = NULL;
    dp_qp *qp[2];
    dp_error err = {0};
    CHECK_OK_ERR(dp_cq_create(host.dev, 1024, &cq, &err), err);
    end_attend(cq);
    end *src[2] = {&busy, &quiet};
    for (int i = 0; i < 2; i++) {
        dp_qp_attr attr = {.max_send = 8, .max_recv = 256, .expose = {host.mem}, .n_expose = 1};
        CHECK_OK_ERR(dp_qp_create(host.dom, cq, &attr, &qp[i], &err), err);
        for (uint64_t k = 0; k < 256; k++)
            CHECK_OK(dp_post_recv(qp[i], k));
        card c, mine = {.blob_len = DP_BLOB_MAX};
        CHECK_OK_ERR(dp_qp_export(qp[i], mine.blob, &mine.blob_len, &err), err);
        end_card(src[i], &c);
        end_connect(src[i], &mine);
        CHECK_OK_ERR(dp_qp_connect(qp[i], c.blob, c.blob_len, &err), err);
    }
    uint64_t addr = (uint64_t)(uintptr_t)host.mem->addr;
    for (int i = 0; i < 2 && host.dev->caps & DP_CAP_POLLED_SOURCE; i++) { /* the first post may take long to leave */
        end_write(src[i], NULL, 0, addr, host.mem->rkey, 7, DP_SIGNALED);
        end_sent(src[i], 7, DP_OP_WRITE);
    }
    for (int i = 0; i < 200; i++)
        end_write_imm(&busy, NULL, 0, addr, host.mem->rkey, 1, 0, 0);
    end_write_imm(&quiet, NULL, 0, addr, host.mem->rkey, 2, 0, 0);
    /* During the flood (each received message is sent again), the quiet peer's message must arrive among the next few hundred. */
    int floods = 0;
    int64_t until = dp_now_ns() + poll_ns();
    for (bool seen = false; !seen;) {
        dp_wc wc[4];
        if (t_idle)
            t_idle(); /* lets posts leave (DP_CAP_POLLED_SOURCE) */
        int n = dp_cq_poll(cq, wc, 4);
        CHECKF(dp_now_ns() < until, "nothing");
        for (int k = 0; k < n; k++) {
            CHECK_OK(wc[k].status);
            if (wc[k].imm == 2) {
                seen = true;
                continue;
            }
            CHECKF(++floods < 2000, "2000 completions of one queue pair, none of the other's waiting one");
            CHECK_OK(dp_post_recv(qp[0], 0));
            end_write_imm(&busy, NULL, 0, addr, host.mem->rkey, 1, 0, 0);
        }
    }
    end_reset(&busy);
    end_reset(&quiet);
    for (int i = 0; i < 2; i++)
        dp_qp_destroy(qp[i]);
    end_unattend(cq);
    dp_cq_destroy(cq);
    end_close(&busy);
    end_close(&quiet);
    end_close(&host);
}

/* Queue pairs: resetting, and what it does to the old peer. */
#include "ends.h"

T_CASE(reset_initial, "reset/initial-state") {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    for (int i = 0; i < 10; i++) {
        end_reset(&a);
        card c;
        end_card(&a, &c);
        end_reset(&a);
    }
    ends_connect_and_write(&a, &b);
    end_close(&a);
    end_close(&b);
}

/* Completions that were not polled do not survive a reset, on either side. */
static void stale_left(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < t_pick(50, 5); i++) {
        for (uint64_t k = 0; k < 8; k++) {
            dp_sge s = local_sge(e, k * 8, 8);
            end_write_imm(e, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, (uint32_t)k, 0xDEAD, DP_SIGNALED);
        }
        if (i % 2)
            t_sleep_ms(t_pick(1, 20)); /* all done, or still in flight */
        t_sync(d->sock);
        end_reset(e);
        end_quiet(e, t_pick(1, 10));
        duo_connect(d);
        end_quiet(e, t_pick(1, 10));
        t_sync(d->sock);
        duo_ping(d);
    }
}

static void stale_right(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < t_pick(50, 5); i++) {
        t_sync(d->sock);
        end_reset(e);
        end_quiet(e, t_pick(1, 10));
        duo_connect(d);
        end_quiet(e, t_pick(1, 10));
        t_sync(d->sock);
        duo_ping(d);
    }
}
DUO_CASE(stale_left, stale_right, "reset/drops-completions", NULL)

/* The outcome of a post to a queue pair that is no longer the peer: DP_OK if it was accepted and completed
 * successfully. On shm such a store may have gone to orphaned pages; there the mark of a probe counts. */
static int outcome(end *e, int posted) {
    dp_wc wc;
    if (posted != DP_OK)
        return posted;
    return end_poll_lost(e, &wc) ? wc.status : DP_CONNECTION;
}

/* The initiator notices that it has lost its peer: on verbs by the completion, on shm by a probe within a second. */
static void check_told(end *e, int st) {
    if (t_is_verbs()) {
        CHECKF(dp_status_class(st) == 5, "the write ends with %d (%s)", st, dp_status_text(st));
        return;
    }
    end_report_death(e);
    int64_t until = dp_now_ns() + (int64_t)(1e9 * t_time_scale());
    while (!dp_qp_broken(e->qp)) {
        CHECKF(dp_now_ns() < until, "not marked broken a second after it lost its peer");
        dp_qp_probe(e->qp);
        t_sleep_ms(1);
    }
    CHECK_STATUS(dp_post_write(e->qp, NULL, 0, 0, 0, 1, DP_SIGNALED), DP_CONNECTION);
}

/* After the right side has reset, later posts of the left side change nothing there, and the left side gets an error. */
static void fenced_left(duo *d) {
    end *e = &d->e;
    memset(local_bytes(e), 0x66, 4096);
    dp_sge s = local_sge(e, 0, 4096);
    t_sync(d->sock); /* the right side has reset and cleared its memory */
    for (uint64_t i = 0; i < 20; i++) {
        t_note("post %d after the peer's reset", (int)i);
        int st = i % 2 ? dp_post_write(e->qp, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, i, DP_SIGNALED)
                       : dp_post_write_imm(e->qp, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, 1, i,
                                           DP_SIGNALED);
        check_told(e, outcome(e, st));
    }
    t_sync(d->sock);
    duo_reconnect(d);
    duo_ping(d);
}

static void fenced_right(duo *d) {
    end *e = &d->e;
    end_reset(e);
    memset(end_bytes(e), 0, e->mem->size);
    t_sync(d->sock);
    t_sync(d->sock);
    CHECK_BYTES(end_bytes(e), 0, e->mem->size);
    end_quiet(e, 20);
    duo_reconnect(d);
    duo_ping(d);
}
static const end_opts fenced_opts = {.quick_errors = true};
DUO_CASE(fenced_left, fenced_right, "reset/fences-old-peer", &fenced_opts)

/* The right side connects the same queue pair to another peer. The old peer reaches nothing. */
T_CASE(fenced_by_new_peer, "reset/new-peer-fences-old", .seconds = 20) {
    end old, mid, fresh;
    end_opts o = {.quick_errors = true};
    end_open(&old, &o, NULL);
    end_open(&mid, &o, NULL);
    end_open(&fresh, &o, NULL);
    ends_connect_and_write(&old, &mid);
    end_reset(&mid);
    ends_connect_and_write(&fresh, &mid);
    memset(end_bytes(&mid), 0, mid.mem->size);
    memset(local_bytes(&old), 0x77, 256);
    dp_sge s = local_sge(&old, 0, 256);
    for (uint64_t i = 0; i < 3; i++) {
        int st = dp_post_write_imm(old.qp, &s, 1, (uint64_t)(uintptr_t)mid.mem->addr, mid.mem->rkey, 1, i, DP_SIGNALED);
        check_told(&old, outcome(&old, st));
    }
    CHECK_BYTES(end_bytes(&mid), 0, mid.mem->size);
    end_quiet(&mid, 20);
    /* The new connection is not harmed. */
    dp_sge t = local_sge(&fresh, 0, 100);
    fill_pattern(local_bytes(&fresh), 100, 9);
    end_write_imm(&fresh, &t, 1, (uint64_t)(uintptr_t)mid.mem->addr, mid.mem->rkey, 12, 3, DP_SIGNALED);
    CHECK_EQ(end_imm(&mid).imm, 12);
    CHECK_PATTERN(end_bytes(&mid), 100, 9);
    end_sent(&fresh, 3, DP_OP_WRITE);
    end_close(&old);
    end_close(&mid);
    end_close(&fresh);
}

/* A blob is valid for one connection. A blob from before a reset opens nothing, neither before the next peer has connected
 * nor afterwards, and does not harm the next peer. */
static void try_old_blob(end *a, const card *old) {
    dp_error err = {0};
    int st = dp_qp_connect(a->qp, old->blob, old->blob_len, &err);
    if (st == DP_OK) {
        memset(local_bytes(a), 0x55, 128);
        dp_sge s = local_sge(a, 0, 128);
        check_told(a, outcome(a, dp_post_write_imm(a->qp, &s, 1, old->regions[0].addr, old->regions[0].rkey, 1, 1,
                                                   DP_SIGNALED)));
    }
    end_reset(a);
}

T_CASE(old_blob, "reset/old-blob-is-dead", .seconds = 20) {
    end a, b, c;
    end_opts o = {.quick_errors = true};
    end_open(&a, &o, NULL);
    end_open(&b, &o, NULL);
    end_open(&c, &o, NULL);
    card old, new;
    end_card(&b, &old);
    end_reset(&b);
    end_card(&b, &new);
    CHECK(memcmp(old.blob, new.blob, old.blob_len));
    try_old_blob(&a, &old);
    CHECK_BYTES(end_bytes(&b), 0, b.mem->size);
    end_quiet(&b, 5);
    ends_connect_and_write(&c, &b);
    memset(end_bytes(&b), 0, b.mem->size);
    try_old_blob(&a, &old);
    CHECK_BYTES(end_bytes(&b), 0, b.mem->size);
    end_quiet(&b, 20);
    end_close(&a);
    end_close(&b);
    end_close(&c);
}

/* Two queue pairs on one completion queue: a reset drops only its own completions. */
T_CASE(reset_keeps_others, "reset/keeps-other-completions") {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    dp_error err = {0};
    dp_cq *cq = NULL;
    dp_qp *qp[2];
    dp_qp_attr attr = {.max_send = 8, .max_recv = 8, .expose = {b.mem}, .n_expose = 1};
    CHECK_OK_ERR(dp_cq_create(b.dev, 32, &cq, &err), err);
    end_attend(cq);
    end src[2];
    for (int i = 0; i < 2; i++) {
        end_open(&src[i], NULL, NULL);
        CHECK_OK_ERR(dp_qp_create(b.dom, cq, &attr, &qp[i], &err), err);
        for (uint64_t k = 0; k < 8; k++)
            CHECK_OK(dp_post_recv(qp[i], 100 * (uint64_t)i + k));
        card c, bc = {.blob_len = DP_BLOB_MAX};
        CHECK_OK_ERR(dp_qp_export(qp[i], bc.blob, &bc.blob_len, &err), err);
        end_card(&src[i], &c);
        end_connect(&src[i], &bc);
        CHECK_OK_ERR(dp_qp_connect(qp[i], c.blob, c.blob_len, &err), err);
    }
    for (uint32_t k = 0; k < 4; k++)
        for (int i = 0; i < 2; i++) {
            end_write_imm(&src[i], NULL, 0, (uint64_t)(uintptr_t)b.mem->addr, b.mem->rkey, k, k, DP_SIGNALED);
            end_sent(&src[i], k, DP_OP_WRITE);
        }
    /* Own completions too, mixed in the queue. */
    for (uint64_t k = 0; k < 4; k++)
        for (int i = 0; i < 2; i++)
            CHECK_OK(dp_post_write(qp[i], NULL, 0, (uint64_t)(uintptr_t)src[i].mem->addr, src[i].mem->rkey,
                                   200 + 100 * (uint64_t)i + k, DP_SIGNALED));
    t_sleep_ms(t_pick(1, 50));
    CHECK_OK_ERR(dp_qp_reset(qp[0], &err), err);
    dp_wc wc[32];
    int got = 0;
    int64_t until = dp_now_ns() + poll_ns();
    while (got < 8 && dp_now_ns() < until) {
        if (t_idle)
            t_idle(); /* the peers acknowledge */
        got += dp_cq_poll(cq, wc + got, 32 - got);
    }
    t_sleep_ms(20);
    got += dp_cq_poll(cq, wc + got, 32 - got);
    CHECK_EQ(got, 8);
    uint32_t received = 0, sent = 0;
    for (int k = 0; k < got; k++) {
        CHECK(wc[k].qp == qp[1]);
        CHECK_OK(wc[k].status);
        if (wc[k].op == DP_OP_RECV_IMM) {
            CHECK_EQ(wc[k].wr_id, 100 + received);
            CHECK_EQ(wc[k].imm, received);
            received++;
        } else {
            CHECK_EQ(wc[k].wr_id, 300 + sent);
            sent++;
        }
    }
    CHECK_EQ(received, 4);
    CHECK_EQ(sent, 4);
    for (int i = 0; i < 2; i++) {
        end_close(&src[i]);
        dp_qp_destroy(qp[i]);
    }
    end_unattend(cq);
    dp_cq_destroy(cq);
    end_close(&a);
    end_close(&b);
}

/* One side destroys its queue pair while the other goes on posting. */
T_CASE(destroyed_peer, "reset/destroyed-peer", .seconds = 20) {
    end a, b;
    end_opts o = {.quick_errors = true};
    end_open(&a, &o, NULL);
    end_open(&b, &o, NULL);
    ends_connect_and_write(&a, &b);
    uint64_t addr = (uint64_t)(uintptr_t)b.mem->addr;
    uint32_t rkey = b.mem->rkey;
    end_close(&b);
    dp_sge s = local_sge(&a, 0, 64);
    int st = outcome(&a, dp_post_write(a.qp, &s, 1, addr, rkey, 1, DP_SIGNALED));
    check_told(&a, st);
    end_close(&a);
}

/* 100 peers one after the other on one queue pair; nothing grows. */
static void new_peer(int sock, void *arg) {
    int n = *(int *)arg;
    dp_dev *dev = NULL;
    dp_error err = {0};
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &dev, &err), err);
    for (int i = 0; i < n; i++) {
        duo d = {.sock = sock};
        end_open(&d.e, NULL, dev);
        duo_connect(&d);
        duo_ping(&d);
        end_close(&d.e);
        t_sync(sock);
    }
    dp_dev_close(dev);
}

static void meet_peers(bool process, int n) {
    t_peer p;
    t_peer_start(&p, process, new_peer, &n);
    duo d = {.sock = p.sock, .left = true};
    end_open(&d.e, NULL, NULL);
    t_usage early = {0}, late;
    for (int i = 0; i < n; i++) {
        t_note("peer %d", i);
        duo_connect(&d);
        duo_ping(&d);
        t_sync(p.sock);
        end_reset(&d.e);
        if (i == 4)
            t_usage_now(&early);
    }
    t_usage_now(&late);
    t_note("after %d peers", n);
    if (process) { /* in one process, the peer's set-up may be in progress */
        CHECK_EQ(late.n_fds, early.n_fds);
        CHECK_EQ(late.shared_maps, early.shared_maps);
        if (!T_ASAN)
            CHECK_LE(late.maps, early.maps + 4);
        CHECK_LE(late.threads, early.threads);
    }
    t_peer_join(&p);
    end_close(&d.e);
}

T_CASE(peers_threads, "reset/100-peers@two-devices", .seconds = 20) { meet_peers(false, 100); }
T_CASE(peers_processes, "reset/100-peers@processes", .seconds = 20) { meet_peers(true, 100); }

/* Queue pairs: creation, blobs, connecting, resetting. */
#include <stdlib.h>
#include <unistd.h>

#include "../dp_shm.h"
#include "ends.h"

T_CASE(qp_limits, "qp/bad-arguments") {
    end e, other;
    end_open(&e, NULL, NULL);
    end_open(&other, NULL, NULL);
    dp_cq *cq = NULL;
    dp_qp *qp = NULL;
    dp_error err = {0};
    CHECK_REFUSED(dp_cq_create(e.dev, 0, &cq, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_cq_create(e.dev, (1u << 20) + 1, &cq, &err), DP_INVALID, err);
    CHECK_OK_ERR(dp_cq_create(e.dev, 16384, &cq, &err), err);
    CHECK_GE(cq->capacity, 16384);

    static const struct { uint32_t send, recv; } bad[] = {{0, 1}, {1, 0}, {4097, 1}, {1, 4097}, {0xFFFFFFFF, 0xFFFFFFFF},
                                                         {0x80000000, 0x80000000}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dp_qp_attr a = {.max_send = bad[i].send, .max_recv = bad[i].recv};
        t_note("max_send %u max_recv %u", a.max_send, a.max_recv);
        CHECK_REFUSED(dp_qp_create(e.dom, cq, &a, &qp, &err), DP_INVALID, err);
    }
    dp_qp_attr many = {.max_send = 1, .max_recv = 1, .n_expose = DP_EXPOSE_MAX + 1};
    CHECK_REFUSED(dp_qp_create(e.dom, cq, &many, &qp, &err), DP_INVALID, err);
    dp_qp_attr none = {.max_send = 1, .max_recv = 1, .n_expose = 1};
    CHECK_REFUSED(dp_qp_create(e.dom, cq, &none, &qp, &err), DP_INVALID, err);
    dp_qp_attr foreign = {.max_send = 1, .max_recv = 1, .n_expose = 1, .expose = {other.mem}};
    CHECK_REFUSED(dp_qp_create(e.dom, cq, &foreign, &qp, &err), DP_INVALID, err);
    dp_qp_attr good = {.max_send = 1, .max_recv = 1};
    CHECK_REFUSED(dp_qp_create(e.dom, other.cq, &good, &qp, &err), DP_INVALID, err);
    CHECK(!qp);

    /* The smallest, the largest, and one that exposes the most. */
    dp_qp_attr largest = {.max_send = 4096, .max_recv = 4096};
    if (t_is_verbs())
        largest.max_send = largest.max_recv = 1024;
    dp_qp *small = NULL, *large = NULL, *wide = NULL;
    dp_mem *mem[DP_EXPOSE_MAX];
    dp_qp_attr widest = {.max_send = 2, .max_recv = 2, .n_expose = DP_EXPOSE_MAX};
    for (int i = 0; i < DP_EXPOSE_MAX; i++) {
        CHECK_OK_ERR(dp_mem_alloc(e.dom, 4096, ACCESS_ALL, &mem[i], &err), err);
        widest.expose[i] = mem[i];
    }
    CHECK_OK_ERR(dp_qp_create(e.dom, cq, &good, &small, &err), err);
    CHECK_OK_ERR(dp_qp_create(e.dom, cq, &largest, &large, &err), err);
    CHECK_OK_ERR(dp_qp_create(e.dom, cq, &widest, &wide, &err), err);
    uint8_t blob[DP_BLOB_MAX];
    uint32_t len = sizeof blob;
    CHECK_OK_ERR(dp_qp_export(wide, blob, &len, &err), err);
    dp_qp_destroy(small);
    dp_qp_destroy(large);
    dp_qp_destroy(wide);
    for (int i = 0; i < DP_EXPOSE_MAX; i++)
        dp_mem_free(mem[i]);
    dp_cq_destroy(cq);
    end_close(&e);
    end_close(&other);
}

T_CASE(cq_reservation, "qp/completion-queue-reservation") {
    end e;
    end_open(&e, NULL, NULL);
    dp_cq *cq = NULL;
    dp_qp *qp[5] = {0};
    dp_error err = {0};
    CHECK_OK_ERR(dp_cq_create(e.dev, 64, &cq, &err), err);
    uint32_t capacity = cq->capacity;
    CHECK_EQ(cq->reserved, 0);
    dp_qp_attr a = {.max_send = 8, .max_recv = 8};
    uint32_t fit = capacity / 16;
    CHECK_EQ(fit, 4); /* capacity is what was asked: the reservation is checked against it */
    for (uint32_t i = 0; i < fit; i++)
        CHECK_OK_ERR(dp_qp_create(e.dom, cq, &a, &qp[i], &err), err);
    CHECK_EQ(cq->reserved, 64);
    dp_qp_attr one = {.max_send = 1, .max_recv = 1};
    CHECK_REFUSED(dp_qp_create(e.dom, cq, &one, &qp[4], &err), DP_INVALID, err);
    CHECK(!qp[4]);
    dp_qp_destroy(qp[1]);
    CHECK_EQ(cq->reserved, 48);
    CHECK_OK_ERR(dp_qp_create(e.dom, cq, &a, &qp[1], &err), err);
    CHECK_REFUSED(dp_qp_create(e.dom, cq, &one, &qp[4], &err), DP_INVALID, err);
    for (int i = 0; i < 4; i++)
        dp_qp_destroy(qp[i]);
    CHECK_EQ(cq->reserved, 0);
    dp_cq_destroy(cq);
    end_close(&e);
}

T_CASE(export_room, "qp/export-room") {
    end e;
    end_open(&e, NULL, NULL);
    uint8_t blob[DP_BLOB_MAX + 16];
    dp_error err = {0};
    static const uint32_t small[] = {0, 1, DP_BLOB_MAX / 2, DP_BLOB_MAX - 1};
    memset(blob, 0xEE, sizeof blob);
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        uint32_t len = small[i];
        CHECK_REFUSED(dp_qp_export(e.qp, blob, &len, &err), DP_INVALID, err);
        CHECK_BYTES(blob, 0xEE, sizeof blob);
    }
    uint32_t len = DP_BLOB_MAX;
    CHECK_OK_ERR(dp_qp_export(e.qp, blob, &len, &err), err);
    CHECK(len > 0 && len <= DP_BLOB_MAX);
    CHECK_BYTES(blob + DP_BLOB_MAX, 0xEE, 16);
    end_close(&e);
}

T_CASE(posts_unconnected, "qp/posts-before-connecting") {
    end e;
    end_open(&e, NULL, NULL);
    dp_sge s = local_sge(&e, 0, 8);
    uint64_t a = (uint64_t)(uintptr_t)e.mem->addr;
    uint32_t k = e.mem->rkey;
    CHECK_STATUS(dp_post_write(e.qp, &s, 1, a, k, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK_STATUS(dp_post_write_imm(e.qp, &s, 1, a, k, 1, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK_STATUS(dp_post_read(e.qp, &s, a, k, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK_STATUS(dp_post_fetch_add(e.qp, &s, a, k, 1, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK_STATUS(dp_post_cmp_swap(e.qp, &s, a, k, 0, 1, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK_STATUS(dp_post_send(e.qp, &s, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK(!dp_rkey_ptr(e.qp, a, k, 8));
    CHECK_EQ(dp_qp_broken(e.qp), 0);
    dp_qp_probe(e.qp); /* must not crash, nor find a peer dead that never was */
    CHECK_EQ(dp_qp_broken(e.qp), 0);
    end_quiet(&e, 20);
    end_close(&e);
}

/* ---- blobs ---- */

/* A good connection to show that refused blobs did no harm. One thread: no operation needs the other side
 * to run. */
static void connect_and_write(end *a, end *b) {
    card ca, cb;
    end_card(a, &ca);
    end_card(b, &cb);
    end_connect(a, &cb);
    end_connect(b, &ca);
    fill_pattern(local_bytes(a), 100, 1);
    dp_sge s = local_sge(a, 0, 100);
    end_write_imm(a, &s, 1, cb.regions[0].addr + 3, cb.regions[0].rkey, 5, 1, DP_SIGNALED);
    CHECK_EQ(end_imm(b).imm, 5);
    CHECK_PATTERN(end_bytes(b) + 3, 100, 1);
    end_sent(a, 1, DP_OP_WRITE);
}

static void refuse_blob(end *e, const void *blob, uint32_t len) {
    dp_error err = {0};
    CHECK_REFUSED(dp_qp_connect(e->qp, blob, len, &err), DP_BAD_BLOB, err);
    CHECK_EQ(e->qp->state, DP_QP_INIT);
}

T_CASE(bad_blobs, "connect/bad-blobs", .seconds = 20) {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    card good;
    end_card(&b, &good);
    uint8_t blob[2 * DP_BLOB_MAX];
    for (uint32_t len = 0; len < sizeof blob; len++) {
        if (len == good.blob_len)
            continue;
        t_note("blob of %u bytes instead of %u", len, good.blob_len);
        memset(blob, 0, sizeof blob);
        memcpy(blob, good.blob, good.blob_len);
        refuse_blob(&a, blob, len);
    }
    for (int i = 0; i < 500; i++) {
        t_note("random blob %d", i);
        for (uint32_t k = 0; k < good.blob_len; k++)
            blob[k] = (uint8_t)t_random();
        refuse_blob(&a, blob, good.blob_len);
    }
    t_note("zeroes");
    memset(blob, 0, sizeof blob);
    refuse_blob(&a, blob, good.blob_len);
    memset(blob, 0xFF, sizeof blob);
    refuse_blob(&a, blob, good.blob_len);
    /* Magic, version and provider are at the front: every bit of the first six bytes counts. */
    for (uint32_t bit = 0; bit < 48; bit++) {
        t_note("bit %u turned", bit);
        memcpy(blob, good.blob, good.blob_len);
        blob[bit / 8] ^= (uint8_t)(1 << bit % 8);
        refuse_blob(&a, blob, good.blob_len);
    }
    t_note("good blob after the bad ones");
    connect_and_write(&a, &b);
    end_close(&a);
    end_close(&b);
}

/* Any damaged byte: an error in bounded time, or a connection that cannot reach anything. Never a crash. Bytes 8 to 15
 * of a shm blob only serve to explain a failure. */
T_CASE(damaged_blobs, "connect/damaged-blobs", .seconds = 30, .providers = T_SHM) {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    card good;
    end_card(&b, &good);
    for (uint32_t i = 0; i < good.blob_len; i++) {
        if (i >= 8 && i < 16)
            continue;
        uint8_t blob[DP_BLOB_MAX];
        memcpy(blob, good.blob, good.blob_len);
        blob[i] ^= (uint8_t)(1 + t_random() % 255);
        t_note("byte %u of %u is %#x instead of %#x", i, good.blob_len, blob[i], good.blob[i]);
        dp_error err = {0};
        int64_t start = dp_now_ns();
        int st = dp_qp_connect(a.qp, blob, good.blob_len, &err);
        CHECK_LT(dp_now_ns() - start, 3000000000);
        if (st) {
            CHECK_EQ(err.status, st);
            CHECK(err.msg[0]);
            CHECK_EQ(a.qp->state, DP_QP_INIT);
        } else {
            dp_sge s = local_sge(&a, 0, 64);
            memset(local_bytes(&a), 0xBD, 64);
            dp_post_write(a.qp, &s, 1, good.regions[0].addr, good.regions[0].rkey, 1, 0);
            t_sleep_ms(1);
            CHECK_BYTES(end_bytes(&b), 0, 64);
            end_reset(&a);
        }
    }
    connect_and_write(&a, &b);
    end_close(&a);
    end_close(&b);
}

T_CASE(other_provider, "connect/blob-of-other-provider") {
    const char *other = t_is_verbs() ? "shm" : "verbs";
    dp_dev *dev = NULL;
    dp_error err = {0};
    if (dp_dev_open(other, NULL, &dev, &err))
        t_skip("no %s device: %s", other, err.msg);
    dp_domain *dom = NULL;
    dp_mem *mem = NULL;
    dp_cq *cq = NULL;
    dp_qp *qp = NULL;
    CHECK_OK_ERR(dp_domain_create(dev, &dom, &err), err);
    CHECK_OK_ERR(dp_mem_alloc(dom, 4096, ACCESS_ALL, &mem, &err), err);
    CHECK_OK_ERR(dp_cq_create(dev, 32, &cq, &err), err);
    dp_qp_attr attr = {.max_send = 8, .max_recv = 8, .expose = {mem}, .n_expose = 1};
    CHECK_OK_ERR(dp_qp_create(dom, cq, &attr, &qp, &err), err);
    uint8_t blob[DP_BLOB_MAX];
    uint32_t len = sizeof blob;
    CHECK_OK_ERR(dp_qp_export(qp, blob, &len, &err), err);
    end e, f;
    end_open(&e, NULL, NULL);
    end_open(&f, NULL, NULL);
    refuse_blob(&e, blob, len);
    /* The other way round. */
    card c;
    end_card(&e, &c);
    CHECK_REFUSED(dp_qp_connect(qp, c.blob, c.blob_len, &err), DP_BAD_BLOB, err);
    /* Even with the length of a blob of this provider. */
    memcpy(c.blob, blob, len < c.blob_len ? len : c.blob_len);
    refuse_blob(&e, c.blob, c.blob_len);
    connect_and_write(&e, &f);
    end_close(&e);
    end_close(&f);
    dp_qp_destroy(qp);
    dp_cq_destroy(cq);
    dp_mem_free(mem);
    dp_domain_destroy(dom);
    dp_dev_close(dev);
}

T_CASE(connect_twice, "connect/twice") {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    connect_and_write(&a, &b);
    card cb;
    dp_error err = {0};
    end_card(&b, &cb);
    CHECK_REFUSED(dp_qp_connect(a.qp, cb.blob, cb.blob_len, &err), DP_INVALID, err);
    CHECK_EQ(a.qp->state, DP_QP_CONNECTED);
    dp_sge s = local_sge(&a, 0, 8);
    end_write_imm(&a, &s, 1, cb.regions[0].addr, cb.regions[0].rkey, 6, 2, DP_SIGNALED);
    CHECK_EQ(end_imm(&b).imm, 6);
    end_sent(&a, 2, DP_OP_WRITE);
    end_close(&a);
    end_close(&b);
}

/* The owner of the blob is gone: connecting fails, or the first write does. In bounded time either way. */
T_CASE(stale_blob, "connect/blob-of-destroyed-qp", .seconds = 20) {
    end a, b;
    end_opts o = {.quick_errors = true};
    end_open(&a, &o, NULL);
    end_open(&b, &o, NULL);
    card cb;
    end_card(&b, &cb);
    end_close(&b);
    dp_error err = {0};
    int64_t start = dp_now_ns();
    int st = dp_qp_connect(a.qp, cb.blob, cb.blob_len, &err);
    CHECK_LT(dp_now_ns() - start, 5000000000);
    if (st == DP_OK) {
        dp_sge s = local_sge(&a, 0, 8);
        dp_wc wc;
        st = dp_post_write(a.qp, &s, 1, cb.regions[0].addr, cb.regions[0].rkey, 9, DP_SIGNALED);
        if (st == DP_OK) {
            CHECKF(end_poll_sent(&a, &wc, poll_ns()), "a write to a queue pair that is gone never ends");
            CHECK_NE(wc.status, DP_OK);
        }
    } else {
        CHECK_EQ(err.status, st);
        CHECK(err.msg[0]);
        CHECK_EQ(a.qp->state, DP_QP_INIT);
    }
    end_close(&a);
}

static void export_and_leave(int sock, void *arg) {
    (void)arg;
    end e;
    card c;
    end_open(&e, NULL, NULL);
    end_card(&e, &c);
    t_send(sock, &c, sizeof c);
    t_recv(sock, &c, 1); /* never comes: killed here */
}

T_CASE(dead_blob, "connect/blob-of-dead-process", .seconds = 20) {
    t_peer p;
    t_peer_start(&p, true, export_and_leave, NULL);
    end a;
    end_opts o = {.quick_errors = true};
    end_open(&a, &o, NULL);
    card c;
    t_recv(p.sock, &c, sizeof c);
    t_peer_kill(&p);
    dp_error err = {0};
    int64_t start = dp_now_ns();
    int st = dp_qp_connect(a.qp, c.blob, c.blob_len, &err);
    CHECK_LT(dp_now_ns() - start, 5000000000);
    if (st == DP_OK) {
        dp_sge s = local_sge(&a, 0, 8);
        dp_wc wc;
        st = dp_post_write(a.qp, &s, 1, c.regions[0].addr, c.regions[0].rkey, 9, DP_SIGNALED);
        if (st == DP_OK) {
            CHECKF(end_poll_sent(&a, &wc, poll_ns()), "a write to a dead process never ends");
            CHECK_NE(wc.status, DP_OK);
        }
    }
    end_close(&a);
}

/* Neither the order of connecting nor an operation before the other side has connected matters: the
 * receives were posted before the blobs left. */
static void early_left(duo *d) {
    end *e = &d->e;
    card mine;
    end_card(e, &mine);
    t_send(d->sock, &mine, sizeof mine);
    t_recv(d->sock, &d->peer, sizeof d->peer);
    end_connect(e, &d->peer);
    fill_pattern(local_bytes(e), 200, 3);
    dp_sge s = local_sge(e, 0, 200);
    end_write_imm(e, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, 0xEA51, 4, DP_SIGNALED);
    t_sync(d->sock); /* now the right side connects */
    end_sent(e, 4, DP_OP_WRITE);
    t_sync(d->sock);
    duo_ping(d);
}

static void early_right(duo *d) {
    end *e = &d->e;
    card mine;
    end_card(e, &mine);
    t_send(d->sock, &mine, sizeof mine);
    t_recv(d->sock, &d->peer, sizeof d->peer);
    t_sync(d->sock);
    t_sleep_ms(20);
    end_connect(e, &d->peer);
    dp_wc wc = end_imm(e);
    CHECK_EQ(wc.imm, 0xEA51);
    CHECK_EQ(wc.byte_len, 200);
    CHECK_PATTERN(end_bytes(e), 200, 3);
    t_sync(d->sock);
    duo_ping(d);
}

static const end_opts early_opts = {.unconnected = true};
DUO_CASE(early_left, early_right, "connect/one-side-first", &early_opts)

/* A worker's device has active_side_only: it does not listen, so it connects first. A client that comes too
 * early is told so at once, or waits; its queue pair is as good as before. */
static void worker_left(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < 20; round++) {
        card mine;
        dp_error err = {0};
        end_card(e, &mine);
        t_send(d->sock, &mine, sizeof mine);
        t_recv(d->sock, &d->peer, sizeof d->peer);
        if (round % 2 && !t_is_verbs()) {
            int64_t start = dp_now_ns();
            int st = dp_qp_connect(e->qp, d->peer.blob, d->peer.blob_len, &err);
            CHECK_LT(dp_now_ns() - start, 5000000000);
            CHECKF(st == DP_OK || dp_status_class(st) == 5, "too early: %d (%s)", st, err.msg);
        }
        t_sync(d->sock); /* the worker connects now */
        t_sync(d->sock);
        if (e->qp->state != DP_QP_CONNECTED)
            end_connect(e, &d->peer);
        duo_ping(d);
        t_sync(d->sock);
        end_reset(e);
    }
}

static void worker_right(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < 20; round++) {
        card mine;
        end_card(e, &mine);
        t_send(d->sock, &mine, sizeof mine);
        t_recv(d->sock, &d->peer, sizeof d->peer);
        t_sync(d->sock);
        end_connect(e, &d->peer);
        t_sync(d->sock);
        duo_ping(d);
        t_sync(d->sock);
        end_reset(e);
    }
}
static const end_opts worker_opts = {.right_active_only = true, .unconnected = true};
DUO_CASE(worker_left, worker_right, "connect/active-side-only", &worker_opts)

/* Both at the same moment, over and over. */
static void crossing(duo *d) {
    for (int i = 0; i < t_pick(100, 20); i++) {
        card mine;
        end_card(&d->e, &mine);
        t_send(d->sock, &mine, sizeof mine);
        t_recv(d->sock, &d->peer, sizeof d->peer);
        t_sync(d->sock);
        for (unsigned k = t_random() % 2000; k; k--)
            dp_cpu_pause();
        end_connect(&d->e, &d->peer);
        /* What the peer left here in vain would keep descriptors of its memory. */
        CHECK(t_is_verbs() || ((const shm_qp *)d->e.qp)->deposit == NULL);
        duo_ping(d);
        t_sync(d->sock);
        end_reset(&d->e);
    }
}
static void crossing_left(duo *d) { crossing(d); }
static void crossing_right(duo *d) { crossing(d); }
static const end_opts crossing_opts = {.unconnected = true};
DUO_CASE(crossing_left, crossing_right, "connect/both-at-once", &crossing_opts, .seconds = 20)

/* ---- reset ---- */

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
    connect_and_write(&a, &b);
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
            t_sleep_ms(t_pick(1, 20)); /* all done, or still under way */
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

/* What became of a post to a queue pair that no longer is this one's peer: DP_OK if it was accepted and completed
 * well. On shm such a store may have gone to orphaned pages; the mark that probing leaves is what counts there. */
static int outcome(end *e, int posted) {
    dp_wc wc;
    if (posted != DP_OK)
        return posted;
    CHECKF(end_poll_sent(e, &wc, poll_ns()), "the write never ends");
    return wc.status;
}

/* The initiator learns that it has lost its peer: verbs by the completion, shm by a probe within a second. */
static void check_told(end *e, int st) {
    if (t_is_verbs()) {
        CHECKF(dp_status_class(st) == 5, "the write ends with %d (%s)", st, dp_status_text(st));
        return;
    }
    int64_t until = dp_now_ns() + (int64_t)(1e9 * t_time_scale());
    while (!dp_qp_broken(e->qp)) {
        CHECKF(dp_now_ns() < until, "not marked broken a second after it lost its peer");
        dp_qp_probe(e->qp);
        t_sleep_ms(1);
    }
    CHECK_STATUS(dp_post_write(e->qp, NULL, 0, 0, 0, 1, DP_SIGNALED), DP_CONNECTION);
}

/* Once the right side has reset, what the left side still posts changes nothing there, and the left side is told. */
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

/* The right side goes on with somebody else on the same queue pair: the old peer reaches nothing. */
T_CASE(fenced_by_new_peer, "reset/new-peer-fences-old", .seconds = 20) {
    end old, mid, fresh;
    end_opts o = {.quick_errors = true};
    end_open(&old, &o, NULL);
    end_open(&mid, &o, NULL);
    end_open(&fresh, &o, NULL);
    connect_and_write(&old, &mid);
    end_reset(&mid);
    connect_and_write(&fresh, &mid);
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

/* A blob is good for one connection: the one from before a reset opens nothing, neither before the next peer
 * has come nor afterwards, and does the next peer no harm. */
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
    connect_and_write(&c, &b);
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
    end src[2];
    for (int i = 0; i < 2; i++) {
        end_open(&src[i], NULL, NULL);
        CHECK_OK_ERR(dp_qp_create(b.dom, cq, &attr, &qp[i], &err), err);
        for (uint64_t k = 0; k < 8; k++)
            CHECK_OK(dp_post_recv(qp[i], NULL, 100 * (uint64_t)i + k));
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
    while (got < 8 && dp_now_ns() < until)
        got += dp_cq_poll(cq, wc + got, 32 - got);
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
    connect_and_write(&a, &b);
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
    if (process) { /* in one process the peer's set-up is under way or not */
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

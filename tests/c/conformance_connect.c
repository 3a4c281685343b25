/* Queue pairs: blobs and connecting. */
#include "dp_shm.h"
#include "ends.h"

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
    ends_connect_and_write(&a, &b);
    end_close(&a);
    end_close(&b);
}

/* A damaged byte gives an error in bounded time, or a connection that cannot reach anything, but never a crash. Bytes 8 to 15
 * of a shm blob only explain failures. Bytes 24 to 43 of a tcp blob are an address, and tests must not connect to other addresses. From
 * byte 104 on it has the secret of a queue pair that encrypts: a connection with another secret is made, and ends (tcp_seal.c). */
T_CASE(damaged_blobs, "connect/damaged-blobs", .seconds = 30, .providers = T_SHM | T_TCP) {
    end a, b;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    card good;
    end_card(&b, &good);
    for (uint32_t i = 0; i < good.blob_len; i++) {
        if (t_is_shm() ? i >= 8 && i < 16 : (i >= 24 && i < 44) || (i >= 104 && i < 121 && good.blob[120]))
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
    ends_connect_and_write(&a, &b);
    end_close(&a);
    end_close(&b);
}

T_CASE(other_provider, "connect/blob-of-other-provider") {
    const char *other = t_is_shm() ? "verbs" : "shm";
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
    ends_connect_and_write(&e, &f);
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
    ends_connect_and_write(&a, &b);
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

/* A queue pair that was prepared for connecting in a sealed process connects and receives as usual. Providers other than verbs refuse to prepare
 * a queue pair, and the test then connects it without that. */
T_CASE(connect_late, "connect/late") {
    end a, b;
    end_opts late = {.no_recvs = true};
    dp_error err = {0};
    end_open(&a, &late, NULL);
    end_open(&b, NULL, NULL);
    if (!t_is_verbs()) {
        CHECK_REFUSED(dp_qp_connect_late(a.qp, &err), DP_UNSUPPORTED, err);
    } else {
        CHECK_OK_ERR(dp_qp_connect_late(a.qp, &err), err);
        CHECK_EQ(a.qp->state, DP_QP_INIT);
    }
    for (uint32_t i = 0; i < a.qp->max_recv; i++)
        end_post_recv(&a);
    ends_connect_and_write(&a, &b);
    card ca;
    end_card(&a, &ca);
    dp_sge s = local_sge(&b, 0, 8);
    for (uint32_t i = 0; i < a.qp->max_recv; i++) {
        end_write_imm(&b, &s, 1, ca.regions[0].addr, ca.regions[0].rkey, i, 100 + i, DP_SIGNALED);
        CHECK_EQ(end_imm(&a).imm, i);
        end_sent(&b, 100 + i, DP_OP_WRITE);
    }
    end_close(&a);
    end_close(&b);
}

/* The owner of the blob is gone: connecting or the first write fails in bounded time. */
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
            if (end_poll_lost(&a, &wc))
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
            if (end_poll_lost(&a, &wc))
                CHECK_NE(wc.status, DP_OK);
        }
    }
    end_close(&a);
}

/* Sides may connect in any order, and one may start operations before the other has connected, because receives were posted before the
 * blobs were sent. */
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

/* A worker's device has active_side_only: it does not listen, so it connects first. A client that connects too
 * early gets an error at once, or waits. Its queue pair can be used afterwards. */
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

/* Both at the same time, many times. */
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
        /* A connection attempt of the peer that was not used would keep descriptors of its memory. */
        CHECK(!t_is_shm() || ((const shm_qp *)d->e.qp)->deposit == NULL);
        duo_ping(d);
        t_sync(d->sock);
        end_reset(&d->e);
    }
}
static void crossing_left(duo *d) { crossing(d); }
static void crossing_right(duo *d) { crossing(d); }
static const end_opts crossing_opts = {.unconnected = true};
DUO_CASE(crossing_left, crossing_right, "connect/both-at-once", &crossing_opts, .seconds = 20)

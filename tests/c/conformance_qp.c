/* Queue pairs: valid and invalid options, and refusals before they are connected. */
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
    dp_qp_attr widest = {.max_send = 2, .max_recv = 2, .n_expose = t_is_ofi() ? 4 : DP_EXPOSE_MAX};
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
    CHECK_EQ(fit, 4); /* the reservation is checked against the requested capacity */
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
    CHECK_STATUS(dp_post_compare_swap(e.qp, &s, a, k, 0, 1, 1, DP_SIGNALED), DP_CONNECTION);
    CHECK(!dp_rkey_ptr(e.qp, a, k, 8));
    CHECK_EQ(dp_qp_broken(e.qp), 0);
    dp_qp_probe(e.qp); /* must not crash, nor find a peer dead that never was */
    CHECK_EQ(dp_qp_broken(e.qp), 0);
    end_quiet(&e, 20);
    end_close(&e);
}

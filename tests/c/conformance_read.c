/* Reads, pointers to the peer's memory, and the order of operations of different kinds. */
#include <sched.h>
#include <stdlib.h>

#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey

/* ---- reads ---- */

static const uint32_t read_sizes[] = {1, 7, 8, 63, 64, 65, 4096, 65536, 1 << 20};

static void read_left(duo *d) {
    end *e = &d->e;
    memset(local_bytes(e), 0xEE, e->local->size);
    t_sync(d->sock); /* the pattern is there */
    for (size_t i = 0; i < sizeof read_sizes / sizeof *read_sizes; i++) {
        uint32_t size = read_sizes[i];
        for (uint32_t at = 0; at < 64; at += size > 65 || t_is_verbs() ? 21 : 1) {
            t_note("%u bytes to %u mod 64", size, at);
            dp_sge s = local_sge(e, 4096 + at, size);
            CHECK_OK(dp_post_read(e->qp, &s, PEER(d, 0), 50 + at, DP_SIGNALED));
            end_sent(e, 50 + at, DP_OP_READ);
            CHECK_PATTERN(local_bytes(e) + 4096 + at, size, 11);
            CHECK_BYTES(local_bytes(e) + 4096 + at - 64, 0xEE, 64);
            CHECK_BYTES(local_bytes(e) + 4096 + at + size, 0xEE, 64);
            memset(local_bytes(e) + 4096 + at, 0xEE, size);
        }
    }
}

static void read_right(duo *d) {
    fill_pattern(end_bytes(&d->e), 1 << 20, 11);
    t_sync(d->sock);
    end_quiet(&d->e, 2); /* one-sided */
}
static const end_opts read_opts = {.size = 1 << 20, .local_size = (1 << 20) + 16384};
DUO_CASE(read_left, read_right, "read/sizes", &read_opts, .verbs_seconds = 60)

/* A read sees the writes posted before it; a later signalled post covers an unsignalled read. */
static void read_order_left(duo *d) {
    end *e = &d->e;
    for (uint64_t i = 1; i < (uint64_t)t_pick(5000, 300); i++) {
        uint64_t *word = (uint64_t *)local_bytes(e);
        word[0] = i * 0x9E3779B97F4A7C15ull;
        word[8] = 0;
        dp_sge from = local_sge(e, 0, 8), to = local_sge(e, 64, 8);
        end_write(e, &from, 1, PEER(d, i % 100 * 8), i, 0);
        if (i % 2) {
            CHECK_OK(dp_post_read(e->qp, &to, PEER(d, i % 100 * 8), i, DP_SIGNALED));
            end_sent(e, i, DP_OP_READ);
        } else {
            CHECK_OK(dp_post_read(e->qp, &to, PEER(d, i % 100 * 8), i, 0));
            dp_sge other = local_sge(e, 128, 8);
            end_write(e, &other, 1, PEER(d, 2048), i, DP_SIGNALED);
            end_sent(e, i, DP_OP_WRITE);
        }
        CHECK_EQ(word[8], word[0]);
    }
}
static void idle(duo *d) { (void)d; }
DUO_CASE(read_order_left, idle, "read/order", NULL)

/* ---- pointers ---- */

enum { READ_ONLY = 1, WRITE_ONLY = 2, HIDDEN = 3 };

static void ptr_left(duo *d) {
    end *e = &d->e;
    const reg_ref *r = d->peer.regions;
    if (!(e->dev->caps & DP_CAP_RKEY_PTR)) {
        CHECK(!dp_rkey_ptr(e->qp, r->addr, r->rkey, 8));
        t_sync(d->sock);
        return;
    }
    volatile uint64_t *p = dp_rkey_ptr(e->qp, r->addr + 64, r->rkey, 64);
    CHECK(p);
    __atomic_store_n(p, 0x1122334455667788ull, __ATOMIC_RELEASE);
    int64_t until = dp_now_ns() + poll_ns();
    while (__atomic_load_n(p + 1, __ATOMIC_ACQUIRE) != 0x8877665544332211ull) {
        CHECKF(dp_now_ns() < until, "the peer's plain store does not show");
        sched_yield();
    }
    unsigned char *whole = dp_rkey_ptr(e->qp, r->addr, r->rkey, r->size);
    CHECK(whole && (void *)(whole + 64) == (void *)p);
    whole[r->size - 1] = 0x3C;
    CHECK(dp_rkey_ptr(e->qp, r->addr + r->size - 1, r->rkey, 1) == whole + r->size - 1);

    CHECK(!dp_rkey_ptr(e->qp, r->addr - 1, r->rkey, 8));
    CHECK(!dp_rkey_ptr(e->qp, r->addr, r->rkey, r->size + 1));
    CHECK(!dp_rkey_ptr(e->qp, r->addr + r->size - 7, r->rkey, 8));
    CHECK(!dp_rkey_ptr(e->qp, r->addr + r->size + 4096, r->rkey, 1));
    CHECK(!dp_rkey_ptr(e->qp, r->addr, r->rkey, UINT64_MAX));
    CHECK(!dp_rkey_ptr(e->qp, r->addr + 8, r->rkey, UINT64_MAX - 7));
    CHECK(!dp_rkey_ptr(e->qp, UINT64_MAX - 3, r->rkey, 8));
    CHECK(!dp_rkey_ptr(e->qp, 0, r->rkey, 8));
    for (uint32_t bit = 0; bit < 32; bit++)
        CHECKF(!dp_rkey_ptr(e->qp, r->addr, r->rkey ^ 1u << bit, 8), "bit %u of the key does not count", bit);
    CHECK(!dp_rkey_ptr(e->qp, r[READ_ONLY].addr, r[READ_ONLY].rkey, 8));
    CHECK(dp_rkey_ptr(e->qp, r[WRITE_ONLY].addr, r[WRITE_ONLY].rkey, 8));
    CHECK(!dp_rkey_ptr(e->qp, r[HIDDEN].addr, r[HIDDEN].rkey, 8));
    CHECK(!dp_rkey_ptr(e->qp, r[WRITE_ONLY].addr, r->rkey, 8));
    t_sync(d->sock);
    end_reset(e);
    CHECK(!dp_rkey_ptr(e->qp, r->addr, r->rkey, 8));
}

static void ptr_right(duo *d) {
    end *e = &d->e;
    if (e->dev->caps & DP_CAP_RKEY_PTR) {
        uint64_t *p = (uint64_t *)(end_bytes(e) + 64);
        int64_t until = dp_now_ns() + poll_ns();
        while (__atomic_load_n(p, __ATOMIC_ACQUIRE) != 0x1122334455667788ull) {
            CHECKF(dp_now_ns() < until, "a store through the pointer does not show");
            sched_yield();
        }
        __atomic_store_n(p + 1, 0x8877665544332211ull, __ATOMIC_RELEASE);
    }
    t_sync(d->sock);
    if (e->dev->caps & DP_CAP_RKEY_PTR)
        CHECK_EQ(end_bytes(e)[e->mem->size - 1], 0x3C);
}
static const end_opts ptr_opts = {
    .regions = {{0, DP_REMOTE_READ, false}, {0, DP_REMOTE_WRITE, false}, {0, ACCESS_ALL, true}}, .n_regions = 3};
DUO_CASE(ptr_left, ptr_right, "rkey-ptr/semantics", &ptr_opts)

/* ---- order across kinds ---- */

/* Writes-with-immediate among other operations, at several sizes and alignments, because providers transfer small data
 * differently. The data of a write-with-immediate is in place when the target has polled it, perhaps no
 * sooner: from then on reads and atomics see it and later writes stand. It never undoes what lies beside it, and
 * comes after what was posted before it. */
static const struct {
    uint32_t size, align;
} imm_shapes[] = {{8, 0}, {40, 0}, {41, 0}, {8, 56}, {64, 24}, {64, 32}, {200, 40}, {4096, 16}};
enum { IMM_SHAPES = sizeof imm_shapes / sizeof *imm_shapes, AT = 8192 };

static void imm_order_left(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < IMM_SHAPES; i++) {
        uint32_t size = imm_shapes[i].size;
        uint64_t at = AT + imm_shapes[i].align;
        t_note("%u bytes at %u mod 64", size, imm_shapes[i].align);
        memset(local_bytes(e), 1, 4096);
        memset(local_bytes(e) + 4096, 2, 4096);
        dp_sge one = local_sge(e, 0, size), two = local_sge(e, 4096, size), in = local_sge(e, 16384, size);
        dp_sge word = local_sge(e, 32768, 8), beside = local_sge(e, 4096, 16);
        /* First: polled by the target, then read, added to, overwritten. */
        end_write_imm(e, &one, 1, PEER(d, at), 1, 1, 0);
        t_sync(d->sock);
        t_sync(d->sock);
        CHECK_OK(dp_post_read(e->qp, &in, PEER(d, at), 2, DP_SIGNALED));
        end_sent(e, 2, DP_OP_READ);
        CHECK_BYTES(local_bytes(e) + 16384, 1, size);
        CHECK_OK(dp_post_fetch_add(e->qp, &word, PEER(d, at), 1, 3, DP_SIGNALED));
        end_sent(e, 3, DP_OP_FETCH_ADD);
        CHECK_EQ(*(uint64_t *)(local_bytes(e) + 32768), 0x0101010101010101ull);
        end_write(e, &two, 1, PEER(d, at), 4, 0);
        end_write_imm(e, NULL, 0, PEER(d, 0), 2, 5, 0);
        t_sync(d->sock);
        /* Second: without a poll in between, the same bytes by a write and by two writes-with-immediate, and
         * their neighbours by later writes. */
        t_sync(d->sock);
        end_write(e, &one, 1, PEER(d, at), 6, 0);
        end_write_imm(e, &one, 1, PEER(d, at), 3, 7, 0);
        end_write_imm(e, &two, 1, PEER(d, at), 4, 8, 0);
        end_write(e, &beside, 1, PEER(d, at - 16), 9, 0);
        end_write(e, &beside, 1, PEER(d, at + size), 10, DP_SIGNALED);
        end_sent(e, 10, DP_OP_WRITE);
        t_sync(d->sock);
        t_sync(d->sock);
    }
}

static void imm_order_right(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < IMM_SHAPES; i++) {
        uint32_t size = imm_shapes[i].size;
        unsigned char *at = end_bytes(e) + AT + imm_shapes[i].align;
        t_note("%u bytes at %u mod 64", size, imm_shapes[i].align);
        CHECK_EQ(end_imm(e).imm, 1);
        t_sync(d->sock);
        t_sync(d->sock);
        CHECK_EQ(end_imm(e).imm, 2);
        CHECK_BYTES(at, 2, size);
        t_sync(d->sock);
        memset(end_bytes(e), 0, e->mem->size);
        t_sync(d->sock);
        t_sync(d->sock); /* all is posted and done */
        CHECK_EQ(end_imm(e).imm, 3);
        CHECK_EQ(end_imm(e).imm, 4);
        CHECK_BYTES(at, 2, size);
        CHECK_BYTES(at - 16, 2, 16);
        CHECK_BYTES(at + size, 2, 16);
        CHECK_BYTES(at - 32, 0, 16);
        CHECK_BYTES(at + size + 16, 0, 16);
        memset(end_bytes(e), 0, e->mem->size);
        t_sync(d->sock);
    }
}
DUO_CASE(imm_order_left, imm_order_right, "write/imm-among-others", NULL)

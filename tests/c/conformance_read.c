/* Reads, atomics, and pointers to the peer's memory. */
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

/* ---- atomics ---- */

static uint64_t word_at(end *e, uint64_t off) { return __atomic_load_n((uint64_t *)(end_bytes(e) + off), __ATOMIC_ACQUIRE); }

static uint64_t fetch_add(duo *d, uint64_t off, uint64_t add) {
    end *e = &d->e;
    uint64_t *old = (uint64_t *)(local_bytes(e) + 64);
    old[-1] = old[0] = old[1] = 0xEEEEEEEEEEEEEEEEull;
    dp_sge s = local_sge(e, 64, 8);
    CHECK_OK(dp_post_fetch_add(e->qp, &s, PEER(d, off), add, 61, DP_SIGNALED));
    end_sent(e, 61, DP_OP_FETCH_ADD);
    CHECK_EQ(old[-1], 0xEEEEEEEEEEEEEEEEull);
    CHECK_EQ(old[1], 0xEEEEEEEEEEEEEEEEull);
    return old[0];
}

static const struct {
    uint64_t add, old, now;
} atomics[] = {
    {5, 0, 5},
    {0, 5, 5},
    {UINT64_MAX, 5, 4}, /* minus one */
    {0x8000000000000000ull, 4, 0x8000000000000004ull},
    {0x8000000000000000ull, 0x8000000000000004ull, 4}, /* wraps */
    {0xFFFFFFFFull << 32, 4, 0xFFFFFFFF00000004ull},
    {0xFFFFFFFCull, 0xFFFFFFFF00000004ull, 0}, /* carries into the upper half, and wraps */
};
enum { ATOMICS = sizeof atomics / sizeof *atomics };

static void atomics_left(duo *d) {
    for (uint64_t off = 0; off < 65536; off += 32768 - 8 + (off ? 8 : 0)) /* 0, 32760, 65528: the last word too */
        for (int i = 0; i < ATOMICS; i++) {
            t_note("step %d at %llu", i, (unsigned long long)off);
            uint64_t old = fetch_add(d, off, atomics[i].add);
            CHECK_EQ(old, atomics[i].old);
            t_sync(d->sock);
            t_sync(d->sock);
        }
}

static void atomics_right(duo *d) {
    for (uint64_t off = 0; off < 65536; off += 32768 - 8 + (off ? 8 : 0))
        for (int i = 0; i < ATOMICS; i++) {
            t_note("step %d at %llu", i, (unsigned long long)off);
            t_sync(d->sock);
            CHECK_EQ(word_at(&d->e, off), atomics[i].now);
            if (off)
                CHECK_EQ(word_at(&d->e, off - 8), 0);
            if (off < 65528)
                CHECK_EQ(word_at(&d->e, off + 8), 0);
            t_sync(d->sock);
        }
}
DUO_CASE(atomics_left, atomics_right, "atomic/results", NULL)

/* Several queue pairs, from threads or processes, at the same word: sums are exact. */
enum { CONTENDERS = 3 };

static void contend(int sock, void *arg) {
    int index = *(int *)arg;
    duo d = {.sock = sock};
    t_name(index == 0 ? "contender 0" : index == 1 ? "contender 1" : "contender 2");
    end_open(&d.e, NULL, NULL);
    duo_connect(&d);
    t_sync(sock); /* all start together */
    long n = t_pick(200000, 400);
    uint64_t last = 0;
    for (long i = 0; i < n; i++) {
        uint64_t old = fetch_add(&d, 0, (uint64_t)index + 1);
        CHECKF(i == 0 || old > last, "the sum went from %llu to %llu", (unsigned long long)last, (unsigned long long)old);
        last = old;
    }
    t_sync(sock);
    t_sync(sock);
    end_close(&d.e);
}

static void contention(bool process) {
    t_peer p[CONTENDERS];
    int index[CONTENDERS];
    for (int i = 0; i < CONTENDERS; i++) {
        index[i] = i;
        t_peer_start(&p[i], process, contend, &index[i]);
    }
    end hub;
    end_open(&hub, NULL, NULL);
    dp_cq *cq = NULL;
    dp_qp *qp[CONTENDERS];
    dp_error err = {0};
    CHECK_OK_ERR(dp_cq_create(hub.dev, 64, &cq, &err), err);
    end_attend(cq);
    for (int i = 0; i < CONTENDERS; i++) {
        dp_qp_attr attr = {.max_send = 4, .max_recv = 4, .expose = {hub.mem}, .n_expose = 1};
        CHECK_OK_ERR(dp_qp_create(hub.dom, cq, &attr, &qp[i], &err), err);
        card mine, theirs;
        end_card(&hub, &mine); /* for the regions */
        mine.blob_len = sizeof mine.blob;
        CHECK_OK_ERR(dp_qp_export(qp[i], mine.blob, &mine.blob_len, &err), err);
        t_send(p[i].sock, &mine, sizeof mine);
        t_recv(p[i].sock, &theirs, sizeof theirs);
        CHECK_OK_ERR(dp_qp_connect(qp[i], theirs.blob, theirs.blob_len, &err), err);
        t_sync(p[i].sock);
    }
    for (int round = 0; round < 2; round++) /* they start, they are done */
        for (int i = 0; i < CONTENDERS; i++)
            t_sync(p[i].sock);
    uint64_t n = (uint64_t)t_pick(200000, 400);
    CHECK_EQ(word_at(&hub, 0), n * (1 + 2 + 3));
    for (int i = 0; i < CONTENDERS; i++)
        t_sync(p[i].sock);
    for (int i = 0; i < CONTENDERS; i++) {
        t_peer_join(&p[i]);
        dp_qp_destroy(qp[i]);
    }
    end_unattend(cq);
    dp_cq_destroy(cq);
    end_close(&hub);
}
T_CASE(contention_threads, "atomic/contention@two-devices", .seconds = 20, .verbs_seconds = 60) { contention(false); }
T_CASE(contention_processes, "atomic/contention@processes", .seconds = 20, .verbs_seconds = 60) { contention(true); }

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

/* Writes-with-immediate among other operations, at several sizes and alignments, since providers carry small data
 * in other ways. The data of a write-with-immediate is in place when the target has polled it, perhaps no
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

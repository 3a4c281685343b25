/* Accesses that are refused: wrong keys, bounds, rights, alignment. Each refusal is an immediate DP_INVALID or
 * a completion with DP_INVALID and the post's wr_id. It changes no memory on either side, causes no successful completion at the
 * target, and leaves queue pairs that can be reset and reconnected. */
#include <stdlib.h>

#include "ends.h"

enum { WHOLE, READ_ONLY, WRITE_ONLY, HIDDEN, REGIONS };
enum key { RIGHT_KEY, KEY_ZERO, KEY_ONES, KEY_BIT0, KEY_BIT8, KEY_BIT31, KEY_OF_WRITE_ONLY };

typedef struct attack {
    const char *what;
    dp_op op; /* RECV_IMM stands for write-with-immediate */
    int region;
    enum key key;
    enum { OFF_START, OFF_END, OFF_ABSOLUTE } from;
    int64_t off;
    uint32_t len;
    bool shm_only; /* verbs exposes the whole domain */
} attack;

#define W DP_OP_WRITE
#define I DP_OP_RECV_IMM
#define R DP_OP_READ
#define F DP_OP_FETCH_ADD
#define C DP_OP_COMPARE_SWAP

static const attack attacks[] = {
    {"write, key 0", W, WHOLE, KEY_ZERO, OFF_START, 0, 8, false},
    {"write, key ~0", W, WHOLE, KEY_ONES, OFF_START, 0, 8, false},
    {"write, key with bit 0 turned", W, WHOLE, KEY_BIT0, OFF_START, 0, 8, false},
    {"write, key with bit 8 turned", W, WHOLE, KEY_BIT8, OFF_START, 0, 8, false},
    {"write, key with bit 31 turned", W, WHOLE, KEY_BIT31, OFF_START, 0, 64, false},
    {"write, key of another region", W, WHOLE, KEY_OF_WRITE_ONLY, OFF_START, 0, 8, false},
    {"imm, bad key", I, WHOLE, KEY_BIT0, OFF_START, 0, 8, false},
    {"imm of 4096, bad key", I, WHOLE, KEY_BIT31, OFF_START, 0, 4096, false},
    {"read, bad key", R, WHOLE, KEY_BIT0, OFF_START, 0, 8, false},
    {"fetch-and-add, bad key", F, WHOLE, KEY_BIT0, OFF_START, 0, 8, false},
    {"compare-and-swap, bad key", C, WHOLE, KEY_BIT0, OFF_START, 0, 8, false},

    {"write across the start", W, WHOLE, RIGHT_KEY, OFF_START, -4, 8, false},
    {"write just before", W, WHOLE, RIGHT_KEY, OFF_START, -8, 8, false},
    {"write across the end", W, WHOLE, RIGHT_KEY, OFF_END, -4, 8, false},
    {"write just behind", W, WHOLE, RIGHT_KEY, OFF_END, 0, 1, false},
    {"write a page behind", W, WHOLE, RIGHT_KEY, OFF_END, 4096, 8, false},
    {"write 4 GiB too far", W, WHOLE, RIGHT_KEY, OFF_START, 1ll << 32, 8, false},
    {"write 4 GiB too low", W, WHOLE, RIGHT_KEY, OFF_START, -(1ll << 32), 8, false},
    {"write 2^47 too far", W, WHOLE, RIGHT_KEY, OFF_START, 1ll << 47, 8, false},
    {"write at address 0", W, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, 0, 8, false},
    {"write over the end of the address space", W, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, -4, 8, false},
    {"write longer than the region", W, WHOLE, RIGHT_KEY, OFF_START, 0, 65537, false},
    {"imm across the end", I, WHOLE, RIGHT_KEY, OFF_END, -63, 64, false},
    {"imm over the end of the address space", I, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, -8, 64, false},
    {"imm across the start", I, WHOLE, RIGHT_KEY, OFF_START, -1, 64, false},
    {"read across the end", R, WHOLE, RIGHT_KEY, OFF_END, -4, 8, false},
    {"read across the start", R, WHOLE, RIGHT_KEY, OFF_START, -4, 8, false},
    {"read over the end of the address space", R, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, -4, 8, false},
    {"fetch-and-add behind", F, WHOLE, RIGHT_KEY, OFF_END, 0, 8, false},
    {"compare-and-swap behind", C, WHOLE, RIGHT_KEY, OFF_END, 0, 8, false},
    {"fetch-and-add before", F, WHOLE, RIGHT_KEY, OFF_START, -8, 8, false},
    {"compare-and-swap before", C, WHOLE, RIGHT_KEY, OFF_START, -8, 8, false},
    {"fetch-and-add at the last word of the address space", F, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, -8, 8, false},
    {"compare-and-swap at the last word of the address space", C, WHOLE, RIGHT_KEY, OFF_ABSOLUTE, -8, 8, false},

    {"fetch-and-add misaligned by 1", F, WHOLE, RIGHT_KEY, OFF_START, 1, 8, false},
    {"compare-and-swap misaligned by 1", C, WHOLE, RIGHT_KEY, OFF_START, 1, 8, false},
    {"fetch-and-add misaligned by 4", F, WHOLE, RIGHT_KEY, OFF_START, 4, 8, false},
    {"compare-and-swap misaligned by 4", C, WHOLE, RIGHT_KEY, OFF_START, 4, 8, false},
    {"fetch-and-add across the end", F, WHOLE, RIGHT_KEY, OFF_END, -4, 8, false},
    {"compare-and-swap across the end", C, WHOLE, RIGHT_KEY, OFF_END, -4, 8, false},

    {"write to read-only", W, READ_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},
    {"imm to read-only", I, READ_ONLY, RIGHT_KEY, OFF_START, 0, 64, false},
    {"fetch-and-add to read-only", F, READ_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},
    {"compare-and-swap to read-only", C, READ_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},
    {"read of write-only", R, WRITE_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},
    {"fetch-and-add to write-only", F, WRITE_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},
    {"compare-and-swap to write-only", C, WRITE_ONLY, RIGHT_KEY, OFF_START, 0, 8, false},

    {"write to a region not exposed", W, HIDDEN, RIGHT_KEY, OFF_START, 0, 8, true},
    {"imm to a region not exposed", I, HIDDEN, RIGHT_KEY, OFF_START, 0, 8, true},
    {"read of a region not exposed", R, HIDDEN, RIGHT_KEY, OFF_START, 0, 8, true},
    {"fetch-and-add to a region not exposed", F, HIDDEN, RIGHT_KEY, OFF_START, 0, 8, true},
    {"compare-and-swap to a region not exposed", C, HIDDEN, RIGHT_KEY, OFF_START, 0, 8, true},
};
enum { ATTACKS = sizeof attacks / sizeof *attacks };

static uint32_t attack_key(const attack *a, const reg_ref *regions) {
    uint32_t key = regions[a->region].rkey;
    switch (a->key) {
    case RIGHT_KEY: return key;
    case KEY_ZERO: return 0;
    case KEY_ONES: return UINT32_MAX;
    case KEY_BIT0: return key ^ 1;
    case KEY_BIT8: return key ^ 1u << 8;
    case KEY_BIT31: return key ^ 1u << 31;
    case KEY_OF_WRITE_ONLY: return regions[WRITE_ONLY].rkey;
    }
    return key;
}

static int post_attack(duo *d, const attack *a, uint64_t wr_id, uint32_t flags) {
    end *e = &d->e;
    const reg_ref *r = &d->peer.regions[a->region];
    uint64_t base = a->from == OFF_START ? r->addr : a->from == OFF_END ? r->addr + r->size : 0;
    uint64_t at = base + (uint64_t)a->off;
    uint32_t key = attack_key(a, d->peer.regions);
    dp_sge s = local_sge(e, 4096, a->len);
    switch (a->op) {
    case W: return dp_post_write(e->qp, &s, 1, at, key, wr_id, flags);
    case I: return dp_post_write_imm(e->qp, &s, 1, at, key, 0xBAD, wr_id, flags);
    case R: return dp_post_read(e->qp, &s, at, key, wr_id, flags);
    case C: return dp_post_compare_swap(e->qp, &s, at, key, 0xEEEEEEEEEEEEEEEEull, 1, wr_id, flags); /* the present value */
    default: return dp_post_fetch_add(e->qp, &s, at, key, 1, wr_id, flags);
    }
}

static void attacks_left(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < ATTACKS; i++) {
        const attack *a = &attacks[i];
        if (a->shm_only && t_is_verbs())
            continue;
        t_note("%s", a->what);
        memset(local_bytes(e), 0x99, e->local->size);
        t_sync(d->sock);
        uint64_t wr_id = 0xBAD0000 + (uint64_t)i;
        int st = post_attack(d, a, wr_id, i % 2 ? DP_SIGNALED : 0); /* a failure completes, signalled or not */
        if (st == DP_OK) {
            dp_wc wc;
            CHECKF(end_poll_sent(e, &wc, poll_ns()), "accepted, and no completion");
            CHECK_EQ(wc.wr_id, wr_id);
            CHECK_STATUS(wc.status, DP_INVALID);
            CHECK_EQ(e->qp->state, DP_QP_ERROR);
            dp_sge s = local_sge(e, 0, 8);
            CHECK_STATUS(dp_post_write(e->qp, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, 1, 0), DP_CONNECTION);
            CHECK_STATUS(dp_post_write_imm(e->qp, &s, 1, d->peer.regions[0].addr, d->peer.regions[0].rkey, 1, 1, 0),
                         DP_CONNECTION);
        } else {
            CHECK_STATUS(st, DP_INVALID);
        }
        CHECK_BYTES(local_bytes(e), 0x99, e->local->size); /* a refused read writes nothing */
        t_sync(d->sock);
        t_sync(d->sock);
        duo_reconnect(d);
        duo_ping(d);
    }
}

static void attacks_right(duo *d) {
    end *e = &d->e;
    for (int i = 0; i < ATTACKS; i++) {
        if (attacks[i].shm_only && t_is_verbs())
            continue;
        t_note("%s", attacks[i].what);
        for (int k = 0; k < REGIONS; k++)
            memset(e->regions[k]->addr, 0xEE, e->regions[k]->size);
        t_sync(d->sock);
        t_sync(d->sock);
        for (int k = 0; k < REGIONS; k++)
            CHECK_BYTES(e->regions[k]->addr, 0xEE, e->regions[k]->size);
        dp_wc wc;
        for (int k = 0; k < 100; k++)
            if (dp_cq_poll(e->cq, &wc, 1) == 1)
                CHECKF(wc.status != DP_OK, "the target got a good completion: op %u imm %#x", wc.op, wc.imm);
        t_sync(d->sock);
        duo_reconnect(d);
        duo_ping(d);
    }
}
static const end_opts attack_opts = {
    .size = 65536,
    .local_size = 65536 + 3 * 4096,
    .max_send = 8,
    .max_recv = 8,
    .regions = {{0, DP_REMOTE_READ, false}, {0, DP_REMOTE_WRITE, false}, {0, ACCESS_ALL, true}},
    .n_regions = 3,
};
DUO_CASE(attacks_left, attacks_right, "access/refused", &attack_opts, .seconds = 20, .verbs_seconds = 60)

/* Permitted accesses, to the last byte. Without this, a provider that refuses everything would pass the case above. */
static void allowed_left(duo *d) {
    end *e = &d->e;
    const reg_ref *r = d->peer.regions;
    t_sync(d->sock); /* the read-only region is filled */
    memset(local_bytes(e), 0x21, 4096);
    dp_sge s = local_sge(e, 0, 16), in = local_sge(e, 4096, 16), word = local_sge(e, 8192, 8);
    end_write(e, &s, 1, r[WHOLE].addr, r[WHOLE].rkey, 1, DP_SIGNALED);
    end_sent(e, 1, DP_OP_WRITE);
    end_write(e, &s, 1, r[WHOLE].addr + r[WHOLE].size - 16, r[WHOLE].rkey, 2, DP_SIGNALED);
    end_sent(e, 2, DP_OP_WRITE);
    CHECK_OK(dp_post_read(e->qp, &in, r[READ_ONLY].addr + r[READ_ONLY].size - 16, r[READ_ONLY].rkey, 3, DP_SIGNALED));
    end_sent(e, 3, DP_OP_READ);
    CHECK_BYTES(local_bytes(e) + 4096, 0xEE, 16);
    end_write_imm(e, &s, 1, r[WRITE_ONLY].addr + r[WRITE_ONLY].size - 16, r[WRITE_ONLY].rkey, 4, 4, DP_SIGNALED);
    end_sent(e, 4, DP_OP_WRITE);
    CHECK_OK(dp_post_fetch_add(e->qp, &word, r[WHOLE].addr + r[WHOLE].size - 8, r[WHOLE].rkey, 1, 5, DP_SIGNALED));
    end_sent(e, 5, DP_OP_FETCH_ADD);
    CHECK_EQ(*(uint64_t *)(local_bytes(e) + 8192), 0x2121212121212121ull);
    CHECK_OK(dp_post_compare_swap(e->qp, &word, r[WHOLE].addr + r[WHOLE].size - 16, r[WHOLE].rkey, 0x2121212121212121ull, 7, 6, DP_SIGNALED));
    end_sent(e, 6, DP_OP_COMPARE_SWAP);
    CHECK_EQ(*(uint64_t *)(local_bytes(e) + 8192), 0x2121212121212121ull);
    t_sync(d->sock);
}

static void allowed_right(duo *d) {
    end *e = &d->e;
    memset(e->regions[READ_ONLY]->addr, 0xEE, e->regions[READ_ONLY]->size);
    t_sync(d->sock);
    CHECK_EQ(end_imm(e).imm, 4);
    t_sync(d->sock);
    CHECK_BYTES(end_bytes(e), 0x21, 16);
    CHECK_BYTES(end_bytes(e) + 16, 0, e->mem->size - 32);
    CHECK_EQ(*(uint64_t *)(end_bytes(e) + e->mem->size - 8), 0x2121212121212122ull);
    CHECK_EQ(*(uint64_t *)(end_bytes(e) + e->mem->size - 16), 7);
    CHECK_BYTES((unsigned char *)e->regions[WRITE_ONLY]->addr + e->regions[WRITE_ONLY]->size - 16, 0x21, 16);
}

DUO_CASE(allowed_left, allowed_right, "access/allowed", &attack_opts)

/* Valid posts before the failing one take effect, posts after it do not, and each signalled one completes. */
static void flush_left(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < 10; round++) {
        const reg_ref *r = d->peer.regions;
        memset(local_bytes(e), 0x31, 64);
        memset(local_bytes(e) + 64, 0x32, 64);
        t_sync(d->sock);
        dp_sge before = local_sge(e, 0, 64), behind = local_sge(e, 64, 64);
        CHECK_OK(dp_post_write(e->qp, &before, 1, r->addr, r->rkey, 1, DP_SIGNALED));
        int st = dp_post_write(e->qp, &before, 1, r->addr, r->rkey ^ 1, 2, 0);
        uint64_t expect[5] = {1};
        int n = 1;
        if (st == DP_OK)
            expect[n++] = 2;
        else
            CHECK_STATUS(st, DP_INVALID);
        for (uint64_t id = 3; id < 6 && st == DP_OK; id++) {
            int later = dp_post_write(e->qp, &behind, 1, r->addr + 64, r->rkey, id, DP_SIGNALED);
            CHECKF(later == DP_OK || later == DP_CONNECTION, "status %s", dp_status_text(later));
            if (later == DP_OK)
                expect[n++] = id;
        }
        for (int i = 0; i < n; i++) {
            dp_wc wc;
            t_note("round %d completion %d of %d", round, i, n);
            CHECKF(end_poll_sent(e, &wc, poll_ns()), "post %llu was accepted and never completes", (unsigned long long)expect[i]);
            CHECK_EQ(wc.wr_id, expect[i]);
            if (wc.wr_id == 1)
                CHECK_STATUS(wc.status, DP_OK);
            else if (wc.wr_id == 2)
                CHECK_STATUS(wc.status, DP_INVALID);
            else
                CHECK_STATUS(wc.status, DP_CONNECTION);
        }
        t_sync(d->sock);
        t_sync(d->sock);
        duo_reconnect(d);
    }
    duo_ping(d);
}

static void flush_right(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < 10; round++) {
        memset(end_bytes(e), 0, 256);
        t_sync(d->sock);
        t_sync(d->sock);
        CHECK_BYTES(end_bytes(e), 0x31, 64);
        CHECK_BYTES(end_bytes(e) + 64, 0, 192);
        t_sync(d->sock);
        duo_reconnect(d);
    }
    duo_ping(d);
}
DUO_CASE(flush_left, flush_right, "access/posts-around-a-refusal", NULL)

/* Writes and writes-with-immediate: data, bounds, order, completions, full queues. */
#include <sched.h>
#include <stdlib.h>

#include "ends.h"

#define PEER(d, off) (d)->peer.regions[0].addr + (off), (d)->peer.regions[0].rkey

/* ---- sizes, alignments, pieces ---- */

enum { MARGIN = 4096, BIG = 1 << 20 };

static const uint32_t sizes[] = {0, 1, 8, 39, 40, 41, 42, 63, 64, 65, 4096, 65536, BIG};

typedef struct shape {
    uint32_t size, align, cut; /* cut: bytes of the first of two pieces; UINT32_MAX: one piece */
    bool plain;                /* a write, and a write-with-immediate without data behind it */
} shape;

/* The next combination, which is the same on both sides; false at the end. */
static bool next_shape(unsigned *i, shape *s) {
    for (;;) {
        unsigned k = (*i)++;
        unsigned size = k / 256, align = k / 4 % 64, form = k % 4;
        if (size >= sizeof sizes / sizeof *sizes)
            return false;
        *s = (shape){sizes[size], align, UINT32_MAX, form & 1};
        if (s->size > 65 && align != 0 && align != 1 && align != 8 && align != 63)
            continue;
        if (t_is_verbs() && align % 8 > 1 && s->size != 41)
            continue;
        if (t_is_verbs() && s->size > 4096 && (align > 1 || form == 3))
            continue;
        if (form & 2)
            s->cut = s->size ? (k * 7 + align) % (s->size + 1) : 0;
        t_note("size %u, target at %u mod 64, cut %u%s", s->size, s->align, s->cut, s->plain ? ", write + imm" : "");
        return true;
    }
}

static void shapes_left(duo *d) {
    end *e = &d->e;
    shape s;
    for (unsigned i = 0; next_shape(&i, &s);) {
        uint64_t id = 0xF000000000000ull + i;
        fill_pattern(local_bytes(e) + 5, s.size, i);
        /* The two pieces are separate, the second one first in memory. */
        dp_sge sge[2] = {local_sge(e, 5, s.size), {0}};
        int n = 1;
        if (s.cut != UINT32_MAX) {
            uint64_t second = BIG + 128 + 3;
            memcpy(local_bytes(e) + second, local_bytes(e) + 5 + s.cut, s.size - s.cut);
            memset(local_bytes(e) + 5 + s.cut, 0xDD, s.size - s.cut);
            sge[0] = local_sge(e, 5, s.cut);
            sge[1] = local_sge(e, second, s.size - s.cut);
            n = 2;
        } else if (s.size == 0 && i % 8 < 4) {
            n = 0;
        }
        uint64_t off = MARGIN + s.align;
        if (s.plain) {
            end_write(e, sge, n, PEER(d, off), id, i % 3 ? 0 : DP_SIGNALED);
            end_write_imm(e, NULL, 0, PEER(d, off), i, id + 1, DP_SIGNALED);
            if (i % 3 == 0)
                end_sent(e, id, DP_OP_WRITE);
            end_sent(e, id + 1, DP_OP_WRITE);
        } else {
            end_write_imm(e, sge, n, PEER(d, off), i, id, DP_SIGNALED);
            end_sent(e, id, DP_OP_WRITE);
        }
        duo_await(d);
    }
}

static void shapes_right(duo *d) {
    end *e = &d->e;
    unsigned char *mem = end_bytes(e);
    memset(mem, 0xEE, e->mem->size);
    shape s;
    for (unsigned i = 0; next_shape(&i, &s);) {
        dp_wc wc = end_imm(e);
        /* No waiting here: the data is complete when the completion is polled. */
        unsigned char *at = mem + MARGIN + s.align;
        CHECK_PATTERN(at, s.size, i);
        CHECK_EQ(wc.imm, i);
        CHECK_EQ(wc.byte_len, s.plain ? 0 : s.size);
        CHECK_BYTES(at - 64, 0xEE, 64);
        CHECK_BYTES(at + s.size, 0xEE, 64);
        memset(at, 0xEE, s.size);
        if (i % 64 == 0)
            CHECK_BYTES(mem, 0xEE, s.size > 65536 ? MARGIN : e->mem->size);
        duo_ack(d);
    }
    CHECK_BYTES(mem, 0xEE, e->mem->size);
}
static const end_opts shape_opts = {.size = BIG + 2 * MARGIN, .local_size = 2 * BIG + 8192};
DUO_CASE(shapes_left, shapes_right, "write/sizes-and-alignments", &shape_opts, .seconds = 30, .verbs_seconds = 90)

/* ---- the immediate ---- */

static uint32_t imm_value(int i) {
    if (i < 32)
        return 1u << i;
    if (i < 64)
        return ~(1u << (i - 32));
    return i == 64 ? 0 : i == 65 ? UINT32_MAX : 0x01020304;
}

static void imm_left(duo *d) {
    for (int i = 0; i < 67; i++) {
        dp_sge s = local_sge(&d->e, 0, 8);
        end_write_imm(&d->e, &s, i % 2, PEER(d, 0), imm_value(i), 0, 0);
        duo_await(d);
    }
}

static void imm_right(duo *d) {
    for (int i = 0; i < 67; i++) {
        t_note("value %d", i);
        dp_wc wc = end_imm(&d->e);
        CHECK_EQ(wc.imm, imm_value(i));
        CHECK_EQ(wc.byte_len, i % 2 * 8);
        duo_ack(d);
    }
}
DUO_CASE(imm_left, imm_right, "write/imm-bits", NULL)

/* A write of no bytes needs neither address nor key (InfiniBand specification, 9.4.3). */
static void empty_left(duo *d) {
    end *e = &d->e;
    end_write(e, NULL, 0, 0, 0, 1, DP_SIGNALED);
    end_sent(e, 1, DP_OP_WRITE);
    end_write_imm(e, NULL, 0, 0, 0, 99, 2, DP_SIGNALED);
    end_sent(e, 2, DP_OP_WRITE);
    duo_await(d);
}

static void empty_right(duo *d) {
    dp_wc wc = end_imm(&d->e);
    CHECK_EQ(wc.imm, 99);
    CHECK_EQ(wc.byte_len, 0);
    duo_ack(d);
}
DUO_CASE(empty_left, empty_right, "write/nothing-needs-no-key", NULL)

/* ---- sources ---- */

/* Data that the provider copies at once may be overwritten at once: inline data, or everything with
 * DP_CAP_SYNC_SOURCE. The data is in unregistered memory. */
static void source_left(duo *d) {
    end *e = &d->e;
    uint32_t most = e->dev->caps & DP_CAP_SYNC_SOURCE ? 4096 : e->qp->max_inline;
    unsigned char *stack = malloc(4096);
    if (most > 4096)
        most = 4096;
    t_send(d->sock, &most, sizeof most);
    for (uint32_t i = 1; i <= most; i += i < 70 ? 1 : 61) {
        t_note("%u bytes of %u", i, most);
        fill_pattern(stack, i, i);
        dp_sge s[2] = {{stack, i / 3, 0}, {stack + i / 3, i - i / 3, 0}};
        end_write_imm(e, s, 2, PEER(d, 0), i, i, DP_SIGNALED);
        memset(stack, 0xFF, i);
        end_sent(e, i, DP_OP_WRITE);
        duo_await(d);
    }
    free(stack);
}

static void source_right(duo *d) {
    uint32_t most;
    t_recv(d->sock, &most, sizeof most);
    for (uint32_t i = 1; i <= most; i += i < 70 ? 1 : 61) {
        dp_wc wc = end_imm(&d->e);
        CHECK_EQ(wc.byte_len, i);
        CHECK_PATTERN(end_bytes(&d->e), i, i);
        duo_ack(d);
    }
}
static const end_opts source_opts = {.max_inline = 256};
DUO_CASE(source_left, source_right, "write/source-reusable-at-once", &source_opts)

/* From memory that the caller registered. */
static void registered_left(duo *d) {
    end *e = &d->e;
    unsigned char *own = malloc(70000);
    dp_mem *m = NULL;
    dp_error err = {0};
    CHECK_OK_ERR(dp_mem_register(e->dom, own, 70000, 0, &m, &err), err);
    fill_pattern(own + 3, 60000, 2);
    dp_sge s = {own + 3, 60000, m->lkey};
    end_write_imm(e, &s, 1, PEER(d, 1), 7, 8, DP_SIGNALED);
    end_sent(e, 8, DP_OP_WRITE);
    /* And back into it. */
    memset(own, 0xEE, 70000);
    dp_sge r = {own + 9, 60000, m->lkey};
    CHECK_OK(dp_post_read(e->qp, &r, PEER(d, 1), 9, DP_SIGNALED));
    end_sent(e, 9, DP_OP_READ);
    CHECK_PATTERN(own + 9, 60000, 2);
    CHECK_BYTES(own, 0xEE, 9);
    CHECK_BYTES(own + 60009, 0xEE, 70000 - 60009);
    duo_await(d);
    dp_mem_free(m);
    free(own);
}

static void registered_right(duo *d) {
    CHECK_EQ(end_imm(&d->e).byte_len, 60000);
    CHECK_PATTERN(end_bytes(&d->e) + 1, 60000, 2);
    duo_ack(d);
}
DUO_CASE(registered_left, registered_right, "write/registered-source", NULL)

/* ---- arguments ---- */

static void refused_left(duo *d) {
    end *e = &d->e;
    dp_sge s[3] = {local_sge(e, 0, 8), local_sge(e, 8, 8), local_sge(e, 16, 8)};
    CHECK_STATUS(dp_post_write(e->qp, s, 3, PEER(d, 0), 1, 0), DP_INVALID);
    CHECK_STATUS(dp_post_write_imm(e->qp, s, 3, PEER(d, 0), 1, 1, 0), DP_INVALID);
    CHECK_STATUS(dp_post_write(e->qp, s, -1, PEER(d, 0), 1, 0), DP_INVALID);
    CHECK_STATUS(dp_post_write_imm(e->qp, s, -1, PEER(d, 0), 1, 1, 0), DP_INVALID);
    if (e->dev->max_msg < UINT32_MAX) {
        dp_sge huge = {local_bytes(e), e->dev->max_msg + 1, e->local->lkey};
        CHECK_STATUS(dp_post_write(e->qp, &huge, 1, PEER(d, 0), 1, 0), DP_INVALID);
    }
    end_quiet(e, 5);
    CHECK_EQ(e->qp->state, DP_QP_CONNECTED); /* no effect: the connection still works */
    duo_ping(d);
    /* The sum of two lengths does not wrap to something small. (This may count as out of bounds, which ends the
     * connection.) */
    dp_sge wrap[2] = {{local_bytes(e), 0xFFFFFFF0u, e->local->lkey}, {local_bytes(e), 0x20, e->local->lkey}};
    for (int i = 0; i < 2; i++) {
        int st = i ? dp_post_write_imm(e->qp, wrap, 2, PEER(d, 0), 1, 1, 0) : dp_post_write(e->qp, wrap, 2, PEER(d, 0), 1, 0);
        dp_wc wc;
        if (st == DP_OK) {
            CHECKF(end_poll_sent(e, &wc, poll_ns()), "no completion of a write of more than 4 GiB");
            CHECK_STATUS(wc.status, DP_INVALID);
        } else {
            CHECKF(st == DP_INVALID || (i && st == DP_CONNECTION), "status %d (%s)", st, dp_status_text(st));
        }
    }
    duo_reconnect(d);
    duo_ping(d);
}

static void refused_right(duo *d) {
    duo_ping(d);
    duo_reconnect(d);
    duo_ping(d);
    CHECK_BYTES(end_bytes(&d->e), 0, 60000);
}
DUO_CASE(refused_left, refused_right, "write/bad-arguments", NULL)

/* ---- order ---- */

/* Many writes to the same words, then an immediate: the last values remain, and no word is torn. */
static void order_left(duo *d) {
    end *e = &d->e;
    long rounds = t_pick(300, 15);
    uint64_t value = 0;
    for (long r = 0; r < rounds; r++) {
        uint64_t ring = 0; /* sources of unsignalled writes must stay as they are until the acknowledgement */
        for (int pass = 0; pass < 10; pass++)
            for (uint64_t word = 0; word < 16; word++) {
                uint64_t *src = (uint64_t *)(local_bytes(e) + ring++ * 8);
                *src = ++value;
                dp_sge s = {src, 8, e->local->lkey};
                end_write(e, &s, 1, PEER(d, word * 64), value, 0);
            }
        end_write_imm(e, NULL, 0, PEER(d, 0), (uint32_t)r, 0, 0);
        duo_await(d);
    }
}

static void order_right(duo *d) {
    long rounds = t_pick(300, 15);
    uint64_t value = 0;
    for (long r = 0; r < rounds; r++) {
        CHECK_EQ(end_imm(&d->e).imm, r);
        value += 160;
        for (uint64_t word = 0; word < 16; word++)
            CHECK_EQ(*(uint64_t *)(end_bytes(&d->e) + word * 64), value - 15 + word);
        duo_ack(d);
    }
}
DUO_CASE(order_left, order_right, "write/order", NULL)

/* A stream of numbered 1 KB writes-with-immediate within the peer's receives; each is complete and in its
 * order when its completion is polled. */
enum { WINDOW = 32, ITEM = 1024 };

static void stream_left(duo *d) {
    end *e = &d->e;
    uint32_t n = (uint32_t)t_pick(30000, 600);
    uint32_t acked = 0;
    for (uint32_t i = 0; i < n; i++) {
        while (i - acked >= WINDOW) {
            dp_wc wc = end_imm(e);
            acked = wc.imm;
        }
        uint32_t *src = (uint32_t *)(local_bytes(e) + i % WINDOW * ITEM);
        for (int k = 0; k < ITEM / 4; k++)
            src[k] = i;
        dp_sge s = {src, ITEM, e->local->lkey};
        CHECK_OK(dp_post_write_imm(e->qp, &s, 1, PEER(d, i % WINDOW * ITEM), i, i, 0));
    }
    while (acked < n)
        acked = end_imm(e).imm;
}

static void stream_right(duo *d) {
    end *e = &d->e;
    uint32_t n = (uint32_t)t_pick(30000, 600);
    for (uint32_t i = 0; i < n; i++) {
        dp_wc wc = end_imm(e);
        CHECK_EQ(wc.imm, i);
        CHECK_EQ(wc.byte_len, ITEM);
        uint32_t *got = (uint32_t *)(end_bytes(e) + i % WINDOW * ITEM);
        for (int k = 0; k < ITEM / 4; k++)
            CHECK_EQ(got[k], i);
        if (i % 8 == 7 || i + 1 == n)
            end_write_imm(e, NULL, 0, PEER(d, 0), i + 1, 0, 0);
    }
}
/* max_send exceeds the window by what the provider may keep unreclaimed: within credits, posts never fail. */
static const end_opts stream_opts = {.max_send = 256, .max_recv = 64};
DUO_CASE(stream_left, stream_right, "write/stream", &stream_opts, .verbs_seconds = 60)

/* One write at a time to a side that spins: the last byte is there as soon as the completion is polled. */
enum { WHOLE = 8192 };

static void complete_left(duo *d) {
    end *e = &d->e;
    for (uint32_t i = 0; i < t_pick(20000, 200); i++) {
        memset(local_bytes(e), (int)(i & 0xff), WHOLE);
        dp_sge s = local_sge(e, 0, WHOLE);
        end_write_imm(e, &s, 1, PEER(d, 8), i, 0, 0);
        duo_await(d);
    }
}

static void complete_right(duo *d) {
    end *e = &d->e;
    for (uint32_t i = 0; i < t_pick(20000, 200); i++) {
        dp_wc wc;
        int64_t until = dp_now_ns() + poll_ns();
        for (unsigned k = 1; dp_cq_poll(e->cq, &wc, 1) == 0; k++) {
            dp_cpu_pause();
            if (k % 1024 == 0) { /* the other side may wait for this core */
                sched_yield();
                CHECKF(dp_now_ns() < until, "write %u does not arrive", i);
            }
        }
        unsigned char last = ((volatile unsigned char *)end_bytes(e))[8 + WHOLE - 1];
        unsigned char middle = ((volatile unsigned char *)end_bytes(e))[8 + WHOLE / 2];
        CHECK_OK(wc.status);
        CHECK_EQ(wc.imm, i);
        CHECK_EQ(wc.byte_len, WHOLE);
        CHECK_EQ(last, i & 0xff);
        CHECK_EQ(middle, i & 0xff);
        e->recvs_done++;
        end_post_recv(e);
        duo_ack(d);
    }
}
DUO_CASE(complete_left, complete_right, "write/complete-when-polled", NULL)

/* ---- completions ---- */

static void signals_left(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < t_pick(200, 20); round++) {
        uint64_t want[32];
        int n = 0;
        for (uint64_t i = 0; i < 32; i++) {
            dp_sge s = local_sge(e, i * 8, 8);
            uint64_t id = i == 0 ? 0 : i == 1 ? 0xFFFFFFFFFFFFFFFFull : t_random() & 0x0FFFFFFFFFFFFFFFull;
            bool sig = t_random() % 2;
            if (sig)
                want[n++] = id;
            end_write(e, &s, 1, PEER(d, i * 8), id, sig ? DP_SIGNALED : 0);
        }
        for (int i = 0; i < n; i++)
            end_sent(e, want[i], DP_OP_WRITE);
    }
    end_quiet(e, 20); /* unsignalled posts never complete */
}
static void signals_right(duo *d) { end_quiet(&d->e, 20); }
DUO_CASE(signals_left, signals_right, "write/completions-of-signalled-only", NULL)

/* Signalled posts without polling: busy when the queue is full, and every accepted one completes. */
static void busy_left(duo *d) {
    end *e = &d->e;
    for (int round = 0; round < 20; round++) {
        uint64_t accepted = 0;
        int st = DP_OK;
        while (st == DP_OK && accepted < 10000) {
            dp_sge s = local_sge(e, accepted % 8 * 8, 8);
            *(uint64_t *)(uintptr_t)s.addr = accepted;
            st = dp_post_write(e->qp, &s, 1, PEER(d, accepted % 64 * 8), accepted, DP_SIGNALED);
            accepted += st == DP_OK;
        }
        CHECK_STATUS(st, DP_BUSY);
        CHECK_GE(accepted, e->qp->max_send);
        /* The completion queue has room for no more than was reserved. */
        CHECK_LE(accepted, e->qp->max_send + e->qp->max_recv);
        dp_sge s = local_sge(e, 0, 8);
        CHECK_STATUS(dp_post_write_imm(e->qp, &s, 1, PEER(d, 0), 1, 1, DP_SIGNALED), DP_BUSY);
        CHECK_STATUS(dp_post_read(e->qp, &s, PEER(d, 0), 1, DP_SIGNALED), DP_BUSY);
        CHECK_EQ(e->qp->state, DP_QP_CONNECTED);
        for (uint64_t i = 0; i < accepted; i++)
            end_sent(e, i, DP_OP_WRITE);
        end_quiet(e, 2);
        end_write(e, &s, 1, PEER(d, 0), 5, DP_SIGNALED);
        end_sent(e, 5, DP_OP_WRITE);
    }
    t_sync(d->sock);
    t_sync(d->sock);
    duo_ping(d);
}

static void busy_right(duo *d) {
    t_sync(d->sock);
    end_quiet(&d->e, 2); /* the refused write-with-immediate had no effect */
    t_sync(d->sock);
    duo_ping(d);
}
static const end_opts busy_opts = {.max_send = 8, .max_recv = 16};
DUO_CASE(busy_left, busy_right, "write/busy-when-full", &busy_opts)

/* Far more unsignalled posts than the queue holds, polling only when it is full. */
static void unsignalled_left(duo *d) {
    end *e = &d->e;
    long n = t_pick(100000, 3000);
    for (long i = 0; i < n; i++) {
        dp_sge s = local_sge(e, 0, 64);
        end_write(e, &s, 1, PEER(d, i % 512 * 64), (uint64_t)i, 0);
    }
    dp_sge s = local_sge(e, 0, 8);
    end_write_imm(e, &s, 1, PEER(d, 0), 1, 1234, DP_SIGNALED);
    end_sent(e, 1234, DP_OP_WRITE);
    duo_await(d);
    end_quiet(e, 5);
}

static void unsignalled_right(duo *d) {
    dp_wc wc;
    end *e = &d->e;
    int64_t start = dp_now_ns();
    while (!end_poll_recv(e, &wc, 1000000000))
        CHECKF(dp_now_ns() - start < 4 * poll_ns(), "the last write does not arrive");
    CHECK_OK(wc.status);
    CHECK_EQ(wc.imm, 1);
    end_post_recv(e);
    e->recvs_done++;
    duo_ack(d);
}
static const end_opts unsignalled_opts = {.max_send = 8, .max_recv = 8};
DUO_CASE(unsignalled_left, unsignalled_right, "write/unsignalled-beyond-queue", &unsignalled_opts, .seconds = 20,
         .verbs_seconds = 60)

/* Posts with DP_MORE arrive whole and in their order. */
static const uint32_t more_sizes[] = {8, 64, 4096, 20000, 16, 40000, 40000, 70000, 8};
enum { MORE_SIZES = sizeof more_sizes / sizeof *more_sizes, MORE_ROUNDS = 10 };

static void more_left(duo *d) {
    end *e = &d->e;
    for (uint32_t round = 0; round < MORE_ROUNDS; round++) {
        uint64_t at = 0;
        for (uint32_t i = 0; i < MORE_SIZES; i++) {
            fill_pattern(local_bytes(e) + at, more_sizes[i], round + i);
            dp_sge s = local_sge(e, at, more_sizes[i]);
            end_write_imm(e, &s, 1, PEER(d, at), i, i, i + 1 < MORE_SIZES ? DP_MORE : 0);
            at += more_sizes[i] + 64;
        }
        t_sync(d->sock);
    }
}

static void more_right(duo *d) {
    end *e = &d->e;
    for (uint32_t round = 0; round < MORE_ROUNDS; round++) {
        uint64_t at = 0;
        for (uint32_t i = 0; i < MORE_SIZES; i++) {
            t_note("round %u post %u", round, i);
            CHECK_EQ(end_imm(e).imm, i);
            CHECK_PATTERN(end_bytes(e) + at, more_sizes[i], round + i);
            at += more_sizes[i] + 64;
        }
        t_sync(d->sock);
    }
}
static const end_opts more_opts = {.size = 256 << 10};
DUO_CASE(more_left, more_right, "write/more", &more_opts)

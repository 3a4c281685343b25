#include "dp_raw_impl.h"
#include "dp_tcp_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dp_wire.h"

#define SPIN_NS 50000           /* then block */
#define BLOCK_MAX_NS 100000000  /* and look after the peer this often */

/* Memory: `pieces` pieces for operations that are waited for, then a place for each write that is not. */
#define SCRATCH_SIZE (DP_RAW_CHUNK + DP_RAW_BATCH * DP_RAW_POSTED_MAX)
#define BULK_ANSWERS (2u * DP_RAW_PIECES * DP_RAW_PIECE) /* tcp: the answers of DP_RAW_PIECES reads, with their frames and records */

/* All buffers of the queue pair. Those for sending grow at most once: when answers fill them, all posts wait behind the answers. */
_Static_assert(TCP_ONE_SEND >= DP_RAW_ANSWERS && TCP_ONE_SEND >= DP_RAW_BATCH * (DP_RAW_POSTED_MAX + sizeof(tcp_frame)) + 4 * TCP_RECORD_EXTRA &&
                   DP_RAW_TCP_BYTES >= TCP_STAGE + 2 * (TCP_ONE_SEND + 2 * sizeof(tcp_frame)) + sizeof(tcp_seal) + sizeof(tcp_qp) + SCRATCH_SIZE +
                                           sizeof(dp_raw) + 4096,
               "memory of a connection on tcp");

static int create(dp_domain *d, dp_mem *const *expose, uint32_t n, bool bulk, dp_raw **out, dp_error *err) {
    if (n > DP_EXPOSE_MAX)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: %u exposed regions, at most %d", n, DP_EXPOSE_MAX);
    dp_raw *r = calloc(1, sizeof *r);
    if (!r)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    pthread_mutex_init(&r->lock, NULL);
    bool reads = bulk && !n;
    r->piece = reads ? DP_RAW_PIECE : DP_RAW_CHUNK;
    r->pieces = reads ? DP_RAW_PIECES : 1;
    dp_qp_attr attr = {.max_send = 2 * DP_RAW_BATCH, .max_recv = 1, .n_expose = n, .max_answers = bulk ? BULK_ANSWERS : DP_RAW_ANSWERS};
    for (uint32_t i = 0; i < n; i++)
        attr.expose[i] = expose[i];
    /* A bulk connection often makes only a few small reads. To make all pages of its memory ahead would take 0.8 ms. */
    int st = dp_mem_alloc(d, (uint64_t)r->pieces * r->piece + SCRATCH_SIZE - DP_RAW_CHUNK, reads ? DP_MEM_LAZY : 0, &r->scratch, err);
    if (!st)
        st = dp_cq_create(d->dev, attr.max_send + attr.max_recv, &r->cq, err);
    if (!st)
        st = dp_qp_create(d, r->cq, &attr, &r->qp, err);
    if (st) {
        dp_raw_destroy(r);
        return st;
    }
    *out = r;
    return DP_OK;
}

int dp_raw_create(dp_domain *d, dp_mem *const *expose, uint32_t n, dp_raw **out, dp_error *err) {
    return create(d, expose, n, false, out, err);
}

int dp_raw_create_bulk(dp_domain *d, dp_mem *const *expose, uint32_t n, dp_raw **out, dp_error *err) {
    return create(d, expose, n, true, out, err);
}

void dp_raw_destroy(dp_raw *r) {
    if (!r)
        return;
    dp_raw_unserve(r);
    /* The queue pair first: until it is gone the device may read and write the memory. */
    dp_qp_destroy(r->qp);
    dp_cq_destroy(r->cq);
    dp_mem_free(r->scratch);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

int dp_raw_export(dp_raw *r, void *blob, uint32_t *len, dp_error *err) { return dp_qp_export(r->qp, blob, len, err); }

int dp_raw_connect(dp_raw *r, const void *blob, uint32_t len, dp_error *err) {
    return dp_qp_connect(r->qp, blob, len, err);
}

void dp_raw_cancel(dp_raw *r) { dp_qp_cancel(r->qp); }

/* The first reason stays. */
int dp_raw_over(dp_raw *r, int status) {
    if (!r->status)
        r->status = status;
    return status;
}

/* What is known without looking. */
static int known_broken(const dp_raw *r) {
    int broken = dp_qp_broken(r->qp);
    return r->status ? r->status : broken ? broken : r->qp->state == DP_QP_ERROR ? DP_CONNECTION : DP_OK;
}

int dp_raw_drain(dp_raw *r, uint32_t *done) {
    dp_wc wc[8];
    int n;
    while ((n = dp_cq_poll(r->cq, wc, 8)) > 0)
        for (int i = 0; i < n; i++) {
            if (wc[i].status)
                return dp_raw_over(r, wc[i].status);
            if (wc[i].op == DP_OP_RECV || wc[i].op == DP_OP_RECV_IMM) {
                int st = wc[i].op == DP_OP_RECV_IMM ? dp_post_recv(r->qp, 0) : DP_PROTOCOL;
                if (st)
                    return dp_raw_over(r, st);
            } else if (wc[i].wr_id & 1)
                r->reaped++;
            else
                ++*done;
        }
    return n < 0 ? dp_raw_over(r, n) : DP_OK;
}

/* Takes the completions of writes that are not waited for. If there is a server, its thread takes them. */
static int settle(dp_raw *r) {
    uint32_t none = 0;
    return r->server ? DP_OK : dp_raw_drain(r, &none);
}

/* Called while no operation is outstanding. It takes completions, because the next keepalive needs the completion of the last one. */
int dp_raw_broken(dp_raw *r) {
    pthread_mutex_lock(&r->lock);
    if (!known_broken(r) && r->qp->state == DP_QP_CONNECTED && settle(r) == DP_OK)
        dp_qp_probe(r->qp);
    int st = known_broken(r);
    pthread_mutex_unlock(&r->lock);
    return st;
}

/* Returns why an operation that waits cannot begin, or DP_OK. */
static int may_wait(const dp_raw *r) { return r->server ? DP_UNSUPPORTED : known_broken(r); }

/* Waits until `want` posts have completed. */
static int await(dp_raw *r, uint32_t want, uint32_t *done, int64_t deadline) {
    int64_t since = dp_now_ns();
    for (;;) {
        int st = dp_raw_drain(r, done);
        if (st || *done >= want)
            return st;
        if ((st = dp_qp_broken(r->qp)))
            return dp_raw_over(r, st);
        int64_t now = dp_now_ns();
        if (now >= deadline)
            return dp_raw_over(r, DP_DEADLINE);
        if (now - since < SPIN_NS) {
            for (int i = 0; i < 32; i++)
                dp_cpu_pause();
            continue;
        }
        if ((st = dp_cq_arm(r->cq)) || (st = dp_raw_drain(r, done)))
            return dp_raw_over(r, st);
        if (*done >= want) {
            dp_cq_disarm(r->cq);
            return DP_OK;
        }
        int64_t left = deadline - now;
        if ((st = dp_cq_wait(r->cq, left < BLOCK_MAX_NS ? left : BLOCK_MAX_NS)))
            return dp_raw_over(r, st);
        dp_qp_probe(r->qp);
    }
}

/* Returns what posting returned. DP_BUSY is impossible, because all earlier posts were waited for or are counted. */
static int posted(dp_raw *r, int st) { return st == DP_OK ? DP_OK : dp_raw_over(r, st); }

static dp_sge scratch_at(const dp_raw *r, uint32_t offset, uint32_t len) {
    return (dp_sge){(uint8_t *)r->scratch->addr + offset, len, r->scratch->lkey};
}

static uint64_t even_id(dp_raw *r) { return (r->next_id += 2) & ~1ull; }

int dp_raw_read_parts(dp_raw *r, void *dst, uint32_t n, const dp_raw_part *parts, int64_t deadline) {
    int st = may_wait(r);
    const uint32_t room = r->pieces * r->piece;
    uint64_t out = 0, at = 0; /* offsets in dst and in parts[i] */
    for (uint32_t i = 0; !st && i < n;) {
        uint32_t posts = 0, done = 0, filled = 0;
        while (!st && i < n && posts < DP_RAW_BATCH && filled < room) {
            uint64_t left = parts[i].len - at, raddr = parts[i].addr + at;
            uint32_t rkey = parts[i].rkey, len = left < r->piece ? (uint32_t)left : r->piece;
            len = len < room - filled ? len : room - filled;
            if ((at += len) == parts[i].len) {
                i++;
                at = 0;
            }
            if (!len)
                continue;
            dp_sge s = scratch_at(r, filled, len);
            filled += len;
            uint32_t more = i < n && posts + 1 < DP_RAW_BATCH && filled < room ? DP_MORE : 0;
            st = posted(r, dp_post_read(r->qp, &s, raddr, rkey, even_id(r), DP_SIGNALED | more));
            posts++;
        }
        if (!st && posts && !(st = await(r, posts, &done, deadline)))
            memcpy((uint8_t *)dst + out, r->scratch->addr, filled);
        out += filled;
    }
    return st;
}

int dp_raw_read(dp_raw *r, void *dst, uint64_t len, uint64_t raddr, uint32_t rkey, int64_t deadline) {
    return dp_raw_read_parts(r, dst, 1, &(dp_raw_part){raddr, len, rkey}, deadline);
}

int dp_raw_write(dp_raw *r, const void *src, uint64_t len, uint64_t raddr, uint32_t rkey, int64_t deadline) {
    int st = may_wait(r);
    for (uint64_t at = 0; !st && at < len;) {
        uint32_t n = len - at < DP_RAW_CHUNK ? (uint32_t)(len - at) : DP_RAW_CHUNK, done = 0;
        dp_sge s = scratch_at(r, 0, n);
        memcpy(r->scratch->addr, (const uint8_t *)src + at, n);
        st = posted(r, dp_post_write(r->qp, &s, 1, raddr + at, rkey, even_id(r), DP_SIGNALED));
        if (!st)
            st = await(r, 1, &done, deadline);
        at += n;
    }
    return st;
}

int dp_raw_write_ring(dp_raw *r, const void *src, uint32_t len, uint64_t raddr, uint32_t rkey, int64_t deadline) {
    if (len > DP_RAW_CHUNK)
        return DP_INVALID;
    int st = may_wait(r);
    uint32_t done = 0;
    dp_sge s = scratch_at(r, 0, len);
    if (!st) {
        memcpy(r->scratch->addr, src, len);
        st = posted(r, dp_post_write_imm(r->qp, &s, 1, raddr, rkey, 0, even_id(r), DP_SIGNALED));
    }
    return st ? st : await(r, 1, &done, deadline);
}

int dp_raw_fetch_add(dp_raw *r, uint32_t n, const uint64_t *raddr, uint32_t rkey, const uint64_t *add, uint64_t *old,
                     uint32_t *done, int64_t deadline) {
    *done = 0;
    if (n > DP_RAW_BATCH)
        return DP_INVALID;
    int st = may_wait(r);
    uint32_t i = 0;
    for (; !st && i < n; i++) {
        dp_sge s = scratch_at(r, 8 * i, 8);
        st = posted(r, dp_post_fetch_add(r->qp, &s, raddr[i], rkey, add[i], even_id(r), DP_SIGNALED));
    }
    if (!st)
        st = await(r, n, done, deadline);
    for (i = 0; i < *done; i++)
        memcpy(&old[i], (uint8_t *)r->scratch->addr + 8 * i, 8);
    return st;
}

int dp_raw_compare_swap(dp_raw *r, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired, uint64_t *old, int64_t deadline) {
    uint32_t done = 0;
    dp_sge s = scratch_at(r, 0, 8);
    int st = may_wait(r);
    if (!st)
        st = posted(r, dp_post_compare_swap(r->qp, &s, raddr, rkey, expected, desired, even_id(r), DP_SIGNALED));
    if (!st)
        st = await(r, 1, &done, deadline);
    if (!st)
        memcpy(old, r->scratch->addr, 8);
    return st;
}

static int post(dp_raw *r, const void *src, uint32_t len, uint64_t raddr, uint32_t rkey) {
    int st = known_broken(r);
    if (!st)
        st = settle(r);
    if (st)
        return st;
    if (len > DP_RAW_POSTED_MAX)
        return DP_INVALID;
    if (r->posted - r->reaped >= DP_RAW_BATCH)
        return DP_BUSY;
    uint32_t at = r->pieces * r->piece + r->posted % DP_RAW_BATCH * DP_RAW_POSTED_MAX;
    dp_sge s = scratch_at(r, at, len);
    memcpy((uint8_t *)r->scratch->addr + at, src, len);
    st = posted(r, dp_post_write(r->qp, &s, 1, raddr, rkey, even_id(r) | 1, DP_SIGNALED));
    if (!st)
        r->posted++;
    return st;
}

int dp_raw_post(dp_raw *r, const void *src, uint32_t len, uint64_t raddr, uint32_t rkey) {
    pthread_mutex_lock(&r->lock);
    int st = post(r, src, len, raddr, rkey);
    dp_raw_watch(r);
    pthread_mutex_unlock(&r->lock);
    return st;
}

int dp_raw_reap(dp_raw *r) {
    pthread_mutex_lock(&r->lock);
    int st = known_broken(r);
    if (!st)
        st = settle(r);
    int left = (int)(r->posted - r->reaped);
    pthread_mutex_unlock(&r->lock);
    return st ? st : left;
}

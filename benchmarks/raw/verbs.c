/* The floor on a verbs device: one bare reliable connected queue pair at each end and nothing between the program
 * and libibverbs. For a fair comparison it uses the channel's open device, port, GID, MTU and time-outs, so it reads the
 * provider's device structure. */
#include "bench.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "dp_verbs.h"

#define QUEUE_MIN 64
#define SIGNAL_EVERY 16
#define WISHED_INLINE 256
#define ROOM 64 /* for a header before the payload */

struct dp_bench_verbs {
    dpv_dev *dev;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *memory; /* the first half is for sends, the second half for receives: `depth` slots each */
    uint64_t half, stride;
    uint32_t depth;
    uint32_t queue; /* entries of the send queue, and of the receive queue */
    bool atomics;
    uint32_t max_inline;
    uint32_t psn;
    dp_bench_card peer;
    uint32_t unsignalled;
    uint32_t events; /* not yet acknowledged */
};

/* ---- set-up ---- */

static int access_flags(const dp_bench_verbs *v) {
    return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
           (v->atomics ? IBV_ACCESS_REMOTE_ATOMIC : 0);
}

static int make_bare_qp(dp_bench_verbs *v, dp_error *err) {
    for (uint32_t want = WISHED_INLINE;; want /= 2) {
        struct ibv_qp_init_attr a = {
            .send_cq = v->cq,
            .recv_cq = v->cq,
            .cap = {.max_send_wr = v->queue, .max_recv_wr = v->queue, .max_send_sge = 1, .max_recv_sge = 1,
                    .max_inline_data = want},
            .qp_type = IBV_QPT_RC,
        };
        v->qp = dpv_ibv.create_qp(v->pd, &a);
        if (v->qp) {
            v->max_inline = a.cap.max_inline_data;
            break;
        }
        if (!want)
            return dp_fail(err, dpv_status_of(errno), errno, "bench: ibv_create_qp on %s", v->dev->base.name);
    }
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .pkey_index = v->dev->pkey_index, .port_num = v->dev->port,
                            .qp_access_flags = (unsigned)access_flags(v)};
    int e = dpv_ibv.modify_qp(v->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    return e ? dp_fail(err, dpv_status_of(e), e, "bench: ibv_modify_qp to INIT on %s", v->dev->base.name) : DP_OK;
}

static int post_receive(dp_bench_verbs *v) {
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;
    return ibv_post_recv(v->qp, &wr, &bad) ? DP_CONNECTION : DP_OK;
}

static int make(dp_bench_verbs *v, uint32_t payload, uint32_t depth, dp_error *err) {
    const char *name = v->dev->base.name;
    v->depth = depth;
    v->queue = 2 * depth > QUEUE_MIN ? 2 * depth : QUEUE_MIN;
    v->stride = depth > 1 ? (ROOM + payload + 63) & ~63ull : ROOM + payload;
    v->half = (v->stride * depth + 4095) & ~4095ull;
    v->memory = mmap(NULL, 2 * v->half, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (v->memory == MAP_FAILED) {
        v->memory = NULL;
        return dp_fail(err, DP_FATAL, errno, "bench: %llu bytes", (unsigned long long)(2 * v->half));
    }
    v->pd = dpv_ibv.alloc_pd(v->dev->ctx);
    v->channel = dpv_ibv.create_comp_channel(v->dev->ctx);
    if (!v->pd || !v->channel)
        return dp_fail(err, dpv_status_of(errno), errno, "bench: domain and event channel on %s", name);
    v->cq = dpv_ibv.create_cq(v->dev->ctx, (int)(2 * v->queue), NULL, v->channel, 0);
    struct ibv_device_attr attr;
    v->atomics = !dpv_ibv.query_device(v->dev->ctx, &attr) && attr.atomic_cap != IBV_ATOMIC_NONE;
    v->mr = dpv_ibv_reg_mr(v->pd, v->memory, 2 * v->half, (unsigned)access_flags(v));
    if (!v->cq || !v->mr)
        return dp_fail(err, dpv_status_of(errno), errno, "bench: completion queue and region on %s", name);
    int st = make_bare_qp(v, err);
    for (uint32_t i = 0; !st && i < v->queue / 2; i++)
        if (post_receive(v))
            st = dp_fail(err, DP_FATAL, 0, "bench: post receive %u on %s", i, name);
    return st;
}

int dp_bench_verbs_create(dp_dev *dev, uint32_t payload, uint32_t depth, dp_bench_verbs **out, dp_bench_card *card,
                          dp_error *err) {
    if (depth < 1 || depth > DP_DEPTH_MAX)
        return dp_fail(err, DP_INVALID, 0, "bench: %u round trips in flight (1..%d)", depth, DP_DEPTH_MAX);
    if (dev->provider != DP_PROVIDER_VERBS)
        return dp_fail(err, DP_UNSUPPORTED, 0, "bench: %s is not a verbs device", dev->name);
    dp_bench_verbs *v = calloc(1, sizeof *v);
    if (!v)
        return dp_fail(err, DP_FATAL, ENOMEM, "bench: queue pair");
    v->dev = dpv_dev_of(dev);
    int st = make(v, payload, depth, err);
    if (st) {
        dp_bench_verbs_destroy(v);
        return st;
    }
    dp_random(&v->psn, sizeof v->psn);
    v->psn &= 0xffffff;
    *card = (dp_bench_card){.qpn = v->qp->qp_num, .psn = v->psn, .rkey = v->mr->rkey, .lid = v->dev->lid,
                            .addr = (uint64_t)(uintptr_t)v->memory + v->half};
    memcpy(card->gid, v->dev->gid.raw, sizeof card->gid);
    *out = v;
    return DP_OK;
}

void dp_bench_verbs_destroy(dp_bench_verbs *v) {
    if (!v)
        return;
    if (v->qp)
        dpv_ibv.destroy_qp(v->qp);
    if (v->cq) {
        if (v->events)
            dpv_ibv.ack_cq_events(v->cq, v->events);
        dpv_ibv.destroy_cq(v->cq);
    }
    if (v->mr)
        dpv_ibv.dereg_mr(v->mr);
    if (v->channel)
        dpv_ibv.destroy_comp_channel(v->channel);
    if (v->pd)
        dpv_ibv.dealloc_pd(v->pd);
    if (v->memory)
        munmap(v->memory, 2 * v->half);
    free(v);
}

int dp_bench_verbs_connect(dp_bench_verbs *v, const dp_bench_card *peer, dp_error *err) {
    const dpv_dev *d = v->dev;
    v->peer = *peer;
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = d->mtu,
        .dest_qp_num = peer->qpn,
        .rq_psn = peer->psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.dlid = (uint16_t)peer->lid, .sl = d->service_level, .port_num = d->port},
    };
    if (d->use_grh) {
        a.ah_attr.is_global = 1;
        a.ah_attr.grh = (struct ibv_global_route){.sgid_index = d->gid_index, .hop_limit = 64,
                                                  .traffic_class = d->traffic_class};
        memcpy(a.ah_attr.grh.dgid.raw, peer->gid, sizeof peer->gid);
    }
    int e = dpv_ibv.modify_qp(v->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (e)
        return dp_fail(err, DP_CONNECTION, e, "bench: ibv_modify_qp to RTR on %s", d->base.name);
    struct ibv_qp_attr s = {.qp_state = IBV_QPS_RTS, .sq_psn = v->psn, .timeout = d->timeout,
                            .retry_cnt = d->retry_count, .rnr_retry = 7, .max_rd_atomic = 1};
    e = dpv_ibv.modify_qp(v->qp, &s, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                     IBV_QP_MAX_QP_RD_ATOMIC);
    return e ? dp_fail(err, DP_CONNECTION, e, "bench: ibv_modify_qp to RTS on %s", d->base.name) : DP_OK;
}

void dp_bench_verbs_abort(dp_bench_verbs *v) {
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
    dpv_ibv.modify_qp(v->qp, &a, IBV_QP_STATE); /* flushes the posted receives, which ends a wait for one */
}

/* ---- round trips ---- */

static inline int post_slot(dp_bench_verbs *v, uint32_t size, uint32_t slot) {
    uint64_t offset = slot * v->stride;
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)v->memory + offset, .length = size, .lkey = v->mr->lkey};
    struct ibv_send_wr wr, *bad;
    wr.wr_id = 0;
    wr.next = NULL;
    wr.sg_list = &sge;
    wr.num_sge = size ? 1 : 0;
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.send_flags = size && size <= v->max_inline ? IBV_SEND_INLINE : 0;
    wr.imm_data = htonl(slot);
    wr.wr.rdma.remote_addr = v->peer.addr + offset;
    wr.wr.rdma.rkey = v->peer.rkey;
    /* Only signalled completions free send-queue entries. The wait for the answer collects them. */
    if (++v->unsignalled == SIGNAL_EVERY) {
        wr.send_flags |= IBV_SEND_SIGNALED;
        v->unsignalled = 0;
    }
    return ibv_post_send(v->qp, &wr, &bad) ? DP_CONNECTION : DP_OK;
}

static inline int post_first(dp_bench_verbs *v, uint32_t size) { return post_slot(v, size, 0); }

/* Polls completions. 1: the peer's write has arrived and its receive was reposted; 0: not yet. */
static inline int poll_write(dp_bench_verbs *v) {
    struct ibv_wc wc[4];
    int n = ibv_poll_cq(v->cq, 4, wc);
    int arrived = 0;
    for (int i = 0; i < n; i++) {
        if (wc[i].status != IBV_WC_SUCCESS)
            return wc[i].status == IBV_WC_RETRY_EXC_ERR ? DP_PEER_GONE : DP_CONNECTION;
        if (wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
            if (post_receive(v))
                return DP_CONNECTION;
            arrived = 1;
        }
    }
    return n < 0 ? DP_FATAL : arrived;
}

/* Whether a spinner has waited for too long. Reads the clock only now and then. */
static bool over(int64_t *since) {
    int64_t now = dp_now_ns();
    if (!*since)
        *since = now;
    return now - *since > DP_BENCH_PATIENCE_NS;
}

static inline int await_hot(dp_bench_verbs *v) {
    int64_t since = 0;
    for (uint32_t spins = 1;; spins++) {
        int st = poll_write(v);
        if (st)
            return st < 0 ? st : DP_OK;
        dp_cpu_pause();
        if (__builtin_expect(!(spins & 0x3ffff), 0) && over(&since))
            return DP_PEER_GONE;
    }
}

static int await_warm(dp_bench_verbs *v) {
    for (;;) {
        int st = poll_write(v);
        if (!st) {
            if (ibv_req_notify_cq(v->cq, 0))
                return DP_FATAL;
            st = poll_write(v); /* completions from before the request */
        }
        if (st)
            return st < 0 ? st : DP_OK;
        struct ibv_cq *cq;
        void *context;
        /* No time-out, as in a bare program. dp_bench_verbs_abort ends the wait when the peer is gone. */
        if (dpv_ibv.get_cq_event(v->channel, &cq, &context))
            return DP_FATAL;
        if (++v->events == QUEUE_MIN) {
            dpv_ibv.ack_cq_events(v->cq, v->events);
            v->events = 0;
        }
    }
}

/* ---- several in flight ---- */

enum { BATCH = 16 };

/* Waits until writes have arrived, reposts their receives and returns their slots. */
static int await_slots(dp_bench_verbs *v, uint32_t *slots, int *count) {
    int64_t since = 0;
    *count = 0;
    for (uint32_t spins = 1; !*count; spins++) {
        struct ibv_wc wc[BATCH];
        int n = ibv_poll_cq(v->cq, BATCH, wc);
        if (n < 0)
            return DP_FATAL;
        for (int i = 0; i < n; i++) {
            if (wc[i].status != IBV_WC_SUCCESS)
                return wc[i].status == IBV_WC_RETRY_EXC_ERR ? DP_PEER_GONE : DP_CONNECTION;
            if (wc[i].opcode != IBV_WC_RECV_RDMA_WITH_IMM)
                continue;
            slots[(*count)++] = ntohl(wc[i].imm_data) % v->depth;
            if (post_receive(v))
                return DP_CONNECTION;
        }
        if (*count)
            break;
        dp_cpu_pause();
        if (__builtin_expect(!(spins & 0x3ffff), 0) && over(&since))
            return DP_PEER_GONE;
    }
    return DP_OK;
}

static int window_server(dp_bench_verbs *v, const dp_bench_run *r) {
    for (uint64_t done = 0; done < r->rounds;) {
        uint32_t slots[BATCH];
        int n, st = await_slots(v, slots, &n);
        for (int i = 0; !st && i < n; i++, done++)
            st = post_slot(v, r->reply, slots[i]);
        if (st)
            return st;
    }
    return DP_OK;
}

static int window_client(dp_bench_verbs *v, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns) {
    uint64_t head = 0, tail = 0;
    int64_t begin = dp_now_ns(), pushed[DP_DEPTH_MAX];
    while (tail < r->rounds) {
        while (head < r->rounds && head - tail < r->window) {
            uint32_t slot = (uint32_t)(head % r->window);
            v->memory[slot * v->stride] = (uint8_t)head;
            if (samples)
                pushed[slot] = dp_now_ns();
            int st = post_slot(v, r->size, slot);
            if (st)
                return st;
            head++;
        }
        uint32_t slots[BATCH];
        int n, st = await_slots(v, slots, &n);
        if (st)
            return st;
        for (int i = 0; i < n; i++, tail++) { /* in order, because all are on one queue pair */
            if (tail == warm)
                begin = dp_now_ns();
            if (samples && tail >= warm)
                samples[tail - warm] = dp_now_ns() - pushed[slots[i]];
        }
    }
    *ns = dp_now_ns() - begin;
    return DP_OK;
}

/* ---- one-sided ---- */

static int one_sided(dp_bench_verbs *v, const dp_bench_run *r) {
    bool add = r->kind == DP_BENCH_FETCH_ADD;
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)v->memory, .length = add ? sizeof(uint64_t) : r->size,
                          .lkey = v->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
                             .opcode = add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_READ}, *bad;
    if (add) {
        wr.wr.atomic.remote_addr = v->peer.addr;
        wr.wr.atomic.rkey = v->peer.rkey;
        wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = v->peer.addr;
        wr.wr.rdma.rkey = v->peer.rkey;
    }
    if (ibv_post_send(v->qp, &wr, &bad))
        return DP_CONNECTION;
    int64_t since = 0;
    for (uint32_t spins = 1;; spins++) {
        struct ibv_wc wc;
        int n = ibv_poll_cq(v->cq, 1, &wc);
        if (n < 0 || (n && wc.status != IBV_WC_SUCCESS))
            return n < 0 ? DP_FATAL : wc.status == IBV_WC_RETRY_EXC_ERR ? DP_PEER_GONE : DP_CONNECTION;
        if (n && (wc.opcode == IBV_WC_RDMA_READ || wc.opcode == IBV_WC_FETCH_ADD))
            return DP_OK; /* other completions are of writes of an earlier run */
        dp_cpu_pause();
        if (__builtin_expect(!(spins & 0x3ffff), 0) && over(&since))
            return DP_PEER_GONE;
    }
}

/* ---- by kind ---- */

static inline int ping_pong(dp_bench_verbs *v, const dp_bench_run *r) {
    int st = post_first(v, r->size);
    return st ? st : r->kind == DP_BENCH_IMM ? await_hot(v) : await_warm(v);
}

static bool verbs_fits(const dp_bench_verbs *v, const dp_bench_run *r) {
    uint64_t room = v->depth > 1 ? v->stride : v->half;
    return r->size <= room && r->reply <= room &&
           (r->kind != DP_BENCH_IMM_WINDOW || (r->window && r->window <= v->depth)) &&
           (r->kind != DP_BENCH_FETCH_ADD || v->atomics);
}

int dp_bench_verbs_server(dp_bench_verbs *v, const dp_bench_run *r) {
    if (!verbs_fits(v, r))
        return DP_INVALID;
    if (r->kind == DP_BENCH_IMM_WINDOW)
        return window_server(v, r);
    for (uint64_t i = 0; i < r->rounds; i++) {
        int st = r->kind == DP_BENCH_IMM ? await_hot(v) : await_warm(v);
        if (!st)
            st = post_first(v, r->reply);
        if (st)
            return st;
    }
    return DP_OK;
}

int dp_bench_verbs_client(dp_bench_verbs *v, const dp_bench_run *r, uint32_t warm, int64_t *samples, int64_t *ns) {
    if (!verbs_fits(v, r))
        return r->kind == DP_BENCH_FETCH_ADD && !v->atomics ? DP_UNSUPPORTED : DP_INVALID;
    if (r->kind == DP_BENCH_IMM_WINDOW)
        return window_client(v, r, warm, samples, ns);
    bool alone = r->kind == DP_BENCH_READ || r->kind == DP_BENCH_FETCH_ADD;
    int64_t begin = dp_now_ns(), last = begin;
    for (uint64_t i = 0; i < r->rounds; i++) {
        if (i == warm)
            begin = last = dp_now_ns();
        v->memory[0] = (uint8_t)i;
        int st = alone ? one_sided(v, r) : ping_pong(v, r);
        if (st)
            return st;
        if (samples && i >= warm) {
            int64_t now = dp_now_ns();
            *samples++ = now - last;
            last = now;
        }
    }
    *ns = dp_now_ns() - begin;
    return DP_OK;
}

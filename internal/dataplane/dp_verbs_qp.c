/* Life of a reliable connected queue pair, without rdma_cm: addresses travel in our own control messages.
 *
 *            create                export ... peer's blob ... connect
 *   (none) ─────────▶ INIT ──────────────────────────────────────────▶ RTR ─▶ RTS
 *                      ▲   receives may be posted                              │ a failed operation
 *                      │                         reset                         ▼
 *                      └───────────────────── RESET ◀──────────────────────── ERR
 */
#include "dp_verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* 0.64 ms. The default, code 0, is 655 ms: what a worker that is late with a receive would cost. */
#define MIN_RNR_TIMER 12
/* Code 7 repeats for ever: receivers are slow, not wrong, and the initiator counts credits. A receiver that
 * died is found by the ack time-out. */
#define RNR_RETRY 7
#define HOP_LIMIT 64

/* ---- create, destroy ---- */

static uint32_t ring_size(uint32_t n) {
    uint32_t size = 1;
    while (size < n)
        size *= 2;
    return size;
}

static uint32_t fresh_psn(void) {
    uint32_t psn;
    dp_random(&psn, sizeof psn);
    return psn & 0xffffff;
}

int dpv_to_init(dpv_qp *q, dp_error *err) {
    dpv_dev *dev = dpv_dev_of(q->base.domain->dev);
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = dev->pkey_index,
        .port_num = dev->port,
        .qp_access_flags = q->access,
    };
    int e = dpv_modify(q, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (e)
        return dp_fail(err, dpv_status_of(e), e, "ibv_modify_qp to INIT on %s", dev->base.name);
    q->psn = fresh_psn();
    return DP_OK;
}

/* The most inline data to ask for after the device refused `was`. */
static uint32_t less_inline(uint32_t was) {
    if (was > 512)
        return 512;
    return was >= 32 ? was / 2 : 0;
}

/* Creates the verbs queue pair with as much inline room as the device grants, up to the wish. There is no
 * way to ask for the limit, so we ask for less until it is granted, and remember. */
static int create_verbs_qp(dpv_qp *q, const dp_qp_attr *attr, dp_error *err) {
    dpv_dev *dev = dpv_dev_of(q->base.domain->dev);
    struct ibv_cq *cq = dpv_cq_of(q->base.cq)->cq;
    uint32_t cap = __atomic_load_n(&dev->inline_cap, __ATOMIC_RELAXED);
    uint32_t want = attr->max_inline < cap ? attr->max_inline : cap;
    int first_errno = 0;
    for (;;) {
        struct ibv_qp_init_attr a = {
            .qp_context = q,
            .send_cq = cq,
            .recv_cq = cq,
            .cap = {.max_send_wr = attr->max_send,
                    .max_recv_wr = attr->max_recv,
                    .max_send_sge = DPV_MAX_SGE,
                    .max_recv_sge = 1,
                    .max_inline_data = want},
            .qp_type = IBV_QPT_RC,
        };
        q->qp = dpv_ibv.create_qp(dpv_domain_of(q->base.domain)->pd, &a);
        if (q->qp) {
            q->base.max_inline = a.cap.max_inline_data;
            if (first_errno == EINVAL)
                __atomic_store_n(&dev->inline_cap, want, __ATOMIC_RELAXED);
            return DP_OK;
        }
        int e = errno;
        if (!first_errno)
            first_errno = e;
        if (want == 0 || (e != EINVAL && e != ENOMEM && e != EOPNOTSUPP))
            return dp_fail(err, dpv_status_of(e), e, "ibv_create_qp on %s (max_send %u, max_recv %u)",
                           dev->base.name, attr->max_send, attr->max_recv);
        want = less_inline(want);
    }
}

static void free_qp(dpv_qp *q) {
    free(q->sent);
    free(q->recv_ids);
    free(q);
}

static int make_qp(dpv_qp *q, const dp_qp_attr *attr, dp_error *err) {
    uint32_t n_send = ring_size(attr->max_send), n_recv = ring_size(attr->max_recv);
    q->sent = calloc(n_send, sizeof *q->sent);
    q->recv_ids = calloc(n_recv, sizeof *q->recv_ids);
    if (!q->sent || !q->recv_ids)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    q->send_mask = n_send - 1;
    q->recv_mask = n_recv - 1;
    q->max_msg = q->base.domain->dev->max_msg;
    /* Two signals per filling: the queue can be reclaimed while its second half is still under way. */
    q->signal_every = attr->max_send / 2 ? attr->max_send / 2 : 1;
    /* Only the rights that the exposed regions need, so that the peer reaches as little as possible of the domain's other
     * regions. Writing is always allowed, because a write with immediate of no bytes touches no region. */
    uint32_t access = DP_REMOTE_WRITE;
    for (uint32_t i = 0; i < attr->n_expose; i++)
        access |= attr->expose[i]->access;
    q->access = dpv_access_flags(access);
    int st = create_verbs_qp(q, attr, err);
    if (st == DP_OK) {
        st = dpv_to_init(q, err);
        if (st == DP_OK)
            st = dpv_cq_attach(dpv_cq_of(q->base.cq), q, err);
        if (st != DP_OK)
            dpv_ibv.destroy_qp(q->qp);
    }
    return st;
}

int dpv_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    dpv_dev *dev = dpv_dev_of(d->dev);
    uint32_t limit = (uint32_t)dev->attr.max_qp_wr;
    if (attr->max_send > limit || attr->max_recv > limit)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: max_send %u, max_recv %u, %s allows %u",
                       attr->max_send, attr->max_recv, dev->base.name, limit);
    dpv_qp *q = calloc(1, sizeof *q);
    if (!q)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    q->base = (dp_qp){.ops = d->dev->ops,
                      .domain = d,
                      .cq = cq,
                      .max_send = attr->max_send,
                      .max_recv = attr->max_recv,
                      .state = DP_QP_INIT};
    int st = make_qp(q, attr, err);
    if (st != DP_OK) {
        free_qp(q);
        return st;
    }
    *out = &q->base;
    return DP_OK;
}

void dpv_qp_destroy(dp_qp *base) {
    dpv_qp *q = dpv_qp_of(base);
    dpv_ibv.destroy_qp(q->qp);
    dpv_cq_detach(dpv_cq_of(base->cq), q);
    free_qp(q);
}

/* ---- connect ---- */

int dpv_qp_export(dp_qp *base, void *blob, uint32_t *len, dp_error *err) {
    (void)err;
    const dpv_qp *q = dpv_qp_of(base);
    const dpv_dev *dev = dpv_dev_of(base->domain->dev);
    dpv_blob b = {
        .qpn = q->qp->qp_num,
        .psn = q->psn,
        .gid = dev->gid,
        .lid = dev->lid,
        .pkey = dev->pkey,
        .link_layer = dev->link_layer,
        .mtu = dev->mtu,
        .gid_type = (uint8_t)dev->gid_type,
        .rd_atomic = dev->rd_atomic,
        .grh = dev->use_grh,
    };
    *len = dpv_blob_encode(&b, blob);
    return DP_OK;
}

static const char *link_name(uint8_t link_layer) {
    return link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
}

/* A well-formed blob may still come from a network that ours does not reach. */
static int check_compatible(const dpv_dev *dev, const dpv_blob *b, dp_error *err) {
    if (b->link_layer != dev->link_layer)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: peer's link layer is %s, that of %s is %s",
                       link_name(b->link_layer), dev->base.name, link_name(dev->link_layer));
    if (b->gid_type != dev->gid_type)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: peer's GID is RoCE v%u, that of %s is v%u",
                       b->gid_type, dev->base.name, dev->gid_type);
    if ((b->pkey ^ dev->pkey) & 0x7fff || !((b->pkey | dev->pkey) & 0x8000))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: peer's P_Key %#x does not match %#x", b->pkey,
                       dev->pkey);
    /* A queue pair checks the form of what arrives, so both ends route by GID or neither does. */
    static const union ibv_gid zero;
    if (b->grh != dev->use_grh &&
        (!memcmp(&b->gid, &zero, sizeof zero) || !memcmp(&dev->gid, &zero, sizeof zero)))
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: one end routes by GID and the other has none");
    return DP_OK;
}

static int to_rtr(dpv_qp *q, const dpv_dev *dev, const dpv_blob *b, dp_error *err) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = b->mtu < dev->mtu ? b->mtu : dev->mtu,
        .dest_qp_num = b->qpn,
        .rq_psn = b->psn,
        .max_dest_rd_atomic = dev->rd_atomic,
        .min_rnr_timer = MIN_RNR_TIMER,
        .ah_attr = {.dlid = b->lid, .sl = dev->service_level, .port_num = dev->port},
    };
    if (dev->use_grh || b->grh) {
        a.ah_attr.is_global = 1;
        a.ah_attr.grh = (struct ibv_global_route){.dgid = b->gid,
                                                  .sgid_index = dev->gid_index,
                                                  .hop_limit = HOP_LIMIT,
                                                  .traffic_class = dev->traffic_class};
    }
    int e = dpv_modify(q, &a,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (e) {
        char gid[INET6_ADDRSTRLEN] = "";
        inet_ntop(AF_INET6, b->gid.raw, gid, sizeof gid);
        return dp_fail(err, DP_CONNECTION, e, "connect %s to queue pair %#x at GID %s LID %#x",
                       dev->base.name, b->qpn, gid, b->lid);
    }
    return DP_OK;
}

static int to_rts(dpv_qp *q, const dpv_dev *dev, const dpv_blob *b, dp_error *err) {
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTS,
        .sq_psn = q->psn,
        .timeout = dev->timeout,
        .retry_cnt = dev->retry_count,
        .rnr_retry = RNR_RETRY,
        .max_rd_atomic = b->rd_atomic < dev->rd_atomic ? b->rd_atomic : dev->rd_atomic,
    };
    int e = dpv_modify(q, &a,
                       IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                           IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    if (e)
        return dp_fail(err, DP_CONNECTION, e, "ibv_modify_qp to RTS on %s", dev->base.name);
    return DP_OK;
}

int dpv_qp_connect(dp_qp *base, const void *blob, uint32_t len, dp_error *err) {
    dpv_qp *q = dpv_qp_of(base);
    const dpv_dev *dev = dpv_dev_of(base->domain->dev);
    dpv_blob b;
    int st = dpv_blob_decode(blob, len, &b, err);
    if (st == DP_OK)
        st = check_compatible(dev, &b, err);
    if (st == DP_OK)
        st = to_rtr(q, dev, &b, err);
    if (st != DP_OK)
        return st; /* still in INIT: another blob may be tried */
    st = to_rts(q, dev, &b, err);
    base->state = st == DP_OK ? DP_QP_CONNECTED : DP_QP_ERROR;
    return st;
}

/* ---- reset, probe ---- */

int dpv_qp_reset(dp_qp *base, dp_error *err) {
    dpv_qp *q = dpv_qp_of(base);
    dpv_dev *dev = dpv_dev_of(base->domain->dev);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
    q->late = false;
    base->state = DP_QP_ERROR; /* unless all of the following succeeds */
    pthread_mutex_lock(&dev->lock);
    int e = dpv_ibv.modify_qp(q->qp, &a, IBV_QP_STATE);
    if (!e) {
        /* Events of the old life are read now, under the lock, so that none marks the new one. */
        dpv_dev_drain_events_locked(dev);
        __atomic_store_n(&base->broken, 0, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&dev->lock);
    if (e)
        return dp_fail(err, dpv_status_of(e), e, "ibv_modify_qp to RESET on %s", dev->base.name);
    dpv_cq_forget(dpv_cq_of(base->cq), q);
    int st = dpv_to_init(q, err);
    if (st == DP_OK)
        base->state = DP_QP_INIT;
    return st;
}

/* Asks the peer for a sign of life when it has given none for a while and none is under way. Its completions, and the
 * acknowledgements that ours stand for, are signs: while there is traffic nothing is asked. Nor before the first post or
 * receive, for a peer may take its time to connect. A full queue needs no further post to fail. */
static void keepalive(dpv_qp *q) {
    if (q->asking || (q->send_head == 0 && q->recv_tail == 0))
        return;
    int64_t now = dp_now_ns();
    if (!q->heard_at || q->send_tail != q->heard_send || q->recv_tail != q->heard_recv) {
        q->heard_at = now;
        q->heard_send = q->send_tail;
        q->heard_recv = q->recv_tail;
    } else if (now - q->heard_at >= dpv_dev_of(q->base.domain->dev)->keepalive_ns) {
        q->asking = dpv_post_keepalive(q) == DP_OK;
    }
}

int dpv_qp_probe(dp_qp *base) {
    int broken = dp_qp_broken(base);
    base->posted = dpv_qp_of(base)->send_head;
    base->arrived = dpv_qp_of(base)->send_tail;
    if (broken)
        return broken;
    if (base->state != DP_QP_CONNECTED)
        return base->state == DP_QP_ERROR ? DP_CONNECTION : DP_OK;
    struct ibv_qp_attr a;
    struct ibv_qp_init_attr init;
    int e = dpv_ibv.query_qp(dpv_qp_of(base)->qp, &a, IBV_QP_STATE, &init);
    if (e == EPERM) { /* in a worker's sandbox: completions, answers to the keepalive and events must do */
        dpv_dev_drain_events(dpv_dev_of(base->domain->dev));
        keepalive(dpv_qp_of(base));
        return dp_qp_broken(base);
    }
    if (e == 0 && a.qp_state == IBV_QPS_RTS) {
        keepalive(dpv_qp_of(base));
        return DP_OK;
    }
    /* The reason may be in a completion that nobody has polled yet: it marks the queue pair first. */
    dpv_cq_drain(dpv_cq_of(base->cq));
    dp_qp_break(base, DP_CONNECTION);
    /* Whatever else the kernel knows (device removed, queue overrun) waits in the event descriptor. */
    dpv_dev_drain_events(dpv_dev_of(base->domain->dev));
    return dp_qp_broken(base);
}

/* No store reaches a peer but by a post, and that notifies by itself. */
void dpv_qp_notify(dp_qp *base) { (void)base; }

/* Completion queues of the verbs provider. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll */
#endif
#include "dp_verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* ---- create, destroy ---- */

static void link_cq(dpv_dev *dev, dpv_cq *cq) {
    pthread_mutex_lock(&dev->lock);
    cq->next = dev->cqs;
    cq->prev = &dev->cqs;
    if (cq->next)
        cq->next->prev = &cq->next;
    dev->cqs = cq;
    pthread_mutex_unlock(&dev->lock);
}

static void unlink_cq(dpv_dev *dev, dpv_cq *cq) {
    pthread_mutex_lock(&dev->lock);
    *cq->prev = cq->next;
    if (cq->next)
        cq->next->prev = cq->prev;
    pthread_mutex_unlock(&dev->lock);
}

/* Frees what dpv_cq_create has made so far. */
static void free_cq(dpv_cq *cq) {
    if (cq->cq) {
        /* ibv_destroy_cq waits until all events are acknowledged. */
        if (cq->unacked)
            dpv_ibv.ack_cq_events(cq->cq, cq->unacked);
        dpv_ibv.destroy_cq(cq->cq);
    }
    if (cq->channel)
        dpv_ibv.destroy_comp_channel(cq->channel);
    if (cq->wake_fd >= 0)
        close(cq->wake_fd);
    free(cq->stash);
    free(cq->slots);
    free(cq);
}

static int open_cq(dpv_dev *dev, dpv_cq *cq, uint32_t capacity, dp_error *err) {
    cq->stash = malloc(capacity * sizeof *cq->stash);
    if (!cq->stash)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue of %u", capacity);
    cq->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (cq->wake_fd < 0)
        return dp_fail(err, DP_FATAL, errno, "create completion queue: eventfd");
    cq->channel = dpv_ibv.create_comp_channel(dev->ctx);
    if (!cq->channel)
        return dp_fail(err, dpv_status_of(errno), errno, "ibv_create_comp_channel on %s", dev->base.name);
    int fl = fcntl(cq->channel->fd, F_GETFL);
    if (fl < 0 || fcntl(cq->channel->fd, F_SETFL, fl | O_NONBLOCK) < 0)
        return dp_fail(err, DP_FATAL, errno, "create completion queue: event channel");
    /* Vectors are interrupts; taking them in turn spreads blocked waiters over the cores that serve them. */
    uint32_t vectors = dev->ctx->num_comp_vectors > 0 ? (uint32_t)dev->ctx->num_comp_vectors : 1;
    uint32_t vector = __atomic_fetch_add(&dev->next_vector, 1, __ATOMIC_RELAXED) % vectors;
    cq->cq = dpv_ibv.create_cq(dev->ctx, (int)capacity, cq, cq->channel, (int)vector);
    if (!cq->cq)
        return dp_fail(err, dpv_status_of(errno), errno, "ibv_create_cq of %u entries on %s", capacity,
                       dev->base.name);
    return DP_OK;
}

int dpv_cq_create(dp_dev *base, uint32_t capacity, dp_cq **out, dp_error *err) {
    dpv_dev *dev = dpv_dev_of(base);
    if (dev->attr.max_cqe > 0 && capacity > (uint32_t)dev->attr.max_cqe)
        return dp_fail(err, DP_INVALID, 0, "create completion queue: capacity %u, %s allows %d", capacity,
                       base->name, dev->attr.max_cqe);
    dpv_cq *cq = calloc(1, sizeof *cq);
    if (!cq)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue of %u", capacity);
    cq->base = (dp_cq){.ops = base->ops, .dev = base, .capacity = capacity};
    cq->wake_fd = -1;
    int st = open_cq(dev, cq, capacity, err);
    if (st != DP_OK) {
        free_cq(cq);
        return st;
    }
    link_cq(dev, cq);
    *out = &cq->base;
    return DP_OK;
}

void dpv_cq_destroy(dp_cq *base) {
    dpv_cq *cq = dpv_cq_of(base);
    unlink_cq(dpv_dev_of(base->dev), cq);
    free_cq(cq);
}

/* ---- completions ---- */

/* Of a post. Receives fail only because the connection did, whatever the device gives as the reason:
 * soft-RoCE reports a peer's bad key in the receive that it would have consumed. */
static int status_of_post(enum ibv_wc_status s) {
    switch (s) {
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR: return DP_INVALID;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR: return DP_PEER_GONE;
    default: return DP_CONNECTION;
    }
}

/* The rest of translate() for a failed completion. False: it is a keepalive's, whose failure the mark tells. */
static bool failed(dpv_qp *q, const struct ibv_wc *in, dp_wc *out) {
    bool receive = in->wr_id & DPV_RECV_BIT;
    bool keepalive = !receive && q->sent[in->wr_id & q->send_mask].flags & DPV_KEEPALIVE;
    bool first = q->base.state != DP_QP_ERROR;
    out->status = receive ? DP_CONNECTION : status_of_post(in->status);
    q->base.state = DP_QP_ERROR;
    /* A keepalive that was flushed tells nothing: what failed before it has, or had, a completion to show. */
    if (out->status == DP_PEER_GONE || (keepalive && first))
        dp_qp_break(&q->base, out->status == DP_PEER_GONE ? DP_PEER_GONE : DP_CONNECTION);
    return !keepalive;
}

/* Books one completion of the device and turns it into ours. False: not for the caller (a signal for our
 * own bookkeeping, or of an earlier life). */
static inline bool translate(const dpv_cq *cq, const struct ibv_wc *in, dp_wc *out) {
    uint64_t slot = in->wr_id >> DPV_SLOT_SHIFT & DPV_SLOT_MASK;
    if (slot >= cq->n_slots)
        return false;
    dpv_qp *q = cq->slots[slot].qp;
    if (!q || q->tag != (in->wr_id & DPV_TAG_MASK))
        return false;
    bool ok = in->status == IBV_WC_SUCCESS;
    uint16_t index = (uint16_t)in->wr_id;
    if (in->wr_id & DPV_RECV_BIT) {
        uint32_t done = (uint16_t)(index - (uint16_t)q->recv_tail) + 1u;
        if (done > q->recv_head - q->recv_tail)
            return false;
        q->recv_tail += done;
        /* Only wr_id, status, qp_num and vendor_err are set in a failed completion. */
        bool imm = ok && in->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
        out->wr_id = q->recv_ids[index & q->recv_mask];
        out->imm = imm ? ntohl(in->imm_data) : 0;
        out->byte_len = ok ? in->byte_len : 0;
        out->op = imm ? DP_OP_RECV_IMM : DP_OP_RECV;
    } else {
        /* A send completion vouches for all posts before it. */
        uint32_t done = (uint16_t)(index - (uint16_t)q->send_tail) + 1u;
        if (done > q->send_head - q->send_tail)
            return false;
        q->send_tail += done;
        const dpv_sent *s = &q->sent[index & q->send_mask];
        if (ok && !(s->flags & DP_SIGNALED)) {
            if (s->flags & DPV_KEEPALIVE)
                q->asking = false;
            return false;
        }
        out->wr_id = s->wr_id;
        out->imm = 0;
        out->byte_len = 0;
        out->op = s->op;
    }
    out->qp = &q->base;
    out->status = DP_OK;
    return __builtin_expect(ok, 1) || failed(q, in, out);
}

/* Each completion in the stash holds room of its queue pair until delivered. */
static uint32_t *held_by(const dp_wc *wc) {
    dpv_qp *q = dpv_qp_of(wc->qp);
    return wc->op == DP_OP_RECV || wc->op == DP_OP_RECV_IMM ? &q->recv_held : &q->send_held;
}

static int take_stashed(dpv_cq *cq, dp_wc *wc, int n) {
    int got = 0;
    for (; got < n && cq->stash_len; got++, cq->stash_len--) {
        wc[got] = cq->stash[cq->stash_head];
        cq->stash_head = cq->stash_head + 1 == cq->base.capacity ? 0 : cq->stash_head + 1;
        --*held_by(&wc[got]);
    }
    return got;
}

int dpv_cq_poll(dp_cq *base, dp_wc *wc, int n) {
    dpv_cq *cq = dpv_cq_of(base);
    int got = 0;
    if (__builtin_expect(cq->stash_len != 0, 0))
        got = take_stashed(cq, wc, n);
    /* Until the device has no more or the caller no room. Returning 0 after hidden completions only, with
     * others still behind them, would let the caller sleep on an event that has already been used up. */
    while (got < n) {
        struct ibv_wc in[DPV_POLL_BATCH];
        int want = n - got < DPV_POLL_BATCH ? n - got : DPV_POLL_BATCH;
        int m = ibv_poll_cq(cq->cq, want, in);
        if (__builtin_expect(m < 0, 0)) {
            cq->fatal = 1;
            m = 0;
        }
        for (int i = 0; i < m; i++)
            if (translate(cq, &in[i], &wc[got]))
                got++;
        if (m < want)
            break;
    }
    if (got == 0 && __builtin_expect(__atomic_load_n(&cq->fatal, __ATOMIC_ACQUIRE), 0))
        return DP_FATAL;
    return got;
}

/* Capacity suffices for the stash: a queue pair has at most max_send + max_recv completions between posting
 * and delivery, wherever they are, because those in the stash still count against its room. */
void dpv_cq_drain(dpv_cq *cq) {
    for (;;) {
        struct ibv_wc in[DPV_POLL_BATCH];
        uint32_t room = cq->base.capacity - cq->stash_len;
        int want = room < DPV_POLL_BATCH ? (int)room : DPV_POLL_BATCH;
        int m = want ? ibv_poll_cq(cq->cq, want, in) : 0;
        for (int i = 0; i < m; i++) {
            uint32_t at = cq->stash_head + cq->stash_len;
            dp_wc *wc = &cq->stash[at < cq->base.capacity ? at : at - cq->base.capacity];
            if (translate(cq, &in[i], wc)) {
                cq->stash_len++;
                ++*held_by(wc);
            }
        }
        if (m < want || want == 0)
            break;
    }
}

/* ---- slots and lives ---- */

static void begin_life(dpv_cq *cq, dpv_qp *q) {
    uint64_t epoch = cq->slots[q->slot].epoch;
    q->tag = epoch << DPV_EPOCH_SHIFT | (uint64_t)q->slot << DPV_SLOT_SHIFT;
    q->send_head = q->send_tail = q->send_held = 0;
    q->recv_head = q->recv_tail = q->recv_held = 0;
    q->unsignalled = 0;
    q->reads_pending = false;
    q->asking = false;
    q->heard_at = 0;
}

int dpv_cq_attach(dpv_cq *cq, dpv_qp *q, dp_error *err) {
    uint32_t slot = 0;
    while (slot < cq->n_slots && cq->slots[slot].qp)
        slot++;
    if (slot > DPV_SLOT_MASK)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: %u on one completion queue", slot);
    if (slot == cq->n_slots) {
        uint32_t n = cq->n_slots ? 2 * cq->n_slots : 4;
        dpv_slot *grown = realloc(cq->slots, n * sizeof *grown);
        if (!grown)
            return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair: table of %u", n);
        for (uint32_t i = cq->n_slots; i < n; i++)
            grown[i] = (dpv_slot){0};
        cq->slots = grown;
        cq->n_slots = n;
    }
    cq->slots[slot].qp = q;
    q->slot = slot;
    begin_life(cq, q);
    return DP_OK;
}

void dpv_cq_forget(dpv_cq *cq, dpv_qp *q) {
    cq->slots[q->slot].epoch++;
    begin_life(cq, q);
    /* Some devices leave a reset queue pair's completions in the queue, where they would take the room
     * that later ones count on. Their tag matches no more: draining drops them. */
    dpv_cq_drain(cq);
    uint32_t kept = 0, from = cq->stash_head, to = cq->stash_head;
    for (uint32_t i = 0; i < cq->stash_len; i++) {
        if (cq->stash[from].qp != &q->base) {
            cq->stash[to] = cq->stash[from];
            to = to + 1 == cq->base.capacity ? 0 : to + 1;
            kept++;
        }
        from = from + 1 == cq->base.capacity ? 0 : from + 1;
    }
    cq->stash_len = kept;
}

void dpv_cq_detach(dpv_cq *cq, dpv_qp *q) {
    dpv_cq_forget(cq, q);
    cq->slots[q->slot].qp = NULL;
}

/* ---- blocking ---- */

int dpv_cq_arm(dp_cq *base) {
    dpv_cq *cq = dpv_cq_of(base);
    int e = ibv_req_notify_cq(cq->cq, 0);
    return e ? DP_FATAL : DP_OK;
}

/* verbs cannot disarm. An event that was asked for and is not waited for ends the next wait early. */
void dpv_cq_disarm(dp_cq *base) { (void)base; }

void dpv_cq_promise_hot(dp_cq *base, bool hot) {
    (void)base;
    (void)hot;
}

void dpv_cq_wake(dp_cq *base) {
    int saved = errno; /* this may run in a signal handler */
    uint64_t one = 1;
    /* Fails only when 2^64-2 wakes are pending, and then the waiter wakes anyway. */
    ssize_t n = write(dpv_cq_of(base)->wake_fd, &one, sizeof one);
    (void)n;
    errno = saved;
}

/* Consumes the channel's pending events. Each tells of at least one completion since an arm; the caller
 * polls after every return, so their number does not matter. */
static bool take_events(dpv_cq *cq) {
    for (;;) {
        struct ibv_cq *which;
        void *context;
        if (dpv_ibv.get_cq_event(cq->channel, &which, &context) == 0) {
            if (++cq->unacked >= DPV_ACK_BATCH) {
                dpv_ibv.ack_cq_events(cq->cq, cq->unacked);
                cq->unacked = 0;
            }
        } else if (errno != EINTR) {
            return errno == EAGAIN;
        }
    }
}

/* Takes in what ended a wait: the queue's events, and wakes. */
static void take_wakes(dpv_cq *cq, short events, short wakes) {
    if (events && !take_events(cq))
        cq->fatal = 1;
    if (wakes) {
        uint64_t n;
        ssize_t got = read(cq->wake_fd, &n, sizeof n);
        (void)got; /* another wait may have taken them */
    }
}

/* The completion queue's channel is readable after dp_cq_arm when a completion has arrived. */
int dpv_qp_events(dp_qp *qp, int *fd) {
    *fd = dpv_cq_of(qp->cq)->channel->fd;
    return POLLIN;
}

static int wait_on(struct pollfd *fds, nfds_t n, int64_t timeout_ns) {
    struct timespec ts = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    return ppoll(fds, n, timeout_ns < 0 ? NULL : &ts, NULL);
}

int dpv_cq_wait(dp_cq *base, int64_t timeout_ns) {
    dpv_cq *cq = dpv_cq_of(base);
    dpv_dev *dev = dpv_dev_of(base->dev);
    struct pollfd fds[3] = {
        {.fd = cq->channel->fd, .events = POLLIN},
        {.fd = cq->wake_fd, .events = POLLIN},
        {.fd = dev->ctx->async_fd, .events = POLLIN},
    };
    if (wait_on(fds, 3, timeout_ns) < 0)
        return errno == EINTR ? DP_OK : DP_FATAL;
    take_wakes(cq, fds[0].revents, fds[1].revents);
    if (fds[2].revents)
        dpv_dev_drain_events(dev);
    return __atomic_load_n(&cq->fatal, __ATOMIC_ACQUIRE) ? DP_FATAL : DP_OK;
}

bool dpv_cq_wait_many(dp_cq **cqs, uint32_t n, int64_t timeout_ns) {
    dpv_dev *dev = dpv_dev_of(cqs[0]->dev);
    struct pollfd fds[2 * DPV_WAIT_MAX + 1];
    if (n > DPV_WAIT_MAX)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        fds[2 * i] = (struct pollfd){.fd = dpv_cq_of(cqs[i])->channel->fd, .events = POLLIN};
        fds[2 * i + 1] = (struct pollfd){.fd = dpv_cq_of(cqs[i])->wake_fd, .events = POLLIN};
    }
    fds[2 * n] = (struct pollfd){.fd = dev->ctx->async_fd, .events = POLLIN};
    if (wait_on(fds, 2 * n + 1, timeout_ns) < 0)
        return errno == EINTR;
    for (uint32_t i = 0; i < n; i++)
        take_wakes(dpv_cq_of(cqs[i]), fds[2 * i].revents, fds[2 * i + 1].revents);
    if (fds[2 * n].revents)
        dpv_dev_drain_events(dev);
    return true;
}

/* Completions of the ofi provider, waiting, probing. */
#include "dp_ofi.h"

#ifdef DP_HAVE_LIBFABRIC
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BATCH = 16, SENT_EVERY = 64 };

static ofi_dev *dev_of(const ofi_qp *q) { return ofi_dev_of(q->q.domain->dev); }

/* ---- create, destroy ---- */

int ofi_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    ofi_cq *cq = calloc(1, sizeof *cq);
    if (!cq)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue");
    cq->c = (dp_cq){.ops = &ofi_ops, .dev = dev, .capacity = capacity};
    cq->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (cq->wake_fd < 0) {
        int e = errno;
        free(cq);
        return dp_fail(err, DP_FATAL, e, "create completion queue: eventfd");
    }
    *out = &cq->c;
    return DP_OK;
}

void ofi_cq_destroy(dp_cq *c) {
    ofi_cq *cq = ofi_cq_of(c);
    close(cq->wake_fd);
    free(cq->qps);
    free(cq->fds);
    free(cq);
}

int ofi_cq_attach(ofi_cq *cq, ofi_qp *q, dp_error *err) {
    if (cq->n_qps == cq->cap_qps) {
        uint32_t cap = cq->cap_qps ? 2 * cq->cap_qps : 2;
        ofi_qp **qps = realloc(cq->qps, cap * sizeof *qps);
        if (qps)
            cq->qps = qps;
        struct pollfd *fds = realloc(cq->fds, (1 + 2 * (size_t)cap) * sizeof *fds);
        if (fds)
            cq->fds = fds;
        if (!qps || !fds)
            return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
        cq->cap_qps = cap;
    }
    cq->qps[cq->n_qps++] = q;
    return DP_OK;
}

void ofi_cq_detach(ofi_cq *cq, ofi_qp *q) {
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (cq->qps[i] == q)
            cq->qps[i] = cq->qps[--cq->n_qps];
}

/* ---- own posts ---- */

static ofi_op *op_of(ofi_qp *q, const void *context) {
    size_t at = (size_t)((const uint8_t *)context - (const uint8_t *)q->ops) / sizeof *q->ops;
    return context && at <= q->op_mask ? &q->ops[at] : NULL;
}

static void completed(ofi_qp *q, ofi_op *op) {
    if (op->op == DP_OP_READ || ofi_is_atomic(op))
        q->returning--;
    if (ofi_is_atomic(op))
        q->atomic = false;
    if (++op->completed == op->steps) {
        op->done = true;
        q->watched -= op->watched;
    }
    while (q->tail != q->next && q->ops[q->tail & q->op_mask].done)
        q->tail++;
}

static void take_completion(ofi_qp *q, const void *context) {
    ofi_op *op = op_of(q, context);
    q->signs++;
    if (op) {
        q->flight--;
        completed(q, op);
    } else if (context == &q->own_keepalive) {
        q->flight--;
        q->watched--;
        q->ask = OFI_ASK_NONE;
    } else if (context == &q->own_bye) {
        q->bye_acked = true;
    }
}

/* Reads the error that a completion queue reports, and ends the connection. */
static void take_error(ofi_qp *q, struct fid_cq *cq) {
    struct fi_cq_err_entry e = {0};
    if (fi_cq_readerr(cq, &e, 0) != 1)
        return;
    ofi_qp_fail(q, cq == q->tx ? op_of(q, e.op_context) : NULL, ofi_status_of(e.err));
}

void ofi_take_sent(ofi_qp *q) {
    struct fi_cq_data_entry e[BATCH];
    ssize_t n;
    while (q->ep && (n = fi_cq_read(q->tx, e, BATCH)) != -FI_EAGAIN) {
        if (n < 0) {
            take_error(q, q->tx);
            break;
        }
        for (ssize_t i = 0; i < n; i++)
            take_completion(q, e[i].op_context);
    }
    ofi_issue(q);
}

static bool is_shown(const ofi_op *op) { return op->flags & DP_SIGNALED || op->status != DP_OK; }

void ofi_skip_hidden(ofi_qp *q) {
    while (q->shown != q->tail && !is_shown(&q->ops[q->shown & q->op_mask]))
        q->shown++;
}

static int deliver_sent(ofi_qp *q, dp_wc *wc, int n) {
    int got = 0;
    for (ofi_skip_hidden(q); got < n && q->shown != q->tail; ofi_skip_hidden(q)) {
        const ofi_op *op = &q->ops[q->shown++ & q->op_mask];
        wc[got++] = (dp_wc){.wr_id = op->wr_id, .qp = &q->q, .status = op->status, .op = op->op};
    }
    return got;
}

/* ---- arrivals ---- */

static dp_wc arrival(ofi_qp *q, const struct fi_cq_data_entry *e) {
    const ofi_dev *dev = dev_of(q);
    ofi_data d = ofi_data_unpack(e->data);
    dp_wc wc = {.wr_id = q->recvs[q->rdone & q->recv_mask], .qp = &q->q, .op = DP_OP_RECV_IMM};
    if (dev->messages) {
        memcpy(&wc.imm, ((struct ofi_arrival *)e->op_context)->bytes, 4);
        memcpy(&wc.byte_len, ((struct ofi_arrival *)e->op_context)->bytes + 4, 4);
    } else {
        wc.imm = d.value;
        wc.byte_len = !dev->numbered ? (uint32_t)e->len : d.len == OFI_LEN_ANNOUNCED ? q->announced : d.len;
    }
    q->rdone++;
    return wc;
}

/* Reports whether the caller is to see this arrival. If a write before it was lost, ends the connection. */
static bool in_order(ofi_qp *q, const struct fi_cq_data_entry *e) {
    if (!dev_of(q)->numbered)
        return true;
    ofi_data d = ofi_data_unpack(e->data);
    if (d.number != (q->next_number & OFI_NUMBER_MASK)) {
        ofi_qp_fail(q, NULL, DP_CONNECTION);
        return false;
    }
    q->next_number++;
    if (d.hidden && d.len == OFI_ANNOUNCE)
        q->announced = d.value;
    return !d.hidden;
}

static bool receives(const ofi_qp *q) { return q->ep && q->q.state == DP_QP_CONNECTED && q->rposted != q->rdone; }

/* Reads one entry of libfabric's queue of arrivals. False: there is none, or the connection has ended. */
static bool read_arrival(ofi_qp *q, struct fi_cq_data_entry *e) {
    ssize_t r = fi_cq_read(q->rx, e, 1);
    if (r == -FI_EAGAIN)
        return false;
    if (r < 0) {
        take_error(q, q->rx);
        return false;
    }
    q->signs++;
    bool messages = dev_of(q)->messages;
    bool bye = messages ? e->len == 0 && e->flags & FI_RECV : e->op_context == &q->bye;
    bool good = messages ? e->len == sizeof q->arrivals->bytes && e->flags & FI_RECV : (e->flags & FI_REMOTE_CQ_DATA) != 0;
    if (bye || !good) { /* not good: something that rfaas never sends */
        ofi_qp_fail(q, NULL, bye ? DP_PEER_GONE : DP_CONNECTION);
        return false;
    }
    return true;
}

/* Takes one arrival off libfabric's queue. Without a posted receive arrivals stay there. */
static bool take_arrival(ofi_qp *q, dp_wc *out) {
    struct fi_cq_data_entry e;
    for (int hidden = 0; hidden < BATCH && receives(q) && read_arrival(q, &e); hidden++)
        if (in_order(q, &e)) {
            *out = arrival(q, &e);
            return true;
        }
    return false;
}

void ofi_save_arrivals(ofi_qp *q) {
    while (q->n_saved < q->q.max_recv && take_arrival(q, &q->saved[q->n_saved]))
        q->n_saved++;
}

static int deliver_arrived(ofi_qp *q, dp_wc *wc, int n) {
    int got = 0;
    for (; got < n && q->saved_at < q->n_saved; got++)
        wc[got] = q->saved[q->saved_at++];
    while (got < n && take_arrival(q, &wc[got]))
        got++;
    return got;
}

/* Reports whether a poll must look at the completions of own posts. A poll that looks only at arrivals saves system calls, and libfabric makes
 * the same progress. */
static bool sent_due(ofi_qp *q, int n) {
    return q->watched || q->next != q->head || n == 0 || !receives(q) || ++q->polls % SENT_EVERY == 0;
}

int ofi_cq_poll(dp_cq *c, dp_wc *wc, int n) {
    ofi_cq *cq = ofi_cq_of(c);
    int got = 0;
    if (n && cq->n_qps) /* only a poll that can return completions moves the turn to the next queue pair */
        cq->next = (cq->next + 1) % cq->n_qps;
    for (uint32_t i = 0; i < cq->n_qps; i++) {
        ofi_qp *q = cq->qps[(cq->next + i) % cq->n_qps];
        if (q->ep && sent_due(q, n))
            ofi_take_sent(q);
        if (got < n && q->gone) /* what arrived before the failure comes first: the channel ends its calls at the first failed post */
            got += deliver_arrived(q, wc + got, n - got);
        if (got < n)
            got += deliver_sent(q, wc + got, n - got);
        if (got < n)
            got += deliver_arrived(q, wc + got, n - got);
    }
    return got;
}

/* ---- waiting ---- */

/* Without descriptors libfabric's tcp waits for its socket by poll() and not by an epoll inside an epoll, which takes a fifth less time. */
void ofi_cq_promise_hot(dp_cq *c, bool hot) { ofi_cq_of(c)->hot = hot; }

int ofi_cq_arm(dp_cq *c) {
    ofi_cq_of(c)->hot = false;
    return DP_OK;
}

void ofi_cq_disarm(dp_cq *c) { (void)c; }

void ofi_cq_wake(dp_cq *c) {
    int saved = errno; /* this may run in a signal handler */
    uint64_t one = 1;
    ssize_t n = write(ofi_cq_of(c)->wake_fd, &one, sizeof one);
    (void)n;
    errno = saved;
}

/* Adds the descriptors to wait for. Returns false if there is something to do at once. Sets *blind if only polling finds what happens. */
static bool prepare(ofi_cq *cq, ofi_qp *q, nfds_t *n, bool *blind) {
    if (q->ep)
        ofi_take_sent(q);
    ofi_skip_hidden(q);
    if (q->shown != q->tail || q->saved_at < q->n_saved)
        return false;
    if (!q->ep)
        return true;
    struct fid *fids[2] = {&q->tx->fid, &q->rx->fid};
    int count = q->rposted != q->rdone && q->q.state == DP_QP_CONNECTED ? 2 : 1;
    if (q->next != q->head || q->ask == OFI_ASK_DUE || q->tx_fd < 0 || (count == 2 && q->rx_fd < 0)) {
        *blind = true;
        return true;
    }
    int e = fi_trywait(dev_of(q)->fabric, fids, count);
    if (e == -FI_EAGAIN)
        return false;
    if (e)
        *blind = true;
    cq->fds[(*n)++] = (struct pollfd){.fd = q->tx_fd, .events = POLLIN};
    if (count == 2)
        cq->fds[(*n)++] = (struct pollfd){.fd = q->rx_fd, .events = POLLIN};
    return true;
}

int ofi_cq_wait(dp_cq *c, int64_t timeout_ns) {
    ofi_cq *cq = ofi_cq_of(c);
    struct pollfd only_wake;
    struct pollfd *fds = cq->fds ? cq->fds : &only_wake;
    nfds_t n = 1;
    bool blind = false;
    fds[0] = (struct pollfd){.fd = cq->wake_fd, .events = POLLIN};
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (!prepare(cq, cq->qps[i], &n, &blind))
            return DP_OK;
    if (blind && (timeout_ns < 0 || timeout_ns > OFI_BLIND_NS))
        timeout_ns = OFI_BLIND_NS;
    struct timespec ts = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    if (ppoll(fds, n, timeout_ns < 0 ? NULL : &ts, NULL) < 0)
        return errno == EINTR ? DP_OK : DP_FATAL;
    if (fds[0].revents) {
        uint64_t count;
        ssize_t got = read(cq->wake_fd, &count, sizeof count);
        (void)got;
    }
    return DP_OK;
}

/* ---- probing ---- */

/* Posts a write of no bytes if nothing has come from the peer for a while: libfabric reports a dead peer only through an operation. */
static void keepalive(ofi_qp *q) {
    int64_t now = dp_now_ns();
    if (!q->heard_at || q->signs != q->heard_signs) {
        q->heard_at = now;
        q->heard_signs = q->signs;
    } else if (now - q->heard_at >= dev_of(q)->keepalive_ns) {
        ofi_post_keepalive(q);
    }
}

/* ofi_rxm tries to connect without end, for example to a port that a firewall blocks. So a client gives up after some time. A worker does
 * not, because its client need not poll. */
static bool unreachable(const ofi_qp *q) {
    return !q->signs && (q->head != 0 || q->ask != OFI_ASK_NONE) && !dev_of(q)->active_only &&
           dp_now_ns() - q->connected_at > OFI_REACH_KEEPALIVES * dev_of(q)->keepalive_ns;
}

int ofi_qp_probe(dp_qp *qp) {
    ofi_qp *q = ofi_qp_of(qp);
    if (q->ep)
        ofi_take_sent(q);
    if (!(qp->domain->dev->caps & DP_CAP_POLLED_TARGET)) { /* otherwise a waiting post does not show that the peer's device is silent */
        qp->posted = q->head;
        qp->arrived = q->tail;
    }
    if (!dp_qp_broken(qp) && qp->state == DP_QP_ERROR)
        dp_qp_break(qp, DP_CONNECTION);
    if (!dp_qp_broken(qp) && qp->state == DP_QP_CONNECTED && unreachable(q))
        dp_qp_break(qp, DP_PEER_GONE);
    if (!dp_qp_broken(qp) && qp->state == DP_QP_CONNECTED)
        keepalive(q);
    return dp_qp_broken(qp);
}
#endif

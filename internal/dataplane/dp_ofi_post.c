/* The send queue of an ofi queue pair: which post may be issued, and in which form. */
#include "dp_ofi.h"

#ifdef DP_HAVE_LIBFABRIC
#include "dp_wire.h"

#include <string.h>

static ofi_dev *dev_of(const ofi_qp *q) { return ofi_dev_of(q->q.domain->dev); }
static uint8_t *slot_of(const ofi_qp *q, const ofi_op *op) { return q->copies + (size_t)(op - q->ops) * OFI_SLOT; }
static void *desc_of(struct fid_mr *mr) { return mr ? fi_mr_desc(mr) : NULL; }

int ofi_status_of(int e) {
    switch (e) {
    case FI_EACCES:
    case FI_EPERM:
    case FI_EINVAL:
    case FI_EMSGSIZE: return DP_INVALID;
    case FI_ECONNREFUSED:
    case FI_ECONNRESET:
    case FI_ECONNABORTED:
    case FI_ENOTCONN:
    case FI_EHOSTUNREACH:
    case FI_EHOSTDOWN:
    case FI_ENETUNREACH:
    case FI_ETIMEDOUT:
    case FI_ESHUTDOWN:
    case FI_EIO:
    case FI_ECANCELED: /* the connection that it was on has ended */ return DP_PEER_GONE;
    default: return DP_CONNECTION;
    }
}

/* ---- issuing ---- */

/* Any region that may be written: a write of no bytes needs a valid key. */
static const ofi_region *any_writable(const ofi_qp *q) {
    for (uint32_t i = 0; i < q->n_regions; i++)
        if (q->regions[i].access & DP_REMOTE_WRITE)
            return &q->regions[i];
    return NULL;
}

/* Reports whether the next operation of op may be issued while others are outstanding. A message, an atomic, and any operation on a
 * provider without order wait for all of them. A write waits for reads, because the target may execute a read later than a write behind
 * it. All wait for an atomic. */
static bool may_issue(const ofi_qp *q, const ofi_op *op, bool message) {
    if (q->flight == 0)
        return true;
    if (!q->signs) /* the first sign of life shows that the peer can be reached: see ofi_qp_probe */
        return false;
    if (!dev_of(q)->kind->ordered || message || ofi_is_atomic(op) || q->atomic)
        return false;
    return op->op == DP_OP_READ || q->returning == 0;
}

static bool is_message(const ofi_qp *q, const ofi_op *op) {
    return op->with_imm && dev_of(q)->messages && op->issued + 1 == op->steps;
}

/* Reports whether the peer must acknowledge the next operation of op. */
static bool wants_ack(const ofi_qp *q, const ofi_op *op) {
    return !dev_of(q)->numbered || !op->with_imm || op->flags & DP_SIGNALED || q->sent_number % OFI_ACK_EVERY == 0;
}

/* The immediate data of the next operation of op. */
static uint64_t data_of(const ofi_qp *q, const ofi_op *op, bool announcement) {
    if (!dev_of(q)->numbered)
        return op->imm;
    ofi_data d = {.value = op->imm, .len = op->total, .number = q->sent_number, .hidden = announcement};
    if (announcement) {
        d.value = op->total;
        d.len = OFI_ANNOUNCE;
    } else if (op->announces) {
        d.len = OFI_LEN_ANNOUNCED;
    }
    return ofi_data_pack(d);
}

/* The operands stay valid during the call only; the pieces until the operation completes. */
static ssize_t issue_rma(ofi_qp *q, ofi_op *op) {
    const ofi_dev *dev = dev_of(q);
    struct iovec iov[2];
    void *desc[2];
    bool announcement = op->announces && op->issued == 0;
    uint32_t first = dev->iov_limit < op->n_pieces ? op->issued : 0;
    uint32_t n = announcement ? 0 : dev->iov_limit < op->n_pieces ? 1 : op->n_pieces, len = 0;
    uint64_t addr = op->raddr;
    for (uint32_t i = 0; i < first; i++)
        addr += op->len[i];
    for (uint32_t i = 0; i < n; i++) {
        iov[i] = (struct iovec){.iov_base = (void *)(uintptr_t)op->from[first + i], .iov_len = op->len[first + i]};
        desc[i] = op->desc[first + i];
        len += op->len[first + i];
    }
    struct fi_rma_iov there = {.addr = addr, .len = len, .key = op->key};
    struct fi_msg_rma m = {.msg_iov = iov, .desc = desc, .iov_count = n, .addr = q->peer, .rma_iov = &there, .rma_iov_count = 1,
                           .context = &op->contexts[op->issued]};
    uint64_t flags = FI_COMPLETION;
    if (op->op == DP_OP_READ)
        return fi_readmsg(q->ep, &m, flags);
    if (dev->delivery && wants_ack(q, op))
        flags |= FI_DELIVERY_COMPLETE;
    if (op->with_imm && !dev->messages && (announcement || op->issued + 1 == op->steps)) {
        flags |= FI_REMOTE_CQ_DATA;
        m.data = data_of(q, op, announcement);
    }
    return fi_writemsg(q->ep, &m, flags);
}

static ssize_t issue_message(ofi_qp *q, ofi_op *op) {
    uint8_t *at = slot_of(q, op) + OFI_INLINE_MAX;
    uint32_t words[2] = {op->imm, op->total};
    memcpy(at, words, sizeof words);
    return fi_send(q->ep, at, sizeof words, desc_of(q->copies_mr), q->peer, &op->contexts[op->issued]);
}

static ssize_t issue_atomic(ofi_qp *q, ofi_op *op) {
    uint8_t *operand = slot_of(q, op) + OFI_INLINE_MAX, *expected = operand + sizeof op->operands[0];
    void *old = (void *)(uintptr_t)op->from[0], *copies = desc_of(q->copies_mr), *context = &op->contexts[op->issued];
    memcpy(operand, op->operands, sizeof op->operands);
    if (op->op == DP_OP_FETCH_ADD)
        return fi_fetch_atomic(q->ep, operand, 1, copies, old, op->desc[0], q->peer, op->raddr, op->key, FI_UINT64, FI_SUM, context);
    return fi_compare_atomic(q->ep, operand, 1, copies, expected, copies, old, op->desc[0], q->peer, op->raddr, op->key, FI_UINT64,
                             FI_CSWAP, context);
}

/* Libfabric has refused a post (FI_EAGAIN). Reports whether the peer counts as gone. A live peer that takes no data has operations in flight.
 * Atomics do not count: ofi_rxm forgets them when a connection ends. */
static bool is_lost(ofi_qp *q) {
    if (q->flight > q->atomic || !q->signs)
        return false;
    int64_t now = dp_now_ns(), since = q->refused_at ? now - q->refused_at : 0;
    q->refused_at = now;
    q->refused_ns += since < OFI_POLLED_NS ? since : OFI_POLLED_NS;
    return q->refused_ns > OFI_LOST_KEEPALIVES * dev_of(q)->keepalive_ns;
}

/* Looks at libfabric's answer to an operation. Returns whether libfabric has taken it. If not, the queue pair may have failed. */
static bool taken(ofi_qp *q, ofi_op *op, ssize_t e) {
    if (!e) {
        q->refused_at = q->refused_ns = 0;
        q->flight++;
    } else if (e != -FI_EAGAIN) {
        ofi_qp_fail(q, op, ofi_status_of((int)-e));
    } else if (is_lost(q)) {
        ofi_qp_fail(q, op, DP_PEER_GONE);
    }
    return !e;
}

/* If immediate data is numbered, the keepalive has the next number, so that the peer notices writes that were lost before it. */
static void issue_keepalive(ofi_qp *q) {
    const ofi_dev *dev = dev_of(q);
    const ofi_region *r = any_writable(q);
    struct fi_rma_iov there = {.addr = q->peer_virt ? r->base : 0, .key = r->key};
    struct fi_msg_rma m = {.addr = q->peer, .rma_iov = &there, .rma_iov_count = 1, .context = &q->own_keepalive};
    uint64_t flags = FI_COMPLETION | (dev->delivery ? FI_DELIVERY_COMPLETE : 0);
    if (dev->numbered) {
        flags |= FI_REMOTE_CQ_DATA;
        m.data = ofi_data_pack((ofi_data){.len = OFI_CHECK, .number = q->sent_number, .hidden = true});
    }
    if (!taken(q, NULL, fi_writemsg(q->ep, &m, flags)))
        return;
    q->ask = OFI_ASK_SENT;
    q->sent_number += dev->numbered;
}

void ofi_issue(ofi_qp *q) {
    if (q->ask == OFI_ASK_DUE && q->ep && !dp_qp_broken(&q->q))
        issue_keepalive(q);
    while (q->next != q->head && q->ep && !dp_qp_broken(&q->q)) {
        ofi_op *op = &q->ops[q->next & q->op_mask];
        bool message = is_message(q, op);
        if (!may_issue(q, op, message))
            return;
        ssize_t e = ofi_is_atomic(op) ? issue_atomic(q, op) : message ? issue_message(q, op) : issue_rma(q, op);
        if (!taken(q, op, e))
            return;
        if (!op->watched && wants_ack(q, op)) {
            op->watched = true;
            q->watched++;
        }
        q->sent_number += dev_of(q)->numbered && op->with_imm;
        q->returning += op->op == DP_OP_READ || ofi_is_atomic(op);
        q->atomic |= ofi_is_atomic(op);
        if (++op->issued == op->steps)
            q->next++;
    }
}

/* ---- posting ---- */

/* The peer's region with this key and right that holds the bytes; NULL: none. */
static const ofi_region *find(const ofi_qp *q, uint32_t rkey, uint64_t raddr, uint64_t len, uint32_t right) {
    for (uint32_t i = 0; i < q->n_regions; i++) {
        const ofi_region *r = &q->regions[i];
        if (r->rkey == rkey && (r->access & right) && raddr >= r->base && raddr - r->base <= r->size && len <= r->size - (raddr - r->base))
            return r;
    }
    return NULL;
}

/* Finds room for a post: DP_OK, DP_BUSY or DP_CONNECTION. */
static int room(ofi_qp *q) {
    if (q->q.state != DP_QP_CONNECTED || dp_qp_broken(&q->q))
        return DP_CONNECTION;
    if (q->head - q->shown < q->q.max_send)
        return DP_OK;
    ofi_take_sent(q);
    ofi_skip_hidden(q);
    if (q->q.state != DP_QP_CONNECTED)
        return DP_CONNECTION;
    return q->head - q->shown < q->q.max_send ? DP_OK : DP_BUSY;
}

static ofi_op *new_op(ofi_qp *q, uint32_t op, uint64_t wr_id, uint32_t flags) {
    ofi_op *o = &q->ops[q->head & q->op_mask];
    *o = (ofi_op){.wr_id = wr_id, .op = (uint8_t)op, .flags = flags, .steps = 1};
    return o;
}

static void aim(const ofi_qp *q, ofi_op *op, const ofi_region *r, uint64_t raddr) {
    op->key = r->key;
    op->raddr = q->peer_virt ? raddr : raddr - r->base;
}

/* Appends a piece of local memory to the post. Returns false if the lkey belongs to no registered memory. */
static bool set_piece(ofi_qp *q, ofi_op *op, const dp_sge *s) {
    ofi_domain *d = ofi_domain_of(q->q.domain);
    op->from[op->n_pieces] = s->addr;
    op->len[op->n_pieces] = s->len;
    if (dev_of(q)->local) {
        pthread_mutex_lock(&dev_of(q)->lock);
        ofi_mem *m = s->lkey - 1 < d->n_local ? d->local[s->lkey - 1] : NULL;
        op->desc[op->n_pieces] = m ? desc_of(m->local) : NULL;
        pthread_mutex_unlock(&dev_of(q)->lock);
        if (!m)
            return false;
    }
    op->n_pieces++;
    return true;
}

/* Takes the source of a write. It copies up to OFI_INLINE_MAX bytes, which the caller may then reuse at once. */
static bool set_source(ofi_qp *q, ofi_op *op, const dp_sge *sge, int n) {
    if (op->total > OFI_INLINE_MAX) {
        for (int i = 0; i < n; i++)
            if (sge[i].len && !set_piece(q, op, &sge[i]))
                return false;
        return true;
    }
    uint8_t *copy = slot_of(q, op), *at = copy;
    for (int i = 0; i < n; i++)
        if (sge[i].len) {
            memcpy(at, sge[i].addr, sge[i].len);
            at += sge[i].len;
        }
    op->from[0] = copy;
    op->len[0] = op->total;
    op->desc[0] = desc_of(q->copies_mr);
    op->n_pieces = op->total ? 1 : 0;
    return true;
}

/* ofi_rxm may have lost an acknowledged operation and be about to reconnect. Nothing must follow that operation on the new connection, so this
 * looks for its error first. The numbers do not show every such loss, because only writes with immediate data have them. */
static int commit(ofi_qp *q) {
    q->head++;
    if (q->watched)
        ofi_take_sent(q);
    else
        ofi_issue(q);
    return DP_OK;
}

static int post_out(ofi_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, bool with_imm, uint32_t imm, uint64_t wr_id,
                    uint32_t flags) {
    const ofi_dev *dev = dev_of(q);
    int st = room(q);
    if (st)
        return st;
    uint64_t total = 0;
    for (int i = 0; i < n; i++)
        total += sge[i].len;
    if (n < 0 || n > 2 || total > dev->d.max_msg)
        return DP_INVALID;
    const ofi_region *r = total ? find(q, rkey, raddr, total, DP_REMOTE_WRITE) : any_writable(q);
    if (!r && (total || !dev->messages))
        return DP_INVALID;
    ofi_op *op = new_op(q, DP_OP_WRITE, wr_id, flags);
    op->with_imm = with_imm;
    op->imm = imm;
    op->total = (uint32_t)total;
    if (!set_source(q, op, sge, n))
        return DP_INVALID;
    if (r)
        aim(q, op, r, total ? raddr : r->base);
    op->announces = with_imm && dev->numbered && total >= OFI_LEN_ANNOUNCED;
    op->steps = dev->iov_limit < op->n_pieces ? op->n_pieces : 1 + op->announces;
    if (with_imm && dev->messages && total)
        op->steps++;
    return commit(q);
}

int ofi_post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    return post_out(ofi_qp_of(qp), sge, n, raddr, rkey, false, 0, wr_id, flags);
}

int ofi_post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                       uint32_t flags) {
    return post_out(ofi_qp_of(qp), sge, n, raddr, rkey, true, imm, wr_id, flags);
}

void ofi_post_keepalive(ofi_qp *q) {
    if (q->ask != OFI_ASK_NONE || !any_writable(q))
        return;
    q->ask = OFI_ASK_DUE;
    q->watched++;
    ofi_issue(q);
}

bool ofi_say_bye(ofi_qp *q) {
    if (!q->said_bye)
        q->said_bye = !fi_send(q->ep, q->copies, 0, desc_of(q->copies_mr), q->peer, &q->own_bye);
    return q->said_bye;
}

int ofi_post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    ofi_qp *q = ofi_qp_of(qp);
    int st = room(q);
    if (st)
        return st;
    if (!sge || sge->len > dev_of(q)->d.max_msg)
        return DP_INVALID;
    const ofi_region *r = find(q, rkey, raddr, sge->len, DP_REMOTE_READ);
    if (!r)
        return DP_INVALID;
    ofi_op *op = new_op(q, DP_OP_READ, wr_id, flags);
    op->total = sge->len;
    if (!set_piece(q, op, sge))
        return DP_INVALID;
    aim(q, op, r, raddr);
    return commit(q);
}

static int post_atomic(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, int kind, uint64_t operand, uint64_t expected,
                       uint64_t wr_id, uint32_t flags) {
    ofi_qp *q = ofi_qp_of(qp);
    if (!dev_of(q)->kind->atomics)
        return DP_UNSUPPORTED;
    int st = room(q);
    if (st)
        return st;
    const ofi_region *r = find(q, rkey, raddr, 8, DP_REMOTE_ATOMIC);
    if (!sge || raddr & 7 || !r)
        return DP_INVALID;
    ofi_op *op = new_op(q, kind, wr_id, flags);
    op->total = 8;
    op->operands[0] = operand;
    op->operands[1] = expected;
    if (!set_piece(q, op, sge))
        return DP_INVALID;
    aim(q, op, r, raddr);
    return commit(q);
}

int ofi_post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id, uint32_t flags) {
    return post_atomic(qp, sge, raddr, rkey, DP_OP_FETCH_ADD, add, 0, wr_id, flags);
}

int ofi_post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags) {
    return post_atomic(qp, sge, raddr, rkey, DP_OP_COMPARE_SWAP, desired, expected, wr_id, flags);
}

int ofi_post_recv(dp_qp *qp, uint64_t wr_id) {
    ofi_qp *q = ofi_qp_of(qp);
    if (q->gone && q->rposted - q->rdone < qp->max_recv) { /* for an arrival from before the failure, which the caller still handles */
        q->rposted++;
        return DP_OK;
    }
    if (qp->state == DP_QP_ERROR || !q->ep)
        return DP_CONNECTION;
    if (q->rposted - q->rdone >= qp->max_recv)
        return DP_BUSY;
    uint32_t at = q->rposted & q->recv_mask;
    if (dev_of(q)->messages) {
        ssize_t e = fi_recv(q->ep, q->arrivals[at].bytes, sizeof q->arrivals[at].bytes, desc_of(q->arrivals_mr), FI_ADDR_UNSPEC,
                            &q->arrivals[at]);
        if (e)
            return e == -FI_EAGAIN ? DP_BUSY : DP_CONNECTION;
    }
    q->recvs[at] = wr_id;
    q->rposted++;
    return DP_OK;
}
#endif

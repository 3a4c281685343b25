/* Posting work on a verbs queue pair. This is the hot path: one struct on the stack, one call. */
#include "dp_verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stddef.h>

_Static_assert(DPV_MAX_SGE == 2, "gather handles two");

/* Every operation gets its own copy of the path, in which what is constant for it is folded away. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* Reports whether a send-queue entry is free. If none is, completions that the caller has not polled may
 * free some. They go to the stash. The provider signals some posts by itself, so this works for a caller that never polls. */
static bool make_room(dpv_qp *q) {
    if (q->send_head - q->send_tail + q->send_held < q->base.max_send)
        return true;
    dpv_cq_drain(dpv_cq_of(q->base.cq));
    return q->send_head - q->send_tail + q->send_held < q->base.max_send;
}

/* What a post that the device refused means to the caller. */
static int post_failed(dpv_qp *q, int e) {
    if (e == ENOMEM)
        return DP_BUSY;
    if (e == EINVAL)
        return DP_INVALID;
    /* soft-RoCE may have queued the request before its doorbell failed (EACCES after a change of
     * credentials): the queue no longer matches our books. */
    q->base.state = DP_QP_ERROR;
    return DP_CONNECTION;
}

static ALWAYS_INLINE int post(dpv_qp *q, struct ibv_send_wr *wr, uint32_t op, uint64_t wr_id,
                              uint32_t flags) {
    if (__builtin_expect(q->base.state != DP_QP_CONNECTED, 0))
        return DP_CONNECTION;
    if (__builtin_expect(q->send_head - q->send_tail + q->send_held >= q->base.max_send, 0)) {
        if (!make_room(q))
            return q->base.state == DP_QP_CONNECTED ? DP_BUSY : DP_CONNECTION;
        if (q->base.state != DP_QP_CONNECTED)
            return DP_CONNECTION;
    }
    uint32_t head = q->send_head;
    bool signal = flags & (DP_SIGNALED | DPV_KEEPALIVE) || q->unsignalled + 1 >= q->signal_every;
    bool is_read = op != DP_OP_WRITE; /* or atomic */
    wr->wr_id = q->tag | (head & DPV_INDEX_MASK);
    wr->next = NULL;
    if (signal)
        wr->send_flags |= IBV_SEND_SIGNALED;
    if (__builtin_expect(q->reads_pending, 0) && !is_read) {
        /* InfiniBand lets a write overtake an earlier read or atomic; our contract does not. */
        if ((int32_t)(q->reads_end - q->send_tail) > 0)
            wr->send_flags |= IBV_SEND_FENCE;
        else
            q->reads_pending = false;
    }
    q->sent[head & q->send_mask] = (dpv_sent){.wr_id = wr_id, .op = op, .flags = flags};
    struct ibv_send_wr *bad;
    int e = ibv_post_send(q->qp, wr, &bad);
    if (__builtin_expect(e, 0))
        return post_failed(q, e);
    q->send_head = head + 1;
    q->unsignalled = signal ? 0 : q->unsignalled + 1;
    if (is_read) {
        q->reads_pending = true;
        q->reads_end = head + 1;
    }
    return DP_OK;
}

/* The two structs are one, so that pieces go to the device where the caller has them. */
_Static_assert(sizeof(dp_sge) == sizeof(struct ibv_sge), "dp_sge is ibv_sge");
_Static_assert(offsetof(dp_sge, addr) == offsetof(struct ibv_sge, addr) &&
                   offsetof(dp_sge, len) == offsetof(struct ibv_sge, length) &&
                   offsetof(dp_sge, lkey) == offsetof(struct ibv_sge, lkey) &&
                   sizeof(void *) == sizeof(uint64_t),
               "dp_sge is ibv_sge");

/* Sets the pieces of a request, without those that are empty (a length of 0 means 2 GiB to some devices):
 * of two, the first or the last can simply be left off. Returns the total. */
static ALWAYS_INLINE uint64_t gather(const dp_sge *sge, int n, struct ibv_sge **list, int *num) {
    uint64_t total = 0;
    if (n == 2 && !sge[0].len) {
        sge++;
        n--;
    }
    for (int i = 0; i < n; i++)
        total += sge[i].len;
    if (n && !sge[n - 1].len)
        n--;
    *list = (struct ibv_sge *)(uintptr_t)sge;
    *num = n;
    return total;
}

static ALWAYS_INLINE int post_out(dpv_qp *q, enum ibv_wr_opcode opcode, const dp_sge *sge, int n,
                                  uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t limit, uint32_t op,
                                  uint64_t wr_id, uint32_t flags) {
    if (__builtin_expect(n < 0 || n > DPV_MAX_SGE, 0))
        return DP_INVALID;
    struct ibv_send_wr wr;
    uint64_t total = gather(sge, n, &wr.sg_list, &wr.num_sge);
    if (__builtin_expect(total > limit, 0))
        return DP_INVALID;
    wr.opcode = opcode;
    wr.send_flags = total && total <= q->base.max_inline ? IBV_SEND_INLINE : 0;
    wr.imm_data = htonl(imm);
    wr.wr.rdma.remote_addr = raddr;
    wr.wr.rdma.rkey = rkey;
    return post(q, &wr, op, wr_id, flags);
}

int dpv_post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                   uint32_t flags) {
    return post_out(dpv_qp_of(qp), IBV_WR_RDMA_WRITE, sge, n, raddr, rkey, 0, dpv_qp_of(qp)->max_msg,
                    DP_OP_WRITE, wr_id, flags);
}

int dpv_post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                       uint64_t wr_id, uint32_t flags) {
    return post_out(dpv_qp_of(qp), IBV_WR_RDMA_WRITE_WITH_IMM, sge, n, raddr, rkey, imm,
                    dpv_qp_of(qp)->max_msg, DP_OP_WRITE, wr_id, flags);
}

int dpv_post_keepalive(dpv_qp *q) {
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE};
    return post(q, &wr, DP_OP_WRITE, 0, DPV_KEEPALIVE);
}

int dpv_post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                  uint32_t flags) {
    struct ibv_send_wr wr;
    if (!sge || gather(sge, 1, &wr.sg_list, &wr.num_sge) > dpv_qp_of(qp)->max_msg)
        return DP_INVALID;
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = 0;
    wr.wr.rdma.remote_addr = raddr;
    wr.wr.rdma.rkey = rkey;
    return post(dpv_qp_of(qp), &wr, DP_OP_READ, wr_id, flags);
}

/* operand: what is added, or what the word is compared with. */
static int post_atomic(dpv_qp *q, enum ibv_wr_opcode opcode, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t operand,
                       uint64_t desired, uint32_t op, uint64_t wr_id, uint32_t flags) {
    if (!dpv_dev_of(q->base.domain->dev)->atomics)
        return DP_UNSUPPORTED;
    if (!sge || raddr & 7)
        return DP_INVALID;
    struct ibv_sge list = {.addr = (uintptr_t)sge->addr, .length = 8, .lkey = sge->lkey};
    struct ibv_send_wr wr;
    wr.sg_list = &list;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = 0;
    wr.wr.atomic.remote_addr = raddr;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = operand;
    wr.wr.atomic.swap = desired;
    return post(q, &wr, op, wr_id, flags);
}

int dpv_post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add,
                       uint64_t wr_id, uint32_t flags) {
    return post_atomic(dpv_qp_of(qp), IBV_WR_ATOMIC_FETCH_AND_ADD, sge, raddr, rkey, add, 0, DP_OP_FETCH_ADD, wr_id, flags);
}

int dpv_post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags) {
    return post_atomic(dpv_qp_of(qp), IBV_WR_ATOMIC_CMP_AND_SWP, sge, raddr, rkey, expected, desired, DP_OP_COMPARE_SWAP, wr_id, flags);
}

int dpv_post_recv(dp_qp *base, uint64_t wr_id) {
    dpv_qp *q = dpv_qp_of(base);
    if (base->state == DP_QP_ERROR)
        return DP_CONNECTION;
    /* Completions in the stash count: their successors could not all be kept otherwise. */
    if (q->recv_head - q->recv_tail + q->recv_held >= base->max_recv)
        return DP_BUSY;
    struct ibv_recv_wr wr = {.wr_id = q->tag | DPV_RECV_BIT | (q->recv_head & DPV_INDEX_MASK)};
    q->recv_ids[q->recv_head & q->recv_mask] = wr_id;
    struct ibv_recv_wr *bad;
    int e = ibv_post_recv(q->qp, &wr, &bad);
    if (e)
        return post_failed(q, e);
    q->recv_head++;
    return DP_OK;
}

/* A region behind a network card has no local address. */
void *dpv_rkey_ptr(dp_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len) {
    (void)qp;
    (void)raddr;
    (void)rkey;
    (void)len;
    return NULL;
}

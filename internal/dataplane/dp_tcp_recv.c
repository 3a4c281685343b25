/* Parsing frames from a connection's stream. Peers are not trusted: each frame is checked before it takes effect. A malformed or
 * forbidden frame ends the connection with DP_PROTOCOL.
 *
 * Bytes are received into a staging buffer, so several small frames need only one system call. The rest of a large payload is received
 * directly into its destination. */
#include "dp_tcp_impl.h"

#include <errno.h>
#include <string.h>

/* ---- own posts ---- */

static void complete_post(tcp_qp *qp, const tcp_pending *p, int status) {
    if (!p->shown && status == DP_OK)
        return;
    qp->unpolled++;
    tcp_complete(qp, &(dp_wc){.wr_id = p->wr_id, .qp = &qp->q, .status = status, .op = p->op, .byte_len = status ? 0 : p->len});
}

static tcp_pending *oldest(tcp_qp *qp) { return qp->pend_head == qp->pend_tail ? NULL : &qp->pending[qp->pend_head & qp->pend_mask]; }

void tcp_complete_refused(tcp_qp *qp) {
    for (tcp_pending *p; (p = oldest(qp)) && !p->wants;) {
        qp->pend_head++;
        complete_post(qp, p, DP_INVALID);
    }
}

static void answered(tcp_qp *qp) {
    complete_post(qp, oldest(qp), DP_OK);
    qp->pend_head++;
    tcp_complete_refused(qp);
}

void tcp_end(tcp_qp *qp, int status) {
    if (qp->peer.fd < 0)
        return;
    tcp_close(qp);
    qp->in_frame = qp->held = qp->more = false;
    qp->lo = qp->hi = 0;
    qp->out_lo = qp->out_hi = 0;
    if (qp->seal)
        qp->seal->open = qp->seal->lo = qp->seal->hi = 0;
    /* After DP_PEER_GONE, data that the peer sent before is still delivered, and receives can still be posted. dp_cq_poll sets the error
     * state when it delivers a failed post. */
    if (status != DP_PEER_GONE)
        qp->q.state = DP_QP_ERROR;
    int first = status == DP_PEER_GONE ? DP_PEER_GONE : DP_CONNECTION;
    for (tcp_pending *p; (p = oldest(qp)); first = DP_CONNECTION) {
        qp->pend_head++;
        complete_post(qp, p, p->wants ? first : DP_INVALID);
    }
    dp_qp_break(&qp->q, status);
}

/* ---- frames ---- */

/* Returns the target of the peer's access, or NULL if the access is not permitted. */
static uint8_t *reach(const tcp_qp *qp, const tcp_frame *f, uint32_t need, const tcp_mem **into) {
    for (uint32_t i = 0; i < qp->n_expose; i++) {
        const tcp_mem *m = qp->expose[i];
        if (!m || m->m.rkey != f->rkey)
            continue;
        uint64_t offset = f->raddr - m->m.base;
        if (!(m->m.access & need) || offset > m->m.size || f->len > m->m.size - offset)
            return NULL;
        *into = m;
        return (uint8_t *)m->m.addr + offset;
    }
    return NULL;
}

/* Bytes that follow the header of an atomic. */
static uint32_t operands_size(uint8_t op) { return op == TCP_FETCH_ADD ? 8 : op == TCP_COMPARE_SWAP ? 16 : 0; }

/* Executes a read or atomic and queues its answer. False: not permitted, or no room. Peers' atomics are executed only here. */
static bool serve(tcp_qp *qp, const tcp_frame *f, const uint8_t *operands) {
    const tcp_mem *m;
    uint8_t *at;
    if (f->op == TCP_READ) {
        /* A read of no bytes has a key, but the answer has no payload. */
        if (f->len > TCP_MAX_MSG || !(at = reach(qp, f, DP_REMOTE_READ, &m)))
            return false;
        return tcp_answer(qp, &(tcp_frame){.op = TCP_DATA, .len = f->len}, at);
    }
    if (f->len != 8 || (f->raddr & 7) || !(at = reach(qp, f, DP_REMOTE_ATOMIC, &m)) || ((uintptr_t)at & 7))
        return false;
    uint64_t *word = (uint64_t *)(void *)at, v[2], old;
    memcpy(v, operands, operands_size(f->op));
    if (f->op == TCP_FETCH_ADD) {
        old = __atomic_fetch_add(word, v[0], __ATOMIC_SEQ_CST);
    } else {
        old = v[0]; /* the exchange stores the word's value here if it differs */
        __atomic_compare_exchange_n(word, &old, v[1], false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    return tcp_answer(qp, &(tcp_frame){.op = TCP_VALUE, .raddr = old}, NULL);
}

/* Bytes that must be staged before a frame can be taken. */
static uint32_t head_size(const tcp_qp *qp) {
    return sizeof(tcp_frame) + (qp->hi - qp->lo > 0 ? operands_size(qp->stage[qp->lo]) : 0);
}

/* Handles the header of the answer to the oldest post; the payload follows. False: another answer was expected. */
static bool expected(tcp_qp *qp, const tcp_frame *f) {
    const tcp_pending *p = oldest(qp);
    if (!p || p->wants != f->op || f->len != (f->op == TCP_DATA ? p->len : 0))
        return false;
    if (f->op == TCP_VALUE)
        memcpy(p->dst, &f->raddr, 8);
    if (f->op == TCP_DATA) {
        qp->dst = p->dst;
        qp->into = NULL;
        qp->reading -= p->len;
    }
    return true;
}

typedef enum step { TAKEN, SHORT /* of bytes */, HELD, VIOLATION } step;

/* Parses the next frame's header if it is staged. Its payload follows (in_frame). */
static step take_head(tcp_qp *qp) {
    uint32_t need = head_size(qp);
    if (qp->hi - qp->lo < need)
        return SHORT;
    tcp_frame *f = &qp->frame;
    memcpy(f, qp->stage + qp->lo, sizeof *f);
    const uint8_t *behind = qp->stage + qp->lo + sizeof *f;
    if (f->zero || (f->flags & ~TCP_WANTS_ACK) || (f->flags && f->op != TCP_WRITE && f->op != TCP_WRITE_IMM))
        return VIOLATION;
    qp->left = 0;
    switch (f->op) {
    case TCP_WRITE_IMM:
        if (qp->rtaken == qp->rposted)
            return HELD;
        /* fall through */
    case TCP_WRITE:
        if (f->len && (f->len > TCP_MAX_MSG || !(qp->dst = reach(qp, f, DP_REMOTE_WRITE, &qp->into))))
            return VIOLATION;
        qp->left = f->len;
        break;
    case TCP_READ:
    case TCP_FETCH_ADD:
    case TCP_COMPARE_SWAP:
        if (!serve(qp, f, behind))
            return VIOLATION;
        break;
    case TCP_ACK:
    case TCP_DATA:
    case TCP_VALUE:
        if (!expected(qp, f))
            return VIOLATION;
        qp->left = f->op == TCP_DATA ? f->len : 0;
        break;
    default: return VIOLATION;
    }
    qp->lo += need;
    qp->in_frame = true;
    return TAKEN;
}

/* Completes a frame whose payload has arrived. False: there is no room for the acknowledgement. */
static bool finish(tcp_qp *qp) {
    const tcp_frame *f = &qp->frame;
    qp->in_frame = false;
    if (f->op == TCP_ACK || f->op == TCP_DATA || f->op == TCP_VALUE)
        answered(qp);
    if (f->op == TCP_WRITE_IMM)
        tcp_complete(qp, &(dp_wc){.wr_id = qp->recvs[qp->rtaken++ & qp->recv_mask], .qp = &qp->q, .imm = f->imm, .byte_len = f->len,
                                  .op = DP_OP_RECV_IMM});
    return !(f->flags & TCP_WANTS_ACK) || tcp_answer(qp, &(tcp_frame){.op = TCP_ACK}, NULL);
}

/* ---- the stream ---- */

uint32_t tcp_receive(tcp_qp *qp, void *to, uint32_t len) {
    ssize_t n;
    do
        n = recv(qp->peer.fd, to, len, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n > 0)
        return (uint32_t)n;
    if (n == 0 || errno != EAGAIN)
        tcp_end(qp, DP_PEER_GONE); /* the peer has closed the connection, has ended or is unreachable */
    return 0;
}

/* Receives more bytes into the staging buffer, which has less than a header. Returns the number of bytes. */
static uint32_t stage_more(tcp_qp *qp) {
    uint32_t have = qp->hi - qp->lo;
    memmove(qp->stage, qp->stage + qp->lo, have);
    qp->lo = 0;
    qp->hi = have;
    if (qp->seal)
        return tcp_seal_stage(qp);
    uint32_t n = tcp_receive(qp, qp->stage + have, TCP_STAGE - have);
    qp->hi += n; /* tcp_end made it 0 */
    return n;
}

/* Moves received payload to its destination. Adds the received bytes to *budget. False: more bytes are missing. */
static bool take_payload(tcp_qp *qp, uint64_t *budget, bool *drained) {
    while (qp->left) {
        if (!qp->dst) { /* dp_mem_free has removed the region */
            tcp_end(qp, DP_CONNECTION);
            return false;
        }
        uint32_t n = qp->hi - qp->lo < qp->left ? qp->hi - qp->lo : qp->left;
        if (n) {
            memcpy(qp->dst, qp->stage + qp->lo, n);
            qp->lo += n;
        } else if (*drained || *budget >= qp->take_max) {
            return false;
        } else if (qp->left >= TCP_DIRECT_MIN && !qp->seal) {
            if (!(n = tcp_receive(qp, qp->dst, qp->left)))
                return false;
            *budget += n;
            *drained = n < qp->left;
        } else { /* receive the end of the payload together with the next frames */
            uint32_t got = stage_more(qp);
            if (!got)
                return false;
            *budget += got;
            *drained = got < TCP_STAGE && !qp->seal;
            continue;
        }
        qp->dst += n;
        qp->left -= n;
    }
    return true;
}

static void take(tcp_qp *qp) {
    bool drained = false;
    uint64_t budget = 0;
    qp->more = qp->held = qp->ready = false;
    if (qp->seal)
        qp->seal->drained = false;
    while (qp->peer.fd >= 0) {
        step s = qp->in_frame ? TAKEN : take_head(qp);
        if (s == VIOLATION) {
            tcp_end(qp, DP_PROTOCOL);
        } else if (s == HELD) {
            qp->held = true;
            return;
        } else if (s == SHORT) {
            uint32_t room = TCP_STAGE - (qp->hi - qp->lo), got;
            if (drained || budget >= qp->take_max || !(got = stage_more(qp)))
                break;
            budget += got;
            drained = got < room && !qp->seal;
        } else {
            if (!take_payload(qp, &budget, &drained))
                break;
            if (!finish(qp))
                tcp_end(qp, DP_PROTOCOL);
        }
    }
    qp->more = budget >= qp->take_max && qp->peer.fd >= 0;
}

void tcp_take(tcp_qp *qp) {
    pthread_mutex_lock(&qp->lock);
    take(qp);
    pthread_mutex_unlock(&qp->lock);
}

void tcp_lost(tcp_qp *qp) {
    qp->out_lo = qp->out_hi = 0;
    if (qp->seal)
        qp->seal->open = 0;
    do
        tcp_take(qp);
    while (qp->more);
    tcp_end(qp, DP_PEER_GONE);
}

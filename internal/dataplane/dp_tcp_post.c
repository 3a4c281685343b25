/* Posts of the tcp provider. A post has consumed its source when it returns: bytes that the socket does not take are copied.
 *
 * A frame with up to 64 KB of payload is copied behind its header and sent by one call, together with earlier frames whose posts had
 * DP_MORE. For a larger frame, the header is sent with MSG_MORE and the payload without a copy, because a second call costs less than the
 * copy. sendmsg would need neither the copy nor the second call, but a sealed worker may not use it. */
#include "dp_tcp_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- sending ---- */

/* Sends as much as the socket takes. Returns the number of bytes, or -1 if the connection has failed. */
static ssize_t send_some(const tcp_qp *qp, const void *data, size_t len, int flags) {
    ssize_t n;
    do
        n = send(qp->peer.fd, data, len, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
    while (n < 0 && errno == EINTR);
    return n < 0 && (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM) ? 0 : n;
}

bool tcp_flush(tcp_qp *qp) {
    if (qp->seal && !tcp_seal_close(qp))
        return false;
    while (tcp_backlog(qp)) {
        ssize_t n = send_some(qp, qp->out + qp->out_lo, tcp_backlog(qp), 0);
        if (n < 0) {
            tcp_lost(qp);
            return false;
        }
        if (n == 0)
            return true;
        qp->out_lo += (size_t)n;
    }
    qp->out_lo = qp->out_hi = 0;
    return true;
}

/* Makes room for len more bytes behind the waiting bytes. */
static bool make_room(tcp_qp *qp, size_t len) {
    if (qp->seal)
        len = tcp_seal_room(len);
    if (qp->out_cap - qp->out_hi >= len)
        return true;
    size_t have = tcp_backlog(qp);
    memmove(qp->out, qp->out + qp->out_lo, have);
    qp->out_lo = 0;
    qp->out_hi = have;
    if (qp->out_cap - have >= len)
        return true;
    size_t cap = 2 * qp->out_cap;
    while (cap < have + len)
        cap *= 2;
    uint8_t *more = realloc(qp->out, cap);
    if (!more)
        return false;
    qp->out = more;
    qp->out_cap = cap;
    return true;
}

/* Appends to the waiting bytes, which have room. False: sealing has failed, and the connection has ended. */
static bool append(tcp_qp *qp, const void *data, size_t len) {
    if (qp->seal)
        return tcp_seal_append(qp, data, len);
    if (len)
        memcpy(qp->out + qp->out_hi, data, len);
    qp->out_hi += len;
    return true;
}

bool tcp_answer(tcp_qp *qp, const tcp_frame *f, const void *payload) {
    size_t len = payload ? f->len : 0;
    if (tcp_backlog(qp) + sizeof *f + len > qp->out_max || !make_room(qp, sizeof *f + len))
        return false;
    return append(qp, f, sizeof *f) && append(qp, payload, len);
}

/* A piece of a message: the header, or a part of the payload. */
typedef struct piece {
    const void *data;
    size_t len;
} piece;

/* Sends a message whose parts are too large to be copied together. Bytes that the socket does not take are copied. */
static int send_pieces(tcp_qp *qp, const piece *p, int n) {
    bool full = false;
    for (int i = 0; i < n; i++) {
        size_t sent = 0;
        while (!full && sent < p[i].len) {
            ssize_t k = send_some(qp, (const uint8_t *)p[i].data + sent, p[i].len - sent, i + 1 < n ? MSG_MORE : 0);
            if (k < 0) {
                tcp_lost(qp);
                return DP_CONNECTION;
            }
            full = k == 0;
            sent += (size_t)k;
        }
        if (sent == p[i].len)
            continue;
        if (!make_room(qp, p[i].len - sent)) { /* a part of the frame has been sent */
            tcp_end(qp, DP_CONNECTION);
            return DP_CONNECTION;
        }
        if (!append(qp, (const uint8_t *)p[i].data + sent, p[i].len - sent))
            return DP_CONNECTION;
    }
    return DP_OK;
}

/* The same for an encrypted connection. Records are sent before the rest of the message is sealed, so that the peer can open them meanwhile. */
static int seal_pieces(tcp_qp *qp, const piece *p, int n) {
    bool full = false;
    for (int i = 0; i < n; i++) {
        const uint8_t *data = p[i].data;
        for (size_t done = 0, part; done < p[i].len; done += part) {
            part = p[i].len - done < TCP_SEAL_SEND ? p[i].len - done : TCP_SEAL_SEND;
            if (!make_room(qp, part)) {
                tcp_end(qp, DP_CONNECTION);
                return DP_CONNECTION;
            }
            if (!tcp_seal_append(qp, data + done, part) || (part == TCP_SEAL_SEND && !full && !tcp_flush(qp)))
                return DP_CONNECTION;
            full = part == TCP_SEAL_SEND && tcp_backlog(qp);
        }
    }
    return full || tcp_flush(qp) ? DP_OK : DP_CONNECTION;
}

/* Sends a frame with a payload of n pieces behind the waiting bytes. With `more`, it holds small frames back for the next call. DP_BUSY: no
 * room, and nothing of the frame was sent. */
static int put(tcp_qp *qp, const tcp_frame *f, const dp_sge *sge, int n, bool more) {
    piece p[3] = {{f, sizeof *f}};
    int parts = 1;
    size_t all = sizeof *f;
    for (int i = 0; i < n; i++)
        if (sge[i].len) {
            p[parts++] = (piece){sge[i].addr, sge[i].len};
            all += sge[i].len;
        }
    size_t together = qp->seal ? TCP_SEAL_SEND : TCP_ONE_SEND;
    bool joins = tcp_backlog(qp) && tcp_backlog(qp) + all <= together;
    if (!joins && tcp_backlog(qp) && !tcp_flush(qp))
        return DP_CONNECTION;
    bool waits = !joins && tcp_backlog(qp) != 0;
    if (waits && tcp_backlog(qp) + all > TCP_OUT_POSTS)
        return DP_BUSY;
    if (!waits && all > together)
        return qp->seal ? seal_pieces(qp, p, parts) : send_pieces(qp, p, parts);
    if (!make_room(qp, all))
        return DP_BUSY;
    for (int i = 0; i < parts; i++)
        if (!append(qp, p[i].data, p[i].len))
            return DP_CONNECTION;
    return waits || more || tcp_flush(qp) ? DP_OK : DP_CONNECTION;
}

/* ---- posts ---- */

static int may_post(const tcp_qp *qp) {
    if (qp->q.state != DP_QP_CONNECTED || __atomic_load_n(&qp->q.broken, __ATOMIC_RELAXED))
        return DP_CONNECTION;
    return qp->pend_tail - qp->pend_head + qp->unpolled >= qp->q.max_send ? DP_BUSY : DP_OK;
}

/* Reports whether the peer's region with this key covers the bytes and grants the access. The peer checks again. */
static bool may_reach(const tcp_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len, uint32_t need) {
    for (uint32_t i = 0; i < qp->peer.n_regions; i++) {
        const tcp_region *r = &qp->peer.regions[i];
        if (r->rkey != rkey)
            continue;
        uint64_t offset = raddr - r->base; /* wraps to a huge value below base */
        return (r->access & need) && offset <= r->size && len <= r->size - offset;
    }
    return false;
}

static void expect(tcp_qp *qp, const tcp_pending *p) { qp->pending[qp->pend_tail++ & qp->pend_mask] = *p; }

/* Refuses a remote access as a network adapter does: with a failed completion, in order, and the error state. */
static int refuse(tcp_qp *qp, uint64_t wr_id, dp_op op) {
    qp->q.state = DP_QP_ERROR;
    expect(qp, &(tcp_pending){.wr_id = wr_id, .op = op, .shown = true});
    tcp_complete_refused(qp);
    return DP_OK;
}

static int post_write(dp_qp *q, uint8_t op, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                      uint32_t flags) {
    tcp_qp *qp = tcp_qp_of(q);
    int st = may_post(qp);
    if (st)
        return st;
    if (n < 0 || n > 2)
        return DP_INVALID;
    uint64_t total = n == 2 ? (uint64_t)sge[0].len + sge[1].len : n == 1 ? sge[0].len : 0;
    if (total > TCP_MAX_MSG)
        return DP_INVALID;
    /* A write of no bytes needs no key, as on a network adapter. */
    if (total && !may_reach(qp, raddr, rkey, total, DP_REMOTE_WRITE))
        return refuse(qp, wr_id, DP_OP_WRITE);
    bool shown = flags & DP_SIGNALED;
    tcp_frame f = {.op = op, .flags = shown ? TCP_WANTS_ACK : 0, .len = (uint32_t)total, .imm = imm, .rkey = rkey, .raddr = raddr};
    st = put(qp, &f, sge, n, flags & DP_MORE);
    if (st)
        return st;
    q->posted++;
    if (shown)
        expect(qp, &(tcp_pending){.wr_id = wr_id, .len = (uint32_t)total, .op = DP_OP_WRITE, .wants = TCP_ACK, .shown = true});
    return DP_OK;
}

int tcp_post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    return post_write(q, TCP_WRITE, sge, n, raddr, rkey, 0, wr_id, flags);
}

int tcp_post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                       uint32_t flags) {
    return post_write(q, TCP_WRITE_IMM, sge, n, raddr, rkey, imm, wr_id, flags);
}

int tcp_post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    tcp_qp *qp = tcp_qp_of(q);
    int st = may_post(qp);
    if (st)
        return st;
    if (sge->len > TCP_MAX_MSG)
        return DP_INVALID;
    if (!may_reach(qp, raddr, rkey, sge->len, DP_REMOTE_READ))
        return refuse(qp, wr_id, DP_OP_READ);
    if (qp->reading + sge->len > TCP_READS)
        return DP_BUSY;
    tcp_frame f = {.op = TCP_READ, .len = sge->len, .rkey = rkey, .raddr = raddr};
    if ((st = put(qp, &f, NULL, 0, flags & DP_MORE)))
        return st;
    q->posted++;
    qp->reading += sge->len;
    expect(qp, &(tcp_pending){.wr_id = wr_id, .dst = (uint8_t *)sge->addr, .len = sge->len, .op = DP_OP_READ, .wants = TCP_DATA,
                              .shown = flags & DP_SIGNALED});
    return DP_OK;
}

static int post_atomic(dp_qp *q, uint8_t frame_op, dp_op op, const dp_sge *sge, uint64_t raddr, uint32_t rkey, const dp_sge *operands,
                       uint64_t wr_id, uint32_t flags) {
    tcp_qp *qp = tcp_qp_of(q);
    int st = may_post(qp);
    if (st)
        return st;
    if ((raddr & 7) || sge->len < 8 || !may_reach(qp, raddr, rkey, 8, DP_REMOTE_ATOMIC))
        return refuse(qp, wr_id, op);
    tcp_frame f = {.op = frame_op, .len = 8, .rkey = rkey, .raddr = raddr};
    if ((st = put(qp, &f, operands, 1, flags & DP_MORE)))
        return st;
    q->posted++;
    expect(qp, &(tcp_pending){.wr_id = wr_id, .dst = (uint8_t *)sge->addr, .len = 8, .op = op, .wants = TCP_VALUE,
                              .shown = flags & DP_SIGNALED});
    return DP_OK;
}

int tcp_post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id, uint32_t flags) {
    dp_sge operands = {.addr = &add, .len = sizeof add};
    return post_atomic(q, TCP_FETCH_ADD, DP_OP_FETCH_ADD, sge, raddr, rkey, &operands, wr_id, flags);
}

int tcp_post_compare_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags) {
    const uint64_t values[2] = {expected, desired};
    dp_sge operands = {.addr = values, .len = sizeof values};
    return post_atomic(q, TCP_COMPARE_SWAP, DP_OP_COMPARE_SWAP, sge, raddr, rkey, &operands, wr_id, flags);
}

int tcp_post_recv(dp_qp *q, uint64_t wr_id) {
    tcp_qp *qp = tcp_qp_of(q);
    if (q->state == DP_QP_ERROR)
        return DP_CONNECTION;
    if (qp->rposted - qp->rpolled >= q->max_recv)
        return DP_BUSY;
    qp->recvs[qp->rposted++ & qp->recv_mask] = wr_id;
    return DP_OK;
}

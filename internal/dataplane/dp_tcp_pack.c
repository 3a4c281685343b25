/* Handing over a connected queue pair to another process of the node: the socket, and what both sides have said in their hellos. The peer
 * notices nothing. The process that packed it is not trusted, so every word and the descriptor are checked, as for a hello.
 *
 * Regions. The new process allocates memory of its own and keeps the addresses and keys that the peer knows (dp_mem.base). So only what the peer
 * writes from now on is there.
 *
 * Encryption. The description has the secrets of both directions and the numbers of records so far: the next record continues the
 * sequence. Whoever has the description can read the connection, as whoever has its blobs could. It only goes to processes of the same user. */
#include "dp_tcp_impl.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

typedef struct tcp_packed {
    tcp_hello own, peer; /* the hello of each side */
    uint8_t secret[DP_TCP_SECRET_SIZE];
    uint32_t max_send, max_recv;
    uint8_t sealed, dialed;
    uint8_t reserved[6];
    tcp_packed_key tx, rx; /* if sealed */
} tcp_packed;
_Static_assert(sizeof(tcp_packed) == 2 * sizeof(tcp_hello) + DP_TCP_SECRET_SIZE + 16 + 2 * sizeof(tcp_packed_key) && sizeof(tcp_packed) <= DP_PACKED_MAX,
               "room for a packed queue pair, without padding");

/* ---- completion queues ---- */

/* The new process makes a queue of its own. The descriptor only says that it can. */
int tcp_cq_pack(const dp_cq *c) { return ((const tcp_cq *)c)->wake_fd; }

int tcp_cq_unpack(dp_dev *d, uint32_t capacity, int *fd, dp_cq **out, dp_error *err) {
    int st = tcp_cq_create(d, capacity, out, err);
    if (st)
        return st;
    close(*fd);
    *fd = -1;
    return DP_OK;
}

/* ---- packing ---- */

/* Reports whether nothing is under way in either direction. */
static bool at_rest(const tcp_qp *qp) {
    const tcp_seal *s = qp->seal;
    return qp->lo == qp->hi && !qp->in_frame && !qp->held && !tcp_backlog(qp) && qp->pend_head == qp->pend_tail && !qp->unpolled &&
           qp->rtaken == qp->rpolled && qp->rposted - qp->rtaken == qp->q.max_recv && (!s || (s->lo == s->hi && !s->open));
}

int tcp_qp_pack(dp_qp *q, dp_packed_qp *out, int *fds, dp_error *err) {
    tcp_qp *qp = tcp_qp_of(q);
    const tcp_link *l = &qp->peer;
    if (q->state != DP_QP_CONNECTED || dp_qp_broken(q) || l->fd < 0)
        return dp_fail(err, DP_CONNECTION, 0, "pack: the queue pair is not connected");
    uint8_t byte;
    ssize_t n = recv(l->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (!n || (n < 0 && errno != EAGAIN && errno != EINTR))
        return dp_fail(err, DP_CONNECTION, n ? errno : 0, "pack: the tcp peer has ended");
    if (n > 0 || !at_rest(qp))
        return dp_fail(err, DP_BUSY, 0, "pack: operations are under way on the queue pair");
    for (uint32_t i = 0; i < qp->n_expose; i++)
        if (!qp->expose[i])
            return dp_fail(err, DP_UNSUPPORTED, 0, "pack: exposed region %u was freed", i);
    tcp_packed p = {.own = l->hellos[!l->dialed], .peer = l->hellos[l->dialed], .max_send = q->max_send, .max_recv = q->max_recv,
                    .sealed = qp->seal != NULL, .dialed = l->dialed};
    memcpy(p.secret, qp->secret, sizeof p.secret);
    if (qp->seal) {
        p.tx.records = qp->seal->tx.records;
        p.rx.records = qp->seal->rx.records;
        memcpy(p.tx.secret, qp->seal->tx.secret, sizeof p.tx.secret);
        memcpy(p.rx.secret, qp->seal->rx.secret, sizeof p.rx.secret);
    }
    out->size = sizeof p;
    out->n_fds = 1;
    memcpy(out->bytes, &p, sizeof p);
    explicit_bzero(&p, sizeof p);
    fds[0] = l->fd;
    qp->passed = true;
    return DP_OK;
}

/* ---- unpacking ---- */

static int refused(dp_error *err, const char *what) { return dp_fail(err, DP_BAD_BLOB, 0, "take over a queue pair: %s", what); }

static int check(const dp_cq *c, const tcp_packed *p, tcp_link *own, tcp_link *peer, dp_error *err) {
    static const uint8_t zero[sizeof p->reserved];
    if (!tcp_hello_check(&p->own, own) || !tcp_hello_check(&p->peer, peer) || p->own.status || p->peer.status || p->sealed > 1 || p->dialed > 1 ||
        memcmp(p->reserved, zero, sizeof zero))
        return refused(err, "its description is malformed");
    if (memcmp(p->own.from, p->peer.to, DP_TCP_TOKEN_SIZE) || memcmp(p->own.to, p->peer.from, DP_TCP_TOKEN_SIZE))
        return refused(err, "the two sides do not belong together");
    if (p->max_send < 1 || p->max_send > 4096 || p->max_recv < 1 || p->max_recv > 4096)
        return refused(err, "the sizes of its queues are wrong");
    if (c->reserved + p->max_send + p->max_recv > c->capacity)
        return refused(err, "the completion queue has no room for it");
    return DP_OK;
}

static int check_socket(int fd, dp_error *err) {
    int protocol = 0;
    socklen_t len = sizeof protocol;
    struct sockaddr_storage a;
    socklen_t a_len = sizeof a;
    if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) || protocol != IPPROTO_TCP)
        return refused(err, "its descriptor is not a TCP socket");
    if (getpeername(fd, (struct sockaddr *)&a, &a_len))
        return dp_fail(err, DP_PEER_GONE, errno, "take over a queue pair: the tcp peer has ended");
    return DP_OK;
}

/* Makes the regions that the peer knows. */
static int make_regions(dp_domain *d, const tcp_link *own, dp_mem **exposed, uint32_t *n, dp_error *err) {
    for (uint32_t i = 0; i < own->n_regions; i++) {
        const tcp_region *r = &own->regions[i];
        if (!r->access && !r->size) /* says what the sender can do */
            continue;
        if (!r->size || r->size > 1ull << 40)
            return refused(err, "the size of a region is wrong");
        dp_mem *m;
        int st = tcp_mem_alloc(d, r->size, r->access | DP_MEM_LAZY, &m, err);
        if (st)
            return st;
        m->base = r->base;
        m->rkey = r->rkey;
        exposed[(*n)++] = m;
    }
    return DP_OK;
}

static int take_keys(tcp_qp *qp, const tcp_packed *p, dp_error *err) {
    int st = dp_crypto_load(err);
    return st ? st : tcp_seal_continue(qp, &p->tx, &p->rx, err);
}

static void connected(tcp_qp *qp, const tcp_packed *p, const tcp_link *peer, int *fd) {
    qp->peer = *peer;
    qp->peer.dialed = p->dialed;
    qp->peer.hellos[!p->dialed] = p->own;
    qp->peer.hellos[p->dialed] = p->peer;
    qp->peer.fd = *fd;
    *fd = -1;
    memcpy(qp->token, p->own.from, sizeof qp->token); /* the blob is that which the peer knows */
    memcpy(qp->secret, p->secret, sizeof qp->secret);
    qp->taken = qp->ready = qp->passed = true;
    qp->rposted = qp->q.max_recv;
    qp->q.peer_batches = tcp_peer_can(&qp->peer, TCP_CAN_BATCH);
    qp->q.state = DP_QP_CONNECTED;
}

int tcp_qp_unpack(dp_domain *d, dp_cq *c, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out, dp_error *err) {
    tcp_packed p;
    tcp_link own = {.fd = -1}, peer = {.fd = -1};
    dp_qp *q = NULL;
    *n_exposed = 0;
    if (packed->size != sizeof p || packed->n_fds != 1)
        return refused(err, "its description has a wrong size: the two processes use different versions of the library");
    memcpy(&p, packed->bytes, sizeof p);
    int st = check(c, &p, &own, &peer, err);
    if (!st)
        st = check_socket(fds[0], err);
    if (!st)
        st = make_regions(d, &own, exposed, n_exposed, err);
    dp_qp_attr attr = {.max_send = p.max_send, .max_recv = p.max_recv, .n_expose = *n_exposed};
    memcpy(attr.expose, exposed, *n_exposed * sizeof *exposed);
    if (!st)
        st = tcp_qp_create(d, c, &attr, &q, err);
    if (!st && p.sealed)
        st = take_keys(tcp_qp_of(q), &p, err);
    if (!st) {
        tcp_dev *dev = tcp_dev_of(d->dev);
        pthread_mutex_lock(&dev->lock);
        connected(tcp_qp_of(q), &p, &peer, &fds[0]);
        pthread_mutex_unlock(&dev->lock);
        *out = q;
    } else {
        if (q)
            tcp_qp_destroy(q);
        for (uint32_t i = 0; i < *n_exposed; i++)
            tcp_mem_free(exposed[i]);
        *n_exposed = 0;
    }
    explicit_bzero(&p, sizeof p);
    return st;
}

/* Handing over a connected queue pair to another process of the node. The process that packed it is not trusted, so every word and every
 * descriptor is checked, as for a hello.
 *
 * Order of the descriptors: own receive segment, own regions; the peer's receive segment, completion-queue page and regions; the socket to
 * the peer. The own completion-queue page is packed with the queue (shm_cq_pack), because several queue pairs may share it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_shm_link.h"

typedef struct shm_packed {
    shm_hello own, peer; /* the hello of each side */
    uint8_t boot_id[16], name[16];
    uint64_t netns;
    uint32_t max_send, max_recv;
    uint32_t rpos, rposted, spos;
    uint32_t reserved;
} shm_packed;
_Static_assert(sizeof(shm_packed) <= DP_PACKED_MAX && sizeof(shm_packed) == 2 * sizeof(shm_hello) + 64, "room for a packed queue pair");
_Static_assert(2 * DP_EXPOSE_MAX + 4 <= DP_PACKED_FDS, "room for its descriptors");

/* ---- completion queues ---- */

int shm_cq_pack(const dp_cq *c) { return ((const shm_cq *)c)->page->fd; }

int shm_cq_unpack(dp_dev *dev, uint32_t capacity, int *fd, dp_cq **out, dp_error *err) {
    shm_mode_page *page = calloc(1, sizeof *page);
    if (!page)
        return dp_fail(err, DP_FATAL, ENOMEM, "take over a completion queue");
    page->fd = *fd;
    page->map = shm_map_checked(*fd, 0, SHM_PAGE, true, true);
    int st = page->map ? shm_cq_new(dev, page, capacity, out, err)
                       : dp_fail(err, DP_BAD_BLOB, errno, "take over a completion queue: map its page");
    if (st) {
        shm_unmap(page->map, SHM_PAGE);
        free(page);
        return st;
    }
    __atomic_store_n(shm_together(page->map), SHM_AWAKE, __ATOMIC_RELAXED);
    *fd = -1;
    return DP_OK;
}

/* ---- packing ---- */

static void describe_own(const shm_qp *qp, shm_hello *h, int *fds, uint32_t *n) {
    const shm_cq *cq = (const shm_cq *)qp->q.cq;
    *h = (shm_hello){.magic = SHM_HELLO_MAGIC, .version = SHM_LINK_VERSION, .n_regions = (uint16_t)qp->n_expose, .ring_size = qp->ring_size,
                     .reached = ((const shm_dev *)qp->q.domain->dev)->membarrier,
                     .mode_at = (uint32_t)((const uint8_t *)cq->mode - cq->page->map)};
    memcpy(h->from, qp->token, 16);
    memcpy(h->to, qp->peer.token, 16);
    fds[(*n)++] = qp->seg_fd;
    for (uint32_t i = 0; i < qp->n_expose; i++) {
        const shm_mem *m = qp->expose[i];
        h->regions[i] = (shm_hello_region){m->m.rkey, m->m.access, m->m.base, m->m.size, m->offset};
        fds[(*n)++] = m->fd;
    }
}

static void describe_peer(const shm_qp *qp, shm_hello *h, int *fds, uint32_t *n) {
    const shm_peer *p = &qp->peer;
    *h = (shm_hello){.magic = SHM_HELLO_MAGIC, .version = SHM_LINK_VERSION, .n_regions = (uint16_t)p->n_regions, .ring_size = p->ring_size,
                     .reached = p->reached, .mode_at = p->mode_at};
    memcpy(h->from, p->token, 16);
    memcpy(h->to, qp->token, 16);
    for (uint32_t i = 0; i < p->n_regions; i++)
        h->regions[i] = (shm_hello_region){p->regions[i].rkey, p->regions[i].access, p->regions[i].base, p->regions[i].size,
                                           p->regions[i].offset};
    for (uint32_t i = 0; i < 2 + p->n_regions; i++)
        fds[(*n)++] = p->fds[i];
}

int shm_qp_pack(dp_qp *q, dp_packed_qp *out, int *fds, dp_error *err) {
    shm_qp *qp = (shm_qp *)q;
    shm_dev *dev = (shm_dev *)q->domain->dev;
    if (q->state != DP_QP_CONNECTED || dp_qp_broken(q))
        return dp_fail(err, DP_CONNECTION, 0, "pack: the queue pair is not connected");
    const shm_entry *next = &qp->segment->ring[qp->rpos & qp->mask];
    if (qp->unpolled || (uint32_t)__atomic_load_n(&next->seq_imm, __ATOMIC_ACQUIRE) == qp->rpos + 1)
        return dp_fail(err, DP_BUSY, 0, "pack: the queue pair has completions that were not polled");
    for (uint32_t i = 0; i < qp->n_expose; i++)
        if (qp->expose[i]->window || qp->expose[i]->exposed > 1)
            return dp_fail(err, DP_UNSUPPORTED, 0, "pack: exposed region %u is shared with other queue pairs", i);
    shm_packed p = {.max_send = q->max_send, .max_recv = q->max_recv, .rpos = qp->rpos, .rposted = qp->rposted, .spos = qp->spos};
    out->n_fds = 0;
    describe_own(qp, &p.own, fds, &out->n_fds);
    describe_peer(qp, &p.peer, fds, &out->n_fds);
    fds[out->n_fds++] = shm_link_peer_fd(dev, qp);
    for (uint32_t i = 0; i < out->n_fds; i++)
        if (fds[i] < 0)
            return dp_fail(err, DP_UNSUPPORTED, 0, "pack: too many descriptors were open to keep the peer's");
    memcpy(p.boot_id, dev->boot_id, 16);
    memcpy(p.name, qp->home.set ? qp->home.name : dev->name, 16);
    p.netns = qp->home.set ? qp->home.netns : dev->netns;
    out->size = sizeof p;
    memcpy(out->bytes, &p, sizeof p);
    return DP_OK;
}

/* ---- unpacking ---- */

static int refused(dp_error *err, const char *what) { return dp_fail(err, DP_BAD_BLOB, 0, "take over a queue pair: %s", what); }

/* Checks all that can be checked without the descriptors. own: receives the checked description of this side. */
static int check(const dp_domain *d, const dp_cq *c, const shm_packed *p, uint32_t n_fds, shm_peer *own, shm_peer *peer, dp_error *err) {
    const shm_dev *dev = (const shm_dev *)d->dev;
    const shm_cq *cq = (const shm_cq *)c;
    if (p->reserved || p->own.status || p->peer.status || shm_hello_check(&p->own, 2 + p->own.n_regions, own) ||
        shm_hello_check(&p->peer, 2 + p->peer.n_regions, peer))
        return refused(err, "its description is malformed");
    if (n_fds != 1 + own->n_regions + 2 + peer->n_regions + 1)
        return refused(err, "the number of descriptors is wrong");
    if (shm_token_is_zero(p->own.from) || memcmp(p->own.from, p->peer.to, 16) || memcmp(p->own.to, p->peer.from, 16))
        return refused(err, "the two sides do not belong together");
    if (memcmp(p->boot_id, dev->boot_id, 16))
        return refused(err, "it belongs to another node");
    if (p->max_send < 1 || p->max_send > 4096 || p->max_recv < 1 || p->max_recv > own->ring_size || p->max_recv <= own->ring_size / 2 ||
        p->rposted - p->rpos > p->max_recv)
        return refused(err, "sizes or positions of its rings are wrong");
    if (own->mode_at != (uint32_t)((const uint8_t *)cq->mode - cq->page->map))
        return refused(err, "it belongs to another completion queue");
    if (c->reserved + p->max_send + p->max_recv > c->capacity)
        return refused(err, "the completion queue has no room for it");
    for (uint32_t i = 0; i < own->n_regions; i++)
        if (own->regions[i].offset)
            return refused(err, "an own region does not start at offset 0 of its memory file");
    /* The peer omits barriers if this side is registered for membarrier. */
    if (own->reached && !dev->membarrier)
        return dp_fail(err, DP_UNSUPPORTED, 0, "take over a queue pair: this process could not be registered for membarrier");
    return DP_OK;
}

/* Returns a descriptor and sets the source to -1. */
static int take(int *fd) {
    int was = *fd;
    *fd = -1;
    return was;
}

static int take_regions(dp_domain *d, const shm_peer *own, int *fds, dp_mem **exposed, uint32_t *n, dp_error *err) {
    for (*n = 0; *n < own->n_regions; (*n)++) {
        const shm_region *r = &own->regions[*n];
        shm_mem *m = calloc(1, sizeof *m);
        void *at = m ? shm_map_checked(fds[*n], 0, r->size, true, true) : NULL;
        if (!at) {
            free(m);
            return dp_fail(err, DP_BAD_BLOB, m ? errno : ENOMEM, "take over a region of %llu bytes", (unsigned long long)r->size);
        }
        m->fd = take(&fds[*n]);
        m->m = (dp_mem){.domain = d, .addr = at, .size = r->size, .base = r->base, .rkey = r->rkey, .access = r->access};
        exposed[*n] = &m->m;
    }
    return DP_OK;
}

static int take_segment(shm_qp *qp, const shm_packed *p, int *fd, dp_error *err) {
    qp->segment = shm_map_checked(*fd, 0, shm_segment_size(qp->ring_size), true, true);
    if (!qp->segment)
        return dp_fail(err, DP_BAD_BLOB, errno, "take over a receive ring of %u", qp->ring_size);
    qp->seg_fd = take(fd);
    qp->rpos = p->rpos;
    qp->rposted = p->rposted;
    qp->spos = p->spos;
    memcpy(qp->token, p->own.from, 16);
    memcpy(qp->home.name, p->name, 16);
    qp->home.netns = p->netns;
    qp->home.set = qp->taken = qp->given = true;
    return DP_OK;
}

/* Reports whether fd is a socket to a peer that has not ended. */
static int check_socket(int fd, dp_error *err) {
    int domain = 0, type = 0;
    socklen_t len = sizeof domain;
    char c;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) || domain != AF_UNIX ||
        type != SOCK_SEQPACKET)
        return refused(err, "no socket to the peer came with it");
    if (recv(fd, &c, 1, MSG_DONTWAIT | MSG_PEEK) >= 0 || (errno != EAGAIN && errno != EINTR))
        return dp_fail(err, DP_PEER_GONE, 0, "take over a queue pair: the peer has ended");
    return DP_OK;
}

static int take_link(shm_dev *dev, shm_qp *qp, int *fd, dp_error *err) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    if (!dev->active_only && !dev->listening)
        st = shm_listen_start(dev, err); /* its events report the end of the peer */
    if (!st && !shm_link_add(dev, *fd, qp))
        st = dp_fail(err, DP_FATAL, errno, "take over a queue pair: watch the socket to the peer");
    pthread_mutex_unlock(&dev->lock);
    if (!st)
        *fd = -1;
    return st;
}

/* Maps the peer's memory and sets the queue pair to connected. fds: the peer's descriptors, then the socket. */
static int take_peer(shm_qp *qp, const shm_peer *peer, int *fds, dp_error *err) {
    shm_dev *dev = (shm_dev *)qp->q.domain->dev;
    int *sock = &fds[2 + peer->n_regions];
    int st = check_socket(*sock, err);
    if (st)
        return st;
    qp->peer = *peer;
    for (uint32_t i = 0; i < 2 + peer->n_regions; i++)
        qp->peer.fds[i] = take(&fds[i]);
    qp->peer.keep_below = dev->keep_below;
    if ((st = shm_peer_map(&qp->peer, true, err)))
        return st;
    qp->credit = __atomic_load_n(&qp->peer.segment->posted, __ATOMIC_ACQUIRE);
    if (qp->credit - qp->spos > qp->peer.ring_size)
        return refused(err, "the peer's ring is damaged");
    return take_link(dev, qp, sock, err);
}

static void connected(shm_qp *qp) {
    if (!qp->peer.reached)
        ((shm_cq *)qp->q.cq)->n_cold++;
    qp->connected = true;
    qp->q.state = DP_QP_CONNECTED;
}

int shm_qp_unpack(dp_domain *d, dp_cq *c, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out,
                  dp_error *err) {
    shm_packed p;
    shm_peer own = {0}, peer = {0};
    shm_qp *qp = NULL;
    *n_exposed = 0;
    if (packed->size != sizeof p)
        return refused(err, "its description has a wrong size: the two processes use different versions of the library");
    memcpy(&p, packed->bytes, sizeof p);
    memset(peer.fds, -1, sizeof peer.fds);
    int st = check(d, c, &p, packed->n_fds, &own, &peer, err);
    if (!st)
        st = take_regions(d, &own, fds + 1, exposed, n_exposed, err);
    dp_qp_attr attr = {.max_send = p.max_send, .max_recv = p.max_recv, .n_expose = *n_exposed};
    memcpy(attr.expose, exposed, *n_exposed * sizeof *exposed);
    if (!st)
        st = shm_qp_new(d, c, &attr, &qp, err);
    if (!st)
        st = take_segment(qp, &p, &fds[0], err);
    if (!st)
        st = take_peer(qp, &peer, fds + 1 + own.n_regions, err);
    if (!st) {
        connected(qp);
        shm_qp_add(qp);
        *out = &qp->q;
        return DP_OK;
    }
    if (qp) {
        shm_peer_clear(&qp->peer);
        shm_qp_free(qp);
    }
    for (uint32_t i = 0; i < *n_exposed; i++)
        d->dev->ops->mem_free(exposed[i]);
    *n_exposed = 0;
    return st;
}

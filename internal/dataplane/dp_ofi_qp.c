/* Life of an ofi queue pair, and its blob. */
#include "dp_ofi.h"

#ifdef DP_HAVE_LIBFABRIC
#include "dp_wire.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#define MS 1000000ll

enum { BLOB_VERSION = 2, REGIONS_AT = offsetof(ofi_blob, regions) };
static const char blob_magic[4] = {'R', 'F', 'Q', 'P'};

static ofi_dev *dev_of(const ofi_qp *q) { return ofi_dev_of(q->q.domain->dev); }

/* ---- one life: endpoint, queues, registrations ---- */

static void end_life(ofi_qp *q) {
    if (q->ep)
        ofi_close(&q->ep->fid);
    for (uint32_t i = 0; i < q->n_expose; i++)
        if (q->mrs[i])
            ofi_close(&q->mrs[i]->fid);
    if (q->av)
        ofi_close(&q->av->fid);
    if (q->tx)
        ofi_close(&q->tx->fid);
    if (q->rx)
        ofi_close(&q->rx->fid);
    q->ep = NULL;
    q->av = NULL;
    q->tx = q->rx = NULL;
    memset(q->mrs, 0, sizeof q->mrs);
    q->tx_fd = q->rx_fd = -1;
    q->flight = q->returning = q->watched = 0;
    q->atomic = false;
    q->ask = OFI_ASK_NONE;
}

/* Opens a completion queue. If `waits` is true, it has a descriptor to wait for, unless libfabric cannot do this. */
static int open_queue(ofi_qp *q, uint32_t size, bool waits, struct fid_cq **out, int *fd, dp_error *err) {
    struct fid_domain *d = ofi_domain_of(q->q.domain)->domain;
    struct fi_cq_attr a = {.size = size, .format = FI_CQ_FORMAT_DATA, .wait_obj = waits ? FI_WAIT_FD : FI_WAIT_NONE};
    *fd = -1;
    int e = fi_cq_open(d, &a, out, NULL);
    if (e && waits) {
        a.wait_obj = FI_WAIT_NONE;
        e = fi_cq_open(d, &a, out, NULL);
    } else if (!e && waits && fi_control(&(*out)->fid, FI_GETWAIT, fd)) {
        *fd = -1;
    }
    return e ? ofi_fail(err, DP_FATAL, e, "create queue pair: fi_cq_open", dev_of(q)) : DP_OK;
}

static int open_endpoint(ofi_qp *q, dp_error *err) {
    ofi_dev *dev = dev_of(q);
    struct fi_info *i = ofi_lib.dupinfo(dev->info);
    if (!i)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    /* In some providers each entry has its own buffers. */
    if (i->tx_attr->size > 64)
        i->tx_attr->size = q->q.max_send < 64 ? 64 : q->q.max_send;
    if (i->rx_attr->size > 64)
        i->rx_attr->size = q->q.max_recv < 64 ? 64 : q->q.max_recv;
    struct fi_av_attr av = {.type = FI_AV_UNSPEC, .count = 1};
    struct fid_domain *d = ofi_domain_of(q->q.domain)->domain;
    int e = fi_av_open(d, &av, &q->av, NULL);
    if (!e)
        e = fi_endpoint(d, i, &q->ep, NULL);
    if (!e)
        e = fi_ep_bind(q->ep, &q->av->fid, 0);
    if (!e)
        e = fi_ep_bind(q->ep, &q->tx->fid, FI_TRANSMIT);
    if (!e)
        e = fi_ep_bind(q->ep, &q->rx->fid, FI_RECV);
    if (!e)
        e = fi_enable(q->ep);
    ofi_lib.freeinfo(i);
    return e ? ofi_fail(err, DP_FATAL, e, "create queue pair: endpoint", dev) : DP_OK;
}

static int expose(ofi_qp *q, dp_error *err) {
    ofi_dev *dev = dev_of(q);
    for (uint32_t i = 0; i < q->n_expose; i++) {
        const dp_mem *m = &q->expose[i]->m;
        uint64_t access = (m->access & (DP_REMOTE_READ | DP_REMOTE_ATOMIC) ? FI_REMOTE_READ : 0) |
                          (m->access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC) ? FI_REMOTE_WRITE : 0);
        uint64_t key = 0;
        if (!access)
            continue;
        if (dev->own_keys)
            dp_random(&key, dev->info->domain_attr->mr_key_size);
        int e = fi_mr_reg(ofi_domain_of(q->q.domain)->domain, m->addr, m->size, access, 0, key, 0, &q->mrs[i], NULL);
        if (!e && dev->at_ep) {
            e = fi_mr_bind(q->mrs[i], &q->ep->fid, 0);
            if (!e)
                e = fi_mr_enable(q->mrs[i]);
        }
        if (e)
            return ofi_fail(err, DP_FATAL, e, "create queue pair: fi_mr_reg of an exposed region", dev);
    }
    return DP_OK;
}

static int await_bye(ofi_qp *q, dp_error *err) {
    if (dev_of(q)->messages)
        return DP_OK;
    ssize_t e = fi_recv(q->ep, NULL, 0, NULL, FI_ADDR_UNSPEC, &q->bye);
    return e ? ofi_fail(err, DP_FATAL, (long)e, "create queue pair: fi_recv", dev_of(q)) : DP_OK;
}

static int begin_life(ofi_qp *q, dp_error *err) {
    q->head = q->next = q->tail = q->shown = 0;
    q->rposted = q->rdone = 0;
    q->sent_number = q->next_number = 0;
    q->gone = q->said_bye = q->bye_acked = false;
    q->heard_at = q->refused_at = q->refused_ns = 0;
    q->signs = q->heard_signs = 0;
    q->n_regions = q->saved_at = q->n_saved = 0;
    bool waits = !ofi_cq_of(q->q.cq)->hot;
    int st = open_queue(q, q->q.max_send + 16, waits, &q->tx, &q->tx_fd, err);
    if (!st)
        st = open_queue(q, q->q.max_recv + 16, waits, &q->rx, &q->rx_fd, err);
    if (!st)
        st = open_endpoint(q, err);
    if (!st)
        st = expose(q, err);
    if (!st)
        st = await_bye(q, err);
    if (st)
        end_life(q);
    return st;
}

void ofi_qp_fail(ofi_qp *q, ofi_op *failed, int status) {
    if (q->gone)
        return;
    q->gone = true;
    ofi_save_arrivals(q); /* arrivals from before the end are still reported */
    if (q->q.state == DP_QP_CONNECTED && status != DP_PEER_GONE)
        ofi_say_bye(q);
    q->q.state = DP_QP_ERROR;
    end_life(q);
    for (uint32_t i = q->tail; i != q->head; i++) {
        ofi_op *op = &q->ops[i & q->op_mask];
        if (op->done)
            continue;
        if (!failed)
            failed = op;
        op->done = true;
        op->status = op == failed ? status : DP_CONNECTION;
    }
    q->next = q->tail = q->head;
    if (status == DP_PEER_GONE)
        dp_qp_break(&q->q, DP_PEER_GONE);
}

/* ---- create, destroy, reset ---- */

static uint32_t power_of_two(uint32_t n) {
    uint32_t size = 1;
    while (size < n)
        size <<= 1;
    return size;
}

static void free_qp(ofi_qp *q) {
    if (q->copies_mr)
        ofi_close(&q->copies_mr->fid);
    if (q->arrivals_mr)
        ofi_close(&q->arrivals_mr->fid);
    free(q->ops);
    free(q->copies);
    free(q->recvs);
    free(q->arrivals);
    free(q->saved);
    free(q);
}

static int make_rings(ofi_qp *q, dp_error *err) {
    uint32_t n_send = power_of_two(q->q.max_send), n_recv = power_of_two(q->q.max_recv);
    ofi_domain *d = ofi_domain_of(q->q.domain);
    q->op_mask = n_send - 1;
    q->recv_mask = n_recv - 1;
    q->ops = calloc(n_send, sizeof *q->ops);
    q->copies = calloc(n_send, OFI_SLOT);
    q->recvs = calloc(n_recv, sizeof *q->recvs);
    q->arrivals = calloc(n_recv, sizeof *q->arrivals);
    q->saved = calloc(q->q.max_recv, sizeof *q->saved);
    if (!q->saved || !q->ops || !q->copies || !q->recvs || !q->arrivals)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    int st = ofi_local_register(d, q->copies, (uint64_t)n_send * OFI_SLOT, &q->copies_mr, err);
    if (!st && dev_of(q)->messages)
        st = ofi_local_register(d, q->arrivals, n_recv * sizeof *q->arrivals, &q->arrivals_mr, err);
    return st;
}

int ofi_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    if (attr->n_expose > OFI_EXPOSE_MAX)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: %u exposed regions, at most %d on ofi", attr->n_expose, OFI_EXPOSE_MAX);
    ofi_qp *q = calloc(1, sizeof *q);
    if (!q)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    q->q = (dp_qp){.ops = &ofi_ops, .domain = d, .cq = cq, .max_inline = OFI_INLINE_MAX, .max_send = attr->max_send,
                   .max_recv = attr->max_recv};
    q->tx_fd = q->rx_fd = -1;
    q->n_expose = attr->n_expose;
    for (uint32_t i = 0; i < attr->n_expose; i++)
        q->expose[i] = (ofi_mem *)attr->expose[i];
    int st = make_rings(q, err);
    if (!st)
        st = begin_life(q, err);
    if (!st && (st = ofi_cq_attach(ofi_cq_of(cq), q, err)))
        end_life(q);
    if (st) {
        free_qp(q);
        return st;
    }
    pthread_mutex_lock(&dev_of(q)->lock);
    for (uint32_t i = 0; i < q->n_expose; i++)
        q->expose[i]->refs++;
    pthread_mutex_unlock(&dev_of(q)->lock);
    *out = &q->q;
    return DP_OK;
}

/* Makes progress. Returns false if the connection has ended or no post has completed for ms milliseconds; *until is the end of that time. */
static bool linger(ofi_qp *q, int ms, int64_t *until) {
    uint32_t tail = q->tail;
    ofi_take_sent(q);
    if (q->ep)
        ofi_save_arrivals(q); /* the peer's bye may be among them */
    int64_t now = dp_now_ns();
    if (q->tail != tail)
        *until = now + ms * MS;
    return q->ep && now < *until;
}

/* Sends the last posts and then the bye. If the connection is declared broken, only the bye is sent, and nothing is waited for, because the peer
 * may be dead. A peer that has never been heard of is not waited for either, but the progress lets ofi_rxm end an attempt to connect, whose
 * socket it would leak. */
static void leave(ofi_qp *q) {
    if (!q->ep || q->q.state != DP_QP_CONNECTED)
        return;
    bool waits = q->signs && !dp_qp_broken(&q->q);
    int ms = waits ? OFI_LINGER_MS : 1;
    const uint32_t *sent = dev_of(q)->kind->ordered ? &q->next : &q->tail;
    int64_t until = dp_now_ns() + ms * MS;
    while (!dp_qp_broken(&q->q) && q->head != *sent && linger(q, ms, &until))
        ;
    if (!q->flight) { /* then libfabric takes the bye at once, or there is no connection */
        ms = 1;
        until = dp_now_ns() + MS;
    }
    while (q->ep && (q->signs || q->flight) && !ofi_say_bye(q) && linger(q, ms, &until))
        ;
    until = dp_now_ns() + OFI_LINGER_MS * MS;
    while (waits && q->ep && q->said_bye && !q->bye_acked && linger(q, OFI_LINGER_MS, &until))
        ;
}

void ofi_qp_destroy(dp_qp *base) {
    ofi_qp *q = ofi_qp_of(base);
    leave(q);
    end_life(q);
    ofi_cq_detach(ofi_cq_of(base->cq), q);
    for (uint32_t i = 0; i < q->n_expose; i++)
        ofi_mem_unref(dev_of(q), q->expose[i]);
    free_qp(q);
}

int ofi_qp_reset(dp_qp *base, dp_error *err) {
    ofi_qp *q = ofi_qp_of(base);
    leave(q);
    base->state = DP_QP_ERROR;
    end_life(q);
    q->gone = true;
    int st = begin_life(q, err);
    if (st)
        return st;
    __atomic_store_n(&base->broken, 0, __ATOMIC_RELEASE);
    base->posted = base->arrived = 0;
    base->state = DP_QP_INIT;
    return DP_OK;
}

/* ---- blob ---- */

static void list_region(const ofi_qp *q, uint32_t i, ofi_region *out) {
    const dp_mem *m = &q->expose[i]->m;
    *out = (ofi_region){.rkey = m->rkey, .access = m->access, .base = m->base, .size = m->size};
    if (q->mrs[i])
        out->key = fi_mr_key(q->mrs[i]);
}

int ofi_qp_export(dp_qp *base, void *blob, uint32_t *len, dp_error *err) {
    ofi_qp *q = ofi_qp_of(base);
    ofi_dev *dev = dev_of(q);
    if (!q->ep)
        return dp_fail(err, DP_CONNECTION, 0, "export blob: the queue pair has failed (reset it first)");
    ofi_blob b = {.version = BLOB_VERSION, .provider = DP_PROVIDER_OFI, .kind = dev->kind->id, .n_regions = (uint8_t)q->n_expose,
                  .flags = (uint16_t)((dev->virt ? OFI_BLOB_VIRT_ADDR : 0) | (dev->messages ? OFI_BLOB_MESSAGES : 0))};
    memcpy(b.magic, blob_magic, sizeof b.magic);
    size_t room = sizeof b.address;
    int e = fi_getname(&q->ep->fid, b.address, &room);
    if (e || room == 0 || room > sizeof b.address)
        return ofi_fail(err, DP_UNSUPPORTED, e, "export blob: fi_getname (addresses of up to 48 bytes)", dev);
    b.address_len = (uint8_t)room;
    for (uint32_t i = 0; i < q->n_expose; i++)
        list_region(q, i, &b.regions[i]);
    *len = REGIONS_AT + q->n_expose * (uint32_t)sizeof b.regions[0];
    b.crc = dp_crc32c(&b, *len);
    memcpy(blob, &b, *len);
    return DP_OK;
}

static int check_head(const ofi_dev *dev, ofi_blob *b, uint32_t len, dp_error *err) {
    if (memcmp(b->magic, blob_magic, sizeof blob_magic) || b->version != BLOB_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: magic %02x%02x%02x%02x, version %u; this program knows RFQP, version %d",
                       (uint8_t)b->magic[0], (uint8_t)b->magic[1], (uint8_t)b->magic[2], (uint8_t)b->magic[3], b->version, BLOB_VERSION);
    if (b->provider != DP_PROVIDER_OFI)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: provider %u, not ofi (%d)", b->provider, DP_PROVIDER_OFI);
    uint32_t crc = b->crc;
    b->crc = 0;
    if (dp_crc32c(b, len) != crc)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: checksum %#x is wrong", crc);
    uint16_t flags = (uint16_t)((b->flags & OFI_BLOB_VIRT_ADDR) | (dev->messages ? OFI_BLOB_MESSAGES : 0));
    if (b->kind != dev->kind->id || b->flags != flags)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: libfabric provider %u with flags %#x; %s is %u and needs %#x", b->kind, b->flags,
                       dev->d.name, dev->kind->id, flags);
    if (b->n_regions > OFI_EXPOSE_MAX || len != REGIONS_AT + b->n_regions * sizeof b->regions[0])
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: %u bytes with %u regions", len, b->n_regions);
    if (b->address_len == 0 || b->address_len > OFI_ADDRESS_MAX)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: address of %u bytes", b->address_len);
    return DP_OK;
}

/* libfabric trusts the family in a socket address. */
static int check_name(const ofi_dev *dev, const ofi_blob *b, dp_error *err) {
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    uint32_t format = dev->info->addr_format;
    if (format != FI_SOCKADDR && format != FI_SOCKADDR_IN && format != FI_SOCKADDR_IN6)
        return DP_OK;
    memcpy(&v4, b->address, sizeof v4);
    memcpy(&v6, b->address, sizeof v6);
    bool good = v4.sin_family == AF_INET ? b->address_len == sizeof v4 && v4.sin_port && v4.sin_addr.s_addr
                                         : v4.sin_family == AF_INET6 && b->address_len == sizeof v6 && v6.sin6_port;
    return good ? DP_OK : dp_fail(err, DP_BAD_BLOB, 0, "address blob: %u bytes of family %u are not a socket address", b->address_len, v4.sin_family);
}

static int decode(const ofi_dev *dev, const void *blob, uint32_t len, ofi_blob *b, dp_error *err) {
    if (!blob || len < REGIONS_AT || len > sizeof *b)
        return dp_fail(err, DP_BAD_BLOB, 0, "address blob: %u bytes, an ofi blob has %d..%zu", len, REGIONS_AT, sizeof *b);
    *b = (ofi_blob){0};
    memcpy(b, blob, len);
    int st = check_head(dev, b, len, err);
    if (!st)
        st = check_name(dev, b, err);
    for (uint32_t i = 0; !st && i < b->n_regions; i++)
        if (b->regions[i].access & ~7u || b->regions[i].size > 1ull << 40 || b->regions[i].base > UINT64_MAX - b->regions[i].size)
            st = dp_fail(err, DP_BAD_BLOB, 0, "address blob: region %u has access %#x, %#llx bytes at %#llx", i, b->regions[i].access,
                         (unsigned long long)b->regions[i].size, (unsigned long long)b->regions[i].base);
    return st;
}

/* Posts a write of no bytes, so that libfabric connects before the caller's first post: until then a post leaves only while its side
 * polls. A client waits a little for the connection. A worker does not, because the client polls only when it has the worker's blob. */
static void warm_up(ofi_qp *q) {
    ofi_post_keepalive(q);
    int64_t until = dp_now_ns() + OFI_WARM_MS * MS;
    while (!dev_of(q)->active_only && q->ask != OFI_ASK_NONE && dp_now_ns() < until)
        ofi_take_sent(q);
}

int ofi_qp_connect(dp_qp *base, const void *blob, uint32_t len, dp_error *err) {
    ofi_qp *q = ofi_qp_of(base);
    ofi_blob b;
    int st = decode(dev_of(q), blob, len, &b, err);
    if (st)
        return st;
    int n = fi_av_insert(q->av, b.address, 1, &q->peer, 0, NULL);
    if (n != 1)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect on %s: fi_av_insert refuses the peer's address (%d)", dev_of(q)->d.name, n);
    q->n_regions = b.n_regions;
    memcpy(q->regions, b.regions, sizeof q->regions);
    q->peer_virt = b.flags & OFI_BLOB_VIRT_ADDR;
    base->posted = base->arrived = 0;
    base->state = DP_QP_CONNECTED;
    q->connected_at = dp_now_ns();
    warm_up(q);
    return DP_OK;
}
#endif

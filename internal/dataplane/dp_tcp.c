/* The tcp provider: devices, memory, and the life of a queue pair. */
#include "dp_tcp_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINGER_MS 500

static const dp_ops tcp_ops;

/* ---- devices and domains ---- */

static int check_ports(const dp_dev_options *o, dp_error *err) {
    if (o->port_first < 0 || o->port_last < o->port_first || o->port_last > 65535 || (o->port_last && !o->port_first))
        return dp_fail(err, DP_INVALID, 0, "open tcp: ports %d to %d: give a range within 1..65535, or 0 to 0 for any", o->port_first,
                       o->port_last);
    return DP_OK;
}

/* Reads the numeric address to listen on. */
static int parse_listen(tcp_dev *dev, const char *text, dp_error *err) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)&dev->listen_at;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&dev->listen_at;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        dev->listen_len = sizeof *v4;
        return DP_OK;
    }
    memset(v6, 0, sizeof *v6);
    if (inet_pton(AF_INET6, text, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        dev->listen_len = sizeof *v6;
        return DP_OK;
    }
    return dp_fail(err, DP_INVALID, 0, "open tcp: address \"%.60s\" is not a numeric IPv4 or IPv6 address", text);
}

static bool is_wildcard(const tcp_dev *dev) {
    if (dev->listen_at.ss_family == AF_INET)
        return ((const struct sockaddr_in *)&dev->listen_at)->sin_addr.s_addr == INADDR_ANY;
    return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)&dev->listen_at)->sin6_addr);
}

static int apply_options(tcp_dev *dev, const dp_dev_options *o, dp_error *err) {
    const char *address = o->address && *o->address ? o->address : "127.0.0.1";
    const char *advertise = o->advertise && *o->advertise ? o->advertise : NULL;
    dev->active_only = o->active_side_only;
    dev->attended = o->attended;
    dev->handed = dev->d.waits = o->handed;
    dev->handed_from = o->handed && o->handed_from > 0 ? o->handed_from : -1;
    dev->port_first = o->port_first;
    dev->port_last = o->port_last;
    int st = check_ports(o, err);
    if (!st)
        st = parse_listen(dev, address, err);
    if (!st && advertise)
        st = tcp_addresses_parse(advertise, dev->addresses, &dev->n_addresses, err);
    if (!st)
        st = tcp_seal_open_device(dev, o->encrypt, err);
    if (st)
        return st;
    if (dev->active_only && dev->handed)
        return dp_fail(err, DP_INVALID, 0, "open tcp: options handed and active_side_only exclude each other");
    if (!advertise && dev->handed)
        return dp_fail(err, DP_INVALID, 0, "open tcp: option handed needs advertise: the addresses that peers connect to");
    if (!advertise && !dev->active_only && is_wildcard(dev))
        return dp_fail(err, DP_INVALID, 0, "open tcp: listening on %s needs advertise: the addresses that peers connect to", address);
    snprintf(dev->d.name, sizeof dev->d.name, "tcp %.50s", dev->handed ? advertise : dev->active_only ? "client" : address);
    return DP_OK;
}

static void tcp_dev_close(dp_dev *d) {
    tcp_dev *dev = tcp_dev_of(d);
    tcp_listen_stop(dev);
    pthread_cond_destroy(&dev->changed);
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

int dp_tcp_open(const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    tcp_dev *dev = calloc(1, sizeof *dev);
    if (!dev)
        return dp_fail(err, DP_FATAL, ENOMEM, "open tcp");
    dev->d = (dp_dev){.ops = &tcp_ops,
                      .provider = DP_PROVIDER_TCP,
                      .caps = DP_CAP_SYNC_SOURCE | DP_CAP_POLLED_TARGET,
                      .max_msg = TCP_MAX_MSG};
    int st = apply_options(dev, opts, err);
    if (st) {
        free(dev);
        return st;
    }
    pthread_mutex_init(&dev->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&dev->changed, &clock);
    pthread_condattr_destroy(&clock);
    *out = &dev->d;
    return DP_OK;
}

static int tcp_domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    dp_domain *d = calloc(1, sizeof *d);
    if (!d)
        return dp_fail(err, DP_FATAL, ENOMEM, "create domain");
    d->dev = dev;
    *out = d;
    return DP_OK;
}

static void tcp_domain_destroy(dp_domain *d) { free(d); }

void dp_tcp_count(dp_dev *d, dp_tcp_counts *out) {
    *out = (dp_tcp_counts){0};
    if (d->provider != DP_PROVIDER_TCP)
        return;
    tcp_dev *dev = tcp_dev_of(d);
    pthread_mutex_lock(&dev->lock);
    *out = dev->counts;
    out->forged = __atomic_load_n(&dev->forged, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&dev->lock);
}

/* ---- memory ---- */

static int tcp_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    tcp_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "register region");
    m->m = (dp_mem){.domain = d, .addr = addr, .size = size, .access = access};
    do
        dp_random(&m->m.rkey, sizeof m->m.rkey);
    while (!m->m.rkey);
    *out = &m->m;
    return DP_OK;
}

int tcp_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), body = (size + page - 1) & ~(page - 1), len;
    bool lazy = access & DP_MEM_LAZY;
    /* With vm.overcommit_memory=1 mmap never fails; filling the mapping would trigger the OOM killer. */
    if (!lazy && body / page > (uint64_t)sysconf(_SC_PHYS_PAGES))
        return dp_fail(err, DP_FATAL, ENOMEM, "allocate region: %llu bytes exceed this machine's memory", (unsigned long long)size);
    char *map = dp_region_map(body, !lazy, &len);
    if (!map)
        return dp_fail(err, DP_FATAL, errno, "allocate region: mmap of %llu bytes", (unsigned long long)size);
    int st = tcp_mem_register(d, map, size, access & ~DP_MEM_LAZY, out, err);
    if (st) {
        munmap(map, len);
        return st;
    }
    ((tcp_mem *)*out)->map = map;
    ((tcp_mem *)*out)->map_len = len;
    return DP_OK;
}

/* Removes the region from queue pairs that expose it. If a frame is being received into the region, its connection ends. */
void tcp_mem_free(dp_mem *mem) {
    tcp_mem *m = (tcp_mem *)mem;
    tcp_dev *dev = tcp_dev_of(mem->domain->dev);
    pthread_mutex_lock(&dev->lock);
    for (tcp_qp *qp = dev->qps; qp; qp = qp->next) {
        pthread_mutex_lock(&qp->lock);
        for (uint32_t i = 0; i < qp->n_expose; i++)
            if (qp->expose[i] == m)
                qp->expose[i] = NULL;
        if (qp->in_frame && qp->into == m)
            qp->dst = NULL;
        pthread_mutex_unlock(&qp->lock);
    }
    pthread_mutex_unlock(&dev->lock);
    if (m->map)
        munmap(m->map, m->map_len);
    free(m);
}

/* ---- queue pairs ---- */

static uint32_t power_of_two(uint32_t n) {
    uint32_t size = 1;
    while (size < n)
        size <<= 1;
    return size;
}

static void qp_free(tcp_qp *qp) {
    pthread_mutex_destroy(&qp->lock);
    free(qp->stage);
    free(qp->recvs);
    free(qp->pending);
    free(qp->out);
    explicit_bzero(qp->secret, sizeof qp->secret);
    free(qp);
}

int tcp_qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    tcp_dev *dev = tcp_dev_of(d->dev);
    tcp_qp *qp = calloc(1, sizeof *qp);
    if (!qp)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    pthread_mutex_init(&qp->lock, NULL);
    uint32_t n_recv = power_of_two(attr->max_recv), n_send = power_of_two(attr->max_send);
    qp->q = (dp_qp){.ops = &tcp_ops, .domain = d, .cq = c, .max_inline = UINT32_MAX, .max_send = attr->max_send, .max_recv = attr->max_recv};
    qp->stage = malloc(TCP_STAGE);
    qp->recvs = calloc(n_recv, sizeof *qp->recvs);
    qp->pending = calloc(n_send, sizeof *qp->pending);
    qp->out_cap = TCP_ONE_SEND + 2 * sizeof(tcp_frame);
    qp->out = malloc(qp->out_cap);
    qp->recv_mask = n_recv - 1;
    qp->pend_mask = n_send - 1;
    qp->out_max = attr->max_answers ? attr->max_answers : TCP_OUT_MAX;
    qp->take_max = attr->max_answers ? TCP_TAKE_SHORT : TCP_TAKE_MAX;
    qp->peer.fd = qp->deposit.fd = qp->meeting_fd = -1;
    qp->n_expose = attr->n_expose;
    for (uint32_t i = 0; i < attr->n_expose; i++)
        qp->expose[i] = (tcp_mem *)attr->expose[i];
    dp_random(qp->token, sizeof qp->token);
    dp_random(qp->secret, sizeof qp->secret);
    int st = qp->stage && qp->recvs && qp->pending && qp->out ? DP_OK : dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    if (!st)
        st = tcp_cq_attach(tcp_cq_of(c), qp, err);
    if (st) {
        qp_free(qp);
        return st;
    }
    pthread_mutex_lock(&dev->lock);
    qp->next = dev->qps;
    dev->qps = qp;
    pthread_mutex_unlock(&dev->lock);
    *out = &qp->q;
    return DP_OK;
}

static int tcp_qp_export(dp_qp *q, void *blob, uint32_t *len, dp_error *err) {
    return tcp_link_export(tcp_dev_of(q->domain->dev), tcp_qp_of(q), blob, len, err);
}

static int tcp_qp_connect(dp_qp *q, const void *blob, uint32_t len, dp_error *err) {
    tcp_qp *qp = tcp_qp_of(q);
    int st = tcp_link_connect(tcp_dev_of(q->domain->dev), qp, blob, len, err);
    if (st)
        return st;
    dp_tcp_prepare(qp->peer.fd);
    qp->ready = true;
    q->posted = q->arrived = 0;
    q->bytes_acked = q->bytes_received = 0;
    q->peer_batches = tcp_peer_can(&qp->peer, TCP_CAN_BATCH);
    q->state = DP_QP_CONNECTED;
    return DP_OK;
}

/* Closes the connection and drops all of its state. */
static void disconnect(tcp_qp *qp) {
    tcp_dev *dev = tcp_dev_of(qp->q.domain->dev);
    tcp_link_forget(dev, qp);
    tcp_close(qp);
    tcp_seal_end(qp);
    pthread_mutex_lock(&qp->lock); /* dp_mem_free looks at in_frame */
    qp->in_frame = false;
    pthread_mutex_unlock(&qp->lock);
    qp->peer = (tcp_link){.fd = -1};
    qp->held = qp->more = qp->ready = qp->passed = false;
    qp->lo = qp->hi = 0;
    qp->rposted = qp->rtaken = qp->rpolled = 0;
    qp->out_lo = qp->out_hi = 0;
    qp->pend_head = qp->pend_tail = qp->unpolled = 0;
    qp->reading = 0;
    qp->silent_since = 0;
    tcp_cq_forget(tcp_cq_of(qp->q.cq), qp);
}

static int tcp_qp_reset(dp_qp *q, dp_error *err) {
    (void)err;
    tcp_qp *qp = tcp_qp_of(q);
    tcp_dev *dev = tcp_dev_of(q->domain->dev);
    disconnect(qp);
    pthread_mutex_lock(&dev->lock);
    dp_random(qp->token, sizeof qp->token);
    dp_random(qp->secret, sizeof qp->secret);
    qp->taken = false;
    pthread_mutex_unlock(&dev->lock);
    __atomic_store_n(&q->broken, 0, __ATOMIC_RELEASE);
    q->state = DP_QP_INIT;
    return DP_OK;
}

/* Sends the last posts for up to LINGER_MS. A worker may answer and then exit at once. A client waits for nothing that it has sent. */
static void linger(tcp_qp *qp) {
    int64_t until = dp_now_ns() + LINGER_MS * 1000000ll;
    while (qp->peer.fd >= 0 && !dp_qp_broken(&qp->q) && tcp_flush(qp) && tcp_backlog(qp) && dp_now_ns() < until) {
        struct pollfd p = {qp->peer.fd, POLLOUT, 0};
        ppoll(&p, 1, &(struct timespec){.tv_nsec = LINGER_MS * 100000}, NULL);
    }
}

void tcp_qp_destroy(dp_qp *q) {
    tcp_qp *qp = tcp_qp_of(q);
    tcp_dev *dev = tcp_dev_of(q->domain->dev);
    if (!dev->active_only)
        linger(qp);
    disconnect(qp);
    pthread_mutex_lock(&dev->lock);
    for (tcp_qp **p = &dev->qps; *p; p = &(*p)->next)
        if (*p == qp) {
            *p = qp->next;
            break;
        }
    pthread_mutex_unlock(&dev->lock);
    tcp_cq_detach(tcp_cq_of(q->cq), qp);
    qp_free(qp);
}

static void tcp_qp_cancel(dp_qp *q) { tcp_link_cancel(tcp_dev_of(q->domain->dev), tcp_qp_of(q)); }

/* The peer's memory is reached by frames only. */
static void *tcp_rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    (void)q, (void)raddr, (void)rkey, (void)len;
    return NULL;
}

static void tcp_qp_notify(dp_qp *q) { (void)q; }

static const dp_ops tcp_ops = {
    .dev_close = tcp_dev_close,
    .dev_event_fd = tcp_event_fd,
    .dev_attend = tcp_attend,
    .dev_starved = tcp_starved,
    .domain_create = tcp_domain_create,
    .domain_destroy = tcp_domain_destroy,
    .mem_alloc = tcp_mem_alloc,
    .mem_register = tcp_mem_register,
    .mem_free = tcp_mem_free,
    .cq_create = tcp_cq_create,
    .cq_pack = tcp_cq_pack,
    .cq_unpack = tcp_cq_unpack,
    .qp_pack = tcp_qp_pack,
    .qp_unpack = tcp_qp_unpack,
    .cq_destroy = tcp_cq_destroy,
    .cq_poll = tcp_cq_poll,
    .cq_arm = tcp_cq_arm,
    .cq_disarm = tcp_cq_disarm,
    .cq_wait = tcp_cq_wait,
    .cq_wait_many = tcp_cq_wait_many,
    .cq_wake = tcp_cq_wake,
    .cq_promise_hot = tcp_cq_promise_hot,
    .qp_create = tcp_qp_create,
    .qp_export = tcp_qp_export,
    .qp_connect = tcp_qp_connect,
    .qp_cancel = tcp_qp_cancel,
    .qp_reset = tcp_qp_reset,
    .qp_destroy = tcp_qp_destroy,
    .post_write = tcp_post_write,
    .post_write_imm = tcp_post_write_imm,
    .post_read = tcp_post_read,
    .post_fetch_add = tcp_post_fetch_add,
    .post_compare_swap = tcp_post_compare_swap,
    .post_recv = tcp_post_recv,
    .rkey_ptr = tcp_rkey_ptr,
    .qp_probe = tcp_qp_probe,
    .qp_events = tcp_qp_events,
    .qp_notify = tcp_qp_notify,
};

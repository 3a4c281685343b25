#include "dp_vqp.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

const char *dp_status_text(int status) {
    switch ((dp_status)status) {
    case DP_OK: return "ok";
    case DP_BUSY: return "busy";
    case DP_INVALID: return "invalid argument";
    case DP_TOO_LARGE: return "too large";
    case DP_NO_FUNCTION: return "no such function";
    case DP_BAD_BLOB: return "bad address blob";
    case DP_BAD_LIBRARY: return "library cannot be loaded";
    case DP_BAD_REQUEST: return "request refused as malformed";
    case DP_WRONG_THREAD: return "used by two threads at once";
    case DP_UNSUPPORTED: return "unsupported";
    case DP_NO_DEVICE: return "no such device";
    case DP_FUNCTION_FAILED: return "function failed";
    case DP_RESULT_TOO_LARGE: return "result larger than the capacity";
    case DP_DEADLINE: return "deadline exceeded";
    case DP_CANCELLED: return "cancelled";
    case DP_CONNECTION: return "connection broken";
    case DP_PEER_GONE: return "peer gone";
    case DP_WORKER_DIED: return "worker died";
    case DP_TIME_LIMIT: return "time limit exceeded";
    case DP_MEMORY_LIMIT: return "memory limit exceeded";
    case DP_PROTOCOL: return "protocol violation by the peer";
    case DP_LEASE_ENDED: return "lease ended";
    case DP_FATAL: return "fatal";
    case DP_CREDENTIAL: return "credential refused";
    }
    return "unknown status";
}

int dp_fail(dp_error *err, int status, int sys_errno, const char *fmt, ...) {
    if (!err)
        return status;
    err->status = status;
    err->sys_errno = sys_errno;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->msg, sizeof err->msg, fmt, ap);
    va_end(ap);
    if (sys_errno && n >= 0 && (size_t)n < sizeof err->msg) {
        char text[96];
        /* GNU strerror_r may return a static string instead of filling the buffer. */
        snprintf(err->msg + n, sizeof err->msg - (size_t)n, ": %s", strerror_r(sys_errno, text, sizeof text));
    }
    return status;
}

int dp_thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN > (64 << 10) ? (size_t)PTHREAD_STACK_MIN : 64 << 10);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = pthread_create(thread, &attr, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return e;
}

int64_t dp_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

void dp_random(void *buf, size_t len) {
    unsigned char *p = buf;
    while (len) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            abort();
        }
        p += n;
        len -= (size_t)n;
    }
}

/* ---- what there is of each kind in this process ---- */

static dp_live live;
static uint64_t qps_made;

uint64_t dp_qps_made(void) { return __atomic_load_n(&qps_made, __ATOMIC_RELAXED); }

static int made(int status, int32_t *count) {
    if (status == DP_OK)
        __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
    return status;
}

static void gone(int32_t *count) { __atomic_fetch_sub(count, 1, __ATOMIC_RELAXED); }

/* Peers know a new region by its address. */
static int made_region(int status, dp_mem **m) {
    if (status == DP_OK)
        (*m)->base = (uint64_t)(uintptr_t)(*m)->addr;
    return made(status, &live.regions);
}

void dp_live_now(dp_live *out) {
    out->devices = __atomic_load_n(&live.devices, __ATOMIC_RELAXED);
    out->domains = __atomic_load_n(&live.domains, __ATOMIC_RELAXED);
    out->regions = __atomic_load_n(&live.regions, __ATOMIC_RELAXED);
    out->queues = __atomic_load_n(&live.queues, __ATOMIC_RELAXED);
    out->queue_pairs = __atomic_load_n(&live.queue_pairs, __ATOMIC_RELAXED);
}

/* ---- devices, domains, memory ---- */

int dp_dev_open(const char *provider, const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    static const dp_dev_options defaults = {.gid_index = -1};
    if (!opts)
        opts = &defaults;
    if (provider && !strcmp(provider, "shm"))
        return made(dp_shm_open(opts, out, err), &live.devices);
    if (provider && !strcmp(provider, "verbs"))
        return made(dp_verbs_open(opts, out, err), &live.devices);
    if (provider && !strcmp(provider, "tcp"))
        return made(dp_tcp_open(opts, out, err), &live.devices);
    if (provider && !strcmp(provider, "ofi"))
        return made(dp_ofi_open(opts, out, err), &live.devices);
    return dp_fail(err, DP_INVALID, 0, "unknown provider \"%s\" (shm, verbs, tcp, ofi)", provider ? provider : "");
}

int dp_vqp_open(dp_provider_id of, dp_dev **out, dp_error *err) { return made(dp_vqp_make(of, out, err), &live.devices); }

int dp_dev_event_fd(dp_dev *dev) { return dev->ops->dev_event_fd ? dev->ops->dev_event_fd(dev) : -1; }

bool dp_dev_starved(const dp_dev *dev) { return dev->ops->dev_starved && dev->ops->dev_starved(dev); }

void dp_dev_attend(dp_dev *dev) {
    if (dev->ops->dev_attend)
        dev->ops->dev_attend(dev);
}

void dp_dev_close(dp_dev *dev) {
    if (!dev)
        return;
    dev->ops->dev_close(dev);
    gone(&live.devices);
}

int dp_domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    return made(dev->ops->domain_create(dev, out, err), &live.domains);
}

void dp_domain_destroy(dp_domain *d) {
    if (!d)
        return;
    d->dev->ops->domain_destroy(d);
    gone(&live.domains);
}

int dp_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    if (size == 0 || size > (1ull << 40))
        return dp_fail(err, DP_INVALID, 0, "allocate region: size %llu not in 1..2^40", (unsigned long long)size);
    if (access & ~(7u | DP_MEM_LAZY))
        return dp_fail(err, DP_INVALID, 0, "allocate region: unknown access bits %#x", access);
    return made_region(d->dev->ops->mem_alloc(d, size, access, out, err), out);
}

int dp_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    if (!addr || size == 0 || size > (1ull << 40))
        return dp_fail(err, DP_INVALID, 0, "register region: address %p size %llu", addr, (unsigned long long)size);
    if (access & ~7u)
        return dp_fail(err, DP_INVALID, 0, "register region: unknown access bits %#x", access);
    return made_region(d->dev->ops->mem_register(d, addr, size, access, out, err), out);
}

int dp_mem_window(dp_domain *d, dp_mem *whole, uint64_t offset, uint64_t size, uint32_t access, dp_mem **out,
                  dp_error *err) {
    if (size == 0 || offset > whole->size || size > whole->size - offset)
        return dp_fail(err, DP_INVALID, 0, "window of %llu bytes at %llu of a region of %llu", (unsigned long long)size,
                       (unsigned long long)offset, (unsigned long long)whole->size);
    if (access & ~7u)
        return dp_fail(err, DP_INVALID, 0, "window: unknown access bits %#x", access);
    if (!d->dev->ops->mem_window)
        return dp_mem_register(d, (char *)whole->addr + offset, size, access, out, err);
    return made_region(d->dev->ops->mem_window(d, whole, offset, size, access, out, err), out);
}

int dp_mem_file(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err) {
    if (!d->dev->ops->mem_file)
        return dp_mem_register(d, map, size, DP_REMOTE_READ, out, err);
    if (!map || size == 0 || size > (1ull << 40))
        return dp_fail(err, DP_INVALID, 0, "register file: address %p size %llu", map, (unsigned long long)size);
    return made_region(d->dev->ops->mem_file(d, fd, map, size, out, err), out);
}

int dp_mem_lend(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err) {
    if (!map || size == 0 || size > (1ull << 40))
        return dp_fail(err, DP_INVALID, 0, "lend memory: address %p size %llu", map, (unsigned long long)size);
    if (!d->dev->ops->mem_lend)
        return dp_fail(err, DP_UNSUPPORTED, 0, "lend memory: only shm shares memory");
    return made_region(d->dev->ops->mem_lend(d, fd, map, size, out, err), out);
}

void dp_mem_free(dp_mem *m) {
    if (!m)
        return;
    m->domain->dev->ops->mem_free(m);
    gone(&live.regions);
}

int dp_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    if (capacity == 0 || capacity > (1u << 20))
        return dp_fail(err, DP_INVALID, 0, "create completion queue: capacity %u not in 1..2^20", capacity);
    return made(dev->ops->cq_create(dev, capacity, out, err), &live.queues);
}

int dp_cq_create_beside(dp_cq *other, uint32_t capacity, dp_cq **out, dp_error *err) {
    if (!other->ops->cq_create_beside || capacity == 0 || capacity > (1u << 20))
        return dp_cq_create(other->dev, capacity, out, err);
    return made(other->ops->cq_create_beside(other, capacity, out, err), &live.queues);
}

void dp_cq_destroy(dp_cq *cq) {
    if (!cq)
        return;
    cq->ops->cq_destroy(cq);
    gone(&live.queues);
}

#define BLIND_NS 1000000 /* how long to sleep on one queue while another may get something */

/* False while some channels of an endpoint still use virtual queue pairs. */
static bool alike(dp_cq **cqs, uint32_t n) {
    for (uint32_t i = 1; i < n; i++)
        if (cqs[i]->dev != cqs[0]->dev)
            return false;
    return true;
}

int dp_cq_arm_many(dp_cq **cqs, uint32_t n) {
    const dp_ops *ops = cqs[0]->ops;
    if (alike(cqs, n) && ops->cq_arm_many && ops->cq_arm_many(cqs, n))
        return DP_OK;
    for (uint32_t i = 0; i < n; i++) {
        int st = dp_cq_arm(cqs[i]);
        if (!st)
            continue;
        while (i-- > 0)
            dp_cq_disarm(cqs[i]);
        return st;
    }
    return DP_OK;
}

void dp_cq_disarm_many(dp_cq **cqs, uint32_t n) {
    const dp_ops *ops = cqs[0]->ops;
    if (alike(cqs, n) && ops->cq_disarm_many) {
        ops->cq_disarm_many(cqs, n);
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        dp_cq_disarm(cqs[i]);
}

void dp_cq_wait_many(dp_cq **cqs, uint32_t n, int64_t timeout_ns) {
    const dp_ops *ops = cqs[0]->ops;
    if (alike(cqs, n) && ops->cq_wait_many && ops->cq_wait_many(cqs, n, timeout_ns))
        return;
    dp_cq_wait(cqs[0], timeout_ns < 0 || timeout_ns > BLIND_NS ? BLIND_NS : timeout_ns);
    for (uint32_t i = 1; i < n; i++)
        dp_cq_disarm(cqs[i]);
}

int dp_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    if (attr->max_send < 1 || attr->max_send > 4096 || attr->max_recv < 1 || attr->max_recv > 4096)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: max_send %u, max_recv %u not in 1..4096", attr->max_send,
                       attr->max_recv);
    if (attr->n_expose > DP_EXPOSE_MAX)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: %u exposed regions, at most %d", attr->n_expose,
                       DP_EXPOSE_MAX);
    for (uint32_t i = 0; i < attr->n_expose; i++)
        if (!attr->expose[i] || attr->expose[i]->domain != d)
            return dp_fail(err, DP_INVALID, 0, "create queue pair: exposed region %u is not of its domain", i);
    if (cq->dev != d->dev)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: completion queue of another device");
    uint32_t need = attr->max_send + attr->max_recv;
    if (cq->reserved + need > cq->capacity)
        return dp_fail(err, DP_INVALID, 0, "create queue pair: completion queue of %u has %u left, %u needed",
                       cq->capacity, cq->capacity - cq->reserved, need);
    __atomic_add_fetch(&qps_made, 1, __ATOMIC_RELAXED);
    int st = made(d->dev->ops->qp_create(d, cq, attr, out, err), &live.queue_pairs);
    if (st == DP_OK)
        cq->reserved += need;
    return st;
}

int dp_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err) {
    if (*len < DP_BLOB_MAX)
        return dp_fail(err, DP_INVALID, 0, "export blob: room for %u bytes, %d needed", *len, DP_BLOB_MAX);
    return qp->ops->qp_export(qp, blob, len, err);
}

int dp_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err) {
    if (qp->state != DP_QP_INIT)
        return dp_fail(err, DP_INVALID, 0, "connect: queue pair is not in the initial state (reset it first)");
    return qp->ops->qp_connect(qp, blob, len, err);
}

int dp_qp_connect_late(dp_qp *qp, dp_error *err) {
    if (!qp->ops->qp_connect_late)
        return dp_fail(err, DP_UNSUPPORTED, 0, "connect late: only provider verbs supports it, not device %s", qp->domain->dev->name);
    if (qp->state != DP_QP_INIT)
        return dp_fail(err, DP_INVALID, 0, "connect late: queue pair is not in the initial state (reset it first)");
    return qp->ops->qp_connect_late(qp, err);
}

void dp_qp_cancel(dp_qp *qp) {
    if (qp->ops->qp_cancel)
        qp->ops->qp_cancel(qp);
}

int dp_qp_share(dp_qp *qp, const dp_mem *m) { return qp->ops->qp_share ? qp->ops->qp_share(qp, m) : DP_UNSUPPORTED; }

void dp_qp_unshare(dp_qp *qp, const dp_mem *m) {
    if (qp->ops->qp_unshare)
        qp->ops->qp_unshare(qp, m);
}

void dp_qp_unshare_all(dp_qp *qp) {
    if (qp->ops->qp_unshare_all)
        qp->ops->qp_unshare_all(qp);
}

void *dp_qp_shared_ptr(dp_qp *qp, uint32_t rkey, uint64_t offset, uint64_t len, unsigned how) {
    return qp->ops->qp_shared_ptr ? qp->ops->qp_shared_ptr(qp, rkey, offset, len, how) : NULL;
}

void dp_qp_forget_shared(dp_qp *qp) {
    if (qp->ops->qp_forget_shared)
        qp->ops->qp_forget_shared(qp);
}

/* ---- handing over to another process ---- */

int dp_cq_pack(const dp_cq *cq) { return cq->ops->cq_pack ? cq->ops->cq_pack(cq) : -1; }

static int not_packed(const dp_dev *dev, dp_error *err) {
    return dp_fail(err, DP_UNSUPPORTED, 0, "hand over a queue pair: on %s it belongs to its process", dev->name);
}

int dp_cq_unpack(dp_dev *dev, uint32_t capacity, int *fd, dp_cq **out, dp_error *err) {
    if (!dev->ops->cq_unpack)
        return not_packed(dev, err);
    if (capacity == 0 || capacity > (1u << 20))
        return dp_fail(err, DP_INVALID, 0, "take over a completion queue: capacity %u not in 1..2^20", capacity);
    return made(dev->ops->cq_unpack(dev, capacity, fd, out, err), &live.queues);
}

int dp_qp_pack(dp_qp *qp, dp_packed_qp *out, int *fds, dp_error *err) {
    return qp->ops->qp_pack ? qp->ops->qp_pack(qp, out, fds, err) : not_packed(qp->domain->dev, err);
}

int dp_qp_unpack(dp_domain *d, dp_cq *cq, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out,
                 dp_error *err) {
    if (!d->dev->ops->qp_unpack)
        return not_packed(d->dev, err);
    if (cq->dev != d->dev || packed->size == 0 || packed->size > DP_PACKED_MAX || packed->n_fds > DP_PACKED_FDS)
        return dp_fail(err, DP_INVALID, 0, "take over a queue pair: %u bytes and %u descriptors, or a completion queue of another device",
                       packed->size, packed->n_fds);
    int st = made(d->dev->ops->qp_unpack(d, cq, packed, fds, exposed, n_exposed, out, err), &live.queue_pairs);
    if (st)
        return st;
    __atomic_fetch_add(&live.regions, (int32_t)*n_exposed, __ATOMIC_RELAXED);
    cq->reserved += (*out)->max_send + (*out)->max_recv; /* the provider has checked that there is room */
    return DP_OK;
}

int dp_qp_reset(dp_qp *qp, dp_error *err) { return qp->ops->qp_reset(qp, err); }

void dp_qp_destroy(dp_qp *qp) {
    if (!qp)
        return;
    qp->cq->reserved -= qp->max_send + qp->max_recv;
    qp->ops->qp_destroy(qp);
    gone(&live.queue_pairs);
}

void dp_qp_break(dp_qp *qp, int status) {
    int32_t none = 0;
    /* The first reason stays. Release pairs with the acquire in dp_qp_broken. */
    __atomic_compare_exchange_n(&qp->broken, &none, status, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    dp_cq_wake(qp->cq);
}

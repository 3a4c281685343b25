#include "dp_shm.h"
#include "dp_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const dp_ops shm_ops;

static long futex(uint32_t *word, int op, uint32_t value, const struct timespec *timeout) {
    /* Not FUTEX_PRIVATE: the waker is another process. */
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

static uint64_t page_up(uint64_t n) { return (n + SHM_PAGE - 1) & ~(uint64_t)(SHM_PAGE - 1); }

/* ---- memory ---- */

/* Maps fd over a fresh reservation that ends in an inaccessible page. */
static void *map_guarded(int fd, uint64_t size, int prot, bool populate) {
    uint64_t len = page_up(size);
    uint8_t *at = mmap(NULL, len + SHM_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    if (mmap(at, len, prot, MAP_SHARED | MAP_FIXED | (populate ? MAP_POPULATE : 0), fd, 0) == MAP_FAILED) {
        int e = errno;
        munmap(at, len + SHM_PAGE);
        errno = e;
        return NULL;
    }
    return at;
}

void shm_unmap(void *map, uint64_t size) {
    if (map)
        munmap(map, page_up(size) + SHM_PAGE);
}

int shm_segment_create(const char *what, uint64_t size, bool populate, int *fd, void **map, dp_error *err) {
    *map = NULL;
    *fd = memfd_create("rfaas", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0)
        return dp_fail(err, DP_FATAL, errno, "memfd for %s", what);
    if (ftruncate(*fd, (off_t)page_up(size)) || fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) ||
        !(*map = map_guarded(*fd, size, PROT_READ | PROT_WRITE, populate))) {
        int e = errno;
        close(*fd);
        *fd = -1;
        return dp_fail(err, DP_FATAL, e, "memory for %s, %llu bytes", what, (unsigned long long)size);
    }
    return DP_OK;
}

static int shm_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "allocate region");
    int st = shm_segment_create("a region", size, true, &m->fd, &m->m.addr, err);
    if (st) {
        free(m);
        return st;
    }
    /* Our mapping stays writable; a peer's can only be read. */
    if (!(access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC)))
        fcntl(m->fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    fcntl(m->fd, F_ADD_SEALS, F_SEAL_SEAL);
    m->m.domain = d;
    m->m.size = size;
    m->m.access = access;
    do
        dp_random(&m->m.rkey, sizeof m->m.rkey);
    while (!m->m.rkey);
    *out = &m->m;
    return DP_OK;
}

static int shm_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    if (access)
        return dp_fail(err, DP_UNSUPPORTED, 0,
                       "register region: shm shares only memory of dp_mem_alloc (access bits %#x)", access);
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "register region");
    m->fd = -1;
    m->m = (dp_mem){.domain = d, .addr = addr, .size = size};
    *out = &m->m;
    return DP_OK;
}

static void shm_mem_free(dp_mem *mem) {
    shm_mem *m = (shm_mem *)mem;
    if (m->fd >= 0) {
        shm_unmap(m->m.addr, m->m.size);
        close(m->fd);
    }
    free(m);
}

/* Gives the region new pages with the old contents: whoever still maps the old ones writes to orphans. */
static int mem_renew(shm_mem *m, dp_error *err) {
    int fd;
    void *fresh;
    int st = shm_segment_create("a renewed region", m->m.size, true, &fd, &fresh, err);
    if (st)
        return st;
    memcpy(fresh, m->m.addr, m->m.size);
    shm_unmap(fresh, m->m.size);
    if (mmap(m->m.addr, page_up(m->m.size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) ==
        MAP_FAILED) {
        int e = errno;
        close(fd);
        return dp_fail(err, DP_FATAL, e, "map a renewed region of %llu bytes", (unsigned long long)m->m.size);
    }
    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL);
    close(m->fd);
    m->fd = fd;
    return DP_OK;
}

/* ---- devices and domains ---- */

static int shm_domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    dp_domain *d = calloc(1, sizeof *d);
    if (!d)
        return dp_fail(err, DP_FATAL, ENOMEM, "create domain");
    d->dev = dev;
    *out = d;
    return DP_OK;
}

static void shm_domain_destroy(dp_domain *d) { free(d); }

static void shm_dev_close(dp_dev *d) {
    shm_dev *dev = (shm_dev *)d;
    shm_link_close(dev);
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

int dp_shm_open(const dp_dev_options *opts, dp_dev **out, dp_error *err) {
    shm_dev *dev = calloc(1, sizeof *dev);
    if (!dev)
        return dp_fail(err, DP_FATAL, ENOMEM, "open shm");
    dev->d.ops = &shm_ops;
    dev->d.provider = DP_PROVIDER_SHM;
    dev->d.caps = DP_CAP_SYNC_SOURCE | DP_CAP_RKEY_PTR;
    dev->d.max_inline = UINT32_MAX;
    dev->d.max_msg = UINT32_MAX;
    dev->d.max_send_msg = SHM_SEND_MAX;
    strcpy(dev->d.name, "shm");
    dev->active_only = opts->active_side_only;
    dev->listen_fd = dev->epoll_fd = dev->stop_fd = -1;
    pthread_mutex_init(&dev->lock, NULL);
    dev->membarrier = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
    int st = shm_link_identity(dev, err);
    if (st) {
        shm_dev_close(&dev->d);
        return st;
    }
    *out = &dev->d;
    return DP_OK;
}

/* ---- completion queues ---- */

static int shm_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    shm_cq *cq = calloc(1, sizeof *cq);
    if (!cq)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue");
    uint32_t room = 1;
    while (room < capacity)
        room <<= 1;
    cq->c = (dp_cq){.ops = &shm_ops, .dev = dev, .capacity = capacity};
    cq->local_mask = room - 1;
    cq->local = calloc(room, sizeof *cq->local);
    void *page = NULL;
    int st = cq->local ? shm_segment_create("a completion queue", SHM_PAGE, true, &cq->fd, &page, err)
                       : dp_fail(err, DP_FATAL, ENOMEM, "create completion queue of %u", capacity);
    if (st) {
        free(cq->local);
        free(cq);
        return st;
    }
    fcntl(cq->fd, F_ADD_SEALS, F_SEAL_SEAL);
    cq->mode = page;
    *out = &cq->c;
    return DP_OK;
}

static void shm_cq_destroy(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    shm_unmap(cq->mode, SHM_PAGE);
    close(cq->fd);
    free(cq->qps);
    free(cq->local);
    free(cq);
}

/* One queue pair and no local completion: everything there is to poll shows in its next entry. */
static inline void show_next(shm_cq *cq) {
    if (cq->n_qps == 1 && cq->local_head == cq->local_tail) {
        const shm_qp *qp = cq->qps[0];
        cq->c.peek = &qp->segment->ring[qp->rpos & qp->mask].seq_imm;
        cq->c.peek_value = qp->rpos + 1;
    } else {
        cq->c.peek = NULL;
    }
}

static void local_push(shm_qp *qp, uint64_t wr_id, int status, dp_op op, uint32_t len) {
    shm_cq *cq = (shm_cq *)qp->q.cq;
    /* Never overruns: unpolled is bounded by max_send, and the queue has room for every queue pair's. */
    cq->local[cq->local_tail++ & cq->local_mask] =
        (dp_wc){.wr_id = wr_id, .qp = &qp->q, .status = status, .op = op, .byte_len = len};
    qp->unpolled++;
    cq->c.peek = NULL;
}

/* Ends the connection: the peer broke the provider's protocol. */
static __attribute__((noinline, cold)) int violation(shm_qp *qp, dp_wc *wc) {
    wc->status = DP_CONNECTION;
    qp->q.state = DP_QP_ERROR;
    dp_qp_break(&qp->q, DP_PROTOCOL);
    return 1;
}

/* Stores the data that rode in an entry at its target, whose coordinates are the peer's word and checked. */
static inline bool store_head(shm_qp *qp, const uint8_t *data, uint32_t head, uint32_t region, uint64_t offset) {
    if (region >= qp->n_expose || head > SHM_INLINE)
        return false;
    const dp_mem *m = &qp->expose[region]->m;
    if (!(m->access & DP_REMOTE_WRITE) || offset > m->size || head > m->size - offset)
        return false;
    dp_copy_small((uint8_t *)m->addr + offset, data, head);
    return true;
}

static __attribute__((noinline)) int take_send(shm_qp *qp, dp_wc *wc, const shm_entry *e, const shm_recv *r,
                                               uint32_t at) {
    wc->imm = 0;
    if (wc->byte_len > SHM_SEND_MAX)
        return violation(qp, wc);
    if (wc->byte_len > r->len) {
        wc->status = DP_INVALID;
        qp->q.state = DP_QP_ERROR;
    } else if (wc->byte_len) {
        memcpy(r->addr, wc->byte_len <= SHM_INLINE ? e->data : qp->bounce + (uint64_t)at * SHM_SEND_MAX, wc->byte_len);
    }
    return 1;
}

/* Takes the next message if there is one. 1 taken, 0 none. */
static inline int take_entry(shm_qp *qp, dp_wc *wc) {
    uint32_t pos = qp->rpos;
    const shm_entry *e = &qp->segment->ring[pos & qp->mask];
    /* Acquire pairs with the release in publish(): the entry and the data it announces are visible. */
    uint64_t v = __atomic_load_n(&e->seq_imm, __ATOMIC_ACQUIRE);
    if ((uint32_t)v != pos + 1)
        return 0;
    if (__builtin_expect(qp->q.state == DP_QP_ERROR, 0))
        return 0;
    const shm_recv *r = &qp->recvs[pos & qp->mask];
    wc->wr_id = r->wr_id;
    wc->qp = &qp->q;
    wc->status = DP_OK;
    wc->op = DP_OP_RECV_IMM;
    if (__builtin_expect(pos == qp->rposted, 0)) /* no receive posted: the peer overran its credit */
        return violation(qp, wc);
    qp->rpos = pos + 1;
    /* The entry is the peer's memory: each word is read once and checked before use. */
    uint64_t what = *(const volatile uint64_t *)&e->what;
    uint32_t head = what >> 40 & 0xff, op = what >> 48 & 0xff;
    wc->imm = (uint32_t)(v >> 32);
    wc->byte_len = (uint32_t)what;
    if (__builtin_expect(op != DP_OP_RECV_IMM, 0)) {
        wc->op = op;
        return op == DP_OP_RECV ? take_send(qp, wc, e, r, pos & qp->mask) : violation(qp, wc);
    }
    if (head && !store_head(qp, e->data, head, what >> 32 & 0xff, *(const volatile uint64_t *)&e->offset))
        return violation(qp, wc);
    return 1;
}

static int shm_cq_poll(dp_cq *c, dp_wc *wc, int n) {
    shm_cq *cq = (shm_cq *)c;
    int got = 0;
    while (cq->local_head != cq->local_tail && got < n) {
        wc[got] = cq->local[cq->local_head++ & cq->local_mask];
        ((shm_qp *)wc[got].qp)->unpolled--;
        got++;
    }
    uint32_t n_qps = cq->n_qps;
    if (n_qps == 1) {
        while (got < n && take_entry(cq->qps[0], &wc[got]))
            got++;
        show_next(cq);
        return got;
    }
    /* The first to be polled changes with each call that found its fill, so that none starves. */
    for (uint32_t k = 0; k < n_qps && got < n; k++) {
        uint32_t at = cq->turn + k;
        shm_qp *qp = cq->qps[at >= n_qps ? at - n_qps : at];
        while (got < n && take_entry(qp, &wc[got]))
            got++;
    }
    if (got == n && n_qps)
        cq->turn = (cq->turn + 1) % n_qps;
    return got;
}

static int shm_cq_arm(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    if (cq->hot) {
        cq->hot = false;
        __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_SEQ_CST);
        /* Peers that saw HOT left their barrier out: pass one on their CPUs. Partner of the early return in
         * notify(): afterwards either their entry is visible to our next poll or they see AWAKE. */
        syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
    }
    __atomic_store_n(cq->mode, SHM_SLEEPING, __ATOMIC_RELAXED);
    /* The caller's next poll must come after this. An exchange alone would not do: on aarch64 later loads may pass
     * its store. Partners: the fence in notify(), the one in shm_cq_wake. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return DP_OK;
}

static void shm_cq_disarm(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    if (!cq->hot)
        __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_RELEASE);
}

static void shm_cq_promise_hot(dp_cq *c, bool hot) {
    shm_cq *cq = (shm_cq *)c;
    if (cq->hot == hot)
        return;
    if (hot) {
        if (cq->n_cold || !((shm_dev *)cq->c.dev)->membarrier)
            return;
        cq->hot = true;
        __atomic_store_n(cq->mode, SHM_HOT, __ATOMIC_RELEASE);
    } else {
        shm_cq_arm(c);
        shm_cq_disarm(c);
    }
}

static int shm_cq_wait(dp_cq *c, int64_t timeout_ns) {
    shm_cq *cq = (shm_cq *)c;
    if (!__atomic_exchange_n(&cq->wake, 0, __ATOMIC_ACQ_REL)) {
        struct timespec ts, *t = NULL;
        if (timeout_ns >= 0) {
            ts = (struct timespec){timeout_ns / 1000000000, timeout_ns % 1000000000};
            t = &ts;
        }
        /* EAGAIN: somebody moved it to AWAKE already. EINTR, ETIMEDOUT: the caller looks again. */
        futex(cq->mode, FUTEX_WAIT, SHM_SLEEPING, t);
    }
    __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_RELEASE);
    return DP_OK;
}

static void shm_cq_wake(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    __atomic_store_n(&cq->wake, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* partner: the one in shm_cq_arm */
    uint32_t sleeping = SHM_SLEEPING;
    __atomic_compare_exchange_n(cq->mode, &sleeping, SHM_AWAKE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    /* Whatever the flag said: peers write it too, and one may have died after it took the flag from SLEEPING and before
     * it woke us. */
    futex(cq->mode, FUTEX_WAKE, 1, NULL);
}

/* ---- queue pairs ---- */

uint64_t shm_segment_size(uint32_t ring_size) {
    return sizeof(shm_segment) + (uint64_t)ring_size * (sizeof(shm_entry) + SHM_SEND_MAX);
}

static int segment_renew(shm_qp *qp, dp_error *err) {
    int fd;
    void *map;
    int st = shm_segment_create("a receive ring", shm_segment_size(qp->ring_size), false, &fd, &map, err);
    if (st)
        return st;
    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL);
    /* Prefault what is used on every message; bounce slots are touched by sends only. */
    madvise(map, page_up(sizeof(shm_segment) + (uint64_t)qp->ring_size * sizeof(shm_entry)), MADV_POPULATE_WRITE);
    if (qp->segment) {
        shm_unmap(qp->segment, shm_segment_size(qp->ring_size));
        close(qp->seg_fd);
    }
    qp->segment = map;
    qp->seg_fd = fd;
    qp->bounce = (uint8_t *)map + sizeof(shm_segment) + (uint64_t)qp->ring_size * sizeof(shm_entry);
    qp->rpos = qp->rposted = qp->spos = qp->credit = 0;
    show_next((shm_cq *)qp->q.cq);
    return DP_OK;
}

static void qp_free(shm_qp *qp) {
    if (qp->segment) {
        shm_unmap(qp->segment, shm_segment_size(qp->ring_size));
        close(qp->seg_fd);
    }
    free(qp->recvs);
    free(qp);
}

static int shm_qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    shm_dev *dev = (shm_dev *)d->dev;
    shm_cq *cq = (shm_cq *)c;
    if (cq->n_qps == cq->cap_qps) {
        uint32_t cap = cq->cap_qps ? 2 * cq->cap_qps : 4;
        shm_qp **more = realloc(cq->qps, cap * sizeof *more);
        if (!more)
            return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
        cq->qps = more;
        cq->cap_qps = cap;
    }
    shm_qp *qp = aligned_alloc(DP_CACHE_LINE, (sizeof *qp + DP_CACHE_LINE - 1) / DP_CACHE_LINE * DP_CACHE_LINE);
    if (!qp)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    memset(qp, 0, sizeof *qp);
    qp->q = (dp_qp){.ops = &shm_ops, .domain = d, .cq = c, .max_inline = UINT32_MAX, .max_send = attr->max_send,
                    .max_recv = attr->max_recv};
    qp->ring_size = 1;
    while (qp->ring_size < attr->max_recv)
        qp->ring_size <<= 1;
    qp->mask = qp->ring_size - 1;
    qp->seg_fd = -1;
    qp->recvs = calloc(qp->ring_size, sizeof *qp->recvs);
    for (int i = 0; i < 2 + DP_EXPOSE_MAX; i++)
        qp->peer.fds[i] = -1;
    for (uint32_t i = 0; i < attr->n_expose; i++) {
        qp->expose[i] = (shm_mem *)attr->expose[i];
        if (qp->expose[i]->fd < 0) {
            qp_free(qp);
            return dp_fail(err, DP_UNSUPPORTED, 0, "create queue pair: exposed region %u is not of dp_mem_alloc", i);
        }
    }
    int st = qp->recvs ? segment_renew(qp, err) : dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    if (st) {
        qp_free(qp);
        return st;
    }
    qp->n_expose = attr->n_expose;
    for (uint32_t i = 0; i < qp->n_expose; i++)
        qp->expose[i]->exposed++;
    dp_random(qp->token, sizeof qp->token);
    cq->qps[cq->n_qps++] = qp;
    show_next(cq);
    pthread_mutex_lock(&dev->lock);
    qp->next = dev->qps;
    dev->qps = qp;
    pthread_mutex_unlock(&dev->lock);
    *out = &qp->q;
    return DP_OK;
}

static int shm_qp_export(dp_qp *q, void *blob, uint32_t *len, dp_error *err) {
    return shm_link_export((shm_dev *)q->domain->dev, (shm_qp *)q, blob, len, err);
}

static int shm_qp_connect(dp_qp *q, const void *blob, uint32_t len, dp_error *err) {
    shm_qp *qp = (shm_qp *)q;
    int st = shm_link_connect((shm_dev *)q->domain->dev, qp, blob, len, err);
    if (st)
        return st;
    if (!qp->peer.reached) {
        ((shm_cq *)q->cq)->n_cold++;
        dp_cq_promise_hot(q->cq, false);
    }
    qp->connected = true;
    q->state = DP_QP_CONNECTED;
    return DP_OK;
}

/* Forgets the peer: links, mappings, completions not yet polled. */
static void qp_disconnect(shm_qp *qp) {
    shm_cq *cq = (shm_cq *)qp->q.cq;
    shm_link_forget((shm_dev *)qp->q.domain->dev, qp);
    if (qp->connected && !qp->peer.reached)
        cq->n_cold--;
    qp->connected = qp->owed = false;
    shm_peer_clear(&qp->peer);
    uint32_t keep = cq->local_head;
    for (uint32_t i = cq->local_head; i != cq->local_tail; i++)
        if (cq->local[i & cq->local_mask].qp != &qp->q)
            cq->local[keep++ & cq->local_mask] = cq->local[i & cq->local_mask];
    cq->local_tail = keep;
    qp->unpolled = 0;
    show_next(cq);
}

static int shm_qp_reset(dp_qp *q, dp_error *err) {
    shm_qp *qp = (shm_qp *)q;
    bool had_peer = qp->connected || qp->taken;
    qp_disconnect(qp);
    int st = segment_renew(qp, err);
    for (uint32_t i = 0; !st && had_peer && i < qp->n_expose; i++)
        if (qp->expose[i]->exposed == 1 && (qp->expose[i]->m.access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC)))
            st = mem_renew(qp->expose[i], err);
    if (st) {
        q->state = DP_QP_ERROR;
        return st;
    }
    pthread_mutex_lock(&((shm_dev *)q->domain->dev)->lock);
    dp_random(qp->token, sizeof qp->token);
    qp->taken = false;
    pthread_mutex_unlock(&((shm_dev *)q->domain->dev)->lock);
    __atomic_store_n(&q->broken, 0, __ATOMIC_RELEASE);
    q->state = DP_QP_INIT;
    return DP_OK;
}

static void shm_qp_destroy(dp_qp *q) {
    shm_qp *qp = (shm_qp *)q;
    shm_dev *dev = (shm_dev *)q->domain->dev;
    shm_cq *cq = (shm_cq *)q->cq;
    qp_disconnect(qp);
    pthread_mutex_lock(&dev->lock);
    for (shm_qp **p = &dev->qps; *p; p = &(*p)->next)
        if (*p == qp) {
            *p = qp->next;
            break;
        }
    pthread_mutex_unlock(&dev->lock);
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (cq->qps[i] == qp) {
            cq->qps[i] = cq->qps[--cq->n_qps];
            break;
        }
    cq->turn = 0;
    show_next(cq);
    for (uint32_t i = 0; i < qp->n_expose; i++)
        qp->expose[i]->exposed--;
    qp_free(qp);
}

static int shm_qp_probe(dp_qp *q) { return shm_link_probe((shm_dev *)q->domain->dev, (shm_qp *)q); }

/* ---- operations ---- */

/* Index of the peer's region that holds [raddr, raddr+len), with the right `need`; -1 none. */
static inline int find_region(const shm_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len, uint32_t need) {
    for (uint32_t i = 0; i < qp->peer.n_regions; i++) {
        const shm_region *r = &qp->peer.regions[i];
        if (r->rkey != rkey)
            continue;
        uint64_t offset = raddr - r->base; /* wraps to a huge value below base */
        return (r->access & need) && offset <= r->size && len <= r->size - offset ? (int)i : -1;
    }
    return -1;
}

/* Tells the peer that there is something, unless it promised to look by itself. */
static inline void notify(shm_qp *qp) {
    uint32_t *mode = qp->peer.mode;
    qp->owed = false;
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* the compiler keeps the order; the processor is membarrier's matter */
    if (__atomic_load_n(mode, __ATOMIC_RELAXED) == SHM_HOT)
        return; /* partner: the membarrier in shm_cq_arm */
    /* The entry must be visible before mode is read. Partner: the fence in shm_cq_arm. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint32_t sleeping = SHM_SLEEPING;
    if (__atomic_load_n(mode, __ATOMIC_RELAXED) == SHM_SLEEPING &&
        __atomic_compare_exchange_n(mode, &sleeping, SHM_AWAKE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        futex(mode, FUTEX_WAKE, 1, NULL);
}

/* A post that ends a DP_MORE batch without a message of its own gives the notification that the batch owes. */
static inline int settle(shm_qp *qp, int status, uint32_t flags) {
    if (__builtin_expect(qp->owed, 0) && (status != DP_OK || !(flags & DP_MORE)))
        notify(qp);
    return status;
}

static inline int may_post(shm_qp *qp) {
    if (qp->q.state != DP_QP_CONNECTED)
        return qp->q.state == DP_QP_ERROR ? DP_CONNECTION : DP_INVALID;
    if (__atomic_load_n(&qp->q.broken, __ATOMIC_RELAXED))
        return DP_CONNECTION;
    return qp->unpolled >= qp->q.max_send ? settle(qp, DP_BUSY, 0) : DP_OK;
}

/* Remote access refused: as a network adapter would, a completion and the error state. */
static int refuse(shm_qp *qp, uint64_t wr_id, dp_op op) {
    settle(qp, DP_OK, 0);
    qp->q.state = DP_QP_ERROR;
    local_push(qp, wr_id, DP_INVALID, op, 0);
    return DP_OK;
}

static inline uint64_t total_of(const dp_sge *sge, int n) {
    return n == 2 ? (uint64_t)sge[0].len + sge[1].len : n == 1 ? sge[0].len : 0;
}

static inline void put(uint8_t *dst, const void *src, uint64_t len) {
    /* A result that was produced in place (dp_rkey_ptr) is already there. */
    if (len && dst != src)
        memcpy(dst, src, len);
}

/* Room for one more message in the peer's ring? */
static inline bool has_credit(shm_qp *qp) {
    if (qp->spos != qp->credit)
        return true;
    /* Acquire pairs with the release in shm_post_recv: the peer has read the entry that we are about to reuse. */
    qp->credit = __atomic_load_n(&qp->peer.segment->posted, __ATOMIC_ACQUIRE);
    return qp->spos != qp->credit;
}

static inline void publish(shm_qp *qp, shm_entry *e, uint64_t what, uint32_t imm, uint32_t flags) {
    e->what = what;
    /* Release pairs with the acquire in take_entry(). */
    __atomic_store_n(&e->seq_imm, (uint64_t)imm << 32 | (uint32_t)(qp->spos + 1), __ATOMIC_RELEASE);
    qp->spos++;
    if (flags & DP_MORE)
        qp->owed = true;
    else
        notify(qp);
}

static int shm_post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                          uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    if (n < 0 || n > 2)
        return settle(qp, DP_INVALID, flags);
    uint64_t total = total_of(sge, n);
    /* Nothing to write needs no key, as on a network adapter. */
    int i = total ? find_region(qp, raddr, rkey, total, DP_REMOTE_WRITE) : 0;
    if (i < 0)
        return refuse(qp, wr_id, DP_OP_WRITE);
    uint8_t *dst = total ? qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base) : NULL;
    for (int k = 0; total && k < n; k++) {
        put(dst, sge[k].addr, sge[k].len);
        dst += sge[k].len;
    }
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_WRITE, (uint32_t)total);
    return settle(qp, DP_OK, flags);
}

static inline void put_small(uint8_t *dst, const dp_sge *sge, int n) {
    if (n > 0) {
        dp_copy_small(dst, sge[0].addr, sge[0].len);
        if (n > 1)
            dp_copy_small(dst + sge[0].len, sge[1].addr, sge[1].len);
    }
}

/* Data that exceeds an entry: what lies before the target's next line into `head`, the rest to its target. */
static uint32_t put_split(uint8_t *head, uint8_t *dst, const dp_sge *sge, int n) {
    uint32_t want = (uint32_t)-(uintptr_t)dst & (DP_CACHE_LINE - 1);
    if (want > SHM_INLINE)
        want = 0;
    dst += want;
    uint32_t filled = 0;
    for (int k = 0; k < n; k++) {
        const uint8_t *src = sge[k].addr;
        uint32_t len = sge[k].len;
        if (filled < want) {
            uint32_t part = len < want - filled ? len : want - filled;
            dp_copy_small(head + filled, src, part);
            filled += part;
            src += part;
            len -= part;
        }
        put(dst, src, len);
        dst += len;
    }
    return want;
}

static int shm_post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                              uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    if (n < 0 || n > 2)
        return settle(qp, DP_INVALID, flags);
    uint64_t total = total_of(sge, n);
    int i = total ? find_region(qp, raddr, rkey, total, DP_REMOTE_WRITE) : 0;
    if (i < 0 || total > UINT32_MAX)
        return refuse(qp, wr_id, DP_OP_WRITE);
    if (!has_credit(qp))
        return settle(qp, DP_BUSY, flags);
    uint64_t offset = total ? raddr - qp->peer.regions[i].base : 0;
    shm_entry *e = &qp->peer.segment->ring[qp->spos & (qp->peer.ring_size - 1)];
    uint32_t head = (uint32_t)total;
    if (total <= SHM_INLINE) {
        put_small(e->data, sge, n);
    } else {
        head = put_split(e->data, qp->peer.regions[i].map + offset, sge, n);
    }
    e->offset = offset;
    publish(qp, e, shm_what((uint32_t)total, (uint32_t)i, head, DP_OP_RECV_IMM), imm, flags);
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_WRITE, (uint32_t)total);
    return DP_OK;
}

static int shm_post_send(dp_qp *q, const dp_sge *sge, uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    if (sge->len > SHM_SEND_MAX)
        return settle(qp, DP_INVALID, flags);
    if (!has_credit(qp))
        return settle(qp, DP_BUSY, flags);
    uint32_t at = qp->spos & (qp->peer.ring_size - 1);
    shm_entry *e = &qp->peer.segment->ring[at];
    put(sge->len <= SHM_INLINE ? e->data : qp->peer.bounce + (uint64_t)at * SHM_SEND_MAX, sge->addr, sge->len);
    e->offset = 0;
    publish(qp, e, shm_what(sge->len, 0, 0, DP_OP_RECV), 0, flags);
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_SEND, sge->len);
    return DP_OK;
}

static int shm_post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    int i = find_region(qp, raddr, rkey, sge->len, DP_REMOTE_READ);
    if (i < 0)
        return refuse(qp, wr_id, DP_OP_READ);
    put((uint8_t *)sge->addr, qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base), sge->len);
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_READ, sge->len);
    return settle(qp, DP_OK, flags);
}

/* The word that an atomic works on, or NULL. */
static uint64_t *atomic_word(shm_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey) {
    int i = find_region(qp, raddr, rkey, 8, DP_REMOTE_ATOMIC);
    if (i < 0 || (raddr & 7) || sge->len < 8)
        return NULL;
    return (uint64_t *)(void *)(qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base));
}

static int shm_post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                              uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    uint64_t *word = atomic_word(qp, sge, raddr, rkey);
    if (!word)
        return refuse(qp, wr_id, DP_OP_FETCH_ADD);
    uint64_t old = __atomic_fetch_add(word, add, __ATOMIC_SEQ_CST);
    memcpy((void *)sge->addr, &old, 8);
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_FETCH_ADD, 8);
    return settle(qp, DP_OK, flags);
}

static int shm_post_cmp_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expect,
                             uint64_t desired, uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    uint64_t *word = atomic_word(qp, sge, raddr, rkey);
    if (!word)
        return refuse(qp, wr_id, DP_OP_CMP_SWAP);
    uint64_t old = expect;
    __atomic_compare_exchange_n(word, &old, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    memcpy((void *)sge->addr, &old, 8);
    if (flags & DP_SIGNALED)
        local_push(qp, wr_id, DP_OK, DP_OP_CMP_SWAP, 8);
    return settle(qp, DP_OK, flags);
}

static int shm_post_recv(dp_qp *q, const dp_sge *sge, uint64_t wr_id) {
    shm_qp *qp = (shm_qp *)q;
    if (q->state == DP_QP_ERROR)
        return DP_CONNECTION;
    if (qp->rposted - qp->rpos >= q->max_recv)
        return DP_BUSY;
    qp->recvs[qp->rposted & qp->mask] =
        (shm_recv){wr_id, sge ? (void *)sge->addr : NULL, sge ? sge->len : 0};
    qp->rposted++;
    /* Release pairs with the acquire in has_credit(): our reads of the entry that this frees are done. */
    __atomic_store_n(&qp->segment->posted, qp->rposted, __ATOMIC_RELEASE);
    return DP_OK;
}

static void shm_qp_notify(dp_qp *q) { notify((shm_qp *)q); }

static void *shm_rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    shm_qp *qp = (shm_qp *)q;
    if (q->state != DP_QP_CONNECTED)
        return NULL;
    int i = find_region(qp, raddr, rkey, len, DP_REMOTE_WRITE);
    return i < 0 ? NULL : qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base);
}

static const dp_ops shm_ops = {
    .dev_close = shm_dev_close,
    .domain_create = shm_domain_create,
    .domain_destroy = shm_domain_destroy,
    .mem_alloc = shm_mem_alloc,
    .mem_register = shm_mem_register,
    .mem_free = shm_mem_free,
    .cq_create = shm_cq_create,
    .cq_destroy = shm_cq_destroy,
    .cq_poll = shm_cq_poll,
    .cq_arm = shm_cq_arm,
    .cq_disarm = shm_cq_disarm,
    .cq_wait = shm_cq_wait,
    .cq_wake = shm_cq_wake,
    .cq_promise_hot = shm_cq_promise_hot,
    .qp_create = shm_qp_create,
    .qp_export = shm_qp_export,
    .qp_connect = shm_qp_connect,
    .qp_reset = shm_qp_reset,
    .qp_destroy = shm_qp_destroy,
    .post_write = shm_post_write,
    .post_write_imm = shm_post_write_imm,
    .post_read = shm_post_read,
    .post_fetch_add = shm_post_fetch_add,
    .post_cmp_swap = shm_post_cmp_swap,
    .post_send = shm_post_send,
    .post_recv = shm_post_recv,
    .rkey_ptr = shm_rkey_ptr,
    .qp_probe = shm_qp_probe,
    .qp_notify = shm_qp_notify,
};

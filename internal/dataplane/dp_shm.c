#include "dp_shm.h"
#include "dp_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/membarrier.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int shm_qp_peer_fd(dp_qp *q) { return shm_link_peer_fd((shm_dev *)q->domain->dev, (shm_qp *)q); }

static const dp_ops shm_ops;

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
    uintptr_t skew = (uintptr_t)map & (SHM_PAGE - 1);
    if (map)
        munmap((char *)map - skew, page_up(skew + size) + SHM_PAGE);
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

bool shm_next_data(int fd, uint64_t offset, uint64_t len, uint64_t *from, uint64_t *to) {
    if (*from >= len)
        return false;
    off_t data = lseek(fd, (off_t)(offset + *from), SEEK_DATA);
    if (data < 0 && errno == ENXIO)
        return false;
    if (data >= 0) {
        if ((uint64_t)data - offset >= len)
            return false;
        *from = (uint64_t)data - offset;
    }
    off_t hole = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
    *to = hole < 0 || (uint64_t)hole - offset > len ? len : (uint64_t)hole - offset;
    return true;
}

static void new_rkey(shm_mem *m) {
    do
        dp_random(&m->m.rkey, sizeof m->m.rkey);
    while (!m->m.rkey);
}

static int shm_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "allocate region");
    bool lazy = access & DP_MEM_LAZY;
    access &= ~DP_MEM_LAZY;
    int st = shm_segment_create("a region", size, !lazy, &m->fd, &m->m.addr, err);
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
    new_rkey(m);
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

static int shm_mem_window(dp_domain *d, dp_mem *whole, uint64_t offset, uint64_t size, uint32_t access, dp_mem **out,
                          dp_error *err) {
    const shm_mem *w = (const shm_mem *)whole;
    if (whole->domain->dev->provider != DP_PROVIDER_SHM || w->fd < 0)
        return dp_fail(err, DP_UNSUPPORTED, 0, "window: shm has windows of regions of dp_mem_alloc only");
    bool writable = access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC);
    if (writable && !(w->m.access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC)))
        return dp_fail(err, DP_INVALID, 0, "window: access bits %#x of a region with %#x", access, w->m.access);
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "window");
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", w->fd);
    /* A descriptor opened for reading gives no writable mapping, and with this mode another user cannot open a better
     * one by way of it. */
    m->fd = fchmod(w->fd, 0600) ? -1 : writable ? fcntl(w->fd, F_DUPFD_CLOEXEC, 0) : open(path, O_RDONLY | O_CLOEXEC);
    if (m->fd < 0) {
        int e = errno;
        free(m);
        return dp_fail(err, DP_FATAL, e, "window: descriptor");
    }
    m->window = true;
    m->offset = w->offset + offset;
    m->m = (dp_mem){.domain = d, .addr = (char *)whole->addr + offset, .size = size, .access = access};
    new_rkey(m);
    *out = &m->m;
    return DP_OK;
}

static int shm_mem_file(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err) {
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "register file");
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    m->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (m->fd < 0) {
        int e = errno;
        free(m);
        return dp_fail(err, DP_FATAL, e, "register file: descriptor");
    }
    m->window = true;
    m->m = (dp_mem){.domain = d, .addr = map, .size = size, .access = DP_REMOTE_READ};
    new_rkey(m);
    *out = &m->m;
    return DP_OK;
}

static int shm_mem_lend(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err) {
    shm_mem *m = calloc(1, sizeof *m);
    if (!m)
        return dp_fail(err, DP_FATAL, ENOMEM, "lend memory");
    m->fd = fd;
    m->lent = true;
    m->m = (dp_mem){.domain = d, .addr = map, .size = size};
    new_rkey(m);
    *out = &m->m;
    return DP_OK;
}

static void shm_mem_free(dp_mem *mem) {
    shm_mem *m = (shm_mem *)mem;
    if (m->fd >= 0 && !m->lent) {
        if (m->window)
            ; /* the mapping is of the whole */
        else if (m->lost)
            munmap((uint8_t *)m->m.addr + page_up(m->m.size), SHM_PAGE);
        else
            shm_unmap(m->m.addr, m->m.size);
        close(m->fd);
    }
    free(m);
}

/* Called after a mapping over the region's own has failed. Before Linux 6.12 the old mapping may be gone. This keeps its addresses
 * reserved, because shm_mem_free would unmap any other mapping there. */
static void mem_keep_place(shm_mem *m) {
    uint64_t len = page_up(m->m.size);
    if (mmap(m->m.addr, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, m->fd, 0) == MAP_FAILED &&
        errno != EEXIST &&
        mmap(m->m.addr, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) ==
            MAP_FAILED)
        m->lost = true;
}

/* Replaces the region's pages by new ones with the same contents. A process that still maps the old pages no longer reaches the region. */
static int mem_renew(shm_mem *m, dp_error *err) {
    int fd;
    void *fresh;
    int st = shm_segment_create("a renewed region", m->m.size, false, &fd, &fresh, err);
    if (st)
        return st;
    uint64_t len = page_up(m->m.size);
    for (uint64_t from = 0, to; shm_next_data(m->fd, 0, len, &from, &to); from = to)
        memcpy((uint8_t *)fresh + from, (uint8_t *)m->m.addr + from, to - from);
    shm_unmap(fresh, m->m.size);
    if (mmap(m->m.addr, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int e = errno;
        close(fd);
        mem_keep_place(m);
        return dp_fail(err, DP_FATAL, e, "map a renewed region of %llu bytes", (unsigned long long)m->m.size);
    }
    for (uint64_t from = 0, to; shm_next_data(fd, 0, len, &from, &to); from = to)
        madvise((uint8_t *)m->m.addr + from, to - from, MADV_POPULATE_WRITE);
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
    if (dev->spare >= 0)
        close(dev->spare);
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
    dev->d.max_msg = UINT32_MAX;
    strcpy(dev->d.name, "shm");
    dev->active_only = opts->active_side_only;
    dev->attended = opts->attended;
    dev->listen_fd = dev->epoll_fd = dev->stop_fd = -1;
    struct rlimit files;
    if (opts->packable && !getrlimit(RLIMIT_NOFILE, &files)) /* the program needs the other descriptors */
        dev->keep_below = files.rlim_cur / 4 < INT_MAX ? (int)(files.rlim_cur / 4) : INT_MAX;
    dev->spare = dev->active_only ? socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) : -1;
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

static int make_mode_page(shm_mode_page **out, dp_error *err) {
    shm_mode_page *p = calloc(1, sizeof *p);
    if (!p)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue");
    void *map = NULL;
    int st = shm_segment_create("a completion queue", SHM_PAGE, true, &p->fd, &map, err);
    if (st) {
        free(p);
        return st;
    }
    fcntl(p->fd, F_ADD_SEALS, F_SEAL_SEAL);
    p->map = map;
    *out = p;
    return DP_OK;
}

static void leave_mode_page(shm_mode_page *p) {
    if (--p->users)
        return;
    shm_unmap(p->map, SHM_PAGE);
    close(p->fd);
    free(p);
}

int shm_cq_new(dp_dev *dev, shm_mode_page *page, uint32_t capacity, dp_cq **out, dp_error *err) {
    shm_cq *cq = calloc(1, sizeof *cq);
    if (!cq)
        return dp_fail(err, DP_FATAL, ENOMEM, "create completion queue");
    uint32_t room = 1;
    while (room < capacity)
        room <<= 1;
    cq->c = (dp_cq){.ops = &shm_ops, .dev = dev, .capacity = capacity};
    cq->local_mask = room - 1;
    cq->local = calloc(room, sizeof *cq->local);
    int st = !cq->local ? dp_fail(err, DP_FATAL, ENOMEM, "create completion queue of %u", capacity)
             : page     ? DP_OK
                        : make_mode_page(&page, err);
    if (st) {
        free(cq->local);
        free(cq);
        return st;
    }
    page->users++;
    cq->page = page;
    cq->mode = (uint32_t *)(void *)(page->map + DP_CACHE_LINE * page->made++);
    __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_RELAXED); /* an unpacked page has the mode that its last owner set */
    *out = &cq->c;
    return DP_OK;
}

static int shm_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    return shm_cq_new(dev, NULL, capacity, out, err);
}

static int shm_cq_create_beside(dp_cq *other, uint32_t capacity, dp_cq **out, dp_error *err) {
    shm_mode_page *page = ((shm_cq *)other)->page;
    return shm_cq_new(other->dev, page->made < SHM_MODES ? page : NULL, capacity, out, err);
}

static void shm_cq_destroy(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    leave_mode_page(cq->page);
    free(cq->qps);
    free(cq->local);
    free(cq);
}

/* ---- queue pairs ---- */

uint64_t shm_segment_size(uint32_t ring_size) {
    return sizeof(shm_segment) + (uint64_t)ring_size * sizeof(shm_entry);
}

static int segment_renew(shm_qp *qp, dp_error *err) {
    int fd;
    void *map;
    int st = shm_segment_create("a receive ring", shm_segment_size(qp->ring_size), false, &fd, &map, err);
    if (st)
        return st;
    fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL);
    /* Prefault what is used on every message. */
    madvise(map, page_up(sizeof(shm_segment) + (uint64_t)qp->ring_size * sizeof(shm_entry)), MADV_POPULATE_WRITE);
    if (qp->segment) {
        shm_unmap(qp->segment, shm_segment_size(qp->ring_size));
        close(qp->seg_fd);
    }
    qp->segment = map;
    qp->seg_fd = fd;
    qp->rpos = qp->rposted = qp->spos = qp->credit = 0;
    shm_show_next((shm_cq *)qp->q.cq);
    return DP_OK;
}

void shm_qp_free(shm_qp *qp) {
    if (qp->segment) {
        shm_unmap(qp->segment, shm_segment_size(qp->ring_size));
        close(qp->seg_fd);
    }
    free(qp->recvs);
    free(qp);
}

/* Makes room for one more queue pair on the queue. */
static bool reserve_qp(shm_cq *cq) {
    if (cq->n_qps < cq->cap_qps)
        return true;
    uint32_t cap = cq->cap_qps ? 2 * cq->cap_qps : 4;
    shm_qp **more = realloc(cq->qps, cap * sizeof *more);
    if (!more)
        return false;
    cq->qps = more;
    cq->cap_qps = cap;
    return true;
}

int shm_qp_new(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, shm_qp **out, dp_error *err) {
    shm_qp *qp = !reserve_qp((shm_cq *)c) ? NULL
                                          : aligned_alloc(DP_CACHE_LINE, (sizeof *qp + DP_CACHE_LINE - 1) / DP_CACHE_LINE * DP_CACHE_LINE);
    if (!qp)
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    memset(qp, 0, sizeof *qp);
    qp->q = (dp_qp){.ops = &shm_ops, .domain = d, .cq = c, .max_inline = UINT32_MAX, .max_send = attr->max_send,
                    .max_recv = attr->max_recv};
    qp->ring_size = 1;
    while (qp->ring_size < attr->max_recv)
        qp->ring_size <<= 1;
    qp->mask = qp->ring_size - 1;
    qp->seg_fd = qp->meeting = -1;
    qp->recvs = calloc(qp->ring_size, sizeof *qp->recvs);
    for (int i = 0; i < 2 + DP_EXPOSE_MAX; i++)
        qp->peer.fds[i] = -1;
    for (uint32_t i = 0; i < attr->n_expose; i++) {
        qp->expose[i] = (shm_mem *)attr->expose[i];
        if (qp->expose[i]->fd < 0) {
            shm_qp_free(qp);
            return dp_fail(err, DP_UNSUPPORTED, 0, "create queue pair: exposed region %u is not of dp_mem_alloc", i);
        }
    }
    qp->n_expose = attr->n_expose;
    qp->takes_shared = attr->takes_shared;
    if (!qp->recvs) {
        shm_qp_free(qp);
        return dp_fail(err, DP_FATAL, ENOMEM, "create queue pair");
    }
    *out = qp;
    return DP_OK;
}

void shm_qp_add(shm_qp *qp) {
    shm_dev *dev = (shm_dev *)qp->q.domain->dev;
    shm_cq *cq = (shm_cq *)qp->q.cq;
    for (uint32_t i = 0; i < qp->n_expose; i++)
        qp->expose[i]->exposed++;
    cq->qps[cq->n_qps++] = qp;
    shm_show_next(cq);
    pthread_mutex_lock(&dev->lock);
    qp->next = dev->qps;
    dev->qps = qp;
    pthread_mutex_unlock(&dev->lock);
}

static int shm_qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    shm_qp *qp;
    int st = shm_qp_new(d, c, attr, &qp, err);
    if (st)
        return st;
    if ((st = segment_renew(qp, err))) {
        shm_qp_free(qp);
        return st;
    }
    dp_random(qp->token, sizeof qp->token);
    shm_qp_add(qp);
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
    /* The present count. A smaller count later is garbage. */
    qp->credit = __atomic_load_n(&qp->peer.segment->posted, __ATOMIC_ACQUIRE);
    qp->connected = true;
    q->state = DP_QP_CONNECTED;
    return DP_OK;
}

/* Forgets the peer: links, mappings, completions not yet polled. True when there was one. */
static bool qp_disconnect(shm_qp *qp) {
    shm_cq *cq = (shm_cq *)qp->q.cq;
    bool had_peer = shm_link_forget((shm_dev *)qp->q.domain->dev, qp) || qp->connected;
    if (qp->connected && !qp->peer.reached)
        cq->n_cold--;
    qp->connected = false;
    shm_peer_clear(&qp->peer);
    shm_shares_free(qp);
    uint32_t keep = cq->local_head;
    for (uint32_t i = cq->local_head; i != cq->local_tail; i++)
        if (cq->local[i & cq->local_mask].qp != &qp->q)
            cq->local[keep++ & cq->local_mask] = cq->local[i & cq->local_mask];
    cq->local_tail = keep;
    qp->unpolled = 0;
    shm_show_next(cq);
    return had_peer;
}

static int shm_qp_reset(dp_qp *q, dp_error *err) {
    shm_qp *qp = (shm_qp *)q;
    bool had_peer = qp_disconnect(qp);
    int st = segment_renew(qp, err);
    for (uint32_t i = 0; !st && had_peer && i < qp->n_expose; i++)
        if (qp->expose[i]->exposed == 1 && !qp->expose[i]->window &&
            (qp->expose[i]->m.access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC)))
            st = mem_renew(qp->expose[i], err);
    if (st) {
        q->state = DP_QP_ERROR;
        return st;
    }
    pthread_mutex_lock(&((shm_dev *)q->domain->dev)->lock);
    dp_random(qp->token, sizeof qp->token);
    qp->home.set = qp->taken = qp->given = false;
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
    shm_show_next(cq);
    for (uint32_t i = 0; i < qp->n_expose; i++)
        qp->expose[i]->exposed--;
    shm_qp_free(qp);
}

static void shm_qp_cancel(dp_qp *q) { shm_link_cancel((shm_dev *)q->domain->dev, (shm_qp *)q); }
static int shm_qp_probe(dp_qp *q) { return shm_link_probe((shm_dev *)q->domain->dev, (shm_qp *)q); }

static const dp_ops shm_ops = {
    .dev_close = shm_dev_close,
    .dev_event_fd = shm_event_fd,
    .dev_attend = shm_attend,
    .dev_starved = shm_starved,
    .domain_create = shm_domain_create,
    .domain_destroy = shm_domain_destroy,
    .mem_alloc = shm_mem_alloc,
    .mem_register = shm_mem_register,
    .mem_window = shm_mem_window,
    .mem_file = shm_mem_file,
    .mem_lend = shm_mem_lend,
    .mem_free = shm_mem_free,
    .cq_create = shm_cq_create,
    .cq_create_beside = shm_cq_create_beside,
    .cq_pack = shm_cq_pack,
    .cq_unpack = shm_cq_unpack,
    .qp_pack = shm_qp_pack,
    .qp_unpack = shm_qp_unpack,
    .cq_destroy = shm_cq_destroy,
    .cq_poll = shm_cq_poll,
    .cq_arm = shm_cq_arm,
    .cq_disarm = shm_cq_disarm,
    .cq_wait = shm_cq_wait,
    .cq_arm_many = shm_cq_arm_many,
    .cq_wait_many = shm_cq_wait_many,
    .cq_disarm_many = shm_cq_disarm_many,
    .cq_wake = shm_cq_wake,
    .cq_promise_hot = shm_cq_promise_hot,
    .qp_create = shm_qp_create,
    .qp_export = shm_qp_export,
    .qp_connect = shm_qp_connect,
    .qp_cancel = shm_qp_cancel,
    .qp_reset = shm_qp_reset,
    .qp_destroy = shm_qp_destroy,
    .post_write = shm_post_write,
    .post_write_imm = shm_post_write_imm,
    .post_read = shm_post_read,
    .post_fetch_add = shm_post_fetch_add,
    .post_compare_swap = shm_post_compare_swap,
    .reposts = true,
    .post_recv = shm_post_recv,
    .rkey_ptr = shm_rkey_ptr,
    .qp_probe = shm_qp_probe,
    .qp_peer_fd = shm_qp_peer_fd,
    .qp_notify = shm_qp_notify,
    .qp_share = shm_qp_share,
    .qp_unshare = shm_qp_unshare,
    .qp_unshare_all = shm_qp_unshare_all,
    .qp_shared_ptr = shm_qp_shared_ptr,
    .qp_forget_shared = shm_qp_forget_shared,
};

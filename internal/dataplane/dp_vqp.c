/* Virtual queue pairs in the client's process: a device of the fabric whose queue pairs post to a broker. See dp_vqp.h. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "dp_vqp.h"

#define SILENT_NS 2000000000   /* after this time without a beat of the broker, it counts as stopped */
#define LISTENED_MAX_NS 500000000 /* at most this much of the time between two looks counts, because this process may have been stopped itself */

/* The mapping of a memory file. The queue pair and both regions use it. */
typedef struct vqp_map {
    uint8_t *at;
    uint64_t size;
    uint32_t users; /* atomic */
} vqp_map;

typedef struct vqp_mem {
    dp_mem m;
    vqp_map *map;
} vqp_mem;

typedef struct vqp_qp {
    dp_qp q;
    vqp_map *map;
    dp_vqp_page *page;
    dp_vqp_request *requests;
    dp_vqp_completion *completions;
    dp_vqp_layout l;
    dp_vqp_packed packed;
    int memory, sock;
    uint32_t posted, receives, taken; /* as in the page, which may be damaged */
    uint32_t beat;                    /* the latest one */
    int64_t looked_at, silent_ns;     /* when this side last looked for a beat, and how long there has been no new one */
    bool closed, given_up;
    uint32_t claimed; /* by the broker, when this side closed the queue pair */
} vqp_qp;

typedef struct vqp_cq {
    dp_cq c;
    int wake_fd;
    uint32_t n_qps, cap_qps;
    vqp_qp **qps;
    struct pollfd *fds; /* cap_qps + 1 */
} vqp_cq;

static vqp_qp *qp_of(dp_qp *q) { return (vqp_qp *)q; }
static vqp_cq *cq_of(dp_cq *c) { return (vqp_cq *)c; }

const char *dp_vqp_reason_text(uint32_t reason) {
    static const char *const texts[] = {"well formed", "unknown operation", "unknown flags", "wrong pieces", "too long", "beyond the client's memory",
                                        "beyond the worker's memory", "wrong key", "more requests than the ring holds"};
    return reason < sizeof texts / sizeof *texts ? texts[reason] : "unknown reason";
}

/* ---- devices, domains, memory ---- */

/* A device has no state. It is never freed, because regions of a channel that has moved may outlive its session. */
static void dev_close(dp_dev *d) { (void)d; }

static int domain_create(dp_dev *d, dp_domain **out, dp_error *err) {
    dp_domain *dom = calloc(1, sizeof *dom);
    if (!dom)
        return dp_fail(err, DP_FATAL, ENOMEM, "create domain");
    dom->dev = d;
    *out = dom;
    return DP_OK;
}

static void domain_destroy(dp_domain *d) { free(d); }

static int no_memory(const char *what, dp_error *err) {
    return dp_fail(err, DP_UNSUPPORTED, 0, "%s: the agent's queue pair reaches only the memory that the agent has made", what);
}

static int mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    (void)d, (void)size, (void)access, (void)out;
    return no_memory("allocate region", err);
}

static int mem_register(dp_domain *d, void *at, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    (void)d, (void)at, (void)size, (void)access, (void)out;
    return no_memory("register region", err);
}

static int mem_window(dp_domain *d, dp_mem *whole, uint64_t offset, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    (void)d, (void)whole, (void)offset, (void)size, (void)access, (void)out;
    return no_memory("register window", err);
}

static void unmap(vqp_map *m) {
    if (__atomic_sub_fetch(&m->users, 1, __ATOMIC_ACQ_REL))
        return;
    munmap(m->at, m->size);
    free(m);
}

static void mem_free(dp_mem *m) {
    unmap(((vqp_mem *)m)->map);
    free(m);
}

static dp_mem *new_region(dp_domain *d, vqp_map *map, uint64_t at, uint64_t size, uint32_t access, uint64_t base, uint32_t rkey) {
    vqp_mem *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->m = (dp_mem){.domain = d, .addr = map->at + at, .size = size, .base = base, .rkey = rkey, .access = access};
    m->map = map;
    __atomic_add_fetch(&map->users, 1, __ATOMIC_RELAXED);
    return &m->m;
}

/* ---- completion queues ---- */

static int cq_create(dp_dev *d, uint32_t capacity, dp_cq **out, dp_error *err) {
    vqp_cq *cq = calloc(1, sizeof *cq);
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), why = errno;
    if (!cq || fd < 0) {
        if (fd >= 0)
            close(fd);
        free(cq);
        return dp_fail(err, DP_FATAL, fd < 0 ? why : ENOMEM, "create completion queue");
    }
    cq->c = (dp_cq){.ops = d->ops, .dev = d, .capacity = capacity};
    cq->wake_fd = fd;
    *out = &cq->c;
    return DP_OK;
}

static void cq_destroy(dp_cq *c) {
    vqp_cq *cq = cq_of(c);
    close(cq->wake_fd);
    free(cq->qps);
    free(cq->fds);
    free(cq);
}

static int cq_pack(const dp_cq *c) { return ((const vqp_cq *)c)->wake_fd; }

/* The process makes a new queue. The descriptor only shows that the channel can be taken over, so it is closed. */
static int cq_unpack(dp_dev *d, uint32_t capacity, int *fd, dp_cq **out, dp_error *err) {
    int st = cq_create(d, capacity, out, err);
    if (st)
        return st;
    close(*fd);
    *fd = -1;
    return DP_OK;
}

static void note_broken(vqp_qp *q) {
    int32_t broken = __atomic_load_n(&q->page->broken, __ATOMIC_ACQUIRE);
    if (broken && q->q.state == DP_QP_CONNECTED)
        dp_qp_break(&q->q, broken < 0 ? broken : DP_PROTOCOL);
}

/* Wakes the broker if it sleeps. Partner: the fence in sleep_until_event(). Returns false if it has ended. */
static bool ring(const vqp_qp *q) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&q->page->broker_sleeps, __ATOMIC_RELAXED))
        return true;
    ssize_t n = send(q->sock, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    return n > 0 || errno == EAGAIN || errno == EINTR; /* EAGAIN: many bytes wait there already */
}

/* From now on the broker claims no more requests. */
static void close_gate(vqp_qp *q) {
    if (q->closed)
        return;
    q->closed = true;
    q->claimed = (uint32_t)__atomic_fetch_or(&q->page->gate, DP_VQP_CLOSED, __ATOMIC_SEQ_CST);
    send(q->sock, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Fails the queue pair because the broker is stopped. */
static void give_up(vqp_qp *q) {
    close_gate(q);
    q->given_up = true;
    dp_qp_break(&q->q, DP_PEER_GONE);
}

/* Takes the next completion. */
static bool take(vqp_qp *q, dp_vqp_completion *c) {
    if (__atomic_load_n(&q->page->done, __ATOMIC_ACQUIRE) == q->taken)
        return false;
    bool full = __atomic_load_n(&q->page->done, __ATOMIC_RELAXED) - q->taken >= q->l.n_completions;
    *c = *(volatile dp_vqp_completion *)&q->completions[q->taken & (q->l.n_completions - 1)];
    __atomic_store_n(&q->page->taken, ++q->taken, __ATOMIC_RELEASE);
    if (full) /* the broker may have more, for which there was no room */
        ring(q);
    return true;
}

static int cq_poll(dp_cq *c, dp_wc *wc, int n) {
    vqp_cq *cq = cq_of(c);
    int got = 0;
    for (uint32_t i = 0; i < cq->n_qps; i++) {
        vqp_qp *q = cq->qps[i];
        dp_vqp_completion e;
        while (got < n && take(q, &e)) {
            if (q->q.state != DP_QP_CONNECTED)
                continue;
            if (e.status)
                q->q.state = DP_QP_ERROR;
            wc[got++] = (dp_wc){.wr_id = e.wr_id, .qp = &q->q, .status = e.status, .imm = e.imm, .byte_len = e.byte_len, .op = e.op};
        }
        if (got < n)
            note_broken(q); /* after the completions that came before */
    }
    return got;
}

static int cq_arm(dp_cq *c) {
    vqp_cq *cq = cq_of(c);
    for (uint32_t i = 0; i < cq->n_qps; i++)
        __atomic_store_n(&cq->qps[i]->page->client_sleeps, 1, __ATOMIC_SEQ_CST); /* before the caller polls once more. Partner: tell() */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return DP_OK;
}

static void cq_disarm(dp_cq *c) {
    vqp_cq *cq = cq_of(c);
    for (uint32_t i = 0; i < cq->n_qps; i++)
        __atomic_store_n(&cq->qps[i]->page->client_sleeps, 0, __ATOMIC_RELAXED);
}

/* Reads the bytes that have woken this side. Returns false if the broker has ended. */
static bool drain(vqp_qp *q) {
    char bytes[64];
    ssize_t n = recv(q->sock, bytes, sizeof bytes, MSG_DONTWAIT);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

static void look(vqp_qp *q) {
    if (!drain(q))
        dp_qp_break(&q->q, DP_PEER_GONE);
    note_broken(q);
}

/* Gives up if the broker has counted no beat for SILENT_NS. */
static void listen_to_broker(vqp_qp *q) {
    uint32_t beat = __atomic_load_n(&q->page->beat, __ATOMIC_RELAXED);
    int64_t now = dp_now_ns(), passed = now - q->looked_at;
    q->looked_at = now;
    q->silent_ns = beat != q->beat ? 0 : q->silent_ns + (passed < LISTENED_MAX_NS ? passed : LISTENED_MAX_NS);
    q->beat = beat;
    if (q->silent_ns >= SILENT_NS)
        give_up(q);
}

static int cq_wait(dp_cq *c, int64_t timeout_ns) {
    vqp_cq *cq = cq_of(c);
    struct timespec ts = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct pollfd one, *fds = cq->fds ? cq->fds : &one;
    uint32_t n = 0;
    for (; n < cq->n_qps; n++)
        fds[n] = (struct pollfd){.fd = dp_qp_broken(&cq->qps[n]->q) ? -1 : cq->qps[n]->sock, .events = POLLIN};
    fds[n] = (struct pollfd){.fd = cq->wake_fd, .events = POLLIN};
    int got = ppoll(fds, n + 1, timeout_ns < 0 ? NULL : &ts, NULL);
    uint64_t woken;
    if (got > 0 && fds[n].revents && read(cq->wake_fd, &woken, sizeof woken) < 0 && errno != EAGAIN)
        return DP_FATAL;
    for (uint32_t i = 0; got > 0 && i < n; i++)
        if (fds[i].revents)
            look(cq->qps[i]);
    cq_disarm(c);
    return DP_OK;
}

static void cq_wake(dp_cq *c) {
    int saved = errno; /* this may run in a signal handler */
    uint64_t one = 1;
    ssize_t n = write(cq_of(c)->wake_fd, &one, sizeof one); /* fails only when many wakes are pending */
    (void)n;
    errno = saved;
}

static void cq_promise_hot(dp_cq *c, bool hot) { (void)c, (void)hot; }

/* ---- queue pairs ---- */

static int refused(dp_error *err, const char *what) { return dp_fail(err, DP_BAD_BLOB, 0, "take over a virtual queue pair: %s", what); }

static int qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *a, dp_qp **out, dp_error *err) {
    (void)d, (void)c, (void)a, (void)out;
    return dp_fail(err, DP_UNSUPPORTED, 0, "create queue pair: the agent makes virtual queue pairs");
}

static int check(const dp_cq *c, const dp_vqp_packed *p, int memory, int sock, dp_vqp_layout *l, dp_error *err) {
    struct stat st;
    int kind = 0, seals = fcntl(memory, F_GET_SEALS);
    socklen_t len = sizeof kind;
    if (p->magic != DP_VQP_MAGIC || p->version != DP_VQP_VERSION || p->reserved || p->provider != c->dev->provider)
        return refused(err, "its description is malformed, or of another version or provider");
    if (p->max_send < 1 || p->max_send > 4096 || p->max_recv < 1 || p->max_recv > 4096 || p->max_inline > DP_VQP_INLINE || !p->region ||
        p->region > 1ull << 40)
        return refused(err, "its sizes are wrong");
    if (c->reserved + p->max_send + p->max_recv > c->capacity)
        return refused(err, "the completion queue has no room for it");
    *l = dp_vqp_layout_of(p->max_send, p->max_recv, p->region);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(memory, &st) || (uint64_t)st.st_size != l->size)
        return refused(err, "its memory file has a wrong size or is not sealed");
    if (getsockopt(sock, SOL_SOCKET, SO_TYPE, &kind, &len) || kind != SOCK_STREAM)
        return refused(err, "its second descriptor is not a socket");
    return DP_OK;
}

static int attach(vqp_cq *cq, vqp_qp *q) {
    if (cq->n_qps == cq->cap_qps) {
        uint32_t cap = cq->cap_qps ? 2 * cq->cap_qps : 4;
        vqp_qp **qps = realloc(cq->qps, cap * sizeof *qps);
        if (!qps)
            return DP_FATAL;
        cq->qps = qps;
        struct pollfd *fds = realloc(cq->fds, (cap + 1) * sizeof *fds);
        if (!fds)
            return DP_FATAL;
        cq->fds = fds;
        cq->cap_qps = cap;
    }
    cq->qps[cq->n_qps++] = q;
    return DP_OK;
}

static int qp_unpack(dp_domain *d, dp_cq *c, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out,
                     dp_error *err) {
    dp_vqp_packed p;
    dp_vqp_layout l;
    *n_exposed = 0;
    if (packed->size != sizeof p || packed->n_fds != DP_VQP_FDS)
        return refused(err, "its description has a wrong size: the agent has another version");
    memcpy(&p, packed->bytes, sizeof p);
    int st = check(c, &p, fds[0], fds[1], &l, err);
    if (st)
        return st;
    vqp_qp *q = calloc(1, sizeof *q);
    vqp_map *map = calloc(1, sizeof *map);
    uint8_t *at = q && map ? mmap(NULL, l.size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0) : MAP_FAILED;
    if (at == MAP_FAILED) {
        int why = errno;
        free(q);
        free(map);
        return dp_fail(err, DP_FATAL, why, "take over a virtual queue pair: map %llu bytes", (unsigned long long)l.size);
    }
    madvise(at, l.results_at, MADV_POPULATE_WRITE);
    *map = (vqp_map){at, l.size, 1};
    *q = (vqp_qp){.q = {.ops = d->dev->ops, .domain = d, .cq = c, .max_inline = p.max_inline, .max_send = p.max_send, .max_recv = p.max_recv,
                        .state = DP_QP_CONNECTED},
                  .map = map, .page = (dp_vqp_page *)(void *)at, .requests = (dp_vqp_request *)(void *)(at + l.requests_at),
                  .completions = (dp_vqp_completion *)(void *)(at + l.completions_at), .l = l, .packed = p, .memory = -1, .sock = -1};
    q->posted = __atomic_load_n(&q->page->posted, __ATOMIC_ACQUIRE);
    q->receives = __atomic_load_n(&q->page->receives, __ATOMIC_RELAXED);
    q->taken = __atomic_load_n(&q->page->taken, __ATOMIC_RELAXED);
    q->beat = __atomic_load_n(&q->page->beat, __ATOMIC_RELAXED);
    q->looked_at = dp_now_ns();
    dp_mem *results = new_region(d, map, l.results_at, p.region, DP_REMOTE_WRITE, p.base, p.rkey);
    dp_mem *staging = new_region(d, map, l.staging_at, p.region, 0, 0, 0);
    if (!results || !staging || attach(cq_of(c), q)) {
        if (results)
            mem_free(results);
        if (staging)
            mem_free(staging);
        unmap(map);
        free(q);
        return dp_fail(err, DP_FATAL, ENOMEM, "take over a virtual queue pair");
    }
    exposed[(*n_exposed)++] = results;
    exposed[(*n_exposed)++] = staging;
    q->memory = fds[0];
    q->sock = fds[1];
    fds[0] = fds[1] = -1;
    *out = &q->q;
    return DP_OK;
}

static int qp_pack(dp_qp *base, dp_packed_qp *out, int *fds, dp_error *err) {
    vqp_qp *q = qp_of(base);
    if (base->state != DP_QP_CONNECTED || dp_qp_broken(base))
        return dp_fail(err, DP_CONNECTION, 0, "pack: the queue pair is not connected");
    if (__atomic_load_n(&q->page->served, __ATOMIC_ACQUIRE) != q->posted || __atomic_load_n(&q->page->done, __ATOMIC_ACQUIRE) != q->taken)
        return dp_fail(err, DP_BUSY, 0, "pack: operations are under way on the queue pair");
    out->size = sizeof q->packed;
    out->n_fds = DP_VQP_FDS;
    memcpy(out->bytes, &q->packed, sizeof q->packed);
    fds[0] = q->memory;
    fds[1] = q->sock;
    return DP_OK;
}

static void qp_destroy(dp_qp *base) {
    vqp_qp *q = qp_of(base);
    vqp_cq *cq = cq_of(base->cq);
    for (uint32_t i = 0; i < cq->n_qps; i++)
        if (cq->qps[i] == q) {
            cq->qps[i] = cq->qps[--cq->n_qps];
            break;
        }
    close(q->memory);
    close(q->sock);
    unmap(q->map);
    free(q);
}

void dp_vqp_close(dp_qp *base) { close_gate(qp_of(base)); }

bool dp_vqp_given_up(const dp_qp *base) { return ((const vqp_qp *)base)->given_up; }

/* Reports whether a write with an immediate and this wr_id is among the requests that the broker did not claim. */
static bool qp_kept(dp_qp *base, uint64_t wr_id) {
    const vqp_qp *q = qp_of(base);
    uint32_t kept = q->posted - q->claimed;
    if (!q->given_up || kept > q->l.n_requests)
        return false;
    for (uint32_t i = q->claimed; i != q->posted; i++) {
        const dp_vqp_request *r = &q->requests[i & (q->l.n_requests - 1)];
        if (r->op == DP_VQP_WRITE_IMM && r->wr_id == wr_id)
            return true;
    }
    return false;
}

/* ---- posts ---- */

/* Returns the next entry of the ring, or NULL if the broker has not served enough of the earlier ones. */
static dp_vqp_request *next(vqp_qp *q) {
    uint32_t under_way = q->posted - __atomic_load_n(&q->page->served, __ATOMIC_ACQUIRE);
    return under_way < q->q.max_send ? &q->requests[q->posted & (q->l.n_requests - 1)] : NULL;
}

/* Returns false if the broker has ended without claiming the request. Then the request counts as not posted. */
static bool submit(vqp_qp *q) {
    __atomic_store_n(&q->page->posted, ++q->posted, __ATOMIC_RELEASE);
    if (ring(q))
        return true;
    close_gate(q);
    dp_qp_break(&q->q, DP_PEER_GONE);
    if (q->claimed == q->posted)
        return true; /* the call ends with the queue pair */
    __atomic_store_n(&q->page->posted, --q->posted, __ATOMIC_RELEASE);
    return false;
}

/* Describes a piece: by its place in a region of the queue pair, or by its bytes. */
static bool set_piece(const vqp_qp *q, dp_vqp_request *r, dp_vqp_piece *p, const dp_sge *s, uint32_t *used) {
    uint64_t at = (uintptr_t)s->addr - (uintptr_t)q->map->at; /* wraps around for addresses below */
    p->len = s->len;
    if (s->len && at >= q->l.results_at && at < q->l.size) {
        p->where = at < q->l.staging_at ? DP_VQP_RESULTS : DP_VQP_STAGING;
        p->at = at - (at < q->l.staging_at ? q->l.results_at : q->l.staging_at);
        return p->at <= q->packed.region && s->len <= q->packed.region - p->at;
    }
    if (s->len > q->q.max_inline - *used)
        return false;
    p->where = DP_VQP_BYTES;
    p->at = *used;
    memcpy(r->bytes + *used, s->addr, s->len);
    *used += s->len;
    return true;
}

static int post(dp_qp *base, uint32_t op, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id, uint32_t flags) {
    vqp_qp *q = qp_of(base);
    uint32_t used = 0;
    if (base->state != DP_QP_CONNECTED || dp_qp_broken(base))
        return DP_CONNECTION;
    if (n < 0 || n > 2)
        return DP_INVALID;
    dp_vqp_request *r = next(q);
    if (!r)
        return DP_BUSY;
    r->op = op;
    r->flags = flags;
    r->n = (uint32_t)n;
    r->imm = imm;
    r->raddr = raddr;
    r->rkey = rkey;
    r->wr_id = wr_id;
    memset(r->reserved, 0, sizeof r->reserved);
    for (int i = 0; i < n; i++)
        if (!set_piece(q, r, &r->piece[i], &sge[i], &used))
            return DP_INVALID;
    return submit(q) ? DP_OK : DP_CONNECTION;
}

static int post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    return post(q, DP_VQP_WRITE, sge, n, raddr, rkey, 0, wr_id, flags);
}

static int post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id, uint32_t flags) {
    return post(q, DP_VQP_WRITE_IMM, sge, n, raddr, rkey, imm, wr_id, flags);
}

static int post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    (void)q, (void)sge, (void)raddr, (void)rkey, (void)wr_id, (void)flags;
    return DP_UNSUPPORTED;
}

static int post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id, uint32_t flags) {
    (void)q, (void)sge, (void)raddr, (void)rkey, (void)add, (void)wr_id, (void)flags;
    return DP_UNSUPPORTED;
}

static int post_compare_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired, uint64_t wr_id,
                             uint32_t flags) {
    (void)q, (void)sge, (void)raddr, (void)rkey, (void)expected, (void)desired, (void)wr_id, (void)flags;
    return DP_UNSUPPORTED;
}

/* The broker posts it before the next request. The channel gives all its receives the wr_id 0. */
static int post_recv(dp_qp *base, uint64_t wr_id) {
    vqp_qp *q = qp_of(base);
    if (wr_id)
        return DP_INVALID;
    if (base->state == DP_QP_ERROR)
        return DP_CONNECTION;
    __atomic_store_n(&q->page->receives, ++q->receives, __ATOMIC_RELEASE);
    return DP_OK;
}

static void *rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    (void)q, (void)raddr, (void)rkey, (void)len;
    return NULL;
}

static void qp_notify(dp_qp *q) { (void)q; }

/* ---- control ---- */

static int qp_export(dp_qp *base, void *blob, uint32_t *len, dp_error *err) {
    const vqp_qp *q = qp_of(base);
    uint32_t n = *(volatile uint32_t *)&q->page->blob_len;
    if (!n || n > DP_BLOB_MAX)
        return dp_fail(err, DP_PROTOCOL, 0, "export blob: the agent's blob has %u bytes", n);
    memcpy(blob, q->page->blob, n);
    *len = n;
    return DP_OK;
}

static int qp_connect(dp_qp *q, const void *blob, uint32_t len, dp_error *err) {
    (void)q, (void)blob, (void)len;
    return dp_fail(err, DP_UNSUPPORTED, 0, "connect: the agent connects virtual queue pairs");
}

static int qp_reset(dp_qp *q, dp_error *err) {
    q->state = DP_QP_ERROR;
    return dp_fail(err, DP_UNSUPPORTED, 0, "reset: the agent does not connect a virtual queue pair again");
}

/* The broker probes the worker. */
static int qp_probe(dp_qp *base) {
    vqp_qp *q = qp_of(base);
    look(q);
    listen_to_broker(q);
    base->posted = __atomic_load_n(&q->page->sent, __ATOMIC_RELAXED);
    base->arrived = __atomic_load_n(&q->page->arrived, __ATOMIC_RELAXED);
    return dp_qp_broken(base);
}

/* ---- the device ---- */

static const dp_ops ops = {
    .dev_close = dev_close, .domain_create = domain_create, .domain_destroy = domain_destroy, .mem_alloc = mem_alloc,
    .mem_register = mem_register, .mem_window = mem_window, .mem_free = mem_free, .cq_create = cq_create, .cq_pack = cq_pack,
    .cq_unpack = cq_unpack, .qp_pack = qp_pack, .qp_unpack = qp_unpack, .cq_destroy = cq_destroy, .cq_poll = cq_poll, .cq_arm = cq_arm,
    .cq_disarm = cq_disarm, .cq_wait = cq_wait, .cq_wake = cq_wake, .cq_promise_hot = cq_promise_hot, .qp_create = qp_create,
    .qp_export = qp_export, .qp_connect = qp_connect, .qp_reset = qp_reset, .qp_destroy = qp_destroy, .post_write = post_write,
    .post_write_imm = post_write_imm, .post_read = post_read, .post_fetch_add = post_fetch_add, .post_compare_swap = post_compare_swap,
    .post_recv = post_recv, .rkey_ptr = rkey_ptr, .qp_probe = qp_probe, .qp_notify = qp_notify, .qp_kept = qp_kept,
};

bool dp_vqp_is(const dp_dev *dev) { return dev->ops == &ops; }

int dp_vqp_make(dp_provider_id of, dp_dev **out, dp_error *err) {
#define DEVICE(of) [of] = {.ops = &ops, .provider = of, .max_msg = DP_VQP_MESSAGE, .name = "virtual"}
    static dp_dev devices[] = {DEVICE(DP_PROVIDER_VERBS), DEVICE(DP_PROVIDER_TCP)};
    if (of >= sizeof devices / sizeof *devices || !devices[of].ops)
        return dp_fail(err, DP_UNSUPPORTED, 0, "open a device of virtual queue pairs: provider %d", (int)of);
    *out = &devices[of];
    return DP_OK;
}

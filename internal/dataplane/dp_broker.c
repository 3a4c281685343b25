/* The broker of virtual queue pairs: its thread takes requests from the rings of clients, checks and posts them, and returns completions.
 *
 *   ring of a client ── copy ── check ── post ──▶ real queue pair ──▶ its completion queue ──▶ completions of that client
 *
 * A completion is copied only when the client's ring has room for it. Until then it stays in the real completion queue, which has reserved a
 * place for each operation. A request is taken only when there is room for the completion that could refuse it. So nothing is lost, and a
 * client that does not take its completions stops only itself. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_broker.h"
#include "dp_layout.h"
#include "dp_wait.h"

#define BATCH 16 /* requests and completions of one client before the next client's turn */
#define EVENTS 32
#define PASSES 64 /* after this many passes that found work, the thread looks for new and ended clients */

struct dp_brokered {
    dp_broker *broker;
    dp_brokered *next;
    dp_domain *domain;
    dp_cq *cq;
    dp_qp *qp;
    dp_mem *results, *staging;
    dp_layout layout; /* of the channel */
    dp_side peer;     /* the worker's answer; its region bounds what requests may reach */
    uint32_t generation;
    dp_vqp_layout l;
    uint8_t *at; /* the memory file, mapped */
    dp_vqp_page *page;
    dp_vqp_request *requests;
    dp_vqp_completion *completions;
    int memory, sock, client; /* the memory file, this side's socket, the client's; -1: passed on */
    uint32_t served, done;         /* as in the page */
    uint32_t claimed;              /* requests up to this index are posted even if the client closes the queue pair */
    uint32_t received, receives;   /* receives that the client has asked for and that were posted; those outstanding */
    uint32_t watched;              /* events of the completion queue's descriptor in epoll */
    int watched_fd;
    uint32_t beat;                 /* as in the page */
    bool used;   /* the client has posted something */
    bool gone;   /* to be destroyed */
    bool broken; /* told to the client */
};

struct dp_broker {
    dp_dev *dev;
    pthread_t thread;
    int epoll, wake;
    dp_brokered *all; /* the thread's */
    dp_waiter waiter;
    int64_t probe_at;
    pthread_mutex_t mu;
    pthread_cond_t changed;
    dp_brokered *incoming; /* under mu; so are the next three */
    uint32_t destroying;
    bool stop;
    dp_broker_stats stats; /* atomics */
};

static void count(uint64_t *c) { __atomic_fetch_add(c, 1, __ATOMIC_RELAXED); }

/* ---- making a channel ---- */

static int make_file(dp_brokered *c, dp_error *err) {
    c->memory = memfd_create("rfaas-broker", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (c->memory < 0 || ftruncate(c->memory, (off_t)c->l.size) || fcntl(c->memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return dp_fail(err, DP_FATAL, errno, "memory of a brokered channel");
    void *at = mmap(NULL, c->l.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, c->memory, 0);
    if (at == MAP_FAILED)
        return dp_fail(err, DP_FATAL, errno, "map %llu bytes of a brokered channel", (unsigned long long)c->l.size);
    c->at = at;
    c->page = at;
    c->requests = (dp_vqp_request *)(void *)(c->at + c->l.requests_at);
    c->completions = (dp_vqp_completion *)(void *)(c->at + c->l.completions_at);
    return DP_OK;
}

static int make_sockets(dp_brokered *c, dp_error *err) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair))
        return dp_fail(err, DP_FATAL, errno, "sockets of a brokered channel");
    c->sock = pair[0];
    c->client = pair[1];
    return DP_OK;
}

static int post_receives(dp_brokered *c, uint32_t n, dp_error *err) {
    for (uint32_t i = 0; i < n; i++, c->receives++) {
        int st = dp_post_recv(c->qp, 0);
        if (st)
            return dp_fail(err, st, 0, "post receive %u of %u", i, n);
    }
    return DP_OK;
}

static int make_queue_pair(dp_brokered *c, dp_error *err) {
    dp_dev *dev = c->broker->dev;
    dp_qp_attr a = {.max_send = 2 * c->layout.depth + 8, .max_recv = c->layout.depth, .max_inline = DP_VQP_INLINE, .n_expose = 1};
    int st = dp_domain_create(dev, &c->domain, err);
    if (!st)
        st = dp_cq_create(dev, a.max_send + a.max_recv, &c->cq, err);
    if (!st)
        st = dp_mem_register(c->domain, c->at + c->l.results_at, c->layout.size, DP_REMOTE_WRITE, &c->results, err);
    if (!st)
        st = dp_mem_register(c->domain, c->at + c->l.staging_at, c->layout.size, 0, &c->staging, err);
    a.expose[0] = c->results;
    if (!st)
        st = dp_qp_create(c->domain, c->cq, &a, &c->qp, err);
    return st ? st : post_receives(c, c->layout.depth, err);
}

static void destroy(dp_brokered *c) {
    dp_qp_destroy(c->qp);
    dp_mem_free(c->results);
    dp_mem_free(c->staging);
    dp_cq_destroy(c->cq);
    dp_domain_destroy(c->domain);
    if (c->at)
        munmap(c->at, c->l.size);
    int fds[] = {c->memory, c->sock, c->client};
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(c);
}

void dp_brokered_drop(dp_brokered *c) {
    if (c)
        destroy(c);
}

int dp_brokered_create(dp_broker *b, const dp_channel_config *cfg, dp_brokered **out, dp_error *err) {
    uint32_t eager = (cfg->eager + 63) & ~63u;
    uint64_t bulk = (cfg->bulk + 63) & ~63ull;
    if (!cfg->depth || cfg->depth > DP_DEPTH_MAX || !eager || eager > DP_EAGER_MAX || bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "brokered channel of depth %u, eager size %u, bulk size %llu", cfg->depth, cfg->eager,
                       (unsigned long long)cfg->bulk);
    if (eager < DP_CHANNEL_BLOB_MAX || b->dev->max_msg < DP_VQP_MESSAGE)
        return dp_fail(err, DP_UNSUPPORTED, 0, "brokered channel: slots of %u bytes, want at least %d, and messages of %u bytes", eager,
                       DP_CHANNEL_BLOB_MAX, b->dev->max_msg);
    dp_brokered *c = calloc(1, sizeof *c);
    if (!c)
        return dp_fail(err, DP_FATAL, ENOMEM, "brokered channel");
    c->broker = b;
    c->memory = c->sock = c->client = c->watched_fd = -1;
    dp_layout_set(&c->layout, cfg->depth, eager, bulk);
    c->l = dp_vqp_layout_of(2 * cfg->depth + 8, cfg->depth, c->layout.size);
    while (!c->generation)
        dp_random(&c->generation, sizeof c->generation);
    int st = make_file(c, err);
    if (!st)
        st = make_sockets(c, err);
    if (!st)
        st = make_queue_pair(c, err);
    if (st) {
        destroy(c);
        return st;
    }
    *out = c;
    return DP_OK;
}

int dp_brokered_offer(dp_brokered *c, void *blob, uint32_t *len, dp_error *err) {
    return dp_side_encode(c->qp, &c->layout, DP_ROLE_BROKER, c->generation, c->results, blob, len, err);
}

int dp_brokered_connect(dp_brokered *c, const void *blob, uint32_t len, dp_error *err) {
    dp_side side;
    int st = dp_side_decode(blob, len, DP_ROLE_WORKER, c->broker->dev->provider, &side, err);
    if (st)
        return st;
    if (side.generation != c->generation || side.layout.depth != c->layout.depth || side.layout.eager != c->layout.eager || side.layout.bulk != c->layout.bulk)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect a brokered channel: the worker answers generation %#x, depth %u, eager %u, bulk %llu, want %#x, %u, %u, %llu",
                       side.generation, side.layout.depth, side.layout.eager, (unsigned long long)side.layout.bulk, c->generation, c->layout.depth,
                       c->layout.eager, (unsigned long long)c->layout.bulk);
    st = dp_qp_connect(c->qp, side.qp_blob, side.qp_len, err);
    if (!st)
        c->peer = side;
    return st;
}

static int export_blob(dp_brokered *c) {
    dp_error err;
    uint8_t blob[DP_BLOB_MAX];
    uint32_t len = sizeof blob;
    int st = dp_qp_export(c->qp, blob, &len, &err);
    if (st)
        return st;
    memcpy(c->page->blob, blob, len);
    c->page->blob_len = len;
    return DP_OK;
}

static void wake(const dp_broker *b) {
    uint64_t one = 1;
    ssize_t n = write(b->wake, &one, sizeof one);
    (void)n;
}

int dp_brokered_serve(dp_brokered **served, dp_packed_channel *out, int *fds, dp_error *err) {
    dp_brokered *c = *served;
    dp_broker *b = c->broker;
    if (c->qp->state != DP_QP_CONNECTED || export_blob(c))
        return dp_fail(err, DP_CONNECTION, 0, "serve a brokered channel: it is not connected");
    uint32_t inl = c->qp->max_inline < DP_VQP_INLINE ? c->qp->max_inline : DP_VQP_INLINE;
    dp_vqp_packed p = {.magic = DP_VQP_MAGIC, .version = DP_VQP_VERSION, .provider = b->dev->provider, .max_send = c->qp->max_send,
                       .max_recv = c->qp->max_recv, .max_inline = inl, .rkey = c->results->rkey, .base = c->results->base, .region = c->layout.size};
    *out = (dp_packed_channel){.version = DP_PACKED_VERSION, .cfg = {c->layout.depth, c->layout.eager, c->layout.bulk}, .generation = c->generation,
                               .rkey = c->peer.rkey, .addr = c->peer.addr, .blob_len = c->peer.qp_len};
    memcpy(out->blob, c->peer.qp_blob, c->peer.qp_len);
    out->qp.size = sizeof p;
    out->qp.n_fds = DP_VQP_FDS;
    memcpy(out->qp.bytes, &p, sizeof p);
    c->page->broker_sleeps = 1;
    fds[0] = c->memory;
    fds[1] = c->client;
    c->memory = c->client = -1;
    *served = NULL;
    pthread_mutex_lock(&b->mu);
    c->next = b->incoming;
    b->incoming = c;
    pthread_mutex_unlock(&b->mu);
    count(&b->stats.channels);
    wake(b);
    return DP_OK;
}

/* ---- completions ---- */

static uint32_t room(const dp_brokered *c) {
    uint32_t waiting = c->done - __atomic_load_n(&c->page->taken, __ATOMIC_ACQUIRE);
    return waiting < c->l.n_completions ? c->l.n_completions - waiting : 0;
}

static void push(dp_brokered *c, dp_vqp_completion e) {
    c->completions[c->done & (c->l.n_completions - 1)] = e;
    __atomic_store_n(&c->page->done, ++c->done, __ATOMIC_RELEASE);
    count(&c->broker->stats.completions);
}

static bool complete(dp_brokered *c) {
    dp_wc wc[BATCH];
    uint32_t most = room(c);
    int n = most ? dp_cq_poll(c->cq, wc, most < BATCH ? (int)most : BATCH) : 0;
    for (int i = 0; i < n; i++) {
        if (wc[i].op == DP_OP_RECV_IMM || wc[i].op == DP_OP_RECV)
            c->receives--;
        push(c, (dp_vqp_completion){.wr_id = wc[i].wr_id, .status = wc[i].status, .op = wc[i].op, .imm = wc[i].imm, .byte_len = wc[i].byte_len});
    }
    return n > 0;
}

/* ---- requests ---- */

/* Posts the receives that the client has asked for, as far as the queue pair takes them. */
static void receive(dp_brokered *c) {
    uint32_t asked = __atomic_load_n(&c->page->receives, __ATOMIC_ACQUIRE);
    while (c->received != asked && c->receives < c->qp->max_recv && !dp_post_recv(c->qp, 0)) {
        c->received++;
        c->receives++;
    }
}

/* Checks a request that was copied. Fills in where its pieces are. */
static dp_vqp_reason check(const dp_brokered *c, const dp_vqp_request *r, dp_sge sge[2]) {
    uint64_t total = 0, size = c->peer.layout.size;
    bool bytes = false;
    if (r->op != DP_VQP_WRITE && r->op != DP_VQP_WRITE_IMM)
        return DP_VQP_BAD_OPERATION;
    if (r->flags & ~(uint32_t)(DP_SIGNALED | DP_MORE) || r->reserved[0] || r->reserved[1] || r->reserved[2])
        return DP_VQP_BAD_FLAGS;
    if (r->n > 2)
        return DP_VQP_BAD_PIECES;
    for (uint32_t i = 0; i < r->n; i++) {
        const dp_vqp_piece *p = &r->piece[i];
        const dp_mem *m = p->where == DP_VQP_RESULTS ? c->results : p->where == DP_VQP_STAGING ? c->staging : NULL;
        uint64_t most = m ? m->size : DP_VQP_INLINE;
        if (p->where > DP_VQP_STAGING)
            return DP_VQP_BAD_PIECES;
        if (p->at > most || p->len > most - p->at)
            return DP_VQP_BAD_LOCAL;
        sge[i] = (dp_sge){m ? (const uint8_t *)m->addr + p->at : r->bytes + p->at, p->len, m ? m->lkey : 0};
        bytes |= !m;
        total += p->len;
    }
    if (total > DP_VQP_MESSAGE || (bytes && total > c->qp->max_inline && !(c->broker->dev->caps & DP_CAP_SYNC_SOURCE)))
        return DP_VQP_BAD_LENGTH;
    if (r->rkey != c->peer.rkey)
        return DP_VQP_BAD_KEY;
    if (r->raddr < c->peer.addr || r->raddr - c->peer.addr > size || total > size - (r->raddr - c->peer.addr))
        return DP_VQP_BAD_REMOTE;
    return DP_VQP_GOOD;
}

/* Carries out a copied request. *reason is set if it is malformed. DP_BUSY: not now. */
static int execute(dp_brokered *c, const dp_vqp_request *r, dp_vqp_reason *reason) {
    dp_sge sge[2];
    if ((*reason = check(c, r, sge)))
        return DP_INVALID;
    return r->op == DP_VQP_WRITE ? dp_post_write(c->qp, sge, (int)r->n, r->raddr, r->rkey, r->wr_id, r->flags)
                                 : dp_post_write_imm(c->qp, sge, (int)r->n, r->raddr, r->rkey, r->imm, r->wr_id, r->flags);
}

/* Reports whether the client has closed the queue pair, or has damaged the gate. */
static bool is_closed(const dp_brokered *c) { return __atomic_load_n(&c->page->gate, __ATOMIC_ACQUIRE) != c->claimed; }

/* Claims the requests up to index `to`, so that the client counts them as posted. Returns false if the client has closed the queue pair. Then the
 * broker must not post them. */
static bool claim(dp_brokered *c, uint32_t to) {
    uint64_t was = c->claimed;
    if (!__atomic_compare_exchange_n(&c->page->gate, &was, to, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        return false;
    c->claimed = to;
    return true;
}

static bool take_requests(dp_brokered *c) {
    dp_broker *b = c->broker;
    uint32_t posted = __atomic_load_n(&c->page->posted, __ATOMIC_ACQUIRE), before = c->served;
    if (posted == c->served || !room(c))
        return false;
    c->used = true;
    if (posted - c->served > c->l.n_requests) {
        if (!claim(c, posted))
            return false;
        push(c, (dp_vqp_completion){.status = DP_INVALID, .op = DP_OP_WRITE, .reason = DP_VQP_BAD_INDEX});
        count(&b->stats.refused);
        c->served = posted;
    }
    receive(c); /* those that were posted before the requests */
    for (int i = 0; i < BATCH && posted != c->served && room(c); i++) {
        if (c->served == c->claimed && !claim(c, posted - c->served < BATCH ? posted : c->served + BATCH))
            break;
        dp_vqp_request r;
        dp_vqp_reason reason = DP_VQP_GOOD;
        memcpy(&r, &c->requests[c->served & (c->l.n_requests - 1)], sizeof r);
        __asm__ volatile("" : "+m"(r)::"memory"); /* the copy is checked and used, never the original */
        int st = execute(c, &r, &reason);
        if (st == DP_BUSY)
            break;
        c->served++;
        if (st)
            push(c, (dp_vqp_completion){.wr_id = r.wr_id, .status = st, .op = DP_OP_WRITE, .reason = reason});
        count(reason ? &b->stats.refused : &b->stats.requests);
    }
    __atomic_store_n(&c->page->served, c->served, __ATOMIC_RELEASE);
    return c->served != before;
}

/* ---- the thread ---- */

/* Wakes the client if it sleeps. Partner: cq_arm() in dp_vqp.c. */
static void tell(const dp_brokered *c) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&c->page->client_sleeps, __ATOMIC_RELAXED) && __atomic_exchange_n(&c->page->client_sleeps, 0, __ATOMIC_RELAXED))
        send(c->sock, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void note_broken(dp_brokered *c) {
    int status = dp_qp_broken(c->qp);
    if (!status && c->qp->state == DP_QP_ERROR)
        status = DP_CONNECTION;
    if (!status || c->broken || is_closed(c)) /* closed: the worker may have ended since, which is no failure */
        return;
    c->broken = true;
    count(&c->broker->stats.failed);
    __atomic_store_n(&c->page->broken, status, __ATOMIC_RELEASE);
    tell(c);
}

static bool serve(dp_brokered *c) {
    if (is_closed(c)) {
        c->gone = true;
        return true;
    }
    bool any = complete(c);
    any |= take_requests(c);
    if (any)
        tell(c);
    note_broken(c);
    return any;
}

/* Drops the bytes that have woken this side. The end of the stream means that no process has the client's end open. */
static void drain(dp_brokered *c) {
    char bytes[64];
    ssize_t n = recv(c->sock, bytes, sizeof bytes, MSG_DONTWAIT);
    if (!n || (n < 0 && errno != EAGAIN && errno != EINTR))
        c->gone = true;
}

static void *destroy_aside(void *arg) {
    dp_brokered *c = arg;
    dp_broker *b = c->broker;
    destroy(c);
    pthread_mutex_lock(&b->mu);
    b->destroying--;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mu);
    return NULL;
}

/* A driver may take long to destroy a queue pair, so another thread does it. */
static void end(dp_broker *b, dp_brokered *c) {
    pthread_t t;
    int fd;
    epoll_ctl(b->epoll, EPOLL_CTL_DEL, c->sock, NULL);
    dp_qp_events(c->qp, &fd);
    if (fd >= 0 && fd == c->watched_fd) /* otherwise it is closed, and may be the number of another descriptor */
        epoll_ctl(b->epoll, EPOLL_CTL_DEL, c->watched_fd, NULL);
    __atomic_fetch_sub(&b->stats.channels, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&b->mu);
    b->destroying++;
    pthread_mutex_unlock(&b->mu);
    if (dp_thread_start(&t, destroy_aside, c))
        destroy_aside(c);
    else
        pthread_detach(t);
}

static void take_incoming(dp_broker *b, bool *stop) {
    pthread_mutex_lock(&b->mu);
    for (dp_brokered *c; (c = b->incoming);) {
        b->incoming = c->next;
        c->next = b->all;
        b->all = c;
        struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        if (epoll_ctl(b->epoll, EPOLL_CTL_ADD, c->sock, &ev)) /* the user's limit of watches is reached */
            c->gone = true;
    }
    *stop = b->stop;
    pthread_mutex_unlock(&b->mu);
}

static bool serve_all(dp_broker *b, bool stop) {
    bool any = false;
    for (dp_brokered **p = &b->all; *p;) {
        dp_brokered *c = *p;
        any |= serve(c);
        c->gone |= stop;
        if (c->gone) {
            *p = c->next;
            end(b, c);
        } else {
            p = &c->next;
        }
    }
    return any;
}

static void probe_all(dp_broker *b) {
    for (dp_brokered *c = b->all; c; c = c->next) {
        if (!c->used)
            continue;
        __atomic_store_n(&c->page->beat, ++c->beat, __ATOMIC_RELAXED);
        if (c->qp->state != DP_QP_CONNECTED)
            continue;
        dp_qp_probe(c->qp);
        __atomic_store_n(&c->page->sent, c->qp->posted, __ATOMIC_RELAXED);
        __atomic_store_n(&c->page->arrived, c->qp->arrived, __ATOMIC_RELAXED);
        note_broken(c);
    }
}

/* Watches the descriptor of the completion queue. */
static void watch(dp_broker *b, dp_brokered *c) {
    int fd;
    uint32_t events = (uint32_t)dp_qp_events(c->qp, &fd);
    if (fd != c->watched_fd)
        c->watched_fd = -1; /* it is closed */
    if (fd < 0 || (fd == c->watched_fd && events == c->watched))
        return;
    struct epoll_event ev = {.events = events, .data.ptr = NULL};
    if (!epoll_ctl(b->epoll, fd == c->watched_fd ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &ev)) {
        c->watched_fd = fd;
        c->watched = events;
    }
}

/* Waits for events, for at most `ms`; -1: without a limit. */
static void take_events(dp_broker *b, int ms) {
    struct epoll_event ev[EVENTS];
    int n = epoll_wait(b->epoll, ev, EVENTS, ms);
    for (int i = 0; i < n; i++) {
        uint64_t woken;
        if (ev[i].data.ptr == b) {
            if (read(b->wake, &woken, sizeof woken) < 0)
                continue;
        } else if (ev[i].data.ptr) {
            drain(ev[i].data.ptr);
        }
    }
}

/* Sleeps until a client, a completion queue or another thread has something to do. Clients that have never posted cost nothing here: their
 * flag stays set. */
static void sleep_until_event(dp_broker *b) {
    bool used = false, any = false;
    for (dp_brokered *c = b->all; c; c = c->next) {
        if (!c->used)
            continue;
        used = true;
        __atomic_store_n(&c->page->broker_sleeps, 1, __ATOMIC_SEQ_CST);
        any |= dp_cq_arm(c->cq) != DP_OK;
        watch(b, c);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* partner: ring() in dp_vqp.c */
    for (dp_brokered *c = b->all; c && !any; c = c->next)
        any = serve(c) || c->gone;
    take_events(b, any ? 0 : used ? DP_VQP_BEAT_NS / 1000000 : -1);
    for (dp_brokered *c = b->all; c; c = c->next)
        if (c->used) {
            __atomic_store_n(&c->page->broker_sleeps, 0, __ATOMIC_RELAXED);
            dp_cq_disarm(c->cq);
            dp_cq_wait(c->cq, 0); /* takes the event */
        }
}

static void *run(void *arg) {
    dp_broker *b = arg;
    bool stop = false;
    uint32_t passes = 0;
    dp_waiter_begin(&b->waiter);
    for (;;) {
        if (serve_all(b, stop)) {
            dp_waiter_end(&b->waiter);
            dp_waiter_begin(&b->waiter);
            passes++;
        }
        if (stop && !b->all)
            return NULL;
        int what = dp_waiter_spin(&b->waiter);
        if (what == DP_SPIN_ON && passes < PASSES)
            continue;
        take_incoming(b, &stop);
        int64_t now = dp_now_ns();
        if (now >= b->probe_at) {
            b->probe_at = now + DP_VQP_BEAT_NS;
            probe_all(b);
        }
        if (passes >= PASSES)
            take_events(b, 0);
        passes = 0;
        if (what == DP_SPIN_BLOCK && !stop)
            sleep_until_event(b);
    }
}

int dp_broker_start(dp_dev *dev, dp_broker **out, dp_error *err) {
    dp_broker *b = calloc(1, sizeof *b);
    if (!b)
        return dp_fail(err, DP_FATAL, ENOMEM, "start a broker");
    b->dev = dev;
    pthread_mutex_init(&b->mu, NULL);
    pthread_cond_init(&b->changed, NULL);
    dp_waiter_init(&b->waiter, DP_WAIT_ADAPTIVE);
    b->waiter.yields = true; /* a client and a worker wait for this thread, and the node may have only two processors for the three */
    b->epoll = epoll_create1(EPOLL_CLOEXEC);
    b->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = b};
    int why = b->epoll < 0 || b->wake < 0 || epoll_ctl(b->epoll, EPOLL_CTL_ADD, b->wake, &ev) ? errno : dp_thread_start(&b->thread, run, b);
    if (why) {
        if (b->epoll >= 0)
            close(b->epoll);
        if (b->wake >= 0)
            close(b->wake);
        free(b);
        return dp_fail(err, DP_FATAL, why, "start a broker");
    }
    *out = b;
    return DP_OK;
}

void dp_broker_stop(dp_broker *b) {
    if (!b)
        return;
    pthread_mutex_lock(&b->mu);
    b->stop = true;
    pthread_mutex_unlock(&b->mu);
    wake(b);
    pthread_join(b->thread, NULL);
    pthread_mutex_lock(&b->mu);
    while (b->destroying)
        pthread_cond_wait(&b->changed, &b->mu);
    pthread_mutex_unlock(&b->mu);
    close(b->epoll);
    close(b->wake);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->mu);
    free(b);
}

void dp_broker_get_stats(dp_broker *b, dp_broker_stats *out) {
    uint64_t *to = (uint64_t *)out, *from = (uint64_t *)&b->stats;
    for (size_t i = 0; i < sizeof *out / sizeof *to; i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

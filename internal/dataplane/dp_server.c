/* Making, connecting and ending a server, and requests of other threads to it. */
#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dp_serve_impl.h"

#define SCRATCH_GUARD 4096
#define FINISH_NS 2000000 /* how long a server that is to finish polls for more requests */

/* ---- set-up ---- */

uint8_t *dp_server_scratch(uint64_t size) {
    uint8_t *p = mmap(NULL, size + SCRATCH_GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (!mprotect(p, size, PROT_READ | PROT_WRITE))
        return p;
    int e = errno;
    munmap(p, size + SCRATCH_GUARD);
    errno = e;
    return NULL;
}

static void scratch_free(uint8_t *p, uint64_t size) {
    if (p)
        munmap(p, size + SCRATCH_GUARD);
}

static int scratch_create(dp_server *s, dp_error *err) {
    uint64_t want = s->layout.eager > s->layout.bulk ? s->layout.eager : s->layout.bulk;
    s->scratch_size = (want + DP_CACHE_LINE + 4095) & ~4095ull; /* a guard follows each result */
    s->scratch = dp_server_scratch(s->scratch_size);
    if (!s->scratch)
        return dp_fail(err, DP_FATAL, errno, "scratch memory of %llu bytes", (unsigned long long)s->scratch_size);
    /* Only the eager part is prefaulted: large results are normally produced in place. */
    madvise(s->scratch, (s->layout.eager + 4095) & ~4095u, MADV_POPULATE_WRITE);
    return DP_OK;
}

static int check_limits(const dp_server_config *cfg, const dp_layout *l, dp_error *err) {
    uint32_t depth = cfg->max_depth ? cfg->max_depth : DP_DEPTH_MAX;
    uint32_t eager = cfg->max_eager ? cfg->max_eager : DP_EAGER_MAX;
    uint64_t bulk = cfg->max_bulk ? cfg->max_bulk : DP_BULK_MAX;
    if (l->depth > depth)
        return dp_fail(err, DP_INVALID, 0, "channel of depth %u, this executor allows %u", l->depth, depth);
    if (l->eager > eager)
        return dp_fail(err, DP_INVALID, 0, "channel of eager size %u, this executor allows %u", l->eager, eager);
    if (l->bulk > bulk)
        return dp_fail(err, DP_INVALID, 0, "channel of bulk size %llu, this executor allows %llu",
                       (unsigned long long)l->bulk, (unsigned long long)bulk);
    return DP_OK;
}

static int post_receives(dp_server *s, dp_qp *qp, dp_error *err) {
    for (uint32_t i = 0; i < s->layout.depth; i++) {
        int st = dp_post_recv(qp, 0);
        if (st)
            return dp_fail(err, st, 0, "post receive %u of %u", i, s->layout.depth);
    }
    return DP_OK;
}

static int make_queue_pair(dp_server *s, dp_qp **out, dp_error *err) {
    dp_qp_attr attr = {.max_send = 2 * s->layout.depth + 8, .max_recv = s->layout.depth, .max_inline = 256,
                       .expose = {s->requests}, .n_expose = 1, .takes_shared = true};
    int st = dp_qp_create(s->domain, s->cq, &attr, out, err);
    if (!st)
        dp_qp_repost(*out);
    return st;
}

static int make_parts(dp_server *s, bool hot, dp_error *err) {
    bool shared = s->dev->caps & DP_CAP_RKEY_PTR;
    int st = dp_domain_create(s->dev, &s->domain, err);
    if (!st)
        st = dp_cq_create(s->dev, 2 * (3 * s->layout.depth + 8), &s->cq, err); /* for a second queue pair */
    if (!st && hot)
        dp_cq_promise_hot(s->cq, true);
    if (!st)
        st = dp_layout_alloc(s->domain, &s->layout, shared ? dp_layout_large(&s->layout) : s->layout.size, DP_REMOTE_WRITE, &s->requests, err);
    if (!st && !shared)
        st = dp_layout_alloc(s->domain, &s->layout, s->layout.size, 0, &s->staging, err);
    if (!st)
        st = scratch_create(s, err);
    if (st)
        return st;
    st = make_queue_pair(s, &s->qp, err);
    return st ? st : post_receives(s, s->qp, err);
}

static int make_server(dp_dev *dev, const dp_layout *l, bool hot, dp_server **out, dp_error *err) {
    dp_server *s = aligned_alloc(DP_CACHE_LINE, sizeof *s);
    if (!s)
        return dp_fail(err, DP_FATAL, ENOMEM, "create server");
    memset(s, 0, sizeof *s);
    s->dev = dev;
    s->stats = &s->own;
    s->knock = &s->own_knock;
    s->layout = *l;
    s->cap_pending = 3 * l->depth + 8;
    s->pending = calloc(s->cap_pending, sizeof *s->pending);
    s->headers = calloc(l->depth, sizeof *s->headers);
    s->parts = calloc(l->depth, sizeof *s->parts);
    int st = s->pending && s->headers && s->parts ? make_parts(s, hot, err) : dp_fail(err, DP_FATAL, ENOMEM, "create server");
    if (st) {
        dp_server_destroy(s);
        return st;
    }
    *out = s;
    return DP_OK;
}

/* Makes the queue pair to which a brokered client moves. By then the process may be sealed. */
static int make_other(dp_server *s, dp_error *err) {
    int st = make_queue_pair(s, &s->other, err);
    if (!st && s->other->ops->qp_connect_late)
        st = dp_qp_connect_late(s->other, err);
    return st ? st : post_receives(s, s->other, err);
}

static int server_connect(dp_server *s, const dp_server_config *cfg, const dp_side *client, dp_error *err) {
    s->cfg = *cfg;
    s->client = *client;
    dp_waiter_init(&s->waiter, cfg->mode);
    s->waiter.yields = s->dev->provider == DP_PROVIDER_TCP;
    s->late = !client->qp_len;
    if (s->late) {
        int st = dp_qp_connect_late(s->qp, err);
        s->out = s->staging ? s->staging->addr : NULL;
        return st ? st : post_receives(s, s->qp, err);
    }
    if (client->brokered) {
        int st = make_other(s, err);
        if (st)
            return st;
    }
    s->unconnected = s->dev->waits;
    if (s->unconnected) {
        s->out = s->staging->addr;
        return DP_OK;
    }
    int st = dp_qp_connect(s->qp, s->client.qp_blob, s->client.qp_len, err);
    if (st)
        return st;
    s->out = s->staging ? s->staging->addr
                        : dp_rkey_ptr(s->qp, s->client.addr, s->client.rkey, s->layout.size);
    if (!s->out)
        return dp_fail(err, DP_BAD_BLOB, 0, "channel blob: no region of %llu bytes at %#llx",
                       (unsigned long long)s->layout.size, (unsigned long long)s->client.addr);
    if (!s->staging)
        s->mailbox = (dp_mailbox *)(void *)((uint8_t *)s->requests->addr + s->layout.mailbox_at);
    return DP_OK;
}

int dp_server_prepare(dp_dev *dev, const dp_channel_config *sizes, dp_server **out, dp_error *err) {
    dp_layout l;
    if (!sizes->depth || sizes->depth > DP_DEPTH_MAX || !sizes->eager || sizes->eager > DP_EAGER_MAX || sizes->eager % DP_CACHE_LINE ||
        sizes->bulk > DP_BULK_MAX || sizes->bulk % DP_BULK_UNIT)
        return dp_fail(err, DP_INVALID, 0, "prepare server: depth %u, eager size %u, bulk size %llu", sizes->depth, sizes->eager,
                       (unsigned long long)sizes->bulk);
    dp_layout_set(&l, sizes->depth, sizes->eager, sizes->bulk);
    int st = make_server(dev, &l, false, out, err);
    if (!st)
        (*out)->ahead = true;
    return st;
}

uint64_t dp_server_region(const dp_channel_config *sizes) {
    dp_layout l;
    if (!sizes->depth)
        return 0;
    dp_layout_set(&l, sizes->depth, sizes->eager, sizes->bulk);
    return (l.size + 4095) & ~4095ull;
}

uint64_t dp_server_region_for(const dp_server_config *cfg, const void *client_blob, uint32_t len) {
    dp_side client;
    dp_error why;
    int st = dp_side_decode(client_blob, len, DP_ROLE_CLIENT, DP_PROVIDER_VERBS, &client, &why);
    if (!st)
        st = check_limits(cfg, &client.layout, &why);
    if (st)
        return 0;
    return dp_server_region(&(dp_channel_config){client.layout.depth, client.layout.eager, client.layout.bulk});
}

bool dp_server_made_ahead(const dp_server *s) { return s->ahead; }

int dp_server_connect(dp_dev *dev, const dp_server_config *cfg, const void *client_blob, uint32_t len, dp_server **server,
                      dp_error *err) {
    dp_side client;
    int st = dp_side_decode(client_blob, len, DP_ROLE_CLIENT, dev->provider, &client, err);
    if (!st)
        st = check_limits(cfg, &client.layout, err);
    const dp_layout *l = &client.layout;
    if (*server && (st || l->depth != (*server)->layout.depth || l->eager != (*server)->layout.eager ||
                    l->bulk != (*server)->layout.bulk)) {
        dp_server_destroy(*server);
        *server = NULL;
    }
    if (!st && !*server)
        st = make_server(dev, l, cfg->mode == DP_WAIT_HOT, server, err);
    if (!st)
        st = server_connect(*server, cfg, &client, err);
    if (st) {
        dp_server_destroy(*server);
        *server = NULL;
    }
    return st;
}

int dp_server_create(dp_dev *dev, const dp_server_config *cfg, const void *client_blob, uint32_t len, dp_server **out,
                     dp_error *err) {
    dp_server *s = NULL;
    int st = dp_server_connect(dev, cfg, client_blob, len, &s, err);
    if (st == DP_OK)
        *out = s;
    return st;
}

static void touch_present(uint8_t *at, uint64_t len) {
    enum { PAGE = 4096, PAGES = 256 };
    unsigned char present[PAGES];
    for (uint64_t done = 0; done < len; done += PAGES * PAGE) {
        uint64_t part = len - done < PAGES * PAGE ? len - done : PAGES * PAGE;
        if (mincore(at + done, part, present))
            return;
        for (uint64_t i = 0, n = (part + PAGE - 1) / PAGE, from = 0; i < n; i++) {
            if (!(present[i] & 1))
                from = i + 1; /* do not allocate pages that the client has left out */
            else if (i + 1 == n || !(present[i + 1] & 1))
                madvise(at + done + from * PAGE, (i + 1 - from) * PAGE, MADV_POPULATE_WRITE);
        }
    }
}

void dp_server_touch(dp_server *s) {
    enum { PAGE = 4096 };
    /* With staging, or with another page size, each page is mapped at its first use. */
    if (s->staging || sysconf(_SC_PAGESIZE) != PAGE)
        return;
    const uint64_t most = 4u << 20; /* some 100 us, because the client may be calling already */
    uint64_t slots = (s->layout.bulk_at + PAGE - 1) & ~(uint64_t)(PAGE - 1), mailbox = s->layout.mailbox_at & ~(uint64_t)(PAGE - 1);
    int before = errno; /* of hints */
    touch_present(s->out, slots < most ? slots : most);
    touch_present((uint8_t *)s->out + mailbox, s->layout.size - mailbox);
    errno = before;
}

int dp_server_blob(dp_server *s, void *blob, uint32_t *len, dp_error *err) {
    return dp_side_encode(s->qp, &s->layout, DP_ROLE_WORKER, s->client.generation, s->requests, blob, len, err);
}

int dp_server_peer_fd(const dp_server *s) { return dp_qp_peer_fd(s->qp); }

void dp_server_set_functions(dp_server *s, const dp_function *table, uint32_t n) {
    s->functions = table;
    s->n_functions = n;
}

void dp_server_share_stats(dp_server *s, dp_server_stats *shared) { s->stats = shared; }

void dp_server_share_knock(dp_server *s, dp_knock *shared) { s->knock = shared; }

static void drop_parts(dp_server *s) {
    for (uint32_t i = 0; s->parts && i < s->layout.depth; i++)
        dp_parts_drop(&s->parts[i]);
}

void dp_server_destroy(dp_server *s) {
    if (!s)
        return;
    dp_qp_destroy(s->qp);
    dp_qp_destroy(s->other);
    dp_mem_free(s->requests);
    dp_mem_free(s->staging);
    dp_cq_destroy(s->cq);
    dp_domain_destroy(s->domain);
    scratch_free(s->scratch, s->scratch_size);
    scratch_free(s->between, s->scratch_size);
    free(s->pending);
    free(s->headers);
    drop_parts(s);
    free(s->parts);
    free(s);
}

/* ---- moving to another queue pair ---- */

int dp_server_move(dp_server *s, uint32_t slot, const dp_request *h, uint32_t arrived, uint32_t *size) {
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    dp_side side;
    dp_error err = {0};
    const dp_layout *l = &s->layout;
    *size = 0;
    if (!s->other || s->moved || h->generation != s->client.generation || h->size > sizeof blob || h->size > l->eager ||
        arrived != DP_REQ_SHORT + h->size || h->capacity < sizeof blob || h->capacity > l->eager)
        return DP_BAD_REQUEST;
    memcpy(blob, (const uint8_t *)s->requests->addr + dp_slot_payload(l, slot), h->size);
    int st = dp_side_decode(blob, h->size, DP_ROLE_CLIENT, s->dev->provider, &side, &err);
    if (!st && (side.generation != s->client.generation || side.layout.size != l->size || side.layout.depth != l->depth))
        st = DP_BAD_BLOB;
    if (!st)
        st = dp_qp_connect(s->other, side.qp_blob, side.qp_len, &err);
    uint32_t len = DP_CHANNEL_BLOB_MAX;
    if (!st)
        st = dp_side_encode(s->other, l, DP_ROLE_WORKER, side.generation, s->requests, s->scratch, &len, &err);
    if (st)
        return st;
    s->next_client = side;
    *size = len;
    return DP_OK;
}

/* The first queue pair stays as it is, because a sealed process cannot destroy it. Its later errors are ignored. */
void dp_server_moved(dp_server *s) {
    dp_qp *first = s->qp;
    s->qp = s->other;
    s->other = first;
    s->client = s->next_client;
    s->moved = true;
}

/* ---- requests of other threads ---- */

static void futex(int32_t *word, int op, int32_t value) { syscall(SYS_futex, word, op, value, NULL, NULL, 0); }

/* Wakes the serving thread, wherever it blocks. */
static void wake(dp_server *s) {
    futex(&s->stop, FUTEX_WAKE_PRIVATE, INT32_MAX);
    dp_claim_ring(&s->knock->rung, INT32_MAX);
    dp_cq_wake(s->cq);
    if (__atomic_load_n(&s->unconnected, __ATOMIC_SEQ_CST))
        dp_qp_cancel(s->qp);
}

/* Repeats dp_qp_connect, which gives up after a while, until the client connects. The process that started the server limits the time. */
int dp_server_meet(dp_server *s) {
    for (;;) {
        dp_error err = {0};
        int st = dp_qp_connect(s->qp, s->client.qp_blob, s->client.qp_len, &err);
        if (!st)
            break;
        if (__atomic_load_n(&s->stop, __ATOMIC_SEQ_CST))
            return DP_CANCELLED;
        if (st != DP_CONNECTION)
            return st;
    }
    __atomic_store_n(&s->unconnected, false, __ATOMIC_SEQ_CST);
    return DP_OK;
}

void dp_server_stop(dp_server *s) {
    __atomic_store_n(&s->stop, STOP_NOW, __ATOMIC_SEQ_CST);
    wake(s);
}

void dp_server_watch(dp_server *s, bool on) {
    __atomic_store_n(&s->watched, on && s->dev->provider == DP_PROVIDER_SHM ? s->qp : NULL, __ATOMIC_RELEASE);
}

void dp_server_look(dp_server *s) {
    __atomic_store_n(&s->look, true, __ATOMIC_SEQ_CST);
    dp_cq_wake(s->cq);
}

static void ask(dp_server *s, int32_t what) {
    for (int32_t before = 0;
         !__atomic_compare_exchange_n(&s->stop, &before, what, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); before = 0) {
        if (before == STOP_NOW || before == STOP_EMPTY)
            return; /* the server ends */
        futex(&s->stop, FUTEX_WAIT_PRIVATE, before);
    }
    wake(s);
}

void dp_server_finish(dp_server *s) { ask(s, STOP_EMPTY); }

void dp_server_on_suspended(dp_server *s, void (*suspended)(void *arg), void *arg) {
    s->suspended_fn = suspended;
    s->suspended_arg = arg;
}

void dp_server_suspend(dp_server *s) { ask(s, STOP_SUSPEND); }

bool dp_server_is_late(const dp_server *s) { return s->late; }

/* Connects a suspended late server to its client. */
static int connect_late(dp_server *s, const dp_side *client, dp_error *err) {
    const dp_layout *l = &client->layout;
    if (l->depth != s->layout.depth || l->eager != s->layout.eager || l->bulk != s->layout.bulk)
        return dp_fail(err, DP_BAD_BLOB, 0, "resume: the client has depth %u, eager %u, bulk %llu, but the worker was started for %u, %u, %llu",
                       l->depth, l->eager, (unsigned long long)l->bulk, s->layout.depth, s->layout.eager, (unsigned long long)s->layout.bulk);
    int st = dp_qp_connect(s->qp, client->qp_blob, client->qp_len, err);
    if (!st) {
        s->client = *client;
        s->late = false;
    }
    return st;
}

int dp_server_resume(dp_server *s, const void *client_blob, uint32_t len, dp_error *err) {
    dp_side side;
    int st = dp_side_decode(client_blob, len, DP_ROLE_CLIENT, s->dev->provider, &side, err);
    if (!st && s->late)
        st = connect_late(s, &side, err);
    if (st)
        return st;
    const dp_side *was = &s->client;
    if (side.addr != was->addr || side.rkey != was->rkey || side.qp_len != was->qp_len ||
        memcmp(side.qp_blob, was->qp_blob, was->qp_len) || side.layout.depth != was->layout.depth ||
        side.layout.eager != was->layout.eager || side.layout.bulk != was->layout.bulk)
        return dp_fail(err, DP_BAD_BLOB, 0, "resume: the blob is not that of the client that this worker is connected to");
    s->next_generation = side.generation;
    ask(s, STOP_RESUME);
    return DP_OK;
}

/* Reports whether a server that was asked to end, and has found nothing to do, may end. After STOP_EMPTY it polls for FINISH_NS
 * longer: a request may be on its way, and the last replies have to leave. */
static bool may_end(dp_server *s, int32_t stop) {
    if (stop == STOP_NOW)
        return true;
    int64_t now = dp_now_ns();
    if (!s->finish_at)
        s->finish_at = now + FINISH_NS;
    return now >= s->finish_at;
}

/* Accepts a request of another thread. Returns false if STOP_NOW has replaced it. */
static bool taken(dp_server *s, int32_t what) {
    bool is = __atomic_compare_exchange_n(&s->stop, &what, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    futex(&s->stop, FUTEX_WAKE_PRIVATE, INT32_MAX); /* ask() waits for it */
    return is;
}

static void resume(dp_server *s) {
    memset(s->headers, 0, s->layout.depth * sizeof *s->headers); /* so that no bare request repeats a header of an earlier lease */
    s->client.generation = s->next_generation;
    dp_waiter_begin(&s->waiter); /* the time in between was not spent waiting for a processor */
    dp_waiter_expect(&s->waiter);
}

/* Blocks until a client claims the server, and returns 0, or until another thread sets `stop`, and returns its value. claimed: number of earlier
 * claims. A claim comes before `stop`: its lease may end before this thread runs, and the client counts the generation of that lease too. */
static int32_t sleep_suspended(dp_server *s, uint32_t claimed) {
    for (;;) {
        uint32_t rung = __atomic_load_n(&s->knock->rung, __ATOMIC_ACQUIRE);
        int32_t what = __atomic_load_n(&s->stop, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&s->knock->claimed, __ATOMIC_ACQUIRE) != claimed)
            return 0;
        if (what)
            return what;
        syscall(SYS_futex, &s->knock->rung, FUTEX_WAIT, rung, NULL, NULL, 0);
    }
}

/* Blocks until the server is to resume, and returns false, or until it is to end, and returns true. Reads nothing that the client sends. */
static bool suspend(dp_server *s) {
    int32_t what = STOP_SUSPEND;
    uint32_t claimed = __atomic_load_n(&s->knock->claimed, __ATOMIC_ACQUIRE); /* the executor permits a claim after SUSPENDED */
    dp_cq_promise_hot(s->cq, false);
    dp_qp_forget_shared(s->qp); /* it belongs to the lease that ends */
    drop_parts(s);
    while (what == STOP_SUSPEND) {
        if (taken(s, STOP_SUSPEND) && s->suspended_fn)
            s->suspended_fn(s->suspended_arg);
        what = sleep_suspended(s, claimed);
    }
    if (!what) {
        s->next_generation = dp_generation_after(s->client.generation);
        resume(s);
        if (s->dev->provider == DP_PROVIDER_SHM) /* elsewhere the client was not running when it claimed */
            dp_waiter_expect_now(&s->waiter);
    }
    return what && what != STOP_RESUME;
}

bool dp_server_obey(dp_server *s, int32_t what) {
    if (what == STOP_NOW || what == STOP_EMPTY)
        return may_end(s, what);
    if (what == STOP_SUSPEND && suspend(s))
        return true;
    if (taken(s, STOP_RESUME))
        resume(s);
    return false;
}

/* The broker of virtual queue pairs, and moving from them to private queue pairs. The broker, its clients and the private device are in the
 * case's process, each worker in one of its own. Not on shm and ofi: their regions cannot be registered by two processes. */
#include <stddef.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dp_broker.h"
#include "dp_channel_impl.h"
#include "ends.h"
#include "served.h"

#define ON (T_TCP | T_VERBS)
#define WORKERS_MAX 8

/* Counts calls, and returns the count and its payload: a call that is lost, repeated or reordered shows in the count. */
static uint32_t f_count(void *args, uint32_t n, void *res) {
    static uint64_t calls;
    calls++;
    memcpy(res, &calls, sizeof calls);
    memcpy((uint8_t *)res + sizeof calls, args, n);
    return n + sizeof calls;
}

/* Ends its server. On verbs, a server notices the end of its client late. */
static __thread dp_server *this_server;
static uint32_t f_finish(void *args, uint32_t n, void *res) {
    (void)args, (void)n, (void)res;
    dp_server_finish(this_server);
    return 0;
}

/* Says that it runs, and returns when it may. The words are shared by all processes of a case. */
typedef struct gate {
    uint32_t runs, open;
} gate;
static gate *the_gate;
static uint32_t f_gate(void *args, uint32_t n, void *res) {
    (void)args, (void)n, (void)res;
    __atomic_store_n(&the_gate->runs, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&the_gate->open, __ATOMIC_ACQUIRE))
        dp_cpu_pause();
    return 0;
}
static const dp_function functions[] = {f_count, f_finish, f_gate};

static void worker_main(int sock, void *arg) {
    dp_error err;
    dp_dev *dev;
    dp_server *s;
    dp_dev_options o = quick_options();
    uint32_t len;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    (void)arg;
    o.active_side_only = 1;
    t_name("worker");
    while (recv(sock, &len, sizeof len, MSG_WAITALL) == sizeof len && len) {
        t_recv(sock, blob, len);
        CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &dev, &err), err);
        CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &s, &err), err);
        dp_server_set_functions(s, functions, 3);
        this_server = s;
        len = sizeof blob;
        CHECK_OK_ERR(dp_server_blob(s, blob, &len, &err), err);
        t_send(sock, &len, sizeof len);
        t_send(sock, blob, len);
        int st = dp_server_run(s);
        CHECKF(st == DP_OK || dp_status_class(st) == 5, "the server ended with %s", dp_status_text(st));
        dp_server_destroy(s);
        dp_dev_close(dev);
    }
}

/* A broker, and the device and virtual device of a client. */
typedef struct house {
    dp_dev *dev, *own, *virtual;
    dp_broker *broker;
    t_peer workers[WORKERS_MAX];
    int n;
} house;

static void house_open(house *h, int workers) {
    dp_error err;
    dp_dev_options o = quick_options();
    *h = (house){.n = workers};
    for (int i = 0; i < workers; i++)
        t_peer_start(&h->workers[i], true, worker_main, NULL);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h->dev, &err), err);
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h->own, &err), err);
    CHECK_OK_ERR(dp_vqp_open(h->dev->provider, &h->virtual, &err), err);
    CHECK_OK_ERR(dp_broker_start(h->dev, &h->broker, &err), err);
}

static void house_close(house *h) {
    uint32_t none = 0;
    dp_broker_stop(h->broker);
    dp_dev_close(h->virtual);
    dp_dev_close(h->own);
    dp_dev_close(h->dev);
    for (int i = 0; i < h->n; i++) {
        if (t_is_verbs()) { /* its server may run for ever, because it has had no message of its client */
            t_peer_kill(&h->workers[i]);
            continue;
        }
        t_send(h->workers[i].sock, &none, sizeof none);
        t_peer_join(&h->workers[i]);
    }
}

/* A brokered channel: its description and descriptors. */
typedef struct packed {
    dp_packed_channel ch;
    int fds[DP_PACKED_FDS];
} packed;

static void broker_channel(house *h, int worker, uint32_t depth, packed *p) {
    dp_error err;
    dp_brokered *c;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int sock = h->workers[worker].sock;
    CHECK_OK_ERR(dp_brokered_create(h->broker, &(dp_channel_config){depth, 4096, 65536}, &c, &err), err);
    CHECK_OK_ERR(dp_brokered_offer(c, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_brokered_connect(c, blob, len, &err), err);
    CHECK_OK_ERR(dp_brokered_serve(&c, &p->ch, p->fds, &err), err);
    CHECK(!c);
}

typedef struct client {
    dp_endpoint *ep;
    dp_channel *ch;
    uint64_t calls; /* that the worker has counted */
    uint32_t seed;
} client;

static void client_open(house *h, packed *p, client *c, dp_wait_mode mode) {
    dp_error err;
    int page = dup(p->fds[0]);
    *c = (client){.seed = 1};
    CHECK_OK_ERR(dp_endpoint_unpack(h->virtual, 1, p->ch.cfg.depth, mode, &page, &c->ep, &err), err);
    CHECK_EQ(page, -1);
    CHECK_OK_ERR(dp_channel_unpack(c->ep, &p->ch, p->fds, &c->ch, &err), err);
    CHECK_EQ(p->fds[0], -1);
    CHECK_EQ(p->fds[1], -1);
}

static void client_close(client *c) {
    uint32_t size;
    dp_started started;
    if (t_is_verbs() && !dp_channel_status(c->ch))
        CHECK_OK(dp_channel_call(c->ch, 1, NULL, 0, NULL, NULL, 0, &size, 0, &started));
    dp_channel_destroy(c->ch);
    dp_endpoint_destroy(c->ep);
}

/* Finishes a call, and checks that it was executed once and in turn. */
static void finish(client *c, uint32_t at, uint32_t n, uint32_t seed) {
    uint8_t out[70000];
    uint64_t count;
    uint32_t size = 0;
    dp_started started;
    CHECK_OK(dp_channel_wait(c->ch, at, 0));
    CHECK_OK(dp_channel_finish(c->ch, at, out, &size, &started));
    CHECK_EQ(size, n + sizeof count);
    memcpy(&count, out, sizeof count);
    CHECK_EQ(count, ++c->calls);
    CHECK_PATTERN(out + sizeof count, n, seed);
}

static uint32_t submit(client *c, uint32_t n, uint32_t seed) {
    uint8_t in[70000];
    uint32_t at;
    fill_pattern(in, n, seed);
    CHECK_OK(dp_channel_submit(c->ch, 0, in, n, NULL, n + sizeof(uint64_t), &at));
    return at;
}

static void call(client *c, uint32_t n) {
    uint32_t seed = c->seed++;
    finish(c, submit(c, n, seed), n, seed);
}

/* `window` calls in flight, `total` in all. */
static void stream(client *c, uint32_t window, uint32_t total) {
    uint32_t slots[64], first = c->seed, sent = 0;
    for (uint32_t done = 0; done < total; done++) {
        for (; sent < total && sent - done < window; sent++)
            slots[sent % window] = submit(c, (sent * 37) % 600, first + sent);
        finish(c, slots[done % window], (done * 37) % 600, first + done);
    }
    c->seed += total;
}

/* Asks a worker, and switches to the new queue pair. */
static void move(dp_promotion *p, dp_channel *ch) {
    dp_error err;
    uint32_t at;
    CHECK_OK_ERR(dp_promotion_ask(p, ch, &err), err);
    CHECK_STATUS(dp_channel_submit(ch, 0, NULL, 0, NULL, 64, &at), DP_PEER_GONE); /* it takes no calls until it has moved */
    CHECK_OK(dp_promotion_await(p, ch, 0));
    CHECK_OK_ERR(dp_promotion_meet(p, ch, &err), err);
    dp_promotion_switch(p, ch);
    CHECK(!dp_channel_brokered(ch));
}

static void promote(house *h, client *c) {
    dp_error err;
    dp_promotion *p;
    CHECK(dp_endpoint_brokered(c->ep));
    CHECK_OK_ERR(dp_promotion_prepare(c->ep, h->own, &p, &err), err);
    CHECK(dp_promotion_possible(p, c->ch));
    move(p, c->ch);
    CHECK(dp_promotion_over(p));
    CHECK(dp_promotion_complete(p));
    dp_promotion_free(p);
    CHECK(!dp_endpoint_brokered(c->ep));
}

static void await_channels(house *h, uint64_t want) {
    dp_broker_stats st;
    int64_t until = dp_now_ns() + (int64_t)(5e9 * t_time_scale());
    do
        dp_broker_get_stats(h->broker, &st);
    while (st.channels != want && dp_now_ns() < until);
    CHECK_EQ(st.channels, want);
}

static void healthy(house *h) {
    dp_broker_stats st;
    dp_broker_get_stats(h->broker, &st);
    CHECK_EQ(st.failed, 0);
    CHECK_EQ(st.refused, 0);
}

T_CASE(broker_calls, "broker/calls", .providers = ON) {
    static const dp_wait_mode modes[] = {DP_WAIT_ADAPTIVE, DP_WAIT_HOT, DP_WAIT_WARM};
    static const uint32_t sizes[] = {0, 1, 8, 200, 256, 257, 1000, 4000, 5000, 60000};
    house h;
    house_open(&h, 3);
    for (int m = 0; m < 3; m++) {
        packed p;
        client c;
        broker_channel(&h, m, 8, &p);
        client_open(&h, &p, &c, modes[m]);
        for (uint32_t round = 0; round < 3; round++)
            for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
                call(&c, sizes[i]);
        stream(&c, 8, 200);
        healthy(&h);
        client_close(&c);
        await_channels(&h, 0);
    }
    house_close(&h);
}

/* The worker's calls are counted through the move, with calls before, during and after it. */
T_CASE(broker_promotions, "broker/promotions", .providers = ON, .seconds = 60, .verbs_seconds = 90) {
    long n = t_is_tcp() ? 1000 : 20; /* --repeat 10: 10,000 */
    uint64_t counted = 0;
    house h;
    house_open(&h, 1);
    for (long i = 0; i < n; i++) {
        packed p;
        client c;
        uint32_t window = 1 + (uint32_t)(i % 8);
        t_note("promotion %ld", i);
        broker_channel(&h, 0, 8, &p);
        client_open(&h, &p, &c, i % 2 ? DP_WAIT_ADAPTIVE : DP_WAIT_WARM);
        c.calls = counted;
        stream(&c, window, 5 + (uint32_t)(i % 7));
        promote(&h, &c);
        stream(&c, window, 5 + (uint32_t)(i % 5));
        counted = c.calls;
        client_close(&c);
        healthy(&h);
    }
    await_channels(&h, 0);
    house_close(&h);
}

/* ---- hostile and failing clients ---- */

/* A client that writes the ring by hand. */
typedef struct raw {
    packed p;
    dp_vqp_packed d;
    dp_vqp_layout l;
    uint8_t *at;
    dp_vqp_page *page;
    uint32_t posted, taken;
} raw;

static void raw_open(house *h, int worker, uint32_t depth, raw *r) {
    memset(r, 0, sizeof *r);
    broker_channel(h, worker, depth, &r->p);
    memcpy(&r->d, r->p.ch.qp.bytes, sizeof r->d);
    r->l = dp_vqp_layout_of(r->d.max_send, r->d.max_recv, r->d.region);
    r->at = mmap(NULL, r->l.size, PROT_READ | PROT_WRITE, MAP_SHARED, r->p.fds[0], 0);
    CHECK(r->at != MAP_FAILED);
    r->page = (dp_vqp_page *)(void *)r->at;
}

static void raw_close(raw *r) {
    munmap(r->at, r->l.size);
    close(r->p.fds[0]);
    close(r->p.fds[1]);
}

static void raw_ring(const raw *r) { send(r->p.fds[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL); }

static void raw_put(raw *r, const dp_vqp_request *q) {
    ((dp_vqp_request *)(void *)(r->at + r->l.requests_at))[r->posted % r->l.n_requests] = *q;
    __atomic_store_n(&r->page->posted, ++r->posted, __ATOMIC_RELEASE);
    raw_ring(r);
}

static dp_vqp_completion raw_take(raw *r) {
    int64_t until = dp_now_ns() + (int64_t)(5e9 * t_time_scale());
    while (__atomic_load_n(&r->page->done, __ATOMIC_ACQUIRE) == r->taken)
        CHECKF(dp_now_ns() < until, "no completion");
    dp_vqp_completion c = ((dp_vqp_completion *)(void *)(r->at + r->l.completions_at))[r->taken % r->l.n_completions];
    __atomic_store_n(&r->page->taken, ++r->taken, __ATOMIC_RELEASE);
    return c;
}

/* A good request: a signalled write of 8 bytes. */
static dp_vqp_request good(const raw *r) {
    return (dp_vqp_request){.op = DP_VQP_WRITE, .flags = DP_SIGNALED, .n = 1, .raddr = r->p.ch.addr, .rkey = r->p.ch.rkey, .wr_id = 0x1234567800000000ull + r->posted,
                            .piece = {{.len = 8}}};
}

static void raw_expect(raw *r, const dp_vqp_request *q, int status, dp_vqp_reason reason) {
    raw_put(r, q);
    dp_vqp_completion c = raw_take(r);
    CHECK_STATUS(c.status, status);
    CHECKF(c.reason == reason, "refused because %s, wanted %s", dp_vqp_reason_text(c.reason), dp_vqp_reason_text(reason));
    CHECK_EQ(c.wr_id, q->wr_id);
}

#define REFUSED(change, reason)                                                                                                              \
    do {                                                                                                                                     \
        dp_vqp_request q = good(&r);                                                                                                         \
        t_note("%s", #change);                                                                                                               \
        change;                                                                                                                              \
        raw_expect(&r, &q, DP_INVALID, reason);                                                                                              \
        n++;                                                                                                                                 \
    } while (0)

/* Every field is malformed in turn, while another client makes calls all the time. */
T_CASE(broker_malformed, "broker/malformed", .providers = ON, .seconds = 30) {
    house h;
    packed p;
    client c;
    raw r;
    uint32_t n = 0;
    house_open(&h, 2);
    raw_open(&h, 0, 4, &r);
    broker_channel(&h, 1, 4, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    dp_vqp_request fine = good(&r);
    raw_expect(&r, &fine, DP_OK, DP_VQP_GOOD);
    uint64_t size = r.d.region, behind = r.p.ch.addr + size;
    for (int round = 0; round < 20; round++) {
        REFUSED(q.op = 0, DP_VQP_BAD_OPERATION);
        REFUSED(q.op = 3, DP_VQP_BAD_OPERATION);
        REFUSED(q.op = 4, DP_VQP_BAD_OPERATION);
        REFUSED(q.op = UINT32_MAX, DP_VQP_BAD_OPERATION);
        REFUSED(q.flags = 4, DP_VQP_BAD_FLAGS);
        REFUSED(q.flags = 0x80000001u, DP_VQP_BAD_FLAGS);
        REFUSED(q.reserved[1] = 1, DP_VQP_BAD_FLAGS);
        REFUSED(q.n = 3, DP_VQP_BAD_PIECES);
        REFUSED(q.n = UINT32_MAX, DP_VQP_BAD_PIECES);
        REFUSED(q.piece[0].where = 3, DP_VQP_BAD_PIECES);
        REFUSED((q.n = 2, q.piece[1].where = UINT32_MAX), DP_VQP_BAD_PIECES);
        REFUSED(q.piece[0].len = DP_VQP_INLINE + 1, DP_VQP_BAD_LOCAL);
        REFUSED(q.piece[0].len = UINT32_MAX, DP_VQP_BAD_LOCAL);
        REFUSED(q.piece[0].at = DP_VQP_INLINE - 7, DP_VQP_BAD_LOCAL);
        REFUSED(q.piece[0].at = UINT64_MAX, DP_VQP_BAD_LOCAL);
        REFUSED((q.piece[0].where = DP_VQP_STAGING, q.piece[0].at = size - 7), DP_VQP_BAD_LOCAL);
        REFUSED((q.piece[0].where = DP_VQP_RESULTS, q.piece[0].at = size + 1), DP_VQP_BAD_LOCAL);
        REFUSED((q.piece[0].where = DP_VQP_RESULTS, q.piece[0].at = UINT64_MAX - 3), DP_VQP_BAD_LOCAL);
        REFUSED((q.n = 2, q.piece[1] = (dp_vqp_piece){size, 1, DP_VQP_STAGING}), DP_VQP_BAD_LOCAL);
        REFUSED(q.rkey ^= 1, DP_VQP_BAD_KEY);
        REFUSED(q.rkey = 0x7fffffff, DP_VQP_BAD_KEY);
        REFUSED(q.raddr = r.p.ch.addr - 1, DP_VQP_BAD_REMOTE);
        REFUSED(q.raddr = 0, DP_VQP_BAD_REMOTE);
        REFUSED(q.raddr = behind - 7, DP_VQP_BAD_REMOTE);
        REFUSED(q.raddr = behind + 1, DP_VQP_BAD_REMOTE);
        REFUSED(q.raddr = UINT64_MAX, DP_VQP_BAD_REMOTE);
        REFUSED((q.n = 0, q.raddr = behind + 1), DP_VQP_BAD_REMOTE);
        call(&c, 100);
        fine = good(&r);
        raw_expect(&r, &fine, DP_OK, DP_VQP_GOOD);
    }
    /* More requests than the ring holds: they are dropped, and the next one is served. */
    r.posted += 1000;
    __atomic_store_n(&r.page->posted, r.posted, __ATOMIC_RELEASE);
    raw_ring(&r);
    CHECK_EQ(raw_take(&r).reason, DP_VQP_BAD_INDEX);
    fine = good(&r);
    raw_expect(&r, &fine, DP_OK, DP_VQP_GOOD);
    /* Receives without end. */
    __atomic_store_n(&r.page->receives, 0xfffffff0u, __ATOMIC_RELEASE);
    fine = good(&r);
    raw_expect(&r, &fine, DP_OK, DP_VQP_GOOD);
    stream(&c, 4, 100);
    dp_broker_stats st;
    dp_broker_get_stats(h.broker, &st);
    CHECK_EQ(st.failed, 0);
    CHECK_EQ(st.refused, n + 1);
    raw_close(&r);
    client_close(&c);
    await_channels(&h, 0);
    house_close(&h);
}

/* 5,000 signalled posts of a client that takes no completion until the end. Another client continues to make calls. */
T_CASE(broker_unpolled, "broker/posts-without-polling", .providers = ON, .seconds = 30) {
    enum { POSTS = 5000 };
    house h;
    packed p;
    client c;
    raw r;
    uint32_t done = 0;
    house_open(&h, 2);
    raw_open(&h, 0, 16, &r);
    broker_channel(&h, 1, 8, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    while (r.posted < POSTS) {
        while (r.posted < POSTS && r.posted - __atomic_load_n(&r.page->served, __ATOMIC_ACQUIRE) < r.l.n_requests) {
            dp_vqp_request q = good(&r);
            q.wr_id = r.posted;
            raw_put(&r, &q);
        }
        stream(&c, 8, 16); /* the ring of the first client is full, and nobody takes its completions */
        if (__atomic_load_n(&r.page->done, __ATOMIC_ACQUIRE) - r.taken == r.l.n_completions) /* all that may wait */
            for (uint32_t n = r.l.n_completions; n; n--)
                CHECK_EQ(raw_take(&r).wr_id, done++);
    }
    for (; done < POSTS; done++) {
        raw_ring(&r);
        CHECK_EQ(raw_take(&r).wr_id, done);
    }
    healthy(&h);
    raw_close(&r);
    client_close(&c);
    await_channels(&h, 0);
    house_close(&h);
}

typedef struct job {
    house *h;
    packed p;
    int i;
} job;

static void *many_run(void *arg) {
    job *j = arg;
    client c;
    t_name("client");
    client_open(j->h, &j->p, &c, j->i % 2 ? DP_WAIT_WARM : DP_WAIT_ADAPTIVE);
    c.seed = (uint32_t)j->i * 100000 + 1;
    stream(&c, 1 + (uint32_t)j->i, (uint32_t)t_pick(60000, 300));
    client_close(&c);
    return NULL;
}

/* Results of other clients have other patterns and counts. */
T_CASE(broker_many, "broker/many-clients", .providers = ON, .seconds = 40, .verbs_seconds = 60) {
    house h;
    job jobs[6];
    pthread_t threads[6];
    house_open(&h, 6);
    for (int i = 0; i < 6; i++) {
        jobs[i] = (job){.h = &h, .i = i};
        broker_channel(&h, i, 8, &jobs[i].p);
    }
    for (int i = 0; i < 6; i++)
        CHECK(!pthread_create(&threads[i], NULL, many_run, &jobs[i]));
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    healthy(&h);
    await_channels(&h, 0);
    house_close(&h);
}

typedef struct flood {
    raw r;
    bool stop;
} flood;

/* Sends malformed requests to the broker until `stop` is set. */
static void *flood_run(void *arg) {
    flood *f = arg;
    dp_vqp_request bad = {.op = UINT32_MAX};
    dp_vqp_request *ring = (dp_vqp_request *)(void *)(f->r.at + f->r.l.requests_at);
    t_name("flood");
    for (uint32_t i = 0; i < f->r.l.n_requests; i++)
        ring[i] = bad;
    raw_ring(&f->r);
    while (!__atomic_load_n(&f->stop, __ATOMIC_RELAXED)) {
        __atomic_store_n(&f->r.page->taken, __atomic_load_n(&f->r.page->done, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
        __atomic_store_n(&f->r.page->posted, __atomic_load_n(&f->r.page->served, __ATOMIC_ACQUIRE) + f->r.l.n_requests, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Clients that are always busy: another client comes, calls and ends. */
T_CASE(broker_flood, "broker/busy-clients", .providers = ON, .seconds = 30) {
    enum { FLOODS = 4 };
    house h;
    flood floods[FLOODS] = {0};
    pthread_t threads[FLOODS];
    house_open(&h, FLOODS + 1);
    for (int i = 0; i < FLOODS; i++) {
        raw_open(&h, i, 16, &floods[i].r);
        CHECK(!pthread_create(&threads[i], NULL, flood_run, &floods[i]));
    }
    for (int i = 0; i < 20; i++) {
        packed p;
        client c;
        broker_channel(&h, FLOODS, 8, &p);
        client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        c.calls = (uint64_t)i * 20;
        stream(&c, 4, 20);
        client_close(&c);
        await_channels(&h, FLOODS);
    }
    for (int i = 0; i < FLOODS; i++) {
        __atomic_store_n(&floods[i].stop, true, __ATOMIC_RELAXED);
        pthread_join(threads[i], NULL);
        raw_close(&floods[i].r);
    }
    await_channels(&h, 0);
    house_close(&h);
}

/* ---- ends ---- */

static int failed_call(client *c) {
    uint8_t in[64] = {0}, out[128];
    uint32_t size;
    dp_started started;
    return dp_channel_call(c->ch, 0, in, sizeof in, NULL, out, sizeof out, &size, dp_now_ns() + (int64_t)(20e9 * t_time_scale()), &started);
}

/* Connects a failed channel to another worker, on a private queue pair. */
static void replace_worker(house *h, client *c, int worker) {
    dp_error err;
    if (dp_channel_brokered(c->ch)) {
        dp_promotion *p;
        CHECK_REFUSED(dp_channel_reset(c->ch, &err), DP_UNSUPPORTED, err);
        CHECK_OK_ERR(dp_promotion_prepare(c->ep, h->own, &p, &err), err);
        dp_promotion_switch(p, c->ch);
        dp_promotion_free(p);
        CHECK(!dp_channel_brokered(c->ch));
    }
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    int sock = h->workers[worker].sock;
    CHECK_OK_ERR(dp_channel_reset(c->ch, &err), err);
    CHECK_OK_ERR(dp_channel_offer(c->ch, blob, &len, &err), err);
    t_send(sock, &len, sizeof len);
    t_send(sock, blob, len);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, blob, len);
    CHECK_OK_ERR(dp_channel_connect(c->ch, blob, len, &err), err);
    c->calls = 0;
}

/* The worker of a brokered channel is killed: the call fails, and the channel is connected to a new worker on a private queue pair. The broker
 * has ended the old one. */
T_CASE(broker_worker_killed, "broker/worker-killed", .providers = ON, .seconds = 40, .verbs_seconds = 60) {
    house h;
    packed p;
    client c;
    house_open(&h, 2);
    broker_channel(&h, 0, 4, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    call(&c, 10);
    t_peer_kill(&h.workers[0]);
    CHECK_EQ(dp_status_class(failed_call(&c)), 5);
    h.workers[0] = h.workers[1];
    h.n = 1;
    replace_worker(&h, &c, 0);
    stream(&c, 4, 50);
    await_channels(&h, 0);
    client_close(&c);
    house_close(&h);
}

/* Opens one endpoint with two channels. */
static void pair_open(house *h, client c[2]) {
    dp_error err;
    dp_endpoint *ep = NULL;
    for (int i = 0; i < 2; i++) {
        packed p;
        broker_channel(h, i, 4, &p);
        int page = dup(p.fds[0]);
        if (!ep)
            CHECK_OK_ERR(dp_endpoint_unpack(h->virtual, 2, 4, DP_WAIT_ADAPTIVE, &page, &ep, &err), err);
        if (page >= 0)
            close(page);
        c[i] = (client){.ep = ep, .seed = 1};
        CHECK_OK_ERR(dp_channel_unpack(ep, &p.ch, p.fds, &c[i].ch, &err), err);
    }
}

static void pair_close(client c[2]) {
    uint32_t size;
    dp_started started;
    for (int i = 0; i < 2; i++) {
        if (t_is_verbs())
            CHECK_OK(dp_channel_call(c[i].ch, 1, NULL, 0, NULL, NULL, 0, &size, 0, &started));
        dp_channel_destroy(c[i].ch);
    }
    dp_endpoint_destroy(c[0].ep);
}

/* One of two workers is killed while both have calls in flight. The other one's call ends as usual, through the broker, while the dead one's
 * channel has a private queue pair already. Then the other one moves with an own preparation. */
T_CASE(broker_one_killed, "broker/one-of-two-killed", .providers = ON, .seconds = 40, .verbs_seconds = 60) {
    house h;
    client c[2];
    dp_promotion *p;
    dp_error err;
    house_open(&h, 3);
    pair_open(&h, c);
    call(&c[0], 10);
    t_peer_kill(&h.workers[0]);
    uint32_t other = submit(&c[1], 20, 5);
    CHECK_EQ(dp_status_class(failed_call(&c[0])), 5);
    replace_worker(&h, &c[0], 2);
    call(&c[0], 10);
    CHECK(dp_channel_brokered(c[1].ch) && dp_endpoint_brokered(c[1].ep));
    finish(&c[1], other, 20, 5);
    for (int i = 0; i < 10; i++) { /* waits on both kinds of queue */
        uint32_t at = submit(&c[i % 2], 30, (uint32_t)i);
        while (!dp_channel_test(c[i % 2].ch, at))
            CHECK_OK(dp_endpoint_wait_any(c[0].ep, dp_now_ns() + 20000000000ll));
        finish(&c[i % 2], at, 30, (uint32_t)i);
    }
    CHECK_OK_ERR(dp_promotion_prepare(c[0].ep, h.own, &p, &err), err);
    CHECK(!dp_promotion_possible(p, c[0].ch));
    CHECK(!dp_promotion_complete(p));
    move(p, c[1].ch);
    CHECK(dp_promotion_complete(p));
    dp_promotion_free(p);
    CHECK(!dp_endpoint_brokered(c[0].ep));
    stream(&c[0], 4, 50);
    stream(&c[1], 4, 50);
    await_channels(&h, 0);
    pair_close(c);
    h.workers[0] = h.workers[2];
    h.n = 2;
    house_close(&h);
}

/* The broker ends: the client's call fails at once. Its channel moves to a private queue pair, and a new worker connects to that. */
T_CASE(broker_ends, "broker/broker-ends", .providers = ON, .seconds = 40, .verbs_seconds = 60) {
    house h;
    packed p;
    client c;
    house_open(&h, 2);
    broker_channel(&h, 0, 4, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    call(&c, 10);
    dp_broker_stop(h.broker);
    h.broker = NULL;
    CHECK_STATUS(failed_call(&c), DP_PEER_GONE);
    replace_worker(&h, &c, 1);
    stream(&c, 4, 50);
    client_close(&c);
    house_close(&h);
}

/* ---- a stopped broker ---- */

/* The broker in a process of its own, which can be stopped. It makes a channel to the worker for each byte that it receives. */
static void agent_main(int sock, void *arg) {
    house h = *(house *)arg; /* its workers */
    dp_error err;
    dp_dev_options o = quick_options();
    char byte;
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h.dev, &err), err);
    CHECK_OK_ERR(dp_broker_start(h.dev, &h.broker, &err), err);
    while (recv(sock, &byte, 1, MSG_WAITALL) == 1 && byte) {
        packed p;
        char control[CMSG_SPACE(DP_VQP_FDS * sizeof(int))] = {0};
        struct iovec v = {&p.ch, sizeof p.ch};
        struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        broker_channel(&h, 0, 8, &p);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){CMSG_LEN(DP_VQP_FDS * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(c), p.fds, DP_VQP_FDS * sizeof(int));
        CHECK_EQ(sendmsg(sock, &m, 0), sizeof p.ch);
        for (int i = 0; i < DP_VQP_FDS; i++)
            close(p.fds[i]);
    }
    dp_broker_stop(h.broker);
    dp_dev_close(h.dev);
}

static void agent_channel(t_peer *agent, packed *p) {
    char control[CMSG_SPACE(DP_VQP_FDS * sizeof(int))], byte = 1;
    struct iovec v = {&p->ch, sizeof p->ch};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    t_send(agent->sock, &byte, 1);
    CHECK_EQ(recvmsg(agent->sock, &m, MSG_WAITALL | MSG_CMSG_CLOEXEC), sizeof p->ch);
    CHECK(CMSG_FIRSTHDR(&m) && CMSG_FIRSTHDR(&m)->cmsg_len == CMSG_LEN(DP_VQP_FDS * sizeof(int)));
    memcpy(p->fds, CMSG_DATA(CMSG_FIRSTHDR(&m)), DP_VQP_FDS * sizeof(int));
}

static void stop(t_peer *agent) {
    int status;
    CHECK(!kill(agent->pid, SIGSTOP));
    CHECK(waitpid(agent->pid, &status, WUNTRACED) == agent->pid && WIFSTOPPED(status));
}

static void go_on(t_peer *agent) { CHECK(!kill(agent->pid, SIGCONT)); }

/* Waits for a call that the broker does not finish. It has no deadline. */
static void expect_given_up(client *c, uint32_t at, dp_started want) {
    uint32_t size;
    dp_started started;
    CHECK_STATUS(dp_channel_wait(c->ch, at, 0), DP_OK);
    CHECK_STATUS(dp_channel_finish(c->ch, at, NULL, &size, &started), DP_PEER_GONE);
    CHECK_EQ(started, want);
    CHECK(dp_channel_given_up(c->ch));
}

/* Waits until a broker that goes on has ended the channel, and the worker's server with it. Then the worker serves the client directly, and has
 * executed `executed` calls before. */
static void expect_count(house *h, client *c, uint64_t executed) {
    replace_worker(h, c, 0);
    c->calls = executed;
    stream(c, 4, 20);
}

/* The agent is stopped while a client calls. The call that the agent has not claimed was not started and is never executed, also if the agent goes
 * on. The call whose reply the agent does not deliver may have been executed. Both end without a deadline. A short stop ends no call. */
T_CASE(broker_stopped, "broker/agent-stopped", .providers = ON, .seconds = 40, .verbs_seconds = 60) {
    static const dp_wait_mode modes[] = {DP_WAIT_HOT, DP_WAIT_WARM};
    dp_error err;
    dp_dev_options o = quick_options();
    the_gate = mmap(NULL, sizeof *the_gate, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(the_gate != MAP_FAILED);
    for (int claimed = 0; claimed < 2; claimed++) {
        house h = {.n = 1};
        t_peer agent;
        packed p;
        client c;
        *the_gate = (gate){0};
        t_peer_start(&h.workers[0], true, worker_main, NULL);
        house of_agent = h;
        CHECK_GE(of_agent.workers[0].sock = dup(h.workers[0].sock), 0); /* a new peer process closes the sockets of the others */
        t_peer_start(&agent, true, agent_main, &of_agent);
        close(of_agent.workers[0].sock);
        CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &h.own, &err), err);
        agent_channel(&agent, &p);
        dp_provider_id of = !strcmp(t_provider(), "tcp") ? DP_PROVIDER_TCP : DP_PROVIDER_VERBS;
        CHECK_OK_ERR(dp_vqp_open(of, &h.virtual, &err), err);
        client_open(&h, &p, &c, modes[claimed]);
        stream(&c, 4, 20);
        for (int i = 0; i < 5; i++) { /* short stops */
            stop(&agent);
            uint32_t at = submit(&c, 100, (uint32_t)i);
            go_on(&agent);
            finish(&c, at, 100, (uint32_t)i);
        }
        uint64_t executed = c.calls;
        uint32_t at[3];
        if (claimed) {
            CHECK_OK(dp_channel_submit(c.ch, 2, NULL, 0, NULL, 0, &at[0]));
            while (!__atomic_load_n(&the_gate->runs, __ATOMIC_ACQUIRE))
                dp_cpu_pause();
            stop(&agent);
            __atomic_store_n(&the_gate->open, 1, __ATOMIC_RELEASE);
            at[1] = submit(&c, 30, 1);
        } else {
            stop(&agent);
            at[0] = submit(&c, 5000, 1); /* two requests: its bytes, and its header */
            at[1] = submit(&c, 30, 1);
        }
        expect_given_up(&c, at[0], claimed ? DP_MAYBE_EXECUTED : DP_NOT_STARTED);
        expect_given_up(&c, at[1], DP_NOT_STARTED);
        CHECK_STATUS(dp_channel_submit(c.ch, 0, NULL, 0, NULL, 64, &at[2]), DP_PEER_GONE);
        go_on(&agent);
        expect_count(&h, &c, executed);
        client_close(&c);
        char none = 0;
        t_send(agent.sock, &none, 1);
        t_peer_join(&agent);
        dp_dev_close(h.virtual);
        dp_dev_close(h.own);
        uint32_t last = 0;
        if (t_is_verbs()) {
            t_peer_kill(&h.workers[0]);
        } else {
            t_send(h.workers[0].sock, &last, sizeof last);
            t_peer_join(&h.workers[0]);
        }
    }
    munmap(the_gate, sizeof *the_gate);
}

/* The client learns of the worker's death before or after the worker's answer. The channel stays failed on the new queue pair, and the worker is replaced. */
T_CASE(broker_died_moving, "broker/died-while-moving", .providers = ON, .seconds = 20) {
    for (int answered = 0; answered < 2; answered++) {
        house h;
        packed p;
        client c;
        dp_promotion *m;
        dp_error err;
        house_open(&h, 2);
        broker_channel(&h, 0, 4, &p);
        client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        call(&c, 10);
        CHECK_OK_ERR(dp_promotion_prepare(c.ep, h.own, &m, &err), err);
        CHECK_OK_ERR(dp_promotion_ask(m, c.ch, &err), err);
        if (answered) {
            CHECK_OK(dp_promotion_await(m, c.ch, 0));
            CHECK_OK_ERR(dp_promotion_meet(m, c.ch, &err), err);
        }
        dp_channel_fail(c.ch, DP_WORKER_DIED);
        dp_promotion_switch(m, c.ch);
        dp_promotion_free(m);
        CHECK_STATUS(dp_channel_status(c.ch), DP_WORKER_DIED);
        CHECK_STATUS(failed_call(&c), DP_WORKER_DIED);
        replace_worker(&h, &c, 1);
        stream(&c, 4, 50);
        client_close(&c);
        house_close(&h);
    }
}

/* With a call in flight the channel does not move, and goes on as it is. The prepared queue pairs are not used. */
T_CASE(broker_busy, "broker/move-busy", .providers = ON, .seconds = 20) {
    house h;
    packed p;
    client c;
    dp_promotion *m;
    dp_error err;
    house_open(&h, 1);
    broker_channel(&h, 0, 4, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    call(&c, 10);
    CHECK_OK_ERR(dp_promotion_prepare(c.ep, h.own, &m, &err), err);
    uint32_t at = submit(&c, 5, 5);
    CHECK(!dp_promotion_possible(m, c.ch));
    CHECK_REFUSED(dp_promotion_ask(m, c.ch, &err), DP_BUSY, err);
    finish(&c, at, 5, 5);
    dp_promotion_free(m);
    stream(&c, 4, 20);
    promote(&h, &c);
    stream(&c, 4, 20);
    client_close(&c);
    house_close(&h);
}

/* The worker of a client that is not brokered has no second queue pair. It refuses to move, and its channel goes on as it is. */
T_CASE(broker_refused, "broker/move-refused", .providers = ON, .seconds = 20) {
    served s;
    uint8_t blob[DP_CHANNEL_BLOB_MAX] = {0}, out[DP_CHANNEL_BLOB_MAX];
    uint32_t at, size = 0;
    dp_started started;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 4096, 0);
    served_echo(&s, 100, 1);
    CHECK_OK(dp_channel_submit_move(s.ch, blob, sizeof blob, &at));
    CHECK_OK(dp_channel_wait(s.ch, at, 0));
    CHECK_STATUS(dp_channel_finish(s.ch, at, out, &size, &started), DP_BAD_REQUEST);
    for (uint32_t i = 0; i < 20; i++)
        served_echo(&s, 100 + i, i);
    served_close_client(&s);
    t_peer_kill(&s.peer);
}

/* A client hands over its channel to another one, which goes on, and moves. */
T_CASE(broker_handed, "broker/handed-over", .providers = ON, .seconds = 20) {
    house h;
    packed p, again = {0};
    client c, d;
    dp_error err;
    house_open(&h, 1);
    broker_channel(&h, 0, 4, &p);
    client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    stream(&c, 4, 30);
    CHECK_OK_ERR(dp_channel_pack(c.ch, &again.ch, again.fds, &err), err);
    for (int i = 0; i < DP_VQP_FDS; i++)
        CHECK_GE(again.fds[i] = dup(again.fds[i]), 0);
    dp_channel_destroy(c.ch);
    dp_endpoint_destroy(c.ep);
    client_open(&h, &again, &d, DP_WAIT_WARM);
    d.calls = c.calls;
    stream(&d, 4, 30);
    promote(&h, &d);
    stream(&d, 4, 30);
    client_close(&d);
    await_channels(&h, 0);
    healthy(&h);
    house_close(&h);
}

/* Descriptions with wrong bytes and descriptors. */
T_CASE(broker_description, "broker/description", .providers = ON) {
    house h;
    packed p;
    dp_endpoint *ep;
    dp_channel *ch;
    dp_error err;
    house_open(&h, 1);
    broker_channel(&h, 0, 4, &p);
    int page = dup(p.fds[0]);
    CHECK_OK_ERR(dp_endpoint_unpack(h.virtual, 4, 4, DP_WAIT_ADAPTIVE, &page, &ep, &err), err);
    for (uint32_t at = 0; at < 32; at += 4) {
        packed bad = p;
        bad.ch.qp.bytes[at] ^= 0x41;
        if (at == offsetof(dp_vqp_packed, rkey)) /* any key is possible */
            continue;
        CHECK_REFUSED(dp_channel_unpack(ep, &bad.ch, bad.fds, &ch, &err), DP_BAD_BLOB, err);
    }
    packed swapped = p;
    swapped.fds[0] = p.fds[1];
    swapped.fds[1] = p.fds[0];
    CHECK_REFUSED(dp_channel_unpack(ep, &swapped.ch, swapped.fds, &ch, &err), DP_BAD_BLOB, err);
    dp_endpoint_destroy(ep);
    close(p.fds[0]);
    close(p.fds[1]);
    await_channels(&h, 0);
    house_close(&h);
}

/* ---- figures ---- */

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void time_calls(client *c, const char *what) {
    static const uint32_t sizes[] = {8, 1024};
    static int64_t took[2000];
    const int calls = t_is_verbs() ? 200 : 2000;
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < calls; i++) {
            int64_t from = dp_now_ns();
            call(c, sizes[s]);
            took[i] = dp_now_ns() - from;
        }
        qsort(took, (size_t)calls, sizeof *took, by_time);
        int64_t from = dp_now_ns();
        stream(c, 8, (uint32_t)calls);
        printf("figure: %s %s %u B: median %.1f us, p90 %.1f us; 8 in flight: %.0f calls/s\n", t_provider(), what, sizes[s], (double)took[calls / 2] / 1e3,
               (double)took[calls * 9 / 10] / 1e3, calls / ((double)(dp_now_ns() - from) / 1e9));
    }
}

/* The same calls through the broker and on the private queue pair, in turn. Judges nothing. */
T_CASE(broker_figures, "broker/figures", .providers = ON, .seconds = 60, .verbs_seconds = 60) {
    house h;
    if (!getenv("RFAAS_TEST_FIGURES"))
        t_skip("RFAAS_TEST_FIGURES is not set");
    house_open(&h, 3);
    for (int i = 0; i < 3; i++) {
        packed p;
        client c;
        broker_channel(&h, i, 8, &p);
        client_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        time_calls(&c, "brokered");
        int64_t from = dp_now_ns();
        promote(&h, &c);
        printf("figure: %s promotion %.2f ms\n", t_provider(), (double)(dp_now_ns() - from) / 1e6);
        time_calls(&c, "private");
        client_close(&c);
    }
    house_close(&h);
}

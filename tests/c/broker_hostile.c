/* Hostile and failing clients of the broker, and many of them. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "brokered.h"
#include "served.h"

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
    brokered_channel(h, worker, depth, &r->p);
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
T_CASE(broker_malformed, "broker/malformed", .providers = BROKERED, .seconds = 30) {
    house h;
    packed p;
    client c;
    raw r;
    uint32_t n = 0;
    house_open(&h, 2);
    raw_open(&h, 0, 4, &r);
    brokered_channel(&h, 1, 4, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
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
        brokered_call(&c, 100);
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
    brokered_stream(&c, 4, 100);
    dp_broker_stats st;
    dp_broker_get_stats(h.broker, &st);
    CHECK_EQ(st.failed, 0);
    CHECK_EQ(st.refused, n + 1);
    raw_close(&r);
    brokered_close(&c);
    brokered_await(&h, 0);
    house_close(&h);
}

/* 5,000 signalled posts of a client that takes no completion until the end. Another client continues to make calls. */
T_CASE(broker_unpolled, "broker/posts-without-polling", .providers = BROKERED, .seconds = 30) {
    enum { POSTS = 5000 };
    house h;
    packed p;
    client c;
    raw r;
    uint32_t done = 0;
    house_open(&h, 2);
    raw_open(&h, 0, 16, &r);
    brokered_channel(&h, 1, 8, &p);
    brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
    while (r.posted < POSTS) {
        while (r.posted < POSTS && r.posted - __atomic_load_n(&r.page->served, __ATOMIC_ACQUIRE) < r.l.n_requests) {
            dp_vqp_request q = good(&r);
            q.wr_id = r.posted;
            raw_put(&r, &q);
        }
        brokered_stream(&c, 8, 16); /* the ring of the first client is full, and nobody takes its completions */
        if (__atomic_load_n(&r.page->done, __ATOMIC_ACQUIRE) - r.taken == r.l.n_completions) /* all that may wait */
            for (uint32_t n = r.l.n_completions; n; n--)
                CHECK_EQ(raw_take(&r).wr_id, done++);
    }
    for (; done < POSTS; done++) {
        raw_ring(&r);
        CHECK_EQ(raw_take(&r).wr_id, done);
    }
    brokered_healthy(&h);
    raw_close(&r);
    brokered_close(&c);
    brokered_await(&h, 0);
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
    brokered_open(j->h, &j->p, &c, j->i % 2 ? DP_WAIT_WARM : DP_WAIT_ADAPTIVE);
    c.seed = (uint32_t)j->i * 100000 + 1;
    brokered_stream(&c, 1 + (uint32_t)j->i, (uint32_t)t_pick(60000, 300));
    brokered_close(&c);
    return NULL;
}

/* Results of other clients have other patterns and counts. */
T_CASE(broker_many, "broker/many-clients", .providers = BROKERED, .seconds = 40, .verbs_seconds = 60) {
    house h;
    job jobs[6];
    pthread_t threads[6];
    house_open(&h, 6);
    for (int i = 0; i < 6; i++) {
        jobs[i] = (job){.h = &h, .i = i};
        brokered_channel(&h, i, 8, &jobs[i].p);
    }
    for (int i = 0; i < 6; i++)
        CHECK(!pthread_create(&threads[i], NULL, many_run, &jobs[i]));
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    brokered_healthy(&h);
    brokered_await(&h, 0);
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
T_CASE(broker_flood, "broker/busy-clients", .providers = BROKERED, .seconds = 30) {
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
        brokered_channel(&h, FLOODS, 8, &p);
        brokered_open(&h, &p, &c, DP_WAIT_ADAPTIVE);
        c.calls = (uint64_t)i * 20;
        brokered_stream(&c, 4, 20);
        brokered_close(&c);
        brokered_await(&h, FLOODS);
    }
    for (int i = 0; i < FLOODS; i++) {
        __atomic_store_n(&floods[i].stop, true, __ATOMIC_RELAXED);
        pthread_join(threads[i], NULL);
        raw_close(&floods[i].r);
    }
    brokered_await(&h, 0);
    house_close(&h);
}

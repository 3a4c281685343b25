/* Measures virtual queue pairs for `rfaas-bench leases` (K5 to K10, S5): a broker, its clients and their workers, without an agent or an executor.
 * The broker and the clients are threads of this process, each worker is a process of its own. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "broker.h"
#include "dp_broker.h"
#include "dp_serve.h"
#include "relay.h"

enum { CLIENTS = 4, DEPTH = 8, BYTES = 8, ROUNDS = 5, POSTS = 5000, MALFORMED = 100000 };
static const dp_channel_config sizes = {DEPTH, 4096, 0};

/* ---- workers ---- */

static dp_server *server;

/* Returns how many calls the worker has executed, and the payload. */
static uint32_t count(void *args, uint32_t n, void *res) {
    static uint64_t calls;
    calls++;
    memcpy(res, &calls, sizeof calls);
    memcpy((uint8_t *)res + sizeof calls, args, n);
    return n + sizeof calls;
}

/* On verbs, a server notices the end of its client late. */
static uint32_t finish(void *args, uint32_t n, void *res) {
    (void)args, (void)n, (void)res;
    dp_server_finish(server);
    return 0;
}

static const dp_function functions[] = {count, finish};
enum { COUNT, FINISH };

typedef struct blob {
    uint32_t len;
    uint8_t bytes[DP_CHANNEL_BLOB_MAX];
} blob;

static _Noreturn void work(const char *provider, int sock) {
    dp_dev *dev;
    dp_error err = {0};
    blob b;
    const dp_dev_options o = {.active_side_only = 1};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (recv(sock, &b, sizeof b, MSG_WAITALL) == sizeof b) {
        int st = dp_dev_open(provider, &o, &dev, &err);
        if (!st)
            st = dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, b.bytes, b.len, &server, &err);
        b.len = sizeof b.bytes;
        if (st || dp_server_blob(server, b.bytes, &b.len, &err) || send(sock, &b, sizeof b, 0) != sizeof b) {
            fprintf(stderr, "rfaas-bench-peer: worker: %s\n", err.msg);
            _exit(1);
        }
        dp_server_set_functions(server, functions, 2);
        dp_server_run(server);
        dp_server_destroy(server);
        dp_dev_close(dev);
    }
    _exit(0);
}

/* The other side of the floor. */
static _Noreturn void work_bare(const char *provider, int sock) {
    dp_dev *dev;
    dp_error err = {0};
    relay_card c;
    const dp_dev_options o = {.active_side_only = 1};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (recv(sock, &c, sizeof c, MSG_WAITALL) == sizeof c) {
        int st = dp_dev_open(provider, &o, &dev, &err);
        if (!st)
            st = relay_serve(dev, sock, &c, &err);
        if (st) {
            fprintf(stderr, "rfaas-bench-peer: worker: %s\n", err.msg);
            _exit(1);
        }
        dp_dev_close(dev);
    }
    _exit(0);
}

/* ---- clients ---- */

typedef struct run {
    dp_dev *dev, *own, *virtual;
    dp_broker *broker;
    int workers[CLIENTS + 1]; /* their sockets; the last one serves the floor */
    int calls;            /* of a measurement */
} run;

typedef struct client {
    run *r;
    int i;
    dp_endpoint *ep;
    dp_channel *ch;
    uint64_t called, wrong, moves;
    int status;
    dp_error err;
} client;

static int broker_channel(run *r, int worker, dp_packed_channel *p, int *fds, dp_error *err) {
    dp_brokered *c;
    blob b = {.len = sizeof b.bytes};
    int st = dp_brokered_create(r->broker, &sizes, &c, err);
    if (st)
        return st;
    st = dp_brokered_offer(c, b.bytes, &b.len, err);
    if (!st && (send(r->workers[worker], &b, sizeof b, MSG_NOSIGNAL) != sizeof b || recv(r->workers[worker], &b, sizeof b, MSG_WAITALL) != sizeof b))
        st = dp_fail(err, DP_PEER_GONE, 0, "the worker has ended");
    if (!st)
        st = dp_brokered_connect(c, b.bytes, b.len, err);
    if (!st)
        st = dp_brokered_serve(&c, p, fds, err);
    dp_brokered_drop(c);
    return st;
}

static int begin(client *c) {
    dp_packed_channel p;
    int fds[DP_PACKED_FDS] = {-1, -1};
    int st = broker_channel(c->r, c->i, &p, fds, &c->err);
    int page = dup(fds[0]);
    c->ep = NULL;
    c->ch = NULL;
    if (!st)
        st = dp_endpoint_unpack(c->r->virtual, 1, DEPTH, DP_WAIT_ADAPTIVE, &page, &c->ep, &c->err);
    if (!st)
        st = dp_channel_unpack(c->ep, &p, fds, &c->ch, &c->err);
    for (int i = 0; i < DP_VQP_FDS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    if (page >= 0)
        close(page);
    return st;
}

static void end(client *c) {
    uint32_t size;
    dp_started started;
    if (c->ch && !dp_channel_status(c->ch))
        dp_channel_call(c->ch, FINISH, NULL, 0, NULL, NULL, 0, &size, 0, &started);
    dp_channel_destroy(c->ch);
    dp_endpoint_destroy(c->ep);
}

static int move(client *c) {
    dp_promotion *p;
    int st = dp_promotion_prepare(c->ep, c->r->own, &p, &c->err);
    if (st)
        return st;
    st = dp_promotion_ask(p, c->ch, &c->err);
    if (!st)
        st = dp_promotion_await(p, c->ch, 0);
    if (!st)
        st = dp_promotion_meet(p, c->ch, &c->err);
    if (!st) {
        dp_promotion_switch(p, c->ch);
        dp_promotion_complete(p);
        c->moves++;
    }
    dp_promotion_free(p);
    return st;
}

/* `total` calls, of which `window` are in flight. Counts results that are not the next one of this client. took: time of each call if not NULL. */
static int calls(client *c, uint32_t window, uint32_t total, int64_t *took) {
    uint32_t slots[DEPTH], sent = 0;
    uint64_t first = c->called;
    for (uint32_t done = 0; done < total; done++) {
        uint64_t want[2] = {first + done + 1, (first + done) << 8 | (uint64_t)c->i}, got[2] = {0};
        int64_t from = took ? dp_now_ns() : 0;
        uint32_t size = 0;
        dp_started started;
        for (; sent < total && sent - done < window; sent++) {
            uint64_t in = (first + sent) << 8 | (uint64_t)c->i;
            int st = dp_channel_submit(c->ch, COUNT, &in, sizeof in, NULL, sizeof got, &slots[sent % window]);
            if (st)
                return dp_fail(&c->err, st, 0, "submit: %s", dp_status_text(st));
        }
        int st = dp_channel_wait(c->ch, slots[done % window], 0);
        if (!st)
            st = dp_channel_finish(c->ch, slots[done % window], got, &size, &started);
        if (st)
            return dp_fail(&c->err, st, 0, "call: %s", dp_status_text(st));
        if (took)
            took[done] = dp_now_ns() - from;
        c->wrong += size != sizeof got || memcmp(got, want, sizeof got);
        c->called++;
    }
    return DP_OK;
}

/* ---- measurements ---- */

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The same calls through the broker and on the private queue pair, and the floor's round trips, in turn. Prints medians of the rounds. */
static int paths(run *r, client *c) {
    int64_t took[2][ROUNDS], whole[2][ROUNDS], bare[2][ROUNDS], *each = calloc((size_t)r->calls, sizeof *each);
    int st = each ? DP_OK : DP_FATAL;
    for (int k = 0; k < ROUNDS && !st; k++) {
        st = begin(c);
        for (int path = 0; path < 2 && !st; path++) {
            st = calls(c, 1, (uint32_t)r->calls, each);
            qsort(each, (size_t)r->calls, sizeof *each, by_time);
            took[path][k] = each[r->calls / 2];
            int64_t from = dp_now_ns();
            if (!st)
                st = calls(c, DEPTH, (uint32_t)r->calls, NULL);
            whole[path][k] = dp_now_ns() - from;
            if (!st && !path)
                st = move(c);
        }
        end(c);
        if (!st)
            st = relay_measure(r->own, r->workers[CLIENTS], r->calls, &bare[0][k], &bare[1][k], &c->err);
    }
    free(each);
    if (st)
        return st;
    for (int path = 0; path < 2; path++) {
        qsort(took[path], ROUNDS, sizeof(int64_t), by_time);
        qsort(whole[path], ROUNDS, sizeof(int64_t), by_time);
        qsort(bare[path], ROUNDS, sizeof(int64_t), by_time);
        printf("%s %lld %.0f\n", path ? "private" : "brokered", (long long)took[path][ROUNDS / 2], r->calls / ((double)whole[path][ROUNDS / 2] / 1e9));
    }
    printf("floor %lld %lld\n", (long long)bare[0][ROUNDS / 2], (long long)bare[1][ROUNDS / 2]);
    return DP_OK;
}

static void *mover(void *arg) {
    client *c = arg;
    int n = c->r->calls / 10;
    for (int k = 0; k < n && !c->status; k++) {
        c->status = begin(c);
        uint32_t window = 1 + (uint32_t)(k % DEPTH);
        if (!c->status)
            c->status = calls(c, window, 5 + (uint32_t)(k % 7), NULL);
        if (!c->status)
            c->status = move(c);
        if (!c->status)
            c->status = calls(c, window, 5 + (uint32_t)(k % 5), NULL);
        end(c);
    }
    return NULL;
}

typedef struct hostile {
    client c;
    dp_packed_channel p;
    int fds[DP_PACKED_FDS];
    dp_vqp_layout l;
    uint8_t *at;
    dp_vqp_page *page;
    uint64_t lost;
} hostile;

static int hostile_open(hostile *h) {
    dp_vqp_packed d;
    int st = broker_channel(h->c.r, h->c.i, &h->p, h->fds, &h->c.err);
    if (st)
        return st;
    memcpy(&d, h->p.qp.bytes, sizeof d);
    h->l = dp_vqp_layout_of(d.max_send, d.max_recv, d.region);
    h->at = mmap(NULL, h->l.size, PROT_READ | PROT_WRITE, MAP_SHARED, h->fds[0], 0);
    h->page = (dp_vqp_page *)(void *)h->at;
    return h->at == MAP_FAILED ? dp_fail(&h->c.err, DP_FATAL, 0, "map a channel") : DP_OK;
}

static void hostile_put(hostile *h, const dp_vqp_request *q) {
    uint32_t at = h->page->posted;
    ((dp_vqp_request *)(void *)(h->at + h->l.requests_at))[at % h->l.n_requests] = *q;
    __atomic_store_n(&h->page->posted, at + 1, __ATOMIC_RELEASE);
    if (__atomic_load_n(&h->page->broker_sleeps, __ATOMIC_SEQ_CST))
        send(h->fds[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Takes completions until `n` are left; each must name the next request. */
static void hostile_take(hostile *h, uint32_t left, uint64_t *next) {
    while (h->page->posted - h->page->taken > left) {
        uint32_t at = h->page->taken;
        while (__atomic_load_n(&h->page->done, __ATOMIC_ACQUIRE) == at) {
            send(h->fds[1], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
            dp_cpu_pause();
        }
        h->lost += ((dp_vqp_completion *)(void *)(h->at + h->l.completions_at))[at % h->l.n_completions].wr_id != (*next)++;
        __atomic_store_n(&h->page->taken, at + 1, __ATOMIC_RELEASE);
    }
}

/* Posts signalled writes without taking a completion before their ring is full, and then malformed requests of all kinds. */
static void *attack(void *arg) {
    hostile *h = arg;
    uint64_t next = 0;
    dp_vqp_request good = {.op = DP_VQP_WRITE, .flags = DP_SIGNALED, .n = 1, .raddr = h->p.addr, .rkey = h->p.rkey, .piece = {{.len = BYTES}}};
    for (uint32_t i = 0; i < POSTS; i++) {
        good.wr_id = i;
        hostile_take(h, h->page->posted - h->page->taken >= h->l.n_requests ? 0 : UINT32_MAX, &next);
        hostile_put(h, &good);
    }
    hostile_take(h, 0, &next);
    uint64_t lost = h->lost;
    for (uint32_t i = 0; i < MALFORMED; i++) {
        dp_vqp_request bad = good;
        uint8_t *field = (uint8_t *)&bad;
        static const uint32_t at[] = {0, 4, 8, 16, 32, 36, 48, 56, 60};
        bad.wr_id = next + (h->page->posted - h->page->taken);
        field[at[i % (sizeof at / sizeof *at)] + (i >> 4) % 4] ^= (uint8_t)(0x80 >> i % 3);
        hostile_take(h, h->l.n_requests / 2, &next);
        hostile_put(h, &bad);
    }
    hostile_take(h, 0, &next);
    h->lost = lost;
    return NULL;
}

/* Clients that move under load, beside one that posts without polling and sends malformed requests. */
static int soak(run *r, dp_error *err) {
    client c[CLIENTS - 1];
    pthread_t threads[CLIENTS];
    hostile h = {.c = {.r = r, .i = CLIENTS - 1}};
    int st = hostile_open(&h);
    if (st) {
        *err = h.c.err;
        return st;
    }
    for (int i = 0; i < CLIENTS; i++) {
        if (i < CLIENTS - 1)
            c[i] = (client){.r = r, .i = i};
        if (pthread_create(&threads[i], NULL, i < CLIENTS - 1 ? mover : attack, i < CLIENTS - 1 ? (void *)&c[i] : &h))
            return dp_fail(err, DP_FATAL, 0, "create a thread");
    }
    for (int i = 0; i < CLIENTS; i++)
        pthread_join(threads[i], NULL);
    dp_broker_stats s;
    dp_broker_get_stats(r->broker, &s);
    uint64_t called = 0, wrong = 0, moves = 0;
    for (int i = 0; i < CLIENTS - 1; i++) {
        if (c[i].status) {
            *err = c[i].err;
            return c[i].status;
        }
        called += c[i].called;
        wrong += c[i].wrong;
        moves += c[i].moves;
    }
    printf("soak %llu %llu %llu %llu %d %llu %llu\n", (unsigned long long)s.refused, (unsigned long long)s.failed, (unsigned long long)called,
           (unsigned long long)wrong, POSTS, (unsigned long long)h.lost, (unsigned long long)moves);
    munmap(h.at, h.l.size);
    close(h.fds[0]);
    close(h.fds[1]);
    return DP_OK;
}

/* Starts the workers before this process has threads. */
static int hire(run *r, const char *provider, dp_error *err) {
    for (int i = 0; i <= CLIENTS; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
            return dp_fail(err, DP_FATAL, errno, "socket of a worker");
        pid_t pid = fork();
        if (!pid) {
            for (int k = 0; k < i; k++)
                close(r->workers[k]);
            close(pair[0]);
            if (i == CLIENTS)
                work_bare(provider, pair[1]);
            work(provider, pair[1]);
        }
        close(pair[1]);
        r->workers[i] = pair[0];
        if (pid < 0)
            return dp_fail(err, DP_FATAL, errno, "start a worker");
    }
    return DP_OK;
}

int bench_broker(const char *provider, int n) {
    run r = {.calls = n};
    dp_error err = {0};
    const dp_dev_options o = {0};
    int st = hire(&r, provider, &err);
    if (!st)
        st = dp_dev_open(provider, &o, &r.dev, &err);
    if (!st)
        st = dp_dev_open(provider, &o, &r.own, &err);
    if (!st)
        st = dp_vqp_open(r.dev->provider, &r.virtual, &err);
    if (!st)
        st = dp_broker_start(r.dev, &r.broker, &err);
    client c = {.r = &r, .i = CLIENTS - 1}; /* the worker of the hostile client in soak() */
    if (!st && (st = paths(&r, &c)))
        err = c.err;
    if (!st)
        st = soak(&r, &err);
    dp_broker_stop(r.broker);
    if (st)
        fprintf(stderr, "rfaas-bench-peer: broker: %s\n", err.msg);
    return st != DP_OK;
}

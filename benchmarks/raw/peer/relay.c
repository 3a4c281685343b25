/* The lower bound of a call through a broker. A thread takes words from shared memory, sends each to another process by a bare write with an immediate,
 * and returns the answer. It checks nothing, and knows nothing of calls. All sides poll, and yield their processors. */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_wait.h"
#include "relay.h"

enum { RECVS = 8, BYTES = 8, END = 1u << 16, SPINS = DP_SPINS_PER_YIELD };

typedef struct end {
    dp_domain *domain;
    dp_cq *cq;
    dp_mem *mem;
    dp_qp *qp;
    uint64_t peer;
    uint32_t rkey;
} end;

static void close_end(end *e) {
    dp_qp_destroy(e->qp);
    dp_mem_free(e->mem);
    dp_cq_destroy(e->cq);
    dp_domain_destroy(e->domain);
}

static int open_end(dp_dev *dev, end *e, dp_error *err) {
    dp_qp_attr a = {.max_send = 16, .max_recv = RECVS, .max_inline = 64, .n_expose = 1};
    *e = (end){0};
    int st = dp_domain_create(dev, &e->domain, err);
    if (!st)
        st = dp_cq_create(dev, a.max_send + a.max_recv, &e->cq, err);
    if (!st)
        st = dp_mem_alloc(e->domain, 4096, DP_REMOTE_WRITE, &e->mem, err);
    a.expose[0] = e->mem;
    if (!st)
        st = dp_qp_create(e->domain, e->cq, &a, &e->qp, err);
    for (int i = 0; i < RECVS && !st; i++)
        st = dp_post_recv(e->qp, 0);
    return st;
}

static int describe(const end *e, relay_card *c, dp_error *err) {
    c->len = sizeof c->bytes;
    c->addr = e->mem->base;
    c->rkey = e->mem->rkey;
    return dp_qp_export(e->qp, c->bytes, &c->len, err);
}

static int join(end *e, const relay_card *c, dp_error *err) {
    e->peer = c->addr;
    e->rkey = c->rkey;
    return c->len <= sizeof c->bytes ? dp_qp_connect(e->qp, c->bytes, c->len, err) : dp_fail(err, DP_BAD_BLOB, 0, "a card of %u bytes", c->len);
}

static int send_word(const end *e, uint32_t imm) {
    uint64_t word = imm;
    return dp_post_write_imm(e->qp, &(dp_sge){&word, BYTES, 0}, 1, e->peer, e->rkey, imm, 0, 0);
}

static void pause_or_yield(uint32_t *spins) {
    if (++*spins % SPINS)
        dp_cpu_pause();
    else
        sched_yield();
}

static int await(const end *e, uint32_t *imm) {
    dp_wc wc;
    for (uint32_t spins = 0;;) {
        int n = dp_cq_poll(e->cq, &wc, 1);
        if (n < 0 || (n && wc.status))
            return DP_CONNECTION;
        if (n && wc.op == DP_OP_RECV_IMM) {
            *imm = wc.imm;
            return dp_post_recv(e->qp, 0);
        }
        pause_or_yield(&spins);
    }
}

int relay_serve(dp_dev *dev, int sock, relay_card *c, dp_error *err) {
    end e;
    uint32_t imm = 0;
    int st = open_end(dev, &e, err);
    if (!st)
        st = join(&e, c, err);
    if (!st)
        st = describe(&e, c, err);
    if (!st && send(sock, c, sizeof *c, MSG_NOSIGNAL) != sizeof *c)
        st = DP_PEER_GONE;
    while (!st && !(st = await(&e, &imm)) && imm != END)
        st = send_word(&e, imm);
    close_end(&e);
    return st;
}

/* The words of the shared memory. */
typedef struct words {
    _Alignas(64) uint32_t ask;
    _Alignas(64) uint32_t answer;
    int status;
    end *e;
} words;

static void *relay(void *arg) {
    words *w = arg;
    for (uint32_t seen = 0, spins = 0;;) {
        uint32_t ask = __atomic_load_n(&w->ask, __ATOMIC_ACQUIRE), imm;
        if (ask == seen) {
            pause_or_yield(&spins);
            continue;
        }
        seen = ask;
        w->status = send_word(w->e, ask);
        if (ask == END)
            return NULL;
        if (!w->status)
            w->status = await(w->e, &imm);
        __atomic_store_n(&w->answer, ask, __ATOMIC_RELEASE);
        if (w->status)
            return NULL;
    }
}

static int by_time(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Times n round trips, by the relay if w is not NULL. Returns the median in *took. */
static int time_trips(const end *e, words *w, int64_t *each, int n, int64_t *took) {
    for (int i = 0; i < n; i++) {
        int64_t from = dp_now_ns();
        uint32_t imm = (uint32_t)i % (END - 1) + 1, got = imm;
        int st = DP_OK;
        if (w) {
            __atomic_store_n(&w->ask, imm, __ATOMIC_RELEASE);
            for (uint32_t spins = 0; __atomic_load_n(&w->answer, __ATOMIC_ACQUIRE) != imm;)
                pause_or_yield(&spins);
            st = w->status;
        } else if (!(st = send_word(e, imm))) {
            st = await(e, &got);
        }
        if (st || got != imm)
            return st ? st : DP_PROTOCOL;
        each[i] = dp_now_ns() - from;
    }
    qsort(each, (size_t)n, sizeof *each, by_time);
    *took = each[n / 2];
    return DP_OK;
}

int relay_measure(dp_dev *dev, int sock, int n, int64_t *bare, int64_t *relayed, dp_error *err) {
    end e;
    relay_card c;
    pthread_t t;
    words w = {.e = &e};
    int64_t *each = calloc((size_t)n, sizeof *each);
    int st = each ? open_end(dev, &e, err) : dp_fail(err, DP_FATAL, ENOMEM, "relay");
    if (!each)
        return st;
    if (!st)
        st = describe(&e, &c, err);
    if (!st && (send(sock, &c, sizeof c, MSG_NOSIGNAL) != sizeof c || recv(sock, &c, sizeof c, MSG_WAITALL) != sizeof c))
        st = dp_fail(err, DP_PEER_GONE, 0, "relay: the worker has ended");
    if (!st)
        st = join(&e, &c, err);
    if (!st && (st = time_trips(&e, NULL, each, n, bare)))
        dp_fail(err, st, 0, "bare round trip: %s", dp_status_text(st));
    if (!st && pthread_create(&t, NULL, relay, &w))
        st = dp_fail(err, DP_FATAL, 0, "create a thread");
    if (!st) {
        if ((st = time_trips(NULL, &w, each, n, relayed)))
            dp_fail(err, st, 0, "relayed round trip: %s", dp_status_text(st));
        __atomic_store_n(&w.ask, END, __ATOMIC_RELEASE);
        pthread_join(t, NULL);
    }
    free(each);
    close_end(&e);
    return st;
}

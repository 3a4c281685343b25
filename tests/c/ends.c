#include "ends.h"

#include <sched.h>
#include <stdlib.h>

int64_t poll_ns(void) { return (int64_t)((t_is_verbs() ? 15e9 : 5e9) * t_time_scale()); }

dp_dev_options quick_options(void) {
    /* 4.096 us << 10 = 4.2 ms, three times; the device may round up. On ofi a client waits ten keepalive times for its worker, which may be
     * starved of the processor. */
    return (dp_dev_options){.gid_index = -1, .timeout = 10, .retry_count = 2, .keepalive_ms = t_is_ofi() ? 100 : 20};
}

/* ---- queues that are polled while their owner waits for something else ---- */

enum { ATTENDED_MAX = 32 };
static __thread dp_cq *attended[ATTENDED_MAX];

static void poll_attended(void) {
    for (int i = 0; i < ATTENDED_MAX; i++)
        if (attended[i])
            CHECK_EQ(dp_cq_poll(attended[i], NULL, 0), 0);
}

static void replace_attended(dp_cq *from, dp_cq *to) {
    int i = 0;
    while (i < ATTENDED_MAX && attended[i] != from)
        i++;
    CHECKF(i < ATTENDED_MAX, "more than %d queues in a thread, or one that is not attended", ATTENDED_MAX);
    attended[i] = to;
}

void end_attend(dp_cq *cq) {
    if (!(cq->dev->caps & (DP_CAP_POLLED_TARGET | DP_CAP_POLLED_SOURCE)))
        return;
    replace_attended(NULL, cq);
    t_idle = poll_attended;
}

void end_unattend(dp_cq *cq) {
    if (cq->dev->caps & (DP_CAP_POLLED_TARGET | DP_CAP_POLLED_SOURCE))
        replace_attended(cq, NULL);
}

/* ---- an end ---- */

static const end_opts no_opts;

void end_open(end *e, const end_opts *o, dp_dev *dev) {
    dp_error err = {0};
    if (!o)
        o = &no_opts;
    *e = (end){.o = o, .dev = dev, .own_dev = !dev};
    if (!dev) {
        dp_dev_options quick = quick_options();
        CHECK_OK_ERR(dp_dev_open(t_provider(), o->quick_errors ? &quick : NULL, &e->dev, &err), err);
    }
    CHECK_OK_ERR(dp_domain_create(e->dev, &e->dom, &err), err);
    uint64_t size = o->size ? o->size : 65536;
    CHECK_OK_ERR(dp_mem_alloc(e->dom, size, ACCESS_ALL, &e->mem, &err), err);
    e->regions[e->n_regions++] = e->mem;
    for (int i = 0; i < o->n_regions; i++) {
        const region_opts *r = &o->regions[i];
        CHECK_OK_ERR(dp_mem_alloc(e->dom, r->size ? r->size : 8192, r->access, &e->regions[e->n_regions++], &err), err);
    }
    CHECK_OK_ERR(dp_mem_alloc(e->dom, o->local_size ? o->local_size : size, 0, &e->local, &err), err);
    dp_qp_attr attr = {
        .max_send = o->max_send ? o->max_send : 64,
        .max_recv = o->max_recv ? o->max_recv : 64,
        .max_inline = o->max_inline,
        .max_answers = o->max_answers,
        .takes_shared = o->takes_shared,
    };
    CHECK_OK_ERR(dp_cq_create(e->dev, attr.max_send + attr.max_recv, &e->cq, &err), err);
    end_attend(e->cq);
    attr.expose[attr.n_expose++] = e->mem;
    for (int i = 0; i < o->n_regions; i++)
        if (!o->regions[i].hidden)
            attr.expose[attr.n_expose++] = e->regions[i + 1];
    CHECK_OK_ERR(dp_qp_create(e->dom, e->cq, &attr, &e->qp, &err), err);
    CHECK_EQ(e->qp->state, DP_QP_INIT);
    CHECK_EQ(e->qp->max_send, attr.max_send);
    CHECK_EQ(e->qp->max_recv, attr.max_recv);
    if (!o->no_recvs)
        for (uint32_t i = 0; i < attr.max_recv; i++)
            end_post_recv(e);
}

void end_close(end *e) {
    dp_qp_destroy(e->qp);
    end_unattend(e->cq);
    dp_cq_destroy(e->cq);
    dp_mem_free(e->local);
    for (int i = 0; i < e->n_regions; i++)
        dp_mem_free(e->regions[i]);
    dp_domain_destroy(e->dom);
    if (e->own_dev)
        dp_dev_close(e->dev);
    free(e->sent.wc);
    free(e->received.wc);
}

void end_card(end *e, card *c) {
    dp_error err = {0};
    memset(c, 0, sizeof *c);
    c->blob_len = sizeof c->blob;
    CHECK_OK_ERR(dp_qp_export(e->qp, c->blob, &c->blob_len, &err), err);
    CHECK(c->blob_len > 0 && c->blob_len <= DP_BLOB_MAX);
    c->n_regions = e->n_regions;
    for (int i = 0; i < e->n_regions; i++)
        c->regions[i] = (reg_ref){(uint64_t)(uintptr_t)e->regions[i]->addr, e->regions[i]->size, e->regions[i]->rkey};
}

void end_connect(end *e, const card *peer) {
    dp_error err = {0};
    CHECK_OK_ERR(dp_qp_connect(e->qp, peer->blob, peer->blob_len, &err), err);
    CHECK_EQ(e->qp->state, DP_QP_CONNECTED);
}

void end_reset(end *e) {
    dp_error err = {0};
    CHECK_OK_ERR(dp_qp_reset(e->qp, &err), err);
    CHECK_EQ(e->qp->state, DP_QP_INIT);
    CHECK_EQ(dp_qp_broken(e->qp), 0);
    e->recvs_posted = e->recvs_done = 0;
    e->sent.head = e->sent.tail = e->received.head = e->received.tail = 0;
    if (!e->o->no_recvs)
        for (uint32_t i = 0; i < e->qp->max_recv; i++)
            end_post_recv(e);
}

void end_post_recv(end *e) { CHECK_OK(dp_post_recv(e->qp, RECV_ID(e->recvs_posted++))); }

dp_sge local_sge(end *e, uint64_t off, uint32_t len) {
    CHECK(off + len <= e->local->size);
    return (dp_sge){local_bytes(e) + off, len, e->local->lkey};
}

/* ---- completions ---- */

static bool is_recv(const dp_wc *wc) { return wc->wr_id >> 48 == RECV_ID(0) >> 48; }

static void stash_put(stash *s, const dp_wc *wc) {
    if (s->tail == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 64;
        s->wc = realloc(s->wc, s->cap * sizeof *s->wc);
        CHECK(s->wc);
    }
    s->wc[s->tail++] = *wc;
}

static bool stash_get(stash *s, dp_wc *wc) {
    if (s->head == s->tail)
        return false;
    *wc = s->wc[s->head++];
    if (s->head == s->tail)
        s->head = s->tail = 0;
    return true;
}

bool end_poll(end *e, dp_wc *wc, int64_t ns) {
    int64_t until = 0;
    for (unsigned i = 1;; i++) {
        int n = dp_cq_poll(e->cq, wc, 1);
        CHECKF(n == 0 || n == 1, "dp_cq_poll(1) returned %d", n);
        if (n) {
            CHECKF(wc->qp == e->qp, "completion of queue pair %p, ours is %p", (void *)wc->qp, (void *)e->qp);
            return true;
        }
        if (t_idle)
            t_idle();
        dp_cpu_pause();
        if (i % 64)
            continue;
        sched_yield(); /* both sides and other programs share two cores */
        int64_t now = dp_now_ns();
        if (!until)
            until = now + ns;
        else if (now > until)
            return false;
    }
}

static bool poll_kind(end *e, dp_wc *wc, bool recv, int64_t ns) {
    if (stash_get(recv ? &e->received : &e->sent, wc))
        return true;
    while (end_poll(e, wc, ns)) {
        if (is_recv(wc) == recv)
            return true;
        stash_put(recv ? &e->sent : &e->received, wc);
    }
    return false;
}

bool end_poll_sent(end *e, dp_wc *wc, int64_t ns) { return poll_kind(e, wc, false, ns); }
bool end_poll_recv(end *e, dp_wc *wc, int64_t ns) { return poll_kind(e, wc, true, ns); }

bool end_report_death(end *e) {
    if (!(e->dev->caps & DP_CAP_SILENT_DEATH))
        return false;
    dp_qp_break(e->qp, DP_PEER_GONE);
    return true;
}

bool end_poll_lost(end *e, dp_wc *wc) {
    bool silent = e->dev->caps & DP_CAP_SILENT_DEATH;
    bool got = end_poll_sent(e, wc, silent ? 20000000 : poll_ns());
    CHECKF(got || silent, "a post to a peer that is gone never ends");
    return got;
}

void end_drain(end *e) {
    dp_wc wc[16];
    if (t_idle)
        t_idle();
    int n = dp_cq_poll(e->cq, wc, 16);
    CHECK_GE(n, 0);
    CHECK_LE(n, 16);
    for (int i = 0; i < n; i++) {
        CHECK(wc[i].qp == e->qp);
        stash_put(is_recv(&wc[i]) ? &e->received : &e->sent, &wc[i]);
    }
}

void end_sent(end *e, uint64_t wr_id, dp_op op) {
    dp_wc wc;
    CHECKF(end_poll_sent(e, &wc, poll_ns()), "no completion of post %#llx (op %d)", (unsigned long long)wr_id, op);
    CHECK_STATUS(wc.status, DP_OK);
    CHECK_EQ(wc.wr_id, wr_id);
    CHECK_EQ(wc.op, op);
}

dp_wc end_imm(end *e) {
    dp_wc wc;
    uint64_t k = e->recvs_done;
    CHECKF(end_poll_recv(e, &wc, poll_ns()), "receive %llu does not complete", (unsigned long long)k);
    CHECK_STATUS(wc.status, DP_OK);
    CHECK_EQ(wc.wr_id, RECV_ID(k));
    CHECK_EQ(wc.op, DP_OP_RECV_IMM);
    e->recvs_done++;
    if (!e->o->no_recvs)
        end_post_recv(e);
    return wc;
}

void end_quiet(end *e, int ms) {
    dp_wc wc;
    int64_t until = dp_now_ns() + (int64_t)ms * 1000000;
    do {
        int n = dp_cq_poll(e->cq, &wc, 1);
        CHECKF(n == 0, "unexpected completion (or error %d): wr_id %#llx op %u status %d", n, (unsigned long long)wc.wr_id,
               wc.op, wc.status);
        sched_yield();
    } while (dp_now_ns() < until);
}

/* ---- posts ---- */

void end_write(end *e, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    int64_t until = 0;
    int st;
    while ((st = dp_post_write(e->qp, sge, n, raddr, rkey, wr_id, flags)) == DP_BUSY) {
        int64_t now = dp_now_ns();
        until = until ? until : now + poll_ns();
        CHECKF(now < until, "post_write stays busy although completions are polled");
        end_drain(e);
        sched_yield();
    }
    CHECK_OK(st);
}

void end_write_imm(end *e, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                   uint32_t flags) {
    int64_t until = 0;
    int st;
    while ((st = dp_post_write_imm(e->qp, sge, n, raddr, rkey, imm, wr_id, flags)) == DP_BUSY) {
        int64_t now = dp_now_ns();
        until = until ? until : now + poll_ns();
        CHECKF(now < until, "post_write_imm stays busy although completions are polled");
        end_drain(e);
        sched_yield();
    }
    CHECK_OK(st);
}

/* ---- patterns ---- */

static unsigned char pattern_byte(size_t i, uint32_t seed) {
    return (unsigned char)((i * 131 + (i >> 8) * 17 + (i >> 16) * 5 + seed * 29 + 7) & 0x7f); /* never 0xEE */
}

void fill_pattern(void *p, size_t n, uint32_t s) {
    unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        b[i] = pattern_byte(i, s);
}

void t_check_pattern(const char *file, int line, const void *p, size_t n, uint32_t s) {
    const unsigned char *b = p;
    t_at(file, line);
    for (size_t i = 0; i < n; i++)
        if (b[i] != pattern_byte(i, s))
            t_fail_at(file, line, "byte %zu of %zu is %#x, wanted %#x", i, n, b[i], pattern_byte(i, s));
}

/* ---- duos ---- */

void duo_connect(duo *d) {
    card mine;
    end_card(&d->e, &mine);
    t_send(d->sock, &mine, sizeof mine);
    t_recv(d->sock, &d->peer, sizeof d->peer);
    end_connect(&d->e, &d->peer);
    t_sync(d->sock);
}

void duo_reconnect(duo *d) {
    t_sync(d->sock);
    end_reset(&d->e);
    duo_connect(d);
}

void duo_ack(duo *d) { end_write_imm(&d->e, NULL, 0, d->peer.regions[0].addr, d->peer.regions[0].rkey, 0xACC, 0, 0); }

void duo_await(duo *d) {
    dp_wc wc = end_imm(&d->e);
    CHECK_EQ(wc.imm, 0xACC);
    CHECK_EQ(wc.byte_len, 0);
}

void duo_ping(duo *d) {
    end *e = &d->e;
    uint64_t at = e->mem->size - 64;
    CHECK_GE(e->local->size, 16);
    for (int turn = 0; turn < 2; turn++) {
        if (d->left == (turn == 0)) {
            memcpy(local_bytes(e), turn ? "ping from right" : "ping from left ", 16);
            dp_sge s = local_sge(e, 0, 16);
            end_write_imm(e, &s, 1, d->peer.regions[0].addr + d->peer.regions[0].size - 64, d->peer.regions[0].rkey, 0x919,
                          77, DP_SIGNALED);
            end_sent(e, 77, DP_OP_WRITE);
        } else {
            if (e->o->no_recvs)
                end_post_recv(e);
            dp_wc wc = end_imm(e);
            CHECK_EQ(wc.imm, 0x919);
            CHECK_EQ(wc.byte_len, 16);
            CHECK_SAME(end_bytes(e) + at, turn ? "ping from right" : "ping from left ", 16);
        }
        t_sync(d->sock);
    }
}

typedef struct side_start {
    const t_case *c;
    dp_dev *dev;
    bool left;
} side_start;

static void run_side(int sock, void *arg) {
    side_start *s = arg;
    const duo_def *def = s->c->arg;
    end_opts o = def->opts ? *def->opts : no_opts;
    duo *d = calloc(1, sizeof *d);
    CHECK(d);
    t_name(s->left ? "left" : "right");
    d->sock = sock;
    d->left = s->left;
    d->processes = s->c->variant == DUO_PROCESSES;
    dp_dev *dev = s->dev, *own = NULL;
    if (!dev && o.right_active_only && !s->left && !t_is_verbs()) {
        dp_dev_options opts = {.gid_index = -1, .active_side_only = 1};
        dp_error err = {0};
        CHECK_OK_ERR(dp_dev_open(t_provider(), &opts, &own, &err), err);
        dev = own;
    }
    end_open(&d->e, &o, dev);
    if (!o.unconnected)
        duo_connect(d);
    (s->left ? def->left : def->right)(d);
    t_sync(sock); /* neither side ends before the other is done */
    end_close(&d->e);
    dp_dev_close(own);
    t_sync(sock);
    free(d);
}

void duo_run(const t_case *c) {
    const duo_def *def = c->arg;
    side_start left = {c, NULL, true}, right = {c, NULL, false};
    dp_error err = {0};
    if (c->variant == DUO_ONE_DEVICE) {
        dp_dev_options quick = quick_options();
        bool q = def->opts && def->opts->quick_errors;
        CHECK_OK_ERR(dp_dev_open(t_provider(), q ? &quick : NULL, &left.dev, &err), err);
        right.dev = left.dev;
    }
    t_peer p;
    t_peer_start(&p, c->variant == DUO_PROCESSES, run_side, &right);
    run_side(p.sock, &left);
    t_peer_join(&p);
    dp_dev_close(left.dev);
}

void ends_connect_and_write(end *a, end *b) {
    card ca, cb;
    end_card(a, &ca);
    end_card(b, &cb);
    end_connect(a, &cb);
    end_connect(b, &ca);
    fill_pattern(local_bytes(a), 100, 1);
    dp_sge s = local_sge(a, 0, 100);
    end_write_imm(a, &s, 1, cb.regions[0].addr + 3, cb.regions[0].rkey, 5, 1, DP_SIGNALED);
    CHECK_EQ(end_imm(b).imm, 5);
    CHECK_PATTERN(end_bytes(b) + 3, 100, 1);
    end_sent(a, 1, DP_OP_WRITE);
}

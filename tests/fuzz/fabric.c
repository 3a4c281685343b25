#include "fabric.h"

static int domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    (void)err;
    *out = calloc(1, sizeof **out);
    (*out)->dev = dev;
    return DP_OK;
}

static void domain_destroy(dp_domain *d) { free(d); }

static int mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    (void)err;
    dp_mem *m = calloc(1, sizeof *m);
    *m = (dp_mem){.domain = d, .size = size, .access = access, .lkey = 5, .rkey = FABRIC_RKEY};
    MUST(posix_memalign(&m->addr, 128, size) == 0);
    memset(m->addr, 0, size);
    *out = m;
    return DP_OK;
}

static int mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    (void)err;
    dp_mem *m = calloc(1, sizeof *m);
    *m = (dp_mem){.domain = d, .addr = addr, .size = size, .access = access, .lkey = 6};
    *out = m;
    return DP_OK;
}

static void mem_free(dp_mem *m) {
    if (m->lkey == 5)
        free(m->addr);
    free(m);
}

static int cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    (void)err;
    dp_cq *c = calloc(1, sizeof *c);
    *c = (dp_cq){.ops = dev->ops, .dev = dev, .capacity = capacity};
    *out = c;
    return DP_OK;
}

static void cq_destroy(dp_cq *c) { free(c); }

static int cq_poll(dp_cq *c, dp_wc *wc, int n) {
    fabric *f = (fabric *)c->dev;
    int got = f->poll(f->arg, wc, n);
    MUST(got <= n);
    return got;
}

static int cq_arm(dp_cq *c) {
    (void)c;
    return DP_OK;
}

static void cq_disarm(dp_cq *c) { (void)c; }

static int cq_wait(dp_cq *c, int64_t timeout_ns) {
    (void)c, (void)timeout_ns;
    return DP_OK;
}

static void cq_wake(dp_cq *c) { (void)c; }
static void cq_promise_hot(dp_cq *c, bool hot) { (void)c, (void)hot; }

static int qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    (void)err;
    fabric *f = (fabric *)d->dev;
    dp_qp *q = calloc(1, sizeof *q);
    *q = (dp_qp){.ops = d->dev->ops, .domain = d, .cq = c, .max_send = attr->max_send, .max_recv = attr->max_recv,
                 .max_inline = 64};
    f->qp = q;
    *out = q;
    return DP_OK;
}

static int qp_export(dp_qp *q, void *blob, uint32_t *len, dp_error *err) {
    (void)q, (void)err;
    memcpy(blob, "\1\2\3\4", 4);
    *len = 4;
    return DP_OK;
}

static int qp_connect(dp_qp *q, const void *blob, uint32_t len, dp_error *err) {
    (void)blob, (void)len, (void)err;
    q->state = DP_QP_CONNECTED;
    return DP_OK;
}

static int qp_reset(dp_qp *q, dp_error *err) {
    (void)err;
    ((fabric *)q->domain->dev)->recvs = 0;
    q->state = DP_QP_INIT;
    q->broken = 0;
    return DP_OK;
}

static void qp_destroy(dp_qp *q) { free(q); }

static int may_post(dp_qp *q) {
    fabric *f = (fabric *)q->domain->dev;
    if (q->state != DP_QP_CONNECTED)
        return q->state == DP_QP_ERROR ? DP_CONNECTION : DP_INVALID;
    if (q->broken)
        return DP_CONNECTION;
    if (f->busy == 0)
        return DP_OK;
    f->busy--;
    return DP_BUSY;
}

/* The side under test may only write where the peer has permitted it. */
static uint64_t put(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey) {
    fabric *f = (fabric *)q->domain->dev;
    uint64_t total = 0, at = raddr - FABRIC_BASE;
    MUST(n >= 0 && n <= 2);
    for (int i = 0; i < n; i++)
        total += sge[i].len;
    MUST(total <= f->dev.max_msg + 128ull); /* a header and the largest message of an eager call */
    MUST(total == 0 || (rkey == FABRIC_RKEY && at <= f->peer_size && total <= f->peer_size - at));
    for (int i = 0; i < n; i++) {
        if (sge[i].len && f->peer + at != sge[i].addr)
            memmove(f->peer + at, sge[i].addr, sge[i].len);
        at += sge[i].len;
    }
    return total;
}

static int post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    (void)wr_id, (void)flags;
    int st = may_post(q);
    if (st == DP_OK)
        put(q, sge, n, raddr, rkey);
    return st;
}

static int post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                          uint32_t flags) {
    (void)wr_id, (void)flags;
    fabric *f = (fabric *)q->domain->dev;
    int st = may_post(q);
    if (st)
        return st;
    uint64_t len = put(q, sge, n, raddr, rkey);
    if (f->on_imm)
        f->on_imm(f->arg, imm, raddr, len);
    return DP_OK;
}

static int post_recv(dp_qp *q, uint64_t wr_id) {
    (void)wr_id;
    fabric *f = (fabric *)q->domain->dev;
    if (q->state == DP_QP_ERROR)
        return DP_CONNECTION;
    MUST(f->recvs < q->max_recv);
    f->recvs++;
    return DP_OK;
}

static void *rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    fabric *f = (fabric *)q->domain->dev;
    uint64_t at = raddr - FABRIC_BASE;
    if (!(f->dev.caps & DP_CAP_RKEY_PTR) || rkey != FABRIC_RKEY || at > f->peer_size || len > f->peer_size - at)
        return NULL;
    return f->peer + at;
}

static int qp_probe(dp_qp *q) {
    (void)q;
    return DP_OK;
}

static void qp_notify(dp_qp *q) { (void)q; }

static const dp_ops ops = {
    .domain_create = domain_create,
    .domain_destroy = domain_destroy,
    .mem_alloc = mem_alloc,
    .mem_register = mem_register,
    .mem_free = mem_free,
    .cq_create = cq_create,
    .cq_destroy = cq_destroy,
    .cq_poll = cq_poll,
    .cq_arm = cq_arm,
    .cq_disarm = cq_disarm,
    .cq_wait = cq_wait,
    .cq_wake = cq_wake,
    .cq_promise_hot = cq_promise_hot,
    .qp_create = qp_create,
    .qp_export = qp_export,
    .qp_connect = qp_connect,
    .qp_reset = qp_reset,
    .qp_destroy = qp_destroy,
    .post_write = post_write,
    .post_write_imm = post_write_imm,
    .post_recv = post_recv,
    .rkey_ptr = rkey_ptr,
    .qp_probe = qp_probe,
    .qp_notify = qp_notify,
};

void fabric_init(fabric *f, uint32_t caps, uint32_t max_msg) {
    memset(f, 0, sizeof *f);
    f->dev = (dp_dev){.ops = &ops, .provider = caps & DP_CAP_RKEY_PTR ? DP_PROVIDER_SHM : DP_PROVIDER_VERBS, .caps = caps,
                      .max_msg = max_msg};
}

#include "fault.h"

#include <stdlib.h>
#include <string.h>

enum { RULES_MAX = 16, QPS_MAX = 16, CQS_MAX = 16, PULL = 16 };

typedef enum point {
    POST, POST_RECV, RECV, SENT, QP, POLL, ARM, WAIT, PROBE, MAKE, CONNECT, RESET, RKEY_PTR, POINTS
} point;

typedef enum action { NOTHING, BUSY, FAIL, DROP, DUP, DELAY, ERROR, GONE, BREAK, EARLY } action;

static const char *const point_names[POINTS] = {"post", "post-recv", "recv",    "sent",  "qp",   "poll",    "arm",
                                                "wait", "probe",     "make", "connect", "reset", "rkey-ptr"};

/* The actions of each point, by name in the order of enum action. */
static const char *const action_names[] = {"", "busy", "fail", "drop", "dup", "delay", "error", "gone", "break", "early"};
#define ON(a) (1u << (a))
static const unsigned allowed[POINTS] = {
    [POST] = ON(BUSY) | ON(FAIL),
    [POST_RECV] = ON(BUSY) | ON(FAIL),
    [RECV] = ON(DROP) | ON(DUP) | ON(DELAY) | ON(ERROR) | ON(GONE),
    [SENT] = ON(DROP) | ON(DUP) | ON(DELAY) | ON(ERROR) | ON(GONE),
    [QP] = ON(BREAK),
    [POLL] = ON(FAIL),
    [ARM] = ON(FAIL),
    [WAIT] = ON(FAIL) | ON(EARLY),
    [PROBE] = ON(BREAK),
    [MAKE] = ON(FAIL),
    [CONNECT] = ON(FAIL),
    [RESET] = ON(FAIL),
    [RKEY_PTR] = ON(FAIL),
};

typedef struct rule {
    point at;
    action what;
    uint32_t first, every, k;
} rule;

/* A completion held by the decorator. */
typedef struct held {
    dp_wc wc;
    uint64_t due; /* poll that may deliver it */
} held;

typedef struct queue { /* of one completion queue, oldest first */
    const dp_cq *cq;
    uint64_t polls;
    held *items;
    uint32_t n, cap;
} queue;

struct fault {
    dp_ops ops; /* first: an object's ops pointer leads here */
    const dp_ops *inner;
    rule rules[RULES_MAX];
    uint32_t n_rules;
    uint32_t seen[POINTS];
    uint32_t count;
    bool stopped;
    queue queues[CQS_MAX];
    const dp_qp *down[QPS_MAX]; /* broken by a rule */
};

static fault *of(const dp_ops *ops) { return (fault *)(uintptr_t)ops; }

/* ---- the script ---- */

/* The action of the first rule for this event, and its number. */
static action due(fault *f, point at, uint32_t *k) {
    if (f->stopped)
        return NOTHING;
    uint32_t n = ++f->seen[at];
    for (uint32_t i = 0; i < f->n_rules; i++) {
        const rule *r = &f->rules[i];
        if (r->at != at || n < r->first || (n > r->first && (!r->every || (n - r->first) % r->every)))
            continue;
        __atomic_fetch_add(&f->count, 1, __ATOMIC_RELAXED);
        if (k)
            *k = r->k;
        return r->what;
    }
    return NOTHING;
}

static bool number(const char **p, uint32_t *out) {
    char *end;
    unsigned long v = strtoul(*p, &end, 10);
    if (end == *p || **p < '0' || **p > '9' || v == 0 || v > UINT32_MAX)
        return false;
    *out = (uint32_t)v;
    *p = end;
    return true;
}

/* Length of the longest name of the table at p, its index in *out; 0: none. */
static size_t name(const char *p, const char *const *table, int n, int *out) {
    size_t best = 0;
    for (int i = 0; i < n; i++) {
        size_t len = strlen(table[i]);
        if (len > best && !strncmp(p, table[i], len)) {
            best = len;
            *out = i;
        }
    }
    return best;
}

static bool parse_rule(const char **p, rule *r) {
    int at = 0, what = 0;
    *p += name(*p, point_names, POINTS, &at);
    r->at = (point)at;
    if (*(*p)++ != ':' || !number(p, &r->first))
        return false;
    if (**p == '+' && (++*p, !number(p, &r->every)))
        return false;
    if (*(*p)++ != '=')
        return false;
    *p += name(*p, action_names, (int)(sizeof action_names / sizeof *action_names), &what);
    r->what = (action)what;
    if (!(allowed[r->at] & ON(r->what)))
        return false;
    if ((r->what == DELAY) != (**p == '('))
        return false;
    return r->what != DELAY || (++*p, number(p, &r->k) && *(*p)++ == ')');
}

static int parse(fault *f, const char *script, dp_error *err) {
    for (const char *p = script; *p;) {
        const char *start = p;
        if (f->n_rules == RULES_MAX)
            return dp_fail(err, DP_INVALID, 0, "fault script: more than %d rules", RULES_MAX);
        if (!parse_rule(&p, &f->rules[f->n_rules]) || (*p && *p != ','))
            return dp_fail(err, DP_INVALID, 0, "fault script: \"%.40s\" is not a rule", start);
        f->n_rules++;
        if (*p == ',' && !*++p)
            return dp_fail(err, DP_INVALID, 0, "fault script: a comma at the end");
    }
    return DP_OK;
}

void fault_stop(fault *f) {
    f->stopped = true;
    for (int i = 0; i < CQS_MAX; i++)
        for (uint32_t k = 0; k < f->queues[i].n; k++)
            f->queues[i].items[k].due = 0;
}

uint32_t fault_count(const fault *f) { return __atomic_load_n(&f->count, __ATOMIC_RELAXED); }

/* ---- queue pairs broken by rules ---- */

static const dp_qp **down_entry(fault *f, const dp_qp *qp) {
    for (int i = 0; i < QPS_MAX; i++)
        if (f->down[i] == qp)
            return &f->down[i];
    return NULL;
}

static void break_qp(fault *f, dp_qp *qp) {
    const dp_qp **free_entry = down_entry(f, NULL);
    if (!down_entry(f, qp) && free_entry)
        *free_entry = qp;
    dp_qp_break(qp, DP_PEER_GONE);
}

/* Counts an operation of the queue pair, which may break it. True if it is broken. */
static bool broken(fault *f, dp_qp *qp) {
    if (due(f, QP, NULL) == BREAK)
        break_qp(f, qp);
    return down_entry(f, qp) != NULL;
}

static void forget(fault *f, const dp_qp *qp) {
    const dp_qp **entry = down_entry(f, qp);
    if (entry)
        *entry = NULL;
    for (int i = 0; i < CQS_MAX; i++) {
        queue *q = &f->queues[i];
        uint32_t kept = 0;
        for (uint32_t k = 0; k < q->n; k++)
            if (q->items[k].wc.qp != qp)
                q->items[kept++] = q->items[k];
        q->n = kept;
    }
}

/* ---- completions ---- */

static queue *queue_of(fault *f, const dp_cq *cq) {
    for (int i = 0; i < CQS_MAX; i++)
        if (f->queues[i].cq == cq)
            return &f->queues[i];
    return NULL;
}

static void push(queue *q, const dp_wc *wc, uint64_t at) {
    if (q->n == q->cap) {
        q->cap = q->cap ? 2 * q->cap : 64;
        q->items = realloc(q->items, q->cap * sizeof *q->items);
        if (!q->items)
            abort();
    }
    q->items[q->n++] = (held){*wc, at};
}

static void take(fault *f, queue *q, dp_wc *wc) {
    if (broken(f, wc->qp))
        return;
    uint32_t k = 0;
    action a = due(f, wc->op == DP_OP_RECV || wc->op == DP_OP_RECV_IMM ? RECV : SENT, &k);
    if (a == DROP)
        return;
    if (a == ERROR || a == GONE) {
        wc->status = a == GONE ? DP_PEER_GONE : DP_CONNECTION;
        wc->imm = wc->byte_len = 0;
        wc->qp->state = DP_QP_ERROR;
    }
    push(q, wc, a == DELAY ? q->polls + k : 0);
    if (a == DUP)
        push(q, wc, 0);
}

static int cq_poll(dp_cq *cq, dp_wc *wc, int n) {
    fault *f = of(cq->ops);
    queue *q = queue_of(f, cq);
    if (due(f, POLL, NULL) == FAIL)
        return DP_FATAL;
    q->polls++;
    for (int got = PULL; got == PULL;) {
        dp_wc in[PULL];
        got = f->inner->cq_poll(cq, in, PULL);
        cq->peek = NULL; /* it does not show the held completions */
        if (got < 0 && !q->n)
            return got;
        for (int i = 0; i < got; i++)
            take(f, q, &in[i]);
    }
    int given = 0;
    while (given < n && (uint32_t)given < q->n && q->items[given].due <= q->polls) {
        wc[given] = q->items[given].wc;
        given++;
    }
    if (given)
        memmove(q->items, q->items + given, (q->n - (uint32_t)given) * sizeof *q->items);
    q->n -= (uint32_t)given;
    return given;
}

static int cq_arm(dp_cq *cq) {
    fault *f = of(cq->ops);
    return due(f, ARM, NULL) == FAIL ? DP_FATAL : f->inner->cq_arm(cq);
}

static void cq_disarm(dp_cq *cq) { of(cq->ops)->inner->cq_disarm(cq); }

static int cq_wait(dp_cq *cq, int64_t timeout_ns) {
    fault *f = of(cq->ops);
    action a = due(f, WAIT, NULL);
    if (a == FAIL)
        return DP_FATAL;
    /* Held completions become due by polls, not by sleeping. */
    return a == EARLY || queue_of(f, cq)->n ? DP_OK : f->inner->cq_wait(cq, timeout_ns);
}

static void cq_wake(dp_cq *cq) { of(cq->ops)->inner->cq_wake(cq); }

static void cq_promise_hot(dp_cq *cq, bool hot) { of(cq->ops)->inner->cq_promise_hot(cq, hot); }

/* ---- posts ---- */

/* DP_OK: go on. */
static int may_post(fault *f, dp_qp *qp, point at) {
    if (broken(f, qp))
        return DP_CONNECTION;
    switch (due(f, at, NULL)) {
    case BUSY: return DP_BUSY;
    case FAIL: qp->state = DP_QP_ERROR; return DP_CONNECTION;
    default: return DP_OK;
    }
}

/* shm completes a post at once, which shows in peek. */
static int posted(dp_qp *qp, int st) {
    qp->cq->peek = NULL;
    return st;
}

#define FORWARD(at, qp, call)                                                                                          \
    fault *f = of((qp)->ops);                                                                                          \
    int st = may_post(f, qp, at);                                                                                      \
    return st ? st : posted(qp, f->inner->call)

static int post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                      uint32_t flags) {
    FORWARD(POST, qp, post_write(qp, sge, n, raddr, rkey, wr_id, flags));
}
static int post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                          uint64_t wr_id, uint32_t flags) {
    FORWARD(POST, qp, post_write_imm(qp, sge, n, raddr, rkey, imm, wr_id, flags));
}
static int post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    FORWARD(POST, qp, post_read(qp, sge, raddr, rkey, wr_id, flags));
}
static int post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                          uint32_t flags) {
    FORWARD(POST, qp, post_fetch_add(qp, sge, raddr, rkey, add, wr_id, flags));
}
static int post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                             uint64_t wr_id, uint32_t flags) {
    FORWARD(POST, qp, post_compare_swap(qp, sge, raddr, rkey, expected, desired, wr_id, flags));
}
static int post_recv(dp_qp *qp, uint64_t wr_id) {
    FORWARD(POST_RECV, qp, post_recv(qp, wr_id));
}

/* ---- making, connecting, destroying ---- */

static bool cannot_make(fault *f, const char *what, dp_error *err) {
    if (due(f, MAKE, NULL) != FAIL)
        return false;
    dp_fail(err, DP_FATAL, 0, "%s: the fault script says no", what);
    return true;
}

static int domain_create(dp_dev *dev, dp_domain **out, dp_error *err) {
    fault *f = of(dev->ops);
    return cannot_make(f, "create domain", err) ? DP_FATAL : f->inner->domain_create(dev, out, err);
}

static void domain_destroy(dp_domain *d) { of(d->dev->ops)->inner->domain_destroy(d); }

static int mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    fault *f = of(d->dev->ops);
    return cannot_make(f, "allocate region", err) ? DP_FATAL : f->inner->mem_alloc(d, size, access, out, err);
}

static int mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err) {
    fault *f = of(d->dev->ops);
    return cannot_make(f, "register region", err) ? DP_FATAL : f->inner->mem_register(d, addr, size, access, out, err);
}

static void mem_free(dp_mem *m) { of(m->domain->dev->ops)->inner->mem_free(m); }

static int cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err) {
    fault *f = of(dev->ops);
    queue *q = queue_of(f, NULL);
    if (!q)
        return dp_fail(err, DP_INVALID, 0, "more than %d completion queues with faults", CQS_MAX);
    if (cannot_make(f, "create completion queue", err))
        return DP_FATAL;
    int st = f->inner->cq_create(dev, capacity, out, err);
    if (st == DP_OK) {
        (*out)->ops = &f->ops;
        *q = (queue){.cq = *out};
    }
    return st;
}

static void cq_destroy(dp_cq *cq) {
    fault *f = of(cq->ops);
    queue *q = queue_of(f, cq);
    f->inner->cq_destroy(cq);
    free(q->items);
    *q = (queue){0};
}

static int qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err) {
    fault *f = of(d->dev->ops);
    if (cannot_make(f, "create queue pair", err))
        return DP_FATAL;
    int st = f->inner->qp_create(d, cq, attr, out, err);
    cq->peek = NULL;
    if (st == DP_OK)
        (*out)->ops = &f->ops;
    return st;
}

static int qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err) {
    return of(qp->ops)->inner->qp_export(qp, blob, len, err);
}

static int qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err) {
    fault *f = of(qp->ops);
    if (due(f, CONNECT, NULL) == FAIL)
        return dp_fail(err, DP_CONNECTION, 0, "connect: the fault script says no");
    return posted(qp, f->inner->qp_connect(qp, blob, len, err));
}

static int qp_reset(dp_qp *qp, dp_error *err) {
    fault *f = of(qp->ops);
    if (due(f, RESET, NULL) == FAIL) {
        qp->state = DP_QP_ERROR;
        return dp_fail(err, DP_FATAL, 0, "reset: the fault script says no");
    }
    int st = posted(qp, f->inner->qp_reset(qp, err));
    if (st == DP_OK)
        forget(f, qp);
    return st;
}

static void qp_destroy(dp_qp *qp) {
    fault *f = of(qp->ops);
    dp_cq *cq = qp->cq;
    forget(f, qp);
    f->inner->qp_destroy(qp);
    cq->peek = NULL;
}

static void *rkey_ptr(dp_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len) {
    fault *f = of(qp->ops);
    return due(f, RKEY_PTR, NULL) == FAIL ? NULL : f->inner->rkey_ptr(qp, raddr, rkey, len);
}

static int qp_probe(dp_qp *qp) {
    fault *f = of(qp->ops);
    if (due(f, PROBE, NULL) == BREAK)
        break_qp(f, qp);
    return f->inner->qp_probe(qp);
}

static void qp_notify(dp_qp *qp) { of(qp->ops)->inner->qp_notify(qp); }

static void dev_close(dp_dev *dev) {
    fault *f = of(dev->ops);
    dev->ops = f->inner;
    f->inner->dev_close(dev);
    free(f);
}

static const dp_ops fault_ops = {
    .dev_close = dev_close,
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
    .post_read = post_read,
    .post_fetch_add = post_fetch_add,
    .post_compare_swap = post_compare_swap,
    .post_recv = post_recv,
    .rkey_ptr = rkey_ptr,
    .qp_probe = qp_probe,
    .qp_notify = qp_notify,
};

int fault_wrap(dp_dev *dev, const char *script, fault **out, dp_error *err) {
    fault *f = calloc(1, sizeof *f);
    if (!f)
        return dp_fail(err, DP_FATAL, 0, "fault script: no memory");
    int st = parse(f, script, err);
    if (st) {
        free(f);
        return st;
    }
    f->ops = fault_ops;
    f->inner = dev->ops;
    dev->ops = &f->ops;
    if (out)
        *out = f;
    return DP_OK;
}

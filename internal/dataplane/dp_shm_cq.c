/* Completion queues of shm: taking messages out of receive rings, sleeping and waking. */
#include <errno.h>
#include <linux/membarrier.h>
#include <string.h>

#include "dp_shm.h"
#include "dp_wire.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNSURE_NS 1000000

/* Ends the connection: the peer broke the provider's protocol. */
static __attribute__((noinline, cold)) int violation(shm_qp *qp, dp_wc *wc) {
    wc->status = DP_CONNECTION;
    qp->q.state = DP_QP_ERROR;
    dp_qp_break(&qp->q, DP_PROTOCOL);
    return 1;
}

/* Stores an entry's data at its target. The peer has written the target's position, so it is checked. */
static inline bool store_head(shm_qp *qp, const uint8_t *data, uint32_t head, uint32_t region, uint64_t offset) {
    if (region >= qp->n_expose || head > SHM_INLINE)
        return false;
    const dp_mem *m = &qp->expose[region]->m;
    if (!(m->access & DP_REMOTE_WRITE) || offset > m->size || head > m->size - offset)
        return false;
    dp_copy_small((uint8_t *)m->addr + offset, data, head);
    return true;
}

/* Takes the next message if there is one. 1 taken, 0 none. */
static ALWAYS_INLINE int take_entry(shm_qp *qp, dp_wc *wc) {
    uint32_t pos = qp->rpos;
    const shm_entry *e = &qp->segment->ring[pos & qp->mask];
    /* Acquire pairs with the release in publish(): the entry and the data it announces are visible. */
    uint64_t v = __atomic_load_n(&e->seq_imm, __ATOMIC_ACQUIRE);
    if ((uint32_t)v != pos + 1)
        return 0;
    if (__builtin_expect(qp->q.state == DP_QP_ERROR, 0))
        return 0;
    wc->wr_id = qp->q.reposts ? 0 : qp->recvs[pos & qp->mask];
    wc->qp = &qp->q;
    wc->status = DP_OK;
    wc->op = DP_OP_RECV_IMM;
    if (__builtin_expect(pos == qp->rposted, 0)) /* no receive posted: the peer overran its credit */
        return violation(qp, wc);
    qp->rpos = pos + 1;
    qp->rposted += qp->q.reposts; /* at most max_recv are posted, because this one was */
    /* The entry is the peer's memory: each word is read once and checked before use. */
    uint64_t what = *(const volatile uint64_t *)&e->what;
    uint32_t head = what >> 40 & 0xff, op = what >> 48 & 0xff;
    wc->imm = (uint32_t)(v >> 32);
    wc->byte_len = (uint32_t)what;
    if (__builtin_expect(op != DP_OP_RECV_IMM, 0))
        return violation(qp, wc);
    if (head && !store_head(qp, e->data, head, what >> 32 & 0xff, *(const volatile uint64_t *)&e->offset))
        return violation(qp, wc);
    return 1;
}

/* Takes up to n messages. If their receives are posted again, the count of receives is published once for all of them. */
static ALWAYS_INLINE int take_entries(shm_qp *qp, dp_wc *wc, int n) {
    int got = 0;
    while (got < n && take_entry(qp, &wc[got]))
        got++;
    if (got && qp->q.reposts)
        shm_show_posted(qp);
    return got;
}

int shm_cq_poll(dp_cq *c, dp_wc *wc, int n) {
    shm_cq *cq = (shm_cq *)c;
    int got = 0;
    while (cq->local_head != cq->local_tail && got < n) {
        wc[got] = cq->local[cq->local_head++ & cq->local_mask];
        ((shm_qp *)wc[got].qp)->unpolled--;
        got++;
    }
    uint32_t n_qps = cq->n_qps;
    if (n_qps == 1) {
        got += take_entries(cq->qps[0], wc + got, n - got);
        shm_show_next(cq);
        return got;
    }
    /* After a call that returned n completions, the next one begins with another queue pair, so that none starves. */
    for (uint32_t k = 0; k < n_qps && got < n; k++) {
        uint32_t at = cq->turn + k;
        got += take_entries(cq->qps[at >= n_qps ? at - n_qps : at], wc + got, n - got);
    }
    if (got == n && n_qps)
        cq->turn = (cq->turn + 1) % n_qps;
    return got;
}

static void take_back_promise(shm_cq *cq) {
    if (!cq->hot)
        return;
    cq->hot = false;
    __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_SEQ_CST);
    /* Peers that saw HOT left their barrier out: pass one on their CPUs. Partner of the early return in
     * notify(): afterwards either their entry is visible to our next poll or they see AWAKE. */
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0))
        cq->no_barrier = cq->unsure = true; /* a filter may have forbidden it after we registered */
}

int shm_cq_arm(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    take_back_promise(cq);
    __atomic_store_n(cq->mode, SHM_SLEEPING, __ATOMIC_RELAXED);
    /* The caller's next poll must come after this. An exchange alone would not do: on aarch64 later loads may pass
     * its store. Partners: the fence in notify(), the one in shm_cq_wake. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return DP_OK;
}

void shm_cq_disarm(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    if (!cq->hot)
        __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_RELEASE);
}

void shm_cq_promise_hot(dp_cq *c, bool hot) {
    shm_cq *cq = (shm_cq *)c;
    if (cq->hot == hot)
        return;
    if (hot) {
        if (cq->n_cold || cq->no_barrier || !((shm_dev *)cq->c.dev)->membarrier)
            return;
        cq->hot = true;
        __atomic_store_n(cq->mode, SHM_HOT, __ATOMIC_RELEASE);
    } else {
        shm_cq_arm(c);
        shm_cq_disarm(c);
    }
}

int shm_cq_wait(dp_cq *c, int64_t timeout_ns) {
    shm_cq *cq = (shm_cq *)c;
    if (!__atomic_exchange_n(&cq->wake, 0, __ATOMIC_ACQ_REL)) {
        struct timespec ts, *t = NULL;
        /* The barrier failed. A writer that has seen the promise will not wake this side, and its entry may still be in its
         * store buffer. The entry becomes visible soon, so wait only briefly. */
        if (cq->unsure && (timeout_ns < 0 || timeout_ns > UNSURE_NS))
            timeout_ns = UNSURE_NS;
        cq->unsure = false;
        if (timeout_ns >= 0) {
            ts = (struct timespec){timeout_ns / 1000000000, timeout_ns % 1000000000};
            t = &ts;
        }
        /* EAGAIN: the mode is AWAKE already. EINTR, ETIMEDOUT: the caller looks again. */
        shm_futex(cq->mode, FUTEX_WAIT, SHM_SLEEPING, t);
    }
    __atomic_store_n(cq->mode, SHM_AWAKE, __ATOMIC_RELEASE);
    return DP_OK;
}

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#define WAITV_32 2 /* FUTEX_32, which older headers do not have */

/* As the kernel has it, since 5.16. */
typedef struct waitv {
    uint64_t value, word;
    uint32_t flags, reserved;
} waitv;

/* Returns the page that all the queues share, or NULL. */
static shm_mode_page *page_of(dp_cq **c, uint32_t n) {
    shm_mode_page *page = ((shm_cq *)c[0])->page;
    for (uint32_t i = 1; i < n; i++)
        if (((shm_cq *)c[i])->page != page)
            return NULL;
    return page;
}

bool shm_cq_arm_many(dp_cq **c, uint32_t n) {
    shm_mode_page *page = page_of(c, n);
    if (!page)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        shm_cq *cq = (shm_cq *)c[i];
        take_back_promise(cq);
        if (__atomic_load_n(cq->mode, __ATOMIC_RELAXED) != SHM_TOGETHER) /* stays set until a queue is used alone */
            __atomic_store_n(cq->mode, SHM_TOGETHER, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&page->sleeps, 1, __ATOMIC_RELAXED);
    __atomic_store_n(shm_together(page->map), SHM_SLEEPING, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* as in shm_cq_arm */
    return true;
}

void shm_cq_disarm_many(dp_cq **c, uint32_t n) {
    shm_mode_page *page = page_of(c, n);
    if (page) {
        __atomic_store_n(&page->sleeps, 0, __ATOMIC_RELAXED);
        __atomic_store_n(shm_together(page->map), SHM_AWAKE, __ATOMIC_RELEASE);
    }
    for (uint32_t i = 0; !page && i < n; i++)
        shm_cq_disarm(c[i]);
}

/* Sleeps until one of the words is no longer SLEEPING. Returns false if the kernel has no futex_waitv. */
static bool sleep_on_all(dp_cq **c, uint32_t n, int64_t timeout_ns) {
    waitv v[SHM_WAIT_MAX];
    for (uint32_t i = 0; i < n; i++)
        v[i] = (waitv){SHM_SLEEPING, (uintptr_t)((shm_cq *)c[i])->mode, WAITV_32, 0};
    int64_t until = dp_now_ns() + (timeout_ns < 0 ? INT64_MAX / 2 : timeout_ns); /* futex_waitv takes an absolute time */
    struct timespec ts = {until / 1000000000, until % 1000000000};
    int saved = errno;
    bool worked = syscall(SYS_futex_waitv, v, n, 0, &ts, CLOCK_MONOTONIC) >= 0 || (errno != ENOSYS && errno != EPERM);
    errno = saved;
    return worked;
}

bool shm_cq_wait_many(dp_cq **c, uint32_t n, int64_t timeout_ns) {
    shm_mode_page *page = page_of(c, n);
    bool woken = false, worked = true;
    if (n > SHM_WAIT_MAX)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        shm_cq *cq = (shm_cq *)c[i];
        woken |= __atomic_exchange_n(&cq->wake, 0, __ATOMIC_ACQ_REL) != 0;
        if (cq->unsure && (timeout_ns < 0 || timeout_ns > UNSURE_NS))
            timeout_ns = UNSURE_NS; /* as in shm_cq_wait */
        cq->unsure = false;
    }
    if (!woken && page) {
        struct timespec ts = {timeout_ns / 1000000000, timeout_ns % 1000000000};
        shm_futex(shm_together(page->map), FUTEX_WAIT, SHM_SLEEPING, timeout_ns < 0 ? NULL : &ts);
    } else if (!woken) {
        worked = sleep_on_all(c, n, timeout_ns);
    }
    if (worked)
        shm_cq_disarm_many(c, n);
    return worked;
}

void shm_cq_wake(dp_cq *c) {
    shm_cq *cq = (shm_cq *)c;
    __atomic_store_n(&cq->wake, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* partner: the one in shm_cq_arm */
    uint32_t sleeping = SHM_SLEEPING;
    uint32_t *word = __atomic_load_n(&cq->page->sleeps, __ATOMIC_RELAXED) ? shm_together(cq->page->map) : cq->mode;
    __atomic_compare_exchange_n(word, &sleeping, SHM_AWAKE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    /* Wake even if the flag was not SLEEPING, because peers write it too. A peer may have died after it changed the flag and before it
     * woke this side. */
    shm_futex(word, FUTEX_WAKE, 1, NULL);
}

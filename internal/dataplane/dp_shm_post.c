/* Operations of shm: stores into the peer's memory and entries for its receive ring. */
#include <string.h>

#include "dp_shm.h"
#include "dp_wire.h"

/* If more than AHEAD calls are in flight, a post prefetches the entry that will be used AHEAD posts later. Stores leave a processor in order. So without the
 * prefetch, the stores of later calls wait until the peer's cache has given up the entry's line. With fewer calls in flight, the peer may be polling that entry.
 * With 64 calls of 8 bytes in flight, a call takes 23.6 ns instead of 25.4 ns between near cores, and 67 ns instead of 103 ns between far cores. */
#define AHEAD 4

/* Index of the peer's region that holds [raddr, raddr+len), with the right `need`; -1 none. */
static inline int find_region(const shm_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len, uint32_t need) {
    for (uint32_t i = 0; i < qp->peer.n_regions; i++) {
        const shm_region *r = &qp->peer.regions[i];
        if (r->rkey != rkey)
            continue;
        uint64_t offset = raddr - r->base; /* wraps to a huge value below base */
        return (r->access & need) && offset <= r->size && len <= r->size - offset ? (int)i : -1;
    }
    return -1;
}

/* Wakes the peer if it sleeps. Called only if the peer has not promised to poll. */
static __attribute__((noinline)) void wake(shm_qp *qp) {
    uint32_t *word = qp->peer.mode;
    /* The entry must be visible before mode is read. Partner: the fence in shm_cq_arm. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint32_t sleeping = SHM_SLEEPING, mode = __atomic_load_n(word, __ATOMIC_RELAXED);
    if (mode == SHM_TOGETHER) {
        word = shm_together(qp->peer.page);
        mode = __atomic_load_n(word, __ATOMIC_RELAXED);
    }
    if (mode == SHM_SLEEPING && __atomic_compare_exchange_n(word, &sleeping, SHM_AWAKE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        shm_futex(word, FUTEX_WAKE, 1, NULL);
}

/* Wakes the peer, unless it has promised to poll. */
static inline void notify(shm_qp *qp) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST); /* orders the compiler; the peer's membarrier orders the processor */
    if (__builtin_expect(__atomic_load_n(qp->peer.mode, __ATOMIC_RELAXED) != SHM_HOT, 0)) /* partner: the membarrier in shm_cq_arm */
        wake(qp);
}

static inline int may_post(shm_qp *qp) {
    if (qp->q.state != DP_QP_CONNECTED)
        return DP_CONNECTION;
    if (__atomic_load_n(&qp->q.broken, __ATOMIC_RELAXED))
        return DP_CONNECTION;
    return qp->unpolled >= qp->q.max_send ? DP_BUSY : DP_OK;
}

/* Refuses a remote access as a network adapter does: with a completion and the error state. */
static int refuse(shm_qp *qp, uint64_t wr_id, dp_op op) {
    qp->q.state = DP_QP_ERROR;
    shm_local_push(qp, wr_id, DP_INVALID, op, 0);
    return DP_OK;
}

static inline uint64_t total_of(const dp_sge *sge, int n) {
    return n == 2 ? (uint64_t)sge[0].len + sge[1].len : n == 1 ? sge[0].len : 0;
}

static inline void put(uint8_t *dst, const void *src, uint64_t len) {
    /* A result that was produced in place (dp_rkey_ptr) is already there. */
    if (len && dst != src)
        memcpy(dst, src, len);
}

/* Reads the peer's count of receives. DP_OK: there is one for the next message. The count only grows, and by no more than the ring has entries. Any other
 * value is garbage, written by a function that overwrites memory. */
static __attribute__((noinline)) int look_for_credit(shm_qp *qp) {
    /* Acquire pairs with the release in shm_show_posted: the peer has read the entry that we are about to reuse. */
    uint32_t posted = __atomic_load_n(&qp->peer.segment->posted, __ATOMIC_ACQUIRE);
    if (posted - qp->credit > qp->peer.ring_size || posted - qp->spos > qp->peer.ring_size) {
        dp_qp_break(&qp->q, DP_PROTOCOL);
        return DP_CONNECTION;
    }
    qp->credit = posted;
    return qp->spos != posted ? DP_OK : DP_BUSY;
}

/* Returns DP_OK if the peer's ring has room for one more message. */
static inline int take_credit(shm_qp *qp) { return qp->spos != qp->credit ? DP_OK : look_for_credit(qp); }

static inline void publish(shm_qp *qp, shm_entry *e, uint64_t what, uint32_t imm) {
    e->what = what;
    /* Release pairs with the acquire in take_entry(). */
    __atomic_store_n(&e->seq_imm, (uint64_t)imm << 32 | (uint32_t)(qp->spos + 1), __ATOMIC_RELEASE);
    qp->spos++;
    if (qp->spos - qp->rpos + AHEAD > 2 * AHEAD) /* the difference is the number of calls in flight, negative at the server */
        dp_prefetch_write(&qp->peer.segment->ring[(qp->spos + AHEAD) & (qp->peer.ring_size - 1)]);
    notify(qp);
}

int shm_post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                          uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    if (n < 0 || n > 2)
        return DP_INVALID;
    uint64_t total = total_of(sge, n);
    /* A write of no bytes needs no key, as on a network adapter. */
    int i = total ? find_region(qp, raddr, rkey, total, DP_REMOTE_WRITE) : 0;
    if (i < 0)
        return refuse(qp, wr_id, DP_OP_WRITE);
    uint8_t *dst = total ? qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base) : NULL;
    for (int k = 0; total && k < n; k++) {
        put(dst, sge[k].addr, sge[k].len);
        dst += sge[k].len;
    }
    if (flags & DP_SIGNALED)
        shm_local_push(qp, wr_id, DP_OK, DP_OP_WRITE, (uint32_t)total);
    return DP_OK;
}

static inline void put_small(uint8_t *dst, const dp_sge *sge, int n) {
    if (n > 0) {
        dp_copy_small(dst, sge[0].addr, sge[0].len);
        if (n > 1)
            dp_copy_small(dst + sge[0].len, sge[1].addr, sge[1].len);
    }
}

/* Stores data that exceeds an entry: the bytes before the target's next cache line in `head`, the rest at the target. */
static uint32_t put_split(uint8_t *head, uint8_t *dst, const dp_sge *sge, int n) {
    uint32_t want = (uint32_t)-(uintptr_t)dst & (DP_CACHE_LINE - 1);
    if (want > SHM_INLINE)
        want = 0;
    dst += want;
    uint32_t filled = 0;
    for (int k = 0; k < n; k++) {
        const uint8_t *src = sge[k].addr;
        uint32_t len = sge[k].len;
        if (filled < want) {
            uint32_t part = len < want - filled ? len : want - filled;
            dp_copy_small(head + filled, src, part);
            filled += part;
            src += part;
            len -= part;
        }
        put(dst, src, len);
        dst += len;
    }
    return want;
}

static __attribute__((noinline)) int post_any(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                                              uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    if (n < 0 || n > 2)
        return DP_INVALID;
    uint64_t total = total_of(sge, n);
    int i = total ? find_region(qp, raddr, rkey, total, DP_REMOTE_WRITE) : 0;
    if (i < 0 || total > UINT32_MAX)
        return refuse(qp, wr_id, DP_OP_WRITE);
    if ((st = take_credit(qp)))
        return st;
    uint64_t offset = total ? raddr - qp->peer.regions[i].base : 0;
    shm_entry *e = &qp->peer.segment->ring[qp->spos & (qp->peer.ring_size - 1)];
    uint32_t head = (uint32_t)total;
    if (total <= SHM_INLINE) {
        put_small(e->data, sge, n);
    } else {
        head = put_split(e->data, qp->peer.regions[i].map + offset, sge, n);
    }
    e->offset = offset;
    publish(qp, e, shm_what((uint32_t)total, (uint32_t)i, head), imm);
    if (flags & DP_SIGNALED)
        shm_local_push(qp, wr_id, DP_OK, DP_OP_WRITE, (uint32_t)total);
    return DP_OK;
}

/* A short path for most messages, with 85 instructions instead of 140: a single piece that fits into an entry and goes to the peer's first region.
 * post_any handles all other messages, and errors. */
int shm_post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    const shm_region *r = &qp->peer.regions[0];
    uint64_t offset = raddr - r->base; /* wraps to a huge value below base */
    uint32_t len = n == 1 ? sge->len : UINT32_MAX;
    if (__builtin_expect(len > SHM_INLINE || r->rkey != rkey || offset >= r->size || len > r->size - offset ||
                             !(r->access & DP_REMOTE_WRITE) || qp->spos == qp->credit || flags & DP_SIGNALED ||
                             may_post(qp) != DP_OK, 0))
        return post_any(q, sge, n, raddr, rkey, imm, wr_id, flags);
    shm_entry *e = &qp->peer.segment->ring[qp->spos & (qp->peer.ring_size - 1)];
    dp_copy_small(e->data, sge->addr, len);
    e->offset = offset;
    publish(qp, e, shm_what(len, 0, len), imm);
    return DP_OK;
}

int shm_post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    int st = may_post(qp);
    if (st)
        return st;
    int i = find_region(qp, raddr, rkey, sge->len, DP_REMOTE_READ);
    if (i < 0)
        return refuse(qp, wr_id, DP_OP_READ);
    put((uint8_t *)sge->addr, qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base), sge->len);
    if (flags & DP_SIGNALED)
        shm_local_push(qp, wr_id, DP_OK, DP_OP_READ, sge->len);
    return DP_OK;
}

/* Checks an atomic and sets *word to the peer's word. NULL: the atomic is refused, and the post returns the result. */
static int find_word(shm_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, dp_op op, uint64_t **word) {
    *word = NULL;
    int st = may_post(qp);
    if (st)
        return st;
    int i = find_region(qp, raddr, rkey, 8, DP_REMOTE_ATOMIC);
    if (i < 0 || (raddr & 7) || sge->len < 8)
        return refuse(qp, wr_id, op);
    *word = (uint64_t *)(void *)(qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base));
    return DP_OK;
}

static int executed(shm_qp *qp, const dp_sge *sge, uint64_t old, uint64_t wr_id, dp_op op, uint32_t flags) {
    memcpy((void *)sge->addr, &old, 8);
    if (flags & DP_SIGNALED)
        shm_local_push(qp, wr_id, DP_OK, op, 8);
    return DP_OK;
}

int shm_post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                              uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    uint64_t *word;
    int st = find_word(qp, sge, raddr, rkey, wr_id, DP_OP_FETCH_ADD, &word);
    if (!word)
        return st;
    return executed(qp, sge, __atomic_fetch_add(word, add, __ATOMIC_SEQ_CST), wr_id, DP_OP_FETCH_ADD, flags);
}

int shm_post_compare_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags) {
    shm_qp *qp = (shm_qp *)q;
    uint64_t *word;
    int st = find_word(qp, sge, raddr, rkey, wr_id, DP_OP_COMPARE_SWAP, &word);
    if (!word)
        return st;
    uint64_t old = expected; /* the exchange stores the word's value here if it differs */
    __atomic_compare_exchange_n(word, &old, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return executed(qp, sge, old, wr_id, DP_OP_COMPARE_SWAP, flags);
}

int shm_post_recv(dp_qp *q, uint64_t wr_id) {
    shm_qp *qp = (shm_qp *)q;
    if (q->state == DP_QP_ERROR)
        return DP_CONNECTION;
    if (qp->rposted - qp->rpos >= q->max_recv)
        return DP_BUSY;
    qp->recvs[qp->rposted++ & qp->mask] = wr_id;
    shm_show_posted(qp);
    return DP_OK;
}

void shm_qp_notify(dp_qp *q) { notify((shm_qp *)q); }

void *shm_rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len) {
    shm_qp *qp = (shm_qp *)q;
    if (q->state != DP_QP_CONNECTED)
        return NULL;
    int i = find_region(qp, raddr, rkey, len, DP_REMOTE_WRITE);
    return i < 0 ? NULL : qp->peer.regions[i].map + (raddr - qp->peer.regions[i].base);
}

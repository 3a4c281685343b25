/* The shm provider: remote memory semantics between processes of one host.
 *
 * Every region, receive ring and completion-queue page is a sealed memfd of its owner's, mapped by the peer. A
 * remote write is a store; its notification is an entry of the target's receive ring:
 *
 *     0        8      12   13   14   15   16              24                              64
 *     | seq|imm | len  |reg |head| op | 0  |    offset     |   first `head` bytes of data   |
 *
 * An entry is one cache line and is published by one 8-byte release store of (imm << 32 | seq), seq being the
 * entry's position + 1, so the consumer polls the line that carries the message and no index is shared. What
 * fits into the line's 40 data bytes travels in it (the receiver's poll stores it at its target, as a
 * network adapter may scatter small data to the completion entry); of longer data the part before the
 * target's next cache-line boundary does, so that a header that ends on a boundary rides in the entry and the
 * payload is stored straight into its lines.
 *
 * dp_shm_pack.c hands over connected queue pairs to another process of the node. dp_shm.c holds the objects, dp_shm_cq.c and
 * dp_shm_post.c the operations. dp_shm_link.c, dp_shm_monitor.c and dp_shm_peer.c exchange descriptors between two processes and detect
 * the end of the peer. dp_shm_share.c maps more memory of a connected peer.
 */
#ifndef RFAAS_DP_SHM_H
#define RFAAS_DP_SHM_H

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dp_fabric.h"

#define SHM_INLINE 40
#define SHM_RING_MAX 4096
#define SHM_PAGE 4096u
#define SHM_WAIT_MAX 64 /* queues of one wait; the kernel's own bound is 128 */

typedef struct shm_entry {
    uint64_t seq_imm; /* published last */
    uint64_t what;    /* shm_what() */
    uint64_t offset;  /* in the region */
    uint8_t data[SHM_INLINE];
} shm_entry;

/* len: bytes written; region: index into the target queue pair's exposed regions; head: bytes of data[] that
 * belong at offset; op: DP_OP_RECV_IMM. One word, so that writer and reader move it whole. */
static inline uint64_t shm_what(uint32_t len, uint32_t region, uint32_t head) {
    return len | (uint64_t)region << 32 | (uint64_t)head << 40 | (uint64_t)DP_OP_RECV_IMM << 48;
}
_Static_assert(sizeof(shm_entry) == DP_CACHE_LINE, "a ring entry is one cache line");

/* A queue pair's receive segment: written by the peer but for `posted`. */
typedef struct shm_segment {
    uint32_t posted; /* receives ever posted: written by the owner, the peer's credit */
    uint8_t pad[DP_CACHE_LINE - 4];
    shm_entry ring[]; /* ring_size entries */
} shm_segment;

/* State of a completion queue's owner: a word of the page, and the futex that the owner sleeps on.
 * HOT:      the owner promises not to sleep. Before it leaves this state it makes every peer's CPU pass a barrier
 *           (membarrier), so peers need none of their own.
 * AWAKE:    the owner may go to sleep at any time: peers pass a full barrier between publishing and reading the state.
 * SLEEPING: the owner sleeps or is about to: the peer that changes it to AWAKE wakes the owner.
 * TOGETHER: the state is in the page's word `together`, AWAKE or SLEEPING, which all queues of the page share. An owner that waits for
 *           all of them sleeps on this one futex, and only the first peer wakes it. */
enum { SHM_AWAKE = 0, SHM_SLEEPING = 1, SHM_HOT = 2, SHM_TOGETHER = 3 };
#define SHM_MODES (SHM_PAGE / DP_CACHE_LINE) /* queues of a page: each has a cache line; `together` follows the first state */

typedef struct shm_mode_page {
    int fd;
    uint8_t *map;
    uint32_t users, made; /* queues that use the page now, and that ever did */
    uint32_t sleeps;      /* the owner sleeps on `together`, or is about to; atomic. Peers cannot write it */
} shm_mode_page;

static inline uint32_t *shm_together(uint8_t *page) { return (uint32_t *)(void *)page + 1; }

typedef struct shm_dev shm_dev;
typedef struct shm_qp shm_qp;
typedef struct shm_shares shm_shares; /* memory shared by dp_qp_share */

typedef struct shm_mem {
    dp_mem m;
    int fd;           /* -1: the caller's memory */
    bool window;      /* the mapping is another region's, or the caller's */
    bool lent;        /* the mapping and fd are the caller's */
    uint64_t offset;  /* in fd */
    bool lost;        /* its mapping is gone, and other memory may be mapped at its address */
    uint32_t exposed; /* queue pairs that expose it */
} shm_mem;

typedef struct shm_cq {
    dp_cq c;
    uint32_t *mode; /* in the page that peers map */
    shm_mode_page *page;
    bool hot;        /* mode is SHM_HOT */
    bool no_barrier; /* membarrier was refused: no hot promise again */
    bool unsure;     /* it was refused when a promise was withdrawn: the next wait is short */
    uint32_t n_cold; /* connected peers that are not reached by membarrier: no hot promise with any */
    int32_t wake;    /* a wake for the next wait (atomic) */
    shm_qp **qps;
    uint32_t n_qps, cap_qps;
    uint32_t turn;  /* queue pair polled first */
    dp_wc *local;   /* completions of local operations */
    uint32_t local_head, local_tail, local_mask;
} shm_cq;

typedef struct shm_region { /* of the peer, mapped here */
    uint32_t rkey;
    uint32_t access;
    uint64_t base;
    uint64_t size;
    uint64_t offset; /* in its descriptor */
    uint8_t *map;
} shm_region;

/* What the peer handed over: descriptors first, mappings after shm_peer_map. */
typedef struct shm_peer {
    uint8_t token[16];
    uint32_t ring_size;
    uint32_t mode_at; /* offset of its queue's mode in the page */
    uint32_t reached; /* its process is registered for membarrier */
    uint32_t n_regions;
    shm_region regions[DP_EXPOSE_MAX];
    int fds[2 + DP_EXPOSE_MAX]; /* receive segment, completion-queue page, regions; -1 when closed */
    int keep_below;             /* shm_peer_map keeps descriptors below this one, for shm_qp_pack */
    shm_segment *segment;
    uint8_t *page;
    uint32_t *mode;
} shm_peer;

/* The contents of a blob except the token. A process that takes over a queue pair exports it with the original contents. */
typedef struct shm_home {
    uint8_t name[16];
    uint64_t netns;
    bool set; /* by shm_qp_unpack; if not set, the blob describes this process's device */
} shm_home;

struct shm_qp {
    dp_qp q;
    /* Receiving. */
    shm_segment *segment;
    uint32_t ring_size, mask;
    uint32_t rpos;      /* next entry to look at */
    uint32_t rposted;   /* receives ever posted */
    uint64_t *recvs;    /* their wr_id, by position & mask */
    /* Sending. */
    uint32_t spos;      /* next entry of the peer's ring */
    uint32_t credit;    /* peer's `posted` when last looked at */
    uint32_t unpolled;  /* completions of ours in the local queue */
    shm_peer peer;
    bool connected;
    bool takes_shared;  /* accepts memory that the peer shares */
    shm_shares *shares; /* NULL: none so far */
    /* Exchange, under the device's lock. */
    uint8_t token[16];
    int seg_fd;
    shm_peer *deposit; /* what a peer that connected first left here */
    shm_home home;     /* where the token was made known */
    bool taken;        /* the token was used */
    bool given;        /* its descriptors have left this process */
    int meeting;       /* socket on which a connect waits for the peer; -1: none */
    bool cancelled;    /* connects must not wait */
    shm_qp *next;
    uint32_t n_expose;
    shm_mem *expose[DP_EXPOSE_MAX];
};

typedef struct shm_link shm_link; /* a socket to a peer process */

struct shm_dev {
    dp_dev d;
    bool active_only, attended;
    bool membarrier;
    int keep_below; /* descriptors of peers below this one are kept; 0: none */
    int spare; /* active_only: a socket of the network namespace in which the device was opened, for connecting; -1: none */
    uint8_t boot_id[16];
    uint64_t netns;
    /* Everything below under lock. */
    pthread_mutex_t lock;
    shm_qp *qps;
    shm_link *links;
    uint64_t next_link;
    uint32_t n_newcomers; /* accepted sockets without a hello */
    bool listening;
    bool paused; /* no descriptor is left to accept a peer; atomic, written by the thread that handles events */
    uint8_t name[16]; /* of the listening abstract socket */
    int listen_fd, epoll_fd, stop_fd;
    pthread_t monitor;
};

/* memfd of size bytes, sealed against resizing, mapped with a PROT_NONE page behind it. */
int shm_segment_create(const char *what, uint64_t size, bool populate, int *fd, void **map, dp_error *err);
/* Finds the next pages that exist in a range of a memfd: len bytes from offset. Searches from *from on, and sets *from and *to to their
 * beginning and end. False: there are none. */
bool shm_next_data(int fd, uint64_t offset, uint64_t len, uint64_t *from, uint64_t *to);
/* map may lie within its first page. */
void shm_unmap(void *map, uint64_t size);
/* Maps size bytes from offset of fd, followed by an inaccessible page, if it is a memfd of ordinary pages that can no longer shrink and
 * holds them. NULL with errno otherwise. `now`: maps the existing pages at once. */
void *shm_map_checked(int fd, uint64_t offset, uint64_t size, bool writable, bool now);
/* Maps the peer's descriptors and closes them, except those to keep. `now`: maps the existing pages of regions at once instead of on first
 * use. The pages that every message needs are mapped in any case. */
int shm_peer_map(shm_peer *p, bool now, dp_error *err);
/* shm_peer_unmap unmaps after a failed map, and keeps the descriptors. shm_peer_clear also closes the descriptors. */
void shm_peer_unmap(shm_peer *p);
void shm_peer_clear(shm_peer *p);

uint64_t shm_segment_size(uint32_t ring_size);

/* ---- for the provider's own files ---- */

/* Not FUTEX_PRIVATE: the waker is another process. */
static inline long shm_futex(uint32_t *word, int op, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

/* With one queue pair and no local completion, its next entry shows whether there is anything to poll. */
static inline void shm_show_next(shm_cq *cq) {
    if (cq->n_qps == 1 && cq->local_head == cq->local_tail) {
        const shm_qp *qp = cq->qps[0];
        cq->c.peek = &qp->segment->ring[qp->rpos & qp->mask].seq_imm;
        cq->c.peek_value = qp->rpos + 1;
    } else {
        cq->c.peek = NULL;
    }
}

/* Release pairs with the acquire in look_for_credit(): our reads of the entries that this frees are done. */
static inline void shm_show_posted(shm_qp *qp) { __atomic_store_n(&qp->segment->posted, qp->rposted, __ATOMIC_RELEASE); }

static inline void shm_local_push(shm_qp *qp, uint64_t wr_id, int status, dp_op op, uint32_t len) {
    shm_cq *cq = (shm_cq *)qp->q.cq;
    /* Never overruns: unpolled is bounded by max_send, and the queue has room for every queue pair's. */
    cq->local[cq->local_tail++ & cq->local_mask] =
        (dp_wc){.wr_id = wr_id, .qp = &qp->q, .status = status, .op = op, .byte_len = len};
    qp->unpolled++;
    cq->c.peek = NULL;
}

/* dp_shm_cq.c: what arrives, sleeping and waking. dp_shm_post.c: what is sent. The operations of dp_ops. */
int shm_cq_poll(dp_cq *c, dp_wc *wc, int n);
int shm_cq_arm(dp_cq *c);
void shm_cq_disarm(dp_cq *c);
void shm_cq_promise_hot(dp_cq *c, bool hot);
int shm_cq_wait(dp_cq *c, int64_t timeout_ns);
bool shm_cq_arm_many(dp_cq **c, uint32_t n);
void shm_cq_disarm_many(dp_cq **c, uint32_t n);
bool shm_cq_wait_many(dp_cq **c, uint32_t n, int64_t timeout_ns);
void shm_cq_wake(dp_cq *c);
int shm_post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int shm_post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t
                       wr_id, uint32_t flags);
int shm_post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int shm_post_compare_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags);
int shm_post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                       uint32_t flags);
int shm_post_recv(dp_qp *q, uint64_t wr_id);
void shm_qp_notify(dp_qp *q);
void *shm_rkey_ptr(dp_qp *q, uint64_t raddr, uint32_t rkey, uint64_t len);

/* dp_shm_share.c */
int shm_qp_share(dp_qp *q, const dp_mem *mem);
void shm_qp_unshare(dp_qp *q, const dp_mem *mem);
void shm_qp_unshare_all(dp_qp *q);
void *shm_qp_shared_ptr(dp_qp *q, uint32_t rkey, uint64_t offset, uint64_t len, unsigned how);
void shm_qp_forget_shared(dp_qp *q);
/* Takes the messages of the peer that have arrived. DP_OK, or the status that ends the connection. Under dev->lock. */
int shm_shares_take(shm_qp *qp, int sock);
/* Unmaps what the peer shared, and forgets what was shared with it. */
void shm_shares_free(shm_qp *qp);

/* In dp_shm.c, for dp_shm_pack.c: make a queue pair without segment and token; list it with the device and the queue; make a completion
 * queue with this page (NULL: a new one), which the queue owns if the function succeeds. */
int shm_qp_new(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, shm_qp **out, dp_error *err);
void shm_qp_add(shm_qp *qp);
void shm_qp_free(shm_qp *qp);
int shm_cq_new(dp_dev *dev, shm_mode_page *page, uint32_t capacity, dp_cq **out, dp_error *err);
/* dp_shm_pack.c */
int shm_cq_pack(const dp_cq *c);
int shm_cq_unpack(dp_dev *dev, uint32_t capacity, int *fd, dp_cq **out, dp_error *err);
int shm_qp_pack(dp_qp *q, dp_packed_qp *out, int *fds, dp_error *err);
int shm_qp_unpack(dp_domain *d, dp_cq *c, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out,
                  dp_error *err);
/* dp_shm_link.c; dp_shm_monitor.c: shm_link_close */
int shm_link_export(shm_dev *dev, shm_qp *qp, void *blob, uint32_t *len, dp_error *err);
int shm_link_connect(shm_dev *dev, shm_qp *qp, const void *blob, uint32_t len, dp_error *err);
/* shm_link_cancel makes a connect that waits for its peer return early. Any thread may call it. */
void shm_link_cancel(shm_dev *dev, shm_qp *qp);
/* Closes the queue pair's links and drops deposits; its token is invalid afterwards. Returns whether any peer was
 * given the exposed regions through it. Only after this call is it certain that no peer will be. */
bool shm_link_forget(shm_dev *dev, shm_qp *qp);
int shm_link_probe(shm_dev *dev, shm_qp *qp);
/* The socket to the peer of a connected queue pair, -1 without one. */
int shm_link_peer_fd(shm_dev *dev, const shm_qp *qp);
void shm_link_close(shm_dev *dev);
int shm_event_fd(dp_dev *d);
void shm_attend(dp_dev *d);
bool shm_starved(const dp_dev *d);
int shm_link_identity(shm_dev *dev, dp_error *err);

#endif

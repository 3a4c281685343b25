/* Inside the verbs provider: the objects behind dp_dev, dp_domain, dp_mem, dp_cq and dp_qp, and what its
 * files ask of each other. Nothing outside dp_verbs_*.c includes this.
 *
 *   dp_verbs_load.c    libibverbs, loaded when the first device is looked for
 *   dp_verbs_device.c  choice of device, port, GID and P_Key; asynchronous events; preload
 *   dp_verbs_mem.c     protection domains and memory regions
 *   dp_verbs_cq.c      polling, blocking, and the bookkeeping that a completion triggers
 *   dp_verbs_qp.c      life of a queue pair: create, export, connect, reset, probe
 *   dp_verbs_late.c    connecting a queue pair in a sealed worker
 *   dp_verbs_blob.c    the address blob, byte by byte
 *   dp_verbs_post.c    posting work
 *
 * A work request carries this wr_id through the device; the user's own stays here, in a ring indexed by
 * the post counter, because a failed request reports only its wr_id and completions must survive resets:
 *
 *    63            37 36          17    16     15          0
 *   +----------------+--------------+---------+-------------+
 *   | epoch (27)     | slot (20)    | receive | index (16)  |
 *   +----------------+--------------+---------+-------------+
 *   `--------- tag of one life ----'            low bits of the post counter
 *
 * `slot` finds the queue pair in its completion queue's table. `epoch` grows with every reset and destroy,
 * so that a completion of an earlier life finds no match and is dropped.
 */
#ifndef RFAAS_DP_VERBS_H
#define RFAAS_DP_VERBS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "dp_fabric.h"
#include "dp_verbs_load.h"

#define DPV_INDEX_MASK 0xffffull
#define DPV_RECV_BIT (1ull << 16)
#define DPV_SLOT_SHIFT 17
#define DPV_SLOT_MASK 0xfffffull
#define DPV_EPOCH_SHIFT 37
#define DPV_TAG_MASK (~(DPV_INDEX_MASK | DPV_RECV_BIT))

#define DPV_MAX_SGE 2               /* pieces of one write */
#define DPV_MAX_INLINE 1024         /* room for a header and a small payload; soft-RoCE stops at 512 */
#define DPV_RD_ATOMIC 16            /* reads and atomics in flight, each direction */
#define DPV_POLL_BATCH 16           /* completions taken from the device at once */
#define DPV_ACK_BATCH 64            /* acknowledging an event takes a lock: do it for many */
#define DPV_KEEPALIVE_MS 1000       /* a peer not heard of for so long is asked for a sign of life */
#define DPV_TIMEOUT 16              /* local ack time-out exponent (268 ms), and how often a packet is repeated: see */
#define DPV_RETRY_COUNT 6           /* RATIONALE.md, "How does a waiter notice a silent peer?" */

#define DPV_KEEPALIVE 0x80000000u /* flag of a post of our own (with the DP_ ones): no completion of it is shown */

typedef struct dpv_qp dpv_qp;
typedef struct dpv_cq dpv_cq;

typedef struct dpv_dev {
    dp_dev base;
    struct ibv_context *ctx;
    struct ibv_device_attr attr;
    union ibv_gid gid; /* zero when the port has none */
    uint32_t gid_type; /* an ibv_gid_type */
    uint16_t lid;      /* InfiniBand only */
    uint16_t pkey;     /* value at pkey_index, host order */
    uint16_t pkey_index;
    uint8_t port;
    uint8_t link_layer; /* IBV_LINK_LAYER_INFINIBAND or _ETHERNET */
    uint8_t gid_index;
    bool use_grh;      /* route by GID: always on Ethernet, on InfiniBand when asked for */
    uint8_t mtu;       /* an ibv_mtu */
    uint8_t rd_atomic; /* reads and atomics we serve and start at once */
    uint8_t traffic_class;
    uint8_t service_level;
    uint8_t timeout;
    uint8_t retry_count;
    bool atomics;
    int64_t keepalive_ns;
    uint32_t inline_cap;  /* atomic; what creating queue pairs has shown the device to grant */
    uint32_t next_vector; /* atomic; completion vectors are dealt in turn */
    /* Guards the list of completion queues, and makes "read an event and mark its queue pair" one step
     * for dp_qp_reset, which must not be overtaken by an event of the life it ends. */
    pthread_mutex_t lock;
    dpv_cq *cqs;
} dpv_dev;

typedef struct dpv_domain {
    dp_domain base;
    struct ibv_pd *pd;
} dpv_domain;

/* Where a wr_id's slot number leads. qp is NULL while the slot is free; epoch outlives its queue pairs. */
typedef struct dpv_slot {
    dpv_qp *qp;
    uint64_t epoch;
} dpv_slot;

struct dpv_cq {
    dp_cq base;
    struct ibv_cq *cq;
    dpv_slot *slots;
    uint32_t n_slots;
    int32_t fatal; /* atomic: device removed or queue overrun */
    /* Completions that a post in need of room, or a reset, has taken off the device instead of dp_cq_poll,
     * oldest first. A ring of base.capacity entries; see dpv_cq_drain for why that suffices. */
    dp_wc *stash;
    uint32_t stash_head;
    uint32_t stash_len;
    struct ibv_comp_channel *channel;
    int wake_fd; /* eventfd */
    unsigned unacked;
    dpv_cq *next; /* device's list */
    dpv_cq **prev;
};

typedef struct dpv_sent {
    uint64_t wr_id;
    uint32_t op;    /* a dp_op */
    uint32_t flags; /* the poster's: says whether a good completion is shown */
} dpv_sent;

struct dpv_qp {
    dp_qp base;
    struct ibv_qp *qp;
    uint64_t tag; /* epoch and slot, as they stand in wr_id */
    /* Counters of posts; free running, head - tail are outstanding. */
    uint32_t send_head;
    uint32_t send_tail; /* moves at signalled completions only */
    uint32_t send_held; /* completions in the stash: they keep their room until delivered */
    uint32_t send_mask;
    uint32_t max_msg;     /* the device's, close at hand */
    uint32_t unsignalled; /* posts since the last signalled one */
    uint32_t signal_every;
    uint32_t reads_end; /* counter behind the newest read or atomic, while reads_pending */
    bool reads_pending;
    bool asking;         /* a keepalive is under way */
    bool late;           /* dpv_modify sends commands by write(), without the library */
    uint32_t heard_send; /* tails when the peer was last known to be there, */
    uint32_t heard_recv;
    int64_t heard_at;    /* and when that was seen; 0: not looked yet */
    uint32_t recv_head;
    uint32_t recv_tail;
    uint32_t recv_held;
    uint32_t recv_mask;
    dpv_sent *sent;     /* by send counter & send_mask */
    uint64_t *recv_ids; /* by receive counter & recv_mask */
    uint32_t slot;
    uint32_t psn;    /* where our packets start: random, new in each life */
    uint32_t access; /* ibv_access_flags granted to the peer */
};

/* Contents of an address blob; dp_verbs_blob.c has the layout. */
typedef struct dpv_blob {
    uint32_t qpn;
    uint32_t psn;
    union ibv_gid gid;
    uint16_t lid;
    uint16_t pkey;
    uint8_t link_layer;
    uint8_t mtu; /* an ibv_mtu */
    uint8_t gid_type;
    uint8_t rd_atomic;
    bool grh;
} dpv_blob;

static inline dpv_dev *dpv_dev_of(dp_dev *d) { return (dpv_dev *)d; }
static inline dpv_domain *dpv_domain_of(dp_domain *d) { return (dpv_domain *)d; }
static inline dpv_cq *dpv_cq_of(dp_cq *c) { return (dpv_cq *)c; }
static inline dpv_qp *dpv_qp_of(dp_qp *q) { return (dpv_qp *)q; }

/* ---- device ---- */

/* Class of a failed verbs call, by its errno. */
int dpv_status_of(int sys_errno);
/* Reads pending asynchronous events without blocking and marks what they concern. _locked: dev->lock held. */
void dpv_dev_drain_events(dpv_dev *dev);
void dpv_dev_drain_events_locked(dpv_dev *dev);

/* ---- memory ---- */

int dpv_domain_create(dp_dev *dev, dp_domain **out, dp_error *err);
void dpv_domain_destroy(dp_domain *d);
int dpv_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);
int dpv_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);
int dpv_mem_file(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err);
void dpv_mem_free(dp_mem *m);
uint32_t dpv_access_flags(uint32_t access);

/* ---- completion queue ---- */

int dpv_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err);
void dpv_cq_destroy(dp_cq *cq);
int dpv_cq_poll(dp_cq *cq, dp_wc *wc, int n);
int dpv_cq_arm(dp_cq *cq);
void dpv_cq_disarm(dp_cq *cq);
int dpv_cq_wait(dp_cq *cq, int64_t timeout_ns);
#define DPV_WAIT_MAX 64 /* queues of one wait */
bool dpv_cq_wait_many(dp_cq **cqs, uint32_t n, int64_t timeout_ns);
void dpv_cq_wake(dp_cq *cq);
void dpv_cq_promise_hot(dp_cq *cq, bool hot);
/* Takes everything off the device into the stash, reclaiming send queues on the way. */
void dpv_cq_drain(dpv_cq *cq);
/* Gives a queue pair a slot and its first tag. */
int dpv_cq_attach(dpv_cq *cq, dpv_qp *qp, dp_error *err);
/* Ends a queue pair's life: its completions, on the device or stashed, are gone. Counters start anew. */
void dpv_cq_forget(dpv_cq *cq, dpv_qp *qp);
/* Forgets it and frees its slot. */
void dpv_cq_detach(dpv_cq *cq, dpv_qp *qp);

/* ---- queue pair ---- */

int dpv_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err);
int dpv_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err);
int dpv_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err);
int dpv_qp_connect_late(dp_qp *qp, dp_error *err);
int dpv_qp_reset(dp_qp *qp, dp_error *err);
void dpv_qp_destroy(dp_qp *qp);
int dpv_qp_probe(dp_qp *qp);
void dpv_qp_notify(dp_qp *qp);
int dpv_qp_events(dp_qp *qp, int *fd);
/* RESET to INIT, with a new packet sequence number: from here on receives can be posted. */
int dpv_to_init(dpv_qp *q, dp_error *err);
/* ibv_modify_qp, also for a queue pair that is connected late. Returns 0 or an errno. */
int dpv_modify(const dpv_qp *q, struct ibv_qp_attr *a, int mask);

/* ---- blob ---- */

uint32_t dpv_blob_encode(const dpv_blob *b, void *out);
/* Checks form and ranges; whether it fits our device is dpv_qp_connect's to say. */
int dpv_blob_decode(const void *in, uint32_t len, dpv_blob *out, dp_error *err);

/* ---- posts ---- */

int dpv_post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                   uint32_t flags);
int dpv_post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                       uint64_t wr_id, uint32_t flags);
int dpv_post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                  uint32_t flags);
int dpv_post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags);
int dpv_post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add,
                       uint64_t wr_id, uint32_t flags);
int dpv_post_recv(dp_qp *qp, uint64_t wr_id);
/* A write of no bytes, which the peer's adapter acknowledges without its owner noticing. It takes an ordinary place in
 * the send queue; the provider consumes its completion, and breaks the queue pair if it failed. */
int dpv_post_keepalive(dpv_qp *q);
void *dpv_rkey_ptr(dp_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len);

#endif

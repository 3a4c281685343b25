/* Inside the ofi provider (libfabric). Nothing outside dp_ofi*.c includes this.
 *
 *   dp_ofi_load.c  libfabric, loaded on demand
 *   dp_ofi_dev.c   the properties of each libfabric provider; devices, domains, memory
 *   dp_ofi_qp.c    life of a queue pair, and its blob
 *   dp_ofi_post.c  the send queue: which post may be issued, and in which form
 *   dp_ofi_cq.c    completions, waiting, probing
 *
 * A queue pair is one FI_EP_RDM endpoint with an address vector of one entry, two libfabric completion queues (own posts, arrivals) and
 * its own registration of each exposed region. All of these are made anew by dp_qp_reset, so an address or a key of an earlier life
 * reaches nothing. A dp_cq polls the libfabric queues of its queue pairs.
 *
 * Posts go into a ring and are issued from its front, as far as the order allows and libfabric takes them (FI_EAGAIN). They complete in
 * order. Each is issued with FI_DELIVERY_COMPLETE, so a completion means that the peer's memory has the data. There is one exception. On
 * libfabric's tcp, FI_DELIVERY_COMPLETE costs a message back, so most unsignalled writes with immediate data complete there when libfabric has
 * sent them. All writes with immediate data are numbered there (ofi_data), and the receiver ends the connection if a number is missing.
 *
 * How a side learns that its peer has ended:
 *   - A side that is reset or destroyed, or that fails by itself, tells its peer with an empty message, the bye (ofi_say_bye). It does so too if
 *     another thread has declared its connection broken.
 *   - A killed process says nothing, and a bye may be lost. Then an operation in flight fails. If none is in flight, ofi_rxm reports no error
 *     and tries without end to connect again. So a side that has heard of its peer counts it as gone when libfabric takes no post for
 *     OFI_LOST_KEEPALIVES keepalive times (is_lost in dp_ofi_post.c). dp_qp_probe posts keepalives, so this needs no call in flight.
 *   - A client that has never heard of its worker counts it as gone after OFI_REACH_KEEPALIVES (unreachable in dp_ofi_cq.c). A worker that
 *     has never heard of its client waits, because a client need not poll. Its executor ends it.
 * DP_CAP_SILENT_DEATH remains for nodes that die with an operation in flight: no kernel refuses anything then.
 *
 * The blob lists the exposed regions. The initiator checks key, bounds and rights of every post against that list, because a
 * libfabric target may drop a wrong access silently. This protects against mistakes, but not against a hostile peer.
 */
#ifndef RFAAS_DP_OFI_H
#define RFAAS_DP_OFI_H

#include "dp_ofi_load.h"

#ifdef DP_HAVE_LIBFABRIC
#include <pthread.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stddef.h>

#define OFI_INLINE_MAX 256   /* bytes that a post copies */
#define OFI_SLOT (OFI_INLINE_MAX + 16) /* the copy, and a message or the operands of an atomic */
#define OFI_STEPS_MAX 3
#define OFI_MAX_MSG (1u << 30)
#define OFI_ADDRESS_MAX 48
#define OFI_EXPOSE_MAX 4      /* regions of a queue pair; more would not fit into a blob */
#define OFI_WARM_MS 50       /* how long dp_qp_connect waits for libfabric's connection */
#define OFI_KEEPALIVE_MS 1000
#define OFI_REACH_KEEPALIVES 10 /* a peer that takes nothing for so many keepalive times after dp_qp_connect counts as gone */
#define OFI_LOST_KEEPALIVES 3 /* a peer that takes nothing for so many keepalive times after it was heard of counts as gone */
#define OFI_POLLED_NS 10000000 /* most time between two attempts to issue a post that counts: connecting needs this side's polls */
#define OFI_BLIND_NS 200000  /* longest sleep where libfabric has no descriptor to wait for, or posts wait to be issued */

/* One libfabric provider: what its fi_info does not say, or what must be asked for. */
typedef struct ofi_kind {
    const char *name;         /* of the setting ofi-provider */
    const char *fi_names[2];  /* names for libfabric, tried in this order */
    uint8_t id;               /* in blobs */
    bool ordered;             /* writes, and writes with immediate data, take effect in the order of the posts */
    bool arrival_len;         /* an arrival of immediate data tells how many bytes were written */
    bool polled;              /* the target's polling makes the progress (DP_CAP_POLLED_TARGET) */
    bool silent;              /* operations to a peer that has gone are not reported (DP_CAP_SILENT_DEATH) */
    bool writedata;           /* false: the immediate value is sent as a message behind the write */
    bool atomics;             /* false: posts of atomics are DP_UNSUPPORTED */
} ofi_kind;

/* The 64 bits of immediate data where the provider keeps the order of writes and has that many bits. ofi_rxm reconnects without an error, and
 * writes that were on their way are lost. The numbers show this loss: they count the writes with immediate data of one direction, from 0.
 * Fewer than 2^OFI_NUMBER_BITS writes can be lost at once, because every OFI_ACK_EVERY-th one stays in the ring until it is acknowledged. */
typedef struct ofi_data {
    uint32_t value;  /* the immediate value; of an OFI_ANNOUNCE the byte count of the next write */
    uint32_t len;    /* bytes written; OFI_LEN_ANNOUNCED: as announced. Of a hidden one: OFI_CHECK or OFI_ANNOUNCE */
    uint32_t number;
    bool hidden;     /* not for the caller */
} ofi_data;
#define OFI_LEN_BITS 18
#define OFI_NUMBER_BITS 13
#define OFI_LEN_ANNOUNCED ((1u << OFI_LEN_BITS) - 1)
#define OFI_NUMBER_MASK ((1u << OFI_NUMBER_BITS) - 1)
#define OFI_ACK_EVERY 256
enum { OFI_CHECK, OFI_ANNOUNCE };

static inline uint64_t ofi_data_pack(ofi_data d) {
    return d.value | (uint64_t)d.len << 32 | (uint64_t)(d.number & OFI_NUMBER_MASK) << (32 + OFI_LEN_BITS) | (uint64_t)d.hidden << 63;
}

static inline ofi_data ofi_data_unpack(uint64_t bits) {
    return (ofi_data){.value = (uint32_t)bits, .len = bits >> 32 & OFI_LEN_ANNOUNCED,
                      .number = bits >> (32 + OFI_LEN_BITS) & OFI_NUMBER_MASK, .hidden = bits >> 63};
}

typedef struct ofi_region { /* as in a blob, little endian */
    uint32_t rkey, access;
    uint64_t key;  /* libfabric's */
    uint64_t base; /* address that posts name */
    uint64_t size;
} ofi_region;

typedef struct ofi_blob {
    char magic[4];
    uint16_t version;
    uint8_t provider;
    uint8_t kind;
    uint32_t crc; /* CRC32C of the blob with this field 0 */
    uint8_t address_len;
    uint8_t n_regions;
    uint16_t flags;
    uint8_t address[OFI_ADDRESS_MAX];
    ofi_region regions[OFI_EXPOSE_MAX]; /* n_regions of them travel */
} ofi_blob;
_Static_assert(sizeof(ofi_blob) == DP_BLOB_MAX && offsetof(ofi_blob, regions) == 64, "ofi blob");
enum {
    OFI_BLOB_VIRT_ADDR = 1, /* peers name addresses; otherwise offsets into the region */
    OFI_BLOB_MESSAGES = 2,  /* immediate values come as messages */
};

typedef struct ofi_dev {
    dp_dev d;
    const ofi_kind *kind; /* the rules */
    const ofi_kind *fi;   /* the provider to request from libfabric: differs from kind in tests only */
    struct fi_info *info;
    struct fid_fabric *fabric;
    bool active_only; /* dp_dev_options.active_side_only */
    bool local;    /* local memory must be registered (FI_MR_LOCAL) */
    bool virt;     /* FI_MR_VIRT_ADDR */
    bool own_keys; /* the application chooses keys (no FI_MR_PROV_KEY) */
    bool at_ep;    /* FI_MR_ENDPOINT: regions belong to an endpoint */
    bool messages; /* see ofi_kind.writedata */
    bool numbered; /* immediate data is an ofi_data */
    bool delivery; /* FI_DELIVERY_COMPLETE is granted */
    uint32_t iov_limit;
    int64_t keepalive_ns;
    pthread_mutex_t lock; /* guards refs of regions and the table of local registrations */
} ofi_dev;

typedef struct ofi_mem {
    dp_mem m;
    void *map; /* NULL: the caller's memory */
    uint64_t map_len;
    struct fid_mr *local; /* with ofi_dev.local */
    uint32_t refs;        /* dp_mem_free, and queue pairs that expose it */
} ofi_mem;

typedef struct ofi_domain {
    dp_domain d;
    struct fid_domain *domain;
    ofi_mem **local; /* by lkey - 1, with ofi_dev.local */
    uint32_t n_local;
} ofi_domain;

typedef struct ofi_qp ofi_qp;

typedef struct ofi_cq {
    dp_cq c;
    int wake_fd;
    bool hot; /* dp_cq_promise_hot: queue pairs that begin a life need no descriptors */
    ofi_qp **qps;
    struct pollfd *fds; /* room for the wake_fd and two descriptors of each queue pair */
    uint32_t n_qps, cap_qps;
    uint32_t next; /* queue pair to poll first */
} ofi_cq;

#define OFI_LINGER_MS 500 /* how long a queue pair that is reset or destroyed waits for progress of its last posts and its bye */

/* One post. It becomes one libfabric operation, or several: a write for each piece, and a message with the immediate value. */
typedef struct ofi_op {
    struct fi_context2 contexts[OFI_STEPS_MAX]; /* one for each libfabric operation; libfabric may write to it */
    uint64_t wr_id, raddr, key;
    uint64_t operands[2]; /* of an atomic: what to add, or what to store and what to expect */
    const uint8_t *from[2]; /* pieces */
    void *desc[2];
    uint32_t len[2], total;
    uint32_t imm, flags;
    uint8_t op;
    bool with_imm, done;
    bool announces; /* its first operation announces the byte count */
    bool watched;   /* counted in ofi_qp.watched */
    uint8_t n_pieces;
    uint8_t steps, issued, completed; /* numbers of libfabric operations: all, issued, completed */
    int32_t status;
} ofi_op;

/* A keepalive is a write of no bytes outside the ring, so that it does not wait for a post that will never complete. */
enum { OFI_ASK_NONE, OFI_ASK_DUE /* libfabric has not taken it yet */, OFI_ASK_SENT };

static inline bool ofi_is_atomic(const ofi_op *op) { return op->op == DP_OP_FETCH_ADD || op->op == DP_OP_COMPARE_SWAP; }

struct ofi_qp {
    dp_qp q;
    struct fid_ep *ep; /* NULL: closed after a failure */
    struct fid_av *av;
    struct fid_cq *tx, *rx;
    int tx_fd, rx_fd; /* -1: there is none */
    fi_addr_t peer;
    uint32_t n_regions; /* the peer's */
    ofi_region regions[OFI_EXPOSE_MAX];
    bool peer_virt;
    uint32_t n_expose;
    ofi_mem *expose[OFI_EXPOSE_MAX];
    struct fid_mr *mrs[OFI_EXPOSE_MAX];
    /* Posts: [tail, head), of which [tail, next) are issued completely. */
    ofi_op *ops;
    uint8_t *copies; /* OFI_SLOT bytes for each entry */
    struct fid_mr *copies_mr;
    uint32_t op_mask, head, next, tail, shown; /* [shown, tail) are done and not yet delivered */
    uint32_t flight; /* operations that libfabric has */
    uint32_t watched; /* posts among them that the peer acknowledges (wants_ack), and the keepalive unless it is OFI_ASK_NONE */
    uint64_t signs;   /* of life: completions, and arrivals from the peer. 0: it may be unreachable */
    uint32_t polls;
    uint32_t returning; /* the reads and atomics among them, which return data */
    bool atomic;     /* one of them is an atomic */
    uint8_t ask;     /* the keepalive: OFI_ASK_* */
    bool gone;       /* the endpoint failed */
    int64_t connected_at;
    int64_t refused_at, refused_ns; /* libfabric refused the last post: when, and for how long it has refused all */
    int64_t heard_at;
    uint64_t heard_signs;
    struct fi_context2 bye; /* of the receive for the peer's bye; not used if immediate values are messages too */
    struct fi_context2 own_bye, own_keepalive;
    bool said_bye, bye_acked;
    /* Receives. */
    uint64_t *recvs;
    struct ofi_arrival {
        struct fi_context2 context;
        uint8_t bytes[8]; /* little endian: immediate value, byte count */
    } *arrivals;
    struct fid_mr *arrivals_mr;
    uint32_t recv_mask, rposted, rdone;
    uint32_t sent_number, next_number; /* of ofi_data: the next one to send, and to arrive */
    uint32_t announced; /* byte count */
    dp_wc *saved; /* [saved_at, n_saved): arrivals before a failure */
    uint32_t saved_at, n_saved;
};

static inline ofi_dev *ofi_dev_of(dp_dev *d) { return (ofi_dev *)d; }
static inline ofi_domain *ofi_domain_of(dp_domain *d) { return (ofi_domain *)d; }
static inline ofi_qp *ofi_qp_of(dp_qp *q) { return (ofi_qp *)q; }
static inline ofi_cq *ofi_cq_of(dp_cq *c) { return (ofi_cq *)c; }

extern const dp_ops ofi_ops; /* dp_ofi_dev.c */
/* Fails with libfabric's text for e (negative). */
int ofi_fail(dp_error *err, int status, long e, const char *what, const ofi_dev *dev);
void ofi_mem_unref(ofi_dev *dev, ofi_mem *m);
/* Registers the memory at libfabric for local use. *out is NULL if the provider does not need that. */
int ofi_local_register(ofi_domain *d, void *addr, uint64_t size, struct fid_mr **out, dp_error *err);
void ofi_close(struct fid *f);

/* dp_ofi_qp.c */
int ofi_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err);
int ofi_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err);
int ofi_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err);
int ofi_qp_reset(dp_qp *qp, dp_error *err);
void ofi_qp_destroy(dp_qp *qp);
/* Closes the endpoint. Afterwards no post touches local memory. `op`, or the oldest post if `op` is NULL, completes with `status`. The
 * other outstanding posts complete with DP_CONNECTION. */
void ofi_qp_fail(ofi_qp *q, ofi_op *op, int status);

/* dp_ofi_post.c */
int ofi_post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int ofi_post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                       uint32_t flags);
int ofi_post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int ofi_post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id, uint32_t flags);
int ofi_post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags);
int ofi_post_recv(dp_qp *qp, uint64_t wr_id);
/* Asks the peer for a sign of life. Does nothing if the peer exposes no memory to write to. */
void ofi_post_keepalive(ofi_qp *q);
/* Tells the peer that this side has ended. Returns false if libfabric does not take the message now. Nothing may be issued afterwards. On a
 * provider without order, the message may overtake posts in flight. */
bool ofi_say_bye(ofi_qp *q);
/* Issues the keepalive, if it is due, and all posts that may be issued now. */
void ofi_issue(ofi_qp *q);

/* dp_ofi_cq.c */
int ofi_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err);
void ofi_cq_destroy(dp_cq *cq);
int ofi_cq_attach(ofi_cq *cq, ofi_qp *q, dp_error *err);
void ofi_cq_detach(ofi_cq *cq, ofi_qp *q);
int ofi_cq_poll(dp_cq *cq, dp_wc *wc, int n);
int ofi_cq_arm(dp_cq *cq);
void ofi_cq_disarm(dp_cq *cq);
int ofi_cq_wait(dp_cq *cq, int64_t timeout_ns);
void ofi_cq_promise_hot(dp_cq *cq, bool hot);
void ofi_cq_wake(dp_cq *cq);
int ofi_qp_probe(dp_qp *qp);
/* Takes completions of own posts off libfabric's queue and issues the posts that may be issued then. */
void ofi_take_sent(ofi_qp *q);
/* Takes arrivals off libfabric's queue for later polls. */
void ofi_save_arrivals(ofi_qp *q);
/* Frees the ring entries of posts that are done and whose completions are not shown to the caller. */
void ofi_skip_hidden(ofi_qp *q);
/* The status of a failed operation: e is libfabric's error, positive. */
int ofi_status_of(int e);
#endif

#endif

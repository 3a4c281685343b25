/* The fabric: those semantics of remote memory that rfaas uses, and no others.
 *
 *   device ── domain ── memory region            one device per provider instance
 *     │          └───── queue pair ──┐           a queue pair belongs to one domain and one completion queue
 *     └── completion queue ──────────┘
 *
 * Providers implement `dp_ops`; nothing above this header knows which one it talks to, and no verbs
 * type appears in it. Semantics are those of a reliable connected queue pair:
 *
 *   - Operations of one queue pair take effect in the order they were posted, with one exception: the data
 *     of a write-with-immediate is in place when its completion is polled at the target, and a provider may
 *     put it there no sooner. Do not read or overwrite those bytes from the initiator's side before that.
 *   - Each write-with-immediate consumes a receive. Receives have no memory. The target posts them, and
 *     the initiator counts them (the channel does). A post that finds no room
 *     in the local queue returns DP_BUSY and has no effect.
 *   - A failed operation moves the queue pair to the error state. Later posts return DP_CONNECTION
 *     until dp_qp_reset and a new dp_qp_connect, as they do before the first dp_qp_connect.
 *   - Completions of local operations appear only for DP_SIGNALED ones and for failures. The provider
 *     signals others by itself as often as it must to reclaim its queue, and hides those completions.
 *   - A completion queue is never overrun: each queue pair reserves max_send + max_recv of its
 *     completion queue's capacity when it is created, and creation fails when there is not enough.
 *
 * Threads: a completion queue and the queue pairs on it are used by one thread at a time. Any thread
 * may call dp_cq_wake and dp_qp_break. Devices and domains are thread safe.
 */
#ifndef RFAAS_DP_FABRIC_H
#define RFAAS_DP_FABRIC_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "dp_status.h"

#define DP_CACHE_LINE 64
#define DP_BLOB_MAX 192 /* bytes of a queue-pair blob, any provider */
#define DP_EXPOSE_MAX 8 /* regions a queue pair exposes to its peer; on ofi 4 */

typedef enum dp_provider_id { DP_PROVIDER_SHM = 1, DP_PROVIDER_VERBS = 2, DP_PROVIDER_TCP = 3, DP_PROVIDER_OFI = 4 } dp_provider_id;

/* What a region's peer may do with it. Local access is always read and write. */
enum {
    DP_REMOTE_READ = 1,
    DP_REMOTE_WRITE = 2,
    DP_REMOTE_ATOMIC = 4, /* words reached by fetch-and-add and compare-and-swap */
};
/* With these in dp_mem_alloc: pages come when they are first touched, where the provider can do that (shm). */
#define DP_MEM_LAZY 8u

/* Capabilities of a device. */
enum {
    DP_CAP_SYNC_SOURCE = 1, /* a post has consumed its source before it returns: no lkey needed */
    DP_CAP_RKEY_PTR = 2,    /* dp_rkey_ptr can return a pointer */
    /* The target's thread executes remote operations while it polls. Signalled posts complete, and a full send queue gets room, only when
     * the target polls. A target that runs a function polls only when the function has ended. */
    DP_CAP_POLLED_TARGET = 4,
    DP_CAP_POLLED_SOURCE = 8, /* a post may leave only when its own side polls again or waits */
    /* A peer that has ended or was reset may go unnoticed: posts to it then neither complete nor fail, and probing reports nothing.
     * Another party must report it (dp_qp_break). What the peer posted last is lost unless this side polled before the peer ended. */
    DP_CAP_SILENT_DEATH = 16,
};

/* Flags of a post. */
enum {
    DP_SIGNALED = 1, /* the initiator gets a completion */
    /* Another post on this queue pair follows at once. A hint: tcp holds the post back and sends both with one system call. If the next
     * post fails, a dp_cq_poll that returns 0, or dp_cq_arm, sends what was held back. */
    DP_MORE = 2,
};

typedef enum dp_op {
    DP_OP_RECV = 1,     /* a receive failed, or the peer of a verbs queue pair sent something, which rfaas never does */
    DP_OP_RECV_IMM = 2, /* a write-with-immediate arrived; imm is set, byte_len is the bytes written */
    DP_OP_WRITE = 3,
    DP_OP_READ = 4,
    DP_OP_FETCH_ADD = 5,
    DP_OP_COMPARE_SWAP = 6,
} dp_op;

/* Status of a completion: DP_OK, DP_INVALID (remote access refused: key, bounds or rights),
 * DP_PEER_GONE (retries exceeded or peer process ended), DP_CONNECTION (flushed or broken). */
typedef struct dp_wc {
    uint64_t wr_id;   /* as given to the post, or to the receive that was consumed */
    struct dp_qp *qp; /* queue pair it belongs to */
    int32_t status;
    uint32_t imm;
    uint32_t byte_len;
    uint32_t op; /* a dp_op */
} dp_wc;

typedef struct dp_sge {
    const void *addr;
    uint32_t len;
    uint32_t lkey; /* dp_mem.lkey; ignored with DP_CAP_SYNC_SOURCE and for inline data */
} dp_sge;

/* Encryption of the data on tcp. Each side of a connection names its value in its blob, and both sides reach the same decision. */
enum {
    DP_ENCRYPT_OFF = 0,   /* never */
    DP_ENCRYPT_ALLOW = 1, /* only if the peer has ON or REQUIRE */
    DP_ENCRYPT_ON = 2,    /* unless both sides have loopback addresses only */
    DP_ENCRYPT_REQUIRE = 3,
};

typedef struct dp_dev_options {
    const char *device;    /* verbs: device name, NULL or "" for the first with an active port */
    int port;              /* verbs: 1-based, 0 for the first active */
    int gid_index;         /* verbs: -1 chooses (RoCE v2 IPv4-mapped first, then RoCE v2, then any) */
    int pkey_index;        /* verbs: default 0 */
    int traffic_class;     /* verbs: 0..255 */
    int service_level;     /* verbs: 0..15 */
    int mtu;               /* verbs: 256..4096 bytes, 0 for the port's active MTU */
    int timeout;           /* verbs: local ack timeout exponent 1..31, 0 for the default 16 (268 ms) */
    int retry_count;       /* verbs: 1..7, 0 for the default 6; soft-RoCE takes 7 for "for ever" */
    int keepalive_ms;      /* verbs: how long a peer may be silent until dp_qp_probe asks it for a sign of life;
                              1..3600000, 0 for the default 1000 */
    int active_side_only;  /* shm, tcp: this process only connects to blobs whose owners listen (shm: workers; tcp: clients) */
    int attended;          /* shm, tcp: the device has no thread; the program calls dp_dev_attend while it waits */
    const char *address;   /* tcp: numeric IPv4 or IPv6 address to listen on, NULL or "" for 127.0.0.1 */
    int port_first;        /* tcp: first and last port to listen on, 1..65535; both 0: the kernel chooses */
    int port_last;
    const char *advertise; /* tcp: up to 4 "IPv4:port" or "[IPv6]:port", separated by commas, for the blobs. NULL or "": where the
                              device listens. Needed when `address` is a wildcard, and when `handed` */
    int handed;            /* tcp: the device neither listens nor connects; another process hands sockets to it, see dp_tcp.h (workers) */
    int handed_from;       /* tcp, with handed: unix socket from which dp_qp_connect takes sockets while it waits. The caller's. 0: none */
    int encrypt;           /* tcp: a DP_ENCRYPT_* value. ofi does not encrypt: refused with REQUIRE, and with ON except on loopback */
    const char *ofi_provider; /* ofi: libfabric's provider, "tcp", "cxi", "efa", "opx" or "psm3"; NULL or "": tcp */
    int packable;          /* shm: keep the descriptors that dp_qp_pack needs, as long as few descriptors are open */
} dp_dev_options;

typedef struct dp_ops dp_ops;

typedef struct dp_dev {
    const dp_ops *ops;
    dp_provider_id provider;
    uint32_t caps;
    uint32_t max_msg; /* bytes of one write */
    char name[64];    /* for people: "shm", "rxe0 port 1 gid 1", "tcp 10.1.2.3" */
    uint8_t link;     /* kind of the address: 0 none, 1 InfiniBand, 2 RoCE */
    uint16_t lid;     /* InfiniBand */
    uint8_t gid[16];  /* zero when the port has none */
    bool waits;       /* dp_qp_connect waits for the peer, which needs this side's blob first (tcp, handed) */
    /* meanwhile: one-shot callback, run while the next dp_qp_connect waits for the peer. met: run by each dp_qp_connect when
     * the peer has answered, before its memory is mapped. NULL: none. Verbs never waits. */
    void (*meanwhile)(void *arg), (*met)(void *arg);
    void *meanwhile_arg;
    /* Asked for the memory of each region that is allocated, size in whole pages. It returns memory as of dp_region_map,
     * or NULL, and then the provider maps it. NULL: the provider always maps it. Only verbs asks. While it is set, one thread
     * alone uses the device. */
    char *(*take_region)(void *arg, uint64_t size);
    void *take_region_arg;
} dp_dev;

typedef struct dp_domain {
    dp_dev *dev;
} dp_domain;

typedef struct dp_mem {
    dp_domain *domain;
    void *addr;
    uint64_t size;
    uint64_t base; /* address that peers use: addr, unless dp_qp_unpack made the region */
    uint32_t lkey;
    uint32_t rkey;
    uint32_t access;
} dp_mem;

typedef struct dp_cq {
    const dp_ops *ops;
    dp_dev *dev;
    /* While the low half of *peek differs from peek_value, there is nothing to poll. NULL: only polling shows
     * whether there is a completion. */
    const uint64_t *peek;
    uint32_t peek_value;
    uint32_t capacity;
    uint32_t reserved; /* by the queue pairs on it */
} dp_cq;

/* Description of a connected queue pair at rest, for another process of this node. Descriptors go with it (dp_qp_pack). */
#define DP_PACKED_MAX 704 /* bytes, any provider */
#define DP_PACKED_FDS 24  /* descriptors of one queue pair */
typedef struct dp_packed_qp {
    uint32_t size; /* of bytes, 1 .. DP_PACKED_MAX */
    uint32_t n_fds;
    _Alignas(8) uint8_t bytes[DP_PACKED_MAX];
} dp_packed_qp;

typedef struct dp_qp_attr {
    uint32_t max_send;   /* posts outstanding, 1..4096 */
    uint32_t max_recv;   /* receives posted, 1..4096 */
    uint32_t max_inline; /* wished; the provider may give less or more, see dp_qp.max_inline */
    /* Regions that the peer may reach through this queue pair. shm and tcp give exactly these to the peer;
     * verbs gives the whole domain, so put nothing else remotely accessible into it. */
    dp_mem *expose[DP_EXPOSE_MAX];
    uint32_t n_expose;
    bool takes_shared;    /* the peer may share memory with this side (dp_qp_share) */
    uint32_t max_answers; /* tcp: most bytes of answers that wait for a slow peer; more end the connection. 0: the largest bound */
} dp_qp_attr;

typedef enum dp_qp_state { DP_QP_INIT, DP_QP_CONNECTED, DP_QP_ERROR } dp_qp_state;

typedef struct dp_qp {
    const dp_ops *ops;
    dp_domain *domain;
    dp_cq *cq;
    void *user;          /* owner's, untouched by providers */
    uint32_t max_inline; /* bytes a post takes from any memory, registered or not */
    uint32_t max_send;
    uint32_t max_recv;
    int32_t state; /* dp_qp_state, written by the owner thread only */
    int32_t broken; /* 0 or a dp_status, set by any thread (atomic): the peer is gone or gave up */
    /* Since it was connected, as of the last probe: posts, and how many of them the peer's device is known to have. Where posts
     * are there at once both stay 0. */
    uint32_t posted, arrived;
    /* Bytes of the connection that the peer's host has acknowledged, and that this host has received, as of the last probe. Both grow
     * until the queue pair is reset. They stay 0 where the provider cannot tell (shm, verbs). */
    uint64_t bytes_acked, bytes_received;
    bool peer_batches; /* tcp, connected: the peer has announced that it serves requests with DP_REQ_BATCH */
    bool reposts;      /* see dp_qp_repost: dp_cq_poll posts a receive again for each arrival */
} dp_qp;

struct dp_ops {
    bool destroys_slowly; /* the driver may take long to destroy a queue pair, completion queue or region */
    bool reposts;         /* the provider supports dp_qp_repost */
    void (*dev_close)(dp_dev *);
    int (*dev_event_fd)(dp_dev *); /* NULL: none */
    void (*dev_attend)(dp_dev *);
    bool (*dev_starved)(const dp_dev *); /* NULL: never */
    int (*domain_create)(dp_dev *, dp_domain **, dp_error *);
    void (*domain_destroy)(dp_domain *);
    int (*mem_alloc)(dp_domain *, uint64_t size, uint32_t access, dp_mem **, dp_error *);
    int (*mem_register)(dp_domain *, void *, uint64_t size, uint32_t access, dp_mem **, dp_error *);
    int (*mem_window)(dp_domain *, dp_mem *, uint64_t offset, uint64_t size, uint32_t access, dp_mem **, dp_error *);
    int (*mem_file)(dp_domain *, int fd, void *map, uint64_t size, dp_mem **, dp_error *); /* NULL: mem_register does as well */
    void (*mem_free)(dp_mem *);
    int (*cq_create)(dp_dev *, uint32_t capacity, dp_cq **, dp_error *);
    int (*cq_create_beside)(dp_cq *, uint32_t capacity, dp_cq **, dp_error *); /* NULL: cq_create does as well */
    int (*cq_pack)(const dp_cq *); /* this and the next three are NULL if a queue pair cannot leave its process */
    int (*cq_unpack)(dp_dev *, uint32_t capacity, int *fd, dp_cq **, dp_error *);
    int (*qp_pack)(dp_qp *, dp_packed_qp *, int *fds, dp_error *);
    int (*qp_unpack)(dp_domain *, dp_cq *, const dp_packed_qp *, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **, dp_error *);
    void (*cq_destroy)(dp_cq *);
    int (*cq_poll)(dp_cq *, dp_wc *, int n);
    int (*cq_arm)(dp_cq *);
    void (*cq_disarm)(dp_cq *);
    int (*cq_wait)(dp_cq *, int64_t timeout_ns);
    /* The same for n > 1 queues of one device. False: not possible for these queues. NULL: not supported. cq_arm_many may arm fewer words
     * than queues, so only cq_wait_many and cq_disarm_many may follow it. */
    bool (*cq_arm_many)(dp_cq **, uint32_t n);
    bool (*cq_wait_many)(dp_cq **, uint32_t n, int64_t timeout_ns);
    void (*cq_disarm_many)(dp_cq **, uint32_t n);
    void (*cq_wake)(dp_cq *);
    void (*cq_promise_hot)(dp_cq *, bool);
    int (*qp_create)(dp_domain *, dp_cq *, const dp_qp_attr *, dp_qp **, dp_error *);
    int (*qp_export)(dp_qp *, void *blob, uint32_t *len, dp_error *);
    int (*qp_connect)(dp_qp *, const void *blob, uint32_t len, dp_error *);
    int (*qp_connect_late)(dp_qp *, dp_error *); /* NULL: not supported */
    void (*qp_cancel)(dp_qp *); /* NULL: connecting never waits for the peer */
    int (*qp_reset)(dp_qp *, dp_error *);
    void (*qp_destroy)(dp_qp *);
    int (*post_write)(dp_qp *, const dp_sge *, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                      uint32_t flags);
    int (*post_write_imm)(dp_qp *, const dp_sge *, int n, uint64_t raddr, uint32_t rkey, uint32_t imm,
                          uint64_t wr_id, uint32_t flags);
    int (*post_read)(dp_qp *, const dp_sge *, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
    int (*post_fetch_add)(dp_qp *, const dp_sge *, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                          uint32_t flags);
    int (*post_compare_swap)(dp_qp *, const dp_sge *, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                             uint64_t wr_id, uint32_t flags);
    int (*post_recv)(dp_qp *, uint64_t wr_id);
    void *(*rkey_ptr)(dp_qp *, uint64_t raddr, uint32_t rkey, uint64_t len);
    int (*qp_probe)(dp_qp *);
    bool (*qp_kept)(dp_qp *, uint64_t wr_id); /* NULL: any posted write may reach the peer */
    int (*qp_peer_fd)(dp_qp *); /* NULL: none */
    int (*qp_events)(dp_qp *, int *fd); /* NULL: never any */
    void (*qp_notify)(dp_qp *);
    int (*mem_lend)(dp_domain *, int fd, void *, uint64_t size, dp_mem **, dp_error *); /* this and the rest: NULL without sharing */
    int (*qp_share)(dp_qp *, const dp_mem *);
    void (*qp_unshare)(dp_qp *, const dp_mem *);
    void (*qp_unshare_all)(dp_qp *);
    void *(*qp_shared_ptr)(dp_qp *, uint32_t rkey, uint64_t offset, uint64_t len, unsigned how);
    void (*qp_forget_shared)(dp_qp *);
};

/* ---- devices ---- */

/* dp_dev_open opens a device of the provider named "shm", "verbs" or "tcp"; opts may be NULL for defaults
 * (gid_index is then -1). "verbs" without a usable device: DP_NO_DEVICE naming what was looked for; without libibverbs,
 * which it loads: DP_UNSUPPORTED naming the packages to install. */
int dp_dev_open(const char *provider, const dp_dev_options *opts, dp_dev **out, dp_error *err);
/* Everything made from the device must be gone. */
void dp_dev_close(dp_dev *dev);
/* Of a device that is `attended`: dp_dev_attend accepts peers that connect and detects peers that have ended, without blocking. It
 * has something to do when the descriptor of dp_dev_event_fd is readable (-1: never). Any thread. */
int dp_dev_event_fd(dp_dev *dev);
void dp_dev_attend(dp_dev *dev);
/* dp_dev_starved reports whether a peer waits that dp_dev_attend could not accept, because this process has no descriptor left. The
 * descriptor of dp_dev_event_fd is not readable then, so call dp_dev_attend now and then. Any thread. */
bool dp_dev_starved(const dp_dev *dev);
/* Provider openers, called through dp_dev_open. */
int dp_shm_open(const dp_dev_options *opts, dp_dev **out, dp_error *err);
int dp_verbs_open(const dp_dev_options *opts, dp_dev **out, dp_error *err);
int dp_tcp_open(const dp_dev_options *opts, dp_dev **out, dp_error *err);
int dp_ofi_open(const dp_dev_options *opts, dp_dev **out, dp_error *err);
/* Loads libfabric, for later opens here and in forked children. If that fails, dp_ofi_open reports why. */
void dp_ofi_preload(void);
/* Sets the options of an ofi device: libfabric's provider, and its domain, or for libfabric's tcp a numeric address of this node. The
 * strings are the caller's. `device` may be NULL or "". */
void dp_ofi_choose(dp_dev_options *opts, const char *provider, const char *device);
/* dp_shm_preload reads the identity of this node once, for all devices of shm that are opened later in this process, and in forked processes that stay in
 * its network namespace. If that fails, dp_dev_open reports it. */
void dp_shm_preload(void);
/* dp_verbs_preload loads libibverbs and its providers and keeps the device list, so that later opens here and in forked
 * children are quick. It opens no device. Returns the number of devices; 0 when there are none, without loading anything,
 * or when they cannot be listed: err says why. */
int dp_verbs_preload(dp_error *err);
/* dp_verbs_load loads libibverbs unless that has been done; it stays loaded. Thread safe. DP_UNSUPPORTED names the packages
 * to install; the next call tries again. A process that enters a sandbox calls it, or dp_verbs_preload, before that. */
int dp_verbs_load(dp_error *err);

/* ---- domains and memory ---- */

int dp_domain_create(dp_dev *dev, dp_domain **out, dp_error *err);
void dp_domain_destroy(dp_domain *d);

/* dp_region_map maps size bytes, whole pages, followed by an inaccessible page; *len is the length of both. The mapping is
 * shared with children: after a fork, private pages that a device has pinned would stay with one process, and the other
 * would write to a copy that the device never sees. With filled, all pages are present. Returns NULL and sets errno on
 * failure. The caller unmaps it. */
char *dp_region_map(uint64_t size, int filled, uint64_t *len);
/* dp_mem_alloc allocates zeroed, page-aligned memory, prefaulted without DP_MEM_LAZY, of at least size bytes (size 1 ..
 * 1 TiB) and registers it. The provider owns it until dp_mem_free. Followed by an inaccessible page. */
int dp_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);
/* dp_mem_register registers memory of the caller. The caller keeps it mapped until dp_mem_free. shm can
 * register such memory for local use only (access 0); anything else there is DP_UNSUPPORTED. */
int dp_mem_register(dp_domain *d, void *addr, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);
/* dp_mem_window registers a part of `whole` again, in any domain and with other rights: one peer may write what others
 * may only read. It has its own key and the part's address. `whole` is of dp_mem_alloc and outlives it; on
 * verbs it may be of another device, or of shm. On shm a peer's process maps the pages that the part touches, and one
 * that may not write cannot map them writable; its queue pair checks the exact bounds. */
int dp_mem_window(dp_domain *d, dp_mem *whole, uint64_t offset, uint64_t size, uint32_t access, dp_mem **out,
                  dp_error *err);
/* dp_mem_file registers a memory file that the caller has mapped whole at `map` and keeps mapped, for remote reading. The file is sealed
 * against shrinking and growing: shm gives peers a descriptor that is opened for reading. On verbs before Linux 6.2, the region is a copy of
 * the file. The caller keeps fd. */
int dp_mem_file(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err);
/* dp_mem_lend registers a memory file for dp_qp_share. The caller has mapped it whole at `map`, and keeps the mapping and fd until
 * dp_mem_free. The file is sealed against shrinking and growing. DP_UNSUPPORTED: only shm can share it. */
int dp_mem_lend(dp_domain *d, int fd, void *map, uint64_t size, dp_mem **out, dp_error *err);
void dp_mem_free(dp_mem *m);

/* ---- completion queues ---- */

int dp_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err);
/* dp_cq_create_beside creates a completion queue on the device of `other`, for threads that often wait for both (dp_cq_wait_many). The
 * two may share a page, so their peers can affect each other as on one queue. They may be destroyed in any order. One thread at a time
 * creates and destroys queues that are beside each other. */
int dp_cq_create_beside(dp_cq *other, uint32_t capacity, dp_cq **out, dp_error *err);
void dp_cq_destroy(dp_cq *cq);
/* dp_cq_poll stores up to n completions and returns how many. Never blocks. Negative: DP_FATAL. With n 0 it takes no completion, but
 * on a device with DP_CAP_POLLED_TARGET it still executes operations of peers. */
static inline int dp_cq_poll(dp_cq *cq, dp_wc *wc, int n) {
    if (cq->peek && (uint32_t)__atomic_load_n(cq->peek, __ATOMIC_RELAXED) != cq->peek_value)
        return 0;
    return cq->ops->cq_poll(cq, wc, n);
}
/* To block: dp_cq_arm, dp_cq_poll once more (0 completions), dp_cq_wait. A completion that arrives after
 * dp_cq_arm returned ends the wait. If the poll found something, dp_cq_disarm (or simply go on and arm
 * again later). */
static inline int dp_cq_arm(dp_cq *cq) { return cq->ops->cq_arm(cq); }
static inline void dp_cq_disarm(dp_cq *cq) { cq->ops->cq_disarm(cq); }
/* dp_cq_wait blocks until an event, a wake or the time-out (negative: none). Spurious returns are
 * allowed. Returns DP_OK or DP_FATAL. */
static inline int dp_cq_wait(dp_cq *cq, int64_t timeout_ns) { return cq->ops->cq_wait(cq, timeout_ns); }
/* The same for n queues. If they are of several devices, or the provider cannot wait for several queues, dp_cq_wait_many waits for the first one, for at
 * most a millisecond. Afterwards no queue is armed. dp_cq_arm_many arms all queues, or none after an error. */
int dp_cq_arm_many(dp_cq **cqs, uint32_t n);
void dp_cq_wait_many(dp_cq **cqs, uint32_t n, int64_t timeout_ns);
void dp_cq_disarm_many(dp_cq **cqs, uint32_t n);
/* dp_cq_wake ends the present or the next dp_cq_wait. Any thread. Async-signal-safe. */
static inline void dp_cq_wake(dp_cq *cq) { cq->ops->cq_wake(cq); }
/* dp_cq_promise_hot(true) promises that this side polls without blocking until the promise is withdrawn. dp_cq_arm withdraws it. A hint:
 * providers may ignore it. On shm, peers may then leave out the barrier before the sleeping flag. On ofi, a queue pair that is created or
 * reset under the promise has no descriptors, which is faster on libfabric's tcp. It keeps none until its next reset, and waits
 * poll it every 200 us. */
static inline void dp_cq_promise_hot(dp_cq *cq, bool hot) { cq->ops->cq_promise_hot(cq, hot); }

/* ---- queue pairs ---- */

int dp_qp_create(dp_domain *d, dp_cq *cq, const dp_qp_attr *attr, dp_qp **out, dp_error *err);
/* dp_qp_export writes the blob that the peer needs to connect: *len is the room on entry (at least
 * DP_BLOB_MAX), the blob's size on return. A blob is good for one connection: reset makes a new one. */
int dp_qp_export(dp_qp *qp, void *blob, uint32_t *len, dp_error *err);
/* dp_qp_connect connects to the peer whose blob this is. Both sides connect; receives posted before
 * dp_qp_export are in place when the peer's first operation arrives, whichever side connects first.
 * Blobs are checked byte by byte: wrong length, magic, version, provider, node: DP_BAD_BLOB. */
int dp_qp_connect(dp_qp *qp, const void *blob, uint32_t len, dp_error *err);
/* dp_qp_connect_late prepares a queue pair for a dp_qp_connect in a process that may no longer call ioctl by then. The queue pair must be in
 * DP_QP_INIT, and is in DP_QP_INIT afterwards. Posted receives are lost. Earlier results of dp_qp_export are void. DP_UNSUPPORTED: the provider
 * is not verbs, or the kernel does not permit it. */
int dp_qp_connect_late(dp_qp *qp, dp_error *err);
/* dp_qp_cancel makes a dp_qp_connect that waits for its peer, now or later, return DP_CONNECTION. Any thread may
 * call it until the queue pair is destroyed. A cancelled queue pair can only be destroyed. */
void dp_qp_cancel(dp_qp *qp);
/* dp_qp_reset takes the queue pair from any state back to DP_QP_INIT: posted receives, outstanding
 * operations and undelivered completions are dropped, and the old peer can no longer reach the exposed regions through
 * it. (shm gives them new pages with the old contents; a region that another queue pair exposes too keeps its pages. tcp closes the
 * socket.) */
int dp_qp_reset(dp_qp *qp, dp_error *err);
void dp_qp_destroy(dp_qp *qp);
/* Handing over a connected queue pair to another process of this node. The peer does not notice.
 * dp_cq_pack returns the descriptor of the page that the completion queue shares with its peers, on tcp one that only says that the queue
 * can be rebuilt. The queue still owns it. -1: not supported (verbs, ofi).
 * dp_cq_unpack rebuilds the queue in another process. The caller then rebuilds the queues beside it with dp_cq_create_beside, in the same
 * order. If dp_cq_unpack succeeds, it takes over the descriptor and sets *fd to -1.
 * dp_qp_pack describes a queue pair at rest: no local operation is outstanding, nothing has arrived that was not polled, and neither
 * side posts before dp_qp_unpack. It fills fds (room for DP_PACKED_FDS) with descriptors, which the queue pair still owns. It
 * can be used again unless another process has unpacked it; then it may only be destroyed. DP_UNSUPPORTED: the
 * provider cannot pack queue pairs, or the descriptors were not kept (dp_dev_options.packable). DP_BUSY: not at rest.
 * dp_qp_unpack rebuilds the queue pair, connected, with its receives posted (wr_id 0). It also makes the exposed regions. The caller frees
 * them after the queue pair; exposed has room for DP_EXPOSE_MAX. Every byte of `packed` and every descriptor is checked. It takes
 * over the descriptors that it needs and sets them to -1; the caller closes the others. DP_PEER_GONE: the peer has ended. */
int dp_cq_pack(const dp_cq *cq);
int dp_cq_unpack(dp_dev *dev, uint32_t capacity, int *fd, dp_cq **out, dp_error *err);
int dp_qp_pack(dp_qp *qp, dp_packed_qp *out, int *fds, dp_error *err);
int dp_qp_unpack(dp_domain *d, dp_cq *cq, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out,
                 dp_error *err);
/* dp_qp_break marks the queue pair as broken for `status` and wakes its completion queue. Any thread. */
void dp_qp_break(dp_qp *qp, int status);
static inline int dp_qp_broken(const dp_qp *qp) { return __atomic_load_n(&qp->broken, __ATOMIC_ACQUIRE); }
/* dp_qp_probe checks, without blocking, whether the peer still exists, and marks the queue pair broken if not. A waiting
 * thread calls it several times a second: it costs a system call. A peer behind a network is detected only by its answers.
 * So on verbs dp_qp_probe posts a write of 0 bytes if the peer was last heard of keepalive_ms ago. It posts none before the
 * first post or arrival, because the peer may connect later. When the retries have run out, the next probe finds the queue
 * pair broken with DP_PEER_GONE. A probe uses one place of max_send while it is outstanding. Its completion is not returned. On tcp
 * the kernel sends the probes, and dp_qp_probe reads the kernel's counters: a peer that acknowledges nothing for 3.5 s is gone. */
static inline int dp_qp_probe(dp_qp *qp) { return qp->ops->qp_probe(qp); }
/* dp_qp_kept reports whether a posted write with an immediate and this wr_id is sure never to reach the peer. The queue pair must have failed. */
static inline bool dp_qp_kept(dp_qp *qp, uint64_t wr_id) { return qp->ops->qp_kept && qp->ops->qp_kept(qp, wr_id); }
/* Returns a descriptor that is readable once the process of the connected peer has ended, for poll() in any thread; -1 where only
 * probing tells (verbs, tcp). The queue pair owns it. */
static inline int dp_qp_peer_fd(dp_qp *qp) { return qp->ops->qp_peer_fd ? qp->ops->qp_peer_fd(qp) : -1; }

/* dp_qp_events sets *fd to the socket of a connected queue pair, on verbs to the channel of its completion queue, whose events follow a
 * dp_cq_arm and are taken by dp_cq_wait. It returns the events of poll() after which dp_cq_poll has work for
 * it. 0: none will come, because the connection has ended (*fd is -1), no receive is posted, or the provider has no socket. The
 * queue pair owns the descriptor. */
static inline int dp_qp_events(dp_qp *qp, int *fd) {
    *fd = -1;
    return qp->ops->qp_events ? qp->ops->qp_events(qp, fd) : 0;
}

/* ---- operations; all return DP_OK, DP_BUSY, DP_INVALID, DP_CONNECTION or (atomics) DP_UNSUPPORTED at once ---- */

/* Writes the n (0..2) pieces, in order, to consecutive remote bytes from raddr. */
static inline int dp_post_write(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                                uint32_t flags) {
    return qp->ops->post_write(qp, sge, n, raddr, rkey, wr_id, flags);
}
static inline int dp_post_write_imm(dp_qp *qp, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey,
                                    uint32_t imm, uint64_t wr_id, uint32_t flags) {
    return qp->ops->post_write_imm(qp, sge, n, raddr, rkey, imm, wr_id, flags);
}
/* Reads sge->len remote bytes into sge->addr (registered local memory). */
static inline int dp_post_read(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id,
                               uint32_t flags) {
    return qp->ops->post_read(qp, sge, raddr, rkey, wr_id, flags);
}
/* Atomics. Each changes one naturally aligned remote u64, and writes the word's old value to the 8 bytes at sge->addr (registered local
 * memory). Both need DP_REMOTE_ATOMIC. An atomic is atomic only with respect to others that the same hardware executes: on verbs the target's
 * adapter, on shm and tcp the processors of the target's node. So one device, or these processors, make all changes of a word. An atomic
 * that completes with DP_INVALID took no effect. With any other failure, or a reset before its completion, it may have taken effect.
 * dp_post_fetch_add adds `add` to the word. Sums wrap. */
static inline int dp_post_fetch_add(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add,
                                    uint64_t wr_id, uint32_t flags) {
    return qp->ops->post_fetch_add(qp, sge, raddr, rkey, add, wr_id, flags);
}
/* dp_post_compare_swap sets the word to `desired` if it equals `expected`, and otherwise leaves it. It has set the word if the old value that
 * came back equals `expected`. */
static inline int dp_post_compare_swap(dp_qp *qp, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected,
                                       uint64_t desired, uint64_t wr_id, uint32_t flags) {
    return qp->ops->post_compare_swap(qp, sge, raddr, rkey, expected, desired, wr_id, flags);
}
/* Posts a receive. */
static inline int dp_post_recv(dp_qp *qp, uint64_t wr_id) { return qp->ops->post_recv(qp, wr_id); }
/* dp_qp_repost makes dp_cq_poll post a receive with wr_id 0 again for each arrival, if that costs the provider less than dp_post_recv (shm). Receives that
 * are already posted must have wr_id 0. If qp->reposts is then false, the caller posts the receives itself. */
static inline void dp_qp_repost(dp_qp *qp) { qp->reposts = qp->ops->reposts; }
/* dp_rkey_ptr returns a local pointer to len bytes of the peer's region for plain loads and stores, or
 * NULL without DP_CAP_RKEY_PTR, with a bad key or bounds, or without write access. Valid until reset. */
static inline void *dp_rkey_ptr(dp_qp *qp, uint64_t raddr, uint32_t rkey, uint64_t len) {
    return qp->ops->rkey_ptr(qp, raddr, rkey, len);
}

/* After stores through dp_rkey_ptr: wakes the peer if it blocks, as a write-with-immediate would. */
static inline void dp_qp_notify(dp_qp *qp) { qp->ops->qp_notify(qp); }

/* ---- memory shared with a connected peer (shm) ----
 *
 * The side that owns memory of dp_mem_lend shares it with a connected peer that takes_shared, at most DP_SHARED_MAX regions at a time. The
 * peer then maps the memory, to read and to write. It keeps the mappings as long as it likes, so the memory must not serve for
 * anything that the peer may not see or change. */
#define DP_SHARED_MAX 128
/* dp_qp_share does nothing if the region is already shared. It does not block. DP_UNSUPPORTED: the provider or the region cannot be
 * shared, or there are too many. DP_BUSY: not now. DP_CONNECTION. The queue pair's thread. */
int dp_qp_share(dp_qp *qp, const dp_mem *m);
/* dp_qp_unshare asks the peer to unmap the region. No operation on it may be in flight. */
void dp_qp_unshare(dp_qp *qp, const dp_mem *m);
/* dp_qp_unshare_all does this for all regions, so that dp_qp_share shares them again. */
void dp_qp_unshare_all(dp_qp *qp);
/* dp_qp_shared_ptr returns a pointer to memory that the peer has shared, to be read unless `how` says otherwise. NULL: there is no such memory.
 * It may unmap memory that the peer has unshared or replaced meanwhile, except with DP_SHARED_KNOWN. Valid until the peer unshares it, dp_qp_forget_shared or a reset. The peer can change the bytes at any time. */
enum { DP_SHARED_READ = 0, DP_SHARED_WRITE = 1, DP_SHARED_KNOWN = 2 /* does not look for new messages of the peer */ };
void *dp_qp_shared_ptr(dp_qp *qp, uint32_t rkey, uint64_t offset, uint64_t len, unsigned how);
/* dp_qp_forget_shared unmaps all memory that the peer has shared. */
void dp_qp_forget_shared(dp_qp *qp);

/* ---- leaks ---- */

/* Objects that this process has made and not given back. */
typedef struct dp_live {
    int32_t devices, domains, regions, queues, queue_pairs;
} dp_live;
void dp_live_now(dp_live *out);
/* dp_qps_made is how many queue pairs the process has made so far. */
uint64_t dp_qps_made(void);

/* ---- small things every C file needs ---- */

static inline void dp_cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
/* Requests a cache line for writing. By __builtin_prefetch, GCC emits prefetchw only if -march names a processor that has it. */
static inline void dp_prefetch_write(const void *at) {
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)at));
#else
    __builtin_prefetch(at, 1);
#endif
}
/* Monotonic clock, ns. */
int64_t dp_now_ns(void);
/* Starts a thread with a small stack. It handles no signals: those belong to the threads of the program. Returns 0 or an errno. */
int dp_thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg);
/* Cryptographically random bytes (getrandom); ends the process if the kernel has none. */
void dp_random(void *buf, size_t len);

#endif

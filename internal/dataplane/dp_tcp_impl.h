/* Internals of the tcp provider: objects, formats, and the functions that its files share. dp_tcp.h has the interface.
 *
 *   dp_tcp.c        devices, memory, completion queues, the life of a queue pair
 *   dp_tcp_link.c   blobs and hellos; connecting, and taking over sockets that other processes accepted
 *   dp_tcp_listen.c the listening socket, and the thread that accepts
 *   dp_tcp_recv.c   parsing frames from the stream; checks everything that a peer sends
 *   dp_tcp_post.c   posts, and sending
 *   dp_tcp_cq.c     polling, blocking, and detecting dead peers
 *   dp_tcp_pack.c   handing over a connection to another process
 *   dp_tcp_seal.c   encryption; dp_tcp_crypto.c loads the library for it
 *
 * Threads: only the owner of a queue pair posts, polls, probes and resets. Other threads only free memory that queue pairs expose
 * (tcp_qp.lock), and look up queue pairs by token (tcp_dev.lock, which is locked first).
 */
#ifndef RFAAS_DP_TCP_IMPL_H
#define RFAAS_DP_TCP_IMPL_H

#include <pthread.h>
#include <stddef.h>
#include <sys/socket.h>

#include "dp_tcp.h"
#include "dp_tcp_seal.h"

#define TCP_MAX_MSG (1u << 20)       /* bytes of one write or read */
#define TCP_STAGE (64u << 10)        /* bytes received by one call before their frames are known */
#define TCP_ONE_SEND (68u << 10)     /* frames up to this size are copied together and sent by one call */
#define TCP_DIRECT_MIN (8u << 10)    /* if at least this much of a payload is missing, it is received into its destination */
#define TCP_OUT_POSTS (4u << 20)     /* bytes waiting to be sent; above this, posts return DP_BUSY */
#define TCP_READS (4u << 20)         /* bytes that the outstanding reads of a queue pair may have */
/* Most bytes that ever wait to be sent: only a peer that breaks the limit of reads could make more of them wait. */
#define TCP_OUT_MAX (TCP_OUT_POSTS + TCP_READS + TCP_MAX_MSG + (1u << 20))
#define TCP_TAKE_MAX (4u << 20)      /* bytes taken from one socket before the next socket is read */
/* The same for a queue pair with max_answers. It has a lock that other threads wait for while frames are executed (dp_raw_serve). */
#define TCP_TAKE_SHORT (256u << 10)
#define TCP_DIRECT_QPS 2             /* up to this many sockets of a completion queue are read without epoll */
#define TCP_WAIT_MAX 64              /* most completion queues in one wait */

/* ---- formats: little endian ---- */

/* The frames that follow the hellos. A payload of len bytes follows WRITE, WRITE_IMM and DATA. The operands of 8 bytes
 * each follow FETCH_ADD (one: what is added) and COMPARE_SWAP (two: the expected and the desired value). */
enum { TCP_WRITE = 1, TCP_WRITE_IMM, TCP_READ, TCP_FETCH_ADD, TCP_ACK, TCP_DATA, TCP_VALUE, TCP_COMPARE_SWAP };
enum { TCP_WANTS_ACK = 1 }; /* flag of WRITE and WRITE_IMM */

typedef struct tcp_frame {
    uint8_t op;
    uint8_t flags;
    uint16_t zero;
    uint32_t len;   /* of the payload; READ: bytes asked for; FETCH_ADD and COMPARE_SWAP: 8, the size of the word */
    uint32_t imm;   /* WRITE_IMM, else 0 */
    uint32_t rkey;  /* of a request with a target */
    uint64_t raddr; /* likewise; VALUE: the word's old value */
} tcp_frame;
_Static_assert(sizeof(tcp_frame) == 24 && offsetof(tcp_frame, raddr) == 16, "tcp frame");

typedef struct tcp_address {
    uint8_t ip[16]; /* IPv6, or IPv4 as ::ffff:a.b.c.d */
    uint16_t port;
    uint16_t zero;
} tcp_address;

typedef struct tcp_blob {
    uint32_t magic;
    uint16_t version;
    uint8_t provider;
    uint8_t n_addresses;
    uint8_t token[DP_TCP_TOKEN_SIZE];
    tcp_address addresses[DP_TCP_ADDRESSES]; /* the unused ones are zero */
    uint8_t secret[DP_TCP_SECRET_SIZE]; /* zero with DP_ENCRYPT_OFF, else not */
    uint8_t encrypt;                    /* DP_ENCRYPT_* of the sender */
    uint8_t reserved[7];
} tcp_blob;
_Static_assert(sizeof(tcp_blob) == 128 && offsetof(tcp_blob, token) == DP_TCP_BLOB_TOKEN_AT && offsetof(tcp_blob, secret) == 104,
               "tcp blob");

typedef struct tcp_region { /* as in a hello */
    uint32_t rkey, access;
    uint64_t base, size;
} tcp_region;

/* An entry without rights and size is not a region: its base has flags of what the sender supports. Earlier builds accept and ignore it. */
enum { TCP_CAN_BATCH = 1 }; /* serves requests with DP_REQ_BATCH */

typedef struct tcp_hello {
    uint32_t magic;
    uint16_t version;
    uint8_t n_regions;
    uint8_t zero;
    uint8_t to[DP_TCP_TOKEN_SIZE];
    uint8_t from[DP_TCP_TOKEN_SIZE];
    int32_t status; /* of an answer: DP_OK, or DP_BUSY if both sides connected at once and the sender's socket is used */
    uint8_t reserved[20];
    tcp_region regions[DP_EXPOSE_MAX]; /* the unused ones are zero */
} tcp_hello;
_Static_assert(sizeof(tcp_hello) == DP_TCP_HELLO_SIZE && offsetof(tcp_hello, to) == DP_TCP_HELLO_TOKEN_AT &&
                   offsetof(tcp_hello, from) == DP_TCP_HELLO_FROM_AT && offsetof(tcp_hello, regions) == 64,
               "tcp hello");

/* ---- objects ---- */

typedef struct tcp_dev tcp_dev;
typedef struct tcp_qp tcp_qp;
typedef struct tcp_listener tcp_listener;

typedef struct tcp_mem {
    dp_mem m;
    void *map; /* NULL: the caller's memory */
    uint64_t map_len;
} tcp_mem;

typedef struct tcp_cq {
    dp_cq c;
    int wake_fd;  /* eventfd */
    int epoll_fd; /* -1 until there are more than TCP_DIRECT_QPS queue pairs */
    tcp_qp **qps;
    uint32_t n_qps, cap_qps;
    dp_wc *ring; /* completions not polled yet; cannot overflow, because each queue pair reserves its part */
    uint32_t head, tail, mask;
    uint64_t polls;
} tcp_cq;

/* A connected socket and the contents of the peer's hello. */
typedef struct tcp_link {
    int fd; /* -1: none */
    uint8_t token[DP_TCP_TOKEN_SIZE]; /* of the peer's queue pair */
    uint32_t n_regions;
    tcp_region regions[DP_EXPOSE_MAX];
    bool dialed;         /* this side opened the socket */
    tcp_hello hellos[2]; /* of the side that opened the socket, and of the other side */
} tcp_link;

/* A post that waits for its answer. Answers come in the order of the posts. */
typedef struct tcp_pending {
    uint64_t wr_id;
    uint8_t *dst;  /* of a read or an atomic */
    uint32_t len;
    uint8_t op;    /* a dp_op */
    uint8_t wants; /* op of the answer; 0: none, the post has failed and waits for its turn to complete */
    bool shown;    /* DP_SIGNALED */
} tcp_pending;

struct tcp_qp {
    dp_qp q;
    tcp_link peer; /* fd is -1 unless connected */
    /* Receiving. */
    uint8_t *stage; /* TCP_STAGE bytes; [lo, hi) are received but not parsed */
    uint32_t lo, hi;
    tcp_frame frame;     /* if in_frame: the frame whose payload is incomplete */
    bool in_frame;
    bool held;           /* a write-with-immediate waits for a receive */
    bool more;           /* the last tcp_take stopped before it had read everything */
    bool ready;          /* epoll has reported the socket */
    bool passed;         /* another process may have the socket */
    uint8_t *dst;        /* destination of the rest of the payload */
    uint32_t left;       /* bytes of the payload that are missing */
    const tcp_mem *into; /* region that dst lies in; NULL: local memory */
    uint64_t *recvs;     /* wr_id of receives, by position & recv_mask */
    uint32_t recv_mask, rposted, rtaken, rpolled;
    /* Sending. */
    uint8_t *out; /* [out_lo, out_hi) could not be sent yet */
    size_t out_lo, out_hi, out_cap;
    size_t out_max; /* most bytes that wait when an answer is appended */
    uint32_t take_max; /* TCP_TAKE_MAX or TCP_TAKE_SHORT */
    tcp_seal *seal; /* NULL: the connection is not encrypted */
    tcp_pending *pending;
    uint32_t pend_mask, pend_head, pend_tail;
    uint32_t unpolled;     /* own completions in the ring */
    uint64_t reading;      /* bytes of outstanding reads */
    uint32_t watched;      /* events that epoll watches for; 0: not registered with epoll */
    uint64_t probed_polls; /* cq.polls at the last probe */
    int64_t silent_until;  /* time of the latest probe */
    int64_t silent_since;  /* first of the latest probes, all of which found the peer silent; 0: none */
    /* Shared with threads that free memory: under lock. */
    pthread_mutex_t lock;
    uint32_t n_expose;
    tcp_mem *expose[DP_EXPOSE_MAX]; /* NULL: the region was freed */
    /* Connecting: under the device's lock. */
    uint8_t token[DP_TCP_TOKEN_SIZE];
    uint8_t secret[DP_TCP_SECRET_SIZE];       /* changes with the token */
    uint8_t meeting_token[DP_TCP_TOKEN_SIZE]; /* of the peer, while meeting */
    bool meeting;   /* dp_qp_connect is under way */
    int meeting_fd; /* its socket; -1: none */
    bool taken;     /* the token was used */
    bool cancelled;
    tcp_link deposit; /* socket of a peer that connected before dp_qp_connect */
    tcp_qp *next;
};

/* One direction of an encrypted connection, for the process that takes it over. */
typedef struct tcp_packed_key {
    uint8_t secret[DP_CRYPTO_SUM];
    uint64_t records;
} tcp_packed_key;

struct tcp_dev {
    dp_dev d;
    bool active_only, attended, handed;
    uint8_t encrypt;  /* DP_ENCRYPT_* */
    uint64_t forged;  /* see dp_tcp_counts; atomic */
    int handed_from; /* -1: none */
    struct sockaddr_storage listen_at;
    socklen_t listen_len;
    int port_first, port_last;
    tcp_address addresses[DP_TCP_ADDRESSES]; /* for blobs; without advertise, set when the device starts to listen */
    uint32_t n_addresses;
    /* Everything below under lock. */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a deposit was made, or a connect was cancelled */
    tcp_qp *qps;
    dp_tcp_counts counts;
    tcp_listener *listener; /* NULL: not listening */
};

static inline tcp_dev *tcp_dev_of(dp_dev *d) { return (tcp_dev *)d; }
static inline tcp_qp *tcp_qp_of(dp_qp *q) { return (tcp_qp *)q; }
static inline tcp_cq *tcp_cq_of(dp_cq *c) { return (tcp_cq *)c; }
static inline size_t tcp_backlog(const tcp_qp *qp) { return qp->out_hi - qp->out_lo; }

static inline void tcp_complete(tcp_qp *qp, const dp_wc *wc) {
    tcp_cq *cq = tcp_cq_of(qp->q.cq);
    cq->ring[cq->tail++ & cq->mask] = *wc;
}

/* dp_tcp.c */

int tcp_mem_alloc(dp_domain *d, uint64_t size, uint32_t access, dp_mem **out, dp_error *err);
void tcp_mem_free(dp_mem *mem);
int tcp_qp_create(dp_domain *d, dp_cq *c, const dp_qp_attr *attr, dp_qp **out, dp_error *err);
void tcp_qp_destroy(dp_qp *q);

/* dp_tcp_recv.c */

/* Reads and executes frames until the socket is empty, a receive is missing, or take_max is reached. Owner. */
void tcp_take(tcp_qp *qp);
/* Receives up to len bytes. 0: no bytes have arrived, or the connection has ended. */
uint32_t tcp_receive(tcp_qp *qp, void *to, uint32_t len);
/* Ends the connection; status is the reason. Outstanding posts fail, the oldest with `status`. Owner. */
void tcp_end(tcp_qp *qp, int status);
/* Ends a connection on which a send has failed. It first takes what the peer sent before its end. The reason is DP_PEER_GONE. Owner. */
void tcp_lost(tcp_qp *qp);
/* Completes posts that failed before they were sent and have become the oldest. */
void tcp_complete_refused(tcp_qp *qp);

/* dp_tcp_post.c */

/* Sends waiting bytes. False: the connection has failed, and the queue pair was ended. */
bool tcp_flush(tcp_qp *qp);
/* Appends an answer to the waiting bytes. False: the peer exceeds the limit of reads, or there is no memory, or sealing has failed. */
bool tcp_answer(tcp_qp *qp, const tcp_frame *f, const void *payload);
int tcp_post_write(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int tcp_post_write_imm(dp_qp *q, const dp_sge *sge, int n, uint64_t raddr, uint32_t rkey, uint32_t imm, uint64_t wr_id,
                       uint32_t flags);
int tcp_post_read(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t wr_id, uint32_t flags);
int tcp_post_fetch_add(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t add, uint64_t wr_id,
                       uint32_t flags);
int tcp_post_compare_swap(dp_qp *q, const dp_sge *sge, uint64_t raddr, uint32_t rkey, uint64_t expected, uint64_t desired,
                          uint64_t wr_id, uint32_t flags);
int tcp_post_recv(dp_qp *q, uint64_t wr_id);

/* dp_tcp_seal.c */

/* Sets the device's encryption to a DP_ENCRYPT_* value, after its addresses. */
int tcp_seal_open_device(tcp_dev *dev, int wanted, dp_error *err);
/* Decides by the settings and addresses of both sides whether they encrypt their connection. Both sides reach the same decision. Errors:
 * DP_UNSUPPORTED (the settings contradict each other, or libcrypto is missing). */
int tcp_seal_decide(const tcp_dev *dev, const tcp_blob *peer, bool *seals, dp_error *err);
/* Makes the keys of a new connection. */
int tcp_seal_start(tcp_qp *qp, const tcp_blob *peer, dp_error *err);
/* Makes the keys of a connection that another process has handed over, from the secret and the number of records of each direction. */
int tcp_seal_continue(tcp_qp *qp, const tcp_packed_key *tx, const tcp_packed_key *rx, dp_error *err);
/* Wipes the keys. */
void tcp_seal_end(tcp_qp *qp);
/* Most bytes that appending len bytes adds to tcp_qp.out. */
static inline size_t tcp_seal_room(size_t len) { return len + TCP_RECORD_EXTRA * (len / TCP_RECORD_MAX + 2); }
/* Appends bytes of frames to the record at the end of tcp_qp.out, which has room. Full records are sealed. False: the connection has ended. */
bool tcp_seal_append(tcp_qp *qp, const uint8_t *data, size_t len);
/* Seals the record at the end of tcp_qp.out. False: the connection has ended. */
bool tcp_seal_close(tcp_qp *qp);
/* Receives records and opens them into the staging buffer. Returns the number of bytes staged; 0: no record is complete, or the connection
 * has ended. */
uint32_t tcp_seal_stage(tcp_qp *qp);

/* dp_tcp_cq.c */

int tcp_cq_create(dp_dev *dev, uint32_t capacity, dp_cq **out, dp_error *err);
void tcp_cq_destroy(dp_cq *c);
int tcp_cq_attach(tcp_cq *cq, tcp_qp *qp, dp_error *err);
void tcp_cq_detach(tcp_cq *cq, tcp_qp *qp);
/* Closes the socket, if there is one. */
void tcp_close(tcp_qp *qp);
/* Drops the queue pair's completions. */
void tcp_cq_forget(tcp_cq *cq, const tcp_qp *qp);
int tcp_cq_poll(dp_cq *c, dp_wc *wc, int n);
int tcp_cq_arm(dp_cq *c);
void tcp_cq_disarm(dp_cq *c);
int tcp_cq_wait(dp_cq *c, int64_t timeout_ns);
bool tcp_cq_wait_many(dp_cq **c, uint32_t n, int64_t timeout_ns);
void tcp_cq_wake(dp_cq *c);
void tcp_cq_promise_hot(dp_cq *c, bool hot);
int tcp_qp_probe(dp_qp *q);
/* How long a silent peer has to answer before it counts as gone, by the round-trip time of its connection. */
int64_t tcp_gone_confirm_ns(uint32_t rtt_us);
int tcp_qp_events(dp_qp *q, int *fd);

/* dp_tcp_pack.c */

int tcp_cq_pack(const dp_cq *c);
int tcp_cq_unpack(dp_dev *d, uint32_t capacity, int *fd, dp_cq **out, dp_error *err);
int tcp_qp_pack(dp_qp *q, dp_packed_qp *out, int *fds, dp_error *err);
int tcp_qp_unpack(dp_domain *d, dp_cq *c, const dp_packed_qp *packed, int *fds, dp_mem **exposed, uint32_t *n_exposed, dp_qp **out, dp_error *err);

/* dp_tcp_link.c */

int tcp_link_export(tcp_dev *dev, const tcp_qp *qp, void *blob, uint32_t *len, dp_error *err);
int tcp_link_connect(tcp_dev *dev, tcp_qp *qp, const void *blob, uint32_t len, dp_error *err);
void tcp_link_cancel(tcp_dev *dev, tcp_qp *qp);
/* Invalidates the token and drops a deposit. */
void tcp_link_forget(tcp_dev *dev, tcp_qp *qp);
/* Copies a blob and checks every byte of it except the token, which must only be nonzero. */
int tcp_blob_check(const void *data, uint32_t len, tcp_blob *b, dp_error *err);
/* Checks a hello and copies its regions and its sender. */
bool tcp_hello_check(const tcp_hello *h, tcp_link *out);
/* Reports whether the peer's hello announces this (TCP_CAN_*). */
bool tcp_peer_can(const tcp_link *l, uint64_t what);
/* The address and port of a socket address, and back. False: another family. */
bool tcp_address_of(const struct sockaddr_storage *a, tcp_address *out);
socklen_t tcp_address_to(const tcp_address *a, struct sockaddr_storage *out);
/* "IPv4:port" or "[IPv6]:port", separated by commas. */
int tcp_addresses_parse(const char *text, tcp_address *out, uint32_t *n, dp_error *err);

/* dp_tcp_listen.c */

/* Under dev->lock. */
int tcp_listen_start(tcp_dev *dev, dp_error *err);
/* Not under dev->lock. */
void tcp_listen_stop(tcp_dev *dev);
int tcp_event_fd(dp_dev *d);
void tcp_attend(dp_dev *d);
bool tcp_starved(const dp_dev *d);

#endif

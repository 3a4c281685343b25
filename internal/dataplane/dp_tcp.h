/* The tcp provider: the semantics of a reliable connected queue pair over one TCP socket per queue pair, for plain Ethernet.
 * Only processes that accept or hand over sockets need this header. Other programs use dp_fabric.h.
 *
 * Connecting. A queue pair's blob carries a single-use random token and up to DP_TCP_ADDRESSES addresses. One side opens a socket to an
 * address of the peer's blob and sends a hello: 256 bytes with the token of the peer, its own token and the regions that it exposes. The
 * other side answers with a hello of its own. Frames follow (docs/PROTOCOL.md). A device is in one of three modes:
 *
 *   listening         (default) The device listens from the first dp_qp_export on, on dp_dev_options.address and the port range. A thread
 *                     accepts connections; if the device is `attended`, dp_dev_attend does. dp_qp_connect connects to the peer's
 *                     addresses, unless the peer has connected already.
 *   active_side_only  The device never listens. Its blobs carry no address, so dp_qp_connect always opens the socket. For clients.
 *   handed            The device neither listens nor connects. Another process (the acceptor, a daemon) owns the listening socket and
 *                     hands accepted sockets to this one. The blobs carry dp_dev_options.advertise: the acceptor's addresses. dp_qp_connect
 *                     waits up to DP_TCP_CONNECT_MS for the socket. For workers.
 *
 * What an acceptor does:
 *   1. It calls accept() on its data port and reads exactly DP_TCP_HELLO_SIZE bytes. It closes the socket if they do not arrive within
 *      DP_TCP_HELLO_MS. It keeps at most DP_TCP_PENDING connections without a whole hello; a new one replaces the oldest.
 *   2. It calls dp_tcp_hello_token() (in Go: dataplane.HelloToken), which returns the token of the queue pair that the hello addresses.
 *      dp_tcp_blob_token() returns the same token for the blob that the worker exported (in Go: dataplane.ChannelToken for a channel's
 *      blob). The token is a secret, so the acceptor looks it up by hash, or compares it in constant time.
 *   3. It calls dp_tcp_prepare() for the socket (TCP_NODELAY and keepalive). A sealed worker cannot: its filter refuses these options.
 *   4. It passes the socket and the hello to the worker over a unix socket with dp_tcp_pass(), and closes its own copy. In Go: one message
 *      of DP_TCP_HELLO_SIZE bytes with the descriptor as SCM_RIGHTS.
 *   After that, it forgets the token. The worker refuses a second hello with the same token in any case.
 * What a worker does, one of:
 *   - It calls dp_tcp_take() when its unix socket is readable.
 *   - It sets dp_dev_options.handed_from. Then dp_qp_connect takes sockets from there while it waits.
 *   - It calls dp_tcp_hand() with a descriptor that it received in another way.
 *
 * Progress. The target's thread executes remote writes, reads and atomics in dp_cq_poll. While the owner of a queue pair does not poll,
 * the peer's operations wait (DP_CAP_POLLED_TARGET). A write-with-immediate that finds no posted receive waits in the stream until
 * dp_post_recv, and so do the frames behind it.
 *
 * System calls of the data path, once a queue pair is connected: recvfrom and sendto (no address, flags MSG_DONTWAIT, MSG_NOSIGNAL and
 * MSG_MORE), ppoll, epoll_ctl and epoll_pwait (from the third queue pair of a completion queue on; epoll_create1 before), read and write
 * (eventfd), getsockopt (TCP_INFO and SO_ERROR), ioctl (FIONREAD), shutdown, close, clock_gettime. The data path does not use sendmsg.
 * dp_tcp_take also needs recvmsg, dp_qp_reset getrandom, dp_qp_create mmap, and dp_cq_create eventfd2. setsockopt is tried and may fail
 * with EPERM.
 * worker/filter.c allows all of these in a sealed worker today (tests/c/tcp_connect.c: tcp/handed-to-a-sealed-worker).
 *
 * dp_qp_destroy waits up to half a second for the socket to take the last posted bytes, and drops the rest.
 *
 * Encryption. dp_dev_options.encrypt says whether a device encrypts its connections; dp_tcp_seal.h has the description. The hellos always
 * travel in the clear.
 */
#ifndef RFAAS_DP_TCP_H
#define RFAAS_DP_TCP_H

#include "dp_fabric.h"

#define DP_TCP_VERSION 1
#define DP_TCP_HELLO_MAGIC 0x54484652u /* "RFHT", little endian, as all integers of blobs, hellos and frames */
#define DP_TCP_BLOB_MAGIC 0x54514652u  /* "RFQT" */

#define DP_TCP_TOKEN_SIZE 16
#define DP_TCP_SECRET_SIZE 16
#define DP_TCP_ADDRESSES 4       /* in a blob */
#define DP_TCP_HELLO_SIZE 256    /* bytes, always */
#define DP_TCP_HELLO_TOKEN_AT 8  /* offset in the hello: token of the queue pair that it addresses */
#define DP_TCP_HELLO_FROM_AT 24  /* offset in the hello: token of the queue pair that sends it */
#define DP_TCP_BLOB_TOKEN_AT 8   /* offset in a blob: token of the queue pair that exported it */
#define DP_TCP_HELLO_MS 1000     /* a hello must arrive within this time after the connection */
#define DP_TCP_CONNECT_MS 2000   /* how long dp_qp_connect waits for its peer */
#define DP_TCP_PENDING 128       /* most accepted sockets without a whole hello */

/* dp_tcp_preload loads what encrypted connections need, for processes that are forked from this one. If that fails, dp_dev_open reports it. */
void dp_tcp_preload(void);

/* dp_tcp_hello_token checks the magic and version of a hello of DP_TCP_HELLO_SIZE bytes and returns the receiver's token:
 * DP_TCP_TOKEN_SIZE bytes inside the hello. NULL: not a hello of this version. Any thread. */
const uint8_t *dp_tcp_hello_token(const void *hello);

/* dp_tcp_blob_token returns the token of a queue pair's blob, DP_TCP_TOKEN_SIZE bytes inside the blob. NULL: not a tcp blob of this
 * version. The queue-pair blob of a channel blob follows the channel's header (dp_wire.h). */
const uint8_t *dp_tcp_blob_token(const void *blob, uint32_t len);

/* dp_tcp_prepare sets the options of a connected socket that the provider relies on: TCP_NODELAY, SO_KEEPALIVE with probes every second.
 * It ignores options that it cannot set. A sealed worker cannot set them, and receives prepared sockets. */
void dp_tcp_prepare(int fd);

/* dp_tcp_pass sends a socket and the hello that was read from it over a unix socket (stream or seqpacket), without blocking. The caller
 * keeps fd and closes it. Errors: DP_BUSY (the unix socket is full: try again), DP_PEER_GONE. */
int dp_tcp_pass(int unix_fd, int fd, const void *hello, dp_error *err);

/* dp_tcp_hand gives the device a connected socket and the hello that was read from it, for the queue pair that the hello
 * addresses. The queue pair answers, and its pending or next dp_qp_connect completes. The device owns fd from now on and closes it in case
 * of an error. Any thread; does not block. Any mode, also a listening one.
 * Errors: DP_BAD_BLOB (not a hello, no queue pair with this token, or the token was used already; counted), DP_PEER_GONE (the
 * answer could not be sent), DP_UNSUPPORTED (a device of another provider). */
int dp_tcp_hand(dp_dev *dev, int fd, const void *hello, dp_error *err);

/* dp_tcp_take receives one socket that dp_tcp_pass sent over unix_fd and hands it to the device. Does not block. Any thread.
 * Errors: DP_BUSY (no message has arrived), DP_PEER_GONE (unix_fd was closed), DP_PROTOCOL (a malformed message), those of dp_tcp_hand. */
int dp_tcp_take(dp_dev *dev, int unix_fd, dp_error *err);

/* Counts the sockets that the device has accepted or received by dp_tcp_hand since it was opened. */
typedef struct dp_tcp_counts {
    uint64_t accepted;  /* sockets accepted or handed */
    uint64_t connected; /* hellos that reached their queue pair */
    uint64_t refused;   /* hellos that are malformed, or whose token is unknown or was used before */
    uint64_t forged;    /* encrypted connections that ended because a record was not the peer's next one */
    uint64_t dropped;   /* sockets closed without a whole hello: by the peer, after DP_TCP_HELLO_MS, or for a newer socket */
} dp_tcp_counts;
/* Any thread. All zero for a device of another provider. */
void dp_tcp_count(dp_dev *dev, dp_tcp_counts *out);

#endif

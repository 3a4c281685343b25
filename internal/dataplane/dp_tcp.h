/* The tcp provider: the semantics of a reliable connected queue pair over one TCP socket per queue pair, for plain Ethernet.
 * This header is for those who integrate the provider. Programs that only use dp_fabric.h need nothing from it.
 *
 * Who connects. A queue pair's blob carries a random token of one use and up to DP_TCP_ADDRESSES addresses. One side opens a socket to an
 * address of the peer's blob and sends a hello: 256 bytes with the token of the peer, its own token and the regions that it exposes. The
 * other side answers with a hello of its own. Frames follow (docs/PROTOCOL.md). A device is in one of three modes:
 *
 *   listening         (default) The device listens by itself, from the first dp_qp_export on, on dp_dev_options.address and the port range.
 *                     A thread accepts, or dp_dev_attend if the device is `attended`. dp_qp_connect connects to the peer's addresses,
 *                     unless the peer has connected already.
 *   active_side_only  The device never listens. Its blobs carry no address, so dp_qp_connect always opens the socket. For clients.
 *   handed            The device neither listens nor connects. Another process (the acceptor, a daemon) owns the listening socket and
 *                     hands accepted sockets to this one. The blobs carry dp_dev_options.advertise: the acceptor's addresses. dp_qp_connect
 *                     waits up to DP_TCP_CONNECT_MS for the socket. For workers.
 *
 * What an acceptor does:
 *   1. accept() on its data port. Read exactly DP_TCP_HELLO_SIZE bytes, and nothing more. Close the socket if they do not come within
 *      DP_TCP_HELLO_MS. Keep at most DP_TCP_STRANGERS such sockets; a new one replaces the oldest.
 *   2. dp_tcp_hello_token() (in Go: dataplane.HelloToken) gives the token of the queue pair that the hello is for. It is the token of
 *      dp_tcp_blob_token() of the blob that the worker exported (in Go: dataplane.ChannelToken of a channel's blob). Look it up by hash, or
 *      compare in constant time: the token is a secret.
 *   3. dp_tcp_prepare() the socket (TCP_NODELAY and keepalive). A sealed worker cannot: its filter refuses these options.
 *   4. dp_tcp_pass() the socket and the hello to the worker over a unix socket, then close the acceptor's copy. In Go: one message of
 *      DP_TCP_HELLO_SIZE bytes with the descriptor as SCM_RIGHTS.
 *   Forget the token after that: a second hello with it is refused by the worker anyway.
 * What the worker does: dp_tcp_take() when its unix socket is readable, or set dp_dev_options.handed_from, and dp_qp_connect takes
 * sockets from there while it waits; or dp_tcp_hand() with a descriptor that it received in some other way.
 *
 * Progress. Remote operations are executed by the target's thread, in dp_cq_poll: writes are applied, reads answered, atomics executed
 * there. While the owner of a queue pair does not poll, peers' operations wait (DP_CAP_POLLED_TARGET). Writes-with-immediate that find no
 * posted receive wait in the stream, and so does what follows them, until dp_post_recv.
 *
 * System calls of the data path, once a queue pair is connected: recvfrom and sendto (no address, flags MSG_DONTWAIT, MSG_NOSIGNAL and
 * MSG_MORE), ppoll, epoll_ctl and epoll_pwait (from the third queue pair of a completion queue on; epoll_create1 before), read and write
 * (eventfd), getsockopt (TCP_INFO and SO_ERROR), ioctl (FIONREAD), shutdown, close, clock_gettime. No sendmsg. dp_tcp_take also needs recvmsg; dp_qp_reset needs
 * getrandom; dp_qp_create needs mmap, eventfd2 is needed by dp_cq_create. setsockopt is tried and may fail with EPERM.
 * worker/filter.c allows all of these in a sealed worker today (tests/c/tcp_connect.c: tcp/handed-to-a-sealed-worker).
 *
 * dp_qp_destroy waits up to half a second for the socket to take what was posted last, and drops the rest.
 *
 * Not encrypted: payloads and tokens travel in the clear, as with verbs.
 */
#ifndef RFAAS_DP_TCP_H
#define RFAAS_DP_TCP_H

#include "dp_fabric.h"

#define DP_TCP_VERSION 1
#define DP_TCP_HELLO_MAGIC 0x54484652u /* "RFHT", little endian, as all integers of blobs, hellos and frames */
#define DP_TCP_BLOB_MAGIC 0x54514652u  /* "RFQT" */

#define DP_TCP_TOKEN_SIZE 16
#define DP_TCP_ADDRESSES 4       /* in a blob */
#define DP_TCP_HELLO_SIZE 256    /* bytes, always */
#define DP_TCP_HELLO_TOKEN_AT 8  /* offset in the hello: token of the queue pair that it is for */
#define DP_TCP_HELLO_FROM_AT 24  /* offset in the hello: token of the queue pair that sends it */
#define DP_TCP_BLOB_TOKEN_AT 8   /* offset in a blob: token of the queue pair that exported it */
#define DP_TCP_HELLO_MS 1000     /* a hello must have come this long after the connection */
#define DP_TCP_CONNECT_MS 2000   /* how long dp_qp_connect waits for its peer */
#define DP_TCP_STRANGERS 128     /* accepted sockets whose hello has not come yet */

/* dp_tcp_hello_token checks the magic and version of a hello of DP_TCP_HELLO_SIZE bytes and returns the token that it is for,
 * DP_TCP_TOKEN_SIZE bytes inside of the hello; NULL if it is no hello of this version. Any thread. */
const uint8_t *dp_tcp_hello_token(const void *hello);

/* dp_tcp_blob_token returns the token of a queue pair's blob, DP_TCP_TOKEN_SIZE bytes inside of the blob; NULL if it is no tcp blob of this
 * version. The queue-pair blob of a channel blob follows the channel's header (dp_wire.h). */
const uint8_t *dp_tcp_blob_token(const void *blob, uint32_t len);

/* dp_tcp_prepare sets the options of a connected socket that the provider relies on: TCP_NODELAY, SO_KEEPALIVE with probes every second.
 * Options that cannot be set are left as they are; a worker behind a filter cannot, and has prepared sockets. */
void dp_tcp_prepare(int fd);

/* dp_tcp_pass sends a socket and the hello that was read from it over a unix socket (stream or seqpacket), without blocking. The caller
 * keeps fd and closes it. Errors: DP_BUSY (the unix socket is full: try again), DP_PEER_GONE. */
int dp_tcp_pass(int unix_fd, int fd, const void *hello, dp_error *err);

/* dp_tcp_hand gives the device a connected socket and the hello that was read from it, for the queue pair whose token the hello carries. That
 * queue pair answers and a present or later dp_qp_connect of it completes. The device owns fd from now on and closes it in case of an
 * error. Any thread; does not block. Any mode, also a listening one.
 * Errors: DP_BAD_BLOB (not a hello, no queue pair with this token, or the token was used already; counted), DP_PEER_GONE (the
 * answer could not be sent), DP_UNSUPPORTED (a device of another provider). */
int dp_tcp_hand(dp_dev *dev, int fd, const void *hello, dp_error *err);

/* dp_tcp_take receives one socket that dp_tcp_pass sent over unix_fd and hands it to the device. Does not block. Any thread.
 * Errors: DP_BUSY (nothing is there), DP_PEER_GONE (unix_fd was closed), DP_PROTOCOL (a message of another form), those of dp_tcp_hand. */
int dp_tcp_take(dp_dev *dev, int unix_fd, dp_error *err);

/* What came to the device's listening socket and to dp_tcp_hand since it was opened. */
typedef struct dp_tcp_counts {
    uint64_t accepted;  /* sockets accepted or handed */
    uint64_t connected; /* hellos that reached their queue pair */
    uint64_t refused;   /* hellos that are malformed, or with a token that is unknown or was used */
    uint64_t dropped;   /* sockets without a whole hello: closed by the peer, too late, or replaced by a newer one */
} dp_tcp_counts;
/* Any thread. All zero for a device of another provider. */
void dp_tcp_count(dp_dev *dev, dp_tcp_counts *out);

#endif

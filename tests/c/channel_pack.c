/* Connected channels that one process hands over to another (dp_channel_pack), and hostile descriptions of channels. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dp_channel_impl.h"
#include "dp_shm_link.h"
#include "dp_tcp_impl.h"
#include "ends.h"
#include "served.h"

#define FDS (1 + DP_PACKED_FDS)

/* A packed endpoint with one channel. */
typedef struct packed {
    dp_packed_channel ch;
    int fds[FDS]; /* of the endpoint and the channel */
} packed;

static void pack(served *s, packed *p) {
    dp_error err;
    memset(p, 0, sizeof *p);
    CHECK_OK_ERR(dp_channel_pack(s->ch, &p->ch, p->fds + 1, &err), err);
    CHECK(p->ch.qp.n_fds <= DP_PACKED_FDS);
    p->fds[0] = dp_endpoint_pack(s->ep);
    CHECK_GE(p->fds[0], 0);
}

static void send_packed(int sock, const packed *p) {
    size_t n = (1 + p->ch.qp.n_fds) * sizeof(int);
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(FDS * sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)&p->ch, sizeof p->ch};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_SPACE(n)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(n), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(c), p->fds, n);
    CHECK_EQ(sendmsg(sock, &m, 0), sizeof p->ch);
}

static void recv_packed(int sock, packed *p) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(FDS * sizeof(int))];
    } control = {0};
    struct iovec iov = {&p->ch, sizeof p->ch};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    CHECK_EQ(recvmsg(sock, &m, MSG_WAITALL | MSG_CMSG_CLOEXEC), sizeof p->ch);
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    CHECK(c && c->cmsg_len == CMSG_LEN((1 + p->ch.qp.n_fds) * sizeof(int)));
    memset(p->fds, -1, sizeof p->fds);
    memcpy(p->fds, CMSG_DATA(c), (1 + p->ch.qp.n_fds) * sizeof(int));
}

static void close_rest(packed *p) {
    for (uint32_t i = 0; i < FDS; i++)
        if (p->fds[i] >= 0)
            close(p->fds[i]);
}

static int unpack(served *s, packed *p, dp_error *err) {
    dp_dev_options o = quick_options();
    o.packable = 1;
    s->ch = NULL;
    s->ep = NULL;
    CHECK_OK_ERR(dp_dev_open(t_provider(), &o, &s->dev, err), *err);
    int st = dp_endpoint_unpack(s->dev, 1, p->ch.cfg.depth ? p->ch.cfg.depth : 1, s->mode, &p->fds[0], &s->ep, err);
    if (!st)
        st = dp_channel_unpack(s->ep, &p->ch, p->fds + 1, &s->ch, err);
    close_rest(p);
    return st;
}

static void calls(served *s) {
    static const uint32_t sizes[] = {0, 1, 8, 16, 17, 64, 256, 257, 1000, 4096, 4097, 5000, 60000};
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            served_echo(s, sizes[i], sizes[i] + round);
}

/* ---- from process to process ---- */

/* Reads a channel's blob, without the addresses at which a tcp device listens. Clients of the product have none. */
static void offer(const served *s, uint8_t *blob, uint32_t *len) {
    dp_error err;
    *len = DP_CHANNEL_BLOB_MAX;
    CHECK_OK_ERR(dp_channel_offer(s->ch, blob, len, &err), err);
    if (s->dev->provider != DP_PROVIDER_TCP)
        return;
    memset(blob + offsetof(dp_channel_blob, crc), 0, sizeof(uint32_t));
    memset(blob + sizeof(dp_channel_blob) + offsetof(tcp_blob, addresses), 0, sizeof(tcp_address[DP_TCP_ADDRESSES]));
}

static void taker(int sock, void *arg) {
    served s = {.mode = *(dp_wait_mode *)arg};
    packed p;
    dp_error err;
    uint8_t was[DP_CHANNEL_BLOB_MAX], is[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    t_name("taker");
    recv_packed(sock, &p);
    t_recv(sock, &len, sizeof len);
    t_recv(sock, was, len);
    CHECK_OK_ERR(unpack(&s, &p, &err), err);
    uint32_t now;
    offer(&s, is, &now);
    CHECK_EQ(now, len);
    CHECK_SAME(is, was, len); /* so the worker recognises its client */
    calls(&s);
    pack(&s, &p);
    send_packed(sock, &p);
    served_close_client(&s);
    t_sync(sock);
}

static void passed_on(dp_wait_mode mode) {
    served s;
    t_peer peer;
    packed p;
    dp_error err;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len;
    t_peer_start(&peer, true, taker, &mode);
    served_open(&s, true, mode, 4, 4096, 65536);
    calls(&s);
    offer(&s, blob, &len);
    pack(&s, &p);
    send_packed(peer.sock, &p);
    t_send(peer.sock, &len, sizeof len);
    t_send(peer.sock, blob, len);
    served_close_client(&s); /* the worker notices nothing, because other processes hold the socket */
    recv_packed(peer.sock, &p);
    t_sync(peer.sock);
    t_peer_join(&peer);
    CHECK_OK_ERR(unpack(&s, &p, &err), err);
    calls(&s);
    /* A channel that was packed but not unpacked can still be used. */
    pack(&s, &p);
    calls(&s);
    /* After the worker's end, another worker can use the channel, as with any channel. */
    t_peer_kill(&s.peer);
    uint8_t in[8] = {0};
    uint32_t size;
    dp_started started;
    int st = dp_channel_call(s.ch, FN_ECHO, in, 8, NULL, in, 8, &size, 0, &started);
    CHECKF(dp_status_class(st) == dp_status_class(DP_PEER_GONE), "a call after the worker's end: %s", dp_status_text(st));
    CHECK_STATUS(dp_channel_pack(s.ch, &p.ch, p.fds, NULL), DP_BUSY);
    CHECK_OK_ERR(dp_channel_reset(s.ch, &err), err);
    served_again(&s, false);
    calls(&s);
    served_close(&s);
}

T_CASE(pack_adaptive, "channel/pack-adaptive", .providers = T_SHM | T_TCP) { passed_on(DP_WAIT_ADAPTIVE); }
T_CASE(pack_hot, "channel/pack-hot", .providers = T_SHM | T_TCP) { passed_on(DP_WAIT_HOT); }
T_CASE(pack_warm, "channel/pack-warm", .providers = T_SHM | T_TCP) { passed_on(DP_WAIT_WARM); }

/* ---- several holders of the socket ---- */

static void holder(int sock, void *arg) {
    packed p;
    (void)arg;
    t_name("holder");
    recv_packed(sock, &p);
    t_sync(sock);
    t_sync(sock);
    close_rest(&p);
}

/* A process that has handed over a channel does not spin when the worker of that channel ends. */
T_CASE(pack_left, "channel/pack-left-behind", .providers = T_SHM) {
    served s;
    t_peer peer, worker;
    packed p;
    t_peer_start(&peer, true, holder, NULL);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 512, 0);
    served_echo(&s, 8, 1);
    pack(&s, &p);
    send_packed(peer.sock, &p);
    t_sync(peer.sock);
    shm_dev *dev = (shm_dev *)s.dev;
    int watched = fcntl(dev->epoll_fd, F_DUPFD_CLOEXEC, 0);
    CHECK_GE(watched, 0);
    dp_channel_destroy(s.ch);
    dp_endpoint_destroy(s.ep);
    worker = s.peer;
    t_peer_kill(&worker);
    struct pollfd event = {.fd = watched, .events = POLLIN};
    CHECK_EQ(poll(&event, 1, 100), 0);
    close(watched);
    dp_dev_close(s.dev);
    t_sync(peer.sock);
    t_peer_join(&peer);
}

/* A worker ends when the last process that holds its socket does. */
T_CASE(pack_last, "channel/pack-last-holder", .providers = T_SHM | T_TCP) {
    served s;
    t_peer peer;
    packed p;
    t_peer_start(&peer, true, holder, NULL);
    served_open(&s, true, DP_WAIT_ADAPTIVE, 2, 512, 0);
    served_echo(&s, 8, 1);
    pack(&s, &p);
    send_packed(peer.sock, &p);
    t_sync(peer.sock);
    served_close_client(&s);
    struct pollfd still = {.fd = s.peer.sock, .events = POLLIN};
    CHECK_EQ(poll(&still, 1, 300), 0); /* the worker closes its end when it ends */
    t_sync(peer.sock);
    t_peer_join(&peer);
    t_peer_join(&s.peer);
}

/* A channel cannot be handed over without the peer's descriptors, which few processes keep. */
T_CASE(pack_few, "channel/pack-too-many-descriptors", .providers = T_SHM) {
    served s;
    packed p;
    dp_error err;
    served_open(&s, false, DP_WAIT_ADAPTIVE, 2, 512, 0);
    served_echo(&s, 8, 1);
    shm_peer *peer = &((shm_qp *)s.ch->qp)->peer;
    CHECK_GE(peer->fds[0], 0);
    close(peer->fds[0]);
    peer->fds[0] = -1;
    CHECK_REFUSED(dp_channel_pack(s.ch, &p.ch, p.fds, &err), DP_UNSUPPORTED, err);
    served_echo(&s, 8, 2);
    served_close(&s);
}

/* A process whose threads no barrier reaches cannot take over a channel whose peer relies on barriers. */
T_CASE(pack_barrier, "channel/pack-without-membarrier", .providers = T_SHM) {
    served s, other = {.mode = DP_WAIT_HOT};
    packed p;
    dp_error err;
    served_open(&s, false, DP_WAIT_HOT, 2, 512, 0);
    served_echo(&s, 8, 1);
    if (!((shm_dev *)s.dev)->membarrier)
        t_skip("this kernel has no membarrier");
    pack(&s, &p);
    for (uint32_t i = 0; i < FDS; i++)
        p.fds[i] = i <= p.ch.qp.n_fds ? fcntl(p.fds[i], F_DUPFD_CLOEXEC, 0) : -1;
    CHECK_OK_ERR(dp_dev_open(t_provider(), NULL, &other.dev, &err), err);
    ((shm_dev *)other.dev)->membarrier = false;
    CHECK_OK_ERR(dp_endpoint_unpack(other.dev, 1, 2, other.mode, &p.fds[0], &other.ep, &err), err);
    CHECK_REFUSED(dp_channel_unpack(other.ep, &p.ch, p.fds + 1, &other.ch, &err), DP_UNSUPPORTED, err);
    close_rest(&p);
    dp_endpoint_destroy(other.ep);
    dp_dev_close(other.dev);
    served_echo(&s, 8, 2);
    served_close(&s);
}

/* ---- hostile descriptions ---- */

/* Offers a damaged description with copies of the descriptors. Nothing leaks, whatever the answer is. */
static int offered(const packed *good, const packed *bad) {
    packed p = *bad;
    served s = {.mode = DP_WAIT_ADAPTIVE};
    dp_error err = {0};
    t_usage before;
    t_usage_now(&before);
    for (uint32_t i = 0; i < FDS; i++)
        p.fds[i] = bad->fds[i] >= 0 && i <= good->ch.qp.n_fds ? fcntl(bad->fds[i], F_DUPFD_CLOEXEC, 0) : -1;
    int st = unpack(&s, &p, &err);
    CHECKF(!st || err.msg[0], "status %d without a message", st);
    dp_channel_destroy(s.ch);
    dp_endpoint_destroy(s.ep);
    dp_dev_close(s.dev);
    t_usage_check(&before);
    return st;
}

/* Damages every `step`-th byte of a description in turn: the result is a refusal, or a channel that can be destroyed. */
static void damage(const packed *good, uint32_t step) {
    for (size_t at = t_random() % step; at < offsetof(dp_packed_channel, qp.bytes) + good->ch.qp.size; at += step) {
        packed bad = *good;
        ((uint8_t *)&bad.ch)[at] ^= (uint8_t)(1 + t_random() % 255);
        t_note("byte %zu", at);
        offered(good, &bad);
    }
}

static int segment(uint64_t size, int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)size) && !fcntl(fd, F_ADD_SEALS, seals));
    return fd;
}

#define REFUSE(change)                                                                                                 \
    do {                                                                                                               \
        packed bad = good;                                                                                             \
        shm_packed_view *v = (shm_packed_view *)(void *)bad.ch.qp.bytes;                                               \
        (void)v;                                                                                                       \
        change;                                                                                                        \
        t_note("%s", #change);                                                                                         \
        CHECK_NE(offered(&good, &bad), DP_OK);                                                                         \
    } while (0)

typedef struct shm_packed_view { /* as in dp_shm_pack.c */
    shm_hello own, peer;
    uint8_t boot_id[16], name[16];
    uint64_t netns;
    uint32_t max_send, max_recv, rpos, rposted, spos, reserved;
} shm_packed_view;

T_CASE(pack_hostile, "channel/pack-hostile", .providers = T_SHM, .seconds = 60) {
    served s;
    packed good;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 4096, 65536);
    calls(&s);
    pack(&s, &good);
    CHECK_EQ(good.ch.qp.size, sizeof(shm_packed_view));
    CHECK_OK(offered(&good, &good));

    REFUSE(bad.ch.version++);
    REFUSE(bad.ch.generation = 0);
    REFUSE(bad.ch.blob_len = DP_BLOB_MAX + 1);
    REFUSE(bad.ch.cfg.depth = 0);
    REFUSE(bad.ch.cfg.depth = 5);
    REFUSE(bad.ch.cfg.depth = UINT32_MAX);
    REFUSE(bad.ch.cfg.eager = UINT32_MAX);
    REFUSE(bad.ch.cfg.eager += 64);
    REFUSE(bad.ch.cfg.bulk = UINT64_MAX);
    REFUSE(bad.ch.cfg.bulk = 1 << 20);
    REFUSE(bad.ch.addr++);
    REFUSE(bad.ch.addr = UINT64_MAX - 63);
    REFUSE(bad.ch.rkey++);
    REFUSE(bad.ch.qp.size = 0);
    REFUSE(bad.ch.qp.size--);
    REFUSE(bad.ch.qp.size = UINT32_MAX);
    REFUSE(bad.ch.qp.n_fds = 0);
    REFUSE(bad.ch.qp.n_fds--);
    REFUSE(bad.ch.qp.n_fds++);
    REFUSE(bad.ch.qp.n_fds = UINT32_MAX);
    REFUSE(v->own.magic++);
    REFUSE(v->peer.version++);
    REFUSE(v->own.status = DP_BUSY);
    REFUSE(v->own.ring_size = 0);
    REFUSE(v->own.ring_size = 3);
    REFUSE(v->own.ring_size *= 2);
    REFUSE(v->peer.ring_size = 1u << 31);
    REFUSE(v->own.mode_at += 64);
    REFUSE(v->own.mode_at++);
    REFUSE(v->peer.mode_at = SHM_PAGE);
    REFUSE(v->own.n_regions = 0);
    REFUSE(v->own.n_regions = DP_EXPOSE_MAX + 1);
    REFUSE(v->own.regions[0].offset = SHM_PAGE);
    REFUSE(v->own.regions[0].size = 1ull << 40);
    REFUSE(v->own.regions[0].size = 64);
    REFUSE(v->own.regions[0].access = 255);
    REFUSE(v->own.regions[0].access = DP_REMOTE_READ);
    REFUSE(v->own.regions[0].base++);
    REFUSE(v->peer.n_regions = 60000);
    REFUSE(v->peer.regions[0].size += 1 << 20);
    REFUSE(v->peer.regions[0].base = UINT64_MAX);
    REFUSE(v->peer.from[3]++);
    REFUSE(memset(v->own.from, 0, 16));
    REFUSE(v->boot_id[0]++);
    REFUSE(v->max_send = 0);
    REFUSE(v->max_send = 4097);
    REFUSE(v->max_recv = 0);
    REFUSE(v->max_recv = 5);
    REFUSE(v->rposted += 100);
    REFUSE(v->rpos++; v->rposted += 2);
    REFUSE(v->spos += 1000);
    REFUSE(v->reserved = 1);

    /* For each descriptor: none, a file of another kind, memory that may shrink, and too little memory. */
    enum { SEALED = F_SEAL_SHRINK | F_SEAL_GROW };
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), loose = segment(1 << 20, F_SEAL_GROW), small = segment(1, SEALED),
        fixed = segment(1 << 20, SEALED | F_SEAL_WRITE), pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    const int wrong[] = {-1, null, loose, small, fixed, pair[0]};
    for (uint32_t at = 0; at <= good.ch.qp.n_fds; at++)
        for (uint32_t k = 0; k < sizeof wrong / sizeof *wrong; k++)
            REFUSE(bad.fds[at] = wrong[k]);
    const int all[] = {null, loose, small, fixed, pair[0], pair[1]};
    for (uint32_t k = 0; k < sizeof all / sizeof *all; k++)
        close(all[k]);

    damage(&good, 1);
    served_echo(&s, 100, 3);
    served_close(&s);
}

#define REFUSE_TCP(change)                                                                                             \
    do {                                                                                                               \
        packed bad = good;                                                                                             \
        tcp_packed_view *v = (tcp_packed_view *)(void *)bad.ch.qp.bytes;                                               \
        (void)v;                                                                                                       \
        change;                                                                                                        \
        t_note("%s", #change);                                                                                         \
        CHECK_NE(offered(&good, &bad), DP_OK);                                                                         \
    } while (0)

typedef struct tcp_packed_view { /* as in dp_tcp_pack.c */
    tcp_hello own, peer;
    uint8_t secret[DP_TCP_SECRET_SIZE];
    uint32_t max_send, max_recv;
    uint8_t sealed, dialed, reserved[6];
    tcp_packed_key tx, rx;
} tcp_packed_view;

T_CASE(pack_hostile_tcp, "tcp/pack-hostile", .providers = T_TCP, .seconds = 60) {
    served s;
    packed good;
    served_open(&s, true, DP_WAIT_ADAPTIVE, 4, 4096, 65536);
    calls(&s);
    pack(&s, &good);
    CHECK_EQ(good.ch.qp.size, sizeof(tcp_packed_view));
    CHECK_OK(offered(&good, &good));

    REFUSE_TCP(bad.ch.cfg.depth = 5);
    REFUSE_TCP(bad.ch.cfg.bulk = 1 << 20);
    REFUSE_TCP(bad.ch.addr++);
    REFUSE_TCP(bad.ch.qp.size--);
    REFUSE_TCP(bad.ch.qp.n_fds = 0);
    REFUSE_TCP(bad.ch.qp.n_fds = 2);
    REFUSE_TCP(v->own.magic++);
    REFUSE_TCP(v->peer.version++);
    REFUSE_TCP(v->own.status = DP_BUSY);
    REFUSE_TCP(v->peer.status = DP_BUSY);
    REFUSE_TCP(v->own.n_regions = DP_EXPOSE_MAX + 1);
    REFUSE_TCP(v->own.regions[0].size = 0);
    REFUSE_TCP(v->own.regions[0].size = 64);
    REFUSE_TCP(v->own.regions[0].size = UINT64_MAX);
    REFUSE_TCP(v->own.regions[0].access = DP_REMOTE_READ);
    REFUSE_TCP(v->own.regions[0].base = UINT64_MAX);
    REFUSE_TCP(v->peer.n_regions = 255);
    REFUSE_TCP(v->peer.from[3]++);
    REFUSE_TCP(memset(v->own.from, 0, sizeof v->own.from));
    REFUSE_TCP(v->max_send = 0);
    REFUSE_TCP(v->max_send = 4097);
    REFUSE_TCP(v->max_recv = 0);
    REFUSE_TCP(v->max_recv = 5);
    REFUSE_TCP(v->sealed = 2);
    REFUSE_TCP(v->dialed = 2);
    REFUSE_TCP(v->reserved[5] = 1);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), loose = socket(AF_INET, SOCK_STREAM, 0), pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    const int wrong[] = {-1, null, loose, pair[0]};
    for (uint32_t k = 0; k < sizeof wrong / sizeof *wrong; k++)
        REFUSE_TCP(bad.fds[1] = wrong[k]);
    const int all[] = {null, loose, pair[0], pair[1]};
    for (uint32_t k = 0; k < sizeof all / sizeof *all; k++)
        close(all[k]);
    damage(&good, 4);
    served_echo(&s, 100, 3);
    served_close(&s);
}

/* Connecting on tcp: refused hellos, tokens, sockets without a hello, and sockets that another process hands over. */
#include "tcp_peer.h"
#include "worker/sandbox.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS 1000000ll

T_CASE(tcp_options, "tcp/bad-options", .providers = T_TCP) {
    static const struct {
        const char *what, *named;
        dp_dev_options o;
    } bad[] = {
        {"a name for an address", "localhost", {.address = "localhost"}},
        {"a port in the address", "127.0.0.1:80", {.address = "127.0.0.1:80"}},
        {"a range that ends before it begins", "9000 to 8000", {.port_first = 9000, .port_last = 8000}},
        {"a range without a beginning", "0 to 8000", {.port_last = 8000}},
        {"port 65536", "65536", {.port_first = 1, .port_last = 65536}},
        {"port -1", "-1", {.port_first = -1, .port_last = 5}},
        {"a wildcard that advertises nothing", "advertise", {.address = "0.0.0.0"}},
        {"a wildcard of IPv6 that advertises nothing", "advertise", {.address = "::"}},
        {"advertise without a port", "\"127.0.0.1\"", {.advertise = "127.0.0.1"}},
        {"advertise with port 0", "127.0.0.1:0", {.advertise = "127.0.0.1:0"}},
        {"advertise of IPv6 without brackets", "::1:5", {.advertise = "::1:5"}},
        {"five addresses", "1.2.3.4:5", {.advertise = "1.2.3.4:5,1.2.3.4:5,1.2.3.4:5,1.2.3.4:5,1.2.3.4:5"}},
        {"an empty address at the end", "1.2.3.4:5,", {.advertise = "1.2.3.4:5,"}},
        {"handed without advertise", "advertise", {.handed = 1}},
        {"handed and active", "active_side_only", {.handed = 1, .advertise = "1.2.3.4:5", .active_side_only = 1}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dp_error err;
        dp_dev *dev;
        t_note("%s", bad[i].what);
        CHECK_REFUSED(dp_dev_open("tcp", &bad[i].o, &dev, &err), DP_INVALID, err);
        CHECKF(strstr(err.msg, bad[i].named), "the message does not name %s: %s", bad[i].named, err.msg);
    }
    dp_error err;
    dp_dev *dev;
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.address = "::", .advertise = "10.0.0.1:70,[fe80::1]:71"}, &dev, &err), err);
    CHECK_EQ(((tcp_dev *)dev)->n_addresses, 2);
    CHECK_EQ(((tcp_dev *)dev)->addresses[1].port, 71);
    CHECK_EQ(((tcp_dev *)dev)->addresses[1].ip[0], 0xfe);
    dp_dev_close(dev);
}

/* Two devices with the same two ports: the third has none left. */
T_CASE(ports, "tcp/port-range", .providers = T_TCP) {
    end e[3];
    card c;
    dp_dev *dev[3];
    dp_error err;
    end_open(&e[2], NULL, NULL);
    end_card(&e[2], &c); /* a port that the kernel had free */
    tcp_blob b;
    memcpy(&b, c.blob, sizeof b);
    int first = b.addresses[0].port;
    end_close(&e[2]);
    dp_dev_options o = {.port_first = first, .port_last = first};
    CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev[0], &err), err);
    CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev[1], &err), err);
    for (int i = 0; i < 2; i++)
        end_open(&e[i], NULL, dev[i]);
    end_card(&e[0], &c);
    memcpy(&b, c.blob, sizeof b);
    CHECK_EQ(b.addresses[0].port, first);
    c.blob_len = sizeof c.blob;
    CHECK_REFUSED(dp_qp_export(e[1].qp, c.blob, &c.blob_len, &err), DP_FATAL, err);
    CHECK_EQ(err.sys_errno, EADDRINUSE);
    for (int i = 0; i < 2; i++) {
        end_close(&e[i]);
        dp_dev_close(dev[i]);
    }
}

/* ---- hellos ---- */

/* Sends a hello and returns whether the end answered before it closed the socket. */
static bool answered(const card *c, const tcp_hello *h) {
    int fd = rogue_dial(c);
    char byte;
    CHECK_EQ(send(fd, h, sizeof *h, MSG_NOSIGNAL), (ssize_t)sizeof *h);
    ssize_t n = recv(fd, &byte, 1, 0);
    close(fd);
    return n > 0;
}

T_CASE(hellos, "tcp/hellos-refused", .providers = T_TCP) {
    end e;
    card c;
    rogue r;
    dp_tcp_counts before, after;
    uint8_t token[DP_TCP_TOKEN_SIZE] = {1};
    end_open(&e, NULL, NULL);
    end_card(&e, &c);
    int n = 0;
    dp_tcp_count(e.dev, &before);
#define REFUSED(what, change)                                                                                          \
    do {                                                                                                               \
        tcp_hello h = rogue_hello(&c, token);                                                                          \
        t_note(what);                                                                                                  \
        change;                                                                                                        \
        CHECK(!answered(&c, &h));                                                                                      \
        n++;                                                                                                           \
    } while (0)
    REFUSED("magic", h.magic++);
    REFUSED("version", h.version++);
    REFUSED("reserved byte", h.zero = 1);
    REFUSED("reserved bytes", h.reserved[19] = 1);
    REFUSED("nine regions", h.n_regions = DP_EXPOSE_MAX + 1);
    REFUSED("a region behind the last one", h.regions[1].size = 1);
    REFUSED("unknown rights", h.regions[0].access = 8);
    REFUSED("a region at the end of everything", h.regions[0].base = UINT64_MAX - 5);
    REFUSED("no token of its own", memset(h.from, 0, sizeof h.from));
    REFUSED("an answer instead of a question", h.status = DP_BUSY);
    for (int bit = 0; bit < 128; bit += 9)
        REFUSED("another token", h.to[bit / 8] ^= (uint8_t)(1 << bit % 8));
    dp_tcp_count(e.dev, &after);
    CHECK_EQ(after.refused - before.refused, n);
    CHECK_EQ(after.connected, before.connected);
    /* Half a hello, then nothing more. */
    int fd = rogue_dial(&c);
    tcp_hello half = rogue_hello(&c, token);
    char byte;
    CHECK_EQ(send(fd, &half, 100, 0), 100);
    shutdown(fd, SHUT_WR);
    CHECK_EQ(recv(fd, &byte, 1, 0), 0);
    close(fd);
    /* A good one, and the same again. */
    rogue_join(&r, &e);
    REFUSED("a token that was used", (void)0);
    dp_tcp_count(e.dev, &after);
    CHECK_EQ(after.refused - before.refused, n);
    CHECK_EQ(after.connected - before.connected, 1);
    CHECK_EQ(after.dropped - before.dropped, 1);
#undef REFUSED
    rogue_leave(&r);
    end_close(&e);
}

/* The peer dies, or is reset, after its blob was sent: an event, not a wrong address. */
T_CASE(gone_before, "tcp/peer-gone-before-connect", .providers = T_TCP) {
    end e, f;
    card c;
    dp_error err;
    end_open(&e, NULL, NULL);
    end_open(&f, NULL, NULL);
    end_card(&f, &c);
    end_reset(&f);
    CHECK_REFUSED(dp_qp_connect(e.qp, c.blob, c.blob_len, &err), DP_PEER_GONE, err);
    ends_connect_and_write(&e, &f);
    end_close(&f);
    end_reset(&e);
    CHECK_REFUSED(dp_qp_connect(e.qp, c.blob, c.blob_len, &err), DP_PEER_GONE, err);
    end_close(&e);
}

/* An end connects to a blob, but another queue pair has used the end's token first. */
T_CASE(impostor, "tcp/another-queue-pair-connects", .providers = T_TCP) {
    end e, f;
    card c, cf;
    dp_error err;
    uint8_t token[DP_TCP_TOKEN_SIZE] = {9};
    end_open(&e, NULL, NULL);
    end_open(&f, NULL, NULL);
    end_card(&e, &c);
    end_card(&f, &cf);
    rogue r = {.fd = rogue_dial(&c)};
    tcp_hello h = rogue_hello(&c, token);
    rogue_say(&r, &h, sizeof h);
    CHECK_EQ(recv(r.fd, &h, sizeof h, MSG_WAITALL), (ssize_t)sizeof h);
    CHECK_REFUSED(dp_qp_connect(e.qp, cf.blob, cf.blob_len, &err), DP_BAD_BLOB, err);
    rogue_await_end(&r, &e);
    rogue_leave(&r);
    end_reset(&e);
    ends_connect_and_write(&e, &f);
    end_close(&e);
    end_close(&f);
}

/* Silent sockets: newer ones replace the oldest, all are closed after a second, and a peer that sends a hello is always served. */
T_CASE(silent_connections, "tcp/silent-connections", .providers = T_TCP, .seconds = 30) {
    enum { N = DP_TCP_PENDING + 20 };
    end e;
    card c;
    rogue r;
    int fd[N];
    dp_tcp_counts n;
    end_open(&e, NULL, NULL);
    end_card(&e, &c);
    int64_t start = dp_now_ns();
    for (int i = 0; i < N; i++)
        fd[i] = rogue_dial(&c);
    rogue_join(&r, &e);
    for (int i = 0; i < N; i++) {
        char byte;
        t_note("connection %d", i);
        struct pollfd p = {fd[i], POLLIN, 0};
        CHECK_EQ(poll(&p, 1, (int)(5000 * t_time_scale())), 1);
        CHECK_LE(recv(fd[i], &byte, 1, 0), 0);
        if (i == N - 1)
            CHECKF(dp_now_ns() - start >= DP_TCP_HELLO_MS * MS, "the last one had %lld ms", (long long)((dp_now_ns() - start) / MS));
        close(fd[i]);
    }
    dp_tcp_count(e.dev, &n);
    CHECK_EQ(n.dropped, N);
    CHECK_EQ(n.accepted, N + 1);
    CHECK_EQ(n.connected, 1);
    end_drain(&e);
    CHECK_EQ(dp_qp_broken(e.qp), 0);
    rogue_leave(&r);
    end_close(&e);
}

/* A device without a thread accepts when its program attends to it. */
T_CASE(tcp_attended, "tcp/attended", .providers = T_TCP) {
    end e, f;
    dp_dev *dev;
    dp_error err;
    card ce, cf;
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.attended = 1}, &dev, &err), err);
    CHECK_EQ(dp_dev_event_fd(dev), -1);
    end_open(&e, NULL, dev);
    end_card(&e, &ce);
    int fd = dp_dev_event_fd(dev);
    CHECK(fd >= 0);
    dp_dev_attend(dev); /* nothing to do */
    end_open(&f, NULL, NULL);
    end_card(&f, &cf);
    rogue r = {.fd = rogue_dial(&ce)};
    tcp_hello h = rogue_hello(&ce, dp_tcp_blob_token(cf.blob, cf.blob_len));
    rogue_say(&r, &h, sizeof h);
    int64_t until = dp_now_ns() + poll_ns();
    for (dp_tcp_counts n = {0}; !n.connected; dp_tcp_count(dev, &n)) {
        struct pollfd p = {fd, POLLIN, 0};
        CHECK_EQ(poll(&p, 1, 5000), 1);
        dp_dev_attend(dev);
        CHECK(dp_now_ns() < until);
    }
    end_connect(&e, &cf);
    rogue_leave(&r);
    end_close(&e);
    end_close(&f);
    dp_dev_close(dev);
}

/* ---- sockets that another process hands over ---- */

typedef struct acceptor {
    int listen_fd, worker_fd; /* worker_fd: unix socket to the worker */
    char advertise[64];
} acceptor;

static void acceptor_open(acceptor *a, int *worker_end) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int sv[2];
    a->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(!bind(a->listen_fd, (struct sockaddr *)&at, len) && !listen(a->listen_fd, 16));
    CHECK(!getsockname(a->listen_fd, (struct sockaddr *)&at, &len));
    /* Nobody listens at the first address, so the peer has to try the next one. */
    snprintf(a->advertise, sizeof a->advertise, "127.0.0.1:1,127.0.0.1:%d", ntohs(at.sin_port));
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv));
    a->worker_fd = sv[0];
    *worker_end = sv[1];
}

static void acceptor_close(acceptor *a, int worker_end) {
    close(a->listen_fd);
    close(a->worker_fd);
    close(worker_end);
}

/* Accepts one socket, reads its hello and passes it on, as a daemon does. Returns the token in the hello. */
static void accept_one(acceptor *a, uint8_t token[DP_TCP_TOKEN_SIZE]) {
    uint8_t hello[DP_TCP_HELLO_SIZE];
    dp_error err;
    int fd = accept4(a->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(recv(fd, hello, sizeof hello, MSG_WAITALL), (ssize_t)sizeof hello);
    const uint8_t *to = dp_tcp_hello_token(hello);
    CHECK(to);
    memcpy(token, to, DP_TCP_TOKEN_SIZE);
    dp_tcp_prepare(fd);
    CHECK_OK_ERR(dp_tcp_pass(a->worker_fd, fd, hello, &err), err);
    close(fd);
}

typedef struct handing {
    acceptor a;
    int worker_end;
    bool by_connect; /* dp_qp_connect takes the socket from the unix socket itself */
    bool sealed;     /* the worker installs its system call filter before it connects */
    uint8_t token[DP_TCP_TOKEN_SIZE];
} handing;

static void handed_worker(int sock, void *arg) {
    handing *h = arg;
    duo d = {.sock = sock};
    dp_dev *dev;
    dp_error err;
    dp_dev_options o = {.handed = 1, .advertise = h->a.advertise, .handed_from = h->by_connect ? h->worker_end : 0};
    CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev, &err), err);
    end_open(&d.e, NULL, dev);
    card mine;
    end_card(&d.e, &mine);
    CHECK_SAME(dp_tcp_blob_token(mine.blob, mine.blob_len), tcp_qp_of(d.e.qp)->token, DP_TCP_TOKEN_SIZE);
    t_send(sock, &mine, sizeof mine);
    t_recv(sock, &d.peer, sizeof d.peer);
    if (!h->by_connect) {
        CHECK_STATUS(dp_tcp_take(dev, h->worker_end, &err), DP_BUSY);
        t_sync(sock); /* the client connects now */
        struct pollfd p = {h->worker_end, POLLIN, 0};
        CHECK_EQ(poll(&p, 1, 5000), 1);
        CHECK_OK_ERR(dp_tcp_take(dev, h->worker_end, &err), err);
    } else {
        t_sync(sock);
    }
    if (h->sealed) {
        CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        CHECK_OK(dp_sandbox_filter(DP_FILTER_ALL, false, false));
        CHECK(socket(AF_INET, SOCK_STREAM, 0) < 0 && errno == EPERM);
    }
    end_connect(&d.e, &d.peer);
    t_sync(sock);
    duo_ping(&d);
    CHECK_STATUS(dp_qp_probe(d.e.qp), DP_OK);
    CHECK_OK(dp_cq_arm(d.e.cq));
    CHECK_OK(dp_cq_wait(d.e.cq, MS));
    end_reset(&d.e);
    end_close(&d.e);
    dp_dev_close(dev);
}

static void run_acceptor(int sock, void *arg) {
    handing *h = arg;
    accept_one(&h->a, h->token);
    t_sync(sock);
}

static void hand_over(bool by_connect, bool sealed) {
    handing h = {.by_connect = by_connect, .sealed = sealed};
    t_peer worker, door;
    duo d = {.left = true};
    dp_dev *dev;
    dp_error err;
    acceptor_open(&h.a, &h.worker_end);
    t_peer_start(&worker, true, handed_worker, &h);
    t_peer_start(&door, false, run_acceptor, &h);
    d.sock = worker.sock;
    CHECK_OK_ERR(dp_dev_open("tcp", &(dp_dev_options){.active_side_only = 1}, &dev, &err), err);
    end_open(&d.e, NULL, dev);
    card mine;
    end_card(&d.e, &mine);
    t_send(d.sock, &mine, sizeof mine);
    t_recv(d.sock, &d.peer, sizeof d.peer);
    t_sync(d.sock);
    end_connect(&d.e, &d.peer);
    t_sync(d.sock);
    duo_ping(&d);
    t_sync(door.sock);
    CHECK_SAME(h.token, dp_tcp_blob_token(d.peer.blob, d.peer.blob_len), DP_TCP_TOKEN_SIZE);
    t_peer_join(&door);
    t_peer_join(&worker);
    end_close(&d.e);
    dp_dev_close(dev);
    acceptor_close(&h.a, h.worker_end);
}

T_CASE(handed_take, "tcp/handed-before-connect", .providers = T_TCP | T_ENCRYPT) { hand_over(false, false); }
T_CASE(handed_connect, "tcp/handed-while-connecting", .providers = T_TCP | T_ENCRYPT) { hand_over(true, false); }

/* The same with a sealed worker: its system call filter permits every call that is needed. */
T_CASE(handed_sealed, "tcp/handed-to-a-sealed-worker", .providers = T_TCP | T_ENCRYPT) {
    if (T_ASAN || T_TSAN)
        t_skip("a sanitizer makes system calls of its own");
    hand_over(true, true);
}

static void cancel_later(int sock, void *arg) {
    (void)sock;
    t_sleep_ms(20);
    dp_qp_cancel(arg);
}

/* Errors of handing over sockets: no socket, malformed messages, a wrong token, an acceptor that ends, a cancelled wait. */
T_CASE(handed_badly, "tcp/handed-badly", .providers = T_TCP) {
    acceptor a;
    int worker_end, sv[2], pair[2];
    dp_dev *dev;
    dp_error err;
    end e;
    card c;
    acceptor_open(&a, &worker_end);
    dp_dev_options o = {.handed = 1, .advertise = a.advertise, .handed_from = worker_end};
    CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev, &err), err);
    end_open(&e, NULL, dev);
    end_card(&e, &c);
    uint8_t token[DP_TCP_TOKEN_SIZE] = {5};
    tcp_hello h = rogue_hello(&c, token);
    tcp_blob peer = rogue_blob(token);
    t_note("a message without a socket");
    CHECK_EQ(send(a.worker_fd, &h, sizeof h, 0), (ssize_t)sizeof h);
    CHECK_REFUSED(dp_tcp_take(dev, worker_end, &err), DP_PROTOCOL, err);
    t_note("a short hello");
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    CHECK_EQ(send(a.worker_fd, "x", 1, 0), 1);
    CHECK_REFUSED(dp_tcp_take(dev, worker_end, &err), DP_PROTOCOL, err);
    t_note("another token");
    h.to[0] ^= 1;
    CHECK_OK_ERR(dp_tcp_pass(a.worker_fd, pair[0], &h, &err), err);
    CHECK_REFUSED(dp_tcp_take(dev, worker_end, &err), DP_BAD_BLOB, err);
    t_note("a peer that has left");
    h.to[0] ^= 1;
    close(pair[1]);
    CHECK_OK_ERR(dp_tcp_pass(a.worker_fd, pair[0], &h, &err), err);
    CHECK_REFUSED(dp_tcp_take(dev, worker_end, &err), DP_PEER_GONE, err);
    close(pair[0]);
    t_note("a wait that is too long");
    int64_t start = dp_now_ns();
    CHECK_REFUSED(dp_qp_connect(e.qp, &peer, sizeof peer, &err), DP_CONNECTION, err);
    CHECK_GE(dp_now_ns() - start, DP_TCP_CONNECT_MS * MS);
    CHECK_EQ(e.qp->state, DP_QP_INIT);
    t_note("a good one, after all that");
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv));
    CHECK_OK_ERR(dp_tcp_pass(a.worker_fd, sv[0], &h, &err), err);
    CHECK_OK_ERR(dp_qp_connect(e.qp, &peer, sizeof peer, &err), err);
    close(sv[0]);
    close(sv[1]);
    end_reset(&e);
    t_note("a cancelled wait");
    t_peer p;
    t_peer_start(&p, false, cancel_later, e.qp);
    CHECK_REFUSED(dp_qp_connect(e.qp, &peer, sizeof peer, &err), DP_CONNECTION, err);
    CHECK_EQ(err.sys_errno, ECANCELED);
    t_peer_join(&p);
    dp_tcp_counts n;
    dp_tcp_count(dev, &n);
    CHECK_EQ(n.refused, 1);
    CHECK_EQ(n.connected, 1);
    end_close(&e);
    end_open(&e, NULL, dev);
    t_note("an acceptor that has ended");
    close(a.worker_fd);
    CHECK_REFUSED(dp_tcp_take(dev, worker_end, &err), DP_PEER_GONE, err);
    CHECK_REFUSED(dp_qp_connect(e.qp, &peer, sizeof peer, &err), DP_CONNECTION, err);
    end_close(&e);
    dp_dev_close(dev);
    close(a.listen_fd);
    close(worker_end);
}

/* Connecting two queue pairs of the tcp provider: blobs, hellos, and taking over sockets. dp_tcp.h describes the exchange.
 *
 * Both sides may connect at once. Then both use the socket that was opened by the side with the smaller token. That side answers the
 * other side's hello with DP_BUSY, and the other side waits for the hello that is on its way. */
#include "dp_tcp_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MS 1000000ll
#define STEP_MS 10 /* a wait for a handed socket checks for cancellation this often */

/* ---- formats ---- */

static bool is_zero(const void *p, size_t n) {
    const uint8_t *b = p;
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= b[i];
    return !any;
}

/* Not memcmp: a token is a secret. */
static bool same_token(const uint8_t *a, const uint8_t *b) {
    unsigned diff = 0;
    for (int i = 0; i < DP_TCP_TOKEN_SIZE; i++)
        diff |= a[i] ^ b[i];
    return !diff;
}

bool tcp_address_of(const struct sockaddr_storage *a, tcp_address *out) {
    memset(out, 0, sizeof *out);
    if (a->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
        out->ip[10] = out->ip[11] = 0xff;
        memcpy(out->ip + 12, &v4->sin_addr, 4);
        out->port = ntohs(v4->sin_port);
        return true;
    }
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;
    if (a->ss_family != AF_INET6)
        return false;
    memcpy(out->ip, &v6->sin6_addr, 16);
    out->port = ntohs(v6->sin6_port);
    return true;
}

socklen_t tcp_address_to(const tcp_address *a, struct sockaddr_storage *out) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    memset(out, 0, sizeof *out);
    if (!memcmp(a->ip, mapped, sizeof mapped)) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)out;
        v4->sin_family = AF_INET;
        v4->sin_port = htons(a->port);
        memcpy(&v4->sin_addr, a->ip + 12, 4);
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(a->port);
    memcpy(&v6->sin6_addr, a->ip, 16);
    return sizeof *v6;
}

/* One "IPv4:port" or "[IPv6]:port" of len characters. */
static bool parse_address(const char *text, size_t len, tcp_address *out) {
    char copy[64];
    struct sockaddr_storage s = {0};
    if (len >= sizeof copy)
        return false;
    memcpy(copy, text, len);
    copy[len] = 0;
    char *colon = strrchr(copy, ':'), *end;
    if (!colon)
        return false;
    *colon = 0;
    long port = strtol(colon + 1, &end, 10);
    if (end == colon + 1 || *end || port < 1 || port > 65535)
        return false;
    size_t n = strlen(copy);
    if (n > 2 && copy[0] == '[' && copy[n - 1] == ']') {
        copy[n - 1] = 0;
        s.ss_family = AF_INET6;
        if (inet_pton(AF_INET6, copy + 1, &((struct sockaddr_in6 *)&s)->sin6_addr) != 1)
            return false;
    } else {
        s.ss_family = AF_INET;
        if (inet_pton(AF_INET, copy, &((struct sockaddr_in *)&s)->sin_addr) != 1)
            return false;
    }
    tcp_address_of(&s, out);
    out->port = (uint16_t)port;
    return true;
}

int tcp_addresses_parse(const char *text, tcp_address *out, uint32_t *n, dp_error *err) {
    *n = 0;
    for (const char *p = text; *n < DP_TCP_ADDRESSES; p++) {
        size_t len = strcspn(p, ",");
        if (!parse_address(p, len, &out[(*n)++]))
            break;
        p += len;
        if (!*p)
            return DP_OK;
    }
    return dp_fail(err, DP_INVALID, 0, "open tcp: advertise \"%.100s\": give up to %d of IPv4:port or [IPv6]:port, separated by commas", text,
                   DP_TCP_ADDRESSES);
}

int tcp_blob_check(const void *data, uint32_t len, tcp_blob *b, dp_error *err) {
    if (len >= 7) { /* name the provider, even if the length is that of another provider's blob */
        memcpy(b, data, 7);
        if (b->provider != DP_PROVIDER_TCP && b->version <= 64)
            return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of provider %u, not tcp (3)", b->provider);
    }
    if (len != sizeof *b)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of %u bytes, tcp has %zu", len, sizeof *b);
    memcpy(b, data, sizeof *b);
    if (b->magic != DP_TCP_BLOB_MAGIC)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has magic %#x", b->magic);
    if (b->version != DP_TCP_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has version %u, this side %d", b->version, DP_TCP_VERSION);
    if (b->n_addresses > DP_TCP_ADDRESSES)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with %u addresses, at most %d", b->n_addresses, DP_TCP_ADDRESSES);
    const tcp_address *unused = &b->addresses[b->n_addresses];
    if (b->encrypt > DP_ENCRYPT_REQUIRE || is_zero(b->secret, sizeof b->secret) != (b->encrypt == DP_ENCRYPT_OFF))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with encryption %u and %s secret", b->encrypt,
                       is_zero(b->secret, sizeof b->secret) ? "no" : "a");
    if (!is_zero(unused, sizeof *unused * (DP_TCP_ADDRESSES - b->n_addresses)) || !is_zero(b->reserved, sizeof b->reserved))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with reserved bytes set");
    for (int i = 0; i < b->n_addresses; i++)
        if (!b->addresses[i].port || b->addresses[i].zero || is_zero(b->addresses[i].ip, 16))
            return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with address %d damaged", i);
    if (is_zero(b->token, sizeof b->token))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob without a token");
    return DP_OK;
}

bool tcp_hello_check(const tcp_hello *h, tcp_link *out) {
    if (h->magic != DP_TCP_HELLO_MAGIC || h->version != DP_TCP_VERSION || h->zero || h->n_regions > DP_EXPOSE_MAX ||
        !is_zero(h->reserved, sizeof h->reserved) || is_zero(h->from, sizeof h->from))
        return false;
    for (uint32_t i = 0; i < DP_EXPOSE_MAX; i++) {
        const tcp_region *r = &h->regions[i];
        if (i >= h->n_regions ? !is_zero(r, sizeof *r)
                              : r->access > (DP_REMOTE_READ | DP_REMOTE_WRITE | DP_REMOTE_ATOMIC) || r->base > UINT64_MAX - r->size)
            return false;
    }
    memcpy(out->token, h->from, sizeof out->token);
    out->n_regions = h->n_regions;
    memcpy(out->regions, h->regions, sizeof out->regions);
    return true;
}

const uint8_t *dp_tcp_hello_token(const void *hello) {
    const uint8_t *bytes = hello; /* not aligned */
    uint32_t magic;
    uint16_t version;
    memcpy(&magic, bytes + offsetof(tcp_hello, magic), sizeof magic);
    memcpy(&version, bytes + offsetof(tcp_hello, version), sizeof version);
    return magic == DP_TCP_HELLO_MAGIC && version == DP_TCP_VERSION ? bytes + DP_TCP_HELLO_TOKEN_AT : NULL;
}

const uint8_t *dp_tcp_blob_token(const void *blob, uint32_t len) {
    tcp_blob b;
    return tcp_blob_check(blob, len, &b, NULL) ? NULL : (const uint8_t *)blob + DP_TCP_BLOB_TOKEN_AT;
}

/* The hello of a queue pair. Under the device's lock. */
static tcp_hello hello_of(tcp_qp *qp, const uint8_t *to, int status) {
    tcp_hello h = {.magic = DP_TCP_HELLO_MAGIC, .version = DP_TCP_VERSION, .status = status};
    memcpy(h.to, to, sizeof h.to);
    memcpy(h.from, qp->token, sizeof h.from);
    for (uint32_t i = 0; i < qp->n_expose; i++) {
        const tcp_mem *m = qp->expose[i];
        if (m)
            h.regions[h.n_regions++] = (tcp_region){m->m.rkey, m->m.access, m->m.base, m->m.size};
    }
    if (h.n_regions < DP_EXPOSE_MAX)
        h.regions[h.n_regions++] = (tcp_region){.base = TCP_CAN_BATCH};
    return h;
}

bool tcp_peer_can(const tcp_link *l, uint64_t what) {
    for (uint32_t i = 0; i < l->n_regions; i++)
        if (!l->regions[i].access && !l->regions[i].size)
            return l->regions[i].base & what;
    return false;
}

/* ---- sockets ---- */

void dp_tcp_prepare(int fd) {
    /* One keepalive probe each second of silence. dp_qp_probe detects a dead peer; without dp_qp_probe, the kernel does so later. */
    static const struct {
        int level, option, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},  {IPPROTO_TCP, TCP_KEEPIDLE, 1}, {IPPROTO_TCP, TCP_KEEPINTVL, 1},
        {IPPROTO_TCP, TCP_KEEPCNT, 10}, {SOL_SOCKET, SO_KEEPALIVE, 1},
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(fd, options[i].level, options[i].option, &options[i].value, sizeof options[i].value);
}

static bool send_hello(int fd, const tcp_hello *h) {
    return send(fd, h, sizeof *h, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof *h; /* the first bytes fit into the socket's buffer */
}

/* ---- export, forget, cancel ---- */

int tcp_link_export(tcp_dev *dev, const tcp_qp *qp, void *out, uint32_t *len, dp_error *err) {
    int st = DP_OK;
    tcp_blob b = {.magic = DP_TCP_BLOB_MAGIC, .version = DP_TCP_VERSION, .provider = DP_PROVIDER_TCP};
    pthread_mutex_lock(&dev->lock);
    if (!dev->active_only && !dev->handed && !dev->listener)
        st = tcp_listen_start(dev, err);
    if (!dev->active_only) {
        b.n_addresses = (uint8_t)dev->n_addresses;
        memcpy(b.addresses, dev->addresses, sizeof b.addresses);
    }
    memcpy(b.token, qp->token, sizeof b.token);
    b.encrypt = dev->encrypt;
    if (b.encrypt)
        memcpy(b.secret, qp->secret, sizeof b.secret);
    pthread_mutex_unlock(&dev->lock);
    if (st)
        return st;
    memcpy(out, &b, sizeof b);
    *len = sizeof b;
    return DP_OK;
}

static void drop_link(tcp_link *l) {
    if (l->fd >= 0) {
        shutdown(l->fd, SHUT_RDWR);
        close(l->fd);
    }
    *l = (tcp_link){.fd = -1};
}

void tcp_link_forget(tcp_dev *dev, tcp_qp *qp) {
    pthread_mutex_lock(&dev->lock);
    drop_link(&qp->deposit);
    qp->taken = true;
    pthread_mutex_unlock(&dev->lock);
}

void tcp_link_cancel(tcp_dev *dev, tcp_qp *qp) {
    pthread_mutex_lock(&dev->lock);
    qp->cancelled = true;
    if (qp->meeting_fd >= 0)
        shutdown(qp->meeting_fd, SHUT_RDWR); /* ends the wait for the socket and for the answer */
    pthread_cond_broadcast(&dev->changed);
    pthread_mutex_unlock(&dev->lock);
}

/* ---- sockets that were accepted or handed over ---- */

static tcp_qp *qp_by_token(tcp_dev *dev, const uint8_t *token) {
    for (tcp_qp *qp = dev->qps; qp; qp = qp->next)
        if (same_token(qp->token, token))
            return qp;
    return NULL;
}

/* Reports whether both sides connect at once and this side's socket is used. */
static bool ours_wins(const tcp_qp *qp, const tcp_link *l) {
    return qp->meeting && same_token(qp->meeting_token, l->token) && memcmp(qp->token, l->token, DP_TCP_TOKEN_SIZE) < 0;
}

int dp_tcp_hand(dp_dev *d, int fd, const void *hello, dp_error *err) {
    if (d->provider != DP_PROVIDER_TCP) {
        close(fd);
        return dp_fail(err, DP_UNSUPPORTED, 0, "hand over a socket to a device of another provider than tcp (%s)", d->name);
    }
    tcp_dev *dev = tcp_dev_of(d);
    tcp_hello h;
    tcp_link l = {.fd = fd};
    memcpy(&h, hello, sizeof h);
    bool good = tcp_hello_check(&h, &l) && h.status == DP_OK;
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    tcp_qp *qp = good ? qp_by_token(dev, h.to) : NULL;
    if (!qp || qp->taken || qp->deposit.fd >= 0) {
        st = dp_fail(err, DP_BAD_BLOB, 0, "hand over a socket: %s",
                     !good ? "no hello of this version" : qp ? "the token was used already" : "no queue pair has this token");
        dev->counts.refused++;
    } else {
        bool crossed = ours_wins(qp, &l);
        tcp_hello answer = hello_of(qp, h.from, crossed ? DP_BUSY : DP_OK);
        if (!send_hello(fd, &answer))
            st = dp_fail(err, DP_PEER_GONE, errno, "hand over a socket: answer its hello");
        l.hellos[0] = h;
        l.hellos[1] = answer;
        if (!st && !crossed) {
            qp->deposit = l;
            qp->taken = true;
            fd = -1;
            dev->counts.connected++;
            pthread_cond_broadcast(&dev->changed);
        }
    }
    pthread_mutex_unlock(&dev->lock);
    if (fd >= 0) /* even if the requests crossed: the peer receives the answer before the end of the stream */
        close(fd);
    return st;
}

int dp_tcp_pass(int unix_fd, int fd, const void *hello, dp_error *err) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)hello, DP_TCP_HELLO_SIZE};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    ssize_t n = sendmsg(unix_fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n == DP_TCP_HELLO_SIZE)
        return DP_OK;
    return dp_fail(err, n < 0 && errno == EAGAIN ? DP_BUSY : DP_PEER_GONE, n < 0 ? errno : EPIPE, "pass a socket to its worker");
}

int dp_tcp_take(dp_dev *d, int unix_fd, dp_error *err) {
    enum { FDS = 4 };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(FDS * sizeof(int))];
    } control;
    if (d->provider != DP_PROVIDER_TCP)
        return dp_fail(err, DP_UNSUPPORTED, 0, "take a socket for a device of another provider than tcp (%s)", d->name);
    uint8_t hello[DP_TCP_HELLO_SIZE];
    struct iovec iov = {hello, sizeof hello};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(unix_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n <= 0)
        return dp_fail(err, n < 0 && (errno == EAGAIN || errno == EINTR) ? DP_BUSY : DP_PEER_GONE, n < 0 ? errno : 0, "take a socket");
    int fds[FDS], n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
            for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len && n_fds < FDS; i++)
                memcpy(&fds[n_fds++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    tcp_dev *dev = tcp_dev_of(d);
    pthread_mutex_lock(&dev->lock);
    dev->counts.accepted++;
    pthread_mutex_unlock(&dev->lock);
    if (n == (ssize_t)sizeof hello && n_fds == 1 && !(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
        return dp_tcp_hand(d, fds[0], hello, err);
    while (n_fds)
        close(fds[--n_fds]);
    return dp_fail(err, DP_PROTOCOL, 0, "take a socket: a message of %zd bytes, %d expected", n, DP_TCP_HELLO_SIZE);
}

/* ---- connecting ---- */

/* Waits until fd has the events. 0 or an errno. */
static int await(int fd, short events, int64_t until) {
    for (;;) {
        int64_t left = until - dp_now_ns();
        struct timespec ts = {left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
        struct pollfd p = {fd, events, 0};
        int n = ppoll(&p, 1, &ts, NULL);
        if (n > 0)
            return 0;
        if (n == 0)
            return ETIMEDOUT;
        if (errno != EINTR)
            return errno;
    }
}

/* Sets the socket that dp_qp_cancel shuts down; -1: none. False: cancelled. */
static bool set_meeting(tcp_dev *dev, tcp_qp *qp, int fd) {
    pthread_mutex_lock(&dev->lock);
    qp->meeting_fd = fd;
    bool go_on = !qp->cancelled;
    pthread_mutex_unlock(&dev->lock);
    return go_on;
}

/* Opens a socket to an address. Returns it, or -1 and an errno. */
static int dial(tcp_dev *dev, tcp_qp *qp, const tcp_address *a, int64_t until, int *e) {
    struct sockaddr_storage to;
    socklen_t len = tcp_address_to(a, &to);
    int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    *e = fd < 0 ? errno : 0;
    if (fd < 0)
        return -1;
    if (!set_meeting(dev, qp, fd))
        *e = ECANCELED;
    else if (connect(fd, (struct sockaddr *)&to, len))
        *e = errno;
    if (*e == EINPROGRESS && !(*e = await(fd, POLLOUT, until))) {
        socklen_t n = sizeof *e;
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, e, &n))
            *e = errno;
    }
    if (!*e)
        return fd;
    set_meeting(dev, qp, -1);
    close(fd);
    return -1;
}

/* Reads exactly one hello. Returns 0 or an errno; ECONNRESET if the peer closed or reset the socket. */
static int read_hello(int fd, tcp_hello *h, int64_t until) {
    size_t got = 0;
    while (got < sizeof *h) {
        ssize_t n = recv(fd, (uint8_t *)h + got, sizeof *h - got, MSG_DONTWAIT);
        if (n == 0)
            return ECONNRESET;
        if (n > 0) {
            got += (size_t)n;
        } else if (errno == EAGAIN) {
            int e = await(fd, POLLIN, until);
            if (e)
                return e;
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

/* Waits for the peer's socket, which this device accepts or another process hands over. */
static int await_deposit(tcp_dev *dev, tcp_qp *qp, const tcp_blob *b, int64_t until, dp_error *err) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    while (!st && qp->deposit.fd < 0) {
        if (qp->cancelled) {
            st = dp_fail(err, DP_CONNECTION, ECANCELED, "connect: wait for the tcp peer's socket");
        } else if (dp_now_ns() >= until) {
            st = dp_fail(err, DP_CONNECTION, ETIMEDOUT, "connect: the peer has not connected");
        } else if (dev->handed_from >= 0) {
            pthread_mutex_unlock(&dev->lock);
            int64_t step = dp_now_ns() + STEP_MS * MS;
            if (await(dev->handed_from, POLLIN, step < until ? step : until) == 0 && dp_tcp_take(&dev->d, dev->handed_from, NULL) == DP_PEER_GONE)
                st = dp_fail(err, DP_CONNECTION, 0, "connect: the process that hands over sockets has ended");
            pthread_mutex_lock(&dev->lock);
        } else {
            struct timespec ts = {until / 1000000000, until % 1000000000};
            pthread_cond_timedwait(&dev->changed, &dev->lock, &ts);
        }
    }
    if (!st && !same_token(qp->deposit.token, b->token)) {
        st = dp_fail(err, DP_BAD_BLOB, 0, "connect: another queue pair has connected to this one");
        drop_link(&qp->deposit);
    }
    if (!st) {
        qp->peer = qp->deposit;
        qp->deposit = (tcp_link){.fd = -1};
    }
    pthread_mutex_unlock(&dev->lock);
    return st;
}

/* Sends a hello on a socket and reads the answer. *crossed: the peer's socket is used instead. */
static int greet(tcp_dev *dev, tcp_qp *qp, const tcp_blob *b, int fd, int64_t until, bool *crossed, dp_error *err) {
    pthread_mutex_lock(&dev->lock);
    tcp_hello h = hello_of(qp, b->token, DP_OK);
    pthread_mutex_unlock(&dev->lock);
    tcp_link l = {.fd = fd, .dialed = true, .hellos = {h}};
    int e = send_hello(fd, &h) ? 0 : errno;
    void (*meanwhile)(void *) = dev->d.meanwhile;
    if (meanwhile) { /* set only by the sole user of the device */
        dev->d.meanwhile = NULL;
        meanwhile(dev->d.meanwhile_arg);
    }
    if (!e)
        e = read_hello(fd, &h, until);
    if (e == ECONNRESET || e == EPIPE)
        return dp_fail(err, DP_PEER_GONE, 0, "connect: the tcp peer closed the connection: its process or queue pair is gone, or its blob was used already");
    if (e)
        return dp_fail(err, DP_CONNECTION, e, "connect: exchange with the tcp peer");
    if (!tcp_hello_check(&h, &l) || !same_token(h.to, qp->token) || (h.status && h.status != DP_BUSY))
        return dp_fail(err, DP_PROTOCOL, 0, "connect: the tcp peer's answer is not a valid hello");
    if (!same_token(h.from, b->token))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: another queue pair answered");
    l.hellos[1] = h;
    *crossed = h.status == DP_BUSY;
    if (!*crossed)
        qp->peer = l;
    return DP_OK;
}

/* Connects to the first of the peer's addresses that can be reached. */
static int meet(tcp_dev *dev, tcp_qp *qp, const tcp_blob *b, int64_t until, bool *crossed, dp_error *err) {
    int e = 0;
    for (int i = 0; i < b->n_addresses; i++) {
        int64_t now = dp_now_ns(), share = (until - now) / (b->n_addresses - i);
        int fd = dial(dev, qp, &b->addresses[i], now + share, &e);
        if (fd < 0)
            continue;
        int st = greet(dev, qp, b, fd, until, crossed, err);
        bool cancelled = !set_meeting(dev, qp, -1);
        if (st && cancelled)
            st = dp_fail(err, DP_CONNECTION, ECANCELED, "connect: exchange with the tcp peer");
        if (st || *crossed)
            close(fd);
        return st;
    }
    char text[INET6_ADDRSTRLEN] = "";
    inet_ntop(AF_INET6, b->addresses[b->n_addresses - 1].ip, text, sizeof text);
    return dp_fail(err, e == ECONNREFUSED ? DP_PEER_GONE : DP_CONNECTION, e, "connect: tcp peer at %s port %u", text,
                   b->addresses[b->n_addresses - 1].port);
}

/* Connects to the queue pair of a blob. */
static int join_peer(tcp_dev *dev, tcp_qp *qp, const tcp_blob *b, dp_error *err) {
    int64_t until = dp_now_ns() + DP_TCP_CONNECT_MS * MS;
    pthread_mutex_lock(&dev->lock);
    bool there = qp->deposit.fd >= 0, cancelled = qp->cancelled;
    qp->meeting = !there && !dev->handed && b->n_addresses && !cancelled;
    bool meeting = qp->meeting;
    memcpy(qp->meeting_token, b->token, sizeof b->token);
    pthread_mutex_unlock(&dev->lock);
    if (there || (dev->handed && !cancelled))
        return await_deposit(dev, qp, b, until, err);
    if (cancelled)
        return dp_fail(err, DP_CONNECTION, ECANCELED, "connect to the tcp peer");
    if (!meeting)
        return dp_fail(err, DP_CONNECTION, 0, "connect: the peer does not listen and has not connected to us");
    bool crossed = false;
    int st = meet(dev, qp, b, until, &crossed, err);
    pthread_mutex_lock(&dev->lock);
    qp->meeting = false;
    bool deposited = qp->deposit.fd >= 0;
    if (!st && !crossed) {
        qp->taken = true;
        drop_link(&qp->deposit);
    }
    pthread_mutex_unlock(&dev->lock);
    if (crossed || (st && deposited)) /* the peer connected at the same time, and its socket is used */
        st = await_deposit(dev, qp, b, until, err);
    if (!st && dev->d.met)
        dev->d.met(dev->d.meanwhile_arg);
    return st;
}

int tcp_link_connect(tcp_dev *dev, tcp_qp *qp, const void *data, uint32_t len, dp_error *err) {
    tcp_blob b;
    bool seals;
    int st = tcp_blob_check(data, len, &b, err);
    if (!st)
        st = tcp_seal_decide(dev, &b, &seals, err);
    if (!st)
        st = join_peer(dev, qp, &b, err);
    if (!st && seals && (st = tcp_seal_start(qp, &b, err)))
        drop_link(&qp->peer);
    explicit_bzero(&b, sizeof b);
    return st;
}

/* How two processes of a host exchange the descriptors of their memory, and notice each other's end.
 *
 * A queue pair's blob names an abstract unix socket of its process and a random token. Whoever connects first
 * opens that socket and sends HELLO with the target's token and its own descriptors; the answer is a HELLO
 * with the target's. The target keeps what it got as a deposit, so its own connect needs no socket. A process
 * with active_side_only has no socket and must connect first. The socket then stays open on both sides,
 * unused: the kernel closes it when a process ends, however it ends.
 *
 * Blob, 80 bytes: u32 magic | u16 version | u8 provider | u8 0 | u64 network name space | 16 boot id |
 *                 16 socket name (zero: does not listen) | 16 token | 16 zero.
 */
#include "dp_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BLOB_MAGIC 0x53514652u  /* "RFQS" */
#define HELLO_MAGIC 0x48534652u /* "RFSH" */
#define LINK_VERSION 1
#define HELLO_TIMEOUT_MS 2000
#define STRANGERS_MAX 128
#define HELLO_FDS (2 + DP_EXPOSE_MAX)

typedef struct blob {
    uint32_t magic;
    uint16_t version;
    uint8_t provider;
    uint8_t zero;
    uint64_t netns;
    uint8_t boot_id[16];
    uint8_t name[16];
    uint8_t token[16];
    uint8_t reserved[16];
} blob;
_Static_assert(sizeof(blob) == 80 && offsetof(blob, boot_id) == 16 && offsetof(blob, token) == 48, "shm blob");

typedef struct hello_region {
    uint32_t rkey, access;
    uint64_t base, size;
} hello_region;

typedef struct hello {
    uint32_t magic;
    uint16_t version;
    uint16_t n_regions;
    int32_t status; /* of an answer */
    uint32_t ring_size;
    uint32_t reached; /* registered for membarrier */
    uint32_t zero;
    uint8_t to[16];   /* token that it is for */
    uint8_t from[16]; /* token of the sender's queue pair */
    hello_region regions[DP_EXPOSE_MAX];
} hello;

struct shm_link {
    shm_link *next;
    uint64_t id; /* what epoll carries: links may vanish while their event waits */
    int fd;
    shm_qp *qp; /* NULL until hello */
};

enum { ID_LISTEN = 0, ID_STOP = 1, ID_FIRST_LINK = 2 };

int shm_link_identity(shm_dev *dev, dp_error *err) {
    char text[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    int e = errno;
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return dp_fail(err, DP_FATAL, e, "read the boot id");
    int nibbles = 0;
    for (const char *c = text; *c && nibbles < 32; c++) {
        int v = *c >= '0' && *c <= '9' ? *c - '0' : *c >= 'a' && *c <= 'f' ? *c - 'a' + 10 : -1;
        if (v >= 0) {
            dev->boot_id[nibbles / 2] |= (uint8_t)(nibbles % 2 ? v : v << 4);
            nibbles++;
        }
    }
    /* Abstract sockets belong to the network name space. */
    struct stat st;
    if (stat("/proc/self/ns/net", &st) == 0)
        dev->netns = st.st_ino;
    return DP_OK;
}

/* ---- peers ---- */

void shm_peer_clear(shm_peer *p) {
    if (p->segment)
        shm_unmap(p->segment, shm_segment_size(p->ring_size));
    if (p->mode)
        shm_unmap(p->mode, SHM_PAGE);
    for (uint32_t i = 0; i < p->n_regions; i++)
        shm_unmap(p->regions[i].map, p->regions[i].size);
    for (int i = 0; i < HELLO_FDS; i++)
        if (p->fds[i] >= 0)
            close(p->fds[i]);
    memset(p, 0, sizeof *p);
    for (int i = 0; i < HELLO_FDS; i++)
        p->fds[i] = -1;
}

/* Maps fd if it is a memfd that can no longer shrink and holds size bytes. */
static void *map_checked(int fd, uint64_t size, bool writable) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) || fstat(fd, &st) ||
        (uint64_t)st.st_size < size) {
        errno = EBADF;
        return NULL;
    }
    uint64_t len = (size + SHM_PAGE - 1) & ~(uint64_t)(SHM_PAGE - 1);
    uint8_t *at = mmap(NULL, len + SHM_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    if (mmap(at, len, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int e = errno;
        munmap(at, len + SHM_PAGE);
        errno = e;
        return NULL;
    }
    /* Page tables now rather than at the first call; a hint. */
    madvise(at, len, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    return at;
}

int shm_peer_map(shm_peer *p, dp_error *err) {
    p->segment = map_checked(p->fds[0], shm_segment_size(p->ring_size), true);
    if (!p->segment)
        return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's receive ring of %u", p->ring_size);
    p->bounce = (uint8_t *)p->segment + sizeof(shm_segment) + (uint64_t)p->ring_size * sizeof(shm_entry);
    p->mode = map_checked(p->fds[1], SHM_PAGE, true);
    if (!p->mode)
        return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's completion-queue page");
    for (uint32_t i = 0; i < p->n_regions; i++) {
        shm_region *r = &p->regions[i];
        bool writable = r->access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC);
        r->map = map_checked(p->fds[2 + i], r->size, writable);
        if (!r->map)
            return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's region of %llu bytes",
                           (unsigned long long)r->size);
    }
    for (int i = 0; i < HELLO_FDS; i++)
        if (p->fds[i] >= 0) {
            close(p->fds[i]);
            p->fds[i] = -1;
        }
    return DP_OK;
}

/* ---- hello ---- */

static int send_hello(int fd, const shm_dev *dev, const shm_qp *qp, int status, const uint8_t to[16]) {
    hello h = {.magic = HELLO_MAGIC, .version = LINK_VERSION, .status = status, .reached = dev->membarrier};
    memcpy(h.to, to, 16);
    int fds[HELLO_FDS], n = 0;
    if (qp) {
        memcpy(h.from, qp->token, 16);
        h.ring_size = qp->ring_size;
        h.n_regions = (uint16_t)qp->n_expose;
        fds[n++] = qp->seg_fd;
        fds[n++] = ((shm_cq *)qp->q.cq)->fd;
        for (uint32_t i = 0; i < qp->n_expose; i++) {
            const shm_mem *m = qp->expose[i];
            h.regions[i] = (hello_region){m->m.rkey, m->m.access, (uint64_t)(uintptr_t)m->m.addr, m->m.size};
            fds[n++] = m->fd;
        }
    }
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof fds)];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec iov = {&h, sizeof h};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n) {
        msg.msg_control = control.buf;
        msg.msg_controllen = CMSG_SPACE((size_t)n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
    }
    for (;;) {
        ssize_t sent = sendmsg(fd, &msg, MSG_NOSIGNAL);
        if (sent == (ssize_t)sizeof h)
            return 0;
        if (sent < 0 && errno == EINTR)
            continue;
        return sent < 0 ? errno : EPROTO;
    }
}

/* Receives one hello into p (cleared by the caller on failure). 0, or an errno. */
static int recv_hello(int fd, int flags, hello *h, shm_peer *p) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(HELLO_FDS * sizeof(int))];
    } control;
    struct iovec iov = {h, sizeof *h};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf,
                         .msg_controllen = sizeof control.buf};
    ssize_t n;
    do
        n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC | flags);
    while (n < 0 && errno == EINTR);
    memset(p, 0, sizeof *p);
    for (int i = 0; i < HELLO_FDS; i++)
        p->fds[i] = -1;
    if (n < 0)
        return errno;
    int n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int k = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < k; i++) {
                int got;
                memcpy(&got, CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof got);
                if (n_fds < HELLO_FDS)
                    p->fds[n_fds++] = got;
                else
                    close(got);
            }
        }
    if (n == 0)
        return ECONNRESET;
    if (n != (ssize_t)sizeof *h || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) || h->magic != HELLO_MAGIC ||
        h->version != LINK_VERSION)
        return EPROTO;
    if (h->status)
        return 0; /* a refusal: nothing else in it counts */
    if (h->n_regions > DP_EXPOSE_MAX || n_fds != 2 + h->n_regions || h->ring_size == 0 ||
        h->ring_size > SHM_RING_MAX || (h->ring_size & (h->ring_size - 1)))
        return EPROTO;
    memcpy(p->token, h->from, 16);
    p->ring_size = h->ring_size;
    p->reached = h->reached;
    for (uint32_t i = 0; i < h->n_regions; i++) {
        if (h->regions[i].size == 0 || h->regions[i].size > (1ull << 40))
            return EPROTO;
        p->regions[i] = (shm_region){.rkey = h->regions[i].rkey, .access = h->regions[i].access,
                                     .base = h->regions[i].base, .size = h->regions[i].size};
    }
    p->n_regions = h->n_regions;
    return 0;
}

/* ---- links; all under dev->lock ---- */

static shm_link *link_add(shm_dev *dev, int fd, shm_qp *qp) {
    shm_link *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->id = dev->next_link++;
    l->fd = fd;
    l->qp = qp;
    l->next = dev->links;
    dev->links = l;
    if (dev->listening) {
        struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = l->id};
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, fd, &ev);
    }
    return l;
}

static void link_drop(shm_dev *dev, shm_link *gone) {
    for (shm_link **p = &dev->links; *p; p = &(*p)->next)
        if (*p == gone) {
            *p = gone->next;
            break;
        }
    close(gone->fd); /* leaves epoll with it */
    free(gone);
}

static shm_qp *qp_by_token(shm_dev *dev, const uint8_t token[16]) {
    for (shm_qp *qp = dev->qps; qp; qp = qp->next) {
        unsigned diff = 0; /* not memcmp: a token is a secret */
        for (int i = 0; i < 16; i++)
            diff |= qp->token[i] ^ token[i];
        if (!diff)
            return qp;
    }
    return NULL;
}

static bool token_is_zero(const uint8_t token[16]) {
    static const uint8_t zero[16];
    return memcmp(token, zero, 16) == 0;
}

/* ---- monitor thread ---- */

static void accept_stranger(shm_dev *dev) {
    int fd = accept4(dev->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (dev->n_strangers >= STRANGERS_MAX) { /* the oldest stranger is the last in the list */
        shm_link *oldest = NULL;
        for (shm_link *l = dev->links; l; l = l->next)
            if (!l->qp)
                oldest = l;
        if (oldest) {
            link_drop(dev, oldest);
            dev->n_strangers--;
        }
    }
    if (link_add(dev, fd, NULL))
        dev->n_strangers++;
    else
        close(fd);
}

static void greet_stranger(shm_dev *dev, shm_link *l) {
    hello h;
    shm_peer p;
    int e = recv_hello(l->fd, MSG_DONTWAIT, &h, &p);
    if (e == EAGAIN)
        return;
    shm_qp *qp = e || h.status || token_is_zero(h.from) ? NULL : qp_by_token(dev, h.to);
    shm_peer *deposit = qp && !qp->taken ? malloc(sizeof *deposit) : NULL;
    dev->n_strangers--;
    if (!deposit) {
        if (!e)
            send_hello(l->fd, dev, NULL, qp ? DP_BUSY : DP_BAD_BLOB, h.from);
        shm_peer_clear(&p);
        link_drop(dev, l);
        return;
    }
    *deposit = p;
    qp->deposit = deposit;
    qp->taken = true;
    l->qp = qp;
    send_hello(l->fd, dev, qp, DP_OK, h.from);
}

static void link_event(shm_dev *dev, uint64_t id) {
    for (shm_link *l = dev->links; l; l = l->next) {
        if (l->id != id)
            continue;
        if (!l->qp) {
            greet_stranger(dev, l);
            return;
        }
        /* Nothing is ever said after hello: readable means closed, or a peer that breaks the rules. */
        dp_qp_break(&l->qp->q, DP_PEER_GONE);
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_DEL, l->fd, NULL);
        return;
    }
}

static void *monitor(void *arg) {
    shm_dev *dev = arg;
    for (;;) {
        struct epoll_event ev[16];
        int n = epoll_wait(dev->epoll_fd, ev, 16, -1);
        for (int i = 0; i < n; i++) {
            if (ev[i].data.u64 == ID_STOP)
                return NULL;
            pthread_mutex_lock(&dev->lock);
            if (ev[i].data.u64 == ID_LISTEN)
                accept_stranger(dev);
            else
                link_event(dev, ev[i].data.u64);
            pthread_mutex_unlock(&dev->lock);
        }
        if (n < 0 && errno != EINTR)
            return NULL;
    }
}

static socklen_t abstract_address(const uint8_t name[16], struct sockaddr_un *a) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    char *p = a->sun_path + 1; /* the leading NUL makes it abstract: no file, gone with the process */
    p += sprintf(p, "rfaas-shm-");
    for (int i = 0; i < 16; i++)
        p += sprintf(p, "%02x", name[i]);
    return (socklen_t)(p - (char *)a);
}

static int listen_start(shm_dev *dev, dp_error *err) {
    struct sockaddr_un a;
    dp_random(dev->name, sizeof dev->name);
    socklen_t len = abstract_address(dev->name, &a);
    dev->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    dev->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    dev->stop_fd = eventfd(0, EFD_CLOEXEC);
    struct epoll_event on_listen = {.events = EPOLLIN, .data.u64 = ID_LISTEN};
    struct epoll_event on_stop = {.events = EPOLLIN, .data.u64 = ID_STOP};
    int e = 0;
    if (dev->listen_fd < 0 || dev->epoll_fd < 0 || dev->stop_fd < 0 ||
        bind(dev->listen_fd, (struct sockaddr *)&a, len) || listen(dev->listen_fd, 64) ||
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, dev->listen_fd, &on_listen) ||
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, dev->stop_fd, &on_stop))
        e = errno;
    if (!e) {
        /* Signals belong to the program's threads. */
        sigset_t all, old;
        sigfillset(&all);
        pthread_attr_t attr;
        pthread_attr_init(&attr);
        pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN > (64 << 10) ? (size_t)PTHREAD_STACK_MIN : 64 << 10);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        e = pthread_create(&dev->monitor, &attr, monitor, dev);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        pthread_attr_destroy(&attr);
    }
    if (e) {
        int *fds[] = {&dev->listen_fd, &dev->epoll_fd, &dev->stop_fd};
        for (int i = 0; i < 3; i++) {
            if (*fds[i] >= 0)
                close(*fds[i]);
            *fds[i] = -1;
        }
        return dp_fail(err, DP_FATAL, e, "start listening for shm peers");
    }
    dev->listening = true;
    dev->next_link = ID_FIRST_LINK + dev->next_link;
    for (shm_link *l = dev->links; l; l = l->next) { /* made before we listened */
        l->id = dev->next_link++;
        struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = l->id};
        epoll_ctl(dev->epoll_fd, EPOLL_CTL_ADD, l->fd, &ev);
    }
    return DP_OK;
}

void shm_link_close(shm_dev *dev) {
    if (dev->listening) {
        uint64_t one = 1;
        while (write(dev->stop_fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
        pthread_join(dev->monitor, NULL);
        close(dev->listen_fd);
        close(dev->epoll_fd);
        close(dev->stop_fd);
        dev->listening = false;
    }
    while (dev->links)
        link_drop(dev, dev->links);
}

/* ---- export, connect, forget, probe ---- */

int shm_link_export(shm_dev *dev, shm_qp *qp, void *out, uint32_t *len, dp_error *err) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    if (!dev->active_only && !dev->listening)
        st = listen_start(dev, err);
    pthread_mutex_unlock(&dev->lock);
    if (st)
        return st;
    blob b = {.magic = BLOB_MAGIC, .version = LINK_VERSION, .provider = DP_PROVIDER_SHM, .netns = dev->netns};
    memcpy(b.boot_id, dev->boot_id, 16);
    if (dev->listening)
        memcpy(b.name, dev->name, 16);
    memcpy(b.token, qp->token, 16);
    memcpy(out, &b, sizeof b);
    *len = sizeof b;
    return DP_OK;
}

static int check_blob(const shm_dev *dev, const void *data, uint32_t len, blob *b, dp_error *err) {
    if (len >= 7) { /* whose is it, even if the length is another provider's */
        memcpy(b, data, 7);
        if (b->provider != DP_PROVIDER_SHM && b->version <= 64)
            return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of provider %u, not shm (1)", b->provider);
    }
    if (len != sizeof *b)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of %u bytes, shm has %zu", len, sizeof *b);
    memcpy(b, data, sizeof *b);
    if (b->magic != BLOB_MAGIC)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has magic %#x", b->magic);
    if (b->version != LINK_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has version %u, this side %d", b->version,
                       LINK_VERSION);
    if (b->zero || !token_is_zero(b->reserved))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with reserved bytes set");
    if (memcmp(b->boot_id, dev->boot_id, 16))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: the peer is on another node: use verbs");
    if (token_is_zero(b->token))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob without a token");
    return DP_OK;
}

/* Opens the peer's socket and exchanges hellos. */
static int meet(shm_dev *dev, shm_qp *qp, const blob *b, int *out_fd, dp_error *err) {
    if (token_is_zero(b->name))
        return dp_fail(err, DP_CONNECTION, 0, "connect: the peer does not listen and has not connected to us");
    struct sockaddr_un a;
    socklen_t len = abstract_address(b->name, &a);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dp_fail(err, DP_FATAL, errno, "connect: socket");
    struct timeval limit = {HELLO_TIMEOUT_MS / 1000, HELLO_TIMEOUT_MS % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&a, len)) {
        int e = errno;
        close(fd);
        if (b->netns != dev->netns)
            return dp_fail(err, DP_CONNECTION, e, "connect: the peer is in another network name space");
        return dp_fail(err, e == ECONNREFUSED ? DP_PEER_GONE : DP_CONNECTION, e, "connect: shm peer's socket");
    }
    hello h;
    int e = send_hello(fd, dev, qp, DP_OK, b->token);
    if (!e)
        e = recv_hello(fd, 0, &h, &qp->peer);
    int st = DP_OK;
    if (e)
        st = dp_fail(err, e == ECONNRESET || e == EPIPE ? DP_PEER_GONE : DP_CONNECTION, e == EAGAIN ? ETIMEDOUT : e,
                     "connect: exchange with the shm peer");
    else if (h.status)
        st = dp_fail(err, DP_BAD_BLOB, 0, "connect: the peer refused: %s",
                     h.status == DP_BUSY ? "its blob was used already" : "its queue pair is gone or was reset");
    else if (memcmp(h.from, b->token, 16))
        st = dp_fail(err, DP_BAD_BLOB, 0, "connect: another queue pair answered");
    if (st) {
        shm_peer_clear(&qp->peer);
        close(fd);
        return st;
    }
    *out_fd = fd;
    return DP_OK;
}

int shm_link_connect(shm_dev *dev, shm_qp *qp, const void *data, uint32_t len, dp_error *err) {
    blob b;
    int st = check_blob(dev, data, len, &b, err);
    if (st)
        return st;
    pthread_mutex_lock(&dev->lock);
    shm_peer *deposit = qp->deposit;
    if (deposit) {
        qp->deposit = NULL;
        qp->peer = *deposit;
        free(deposit);
    }
    pthread_mutex_unlock(&dev->lock);
    if (deposit) {
        if (memcmp(qp->peer.token, b.token, 16)) {
            shm_peer_clear(&qp->peer);
            return dp_fail(err, DP_BAD_BLOB, 0, "connect: another queue pair has connected to this one");
        }
        st = shm_peer_map(&qp->peer, err);
        if (st)
            shm_peer_clear(&qp->peer);
        return st;
    }
    int fd = -1;
    st = meet(dev, qp, &b, &fd, err);
    if (st) {
        /* Both sides connected at once and ours came second: the peer's hello has arrived meanwhile. */
        pthread_mutex_lock(&dev->lock);
        bool crossed = qp->deposit != NULL;
        pthread_mutex_unlock(&dev->lock);
        return crossed ? shm_link_connect(dev, qp, data, len, err) : st;
    }
    st = shm_peer_map(&qp->peer, err);
    if (st) {
        shm_peer_clear(&qp->peer);
        close(fd);
        return st;
    }
    pthread_mutex_lock(&dev->lock);
    qp->taken = true;
    if (!link_add(dev, fd, qp)) {
        close(fd);
        st = dp_fail(err, DP_FATAL, ENOMEM, "connect");
    }
    pthread_mutex_unlock(&dev->lock);
    if (st)
        shm_peer_clear(&qp->peer);
    return st;
}

void shm_link_forget(shm_dev *dev, shm_qp *qp) {
    pthread_mutex_lock(&dev->lock);
    if (qp->deposit) {
        shm_peer_clear(qp->deposit);
        free(qp->deposit);
        qp->deposit = NULL;
    }
    qp->taken = true;
    for (shm_link *l = dev->links, *next; l; l = next) {
        next = l->next;
        if (l->qp == qp)
            link_drop(dev, l);
    }
    pthread_mutex_unlock(&dev->lock);
}

int shm_link_probe(shm_dev *dev, shm_qp *qp) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    for (shm_link *l = dev->links; l; l = l->next)
        if (l->qp == qp) {
            char c;
            ssize_t n = recv(l->fd, &c, 1, MSG_DONTWAIT | MSG_PEEK);
            if (n >= 0 || (errno != EAGAIN && errno != EINTR))
                st = DP_PEER_GONE;
        }
    pthread_mutex_unlock(&dev->lock);
    if (st)
        dp_qp_break(&qp->q, st);
    return st;
}

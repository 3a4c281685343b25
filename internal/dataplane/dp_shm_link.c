/* How two processes of a host exchange the descriptors of their memory, and notice each other's end.
 *
 * A queue pair's blob names an abstract unix socket of its process and a random token. The side that connects first
 * opens that socket and sends HELLO with the target's token and its own descriptors; the answer is a HELLO
 * with the target's. The target keeps what it got as a deposit, so its own connect needs no socket. A process
 * with active_side_only has no socket and must connect first. The socket then stays open on both sides: the
 * kernel closes it when a process ends, however it ends. Memory that is shared later (dp_shm_share.c) is
 * announced through it.
 *
 * Blob, 80 bytes: u32 magic | u16 version | u8 provider | u8 0 | u64 network namespace | 16 boot id |
 *                 16 socket name (zero: does not listen) | 16 token | 16 zero.
 */
#include "dp_shm_link.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define HELLO_TIMEOUT_MS 2000 /* how long connecting waits for a peer that does not answer */
#define HELLO_STEP_MS 100     /* how often connecting checks for cancellation while the peer's queue is full */
#define HELLO_SPIN_NS 200000 /* about the longest answer of a peer that is there */

/* The identity that dp_shm_preload has read. ok: the reading has succeeded. */
static struct {
    bool ok;
    uint8_t boot_id[16];
    uint64_t netns;
} known;

void dp_shm_preload(void) {
    static shm_dev here;
    dp_error err;
    if (shm_link_identity(&here, &err) != DP_OK)
        return; /* dp_dev_open tries again and reports the error */
    memcpy(known.boot_id, here.boot_id, sizeof known.boot_id);
    known.netns = here.netns;
    known.ok = true;
}

int shm_link_identity(shm_dev *dev, dp_error *err) {
    if (known.ok) {
        memcpy(dev->boot_id, known.boot_id, sizeof dev->boot_id);
        dev->netns = known.netns;
        return DP_OK;
    }
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
    /* Abstract sockets belong to the network namespace. */
    struct stat st;
    if (stat("/proc/self/ns/net", &st) == 0)
        dev->netns = st.st_ino;
    return DP_OK;
}

/* ---- export, connect, forget, probe ---- */

int shm_link_export(shm_dev *dev, shm_qp *qp, void *out, uint32_t *len, dp_error *err) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    if (!dev->active_only && !dev->listening)
        st = shm_listen_start(dev, err); /* also for a home in another process, because the thread watches the link */
    pthread_mutex_unlock(&dev->lock);
    if (st)
        return st;
    shm_blob b = {.magic = SHM_BLOB_MAGIC, .version = SHM_LINK_VERSION, .provider = DP_PROVIDER_SHM, .netns = dev->netns};
    memcpy(b.boot_id, dev->boot_id, 16);
    if (dev->listening)
        memcpy(b.name, dev->name, 16);
    if (qp->home.set) {
        b.netns = qp->home.netns;
        memcpy(b.name, qp->home.name, 16);
    }
    memcpy(b.token, qp->token, 16);
    memcpy(out, &b, sizeof b);
    *len = sizeof b;
    return DP_OK;
}

int shm_blob_check(const shm_dev *dev, const void *data, uint32_t len, shm_blob *b, dp_error *err) {
    if (len >= 7) { /* name the provider, even if the length is that of another provider's blob */
        memcpy(b, data, 7);
        if (b->provider != DP_PROVIDER_SHM && b->version <= 64)
            return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of provider %u, not shm (1)", b->provider);
    }
    if (len != sizeof *b)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob of %u bytes, shm has %zu", len, sizeof *b);
    memcpy(b, data, sizeof *b);
    if (b->magic != SHM_BLOB_MAGIC)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has magic %#x", b->magic);
    if (b->version != SHM_LINK_VERSION)
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob has version %u, this side %d", b->version,
                       SHM_LINK_VERSION);
    if (b->zero || !shm_token_is_zero(b->reserved))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob with reserved bytes set");
    if (memcmp(b->boot_id, dev->boot_id, 16))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: the peer is on another node: use verbs");
    if (shm_token_is_zero(b->token))
        return dp_fail(err, DP_BAD_BLOB, 0, "connect: queue-pair blob without a token");
    return DP_OK;
}

static void drop_deposit(shm_qp *qp) {
    if (!qp->deposit)
        return;
    shm_peer_clear(qp->deposit);
    free(qp->deposit);
    qp->deposit = NULL;
}

/* Receives the answer to our hello. An active_only device belongs to a worker, on a core that is leased for it. The worker polls for
 * the answer at first, because a wake-up takes longer than the peer's answer. It yields the core to other threads meanwhile. */
static int answer_recv(const shm_dev *dev, int fd, shm_hello *h, shm_peer *peer) {
    int e = EAGAIN;
    for (int64_t end = dp_now_ns() + HELLO_SPIN_NS; dev->active_only && e == EAGAIN && dp_now_ns() < end; sched_yield())
        e = shm_hello_recv(fd, MSG_DONTWAIT, h, peer);
    return e == EAGAIN ? shm_hello_recv(fd, 0, h, peer) : e;
}

static void limit_wait(int fd, int option, int64_t ms) {
    struct timeval limit = {ms / 1000, ms % 1000 * 1000};
    setsockopt(fd, SOL_SOCKET, option, &limit, sizeof limit);
}

/* Connects fd to the peer's socket. Waits in steps while the peer's queue is full, until HELLO_TIMEOUT_MS are over
 * or the connect is cancelled. The rest of that time is left for the answer. Returns 0 or an errno. */
static int reach(shm_dev *dev, shm_qp *qp, int fd, const uint8_t name[16]) {
    struct sockaddr_un a;
    socklen_t len = shm_listen_address(name, &a);
    int64_t end = dp_now_ns() + HELLO_TIMEOUT_MS * 1000000ll, left = HELLO_TIMEOUT_MS;
    limit_wait(fd, SO_SNDTIMEO, HELLO_STEP_MS);
    while (connect(fd, (struct sockaddr *)&a, len)) {
        if (errno != EAGAIN && errno != EINTR)
            return errno;
        left = (end - dp_now_ns()) / 1000000;
        if (left <= 0)
            return ETIMEDOUT;
        pthread_mutex_lock(&dev->lock);
        bool cancelled = qp->cancelled;
        pthread_mutex_unlock(&dev->lock);
        if (cancelled)
            return ECANCELED;
    }
    limit_wait(fd, SO_RCVTIMEO, left);
    return 0;
}

void shm_link_cancel(shm_dev *dev, shm_qp *qp) {
    pthread_mutex_lock(&dev->lock);
    qp->cancelled = true;
    if (qp->meeting >= 0)
        shutdown(qp->meeting, SHUT_RDWR); /* ends the wait for the answer */
    pthread_mutex_unlock(&dev->lock);
}

/* Opens the peer's socket and exchanges hellos. */
static int meet(shm_dev *dev, shm_qp *qp, const shm_blob *b, int *out_fd, dp_error *err) {
    if (shm_token_is_zero(b->name))
        return dp_fail(err, DP_CONNECTION, 0, "connect: the peer does not listen and has not connected to us");
    pthread_mutex_lock(&dev->lock);
    int fd = dev->spare;
    dev->spare = -1;
    pthread_mutex_unlock(&dev->lock);
    if (fd < 0)
        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dp_fail(err, DP_FATAL, errno, "connect: socket");
    int e = reach(dev, qp, fd, b->name);
    if (e) {
        close(fd);
        if (b->netns != dev->netns)
            return dp_fail(err, DP_CONNECTION, e, "connect: the peer is in another network namespace");
        return dp_fail(err, e == ECONNREFUSED ? DP_PEER_GONE : DP_CONNECTION, e, "connect: shm peer's socket");
    }
    shm_hello h;
    pthread_mutex_lock(&dev->lock);
    bool cancelled = qp->cancelled;
    if (!cancelled) {
        qp->given = true; /* even if the peer refuses */
        qp->meeting = fd;
    }
    pthread_mutex_unlock(&dev->lock);
    if (cancelled) {
        close(fd);
        return dp_fail(err, DP_CONNECTION, ECANCELED, "connect: shm peer's socket");
    }
    e = shm_hello_send(fd, dev, qp, DP_OK, b->token);
    void (*meanwhile)(void *) = dev->d.meanwhile;
    if (meanwhile) { /* set only by the sole user of the device */
        dev->d.meanwhile = NULL;
        meanwhile(dev->d.meanwhile_arg);
    }
    if (!e)
        e = answer_recv(dev, fd, &h, &qp->peer);
    pthread_mutex_lock(&dev->lock);
    qp->meeting = -1;
    cancelled = qp->cancelled;
    pthread_mutex_unlock(&dev->lock);
    int st = DP_OK;
    if (e && cancelled)
        st = dp_fail(err, DP_CONNECTION, ECANCELED, "connect: exchange with the shm peer");
    else if (e == EMFILE)
        st = dp_fail(err, DP_FATAL, e, "connect: take the descriptors of the shm peer");
    else if (e)
        st = dp_fail(err, e == ECONNRESET || e == EPIPE ? DP_PEER_GONE : DP_CONNECTION, e == EAGAIN ? ETIMEDOUT : e,
                     "connect: exchange with the shm peer");
    else if (h.status == DP_FATAL)
        st = dp_fail(err, DP_CONNECTION, 0, "connect: the peer has no descriptors left");
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
    shm_blob b;
    int st = shm_blob_check(dev, data, len, &b, err);
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
        st = qp->peer.segment ? DP_OK : shm_peer_map(&qp->peer, true, err);
        if (st)
            shm_peer_clear(&qp->peer);
        return st;
    }
    int fd = -1;
    st = meet(dev, qp, &b, &fd, err);
    if (!st && dev->d.met)
        dev->d.met(dev->d.meanwhile_arg);
    if (st) {
        /* Both sides connected at once and ours came second: the peer's hello has arrived meanwhile. */
        pthread_mutex_lock(&dev->lock);
        bool crossed = qp->deposit != NULL;
        pthread_mutex_unlock(&dev->lock);
        return crossed ? shm_link_connect(dev, qp, data, len, err) : st;
    }
    qp->peer.keep_below = dev->keep_below;
    st = shm_peer_map(&qp->peer, !dev->active_only, err);
    if (st) {
        shm_peer_clear(&qp->peer);
        close(fd);
        return st;
    }
    pthread_mutex_lock(&dev->lock);
    qp->taken = true;
    /* If both sides connected at once, the deposit is from this same peer. */
    if (qp->deposit && memcmp(qp->deposit->token, b.token, 16))
        st = dp_fail(err, DP_BAD_BLOB, 0, "connect: another queue pair has connected to this one");
    else if (!shm_link_add(dev, fd, qp))
        st = dp_fail(err, DP_FATAL, errno, "connect: watch the socket to the peer");
    drop_deposit(qp);
    if (st)
        close(fd);
    pthread_mutex_unlock(&dev->lock);
    if (st)
        shm_peer_clear(&qp->peer);
    return st;
}

bool shm_link_forget(shm_dev *dev, shm_qp *qp) {
    pthread_mutex_lock(&dev->lock);
    drop_deposit(qp);
    bool given = qp->given;
    qp->taken = true;
    for (shm_link *l = dev->links, *next; l; l = next) {
        next = l->next;
        if (l->qp == qp)
            shm_link_drop(dev, l);
    }
    pthread_mutex_unlock(&dev->lock);
    return given;
}

int shm_link_peer_fd(shm_dev *dev, const shm_qp *qp) {
    int fd = -1;
    pthread_mutex_lock(&dev->lock);
    for (const shm_link *l = dev->links; l; l = l->next)
        if (l->qp == qp)
            fd = l->fd;
    pthread_mutex_unlock(&dev->lock);
    return fd;
}

int shm_link_probe(shm_dev *dev, shm_qp *qp) {
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    for (shm_link *l = dev->links; l; l = l->next)
        if (l->qp == qp) {
            char c;
            ssize_t n = recv(l->fd, &c, 1, MSG_DONTWAIT | MSG_PEEK);
            if (n > 0 && qp->takes_shared)
                st = shm_shares_take(qp, l->fd);
            else if (n >= 0 || (errno != EAGAIN && errno != EINTR))
                st = DP_PEER_GONE;
        }
    pthread_mutex_unlock(&dev->lock);
    /* Only this side writes the peer's ring. If its last entry has changed, the peer will never see that entry. */
    if (!st && qp->connected && qp->spos) {
        const shm_entry *last = &qp->peer.segment->ring[(qp->spos - 1) & (qp->peer.ring_size - 1)];
        if ((uint32_t)__atomic_load_n(&last->seq_imm, __ATOMIC_RELAXED) != qp->spos)
            st = DP_PROTOCOL;
    }
    if (st)
        dp_qp_break(&qp->q, st);
    return st;
}

/* Memory that one side shares with a connected peer: a message with the descriptor of a memory file goes through the socket that the
 * hellos used. The peer maps the file twice, to read and to write. Only a side that was created with takes_shared accepts such messages;
 * for the other side any message is the end of the connection. */
#include "dp_shm_link.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SHARE_MAGIC 0x52534652u /* "RFSR" */
#define AT_ONCE 256             /* messages that one call takes, so that a peer that sends on and on cannot keep this side busy */

enum { SHARE = 1, UNSHARE = 2 };

typedef struct share_message {
    uint32_t magic;
    uint16_t version;
    uint16_t what;
    uint32_t rkey;
    uint32_t zero;
    uint64_t size;
} share_message;
_Static_assert(sizeof(share_message) == 24, "share message");

/* Memory of the peer, mapped here. */
typedef struct shared_memory {
    uint32_t rkey;
    uint64_t size;
    uint8_t *read, *write;
} shared_memory;

struct shm_shares {
    uint32_t n_given, n_taken;
    uint32_t given[DP_SHARED_MAX]; /* keys that the peer has been told */
    shared_memory taken[DP_SHARED_MAX];
};

static bool make_shares(shm_qp *qp) { return qp->shares || (qp->shares = calloc(1, sizeof *qp->shares)); }

/* ---- the side that owns the memory ---- */

/* Returns 0 or an errno. Does not block. fd: -1 sends no descriptor. */
static int share_send(int sock, const share_message *m, int fd) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)m, sizeof *m};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        msg.msg_control = control.buf;
        msg.msg_controllen = sizeof control.buf;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t n;
    do
        n = sendmsg(sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n < 0 ? errno : 0;
}

static int find_given(const shm_shares *s, uint32_t rkey) {
    for (uint32_t i = 0; i < s->n_given; i++)
        if (s->given[i] == rkey)
            return (int)i;
    return -1;
}

int shm_qp_share(dp_qp *q, const dp_mem *mem) {
    shm_qp *qp = (shm_qp *)q;
    const shm_mem *m = (const shm_mem *)mem;
    if (q->state != DP_QP_CONNECTED || dp_qp_broken(q))
        return DP_CONNECTION;
    if (!make_shares(qp))
        return DP_FATAL;
    if (find_given(qp->shares, mem->rkey) >= 0)
        return DP_OK;
    if (m->fd < 0 || m->offset || qp->shares->n_given == DP_SHARED_MAX)
        return DP_UNSUPPORTED;
    share_message msg = {.magic = SHARE_MAGIC, .version = SHM_LINK_VERSION, .what = SHARE, .rkey = mem->rkey, .size = mem->size};
    if (share_send(shm_link_peer_fd((shm_dev *)q->domain->dev, qp), &msg, m->fd))
        return DP_BUSY; /* the peer has not taken earlier ones, or it is gone, which the next probe finds */
    qp->shares->given[qp->shares->n_given++] = mem->rkey;
    return DP_OK;
}

static void take_back(shm_qp *qp, int i) {
    uint32_t rkey = qp->shares->given[i];
    qp->shares->given[i] = qp->shares->given[--qp->shares->n_given];
    share_message msg = {.magic = SHARE_MAGIC, .version = SHM_LINK_VERSION, .what = UNSHARE, .rkey = rkey};
    share_send(shm_link_peer_fd((shm_dev *)qp->q.domain->dev, qp), &msg, -1); /* if it fails, the peer keeps its mapping until it forgets all */
}

void shm_qp_unshare(dp_qp *q, const dp_mem *mem) {
    shm_qp *qp = (shm_qp *)q;
    int i = qp->shares ? find_given(qp->shares, mem->rkey) : -1;
    if (i >= 0)
        take_back(qp, i);
}

void shm_qp_unshare_all(dp_qp *q) {
    shm_qp *qp = (shm_qp *)q;
    while (qp->shares && qp->shares->n_given)
        take_back(qp, 0);
}

/* ---- the side that maps it; everything under dev->lock ---- */

static void unmap(shared_memory *m) {
    shm_unmap(m->read, m->size);
    shm_unmap(m->write, m->size);
    *m = (shared_memory){0};
}

static shared_memory *find_taken(shm_shares *s, uint32_t rkey) {
    for (uint32_t i = 0; i < s->n_taken; i++)
        if (s->taken[i].rkey == rkey)
            return &s->taken[i];
    return NULL;
}

static void drop(shm_shares *s, uint32_t rkey) {
    shared_memory *m = find_taken(s, rkey);
    if (!m)
        return; /* forgotten meanwhile */
    unmap(m);
    *m = s->taken[--s->n_taken];
}

static int map(shm_shares *s, const share_message *m, int fd) {
    drop(s, m->rkey);
    if (s->n_taken == DP_SHARED_MAX)
        return DP_PROTOCOL;
    shared_memory new = {.rkey = m->rkey, .size = m->size};
    new.read = shm_map_checked(fd, 0, m->size, false, true);
    new.write = new.read ? shm_map_checked(fd, 0, m->size, true, true) : NULL;
    if (!new.write) { /* without memory for it, requests that name it are refused */
        int st = errno == EBADF ? DP_PROTOCOL : DP_OK;
        unmap(&new);
        return st;
    }
    s->taken[s->n_taken++] = new;
    return DP_OK;
}

/* Receives one message. 1: handled. 0: there is none. Otherwise the status that ends the connection. */
static int take_one(shm_qp *qp, int sock) {
    share_message m;
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(2 * sizeof(int))]; /* also what the alignment makes of room for one descriptor */
    } control;
    struct iovec iov = {&m, sizeof m};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
    ssize_t n = recvmsg(sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : DP_PEER_GONE;
    int fds[2] = {-1, -1};
    const struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
    int fd = fds[0];
    bool cut = msg.msg_flags & MSG_CTRUNC, good_fds = fds[1] < 0 && !(cut && fd >= 0); /* one at most was sent */
    int st = DP_PROTOCOL;
    if (n == 0) {
        st = DP_PEER_GONE;
    } else if (n == (ssize_t)sizeof m && !(msg.msg_flags & MSG_TRUNC) && m.magic == SHARE_MAGIC && m.version == SHM_LINK_VERSION && !m.zero &&
               good_fds && make_shares(qp)) {
        if (m.what == UNSHARE && fd < 0) {
            drop(qp->shares, m.rkey);
            st = DP_OK;
        } else if (m.what == SHARE && m.size && m.size <= SHM_REGION_MAX && (fd >= 0 || cut)) {
            st = fd < 0 ? DP_OK : map(qp->shares, &m, fd); /* no descriptor was free: as without memory */
        }
    }
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return st ? st : 1;
}

int shm_shares_take(shm_qp *qp, int sock) {
    int st = 1;
    for (int i = 0; i < AT_ONCE && st == 1; i++)
        st = take_one(qp, sock);
    return st == 1 ? DP_OK : st;
}

void *shm_qp_shared_ptr(dp_qp *q, uint32_t rkey, uint64_t offset, uint64_t len, unsigned how) {
    shm_qp *qp = (shm_qp *)q;
    shm_dev *dev = (shm_dev *)q->domain->dev;
    uint8_t *at = NULL;
    int st = DP_OK;
    if (!qp->takes_shared)
        return NULL;
    pthread_mutex_lock(&dev->lock);
    const shared_memory *m = qp->shares ? find_taken(qp->shares, rkey) : NULL;
    if (!m && !(how & DP_SHARED_KNOWN)) {
        for (const shm_link *l = dev->links; l && !st; l = l->next)
            if (l->qp == qp)
                st = shm_shares_take(qp, l->fd);
        m = qp->shares ? find_taken(qp->shares, rkey) : NULL;
    }
    if (m && offset <= m->size && len <= m->size - offset)
        at = (how & DP_SHARED_WRITE ? m->write : m->read) + offset;
    pthread_mutex_unlock(&dev->lock);
    if (st)
        dp_qp_break(q, st);
    return at;
}

static void unmap_all(shm_shares *s) {
    while (s->n_taken)
        unmap(&s->taken[--s->n_taken]);
}

void shm_qp_forget_shared(dp_qp *q) {
    shm_qp *qp = (shm_qp *)q;
    shm_dev *dev = (shm_dev *)q->domain->dev;
    int st = DP_OK;
    pthread_mutex_lock(&dev->lock);
    for (const shm_link *l = dev->links; l && !st && qp->takes_shared; l = l->next)
        if (l->qp == qp)
            st = shm_shares_take(qp, l->fd);
    if (qp->shares)
        unmap_all(qp->shares);
    pthread_mutex_unlock(&dev->lock);
    if (st)
        dp_qp_break(q, st);
}

void shm_shares_free(shm_qp *qp) {
    if (qp->shares)
        unmap_all(qp->shares);
    free(qp->shares);
    qp->shares = NULL;
}

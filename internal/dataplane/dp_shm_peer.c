/* Hello messages of peers, their descriptors, and the memory behind them. The peer writes all of it, so every word is checked. */
#include "dp_shm_link.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

/* ---- peers ---- */

static void peer_init(shm_peer *p) {
    memset(p, 0, sizeof *p);
    for (int i = 0; i < SHM_HELLO_FDS; i++)
        p->fds[i] = -1;
}

void shm_peer_unmap(shm_peer *p) {
    if (p->segment)
        shm_unmap(p->segment, shm_segment_size(p->ring_size));
    if (p->page)
        shm_unmap(p->page, SHM_PAGE);
    for (uint32_t i = 0; i < p->n_regions; i++) {
        shm_unmap(p->regions[i].map, p->regions[i].size);
        p->regions[i].map = NULL;
    }
    p->segment = NULL;
    p->page = NULL;
    p->mode = NULL;
}

void shm_peer_clear(shm_peer *p) {
    shm_peer_unmap(p);
    for (int i = 0; i < SHM_HELLO_FDS; i++)
        if (p->fds[i] >= 0)
            close(p->fds[i]);
    peer_init(p);
}

/* Fills in the page tables now instead of at the first call; a hint. Only for pages that the owner has: pages that a peer has left
 * out, up to SHM_REGION_MAX bytes, must not be allocated here. */
static void populate(int fd, uint64_t offset, uint8_t *at, uint64_t len, bool writable) {
    enum { PIECES = 16 }; /* a region has two at first: its slots and its mailbox */
    const uint64_t most = 256u << 20; /* the slots of the deepest channels */
    uint64_t from = 0, to;
    for (int i = 0; i < PIECES && shm_next_data(fd, offset, len < most ? len : most, &from, &to); i++, from = to)
        madvise(at + from, to - from, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

/* Huge pages are refused: their mapping covers more than the requested size, so it would replace other memory of this process, and a
 * fault may find no huge page left. */
void *shm_map_checked(int fd, uint64_t offset, uint64_t size, bool writable, bool now) {
    struct stat st;
    struct statfs fs;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) || fstat(fd, &st) ||
        fstatfs(fd, &fs) || fs.f_type != TMPFS_MAGIC || (uint64_t)st.st_size < offset ||
        (uint64_t)st.st_size - offset < size) {
        errno = EBADF;
        return NULL;
    }
    uint64_t skew = offset & (SHM_PAGE - 1), len = (skew + size + SHM_PAGE - 1) & ~(uint64_t)(SHM_PAGE - 1);
    uint8_t *at = mmap(NULL, len + SHM_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    if (mmap(at, len, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, fd,
             (off_t)(offset - skew)) == MAP_FAILED) {
        int e = errno;
        munmap(at, len + SHM_PAGE);
        errno = e;
        return NULL;
    }
    if (now)
        populate(fd, offset - skew, at, len, writable);
    return at + skew;
}

int shm_peer_map(shm_peer *p, bool now, dp_error *err) {
    p->segment = shm_map_checked(p->fds[0], 0, shm_segment_size(p->ring_size), true, true);
    if (!p->segment)
        return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's receive ring of %u", p->ring_size);
    p->page = shm_map_checked(p->fds[1], 0, SHM_PAGE, true, true);
    if (!p->page)
        return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's completion-queue page");
    p->mode = (uint32_t *)(void *)(p->page + p->mode_at);
    for (uint32_t i = 0; i < p->n_regions; i++) {
        shm_region *r = &p->regions[i];
        bool writable = r->access & (DP_REMOTE_WRITE | DP_REMOTE_ATOMIC);
        r->map = shm_map_checked(p->fds[2 + i], r->offset, r->size, writable, now);
        if (!r->map)
            return dp_fail(err, DP_BAD_BLOB, errno, "connect: map the peer's region of %llu bytes",
                           (unsigned long long)r->size);
    }
    for (int i = 0; i < SHM_HELLO_FDS; i++)
        if (p->fds[i] >= p->keep_below) {
            close(p->fds[i]);
            p->fds[i] = -1;
        }
    return DP_OK;
}

/* ---- hello ---- */

int shm_hello_send(int fd, const shm_dev *dev, const shm_qp *qp, int status, const uint8_t to[16]) {
    shm_hello h = {.magic = SHM_HELLO_MAGIC, .version = SHM_LINK_VERSION, .status = status, .reached = dev->membarrier};
    memcpy(h.to, to, 16);
    int fds[SHM_HELLO_FDS], n = 0;
    if (qp) {
        memcpy(h.from, qp->token, 16);
        h.ring_size = qp->ring_size;
        h.n_regions = (uint16_t)qp->n_expose;
        fds[n++] = qp->seg_fd;
        const shm_cq *cq = (const shm_cq *)qp->q.cq;
        h.mode_at = (uint32_t)((uint8_t *)cq->mode - cq->page->map);
        fds[n++] = cq->page->fd;
        for (uint32_t i = 0; i < qp->n_expose; i++) {
            const shm_mem *m = qp->expose[i];
            h.regions[i] = (shm_hello_region){m->m.rkey, m->m.access, m->m.base, m->m.size,
                                              m->offset};
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

int shm_hello_check(const shm_hello *h, int n_fds, shm_peer *p) {
    if (h->magic != SHM_HELLO_MAGIC || h->version != SHM_LINK_VERSION)
        return EPROTO;
    if (h->status)
        return 0; /* a refusal has no other fields */
    if (h->n_regions > DP_EXPOSE_MAX || n_fds != 2 + h->n_regions || h->ring_size == 0 ||
        h->ring_size > SHM_RING_MAX || (h->ring_size & (h->ring_size - 1)) || h->mode_at % DP_CACHE_LINE || h->mode_at >= SHM_PAGE)
        return EPROTO;
    memcpy(p->token, h->from, 16);
    p->ring_size = h->ring_size;
    p->mode_at = h->mode_at;
    p->reached = h->reached;
    for (uint32_t i = 0; i < h->n_regions; i++) {
        const shm_hello_region *r = &h->regions[i];
        /* Memory that is aligned at its remote address must be aligned in our mapping too, because atomics rely on it. */
        if (r->size == 0 || r->size > SHM_REGION_MAX || r->offset > SHM_REGION_MAX ||
            (r->base - r->offset) % SHM_PAGE || r->base > UINT64_MAX - r->size ||
            (r->access & ~(uint32_t)(DP_REMOTE_READ | DP_REMOTE_WRITE | DP_REMOTE_ATOMIC)))
            return EPROTO;
        p->regions[i] = (shm_region){.rkey = r->rkey, .access = r->access, .base = r->base, .size = r->size,
                                     .offset = r->offset};
    }
    p->n_regions = h->n_regions;
    return 0;
}

int shm_hello_recv(int fd, int flags, shm_hello *h, shm_peer *p) {
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(SHM_HELLO_FDS * sizeof(int))];
    } control;
    struct iovec iov = {h, sizeof *h};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf,
                         .msg_controllen = sizeof control.buf};
    ssize_t n;
    do
        n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC | flags);
    while (n < 0 && errno == EINTR);
    peer_init(p);
    if (n < 0)
        return errno;
    int n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int k = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < k; i++) {
                int got;
                memcpy(&got, CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof got);
                if (n_fds < SHM_HELLO_FDS)
                    p->fds[n_fds++] = got;
                else
                    close(got);
            }
        }
    if (n == 0)
        return ECONNRESET;
    if (n != (ssize_t)sizeof *h || (msg.msg_flags & MSG_TRUNC))
        return EPROTO;
    if (msg.msg_flags & MSG_CTRUNC) /* too many descriptors, or this process has none left */
        return n_fds == SHM_HELLO_FDS ? EPROTO : EMFILE;
    return shm_hello_check(h, n_fds, p);
}

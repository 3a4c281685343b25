/* Messages of one process to another over the socket of shm: blobs, and hello messages with descriptors.
 *
 * Byte 0: 0 a blob, on a node whose boot id is 16 bytes 5a. Otherwise a hello: byte 0 is how many descriptors come with
 * it, and the next byte of each says what it is (see offer()). */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "dp_shm_link.h"
#include "fuzz.h"

static int memfd(uint64_t size, int seals) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    MUST(fd >= 0 && ftruncate(fd, (off_t)size) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static int offer(uint8_t kind) {
    static int fds[6];
    if (!fds[0]) {
        const int fixed = F_SEAL_SHRINK | F_SEAL_GROW;
        fds[0] = memfd(SHM_PAGE, fixed);
        fds[1] = memfd(64 * SHM_PAGE, fixed);
        fds[2] = memfd(64 * SHM_PAGE, 0); /* may shrink while it is mapped */
        fds[3] = memfd(64 * SHM_PAGE, fixed | F_SEAL_WRITE);
        fds[4] = memfd(64 * SHM_PAGE + 1, fixed);
        fds[5] = open("/dev/null", O_RDWR | O_CLOEXEC);
        MUST(fds[5] >= 0);
    }
    return fds[kind % 6];
}

static void one_blob(input *in) {
    shm_dev dev = {.netns = 1};
    memset(dev.boot_id, 0x5a, sizeof dev.boot_id);
    uint8_t *copy = exact_copy(in->at, in->left);
    shm_blob b;
    dp_error err = {0};
    int st = shm_blob_check(&dev, copy, (uint32_t)in->left, &b, &err);
    if (st)
        MUST(st == DP_BAD_BLOB && err.msg[0]);
    else
        MUST(in->left == sizeof b && !memcmp(b.boot_id, dev.boot_id, 16) && !shm_token_is_zero(b.token));
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int pair[2] = {-1, -1};
    input in = {data, size};
    uint8_t n = take8(&in);
    if (n == 0) {
        one_blob(&in);
        return 0;
    }
    offer(0);
    if (pair[0] < 0) {
        MUST(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    }
    int lowest = dup(0); /* libFuzzer has open files too */
    close(lowest);
    int fds[SHM_HELLO_FDS + 4];
    n = (uint8_t)((n - 1) % (sizeof fds / sizeof *fds));
    for (int i = 0; i < n; i++)
        fds[i] = offer(take8(&in));
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE(sizeof fds)];
    } control;
    memset(&control, 0, sizeof control);
    uint8_t bytes[sizeof(shm_hello) + 1];
    size_t len = in.left < sizeof bytes ? in.left : sizeof bytes;
    memcpy(bytes, in.at, len);
    struct iovec iov = {bytes, len};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n) {
        m.msg_control = control.buf;
        m.msg_controllen = CMSG_SPACE((size_t)n * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
    }
    if (len == 0 || sendmsg(pair[0], &m, MSG_NOSIGNAL) < 0)
        return 0;
    shm_hello h;
    shm_peer p;
    dp_error err = {0};
    int e = shm_hello_recv(pair[1], MSG_DONTWAIT, &h, &p);
    if (!e && !h.status && shm_peer_map(&p, true, &err) == DP_OK) {
        /* The peer's memory is mapped to the last byte, with the alignment that the peer announced. */
        MUST(p.segment && p.mode);
        volatile uint32_t first = p.segment->posted, mode = *p.mode;
        volatile uint8_t last = ((uint8_t *)p.segment)[shm_segment_size(p.ring_size) - 1];
        (void)first, (void)mode, (void)last;
        for (uint32_t i = 0; i < p.n_regions; i++) {
            const shm_region *r = &p.regions[i];
            last = r->map[r->size - 1];
            MUST((uintptr_t)r->map % SHM_PAGE == 0 && r->base % SHM_PAGE == 0);
        }
    }
    shm_peer_clear(&p);
    int free_fd = dup(0);
    MUST(free_fd == lowest); /* no descriptor is left */
    close(free_fd);
    return 0;
}

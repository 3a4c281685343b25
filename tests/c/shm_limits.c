/* shm when the system refuses resources, and connections to its socket that send no hello. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "dp_layout.h"
#include "dp_serve.h"
#include "dp_shm_link.h"
#include "ends.h"

/* ---- mmap that fails: the program is linked with --wrap=mmap ---- */

static __thread struct {
    void *at;  /* address of the mapping that is to fail; NULL: none */
    int times; /* so many attempts there */
    bool hole; /* the first failure removes the old mapping, as kernels before 6.12 may */
} refusal;

void *__real_mmap(void *at, size_t len, int prot, int flags, int fd, off_t off);
void *__wrap_mmap(void *at, size_t len, int prot, int flags, int fd, off_t off);

void *__wrap_mmap(void *at, size_t len, int prot, int flags, int fd, off_t off) {
    if (!refusal.at || at != refusal.at || refusal.times == 0)
        return __real_mmap(at, len, prot, flags, fd, off);
    refusal.times--;
    if (refusal.hole)
        munmap(at, len);
    refusal.hole = false;
    errno = ENOMEM;
    return MAP_FAILED;
}

/* If a region cannot be renewed, the reset fails, and its addresses stay reserved until it is freed. */
static void renewal_fails(bool hole, int times) {
    end a, b;
    card ca, cb;
    end_open(&a, NULL, NULL);
    end_open(&b, NULL, NULL);
    end_card(&a, &ca);
    end_card(&b, &cb);
    end_connect(&a, &cb);
    end_connect(&b, &ca);
    fill_pattern(end_bytes(&a), 4096, 5);
    refusal.at = end_bytes(&a);
    refusal.times = times;
    refusal.hole = hole;
    dp_error err = {0};
    CHECK_REFUSED(dp_qp_reset(a.qp, &err), DP_FATAL, err);
    CHECK_EQ(a.qp->state, DP_QP_ERROR);
    CHECK_EQ(refusal.times, 0);
    refusal.at = NULL;
    if (times == 1)
        CHECK_PATTERN(end_bytes(&a), 4096, 5);
    /* Another mapping takes the hole, if there is one. */
    uint8_t *other = mmap(end_bytes(&a), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                          -1, 0);
    CHECK((other != MAP_FAILED) == (times == 3));
    if (times == 3)
        *other = 77;
    end_close(&b);
    end_close(&a);
    if (times == 3) {
        CHECK_EQ(*(volatile uint8_t *)other, 77);
        munmap(other, 4096);
    }
}

T_CASE(renewal_refused, "memory/renewal-refused", .providers = T_SHM) { renewal_fails(false, 1); }
T_CASE(renewal_hole, "memory/renewal-leaves-no-hole", .providers = T_SHM) { renewal_fails(true, 1); }
T_CASE(renewal_reserved, "memory/renewal-keeps-its-place", .providers = T_SHM) { renewal_fails(true, 2); }
T_CASE(renewal_lost, "memory/renewal-that-lost-its-place", .providers = T_SHM) { renewal_fails(true, 3); }

/* ---- membarrier that is forbidden after it was registered ---- */

static void forbid(int number) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    CHECKF(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "seccomp: %s", strerror(errno));
}

/* A hot promise that cannot be withdrawn safely: one short wait, and no further promises. */
T_CASE(no_membarrier, "wait/membarrier-refused", .providers = T_SHM) {
    end e;
    end_open(&e, NULL, NULL);
    const uint32_t *mode = ((shm_cq *)e.cq)->mode;
    dp_cq_promise_hot(e.cq, true);
    if (*mode != SHM_HOT)
        t_skip("this kernel has no membarrier");
    forbid(SYS_membarrier);
    dp_wc wc;
    CHECK_OK(dp_cq_arm(e.cq));
    CHECK_EQ(*mode, SHM_SLEEPING);
    CHECK_EQ(dp_cq_poll(e.cq, &wc, 1), 0);
    int64_t t0 = dp_now_ns();
    CHECK_OK(dp_cq_wait(e.cq, 5000000000));
    CHECKF(dp_now_ns() - t0 < 4000000000, "the wait took %lld ms", (long long)(dp_now_ns() - t0) / 1000000);
    CHECK_EQ(dp_cq_poll(e.cq, &wc, 1), 0);
    dp_cq_promise_hot(e.cq, true);
    CHECK_EQ(*mode, SHM_AWAKE);
    CHECK_OK(dp_cq_arm(e.cq));
    t0 = dp_now_ns();
    CHECK_OK(dp_cq_wait(e.cq, 50000000));
    CHECKF(dp_now_ns() - t0 >= 49000000, "later waits are whole: this one took %lld us", (long long)(dp_now_ns() - t0) / 1000);
    end_close(&e);
}

/* ---- no descriptors for newcomers ---- */

static void newcomer(int sock, void *arg) {
    (void)arg;
    for (;;) {
        end e;
        card mine, theirs;
        dp_error err = {0};
        int go;
        t_recv(sock, &go, sizeof go);
        if (!go)
            return;
        end_open(&e, NULL, NULL);
        end_card(&e, &mine);
        t_send(sock, &mine, sizeof mine);
        t_recv(sock, &theirs, sizeof theirs);
        int st = dp_qp_connect(e.qp, theirs.blob, theirs.blob_len, &err);
        t_send(sock, &st, sizeof st);
        t_send(sock, err.msg, sizeof err.msg);
        t_sync(sock);
        end_close(&e);
    }
}

static void leave_descriptors(int n) {
    int next = dup(0);
    CHECK(next >= 0);
    close(next);
    struct rlimit lim;
    CHECK(!getrlimit(RLIMIT_NOFILE, &lim));
    lim.rlim_cur = (rlim_t)(next + n);
    CHECK(!setrlimit(RLIMIT_NOFILE, &lim));
}

static int64_t cpu_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

T_CASE(newcomers, "connect/no-descriptor-for-a-newcomer", .providers = T_SHM, .seconds = 20) {
    t_peer p;
    t_peer_start(&p, true, newcomer, NULL);
    end e;
    card mine, theirs;
    char msg[sizeof((dp_error *)0)->msg];
    struct rlimit old;
    CHECK(!getrlimit(RLIMIT_NOFILE, &old));
    end_open(&e, NULL, NULL);
    for (int room = 0; room <= 2; room++) {
        t_note("%d free descriptors", room);
        int go = 1, st;
        end_card(&e, &mine); /* listens from now on */
        t_send(p.sock, &go, sizeof go);
        t_recv(p.sock, &theirs, sizeof theirs);
        leave_descriptors(room);
        t_send(p.sock, &mine, sizeof mine);
        if (room == 0) {
            /* It waits to be accepted, and this side does not spin meanwhile. */
            int64_t before = cpu_ns();
            t_sleep_ms(500);
            int64_t used = cpu_ns() - before;
            CHECKF(used < 50000000, "%lld ms of processor time while a newcomer waits for 500 ms", (long long)used / 1000000);
            CHECK(!setrlimit(RLIMIT_NOFILE, &old));
        }
        t_recv(p.sock, &st, sizeof st);
        t_recv(p.sock, msg, sizeof msg);
        CHECK(!setrlimit(RLIMIT_NOFILE, &old));
        if (room == 0) {
            CHECKF(st == DP_OK, "connect: %s", msg);
        } else {
            /* Accepted, but there are no descriptors for its memory. */
            CHECKF(st == DP_CONNECTION && strstr(msg, "no descriptors left"), "connect: %d %s", st, msg);
        }
        t_sync(p.sock);
        end_reset(&e);
    }
    int go = 0;
    t_send(p.sock, &go, sizeof go);
    t_peer_join(&p);
    end_close(&e);
}

/* ---- connections without a hello ---- */

static int call_on(const card *c) {
    shm_blob b;
    memcpy(&b, c->blob, sizeof b);
    struct sockaddr_un a;
    socklen_t len = shm_listen_address(b.name, &a);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    struct timeval limit = {5, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    CHECKF(connect(fd, (struct sockaddr *)&a, len) == 0, "connect: %s", strerror(errno));
    return fd;
}

/* Sends h with these descriptors; returns the status of the answer, or 1 when the socket was closed without one. */
static int say_with(const card *to, shm_hello h, const int *fds, int n_fds) {
    int fd = call_on(to);
    union {
        struct cmsghdr align;
        char buf[CMSG_SPACE((SHM_HELLO_FDS + 4) * sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec iov = {&h, sizeof h};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds) {
        msg.msg_control = control.buf;
        msg.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)n_fds * sizeof(int));
    }
    CHECK_EQ(sendmsg(fd, &msg, MSG_NOSIGNAL), (ssize_t)sizeof h);
    shm_hello answer;
    shm_peer got;
    int e = shm_hello_recv(fd, 0, &answer, &got);
    shm_peer_clear(&got);
    close(fd);
    CHECKF(e == 0 || e == ECONNRESET, "answer: %s", strerror(e));
    return e ? 1 : answer.status;
}

/* The same with the descriptors of qp. */
static int say(const card *to, shm_hello h, const shm_qp *qp, int n_fds) {
    int fds[SHM_HELLO_FDS + 4];
    for (int i = 0; i < n_fds; i++)
        fds[i] = i == 0 ? qp->seg_fd : i == 1 ? ((shm_cq *)qp->q.cq)->page->fd : qp->expose[0]->fd;
    return say_with(to, h, fds, n_fds);
}

T_CASE(bad_hello, "connect/bad-hello", .providers = T_SHM) {
    end e, other;
    card c, co;
    end_open(&e, NULL, NULL);
    end_open(&other, NULL, NULL);
    end_card(&e, &c);
    end_card(&other, &co);
    shm_blob b;
    memcpy(&b, c.blob, sizeof b);
    const shm_qp *qp = (const shm_qp *)other.qp;
    shm_hello good = {.magic = SHM_HELLO_MAGIC, .version = SHM_LINK_VERSION, .n_regions = 1, .ring_size = qp->ring_size};
    memcpy(good.to, b.token, 16);
    memcpy(good.from, qp->token, 16);
    const dp_mem *m = other.mem;
    good.regions[0] = (shm_hello_region){m->rkey, m->access, (uint64_t)(uintptr_t)m->addr, m->size, 0};
#define WITH(what, change, n_fds, answer)                                                                              \
    do {                                                                                                               \
        shm_hello h = good;                                                                                            \
        t_note(what);                                                                                                  \
        change;                                                                                                        \
        CHECK_EQ(say(&c, h, qp, n_fds), answer);                                                                       \
    } while (0)
    WITH("magic", h.magic++, 3, 1);
    WITH("version", h.version++, 3, 1);
    WITH("no descriptors", (void)0, 0, 1);
    WITH("a descriptor too few", (void)0, 2, 1);
    WITH("a descriptor too many", (void)0, 4, 1);
    WITH("more descriptors than any hello has", (void)0, SHM_HELLO_FDS + 1, 1);
    WITH("nine regions", h.n_regions = DP_EXPOSE_MAX + 1, SHM_HELLO_FDS, 1);
    WITH("no ring", h.ring_size = 0, 3, 1);
    WITH("a ring of 24", h.ring_size = 24, 3, 1);
    WITH("a ring of 8192", h.ring_size = 8192, 3, 1);
    WITH("a mode behind the page", h.mode_at = SHM_PAGE, 3, 1);
    WITH("a mode in the middle of a cache line", h.mode_at = 4, 3, 1);
    WITH("a region of no bytes", h.regions[0].size = 0, 3, 1);
    WITH("a region beyond 2^40", h.regions[0].size = SHM_REGION_MAX + 1, 3, 1);
    WITH("a region that is not page-aligned", h.regions[0].base += 64, 3, 1);
    WITH("an offset that does not go with the address", h.regions[0].offset = 64, 3, 1);
    WITH("an offset beyond 2^40", h.regions[0].offset = SHM_REGION_MAX + SHM_PAGE, 3, 1);
    WITH("a region at the end of everything", h.regions[0].base = UINT64_MAX - 4095, 3, 1);
    WITH("unknown rights", h.regions[0].access |= 8, 3, 1);
    WITH("another token", h.to[3] ^= 1, 3, DP_BAD_BLOB);
    WITH("no token of its own", memset(h.from, 0, 16), 3, DP_BAD_BLOB);
    WITH("a refusal in the place of a question", h.status = DP_BUSY, 3, DP_BAD_BLOB);
#undef WITH
    /* A few bytes, and nothing at all. */
    int fd = call_on(&c);
    CHECK_EQ(send(fd, "hello", 5, 0), 5);
    char byte;
    CHECK_EQ(recv(fd, &byte, 1, 0), 0);
    close(fd);
    int silent[3];
    for (int i = 0; i < 3; i++)
        silent[i] = call_on(&c);
    end_connect(&e, &co);
    end_connect(&other, &c);
    t_note("the blob is used");
    CHECK_EQ(say(&c, good, qp, 3), DP_BUSY);
    for (int i = 0; i < 3; i++)
        close(silent[i]);
    end_close(&e);
    end_close(&other);
}

/* ---- memory that is not what it should be ---- */

/* A memfd of that size whose pages are not allocated yet. */
static int no_pages(const char *name, uint64_t size, unsigned flags, int seals) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    CHECKF(fd >= 0, "memfd_create: %s", strerror(errno));
    CHECKF(!ftruncate(fd, (off_t)size), "size of a memfd: %s", strerror(errno));
    CHECK(!fcntl(fd, F_ADD_SEALS, seals));
    return fd;
}

/* Connects to a peer that passes `fd` with that size as its region. Returns the status. */
static int connect_to(int fd, uint64_t size, dp_error *err) {
    end e, other;
    card c, co;
    end_open(&e, NULL, NULL);
    end_open(&other, NULL, NULL);
    end_card(&e, &c);
    end_card(&other, &co);
    shm_blob b;
    memcpy(&b, c.blob, sizeof b);
    const shm_qp *qp = (const shm_qp *)other.qp;
    shm_hello h = {.magic = SHM_HELLO_MAGIC, .version = SHM_LINK_VERSION, .n_regions = 1, .ring_size = qp->ring_size};
    memcpy(h.to, b.token, 16);
    memcpy(h.from, qp->token, 16);
    h.regions[0] = (shm_hello_region){7, DP_REMOTE_WRITE, 1u << 20, size, 0};
    CHECK_EQ(say_with(&c, h, (int[]){qp->seg_fd, ((shm_cq *)qp->q.cq)->page->fd, fd}, 3), DP_OK);
    int st = dp_qp_connect(e.qp, co.blob, co.blob_len, err);
    end_close(&e);
    end_close(&other);
    return st;
}

T_CASE(bad_memory, "connect/bad-memory", .providers = T_SHM) {
    enum { SIZE = 2 << 20 };
    const int fixed = F_SEAL_SHRINK | F_SEAL_GROW;
    const struct {
        const char *what;
        uint64_t holds;
        unsigned flags;
        int seals;
    } bad[] = {
        {"may shrink", SIZE, 0, F_SEAL_GROW},
        {"may grow", SIZE, 0, F_SEAL_SHRINK},
        {"holds less than it says", SIZE - 4096, 0, fixed},
        {"has huge pages", SIZE, MFD_HUGETLB, fixed},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t_note("%s", bad[i].what);
        int fd = no_pages(bad[i].what, bad[i].holds, bad[i].flags, bad[i].seals);
        dp_error err = {0};
        CHECK_REFUSED(connect_to(fd, SIZE, &err), DP_BAD_BLOB, err);
        /* Because it has huge pages, not because none is free now. */
        CHECKF(strstr(err.msg, strerror(EBADF)), "said: %s", err.msg);
        close(fd);
    }
    t_note("pages that the peer has not made are not made for it");
    const uint64_t large = 256u << 20;
    int fd = no_pages("large", large, 0, fixed);
    dp_error err = {0};
    CHECK_OK_ERR(connect_to(fd, large, &err), err);
    struct stat st;
    CHECK(!fstat(fd, &st));
    CHECK_EQ(st.st_blocks, 0);
    close(fd);
}

/* ---- one that takes what it is given, and refuses ---- */

typedef struct ungrateful {
    int listener;
    uint8_t *map;
    uint64_t size;
} ungrateful;

static void take_and_refuse(int sock, void *arg) {
    ungrateful *u = arg;
    int fd = accept4(u->listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    shm_hello h;
    shm_peer p;
    CHECK_EQ(shm_hello_recv(fd, 0, &h, &p), 0);
    u->size = p.regions[0].size;
    u->map = mmap(NULL, u->size, PROT_READ | PROT_WRITE, MAP_SHARED, p.fds[2], 0);
    CHECK(u->map != MAP_FAILED);
    shm_dev dev = {0};
    CHECK_EQ(shm_hello_send(fd, &dev, NULL, DP_BUSY, h.from), 0);
    shm_peer_clear(&p);
    close(fd);
    t_sync(sock);
}

/* A reset also takes the memory away from a peer that refused the connection. */
T_CASE(refused_and_fenced, "reset/fences-who-refused", .providers = T_SHM) {
    end e, other;
    card c;
    dp_error err;
    end_open(&e, NULL, NULL);
    end_open(&other, NULL, NULL);
    end_card(&other, &c);
    end_close(&other);
    shm_blob b;
    memcpy(&b, c.blob, sizeof b);
    dp_random(b.name, sizeof b.name);
    struct sockaddr_un a;
    socklen_t len = shm_listen_address(b.name, &a);
    ungrateful u = {.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    CHECK(u.listener >= 0 && !bind(u.listener, (struct sockaddr *)&a, len) && !listen(u.listener, 1));
    t_peer p;
    t_peer_start(&p, false, take_and_refuse, &u);
    fill_pattern(end_bytes(&e), e.mem->size, 3);
    CHECK_REFUSED(dp_qp_connect(e.qp, &b, sizeof b, &err), DP_BAD_BLOB, err);
    t_sync(p.sock);
    t_peer_join(&p);
    end_reset(&e);
    CHECK_PATTERN(end_bytes(&e), e.mem->size, 3);
    memset(u.map, 0xEE, u.size);
    CHECK_PATTERN(end_bytes(&e), e.mem->size, 3);
    munmap(u.map, u.size);
    close(u.listener);
    end_close(&e);
}

/* ---- a client that takes no replies ---- */

typedef struct stingy {
    dp_server *server;
    int status;
    int64_t ended;
} stingy;

static uint32_t one_byte(void *args, uint32_t size, void *res) {
    (void)args;
    *(char *)res = (char)size;
    return 1;
}

static void serve_stingy(int sock, void *arg) {
    stingy *s = arg;
    s->status = dp_server_run(s->server);
    s->ended = dp_now_ns();
    t_sync(sock);
}

/* A server that waits for room for a reply stops at once when its executor says so, and not only after its time-out for the client. */
T_CASE(stop_in_reply, "channel/stop-while-the-client-takes-no-replies", .providers = T_SHM) {
    static const end_opts o = {.size = 64 << 10, .no_recvs = true};
    static const dp_function table[] = {one_byte};
    end e;
    dp_error err;
    dp_layout l;
    dp_side worker;
    dp_dev *dev;
    uint8_t blob[DP_CHANNEL_BLOB_MAX];
    uint32_t len = sizeof blob;
    end_open(&e, &o, NULL);
    dp_layout_set(&l, 4, 64, 0);
    CHECK_OK_ERR(dp_side_encode(e.qp, &l, DP_ROLE_CLIENT, 7, e.mem, blob, &len, &err), err);
    CHECK_OK_ERR(dp_dev_open("shm", &(dp_dev_options){.active_side_only = 1}, &dev, &err), err);
    stingy s = {0};
    CHECK_OK_ERR(dp_server_create(dev, &(dp_server_config){.mode = DP_WAIT_ADAPTIVE}, blob, len, &s.server, &err), err);
    dp_server_set_functions(s.server, table, 1);
    len = sizeof blob;
    CHECK_OK_ERR(dp_server_blob(s.server, blob, &len, &err), err);
    CHECK_OK_ERR(dp_side_decode(blob, len, DP_ROLE_WORKER, DP_PROVIDER_SHM, &worker, &err), err);
    CHECK_OK_ERR(dp_qp_connect(e.qp, worker.qp_blob, worker.qp_len, &err), err);

    dp_request h = {.generation = 7, .call_id = 1, .capacity = 1};
    const uint8_t *words = (const uint8_t *)&h + DP_REQ_LONG - DP_REQ_SHORT;
    memcpy(local_bytes(&e), words, DP_REQ_SHORT);
    dp_sge sge = local_sge(&e, 0, DP_REQ_SHORT);
    end_write_imm(&e, &sge, 1, worker.addr + dp_slot_payload(&l, 0) - DP_REQ_SHORT, worker.rkey, dp_imm(0, 1), 0, 0);
    t_peer p;
    t_peer_start(&p, false, serve_stingy, &s);
    t_sleep_ms(50); /* by now it waits for room; if not, it stops anyway */
    int64_t t0 = dp_now_ns();
    dp_server_stop(s.server);
    t_sync(p.sock);
    CHECK_STATUS(s.status, DP_OK);
    CHECKF(s.ended - t0 < 1000000000, "stopped after %lld ms", (long long)(s.ended - t0) / 1000000);
    t_peer_join(&p);
    dp_server_destroy(s.server);
    dp_dev_close(dev);
    end_close(&e);
}

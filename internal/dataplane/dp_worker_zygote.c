/* Messages, the zygote's loop, cloning. */
#include "dp_worker.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x00001000
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif

/* Descriptors of one packet that are received, to be closed if they do not belong to a SPAWN. The kernel closes any
 * others and sets MSG_CTRUNC. */
#define FDS_TAKEN 16

/* ---- messages ---- */

int dp_msg_send_fds(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, const int *fds, int n) {
    dp_msg_head head = {DP_MSG_MAGIC, DP_WIRE_VERSION, type, id, len};
    struct iovec iov[2] = {{&head, sizeof head}, {(void *)body, len}};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(DP_MSG_FDS_MAX * sizeof(int))];
    } control;
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = len ? 2 : 1};
    if (n > 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE((size_t)n * sizeof *fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)n * sizeof *fds);
        memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof *fds);
    }
    for (;;) {
        if (sendmsg(sock, &m, MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

/* Messages without a descriptor use send(): a sealed worker may not use sendmsg(), which could pass on its device. */
int dp_msg_send(int sock, uint16_t type, uint32_t id, const void *body, uint32_t len, int fd) {
    if (fd >= 0)
        return dp_msg_send_fds(sock, type, id, body, len, &fd, 1);
    unsigned char packet[DP_MSG_MAX];
    dp_msg_head head = {DP_MSG_MAGIC, DP_WIRE_VERSION, type, id, len};
    if (len > sizeof packet - sizeof head)
        return EMSGSIZE;
    memcpy(packet, &head, sizeof head);
    if (len)
        memcpy(packet + sizeof head, body, len);
    for (;;) {
        if (send(sock, packet, sizeof head + len, MSG_NOSIGNAL) >= 0)
            return 0;
        if (errno != EINTR)
            return errno;
    }
}

static int send_failure(int sock, uint16_t type, uint32_t id, int status, const char *text, const int *fds, int n_fds) {
    char body[DP_MSG_MAX - sizeof(dp_msg_head)];
    int32_t st = status;
    size_t n = strlen(text);
    if (n > sizeof body - sizeof st)
        n = sizeof body - sizeof st;
    memcpy(body, &st, sizeof st);
    memcpy(body + sizeof st, text, n);
    uint32_t len = (uint32_t)(sizeof st + n);
    return n_fds ? dp_msg_send_fds(sock, type, id, body, len, fds, n_fds) : dp_msg_send(sock, type, id, body, len, -1);
}

int dp_msg_send_failure(int sock, uint16_t type, uint32_t id, int status, const char *text) {
    return send_failure(sock, type, id, status, text, NULL, 0);
}

typedef struct packet {
    union {
        dp_msg_head head;
        unsigned char bytes[DP_MSG_MAX];
    };
    size_t len;
    bool cut; /* longer than DP_MSG_MAX, or more descriptors than FDS_TAKEN */
    int fds[FDS_TAKEN];
    int n_fds;
} packet;

static void packet_close(packet *p) {
    for (int i = 0; i < p->n_fds; i++)
        close(p->fds[i]);
    p->n_fds = 0;
}

/* 1: a packet, 0: the socket closed, negative: -errno. */
static int packet_recv(int sock, packet *p) {
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(FDS_TAKEN * sizeof(int))];
    } control;
    struct iovec iov = {p->bytes, sizeof p->bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do
        n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    p->len = (size_t)n;
    p->cut = m.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    p->n_fds = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < got && p->n_fds < FDS_TAKEN; i++)
            memcpy(&p->fds[p->n_fds++], CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof(int));
    }
    /* An empty packet with descriptors is not the end of file, but no peer sends one. */
    return n > 0 || p->n_fds > 0;
}

/* ---- validation ---- */

static bool all_zero(const void *from, size_t n) {
    const unsigned char *b = from;
    while (n)
        if (b[--n])
            return false;
    return true;
}

static int check_range(const char *what, int64_t v, int64_t low, int64_t high, dp_error *err) {
    if (v < low || v > high)
        return dp_fail(err, DP_INVALID, 0, "spawn: %s %lld not in %lld..%lld", what, (long long)v, (long long)low,
                       (long long)high);
    return DP_OK;
}

static int check_device(const char *device, size_t room, dp_error *err) {
    size_t n = strnlen(device, room);
    if (n == room)
        return dp_fail(err, DP_INVALID, 0, "spawn: device name is longer than %zu bytes", room - 1);
    for (size_t i = 0; i < n; i++)
        if (device[i] <= ' ' || device[i] > '~')
            return dp_fail(err, DP_INVALID, 0, "spawn: byte %zu of the device name is %#x", i,
                           (unsigned)(unsigned char)device[i]);
    if (!all_zero(device + n, room - n))
        return dp_fail(err, DP_INVALID, 0, "spawn: bytes after the end of the device name");
    return DP_OK;
}

/* Checks a PREPARE: everything that a pooled worker needs, and no field of a lease. */
static int check_prepare(const dp_msg_spawn *m, dp_error *err) {
    if (m->n_functions || m->blob_len || m->memory_limit || m->channel_depth || m->channel_eager || m->channel_bulk ||
        !all_zero(m->cpus, sizeof m->cpus) || !all_zero(m->blob, sizeof m->blob))
        return dp_fail(err, DP_INVALID, 0, "prepare: the message has a lease's functions, blob, channel, memory limit or CPUs");
    if (check_range("provider", m->provider, DP_PROVIDER_SHM, DP_PROVIDER_VERBS, err) != DP_OK ||
        check_range("depth", m->max_depth, 0, DP_DEPTH_MAX, err) != DP_OK)
        return DP_INVALID;
    bool sizes = m->max_eager && m->max_eager <= DP_EAGER_MAX && m->max_eager % DP_CACHE_LINE == 0 && m->max_bulk <= DP_BULK_MAX &&
                 m->max_bulk % DP_BULK_UNIT == 0;
    if (m->max_depth && !sizes)
        return dp_fail(err, DP_INVALID, 0, "prepare: eager size %u, bulk size %llu", m->max_eager, (unsigned long long)m->max_bulk);
    return check_device(m->device, sizeof m->device, err);
}

static int check_spawn(const dp_msg_spawn *m, dp_error *err) {
    const struct {
        const char *what;
        int64_t v, low, high;
    } ranges[] = {
        {"provider", m->provider, DP_PROVIDER_SHM, DP_PROVIDER_VERBS},
        {"wait mode", m->wait_mode, DP_WAIT_ADAPTIVE, DP_WAIT_WARM},
        {"reserved byte", m->pad0, 0, 0},
        {"reserved word", m->pad1, 0, 0},
        {"channel depth", m->channel_depth, 0, DP_DEPTH_MAX},
        {"channel eager size", m->channel_eager, 0, DP_EAGER_MAX},
        {"GID index", m->gid_index, -1, 255},
        {"P_Key index", m->pkey_index, 0, 65535},
        {"traffic class", m->traffic_class, 0, 255},
        {"service level", m->service_level, 0, 15},
        {"MTU", m->mtu, 0, 4096},
        {"depth limit", m->max_depth, 0, DP_DEPTH_MAX},
        {"eager limit", m->max_eager, 0, DP_EAGER_MAX},
        {"function count", m->n_functions, 1, DP_FUNCTIONS_MAX},
        {"blob length", m->blob_len, 1, DP_CHANNEL_BLOB_MAX},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (check_range(ranges[i].what, ranges[i].v, ranges[i].low, ranges[i].high, err) != DP_OK)
            return DP_INVALID;
    if (m->channel_bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "spawn: channel bulk size %llu not in 0..%llu", (unsigned long long)m->channel_bulk,
                       (unsigned long long)DP_BULK_MAX);
    if (m->max_bulk > DP_BULK_MAX)
        return dp_fail(err, DP_INVALID, 0, "spawn: bulk limit %llu not in 0..%llu", (unsigned long long)m->max_bulk,
                       (unsigned long long)DP_BULK_MAX);
    if (!all_zero(m->blob + m->blob_len, sizeof m->blob - m->blob_len))
        return dp_fail(err, DP_INVALID, 0, "spawn: bytes after the end of the client's blob");
    return check_device(m->device, sizeof m->device, err);
}

static int check_head(const packet *p, dp_error *err) {
    if (p->len < sizeof(dp_msg_head))
        return dp_fail(err, DP_PROTOCOL, 0, "message of %zu bytes is shorter than its head of %zu", p->len,
                       sizeof(dp_msg_head));
    if (p->head.magic != DP_MSG_MAGIC)
        return dp_fail(err, DP_PROTOCOL, 0, "message begins with %#x, not %#x", p->head.magic, DP_MSG_MAGIC);
    if (p->head.version != DP_WIRE_VERSION)
        return dp_fail(err, DP_PROTOCOL, 0, "message of wire version %u, this is rfaas-worker of version %d",
                       p->head.version, DP_WIRE_VERSION);
    return DP_OK;
}

/* Checks the length and the number of descriptors: fds, and up to `more` additional ones. */
static int check_size(const packet *p, const char *what, size_t body, int fds, int more, dp_error *err) {
    if (p->cut)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: more than %d bytes or %d descriptors", what, DP_MSG_MAX, FDS_TAKEN);
    if (p->head.len != p->len - sizeof(dp_msg_head) || p->head.len != body)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: body of %zu bytes, %u announced, %zu needed", what, p->len - sizeof(dp_msg_head),
                       p->head.len, body);
    if (p->n_fds < fds || p->n_fds > fds + more)
        return dp_fail(err, DP_PROTOCOL, 0, "%s: %d descriptors, %d needed", what, p->n_fds, fds);
    return DP_OK;
}

/* Checks the head of a message to the zygote: a SPAWN or PREPARE. The body is not checked. */
static int check_packet(const packet *p, dp_error *err) {
    int st = check_head(p, err);
    if (st != DP_OK)
        return st;
    if (p->head.type != DP_MSG_SPAWN && p->head.type != DP_MSG_PREPARE)
        return dp_fail(err, DP_PROTOCOL, 0, "message of type %u, not SPAWN", p->head.type);
    int fds = p->head.type == DP_MSG_PREPARE ? DP_PREPARE_FDS : DP_SPAWN_FDS;
    return check_size(p, "spawn", sizeof(dp_msg_spawn), fds, DP_JOIN_FDS_MAX, err);
}

/* Checks an INSPECT or SYMBOLS. Its length depends on the number of offsets. */
static int check_inspect(const packet *p, dp_msg_inspect *m, dp_error *err) {
    const size_t fixed = offsetof(dp_msg_inspect, offsets);
    bool symbols = p->head.type == DP_MSG_SYMBOLS;
    memset(m, 0, sizeof *m);
    if (p->len >= sizeof p->head + fixed)
        memcpy(m, p->bytes + sizeof p->head, fixed);
    if (m->n_offsets > DP_ELF_OFFSETS_MAX || symbols != (m->n_offsets > 0))
        return dp_fail(err, DP_INVALID, 0, "inspect: %u offsets", m->n_offsets);
    int st = check_size(p, "inspect", fixed + m->n_offsets * sizeof *m->offsets, DP_LEASE_FDS, 0, err);
    if (st != DP_OK)
        return st;
    if (!m->cpu_seconds)
        return dp_fail(err, DP_INVALID, 0, "inspect: no processor time");
    memcpy(m->offsets, p->bytes + sizeof p->head + fixed, m->n_offsets * sizeof *m->offsets);
    return DP_OK;
}

static int check_task(const packet *p, dp_msg_task *task, dp_error *err) {
    int st = check_head(p, err);
    if (st != DP_OK)
        return st;
    task->type = p->head.type;
    if (task->type == DP_MSG_INSPECT || task->type == DP_MSG_SYMBOLS)
        return check_inspect(p, &task->inspect, err);
    if (task->type != DP_MSG_SPAWN)
        return dp_fail(err, DP_PROTOCOL, 0, "message of type %u, not SPAWN, INSPECT or SYMBOLS", task->type);
    st = check_size(p, "spawn", sizeof task->lease, DP_LEASE_FDS, 0, err);
    if (st != DP_OK)
        return st;
    memcpy(&task->lease, p->bytes + sizeof p->head, sizeof task->lease);
    return check_spawn(&task->lease, err);
}

int dp_msg_recv_task(int sock, dp_msg_task *task, int fds[DP_LEASE_FDS], dp_error *err) {
    packet p;
    int got = packet_recv(sock, &p);
    if (got <= 0 || (p.len == sizeof p.head && (p.head.type == DP_MSG_STOP || p.head.type == DP_MSG_FINISH))) {
        if (got > 0)
            packet_close(&p);
        return DP_CANCELLED;
    }
    int st = check_task(&p, task, err);
    if (st != DP_OK) {
        packet_close(&p);
        return st;
    }
    memcpy(fds, p.fds, DP_LEASE_FDS * sizeof *fds);
    return DP_OK;
}

/* ---- cloning ---- */

/* glibc keeps a thread's id in its struct pthread. Recursive, robust and priority-inheriting mutexes (and, before
 * 2.35, abort and raise) read it there. fork() updates it in the child by CLONE_CHILD_SETTID with the field's
 * address. A raw clone must do the same, but the address is private. So it is searched for: the only word that has
 * the thread's id at the same offset of struct pthread in two threads. The struct has more than 1 KiB in every glibc
 * since 2.17. */
#define TID_SCAN 1024

typedef struct tid_scan {
    bool fits[TID_SCAN / sizeof(pid_t)];
} tid_scan;

static void *tid_scan_thread(void *arg) {
    tid_scan *s = arg;
    pid_t tid = (pid_t)syscall(SYS_gettid);
    const pid_t *words = (const pid_t *)pthread_self();
    for (size_t i = 0; i < TID_SCAN / sizeof(pid_t); i++)
        s->fits[i] = s->fits[i] && words[i] == tid;
    return NULL;
}

/* Returns the address of the calling thread's field, or NULL. */
static pid_t *tid_field(void) {
    tid_scan scan;
    memset(&scan, 1, sizeof scan);
    tid_scan_thread(&scan);
    pthread_t other;
    if (pthread_create(&other, NULL, tid_scan_thread, &scan))
        return NULL;
    pthread_join(other, NULL);
    pid_t *found = NULL;
    for (size_t i = 0; i < TID_SCAN / sizeof(pid_t); i++) {
        if (!scan.fits[i])
            continue;
        if (found)
            return NULL;
        found = (pid_t *)pthread_self() + i;
    }
    return found;
}

/* The processes that are cloned for a worker: pidfds, -1 for none. */
typedef struct clones {
    pid_t pid; /* of the worker, or -errno */
    int worker;
    dp_sandbox_fds sandbox;
    int status; /* of the sandbox */
    dp_error err;
} clones;

typedef struct zygote {
    int sock;
    pid_t parent; /* executor */
    pid_t *tid;   /* see above */
    dp_sandbox *sandbox;
    const char *version;
    dp_spare spare;
    int own_pids;      /* the zygote's process namespace, -1 if it may not return there */
    clones *stem_says; /* shared with the stem, NULL where none is needed: see clone_sandboxed */
    void *robust; /* head of the list of robust mutexes: the kernel drops it in a child, and fork() sets it again */
    size_t robust_len;
} zygote;

/* struct clone_args of linux/sched.h, which older systems lack or have without its last word. */
typedef struct clone3_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
} clone3_args;
#define INTO_CGROUP 0x200000000ull

/* With CLONE_PARENT the exit signal is that of the zygote itself, which is SIGCHLD after execve. */
#define WORKER_FLAGS (CLONE_PARENT | CLONE_PIDFD | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID)

/* The child starts in a control group of version 2. Moving a process later waits for all processors, unless it has
 * one thread and moves itself: join_group. */
static pid_t clone_into(const zygote *z, int group, int *pidfd) {
    clone3_args a = {.flags = WORKER_FLAGS | INTO_CGROUP, .pidfd = (uintptr_t)pidfd, .child_tid = (uintptr_t)z->tid, .cgroup = (uint64_t)group};
    long pid = syscall(SYS_clone3, &a, sizeof a);
    return pid < 0 ? -errno : (pid_t)pid;
}

/* Moves the caller, which has one thread, into a control group: through "tasks" of version 1 immediately, through
 * "cgroup.procs" of version 2 in a few milliseconds. Returns 0 or an errno. */
static int join_group(int group) {
    int procs = openat(group, "cgroup.procs", O_WRONLY | O_CLOEXEC);
    int e = write(procs < 0 ? group : procs, "0", 1) < 0 ? errno : 0;
    if (procs >= 0)
        close(procs);
    return e;
}

/* Like fork(), but the child's parent is the spawner. Returns 0 in the child, the child's pid, or -errno. */
static pid_t clone_plain(const zygote *z, int *pidfd) {
#if defined(__x86_64__)
    long pid = syscall(SYS_clone, WORKER_FLAGS, NULL, pidfd, z->tid, 0);
#else /* aarch64, ppc64le, riscv64: the last two arguments are swapped */
    long pid = syscall(SYS_clone, WORKER_FLAGS, NULL, pidfd, 0, z->tid);
#endif
    return pid < 0 ? -errno : (pid_t)pid;
}

static bool is_directory(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
}

/* The directory among the files of control groups, -1 if there is none. */
static int group_directory(const dp_guard_files *files) {
    for (int i = 0; i < files->n_join; i++)
        if (is_directory(files->join[i]))
            return files->join[i];
    return -1;
}

/* Joins the control groups but one. Returns 0 or an errno, and says what has failed. */
static int join_groups(const dp_guard_files *files, int except, clones *c) {
    for (int i = 0; i < files->n_join; i++) {
        int e = files->join[i] == except ? 0 : join_group(files->join[i]);
        if (e) {
            c->status = dp_fail(&c->err, DP_FATAL, e, "sandbox: join the control group");
            return e;
        }
    }
    return 0;
}

/* Clones the worker into its control groups. The caller, the stem, first joins those that clone3 does not support.
 * Returns 0 in the worker, its pid, or -errno. */
static pid_t clone_into_groups(const zygote *z, const dp_guard_files *files, clones *c) {
    int directory = group_directory(files);
    int e = join_groups(files, directory, c);
    if (e)
        return -e;
    pid_t pid = directory < 0 ? -1 : clone_into(z, directory, &c->worker);
    if (pid < 0 && directory >= 0 && (e = join_group(directory))) /* a kernel before 5.7 */
        return -e;
    return pid < 0 ? clone_plain(z, &c->worker) : pid;
}

/* clone_sandboxed where the zygote may return from the process namespace that it makes for its children: no stem is
 * needed, which takes a third of the time of the clones. The worker itself joins the control groups that clone3 does
 * not support, before it does anything else; then c->status says whether that has failed. */
static pid_t clone_without_stem(const zygote *z, const dp_guard_files *files, clones *c) {
    int directory = group_directory(files);
    c->pid = -ECHILD;
    c->status = dp_sandbox_open(z->sandbox, files, &c->sandbox, &c->err);
    if (c->status == DP_OK) {
        c->pid = directory < 0 ? -1 : clone_into(z, directory, &c->worker);
        if (c->pid < 0) { /* no directory, or a kernel before 5.7 */
            directory = -1;
            c->pid = clone_plain(z, &c->worker);
        }
        if (c->pid == 0) {
            join_groups(files, directory, c);
            return 0;
        }
    }
    if (setns(z->own_pids, CLONE_NEWPID)) { /* was possible at the start */
        fprintf(stderr, "rfaas-worker: return to the own process namespace: %s\n", strerror(errno));
        _exit(DP_EXIT_ZYGOTE);
    }
    return c->pid;
}

/* The worker is in the process namespace of its guard. The zygote cannot make that namespace for its own children,
 * where it lacks the rights to return. So it clones a process in between, the stem, which makes the guard and
 * the worker and ends. The zygote waits meanwhile, as after vfork. It has the stem's descriptors, and reads from
 * shared memory what the stem has made. All three are children of the spawner. Guard and worker do not have the
 * shared memory. Returns 0 in the worker. */
static pid_t clone_sandboxed(const zygote *z, const dp_guard_files *files, clones *c) {
    if (z->own_pids >= 0)
        return clone_without_stem(z, files, c);
    clones *shared = z->stem_says;
    c->pid = -ECHILD;
    *shared = *c;
    long stem = syscall(SYS_clone, CLONE_PARENT | CLONE_VFORK | CLONE_FILES, NULL, NULL, 0, 0);
    if (stem == 0) {
        prctl(PR_SET_NAME, "rfaas-guard");
        c->sandbox.stem = (int)syscall(SYS_pidfd_open, getpid(), 0);
        c->status = madvise(shared, sizeof *shared, MADV_DONTFORK) ? dp_fail(&c->err, DP_FATAL, errno, "sandbox: keep the zygote's memory")
                                                                   : dp_sandbox_open(z->sandbox, files, &c->sandbox, &c->err);
        if (c->status == DP_OK)
            c->pid = clone_into_groups(z, files, c);
        if (c->pid == 0) {
            return 0;
        }
        *shared = *c;
        _exit(0);
    }
    *c = *shared;
    if (stem < 0)
        c->pid = (pid_t)-errno;
    return c->pid;
}

static void close_clones(const clones *c) {
    const int fds[] = {c->worker, c->sandbox.stem, c->sandbox.guard, c->sandbox.ctl};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* Reports to the spawner the processes to reap: the worker, and in a sandbox the guard and the stem. */
static int answer(const zygote *z, uint32_t id, clones *c) {
    dp_error err = c->err;
    int st = c->status;
    if (st == DP_OK && c->pid < 0)
        st = dp_fail(&err, DP_FATAL, -c->pid, "clone worker %u", id);
    int e = 0;
    if (st == DP_OK) {
        uint32_t body = (uint32_t)c->pid;
        const int fds[DP_MSG_FDS_MAX] = {c->worker, c->sandbox.guard, c->sandbox.stem};
        e = dp_msg_send_fds(z->sock, DP_MSG_SPAWNED, id, &body, sizeof body, fds, c->sandbox.guard < 0 ? 1 : c->sandbox.stem < 0 ? 2 : 3);
        if (!e)
            return 0;
        syscall(SYS_pidfd_send_signal, c->worker, SIGKILL, NULL, 0);
        st = dp_fail(&err, DP_FATAL, e, "pass the descriptor of worker %u", id);
    }
    /* The processes that the spawner reaps, in this order: a guard ends only when its worker was reaped. */
    int reap[DP_MSG_FDS_MAX], n = 0;
    if (c->worker >= 0)
        reap[n++] = c->worker;
    if (c->sandbox.stem >= 0)
        reap[n++] = c->sandbox.stem;
    if (c->sandbox.guard >= 0) {
        syscall(SYS_pidfd_send_signal, c->sandbox.guard, SIGKILL, NULL, 0);
        reap[n++] = c->sandbox.guard;
    }
    return send_failure(z->sock, DP_MSG_SPAWN_FAILED, id, st, err.msg, reap, n);
}

/* Answers one SPAWN or PREPARE. Returns 0, or the errno with which the executor's socket failed. */
static int spawn(zygote *z, packet *p) {
    uint32_t id = p->len >= sizeof p->head ? p->head.id : 0;
    dp_msg_spawn m;
    dp_error err;
    int st = check_packet(p, &err);
    if (st == DP_OK) {
        memcpy(&m, p->bytes + sizeof p->head, sizeof m);
        st = p->head.type == DP_MSG_PREPARE ? check_prepare(&m, &err) : check_spawn(&m, &err);
    }
    if (st != DP_OK)
        return dp_msg_send_failure(z->sock, DP_MSG_SPAWN_FAILED, id, st, err.msg);

    dp_ahead *memory = dp_spare_take(&z->spare, &m);
    /* No signal may arrive in the child while it still has the zygote's state. The worker unblocks signals. */
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    int needed = p->head.type == DP_MSG_PREPARE ? DP_PREPARE_FDS : DP_SPAWN_FDS;
    clones c = {.worker = -1, .sandbox = DP_SANDBOX_NONE, .status = DP_OK};
    if (z->sandbox->parts & DP_SANDBOX_PIDS) {
        dp_guard_files files = {.alive = p->fds[0], .join = p->fds + needed, .n_join = p->n_fds - needed, .memory = memory};
        c.pid = clone_sandboxed(z, &files, &c);
    } else {
        c.pid = clone_plain(z, &c.worker);
    }
    if (c.pid == 0) {
        syscall(SYS_set_robust_list, z->robust, z->robust_len);
        if (c.status != DP_OK) {
            dp_msg_send_failure(p->fds[0], DP_MSG_FAILED, id, c.status, c.err.msg);
            _exit(DP_EXIT_FAILED);
        }
        dp_worker_fds fds = {p->fds[0], p->fds[1], p->fds[2], p->fds[3], p->fds[4], c.sandbox};
        if (p->head.type == DP_MSG_PREPARE)
            fds = (dp_worker_fds){p->fds[0], -1, -1, p->fds[1], p->fds[2], c.sandbox};
        dp_worker_live(id, &m, &fds, z->parent, z->sandbox, memory);
    }
    sigprocmask(SIG_SETMASK, &old, NULL);
    int e = answer(z, id, &c);
    close_clones(&c);
    return e;
}

/* ---- loop ---- */

static int zygote_start(zygote *z) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* If the executor has died before that, the socket is closed and the loop ends at once. */
    z->parent = getppid();
    prctl(PR_SET_NAME, "rfaas-zygote");
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_IGN); /* the executor decides; workers set it back */
    z->tid = tid_field();
    if (!z->tid) {
        fprintf(stderr, "rfaas-worker: cannot find where this C library keeps a thread's id\n");
        return DP_EXIT_ZYGOTE;
    }
    if (syscall(SYS_get_robust_list, 0, &z->robust, &z->robust_len)) {
        fprintf(stderr, "rfaas-worker: get_robust_list: %s\n", strerror(errno));
        return DP_EXIT_ZYGOTE;
    }
    dp_crash_prepare();
    /* The zygote returns to this namespace after it has made one for its children. That takes the same right as this. */
    z->own_pids = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    if (z->own_pids >= 0 && (z->sandbox->without & DP_SANDBOX_WITHOUT_RETURN || setns(z->own_pids, CLONE_NEWPID))) {
        close(z->own_pids);
        z->own_pids = -1;
    }
    struct {
        uint32_t numbers[3];
        char text[DP_SANDBOX_TEXT_MAX + DP_VERSION_MAX]; /* missing parts, NUL, version */
    } hello = {{DP_WIRE_VERSION, (uint32_t)dp_verbs_preload(), 0}, ""};
    dp_sandbox_prepare(z->sandbox, hello.numbers[1] > 0);
    hello.numbers[2] = z->sandbox->parts;
    if (z->sandbox->parts & DP_SANDBOX_PIDS && z->own_pids < 0)
        z->stem_says = mmap(NULL, sizeof *z->stem_says, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (z->stem_says == MAP_FAILED) {
        fprintf(stderr, "rfaas-worker: memory: %s\n", strerror(errno));
        return DP_EXIT_ZYGOTE;
    }
    size_t text = strlen(z->sandbox->missing) + 1, version = strnlen(z->version, DP_VERSION_MAX);
    memcpy(hello.text, z->sandbox->missing, text);
    memcpy(hello.text + text, z->version, version);
    text += version;
    int e = dp_msg_send(z->sock, DP_MSG_HELLO, 0, &hello, (uint32_t)(sizeof hello.numbers + text), -1);
    if (e) {
        fprintf(stderr, "rfaas-worker: descriptor %d: %s\n", z->sock, strerror(e));
        return DP_EXIT_ZYGOTE;
    }
    return 0;
}

int dp_zygote_run(int sock, dp_sandbox *sandbox, const char *version) {
    zygote z = {.sock = sock, .sandbox = sandbox, .version = version};
    int st = zygote_start(&z);
    if (st)
        return st;
    for (;;) {
        packet p;
        dp_spare_fill(&z.spare, sock);
        int got = packet_recv(sock, &p);
        if (got == 0)
            return DP_EXIT_STOPPED;
        if (got < 0) {
            fprintf(stderr, "rfaas-worker: receive from the executor: %s\n", strerror(-got));
            return DP_EXIT_ZYGOTE;
        }
        int e = spawn(&z, &p);
        packet_close(&p);
        if (e) {
            if (e != EPIPE && e != ECONNRESET)
                fprintf(stderr, "rfaas-worker: send to the executor: %s\n", strerror(e));
            return e == EPIPE || e == ECONNRESET ? DP_EXIT_STOPPED : DP_EXIT_ZYGOTE;
        }
    }
}

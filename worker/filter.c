/* The system call filter of a sealed worker. A call that is not listed here fails with EPERM. A call that is newer than this
 * list fails with ENOSYS, so that libraries fall back to an older one. The list allows what computing needs: memory, threads,
 * signals, visible files, child programs, clocks. It refuses new sockets, namespaces, mounts, tracing, keys, io_uring, BPF, and
 * commands to devices. Some calls are allowed with some arguments only; the comment at each rule says why.
 *
 * The program is a binary search over the numbers of the system calls. When a filter is installed, the kernel (5.11 and newer) runs
 * it once for each number, to remember which calls are allowed whatever their arguments are. A search makes that faster than
 * a list of comparisons (130 instead of 340 us, kernel 6.18), and the calls whose arguments are checked cost 8 comparisons instead of 200.
 * SPEC_ALLOW keeps older kernels from slowing down all loads of the process. */
#include "sandbox.h"

#include <asm/ioctls.h>
#include <asm/termbits.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/membarrier.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#elif defined(__powerpc64__)
#define ARCH (AUDIT_ARCH_PPC64 | __AUDIT_ARCH_LE)
#elif defined(__riscv)
#define ARCH AUDIT_ARCH_RISCV64
#else
#error "name this architecture for seccomp"
#endif

#ifndef SECCOMP_FILTER_FLAG_SPEC_ALLOW
#define SECCOMP_FILTER_FLAG_SPEC_ALLOW (1UL << 2)
#endif
#ifndef SECCOMP_RET_KILL_PROCESS
#define SECCOMP_RET_KILL_PROCESS 0x80000000U
#endif
#define NEWEST 450 /* the newest call that was considered for this list */

/* Calls allowed with any arguments. The numbers are those of this architecture. Its headers lack calls that it does not have. */
static const int allowed[] = {
    SYS_futex, SYS_read, SYS_write, SYS_ppoll,
#ifdef SYS_poll
    SYS_poll,
#endif
    SYS_clock_nanosleep, SYS_nanosleep, SYS_clock_gettime, SYS_clock_getres, SYS_gettimeofday, SYS_sched_yield, SYS_recvfrom,
    /* memory */
    SYS_brk, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_mincore, SYS_msync, SYS_mlock, SYS_mlock2, SYS_munlock,
    SYS_mlockall, SYS_munlockall, SYS_mbind, SYS_get_mempolicy, SYS_set_mempolicy, SYS_rseq,
#ifdef SYS_pkey_alloc
    SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect,
#endif
    SYS_shmat, SYS_shmdt, SYS_shmctl, SYS_semget, SYS_semop, SYS_semctl, SYS_semtimedop, SYS_msgget, SYS_msgsnd, SYS_msgrcv,
    SYS_msgctl,
    /* threads, processes */
    SYS_set_robust_list, SYS_get_robust_list, SYS_set_tid_address, SYS_gettid, SYS_getpid, SYS_getppid, SYS_getpgid, SYS_getsid,
    SYS_setpgid, SYS_setsid, SYS_exit, SYS_exit_group, SYS_wait4, SYS_waitid, SYS_execve, SYS_execveat, SYS_sched_getaffinity,
    SYS_sched_setaffinity, SYS_sched_getparam, SYS_sched_getscheduler, SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_getcpu,
    SYS_getpriority, SYS_getrusage, SYS_times, SYS_getrlimit, SYS_setrlimit, SYS_sysinfo, SYS_uname,
    SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid, SYS_getgroups, SYS_getresuid, SYS_getresgid, SYS_capget, SYS_umask, SYS_getrandom,
#ifdef SYS_pidfd_open
    SYS_pidfd_open, SYS_pidfd_send_signal,
#endif
#ifdef SYS_fork
    SYS_fork, SYS_vfork, SYS_getpgrp, SYS_arch_prctl, SYS_pause, SYS_alarm, SYS_time,
#endif
    /* signals, timers */
    SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigpending, SYS_rt_sigsuspend, SYS_rt_sigtimedwait, SYS_rt_sigqueueinfo,
    SYS_rt_tgsigqueueinfo, SYS_sigaltstack, SYS_kill, SYS_tkill, SYS_tgkill, SYS_restart_syscall, SYS_getitimer, SYS_setitimer,
    SYS_timer_create, SYS_timer_settime, SYS_timer_gettime, SYS_timer_getoverrun, SYS_timer_delete, SYS_timerfd_create,
    SYS_timerfd_settime, SYS_timerfd_gettime, SYS_signalfd4, SYS_eventfd2,
    /* files */
    SYS_openat, SYS_close, SYS_pread64, SYS_pwrite64, SYS_readv, SYS_writev, SYS_preadv, SYS_pwritev, SYS_preadv2, SYS_pwritev2, SYS_lseek,
    SYS_fstat, SYS_statx, SYS_faccessat, SYS_readlinkat, SYS_getdents64, SYS_fstatfs, SYS_statfs, SYS_flock, SYS_fsync,
    SYS_fdatasync, SYS_sync_file_range, SYS_ftruncate, SYS_truncate, SYS_fallocate, SYS_fadvise64, SYS_readahead, SYS_getcwd, SYS_chdir,
    SYS_fchdir, SYS_mkdirat, SYS_unlinkat, SYS_linkat, SYS_symlinkat, SYS_renameat2, SYS_fchmod, SYS_fchmodat, SYS_utimensat, SYS_dup,
    SYS_dup3, SYS_pipe2, SYS_sendfile, SYS_splice, SYS_tee, SYS_copy_file_range, SYS_pselect6, SYS_epoll_create1, SYS_epoll_ctl,
    SYS_epoll_pwait, SYS_getxattr, SYS_lgetxattr, SYS_fgetxattr, SYS_listxattr, SYS_llistxattr, SYS_flistxattr,
#ifdef SYS_close_range
    SYS_close_range,
#endif
#ifdef SYS_faccessat2
    SYS_faccessat2,
#endif
#ifdef SYS_openat2
    SYS_openat2,
#endif
#ifdef SYS_newfstatat
    SYS_newfstatat,
#endif
#ifdef SYS_renameat
    SYS_renameat,
#endif
#ifdef SYS_open
    SYS_open, SYS_creat, SYS_stat, SYS_lstat, SYS_access, SYS_readlink, SYS_getdents, SYS_mkdir, SYS_rmdir, SYS_unlink, SYS_link, SYS_symlink,
    SYS_rename, SYS_chmod, SYS_utime, SYS_utimes, SYS_dup2, SYS_pipe, SYS_select, SYS_epoll_create, SYS_epoll_wait, SYS_eventfd,
#endif
    /* on the sockets that the worker already has, and on socket pairs */
    SYS_recvmsg, SYS_shutdown, SYS_getsockname, SYS_getpeername, SYS_getsockopt, 
};

/* ---- calls whose arguments are checked ---- */

typedef enum rule_kind { ONLY /* these values */, NONE_OF /* these values */, WITHOUT /* these bits */ } rule_kind;

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif
#ifndef MADV_SOFT_OFFLINE
#define MADV_SOFT_OFFLINE 101
#endif
#ifndef MADV_HWPOISON
#define MADV_HWPOISON 100
#endif

/* Refuses children of the executor and children in another namespace. CLONE_NEWTIME needs no bit: clone treats it as
 * part of the signal number, and only unshare and clone3 support it. */
#define CLONE_REFUSED                                                                                                                  \
    (CLONE_PARENT | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET |         \
     CLONE_PTRACE)

#define RULE(call, argument, kind, ...)                                                                                                \
    { call, argument, kind, sizeof(uint32_t[]){__VA_ARGS__} / sizeof(uint32_t), (const uint32_t[]){__VA_ARGS__} }

/* A call in this table is allowed if all its rules hold. A rule sees the low 32 bits of an argument, as these calls
 * do. */
static const struct rule {
    int call, argument;
    rule_kind kind;
    int n;
    const uint32_t *values;
} rules[] = {
    RULE(SYS_ioctl, 1, ONLY, /* first: build_rest */ TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX),
    RULE(SYS_prctl, 0, ONLY, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, PR_GET_DUMPABLE, PR_SET_TIMERSLACK, PR_GET_TIMERSLACK,
         PR_GET_NO_NEW_PRIVS, PR_GET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_THP_DISABLE, PR_GET_THP_DISABLE, PR_CAPBSET_READ),
    RULE(SYS_personality, 0, ONLY, PER_LINUX, 0xffffffffu /* query */),
    RULE(SYS_clone, 0, WITHOUT, CLONE_REFUSED),
    /* Huge pages that the node has reserved: most control groups do not count them. mremap cannot make a mapping huge. */
    RULE(SYS_mmap, 3, WITHOUT, MAP_HUGETLB),
    RULE(SYS_memfd_create, 1, WITHOUT, MFD_HUGETLB),
    RULE(SYS_shmget, 2, WITHOUT, SHM_HUGETLB),
    /* Merged pages reveal to one process what another has in memory. */
    RULE(SYS_madvise, 2, NONE_OF, MADV_MERGEABLE, MADV_HWPOISON, MADV_SOFT_OFFLINE),
    /* Without the commands that interrupt all processors of the node. */
    RULE(SYS_membarrier, 0, ONLY, MEMBARRIER_CMD_QUERY, MEMBARRIER_CMD_PRIVATE_EXPEDITED, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED,
         MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 1 << 7, 1 << 8 /* rseq */),
    /* Only its own limits and priority: without a process namespace it could reach those of the executor's user. */
    RULE(SYS_prlimit64, 0, ONLY, 0),
    RULE(SYS_setpriority, 0, ONLY, PRIO_PROCESS),
    RULE(SYS_setpriority, 1, ONLY, 0),
    /* Without owners that get signals from a file (F_SETOWN, F_SETSIG), leases on files, and directory notification. */
    RULE(SYS_fcntl, 1, ONLY, F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_SETLK, F_SETLKW, F_OFD_GETLK,
         F_OFD_SETLK, F_OFD_SETLKW, F_SETPIPE_SZ, F_GETPIPE_SZ, F_ADD_SEALS, F_GET_SEALS),
    /* Sockets. An address is not allowed: a pair of datagram sockets could reach any abstract address, through which workers in
     * the same network namespace could communicate. Urgent data on unix sockets has had kernel bugs, and functions do not need
     * it. Options: those of socket pairs, without programs (SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_LOCK_FILTER). */
    RULE(SYS_socketpair, 0, ONLY, AF_UNIX),
    RULE(SYS_sendto, 5, ONLY, 0),
    RULE(SYS_sendto, 3, WITHOUT, MSG_OOB),
    RULE(SYS_setsockopt, 1, ONLY, SOL_SOCKET),
    RULE(SYS_setsockopt, 2, ONLY, SO_RCVTIMEO, SO_SNDTIMEO, SO_RCVBUF, SO_SNDBUF, SO_RCVLOWAT, SO_REUSEADDR, SO_KEEPALIVE, SO_PASSCRED),
    /* With DP_FILTER_SOCKETS these replace the rules above. A system call's first rule here must not directly follow its last rule above.
     * A filter cannot see the address of a sendmsg, which is in memory, so there must be no datagram sockets. */
#define SOCKET_PAIRS(type) type, (type) | SOCK_CLOEXEC, (type) | SOCK_NONBLOCK, (type) | SOCK_CLOEXEC | SOCK_NONBLOCK
    RULE(SYS_socketpair, 0, ONLY, AF_UNIX),
    RULE(SYS_socketpair, 1, ONLY, SOCKET_PAIRS(SOCK_STREAM), SOCKET_PAIRS(SOCK_SEQPACKET)),
    RULE(SYS_sendmsg, 2, WITHOUT, MSG_OOB | MSG_FASTOPEN),
    RULE(SYS_setsockopt, 1, ONLY, SOL_SOCKET, IPPROTO_TCP),
    RULE(SYS_setsockopt, 2, ONLY, SO_RCVTIMEO, SO_SNDTIMEO, SO_RCVBUF, SO_SNDBUF, SO_RCVLOWAT, SO_REUSEADDR, SO_KEEPALIVE, SO_PASSCRED, TCP_NODELAY),
};
enum { N_RULES = sizeof rules / sizeof *rules, N_SOCKET_RULES = 5, N_USUAL_RULES = N_RULES - N_SOCKET_RULES };

/* DP_FILTER_SOCKETS: libfabric's listening socket takes the client's connection. No new socket can be made, bound or connected. */
static const int accepting[] = {
    SYS_accept4,
#ifdef SYS_accept
    SYS_accept,
#endif
};

/* Calls that a pooled worker needs to connect and to seal itself, and never afterwards. */
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_restrict_self 446
#endif
static const int connecting[] = {SYS_connect, SYS_sendmsg, SYS_landlock_create_ruleset, SYS_landlock_restrict_self, SYS_seccomp};

/* ---- the program ---- */

#define PROGRAM_MAX 1024
typedef struct program {
    struct sock_filter code[PROGRAM_MAX];
    unsigned n;
} program;

static void add(program *p, uint16_t code, uint32_t k, unsigned yes, unsigned no) {
    if (p->n < PROGRAM_MAX)
        p->code[p->n] = (struct sock_filter){code, (uint8_t)yes, (uint8_t)no, k};
    p->n++;
}

static void load(program *p, size_t offset) { add(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
static void equal(program *p, uint32_t k, unsigned yes, unsigned no) { add(p, BPF_JMP | BPF_JEQ | BPF_K, k, yes, no); }
static void give(program *p, uint32_t action) { add(p, BPF_RET | BPF_K, action, 0, 0); }

/* Adds one rule: it continues if the rule holds; otherwise the call fails with EPERM. */
static void check(program *p, const struct rule *r) {
    load(p, offsetof(struct seccomp_data, args) + 8u * (unsigned)r->argument);
    unsigned left = (unsigned)r->n;
    for (int i = 0; i < r->n; i++, left--) {
        if (r->kind == WITHOUT)
            add(p, BPF_JMP | BPF_JSET | BPF_K, r->values[i], 0, 1);
        else if (r->kind == ONLY)
            equal(p, r->values[i], left, 0);
        else
            equal(p, r->values[i], left - 1, left == 1);
    }
    give(p, SECCOMP_RET_ERRNO | EPERM);
}

/* The decision for a call: one of these, or RULES plus the index of its first rule. */
enum { ALLOWED, NOT_ALLOWED, NOT_THERE, RULES };

static void decide(program *p, int what) {
    static const uint32_t actions[] = {SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ERRNO | ENOSYS};
    if (what < RULES) {
        give(p, actions[what]);
        return;
    }
    const struct rule *r = &rules[what - RULES];
    for (int call = r->call; r < rules + N_RULES && r->call == call; r++)
        check(p, r);
    give(p, SECCOMP_RET_ALLOW);
}

/* Consecutive numbers with the same decision. */
typedef struct run {
    uint32_t first;
    int what;
} run;

/* Adds a binary search for the run that contains the call's number, among n runs. */
static void search(program *p, const run *r, int n) {
    if (n == 1) {
        decide(p, r->what);
        return;
    }
    int half = n / 2;
    unsigned jump = p->n;
    add(p, BPF_JMP | BPF_JGE | BPF_K, r[half].first, 0, 0);
    search(p, r, half);
    unsigned over = p->n - jump - 1;
    if (p->n >= PROGRAM_MAX) {
        p->n = PROGRAM_MAX + 1; /* refused */
        return;
    }
    if (over <= UINT8_MAX) {
        p->code[jump].jt = (uint8_t)over;
    } else { /* a conditional jump does not reach that far */
        memmove(&p->code[jump + 2], &p->code[jump + 1], over * sizeof *p->code);
        p->code[jump].jf = 1;
        p->code[jump + 1] = (struct sock_filter){BPF_JMP | BPF_JA, 0, 0, over};
        p->n++;
    }
    search(p, r + half, n - half);
}

/* DP_FILTER_REST: refuses the few calls that DP_FILTER_CONNECTS has left open. */
static void build_rest(program *p, bool fixed_cpus) {
    if (fixed_cpus) { /* the worker is already bound to its lease's CPUs */
        equal(p, SYS_sched_setaffinity, 0, 1);
        give(p, SECCOMP_RET_ERRNO | EPERM);
    }
    for (size_t i = 0; i < sizeof connecting / sizeof *connecting; i++) {
        equal(p, (uint32_t)connecting[i], 0, 1);
        give(p, SECCOMP_RET_ERRNO | EPERM);
    }
    equal(p, SYS_ioctl, 1, 0);
    give(p, SECCOMP_RET_ALLOW);
    decide(p, RULES + 0);
}

static void build_list(program *p, dp_filter part, bool fixed_cpus, bool fixed_session) {
    bool connects = part == DP_FILTER_CONNECTS, sockets = part == DP_FILTER_SOCKETS;
    uint8_t what[NEWEST + 2]; /* the last is for all numbers above NEWEST */
    memset(what, NOT_ALLOWED, sizeof what);
    what[NEWEST + 1] = NOT_THERE;
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++)
        what[allowed[i]] = ALLOWED;
    for (int i = N_USUAL_RULES - 1; i >= 0; i--) /* backwards, so that the first rule of each call remains */
        what[rules[i].call] = (uint8_t)(RULES + i);
    for (int i = N_RULES - 1; i >= N_USUAL_RULES && sockets; i--)
        what[rules[i].call] = (uint8_t)(RULES + i);
    for (size_t i = 0; i < sizeof accepting / sizeof *accepting && sockets; i++)
        what[accepting[i]] = ALLOWED;
    if (fixed_cpus && !connects) /* a worker that connects later still has to bind itself to its CPUs */
        what[SYS_sched_setaffinity] = NOT_ALLOWED;
    if (fixed_session)
        what[SYS_setsid] = NOT_ALLOWED;
    if (connects) {
        for (size_t i = 0; i < sizeof connecting / sizeof *connecting; i++)
            what[connecting[i]] = ALLOWED;
        what[SYS_ioctl] = ALLOWED; /* the device takes commands */
    }
#ifdef SYS_clone3
    what[SYS_clone3] = NOT_THERE; /* its flags are in memory, which a filter cannot see: libraries fall back to clone */
#endif
    run runs[NEWEST + 2];
    int n = 0;
    for (uint32_t i = 0; i < NEWEST + 2; i++)
        if (!n || what[i] != runs[n - 1].what)
            runs[n++] = (run){i, what[i]};
    search(p, runs, n);
}

static void build(program *p, dp_filter part, bool fixed_cpus, bool fixed_session) {
    p->n = 0;
    load(p, offsetof(struct seccomp_data, arch));
    equal(p, ARCH, 1, 0);
    give(p, SECCOMP_RET_KILL_PROCESS);
    load(p, offsetof(struct seccomp_data, nr));
    if (part == DP_FILTER_REST)
        build_rest(p, fixed_cpus);
    else
        build_list(p, part, fixed_cpus, fixed_session);
}

static int install(program *p) {
    if (p->n > PROGRAM_MAX)
        return E2BIG;
    struct sock_fprog f = {(unsigned short)p->n, p->code};
    const unsigned long all_threads = SECCOMP_FILTER_FLAG_TSYNC;
    long st = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all_threads | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &f);
    if (st < 0 && errno == EINVAL) /* before 4.17 */
        st = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all_threads, &f);
    return st < 0 ? errno : st > 0 ? EBUSY : 0;
}

int dp_sandbox_filter(dp_filter part, bool fixed_cpus, bool fixed_session) {
    program p;
    build(&p, part, fixed_cpus, fixed_session);
    return install(&p);
}

int dp_sandbox_filter_reader(void) {
    static const int calls[] = {SYS_rt_sigreturn, SYS_exit_group};
    program p = {.n = 0};
    load(&p, offsetof(struct seccomp_data, arch));
    equal(&p, ARCH, 1, 0);
    give(&p, SECCOMP_RET_KILL_PROCESS);
    load(&p, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        equal(&p, (uint32_t)calls[i], 0, 1);
        give(&p, SECCOMP_RET_ALLOW);
    }
    equal(&p, SYS_sendto, 0, 3);
    load(&p, offsetof(struct seccomp_data, args) + 8u * 5u); /* length of the address: none allowed */
    equal(&p, 0, 0, 1);
    give(&p, SECCOMP_RET_ALLOW);
    give(&p, SECCOMP_RET_KILL_PROCESS);
    if (prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return errno;
    return install(&p);
}

bool dp_sandbox_filter_works(void) {
    uint32_t action = SECCOMP_RET_ERRNO;
    return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

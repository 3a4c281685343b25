/* The filter of system calls of a sealed worker: what is not listed fails with EPERM (calls that are newer than this list with
 * ENOSYS, so that libraries fall back to older ones). Allowed is what computing needs: memory, threads, signals, files that are
 * seen, programs of its own, clocks. Not allowed are new sockets, name spaces, mounts, tracing, keys, io_uring, BPF, and
 * commands to devices.
 *
 * The filter costs nothing where the fast path makes no system call, and where it does the kernel (5.11 and newer) knows by
 * number alone what is always allowed. SPEC_ALLOW keeps older kernels from slowing down the process' every load. */
#include "dp_worker_sandbox.h"

#include <asm/ioctls.h>
#include <asm/termbits.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/personality.h>
#include <sys/prctl.h>
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
#define NEWEST 450 /* numbers above it are the same on every architecture, and not looked at here */

/* Often used ones first. The numbers are those of this architecture; calls that it does not have are not in its headers. */
static const int allowed[] = {
    SYS_futex, SYS_read, SYS_write, SYS_ppoll,
#ifdef SYS_poll
    SYS_poll,
#endif
    SYS_clock_nanosleep, SYS_nanosleep, SYS_clock_gettime, SYS_clock_getres, SYS_gettimeofday, SYS_sched_yield, SYS_recvfrom,
    /* memory */
    SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_mincore, SYS_msync, SYS_mlock, SYS_mlock2, SYS_munlock,
    SYS_mlockall, SYS_munlockall, SYS_mbind, SYS_get_mempolicy, SYS_set_mempolicy, SYS_memfd_create, SYS_membarrier, SYS_rseq,
#ifdef SYS_pkey_alloc
    SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect,
#endif
    SYS_shmget, SYS_shmat, SYS_shmdt, SYS_shmctl, SYS_semget, SYS_semop, SYS_semctl, SYS_semtimedop, SYS_msgget, SYS_msgsnd, SYS_msgrcv,
    SYS_msgctl,
    /* threads, processes */
    SYS_set_robust_list, SYS_get_robust_list, SYS_set_tid_address, SYS_gettid, SYS_getpid, SYS_getppid, SYS_getpgid, SYS_getsid,
    SYS_setpgid, SYS_setsid, SYS_exit, SYS_exit_group, SYS_wait4, SYS_waitid, SYS_execve, SYS_execveat, SYS_sched_getaffinity,
    SYS_sched_setaffinity, SYS_sched_getparam, SYS_sched_getscheduler, SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_getcpu,
    SYS_getpriority, SYS_setpriority, SYS_getrusage, SYS_times, SYS_getrlimit, SYS_setrlimit, SYS_prlimit64, SYS_sysinfo, SYS_uname,
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
    SYS_fstat, SYS_statx, SYS_faccessat, SYS_readlinkat, SYS_getdents64, SYS_fstatfs, SYS_statfs, SYS_fcntl, SYS_flock, SYS_fsync,
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
    /* sockets that there are already, and pairs of its own */
    SYS_recvmsg, SYS_shutdown, SYS_getsockname, SYS_getpeername, SYS_getsockopt, SYS_setsockopt,
};

/* Calls of which only some values of one argument are allowed. */
static const unsigned terminals[] = {TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX};
#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif
static const unsigned process_options[] = {PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, PR_GET_DUMPABLE, PR_SET_TIMERSLACK, PR_GET_TIMERSLACK,
                                           PR_GET_NO_NEW_PRIVS, PR_GET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_THP_DISABLE, PR_GET_THP_DISABLE,
                                           PR_CAPBSET_READ};
static const unsigned pairs[] = {AF_UNIX};
/* The length of an address: to the peer alone. A pair of datagram sockets reaches any abstract address otherwise, by which workers
 * that share a network name space would meet. */
static const unsigned no_address[] = {0};
static const unsigned personalities[] = {PER_LINUX, 0xffffffffu};

static const struct {
    int call, argument, n;
    const unsigned *values;
} some_of[] = {
    {SYS_ioctl, 1, sizeof terminals / sizeof *terminals, terminals},
    {SYS_prctl, 0, sizeof process_options / sizeof *process_options, process_options},
    {SYS_socketpair, 0, 1, pairs},
    {SYS_sendto, 5, 1, no_address},
    {SYS_personality, 0, 2, personalities},
};

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif
/* A child of the executor's own or one in another name space. (CLONE_NEWTIME is in the byte of the signal; unshare alone
 * takes it.) */
#define CLONE_REFUSED                                                                                                                  \
    (CLONE_PARENT | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET |         \
     CLONE_PTRACE)

#define PROGRAM_MAX 1024
typedef struct program {
    struct sock_filter code[PROGRAM_MAX];
    unsigned short n;
} program;

static void add(program *p, uint16_t code, uint32_t k, unsigned yes, unsigned no) {
    if (p->n < PROGRAM_MAX)
        p->code[p->n] = (struct sock_filter){code, (uint8_t)yes, (uint8_t)no, k};
    p->n++;
}

static void load(program *p, size_t offset) { add(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0); }
/* The low half of an argument: what these calls look at. */
static void load_argument(program *p, int i) { load(p, offsetof(struct seccomp_data, args) + 8u * (unsigned)i); }
static void equal(program *p, uint32_t k, unsigned yes, unsigned no) { add(p, BPF_JMP | BPF_JEQ | BPF_K, k, yes, no); }
static void give(program *p, uint32_t action) { add(p, BPF_RET | BPF_K, action, 0, 0); }
static void refuse_with(program *p, int e) { give(p, SECCOMP_RET_ERRNO | (uint32_t)e); }

/* What a worker needs that was made ahead of its lease, to connect and to be sealed, and never afterwards. */
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_restrict_self 446
#endif
static const int connecting[] = {SYS_connect, SYS_sendmsg, SYS_landlock_create_ruleset, SYS_landlock_restrict_self, SYS_seccomp};

static void build(program *p, dp_filter part) {
    p->n = 0;
    load(p, offsetof(struct seccomp_data, arch));
    equal(p, ARCH, 1, 0);
    give(p, SECCOMP_RET_KILL_PROCESS);
    load(p, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; part != DP_FILTER_ALL && i < sizeof connecting / sizeof *connecting; i++) {
        equal(p, (uint32_t)connecting[i], 0, 1);
        give(p, part == DP_FILTER_REST ? SECCOMP_RET_ERRNO | EPERM : SECCOMP_RET_ALLOW);
    }
    for (size_t i = 0; part != DP_FILTER_REST && i < sizeof allowed / sizeof *allowed; i++) {
        equal(p, (uint32_t)allowed[i], 0, 1);
        give(p, SECCOMP_RET_ALLOW);
    }
    if (part == DP_FILTER_CONNECTS) { /* devices take commands */
        equal(p, SYS_ioctl, 0, 1);
        give(p, SECCOMP_RET_ALLOW);
    }
    for (size_t i = 0; i < sizeof some_of / sizeof *some_of; i++) {
        if (part == DP_FILTER_REST ? some_of[i].call != SYS_ioctl : part == DP_FILTER_CONNECTS && some_of[i].call == SYS_ioctl)
            continue;
        int n = some_of[i].n;
        equal(p, (uint32_t)some_of[i].call, 0, (unsigned)n + 3);
        load_argument(p, some_of[i].argument);
        for (int v = 0; v < n; v++)
            equal(p, some_of[i].values[v], (unsigned)(n - v), 0);
        refuse_with(p, EPERM);
        give(p, SECCOMP_RET_ALLOW);
    }
    if (part == DP_FILTER_REST) {
        give(p, SECCOMP_RET_ALLOW);
        return;
    }
    equal(p, SYS_clone, 0, 4);
    load_argument(p, 0);
    add(p, BPF_JMP | BPF_JSET | BPF_K, CLONE_REFUSED, 1, 0);
    give(p, SECCOMP_RET_ALLOW);
    refuse_with(p, EPERM);
#ifdef SYS_clone3
    equal(p, SYS_clone3, 0, 1);
    refuse_with(p, ENOSYS); /* its flags are in memory: clone comes instead */
#endif
    add(p, BPF_JMP | BPF_JGT | BPF_K, NEWEST, 0, 1);
    refuse_with(p, ENOSYS);
    refuse_with(p, EPERM);
}

static int install(program *p) {
    if (p->n > PROGRAM_MAX)
        return E2BIG;
    struct sock_fprog f = {p->n, p->code};
    const unsigned long all_threads = SECCOMP_FILTER_FLAG_TSYNC;
    long st = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all_threads | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &f);
    if (st < 0 && errno == EINVAL) /* before 4.17 */
        st = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all_threads, &f);
    return st < 0 ? errno : st > 0 ? EBUSY : 0;
}

int dp_sandbox_filter(dp_filter part) {
    program p;
    build(&p, part);
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
    load_argument(&p, 5); /* the length of an address: none */
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

/* Cloning of workers, in a sandbox with their guard. */
#include "clone.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "message.h"

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x00001000
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif

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

/* struct clone_args of linux/sched.h, which older systems lack or have without its last word. */
typedef struct clone3_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
} clone3_args;
#define INTO_CGROUP 0x200000000ull

/* With CLONE_PARENT the exit signal is that of the zygote itself, which is SIGCHLD after execve. */
#define WORKER_FLAGS (CLONE_PARENT | CLONE_PIDFD | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID)

/* The child starts in a control group of version 2. Moving a process later waits for all processors, unless it has
 * one thread and moves itself: join_group. */
static pid_t clone_into(const dp_cloner *by, int group, int *pidfd) {
    clone3_args a = {.flags = WORKER_FLAGS | INTO_CGROUP, .pidfd = (uintptr_t)pidfd, .child_tid = (uintptr_t)by->tid, .cgroup = (uint64_t)group};
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
static pid_t clone_plain(const dp_cloner *by, int *pidfd) {
#if defined(__x86_64__)
    long pid = syscall(SYS_clone, WORKER_FLAGS, NULL, pidfd, by->tid, 0);
#else /* aarch64, ppc64le, riscv64: the last two arguments are swapped */
    long pid = syscall(SYS_clone, WORKER_FLAGS, NULL, pidfd, 0, by->tid);
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
static int join_groups(const dp_guard_files *files, int except, dp_clones *c) {
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
static pid_t clone_into_groups(const dp_cloner *by, const dp_guard_files *files, dp_clones *c) {
    int directory = group_directory(files);
    int e = join_groups(files, directory, c);
    if (e)
        return -e;
    pid_t pid = directory < 0 ? -1 : clone_into(by, directory, &c->worker);
    if (pid < 0 && directory >= 0 && (e = join_group(directory))) /* a kernel before 5.7 */
        return -e;
    return pid < 0 ? clone_plain(by, &c->worker) : pid;
}

/* clone_sandboxed where the zygote may return from the process namespace that it makes for its children: no stem is
 * needed, which takes a third of the time of the clones. The worker itself joins the control groups that clone3 does
 * not support, before it does anything else; then c->status says whether that has failed. */
static pid_t clone_without_stem(const dp_cloner *by, const dp_guard_files *files, dp_clones *c) {
    int directory = group_directory(files);
    c->pid = -ECHILD;
    c->status = dp_sandbox_open(by->sandbox, files, &c->sandbox, &c->err);
    if (c->status == DP_OK) {
        c->pid = directory < 0 ? -1 : clone_into(by, directory, &c->worker);
        if (c->pid < 0) { /* no directory, or a kernel before 5.7 */
            directory = -1;
            c->pid = clone_plain(by, &c->worker);
        }
        if (c->pid == 0) {
            join_groups(files, directory, c);
            return 0;
        }
    }
    if (setns(by->own_pids, CLONE_NEWPID)) { /* was possible at the start */
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
static pid_t clone_sandboxed(const dp_cloner *by, const dp_guard_files *files, dp_clones *c) {
    if (by->own_pids >= 0)
        return clone_without_stem(by, files, c);
    dp_clones *shared = by->stem_says;
    c->pid = -ECHILD;
    *shared = *c;
    long stem = syscall(SYS_clone, CLONE_PARENT | CLONE_VFORK | CLONE_FILES, NULL, NULL, 0, 0);
    if (stem == 0) {
        prctl(PR_SET_NAME, "rfaas-guard");
        c->sandbox.stem = (int)syscall(SYS_pidfd_open, getpid(), 0);
        c->status = madvise(shared, sizeof *shared, MADV_DONTFORK) ? dp_fail(&c->err, DP_FATAL, errno, "sandbox: keep the zygote's memory")
                                                                   : dp_sandbox_open(by->sandbox, files, &c->sandbox, &c->err);
        if (c->status == DP_OK)
            c->pid = clone_into_groups(by, files, c);
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

int dp_cloner_init(dp_cloner *by, dp_sandbox *sandbox) {
    *by = (dp_cloner){.sandbox = sandbox};
    by->tid = tid_field();
    if (!by->tid) {
        fprintf(stderr, "rfaas-worker: cannot find where this C library keeps a thread's id\n");
        return -1;
    }
    if (syscall(SYS_get_robust_list, 0, &by->robust, &by->robust_len)) {
        fprintf(stderr, "rfaas-worker: get_robust_list: %s\n", strerror(errno));
        return -1;
    }
    /* The zygote returns to this namespace after it has made one for its children. That takes the same right as this. */
    by->own_pids = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    if (by->own_pids >= 0 && (sandbox->without & DP_SANDBOX_WITHOUT_RETURN || setns(by->own_pids, CLONE_NEWPID))) {
        close(by->own_pids);
        by->own_pids = -1;
    }
    return 0;
}

int dp_cloner_share(dp_cloner *by) {
    if (by->sandbox->parts & DP_SANDBOX_PIDS && by->own_pids < 0)
        by->stem_says = mmap(NULL, sizeof *by->stem_says, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (by->stem_says == MAP_FAILED) {
        fprintf(stderr, "rfaas-worker: memory: %s\n", strerror(errno));
        return -1;
    }
    return 0;
}

pid_t dp_clone_worker(const dp_cloner *by, const dp_guard_files *files, dp_clones *c) {
    *c = (dp_clones){.worker = -1, .sandbox = DP_SANDBOX_NONE, .status = DP_OK};
    c->pid = by->sandbox->parts & DP_SANDBOX_PIDS ? clone_sandboxed(by, files, c) : clone_plain(by, &c->worker);
    if (c->pid == 0)
        syscall(SYS_set_robust_list, by->robust, by->robust_len);
    return c->pid;
}

void dp_clones_close(const dp_clones *c) {
    const int fds[] = {c->worker, c->sandbox.stem, c->sandbox.guard, c->sandbox.ctl};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* The zygote's part of the sandbox: which parts work, and the guard of each worker. */
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "startup/ahead.h"

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x00001000
#endif

/* ---- once ---- */

void dp_sandbox_lacks(dp_sandbox *s, uint32_t part, const char *what, int e) {
    s->parts &= ~part;
    size_t n = strlen(s->missing);
    snprintf(s->missing + n, sizeof s->missing - n, "%s%s%s%s", n ? "; " : "", what, e ? ": " : "", e ? strerror(e) : "");
}

static bool write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    int e = errno;
    close(fd);
    errno = e;
    return ok;
}

/* Gains the rights to make namespaces, if necessary in a user namespace in which ids stay the same. Returns 0 or an errno. */
static int gain_rights(bool *root) {
    *root = false;
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct caps[2];
    if (syscall(SYS_capget, &head, caps) == 0 && caps[0].effective & 1u << CAP_SYS_ADMIN) {
        const uint32_t own_ids = 1u << CAP_SETUID | 1u << CAP_SETGID;
        *root = geteuid() == 0 && (caps[0].effective & own_ids) == own_ids;
        return 0;
    }
    char uids[32], gids[32];
    snprintf(uids, sizeof uids, "%u %u 1", geteuid(), geteuid());
    snprintf(gids, sizeof gids, "%u %u 1", getegid(), getegid());
    if (unshare(CLONE_NEWUSER))
        return errno;
    if (!write_text("/proc/self/setgroups", "deny") || !write_text("/proc/self/uid_map", uids) || !write_text("/proc/self/gid_map", gids))
        return errno;
    return 0;
}

/* Makes an empty network namespace in a child, since the caller may be unable to return from it. Its interfaces are
 * down. The child shares the descriptors, and its exit status is the number of the one that it has opened: /proc may
 * belong to another process namespace, in which only a process itself knows itself. Returns -1 and sets errno on
 * failure. */
static int empty_net(void) {
    enum { FAILED = 128 }; /* and an errno, all of which that can come are below 127 */
    pid_t child = (pid_t)syscall(SYS_clone, CLONE_FILES | CLONE_VFORK | SIGCHLD, NULL, NULL, 0, 0);
    if (child == 0) {
        int net = unshare(CLONE_NEWNET) ? -1 : open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        _exit(net < 0 ? FAILED | (errno & 127) : net < FAILED ? net : FAILED | EMFILE);
    }
    if (child < 0)
        return -1;
    int st = 0;
    while (waitpid(child, &st, 0) < 0)
        if (errno != EINTR)
            return -1;
    int said = WIFEXITED(st) ? WEXITSTATUS(st) : FAILED | ECHILD;
    errno = said & 127;
    return said < FAILED ? said : -1;
}

/* Returns the group of device files that not every user may open; 0 if every user may, or there are none. */
static gid_t device_group(void) {
    glob_t g;
    gid_t group = 0;
    if (glob("/dev/infiniband/uverbs*", 0, NULL, &g) == 0)
        for (size_t i = 0; i < g.gl_pathc && !group; i++) {
            struct stat st;
            if (stat(g.gl_pathv[i], &st) == 0 && (st.st_mode & 06) != 06)
                group = st.st_gid;
        }
    globfree(&g);
    return group;
}

/* Tries to make a process namespace, in a child, because later clones would be in it. Returns 0 or an errno. */
static int try_pids(void) {
    pid_t child = fork();
    if (child == 0)
        _exit(unshare(CLONE_NEWPID) ? errno : 0);
    int st = 0;
    if (child < 0)
        return errno;
    while (waitpid(child, &st, 0) < 0)
        if (errno != EINTR)
            return errno;
    return WIFEXITED(st) ? WEXITSTATUS(st) : ECHILD;
}

/* Tries to enter the namespaces of another process by its pidfd, which needs Linux 5.8. Returns 0 or an errno. */
static int try_enter(void) {
    if (unshare(CLONE_NEWIPC))
        return errno;
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (self < 0)
        return errno;
    int e = setns(self, CLONE_NEWIPC) ? errno : 0;
    close(self);
    return e;
}

static void prepare_spaces(dp_sandbox *s, bool verbs) {
    const uint32_t spaces = DP_SANDBOX_PIDS | DP_SANDBOX_FILES | DP_SANDBOX_IPC | DP_SANDBOX_NET;
    bool root;
    int e = gain_rights(&root);
    if (e) {
        dp_sandbox_lacks(s, DP_SANDBOX_UID | spaces, "namespaces: none can be made without root or user namespaces", e);
        return;
    }
    if (!root || s->without & DP_SANDBOX_UID)
        dp_sandbox_lacks(s, DP_SANDBOX_UID, "user ids: only root with CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID can give workers their own", 0);
    if ((e = s->without & DP_SANDBOX_PIDS ? ENOTSUP : try_pids())) {
        /* Without a process namespace there is no guard, and so no process that keeps the other namespaces. */
        dp_sandbox_lacks(s, spaces, "process namespace", e);
        return;
    }
    if ((e = try_enter())) {
        dp_sandbox_lacks(s, spaces, "enter namespaces by a pidfd (Linux 5.8)", e);
        return;
    }
    errno = ENOTSUP;
    s->net = s->without & DP_SANDBOX_NET ? -1 : empty_net();
    if (s->net < 0)
        dp_sandbox_lacks(s, DP_SANDBOX_NET, "network namespace", errno);
    const char *what = "mount namespace";
    e = s->without & DP_SANDBOX_FILES ? ENOTSUP : unshare(CLONE_NEWNS) ? errno : dp_sandbox_root(s, verbs, &what);
    if (e) {
        char text[256];
        snprintf(text, sizeof text, "file system: %s", what);
        dp_sandbox_lacks(s, DP_SANDBOX_FILES, text, e);
    }
}

void dp_sandbox_prepare(dp_sandbox *s, bool verbs) {
    s->net = -1;
    s->landlock = 0;
    s->parts = 0;
    *s->missing = 0;
    if (!s->wanted)
        return;
    s->parts = DP_SANDBOX_ALL;
    s->device_group = verbs ? device_group() : 0;
    prepare_spaces(s, verbs);
    if (!(s->parts & DP_SANDBOX_PIDS)) /* workers cannot join control groups */
        s->fixed_cpus = true;
    errno = ENOTSUP;
    if (s->without & DP_SANDBOX_SECCOMP || !dp_sandbox_filter_works())
        dp_sandbox_lacks(s, DP_SANDBOX_SECCOMP, "filter of system calls", errno);
    errno = ENOTSUP;
    s->landlock = s->without & DP_SANDBOX_LANDLOCK ? 0 : dp_sandbox_landlock_version();
    if (!s->landlock)
        dp_sandbox_lacks(s, DP_SANDBOX_LANDLOCK, "Landlock", errno);
}

/* ---- the guard ---- */

static void close_all_but(int a, int b) {
    int highest = a > b ? a : b;
    for (int fd = 0; fd < highest; fd++)
        if (fd != a && fd != b)
            close(fd);
    syscall(SYS_close_range, highest + 1, ~0u, 0);
}

static bool hung_up(int sock) {
    struct pollfd p = {.fd = sock};
    return poll(&p, 1, 0) == 1 && p.revents & (POLLHUP | POLLERR | POLLNVAL);
}

static int guard_set_up(const dp_sandbox *s, const uint8_t *bundle, const char **what) {
    if (s->parts & DP_SANDBOX_NET) {
        *what = "enter the network namespace";
        if (setns(s->net, CLONE_NEWNET))
            return errno;
    }
    return s->parts & DP_SANDBOX_FILES ? dp_sandbox_own_mounts(bundle, what) : 0;
}

/* When the spawner ends, the kernel kills the worker. The guard, which has a userfaultfd of the worker, ends after it. */
_Noreturn static void outlive_worker(void) {
    int sig = SIGRTMAX; /* no batch system sends it */
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, sig);
    sigprocmask(SIG_BLOCK, &set, NULL);
    prctl(PR_SET_PDEATHSIG, sig);
    while (sigwaitinfo(&set, NULL) != sig)
        ;
    enum { TRIES = 1000 }; /* bounds the life of a process that is not killed with its parent */
    for (int i = 0; i < TRIES && (kill(-1, 0) == 0 || errno != ESRCH); i++)
        usleep(1000);
    _exit(0);
}

_Noreturn static void guard(const dp_sandbox *s, const dp_guard_files *files, int ctl) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (hung_up(files->alive)) /* the executor ended before that */
        _exit(0);
    prctl(PR_SET_NAME, "rfaas-guard");
    signal(SIGCHLD, SIG_IGN); /* orphans leave no zombies */
    setsid();
    close_all_but(ctl, s->net);
    const char *what = "";
    int e = guard_set_up(s, files->bundle, &what);
    char ask;
    if (recv(ctl, &ask, 1, 0) != 1) /* there will be no worker */
        _exit(0);
    dp_sandbox_guard_say(ctl, e, what);
    dp_ahead_end(files->memory);
    bool holds = false;
    for (dp_packet p; dp_packet_recv(ctl, &p) == 1;) {
        if (p.n_fds) {
            holds = true;
            continue;
        }
        e = dp_sandbox_hide_devices();
        dp_sandbox_guard_say(ctl, e, "hide the devices");
    }
    close(ctl);
    close(s->net);
    prctl(PR_SET_DUMPABLE, 0);
    dp_sandbox_drop_capabilities();
    if (holds)
        outlive_worker();
    for (;;)
        pause();
}

int dp_sandbox_open(const dp_sandbox *s, const dp_guard_files *files, dp_sandbox_fds *fds, dp_error *err) {
    fds->guard = fds->ctl = -1;
    if (!(s->parts & DP_SANDBOX_PIDS))
        return DP_OK;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends))
        return dp_fail(err, DP_FATAL, errno, "sandbox: socket to the guard");
    if (unshare(CLONE_NEWPID)) {
        int e = errno;
        close(ends[0]);
        close(ends[1]);
        return dp_fail(err, DP_FATAL, e, "sandbox: process namespace");
    }
    unsigned long flags = CLONE_PARENT | CLONE_PIDFD | (s->parts & DP_SANDBOX_FILES ? CLONE_NEWNS : 0) |
                          (s->parts & DP_SANDBOX_IPC ? CLONE_NEWIPC : 0);
    int pidfd = -1;
    long pid = syscall(SYS_clone, flags, NULL, &pidfd, 0, 0);
    if (pid == 0)
        guard(s, files, ends[1]);
    int e = errno;
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return dp_fail(err, DP_FATAL, e, "sandbox: clone the guard");
    }
    fds->guard = pidfd;
    fds->ctl = ends[0];
    return DP_OK;
}

/* The worker's way into its sandbox: credentials, namespaces, capabilities, Landlock. The filter is in filter.c. */
#include "bundle.h"
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- credentials ---- */

static int set_capabilities(uint64_t keep) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct now[2], data[2];
    if (syscall(SYS_capget, &head, now))
        return errno;
    for (int i = 0; i < 2; i++) {
        uint32_t bits = now[i].permitted & (uint32_t)(keep >> 32 * i);
        data[i] = (struct __user_cap_data_struct){.effective = bits, .permitted = bits};
    }
    return syscall(SYS_capset, &head, data) ? errno : 0;
}

int dp_sandbox_drop_capabilities(void) { return set_capabilities(0); }

/* The capabilities that a process needs to enter the guard's namespaces. */
#define TO_ENTER (1ull << CAP_SYS_ADMIN | 1ull << CAP_SYS_CHROOT | 1ull << CAP_SYS_PTRACE)

int dp_sandbox_identity(const dp_sandbox *s, uint32_t uid, uint32_t gid, dp_error *err) {
    if (!uid) {
        if (s->wanted && geteuid() == 0)
            return dp_fail(err, DP_FATAL, 0, "sandbox: this worker would run as root: set a range of user ids (sandbox-uids)");
        return DP_OK;
    }
    if (!(s->parts & DP_SANDBOX_UID))
        return dp_fail(err, DP_FATAL, 0, "sandbox: this executor cannot give a worker the user id %u", uid);
    /* Raised because the limit on locked memory applies to memory that is registered from now on, but did not apply to root. */
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_MEMLOCK, &all);
    gid_t groups[1] = {s->device_group};
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
        return dp_fail(err, DP_FATAL, errno, "sandbox: keep capabilities");
    if (setgroups(s->device_group ? 1 : 0, groups) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid))
        return dp_fail(err, DP_FATAL, errno, "sandbox: become user %u, group %u", uid, gid);
    int e = set_capabilities(TO_ENTER);
    if (e)
        return dp_fail(err, DP_FATAL, e, "sandbox: keep capabilities");
    return DP_OK;
}

/* ---- namespaces ---- */

/* The guard sends this message when it is ready, and again when it has hidden the devices. `e` is an errno, or 0 for success. `what` names the step that
 * failed. */
typedef struct guard_word {
    int32_t e;
    char what[60];
} guard_word;

void dp_sandbox_guard_say(int ctl, int e, const char *what) {
    guard_word w = {.e = e};
    snprintf(w.what, sizeof w.what, "%s", what);
    ssize_t n = send(ctl, &w, sizeof w, MSG_NOSIGNAL);
    (void)n;
}

static int guard_hear(int ctl, dp_error *err) {
    guard_word w = {0};
    ssize_t n;
    do
        n = recv(ctl, &w, sizeof w, 0);
    while (n < 0 && errno == EINTR);
    if (n != sizeof w)
        return dp_fail(err, DP_FATAL, n < 0 ? errno : 0, "sandbox: the guard process ended");
    w.what[sizeof w.what - 1] = 0;
    if (w.e)
        return dp_fail(err, DP_FATAL, w.e, "sandbox: %s", w.what);
    return DP_OK;
}

int dp_sandbox_present(const dp_sandbox_fds *fds, dp_error *err) {
    if (fds->ctl >= 0 && send(fds->ctl, "p", 1, MSG_NOSIGNAL) != 1)
        return dp_fail(err, DP_FATAL, errno, "sandbox: reach the guard");
    return DP_OK;
}

int dp_sandbox_enter(const dp_sandbox *s, const dp_sandbox_fds *fds, bool connects, dp_error *err) {
    if (fds->guard >= 0) {
        int st = guard_hear(fds->ctl, err);
        if (st != DP_OK)
            return st;
        int spaces = (s->parts & DP_SANDBOX_FILES ? CLONE_NEWNS : 0) | (s->parts & DP_SANDBOX_IPC ? CLONE_NEWIPC : 0) |
                     (s->parts & DP_SANDBOX_NET ? CLONE_NEWNET : 0);
        if (spaces && setns(fds->guard, spaces))
            return dp_fail(err, DP_FATAL, errno, "sandbox: enter the namespaces");
    }
    if (!(s->parts & DP_SANDBOX_PRIVS))
        return DP_OK;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return dp_fail(err, DP_FATAL, errno, "sandbox: no new privileges");
    int e = dp_sandbox_drop_capabilities();
    if (e)
        return dp_fail(err, DP_FATAL, e, "sandbox: drop capabilities");
    e = s->parts & DP_SANDBOX_LANDLOCK ? dp_sandbox_landlock(s, connects) : 0;
    if (e)
        return dp_fail(err, DP_FATAL, e, "sandbox: Landlock");
    /* The change of credentials has undone it. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return DP_OK;
}

int dp_sandbox_hide(const dp_sandbox *s, const dp_sandbox_fds *fds, dp_error *err) {
    if (fds->ctl < 0 || !(s->parts & DP_SANDBOX_FILES))
        return DP_OK;
    char ask = 'h';
    if (send(fds->ctl, &ask, 1, MSG_NOSIGNAL) != 1)
        return dp_fail(err, DP_FATAL, errno, "sandbox: ask the guard");
    return guard_hear(fds->ctl, err);
}

int dp_sandbox_hold(const dp_sandbox_fds *fds, int fd, dp_error *err) {
    int e = dp_msg_send(fds->ctl, DP_MSG_PAGES, 0, NULL, 0, fd);
    return e ? dp_fail(err, DP_FATAL, e, "sandbox: give the guard a descriptor") : DP_OK;
}

int dp_sandbox_filter_early(const dp_sandbox *s, dp_error *err) {
    int e = s->parts & DP_SANDBOX_SECCOMP ? dp_sandbox_filter(DP_FILTER_CONNECTS, s->fixed_cpus, s->idle) : 0;
    return e ? dp_fail(err, DP_FATAL, e, "sandbox: filter of system calls") : DP_OK;
}

int dp_sandbox_seal(const dp_sandbox *s, bool early, bool connected, dp_error *err) {
    int e = connected && s->parts & DP_SANDBOX_LANDLOCK ? dp_sandbox_landlock_scope(s) : 0;
    if (e)
        return dp_fail(err, DP_FATAL, e, "sandbox: Landlock");
    e = s->parts & DP_SANDBOX_SECCOMP ? dp_sandbox_filter(early ? DP_FILTER_REST : DP_FILTER_ALL, s->fixed_cpus, s->idle) : 0;
    return e ? dp_fail(err, DP_FATAL, e, "sandbox: filter of system calls") : DP_OK;
}

int dp_sandbox_seal_sockets(const dp_sandbox *s, dp_error *err) {
    int e = s->parts & DP_SANDBOX_SECCOMP ? dp_sandbox_filter(DP_FILTER_SOCKETS, s->fixed_cpus, s->idle) : 0;
    return e ? dp_fail(err, DP_FATAL, e, "sandbox: filter of system calls") : DP_OK;
}

/* ---- Landlock ---- */

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

/* The kernel's interface, with names of our own since older systems lack the header or parts of it. */
typedef struct landlock_ruleset {
    uint64_t files, net, scoped;
} landlock_ruleset;
typedef struct __attribute__((packed)) landlock_beneath {
    uint64_t allowed;
    int32_t parent;
} landlock_beneath;

enum {
    FS_EXECUTE = 1 << 0,
    FS_WRITE = 1 << 1,
    FS_READ = 1 << 2,
    FS_READ_DIR = 1 << 3,
    FS_V1 = (1 << 13) - 1,
    FS_REFER = 1 << 13,     /* version 2 */
    FS_TRUNCATE = 1 << 14,  /* 3 */
    FS_IOCTL_DEV = 1 << 15, /* 5 */
    NET_ALL = 3,            /* 4: bind and connect of TCP */
    SCOPE_ALL = 3,          /* 6: abstract sockets and signals */
};

int dp_sandbox_landlock_version(void) {
    long v = syscall(SYS_landlock_create_ruleset, NULL, 0, 1u /* ask for the version */);
    return v > 0 ? (int)v : 0;
}

static int allow(int rules, const char *path, uint64_t what) {
    landlock_beneath b = {.allowed = what, .parent = open(path, O_PATH | O_CLOEXEC)};
    if (b.parent < 0)
        return errno == ENOENT ? 0 : errno;
    int e = syscall(SYS_landlock_add_rule, rules, 1 /* beneath a path */, &b, 0) ? errno : 0;
    close(b.parent);
    return e;
}

static int restrict_self(int rules) {
    int e = syscall(SYS_landlock_restrict_self, rules, 0) ? errno : 0;
    close(rules);
    return e;
}

int dp_sandbox_landlock_scope(const dp_sandbox *s) {
    if (s->landlock < 6)
        return 0;
    landlock_ruleset r = {.scoped = SCOPE_ALL};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &r, sizeof r, 0);
    return rules < 0 ? errno : restrict_self(rules);
}

int dp_sandbox_landlock(const dp_sandbox *s, bool connects) {
    int v = s->landlock;
    uint64_t all = FS_V1 | (v >= 2 ? FS_REFER : 0) | (v >= 3 ? FS_TRUNCATE : 0) | (v >= 5 ? FS_IOCTL_DEV : 0);
    landlock_ruleset r = {.files = all, .net = v >= 4 ? NET_ALL : 0, .scoped = v >= 6 && !connects ? SCOPE_ALL : 0};
    size_t size = v >= 6 ? sizeof r : v >= 4 ? 16 : 8;
    int rules = (int)syscall(SYS_landlock_create_ruleset, &r, size, 0);
    if (rules < 0)
        return errno;
    const uint64_t change = FS_WRITE | (all & FS_TRUNCATE);
    const uint64_t read = FS_EXECUTE | FS_READ | FS_READ_DIR;
    int e = 0;
    if (s->parts & DP_SANDBOX_FILES) {
        e = allow(rules, "/", read);
        if (!e)
            e = allow(rules, "/tmp", all);
    } else { /* the worker sees all files of the node. It may read only those that a private root would contain, and may write none */
        static const char *const system[] = {"/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys"};
        for (size_t i = 0; i < sizeof system / sizeof *system && !e; i++)
            e = allow(rules, system[i], read);
        for (int i = 0; i < s->n_paths && !e; i++)
            e = allow(rules, s->paths[i], read);
        if (!e && dp_bundle_directory())
            e = allow(rules, dp_bundle_directory(), read);
    }
    static const char *const streams[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"};
    for (size_t i = 0; i < sizeof streams / sizeof *streams && !e; i++)
        e = allow(rules, streams[i], FS_READ | change);
    /* A worker needs this to open its device. Where mounts can be hidden, the device files are hidden afterwards. */
    if (!e)
        e = allow(rules, "/dev/infiniband", FS_READ | FS_WRITE | FS_READ_DIR | (all & FS_IOCTL_DEV));
    if (!e)
        return restrict_self(rules);
    close(rules);
    return e;
}

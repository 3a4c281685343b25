/* The sandbox of workers: it confines a user's function to its own process and its own cores.
 *
 *   zygote, once     dp_sandbox_prepare    tries what the kernel and its rights allow; makes a root of read-only mounts for
 *                                          itself, an empty network namespace, and the system call filter
 *   zygote, each     dp_sandbox_open       a process namespace and its first process, the guard, in which the worker is cloned
 *   guard            (own process)         own mounts of /proc and /tmp, own IPC; ends with the executor, and all with it
 *   worker           dp_sandbox_present    tells the guard that the worker exists
 *                    dp_sandbox_identity   own user id, before anything is made with the old one
 *                    dp_sandbox_enter      the guard's namespaces, no capabilities, no new privileges, Landlock
 *                    dp_sandbox_hide       device files leave the file system, once the device is open
 *                    dp_sandbox_seal       the filter, before the first instruction of the user
 *
 * The guard is the first process of the namespace, so that the worker is not: signals without a handler do not reach a first
 * process, and it would inherit every orphan. The guard has no descriptors of the worker. Its parent is the spawner, which
 * ends it, and with it every process that a function left behind, when the worker has ended.
 *
 * Only _identity and _enter change credentials. soft-RoCE compares the credentials of a post with the credentials that
 * opened the device, by pointer, and Landlock changes them. So a worker on verbs enters first and then opens the device. A worker on shm
 * connects first, since it cannot reach abstract sockets from the other network namespace. A worker on ofi connects first, since
 * libfabric opens sockets of the node's network. A pooled worker on shm makes its
 * socket before it enters.
 */
#ifndef RFAAS_WORKER_SANDBOX_H
#define RFAAS_WORKER_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "dp_fabric.h"
#include "message.h"

/* The parts of a sandbox. HELLO reports those that work. internal/spawner/wire has the same numbers. */
enum {
    DP_SANDBOX_UID = 1 << 0,      /* workers get user ids of their own */
    DP_SANDBOX_PIDS = 1 << 1,     /* namespaces */
    DP_SANDBOX_FILES = 1 << 2,
    DP_SANDBOX_IPC = 1 << 3,
    DP_SANDBOX_NET = 1 << 4,
    DP_SANDBOX_PRIVS = 1 << 5,    /* no new privileges, no capabilities */
    DP_SANDBOX_SECCOMP = 1 << 6,
    DP_SANDBOX_LANDLOCK = 1 << 7,
    DP_SANDBOX_ALL = (1 << 8) - 1,
    DP_SANDBOX_WITHOUT_RETURN = 1 << 8, /* no part: tests leave it out to have workers cloned through a stem */
    DP_SANDBOX_PAGES = 1 << 9, /* no part: memory of workers can be filled on demand (pages.h) */
};

#define DP_SANDBOX_PATHS_MAX 64

#define DP_BUNDLE_AT "/bundle" /* where a worker in a file system of its own sees it */
void dp_bundle_name(const uint8_t id[DP_BUNDLE_ID], char name[2 * DP_BUNDLE_ID + 1]);
#define DP_SANDBOX_TEXT_MAX 1024

typedef struct dp_sandbox {
    bool wanted;
    uint32_t parts; /* DP_SANDBOX_* that work here */
    const char *paths[DP_SANDBOX_PATHS_MAX]; /* visible besides the system's; owned by the caller */
    int n_paths;
    uint32_t without; /* parts to leave out, for tests */
    bool idle;       /* workers have idle priority, and stay in the zygote's session (limit.h) */
    bool fixed_cpus; /* no cpuset keeps workers on their CPUs, so the filter refuses sched_setaffinity */
    uint32_t files;   /* most open descriptors of a worker, 0: as many as the executor */
    const char *bundles; /* the executor's directory of unpacked bundles, or NULL; owned by the caller */
    int pages; /* descriptor of /dev/userfaultfd, 0: none */
    /* Private from here on. */
    int landlock; /* version of the kernel's interface, 0: none */
    int net;      /* empty network namespace, or -1 */
    gid_t device_group; /* group that may open the devices if not every user may; 0: not needed */
    char missing[DP_SANDBOX_TEXT_MAX]; /* missing parts and the reasons, for people */
} dp_sandbox;

/* Descriptors of one worker's sandbox. -1: none. */
typedef struct dp_sandbox_fds {
    int guard; /* its pidfd */
    int ctl;   /* the worker's end of the socket to it */
    int stem;  /* pidfd of the process that cloned both, -1 if the zygote itself did: clone.c */
} dp_sandbox_fds;

#define DP_SANDBOX_NONE ((dp_sandbox_fds){-1, -1, -1})

/* dp_sandbox_prepare determines which parts work. The zygote calls it once, when it has one thread and has loaded
 * its providers. With verbs the root shows devices until dp_sandbox_hide. It never fails: parts and missing have the
 * result. */
void dp_sandbox_prepare(dp_sandbox *s, bool verbs);

typedef struct dp_guard_files {
    int alive;   /* a socket whose other end the executor has; it hangs up when the executor ends */
    /* Control groups for the worker, not for the guard: the directory of version 2, the files "tasks" of version 1. */
    const int *join;
    int n_join;
    struct dp_ahead *memory; /* the worker's, not the guard's; or NULL */
    const uint8_t *bundle;   /* identifier of the bundle that the worker sees; all 0: none */
} dp_guard_files;

/* dp_sandbox_open makes a process namespace for later clones of the calling process, and its first process, the
 * guard, as a child of the caller's parent. Returns DP_OK or DP_FATAL. The caller owns fds. */
int dp_sandbox_open(const dp_sandbox *s, const dp_guard_files *files, dp_sandbox_fds *fds, dp_error *err);

/* The worker's steps, in this order, each once. The worker must end after a failure. uid 0 keeps the current user. */
int dp_sandbox_present(const dp_sandbox_fds *fds, dp_error *err);
int dp_sandbox_identity(const dp_sandbox *s, uint32_t uid, uint32_t gid, dp_error *err);
/* connects: the worker connects later. Until it is sealed it can reach abstract sockets with a socket that it made before. */
int dp_sandbox_enter(const dp_sandbox *s, const dp_sandbox_fds *fds, bool connects, dp_error *err);
int dp_sandbox_hide(const dp_sandbox *s, const dp_sandbox_fds *fds, dp_error *err);
/* dp_sandbox_hold gives the guard a copy of a descriptor, which stays open until the worker has ended. It may be called once, before the guard's socket is closed. */
int dp_sandbox_hold(const dp_sandbox_fds *fds, int fd, dp_error *err);
/* For a worker that waits for its lease: the filter without the rules against connecting, which dp_sandbox_seal adds quickly. */
int dp_sandbox_filter_early(const dp_sandbox *s, dp_error *err);
/* early: dp_sandbox_filter_early was called; connected: dp_sandbox_enter was called with connects. */
int dp_sandbox_seal(const dp_sandbox *s, bool early, bool connected, dp_error *err);
/* The same for a worker whose device uses sockets that it has opened before (ofi over libfabric's tcp). */
int dp_sandbox_seal_sockets(const dp_sandbox *s, dp_error *err);

/* ---- between the sandbox's files ---- */

/* Takes parts away and adds "what: error" to s->missing. */
void dp_sandbox_lacks(dp_sandbox *s, uint32_t part, const char *what, int e);
/* dp_sandbox_root builds the root of read-only mounts and makes it the caller's root. The caller must have its own
 * mount namespace. Returns 0, or an errno with the step in *what. */
int dp_sandbox_root(const dp_sandbox *s, bool verbs, const char **what);
/* dp_sandbox_own_mounts mounts a new /proc, a new /tmp and, read-only, the bundle in the guard. Without the right to mount /proc it keeps
 * the zygote's /proc. Returns 0 or an errno. */
int dp_sandbox_own_mounts(const uint8_t *bundle, const char **what);
int dp_sandbox_hide_devices(void);
/* dp_sandbox_landlock restricts the caller for good. If the caller still connects, it leaves out the part that
 * dp_sandbox_landlock_scope adds. Returns 0 or an errno. */
int dp_sandbox_landlock(const dp_sandbox *s, bool connects);
int dp_sandbox_landlock_scope(const dp_sandbox *s);
/* Returns the kernel's version of Landlock, 0: none. */
int dp_sandbox_landlock_version(void);
/* dp_sandbox_filter installs the system call filter, or one of its two parts, on all threads. DP_FILTER_CONNECTS is
 * the large part, which takes the kernel long to install; DP_FILTER_REST adds a few instructions. fixed_cpus refuses
 * sched_setaffinity, fixed_session setsid. Returns 0 or an errno. */
typedef enum dp_filter {
    DP_FILTER_ALL,
    DP_FILTER_CONNECTS, /* all but the rules against connecting */
    DP_FILTER_REST,
    DP_FILTER_SOCKETS,  /* all, but sockets that are open may accept, and send from several pieces */
} dp_filter;
int dp_sandbox_filter(dp_filter part, bool fixed_cpus, bool fixed_session);
/* dp_sandbox_filter_reader takes every system call from the process except send() on a connected socket, the return
 * from a signal handler, and exit_group(). Any other call ends the process. It replaces the filters above, or is
 * added to DP_FILTER_CONNECTS. Returns 0 or an errno. */
int dp_sandbox_filter_reader(void);
/* Returns false and sets errno if the kernel has no such filter. */
bool dp_sandbox_filter_works(void);
int dp_sandbox_drop_capabilities(void);
/* dp_sandbox_guard_say sends the guard's result: an errno, 0 for success, and the failed step. It gives up if the
 * worker is gone. */
void dp_sandbox_guard_say(int ctl, int e, const char *what);

#endif

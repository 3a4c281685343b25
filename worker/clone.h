/* Cloning of workers. In a sandbox, each worker has a guard, which is the first process of its process namespace, and the
 * process in between that clones both, the stem, if the zygote itself cannot. */
#ifndef RFAAS_WORKER_CLONE_H
#define RFAAS_WORKER_CLONE_H

#include <stddef.h>
#include <sys/types.h>

#include "sandbox.h"

/* The processes that are cloned for a worker: pidfds, -1 for none. */
typedef struct dp_clones {
    pid_t pid; /* of the worker, or -errno */
    int worker;
    dp_sandbox_fds sandbox;
    int status; /* of the sandbox */
    dp_error err;
} dp_clones;

/* What the zygote learns once for all clones. */
typedef struct dp_cloner {
    pid_t *tid; /* where the C library keeps the calling thread's id */
    dp_sandbox *sandbox;
    int own_pids;         /* the zygote's process namespace, -1 if it may not return there */
    dp_clones *stem_says; /* shared with the stem, NULL where none is needed */
    void *robust; /* head of the list of robust mutexes: the kernel drops it in a child, and fork() sets it again */
    size_t robust_len;
} dp_cloner;

/* dp_cloner_init is called once, before dp_sandbox_prepare. dp_cloner_share is called after it. The process must have one thread.
 * Both return 0, or -1 after writing the reason to standard error. */
int dp_cloner_init(dp_cloner *by, dp_sandbox *sandbox);
int dp_cloner_share(dp_cloner *by);

/* dp_clone_worker clones the calling process. All signals must be blocked. Returns 0 in the worker, where c->status says
 * whether its sandbox has failed; in the zygote, the worker's pid or -errno, and the caller closes the clones. Without a
 * sandbox, files are not used. */
pid_t dp_clone_worker(const dp_cloner *by, const dp_guard_files *files, dp_clones *c);
void dp_clones_close(const dp_clones *c);

#endif

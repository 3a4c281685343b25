/* Limits of a worker: processors, memory, and its effect on other processes of the node. */
#ifndef RFAAS_WORKER_LIMIT_H
#define RFAAS_WORKER_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

#include "dp_status.h"

/* dp_worker_pin binds the process to the CPUs whose bits are set, of DP_CPUS_MAX bits. Without any bit it does nothing. The error
 * names the first CPU that does not exist or may not be used. */
int dp_worker_pin(const uint8_t *cpus, dp_error *err);
/* dp_worker_memory returns the private writable memory of the process, in bytes. dp_worker_limit_memory limits it to `has` and
 * `bytes` more; bytes 0: no limit. */
int dp_worker_memory(uint64_t *bytes, dp_error *err);
int dp_worker_limit_memory(uint64_t has, uint64_t bytes, dp_error *err);
/* dp_worker_yield_to_others makes the kernel kill this process first when memory runs out, and disables core dumps. With `idle`, all other
 * programs of the node run before this process. */
void dp_worker_yield_to_others(bool idle);
/* dp_worker_yield_session gives the smallest weight to the session of the calling process, if the process leads it. The kernel may share a CPU between
 * sessions by weight (autogroup), whatever the policy of their threads is. So workers without a control group of their own must stay in a session with
 * the smallest weight. A user without CAP_SYS_ADMIN may set one weight in 100 ms, so the zygote sets it once. Waits for at most 2 s. Returns 0 or an
 * errno. */
int dp_worker_yield_session(void);
/* dp_worker_limit sets the soft and the hard limit of a resource (RLIMIT_*) of the calling process to `most`, or to
 * the current hard limit if that is lower. Returns 0 or an errno. */
int dp_worker_limit(int resource, uint64_t most);

#endif

/* Limits of a worker: processors, memory, and its effect on other processes of the node. */
#ifndef RFAAS_WORKER_LIMIT_H
#define RFAAS_WORKER_LIMIT_H

#include <stdint.h>

#include "dp_status.h"

/* dp_worker_pin binds the process to the CPUs of DP_CPUS_MAX bits; none: it stays as it is. An error names the first that is not
 * there. dp_worker_memory is what the process has of private writable memory, in bytes, and dp_worker_limit_memory bounds what it may
 * add to that; 0: nothing. */
int dp_worker_pin(const uint8_t *cpus, dp_error *err);
int dp_worker_memory(uint64_t *bytes, dp_error *err);
int dp_worker_limit_memory(uint64_t has, uint64_t bytes, dp_error *err);
/* Has the pages of the program and its libraries in place, and own copies of those that it writes to: a worker that waits does
 * ahead what each step of its start would do page by page. */
void dp_worker_touch(void);
/* dp_worker_yield_to_others makes the kernel kill this process first when memory runs out, and disables core dumps. */
void dp_worker_yield_to_others(void);
/* dp_worker_limit sets the soft and the hard limit of a resource (RLIMIT_*) of the calling process to `most`, or to
 * the current hard limit if that is lower. Returns 0 or an errno. */
int dp_worker_limit(int resource, uint64_t most);

#endif

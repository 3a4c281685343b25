/* The zygote: answers the spawner's messages by cloning workers. */
#ifndef RFAAS_WORKER_ZYGOTE_H
#define RFAAS_WORKER_ZYGOTE_H

#include "runtime.h"
#include "sandbox.h"

#define DP_VERSION_MAX 256 /* bytes of a version that are told */

/* dp_zygote_run runs the zygote on the given socket until the socket closes, and returns the exit status. The process must
 * have one thread. HELLO carries the version: the executor accepts only a zygote of its own version. If the runtime cannot start, FAILED is
 * sent in place of HELLO. */
int dp_zygote_run(int sock, dp_sandbox *sandbox, dp_runtime *runtime, const char *version);

#endif

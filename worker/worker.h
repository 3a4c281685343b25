/* A worker from its first instruction to its exit. */
#ifndef RFAAS_WORKER_H
#define RFAAS_WORKER_H

#include <stdint.h>
#include <sys/types.h>

#include "message.h"
#include "sandbox.h"
#include "startup/ahead.h"

typedef struct dp_worker_fds {
    int sock, code, names, log, page;
    dp_sandbox_fds sandbox;
} dp_worker_fds;

/* dp_worker_live is the life of a worker. The cloned child calls it. m is valid. parent is the executor's pid as the zygote
 * sees it. A worker without functions is pooled: it waits for its lease, and fds have neither code nor names (-1).
 * memory is for its channel, or NULL. */
_Noreturn void dp_worker_live(uint32_t id, const dp_msg_spawn *m, const dp_worker_fds *fds, pid_t parent,
                              const dp_sandbox *sandbox, dp_ahead *memory);

#endif

/* A prepared worker that makes a seed instead of serving a lease. */
#ifndef RFAAS_WORKER_MAKE_SEED_H
#define RFAAS_WORKER_MAKE_SEED_H

#include "message.h"

/* dp_seed_make loads the library, runs the setup function, captures the seed and ends the process. The worker is sealed, and fds are those
 * of SEED. */
_Noreturn void dp_seed_make(int sock, uint32_t id, const dp_msg_seed *m, const int fds[DP_SEED_FDS]);

#endif

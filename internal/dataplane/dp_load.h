/* Loading the libraries of the fabrics (libibverbs, libfabric, libcrypto). */
#ifndef RFAAS_DP_LOAD_H
#define RFAAS_DP_LOAD_H

#include <stdbool.h>

/* Threads load one library at a time. */
void dp_load_lock(void);
void dp_load_unlock(void);

/* A child of fork() must not inherit a library that another thread was loading: it could neither use it nor load it again. So fork() waits
 * until no library is being loaded, for a second at most: C libraries before glibc 2.36 hold a lock during fork() that the loading thread may
 * need. Called before all other locks are taken. */
void dp_load_before_fork(void);
void dp_load_after_fork(bool child);

/* One thread at a time calls code that may replace signal handlers, which are set back afterwards. */
void dp_handlers_lock(void);
void dp_handlers_unlock(void);

#endif

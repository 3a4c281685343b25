/* Loading the libraries of the fabrics (libibverbs, libfabric, libcrypto). */
#ifndef RFAAS_DP_LOAD_H
#define RFAAS_DP_LOAD_H

#include <stdbool.h>

/* One library is loaded at a time. A child of fork() must not inherit a library that another thread was loading: it could neither use it nor
 * load it again. So a program that forks calls dp_load_before_fork and dp_load_after_fork. */
void dp_load_lock(void);
void dp_load_unlock(void);
void dp_load_before_fork(void);
void dp_load_after_fork(bool child);

#endif

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP */
#endif
#include "dp_load.h"

#include <pthread.h>

/* Recursive, because a library may fork while it is loaded. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

void dp_load_lock(void) { pthread_mutex_lock(&lock); }

void dp_load_unlock(void) { pthread_mutex_unlock(&lock); }

void dp_load_before_fork(void) { dp_load_lock(); }

void dp_load_after_fork(bool child) {
    if (child)
        lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    else
        dp_load_unlock();
}

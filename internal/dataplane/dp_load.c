#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP */
#endif
#include "dp_load.h"

#include <pthread.h>
#include <time.h>

/* Recursive, because a library may fork while it is loaded. */
static pthread_mutex_t loading = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, handlers = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static __thread bool forks; /* this thread has `loading` because it forks */

void dp_load_lock(void) { pthread_mutex_lock(&loading); }

void dp_load_unlock(void) { pthread_mutex_unlock(&loading); }

void dp_load_before_fork(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    forks = pthread_mutex_timedlock(&loading, &until) == 0;
}

void dp_load_after_fork(bool child) {
    if (child)
        loading = handlers = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    else if (forks)
        dp_load_unlock();
    forks = false;
}

void dp_handlers_lock(void) { pthread_mutex_lock(&handlers); }

void dp_handlers_unlock(void) { pthread_mutex_unlock(&handlers); }

/* The attacks of the hostile-tenant suite that run as functions in a worker. Each returns text: empty when everything that it tried
 * was refused, else what it got. Functions that measure return their figures instead. The functions of the client's own
 * sandbox test are in the same library. */
#ifndef ATTACK_H
#define ATTACK_H

#include "../../../client/testdata/hostile.h"

#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

/* A worker that is root tries nothing: without a sandbox it would damage the node. The attack has failed the suite then. */
#define ATTACK(name)                                                                                                                   \
    static void name##_runs(char *arg, text *t);                                                                                       \
    FUNCTION(name) {                                                                                                                   \
        char copy[4096];                                                                                                               \
        snprintf(copy, sizeof copy, "%s", arg);                                                                                        \
        if (getuid() == 0 || geteuid() == 0) {                                                                                         \
            say(out, "the worker is root: nothing was tried; ");                                                                       \
            return;                                                                                                                    \
        }                                                                                                                              \
        name##_runs(copy, out);                                                                                                        \
    }                                                                                                                                  \
    static void name##_runs(char *arg, text *t)

/* Notes a call unless it failed with an error that refuses it. Other errors, like EINVAL and EFAULT, mean that the kernel has looked at
 * the arguments. */
static inline void attempt(text *t, const char *what, long result) {
    static const int refusals[] = {EPERM, EACCES, ENOENT, ESRCH, ENOSYS, EROFS, ENOSPC, EAGAIN, ENOTDIR, EMFILE, ENXIO, ENODEV};
    int e = errno;
    if (result >= 0) {
        say(t, "%s: %ld; ", what, result);
        return;
    }
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (e == refusals[i])
            return;
    say(t, "%s: %s; ", what, strerror(e));
}
#define ATTEMPT(t, call) (errno = 0, attempt(t, #call, (long)(call)))

static inline double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static inline void burn(clockid_t clock, double how_long) {
    for (double end = seconds(clock) + how_long; seconds(clock) < end;) {
    }
}

#endif

#include "inherit.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static bool changed[NSIG]; /* signals that do not have their default disposition in the zygote */
static int null = -1;

static void note_signals(void) {
    for (int sig = 1; sig < NSIG; sig++) {
        struct sigaction now;
        changed[sig] = sigaction(sig, NULL, &now) == 0 && now.sa_handler != SIG_DFL; /* fails for the two signals that glibc uses itself */
    }
}

void dp_inherit_prepare(void) {
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && fd < DP_INHERIT_FREE)
        fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    null = fd;
    note_signals();
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash must not lose the last lines */
    setenv("GFORTRAN_UNBUFFERED_PRECONNECTED", "y", 1);
}

int dp_inherit_null(void) {
    if (null < 0)
        null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0 && null < DP_INHERIT_FREE)
        null = fcntl(null, F_DUPFD_CLOEXEC, DP_INHERIT_FREE);
    return null;
}

void dp_inherit_signals(void) {
    for (int sig = 1; sig < NSIG; sig++)
        if (changed[sig])
            signal(sig, SIG_DFL);
}

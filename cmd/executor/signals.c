/* SIGTERM, SIGINT and SIGUSR2 without Go's handler, which loses them in a handover: it accepts a signal for a program that execve ends a moment
 * later, and from the start of the Go runtime to signal.Notify it ends the new program. This handler writes each signal to a pipe.
 * What the old program has not read, the new one reads. */
#define _GNU_SOURCE /* pipe2, RTLD_NEXT */
#include "signals.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int executor_signals = -1;
static int in = -1;
static int (*libc_sigaction)(int, const struct sigaction *, struct sigaction *);

void executor_signals_add(sigset_t *set) {
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGUSR2);
}

/* write() fails only if the pipe has 65,536 unread signals. */
static void on_signal(int sig) {
    int e = errno;
    unsigned char b = (unsigned char)sig;
    if (write(in, &b, 1) < 0) {
    }
    errno = e;
}

/* Runs before the Go runtime starts. execve has kept the signals that came since it reset the handlers: the caller blocks them. */
__attribute__((constructor)) static void receive(void) {
    int fds[2];
    libc_sigaction = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    if (!libc_sigaction || pipe2(fds, O_CLOEXEC | O_NONBLOCK))
        _exit(1);
    executor_signals = fds[0];
    in = fds[1];
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART};
    sigfillset(&a.sa_mask); /* a thread that has accepted a signal writes it before it stops */
    sigset_t set;
    sigemptyset(&set);
    executor_signals_add(&set);
    for (int sig = 1; sig < NSIG; sig++)
        if (sigismember(&set, sig))
            libc_sigaction(sig, &a, NULL);
    a.sa_handler = executor_on_stop;
    libc_sigaction(EXECUTOR_STOP, &a, NULL);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

/* Replaces the C library's function, which the Go runtime calls to install its handlers. */
int sigaction(int sig, const struct sigaction *restrict act, struct sigaction *restrict old) {
    if (sig != SIGTERM && sig != SIGINT && sig != SIGUSR2 && sig != EXECUTOR_STOP)
        return libc_sigaction(sig, act, old);
    if (old)
        *old = (struct sigaction){.sa_handler = SIG_DFL};
    return 0;
}

/* SIGTERM, SIGINT and SIGUSR2 without Go's handler, which loses them in a handover: it may accept a signal just before execve ends the old program. If
 * one comes to the new program after the start of the Go runtime and before signal.Notify, Go's handler ends that program. The handler here writes
 * each signal to a pipe. The new program reads what the old one has not read. */
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

/* Runs before the Go runtime starts. executor_replace blocks the signals, so those that came after execve reset the handlers are still pending. They
 * are delivered at the end of this function. */
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
    sigaddset(&set, EXECUTOR_STOP); /* the program that has started this one may have blocked it, and Go's threads inherit that */
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

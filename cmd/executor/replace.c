/* execve without a lost signal. If execve ends a thread that has accepted a signal and has not yet written it to the pipe, the signal is lost. Go does
 * not let its threads block SIGTERM and SIGINT. So all other threads first stop in a signal handler, in which all signals are blocked. From then on,
 * signals for the process stay pending. A SIGPWR to each thread stops it: the kernel delivers a signal for one thread before those for the process. */
#define _GNU_SOURCE /* struct dirent64, RTLD_NEXT */
#include "signals.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How long to wait for the other threads. Only a thread that blocks all signals after its start does not stop, and such a thread accepts no signal. */
#define PATIENCE_NS 1000000000ll
#define LOOK_NS 1000000 /* between two looks for new threads */
#define THREADS 8192    /* whose stop can be recorded. If there are more, stop_others takes PATIENCE_NS */

static uint32_t turn; /* odd while threads have to stop */
static uint32_t n_stopped;
static uint64_t stopped[THREADS]; /* a turn and a thread */
static struct rlimit files;       /* at the start */

static uint64_t stop_of(uint32_t t, long thread) { return (uint64_t)t << 32 | (uint32_t)thread; }

static void wait_while(uint32_t *word, uint32_t value, const struct timespec *most) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, most, NULL, 0); }

static void wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

void executor_on_stop(int sig) {
    (void)sig;
    int e = errno;
    uint32_t now = __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
    uint32_t at = now % 2 ? __atomic_fetch_add(&n_stopped, 1, __ATOMIC_RELAXED) : THREADS;
    if (at < THREADS) {
        __atomic_store_n(&stopped[at], stop_of(now, syscall(SYS_gettid)), __ATOMIC_RELEASE);
        wake(&n_stopped);
    }
    while (now % 2 && __atomic_load_n(&turn, __ATOMIC_ACQUIRE) == now)
        wait_while(&turn, now, NULL);
    errno = e;
}

__attribute__((constructor)) static void note_files(void) { getrlimit(RLIMIT_NOFILE, &files); }

static bool has_stopped(pid_t thread) {
    uint32_t n = __atomic_load_n(&n_stopped, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < n && i < THREADS; i++)
        if (__atomic_load_n(&stopped[i], __ATOMIC_ACQUIRE) == stop_of(turn, thread))
            return true;
    return false;
}

/* Sends the signal to all other threads that have not stopped. Returns true if there were none. Does not use malloc, because a thread that has
 * stopped may hold malloc's lock. */
static bool stop_threads(int tasks) {
    static _Alignas(struct dirent64) char list[1 << 15];
    pid_t process = getpid(), self = (pid_t)syscall(SYS_gettid);
    bool all = true;
    long n;
    lseek(tasks, 0, SEEK_SET);
    while ((n = syscall(SYS_getdents64, tasks, list, sizeof list)) > 0)
        for (long at = 0; at < n;) {
            const struct dirent64 *d = (const void *)(list + at);
            pid_t thread = (pid_t)strtol(d->d_name, NULL, 10); /* 0: "." or ".." */
            if (thread && thread != self && !has_stopped(thread)) {
                syscall(SYS_tgkill, process, thread, EXECUTOR_STOP);
                all = false;
            }
            at += d->d_reclen;
        }
    return all && n == 0;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* The list of threads may be incomplete if one ends meanwhile. So it is read until two readings in a row find only stopped threads. */
static void stop_others(void) {
    int tasks = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const struct timespec look = {.tv_nsec = LOOK_NS};
    int64_t until = now_ns() + PATIENCE_NS;
    for (int good = 0; tasks >= 0 && good < 2 && now_ns() < until;) {
        uint32_t n = __atomic_load_n(&n_stopped, __ATOMIC_ACQUIRE);
        good = stop_threads(tasks) ? good + 1 : 0;
        if (!good)
            wait_while(&n_stopped, n, &look);
    }
    if (tasks >= 0)
        close(tasks);
}

int executor_replace(const char *path, char *const argv[], char *const envp[]) {
    sigset_t all, old, kept;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    __atomic_store_n(&n_stopped, 0, __ATOMIC_RELAXED); /* records of an execve that failed: they have another turn */
    __atomic_add_fetch(&turn, 1, __ATOMIC_SEQ_CST);
    stop_others();
    struct rlimit raised; /* by Go, which also sets it back before execve */
    getrlimit(RLIMIT_NOFILE, &raised);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){files.rlim_cur, raised.rlim_max});
    kept = old;
    executor_signals_add(&kept);
    pthread_sigmask(SIG_SETMASK, &kept, NULL);
    execve(path, argv, envp);
    int e = errno;
    setrlimit(RLIMIT_NOFILE, &raised);
    __atomic_add_fetch(&turn, 1, __ATOMIC_SEQ_CST);
    wake(&turn);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return e;
}

/* ---- threads that block all signals ---- */

typedef struct beginning {
    void *(*run)(void *);
    void *arg;
} beginning;

static void *begin(void *arg) {
    beginning b = *(beginning *)arg;
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, EXECUTOR_STOP);
    pthread_sigmask(SIG_UNBLOCK, &stop, NULL); /* before free(): a thread that has stopped may hold the lock of malloc */
    free(arg);
    return b.run(b.arg);
}

/* Replaces the C library's function. A new thread inherits the signals that its creator blocks, but begin unblocks SIGPWR, so that the thread can be
 * stopped. A thread that blocks all signals while it creates another one stops when it unblocks them, and stop_others then finds the new thread. */
int pthread_create(pthread_t *restrict thread, const pthread_attr_t *restrict attr, void *(*run)(void *), void *restrict arg) {
    static int (*libc_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!libc_create)
        libc_create = (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    beginning *b = libc_create ? malloc(sizeof *b) : NULL;
    if (!b)
        return EAGAIN;
    *b = (beginning){run, arg};
    int e = libc_create(thread, attr, begin, b);
    if (e)
        free(b);
    return e;
}

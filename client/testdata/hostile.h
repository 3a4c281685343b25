/* What the functions of hostile.c, hostile_limits.c and tests/hostile/testdata have in common. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROOM 2000

typedef struct text {
    char *s;
    uint32_t n;
} text;

__attribute__((format(printf, 2, 3))) static inline void say(text *t, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(t->s + t->n, ROOM - t->n, fmt, ap);
    va_end(ap);
    if (n > 0 && t->n + (uint32_t)n < ROOM)
        t->n += (uint32_t)n;
}

/* The call must fail, with this errno unless it is 0. */
#define REFUSED(call, wanted)                                                                                                          \
    do {                                                                                                                               \
        errno = 0;                                                                                                                     \
        long st_ = (long)(call);                                                                                                       \
        if (st_ >= 0)                                                                                                                  \
            say(&t, "%s: %ld; ", #call, st_);                                                                                          \
        else if ((wanted) && errno != (wanted))                                                                                        \
            say(&t, "%s: %s; ", #call, strerror(errno));                                                                               \
    } while (0)

#define FUNCTION(name)                                                                                                                 \
    uint32_t name(void *args, uint32_t size, void *res);                                                                               \
    static void name##_tries(const char *arg, text *out);                                                                              \
    uint32_t name(void *args, uint32_t size, void *res) {                                                                              \
        char arg[4096] = "";                                                                                                           \
        memcpy(arg, args, size < sizeof arg ? size : sizeof arg - 1);                                                                  \
        text out = {res, 0};                                                                                                           \
        name##_tries(arg, &out);                                                                                                       \
        return out.n;                                                                                                                  \
    }                                                                                                                                  \
    static void name##_tries(const char *arg, text *out)

static inline int reads(const char *path) {
    char c;
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, &c, 1);
    close(fd);
    return n < 0 ? -1 : 0;
}

static inline int writes(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT, 0666);
    if (fd < 0)
        return -1;
    close(fd);
    return 0;
}

/* Clones a process that ends at once. */
static inline int cloned(unsigned long flags) {
    long pid = syscall(SYS_clone, flags | SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0)
        _exit(0);
    if (pid > 0)
        waitpid((pid_t)pid, NULL, 0);
    return (int)pid;
}

#endif

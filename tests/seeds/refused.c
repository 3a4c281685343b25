#define _GNU_SOURCE
/* What cannot be kept: the payload names what setup leaves behind. */
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <dlfcn.h>
#include <unistd.h>

static void *volatile kept;
static void handler(int s) { (void)s; }
static void *rest(void *unused) {
    for (;;)
        pause();
    return unused;
}

extern uint32_t rfaas_fail(const char *text);
uint32_t setup(void *in, uint32_t size, void *out) {
    (void)size;
    const char *way = in;
    pthread_t t;
    if (!strcmp(way, "threads"))
        pthread_create(&t, NULL, rest, NULL);
    else if (!strcmp(way, "files"))
        return open("/dev/null", O_RDONLY) < 0;
    else if (!strcmp(way, "handler"))
        signal(SIGUSR1, handler);
    else if (!strcmp(way, "mask")) {
        sigset_t s;
        sigemptyset(&s);
        sigaddset(&s, SIGUSR2);
        sigprocmask(SIG_BLOCK, &s, NULL);
    } else if (!strcmp(way, "mode mask"))
        umask(0123);
    else if (!strcmp(way, "environment"))
        setenv("SEED_TEST", "1", 1);
    else if (!strcmp(way, "directory"))
        return chdir("/") != 0;
    else if (!strcmp(way, "locale"))
        setlocale(LC_ALL, "C.UTF-8");
    else if (!strcmp(way, "thread's locale"))
        uselocale(newlocale(LC_ALL_MASK, "C.UTF-8", (locale_t)0));
    else if (!strcmp(way, "handler's flags")) {
        struct sigaction a;
        sigaction(SIGTERM, NULL, &a);
        a.sa_flags ^= SA_RESTART;
        sigaction(SIGTERM, &a, NULL);
    } else if (!strcmp(way, "CPUs")) {
        cpu_set_t one;
        sched_getaffinity(0, sizeof one, &one);
        for (int i = 0, found = 0; i < CPU_SETSIZE; i++)
            if (CPU_ISSET(i, &one) && found++)
                CPU_CLR(i, &one);
        sched_setaffinity(0, sizeof one, &one);
    } else if (!strcmp(way, "kernel's timer")) {
        timer_t t;
        struct sigevent none = {.sigev_notify = SIGEV_NONE};
        timer_create(CLOCK_MONOTONIC, &none, &t);
    } else if (!strcmp(way, "rounding"))
        fesetround(FE_UPWARD);
    else if (!strcmp(way, "child")) {
        if (!syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL)) /* fork() is refused by itself */
            rest(NULL);
    } else if (!strcmp(way, "timer")) {
        struct itimerval v = {.it_value = {.tv_sec = 1000}};
        setitimer(ITIMER_PROF, &v, NULL);
    } else if (!strcmp(way, "library"))
        dlopen("libresolv.so.2", RTLD_NOW);
    else if (!strcmp(way, "payload"))
        kept = in;
    else if (!strcmp(way, "result"))
        kept = out;
    else if (!strcmp(way, "stack"))
        kept = &way;
    else if (!strcmp(way, "memory"))
        kept = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    else if (!strcmp(way, "fork")) {
        pid_t child = fork();
        if (!child)
            _exit(0);
        waitpid(child, NULL, 0);
    }
    else if (!strcmp(way, "heap")) {
        const void **list = malloc(5 * sizeof *list);
        memcpy(list, (const void *[]){&way, list, in, stdout, (void *)rest}, 5 * sizeof *list); /* the 2nd, 4th and 5th are the same in all workers */
        kept = list;
    } else if (!strcmp(way, "unreadable")) {
        void *page = NULL;
        if (posix_memalign(&page, 4096, 4096))
            return rfaas_fail("posix_memalign failed");
        memset(page, 1, 4096);
        mprotect(page, 4096, PROT_NONE); /* as below the stack of a coroutine */
        kept = page;
    } else if (!strcmp(way, "sleep"))
        rest(NULL);
    return 0;
}
uint32_t fails(void *in, uint32_t size, void *out) { return (void)in, (void)size, (void)out, rfaas_fail("on purpose"); }
uint32_t crashes(void *in, uint32_t size, void *out) { return (void)in, (void)size, (void)out, (uint32_t)kill(getpid(), SIGKILL); }
/* Allocates memory until malloc fails. */
uint32_t greedy(void *in, uint32_t size, void *out) {
    unsigned mib = 0;
    (void)in, (void)size, (void)out;
    for (char *p; (p = malloc(1 << 20)); mib++)
        memset(p, 1, 1 << 20);
    char text[64];
    snprintf(text, sizeof text, "allocated %u MiB", mib);
    return rfaas_fail(text);
}
uint32_t query(void *in, uint32_t size, void *out) { return (void)in, (void)size, (void)out, 0u; }

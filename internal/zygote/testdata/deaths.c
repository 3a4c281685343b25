/* Functions that end their worker in every way we know; by name, see death_test.go. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rfaas_function.h"

#define FUNCTION(name) uint32_t name(__attribute__((unused)) void *args, __attribute__((unused)) uint32_t size, \
                                     __attribute__((unused)) void *res)

FUNCTION(echo) {
    memcpy(res, args, size);
    return size;
}

/* Not exported: only the symbol table has its name. */
static __attribute__((noinline)) void hidden_inner(volatile int *p) {
    printf("about to crash\n");
    *p = 1;
    printf("not reached\n");
}

__attribute__((noinline)) void visible_middle(volatile int *p) {
    hidden_inner(p);
    printf("not reached\n");
}

FUNCTION(segv) {
    visible_middle((int *)8);
    return 0;
}

/* A page of a file beyond the file's end. */
FUNCTION(bus) {
    int fd = memfd_create("short", 0);
    char *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    p[5] = 1;
    return 0;
}

FUNCTION(fpe) {
    volatile int zero = 0;
    return (uint32_t)(*(int *)args / zero);
}

FUNCTION(ill) { __builtin_trap(); }

FUNCTION(aborts) { abort(); }

FUNCTION(frees_twice) {
    void *volatile p = malloc(32);
    free(p);
    free(p);
    return 0;
}

FUNCTION(exits) { exit(*(unsigned char *)args); }

FUNCTION(quits) { _exit(*(unsigned char *)args); }

FUNCTION(recurses) {
    volatile char frame[512];
    frame[0] = 1;
    return size == UINT32_MAX ? 0 : recurses((void *)frame, size + 1, res) + (uint32_t)frame[0];
}

/* One frame that is larger than the stack. */
FUNCTION(large_frame) {
    volatile char frame[256 << 20];
    frame[size] = 1;
    frame[128 << 20] = 1;
    return (uint32_t)frame[size];
}

static int nothing(void) { return 0; }

FUNCTION(jumps) {
    int (*volatile nowhere)(void) = size ? nothing : NULL;
    return (uint32_t)nowhere() + 1;
}

FUNCTION(wild) {
    *(volatile int *)0x8000000000000000 = 1;
    return 0;
}

FUNCTION(kills_itself) {
    kill(getpid(), SIGUSR1);
    for (;;)
        pause();
}

FUNCTION(stops_itself) {
    raise(SIGSTOP);
    return 0;
}

static void *crash_in_thread(void *arg) {
    *(volatile int *)16 = 1;
    return arg;
}

FUNCTION(crashes_in_thread) {
    pthread_t t;
    pthread_create(&t, NULL, crash_in_thread, NULL);
    pthread_join(t, NULL);
    return 0;
}

/* Does what a program does that never checks an allocation; args: u64 bytes. */
FUNCTION(eats_memory) {
    uint64_t n;
    memcpy(&n, args, sizeof n);
    char *p = malloc(n);
    for (uint64_t i = 0; i < n; i += 4096)
        *(volatile char *)&p[i] = 1; /* or the compiler drops it all */
    return 0;
}

static __attribute__((noinline)) void spin_here(void) {
    for (volatile uint64_t i = 0;; i++) {
    }
}

FUNCTION(loops) {
    spin_here();
    return 0;
}

/* Loops with every signal blocked. */
FUNCTION(loops_deaf) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    spin_here();
    return 0;
}

FUNCTION(sleeps) {
    uint64_t ms;
    memcpy(&ms, args, sizeof ms);
    usleep((useconds_t)ms * 1000);
    return 0;
}

/* Lives on without answering, and its page reports that it is idle: the worst case of a worker whose memory a function has damaged. */
FUNCTION(falls_silent) {
    char line[256];
    unsigned long at = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && !at && fgets(line, sizeof line, f))
        if (strstr(line, "rfaas-page"))
            at = strtoul(line, NULL, 16);
    if (!at)
        return rfaas_fail("no page");
    volatile uint64_t *page = (uint64_t *)at;
    page[1] = page[0] >> 16; /* as many calls have ended as have begun */
    for (;;)
        pause();
}

/* Overwrites what the process may write: its shared mappings, and with bit 8 of the u32 in args the private ones too,
 * except the stack that it runs on and the device's own queues. The low byte is what it writes, 1: random bytes. Runs on
 * what it has in registers and on the stack. The result is a u32: how many mappings it has overwritten, 0 if there were more than it
 * could list. */
__attribute__((optimize("no-tree-loop-distribute-patterns"))) FUNCTION(scribbles) {
    static char maps[1 << 16];
    uint32_t how;
    memcpy(&how, args, sizeof how);
    int fd = open("/proc/self/maps", O_RDONLY), n = 0, got;
    while ((got = (int)read(fd, maps + n, sizeof maps - 1 - (size_t)n)) > 0)
        n += got;
    close(fd);
    struct {
        volatile uint64_t *from, *to;
    } areas[256];
    int areas_n = 0;
    for (char *line = strtok(maps, "\n"); line && areas_n < 256; line = strtok(NULL, "\n")) {
        unsigned long from, to;
        char mode[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3 || mode[1] != 'w' || strstr(line, "/dev/infiniband") ||
            strstr(line, "[stack]") || (mode[3] != 's' && !(how & 256)))
            continue;
        areas[areas_n].from = (uint64_t *)from;
        areas[areas_n++].to = (uint64_t *)to;
    }
    uint64_t what = (how & 255) * 0x0101010101010101u;
    for (int i = 0; i < areas_n; i++)
        for (volatile uint64_t *p = areas[i].from; p < areas[i].to; p++) {
            if ((how & 255) == 1) {
                what ^= what << 13;
                what ^= what >> 7;
                what ^= what << 17;
            }
            *p = what;
        }
    uint32_t written = areas_n == 256 || n == (int)sizeof maps - 1 ? 0 : (uint32_t)areas_n;
    memcpy(res, &written, sizeof written);
    return sizeof written;
}

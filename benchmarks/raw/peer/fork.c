#include "fork.h"

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 301 };

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int bench_fork(void) {
    static int64_t first[ROUNDS], whole[ROUNDS];
    int *word = mmap(NULL, sizeof *word, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (word == MAP_FAILED) {
        fprintf(stderr, "rfaas-bench-peer: memory: %s\n", strerror(errno));
        return 1;
    }
    for (int i = 0; i < ROUNDS; i++) {
        __atomic_store_n(word, 0, __ATOMIC_RELAXED);
        int64_t began = now_ns();
        pid_t child = fork();
        if (child == 0) {
            __atomic_store_n(word, 1, __ATOMIC_RELEASE);
            _exit(0);
        }
        if (child < 0) {
            fprintf(stderr, "rfaas-bench-peer: fork: %s\n", strerror(errno));
            return 1;
        }
        while (!__atomic_load_n(word, __ATOMIC_ACQUIRE))
            sched_yield();
        first[i] = now_ns() - began;
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
            ;
        whole[i] = now_ns() - began;
    }
    qsort(first, ROUNDS, sizeof *first, compare);
    qsort(whole, ROUNDS, sizeof *whole, compare);
    printf("%.0f us to the child's first word, %.0f us until it is reaped\n", (double)first[ROUNDS / 2] / 1e3, (double)whole[ROUNDS / 2] / 1e3);
    return 0;
}

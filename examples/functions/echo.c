/* Functions for tests and benchmarks: fast ones, and ones that misbehave in every known way. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "rfaas_function.h"

#define FUNCTION __attribute__((visibility("default")))

static uint64_t argument(const void *args, uint32_t size) {
    uint64_t v = 0;
    memcpy(&v, args, size < sizeof v ? size : sizeof v);
    return v;
}

static uint32_t answer(void *res, uint64_t v) {
    memcpy(res, &v, sizeof v);
    return sizeof v;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Does nothing: measures the cost of a call itself. */
FUNCTION uint32_t empty(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    return 0;
}

/* Returns its payload. */
FUNCTION uint32_t echo(void *args, uint32_t size, void *res) {
    memcpy(res, args, size);
    return size;
}

/* Returns the sum of the payload's bytes, as u64: a large payload and a small result. */
FUNCTION uint32_t sum(void *args, uint32_t size, void *res) {
    const unsigned char *p = args;
    uint64_t s = 0;
    for (uint32_t i = 0; i < size; i++)
        s += p[i];
    return answer(res, s);
}

/* Returns how often this worker was called, from 1. State lasts as long as the worker. */
FUNCTION uint32_t count(void *args, uint32_t size, void *res) {
    static uint64_t calls;
    (void)args;
    (void)size;
    return answer(res, ++calls);
}

/* Returns the process id of the worker. */
FUNCTION uint32_t pid(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    return answer(res, (uint64_t)getpid());
}

/* Uses the core for u64 ns. */
FUNCTION uint32_t spin(void *args, uint32_t size, void *res) {
    uint64_t end = now_ns() + argument(args, size);
    while (now_ns() < end) {
    }
    return answer(res, end);
}

/* Sleeps for u64 ns. */
FUNCTION uint32_t sleep_ns(void *args, uint32_t size, void *res) {
    uint64_t ns = argument(args, size);
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) && errno == EINTR) {
    }
    return answer(res, ns);
}

/* Ends the worker by a segmentation fault. */
FUNCTION uint32_t crash(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    int *volatile nowhere = (int *)8;
    *nowhere = 1;
    return 0;
}

/* Ends the worker by abort. */
FUNCTION uint32_t call_abort(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    abort();
}

/* Ends the worker with exit status u64. */
FUNCTION uint32_t call_exit(void *args, uint32_t size, void *res) {
    (void)res;
    _exit((int)argument(args, size));
}

/* Claims a result one byte larger than the capacity, and writes nothing. */
FUNCTION uint32_t too_large(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    return rfaas_result_capacity() + 1;
}

/* Prints the payload. Errors of a call contain what its function printed. */
FUNCTION uint32_t print(void *args, uint32_t size, void *res) {
    (void)res;
    printf("%.*s\n", (int)size, (const char *)args);
    fflush(stdout);
    return 0;
}

/* Prints the payload, then crashes. */
FUNCTION uint32_t print_and_crash(void *args, uint32_t size, void *res) {
    print(args, size, res);
    return crash(args, size, res);
}

/* Fails with the payload as its message. */
FUNCTION uint32_t fail(void *args, uint32_t size, void *res) {
    (void)res;
    return rfaas_fail("%.*s", (int)size, size ? (const char *)args : "");
}

/* Allocates and touches u64 bytes, and keeps them. */
FUNCTION uint32_t allocate(void *args, uint32_t size, void *res) {
    size_t n = (size_t)argument(args, size);
    char *p = malloc(n);
    if (!p)
        return rfaas_fail("malloc of %zu bytes: %s", n, strerror(errno));
    memset(p, 1, n);
    return answer(res, (uint64_t)(uintptr_t)p);
}

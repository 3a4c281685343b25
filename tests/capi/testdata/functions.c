/* Functions for batch_test.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "rfaas_function.h"

/* Each u64, doubled. */
uint32_t twice(void *args, uint32_t size, void *res) {
    const uint64_t *in = args;
    uint64_t *out = res;
    for (uint32_t i = 0; i < size / 8; i++)
        out[i] = 2 * in[i];
    return size;
}

/* What it got. */
uint32_t same(void *args, uint32_t size, void *res) {
    memcpy(res, args, size);
    return size;
}

/* One byte less than it should. */
uint32_t odd(void *args, uint32_t size, void *res) { return twice(args, size, res) - 1; }

/* Does not take 700. */
uint32_t picky(void *args, uint32_t size, void *res) {
    if (*(uint64_t *)args == 700)
        return rfaas_fail("item 700 is not to my taste");
    return twice(args, size, res);
}

/* 5 ms an item. */
uint32_t slow(void *args, uint32_t size, void *res) {
    struct timespec t = {0, 5000000 * (long)(size / 8)};
    while (nanosleep(&t, &t) && errno == EINTR) {
    }
    return twice(args, size, res);
}

/* Fails for 0, and takes 50 ms for each other item. */
uint32_t late(void *args, uint32_t size, void *res) {
    struct timespec t = {0, 50000000 * (long)(size / 8)};
    if (*(uint64_t *)args == 0)
        return rfaas_fail("item 0 fails");
    while (nanosleep(&t, &t) && errno == EINTR) {
    }
    return twice(args, size, res);
}

/* Fails for 0, and takes for ever for all others. */
uint32_t never(void *args, uint32_t size, void *res) {
    (void)size;
    (void)res;
    if (*(uint64_t *)args == 0)
        return rfaas_fail("item 0 fails");
    for (;;)
        pause();
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Computes for as many ns as each item says, all together. */
uint32_t busy(void *args, uint32_t size, void *res) {
    uint64_t end = now_ns(), *in = args, *out = res;
    for (uint32_t i = 0; i < size / 8; i++) {
        end += in[i];
        while (now_ns() < end) {
        }
        out[i] = in[i];
    }
    return size;
}

/* Of each u64 i, the doubles 1 / (i + 3) and i. Item 0 takes 30 ms, so that later ones are ready before it. */
uint32_t fractions(void *args, uint32_t size, void *res) {
    const uint64_t *in = args;
    double *out = res;
    struct timespec t = {0, 30000000};
    while (in[0] == 0 && nanosleep(&t, &t) && errno == EINTR) {
    }
    for (uint32_t i = 0; i < size / 8; i++) {
        out[2 * i] = 1 / ((double)in[i] + 3);
        out[2 * i + 1] = (double)in[i];
    }
    return 2 * size;
}

static uint64_t kept;

/* Keeps a u64, as an init call. */
uint32_t keep(void *args, uint32_t size, void *res) {
    (void)res;
    kept = size == sizeof kept ? *(uint64_t *)args : 0;
    return 0;
}

/* Returns what the init call has kept. */
uint32_t what_was_kept(void *args, uint32_t size, void *res) {
    (void)args;
    if (!kept)
        return rfaas_fail_code(-5, "nothing was kept, %u bytes", size);
    *(uint64_t *)res = kept;
    return sizeof kept;
}

/* Copies the first and the last 8 bytes, and leaves the rest of the result as it is. */
uint32_t ends(void *args, uint32_t size, void *res) {
    const uint64_t *in = args;
    uint64_t *out = res;
    out[0] = in[0];
    out[size / 8 - 1] = in[size / 8 - 1];
    return size;
}

/* Makes as many bytes as the u64 says, and writes the first 8. The payload of the next function, by a chain or by two calls. */
uint32_t spread(void *args, uint32_t size, void *res) {
    (void)size;
    memcpy(res, args, 8);
    return (uint32_t)*(uint64_t *)args;
}

/* Returns the first 8 bytes. */
uint32_t head(void *args, uint32_t size, void *res) {
    (void)size;
    memcpy(res, args, 8);
    return 8;
}

/* Writes to its payload. */
uint32_t scribble(void *args, uint32_t size, void *res) {
    memset(args, 0xEE, size);
    *(uint64_t *)res = size;
    return 8;
}

/* Returns when the first byte of its payload is no longer 0, or after 10 s. Writes to the whole result then. */
uint32_t watch(void *args, uint32_t size, void *res) {
    const volatile uint8_t *flag = args;
    for (uint64_t end = now_ns() + 10000000000u; !*flag && now_ns() < end;) {
    }
    memset(res, 0x77, size);
    return size;
}

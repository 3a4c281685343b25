/* The computation of the fault tests, whose result identifies its payload. The function (work.c) and its callers in C share
 * it; work_test.go does the same in Go.
 *
 * A payload is a work_head and any number of further bytes. The result is `want` bytes computed from a hash of the
 * whole payload, tag included. Every call has its own tag, so no result is right for two calls. */
#ifndef WORK_H
#define WORK_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct work_head {
    uint64_t tag;
    uint32_t want;     /* bytes of the result */
    uint32_t pause_us; /* how long the function sleeps before it returns */
} work_head;
_Static_assert(sizeof(work_head) == 16, "work_test.go has these offsets");

static inline uint64_t work_mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t work_word(const void *p, size_t n) {
    uint64_t w = 0;
    memcpy(&w, p, n < 8 ? n : 8);
    return w;
}

static inline uint64_t work_hash(const void *data, size_t size) {
    const uint8_t *p = data;
    uint64_t h = size * 0x9e3779b97f4a7c15u;
    for (; size >= 8; p += 8, size -= 8) {
        h = (h ^ work_word(p, 8)) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return work_mix(h ^ work_word(p, size));
}

/* Byte i of the result of a hash is byte i % 8 of word i / 8. */
static inline void work_fill(void *out, size_t size, uint64_t hash) {
    uint8_t *p = out;
    for (uint64_t i = 1; size; i++) {
        uint64_t w = work_mix(hash + i * 0x9e3779b97f4a7c15u);
        size_t n = size < 8 ? size : 8;
        memcpy(p, &w, n);
        p += n;
        size -= n;
    }
}

static inline bool work_is(const void *data, size_t size, uint64_t hash) {
    const uint8_t *p = data;
    for (uint64_t i = 1; size; i++) {
        uint64_t w = work_mix(hash + i * 0x9e3779b97f4a7c15u);
        size_t n = size < 8 ? size : 8;
        if (memcmp(p, &w, n))
            return false;
        p += n;
        size -= n;
    }
    return true;
}

#endif

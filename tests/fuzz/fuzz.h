/* Helpers for fuzz targets. A target is a file fuzz_NAME.c with LLVMFuzzerTestOneInput; see README.md. */
#ifndef RFAAS_FUZZ_H
#define RFAAS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What must hold whatever the input is. */
#define MUST(cond)                                                                                                     \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: MUST(%s)\n", __FILE__, __LINE__, #cond);                                           \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* The input, read piece by piece; zeros after its end. */
typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static inline void take(input *in, void *out, size_t n) {
    size_t have = n < in->left ? n : in->left;
    memset(out, 0, n);
    if (have)
        memcpy(out, in->at, have);
    in->at += have;
    in->left -= have;
}

static inline uint8_t take8(input *in) {
    uint8_t v;
    take(in, &v, sizeof v);
    return v;
}

static inline uint16_t take16(input *in) {
    uint16_t v;
    take(in, &v, sizeof v);
    return v;
}

static inline uint32_t take32(input *in) {
    uint32_t v;
    take(in, &v, sizeof v);
    return v;
}

static inline uint64_t take64(input *in) {
    uint64_t v;
    take(in, &v, sizeof v);
    return v;
}

/* A copy of n bytes in memory of exactly that size, so that the sanitizer detects reads beyond it. The caller frees it. */
static inline void *exact_copy(const void *data, size_t n) {
    void *p = malloc(n ? n : 1);
    MUST(p);
    if (n)
        memcpy(p, data, n);
    return p;
}

#endif

/* Counts how many of n points of a square are in the quarter circle. The seed determines the points, in whole numbers, so the
 * count is the same everywhere. */
#include <string.h>

#include "rfaas_function.h"

static uint64_t next(uint64_t *state) { /* SplitMix64 */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Input: {u64 seed, u64 n}. Result: u64 count. */
__attribute__((visibility("default"))) uint32_t circle(void *args, uint32_t size, void *res) {
    uint64_t in[2], hits = 0;
    if (size != sizeof in)
        return rfaas_fail("the payload has %u bytes, want the 16 of a seed and a number of points", size);
    memcpy(in, args, sizeof in);
    for (uint64_t i = 0; i < in[1]; i++) {
        uint64_t r = next(&in[0]), x = r >> 33, y = r & 0x7fffffff;
        hits += x * x + y * y < (uint64_t)1 << 62;
    }
    memcpy(res, &hits, sizeof hits);
    return sizeof hits;
}

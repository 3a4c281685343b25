#include "dp_pieces.h"

#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline)) /* a copy of the code for each direction and common size of elements */

dp_pieces_fault dp_pieces_size(const dp_pieces *p, size_t *size, size_t *bad) {
    size_t sum = 0;
    for (size_t i = 0; i < p->n; i++) {
        const dp_piece *e = &p->at[i];
        size_t bytes, distance = e->stride < 0 ? -(size_t)e->stride : (size_t)e->stride;
        *bad = i;
        if (e->size && e->count && !e->base)
            return DP_PIECES_NULL;
        if (e->size && e->count > 1 && distance < e->size)
            return DP_PIECES_STRIDE;
        if (__builtin_mul_overflow(e->size, e->count, &bytes) || __builtin_add_overflow(sum, bytes, &sum))
            sum = SIZE_MAX; /* every further addition overflows, too, or adds 0 */
    }
    *size = sum;
    return DP_PIECES_GOOD;
}

static ALWAYS_INLINE void copy(uint8_t *piece, uint8_t *flat, size_t n, int gathers) {
    if (gathers)
        memcpy(flat, piece, n);
    else
        memcpy(piece, flat, n);
}

static ALWAYS_INLINE void copy_elements(uint8_t *at, uint8_t *flat, size_t size, size_t count, ptrdiff_t stride, int gathers) {
    for (; count; count--, at += stride, flat += size)
        copy(at, flat, size, gathers);
}

/* Copies between the first bytes of the pieces and `left` consecutive bytes. */
static ALWAYS_INLINE void copy_all(const dp_pieces *p, uint8_t *flat, size_t left, int gathers) {
    for (const dp_piece *e = p->at; left; e++) {
        size_t size = e->size, bytes = left; /* the product of size and count may be larger than a size_t can say */
        if (!size || e->count <= left / size)
            bytes = size * e->count;
        uint8_t *at = e->base;
        if (!bytes)
            continue;
        if (e->count == 1 || e->stride == (ptrdiff_t)size) {
            copy(at, flat, bytes, gathers);
        } else {
            size_t count = bytes / size, rest = bytes % size;
            switch (size) {
            case 4:
                copy_elements(at, flat, 4, count, e->stride, gathers);
                break;
            case 8:
                copy_elements(at, flat, 8, count, e->stride, gathers);
                break;
            case 16:
                copy_elements(at, flat, 16, count, e->stride, gathers);
                break;
            default:
                copy_elements(at, flat, size, count, e->stride, gathers);
            }
            if (rest)
                copy(at + (ptrdiff_t)count * e->stride, flat + count * size, rest, gathers);
        }
        flat += bytes;
        left -= bytes;
    }
}

void dp_gather(void *to, const dp_pieces *p, size_t size) { copy_all(p, to, size, 1); }

void dp_scatter(const dp_pieces *p, const void *from, size_t size) { copy_all(p, (uint8_t *)from, size, 0); }

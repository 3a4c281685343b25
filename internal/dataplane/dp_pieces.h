/* Payloads and results in several pieces of memory. Workers do not see them: a payload is gathered before it is sent, and a result is
 * scattered after it has arrived. */
#ifndef RFAAS_DP_PIECES_H
#define RFAAS_DP_PIECES_H

#include <stddef.h>
#include <stdint.h>

/* `count` elements of `size` bytes each. `stride` is the distance in bytes from the beginning of one element to that of the next. */
typedef struct dp_piece {
    void *base;
    size_t size, count;
    ptrdiff_t stride;
} dp_piece;

typedef struct dp_pieces {
    const dp_piece *at;
    size_t n;
} dp_pieces;

/* What is wrong with a piece. */
typedef enum dp_pieces_fault {
    DP_PIECES_GOOD,
    DP_PIECES_NULL,   /* bytes at NULL */
    DP_PIECES_STRIDE, /* elements that overlap each other */
} dp_pieces_fault;

/* dp_pieces_size checks the pieces and adds up their bytes, in the order of the array. *size is SIZE_MAX if the sum is larger than that.
 * After a fault, *bad is the index of the piece. */
dp_pieces_fault dp_pieces_size(const dp_pieces *p, size_t *size, size_t *bad);
/* dp_gather copies the first `size` bytes of the pieces to consecutive memory. */
void dp_gather(void *to, const dp_pieces *p, size_t size);
/* dp_scatter copies `size` bytes to the first bytes of the pieces, in the order of the array. */
void dp_scatter(const dp_pieces *p, const void *from, size_t size);

#endif

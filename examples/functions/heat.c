/* Heat on a plate: a block of columns that stays in the worker between calls. Each step transfers only the two columns
 * beside the block and the block's two outermost columns. Columns are contiguous doubles, as in Fortran. */
#include <math.h>
#include <string.h>

#include "rfaas_function.h"

#define FUNCTION __attribute__((visibility("default")))

#define CELLS_MAX (1u << 20)

typedef struct block {
    int64_t rows, columns; /* 0: none yet; rows include the fixed edge, columns not */
    double *now, *next;    /* (columns + 2) * rows each; the first and the last column belong to neighbours */
    double cells[];
} block;

static block *mine(void) { return rfaas_state(sizeof(block) + 2 * sizeof(double) * CELLS_MAX, NULL); }

/* Input: {i64 rows, i64 columns, rows * columns doubles}, which the worker keeps. */
FUNCTION uint32_t heat_begin(void *args, uint32_t size, void *res) {
    (void)res;
    int64_t shape[2];
    block *b = mine();
    if (!b)
        return rfaas_fail("no memory for %u cells", CELLS_MAX);
    if (size < sizeof shape)
        return rfaas_fail("the payload has %u bytes, want at least the 16 of the numbers of rows and columns", size);
    memcpy(shape, args, sizeof shape);
    if (shape[0] < 3 || shape[0] > CELLS_MAX || shape[1] < 1 || shape[1] > CELLS_MAX ||
        shape[0] * (shape[1] + 2) > CELLS_MAX || size != sizeof shape + 8u * (uint64_t)(shape[0] * shape[1]))
        return rfaas_fail("%u bytes for %lld x %lld cells, want 3 rows or more and at most %u cells", size,
                          (long long)shape[0], (long long)shape[1], CELLS_MAX);
    b->rows = shape[0];
    b->columns = shape[1];
    b->now = b->cells;
    b->next = b->cells + CELLS_MAX;
    memcpy(b->now + b->rows, (char *)args + sizeof shape, size - sizeof shape);
    memcpy(b->next + b->rows, (char *)args + sizeof shape, size - sizeof shape); /* the edge does not change */
    return 0;
}

/* Input: the columns to the left and to the right. Result: the block's first and last column after the step. */
FUNCTION uint32_t heat_step(void *args, uint32_t size, void *res) {
    block *b = mine();
    if (!b || !b->columns)
        return rfaas_fail("this worker has no block: call heat_begin first");
    size_t m = (size_t)b->rows, bytes = m * sizeof(double);
    if (size != 2 * bytes)
        return rfaas_fail("the payload has %u bytes, want two columns of %zu", size, bytes);
    memcpy(b->now, args, bytes);
    memcpy(b->now + (size_t)(b->columns + 1) * m, (char *)args + bytes, bytes);
    for (int64_t j = 1; j <= b->columns; j++) {
        const double *c = b->now + (size_t)j * m, *l = c - m, *r = c + m;
        double *to = b->next + (size_t)j * m;
        for (size_t i = 1; i + 1 < m; i++)
            to[i] = 0.25 * ((l[i] + r[i]) + (c[i - 1] + c[i + 1]));
    }
    double *t = b->now;
    b->now = b->next;
    b->next = t;
    memcpy(res, b->now + m, bytes);
    memcpy((char *)res + bytes, b->now + (size_t)b->columns * m, bytes);
    return (uint32_t)(2 * bytes);
}

/* Result: the whole block. */
FUNCTION uint32_t heat_end(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    block *b = mine();
    if (!b || !b->columns)
        return rfaas_fail("this worker has no block: call heat_begin first");
    uint32_t bytes = (uint32_t)(b->rows * b->columns) * 8;
    memcpy(res, b->now + b->rows, bytes);
    return bytes;
}

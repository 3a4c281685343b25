/* Rows of a matrix product. The second matrix is sent once and stays in the worker. Each further call sends any number of rows
 * of the first matrix and returns rows of the product. Matrices are doubles, by rows. */
#include <string.h>

#include "rfaas_function.h"

#define FUNCTION __attribute__((visibility("default")))

typedef struct matrix {
    uint64_t n; /* rows and columns; 0: no matrix yet */
    double a[];
} matrix;

#define N_MAX 2048

static matrix *mine(void) { return rfaas_state(sizeof(matrix) + sizeof(double) * N_MAX * N_MAX, NULL); }

/* Input: {u64 n, n * n doubles}. The worker keeps the matrix. */
FUNCTION uint32_t matmul_keep(void *args, uint32_t size, void *res) {
    (void)res;
    const matrix *in = args;
    matrix *b = mine();
    if (!b)
        return rfaas_fail("no memory for a matrix of %d x %d", N_MAX, N_MAX);
    if (size < sizeof *in || in->n == 0 || in->n > N_MAX || size != sizeof *in + sizeof(double) * in->n * in->n)
        return rfaas_fail("the payload has %u bytes, which is not a square matrix of at most %d rows", size, N_MAX);
    memcpy(b, in, size);
    return 0;
}

/* Input: rows of n doubles. Result: as many rows of the product. */
FUNCTION uint32_t matmul_rows(void *args, uint32_t size, void *res) {
    const double *a = args;
    double *c = res;
    const matrix *b = mine();
    uint32_t n = b ? (uint32_t)b->n : 0;
    if (n == 0)
        return rfaas_fail("this worker has no matrix: call matmul_keep first");
    if (size % (n * sizeof *a))
        return rfaas_fail("the payload has %u bytes, which are not whole rows of %u numbers", size, n);
    uint32_t rows = size / (n * (uint32_t)sizeof *a);
    memset(c, 0, size);
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t k = 0; k < n; k++)
            for (uint32_t j = 0; j < n; j++)
                c[i * n + j] += a[i * n + k] * b->a[k * n + j];
    return size;
}

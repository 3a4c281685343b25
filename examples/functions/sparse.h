/* Rows of a sparse matrix and their product with a vector. The program and the function of its workers use the same code. It adds each row's
 * products in the same order, so results are equal bit by bit. */
#ifndef SPARSE_H
#define SPARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Consecutive rows. Three arrays follow the structure: the value of each entry (double), the column of each entry (uint32_t), and the number of the
 * first entry of each row (uint32_t) with one more for the end. */
typedef struct sparse_rows {
    uint64_t rows, columns, entries;
    double value[];
} sparse_rows;

static inline uint32_t *sparse_column(const sparse_rows *a) { return (uint32_t *)(a->value + a->entries); }
static inline uint32_t *sparse_start(const sparse_rows *a) { return sparse_column(a) + a->entries; }

static inline size_t sparse_size(uint64_t rows, uint64_t entries) {
    return sizeof(sparse_rows) + entries * (sizeof(double) + sizeof(uint32_t)) + (rows + 1) * sizeof(uint32_t);
}

/* Whether `size` bytes are rows whose columns are all below a->columns. */
static inline bool sparse_valid(const sparse_rows *a, size_t size) {
    if (size < sizeof *a || a->rows > UINT32_MAX || a->columns > UINT32_MAX || a->entries > UINT32_MAX || size != sparse_size(a->rows, a->entries))
        return false;
    const uint32_t *column = sparse_column(a), *start = sparse_start(a);
    for (uint64_t i = 0; i < a->entries; i++)
        if (column[i] >= a->columns)
            return false;
    for (uint64_t i = 0; i < a->rows; i++)
        if (start[i] > start[i + 1])
            return false;
    return start[a->rows] <= a->entries;
}

/* y = a x */
static inline void sparse_multiply(const sparse_rows *a, const double *x, double *y) {
    const uint32_t *column = sparse_column(a), *start = sparse_start(a);
    for (uint64_t i = 0; i < a->rows; i++) {
        double sum = 0;
        for (uint32_t k = start[i]; k < start[i + 1]; k++)
            sum += a->value[k] * x[column[k]];
        y[i] = sum;
    }
}

#endif

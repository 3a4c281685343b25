/* Products of a sparse matrix with vectors. The program publishes the rows of the matrix once, as the table "rows". */
#include "rfaas_function.h"

#include "sparse.h"

#define FUNCTION __attribute__((visibility("default")))

/* A vector in, its product with the rows out. */
FUNCTION uint32_t sparse_times(void *args, uint32_t size, void *res) {
    static const sparse_rows *rows; /* of which the table has been checked */
    size_t bytes;
    const sparse_rows *table = rfaas_table("rows", &bytes);
    if (table != rows || !table) {
        if (!table || !sparse_valid(table, bytes))
            return rfaas_fail("the table \"rows\" has %zu bytes, which are no rows of a sparse matrix: publish it by rfaas_table_put", bytes);
        rows = table;
    }
    if (size != rows->columns * sizeof(double) || rows->rows * sizeof(double) > rfaas_result_capacity())
        return rfaas_fail("a vector of %u bytes with room for %u bytes of product, want %llu and %llu", size, rfaas_result_capacity(),
                          (unsigned long long)(rows->columns * sizeof(double)), (unsigned long long)(rows->rows * sizeof(double)));
    sparse_multiply(rows, args, res);
    return (uint32_t)(rows->rows * sizeof(double));
}

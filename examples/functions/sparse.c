/* Products of a sparse matrix with vectors. The worker gets rows of the matrix once, by the init call of its lease, and keeps them. */
#include <string.h>

#include "rfaas_function.h"

#include "sparse.h"

#define FUNCTION __attribute__((visibility("default")))

static sparse_rows *kept;

/* Init call. Input: sparse_rows, which the worker keeps. */
FUNCTION uint32_t sparse_keep(void *args, uint32_t size, void *res) {
    (void)res;
    if (!sparse_valid(args, size))
        return rfaas_fail("the payload of %u bytes does not contain rows of a sparse matrix", size);
    free(kept);
    kept = malloc(size);
    if (!kept)
        return rfaas_fail("no memory for %u bytes of rows: set `memory` of the lease to more than that", size);
    memcpy(kept, args, size);
    return 0;
}

/* Input: a vector. Result: the product of the rows with it. */
FUNCTION uint32_t sparse_times(void *args, uint32_t size, void *res) {
    if (!kept)
        return rfaas_fail("this worker has no rows: name sparse_keep as init_function of the lease");
    if (size != kept->columns * sizeof(double) || kept->rows * sizeof(double) > rfaas_result_capacity())
        return rfaas_fail("a vector of %u bytes and a capacity of %u bytes for the product, want %llu and %llu", size, rfaas_result_capacity(),
                          (unsigned long long)(kept->columns * sizeof(double)), (unsigned long long)(kept->rows * sizeof(double)));
    sparse_multiply(kept, args, res);
    return (uint32_t)(kept->rows * sizeof(double));
}

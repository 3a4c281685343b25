/* Lookups in the table "cross sections", which the program publishes by rfaas_table_put, or by rfaas_table_put_seed from a seed that
 * prepared.c has made. All workers of a node share one copy of it. */
#include <string.h>

#include "rfaas_function.h"

#include "crosssections.h"

/* Input: cross_lookups. Result: double. */
__attribute__((visibility("default"))) uint32_t lookups(void *args, uint32_t size, void *res) {
    cross_lookups l;
    size_t bytes;
    const cross_row *row = rfaas_table("cross sections", &bytes);
    if (size != sizeof l)
        return rfaas_fail("the payload has %u bytes, want the %zu of struct cross_lookups", size, sizeof l);
    if (bytes < 2 * sizeof *row)
        return rfaas_fail("the table \"cross sections\" has %zu bytes: publish it by rfaas_table_put before the lease is opened", bytes);
    memcpy(&l, args, sizeof l);
    double sum = cross_sum(row, bytes / sizeof *row, &l);
    memcpy(res, &sum, sizeof sum);
    return sizeof sum;
}

/* Lookups in a table of cross sections that a setup function has made. The workers that start from its seed share one copy of the table, and none of them
 * makes it again. Functions of other libraries can map the table, too (rfaas_table_put_seed): those of crosssections.c do. */
#include <stdlib.h>
#include <string.h>

#include "rfaas_function.h"

#include "crosssections.h"

static cross_row *row;
static uint64_t rows;

/* Setup function. Input: the number of rows, a uint64_t. */
__attribute__((visibility("default"))) uint32_t prepare(void *args, uint32_t size, void *res) {
    (void)res;
    if (size != sizeof rows)
        return rfaas_fail("the payload has %u bytes, want the %zu of a number of rows", size, sizeof rows);
    memcpy(&rows, args, sizeof rows);
    row = rows >= 2 && rows <= SIZE_MAX / sizeof *row ? malloc(rows * sizeof *row) : NULL;
    if (!row)
        return rfaas_fail("no memory for %llu rows of %zu bytes", (unsigned long long)rows, sizeof *row);
    cross_fill(row, rows);
    rfaas_set_root(row, rows * sizeof *row);
    return 0;
}

/* Input: cross_lookups. Result: double. */
__attribute__((visibility("default"))) uint32_t lookups(void *args, uint32_t size, void *res) {
    cross_lookups l;
    if (size != sizeof l)
        return rfaas_fail("the payload has %u bytes, want the %zu of struct cross_lookups", size, sizeof l);
    if (!row)
        return rfaas_fail("there is no table: open the lease with a seed that `prepare` has made");
    memcpy(&l, args, sizeof l);
    double sum = cross_sum(row, rows, &l);
    memcpy(res, &sum, sizeof sum);
    return sizeof sum;
}

/* Returns this worker's share of the table's memory in KiB (PSS), a uint64_t. */
__attribute__((visibility("default"))) uint32_t share(void *args, uint32_t size, void *res) {
    char line[512];
    unsigned long from, to;
    uint64_t sum = 0;
    unsigned kib;
    int inside = 0;
    FILE *f = fopen("/proc/self/smaps", "r");
    (void)args, (void)size;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = (unsigned long)row < to && from < (unsigned long)(row + rows);
        else if (inside && sscanf(line, "Pss: %u", &kib) == 1)
            sum += kib;
    if (f)
        fclose(f);
    memcpy(res, &sum, sizeof sum);
    return sizeof sum;
}

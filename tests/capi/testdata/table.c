/* Functions for table_test.go. */
#include <string.h>

#include "rfaas_function.h"

uint32_t echo(void *args, uint32_t size, void *res) {
    memcpy(res, args, size);
    return size;
}

/* The number of bytes of the table "sevens" that are 7, and its size. */
uint32_t sevens(void *args, uint32_t size, void *res) {
    uint64_t *out = res;
    size_t bytes;
    (void)args;
    (void)size;
    const unsigned char *table = rfaas_table("sevens", &bytes);
    out[0] = 0;
    out[1] = bytes;
    for (size_t i = 0; i < bytes; i++)
        out[0] += table[i] == 7;
    return 2 * sizeof *out;
}

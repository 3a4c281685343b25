/* Functions that read tables. The payload is a table's name, with its NUL. */
#include <string.h>

#include "rfaas_function.h"

/* Returns the table's address and size, and the sum of its bytes at the beginning of each page. */
uint32_t table_look(void *args, uint32_t size, void *res) {
    uint64_t *out = res;
    size_t bytes = 1;
    const unsigned char *table = rfaas_table(args, &bytes);
    (void)size;
    out[0] = (uint64_t)(uintptr_t)table;
    out[1] = bytes;
    out[2] = 0;
    for (size_t i = 0; table && i < bytes; i += 4096)
        out[2] += table[i];
    return 3 * sizeof *out;
}

/* Returns the 8 bytes at an offset. The payload is the offset, then the name. */
uint32_t table_at(void *args, uint32_t size, void *res) {
    uint64_t offset;
    size_t bytes;
    memcpy(&offset, args, sizeof offset);
    const unsigned char *table = rfaas_table((char *)args + sizeof offset, &bytes);
    if (!table || offset > bytes - 8)
        return rfaas_fail("%u bytes of arguments: %llu of %zu", size, (unsigned long long)offset, bytes);
    memcpy(res, table + offset, 8);
    return 8;
}

/* Writes to a table, which ends the worker. */
uint32_t table_write(void *args, uint32_t size, void *res) {
    (void)res;
    memset((void *)rfaas_table(args, NULL), 1, size);
    return 0;
}

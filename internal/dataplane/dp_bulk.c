#include "dp_bulk.h"

#include <string.h>

int dp_bulk_take(dp_bulk *b, uint32_t len, uint32_t *at) {
    uint32_t end = 0; /* of the range before the gap */
    for (uint32_t i = 0; i <= b->n; i++) {
        uint32_t next = i < b->n ? b->used[i].at : b->total;
        if (next - end >= len) {
            memmove(&b->used[i + 1], &b->used[i], (b->n - i) * sizeof *b->used);
            b->used[i] = (dp_range){end, len};
            b->n++;
            *at = end;
            return 0;
        }
        if (i < b->n)
            end = b->used[i].at + b->used[i].len;
    }
    return -1;
}

void dp_bulk_give(dp_bulk *b, uint32_t at) {
    for (uint32_t i = 0; i < b->n; i++)
        if (b->used[i].at == at) {
            memmove(&b->used[i], &b->used[i + 1], (b->n - i - 1) * sizeof *b->used);
            b->n--;
            return;
        }
}

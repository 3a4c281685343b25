/* A worker's check of a seed's file before it changes its own memory: the header, and the list of libraries that stay apart. The input changes bytes of the header of a seed
 * that suits this process: {u32 offset, u8 value} again and again. */
#include "worker/seed/seed.c"

#include "fuzz.h"

static void check_apart(const dp_apart *list) {
    if (!dp_apart_valid(list))
        return;
    MUST(list->n <= DP_APART_MAX);
    for (uint32_t i = 0; i < list->n; i++)
        MUST(strnlen(list->path[i], DP_APART_PATH) < DP_APART_PATH && strchr(list->path[i], '/'));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static dp_seed_header own;
    static dp_seed s = {.heap_size = 2 * DP_HEAP_UNIT};
    if (!own.magic) {
        dp_modules_list(&s.modules, UINT32_MAX);
        fill_header(&s, &own);
        own.apart.n = 1;
        strcpy(own.apart.path[0], "/lib/libgomp.so.1");
    }
    dp_seed_header *seed = exact_copy((const uint8_t *)&own, sizeof own);
    input in = {data, size};
    while (in.left >= 5) {
        uint32_t at = take32(&in);
        ((uint8_t *)seed)[at % sizeof *seed] = take8(&in);
    }
    dp_error err = {0};
    int st = differs(&own, seed, &err);
    MUST(st == DP_OK || (st == DP_UNSUPPORTED && err.msg[0]));
    if (st == DP_OK) {
        MUST(seed->magic == DP_SEED_MAGIC && seed->version == DP_SEED_VERSION && seed->heap_size == own.heap_size && seed->n_modules <= DP_MODULES_MAX);
        MUST(seed->thread_pointer == own.thread_pointer && !memcmp(seed->processor, own.processor, sizeof own.processor));
    }
    if (dp_seed_root_lies(seed, own.heap_size))
        MUST(seed->root >= DP_HEAP_AT && seed->root_size > 0 && seed->root_size <= own.heap_size && seed->root - DP_HEAP_AT <= own.heap_size - seed->root_size);
    check_apart(&seed->apart);
    free(seed);
    return 0;
}

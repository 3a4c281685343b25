/* The tables of this worker. The monitor thread maps them, before the client may call. Functions find them by name, on any thread. */
#define RFAAS_FUNCTION_IMPLEMENTATION
#include "rfaas_function.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "dp_fabric.h"
#include "seed/mapped.h"
#include "table.h"

static struct {
    const void *at;
    uint64_t size;
    char name[DP_TABLE_NAME];
} tables[DP_TABLES_MAX];
static uint32_t n_tables; /* atomic: those before it do not change any more */

/* Maps the bytes of a table. */
static int map_bytes(const dp_msg_table *t, int fd, const void **out, size_t *size, dp_error *err) {
    void *want = (void *)(uintptr_t)t->address; /* NOLINT(performance-no-int-to-ptr): the client chose it */
    void *at = mmap(want, t->size, PROT_READ, MAP_SHARED | (want ? MAP_FIXED_NOREPLACE : 0), fd, 0);
    if (at != MAP_FAILED && want && at != want) { /* a kernel before 4.17 takes the flag for none */
        munmap(at, t->size);
        at = MAP_FAILED;
        errno = EEXIST;
    }
    if (at == MAP_FAILED && errno == EEXIST)
        return dp_fail(err, DP_INVALID, 0, "table \"%s\": other memory of the worker lies in the %llu bytes from %p; choose another address, for example from "
                                           "0x100000000000 to 0x500000000000, or none", t->name, (unsigned long long)t->size, want);
    if (at == MAP_FAILED)
        return dp_fail(err, errno == EINVAL ? DP_INVALID : DP_FATAL, errno, "table \"%s\": map %llu bytes at %p", t->name,
                       (unsigned long long)t->size, want);
    *out = at;
    *size = t->size;
    return DP_OK;
}

/* Maps the heap of a seed. Functions get its root. */
static int map_seed(const dp_msg_table *t, int fd, const void **out, size_t *size, dp_error *err) {
    dp_error why = {0};
    int st = dp_seed_map(fd, t->seed_units * DP_HEAP_UNIT, out, size, &why);
    return st ? dp_fail(err, st, 0, "table \"%s\": %s", t->name, why.msg) : DP_OK;
}

int dp_table_map(const dp_msg_table *t, int fd, dp_error *err) {
    uint32_t n = n_tables;
    size_t len = strnlen(t->name, sizeof t->name), size;
    const void *at;
    if (len == 0 || len == sizeof t->name || n == DP_TABLES_MAX || t->size == 0 || t->size > PTRDIFF_MAX)
        return dp_fail(err, DP_INVALID, 0, "table %u of %llu bytes, with a name of %zu", n, (unsigned long long)t->size, len);
    int st = (t->seed_units ? map_seed : map_bytes)(t, fd, &at, &size, err);
    if (st)
        return st;
    memcpy(tables[n].name, t->name, sizeof t->name);
    tables[n].at = at;
    tables[n].size = size;
    __atomic_store_n(&n_tables, n + 1, __ATOMIC_RELEASE);
    return DP_OK;
}

const void *rfaas_table(const char *name, size_t *size) {
    uint32_t n = __atomic_load_n(&n_tables, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < n; i++)
        if (!strcmp(tables[i].name, name)) {
            if (size)
                *size = tables[i].size;
            return tables[i].at;
        }
    if (size)
        *size = 0;
    return NULL;
}

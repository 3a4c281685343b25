#include "mapped.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE 4096ull

bool dp_seed_root_lies(const dp_seed_header *h, uint64_t heap_size) {
    uint64_t at = h->root - DP_HEAP_AT;
    return h->root_size && at < heap_size && h->root_size <= heap_size - at;
}

/* The tenant's code may have written anything to the header. */
static int check(const dp_seed_header *h, uint64_t heap_size, dp_error *err) {
    if (h->magic != DP_SEED_MAGIC || h->version != DP_SEED_VERSION)
        return dp_fail(err, DP_UNSUPPORTED, 0, "the seed has version %u, and workers of this executor map version %u: create it again", h->version, DP_SEED_VERSION);
    if (h->heap_size != heap_size)
        return dp_fail(err, DP_INVALID, 0, "the header of the seed says that its heap has %llu bytes, but it has %llu", (unsigned long long)h->heap_size, (unsigned long long)heap_size);
    if (!dp_seed_root_lies(h, heap_size))
        return dp_fail(err, DP_INVALID, 0, "the root of the seed, %llu bytes at %#llx, does not lie in its memory: call rfaas_set_root in the setup function",
                       (unsigned long long)h->root_size, (unsigned long long)h->root);
    return DP_OK;
}

/* Maps the parts of the arena that have memory in the file. The rest stays anonymous memory of zeros, because reading a hole of a memory file would
 * allocate a page in it. */
static int map_extents(const dp_seed_header *h, uint64_t heap_size, int fd, dp_error *err) {
    for (uint32_t i = 0; i < h->n_extents && i < DP_SEED_EXTENTS; i++) {
        uint64_t from = h->extents[i].from & ~(PAGE - 1), end = h->extents[i].to & ~(PAGE - 1);
        end = end > heap_size ? heap_size : end;
        void *to = (void *)(uintptr_t)(DP_HEAP_AT + from);
        if (from < end && mmap(to, end - from, PROT_READ, MAP_FIXED | MAP_SHARED, fd, (off_t)from) != to)
            return dp_fail(err, DP_FATAL, errno, "map %llu KiB of the seed", (unsigned long long)((end - from) >> 10));
    }
    return DP_OK;
}

int dp_seed_map(int fd, uint64_t heap_size, const void **root, size_t *size, dp_error *err) {
    static dp_seed_header h;
    struct stat sb;
    if (heap_size < 2 * DP_HEAP_UNIT || heap_size > DP_HEAP_MOST || fstat(fd, &sb) || (uint64_t)sb.st_size < dp_seed_file_size(heap_size))
        return dp_fail(err, DP_INVALID, 0, "the file of the seed is too short for a heap of %llu bytes", (unsigned long long)heap_size);
    int st = dp_seed_read(fd, &h, sizeof h, heap_size, err);
    if (!st)
        st = check(&h, heap_size, err);
    if (st)
        return st;
    void *want = (void *)DP_HEAP_AT;
    void *at = mmap(want, heap_size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    int e = errno;
    if (at != MAP_FAILED && at != want) { /* a kernel before 4.17 ignores the flag */
        munmap(at, heap_size);
        at = MAP_FAILED;
        e = EEXIST;
    }
    if (at == MAP_FAILED && e == EEXIST)
        return dp_fail(err, DP_INVALID, 0, "other memory of the worker lies in the %llu bytes from %p, the address of a seed: map one seed, and nothing else there",
                       (unsigned long long)heap_size, want);
    if (at == MAP_FAILED)
        return dp_fail(err, DP_FATAL, e, "map %llu bytes at %p for a seed", (unsigned long long)heap_size, want);
    st = map_extents(&h, heap_size, fd, err);
    if (st) {
        munmap(at, heap_size);
        return st;
    }
    *root = (const void *)(uintptr_t)h.root; /* NOLINT(performance-no-int-to-ptr): the setup function chose it */
    *size = h.root_size;
    return DP_OK;
}

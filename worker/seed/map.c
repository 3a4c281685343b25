/* mmap of the libraries of user code. mimalloc maps its own tables, and the data of threads, outside of the arena. They must travel like the arena, or
 * a worker of the seed would give out memory that is in use. So they get pages of the arena's first unit. What user code maps by itself does not travel,
 * so it is counted while a seed is made. libc does not call mmap by this name. */
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
#define MAPS 1
#else
#define MAPS 0
#endif

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "heap.h"

#define PAGE 4096ull
#define UP(x) (((x) + PAGE - 1) & ~(PAGE - 1))
#define TABLES_AT (DP_HEAP_AT + UP(sizeof(dp_heap_kept)))

enum { LEFT_MOST = 64 };

static struct {
    uintptr_t allocator, allocator_size; /* mimalloc's code; 0: no heap is open */
    bool watch;
    pthread_mutex_t lock;
    dp_heap_map left[LEFT_MOST];
    uint32_t n_left;
    bool more; /* than LEFT_MOST */
} maps = {.lock = PTHREAD_MUTEX_INITIALIZER};

void dp_heap_maps_of(uintptr_t code, uintptr_t size) {
    maps.allocator = code;
    maps.allocator_size = size;
}

void dp_heap_watch_maps(bool on) { maps.watch = on; }

const dp_heap_map *dp_heap_left_map(uint32_t i) {
    static const dp_heap_map unknown;
    return i < maps.n_left ? &maps.left[i] : maps.more && i == maps.n_left ? &unknown : NULL;
}

#if MAPS
/* Pages for the allocator. They are zero, and none is used again. */
static void *table_pages(size_t n) {
    dp_heap_kept *k = dp_heap_kept_at();
    void *p = MAP_FAILED;
    pthread_mutex_lock(&maps.lock);
    uint64_t at = k->tables ? k->tables : TABLES_AT;
    if (n && n <= DP_HEAP_UNIT && at + UP(n) <= DP_HEAP_AT + DP_HEAP_UNIT) {
        k->tables = at + UP(n);
        p = (void *)(uintptr_t)at;
    } else
        errno = ENOMEM;
    pthread_mutex_unlock(&maps.lock);
    return p;
}

static void note_map(void *at, size_t n, const void *caller) {
    pthread_mutex_lock(&maps.lock);
    if (maps.n_left == LEFT_MOST)
        maps.more = true;
    else
        maps.left[maps.n_left++] = (dp_heap_map){(uintptr_t)at, n, caller};
    pthread_mutex_unlock(&maps.lock);
}

static void note_unmap(uintptr_t at, size_t n) {
    pthread_mutex_lock(&maps.lock);
    for (uint32_t i = maps.n_left; i--;)
        if (maps.left[i].at >= at && maps.left[i].at + maps.left[i].size <= at + n)
            maps.left[i] = maps.left[--maps.n_left];
    pthread_mutex_unlock(&maps.lock);
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    const void *caller = __builtin_return_address(0);
    if (maps.allocator_size && (uintptr_t)caller - maps.allocator < maps.allocator_size && flags & MAP_ANONYMOUS && !(flags & MAP_FIXED))
        return table_pages(n);
    void *p = (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset); /* NOLINT: the kernel returns an address */
    if (maps.watch && p != MAP_FAILED && !dp_heap_outside)
        note_map(p, n, caller);
    return p;
}

void *mmap64(void *at, size_t n, int prot, int flags, int fd, off64_t offset) __attribute__((alias("mmap")));

int munmap(void *at, size_t n) {
    if (maps.allocator_size && (uintptr_t)at - DP_HEAP_AT < DP_HEAP_UNIT)
        return 0;
    if (maps.watch)
        note_unmap((uintptr_t)at, n);
    return (int)syscall(SYS_munmap, at, n);
}
#endif

/* See heap.h. These definitions replace those of libc for all libraries of the process, because the program comes first in the order of
 * symbols. */
#include "heap.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DIRECT __attribute__((noplt)) /* one jump less */
extern DIRECT void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern DIRECT void __libc_free(void *);

__thread int dp_heap_outside;

/* Constant while `open` is true, except `next`. */
static struct {
    void *(*malloc)(size_t);
    void *(*calloc)(size_t, size_t);
    void *(*realloc)(void *, size_t);
    void *(*memalign)(size_t, size_t);
    void (*free)(void *);
    size_t (*usable)(const void *);
    bool (*manage)(void *, size_t, bool, bool, bool, int, bool, int *);
    void (*set)(int, long);
    uint64_t size;
    uintptr_t code, code_size;     /* mimalloc's; size 0: not loaded */
    uintptr_t linker, linker_size; /* the dynamic linker's code */
    uint64_t mapped;               /* bytes from LINKED_AT to the arena's end; 0: no heap is open */
    uintptr_t next;                /* free memory for the linker; 0: it uses libc's heap */
} heap;
static bool open; /* set once, by the only thread */

/* What the linker allocates while it loads user code lies below the arena: also thread-local blocks, whose addresses must be the same in
 * all workers of a seed. Each block has its size in front of it. None is used again. */
#define LINKED_AT (DP_HEAP_AT - DP_HEAP_LINKED)
enum { HEAD = 16 };

bool dp_heap_has(const void *p) { return (uintptr_t)p - DP_HEAP_AT < heap.size; }

bool dp_heap_inside(void) { return open && !dp_heap_outside; }

/* ---- malloc and its relatives ---- */

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1 /* the sanitizer has its own malloc */
#else
#define SANITIZED 0
#define CALLER __builtin_return_address(0)
#define RARELY(x) __builtin_expect(x, 0)

static bool by_linker(const void *caller) { return (uintptr_t)caller - heap.linker < heap.linker_size; }

static bool inside(const void *caller) { return !dp_heap_outside && !by_linker(caller); }

/* Memory for the linker while it loads user code. NULL: the linker does not load, or the memory is used up. */
static void *link_memory(const void *caller, size_t align, size_t n) {
    uintptr_t at = (heap.next + HEAD + align - 1) & ~(uintptr_t)(align - 1);
    if (!heap.next || !by_linker(caller) || n > DP_HEAP_LINKED || at + n > DP_HEAP_AT)
        return NULL;
    ((size_t *)at)[-1] = n;
    heap.next = (at + n + HEAD - 1) & ~(uintptr_t)(HEAD - 1);
    return (void *)at;
}

static __attribute__((noinline)) void *open_malloc(const void *caller, size_t n) {
    void *p = link_memory(caller, HEAD, n);
    return p ? p : inside(caller) ? heap.malloc(n) : __libc_malloc(n);
}

static __attribute__((noinline)) void *open_calloc(const void *caller, size_t n, size_t size) {
    size_t bytes;
    void *p = __builtin_mul_overflow(n, size, &bytes) ? NULL : link_memory(caller, HEAD, bytes); /* fresh memory is zero */
    return p ? p : inside(caller) ? heap.calloc(n, size) : __libc_calloc(n, size);
}

static __attribute__((noinline)) void *open_realloc(const void *caller, void *p, size_t n) {
    if (!p)
        return open_malloc(caller, n);
    if (dp_heap_has(p))
        return heap.realloc(p, n);
    if ((uintptr_t)p - LINKED_AT >= heap.mapped)
        return __libc_realloc(p, n);
    size_t had = ((size_t *)p)[-1];
    void *more = open_malloc(caller, n);
    return more ? memcpy(more, p, had < n ? had : n) : NULL;
}

static __attribute__((noinline)) void *open_memalign(const void *caller, size_t align, size_t n) {
    void *p = align && !(align & (align - 1)) ? link_memory(caller, align > HEAD ? align : HEAD, n) : NULL;
    return p ? p : inside(caller) ? heap.memalign(align, n) : __libc_memalign(align, n);
}

static void *aligned(const void *caller, size_t align, size_t n) {
    return RARELY(open) ? open_memalign(caller, align, n) : __libc_memalign(align, n);
}

void *malloc(size_t n) { return RARELY(open) ? open_malloc(CALLER, n) : __libc_malloc(n); }

void *calloc(size_t n, size_t size) { return RARELY(open) ? open_calloc(CALLER, n, size) : __libc_calloc(n, size); }

void *realloc(void *p, size_t n) { return RARELY(open) ? open_realloc(CALLER, p, n) : __libc_realloc(p, n); }

void free(void *p) {
    if (RARELY((uintptr_t)p - LINKED_AT < heap.mapped)) {
        if (dp_heap_has(p))
            heap.free(p);
    } else
        __libc_free(p);
}

void *memalign(size_t align, size_t n) { return aligned(CALLER, align, n); }

void *aligned_alloc(size_t align, size_t n) { return aligned(CALLER, align, n); }

void *valloc(size_t n) { return aligned(CALLER, (size_t)sysconf(_SC_PAGESIZE), n); }

void *pvalloc(size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole;
    return aligned(CALLER, page, __builtin_add_overflow(n, page - 1, &whole) ? n : whole & ~(page - 1));
}

int posix_memalign(void **out, size_t align, size_t n) {
    if (align < sizeof(void *) || align & (align - 1))
        return EINVAL;
    int before = errno;
    void *p = aligned(CALLER, align, n);
    errno = before;
    if (!p)
        return ENOMEM;
    *out = p;
    return 0;
}

size_t malloc_usable_size(void *p) {
    static size_t (*of_libc)(void *);
    if (dp_heap_has(p))
        return heap.usable(p);
    if ((uintptr_t)p - LINKED_AT < heap.mapped)
        return ((size_t *)p)[-1];
    if (!of_libc)
        *(void **)&of_libc = dlsym(RTLD_NEXT, "malloc_usable_size");
    return of_libc(p);
}

#endif

/* ---- opening ---- */

static uintptr_t size_of(const struct dl_phdr_info *i) {
    uintptr_t end = 0;
    for (int k = 0; k < i->dlpi_phnum; k++)
        if (i->dlpi_phdr[k].p_type == PT_LOAD && i->dlpi_phdr[k].p_vaddr + i->dlpi_phdr[k].p_memsz > end)
            end = i->dlpi_phdr[k].p_vaddr + i->dlpi_phdr[k].p_memsz;
    return end;
}

static int find_linker(struct dl_phdr_info *i, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *slash = strrchr(i->dlpi_name, '/');
    if (strncmp(slash ? slash + 1 : i->dlpi_name, "ld-linux", 8) && strncmp(slash ? slash + 1 : i->dlpi_name, "ld64", 4))
        return 0;
    heap.linker = i->dlpi_addr;
    heap.linker_size = size_of(i);
    return 1;
}

/* Finds mimalloc by the address of one of its functions. */
static int find_allocator(struct dl_phdr_info *i, size_t size, void *function) {
    (void)size;
    if ((uintptr_t)function - i->dlpi_addr >= size_of(i))
        return 0;
    heap.code = i->dlpi_addr;
    heap.code_size = size_of(i);
    return 1;
}

static bool resolve(void *to, void *library, const char *name, dp_error *err) {
    void *at = dlsym(library, name);
    memcpy(to, &at, sizeof at);
    if (!at)
        dp_fail(err, DP_UNSUPPORTED, 0, "seeds need %s of mimalloc 2, which has no %s", DP_HEAP_LIBRARY, name);
    return at;
}

int dp_heap_load(dp_error *err) {
    int (*version)(void);
    if (heap.code_size)
        return DP_OK;
    if (SANITIZED)
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds: this program is built with a sanitizer");
    if (!dl_iterate_phdr(find_linker, NULL))
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds: the dynamic linker is not among the loaded objects");
    void *l = dlopen(DP_HEAP_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!l) {
        const char *why = dlerror();
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds need %s: %.80s; install libmimalloc2.0 (Debian) or mimalloc (Red Hat)", DP_HEAP_LIBRARY,
                       why ? why : "unknown error");
    }
    if (!resolve(&heap.malloc, l, "mi_malloc", err) || !resolve(&heap.calloc, l, "mi_calloc", err) ||
        !resolve(&heap.realloc, l, "mi_realloc", err) || !resolve(&heap.memalign, l, "mi_memalign", err) ||
        !resolve(&heap.free, l, "mi_free", err) || !resolve(&heap.usable, l, "mi_usable_size", err) ||
        !resolve(&heap.manage, l, "mi_manage_os_memory_ex", err) || !resolve(&heap.set, l, "mi_option_set", err) ||
        !resolve(&version, l, "mi_version", err))
        return DP_UNSUPPORTED;
    if (version() < 200 || version() >= 300) /* the numbers of its options may differ */
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds need %s of mimalloc 2, not of version %d", DP_HEAP_LIBRARY, version());
    void *function;
    memcpy(&function, &heap.manage, sizeof function);
    if (!dl_iterate_phdr(find_allocator, function))
        return dp_fail(err, DP_UNSUPPORTED, 0, "seeds: %s is not among the loaded objects", DP_HEAP_LIBRARY);
    return DP_OK;
}

int dp_heap_open(uint64_t size, dp_error *err) {
    enum { LIMIT_OS_ALLOC = 17 }; /* mi_option_limit_os_alloc */
    int st = dp_heap_load(err);
    if (st)
        return st;
    dp_heap_maps_of(heap.code, heap.code_size);
    heap.set(LIMIT_OS_ALLOC, 1); /* all memory comes from the arena, and mimalloc's own tables from its first unit */
    if (!heap.manage((void *)(DP_HEAP_AT + DP_HEAP_UNIT), size - DP_HEAP_UNIT, true, false, true, -1, false, NULL))
        return dp_fail(err, DP_FATAL, 0, "seeds: mimalloc refuses an arena of %llu bytes", (unsigned long long)size);
    if (mmap((void *)LINKED_AT, DP_HEAP_LINKED, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) !=
        (void *)LINKED_AT)
        return dp_fail(err, DP_UNSUPPORTED, errno, "seeds: other memory of the worker lies below the heap");
    heap.size = size;
    heap.mapped = DP_HEAP_LINKED + size;
    heap.next = LINKED_AT;
    open = true;
    return DP_OK;
}

void dp_heap_linked(void) { heap.next = 0; }

/* Own copies of the pages that the zygote has used, made in few calls at the start of a worker. */
#include "startup.h"

#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* Makes own copies of the pages of writable memory that the zygote has used, with one call for each run of such pages. madvise is a hint here. Most other pages
 * are buffers for a zygote or the process of a seed. */
static void touch_used(uintptr_t from, uintptr_t to, uintptr_t page) {
    enum { PART = 1024 };
    unsigned char used[PART];
    for (uintptr_t n; from < to; from += n * page) {
        n = (to - from) / page < PART ? (to - from) / page : PART;
        if (mincore((void *)from, n * page, used)) { /* some of these pages are not mapped */
            n = 1;
            if (mincore((void *)from, page, used))
                used[0] = 0;
        }
        for (uintptr_t i = 0, first = 0; i < n; i++) {
            if (!(used[i] & 1))
                first = i + 1;
            else if (i + 1 == n || !(used[i + 1] & 1))
                madvise((void *)(from + first * page), (i + 1 - first) * page, MADV_POPULATE_WRITE);
        }
    }
}

/* Copies the used writable pages of an object, except those that the linker has made read-only. */
static int touch_object(struct dl_phdr_info *object, size_t size, void *arg) {
    (void)size;
    const uintptr_t page = *(const uintptr_t *)arg;
    uintptr_t read_only = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &object->dlpi_phdr[i];
        if (h->p_type == PT_GNU_RELRO)
            read_only = (object->dlpi_addr + h->p_vaddr + h->p_memsz) & ~(page - 1);
    }
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &object->dlpi_phdr[i];
        uintptr_t from = (object->dlpi_addr + h->p_vaddr) & ~(page - 1);
        uintptr_t to = (object->dlpi_addr + h->p_vaddr + h->p_memsz + page - 1) & ~(page - 1);
        if (h->p_type == PT_LOAD && h->p_flags & PF_W)
            touch_used(from > read_only || read_only > to ? from : read_only, to, page);
    }
    return 0;
}

void dp_worker_touch(void) {
    enum { HEAP = 256 << 10, STACK = 32 << 10 };
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int before = errno; /* a dead worker's errno must be that of its function */
    dl_iterate_phdr(touch_object, &page);
    uintptr_t end = ((uintptr_t)sbrk(0) + page - 1) & ~(page - 1), stack = (uintptr_t)__builtin_frame_address(0) & ~(page - 1);
    touch_used(end - HEAP, end, page);
    madvise((void *)(stack - STACK), STACK + page, MADV_POPULATE_WRITE);
    errno = before;
}

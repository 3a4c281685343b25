/* Present pages for a worker that waits. */
#include "startup.h"

#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

/* madvise is a hint here. It is called page by page, since part of a writable segment may have become read-only. */
static void touch_written(uintptr_t from, uintptr_t to, uintptr_t page) {
    for (; from < to; from += page)
        madvise((void *)from, page, MADV_POPULATE_WRITE);
}

/* Makes the pages of writable memory present that the zygote or this process has used. Most others are buffers for a zygote or the process of a seed. */
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
        for (uintptr_t i = 0; i < n; i++)
            if (used[i] & 1)
                touch_written(from + i * page, from + (i + 1) * page, page);
    }
}

/* Makes the pages of an object present, except read-only ones. The start has already used the read-only pages that it needs. At each of these uses, the kernel
 * has mapped the neighbouring pages too. */
static int touch_object(struct dl_phdr_info *object, size_t size, void *arg) {
    (void)size;
    const uintptr_t page = *(const uintptr_t *)arg;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &object->dlpi_phdr[i];
        uintptr_t from = (object->dlpi_addr + h->p_vaddr) & ~(page - 1);
        uintptr_t to = (object->dlpi_addr + h->p_vaddr + h->p_memsz + page - 1) & ~(page - 1);
        if (h->p_type == PT_LOAD && h->p_flags & PF_W)
            touch_used(from, to, page);
    }
    return 0;
}

void dp_worker_touch(void) {
    enum { HEAP = 256 << 10, STACK = 32 << 10 };
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int before = errno; /* a dead worker's errno must be that of its function */
    dl_iterate_phdr(touch_object, &page);
    uintptr_t end = (uintptr_t)sbrk(0);
    touch_used((end - HEAP) & ~(page - 1), end, page);
    volatile unsigned char stack[STACK];
    for (size_t i = 0; i < sizeof stack; i += page) {
        stack[i] = 0;
        (void)stack[i];
    }
    errno = before;
}

/* The C API's registered buffers: memory that large payloads leave from without being copied first. */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "call.h"

#define SIZE_MAX_BYTES (1ull << 40)

/* Maps pages, present from the start, followed by an inaccessible page. */
static void *map_pages(uint64_t size, uint64_t *mapped) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) & ~(page - 1);
    uint8_t *at = mmap(NULL, whole + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    if (mmap(at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE, -1, 0) == MAP_FAILED) {
        int why = errno;
        munmap(at, whole + page);
        errno = why;
        return NULL;
    }
    *mapped = whole + page;
    return at;
}

void rfaas_api_move_buffers(rfaas_lease *l, const rfaas_grant *to) {
    for (rfaas_buffer *b = l->buffers; b; b = b->next) {
        dp_error err = {0};
        if (b->mem)
            dp_mem_free(b->mem);
        if (dp_mem_register(dp_endpoint_domain(to->ep), b->addr, b->size, 0, &b->mem, &err))
            b->mem = NULL;
    }
}

static void drop(rfaas_buffer *b) {
    if (b->mem)
        dp_mem_free(b->mem);
    if (b->mapped)
        munmap(b->addr, b->mapped);
    free(b);
}

void rfaas_api_free_buffers(rfaas_lease *l) {
    while (l->buffers) {
        rfaas_buffer *b = l->buffers;
        l->buffers = b->next;
        drop(b);
    }
}

/* Reports whether memory overlaps a buffer of the lease. */
static const rfaas_buffer *overlapped(const rfaas_lease *l, const void *addr, uint64_t size) {
    const rfaas_buffer *b = l->buffers;
    while (b && !((uintptr_t)addr < (uintptr_t)b->addr + b->size && (uintptr_t)b->addr < (uintptr_t)addr + size))
        b = b->next;
    return b;
}

/* Adds a buffer at addr. NULL: allocates it. */
static int add(rfaas_lease *l, const char *op, void *addr, uint64_t size, void **out) {
    dp_error err = {0};
    rfaas_buffer *b = calloc(1, sizeof *b);
    if (!b)
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: out of memory", op);
    b->addr = addr ? addr : map_pages(size, &b->mapped);
    b->size = size;
    if (!b->addr) {
        free(b);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: no memory for %llu bytes", op, (unsigned long long)size);
    }
    int status = rfaas_api_take_all(l, op, 0); /* with the pages there: this takes no time */
    if (status) {
        drop(b);
        return status;
    }
    const rfaas_buffer *other = addr ? overlapped(l, addr, size) : NULL;
    if (other)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: %llu bytes at %p overlap the buffer of %llu bytes at %p", op,
                                (unsigned long long)size, addr, (unsigned long long)other->size, other->addr);
    else if (l->grant->ep && dp_mem_register(dp_endpoint_domain(l->grant->ep), b->addr, size, 0, &b->mem, &err))
        b->mem = NULL, status = rfaas_api_fail_dp(op, &err);
    if (!status) {
        b->next = l->buffers;
        l->buffers = b;
        if (out)
            *out = b->addr;
    }
    rfaas_api_put_all(l);
    if (status)
        drop(b);
    return status;
}

/* Removes the buffer that begins at addr. `mine`: it must be one of rfaas_alloc. */
static int take_out(rfaas_lease *l, const char *op, const void *addr, bool mine) {
    rfaas_buffer **p = &l->buffers;
    while (*p && (*p)->addr != addr)
        p = &(*p)->next;
    if (!*p || ((*p)->mapped > 0) != mine)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: %p is not a buffer of this lease that rfaas_%s gave", op, addr,
                              mine ? "alloc" : "register");
    for (uint32_t i = 0; i < l->n_workers; i++) {
        dp_channel *ch = l->workers[i].ch;
        if (ch && !l->workers[i].broken && !dp_channel_status(ch) && dp_channel_free_slots(ch) < l->cfg.depth)
            return rfaas_api_fail(RFAAS_BUSY, 0, "%s: worker %u has calls in flight that may read the buffer", op, i);
    }
    rfaas_buffer *b = *p;
    *p = b->next;
    drop(b);
    return RFAAS_OK;
}

int rfaas_alloc(rfaas_lease *l, size_t size, void **buffer) {
    static const char op[] = "alloc";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (!buffer || size == 0 || (uint64_t)size > SIZE_MAX_BYTES)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, buffer ? "%s: size %zu, want 1 .. 1 TiB" : "%s: buffer is NULL", op,
                                       size));
    return leave(l, add(l, op, NULL, size, buffer));
}

int rfaas_register(rfaas_lease *l, void *buffer, size_t size) {
    static const char op[] = "register";
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (!buffer || size == 0 || (uint64_t)size > SIZE_MAX_BYTES || (uintptr_t)buffer + size < (uintptr_t)buffer)
        return leave(l, rfaas_api_fail(RFAAS_INVALID, 0, buffer ? "%s: size %zu, want 1 .. 1 TiB" : "%s: buffer is NULL", op,
                                       size));
    return leave(l, add(l, op, buffer, size, NULL));
}

static int give(rfaas_lease *l, const char *op, void *buffer, bool mine) {
    int status = rfaas_api_enter(l, op);
    if (status)
        return status;
    if (!buffer)
        return leave(l, RFAAS_OK);
    if ((status = rfaas_api_take_all(l, op, 0)))
        return leave(l, status);
    status = take_out(l, op, buffer, mine);
    rfaas_api_put_all(l);
    return leave(l, status);
}

int rfaas_free(rfaas_lease *l, void *buffer) { return give(l, "free", buffer, true); }

int rfaas_unregister(rfaas_lease *l, void *buffer) { return give(l, "unregister", buffer, false); }

/* The C API's registered buffers: memory that large payloads leave from without being copied first, and that workers of this node use
 * in place. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "call.h"
#include "dp_vqp.h"

#define SIZE_MAX_BYTES (1ull << 40)

/* Returns a memory file of this size, or -1. Half of the descriptors are left to the program. A file above the limit of file sizes would
 * end the program with SIGXFSZ. */
static int make_file(uint64_t whole) {
    struct rlimit files, bytes;
    if (getrlimit(RLIMIT_FSIZE, &bytes) || whole > bytes.rlim_cur)
        return -1;
    int fd = memfd_create("rfaas", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (getrlimit(RLIMIT_NOFILE, &files) || (rlim_t)fd >= files.rlim_cur / 2 || ftruncate(fd, (off_t)whole) ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Maps present pages, followed by an inaccessible page. If a memory file can be made, the pages are its pages, and *fd is its descriptor. */
static void *map_pages(uint64_t size, uint64_t *mapped, int *fd) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), whole = (size + page - 1) & ~(page - 1);
    /* Private at first, because the kernel refuses too much private memory at once. It would not refuse pages of a file. */
    uint8_t *at = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    *fd = make_file(whole);
    if (*fd >= 0 && mmap(at, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, *fd, 0) == MAP_FAILED) {
        close(*fd); /* as without a file */
        *fd = -1;
    }
    if ((*fd < 0 && mmap(at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE, -1, 0) == MAP_FAILED) ||
        mprotect(at + whole, page, PROT_NONE)) {
        int why = errno;
        munmap(at, whole + page);
        if (*fd >= 0)
            close(*fd);
        *fd = -1;
        errno = why;
        return NULL;
    }
    *mapped = whole + page;
    return at;
}

/* Registers a buffer with the device of a grant. */
static int give_to(rfaas_buffer *b, const rfaas_grant *g, dp_error *err) {
    dp_domain *d = dp_endpoint_domain(g->ep);
    dp_error none;
    /* A device that copies its source gains nothing from a registration. Small calls would even miss the mailbox. Queue pairs of the agent do not
     * reach the buffer: payloads are copied until the lease has its own. */
    int st = d->dev->caps & DP_CAP_SYNC_SOURCE || dp_vqp_is(d->dev) ? DP_OK : dp_mem_register(d, b->addr, b->size, 0, &b->mem, err);
    if (st)
        b->mem = NULL;
    else if (b->fd >= 0 && dp_mem_lend(d, b->fd, b->addr, b->size, &b->lent, &none))
        b->lent = NULL;
    return st;
}

/* Undoes give_to. Without calls in flight that may use the buffer. */
static void take_from(rfaas_buffer *b, const rfaas_grant *g) {
    for (uint32_t i = 0; b->lent && g && i < g->n_workers; i++)
        if (g->workers[i].ch)
            dp_channel_unshare(g->workers[i].ch, b->lent);
    dp_mem_free(b->lent);
    dp_mem_free(b->mem);
    b->lent = b->mem = NULL;
}

void rfaas_api_move_buffers(rfaas_lease *l, const rfaas_grant *to) {
    for (rfaas_buffer *b = l->buffers; b; b = b->next) {
        dp_error err = {0};
        take_from(b, l->grant);
        give_to(b, to, &err); /* if it fails, payloads are copied */
    }
}

static void drop(rfaas_buffer *b, const rfaas_grant *g) {
    take_from(b, g);
    if (b->mapped)
        munmap(b->addr, b->mapped);
    if (b->fd >= 0)
        close(b->fd);
    free(b);
}

void rfaas_api_free_buffers(rfaas_lease *l) {
    while (l->buffers) {
        rfaas_buffer *b = l->buffers;
        l->buffers = b->next;
        drop(b, l->grant);
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
    b->fd = -1;
    b->addr = addr ? addr : map_pages(size, &b->mapped, &b->fd);
    b->size = size;
    if (!b->addr) {
        free(b);
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s: no memory for %llu bytes", op, (unsigned long long)size);
    }
    int status = rfaas_api_take_all(l, op, 0); /* with the pages there: this takes no time */
    if (status) {
        drop(b, NULL);
        return status;
    }
    const rfaas_buffer *other = addr ? overlapped(l, addr, size) : NULL;
    if (other)
        status = rfaas_api_fail(RFAAS_INVALID, 0, "%s: %llu bytes at %p overlap the buffer of %llu bytes at %p", op,
                                (unsigned long long)size, addr, (unsigned long long)other->size, other->addr);
    else if (l->grant->ep && give_to(b, l->grant, &err))
        status = rfaas_api_fail_dp(op, &err);
    if (!status) {
        pthread_mutex_lock(&l->mu);
        b->next = l->buffers;
        l->buffers = b;
        pthread_mutex_unlock(&l->mu);
        if (out)
            *out = b->addr;
    }
    rfaas_api_put_all(l);
    if (status)
        drop(b, NULL);
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
        if (!ch || l->workers[i].broken)
            continue;
        dp_channel_look(ch); /* a program that does nothing but try to free must see the late reply of a call that it gave up */
        if (!dp_channel_status(ch) && dp_channel_free_slots(ch) < l->cfg.depth)
            return rfaas_api_fail(RFAAS_BUSY, 0, "%s: worker %u has calls in flight that may read the buffer", op, i);
    }
    rfaas_buffer *b = *p;
    pthread_mutex_lock(&l->mu);
    *p = b->next;
    pthread_mutex_unlock(&l->mu);
    drop(b, l->grant);
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

/* ---- calls in place ---- */

/* Returns the buffer of rfaas_alloc that contains the bytes, if they are worth to be used in place; otherwise NULL. The thread owns the
 * lease, or has a worker's unit or the mutex. */
static const rfaas_buffer *place_of(const rfaas_lease *l, const void *at, size_t size) {
    for (const rfaas_buffer *b = l->buffers; b && size >= DP_PLACE_MIN; b = b->next) {
        uintptr_t offset = (uintptr_t)at - (uintptr_t)b->addr; /* wraps around for addresses below the buffer */
        if (b->mapped && offset < b->size && size <= b->size - offset)
            return b;
    }
    return NULL;
}

int rfaas_api_plan_in_place(rfaas_lease *l, const char *op, rfaas_function fn, call_plan *p, const void *in, size_t in_size,
                            const void *out, size_t capacity) {
    pthread_mutex_lock(&l->mu); /* other threads of a shared lease may free and make other buffers */
    const bool from = place_of(l, in, in_size), to = place_of(l, out, capacity);
    pthread_mutex_unlock(&l->mu);
    const void *bad = from && (uintptr_t)in % 64 ? in : to && (uintptr_t)out % 64 ? out : NULL;
    if (bad)
        return rfaas_api_fail(RFAAS_INVALID, 0,
                              "%s %s: %p, the %s in place, is not a multiple of 64; move it, or call without RFAAS_CALL_IN_PLACE", op,
                              function_name(l, fn), bad, bad == in ? "payload" : "result");
    if (from && to && (uintptr_t)in < (uintptr_t)out + capacity && (uintptr_t)out < (uintptr_t)in + in_size)
        return rfaas_api_fail(RFAAS_INVALID, 0,
                              "%s %s: %zu bytes of payload at %p overlap %zu bytes of result at %p; separate them, or call without "
                              "RFAAS_CALL_IN_PLACE", op, function_name(l, fn), in_size, in, capacity, out);
    if (to && p->attempt)
        return rfaas_api_fail(RFAAS_INVALID, 0,
                              "%s %s: attempt_ns is %lld with a result in place, to which an attempt that was given up may still write; "
                              "use 0, or memory that is not from rfaas_alloc", op, function_name(l, fn), (long long)p->attempt);
    p->in_place = from || to;
    p->result_in_place = to;
    return RFAAS_OK;
}

/* Finds the memory in which the grant's workers can use payload and result. Returns false if there is none, and cuts the capacity to what
 * the lease carries then. */
static bool find_places(const rfaas_lease *l, const call_args *a, dp_places *p, uint32_t *room) {
    const rfaas_buffer *from = place_of(l, a->in, a->in_size), *to = place_of(l, a->out, a->room);
    *p = (dp_places){from ? from->lent : NULL, to ? to->lent : NULL};
    *room = p->out ? a->room : cut_capacity(l, a->room);
    return p->in || p->out;
}

int rfaas_api_call_in_place(const rfaas_lease *l, uint32_t w, const call_args *a, int64_t deadline, uint32_t *got, dp_started *started,
                            uint32_t *slot) {
    dp_places p;
    uint32_t room;
    if (find_places(l, a, &p, &room))
        return dp_channel_call_placed(l->workers[w].ch, a->fn, a->in, a->in_size, a->out, room, &p, got, deadline, started, slot);
    return dp_channel_call_turn(l->workers[w].ch, a->fn, a->in, a->in_size, buffer_of(l, a->in, a->in_size), a->out, room, got, deadline,
                                started, slot);
}

int rfaas_api_submit_in_place(const rfaas_lease *l, uint32_t w, const call_args *a, int64_t deadline, uint32_t *slot) {
    dp_places p;
    uint32_t room;
    if (find_places(l, a, &p, &room))
        return dp_channel_submit_placed(l->workers[w].ch, a->fn, a->in, a->in_size, a->out, room, &p, deadline, slot);
    return dp_channel_submit_until(l->workers[w].ch, a->fn, a->in, a->in_size, buffer_of(l, a->in, a->in_size), room, deadline, slot);
}

/* The worker's side of calls in parts: payloads that arrive in parts, and results that the client takes in parts. */
#include <string.h>
#include <sys/mman.h>

#include "dp_parts.h"
#include "dp_serve_impl.h"

#define KEPT (16ull << 20) /* bytes of a mapping that are kept for the next call of the slot */

enum { PAGE = 4096 };

static void unmap(dp_area *a) {
    if (a->at)
        munmap(a->at, a->size + PAGE);
    *a = (dp_area){0};
}

/* Maps memory for this many bytes and a guard. The memory counts as the worker's own, as far as it is touched. An inaccessible page follows. */
static bool make_room(dp_area *a, uint64_t bytes) {
    uint64_t size = (bytes + DP_PART_GUARD + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    if (a->at && a->size >= size)
        return true;
    unmap(a);
    uint8_t *at = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return false;
    *a = (dp_area){at, size};
    if (!mprotect(at, size, PROT_READ | PROT_WRITE))
        return true;
    unmap(a);
    return false;
}

static void let_go(dp_area *a) {
    if (a->size > KEPT)
        unmap(a);
}

void dp_parts_done(dp_parts *p) {
    let_go(&p->in);
    let_go(&p->out);
    p->state = DP_PARTS_NONE;
}

void dp_parts_ran(dp_parts *p, uint32_t total) {
    let_go(&p->in);
    p->total = total;
    p->state = DP_PARTS_RAN;
}

void dp_parts_drop(dp_parts *p) {
    unmap(&p->in);
    unmap(&p->out);
    p->state = DP_PARTS_NONE;
}

/* Reports whether a range of the bulk area is in it. */
static bool in_bulk(const dp_layout *l, uint32_t offset, uint32_t bytes) {
    uint64_t at = (uint64_t)offset * DP_BULK_UNIT;
    return at <= l->bulk && bytes <= l->bulk - at;
}

/* Reports whether a message continues the call that the slot has. */
static bool continues(const dp_parts *p, const dp_request *h, dp_parts_state state) {
    return p->state == state && p->call_id == h->call_id && p->size == h->size && p->capacity == h->capacity && p->function == h->function &&
           p->then == h->then;
}

int dp_parts_take(dp_server *s, uint32_t slot, const dp_request *h, uint64_t word) {
    dp_parts *p = &s->parts[slot];
    const dp_layout *l = &s->layout;
    uint32_t offset = (uint32_t)word, bytes = (uint32_t)(word >> 32), most = dp_part_max(l->bulk);
    uint64_t limit = s->cfg.max_bulk ? s->cfg.max_bulk : DP_BULK_MAX;
    if (h->size > limit || h->capacity > limit)
        return DP_TOO_LARGE;
    if (!most || bytes > most || !in_bulk(l, h->in_offset, bytes) || offset > h->size || bytes > h->size - offset || (!bytes && h->size))
        return DP_BAD_REQUEST;
    if (h->capacity > l->eager && !in_bulk(l, h->out_offset, h->capacity < most ? h->capacity : most))
        return DP_BAD_REQUEST;
    if (offset == 0) {
        *p = (dp_parts){DP_PARTS_ARRIVE, h->function, h->then, h->call_id, h->size, h->capacity, 0, 0, p->in, p->out};
        if (!make_room(&p->in, h->size) || (h->capacity > l->eager && !make_room(&p->out, h->capacity))) {
            dp_parts_drop(p);
            return DP_TOO_LARGE;
        }
    } else if (!continues(p, h, DP_PARTS_ARRIVE) || p->got != offset) {
        return DP_BAD_REQUEST;
    }
    memcpy(p->in.at + offset, (const uint8_t *)s->requests->addr + dp_bulk_at(l, h->in_offset), bytes);
    p->got += bytes;
    return DP_OK;
}

int dp_parts_give(dp_server *s, uint32_t slot, const dp_request *h, uint64_t word) {
    const dp_parts *p = &s->parts[slot];
    uint32_t offset = (uint32_t)word, bytes = (uint32_t)(word >> 32);
    bool good = continues(p, h, DP_PARTS_RAN) && bytes && bytes <= dp_part_max(s->layout.bulk) && offset <= p->total &&
                bytes <= p->total - offset && in_bulk(&s->layout, h->out_offset, bytes);
    return good ? DP_OK : DP_BAD_REQUEST;
}

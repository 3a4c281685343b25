/* The requests of a lease: a table of slots, and a list of the free ones. For the files that start requests and end them. */
#ifndef RFAAS_REQUEST_H
#define RFAAS_REQUEST_H

#include <stdlib.h>

#include "call.h"

/* Fields that a thread may read without the unit of the request's worker. A thread that reads a state also sees its worker. */
static inline uint8_t state_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->state, __ATOMIC_ACQUIRE); }
static inline void set_state(rfaas_request_slot *r, rfaas_request_state state) {
    __atomic_store_n(&r->state, (uint8_t)state, __ATOMIC_RELEASE);
}
static inline uint64_t id_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->id, __ATOMIC_RELAXED); }
static inline void set_id(rfaas_request_slot *r, uint64_t id) { __atomic_store_n(&r->id, id, __ATOMIC_RELAXED); }
static inline uint32_t worker_of(const rfaas_request_slot *r) { return __atomic_load_n(&r->worker, __ATOMIC_RELAXED); }
static inline void set_worker(rfaas_request_slot *r, uint32_t worker) { __atomic_store_n(&r->worker, worker, __ATOMIC_RELAXED); }
static inline uint32_t used(const rfaas_lease *l) { return __atomic_load_n(&l->requests_used, __ATOMIC_RELAXED); }

static inline void put_free(rfaas_lease *l, rfaas_request_slot *r) {
    set_id(r, 0);
    set_state(r, RFAAS_REQ_FREE);
    r->next_free = l->requests_free;
    l->requests_free = (uint32_t)(r - l->requests) + 1;
}

/* put_free for a shared lease. */
void rfaas_api_put_request(rfaas_lease *l, rfaas_request_slot *r);

static inline void give_request(rfaas_lease *l, rfaas_request_slot *r) {
    free(r->text);
    r->text = NULL;
    if (UNLIKELY(r->pieces != NULL)) {
        free(r->pieces->rest);
        free(r->pieces);
        r->pieces = NULL;
    }
    if (LIKELY(!shared(l)))
        put_free(l, r);
    else
        rfaas_api_put_request(l, r);
}

/* Finds a request's lease and slot, and enters the lease. Sets the error if it fails. */
static inline int enter_for(rfaas_request id, const char *op, rfaas_lease **lease, rfaas_request_slot **request) {
    rfaas_lease *l = rfaas_api_lease_at(id & (RFAAS_LEASES_MAX - 1));
    uint32_t i = id >> RFAAS_REQ_LEASE_BITS & ((1u << RFAAS_REQ_INDEX_BITS) - 1);
    int status = RFAAS_OK;
    if (UNLIKELY(!usable(l)) || (UNLIKELY(!enter(l)) && (status = rfaas_api_join(l, op, 0)))) {
        if (status && status != RFAAS_INVALID)
            return status;
        if (__atomic_load_n(&rfaas_api_state, __ATOMIC_RELAXED) != RFAAS_STATE_UP)
            return rfaas_api_bad_lease(NULL, op);
        return rfaas_api_fail(RFAAS_INVALID, RFAAS_MAYBE_EXECUTED, "%s: request %#llx: its lease was released", op,
                              (unsigned long long)id);
    }
    if (UNLIKELY(i >= used(l) || id_of(&l->requests[i]) != id))
        return leave(l, rfaas_api_bad_request(id, op));
    *lease = l;
    *request = &l->requests[i];
    return RFAAS_OK;
}

static inline int report(rfaas_lease *l, rfaas_request_slot *r, const char *op, rfaas_request *request, size_t *out_size) {
    int status = rfaas_api_report(l, r, op, out_size);
    *request = RFAAS_REQUEST_NULL;
    return status;
}

#endif

/* rfaas.h for Go. A goroutine may be on another thread at its next call into C, so a failed call brings its error along: each
 * function returns NULL, or the thread's error in memory of malloc. */
#ifndef RFAAS_SHIM_H
#define RFAAS_SHIM_H

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rfaas.h"

typedef struct rfaas_shim_error {
    int status, started;
    int32_t code;
    char *text; /* behind it */
} rfaas_shim_error;

static __attribute__((noinline, cold, unused)) rfaas_shim_error *rfaas_shim_failed(int status) {
    const char *text = rfaas_last_error();
    size_t size = strlen(text) + 1;
    rfaas_shim_error *e = malloc(sizeof *e + size);
    if (!e)
        abort(); /* as Go does without memory */
    e->status = status;
    e->started = rfaas_started();
    e->code = rfaas_function_code();
    e->text = memcpy(e + 1, text, size);
    return e;
}

static inline rfaas_shim_error *rfaas_shim_check(int status) {
    return __builtin_expect(status == RFAAS_OK, 1) ? NULL : rfaas_shim_failed(status);
}

/* ---- calls ----
 * cgo checks each argument whose type may refer to Go memory with pointers. For a void pointer that takes as long as half of a crossing,
 * and for a handle, whose structure cgo does not know, a few nanoseconds. So payloads and results are bytes here, and the lease of
 * a synchronous call is a number. */

/* The outcome of a call. Go passes a pointer to it, because a returned structure would be copied after two calls that check whether the
 * goroutine's stack has moved. It contains no pointers, because cgo would check their targets. */
typedef struct rfaas_shim_result {
    size_t size;
    uint64_t error; /* address of the rfaas_shim_error; 0: none */
} rfaas_shim_result;

static inline rfaas_shim_error *rfaas_shim_error_of(uint64_t error) { return (rfaas_shim_error *)(uintptr_t)error; }

static inline rfaas_call_options rfaas_shim_options(int32_t worker, uint32_t repeats, int64_t timeout_ns, int64_t attempt_ns,
                                                    uint32_t flags) {
    return (rfaas_call_options){sizeof(rfaas_call_options), worker, timeout_ns, repeats, flags, attempt_ns, 0};
}

static inline void rfaas_shim_invoke(uintptr_t l, uint32_t f, const uint8_t *in, size_t in_size, uint8_t *out, size_t capacity,
                                     int32_t worker, uint32_t repeats, int64_t timeout_ns, int64_t attempt_ns, uint32_t flags,
                                     rfaas_shim_result *r) {
    rfaas_call_options o = rfaas_shim_options(worker, repeats, timeout_ns, attempt_ns, flags);
    int status = rfaas_invoke((rfaas_lease *)l, f, in, in_size, out, capacity, &r->size, &o);
    r->error = (uintptr_t)rfaas_shim_check(status);
}

/* Without options. */
static inline void rfaas_shim_call(uintptr_t l, uint32_t f, const uint8_t *in, size_t in_size, uint8_t *out, size_t capacity,
                                   rfaas_shim_result *r) {
    int status = rfaas_invoke((rfaas_lease *)l, f, in, in_size, out, capacity, &r->size, NULL);
    r->error = (uintptr_t)rfaas_shim_check(status);
}

/* Functions of call.h and client.h, which this header does not include because it would give Go the insides of the handles. */
int rfaas_api_iinvoke_for(rfaas_lease *l, rfaas_function fn, const void *in, size_t in_size, void *out, size_t capacity,
                          const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request);
int rfaas_api_iinvokev_for(rfaas_lease *l, rfaas_function fn, const rfaas_piece *in, size_t in_count, const rfaas_piece *out,
                           size_t out_count, const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request);
struct rfaas_fold;
int rfaas_api_map(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *out, size_t out_item, size_t count,
                  const rfaas_map_options *options, const struct rfaas_fold *fold, const uint32_t *cancelled);
int rfaas_api_reduce(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *accumulator, size_t out_item,
                     size_t count, int operation, int type, const rfaas_map_options *options, const uint32_t *cancelled);
void rfaas_api_enter_and_await_slot(rfaas_lease *l, int32_t worker, int64_t until);
void rfaas_api_interrupt(rfaas_lease *l);

typedef struct rfaas_shim_started {
    rfaas_request request; /* 0: it has ended */
    size_t size;
    rfaas_shim_error *error;
} rfaas_shim_started;

/* Waits for a call that was started, up to patience_ns. */
static inline rfaas_shim_started rfaas_shim_wait_first(int status, rfaas_request request, int64_t patience_ns) {
    rfaas_shim_started s = {request, 0, NULL};
    size_t index;
    if (!status && patience_ns > 0)
        status = rfaas_waitany_for(1, &s.request, patience_ns, &index, &s.size);
    s.error = rfaas_shim_check(status);
    return s;
}

static inline rfaas_shim_started rfaas_shim_start(rfaas_lease *l, uint32_t f, const uint8_t *in, size_t in_size, uint8_t *out, size_t capacity,
                                                  int32_t worker, uint32_t repeats, int64_t timeout_ns, int64_t attempt_ns, uint32_t flags,
                                                  uint64_t keep, int64_t wait_ns, int64_t patience_ns) {
    rfaas_call_options o = rfaas_shim_options(worker, repeats, timeout_ns, attempt_ns, flags);
    o.keep = keep;
    rfaas_request r = RFAAS_REQUEST_NULL;
    int status = rfaas_api_iinvoke_for(l, f, in, in_size, out, capacity, &o, wait_ns, &r);
    return rfaas_shim_wait_first(status, r, patience_ns);
}

static inline rfaas_shim_error *rfaas_shim_kept_result(uint8_t *out, size_t capacity) {
    return rfaas_shim_check(rfaas_kept_result(out, capacity, NULL));
}

/* The array has in_count pieces of the payload, and out_count pieces of the result behind them. */
static inline rfaas_shim_started rfaas_shim_start_pieces(rfaas_lease *l, uint32_t f, const rfaas_piece *pieces, size_t in_count,
                                                         size_t out_count, int32_t worker, uint32_t repeats, int64_t timeout_ns,
                                                         int64_t attempt_ns, uint32_t flags, int64_t wait_ns, int64_t patience_ns) {
    rfaas_call_options o = rfaas_shim_options(worker, repeats, timeout_ns, attempt_ns, flags);
    rfaas_request r = RFAAS_REQUEST_NULL;
    int status = rfaas_api_iinvokev_for(l, f, pieces, in_count, pieces + in_count, out_count, &o, wait_ns, &r);
    return rfaas_shim_wait_first(status, r, patience_ns);
}

static inline void rfaas_shim_invoke_pieces(rfaas_lease *l, uint32_t f, const rfaas_piece *pieces, size_t in_count, size_t out_count,
                                            int32_t worker, uint32_t repeats, int64_t timeout_ns, int64_t attempt_ns,
                                            uint32_t flags, rfaas_shim_result *r) {
    rfaas_call_options o = rfaas_shim_options(worker, repeats, timeout_ns, attempt_ns, flags);
    int status = rfaas_invokev(l, f, pieces, in_count, pieces + in_count, out_count, &r->size, &o);
    r->error = (uintptr_t)rfaas_shim_check(status);
}

static inline void rfaas_shim_await_slot(rfaas_lease *l, int32_t worker, int64_t patience_ns) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    rfaas_api_enter_and_await_slot(l, worker, ts.tv_sec * 1000000000ll + ts.tv_nsec + patience_ns);
}

typedef struct rfaas_shim_ended {
    int64_t index; /* -1: none has */
    size_t size;
    rfaas_shim_error *error;
} rfaas_shim_ended;

static inline rfaas_shim_ended rfaas_shim_waitany(size_t count, rfaas_request *requests, int64_t patience_ns) {
    rfaas_shim_ended e = {0, 0, NULL};
    size_t index = RFAAS_UNDEFINED;
    int status = rfaas_waitany_for(count, requests, patience_ns, &index, &e.size);
    e.index = index == RFAAS_UNDEFINED ? -1 : (int64_t)index;
    e.error = rfaas_shim_check(status);
    return e;
}

/* ---- batches: batch.c ---- */

/* A call of a batch. Neither structure contains pointers, because cgo would check their targets. */
typedef struct rfaas_batch_call {
    rfaas_request request; /* in flight; RFAAS_REQUEST_NULL: not submitted, or ended */
    uint64_t in, out;      /* offsets in the batch's memory */
    uint64_t size;         /* of the result */
    uint64_t error;        /* address of the rfaas_shim_error; 0: none */
    uint32_t in_size, capacity, function, unused;
} rfaas_batch_call;

typedef struct rfaas_batch {
    uint64_t memory;   /* address: payloads and results */
    int64_t deadline;  /* of the calls, CLOCK_MONOTONIC ns; 0: none */
    int64_t busy_since; /* when a call found no slot and none was in flight; 0: the last one found a slot */
    uint32_t count;    /* calls */
    uint32_t next;     /* first call that is not submitted */
    uint32_t flying;   /* place of the first call in flight */
    uint32_t n_flying; /* calls in flight */
    uint32_t failed;   /* calls that ended with an error */
    uint32_t begun;    /* the deadline is set */
} rfaas_batch;

/* Submits the calls of a batch as slots become free, and waits until all have ended, at most patience_ns (below 0: without a limit). Then
 * next == count and n_flying == 0. Each run of the same batch passes the same options; their time-out begins with the first run. `flying` has room for
 * the indices of all calls. The caller keeps all memory until the calls have ended or are cancelled. */
void rfaas_api_batch(rfaas_lease *l, rfaas_batch *b, rfaas_batch_call *calls, uint32_t *flying, const rfaas_call_options *o, int64_t patience_ns);

static inline void rfaas_shim_batch(uintptr_t l, rfaas_batch *b, rfaas_batch_call *calls, uint32_t *flying, uint32_t repeats, int64_t timeout_ns,
                                    int64_t attempt_ns, uint32_t flags, int64_t patience_ns) {
    rfaas_call_options o = rfaas_shim_options(RFAAS_ANY_WORKER, repeats, timeout_ns, attempt_ns, flags);
    rfaas_api_batch((rfaas_lease *)l, b, calls, flying, &o, patience_ns);
}

static inline rfaas_shim_error *rfaas_shim_cancel(rfaas_request *r) { return rfaas_shim_check(rfaas_cancel(r)); }

static inline rfaas_shim_error *rfaas_shim_reduce(rfaas_lease *l, rfaas_function f, const uint8_t *in, size_t in_item, uint8_t *accumulator,
                                                  size_t out_item, size_t count, int operation, int type, const rfaas_map_options *o,
                                                  const uint32_t *cancelled) {
    return rfaas_shim_check(rfaas_api_reduce(l, f, in, in_item, accumulator, out_item, count, operation, type, o, cancelled));
}

static inline rfaas_shim_error *rfaas_shim_map(rfaas_lease *l, rfaas_function f, const uint8_t *in, size_t in_item, uint8_t *out,
                                               size_t out_item, size_t count, const rfaas_map_options *o,
                                               const uint32_t *cancelled) {
    return rfaas_shim_check(rfaas_api_map(l, f, in, in_item, out, out_item, count, o, NULL, cancelled));
}

/* ---- everything else ---- */

static inline rfaas_shim_error *rfaas_shim_init(void) { return rfaas_shim_check(rfaas_init(NULL)); }
static inline rfaas_shim_error *rfaas_shim_finalize(void) { return rfaas_shim_check(rfaas_finalize()); }
static inline rfaas_shim_error *rfaas_shim_session_open(const rfaas_session_options *o, rfaas_session **s) {
    return rfaas_shim_check(rfaas_session_open(o, s));
}
static inline rfaas_shim_error *rfaas_shim_table_put(rfaas_session *s, const char *name, const rfaas_piece *parts, size_t count, uint64_t address) {
    return rfaas_shim_check(rfaas_table_put_at(s, name, parts, count, address));
}
static inline rfaas_shim_error *rfaas_shim_table_put_seed(rfaas_session *s, const char *name, const char *seed) {
    return rfaas_shim_check(rfaas_table_put_seed(s, name, seed));
}
static inline rfaas_shim_error *rfaas_shim_table_drop(rfaas_session *s, const char *name) { return rfaas_shim_check(rfaas_table_drop(s, name)); }
static inline rfaas_shim_error *rfaas_shim_seed_create(rfaas_lease *l, const char *setup, const void *in, size_t size, const rfaas_seed_options *o, rfaas_seed **to) {
    return rfaas_shim_check(rfaas_seed_create(l, setup, in, size, o, to));
}
static inline rfaas_shim_error *rfaas_shim_seed_open(rfaas_session *s, const char *name, rfaas_seed **to) {
    return rfaas_shim_check(rfaas_seed_open(s, name, to));
}
static inline rfaas_shim_error *rfaas_shim_seed_info(rfaas_seed *d, rfaas_seed_details *to) { return rfaas_shim_check(rfaas_seed_info(d, to)); }
static inline rfaas_shim_error *rfaas_shim_seed_release(rfaas_seed *d) { return rfaas_shim_check(rfaas_seed_release(d)); }
static inline rfaas_shim_error *rfaas_shim_session_close(rfaas_session *s) { return rfaas_shim_check(rfaas_session_close(s)); }
static inline rfaas_shim_error *rfaas_shim_session_changes(rfaas_session *s, rfaas_change *to, size_t capacity, size_t *count) {
    return rfaas_shim_check(rfaas_session_changes(s, to, capacity, count));
}
static inline rfaas_shim_error *rfaas_shim_lease_open(rfaas_session *s, const rfaas_lease_options *o, const char *at, rfaas_lease **l) {
    rfaas_place place = {{0}};
    if (!at)
        return rfaas_shim_check(rfaas_lease_open(s, o, l));
    memcpy(place.executor, at, strnlen(at, sizeof place.executor)); /* a longer one has no NUL, which is refused */
    return rfaas_shim_check(rfaas_lease_open_at(s, o, &place, l));
}
static inline rfaas_shim_error *rfaas_shim_lease_open_across(rfaas_session *s, const rfaas_lease_options *o, size_t capacity,
                                                             rfaas_lease **leases, size_t *count) {
    return rfaas_shim_check(rfaas_lease_open_across(s, o, capacity, leases, count));
}
static inline rfaas_shim_error *rfaas_shim_places(rfaas_session *s, const rfaas_lease_options *o, size_t count, rfaas_place *places) {
    return rfaas_shim_check(rfaas_places(s, o, count, places));
}
static inline rfaas_shim_error *rfaas_shim_worker_replace(rfaas_lease *l, int worker) {
    return rfaas_shim_check(rfaas_worker_replace(l, worker));
}
static inline rfaas_shim_error *rfaas_shim_lease_release(rfaas_lease *l) { return rfaas_shim_check(rfaas_lease_release(l)); }
static inline rfaas_shim_error *rfaas_shim_lease_renew(rfaas_lease *l, int64_t ns) { return rfaas_shim_check(rfaas_lease_renew(l, ns)); }
static inline rfaas_shim_error *rfaas_shim_lease_status(rfaas_lease *l) { return rfaas_shim_check(rfaas_lease_status(l)); }
static inline rfaas_shim_error *rfaas_shim_lease_event(rfaas_lease *l, rfaas_event *e) { return rfaas_shim_check(rfaas_lease_event(l, e)); }
static inline rfaas_shim_error *rfaas_shim_lease_info(rfaas_lease *l, rfaas_lease_details *d) {
    return rfaas_shim_check(rfaas_lease_info(l, d));
}
static inline rfaas_shim_error *rfaas_shim_lease_function(rfaas_lease *l, const char *name, rfaas_function *f) {
    return rfaas_shim_check(rfaas_lease_function(l, name, f));
}
static inline rfaas_shim_error *rfaas_shim_lease_chain(rfaas_lease *l, rfaas_function first, rfaas_function second, rfaas_function *f) {
    return rfaas_shim_check(rfaas_lease_chain(l, first, second, f));
}
static inline rfaas_shim_error *rfaas_shim_worker_origin(rfaas_lease *l, int worker, rfaas_worker_start *s) {
    return rfaas_shim_check(rfaas_worker_origin(l, worker, s));
}
static inline rfaas_shim_error *rfaas_shim_worker_info(rfaas_lease *l, int worker, rfaas_worker_details *d) {
    return rfaas_shim_check(rfaas_worker_info(l, worker, d));
}
static inline rfaas_shim_error *rfaas_shim_lease_statistics(rfaas_lease *l, rfaas_statistics *s) {
    return rfaas_shim_check(rfaas_lease_statistics(l, s));
}
static inline rfaas_shim_error *rfaas_shim_alloc(rfaas_lease *l, size_t size, void **buffer) {
    return rfaas_shim_check(rfaas_alloc(l, size, buffer));
}
static inline rfaas_shim_error *rfaas_shim_free(rfaas_lease *l, void *buffer) { return rfaas_shim_check(rfaas_free(l, buffer)); }

#endif

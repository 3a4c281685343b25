/* Results that are larger than the caller's memory. The library gives such a call more memory behind the caller's, so that the worker can
 * return the result. It keeps the result for rfaas_kept_result. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

typedef struct kept {
    size_t size;
    uint8_t bytes[];
} kept;

static _Thread_local kept *of_thread; /* at most one for each thread */
static pthread_key_t at_thread_end;
static bool key_made;

static void make_key(void) { key_made = pthread_key_create(&at_thread_end, free) == 0; }

static void set(kept *k) {
    free(of_thread);
    of_thread = k;
    if (key_made)
        pthread_setspecific(at_thread_end, k);
}

void rfaas_api_forget_kept(void) {
    if (of_thread)
        set(NULL);
}

int rfaas_api_keep_room(const rfaas_lease *l, const char *op, call_args *a, size_t capacity) {
    rfaas_call_pieces *p = a->pieces;
    size_t n = p->out.n, size;
    uint32_t most = cut_capacity(l, a->p->keep);
    a->room = most;
    if (most <= capacity)
        return RFAAS_OK; /* the lease returns no more */
    dp_piece *at = NULL;
    if (n >= SIZE_MAX / sizeof *at || __builtin_add_overflow((n + 1) * sizeof *at, most - capacity, &size) || !(at = malloc(size)))
        return rfaas_api_fail(RFAAS_FATAL, 0, "%s %s: out of memory for a result of up to %u bytes (keep)", op, function_name(l, a->fn), most);
    if (n)
        memcpy(at, p->out.at, n * sizeof *at);
    at[n] = (dp_piece){at + n + 1, most - capacity, 1, 0};
    p->out = (dp_pieces){at, n + 1};
    p->rest = at;
    p->capacity = capacity;
    return RFAAS_OK;
}

int rfaas_api_keep(const rfaas_lease *l, const char *op, rfaas_function fn, const rfaas_call_pieces *p, uint32_t size) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!p->rest || size <= p->capacity)
        return RFAAS_OK;
    kept *k = malloc(sizeof *k + size);
    pthread_once(&once, make_key);
    set(k);
    if (!k)
        return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "%s %s: result of %u bytes, the capacity is %zu, and there is no memory to keep it",
                              op, function_name(l, fn), size, p->capacity);
    k->size = size;
    dp_gather(k->bytes, &p->out, size);
    return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "%s %s: result of %u bytes, the capacity is %zu. rfaas_kept_result returns the result",
                          op, function_name(l, fn), size, p->capacity);
}

int rfaas_kept_result(void *out, size_t capacity, size_t *out_size) {
    kept *k = of_thread;
    if (!k)
        return rfaas_api_fail(RFAAS_INVALID, 0, "kept_result: no result is kept for this thread: its last call with RFAAS_RESULT_TOO_LARGE had no `keep`, or "
                              "its result was larger, or was returned before");
    if (out_size)
        *out_size = k->size;
    if (capacity < k->size)
        return rfaas_api_fail(RFAAS_RESULT_TOO_LARGE, RFAAS_MAYBE_EXECUTED, "kept_result: result of %zu bytes, the capacity is %zu", k->size, capacity);
    if (!out)
        return rfaas_api_fail(RFAAS_INVALID, 0, "kept_result: out is NULL with capacity %zu", capacity);
    memcpy(out, k->bytes, k->size);
    set(NULL);
    return RFAAS_OK;
}

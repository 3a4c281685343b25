/* Calls whose payload and result are in several pieces of memory. The dataplane gathers the payload into the memory from
 * which it is sent, and scatters the result when the call ends. */
#include <stdlib.h>
#include <string.h>

#include "call.h"

_Static_assert(sizeof(rfaas_piece) == sizeof(dp_piece) && offsetof(rfaas_piece, base) == offsetof(dp_piece, base) &&
                   offsetof(rfaas_piece, size) == offsetof(dp_piece, size) && offsetof(rfaas_piece, count) == offsetof(dp_piece, count) &&
                   offsetof(rfaas_piece, stride) == offsetof(dp_piece, stride),
               "dp_piece and rfaas_piece have the same layout");

/* Checks an array of pieces and adds up its bytes. */
static int check(const rfaas_lease *l, const char *op, rfaas_function fn, const char *name, const dp_pieces *p, size_t *size) {
    size_t bad;
    if (!p->at && p->n)
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: %s is NULL with %zu pieces", op, function_name(l, fn), name, p->n);
    switch (dp_pieces_size(p, size, &bad)) {
    case DP_PIECES_NULL:
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: base of %s[%zu] is NULL with %zu elements of %zu bytes", op, function_name(l, fn),
                              name, bad, p->at[bad].count, p->at[bad].size);
    case DP_PIECES_STRIDE:
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s %s: stride of %s[%zu] is %td, less than its element size %zu", op,
                              function_name(l, fn), name, bad, p->at[bad].stride, p->at[bad].size);
    default:
        return RFAAS_OK;
    }
}

/* Checks the arguments of a call and makes its plan. The thread is inside. */
static int check_call(rfaas_lease *l, const char *op, const rfaas_call_options *options, call_plan *plan, call_args *a) {
    size_t size = 0, capacity = 0;
    int st = RFAAS_OK;
    if (UNLIKELY(draining(l) || a->fn >= l->n_functions))
        st = rfaas_api_bad_call(l, op, a->fn, NULL, 0, NULL, 0);
    if (!st)
        st = check(l, op, a->fn, "in", &a->pieces->in, &size);
    if (!st)
        st = check(l, op, a->fn, "out", &a->pieces->out, &capacity);
    if (!st && options)
        st = rfaas_api_plan_options(l, op, options, plan);
    plan->in_place = false; /* pieces are gathered */
    if (!st && size > cut_capacity(l, size))
        st = rfaas_api_too_large(l, op, a->fn, size, capacity);
    a->in_size = (uint32_t)size;
    a->room = cut_capacity(l, capacity);
    if (!st && UNLIKELY(plan->keep > capacity))
        st = rfaas_api_keep_room(l, op, a, capacity);
    return st;
}

/* Makes the call, and frees the memory for a larger result. */
static int invoke(rfaas_lease *l, const char *op, const call_args *a, size_t *out_size) {
    uint32_t got = 0;
    bool here;
    int st = rfaas_api_invoke(l, a, &got, &here);
    if (LIKELY(st == DP_OK)) {
        st = rfaas_api_keep(l, op, a->fn, a->pieces, got);
    } else if (st == DP_RESULT_TOO_LARGE) {
        if (!here) /* otherwise the text of the error is set */
            rfaas_api_result_too_large(l, op, a->fn, got, a->room, a->pieces);
        rfaas_api_forget_kept();
    }
    if (out_size && (LIKELY(st == DP_OK) || st == DP_RESULT_TOO_LARGE))
        *out_size = got;
    free(a->pieces->rest);
    return st;
}

int rfaas_invokev(rfaas_lease *l, rfaas_function fn, const rfaas_piece *in, size_t in_count, const rfaas_piece *out, size_t out_count,
                  size_t *out_size, const rfaas_call_options *options) {
    static const char op[] = "invokev";
    int st;
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, op);
    if (UNLIKELY(!enter(l)) && (st = rfaas_api_join(l, op, rfaas_api_deadline_of(options))))
        return st;
    rfaas_call_pieces pieces = {.in = {(const dp_piece *)in, in_count}, .out = {(const dp_piece *)out, out_count}};
    call_plan p = {.worker = RFAAS_ANY_WORKER};
    call_args a = {.p = &p, .fn = fn, .pieces = &pieces};
    if ((st = check_call(l, op, options, &p, &a)))
        return leave(l, st);
    return leave(l, invoke(l, op, &a, out_size));
}

/* Returns the pieces of a call whose payload and result are one buffer each. */
static rfaas_call_pieces whole(const call_args *a, dp_piece *in, dp_piece *out, size_t capacity) {
    *in = (dp_piece){(void *)a->in, a->in_size, 1, 0};
    *out = (dp_piece){a->out, capacity, 1, 0};
    return (rfaas_call_pieces){.in = {in, 1}, .out = {out, 1}};
}

int rfaas_api_invoke_keeping(rfaas_lease *l, call_args *a, size_t capacity, size_t *out_size) {
    dp_piece in, out;
    rfaas_call_pieces pieces = whole(a, &in, &out, capacity);
    a->pieces = &pieces;
    int st = rfaas_api_keep_room(l, "invoke", a, capacity);
    return st ? st : invoke(l, "invoke", a, out_size);
}

/* Returns a copy of the arrays of pieces, from malloc, because the caller may change or free its arrays before the request ends. */
static rfaas_call_pieces *copy(const rfaas_call_pieces *from) {
    size_t all;
    if (__builtin_add_overflow(from->in.n, from->out.n, &all) || all > (SIZE_MAX - sizeof *from) / sizeof(dp_piece))
        return NULL;
    rfaas_call_pieces *p = malloc(sizeof *p + all * sizeof(dp_piece));
    if (!p)
        return NULL;
    dp_piece *at = (dp_piece *)(p + 1);
    if (from->in.n)
        memcpy(at, from->in.at, from->in.n * sizeof *at);
    if (from->out.n)
        memcpy(at + from->in.n, from->out.at, from->out.n * sizeof *at);
    *p = (rfaas_call_pieces){{at, from->in.n}, {at + from->in.n, from->out.n}, from->rest, from->capacity};
    return p;
}

/* Starts the call. The request owns the memory for a larger result. */
static int start(rfaas_lease *l, const char *op, call_args *a, rfaas_request *request) {
    const rfaas_call_pieces *p = a->pieces;
    rfaas_request_slot *r;
    int st;
    if (!(a->pieces = copy(p)))
        st = rfaas_api_fail(RFAAS_FATAL, 0, "%s %s: out of memory for %zu and %zu pieces", op, function_name(l, a->fn), p->in.n, p->out.n);
    else if (!(st = rfaas_api_start_pieces(l, op, a, &r)))
        *request = r->id;
    if (st) {
        free(p->rest);
        free(a->pieces);
    }
    return st;
}

int rfaas_api_iinvoke_keeping(rfaas_lease *l, call_args *a, size_t capacity, rfaas_request *request) {
    dp_piece in, out;
    rfaas_call_pieces pieces = whole(a, &in, &out, capacity);
    a->pieces = &pieces;
    int st = rfaas_api_keep_room(l, "iinvoke", a, capacity);
    return st ? st : start(l, "iinvoke", a, request);
}

int rfaas_iinvokev(rfaas_lease *l, rfaas_function fn, const rfaas_piece *in, size_t in_count, const rfaas_piece *out, size_t out_count,
                   const rfaas_call_options *options, rfaas_request *request) {
    return rfaas_api_iinvokev_for(l, fn, in, in_count, out, out_count, options, 0, request);
}

int rfaas_api_iinvokev_for(rfaas_lease *l, rfaas_function fn, const rfaas_piece *in, size_t in_count, const rfaas_piece *out,
                           size_t out_count, const rfaas_call_options *options, int64_t wait_ns, rfaas_request *request) {
    static const char op[] = "iinvokev";
    int st;
    if (UNLIKELY(!usable(l)))
        return rfaas_api_bad_lease(l, op);
    if (UNLIKELY(!request))
        return rfaas_api_fail(RFAAS_INVALID, 0, "%s: request is NULL", op);
    call_plan p = {.worker = RFAAS_ANY_WORKER, .wait_until = wait_ns ? dp_now_ns() + wait_ns : 0};
    if (UNLIKELY(!enter(l))) {
        call_plan early = {.deadline = rfaas_api_deadline_of(options), .wait_until = p.wait_until};
        if ((st = rfaas_api_join(l, op, start_deadline(&early))))
            return st;
    }
    rfaas_call_pieces pieces = {.in = {(const dp_piece *)in, in_count}, .out = {(const dp_piece *)out, out_count}};
    call_args a = {.p = &p, .fn = fn, .pieces = &pieces};
    if ((st = check_call(l, op, options, &p, &a)))
        return leave(l, st);
    return leave(l, start(l, op, &a, request));
}

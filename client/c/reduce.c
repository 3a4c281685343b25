/* rfaas_reduce and rfaas_reduce_with: a map whose results are combined in the order of the items (map.c). */
#include "call.h"

/* Elements of the program's memory, which may have any alignment. */
typedef int32_t int32_any __attribute__((aligned(1), may_alias));
typedef int64_t int64_any __attribute__((aligned(1), may_alias));
typedef uint32_t uint32_any __attribute__((aligned(1), may_alias)); /* sums of integers wrap around */
typedef uint64_t uint64_any __attribute__((aligned(1), may_alias));
typedef float float_any __attribute__((aligned(1), may_alias));
typedef double double_any __attribute__((aligned(1), may_alias));

/* A rfaas_combine_fn. In `expression`, a is an element of the accumulator, and b is the element of the result in the same place. */
#define COMBINE(name, type, expression)                                                                                \
    static void name(void *accumulator, const void *result, size_t size, void *arg) {                                  \
        type *to = accumulator;                                                                                        \
        const type *from = result;                                                                                     \
        (void)arg;                                                                                                     \
        for (size_t i = 0; i < size / sizeof *to; i++) {                                                               \
            type a = to[i], b = from[i];                                                                               \
            to[i] = (expression);                                                                                      \
        }                                                                                                              \
    }

COMBINE(sum_int32, uint32_any, a + b)
COMBINE(sum_int64, uint64_any, a + b)
COMBINE(sum_float, float_any, a + b)
COMBINE(sum_double, double_any, a + b)
COMBINE(min_int32, int32_any, b < a ? b : a)
COMBINE(min_int64, int64_any, b < a ? b : a)
COMBINE(min_float, float_any, b < a ? b : a)
COMBINE(min_double, double_any, b < a ? b : a)
COMBINE(max_int32, int32_any, b > a ? b : a)
COMBINE(max_int64, int64_any, b > a ? b : a)
COMBINE(max_float, float_any, b > a ? b : a)
COMBINE(max_double, double_any, b > a ? b : a)

static const struct {
    size_t size;
    rfaas_combine_fn by[RFAAS_MAX + 1]; /* operation */
} elements[RFAAS_FLOAT64 + 1] = {
    [RFAAS_INT32] = {4, {[RFAAS_SUM] = sum_int32, [RFAAS_MIN] = min_int32, [RFAAS_MAX] = max_int32}},
    [RFAAS_INT64] = {8, {[RFAAS_SUM] = sum_int64, [RFAAS_MIN] = min_int64, [RFAAS_MAX] = max_int64}},
    [RFAAS_FLOAT32] = {4, {[RFAAS_SUM] = sum_float, [RFAAS_MIN] = min_float, [RFAAS_MAX] = max_float}},
    [RFAAS_FLOAT64] = {8, {[RFAAS_SUM] = sum_double, [RFAAS_MIN] = min_double, [RFAAS_MAX] = max_double}},
};

int rfaas_reduce_with(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *accumulator, size_t out_item,
                      size_t count, rfaas_combine_fn combine, void *arg, const rfaas_map_options *options) {
    if (!combine)
        return rfaas_api_fail(RFAAS_INVALID, 0, "reduce: combine is NULL, want a function");
    const rfaas_fold fold = {.combine = combine, .arg = arg};
    return rfaas_api_map(l, function, in, in_item, accumulator, out_item, count, options, &fold, NULL);
}

int rfaas_reduce(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *accumulator, size_t out_item,
                 size_t count, int operation, int type, const rfaas_map_options *options) {
    return rfaas_api_reduce(l, function, in, in_item, accumulator, out_item, count, operation, type, options, NULL);
}

int rfaas_api_reduce(rfaas_lease *l, rfaas_function function, const void *in, size_t in_item, void *accumulator, size_t out_item,
                     size_t count, int operation, int type, const rfaas_map_options *options, const uint32_t *cancelled) {
    if (type < RFAAS_INT32 || type > RFAAS_FLOAT64)
        return rfaas_api_fail(RFAAS_INVALID, 0, "reduce: type is %d, want RFAAS_INT32, RFAAS_INT64, RFAAS_FLOAT32 or RFAAS_FLOAT64", type);
    if (operation < RFAAS_SUM || operation > RFAAS_MAX)
        return rfaas_api_fail(RFAAS_INVALID, 0, "reduce: operation is %d, want RFAAS_SUM, RFAAS_MIN or RFAAS_MAX", operation);
    if (out_item % elements[type].size)
        return rfaas_api_fail(RFAAS_INVALID, 0, "reduce: out_item is %zu bytes, want a multiple of the %zu bytes of an element", out_item,
                              elements[type].size);
    const rfaas_fold fold = {.combine = elements[type].by[operation]};
    return rfaas_api_map(l, function, in, in_item, accumulator, out_item, count, options, &fold, cancelled);
}

/* The functions of rfaas_function.h, which user code calls. They act on the invocation that the serving thread executes. */
#define RFAAS_FUNCTION_IMPLEMENTATION
#include "rfaas_function.h"

#include <sched.h>
#include <stdarg.h>
#include <string.h>

#include "dp_serve.h"
#include "seed/heap.h"
#include "seed/resume.h"

uint32_t rfaas_result_capacity(void) {
    const dp_invocation *inv = dp_current_invocation();
    return inv ? inv->capacity : UINT32_MAX;
}

static void fail(int32_t code, const char *format, va_list ap) {
    dp_invocation *inv = dp_current_invocation();
    if (inv) {
        int n = vsnprintf(inv->message, DP_FAILURE_TEXT + 1, format, ap);
        inv->failed = 1;
        inv->code = code;
        inv->message_len = n < 0 ? 0 : n < DP_FAILURE_TEXT ? (uint32_t)n : DP_FAILURE_TEXT;
    } else {
        vfprintf(stderr, format, ap);
    }
}

uint32_t rfaas_fail(const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    fail(0, format, ap);
    va_end(ap);
    return 0;
}

uint32_t rfaas_fail_code(int32_t code, const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    fail(code, format, ap);
    va_end(ap);
    return 0;
}

void *rfaas_state(size_t size, int *fresh) {
    /* One block for each serving thread, freed with it. A worker has one serving thread, tests have several. In a worker with a seed's heap
     * the block belongs to the seed. */
    static __thread dp_heap_state own;
    dp_heap_state *s = dp_heap_inside() ? &dp_heap_kept_at()->state : &own;
    if (fresh)
        *fresh = 0;
    if (size == 0 || !dp_current_invocation())
        return NULL;
    if (!s->block) {
        if (size > SIZE_MAX - 63)
            return NULL;
        s->block = aligned_alloc(64, (size + 63) & ~(size_t)63);
        if (!s->block)
            return NULL;
        memset(s->block, 0, size);
        s->size = size;
        if (fresh)
            *fresh = 1;
    }
    return size <= s->size ? s->block : NULL;
}

uint32_t rfaas_worker_cores(void) {
    /* Larger than cpu_set_t: the call fails when the kernel knows more CPUs than fit. */
    static uint32_t cores; /* atomic */
    uint32_t n = __atomic_load_n(&cores, __ATOMIC_RELAXED);
    if (n)
        return n;
    enum { MAX = 8192 };
    cpu_set_t *set = CPU_ALLOC(MAX);
    if (set && sched_getaffinity(0, CPU_ALLOC_SIZE(MAX), set) == 0)
        n = (uint32_t)CPU_COUNT_S(CPU_ALLOC_SIZE(MAX), set);
    CPU_FREE(set);
    if (n == 0)
        n = 1;
    __atomic_store_n(&cores, n, __ATOMIC_RELAXED);
    return n;
}

int rfaas_on_resume(void (*f)(void *arg), void *arg) { return dp_resume_add(f, arg); }

uint32_t rfaas_child_number(void) { return dp_resume_child(); }

void rfaas_set_root(const void *root, size_t size) {
    if (!dp_heap_inside())
        return;
    dp_heap_kept_at()->root = root;
    dp_heap_kept_at()->root_size = size;
}

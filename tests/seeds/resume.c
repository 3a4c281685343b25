/* Functions that each worker calls when it starts: setup registers as many as there is room for, one of which registers another one. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "rfaas_function.h"

static uint32_t called[64], calls, at_setup;

/* Static data that is mostly zero. A constructor writes into it, in each process. */
enum { LARGE = 128 << 20 };
static unsigned char large[LARGE];
__attribute__((constructor)) static void construct(void) { large[LARGE / 2] = 1; }

static void nested(void *arg) { called[(uintptr_t)arg] = 100; }

static void resume(void *arg) {
    called[(uintptr_t)arg] = ++calls;
    if (!arg)
        rfaas_on_resume(nested, (void *)40);
}

uint32_t setup(void *in, uint32_t size, void *out) {
    (void)in, (void)size, (void)out;
    at_setup = rfaas_child_number();
    large[LARGE / 2] = 0;
    large[LARGE / 4] = 7;
    for (uintptr_t i = 0; i < 32; i++)
        if (rfaas_on_resume(resume, (void *)i))
            return rfaas_fail("function %u was refused", (unsigned)i);
    return 0;
}

/* One more than there is room for. */
uint32_t fails(void *in, uint32_t size, void *out) {
    setup(in, size, out);
    return rfaas_on_resume(resume, (void *)32) ? rfaas_fail("on purpose") : 0;
}

/* Returns what was called when, and the numbers of the worker. */
uint32_t query(void *in, uint32_t size, void *out) {
    uint32_t numbers[] = {at_setup, rfaas_child_number(), calls, called[0], called[31], called[40], large[LARGE / 4], large[LARGE / 2], large[LARGE / 3]};
    (void)in, (void)size;
    memcpy(out, numbers, sizeof numbers);
    return sizeof numbers;
}

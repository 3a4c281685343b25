/* The function that the fault tests call. */
#include <errno.h>
#include <time.h>

#include "rfaas_function.h"
#include "work.h"

__attribute__((visibility("default"))) uint32_t work(void *args, uint32_t size, void *res) {
    work_head h;
    if (size < sizeof h)
        return rfaas_fail("a payload of %u bytes", size);
    memcpy(&h, args, sizeof h);
    if (h.want > rfaas_result_capacity())
        return h.want; /* too large: no bytes are written */
    struct timespec t = {h.pause_us / 1000000, (long)(h.pause_us % 1000000) * 1000};
    while (h.pause_us && nanosleep(&t, &t) && errno == EINTR) {
    }
    work_fill(res, h.want, work_hash(args, size));
    return h.want;
}

/* Returns the offsets of args and res within a cache line, as two u32. */
__attribute__((visibility("default"))) uint32_t where(void *args, uint32_t size, void *res) {
    (void)size;
    uint32_t at[2] = {(uint32_t)((uintptr_t)args % 64), (uint32_t)((uintptr_t)res % 64)};
    memcpy(res, at, sizeof at);
    return sizeof at;
}

/* A name longer than 32 characters, to which the first rFaaS truncated names. */
__attribute__((visibility("default"))) uint32_t
a_function_whose_name_is_much_longer_than_thirty_two_characters_and_goes_on_for_quite_a_while(void *args, uint32_t size,
                                                                                              void *res) {
    memcpy(res, args, size);
    return size;
}
__attribute__((visibility("default"))) uint32_t
a_function_whose_name_is_much_longer_than_thirty_two_characters_and_begins_alike(void *args, uint32_t size, void *res) {
    (void)args;
    (void)size;
    (void)res;
    return 0;
}

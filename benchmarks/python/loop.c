/* The same calls from C, for calls.py: a loop over rfaas_invoke. */
#include <rfaas.h>
#include <time.h>

/* Makes `calls` calls, one after the other. Returns the mean time of a call in ns, or the negative status of a call that failed. */
double loop_run(rfaas_lease *lease, rfaas_function f, const void *in, void *out, size_t size, int calls) {
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < calls; i++) {
        int status = rfaas_invoke(lease, f, in, size, out, size, NULL, NULL);
        if (status)
            return status;
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / calls;
}

#include <rfaas.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "example.h"

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

double now_s(void) { return (double)now_ns() * 1e-9; }

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int latency_measure(rfaas_lease *lease, uint32_t echo, int payload, int samples, latency *out) {
    char in[4096], back[4096];
    int64_t *ns = malloc((size_t)samples * sizeof *ns);
    int warm_up = samples / 10 + 100, status = 0;
    memset(in, 'x', sizeof in);
    for (int i = -warm_up; i < samples && ns && !status; i++) {
        in[0] = (char)i;
        int64_t start = now_ns();
        status = rfaas_invoke(lease, echo, in, (size_t)payload, back, sizeof back, NULL, NULL);
        if (i >= 0)
            ns[i] = now_ns() - start;
        if (!status && memcmp(in, back, (size_t)payload))
            status = RFAAS_PROTOCOL;
    }
    if (!ns || status) {
        free(ns);
        return ns ? status : RFAAS_FATAL;
    }
    qsort(ns, (size_t)samples, sizeof *ns, ascending);
    *out = (latency){payload, samples, (double)ns[samples / 2], (double)ns[(int)(samples * 0.99)], (double)ns[0]};
    free(ns);
    return 0;
}

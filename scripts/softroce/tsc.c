/* Prints the frequency of this machine's time stamp counter in kHz. An emulated machine's counter has the same frequency. The result is
 * accurate to some millionths even on a busy processor, because it uses the fastest of many readings at each end. */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void both(int64_t *ns, uint64_t *ticks) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 100; i++) {
        int64_t before = now();
        uint64_t t = __rdtsc();
        int64_t took = now() - before;
        if (took < least) {
            least = took;
            *ns = before + took / 2;
            *ticks = t;
        }
    }
}

int main(void) {
    int64_t from, to;
    uint64_t first, last;
    struct timespec pause = {0, 20000000};
    both(&from, &first);
    nanosleep(&pause, NULL);
    both(&to, &last);
    return printf("%.0f\n", (double)(last - first) * 1e6 / (double)(to - from)) < 0;
}

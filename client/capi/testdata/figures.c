/* What the library costs (figures_test.go). Arguments: echo.so, and how far behind rfaas_invoke the library has its
 * dp_channel_call. Prints lines of "name value".
 *
 * overhead_ns: rfaas_invoke minus the bare dp_channel_call on the same channel and worker, 8 bytes, hot: median of the
 * differences of 100 pairs of batches of 10,000 calls each. It takes the channel out of the library's lease, so this program
 * and the library must be of the same sources.
 * map_1us, map_100us: throughput of rfaas_map in parts of what its workers could do at most, with calls that take so long
 * (chunk 1), and of chunks that the library chooses. What a worker could do at most is the function called again and again with
 * nothing in between, as this process does it on a core of its own: function_ns, which is the nominal time and what the function
 * itself needs to look at the clock. The fastest of several rounds, so that nothing but the function is in it.
 * map_1us_nominal: in parts of the nominal time.
 * own_share: the part of all that time for which this thread, which spins, had a core. Well below 1 others use the machine. */
#define CHECK_ARGUMENT distance
static const char *distance;
#include "check.h"

#include <dlfcn.h>

#include "rfaas_api.h"

#define PAIRS 100
#define BATCH 10000

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static rfaas_lease *take(const char *path, uint32_t workers) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = path;
    o.workers = workers;
    o.depth = 16;
    o.wait_mode = RFAAS_WAIT_HOT;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

static void overhead(void) {
    static double differences[PAIRS], library_ns[PAIRS], bare_ns[PAIRS];
    rfaas_lease *l = take(library, 1);
    rfaas_function echo = find(l, "echo");
    dp_channel *ch = l->workers[0].ch;
    __typeof__(&dp_channel_call) bare_call = (__typeof__(&dp_channel_call))((intptr_t)rfaas_invoke + strtoll(distance, NULL, 10));
    uint64_t in = 1, out = 0, bad = 0;
    int batch = BATCH;
    for (int pair = -5; pair < PAIRS; pair++) { /* the first five warm up */
        double mean[2];
        for (int k = 0; k < 2; k++) {
            int bare = (k + pair) & 1; /* which comes first takes turns */
            double start = now();
            for (int i = 0; i < batch; i++, in++) {
                uint32_t size = 0;
                dp_started started;
                int status = bare ? bare_call(ch, echo, &in, 8, NULL, &out, 8, &size, 0, &started)
                                  : rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL);
                bad += status != 0 || out != in;
            }
            mean[bare] = (now() - start) / batch * 1e9;
        }
        if (pair < 0 && mean[1] > 2000) /* so busy that a million calls would take minutes */
            batch = BATCH / 20;
        if (pair >= 0) {
            differences[pair] = mean[0] - mean[1];
            library_ns[pair] = mean[0];
            bare_ns[pair] = mean[1];
        }
    }
    CHECK(bad == 0);
    qsort(differences, PAIRS, sizeof *differences, ascending);
    qsort(library_ns, PAIRS, sizeof *library_ns, ascending);
    qsort(bare_ns, PAIRS, sizeof *bare_ns, ascending);
    printf("library_ns %.1f\nbare_ns %.1f\noverhead_ns %.1f\n", library_ns[PAIRS / 2], bare_ns[PAIRS / 2], differences[PAIRS / 2]);
    OK(rfaas_lease_release(l));
}

/* What a call of the function takes by itself. */
static double function_ns(uint64_t ns, int calls) {
    void *h = dlopen(getenv("TEST_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    uint32_t (*busy)(void *, uint32_t, void *) = h ? (uint32_t(*)(void *, uint32_t, void *))dlsym(h, "busy") : NULL;
    double least = 0;
    if (!busy) {
        report(__LINE__, "dlopen");
        exit(1);
    }
    for (int round = 0; round < 10; round++) {
        uint64_t out;
        double start = now();
        for (int i = 0; i < calls; i++)
            busy(&ns, 8, &out);
        double mean = (now() - start) / calls * 1e9;
        least = round == 0 || mean < least ? mean : least;
    }
    dlclose(h);
    return least;
}

/* Best of five rounds: what disturbs makes it slower only. each: ns that the worker needs at least for an item. */
static double throughput(rfaas_lease *l, uint64_t ns, double each, size_t items, size_t chunk) {
    rfaas_function busy = find(l, "busy");
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    uint64_t *in = malloc(items * 8), *out = calloc(items, 8);
    double best = 0;
    o.chunk = chunk;
    for (size_t i = 0; i < items; i++)
        in[i] = ns;
    for (int round = 0; round < 5; round++) {
        double start = now();
        OK(rfaas_map(l, busy, in, 8, out, 8, items, &o));
        double part = (double)items * each * 1e-9 / rfaas_lease_workers(l) / (now() - start);
        best = part > best ? part : best;
    }
    for (size_t i = 0; i < items; i++)
        if (out[i] != ns) {
            report(__LINE__, "result");
            break;
        }
    free(in);
    free(out);
    return best;
}

static double own_time(void) {
    struct timespec ts;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

void everything(void) {
    double start = now(), own = own_time();
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    overhead();
    rfaas_lease *l = take(getenv("TEST_LIBRARY"), cores > 2 ? (uint32_t)cores - 1 : 1);
    printf("workers %d\n", rfaas_lease_workers(l));
    double us = function_ns(1000, 10000);
    printf("function_ns %.1f\n", us);
    double one = throughput(l, 1000, us, 100000, 1);
    printf("map_1us %.3f\nmap_1us_nominal %.3f\n", one, one * 1000 / us);
    printf("map_100us %.3f\n", throughput(l, 100000, function_ns(100000, 100), 2000, 1));
    printf("map_1us_chunks %.3f\n", throughput(l, 1000, 1000, 100000, 0)); /* an item of a chunk begins when the last one ends */
    printf("own_share %.3f\n", (own_time() - own) / (now() - start));
    OK(rfaas_lease_release(l));
    OK(rfaas_finalize());
}

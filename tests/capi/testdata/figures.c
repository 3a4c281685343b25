/* What the library costs (figures_test.go). Arguments: echo.so, and how far behind rfaas_invoke the library has its
 * dp_channel_call. Prints lines of "name value".
 *
 * overhead_ns: rfaas_invoke minus the bare dp_channel_call on the same channel and worker, 8 bytes, hot: median of the differences
 * of 100 pairs of batches of 10,000 calls each, 20 with each of five workers in succession. Between two calls, in both batches of
 * a pair alike, the program computes for 0 to some 30 ns, each time another while. Without that two spinners fall in step: a few
 * nanoseconds more then cost nothing, or a whole pause of the processor (28 ns), with one worker this and with the next one that.
 * in_step_ns is the same measured so. It takes the channel out of the library's lease, so this program and the library must be of
 * the same sources.
 * map_1us, map_100us: throughput of rfaas_map in parts of what its workers could do at most, with functions that take so long
 * (chunk 1), and of chunks that the library chooses. The function looks at the clock until its time is over, and is given so much
 * less that it takes 1 us with nothing in between, what it needs for the clock included, as this process finds on a core of its own:
 * function_ns is what came of that, the fastest of several rounds, so that nothing but the function is in it.
 * pieces: time of rfaas_invokev with three pieces of 21 KB each way in parts of that of rfaas_invoke with as many contiguous bytes: median
 * of the ratios of 100 pairs of batches. column: the same with a column of 8,064 doubles each way.
 * chain, chain_8, chain_4k: time of a chain of two functions in parts of that of two calls, with 1 MiB, 8 bytes and 4 KiB between them.
 * own_share: the part of all that time for which this thread, which spins, had a core. Well below 1 others use the machine. */
#define CHECK_ARGUMENT distance
static const char *distance;
#include "check.h"

#include <dlfcn.h>
#include <stdbool.h>

#include "client.h"

#define PEERS 5
#define PAIRS 20 /* with each */
#define ALL (PEERS * PAIRS)
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

/* One step of what takes time and nothing else. */
static inline uint64_t step(uint64_t x) {
    x = x * 6364136223846793005u + 1;
    __asm__ volatile("" : "+r"(x));
    return x;
}

typedef struct series {
    double difference[ALL], library[ALL], bare[ALL];
} series;

static void pairs(rfaas_lease *l, bool in_step, series *to, int from) {
    rfaas_function echo = find(l, "echo");
    dp_channel *ch = l->workers[0].ch;
    __typeof__(&dp_channel_call) bare_call = (__typeof__(&dp_channel_call))((intptr_t)rfaas_invoke + strtoll(distance, NULL, 10));
    uint64_t in = 1, out = 0, bad = 0, x = 1;
    int batch = BATCH;
    for (int pair = -2; pair < PAIRS; pair++) { /* the first two warm up */
        double mean[2];
        for (int k = 0; k < 2; k++) {
            int bare = (k + pair) & 1; /* the two kinds take turns to be first */
            double start = now();
            for (int i = 0; i < batch; i++, in++) {
                uint32_t size = 0;
                dp_started started;
                for (uint64_t n = in_step ? 0 : (in * 2654435761u >> 8) & 31; n; n--)
                    x = step(x);
                int status = bare ? bare_call(ch, echo, &in, 8, NULL, &out, 8, &size, 0, &started)
                                  : rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL);
                bad += status != 0 || out != in;
            }
            mean[bare] = (now() - start) / batch * 1e9;
        }
        if (pair < 0 && mean[1] > 2000) /* so busy that a million calls would take minutes */
            batch = BATCH / 20;
        if (pair >= 0) {
            to->difference[from + pair] = mean[0] - mean[1];
            to->library[from + pair] = mean[0];
            to->bare[from + pair] = mean[1];
        }
    }
    CHECK(bad == 0);
}

static double median(double of[ALL]) {
    qsort(of, ALL, sizeof *of, ascending);
    return (of[ALL / 2 - 1] + of[ALL / 2]) / 2;
}

static void overhead(void) {
    static series apart, in_step;
    for (int peer = 0; peer < PEERS; peer++) {
        rfaas_lease *l = take(library, 1);
        pairs(l, false, &apart, peer * PAIRS);
        pairs(l, true, &in_step, peer * PAIRS);
        OK(rfaas_lease_release(l));
    }
    printf("library_ns %.1f\nbare_ns %.1f\noverhead_ns %.1f\n", median(apart.library), median(apart.bare), median(apart.difference));
    printf("in_step_library_ns %.1f\nin_step_bare_ns %.1f\nin_step_ns %.1f\n", median(in_step.library), median(in_step.bare),
           median(in_step.difference));
}

/* Time of rfaas_invokev in parts of rfaas_invoke's. */
static double pieces(rfaas_lease *l, const rfaas_piece *in, const rfaas_piece *out, size_t count) {
    enum { BYTES = 3 * 21504, CALLS = 50 };
    static double ratio[ALL];
    rfaas_function echo = find(l, "echo");
    char *from = malloc(BYTES), *to = calloc(BYTES, 1);
    memset(from, 5, BYTES);
    for (int pair = -2; pair < ALL; pair++) { /* the first two warm up */
        double took[2];
        for (int k = 0; k < 2; k++) {
            int whole = (k + pair) & 1; /* the two kinds take turns to be first */
            double start = now();
            size_t n = 0;
            for (int i = 0; i < CALLS; i++) {
                int status = whole ? rfaas_invoke(l, echo, from, BYTES, to, BYTES, &n, NULL)
                                   : rfaas_invokev(l, echo, in, count, out, count, &n, NULL);
                if (status || n != BYTES)
                    report(__LINE__, "pieces");
            }
            took[whole] = now() - start;
        }
        if (pair >= 0)
            ratio[pair] = took[0] / took[1];
    }
    free(from);
    free(to);
    return median(ratio);
}

static void pieces_of_both_kinds(void) {
    enum { COLUMN = 8064, COLUMNS = 4 };
    rfaas_lease *l = take(library, 1);
    rfaas_piece in[3], out[3];
    for (int i = 0; i < 3; i++) {
        in[i] = (rfaas_piece)RFAAS_PIECE(calloc(21504, 1), 21504);
        out[i] = (rfaas_piece)RFAAS_PIECE(calloc(21504, 1), 21504);
    }
    printf("pieces %.3f\n", pieces(l, in, out, 3));
    double *matrix = calloc(COLUMN * COLUMNS, sizeof *matrix);
    rfaas_piece from = {matrix, sizeof *matrix, COLUMN, COLUMNS * sizeof *matrix}, to = from;
    to.base = matrix + 2;
    printf("column %.3f\n", pieces(l, &from, &to, 1));
    for (int i = 0; i < 3; i++) {
        free(in[i].base);
        free(out[i].base);
    }
    free(matrix);
    OK(rfaas_lease_release(l));
}

/* Times of calls with 1 MiB of payload and of result, of a function that copies 16 of the bytes: in place, and copied from memory of
 * rfaas_alloc, in parts of those copied from memory of malloc; and of one memcpy of 1 MiB. */
static void placed(void) {
    enum { BYTES = 1 << 20, CALLS = 20, KINDS = 4 };
    static double took[KINDS][ALL];
    rfaas_lease *l = take(getenv("TEST_LIBRARY"), 1);
    rfaas_function f = find(l, "ends");
    rfaas_call_options in_place = RFAAS_CALL_OPTIONS_INIT;
    void *in[2], *out[2];
    in_place.flags = RFAAS_CALL_IN_PLACE;
    in[0] = malloc(BYTES), out[0] = malloc(BYTES);
    OK(rfaas_alloc(l, BYTES, &in[1]));
    OK(rfaas_alloc(l, BYTES, &out[1]));
    for (int i = 0; i < 2; i++)
        memset(in[i], 5, BYTES), memset(out[i], 6, BYTES);
    for (int round = -2; round < ALL; round++)
        for (int k = 0; k < KINDS; k++) {
            int kind = (k + round + KINDS) % KINDS, own = kind != 0; /* 0: malloc, 1: rfaas_alloc, 2: in place, 3: memcpy */
            double start = now();
            for (int i = 0; i < CALLS; i++) {
                size_t n = BYTES;
                if (kind == 3)
                    memcpy(out[0], in[0], BYTES);
                else if (rfaas_invoke(l, f, in[own], BYTES, out[own], BYTES, &n, kind == 2 ? &in_place : NULL) || n != BYTES)
                    report(__LINE__, "placed");
                __asm__ volatile("" ::: "memory");
            }
            if (round >= 0)
                took[kind][round] = now() - start;
        }
    double ratio[3][ALL];
    for (int i = 0; i < ALL; i++) {
        ratio[0][i] = took[1][i] / took[0][i];
        ratio[1][i] = took[2][i] / took[0][i];
        ratio[2][i] = took[3][i] / took[0][i];
    }
    printf("allocated %.3f\nin_place %.4f\nmemcpy %.3f\n", median(ratio[0]), median(ratio[1]), median(ratio[2]));
    free(in[0]);
    free(out[0]);
    OK(rfaas_lease_release(l));
}

/* Two functions of which the first makes `bytes` bytes from 8 and the second makes 8 from them: the time of a chain in parts of that of two
 * calls; and, as a floor, that of the two copies of the intermediate result that two calls make, in the same parts. */
static void chained(const char *name, size_t bytes, int calls) {
    static double took[3][ALL];
    rfaas_lease *l = take(getenv("TEST_LIBRARY"), 1);
    rfaas_function first = find(l, "spread"), second = find(l, "head"), chain = 0;
    uint64_t in = bytes, out = 0, *between = malloc(bytes), *copy = malloc(bytes);
    OK(rfaas_lease_chain(l, first, second, &chain));
    memset(between, 1, bytes);
    memset(copy, 1, bytes);
    for (int round = -2; round < ALL; round++)
        for (int k = 0; k < 3; k++) {
            int kind = (k + round + 3) % 3; /* 0: two calls, 1: a chain, 2: memcpy */
            double start = now();
            for (int i = 0; i < calls; i++) {
                size_t n = bytes;
                int status = RFAAS_OK;
                out = 0;
                if (kind == 0)
                    status = rfaas_invoke(l, first, &in, 8, between, bytes, &n, NULL);
                if (kind == 2) {
                    memcpy(copy, between, bytes);
                    __asm__ volatile("" ::: "memory");
                    memcpy(between, copy, bytes);
                    __asm__ volatile("" ::: "memory");
                } else if (status || n != bytes || rfaas_invoke(l, kind ? chain : second, kind ? &in : between, kind ? 8 : bytes, &out, 8, NULL, NULL) || out != bytes) {
                    report(__LINE__, name);
                }
            }
            if (round >= 0)
                took[kind][round] = now() - start;
        }
    double ratio[2][ALL];
    for (int i = 0; i < ALL; i++) {
        ratio[0][i] = took[1][i] / took[0][i];
        ratio[1][i] = took[2][i] / took[0][i];
    }
    printf("%s %.4f\n%s_copies %.3f\n", name, median(ratio[0]), name, median(ratio[1]));
    free(between);
    free(copy);
    OK(rfaas_lease_release(l));
}

/* What a call that computes for so long takes by itself, in ns. */
static double alone(uint64_t ns, int calls) {
    void *h = dlopen(getenv("TEST_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    uint32_t (*busy)(void *, uint32_t, void *) = h ? (uint32_t(*)(void *, uint32_t, void *))dlsym(h, "busy") : NULL;
    double least = 0;
    if (!busy) {
        report(__LINE__, "dlopen");
        exit(1);
    }
    for (int round = 0; round < 20; round++) {
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
    pieces_of_both_kinds();
    placed();
    chained("chain", 1 << 20, 10);
    chained("chain_8", 8, 500);
    chained("chain_4k", 4096, 200);
    rfaas_lease *l = take(getenv("TEST_LIBRARY"), cores > 2 ? (uint32_t)cores - 1 : 1);
    printf("workers %d\n", rfaas_lease_workers(l));
    double extra = alone(1000, 10000) - 1000;
    uint64_t ns = extra > 0 && extra < 500 ? 1000 - (uint64_t)extra : 1000;
    double us = alone(ns, 10000);
    printf("function_ns %.1f\n", us);
    printf("map_1us %.3f\n", throughput(l, ns, us, 100000, 1));
    printf("map_100us %.3f\n", throughput(l, 100000, alone(100000, 100), 2000, 1));
    printf("map_1us_chunks %.3f\n", throughput(l, 1000, 1000, 100000, 0)); /* an item of a chunk begins when the last one ends */
    printf("own_share %.3f\n", (own_time() - own) / (now() - start));
    OK(rfaas_lease_release(l));
    OK(rfaas_finalize());
}

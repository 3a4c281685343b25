/* The Mandelbrot set with workers of several cores, which run an OpenMP function. Every `cores` MPI ranks share one worker with
 * that many cores, and the first of them calls it. The worker computes half of each rank's rows while the rank computes the other
 * half. Every count is compared with the same rows computed by the rank alone.
 *
 *     mpirun -n 2 build/examples/mandelbrot [width and height, 600 if not given] [cores of a worker, 2]
 */
#include <mpi.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mandelbrot.h"

#define LIMIT 1000
#define CORES_MAX 64

static int rank, ranks;

static void __attribute__((noreturn)) die(const char *what, const char *why) {
    fprintf(stderr, "mandelbrot: rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(int status, const char *what) {
    if (status != RFAAS_OK)
        die(what, rfaas_last_error());
}

static void *memory(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p)
        die("malloc", "out of memory");
    return p;
}

static long argument(int argc, char **argv, int i, long otherwise, long low, long high) {
    char *end = NULL;
    long v = argc > i ? strtol(argv[i], &end, 10) : otherwise;
    if (argc > i && (*end || end == argv[i] || v < low || v > high)) {
        if (rank == 0)
            fprintf(stderr, "mandelbrot: argument \"%s\", want %ld to %ld\n", argv[i], low, high);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return v;
}

/* The rows of a rank: one of 2 * ranks interleaved parts, because rows in the middle take longest. */
static mandelbrot_rows rows_of(long side, int part) {
    return (mandelbrot_rows){.width = side, .height = side, .first = part, .stride = 2 * ranks, .limit = LIMIT};
}

static size_t bytes_of(const mandelbrot_rows *m) { return (size_t)(mandelbrot_count(m) * m->width) * sizeof(uint16_t); }

static void compute(const mandelbrot_rows *m, uint16_t *counts) {
    for (int64_t k = 0; k < mandelbrot_count(m); k++)
        mandelbrot_row(m, m->first + k * m->stride, counts + k * m->width);
}

/* The path of the library: MANDELBROT_LIBRARY, else ../functions/mandelbrot.so beside the program. */
static const char *library(const char *program) {
    static char path[4096];
    const char *given = getenv("MANDELBROT_LIBRARY"), *slash = strrchr(program, '/');
    if (given)
        return given;
    snprintf(path, sizeof path, "%.*s../functions/mandelbrot.so", slash ? (int)(slash - program + 1) : 2, slash ? program : "./");
    return path;
}

/* One worker for the ranks rank .. rank + n - 1. */
typedef struct shared {
    rfaas_session *session;
    rfaas_lease *lease;
    rfaas_function f;
    rfaas_request requests[CORES_MAX];
    mandelbrot_rows rows[CORES_MAX];
    char *results[CORES_MAX]; /* {u64 threads, counts} */
    int n;
} shared;

static void lease_worker(shared *s, const char *path, long side, long cores) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    s->n = ranks - rank < cores ? ranks - rank : (int)cores;
    o.library = path;
    o.cores_per_worker = (uint32_t)cores;
    o.depth = (uint32_t)s->n;
    for (int i = 0; i < s->n; i++) {
        s->rows[i] = rows_of(side, ranks + rank + i);
        s->results[i] = memory(8 + bytes_of(&s->rows[i]));
        o.bulk += 4096 + bytes_of(&s->rows[i]);
    }
    must(rfaas_init(NULL), "init");
    must(rfaas_session_open(NULL, &s->session), "open session");
    must(rfaas_lease_open(s->session, &o, &s->lease), "lease a worker");
    must(rfaas_lease_function(s->lease, "mandelbrot", &s->f), "find function");
}

static void call(shared *s) {
    for (int i = 0; i < s->n; i++)
        must(rfaas_iinvoke(s->lease, s->f, &s->rows[i], sizeof s->rows[i], s->results[i], 8 + bytes_of(&s->rows[i]), NULL,
                           &s->requests[i]),
             "start a call");
}

static void collect(shared *s) {
    for (int i = 0; i < s->n; i++) {
        size_t n = 0;
        must(rfaas_wait(&s->requests[i], &n), "wait");
        if (n != 8 + bytes_of(&s->rows[i]))
            die("wait", "a result of another size");
    }
}

/* Returns how many counts differ from those of the rank alone. */
static long wrong_of(const mandelbrot_rows *m, const uint16_t *counts) {
    uint16_t *own = memory(bytes_of(m));
    long wrong = 0;
    compute(m, own);
    for (int64_t i = 0; i < mandelbrot_count(m) * m->width; i++)
        wrong += own[i] != counts[i];
    free(own);
    return wrong;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    long side = argument(argc, argv, 1, 600, 1, MANDELBROT_SIDE_MAX), cores = argument(argc, argv, 2, 2, 1, CORES_MAX);

    mandelbrot_rows here = rows_of(side, rank), there = rows_of(side, ranks + rank);
    uint16_t *counts = memory(bytes_of(&here)), *both = memory(bytes_of(&there));
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    compute(&here, counts);
    compute(&there, both);
    double times[2] = {MPI_Wtime() - start, 0}, slowest[2];
    memset(counts, 0, bytes_of(&here));

    shared s = {.n = 0};
    if (rank % cores == 0)
        lease_worker(&s, library(argv[0]), side, cores);
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    call(&s);
    compute(&here, counts);
    collect(&s);
    times[1] = MPI_Wtime() - start;

    long found[3] = {wrong_of(&here, counts), 0, s.n > 0}, sums[3];
    uint64_t threads = 0;
    for (int i = 0; i < s.n; i++) {
        uint64_t n;
        memcpy(&n, s.results[i], sizeof n);
        threads = n > threads ? n : threads;
        found[0] += wrong_of(&s.rows[i], (uint16_t *)(s.results[i] + 8));
        found[1] += (long)mandelbrot_count(&s.rows[i]);
        free(s.results[i]);
    }
    if (s.n && threads != (uint64_t)cores)
        die("mandelbrot", "the function did not use all cores of its worker");
    if (s.n)
        must(rfaas_finalize(), "finalize"); /* releases lease and session */
    MPI_Allreduce(found, sums, 3, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    MPI_Reduce(times, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("mandelbrot: %ld x %ld points on %d ranks and %ld workers of %ld cores: %ld of %ld rows remotely, %ld counts wrong\n", side,
               side, ranks, sums[2], cores, sums[1], side, sums[0]);
        printf("  alone %.2f ms, with workers %.2f ms: speed-up %.2f\n", slowest[0] * 1e3, slowest[1] * 1e3, slowest[0] / slowest[1]);
    }
    free(counts);
    free(both);
    MPI_Finalize();
    return sums[0] != 0;
}

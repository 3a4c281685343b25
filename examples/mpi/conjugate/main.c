/* Conjugate gradients on a sparse matrix of 27 points, as in HPCCG. Each rank has a cube of the grid, and the ranks' cubes lie on top of each other. A
 * worker keeps the matrix rows of the upper half of its rank's cube, which it gets once, by the init call of the lease. In each iteration it gets the
 * vector and returns the product, while the rank multiplies the other rows. If the executor is lost, the lease moves, the new worker gets the rows by the
 * same init call, and the call is repeated. Before that each rank solves alone. All residuals and the solution must be equal to the last bit.
 *
 *     mpirun -n 2 build/examples/conjugate [edge of a rank's cube, 32 if not given] [iterations, 100] [lose: lose the executor in the middle]
 *
 * An edge of 100 gives a matrix of 320 MB on each rank. The lines of this file that mention rfaas are all that the solver needs to use workers.
 */
#include <math.h>
#include <mpi.h>
#include <rfaas_mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sparse.h"

#define LOSE_AT 10       /* iteration */
#define LOSE_WITHIN 60.0 /* seconds */

static int rank, ranks;

/* The cube of a rank. Vectors have one more plane below and one above, with copies of the neighbours' numbers. */
typedef struct cube {
    size_t edge, plane, n; /* numbers in a plane and in the cube */
    size_t here;           /* rows that the rank always multiplies itself */
    sparse_rows *own, *lent;
} cube;

/* The worker of a rank, if it has one. */
typedef struct worker {
    rfaas_lease *lease; /* NULL: the rank computes alone */
    rfaas_function times;
    bool lose;
} worker;

static void __attribute__((noreturn)) die(const char *what, const char *why) {
    fprintf(stderr, "conjugate: rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(int status, const char *what) {
    if (status != RFAAS_OK)
        die(what, rfaas_last_error());
}

static void *need(void *memory) {
    if (!memory)
        die("malloc", "out of memory");
    return memory;
}

static long argument(int argc, char **argv, int i, long otherwise, long low, long high) {
    char *end = NULL;
    long v = argc > i ? strtol(argv[i], &end, 10) : otherwise;
    if (argc > i && (*end || end == argv[i] || v < low || v > high)) {
        if (rank == 0)
            fprintf(stderr, "conjugate: argument \"%s\", want %ld to %ld\n", argv[i], low, high);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return v;
}

/* The path of the library: CONJUGATE_LIBRARY, else ../functions/sparse.so beside the program. */
static const char *library(const char *program) {
    static char path[4096];
    const char *given = getenv("CONJUGATE_LIBRARY"), *slash = strrchr(program, '/');
    if (given)
        return given;
    snprintf(path, sizeof path, "%.*s../functions/sparse.so", slash ? (int)(slash - program + 1) : 2, slash ? program : "./");
    return path;
}

/* The rows of the planes from..to - 1. Column 0 is the first number of the plane below `from`. */
static sparse_rows *make_rows(const cube *c, size_t from, size_t to) {
    const long edge = (long)c->edge, bottom = rank == 0, top = rank == ranks - 1;
    size_t rows = (to - from) * c->plane, most = rows * 27;
    sparse_rows *a = need(malloc(sparse_size(rows, most)));
    a->rows = rows;
    a->columns = rows + 2 * c->plane;
    a->entries = most;
    uint32_t *column = sparse_column(a), *start = need(malloc((rows + 1) * sizeof *start)), k = 0, row = 0;
    for (long z = (long)from; z < (long)to; z++)
        for (long y = 0; y < edge; y++)
            for (long x = 0; x < edge; x++) {
                start[row++] = k;
                for (long dz = -1; dz <= 1; dz++)
                    for (long dy = -1; dy <= 1; dy++)
                        for (long dx = -1; dx <= 1; dx++) {
                            bool outside = x + dx < 0 || x + dx >= edge || y + dy < 0 || y + dy >= edge || (bottom && z + dz < 0) || (top && z + dz >= edge);
                            if (outside)
                                continue;
                            a->value[k] = dx || dy || dz ? -1 : 27;
                            column[k++] = (uint32_t)((z + dz - (long)from + 1) * edge * edge + (y + dy) * edge + x + dx);
                        }
            }
    start[row] = k;
    a->entries = k; /* moves the columns and starts */
    memmove(sparse_column(a), column, k * sizeof *column);
    memcpy(sparse_start(a), start, (rows + 1) * sizeof *start);
    free(start);
    return need(realloc(a, sparse_size(rows, k)));
}

/* Exchanges the outer planes of v with the neighbours. */
static void exchange(const cube *c, double *v) {
    int below = rank ? rank - 1 : MPI_PROC_NULL, above = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL, n = (int)c->plane;
    double *cells = v + c->plane;
    MPI_Sendrecv(cells + c->n - c->plane, n, MPI_DOUBLE, above, 0, v, n, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Sendrecv(cells, n, MPI_DOUBLE, below, 1, cells + c->n, n, MPI_DOUBLE, above, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* product = A v. The worker, if there is one, computes the upper rows while this rank computes the others. */
static void multiply(const cube *c, const worker *w, double *v, double *product) {
    double *upper = product + c->here;
    rfaas_call_options again = RFAAS_CALL_OPTIONS_INIT;
    rfaas_request request;
    again.repeats = 3;
    if (w->lease)
        must(rfaas_iinvoke(w->lease, w->times, v + c->here, c->lent->columns * sizeof *v, upper, c->lent->rows * sizeof *v, &again, &request),
             "start a product");
    sparse_multiply(c->own, v, product);
    if (w->lease)
        must(rfaas_wait(&request, NULL), "wait for a product");
    else
        sparse_multiply(c->lent, v + c->here, upper);
}

static double dot(const cube *c, const double *a, const double *b) {
    double sum = 0, all;
    for (size_t i = 0; i < c->n; i++)
        sum += a[i] * b[i];
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

static void executor_of(const worker *w, char name[256]) {
    rfaas_lease_details d = {.struct_size = sizeof d};
    must(rfaas_lease_info(w->lease, &d), "lease info");
    snprintf(name, 256, "%s", strcmp(d.provider, "local") ? d.executor_address : "this rank");
}

/* Prints the executor on which rank 0 calls, and repeats the product until the lease has moved. */
static void lose_executor(const cube *c, const worker *w, double *v, double *product) {
    char before[256], now[256];
    executor_of(w, before);
    printf("conjugate: rank 0 calls on %s\n", before);
    fflush(stdout);
    for (double start = MPI_Wtime();;) {
        multiply(c, w, v, product);
        executor_of(w, now);
        if (strcmp(before, now))
            break;
        if (MPI_Wtime() - start > LOSE_WITHIN)
            die("lose", "the executor is still there");
    }
    printf("conjugate: rank 0 calls on %s now\n", now);
}

/* Solves A x = b, where the solution is 1 everywhere, and stores the residual of each iteration. Returns the seconds that it took. */
static double solve(const cube *c, const worker *w, int iterations, double *x, double *residual) {
    double *r = need(malloc(c->n * sizeof *r)), *product = need(malloc(c->n * sizeof *product)), *p = need(calloc(c->n + 2 * c->plane, sizeof *p));
    double *cells = p + c->plane;
    for (size_t i = 0; i < c->n + 2 * c->plane; i++)
        p[i] = 1;
    exchange(c, p);
    multiply(c, w, p, r); /* b, which is the first residual, since x begins as 0 */
    memset(x, 0, c->n * sizeof *x);
    memcpy(cells, r, c->n * sizeof *r);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime(), rr = dot(c, r, r);
    for (int k = 0; k < iterations; k++) {
        exchange(c, p);
        multiply(c, w, p, product);
        if (w->lose && rank == 0 && k == LOSE_AT)
            lose_executor(c, w, p, product);
        double alpha = rr / dot(c, cells, product);
        for (size_t i = 0; i < c->n; i++) {
            x[i] += alpha * cells[i];
            r[i] -= alpha * product[i];
        }
        double before = rr;
        rr = dot(c, r, r);
        residual[k] = sqrt(rr);
        for (size_t i = 0; i < c->n; i++)
            cells[i] = r[i] + rr / before * cells[i];
    }
    double seconds = MPI_Wtime() - start;
    free(r);
    free(product);
    free(p);
    return seconds;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    cube c = {.edge = (size_t)argument(argc, argv, 1, 32, 2, 250)};
    int iterations = (int)argument(argc, argv, 2, 100, LOSE_AT + 1, 100000);
    c.plane = c.edge * c.edge;
    c.n = c.plane * c.edge;
    c.here = c.edge / 2 * c.plane;
    c.own = make_rows(&c, 0, c.edge / 2);
    c.lent = make_rows(&c, c.edge / 2, c.edge);
    double *x[2] = {need(malloc(c.n * sizeof(double))), need(malloc(c.n * sizeof(double)))}, times[3];
    double *residual[2] = {need(malloc((size_t)iterations * sizeof(double))), need(malloc((size_t)iterations * sizeof(double)))};
    worker alone = {0}, lent = {.lose = argc > 3 && !strcmp(argv[3], "lose")};
    if (argc > 4 || (argc > 3 && !lent.lose))
        die(argv[argc > 4 ? 4 : 3], "want an edge, a number of iterations, and \"lose\"");
    times[0] = solve(&c, &alone, iterations, x[0], residual[0]);

    char why[RFAAS_MPI_ERROR_MAX] = "";
    rfaas_session *session;
    rfaas_lease_options options = RFAAS_LEASE_OPTIONS_INIT;
    options.library = library(argv[0]);
    options.flags = RFAAS_LEASE_FAILOVER | (lent.lose ? 0 : RFAAS_LEASE_LOCAL); /* with "lose", the lease must move */
    options.init_function = "sparse_keep";
    options.init_payload = c.lent;
    options.init_size = sparse_size(c.lent->rows, c.lent->entries);
    options.bulk = options.init_size;                 /* more than a vector */
    options.memory = options.init_size + (256u << 20); /* of the worker, besides its channel */
    must(rfaas_init(NULL), "init");
    times[2] = -MPI_Wtime();
    if (rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &options, &session, &lent.lease, why))
        die("lease a worker", why);
    times[2] += MPI_Wtime();
    must(rfaas_lease_function(lent.lease, "sparse_times", &lent.times), "find function");
    times[1] = solve(&c, &lent, iterations, x[1], residual[1]);

    long wrong[2] = {0, 0}, sums[2];
    double far = 0, slowest[3], farthest;
    for (int k = 0; k < iterations; k++)
        wrong[0] += memcmp(&residual[0][k], &residual[1][k], sizeof(double)) != 0;
    for (size_t i = 0; i < c.n; i++) {
        wrong[1] += memcmp(&x[0][i], &x[1][i], sizeof(double)) != 0;
        far = fmax(far, fabs(x[1][i] - 1));
    }
    MPI_Reduce(times, slowest, 3, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&far, &farthest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Allreduce(wrong, sums, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf("conjugate: %zu rows on each of %d ranks, %zu of them (%.0f MB) kept by a worker, %d iterations, residual %.3g\n"
               "  lease and rows %.2f ms, same ranks without rfaas %.2f ms, with workers %.2f ms: speed-up %.2f\n"
               "  checked: %ld residuals wrong, %ld numbers of the solution wrong; the solution is 1, farthest from it %.1g\n",
               c.n, ranks, c.n - c.here, (double)options.init_size / 1e6, iterations, residual[1][iterations - 1], slowest[2] * 1e3, slowest[0] * 1e3,
               slowest[1] * 1e3, slowest[0] / slowest[1], sums[0], sums[1], farthest);
    must(rfaas_finalize(), "finalize");
    MPI_Finalize();
    return sums[0] || sums[1];
}

/* Lookups in a table of cross sections, half of them by workers. Each rank publishes the same table. An executor reads it once, and its workers share
 * that copy, whichever rank they belong to. Every sum is compared with the same lookups of the rank alone.
 *
 *     mpirun -n 2 build/examples/crosssections [MB of the table, 16 if not given] [lookups of a rank, 400000]
 *
 * With 240 MB and 1000000 lookups it does about what XSBench does with its small table. The lines of this file that mention rfaas are all that the
 * program needs to use workers.
 */
#include <mpi.h>
#include <rfaas_mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crosssections.h"

#define CALLS 16 /* of a rank, all in flight together */

static int rank, ranks;

static void __attribute__((noreturn)) die(const char *what, const char *why) {
    fprintf(stderr, "crosssections: rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(int status, const char *what) {
    if (status != RFAAS_OK)
        die(what, rfaas_last_error());
}

static long argument(int argc, char **argv, int i, long otherwise, long low, long high) {
    char *end = NULL;
    long v = argc > i ? strtol(argv[i], &end, 10) : otherwise;
    if (argc > i && (*end || end == argv[i] || v < low || v > high)) {
        if (rank == 0)
            fprintf(stderr, "crosssections: argument \"%s\", want %ld to %ld\n", argv[i], low, high);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return v;
}

/* CROSSSECTIONS_LIBRARY, else beside the program. */
static const char *library(const char *program) {
    static char path[4096];
    const char *given = getenv("CROSSSECTIONS_LIBRARY"), *slash = strrchr(program, '/');
    if (given)
        return given;
    snprintf(path, sizeof path, "%.*s../functions/crosssections.so", slash ? (int)(slash - program + 1) : 2, slash ? program : "./");
    return path;
}

/* Makes the table, which is the same on all ranks. */
static cross_row *make_table(uint64_t rows) {
    cross_row *row = malloc(rows * sizeof *row);
    if (!row)
        die("malloc", "out of memory");
    cross_fill(row, rows);
    return row;
}

/* The payload of a rank's call i: a part of the second half of the rank's lookups. */
static cross_lookups part(uint64_t lookups, int i) {
    uint64_t half = lookups / 2, from = half * (uint64_t)i / CALLS, to = half * (uint64_t)(i + 1) / CALLS;
    return (cross_lookups){(uint64_t)rank * lookups + half + from, to - from};
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint64_t rows = (uint64_t)argument(argc, argv, 1, 16, 1, 1 << 20) * 1000000 / sizeof(cross_row);
    uint64_t lookups = (uint64_t)argument(argc, argv, 2, 400000, CALLS, 1l << 40);
    cross_row *row = make_table(rows);
    cross_lookups here = {(uint64_t)rank * lookups, lookups / 2};

    rfaas_session *session;
    rfaas_lease *lease;
    rfaas_function f;
    char why[RFAAS_MPI_ERROR_MAX] = "";
    rfaas_lease_options options = RFAAS_LEASE_OPTIONS_INIT;
    const rfaas_piece whole = RFAAS_PIECE(row, rows * sizeof *row);
    options.library = library(argv[0]);
    options.depth = CALLS;
    double times[4] = {-MPI_Wtime()};
    must(rfaas_init(NULL), "init");
    must(rfaas_session_open(NULL, &session), "open session");
    must(rfaas_table_put(session, "cross sections", &whole, 1), "publish the table");
    times[0] += MPI_Wtime();
    times[1] = -MPI_Wtime();
    if (rfaas_mpi_lease_open_in(MPI_COMM_WORLD, session, &options, &lease, why))
        die("lease a worker", why);
    times[1] += MPI_Wtime();
    must(rfaas_lease_function(lease, "lookups", &f), "find function");

    rfaas_request requests[CALLS];
    double sums[CALLS], own[CALLS];
    MPI_Barrier(MPI_COMM_WORLD);
    times[2] = -MPI_Wtime();
    for (int i = 0; i < CALLS; i++) {
        cross_lookups l = part(lookups, i);
        must(rfaas_iinvoke(lease, f, &l, sizeof l, &sums[i], sizeof sums[i], NULL, &requests[i]), "start a call");
    }
    double first = cross_sum(row, rows, &here);
    for (int i = 0; i < CALLS; i++)
        must(rfaas_wait(&requests[i], NULL), "wait");
    times[2] += MPI_Wtime();

    MPI_Barrier(MPI_COMM_WORLD);
    times[3] = -MPI_Wtime();
    double again = cross_sum(row, rows, &here);
    long wrong[2] = {again != first, 0}; /* the first is there so that the compiler computes both */
    for (int i = 0; i < CALLS; i++) {
        cross_lookups l = part(lookups, i);
        own[i] = cross_sum(row, rows, &l);
    }
    times[3] += MPI_Wtime();
    for (int i = 0; i < CALLS; i++)
        wrong[0] += own[i] != sums[i];
    double slowest[4];
    MPI_Reduce(times, slowest, 4, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&wrong[0], &wrong[1], 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%llu rows of cross sections, %.0f MB, %llu lookups on each of %d ranks\n"
               "  published in %.1f ms, worker leased in %.1f ms\n"
               "  half remotely %.2f ms, all locally %.2f ms, speed-up %.2f\n"
               "  checked: %ld of %d sums wrong\n",
               (unsigned long long)rows, (double)(rows * sizeof *row) / 1e6, (unsigned long long)lookups, ranks, slowest[0] * 1e3,
               slowest[1] * 1e3, slowest[2] * 1e3, slowest[3] * 1e3, slowest[3] / slowest[2], wrong[1], ranks * CALLS);
    MPI_Bcast(&wrong[1], 1, MPI_LONG, 0, MPI_COMM_WORLD);
    must(rfaas_finalize(), "finalize");
    free(row);
    MPI_Finalize();
    return wrong[1] != 0;
}

/* Lookups in a table of cross sections that is made once and shared by the workers of all ranks. Rank 0 executes the setup function in a lease and names the memory that
 * it has prepared. Every rank, rank 0 too, opens a lease by that name: its worker starts with the table. Every sum is compared with the same lookups in the rank's own
 * table, which takes as long to make as the setup function takes. Rank 0 also leases a worker of another library, crosssections.so. This worker maps the memory of the
 * seed and finds the table in it.
 *
 *     mpirun -n 2 build/examples/seeds [MB of the table, 64 if not given] [lookups of a rank, 200000]
 */
#include <mpi.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crosssections.h"

#define NAME 512 /* bytes of a seed's full name */

static int rank, ranks;

static void __attribute__((noreturn)) die(const char *what, const char *why) {
    fprintf(stderr, "seeds: rank %d: %s: %s\n", rank, what, why);
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
            fprintf(stderr, "seeds: argument \"%s\", want %ld to %ld\n", argv[i], low, high);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return v;
}

/* The variable, else a library beside the program. */
static const char *library(const char *program, const char *variable, const char *name, char path[4096]) {
    const char *given = getenv(variable), *slash = strrchr(program, '/');
    if (given)
        return given;
    snprintf(path, 4096, "%.*s../functions/%s", slash ? (int)(slash - program + 1) : 2, slash ? program : "./", name);
    return path;
}

/* Executes the setup function beside a worker of a lease, which is released again, and returns the seed's name. */
static void create(rfaas_session *session, rfaas_lease_options options, uint64_t rows, char name[NAME]) {
    rfaas_lease *maker;
    rfaas_seed *seed;
    rfaas_seed_options so = RFAAS_SEED_OPTIONS_INIT;
    so.name = "cross-sections";
    must(rfaas_lease_open(session, &options, &maker), "lease a worker");
    must(rfaas_seed_create(maker, "prepare", &rows, sizeof rows, &so, &seed), "create the seed");
    must(rfaas_lease_release(maker), "release the lease");
    snprintf(name, NAME, "%s", rfaas_seed_name(seed));
}

/* Does the lookups in a worker of another library that maps the table of the seed, and returns their sum. Stores the seconds that the lease and the call took. */
static double map_table(rfaas_lease_options options, const char *seed, const cross_lookups *l, double took[2]) {
    rfaas_session *session; /* of its own: all its leases map the table */
    rfaas_lease *lease;
    rfaas_function lookups;
    double sum;
    options.seed = NULL;
    options.flags = 0;
    options.memory = 64u << 20;
    must(rfaas_session_open(NULL, &session), "open session");
    must(rfaas_table_put_seed(session, "cross sections", seed), "publish the seed as a table");
    took[0] = -MPI_Wtime();
    must(rfaas_lease_open(session, &options, &lease), "lease a worker that maps the table");
    took[0] += MPI_Wtime();
    must(rfaas_lease_function(lease, "lookups", &lookups), "find function");
    took[1] = -MPI_Wtime();
    must(rfaas_invoke(lease, lookups, l, sizeof *l, &sum, sizeof sum, NULL, NULL), "look up");
    took[1] += MPI_Wtime();
    must(rfaas_session_close(session), "close the session");
    return sum;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint64_t rows = (uint64_t)argument(argc, argv, 1, 64, 1, 1 << 16) * 1000000 / sizeof(cross_row);
    cross_lookups l = {(uint64_t)rank * 200000, (uint64_t)argument(argc, argv, 2, 200000, 1, 1l << 40)};
    rfaas_session *session;
    rfaas_lease *lease;
    rfaas_function lookups, share;
    rfaas_lease_options options = RFAAS_LEASE_OPTIONS_INIT;
    char paths[2][4096];
    options.library = library(argv[0], "SEEDS_LIBRARY", "prepared.so", paths[0]);
    options.memory = rows * sizeof(cross_row) + (64u << 20);
    double times[4] = {0}, sum;
    char name[NAME] = "";
    must(rfaas_init(NULL), "init");
    must(rfaas_session_open(NULL, &session), "open session");
    times[0] = -MPI_Wtime();
    if (rank == 0)
        create(session, options, rows, name);
    times[0] += MPI_Wtime();
    MPI_Bcast(name, sizeof name, MPI_CHAR, 0, MPI_COMM_WORLD);
    options.seed = name;
    options.flags = RFAAS_LEASE_SEED_REQUIRED;
    times[1] = -MPI_Wtime();
    must(rfaas_lease_open(session, &options, &lease), "lease a worker of the seed");
    times[1] += MPI_Wtime();
    must(rfaas_lease_function(lease, "lookups", &lookups), "find function");
    must(rfaas_lease_function(lease, "share", &share), "find function");
    times[2] = -MPI_Wtime();
    must(rfaas_invoke(lease, lookups, &l, sizeof l, &sum, sizeof sum, NULL, NULL), "look up");
    times[2] += MPI_Wtime();
    MPI_Barrier(MPI_COMM_WORLD); /* all workers have touched the table */
    uint64_t kib;
    must(rfaas_invoke(lease, share, NULL, 0, &kib, sizeof kib, NULL, NULL), "ask for the share");

    times[3] = -MPI_Wtime();
    cross_row *row = malloc(rows * sizeof *row);
    if (!row)
        die("malloc", "out of memory");
    cross_fill(row, rows);
    times[3] += MPI_Wtime();
    long wrong[2] = {cross_sum(row, rows, &l) != sum, 0};
    double slowest[4];
    unsigned long mine = (unsigned long)kib, all = 0;
    MPI_Reduce(times, slowest, 4, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&wrong[0], &wrong[1], 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Reduce(&mine, &all, 1, MPI_UNSIGNED_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%llu rows of cross sections, %.0f MB, %llu lookups on each of %d ranks, seed %s\n"
               "  seed created in %.1f ms; making the table takes %.1f ms\n"
               "  worker with the table leased in %.2f ms, its first lookups in %.2f ms\n"
               "  memory of the table in all workers: %.1f MB\n"
               "  checked: %ld of %d sums wrong\n",
               (unsigned long long)rows, (double)(rows * sizeof *row) / 1e6, (unsigned long long)l.count, ranks, name, slowest[0] * 1e3, slowest[3] * 1e3, slowest[1] * 1e3,
               slowest[2] * 1e3, (double)all * 1024 / 1e6, wrong[1], ranks);
    must(rfaas_lease_release(lease), "release the lease"); /* its core may be the one that the next lease needs */
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        double took[2];
        rfaas_lease_options other = options;
        other.wait_ns = 10000000000;
        other.library = library(argv[0], "CROSSSECTIONS_LIBRARY", "crosssections.so", paths[1]);
        wrong[0] = map_table(other, name, &l, took) != sum;
        wrong[1] += wrong[0];
        printf("  worker of another library that maps the table leased in %.2f ms, its first lookups in %.2f ms; its sum is %s\n", took[0] * 1e3, took[1] * 1e3, wrong[0] ? "wrong" : "right");
    }
    MPI_Bcast(&wrong[1], 1, MPI_LONG, 0, MPI_COMM_WORLD);
    must(rfaas_finalize(), "finalize");
    free(row);
    MPI_Finalize();
    return wrong[1] != 0;
}

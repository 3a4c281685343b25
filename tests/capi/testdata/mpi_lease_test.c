/* Test of rfaas_mpi.h: leases for all ranks at once. Needs a resource manager with executors that lend as many cores as there
 * are ranks; the argument is the path of build/functions/echo.so. Rank 0 prints which executor each rank was given. */
#include <rfaas_mpi.h>
#include <time.h>
#include <unistd.h>

static int failures, rank, ranks;

static void report(int line, const char *what, const char *text) {
    fprintf(stderr, "mpi_lease_test.c:%d: rank %d: %s (%s; last error: %s)\n", line, rank, what, text, rfaas_last_error());
    failures++;
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x, why))

/* The same status and text on every rank. */
static void same(int line, int status, const char *why) {
    char first[RFAAS_MPI_ERROR_MAX];
    int zeroth = status;
    memcpy(first, why, sizeof first);
    MPI_Bcast(&zeroth, 1, MPI_INT, 0, MPI_COMM_WORLD);
    MPI_Bcast(first, sizeof first, MPI_CHAR, 0, MPI_COMM_WORLD);
    if (zeroth != status || strcmp(first, why))
        report(line, "ranks differ", why);
}

int main(int argc, char **argv) {
    rfaas_session *s, *t;
    rfaas_lease *l, *m;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    char why[RFAAS_MPI_ERROR_MAX] = "";
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    CHECK(rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &o, &s, &l, why) == RFAAS_INVALID && strstr(why, "not initialised"));
    rfaas_init(NULL);
    o.library = argv[1];
    for (uint32_t flags = 0; flags <= RFAAS_LEASE_FAILOVER; flags += RFAAS_LEASE_FAILOVER) {
        int status = RFAAS_BUSY;
        o.flags = flags;
        /* What was released a moment ago may not be on the board yet. */
        for (double end = MPI_Wtime() + 20; status == RFAAS_BUSY;) {
            int over = MPI_Wtime() > end;
            MPI_Bcast(&over, 1, MPI_INT, 0, MPI_COMM_WORLD);
            if (over)
                break;
            status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &o, &s, &l, why);
        }
        CHECK(status == RFAAS_OK);
        if (status)
            break;
        rfaas_function echo = 0;
        CHECK(rfaas_lease_function(l, "echo", &echo) == RFAAS_OK);
        for (int i = 0; i < 100; i++) {
            int in = rank * 1000 + i, out = -1;
            CHECK(rfaas_invoke(l, echo, &in, sizeof in, &out, sizeof out, NULL, NULL) == RFAAS_OK && out == in);
        }
        rfaas_lease_details d = {.struct_size = sizeof d};
        CHECK(rfaas_lease_info(l, &d) == RFAAS_OK);
        char (*all)[sizeof d.executor] = calloc((size_t)ranks, sizeof *all);
        MPI_Gather(d.executor, sizeof d.executor, MPI_CHAR, all, sizeof d.executor, MPI_CHAR, 0, MPI_COMM_WORLD);
        for (int i = 0; i < ranks && rank == 0; i++)
            printf("rank %d on %s\n", i, all[i]);
        free(all);

        /* There is no room for as many again: all ranks learn it, and nothing is taken. */
        status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &o, &t, &m, why);
        CHECK(status == RFAAS_BUSY && !t && !m && strstr(why, "room"));
        same(__LINE__, status, why);
        /* More memory than any executor lends is the same error as for one process, with the sizes. */
        rfaas_lease_options large = o;
        large.memory = 1ull << 50;
        status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &large, &t, &m, why);
        CHECK(status == RFAAS_INVALID && strstr(why, "1125899906842624") && strstr(why, " lends "));
        same(__LINE__, status, why);
        CHECK(rfaas_lease_open(s, &large, &m) == RFAAS_INVALID && strstr(rfaas_last_error(), "1125899906842624") &&
              strstr(rfaas_last_error(), " lends "));
        /* Each could compute itself. */
        o.flags |= RFAAS_LEASE_LOCAL;
        status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &o, &t, &m, why);
        CHECK(status == RFAAS_OK);
        if (!status) {
            CHECK(rfaas_lease_info(m, &d) == RFAAS_OK && !strcmp(d.provider, "local"));
            CHECK(rfaas_session_close(t) == RFAAS_OK);
        }
        /* One rank's mistake is everybody's error, and the text names the rank. */
        o.library = rank == 1 ? "/absent.so" : argv[1];
        status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, &o, &t, &m, why);
        CHECK(status == RFAAS_BAD_LIBRARY && !t && !m && strstr(why, "rank 1: ") == why && strstr(why, "/absent.so"));
        same(__LINE__, status, why);
        o.library = argv[1];
        o.flags = flags;
        status = rfaas_mpi_lease_open(MPI_COMM_WORLD, NULL, rank == 1 ? NULL : &o, &t, &m, why);
        CHECK(status == RFAAS_INVALID && strstr(why, "options is NULL on rank 1"));
        same(__LINE__, status, why);
        /* In the sessions that are open, which stay open after an error. */
        status = rfaas_mpi_lease_open_in(MPI_COMM_WORLD, s, &o, &m, why);
        CHECK(status == RFAAS_BUSY && !m && strstr(why, "room"));
        same(__LINE__, status, why);
        status = rfaas_mpi_lease_open_in(MPI_COMM_WORLD, rank == 1 ? NULL : s, &o, &m, why);
        CHECK(status == RFAAS_INVALID && !m && strstr(why, "session is NULL on rank 1"));
        same(__LINE__, status, why);
        CHECK(rfaas_lease_release(l) == RFAAS_OK);
        const rfaas_piece table = RFAAS_PIECE("table", 6);
        CHECK(rfaas_table_put(s, "t", &table, 1) == RFAAS_OK);
        status = RFAAS_BUSY;
        for (double end = MPI_Wtime() + 20; status == RFAAS_BUSY;) {
            int over = MPI_Wtime() > end;
            MPI_Bcast(&over, 1, MPI_INT, 0, MPI_COMM_WORLD);
            if (over)
                break;
            status = rfaas_mpi_lease_open_in(MPI_COMM_WORLD, s, &o, &l, why);
        }
        CHECK(status == RFAAS_OK);
        int in = rank, out = -1;
        CHECK(!status && rfaas_invoke(l, echo, &in, sizeof in, &out, sizeof out, NULL, NULL) == RFAAS_OK && out == in);
        CHECK(rfaas_session_close(s) == RFAAS_OK);
    }
    rfaas_finalize();
    int sum;
    MPI_Allreduce(&failures, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return sum ? 1 : 0;
}

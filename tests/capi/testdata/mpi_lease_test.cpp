// rfaas_mpi.hpp: leases for all ranks at once. Needs a resource manager with executors that lease as many cores as
// there are ranks. The argument is the path of build/functions/echo.so. Rank 0 prints the executor of each rank.
#include <mpi.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <rfaas_mpi.hpp>
#include <string>

static int failures, rank, ranks;
static void report(int line, const std::string &what) {
    std::fprintf(stderr, "mpi_lease_test.cpp:%d: rank %d: %s (last error: %s)\n", line, rank, what.c_str(),
                 rfaas_last_error());
    failures++;
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x))

/* Opens, and again while the board does not show yet what was released. All ranks decide alike. */
static rfaas::mpi::connection patiently(const rfaas::lease_options &options) {
    for (double end = MPI_Wtime() + 20;;)
        try {
            return rfaas::mpi::open(MPI_COMM_WORLD, options);
        } catch (const rfaas::busy_error &) {
            int over = MPI_Wtime() > end;
            MPI_Bcast(&over, 1, MPI_INT, 0, MPI_COMM_WORLD);
            if (over)
                throw;
        }
}

/* The operation must throw E, with the same text on every rank. */
template <class E, class F> static void throws(int line, const char *word, F f) {
    std::array<char, RFAAS_MPI_ERROR_MAX> mine{}, first{};
    try {
        f();
        report(line, "no exception");
    } catch (const E &e) {
        std::snprintf(mine.data(), mine.size(), "%s", e.what());
    }
    first = mine;
    MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    if (first != mine || !std::strstr(mine.data(), word))
        report(line, mine.data());
}

static void work(const char *path) {
    const rfaas::lease_options plain(path);
    throws<rfaas::invalid_error>(__LINE__, "not initialised", [&] { rfaas::mpi::open(MPI_COMM_WORLD, plain); });
    rfaas::library library;
    for (rfaas::lease_flags flags : {rfaas::lease_flags::none, rfaas::lease_flags::failover}) {
        rfaas::lease_options options = plain;
        options.with(flags);
        rfaas::mpi::connection mine = patiently(options);
        rfaas::function echo = mine.lease.function("echo");
        for (int i = 0; i < 100; i++) {
            int in[1] = {rank * 1000 + i}, out[1] = {};
            CHECK(mine.lease.invoke(echo, in, out) == 1 && out[0] == in[0]);
        }
        std::array<char, 256> at{};
        std::snprintf(at.data(), at.size(), "%s", mine.lease.info().executor_address);
        std::vector<char> all(at.size() * static_cast<std::size_t>(ranks));
        MPI_Gather(at.data(), int(at.size()), MPI_CHAR, all.data(), int(at.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
        for (int i = 0; i < ranks && rank == 0; i++)
            std::printf("rank %d on %s\n", i, all.data() + static_cast<std::size_t>(i) * at.size());

        throws<rfaas::busy_error>(__LINE__, "room", [&] { rfaas::mpi::open(MPI_COMM_WORLD, options); });
        rfaas::mpi::connection here =
            rfaas::mpi::open(MPI_COMM_WORLD, rfaas::lease_options(path).with(flags).with_local());
        CHECK(std::string(here.lease.info().provider) == "local");
        throws<rfaas::busy_error>(__LINE__, "room", [&] { rfaas::mpi::open(MPI_COMM_WORLD, mine.session, options); });
        rfaas::lease too = rfaas::mpi::open(MPI_COMM_WORLD, mine.session, rfaas::lease_options(path).with(flags).with_local());
        CHECK(std::string(too.info().provider) == "local");
        rfaas::lease_options missing(rank == 1 ? "/nothing.so" : path); /* one rank's mistake is an error of all */
        missing.with_local();
        throws<rfaas::invalid_error>(__LINE__, "nothing.so", [&] { rfaas::mpi::open(MPI_COMM_WORLD, missing); });
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    try {
        work(argv[1]);
    } catch (const rfaas::error &e) {
        report(__LINE__, e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    int sum = 0;
    MPI_Allreduce(&failures, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Finalize();
    return sum != 0;
}

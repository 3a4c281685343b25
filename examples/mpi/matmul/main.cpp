/* Dense matrix product on MPI ranks and leased cores, in C++. Each rank computes its rows of C = A * B: workers that keep B
 * compute some of them while the rank computes the others. Every number is compared with a product computed by the rank alone.
 *
 *     mpirun -n 2 build/examples/matmul [n, 256 if not given]
 */
#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <rfaas.hpp>

namespace {

/* Whole numbers of a few bits: sums are exact in any order. */
double element(std::size_t i, std::size_t j, unsigned seed) { return double((i * 7 + j * 13 + seed * 5) % 17) - 8; }

void multiply(const double *a, const double *b, double *c, std::size_t rows, std::size_t n) {
    std::memset(c, 0, rows * n * sizeof *c);
    for (std::size_t i = 0; i < rows; i++)
        for (std::size_t k = 0; k < n; k++)
            for (std::size_t j = 0; j < n; j++)
                c[i * n + j] += a[i * n + k] * b[k * n + j];
}

std::string library_of(const char *program) {
    std::string path = program;
    std::size_t slash = path.rfind('/');
    if (const char *given = std::getenv("MATMUL_LIBRARY"))
        return given;
    return (slash == std::string::npos ? std::string(".") : path.substr(0, slash)) + "/../functions/matmul.so";
}

int work(std::size_t n, const std::string &library_path) {
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const std::size_t from = n * rank / ranks, rows = n * (rank + 1) / ranks - from;
    std::vector<double> a(rows * n), b(n * n), c(rows * n), expected(rows * n);
    for (std::size_t i = 0; i < rows; i++)
        for (std::size_t j = 0; j < n; j++)
            a[i * n + j] = element(from + i, j, 1);
    for (std::size_t i = 0; i < n; i++)
        for (std::size_t j = 0; j < n; j++)
            b[i * n + j] = element(i, j, 2);
    double start = MPI_Wtime();
    multiply(a.data(), b.data(), expected.data(), rows, n);
    const double alone = MPI_Wtime() - start;

    rfaas::library library;
    rfaas::session session;
    rfaas::lease_options options = rfaas::lease_options(library_path).with_workers(1).with_depth(4);
    options.bulk = 2 * (n * n * sizeof(double) + 4096);
    rfaas::lease lease(session, options);
    const rfaas::function keep = lease.function("matmul_keep"), times = lease.function("matmul_rows");
    {
        rfaas::buffer<double> kept(lease, 1 + n * n); /* registered: sent without a copy */
        const std::uint64_t size = n;
        std::memcpy(kept.data(), &size, sizeof size);
        std::copy(b.begin(), b.end(), kept.begin() + 1);
        for (int w = 0; w < lease.workers(); w++)
            lease.invoke(keep, kept, rfaas::span<double>(), rfaas::call_options().on(w));
    }

    /* The workers take rows from the front, this rank takes rows from the back, until they meet. */
    const std::size_t batch = n >= 64 ? 8 : 1;
    std::vector<rfaas::request> requests(std::size_t(lease.workers()) * 4);
    std::size_t sent = 0, here = rows, in_flight = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    start = MPI_Wtime();
    while (sent < here || in_flight) {
        for (rfaas::request &r : requests) {
            if (r && r.test())
                in_flight--;
            if (!r && sent < here) {
                const std::size_t k = std::min(batch, here - sent) * n;
                r = lease.iinvoke(times, rfaas::span<const double>(&a[sent * n], k), rfaas::span<double>(&c[sent * n], k));
                sent += k / n;
                in_flight++;
            }
        }
        if (sent < here) {
            here--;
            multiply(&a[here * n], b.data(), &c[here * n], 1, n);
        } else if (in_flight) {
            rfaas::wait_any(requests);
            in_flight--;
        }
    }
    const double together = MPI_Wtime() - start;

    long counts[2] = {0, long(sent)}, sums[2];
    for (std::size_t i = 0; i < rows * n; i++)
        counts[0] += c[i] != expected[i];
    double times_here[2] = {alone, together}, slowest[2];
    MPI_Allreduce(counts, sums, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(times_here, slowest, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (rank == 0)
        std::printf("matmul: %zu x %zu on %d ranks: %ld of %zu rows remotely, %ld numbers wrong\n"
                    "  alone %.2f ms, with workers %.2f ms: speed-up %.2f\n",
                    n, n, ranks, sums[1], n, sums[0], slowest[0] * 1e3, slowest[1] * 1e3, slowest[0] / slowest[1]);
    return sums[0] || (n > 8 && !sums[1]);
}

} // namespace

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int status = 1;
    try {
        const long n = argc > 1 ? std::atol(argv[1]) : 256;
        if (n < 1 || n > 2048)
            throw std::invalid_argument("n is \"" + std::string(argv[1]) + "\", want 1 to 2048");
        status = work(std::size_t(n), library_of(argv[0]));
    } catch (const std::exception &e) {
        std::fprintf(stderr, "matmul: %s\n", e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return status;
}

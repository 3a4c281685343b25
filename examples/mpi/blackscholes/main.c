/* Black-Scholes on leased cores. Each MPI rank leases workers, lets them price a part of its options while it prices the
 * others itself, and checks every price. price() offloads the work; everything else is input, checks and output.
 *
 *     mpirun -n 2 build/examples/blackscholes --n 1000000 --workers 1
 */
#include <mpi.h>
#include <rfaas.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "example.h"

#define SIZES 2
static const int payloads[SIZES] = {8, 64};

static int rank, ranks;

/* Ends all ranks. A rank that fails must not leave the others waiting. */
static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "blackscholes: rank %d: ", rank);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void must(int status, const char *what) {
    if (status < 0)
        die("%s: %s (%s)", what, rfaas_last_error(), rfaas_strerror(status));
}

/* Calls in flight, oldest first. */
typedef struct flight {
    rfaas_request *requests;
    int room, first, count;
} flight;

static void flight_wait(flight *f) {
    must(rfaas_wait(&f->requests[f->first], NULL), "wait");
    f->first = (f->first + 1) % f->room;
    f->count--;
}

/* Prices options[0..n) and returns how many of them the workers priced. The workers start at the front and this rank at the back, until they
 * meet. With a share, the workers price exactly that part. */
static long price(rfaas_lease *lease, rfaas_function fn, const bs_option *options, double *prices, long n, double share, int batch) {
    rfaas_lease_details d = {.struct_size = sizeof d};
    must(rfaas_lease_info(lease, &d), "lease info");
    flight f = {.room = (int)(d.workers * d.depth)};
    f.requests = calloc((size_t)f.room, sizeof *f.requests);
    if (!f.requests)
        die("out of memory");
    const long most = share < 0 ? n : (long)((double)n * share), least = share < 0 ? 0 : most; /* options for the workers */
    long sent = 0, here = n;
    while (sent < here || f.count) {
        while (sent < most && sent < here && f.count < f.room) {
            long left = (most < here ? most : here) - sent, part = left < batch ? left : batch;
            rfaas_request *r = &f.requests[(f.first + f.count) % f.room];
            int status = rfaas_iinvoke(lease, fn, options + sent, (size_t)part * sizeof *options, prices + sent,
                                       (size_t)part * sizeof *prices, NULL, r);
            if (RFAAS_CLASS(status) == RFAAS_CLASS_BUSY)
                break;
            must(status, "start a call");
            sent += part;
            f.count++;
        }
        for (int done = 1; f.count && done;) {
            must(rfaas_test(&f.requests[f.first], &done, NULL), "test");
            if (done) {
                f.first = (f.first + 1) % f.room;
                f.count--;
            }
        }
        long end = sent > least ? sent : least;
        if (here > end) {
            for (long stop = here - batch > end ? here - batch : end; here > stop;) {
                here--;
                prices[here] = bs_price(&options[here]);
            }
        } else if (f.count) {
            flight_wait(&f);
        }
    }
    free(f.requests);
    return sent;
}

/* Figures of a rank. All are doubles, so that one reduction and one gather are enough. */
typedef struct result {
    double seconds, local_seconds, lease_seconds;
    double idle_cores; /* of this rank's node, while the ranks computed alone */
    double priced, remote, wrong, references, wrong_references;
    double p50[SIZES], p99[SIZES];
} result;

/* Seconds for which cores of this node have been idle, all cores together. */
static double idle_seconds(void) {
    double ticks = 0;
    FILE *f = fopen("/proc/stat", "r");
    if (!f || fscanf(f, "cpu %*f %*f %*f %lf", &ticks) != 1)
        ticks = 0;
    if (f)
        fclose(f);
    return ticks / (double)sysconf(_SC_CLK_TCK);
}

static void check(result *r, const entry *entries, int n_entries, long lo, const bs_option *options, const double *prices,
                  long n) {
    double start = now_s(), idle = idle_seconds();
    double *own = malloc((size_t)(n ? n : 1) * sizeof *own);
    if (!own)
        die("out of memory");
    for (long i = 0; i < n; i++)
        own[i] = bs_price(&options[i]);
    r->local_seconds = now_s() - start;
    r->idle_cores = (idle_seconds() - idle) / r->local_seconds;
    for (long i = 0; i < n; i++) {
        if (!(fabs(prices[i] - own[i]) <= 1e-12 * fmax(1, fabs(own[i]))) && r->wrong++ < 3)
            fprintf(stderr, "blackscholes: rank %d: option %ld: remote price %.17g, local %.17g\n", rank, lo + i, prices[i],
                    own[i]);
        const entry *e = &entries[(lo + i) % n_entries];
        if (isnan(e->reference))
            continue;
        r->references++;
        if (!(fabs(prices[i] - e->reference) <= e->tolerance) && r->wrong_references++ < 3)
            fprintf(stderr, "blackscholes: rank %d: option %ld: price %.17g, published %g\n", rank, lo + i, prices[i],
                    e->reference);
    }
    free(own);
}

static rfaas_lease *take_lease(rfaas_session *s, const arguments *a, int workers, int mode) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l;
    o.library = a->library;
    o.workers = (uint32_t)workers;
    o.wait_mode = (uint32_t)mode;
    must(rfaas_lease_open(s, &o, &l), "lease workers");
    return l;
}

/* The ranks measure one after the other, each with its own hot worker, while the others sleep. */
static void measure_latency(rfaas_session *s, const arguments *a, quiet *q, result *r) {
    for (int turn = 0; turn < ranks; turn++) {
        quiet_barrier(q);
        if (turn != rank)
            continue;
        rfaas_lease *l = take_lease(s, a, 1, RFAAS_WAIT_HOT);
        rfaas_function echo;
        must(rfaas_lease_function(l, "echo", &echo), "find function");
        for (int i = 0; i < SIZES; i++) {
            latency m;
            must(latency_measure(l, echo, payloads[i], a->samples, &m), "latency");
            r->p50[i] = m.p50_ns;
            r->p99[i] = m.p99_ns;
        }
        must(rfaas_lease_release(l), "release");
    }
    quiet_barrier(q);
}

static void print_json(const arguments *a, const result *sum, const result *all, double seconds, double local,
                       const rfaas_lease_details *d) {
    printf("{\"name\":\"blackscholes\",\"ranks\":%d,\"workers\":%d,\"provider\":\"%s\",\"node\":\"%s\",\"options\":%.0f,"
           "\"remote\":%.0f,\"remote_share\":%.4f,\"wrong\":%.0f,\"references\":%.0f,\"wrong_references\":%.0f,"
           "\"seconds\":%.6f,\"local_only_seconds\":%.6f,\"speed_up\":%.4f,\"idle_cores\":%.2f,\"lease_seconds\":%.6f,\"latency\":[",
           ranks, ranks * a->workers, d->provider, d->node, sum->priced, sum->remote, sum->remote / sum->priced,
           sum->wrong, sum->references, sum->wrong_references, seconds, local, local / seconds, all[0].idle_cores, sum->lease_seconds / ranks);
    const char *comma = "";
    for (int i = 0; a->samples && i < ranks; i++)
        for (int k = 0; k < SIZES; k++, comma = ",")
            printf("%s{\"rank\":%d,\"payload\":%d,\"samples\":%d,\"p50_ns\":%.0f,\"p99_ns\":%.0f}", comma, i, payloads[k],
                   a->samples, all[i].p50[k], all[i].p99[k]);
    printf("]}\n");
}

static void print_text(const arguments *a, const result *sum, const result *all, double seconds, double local,
                       const rfaas_lease_details *d) {
    const char *s = ranks == 1 ? "" : "s";
    printf("%.0f options on %d rank%s with %d worker%s%s (%s, executor %s on %s)\n", sum->priced, ranks, s, a->workers,
           a->workers == 1 ? "" : "s", ranks == 1 ? "" : " each", d->provider, d->executor, d->node);
    printf("  lease of the workers    %9.2f ms\n", sum->lease_seconds / ranks * 1e3);
    printf("  %d rank%s without rfaas   %9.2f ms   all options priced locally\n", ranks, s, local * 1e3);
    printf("  %d rank%s with workers    %9.2f ms   %.0f remotely (%.0f %%), %.0f locally\n", ranks, s, seconds * 1e3, sum->remote,
           100 * sum->remote / sum->priced, sum->priced - sum->remote);
    printf("  speed-up                %9.2f      same ranks, same options, same code\n", local / seconds);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int one_machine = !strcmp(d->provider, "shm") || getenv("DEMO_ONE_MACHINE");
    if (one_machine && local >= 0.1 && all[0].idle_cores < 0.75 * ranks * a->workers)
        printf("    the %d worker%s had too few idle cores: while the ranks computed alone, %.1f of this machine's %ld cores were idle\n",
               ranks * a->workers, ranks * a->workers == 1 ? "" : "s", all[0].idle_cores, cores);
    printf("  checked                 %9.0f prices against the local ones: %.0f wrong\n", sum->priced, sum->wrong);
    printf("                          %9.0f against published ones: %.0f wrong\n", sum->references, sum->wrong_references);
    for (int i = 0; a->samples && i < ranks; i++)
        for (int k = 0; k < SIZES; k++)
            printf("  hot call, %2d B, rank %-3d %9.2f us median, %.2f us p99 (%d calls, nothing else spinning)\n",
                   payloads[k], i, all[i].p50[k] * 1e-3, all[i].p99[k] * 1e-3, a->samples);
}

/* Reads the file on rank 0 and sends it to all ranks. */
static entry *share_options(const char *path, int *n) {
    entry *entries = NULL;
    char error[8192];
    if (rank == 0 && !(entries = options_read(path, n, error, sizeof error)))
        die("%s", error);
    MPI_Bcast(n, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (rank && !(entries = malloc((size_t)*n * sizeof *entries)))
        die("out of memory");
    MPI_Bcast(entries, *n * (int)sizeof *entries, MPI_BYTE, 0, MPI_COMM_WORLD);
    return entries;
}

static int run(const arguments *a) {
    int n_entries = 0;
    entry *entries = share_options(a->options, &n_entries);
    long lo = a->n * rank / ranks, n = a->n * (rank + 1) / ranks - lo;
    bs_option *options = malloc((size_t)(n ? n : 1) * sizeof *options);
    double *prices = calloc((size_t)(n ? n : 1), sizeof *prices);
    result *all = malloc((size_t)ranks * sizeof *all);
    quiet *q = quiet_create(MPI_COMM_WORLD);
    if (!options || !prices || !all || !q)
        die("out of memory");
    for (long i = 0; i < n; i++)
        options[i] = entries[(lo + i) % n_entries].option;

    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    so.executor = a->executor;
    so.manager = a->manager;
    so.provider = a->provider;
    rfaas_session *session;
    must(rfaas_init(NULL), "init");
    must(rfaas_session_open(&so, &session), "open session");

    result r = {.priced = (double)n};
    double start = now_s();
    rfaas_lease *lease = take_lease(session, a, a->workers, RFAAS_WAIT_ADAPTIVE);
    r.lease_seconds = now_s() - start;
    rfaas_function fn;
    must(rfaas_lease_function(lease, "blackscholes", &fn), "find function");
    rfaas_lease_details d = {.struct_size = sizeof d};
    must(rfaas_lease_info(lease, &d), "lease info");

    quiet_barrier(q);
    start = now_s();
    r.remote = (double)price(lease, fn, options, prices, n, a->share, a->batch);
    r.seconds = now_s() - start;
    must(rfaas_lease_release(lease), "release");
    quiet_barrier(q);
    check(&r, entries, n_entries, lo, options, prices, n);
    if (a->samples)
        measure_latency(session, a, q, &r);
    must(rfaas_session_close(session), "close session");
    must(rfaas_finalize(), "finalize");

    result sum;
    double seconds, local;
    int fields = (int)(sizeof r / sizeof(double));
    MPI_Reduce(&r, &sum, fields, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Reduce(&r.seconds, &seconds, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(&r.local_seconds, &local, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Gather(&r, fields, MPI_DOUBLE, all, fields, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    int wrong = 0;
    if (rank == 0) {
        (a->json ? print_json : print_text)(a, &sum, all, seconds, local, &d);
        wrong = sum.wrong || sum.wrong_references;
    }
    MPI_Bcast(&wrong, 1, MPI_INT, 0, MPI_COMM_WORLD);
    quiet_free(q);
    free(all);
    free(prices);
    free(options);
    free(entries);
    return wrong;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    arguments a;
    int status = arguments_parse(&a, argc, argv, rank == 0);
    if (status == 0)
        status = run(&a);
    else if (status == 1)
        status = 0;
    MPI_Finalize();
    return status;
}

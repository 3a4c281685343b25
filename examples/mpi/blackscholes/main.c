/* Black-Scholes on borrowed cores: each MPI rank leases workers, lets them price part of its options while it prices the
 * rest itself, and checks every price. The offloading is in price(): the rest is bookkeeping.
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

/* Prices options[0..n): the first `remote` of them on the workers, the others here meanwhile. */
static void price(rfaas_lease *lease, rfaas_function fn, const bs_option *options, double *prices, long n, long remote,
                  int batch) {
    rfaas_lease_details d = {.struct_size = sizeof d};
    must(rfaas_lease_info(lease, &d), "lease info");
    flight f = {.room = (int)(d.workers * d.depth)};
    f.requests = calloc((size_t)f.room, sizeof *f.requests);
    if (!f.requests)
        die("out of memory");
    long sent = 0, here = remote;
    while (sent < remote || f.count || here < n) {
        while (sent < remote && f.count < f.room) {
            long part = remote - sent < batch ? remote - sent : batch;
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
        if (here < n) {
            long end = here + batch < n ? here + batch : n;
            for (; here < end; here++)
                prices[here] = bs_price(&options[here]);
        } else if (f.count) {
            flight_wait(&f);
        }
    }
    free(f.requests);
}

/* What a rank found. All doubles, so that one reduction and one gather do. */
typedef struct result {
    double seconds, local_seconds, lease_seconds;
    double priced, remote, wrong, references, wrong_references;
    double p50[SIZES], p99[SIZES];
} result;

static void check(result *r, const entry *entries, int n_entries, long lo, const bs_option *options, const double *prices,
                  long n) {
    double start = now_s();
    double *own = malloc((size_t)(n ? n : 1) * sizeof *own);
    if (!own)
        die("out of memory");
    for (long i = 0; i < n; i++)
        own[i] = bs_price(&options[i]);
    r->local_seconds = now_s() - start;
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

/* One rank after the other measures with a hot worker of its own while the others sleep. */
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
           "\"seconds\":%.6f,\"local_only_seconds\":%.6f,\"speed_up\":%.4f,\"lease_seconds\":%.6f,\"latency\":[",
           ranks, ranks * a->workers, d->provider, d->node, sum->priced, sum->remote, sum->remote / sum->priced,
           sum->wrong, sum->references, sum->wrong_references, seconds, local, local / seconds, sum->lease_seconds / ranks);
    const char *comma = "";
    for (int i = 0; a->samples && i < ranks; i++)
        for (int k = 0; k < SIZES; k++, comma = ",")
            printf("%s{\"rank\":%d,\"payload\":%d,\"samples\":%d,\"p50_ns\":%.0f,\"p99_ns\":%.0f}", comma, i, payloads[k],
                   a->samples, all[i].p50[k], all[i].p99[k]);
    printf("]}\n");
}

static void print_text(const arguments *a, const result *sum, const result *all, double seconds, double local,
                       const rfaas_lease_details *d) {
    printf("%.0f options on %d rank%s with %d worker%s each (%s, executor %s on %s)\n", sum->priced, ranks,
           ranks == 1 ? "" : "s", a->workers, a->workers == 1 ? "" : "s", d->provider, d->executor, d->node);
    printf("  lease of the workers    %9.2f ms\n", sum->lease_seconds / ranks * 1e3);
    printf("  priced in               %9.2f ms   %.0f remotely (%.0f %%), %.0f locally\n", seconds * 1e3, sum->remote,
           100 * sum->remote / sum->priced, sum->priced - sum->remote);
    printf("  the same without rfaas  %9.2f ms   speed-up %.2f\n", local * 1e3, local / seconds);
    if (local < seconds && !strcmp(d->provider, "shm"))
        printf("    no gain: the workers share this machine's %ld cores with the ranks; cores of other nodes bring a gain\n",
               sysconf(_SC_NPROCESSORS_ONLN));
    printf("  checked                 %9.0f prices against the local ones: %.0f wrong\n", sum->priced, sum->wrong);
    printf("                          %9.0f against published ones: %.0f wrong\n", sum->references, sum->wrong_references);
    for (int i = 0; a->samples && i < ranks; i++)
        for (int k = 0; k < SIZES; k++)
            printf("  hot call, %2d B, rank %-3d %9.2f us median, %.2f us p99 (%d calls, nothing else spinning)\n",
                   payloads[k], i, all[i].p50[k] * 1e-3, all[i].p99[k] * 1e-3, a->samples);
}

/* Reads the file on rank 0 and gives it to everybody. */
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

    result r = {.priced = (double)n, .remote = (double)(long)((double)n * a->share)};
    double start = now_s();
    rfaas_lease *lease = take_lease(session, a, a->workers, RFAAS_WAIT_ADAPTIVE);
    r.lease_seconds = now_s() - start;
    rfaas_function fn;
    must(rfaas_lease_function(lease, "blackscholes", &fn), "find function");
    rfaas_lease_details d = {.struct_size = sizeof d};
    must(rfaas_lease_info(lease, &d), "lease info");

    quiet_barrier(q);
    start = now_s();
    price(lease, fn, options, prices, n, (long)r.remote, a->batch);
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

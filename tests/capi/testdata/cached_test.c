/* Leases on connections that released ones have left (cached_test.go). Arguments: echo.so, and what to do: "reuse:N", where N is how
 * far behind rfaas_invoke the library has its dp_qps_made, or "threads". */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <signal.h>

#define CYCLES 20

static rfaas_statistics statistics_of(rfaas_lease *l) {
    rfaas_statistics s = {.struct_size = sizeof s};
    OK(rfaas_lease_statistics(l, &s));
    return s;
}

/* A small and a large call on each worker, one of them from registered memory. */
static void use(rfaas_lease *l) {
    static char in[100 << 10], out[100 << 10];
    rfaas_function echo = find(l, "echo");
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    void *buffer = NULL;
    size_t n = 0;
    OK(rfaas_alloc(l, sizeof in, &buffer));
    for (o.worker = 0; o.worker < rfaas_lease_workers(l); o.worker++) {
        in[0] = (char)(7 + o.worker);
        in[sizeof in - 1] = 8;
        OK(rfaas_invoke(l, echo, in, 8, out, 8, &n, &o));
        CHECK(n == 8 && !memcmp(in, out, 8));
        if (buffer)
            memcpy(buffer, in, sizeof in);
        OK(rfaas_invoke(l, echo, buffer, sizeof in, out, sizeof out, &n, &o));
        CHECK(n == sizeof in && !memcmp(in, out, n));
    }
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void reuse(const char *distance) {
    uint64_t (*made)(void) = (uint64_t(*)(void))((intptr_t)rfaas_invoke + strtoll(distance, NULL, 10));
    int64_t times[CYCLES];
    rfaas_worker_details first[2], again;
    uint64_t pairs = made();
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_statistics s = statistics_of(l);
    CHECK(s.cold + s.pooled == 2 && s.cached == 0 && s.queue_pairs == 2 && s.cached_leases == 0 && made() - pairs == 2);
    int64_t cold = s.open_ns;
    for (int w = 0; w < 2; w++) {
        first[w].struct_size = sizeof first[w];
        OK(rfaas_worker_info(l, w, &first[w]));
    }
    use(l);
    OK(rfaas_lease_release(l));
    pairs = made();
    for (int i = 0; i < CYCLES; i++) {
        l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
        s = statistics_of(l);
        CHECK(s.cached == 2 && s.cold == 0 && s.pooled == 0 && s.queue_pairs == 0 && s.cached_leases == 0);
        CHECK(s.calls == 0 && s.replies == 0 && s.bytes_in == 0 && s.bytes_out == 0); /* of this lease alone */
        times[i] = s.open_ns;
        for (int w = 0; w < 2 && i == 0; w++) {
            again.struct_size = sizeof again;
            OK(rfaas_worker_info(l, w, &again));
            CHECK(again.pid == first[w].pid);
        }
        use(l);
        s = statistics_of(l);
        CHECK(s.calls == 4 && s.replies == 4);
        CHECK(made() == pairs);
        OK(rfaas_lease_release(l));
        if (i == 0) /* on verbs, the second release makes the session a claimant, which has a queue pair */
            pairs = made();
    }
    CHECK(made() == pairs);
    qsort(times, CYCLES, sizeof *times, ascending);
    printf("first_us %.1f\ncached_us %.1f\n", (double)cold / 1e3, (double)times[CYCLES / 2] / 1e3);
    CHECK(times[CYCLES / 2] <= cold / 2);

    /* One that differs, or the same while that is held, has workers of its own. */
    l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    CHECK(statistics_of(l).cached == 0);
    rfaas_lease *other = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    CHECK(statistics_of(other).cached == 0);
    use(l);
    use(other);
    OK(rfaas_lease_release(l));
    CHECK(statistics_of(other).cached_leases >= 1);
    OK(rfaas_lease_release(other));

    /* A lease that is not at rest leaves nothing: a call is under way, or has been given up. */
    uint64_t ns = 800000000, out; /* longer than this program may be held up */
    for (int cancelled = 0; cancelled < 2; cancelled++) {
        rfaas_request r;
        l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &ns, 8, &out, 8, NULL, &r));
        if (cancelled)
            OK(rfaas_cancel(&r));
        OK(rfaas_lease_release(l));
        l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        CHECK(statistics_of(l).cached == 0);
        use(l);
        /* One whose worker was replaced is as good as any. */
        rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
        o.worker = 1;
        CHECK(rfaas_invoke(l, find(l, "crash"), NULL, 0, NULL, 0, NULL, &o) == RFAAS_WORKER_DIED);
        use(l);
        OK(rfaas_lease_release(l));
        l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        CHECK(statistics_of(l).cached == 2);
        use(l);
        again.struct_size = sizeof again;
        OK(rfaas_worker_info(l, 0, &again));
        OK(rfaas_lease_release(l));
        /* A cached worker dies. */
        CHECK(again.pid > 1 && kill((pid_t)again.pid, SIGKILL) == 0);
        double end = now() + 20;
        l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        while (statistics_of(l).cached && now() < end) { /* until the executor knows: it does not ask cached workers whether they live */
            OK(rfaas_lease_release(l));
            l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        }
        CHECK(statistics_of(l).cached == 0);
        use(l);
        CHECK(rfaas_invoke(l, find(l, "crash"), NULL, 0, NULL, 0, NULL, &o) == RFAAS_WORKER_DIED);
        OK(rfaas_lease_release(l)); /* without the dead one's successor */
        l = lease(2, 2, RFAAS_WAIT_ADAPTIVE);
        use(l);
        OK(rfaas_lease_release(l));
    }
}

#define THREADS 2 /* as many as there are cores */
#define ROUNDS 20

static void *cycle(void *arg) {
    uint64_t *pairs = arg;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t in = (uint64_t)i, out = 0;
        rfaas_lease *l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
        OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, NULL, NULL));
        CHECK(out == in);
        *pairs += statistics_of(l).queue_pairs;
        OK(rfaas_lease_release(l));
    }
    return NULL;
}

/* Leases of several threads take turns on the same connections. */
static void threads(void) {
    pthread_t t[THREADS];
    uint64_t pairs[THREADS] = {0}, all = 0;
    for (int i = 0; i < THREADS; i++)
        pthread_create(&t[i], NULL, cycle, &pairs[i]);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(t[i], NULL);
        all += pairs[i];
    }
    printf("%d leases, %llu queue pairs\n", THREADS * ROUNDS, (unsigned long long)all);
    /* One each; a busy machine may not bring a worker to rest in time. */
    CHECK(all >= 1 && all <= THREADS + THREADS * ROUNDS / 10);
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    lease_flags = RFAAS_LEASE_REUSE;
    if (!strncmp(what, "reuse:", 6))
        reuse(what + 6);
    else if (!strcmp(what, "threads"))
        threads();
    else
        report(__LINE__, what);
    OK(rfaas_finalize());
}

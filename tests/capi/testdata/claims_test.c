/* Many clients take turns on few cached workers by claims (claims_test.go). Arguments: echo.so, and "race:CLIENTS:ROUNDS", or "loop:LEASES". Half
 * of the clients are threads of another process. */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PIDS (1 << 22) /* the kernel's largest pid_max */

/* Memory that both processes share. */
static struct shared {
    atomic_int leases, calls, cached;
    atomic_char held[PIDS]; /* by process id of the worker */
} *all;
static int rounds;

/* Takes a lease, and checks that no other lease has its worker meanwhile. odd: the lease has terms that
 * no cached worker has, so that the executor ends one. */
static void turn(uint64_t number, bool odd) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_worker_start from = {.struct_size = sizeof from};
    rfaas_lease *l;
    uint64_t out = 0;
    o.library = library;
    o.flags = RFAAS_LEASE_REUSE;
    o.wait_ns = 60000000000;
    o.bulk = odd ? 1 << 14 : 1 << 13;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "open");
        return;
    }
    OK(rfaas_worker_origin(l, 0, &from));
    CHECK(atomic_exchange(&all->held[from.pid % PIDS], 1) == 0);
    for (int i = 0; i < 3; i++) {
        OK(rfaas_invoke(l, find(l, "echo"), &number, 8, &out, 8, NULL, NULL));
        CHECK(out == number);
        all->calls++;
    }
    all->held[from.pid % PIDS] = 0;
    OK(rfaas_lease_release(l));
    all->leases++;
    all->cached += from.start == RFAAS_START_CACHED;
}

static void *client(void *arg) {
    uint64_t me = (uintptr_t)arg;
    for (int i = 0; i < rounds; i++)
        turn(me << 32 | (uint64_t)i, (me + (uint64_t)i) % 8 == 7);
    return NULL;
}

static void race(int clients) {
    pthread_t *t = calloc((size_t)clients, sizeof *t);
    for (int i = 0; i < clients; i++)
        pthread_create(&t[i], NULL, client, (void *)(uintptr_t)i);
    for (int i = 0; i < clients; i++)
        pthread_join(t[i], NULL);
    free(t);
}

/* One lease after the other, each with a call. Prints how long a lease takes from its opening to its first result, in microseconds. */
static void loop(int leases) {
    double *times = calloc((size_t)leases, sizeof *times);
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    o.flags = RFAAS_LEASE_REUSE;
    for (int i = 0; i < leases; i++) {
        rfaas_lease *l;
        uint64_t in = (uint64_t)i, out = 0;
        double at = now();
        OK(rfaas_lease_open(session, &o, &l));
        OK(rfaas_invoke(l, 0, &in, 8, &out, 8, NULL, NULL));
        times[i] = (now() - at) * 1e6;
        OK(rfaas_lease_release(l));
        all->leases++;
    }
    for (int i = 1; i < leases; i++) /* sorted by insertion */
        for (int k = i; k > 0 && times[k] < times[k - 1]; k--) {
            double x = times[k];
            times[k] = times[k - 1];
            times[k - 1] = x;
        }
    printf("p50_us %.1f\np90_us %.1f\n", times[leases / 2], times[leases * 9 / 10]);
    free(times);
}

void everything(void) {
    int n = 0;
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    bool racing = sscanf(what, "race:%d:%d", &n, &rounds) == 2;
    pid_t child = racing ? fork() : 1;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (racing)
        race(n / 2);
    else if (sscanf(what, "loop:%d", &n) == 1)
        loop(n);
    else
        report(__LINE__, what);
    OK(rfaas_finalize());
    if (!child)
        _exit(failures ? 1 : 0);
    int status;
    CHECK(!racing || (waitpid(child, &status, 0) == child && status == 0));
    printf("leases %d\ncalls %d\ncached %d\n", all->leases, all->calls, all->cached);
}

/* What the test programs share: checks, leases, and a main that runs everything(), with -DWITH_MPI as an MPI program. */
#include <pthread.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_MPI
#include <mpi.h>
#endif

static int failures;

static void report(int line, const char *problem) {
    fprintf(stderr, "%s:%d: %s (last error: %s)\n", __BASE_FILE__, line, problem, rfaas_last_error());
    failures++;
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x))
#define OK(call) CHECK((call) == RFAAS_OK)
/* The call must fail with the status, and the error's text must name the word. */
#define FAILS(call, status, word) \
    (((call) == (status) && strstr(rfaas_last_error(), word)) ? (void)0 : report(__LINE__, #call " gives " #status ", " word))

__attribute__((unused)) static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static rfaas_session *session;
static const char *library;

__attribute__((unused)) static rfaas_function find(rfaas_lease *l, const char *name) {
    rfaas_function f = UINT32_MAX;
    OK(rfaas_lease_function(l, name, &f));
    return f;
}

__attribute__((unused)) static uint32_t lease_flags; /* of the leases of lease() */

__attribute__((unused)) static rfaas_lease *lease(uint32_t workers, uint32_t depth, uint32_t mode) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = library;
    o.workers = workers;
    o.depth = depth;
    o.wait_mode = mode;
    o.bulk = 1 << 20;
    o.flags = lease_flags;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

void everything(void);

int main(int argc, char **argv) {
    library = argv[1];
#ifdef CHECK_ARGUMENT
    CHECK_ARGUMENT = argv[2];
#endif
    (void)argc;
#ifdef WITH_MPI
    MPI_Init(&argc, &argv);
#endif
    everything();
#ifdef WITH_MPI
    MPI_Finalize();
#endif
    return failures ? 1 : 0;
}

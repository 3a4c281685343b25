/* Calls through rfaas.h until the node drains. Says "loaded" when the load runs and then waits for the drain. Every call
 * must have its result or not have been started. Needs RFAAS_EXECUTOR and RFAAS_SECRET_FILE; the argument is the path of
 * build/functions/echo.so. Prints what happened; exit status 0: all good. */
#include <pthread.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FLYING = 6, POLL_US = 1000 };

static int failures, loaded;
static long calls, refused;
static rfaas_session *session;
static const char *library;

static void report(int line, const char *what) {
    fprintf(stderr, "drain_test.c:%d: %s (last error: %s)\n", line, what, rfaas_last_error());
    __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x))

static rfaas_lease *lease(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = library;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

/* A call that failed because the executor drains. */
static void refused_well(int status) {
    CHECK(status == RFAAS_LEASE_ENDED && rfaas_started() == RFAAS_NOT_STARTED);
    CHECK(strstr(rfaas_last_error(), " is draining: maintenance"));
    __atomic_add_fetch(&refused, 1, __ATOMIC_RELAXED);
}

static void counted(void) {
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == 200)
        __atomic_store_n(&loaded, 1, __ATOMIC_RELEASE);
}

static void take_events(rfaas_lease *l) {
    rfaas_event e = {.struct_size = sizeof e};
    CHECK(rfaas_lease_event(l, &e) == RFAAS_OK && e.kind == RFAAS_EVENT_DRAINING && e.left_ns > 0 && strstr(e.text, "maint"));
    do { /* the end comes a little later; bounded by the test that runs this */
        usleep(POLL_US);
        CHECK(rfaas_lease_event(l, &e) == RFAAS_OK);
    } while (e.kind == RFAAS_EVENT_NONE);
    CHECK(e.kind == RFAAS_EVENT_ENDED && strncmp(e.text, "drained", 7) == 0 && e.lost == 0);
    CHECK(rfaas_lease_event(l, &e) == RFAAS_OK && e.kind == RFAAS_EVENT_NONE);
}

static void *synchronous(void *arg) {
    rfaas_lease *l = arg;
    rfaas_function f;
    CHECK(rfaas_lease_function(l, "echo", &f) == RFAAS_OK);
    for (uint64_t i = 0;; i++) {
        uint64_t in[8] = {i, 1, 2, 3, 4, 5, 6, 7}, out[8];
        size_t n = 0;
        int status = rfaas_invoke(l, f, in, sizeof in, out, sizeof out, &n, NULL);
        if (status) {
            refused_well(status);
            break;
        }
        CHECK(n == sizeof in && memcmp(in, out, n) == 0);
        counted();
    }
    take_events(l);
    CHECK(rfaas_lease_release(l) == RFAAS_OK);
    return arg;
}

static void *in_flight(void *arg) {
    rfaas_lease *l = arg;
    rfaas_function f;
    CHECK(rfaas_lease_function(l, "sleep_ns", &f) == RFAAS_OK);
    rfaas_request request[FLYING];
    uint64_t ns = 1000000, out[FLYING];
    int n = 0, status = RFAAS_OK;
    while (!status) {
        while (n < FLYING && !(status = rfaas_iinvoke(l, f, &ns, sizeof ns, &out[n], sizeof out[n], NULL, &request[n])))
            n++;
        while (n) {
            CHECK(rfaas_wait(&request[--n], NULL) == RFAAS_OK);
            counted();
        }
    }
    refused_well(rfaas_iinvoke(l, f, &ns, sizeof ns, out, sizeof out[0], NULL, request));
    take_events(l);
    CHECK(rfaas_lease_release(l) == RFAAS_OK);
    return arg;
}

/* Holds a lease and does nothing with it: the drain must not wait for it. */
static void idle_lease(rfaas_lease *l) {
    rfaas_event e = {.struct_size = sizeof e};
    do {
        usleep(POLL_US);
        CHECK(rfaas_lease_event(l, &e) == RFAAS_OK);
    } while (e.kind != RFAAS_EVENT_ENDED);
    CHECK(rfaas_lease_renew(l, 0) == RFAAS_LEASE_ENDED);
    CHECK(rfaas_lease_release(l) == RFAAS_OK);
}

int main(int argc, char **argv) {
    pthread_t a, b;
    (void)argc;
    library = argv[1];
    CHECK(rfaas_init(NULL) == RFAAS_OK && rfaas_session_open(NULL, &session) == RFAAS_OK);
    rfaas_lease *idle = lease();
    pthread_create(&a, NULL, synchronous, lease());
    pthread_create(&b, NULL, in_flight, lease());
    while (!__atomic_load_n(&loaded, __ATOMIC_ACQUIRE))
        usleep(POLL_US);
    puts("loaded");
    fflush(stdout);
    idle_lease(idle);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    CHECK(refused == 2);
    printf("%ld calls ended well, %ld were refused\n", calls, refused);
    CHECK(rfaas_finalize() == RFAAS_OK);
    return failures ? 1 : 0;
}

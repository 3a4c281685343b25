/* Threads that wait for something that another thread does sleep until then. A thread that looks again and again shows by its
 * voluntary context switches. */
#include "check.h"

#include <sys/resource.h>

enum { DEPTH = 4, WORKERS = 2, ITEMS = 100 };

static rfaas_lease *l;
static rfaas_function echo;
static rfaas_request held[DEPTH * WORKERS];
static uint64_t results[DEPTH * WORKERS];

static long switches(void) {
    struct rusage u;
    return getrusage(RUSAGE_THREAD, &u) ? -1 : u.ru_nvcsw;
}

static void *call_once(void *arg) {
    uint64_t in = 1, out = 0;
    OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL));
    return arg;
}

/* Lets so many threads call that the lease is shared from then on (threads.c). */
static void share(void) {
    for (int i = 0; i < 10; i++) {
        pthread_t t;
        CHECK(!pthread_create(&t, NULL, call_once, NULL));
        CHECK(!pthread_join(t, NULL));
        call_once(NULL);
    }
}

/* Takes every request of the lease, which all end soon. */
static void take_all_requests(void) {
    uint64_t in = 7;
    for (int i = 0; i < DEPTH * WORKERS; i++)
        OK(rfaas_iinvoke(l, echo, &in, 8, &results[i], 8, NULL, &held[i]));
}

static void *hold_requests(void *arg) {
    take_all_requests();
    __atomic_store_n((int *)arg, 1, __ATOMIC_RELEASE);
    usleep(300000);
    OK(rfaas_waitall(DEPTH * WORKERS, held, NULL, NULL));
    return NULL;
}

/* A map finds no request, since another thread has them all and has not waited for them. */
static void map_without_requests(uint32_t mode) {
    pthread_t t;
    uint64_t in[ITEMS], out[ITEMS];
    int ready = 0;
    l = lease(WORKERS, DEPTH, mode);
    echo = find(l, "echo");
    share();
    for (uint64_t i = 0; i < ITEMS; i++)
        in[i] = i;
    CHECK(!pthread_create(&t, NULL, hold_requests, &ready));
    while (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE))
        usleep(1000);
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    o.chunk = ITEMS;
    o.timeout_ns = 30000000000;
    long before = switches();
    double start = now();
    OK(rfaas_map(l, echo, in, 8, out, 8, ITEMS, &o));
    double took = now() - start;
    long slept = switches() - before;
    CHECK(!memcmp(in, out, sizeof in));
    CHECK(!pthread_join(t, NULL));
    printf("map without requests, mode %u: %.0f ms, %ld sleeps\n", mode, took * 1e3, slept);
    CHECK(took < 0.1 || slept < 100);
    OK(rfaas_lease_release(l));
}

/* The only slot of a worker is taken by a request that ended while the thread waited for another one. */
static void invoke_behind_ended(uint32_t mode) {
    uint64_t in = 7, out[2], result = 0;
    rfaas_request r[2];
    size_t index;
    rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
    rfaas_worker_details d = {.struct_size = sizeof d};
    l = lease(2, 1, mode);
    echo = find(l, "echo");
    for (c.worker = 0; c.worker < 2; c.worker++)
        OK(rfaas_iinvoke(l, echo, &in, 8, &out[c.worker], 8, &c, &r[c.worker]));
    for (int w = 0; w < 2; w++) /* until both have replied */
        for (d.calls = 0; !d.calls; usleep(1000))
            OK(rfaas_worker_info(l, w, &d));
    OK(rfaas_waitany(1, &r[0], &index, NULL));
    c.worker = 1;
    c.timeout_ns = 30000000000;
    OK(rfaas_invoke(l, echo, &in, 8, &result, 8, NULL, &c));
    CHECK(result == in);
    OK(rfaas_wait(&r[1], NULL));
    OK(rfaas_lease_release(l));
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    invoke_behind_ended(RFAAS_WAIT_ADAPTIVE);
    invoke_behind_ended(RFAAS_WAIT_WARM);
    map_without_requests(RFAAS_WAIT_ADAPTIVE);
    map_without_requests(RFAAS_WAIT_WARM);
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

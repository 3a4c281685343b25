/* Leases that are opened with fewer workers than they want, and grow. The executor lends four cores. Arguments: stateful.so. The library of
 * other functions is TEST_LIBRARY. */
#include "check.h"

enum { WANTED = 4 };

static rfaas_lease *growing(const char *with, const char *init) {
    static const uint32_t side = 3;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = with;
    o.workers = WANTED;
    o.workers_min = 1;
    o.init_function = init;
    o.init_payload = init ? &side : NULL;
    o.init_size = init ? sizeof side : 0;
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_lease_details d = {.struct_size = sizeof d};
    OK(rfaas_lease_info(l, &d));
    CHECK(d.workers == 1 && d.workers_wanted == WANTED && rfaas_lease_workers(l) == 1);
    return l;
}

/* Calls a worker. Fails while the lease does not have it. */
static int call(rfaas_lease *l, rfaas_function f, int worker, int64_t *out) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.worker = worker;
    return rfaas_invoke(l, f, NULL, 0, out, sizeof *out, NULL, &o);
}

static void *call_until_grown(void *arg) {
    rfaas_lease *l = arg;
    rfaas_function f = find(l, "init_count");
    int64_t n = 0;
    double until = now() + 30;
    while (now() < until && call(l, f, WANTED - 1, &n))
        for (int i = 0; i < 100; i++)
            OK(call(l, f, RFAAS_ANY_WORKER, &n));
    CHECK(n == 1);
    return NULL;
}

/* The lease grows while a thread, or several, only make calls. Each new worker has executed the init call before its first call. */
static void by_calls(int threads) {
    rfaas_lease *held = lease(WANTED - 1, 4, RFAAS_WAIT_ADAPTIVE), *l = growing(library, "make_rows");
    rfaas_event e = {.struct_size = sizeof e};
    pthread_t t[4];
    int64_t n;
    FAILS(call(l, find(l, "init_count"), 2, &n), RFAAS_INVALID, "worker 2 is not there yet: the lease has 1 of 4 workers");
    FAILS(call(l, find(l, "init_count"), WANTED, &n), RFAAS_INVALID, "worker 4, the lease has workers 0..0");
    OK(rfaas_lease_release(held));
    if (!threads)
        call_until_grown(l);
    for (int i = 0; i < threads; i++)
        pthread_create(&t[i], NULL, call_until_grown, l);
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    for (int i = 1; i < WANTED; i++) {
        OK(rfaas_lease_event(l, &e));
        CHECK(e.kind == RFAAS_EVENT_WORKER_ADDED && e.worker == (uint32_t)i && strstr(e.text, "of 4 workers"));
        OK(call(l, find(l, "init_count"), i, &n));
        CHECK(n == 1);
    }
    OK(rfaas_lease_release(l));
}

/* Room is reported again before the library takes the refusal of its last request: while it waits for other leases, it handles the agent's
 * messages, but only calls on the growing lease go on with its growth. */
static void room_before_refusal(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    o.workers = WANTED - 1;
    rfaas_lease *held = lease(WANTED - 1, 4, RFAAS_WAIT_ADAPTIVE), *l = growing(library, NULL);
    rfaas_function f = find(l, "init_count");
    int64_t n;
    for (int i = 0; i < 20 && held; i++) {
        OK(rfaas_lease_release(held));
        if (rfaas_lease_open(session, &o, &held)) /* the lease got another worker just now */
            held = NULL;
        OK(call(l, f, 0, &n));
    }
    if (held)
        OK(rfaas_lease_release(held));
    double until = now() + 30;
    while (rfaas_lease_workers(l) < WANTED && now() < until)
        OK(call(l, f, 0, &n));
    CHECK(rfaas_lease_workers(l) == WANTED);
    OK(rfaas_lease_release(l));
}

static void *release_soon(void *held) {
    usleep(20000);
    OK(rfaas_lease_release(held));
    return NULL;
}

/* One map uses the workers that are added while it runs. */
static void by_map(void) {
    enum { ITEMS = 400 };
    static uint64_t in[ITEMS], out[ITEMS];
    rfaas_lease *held = lease(WANTED - 1, 4, RFAAS_WAIT_ADAPTIVE), *l = growing(getenv("TEST_LIBRARY"), NULL);
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    rfaas_function f = find(l, "slow");
    pthread_t t;
    o.chunk = 1;
    pthread_create(&t, NULL, release_soon, held);
    OK(rfaas_map(l, f, in, sizeof *in, out, sizeof *out, ITEMS, &o));
    pthread_join(t, NULL);
    rfaas_worker_details d = {.struct_size = sizeof d};
    OK(rfaas_worker_info(l, 1, &d));
    CHECK(d.calls > 0);
    OK(rfaas_lease_release(l));
}

/* A lease is released while workers are added to it. */
static void released_meanwhile(void) {
    for (int i = 0; i < 8; i++) {
        rfaas_lease *held = lease(WANTED - 1, 4, RFAAS_WAIT_ADAPTIVE), *l = growing(library, NULL);
        OK(rfaas_lease_release(held));
        double until = now() + i * 0.003;
        while (now() < until)
            CHECK(rfaas_lease_workers(l) > 0);
        OK(rfaas_lease_release(l));
    }
    OK(rfaas_lease_release(lease(WANTED, 4, RFAAS_WAIT_ADAPTIVE))); /* all cores are free */
}

static void refused(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    rfaas_place places[2];
    size_t n;
    o.library = library;
    o.workers = 2;
    o.workers_min = 3;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "workers_min 3, want at most workers, which is 2");
    o.workers_min = 1;
    FAILS(rfaas_lease_open_across(session, &o, 1, &l, &n), RFAAS_INVALID, "set workers_min to 0");
    FAILS(rfaas_places(session, &o, 2, places), RFAAS_INVALID, "set workers_min to 0");
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    refused();
    by_calls(0);
    by_calls(4);
    room_before_refusal();
    by_map();
    released_meanwhile();
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

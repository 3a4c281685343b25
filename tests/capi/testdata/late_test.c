/* Overdue functions and replaced workers, with one thread and with several. Also leases that wait for room, and invalid arguments. Exit
 * status 0: success. */
#include "check.h"

static const uint64_t forever = 3600000000000;

static int pid_of(rfaas_lease *l, int worker) {
    rfaas_worker_start s = {.struct_size = sizeof s};
    OK(rfaas_worker_origin(l, worker, &s));
    return s.pid;
}

static void until_runs(rfaas_lease *l, int worker, const char *function) {
    rfaas_worker_details d = {.struct_size = sizeof d};
    for (double end = now() + 20; now() < end && strcmp(d.running, function); usleep(1000))
        OK(rfaas_worker_info(l, worker, &d));
    CHECK(!strcmp(d.running, function));
}

/* A worker answers, and is another process than before. */
static void is_new(rfaas_lease *l, int worker, int before) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    uint64_t in = 7, out = 0;
    o.worker = worker;
    OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, NULL, &o));
    CHECK(out == in && pid_of(l, worker) != before);
}

static void late(rfaas_lease *l) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_function sleep_ns = find(l, "sleep_ns"), echo = find(l, "echo");
    uint64_t out = 0, in = 3;
    o.worker = 1;
    o.timeout_ns = 50000000;
    int before = pid_of(l, 1);
    FAILS(rfaas_invoke(l, sleep_ns, &forever, 8, &out, 8, NULL, &o), RFAAS_DEADLINE, "worker 1 still runs \"sleep_ns\"");
    FAILS(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &o), RFAAS_DEADLINE, "worker 1 still runs \"sleep_ns\", whose time limit passed ");
    o.timeout_ns = 0; /* gives up after the session's time-out */
    FAILS(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &o), RFAAS_DEADLINE, "worker 1 still runs \"sleep_ns\"");
    rfaas_request r;
    size_t at;
    OK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, &o, &r));
    FAILS(rfaas_waitany(1, &r, &at, NULL), RFAAS_DEADLINE, "worker 1 still runs \"sleep_ns\"");
    for (int i = 0; i < 10; i++) /* any worker is another one */
        OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL));
    OK(rfaas_worker_replace(l, 1));
    is_new(l, 1, before);

    /* Of a chain, the function that runs is named. */
    rfaas_function chain;
    before = pid_of(l, 1);
    OK(rfaas_lease_chain(l, echo, sleep_ns, &chain));
    o.timeout_ns = 50000000;
    OK(rfaas_iinvoke(l, chain, &forever, 8, &out, 8, &o, &r));
    until_runs(l, 1, "sleep_ns");
    FAILS(rfaas_wait(&r, NULL), RFAAS_DEADLINE, "wait echo, then sleep_ns on worker 1");
    CHECK(strstr(rfaas_last_error(), "worker 1 still runs \"sleep_ns\""));
    OK(rfaas_worker_replace(l, 1));
    is_new(l, 1, before);
}

static void replace(rfaas_lease *l) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_request r[3];
    uint64_t out[3];
    o.worker = 0;
    int before = pid_of(l, 0);
    for (int i = 0; i < 3; i++)
        OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &forever, 8, &out[i], 8, &o, &r[i]));
    until_runs(l, 0, "sleep_ns");
    OK(rfaas_worker_replace(l, 0));
    is_new(l, 0, before);
    for (int i = 0; i < 3; i++) {
        FAILS(rfaas_wait(&r[i], NULL), RFAAS_WORKER_DIED, "rfaas_worker_replace");
        CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED);
    }
    before = pid_of(l, 0);
    OK(rfaas_worker_replace(l, 0)); /* an idle one */
    is_new(l, 0, before);
}

static void killed(rfaas_lease *l) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT, behind = RFAAS_CALL_OPTIONS_INIT;
    rfaas_request r, second;
    uint64_t out = 0;
    o.worker = behind.worker = 1;
    o.flags = RFAAS_CALL_KILL;
    FAILS(rfaas_invoke(l, 0, NULL, 0, &out, 8, NULL, &o), RFAAS_INVALID, "RFAAS_CALL_KILL without a time limit");
    o.timeout_ns = 50000000;
    int before = pid_of(l, 1);
    FAILS(rfaas_invoke(l, find(l, "sleep_ns"), &forever, 8, &out, 8, NULL, &o), RFAAS_DEADLINE, "the worker is killed and replaced");
    is_new(l, 1, before);
    before = pid_of(l, 1);
    OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &forever, 8, &out, 8, &o, &r));
    OK(rfaas_iinvoke(l, find(l, "echo"), &forever, 8, &out, 8, &behind, &second));
    FAILS(rfaas_wait(&r, NULL), RFAAS_DEADLINE, "the worker is killed and replaced");
    FAILS(rfaas_wait(&second, NULL), RFAAS_WORKER_DIED, "the time limit of \"sleep_ns\" passed");
    is_new(l, 1, before);
    o.flags = 4;
    FAILS(rfaas_invoke(l, 0, NULL, 0, &out, 8, NULL, &o), RFAAS_INVALID, "flags 0x4");
}

static void *caller(void *arg) {
    rfaas_lease *l = arg;
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    uint64_t out = 0;
    o.worker = 0;
    FAILS(rfaas_invoke(l, find(l, "sleep_ns"), &forever, 8, &out, 8, NULL, &o), RFAAS_WORKER_DIED, "rfaas_worker_replace");
    return NULL;
}

/* While another thread waits for the worker: the lease is shared from then on. */
static void with_threads(rfaas_lease *l) {
    pthread_t t;
    int before = pid_of(l, 0);
    CHECK(!pthread_create(&t, NULL, caller, l));
    until_runs(l, 0, "sleep_ns");
    OK(rfaas_worker_replace(l, 0));
    CHECK(!pthread_join(t, NULL));
    is_new(l, 0, before);
}

static void *waiter(void *arg) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    o.workers = 2;
    o.wait_ns = 60000000000;
    OK(rfaas_lease_open(session, &o, arg));
    return NULL;
}

static void waits(rfaas_lease *held) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = library;
    o.workers = 2;
    o.wait_ns = -1;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "wait_ns -1 is negative");
    o.wait_ns = 1000000;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_BUSY, "2 cores");
    pthread_t t;
    CHECK(!pthread_create(&t, NULL, waiter, &l));
    OK(rfaas_lease_release(held));
    CHECK(!pthread_join(t, NULL));
    CHECK(rfaas_lease_workers(l) == 2);
    OK(rfaas_lease_release(l));
}

static void refused(rfaas_lease *l) {
    FAILS(rfaas_worker_replace(l, 2), RFAAS_INVALID, "worker 2, the lease has workers 0..1");
    FAILS(rfaas_worker_replace(l, -1), RFAAS_INVALID, "worker -1, the lease has workers 0..1");
    FAILS(rfaas_worker_replace(NULL, 0), RFAAS_INVALID, "lease is NULL");
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *local = NULL;
    o.library = library;
    o.flags = RFAAS_LEASE_LOCAL;
    OK(rfaas_lease_open(session, &o, &local)); /* no core is free */
    FAILS(rfaas_worker_replace(local, 0), RFAAS_UNSUPPORTED, "its calls run in this process");
    OK(rfaas_lease_release(local));
    FAILS(rfaas_worker_replace(local, 0), RFAAS_INVALID, "released");
}

void everything(void) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    o.timeout_ns = 2000000000;
    o.cached_leases = -1;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(&o, &session));
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    late(l);
    replace(l);
    killed(l);
    refused(l);
    with_threads(l);
    late(l);
    replace(l);
    killed(l);
    waits(l);
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

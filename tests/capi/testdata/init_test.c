/* Init calls and codes of failed functions. Argument: stateful.so. With a resource manager, of leases on several executors. */
#include "check.h"

static rfaas_lease *opened(rfaas_lease_options o, uint32_t flags) {
    rfaas_lease *l = NULL;
    o.library = library;
    o.flags = flags;
    if (rfaas_lease_open(session, &o, &l))
        report(__LINE__, "lease");
    return l;
}

static int64_t inits(rfaas_lease *l, int worker) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    int64_t n = 0;
    o.worker = worker;
    OK(rfaas_invoke(l, find(l, "init_count"), NULL, 0, &n, sizeof n, NULL, &o));
    return n;
}

/* The code comes with every way to make a call, and goes with the next error. */
static void codes(rfaas_lease *l) {
    rfaas_function f = find(l, "init_fails");
    rfaas_request r[2];
    char out[64];
    FAILS(rfaas_invoke(l, f, "gone", 4, out, sizeof out, NULL, NULL), RFAAS_FUNCTION_FAILED, "no matrix of the name gone");
    CHECK(rfaas_function_code() == -42);
    FAILS(rfaas_invoke(NULL, f, "gone", 4, out, sizeof out, NULL, NULL), RFAAS_INVALID, "NULL");
    CHECK(rfaas_function_code() == 0);
    OK(rfaas_iinvoke(l, f, "waited", 6, out, sizeof out, NULL, &r[0]));
    FAILS(rfaas_wait(&r[0], NULL), RFAAS_FUNCTION_FAILED, "no matrix of the name waited");
    CHECK(rfaas_function_code() == -42);
    OK(rfaas_iinvoke(l, find(l, "init_count"), NULL, 0, out, sizeof out, NULL, &r[0]));
    OK(rfaas_iinvoke(l, f, "all", 3, out + 32, 32, NULL, &r[1]));
    FAILS(rfaas_waitall(2, r, NULL, NULL), RFAAS_FUNCTION_FAILED, "no matrix of the name all");
    CHECK(rfaas_function_code() == -42);
    FAILS(rfaas_map(l, f, "mapped", 6, out, 8, 1, NULL), RFAAS_FUNCTION_FAILED, "no matrix of the name mapped");
    CHECK(rfaas_function_code() == -42);
    /* A text of the greatest length leaves room for the code. */
    char name[1000];
    memset(name, 'x', sizeof name);
    FAILS(rfaas_invoke(l, f, name, sizeof name, out, sizeof out, NULL, NULL), RFAAS_FUNCTION_FAILED, "no matrix of the name xxx");
    CHECK(rfaas_function_code() == -42);
}

static void *call_often(void *arg) {
    for (int i = 0; i < 50; i++) {
        CHECK(inits(arg, i % 2) == 1);
        if (i == 25)
            codes(arg);
    }
    return NULL;
}

/* Workers that die are replaced by workers that have executed the init call, also under several threads. */
static void threads(rfaas_lease *l) {
    pthread_t t[3];
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    for (int i = 0; i < 3; i++)
        pthread_create(&t[i], NULL, call_often, l);
    for (int i = 0; i < 3; i++)
        pthread_join(t[i], NULL);
    for (o.worker = 0; o.worker < 2; o.worker++) {
        CHECK(rfaas_invoke(l, find(l, "die"), NULL, 0, NULL, 0, NULL, &o) == RFAAS_WORKER_DIED);
        CHECK(inits(l, o.worker) == 1);
    }
}

static rfaas_lease_options with_rows(void) {
    static const uint32_t side = 4;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    o.workers = 2;
    o.init_function = "make_rows";
    o.init_payload = &side;
    o.init_size = sizeof side;
    return o;
}

/* With no core left, this process executes the init call. */
static void here(void) {
    rfaas_lease_options o = with_rows();
    rfaas_lease *l = opened(o, RFAAS_LEASE_LOCAL), *none = NULL;
    CHECK(inits(l, 0) == 1 && inits(l, 1) == 1);
    codes(l);
    o.init_function = "init_fails";
    o.flags = RFAAS_LEASE_LOCAL;
    FAILS(rfaas_lease_open(session, &o, &none), RFAAS_FUNCTION_FAILED, "init call init_fails in this process failed: no matrix of the name");
    CHECK(rfaas_function_code() == -42 && !none && rfaas_started() == RFAAS_NOT_STARTED);
    OK(rfaas_lease_release(l));
}

static void refused(void) {
    rfaas_lease_options o = with_rows();
    rfaas_lease *none = NULL;
    uint32_t workers = o.workers;
    o.workers = 1; /* of more, any can be the first that fails */
    o.init_function = "init_fails";
    FAILS(rfaas_lease_open(session, &o, &none), RFAAS_FUNCTION_FAILED, "init call init_fails on worker 0 failed: no matrix of the name");
    CHECK(rfaas_function_code() == -42 && !none && rfaas_started() == RFAAS_NOT_STARTED);
    o.workers = workers;
    o.init_size = 3;
    o.init_function = "make_rows";
    FAILS(rfaas_lease_open(session, &o, &none), RFAAS_FUNCTION_FAILED, "3 bytes of arguments, want 4");
    CHECK(rfaas_function_code() == 7);
    o.init_payload = NULL;
    FAILS(rfaas_lease_open(session, &o, &none), RFAAS_INVALID, "init_payload is NULL with init_size 3");
    o.init_function = "";
    FAILS(rfaas_lease_open(session, &o, &none), RFAAS_INVALID, "init_size is 3 without init_function");
}

static void across(void) {
    rfaas_lease_options o = with_rows();
    rfaas_lease *all[2];
    size_t n = 0;
    OK(rfaas_lease_open_across(session, &o, 2, all, &n));
    CHECK(n == 2);
    for (size_t i = 0; i < n; i++) {
        CHECK(inits(all[i], 0) == 1);
        OK(rfaas_lease_release(all[i]));
    }
    o.init_function = "init_crashes";
    o.wait_ns = 20000000000; /* until the executors report the cores of the released leases as free */
    FAILS(rfaas_lease_open_across(session, &o, 2, all, &n), RFAAS_WORKER_DIED, "init call init_crashes on worker 0");
}

void everything(void) {
    const char *manager = getenv("RFAAS_MANAGER");
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (manager && *manager) {
        across();
    } else {
        rfaas_lease *l = opened(with_rows(), 0);
        CHECK(inits(l, 0) == 1 && inits(l, 1) == 1);
        codes(l);
        threads(l);
        here();
        OK(rfaas_lease_release(l));
        refused();
    }
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

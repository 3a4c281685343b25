/* Renewal and the events of a lease through rfaas.h. */
#include "check.h"

static void renewal(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_event e = {.struct_size = sizeof e};
    rfaas_lease *l = NULL;
    o.library = library;
    o.call_limit_ns = -1;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "call_limit_ns -1");
    o.call_limit_ns = 0;
    o.flags = 128; /* not a flag */
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "flags 0x80");
    o.flags = 0;
    o.duration_ns = 2000000000;
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_function f = find(l, "empty");
    FAILS(rfaas_lease_renew(l, -1), RFAAS_INVALID, "duration_ns -1");
    FAILS(rfaas_lease_renew(l, INT64_MAX), RFAAS_INVALID, "duration_ms");
    FAILS(rfaas_lease_event(l, NULL), RFAAS_INVALID, "event is NULL");
    OK(rfaas_lease_renew(l, 3000000000));
    double start = now();
    do { /* until it ends by itself */
        usleep(1000);
        OK(rfaas_lease_event(l, &e));
    } while (e.kind == RFAAS_EVENT_NONE && now() - start < 10);
    CHECK(e.kind == RFAAS_EVENT_EXPIRING && e.left_ns <= 1000000000);
    OK(rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL));
    do {
        usleep(1000);
        OK(rfaas_lease_event(l, &e));
    } while (e.kind == RFAAS_EVENT_NONE && now() - start < 10);
    CHECK(e.kind == RFAAS_EVENT_ENDED && strncmp(e.text, "expired", 7) == 0 && now() - start < 8);
    FAILS(rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL), RFAAS_LEASE_ENDED, "expired");
    CHECK(rfaas_started() == RFAAS_NOT_STARTED);
    FAILS(rfaas_lease_renew(l, 0), RFAAS_LEASE_ENDED, "");
    OK(rfaas_lease_release(l));
    o.flags = RFAAS_LEASE_RENEW; /* is renewed */
    OK(rfaas_lease_open(session, &o, &l));
    for (start = now(); now() - start < 3;)
        OK(rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL));
    do /* one that is renewed late is warned of it */
        OK(rfaas_lease_event(l, &e));
    while (e.kind == RFAAS_EVENT_EXPIRING);
    CHECK(e.kind == RFAAS_EVENT_NONE);
    OK(rfaas_lease_release(l));
    FAILS(rfaas_lease_event(l, &e), RFAAS_INVALID, "released");
}

static void death(void) {
    rfaas_event e = {.struct_size = sizeof e};
    rfaas_lease *l = lease(1, 1, RFAAS_WAIT_ADAPTIVE);
    OK(rfaas_lease_event(l, &e));
    CHECK(e.kind == RFAAS_EVENT_NONE);
    e.struct_size = 4;
    FAILS(rfaas_lease_event(l, &e), RFAAS_INVALID, "struct_size is 4");
    e.struct_size = sizeof e;
    CHECK(rfaas_invoke(l, find(l, "crash"), NULL, 0, NULL, 0, NULL, NULL) == RFAAS_WORKER_DIED);
    OK(rfaas_lease_event(l, &e));
    CHECK(e.kind == RFAAS_EVENT_WORKER_DIED && e.worker == 0 && e.lost == 0 && e.text[0]);
    OK(rfaas_lease_release(l));
}

/* A worker that lives and will never answer, of which somebody waits without an end, or all slots are given up; beside one that
 * runs a long function. */
static void silence(const char *deaths) {
    uint64_t ms = 600000;
    rfaas_worker_details d = {.struct_size = sizeof d}, was = {.struct_size = sizeof was};
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_call_options at = RFAAS_CALL_OPTIONS_INIT, longest = RFAAS_CALL_OPTIONS_INIT;
    rfaas_event e = {.struct_size = sizeof e};
    rfaas_lease *l = NULL;
    rfaas_request r = RFAAS_REQUEST_NULL, sleeping = RFAAS_REQUEST_NULL;
    o.library = deaths;
    o.workers = 2;
    o.depth = 2;
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_function falls_silent = find(l, "falls_silent"), echo = find(l, "echo");
    char out[8] = "";
    size_t size = 0;
    at.worker = 0;
    longest.worker = 1;
    OK(rfaas_worker_info(l, 1, &was));
    OK(rfaas_iinvoke(l, find(l, "sleeps"), &ms, sizeof ms, out, sizeof out, &longest, &sleeping));

    FAILS(rfaas_invoke(l, falls_silent, NULL, 0, out, sizeof out, NULL, &at), RFAAS_WORKER_DIED, "lives and runs nothing");
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED);
    OK(rfaas_lease_event(l, &e));
    CHECK(e.kind == RFAAS_EVENT_WORKER_DIED && e.worker == 0);
    OK(rfaas_invoke(l, echo, "again", 6, out, sizeof out, &size, &at));
    CHECK(size == 6 && strcmp(out, "again") == 0);

    OK(rfaas_iinvoke(l, falls_silent, NULL, 0, out, sizeof out, &at, &r));
    OK(rfaas_cancel(&r));
    OK(rfaas_iinvoke(l, echo, NULL, 0, out, sizeof out, &at, &r));
    OK(rfaas_cancel(&r));
    double start = now();
    int status;
    do {
        usleep(1000);
        status = rfaas_iinvoke(l, echo, "anew", 5, out, sizeof out, &at, &r);
    } while (status == RFAAS_BUSY && now() - start < 30);
    CHECK(status == RFAAS_OK && now() - start > 1);
    OK(rfaas_wait(&r, &size));
    CHECK(size == 5 && strcmp(out, "anew") == 0);
    printf("all slots given up: works again after %.1f s\n", now() - start);
    OK(rfaas_worker_info(l, 1, &d));
    CHECK(d.pid == was.pid && strcmp(d.running, "sleeps") == 0);
    OK(rfaas_cancel(&sleeping));
    OK(rfaas_lease_release(l));
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    death();
    const char *deaths = getenv("TEST_DEATHS"); /* where the two machines of a test share no such file */
    if (deaths)
        silence(deaths);
    renewal();
    OK(rfaas_finalize());
}

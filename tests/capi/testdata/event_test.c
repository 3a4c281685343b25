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
    OK(rfaas_lease_renew(l, 3000000000));
    double start = now();
    do { /* until it ends by itself */
        usleep(1000);
        OK(rfaas_lease_event(l, &e));
    } while (e.kind == RFAAS_EVENT_NONE && now() - start < 60);
    CHECK(e.kind == RFAAS_EVENT_EXPIRING && e.left_ns <= 1000000000);
    int status;
    do /* calls succeed until the lease ends, which may be at once if this process was late to see the event */
        status = rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL);
    while (status == RFAAS_OK && now() - start < 60);
    CHECK(status == RFAAS_LEASE_ENDED);
    do {
        usleep(1000);
        OK(rfaas_lease_event(l, &e));
    } while (e.kind == RFAAS_EVENT_NONE && now() - start < 60);
    CHECK(e.kind == RFAAS_EVENT_ENDED && strncmp(e.text, "expired", 7) == 0);
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

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    death();
    renewal();
    OK(rfaas_finalize());
}

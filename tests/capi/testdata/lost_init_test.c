/* The executor is killed during the init call of a lease with RFAAS_LEASE_LOCAL. The second argument is its process id. */
#include <signal.h>
#define CHECK_ARGUMENT executor
static const char *executor;
#include "check.h"

/* Kills the executor when it has granted the lease. */
static void *kill_when_granted(void *arg) {
    rfaas_session *s = NULL;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_place place;
    double start = now();
    (void)arg;
    o.library = library;
    OK(rfaas_session_open(NULL, &s));
    while (rfaas_places(s, &o, 1, &place) == RFAAS_OK && now() - start < 30)
        usleep(1000);
    CHECK(now() - start < 30);
    kill((pid_t)atoi(executor), SIGKILL);
    OK(rfaas_session_close(s));
    return NULL;
}

void everything(void) {
    rfaas_lease *l = NULL;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    uint64_t sleep = 2000000000ull;
    pthread_t t;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    o.library = library;
    o.workers = 2;
    o.flags = RFAAS_LEASE_LOCAL;
    o.init_function = "sleep_ns";
    o.init_payload = &sleep;
    o.init_size = sizeof sleep;
    pthread_create(&t, NULL, kill_when_granted, NULL);
    OK(rfaas_lease_open(session, &o, &l)); /* the init call runs again, in this process */
    pthread_join(t, NULL);
    if (l)
        OK(rfaas_invoke(l, find(l, "empty"), NULL, 0, NULL, 0, NULL, NULL));
    OK(rfaas_lease_release(l));
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

/* A lease whose executor is killed, seen through rfaas.h. The second argument is the executor's process id. */
#include <signal.h>
#define CHECK_ARGUMENT executor
static const char *executor;
#include "check.h"

void everything(void) {
    rfaas_event e = {.struct_size = sizeof e};
    rfaas_request r;
    char in[8] = {0}, out[8];
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE);
    rfaas_function f = find(l, "sleep_ns"), empty = find(l, "empty");
    uint64_t minute = 60000000000ull;
    OK(rfaas_iinvoke(l, f, &minute, sizeof minute, out, sizeof out, NULL, &r));
    kill((pid_t)atoi(executor), SIGKILL);

    /* The call that was running may have been executed, and its connection is lost. */
    int status = rfaas_wait(&r, NULL);
    CHECK(RFAAS_CLASS(status) == RFAAS_CLASS_CONNECTION && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    double start = now();
    do { /* the agent tells of the end */
        usleep(1000);
        OK(rfaas_lease_event(l, &e));
    } while (e.kind != RFAAS_EVENT_ENDED && now() - start < 30);
    CHECK(e.kind == RFAAS_EVENT_ENDED && strncmp(e.text, "lost: ", 6) == 0);

    /* Nothing later was started, and a new lease is needed. */
    for (int i = 0; i < 2; i++) {
        FAILS(rfaas_invoke(l, empty, NULL, 0, NULL, 0, NULL, NULL), RFAAS_LEASE_ENDED, "lost: ");
        CHECK(rfaas_started() == RFAAS_NOT_STARTED);
        FAILS(rfaas_iinvoke(l, empty, NULL, 0, NULL, 0, NULL, &r), RFAAS_LEASE_ENDED, "lost: ");
        CHECK(rfaas_started() == RFAAS_NOT_STARTED);
        FAILS(rfaas_map(l, empty, in, 1, out, 1, 4, NULL), RFAAS_LEASE_ENDED, "lost: ");
        FAILS(rfaas_lease_renew(l, 0), RFAAS_LEASE_ENDED, "lost: ");
        FAILS(rfaas_lease_status(l), RFAAS_LEASE_ENDED, "lost: ");
    }
    OK(rfaas_lease_release(l));
    OK(rfaas_finalize());
}

/* Ends without rfaas_finalize, with a lease held, calls in flight, connections cached and a thread inside the library. Arguments:
 * echo.so, and how: "return" from main, "exit" from a function, "other" for exit() by another thread. Exit status 0. */
#define CHECK_ARGUMENT how
static const char *how;
#include "check.h"

static void *inside(void *arg) {
    uint64_t ns = 600000000000ull, out;
    rfaas_lease *l = arg;
    rfaas_invoke(l, find(l, "sleep_ns"), &ns, 8, &out, 8, NULL, NULL);
    return NULL;
}

static void *ends(void *arg) {
    (void)arg;
    exit(failures ? 1 : 0);
}

void everything(void) {
    static uint64_t ns = 600000000000ull, out[2];
    rfaas_request r[2];
    rfaas_worker_details d = {.struct_size = sizeof d};
    pthread_t t;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    /* The cores of the one before come back when its connection has ended and its workers are reaped. */
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *first = NULL;
    o.library = library;
    o.workers = 2;
    int status;
    for (double end = now() + 30; (status = rfaas_lease_open(session, &o, &first)) == RFAAS_BUSY && now() < end;)
        usleep(10000);
    OK(status);
    OK(rfaas_lease_release(first)); /* cached */
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE), *other = lease(1, 2, RFAAS_WAIT_WARM);
    for (int i = 0; i < 2; i++)
        OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &ns, 8, &out[i], 8, NULL, &r[i]));
    pthread_create(&t, NULL, inside, other);
    for (double end = now() + 10; strcmp(d.running, "sleep_ns") && now() < end;)
        OK(rfaas_worker_info(other, 0, &d));
    CHECK(!strcmp(d.running, "sleep_ns"));
    if (!strcmp(how, "exit"))
        exit(failures ? 1 : 0);
    if (!strcmp(how, "other")) {
        pthread_t u;
        pthread_create(&u, NULL, ends, NULL);
        pthread_join(u, NULL);
    }
}

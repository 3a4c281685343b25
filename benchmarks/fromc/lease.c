#include "fromc.h"

#include <errno.h>
#include <string.h>
#include <time.h>

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

int fromc_session(const char *executor, const char *provider, const char *secret, rfaas_session **s) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    o.executor = executor;
    o.provider = provider;
    o.secret_file = secret;
    int status = rfaas_init(NULL);
    if (status)
        return status;
    if ((status = rfaas_session_open(&o, s)))
        rfaas_finalize();
    return status;
}

void fromc_close(rfaas_session *s) {
    rfaas_session_close(s);
    rfaas_finalize();
}

static void rest(int64_t ns) {
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

int fromc_lease(rfaas_session *s, const fromc_terms *terms, fromc_times *times, rfaas_lease **lease) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    uint8_t out[64];
    rfaas_function f;
    o.library = terms->library;
    o.workers = terms->workers;
    o.flags = terms->flags;
    o.wait_mode = (int32_t)terms->wait_mode;
    o.bulk = terms->bulk;
    rest(terms->rest_ns);
    int64_t began = now_ns();
    int status = rfaas_lease_open(s, &o, lease);
    if (status)
        return status;
    times->leased = now_ns() - began;
    status = rfaas_lease_function(*lease, terms->function, &f);
    if (!status)
        status = rfaas_invoke(*lease, f, NULL, 0, out, sizeof out, NULL, NULL);
    times->total = now_ns() - began;
    times->start.struct_size = sizeof times->start;
    if (!status)
        status = rfaas_worker_origin(*lease, 0, &times->start);
    if (status) {
        rfaas_lease_release(*lease);
        *lease = NULL;
    }
    return status;
}

int fromc_release(rfaas_lease *lease, int64_t *ns) {
    int64_t began = now_ns();
    int status = rfaas_lease_release(lease);
    *ns = now_ns() - began;
    return status;
}

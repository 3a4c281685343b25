/* A client process of the test of a rolling upgrade. It holds leases and calls all of them in turn, until its standard input ends.
 *
 *     holder LIBRARY LEASES TENANT
 *
 * Lines on standard output:
 *
 *     ready                all leases are open
 *     round N              N rounds over all leases have succeeded; a line of its own for each round
 *     failed TEXT          an operation or a call has failed, or a result is wrong; the program continues
 *     end CALLS            the number of calls, after the release of all leases
 */
#include <inttypes.h>
#include <poll.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t calls;

static void failed(const char *what, int lease) { printf("failed %s, lease %d, call %" PRIu64 ": %s\n", what, lease, calls, rfaas_last_error()); }

static int asked_to_end(void) {
    struct pollfd in = {.fd = 0, .events = POLLIN};
    return poll(&in, 1, 0) != 0;
}

/* Makes one call without RFAAS_IDEMPOTENT, so the library does not repeat it. The sizes are on both sides of the limits of the mailbox of
 * either version (256 bytes and 4 KiB). */
static void call(rfaas_lease *lease, rfaas_function echo, int i) {
    static const size_t sizes[] = {32, 256, 320, 4096, 4608};
    static uint64_t in[576], out[576];
    size_t size = sizes[++calls % 5], n = 0;
    for (size_t k = 0; k < size / 8; k++)
        in[k] = calls * 576 + k;
    if (rfaas_invoke(lease, echo, in, size, out, sizeof out, &n, NULL))
        failed("call", i);
    else if (n != size || memcmp(in, out, size) != 0)
        failed("wrong result", i);
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int count = atoi(argv[2]);
    rfaas_session *session;
    rfaas_lease **leases = calloc((size_t)count, sizeof *leases);
    rfaas_function *echo = calloc((size_t)count, sizeof *echo);
    if (leases == NULL || echo == NULL)
        return 1;
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    so.cached_leases = -1;
    so.tenant = argv[3];
    if (rfaas_init(NULL) || rfaas_session_open(&so, &session)) {
        failed("session", -1);
        return 1;
    }
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    lo.library = argv[1];
    lo.memory = 16 << 20;
    lo.bulk = RFAAS_NO_BULK;
    lo.wait_mode = RFAAS_WAIT_WARM;
    lo.duration_ns = (int64_t)600 * 1000000000;
    for (int i = 0; i < count; i++) {
        if (rfaas_lease_open(session, &lo, &leases[i]) || rfaas_lease_function(leases[i], "echo", &echo[i])) {
            failed("open", i);
            return 1;
        }
        call(leases[i], echo[i], i);
    }
    printf("ready\n");
    for (uint64_t round = 1; !asked_to_end(); round++) {
        for (int i = 0; i < count; i++)
            call(leases[i], echo[i], i);
        printf("round %" PRIu64 "\n", round);
    }
    for (int i = 0; i < count; i++)
        if (rfaas_lease_release(leases[i]))
            failed("release", i);
    if (rfaas_finalize())
        failed("finalize", -1);
    printf("end %" PRIu64 "\n", calls);
    return 0;
}

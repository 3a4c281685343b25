/* Arguments and resources at their limits: times that do not fit, and no descriptors. */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>

enum { FILES = 256 };

/* The longest time there is means "no limit", and not a time in the past. */
static void longest_time(void) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
    rfaas_map_options m = RFAAS_MAP_OPTIONS_INIT;
    uint64_t in = 5, out = 0;
    o.timeout_ns = c.timeout_ns = m.timeout_ns = INT64_MAX;
    OK(rfaas_session_open(&o, &session));
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo");
    OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &c));
    OK(rfaas_map(l, echo, &in, 8, &out, 8, 1, &m));
    CHECK(out == in);
    OK(rfaas_lease_release(l));
    OK(rfaas_session_close(session));
}

/* Takes descriptors until only this many are free. Returns how many it took. */
static int take_files(int files[FILES], int leave) {
    int n = 0;
    while (n < FILES && (files[n] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        n++;
    CHECK(n < FILES && errno == EMFILE);
    for (; leave && n; leave--)
        close(files[--n]);
    return n;
}

/* Opens leases while ever more descriptors are free. Wherever the program or the library finds none, an error says so soon. */
static void without_descriptors(void) {
    struct rlimit old, few;
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    o.cached_leases = -1;
    OK(rfaas_session_open(&o, &session));
    OK(rfaas_lease_release(lease(1, 2, RFAAS_WAIT_ADAPTIVE)));
    CHECK(!getrlimit(RLIMIT_NOFILE, &old));
    few = old;
    few.rlim_cur = FILES;
    CHECK(!setrlimit(RLIMIT_NOFILE, &few));
    int failed = 0, opened = 0;
    double longest = 0;
    for (int leave = 0; leave < 40 && opened < 2; leave++) {
        int files[FILES], n = take_files(files, leave);
        rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
        rfaas_lease *l = NULL;
        lo.library = library;
        double start = now();
        int status = rfaas_lease_open(session, &lo, &l);
        double took = now() - start;
        longest = took > longest ? took : longest;
        if (took > 5) {
            fprintf(stderr, "%d descriptors free: %.1f s\n", leave, took);
            report(__LINE__, "an acquisition that found no descriptor went on");
        }
        const char *why = rfaas_last_error();
        if (status && !strstr(why, "descriptor") && !strstr(why, "open files")) {
            fprintf(stderr, "%d descriptors free: %d\n", leave, status);
            report(__LINE__, "the error does not name the reason");
        }
        if (status)
            failed++;
        else
            opened++;
        while (n)
            close(files[--n]);
        if (!status)
            OK(rfaas_lease_release(l));
    }
    printf("without descriptors: %d failed, the longest took %.1f s\n", failed, longest);
    CHECK(failed && opened);
    CHECK(!setrlimit(RLIMIT_NOFILE, &old));
    OK(rfaas_session_close(session));
}

void everything(void) {
    OK(rfaas_init(NULL));
    longest_time();
    without_descriptors();
    OK(rfaas_finalize());
}

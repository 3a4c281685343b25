/* Prints the microseconds from its own start to the result of its first call, and those of rfaas_init and rfaas_session_open: with one argument, the library of functions, it executes itself
 * with the time as a second one. Ends with status 1 and a text if something fails. */
#include <inttypes.h>
#include <rfaas.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int failed(const char *what) {
    printf("%s: %s\n", what, rfaas_last_error());
    return 1;
}

int main(int argc, char **argv) {
    char start[32];
    if (argc == 2) {
        snprintf(start, sizeof start, "%" PRId64, now());
        execl("/proc/self/exe", argv[0], argv[1], start, (char *)NULL);
        perror("exec");
        return 1;
    }
    rfaas_session *session;
    rfaas_lease *lease;
    rfaas_function echo;
    rfaas_lease_options options = RFAAS_LEASE_OPTIONS_INIT;
    options.library = argv[1];
    uint64_t in = 7, out = 0;
    size_t n = 0;
    int64_t contact = now();
    if (rfaas_init(NULL) || rfaas_session_open(NULL, &session))
        return failed("session");
    contact = now() - contact;
    if (rfaas_lease_open(session, &options, &lease) || rfaas_lease_function(lease, "echo", &echo))
        return failed("lease");
    if (rfaas_invoke(lease, echo, &in, sizeof in, &out, sizeof out, &n, NULL) || n != sizeof out || out != in)
        return failed("call");
    printf("%" PRId64 " %" PRId64 "\n", (now() - (int64_t)strtoll(argv[2], NULL, 10)) / 1000, contact / 1000);
    return rfaas_finalize() ? failed("finalize") : 0;
}

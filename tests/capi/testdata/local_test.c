/* Functions in the calling process (RFAAS_LEASE_LOCAL). Second argument "busy": an executor whose cores are all taken.
 * "lost": there is no executor at first; then one is started, killed, and another one started, whenever this program says
 * where it is (local_test.go). Exit status 0: all good. */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <stdbool.h>

static rfaas_lease *local(const char *path, uint32_t flags) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = path;
    o.workers = 2;
    o.depth = 4;
    o.flags = RFAAS_LEASE_LOCAL | flags;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

static const char *provider(rfaas_lease *l) {
    static rfaas_lease_details d;
    d.struct_size = sizeof d;
    OK(rfaas_lease_info(l, &d));
    return d.provider;
}

static uint64_t ran_here(rfaas_lease *l) {
    rfaas_statistics s = {.struct_size = sizeof s};
    OK(rfaas_lease_statistics(l, &s));
    return s.local;
}

static void busy(void) {
    rfaas_lease *all = lease(2, 1, RFAAS_WAIT_WARM), *l = local(library, 0);
    CHECK(strcmp(provider(all), "local") && !strcmp(provider(l), "local"));
    rfaas_function f, echo = find(l, "echo"), count = find(l, "count"), fail = find(l, "fail");
    CHECK(echo == find(l, "echo"));
    FAILS(rfaas_lease_function(l, "ecko", &f), RFAAS_NO_FUNCTION, "ecko");
    FAILS(rfaas_lease_function(l, "printf", &f), RFAAS_NO_FUNCTION, "printf"); /* of another library */
    uint64_t in = 7, out = 0;
    size_t n = 0;
    OK(rfaas_invoke(l, echo, &in, 8, &out, 8, &n, NULL));
    CHECK(n == 8 && out == 7);
    for (uint64_t i = 1; i <= 3; i++) {
        OK(rfaas_invoke(l, count, NULL, 0, &out, 8, NULL, NULL));
        CHECK(out == i);
    }
    CHECK(rfaas_invoke(l, echo, &in, 8, &out, 4, &n, NULL) == RFAAS_RESULT_TOO_LARGE && n == 8);
    FAILS(rfaas_invoke(l, 99, &in, 8, &out, 8, &n, NULL), RFAAS_NO_FUNCTION, "99");
    FAILS(rfaas_invoke(l, fail, "no", 2, &out, 8, &n, NULL), RFAAS_FUNCTION_FAILED, "fail in this process failed: no");
    static char large[(2 << 20) + 1], back[2 << 20];
    memset(large, 3, sizeof large);
    OK(rfaas_invoke(l, echo, large, sizeof back, back, sizeof back, &n, NULL));
    CHECK(n == sizeof back && !memcmp(large, back, n));
    FAILS(rfaas_invoke(l, echo, large, sizeof large, back, sizeof back, &n, NULL), RFAAS_TOO_LARGE, "2097153");

    rfaas_request r[8], extra;
    uint64_t outs[8];
    for (uint64_t i = 0; i < 8; i++)
        OK(rfaas_iinvoke(l, echo, &i, 8, &outs[i], i == 5 ? 4 : 8, NULL, &r[i]));
    CHECK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, NULL, &extra) == RFAAS_BUSY);
    CHECK(rfaas_map(l, echo, &in, 8, &out, 8, 1, NULL) == RFAAS_BUSY);
    size_t at;
    int done;
    OK(rfaas_waitany(8, r, &at, &n));
    CHECK(at < 5 && n == 8);
    OK(rfaas_test(&r[7], &done, &n));
    CHECK(done && n == 8 && outs[7] == 7);
    OK(rfaas_cancel(&r[6]));
    CHECK(rfaas_waitall(8, r, NULL, NULL) == RFAAS_RESULT_TOO_LARGE && strstr(rfaas_last_error(), "in this process"));
    CHECK(rfaas_iinvoke(l, echo, large, sizeof large, back, 8, NULL, &extra) == RFAAS_TOO_LARGE);

    static uint64_t items[10000], results[10000];
    for (uint64_t i = 0; i < 10000; i++)
        items[i] = i * i;
    OK(rfaas_map(l, echo, items, 8, results, 8, 10000, NULL));
    CHECK(!memcmp(items, results, sizeof items) && ran_here(l) > 20);

    void *b = NULL;
    OK(rfaas_alloc(l, 100000, &b));
    OK(rfaas_register(l, large, sizeof large));
    OK(rfaas_invoke(l, echo, b, 100000, back, sizeof back, &n, NULL));
    CHECK(n == 100000 && !back[99999]);
    OK(rfaas_free(l, b));
    OK(rfaas_unregister(l, large));
    rfaas_worker_details w = {.struct_size = sizeof w};
    FAILS(rfaas_worker_info(l, 0, &w), RFAAS_UNSUPPORTED, "in this process");
    OK(rfaas_lease_renew(l, 0));
    OK(rfaas_lease_release(l));
    OK(rfaas_lease_release(all));

    /* There is room again, and what cannot be opened here is refused even so. */
    l = local(library, 0);
    CHECK(strcmp(provider(l), "local"));
    OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, &n, NULL));
    CHECK(ran_here(l) == 0);
    OK(rfaas_lease_release(l));
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = "/etc/passwd";
    o.flags = RFAAS_LEASE_LOCAL;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_BAD_LIBRARY, "/etc/passwd");
    o.library = NULL;
    o.library_data = "no library";
    o.library_size = 10;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_BAD_LIBRARY, "loaded into this process");
    o.flags = 0x80;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "flags 0x80");
}

/* Calls until the calls run here, or elsewhere again; every call ends well. */
static void until(rfaas_lease *l, rfaas_function echo, bool here) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.repeats = 2;
    for (double end = now() + 20; now() < end;) {
        uint64_t before = ran_here(l), v = before + 5, out = 0, result = 0;
        rfaas_request r;
        OK(rfaas_iinvoke(l, echo, &v, 8, &result, 8, &o, &r));
        OK(rfaas_invoke(l, echo, &v, 8, &out, 8, NULL, &o));
        OK(rfaas_wait(&r, NULL));
        CHECK(out == v && result == v);
        if ((ran_here(l) - before == 2) == here) {
            printf("%s\n", here ? "here" : provider(l));
            fflush(stdout);
            return;
        }
    }
    report(__LINE__, "not within 20 s");
    exit(1);
}

static void lost(void) {
    rfaas_lease *l = local(library, 0);
    until(l, find(l, "echo"), true);
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = library;
    rfaas_lease *remote = NULL;
    for (double end = now() + 20; rfaas_lease_open(session, &o, &remote) && now() < end;)
        usleep(10000);
    OK(rfaas_lease_release(l));
    OK(rfaas_lease_release(remote));
    l = local(library, RFAAS_LEASE_FAILOVER);
    rfaas_function echo = find(l, "echo");
    until(l, echo, false);
    until(l, echo, true);
    until(l, echo, false);
    OK(rfaas_lease_release(l));
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (!strcmp(what, "busy"))
        busy();
    else
        lost();
    OK(rfaas_finalize());
}

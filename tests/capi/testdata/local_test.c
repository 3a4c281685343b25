/* Functions in the calling process (RFAAS_LEASE_LOCAL). Second argument "busy": an executor whose cores are all taken.
 * "lost": nobody listens at first. Then a resource manager and an executor are started, the executor is killed, and another one is started,
 * whenever this program says where its calls run (local_test.go). Otherwise the session has no address or no agent, and the argument is a
 * part of the error. The first library is echo.so, TEST_LIBRARY is numbers.c. Exit status 0: all good. */
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
    o.bulk = 2 << 20;
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
    OK(rfaas_lease_chain(l, echo, echo, &f));
    OK(rfaas_invoke(l, f, &in, 8, &out, 8, &n, NULL));
    CHECK(n == 8 && out == 7);
    CHECK(rfaas_invoke(l, f, &in, 8, &out, 4, &n, NULL) == RFAAS_RESULT_TOO_LARGE && n == 8);
    OK(rfaas_lease_chain(l, echo, fail, &f));
    FAILS(rfaas_invoke(l, f, "no", 2, &out, 8, &n, NULL), RFAAS_FUNCTION_FAILED, "fail, the second function of a chain, in this process failed: no");
    OK(rfaas_lease_chain(l, fail, echo, &f));
    FAILS(rfaas_invoke(l, f, "no", 2, &out, 8, &n, NULL), RFAAS_FUNCTION_FAILED, "fail, the first function of a chain, in this process failed: no");
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

/* ---- functions whose order is not that of their names ---- */

static const char *const names[] = {"alpha", "entry", "mike", "set_up", "zulu"}; /* as executors number them */
static const uint64_t values[] = {1001, 1007, 1013, 0, 1026};

static void publish(void) {
    uint64_t seven = 7;
    OK(rfaas_table_put(session, "numbers", &(rfaas_piece){.base = &seven, .size = sizeof seven, .count = 1}, 1));
}

static rfaas_lease_options numbers(uint32_t flags) {
    static const uint64_t base = 1000;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    o.library = getenv("TEST_LIBRARY");
    o.flags = flags;
    o.init_function = "set_up";
    o.init_payload = &base;
    o.init_size = sizeof base;
    return o;
}

/* Calls all functions in every way, by the numbers that executors give them. Returns how many of the calls ran in this process. */
static uint64_t call_all(rfaas_lease *l) {
    uint64_t before = ran_here(l), here = 0;
    for (uint32_t f = 0; f < 5; f++) {
        uint64_t out[2] = {0}, result[2] = {0};
        rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
        rfaas_request r;
        o.repeats = 2;
        if (f == 3)
            continue;
        CHECK(find(l, names[f]) == f && !strcmp(rfaas_lease_function_name(l, f), names[f]));
        OK(rfaas_iinvoke(l, f, NULL, 0, result, sizeof result, &o, &r));
        OK(rfaas_invoke(l, f, NULL, 0, out, sizeof out, NULL, &o));
        OK(rfaas_wait(&r, NULL));
        CHECK(out[0] == values[f] && result[0] == values[f]);
        here += (out[1] == (uint64_t)getpid()) + (result[1] == (uint64_t)getpid());
    }
    CHECK(ran_here(l) - before == here);
    return here;
}

static void event(rfaas_lease *l, uint32_t kind, const char *word) {
    rfaas_event e = {.struct_size = sizeof e};
    do
        OK(rfaas_lease_event(l, &e));
    while (e.kind && e.kind != RFAAS_EVENT_LOCAL && e.kind != RFAAS_EVENT_MOVED);
    if (e.kind != kind || !strstr(e.text, word))
        report(__LINE__, e.text);
}

/* ---- executors come and go ---- */

/* Calls until all calls run here, or in a worker. Every call ends well. */
static void until(rfaas_lease *l, bool here) {
    for (double end = now() + 20; now() < end && !failures;)
        if (call_all(l) == (here ? 8 : 0)) {
            rfaas_lease_details d = {.struct_size = sizeof d};
            OK(rfaas_lease_info(l, &d));
            CHECK(!*d.local_reason == !here && d.functions == 5);
            event(l, here ? RFAAS_EVENT_LOCAL : RFAAS_EVENT_MOVED, here ? "" : d.executor);
            return;
        }
    report(__LINE__, "not within 20 s");
    exit(1);
}

static void say(const char *where) {
    printf("%s\n", where);
    fflush(stdout);
}

static void lost(void) {
    rfaas_lease_options o = numbers(0);
    rfaas_lease *moves, *once;
    CHECK(rfaas_lease_open(session, &o, &once) == RFAAS_CREDENTIAL); /* the first daemon makes the secret */
    publish();
    o.flags = RFAAS_LEASE_LOCAL;
    OK(rfaas_lease_open(session, &o, &once));
    o.flags |= RFAAS_LEASE_FAILOVER;
    OK(rfaas_lease_open(session, &o, &moves));
    until(once, true);
    until(moves, true);
    say("here");
    until(once, false);
    until(moves, false);
    say("there");
    int status = RFAAS_OK;
    uint64_t out[2];
    for (double end = now() + 20; !status && now() < end;)
        status = rfaas_invoke(once, 0, NULL, 0, out, sizeof out, NULL, NULL);
    CHECK(RFAAS_CLASS(status) == RFAAS_CLASS_LEASE || RFAAS_CLASS(status) == RFAAS_CLASS_CONNECTION);
    until(moves, true);
    say("here");
    until(moves, false);
    OK(rfaas_lease_release(moves));
    rfaas_lease_release(once);
}

/* ---- nothing runs ---- */

#define FAILS_SO(call) CHECK((call) == status && strstr(rfaas_last_error(), what))

static void alone(int status) {
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_lease_options o = numbers(0);
    rfaas_lease *l = NULL;
    rfaas_place place;
    size_t n = 0;
    FAILS_SO(rfaas_session_open(NULL, &session));
    so.flags = RFAAS_SESSION_LOCAL;
    so.provider = "pigeons";
    if (status == RFAAS_INVALID) /* the agent checks it */
        FAILS(rfaas_session_open(&so, &session), RFAAS_INVALID, "pigeons");
    so.provider = NULL;
    OK(rfaas_session_open(&so, &session));
    publish();
    FAILS_SO(rfaas_lease_open(session, &o, &l));
    FAILS_SO(rfaas_places(session, &o, 1, &place));
    FAILS_SO(rfaas_lease_open_across(session, &o, 1, &l, &n));
    o.flags = RFAAS_LEASE_LOCAL;
    o.workers = 3;
    OK(rfaas_lease_open_across(session, &o, 1, &l, &n));
    CHECK(n == 1 && rfaas_lease_workers(l) == 3 && call_all(l) == 8);
    OK(rfaas_lease_release(l));
    OK(rfaas_lease_open(session, &o, &l));
    CHECK(call_all(l) == 8 && call_all(l) == 8);
    rfaas_lease_details d = {.struct_size = sizeof d};
    OK(rfaas_lease_info(l, &d));
    CHECK(!strcmp(d.provider, "local") && strstr(d.local_reason, what));
    event(l, RFAAS_EVENT_LOCAL, what);
    event(l, RFAAS_EVENT_NONE, "");
    OK(rfaas_lease_release(l));
    OK(rfaas_table_drop(session, "numbers"));
    OK(rfaas_session_close(session));
}

void everything(void) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    OK(rfaas_init(NULL));
    o.flags = !strcmp(what, "lost") ? RFAAS_SESSION_LOCAL : 0;
    if (!strcmp(what, "busy") || !strcmp(what, "lost"))
        OK(rfaas_session_open(&o, &session));
    if (!strcmp(what, "busy"))
        busy();
    else if (!strcmp(what, "lost"))
        lost();
    else
        alone(strcmp(what, "no address") ? RFAAS_UNSUPPORTED : RFAAS_INVALID);
    OK(rfaas_finalize());
}

/* What programs do wrong with rfaas.h (badinput_test.go): a named error, never a crash. Arguments: echo.so, and what is done
 * wrong. Exit status 0: all good. */
#define CHECK_ARGUMENT mistake
static const char *mistake;
#include "check.h"

#include <sys/wait.h>

static int never(const rfaas_change *c, void *arg) {
    (void)c;
    (void)arg;
    return 0;
}

#define REFUSED(call, status, word) \
    (((call) == (status) && strstr(rfaas_last_error(), word)) ? (void)0 : report(__LINE__, #call))

/* Everything that takes a lease, a session or a request must say `status` and the word. */
static void all_refused(rfaas_session *s, rfaas_lease *l, rfaas_request pending, int status, const char *word, const char *request_word) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_session_options so = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_statistics st = {.struct_size = sizeof st};
    rfaas_lease_details d = {.struct_size = sizeof d};
    rfaas_worker_details w = {.struct_size = sizeof w};
    rfaas_event e = {.struct_size = sizeof e};
    rfaas_place place = {"127.0.0.1:1"};
    rfaas_change change[1];
    rfaas_lease *none = NULL, *leases[1];
    rfaas_session *no_session = NULL;
    rfaas_request r = pending, many[1] = {pending};
    rfaas_function f;
    static uint64_t in, out;
    size_t n = 0;
    int done = 0;
    o.library = library;
    if (s) {
        if (*word) /* the library is down: no new one either */
            REFUSED(rfaas_session_open(&so, &no_session), status, word);
        REFUSED(rfaas_lease_open(s, &o, &none), status, word);
        REFUSED(rfaas_lease_open_at(s, &o, &place, &none), status, word);
        REFUSED(rfaas_lease_open_across(s, &o, 1, leases, &n), status, word);
        REFUSED(rfaas_places(s, &o, 1, &place), status, word);
        REFUSED(rfaas_session_changes(s, change, 1, &n), status, word);
        REFUSED(rfaas_session_watch(s, never, NULL, 1), status, word);
        REFUSED(rfaas_session_close(s), status, word);
    }
    REFUSED(rfaas_invoke(l, 0, &in, 8, &out, 8, &n, NULL), status, word);
    REFUSED(rfaas_iinvoke(l, 0, &in, 8, &out, 8, NULL, &r), status, word);
    rfaas_piece piece = RFAAS_PIECE(&in, 8);
    REFUSED(rfaas_invokev(l, 0, &piece, 1, &piece, 1, &n, NULL), status, word);
    REFUSED(rfaas_iinvokev(l, 0, &piece, 1, &piece, 1, NULL, &r), status, word);
    CHECK(r == pending);
    REFUSED(rfaas_map(l, 0, &in, 8, &out, 8, 1, NULL), status, word);
    void *b = NULL;
    REFUSED(rfaas_alloc(l, 64, &b), status, word);
    REFUSED(rfaas_free(l, &in), status, word);
    REFUSED(rfaas_register(l, &in, 8), status, word);
    REFUSED(rfaas_unregister(l, &in), status, word);
    REFUSED(rfaas_lease_function(l, "echo", &f), status, word);
    REFUSED(rfaas_lease_workers(l), status, word);
    REFUSED(rfaas_lease_info(l, &d), status, word);
    REFUSED(rfaas_worker_info(l, 0, &w), status, word);
    REFUSED(rfaas_lease_renew(l, 0), status, word);
    REFUSED(rfaas_lease_event(l, &e), status, word);
    REFUSED(rfaas_lease_statistics(l, &st), status, word);
    REFUSED(rfaas_lease_release(l), status, word);
    CHECK(!none && !b && !no_session);
    if (!pending)
        return;
    REFUSED(rfaas_wait(&r, &n), status, request_word);
    REFUSED(rfaas_test(&r, &done, &n), status, request_word);
    REFUSED(rfaas_cancel(&r), status, request_word);
    REFUSED(rfaas_waitall(1, many, NULL, NULL), status, request_word);
    REFUSED(rfaas_waitany(1, many, &n, NULL), status, request_word);
    CHECK(r == pending && many[0] == pending && !done);
}

static rfaas_request start(rfaas_lease *l, uint64_t ns) {
    static uint64_t in, out;
    rfaas_request r = RFAAS_REQUEST_NULL;
    in = ns;
    OK(rfaas_iinvoke(l, find(l, "sleep_ns"), &in, 8, &out, 8, NULL, &r));
    return r;
}

static void nulls(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_session *s = NULL;
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE), *leases[1];
    rfaas_place place = {""};
    rfaas_change change[1];
    rfaas_request r = RFAAS_REQUEST_NULL;
    rfaas_function f = find(l, "echo");
    size_t n = 0;
    int done = 0;
    char c;
    void *b = NULL;
    all_refused(NULL, NULL, RFAAS_REQUEST_NULL, RFAAS_INVALID, "lease is NULL", "");
    CHECK(rfaas_strerror(12345) && rfaas_strerror(-12345) && rfaas_last_error());
    FAILS(rfaas_init(&c), RFAAS_INVALID, "NULL");
    FAILS(rfaas_session_open(NULL, NULL), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_session_close(NULL), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_session_changes(NULL, change, 1, &n), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_session_changes(session, NULL, 1, &n), RFAAS_INVALID, "changes is NULL");
    FAILS(rfaas_session_changes(session, change, 1, NULL), RFAAS_INVALID, "count is NULL");
    FAILS(rfaas_session_changes(session, change, 0, &n), RFAAS_INVALID, "capacity is 0");
    FAILS(rfaas_session_watch(NULL, never, NULL, 1), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_session_watch(session, NULL, NULL, 1), RFAAS_INVALID, "function is NULL");
    FAILS(rfaas_session_watch(session, never, NULL, -1), RFAAS_INVALID, "timeout_ns is negative");
    FAILS(rfaas_lease_open(NULL, &o, leases), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_lease_open(session, NULL, leases), RFAAS_INVALID, "options is NULL");
    FAILS(rfaas_lease_open(session, &o, leases), RFAAS_INVALID, "library");
    o.library = library;
    FAILS(rfaas_lease_open(session, &o, NULL), RFAAS_INVALID, "lease is NULL");
    FAILS(rfaas_lease_open_at(NULL, &o, &place, leases), RFAAS_INVALID, "place has no");
    FAILS(rfaas_lease_open_at(session, &o, NULL, leases), RFAAS_INVALID, "place is NULL");
    FAILS(rfaas_lease_open_across(NULL, &o, 1, leases, &n), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_lease_open_across(session, NULL, 1, leases, &n), RFAAS_INVALID, "options is NULL");
    FAILS(rfaas_lease_open_across(session, &o, 1, NULL, &n), RFAAS_INVALID, "leases is NULL");
    FAILS(rfaas_lease_open_across(session, &o, 1, leases, NULL), RFAAS_INVALID, "count is NULL");
    FAILS(rfaas_places(NULL, &o, 1, &place), RFAAS_INVALID, "session is NULL");
    FAILS(rfaas_places(session, NULL, 1, &place), RFAAS_INVALID, "options is NULL");
    FAILS(rfaas_places(session, &o, 1, NULL), RFAAS_INVALID, "places is NULL");
    FAILS(rfaas_lease_event(l, NULL), RFAAS_INVALID, "event is NULL");
    FAILS(rfaas_lease_info(l, NULL), RFAAS_INVALID, "details is NULL");
    FAILS(rfaas_worker_info(l, 0, NULL), RFAAS_INVALID, "details is NULL");
    FAILS(rfaas_lease_function(l, NULL, &f), RFAAS_INVALID, "name is NULL");
    FAILS(rfaas_lease_function(l, "echo", NULL), RFAAS_INVALID, "function is NULL");
    FAILS(rfaas_alloc(l, 64, NULL), RFAAS_INVALID, "buffer is NULL");
    OK(rfaas_free(l, NULL));
    FAILS(rfaas_register(l, NULL, 64), RFAAS_INVALID, "buffer is NULL");
    OK(rfaas_unregister(l, NULL));
    FAILS(rfaas_invoke(l, f, NULL, 8, &b, 8, NULL, NULL), RFAAS_INVALID, "in is NULL");
    FAILS(rfaas_invoke(l, f, &b, 8, NULL, 8, NULL, NULL), RFAAS_INVALID, "out is NULL");
    FAILS(rfaas_iinvoke(l, f, NULL, 8, &b, 8, NULL, &r), RFAAS_INVALID, "in is NULL");
    FAILS(rfaas_iinvoke(l, f, &b, 8, NULL, 8, NULL, &r), RFAAS_INVALID, "out is NULL");
    FAILS(rfaas_iinvoke(l, f, &b, 8, &b, 8, NULL, NULL), RFAAS_INVALID, "request is NULL");
    FAILS(rfaas_wait(NULL, &n), RFAAS_INVALID, "request is NULL");
    FAILS(rfaas_test(NULL, &done, &n), RFAAS_INVALID, "request is NULL");
    FAILS(rfaas_test(&r, NULL, &n), RFAAS_INVALID, "done is NULL");
    FAILS(rfaas_cancel(NULL), RFAAS_INVALID, "request is NULL");
    FAILS(rfaas_waitall(3, NULL, NULL, NULL), RFAAS_INVALID, "requests is NULL");
    FAILS(rfaas_waitany(3, NULL, &n, NULL), RFAAS_INVALID, "requests is NULL");
    FAILS(rfaas_waitany(0, NULL, NULL, NULL), RFAAS_INVALID, "index is NULL");
    FAILS(rfaas_map(l, f, NULL, 8, &b, 8, 1, NULL), RFAAS_INVALID, "in is NULL");
    FAILS(rfaas_map(l, f, &b, 8, NULL, 8, 1, NULL), RFAAS_INVALID, "out is NULL");
    FAILS(rfaas_lease_statistics(l, NULL), RFAAS_INVALID, "stats is NULL");
    OK(rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL)); /* these may be */
    OK(rfaas_wait(&r, NULL));
    CHECK(!s && !b && !r);
}

static void freed_requests(void) {
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE), *other = lease(1, 2, RFAAS_WAIT_ADAPTIVE);
    rfaas_request r, ended, fresh;
    size_t n = 0;
    int done = 0, end;
    for (end = 0; end < 3; end++) { /* by wait, by test, by cancel */
        ended = r = start(l, 1000);
        if (end == 0)
            OK(rfaas_wait(&r, NULL));
        for (done = 0; end == 1 && !done;)
            OK(rfaas_test(&r, &done, NULL));
        if (end == 2)
            OK(rfaas_cancel(&r));
        CHECK(!r);
        fresh = start(l, 1000); /* in the same place */
        for (int again = 0; again < 2; again++) {
            rfaas_request copy = ended;
            FAILS(rfaas_wait(&copy, &n), RFAAS_INVALID, "has ended already");
            FAILS(rfaas_test(&copy, &done, &n), RFAAS_INVALID, "has ended already");
            FAILS(rfaas_cancel(&copy), RFAAS_INVALID, "has ended already");
            FAILS(rfaas_waitall(1, &copy, NULL, NULL), RFAAS_INVALID, "has ended already");
            FAILS(rfaas_waitany(1, &copy, &n, NULL), RFAAS_INVALID, "has ended already");
        }
        OK(rfaas_wait(&fresh, &n));
        CHECK(n == 8);
    }
    for (rfaas_request wild = 1; wild; wild <<= 1) { /* no request at all */
        rfaas_request copy = wild;
        CHECK(rfaas_wait(&copy, &n) == RFAAS_INVALID && rfaas_cancel(&copy) == RFAAS_INVALID && copy == wild);
    }
    r = start(l, 50000000);
    OK(rfaas_lease_release(l));
    all_refused(NULL, l, r, RFAAS_INVALID, "released", "lease was released");
    r = start(other, 1000);
    OK(rfaas_wait(&r, NULL));
    r = start(other, 50000000);
    OK(rfaas_session_close(session));
    all_refused(session, other, r, RFAAS_INVALID, "", "lease was released");
    OK(rfaas_session_open(NULL, &session));
}

struct second {
    rfaas_request r;
    int status;
};

static void *wait_too(void *arg) {
    struct second *s = arg;
    s->status = rfaas_wait(&s->r, NULL);
    return NULL;
}

static void waiting_twice(void) {
    rfaas_lease *l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_request r[3];
    size_t sizes[3], at = 9;
    int statuses[3];
    r[0] = r[1] = start(l, 1000000);
    OK(rfaas_wait(&r[0], NULL));
    FAILS(rfaas_wait(&r[1], NULL), RFAAS_INVALID, "has ended already");
    OK(rfaas_wait(&r[0], NULL)); /* the null request, as in MPI */
    r[0] = r[2] = start(l, 1000000);
    r[1] = start(l, 1000);
    FAILS(rfaas_waitall(3, r, sizes, statuses), RFAAS_INVALID, "request 2 of 3");
    CHECK(statuses[0] == RFAAS_OK && statuses[1] == RFAAS_OK && statuses[2] == RFAAS_INVALID && sizes[0] == 8 && sizes[2] == 0);
    r[0] = r[1] = start(l, 1000000);
    r[2] = RFAAS_REQUEST_NULL;
    OK(rfaas_waitany(3, r, &at, NULL));
    CHECK(at < 2 && !r[at]);
    FAILS(rfaas_waitany(3, r, &at, NULL), RFAAS_INVALID, "has ended already");
    CHECK(at < 2 && r[at]);

    /* By two threads at once: one of them is told. */
    struct second s = {.r = start(l, 300000000)};
    rfaas_request mine = s.r;
    pthread_t t;
    pthread_create(&t, NULL, wait_too, &s);
    int status = rfaas_wait(&mine, NULL);
    pthread_join(t, NULL);
    CHECK((status == RFAAS_OK && s.status < 0) || (s.status == RFAAS_OK && status < 0));
    CHECK(status == RFAAS_OK || status == RFAAS_INVALID);
    CHECK(s.status == RFAAS_OK || s.status == RFAAS_INVALID);
    OK(rfaas_lease_release(l));
}

static void unregistered_buffers(void) {
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE), *other = lease(1, 2, RFAAS_WAIT_WARM);
    static char mine[65536], theirs[65536];
    void *a = NULL;
    uint64_t s = 0;
    OK(rfaas_alloc(l, 4096, &a));
    OK(rfaas_register(l, mine, sizeof mine));
    FAILS(rfaas_free(l, theirs), RFAAS_INVALID, "not a buffer of this lease that rfaas_alloc gave");
    FAILS(rfaas_free(l, mine), RFAAS_INVALID, "not a buffer of this lease that rfaas_alloc gave");
    FAILS(rfaas_free(l, (char *)a + 64), RFAAS_INVALID, "not a buffer");
    FAILS(rfaas_free(other, a), RFAAS_INVALID, "not a buffer");
    FAILS(rfaas_unregister(l, theirs), RFAAS_INVALID, "not a buffer of this lease that rfaas_register gave");
    FAILS(rfaas_unregister(l, mine + 64), RFAAS_INVALID, "not a buffer");
    FAILS(rfaas_unregister(other, mine), RFAAS_INVALID, "not a buffer");
    FAILS(rfaas_unregister(l, a), RFAAS_INVALID, "not a buffer");
    FAILS(rfaas_register(l, mine, sizeof mine), RFAAS_INVALID, "overlap");
    FAILS(rfaas_register(l, mine, SIZE_MAX), RFAAS_INVALID, "1 TiB");
    FAILS(rfaas_register(l, theirs, 0), RFAAS_INVALID, "size 0");
    FAILS(rfaas_alloc(l, SIZE_MAX, &a), RFAAS_INVALID, "1 TiB");
    /* No call needs registered memory: what is not registered is copied. */
    memset(theirs, 1, sizeof theirs);
    OK(rfaas_invoke(l, find(l, "sum"), theirs, sizeof theirs, &s, 8, NULL, NULL));
    CHECK(s == sizeof theirs);
    OK(rfaas_free(l, a));
    FAILS(rfaas_free(l, a), RFAAS_INVALID, "not a buffer");
    OK(rfaas_unregister(l, mine));
    FAILS(rfaas_unregister(l, mine), RFAAS_INVALID, "not a buffer");
}

static void after_finalize(void) {
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE);
    rfaas_session *s = session;
    rfaas_request r = start(l, 50000000);
    OK(rfaas_finalize());
    all_refused(s, l, r, RFAAS_INVALID, "not initialised", "not initialised");
    FAILS(rfaas_finalize(), RFAAS_INVALID, "not initialised");
    OK(rfaas_init(NULL)); /* what was before is gone */
    all_refused(s, l, r, RFAAS_INVALID, "", "");
    OK(rfaas_session_open(NULL, &session));
    OK(rfaas_lease_release(lease(1, 2, RFAAS_WAIT_ADAPTIVE)));
}

/* A child of fork() uses the library as if its parent had not; the parent's handles do not belong to it. */
static void use_anew(rfaas_session *theirs, rfaas_lease *of_them) {
    uint64_t in = 7, out = 0;
    rfaas_lease *l;
    OK(rfaas_init(NULL));
    if (theirs) {
        FAILS(rfaas_session_close(theirs), RFAAS_INVALID, "closed");
        FAILS(rfaas_lease_workers(of_them), RFAAS_INVALID, "released");
    }
    OK(rfaas_session_open(NULL, &session));
    l = lease(1, 1, RFAAS_WAIT_ADAPTIVE);
    OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, NULL, NULL));
    CHECK(out == 7);
    OK(rfaas_finalize());
}

static void another_process(void) {
    rfaas_lease *l = lease(1, 2, RFAAS_WAIT_ADAPTIVE);
    uint64_t in = 5, out = 0;
    OK(rfaas_lease_release(lease(1, 1, RFAAS_WAIT_ADAPTIVE))); /* and something is cached */
    rfaas_request r = start(l, 200000000);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* instead of a hang */
        all_refused(session, l, r, RFAAS_INVALID, "forked", "forked");
        FAILS(rfaas_finalize(), RFAAS_INVALID, "forked");
        use_anew(session, l);
        _exit(failures ? 1 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(rfaas_wait(&r, NULL)); /* the parent's are as they were */
    OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, NULL, NULL));
    CHECK(out == 5);
    OK(rfaas_lease_release(l));
    l = lease(1, 1, RFAAS_WAIT_ADAPTIVE);
    OK(rfaas_invoke(l, find(l, "echo"), &in, 8, &out, 8, NULL, NULL));
}

/* The library is not in use, only loaded. */
static void forked_without_init(void) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        use_anew(NULL, NULL);
        _exit(failures ? 1 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void everything(void) {
    static const struct {
        const char *name;
        void (*make)(void);
    } mistakes[] = {{"NULLs", nulls}, {"freed-requests", freed_requests}, {"waiting-twice", waiting_twice},
                    {"unregistered-buffers", unregistered_buffers}, {"after-finalize", after_finalize},
                    {"another-process", another_process}};
    int forks = !strcmp(mistake, "another-process");
    if (forks)
        forked_without_init();
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++)
        if (!strcmp(mistake, mistakes[i].name)) {
            mistakes[i].make();
            OK(rfaas_finalize());
            if (forks)
                forked_without_init();
            return;
        }
    report(__LINE__, mistake);
}

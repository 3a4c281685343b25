/* Test of librfaas.so through rfaas.h, as a program sees it. Needs RFAAS_EXECUTOR and RFAAS_SECRET_FILE; the argument is
 * the path of build/functions/echo.so. Exit status 0: all good. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

static void before_init(void) {
    rfaas_session *s;
    rfaas_request r = 12345;
    FAILS(rfaas_session_open(NULL, &s), RFAAS_INVALID, "not initialised");
    FAILS(rfaas_invoke(NULL, 0, NULL, 0, NULL, 0, NULL, NULL), RFAAS_INVALID, "not initialised");
    FAILS(rfaas_wait(&r, NULL), RFAAS_INVALID, "not initialised");
    FAILS(rfaas_finalize(), RFAAS_INVALID, "not initialised");
}

static void sessions(void) {
    rfaas_session_options o = RFAAS_SESSION_OPTIONS_INIT;
    rfaas_session *s = NULL;
    o.provider = "carrier pigeon";
    FAILS(rfaas_session_open(&o, &s), RFAAS_INVALID, "carrier pigeon");
    o.provider = NULL;
    o.executor = "nonsense";
    FAILS(rfaas_session_open(&o, &s), RFAAS_INVALID, "nonsense");
    o.executor = "127.0.0.1:1";
    FAILS(rfaas_session_open(&o, &s), RFAAS_PEER_GONE, "127.0.0.1:1");
    o.timeout_ns = -1;
    FAILS(rfaas_session_open(&o, &s), RFAAS_INVALID, "-1");
    o.timeout_ns = 0;
    o.data_encryption = 5;
    FAILS(rfaas_session_open(&o, &s), RFAAS_INVALID, "data_encryption 5");
    o.struct_size = 3;
    FAILS(rfaas_session_open(&o, &s), RFAAS_INVALID, "struct_size");
    CHECK(s == NULL);
    OK(rfaas_session_open(NULL, &s));
    OK(rfaas_session_close(s));
    FAILS(rfaas_session_close(s), RFAAS_INVALID, "closed");
}

static void leases(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "library");
    FAILS(rfaas_lease_open(session, NULL, &l), RFAAS_INVALID, "options");
    o.library = "/does/not/exist.so";
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_BAD_LIBRARY, "/does/not/exist.so");
    o.library = "/etc/passwd";
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_BAD_LIBRARY, "not an ELF");
    o.library = library;
    o.workers = 100000;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "100000");
    o.workers = 1000;
    CHECK(rfaas_lease_open(session, &o, &l) < 0 && strstr(rfaas_last_error(), "1000"));
    o.workers = 1;
    o.depth = 5000;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "5000");
    o.depth = 0;
    o.wait_mode = 9;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "9");
    o.wait_mode = 0;
    CHECK(l == NULL);
    OK(rfaas_lease_open(session, &o, &l));
    CHECK(rfaas_lease_workers(l) == 1);
    rfaas_lease_details d = {.struct_size = sizeof d};
    OK(rfaas_lease_info(l, &d));
    CHECK(d.workers == 1 && d.depth == 8 && d.functions >= 10 && d.node[0] && d.executor[0]);
    CHECK(!strcmp(d.provider, getenv("TEST_REMOTE") ? getenv("TEST_REMOTE") : "shm") || !strcmp(d.provider, "verbs"));
    rfaas_function f;
    FAILS(rfaas_lease_function(l, "eco", &f), RFAAS_NO_FUNCTION, "echo");
    FAILS(rfaas_lease_function(l, NULL, &f), RFAAS_INVALID, "name");
    OK(rfaas_lease_release(l));
    FAILS(rfaas_lease_release(l), RFAAS_INVALID, "released");
    FAILS(rfaas_invoke(l, 0, NULL, 0, NULL, 0, NULL, NULL), RFAAS_INVALID, "released");
    FAILS(rfaas_lease_workers(l), RFAAS_INVALID, "released");
}

static void calls(uint32_t mode) {
    static char in[1 << 20], out[1 << 20];
    rfaas_lease *l = lease(1, 4, mode);
    rfaas_function echo = find(l, "echo"), fail = find(l, "fail");
    static const size_t sizes[] = {0, 1, 8, 64, 4096, 16384, 16385, 1 << 20};
    size_t n;
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = (char)(i * 7);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        memset(out, 0, sizeof out);
        n = 99;
        OK(rfaas_invoke(l, echo, in, sizes[k], out, sizes[k], &n, NULL));
        CHECK(n == sizes[k] && !memcmp(in, out, n));
    }
    FAILS(rfaas_invoke(l, 12345, in, 8, out, 8, &n, NULL), RFAAS_NO_FUNCTION, "12345");
    FAILS(rfaas_invoke(l, echo, in, (1 << 20) + 1, out, 8, &n, NULL), RFAAS_TOO_LARGE, "1048577");
    FAILS(rfaas_invoke(l, echo, in, (size_t)1 << 40, out, 8, &n, NULL), RFAAS_TOO_LARGE, "1099511627776");
    CHECK(rfaas_started() == RFAAS_NOT_STARTED);
    CHECK(rfaas_invoke(l, echo, in, 64, out, 8, &n, NULL) == RFAAS_RESULT_TOO_LARGE && n == 64);
    CHECK(strstr(rfaas_last_error(), "echo: result of 64 bytes, the capacity is 8"));
    rfaas_request large;
    CHECK(!rfaas_iinvoke(l, echo, in, 64, out, 8, NULL, &large) && rfaas_wait(&large, &n) == RFAAS_RESULT_TOO_LARGE && n == 64);
    CHECK(strstr(rfaas_last_error(), "echo: result of 64 bytes, the capacity is 8"));
    FAILS(rfaas_invoke(l, fail, "negative rate", 13, out, 8, &n, NULL), RFAAS_FUNCTION_FAILED, "negative rate");
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED);
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.worker = 7;
    FAILS(rfaas_invoke(l, echo, in, 8, out, 8, &n, &o), RFAAS_INVALID, "7");
    o.worker = 0;
    o.timeout_ns = -5;
    FAILS(rfaas_invoke(l, echo, in, 8, out, 8, &n, &o), RFAAS_INVALID, "-5");
    o.struct_size = 1;
    FAILS(rfaas_invoke(l, echo, in, 8, out, 8, &n, &o), RFAAS_INVALID, "struct_size");
    OK(rfaas_invoke(l, echo, in, 8, out, 8, NULL, NULL));
    OK(rfaas_lease_release(l));
}

static void requests(void) {
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo"), sleep_ns = find(l, "sleep_ns");
    rfaas_request r[8], extra = 1, copy;
    uint64_t out[8];
    size_t n;
    int done;
    for (uint64_t i = 0; i < 8; i++)
        OK(rfaas_iinvoke(l, echo, &i, sizeof i, &out[i], sizeof out[i], NULL, &r[i]));
    CHECK(rfaas_iinvoke(l, echo, NULL, 0, NULL, 0, NULL, &extra) == RFAAS_BUSY && extra == 1);
    copy = r[3];
    for (int i = 7; i >= 0; i--) {
        OK(rfaas_wait(&r[i], &n));
        CHECK(n == 8 && out[i] == (uint64_t)i && r[i] == RFAAS_REQUEST_NULL);
    }
    OK(rfaas_wait(&r[0], &n)); /* the null request */
    FAILS(rfaas_wait(&copy, &n), RFAAS_INVALID, "ended already");
    FAILS(rfaas_test(&copy, &done, &n), RFAAS_INVALID, "ended already");
    extra = 0xdeadbeefcafe;
    CHECK(rfaas_wait(&extra, &n) == RFAAS_INVALID);

    uint64_t ns = 30000000, long_ns = 1000000000; /* longer than this program may be held up */
    double start = now();
    OK(rfaas_iinvoke(l, sleep_ns, &long_ns, sizeof ns, &out[0], 8, NULL, &r[0]));
    OK(rfaas_test(&r[0], &done, &n));
    CHECK(!done && r[0]);
    do
        OK(rfaas_test(&r[0], &done, &n));
    while (!done && now() < start + 5);
    CHECK(done && n == 8 && out[0] == long_ns && now() - start > 0.99);

    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.timeout_ns = 5000000;
    start = now();
    CHECK(rfaas_invoke(l, sleep_ns, &long_ns, sizeof ns, &out[0], 8, NULL, &o) == RFAAS_DEADLINE);
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED && now() - start < 0.9);
    OK(rfaas_iinvoke(l, sleep_ns, &long_ns, sizeof long_ns, &out[0], 8, &o, &r[0]));
    CHECK(rfaas_wait(&r[0], &n) == RFAAS_DEADLINE && !r[0]);
    OK(rfaas_iinvoke(l, sleep_ns, &ns, sizeof ns, &out[0], 8, NULL, &r[0]));
    OK(rfaas_cancel(&r[0]));
    CHECK(!r[0]);
    OK(rfaas_cancel(&r[0]));
    for (uint64_t i = 0; i < 50; i++) { /* late replies belong to nobody */
        OK(rfaas_invoke(l, echo, &i, sizeof i, &out[0], 8, &n, NULL));
        CHECK(n == 8 && out[0] == i);
    }
    OK(rfaas_iinvoke(l, sleep_ns, &ns, sizeof ns, &out[0], 8, NULL, &r[0]));
    OK(rfaas_lease_release(l));
    FAILS(rfaas_wait(&r[0], &n), RFAAS_INVALID, "released");
}

/* The process of worker 0 as its executor knows it. The worker itself has another number in its own namespace. */
static pid_t pid_of(rfaas_lease *l) {
    rfaas_worker_details d = {.struct_size = sizeof d};
    OK(rfaas_worker_info(l, 0, &d));
    return (pid_t)d.pid;
}

static void deaths(uint32_t mode) {
    rfaas_lease *l = lease(2, 4, mode);
    rfaas_function crash = find(l, "crash"), words = find(l, "print_and_crash"),
                   sleep_ns = find(l, "sleep_ns"), count = find(l, "count");
    rfaas_lease_details d = {.struct_size = sizeof d};
    rfaas_call_options on0 = RFAAS_CALL_OPTIONS_INIT;
    uint64_t out[4], minute = 60000000000ull;
    on0.worker = 0;
    double start = now();
    FAILS(rfaas_invoke(l, crash, NULL, 0, NULL, 0, NULL, &on0), RFAAS_WORKER_DIED, "function crash of worker 0: SIGSEGV at address 0x8");
    CHECK(now() - start < 1 && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    OK(rfaas_invoke(l, count, NULL, 0, out, 8, NULL, &on0));
    CHECK(out[0] == 1);
    FAILS(rfaas_invoke(l, words, "last words", 10, NULL, 0, NULL, NULL), RFAAS_WORKER_DIED, "last words");
    OK(rfaas_invoke(l, count, NULL, 0, out, 8, NULL, &on0));

    rfaas_request r[3];
    for (int i = 0; i < 3; i++)
        OK(rfaas_iinvoke(l, sleep_ns, &minute, 8, &out[i], 8, &on0, &r[i]));
    pid_t victim = pid_of(l);
    if (!getenv("TEST_REMOTE") && victim > 1 && kill(victim, 0) == 0) { /* of this machine */
        OK(kill(victim, SIGKILL));
        start = now();
        /* A call on the dead worker replaces it; the old requests keep their outcome. */
        OK(rfaas_invoke(l, count, NULL, 0, out, 8, NULL, NULL));
        for (int i = 0; i < 3; i++)
            FAILS(rfaas_wait(&r[i], NULL), RFAAS_WORKER_DIED, "SIGKILL");
        CHECK(now() - start < 1);
        OK(rfaas_invoke(l, count, NULL, 0, out, 8, NULL, &on0));
        CHECK(out[0] == 1);
        OK(rfaas_lease_info(l, &d));
        CHECK(d.replaced == 3);
    }
    OK(rfaas_lease_release(l));
}

/* Limits end a call with a status of their own, and a worker tells what it does. */
static void limits(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = library;
    o.memory = 64 << 20;
    o.call_limit_ns = -1;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "call_limit_ns -1");
    o.call_limit_ns = 1000000000ll * 3600 * 24 * 400;
    FAILS(rfaas_lease_open(session, &o, &l), RFAAS_INVALID, "call_limit_ms");
    o.call_limit_ns = 1000000000;
    OK(rfaas_lease_open(session, &o, &l));
    if (!l)
        return;
    rfaas_function sleep_ns = find(l, "sleep_ns"), print = find(l, "print"), count = find(l, "count");
    uint64_t minute = 60000000000ull, out[2];
    OK(rfaas_invoke(l, print, "so far", 6, NULL, 0, NULL, NULL));
    double start = now();
    rfaas_request r;
    OK(rfaas_iinvoke(l, sleep_ns, &minute, 8, out, 8, NULL, &r));
    rfaas_worker_details d = {.struct_size = sizeof d};
    do /* it may take a moment until the function runs and its output has been read */
        OK(rfaas_worker_info(l, 0, &d));
    while (now() - start < 0.9 && (!d.output_size || strcmp(d.running, "sleep_ns")));
    CHECK(!strcmp(d.output, "so far\n") && d.output_size == 7 && d.calls == 1 && d.bytes_in == 6 && d.pid > 1);
    FAILS(rfaas_wait(&r, NULL), RFAAS_TIME_LIMIT, "function sleep_ns of worker 0: exceeded its time limit of 1s");
    CHECK(now() - start > 0.99 && now() - start < 3 && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    CHECK(strstr(rfaas_last_error(), "\non the stack:\n    ") && strstr(rfaas_last_error(), "\n    sleep_ns+0x") &&
          strstr(rfaas_last_error(), "\nits last output:\n    so far"));
    OK(rfaas_invoke(l, count, NULL, 0, out, 8, NULL, NULL));
    CHECK(out[0] == 1);
    FAILS(rfaas_worker_info(l, 1, &d), RFAAS_INVALID, "worker 1");
    d.struct_size = 4;
    FAILS(rfaas_worker_info(l, 0, &d), RFAAS_INVALID, "struct_size is 4");
    OK(rfaas_lease_release(l));
    FAILS(rfaas_worker_info(l, 0, &d), RFAAS_INVALID, "released");
}

/* A program that was compiled when structures were shorter: nothing behind struct_size is read or written. */
static void shorter_structures(void) {
    rfaas_lease *l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo");
    rfaas_lease_details d = {.struct_size = offsetof(rfaas_lease_details, node_name)};
    memset(d.node_name, 'x', sizeof d.node_name);
    OK(rfaas_lease_info(l, &d));
    CHECK(d.workers == 1 && d.executor[0] && d.node_name[0] == 'x' && d.node_name[sizeof d.node_name - 1] == 'x');
    rfaas_statistics st = {.struct_size = offsetof(rfaas_statistics, cold), .cold = 77};
    OK(rfaas_lease_statistics(l, &st));
    CHECK(st.cold == 77);
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    uint64_t in = 5, out = 0;
    o.struct_size = offsetof(rfaas_call_options, repeats);
    o.attempt_ns = -1; /* would be refused */
    OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &o));
    CHECK(out == 5);
    OK(rfaas_lease_release(l));
    rfaas_lease_options lo = RFAAS_LEASE_OPTIONS_INIT;
    lo.struct_size = offsetof(rfaas_lease_options, call_limit_ns);
    lo.call_limit_ns = -1; /* would be refused */
    lo.library = library;
    OK(rfaas_lease_open(session, &lo, &l));
    OK(rfaas_lease_release(l));
}

static void buffers(void) {
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function sum = find(l, "sum");
    static const size_t sizes[] = {0, 8, 5000, 100000, 1 << 20};
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    void *b = NULL;
    FAILS(rfaas_alloc(l, 0, &b), RFAAS_INVALID, "0");
    OK(rfaas_alloc(l, 1 << 20, &b));
    memset(b, 1, 1 << 20);
    for (o.worker = 0; o.worker < 2; o.worker++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            uint64_t s = 0;
            OK(rfaas_invoke(l, sum, b, sizes[k], &s, 8, NULL, &o));
            CHECK(s == sizes[k]);
        }
    FAILS(rfaas_free(l, (char *)b + 64), RFAAS_INVALID, "not a buffer");
    OK(rfaas_free(l, b));
    OK(rfaas_free(l, NULL));
    OK(rfaas_lease_release(l));
}

struct intruder {
    rfaas_lease *l;
    rfaas_function f;
    int status;
};

static void *intrude(void *arg) {
    struct intruder *i = arg;
    rfaas_worker_details d = {.struct_size = sizeof d};
    while (rfaas_worker_info(i->l, 0, &d) == RFAAS_OK && strcmp(d.running, "sleep_ns")) {
    }
    i->status = rfaas_invoke(i->l, i->f, NULL, 0, NULL, 0, NULL, NULL);
    return NULL;
}

static void threads_and_fork(void) {
    rfaas_lease *l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    struct intruder i = {.l = l, .f = find(l, "empty")};
    pthread_t t;
    uint64_t ns = 1000000000, out;
    rfaas_function sleep_ns = find(l, "sleep_ns");
    pthread_create(&t, NULL, intrude, &i);
    OK(rfaas_invoke(l, sleep_ns, &ns, 8, &out, 8, NULL, NULL));
    pthread_join(t, NULL);
    CHECK(i.status == RFAAS_OK);
#ifndef WITH_MPI
    pid_t child = fork();
    if (child == 0)
        _exit(rfaas_invoke(l, i.f, NULL, 0, NULL, 0, NULL, NULL) == RFAAS_INVALID && strstr(rfaas_last_error(), "fork") ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
    OK(rfaas_invoke(l, i.f, NULL, 0, NULL, 0, NULL, NULL));
    OK(rfaas_lease_release(l));
}

void everything(void) {
    before_init();
    CHECK(rfaas_version() >= RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR);
    OK(rfaas_init(NULL));
    OK(rfaas_init(NULL));
    sessions();
    OK(rfaas_session_open(NULL, &session));
    leases();
    for (uint32_t mode = 0; mode <= 2; mode++) {
        calls(mode);
        deaths(mode);
    }
    requests();
    limits();
    shorter_structures();
    buffers();
    threads_and_fork();
    rfaas_lease *left = lease(1, 1, 0); /* finalize cleans up */
    OK(rfaas_finalize());
    CHECK(rfaas_lease_workers(left) == 1);
    OK(rfaas_finalize());
    FAILS(rfaas_lease_workers(left), RFAAS_INVALID, "not initialised");
    OK(rfaas_init(NULL)); /* and again */
    OK(rfaas_session_open(NULL, &session));
    OK(rfaas_lease_release(lease(2, 1, 0))); /* all cores are free */
    OK(rfaas_finalize());
}

/* A loop around poll() that waits for calls by the descriptor of a lease, and the worker of a call. */
#include "check.h"

#include <poll.h>
#include <stdbool.h>
#include <sys/wait.h>

enum { LONG = 600000, THREADS = 3, DEPTH = 8 }; /* LONG: ms, longer than the test */

static rfaas_lease *l;
static rfaas_function echo, sleep_ns, crash;

/* Reports whether the descriptor is readable within `ms`. */
static bool readable(int fd, int ms) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, ms) == 1 && p.revents == POLLIN;
}

static int begin(uint32_t workers, uint32_t mode) {
    int fd = -1;
    l = lease(workers, DEPTH, mode);
    echo = find(l, "echo");
    sleep_ns = find(l, "sleep_ns");
    crash = find(l, "crash");
    FAILS(rfaas_lease_arm(l), RFAAS_INVALID, "rfaas_lease_descriptor");
    FAILS(rfaas_lease_descriptor(l, NULL), RFAAS_INVALID, "fd");
    OK(rfaas_lease_descriptor(l, &fd));
    return fd;
}

static uint64_t long_ns = LONG * 1000000ull, slept[4];

static void start_long(int worker, uint64_t *ns, rfaas_request *r, int64_t timeout_ns) {
    rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
    c.worker = worker;
    c.timeout_ns = timeout_ns;
    OK(rfaas_iinvoke(l, sleep_ns, ns, 8, &slept[worker], 8, &c, r));
}

static int tested(rfaas_request *r, bool *over) {
    int done = 0, status = rfaas_test(r, &done, NULL);
    *over = done;
    return status;
}

/* One call after the other, and pairs of calls of which one goes on. */
static void loop(uint32_t workers, uint32_t mode) {
    int fd = begin(workers, mode), again = -1;
    uint64_t in = 42, out = 0, brief = 2000000;
    rfaas_request r, other;
    bool over;
    OK(rfaas_lease_descriptor(l, &again));
    CHECK(again == fd);
    CHECK(!readable(fd, 0));
    OK(rfaas_lease_arm(l)); /* nothing is in flight */
    CHECK(readable(fd, LONG));
    double all = 0, least = 1;
    for (int i = 0; i < 200; i++) {
        out = 0;
        OK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, NULL, &r));
        double start = now();
        OK(rfaas_lease_arm(l));
        CHECK(readable(fd, LONG));
        double took = now() - start;
        all += took;
        least = took < least ? took : least;
        OK(tested(&r, &over));
        CHECK(over && out == 42);
    }
    printf("%u workers, mode %u: %.1f us from arm to readable, at least %.1f\n", workers, mode, all / 200 * 1e6, least * 1e6);
    for (int i = 0; i < 5; i++) { /* the thread sleeps before the call ends */
        start_long(0, &brief, &r, 0);
        OK(rfaas_lease_arm(l));
        CHECK(readable(fd, LONG));
        OK(tested(&r, &over));
        CHECK(over);
    }
    start_long(0, &long_ns, &r, 0);
    OK(rfaas_lease_arm(l));
    CHECK(!readable(fd, 20));
    if (workers > 1) { /* a call that is started after arming */
        rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
        c.worker = 1;
        OK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, &c, &other));
        CHECK(readable(fd, LONG));
        OK(tested(&r, &over));
        CHECK(!over);
        OK(tested(&other, &over));
        CHECK(over);
        OK(rfaas_lease_arm(l));
        CHECK(!readable(fd, 20));
    }
    rfaas_call_options any = RFAAS_CALL_OPTIONS_INIT;
    any.worker = (int)workers - 1;
    if (workers > 1) { /* the end of a call that the loop does not test is reported once */
        OK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, &any, &other));
        CHECK(readable(fd, LONG));
        OK(rfaas_lease_arm(l));
        CHECK(!readable(fd, 20));
        OK(rfaas_wait(&other, NULL));
    }
    OK(rfaas_worker_replace(l, 0));
    CHECK(readable(fd, LONG));
    CHECK(tested(&r, &over) == RFAAS_WORKER_DIED && over);
    start_long(0, &long_ns, &r, 30000000);
    OK(rfaas_lease_arm(l));
    CHECK(readable(fd, LONG));
    CHECK(tested(&r, &over) == RFAAS_DEADLINE && over);
    OK(rfaas_worker_replace(l, 0));
    OK(rfaas_iinvoke(l, crash, NULL, 0, NULL, 0, NULL, &r));
    OK(rfaas_lease_arm(l));
    CHECK(readable(fd, LONG));
    CHECK(tested(&r, &over) == RFAAS_WORKER_DIED && over);
    start_long(0, &long_ns, &r, 0);
    OK(rfaas_lease_arm(l));
    OK(rfaas_cancel(&r)); /* now nothing is in flight */
    CHECK(readable(fd, LONG));
    OK(rfaas_worker_replace(l, 0));
    start_long(0, &brief, &r, 0);
    OK(rfaas_lease_arm(l));
    int copy = dup(fd);
    OK(rfaas_lease_release(l)); /* armed */
    CHECK(readable(copy, 0));
    CHECK(!close(copy));
}

static volatile bool stop;

static void *call_on(void *arg) {
    for (uint64_t i = 1, out = 0; !stop; i++) {
        OK(rfaas_invoke(l, echo, &i, 8, &out, 8, NULL, NULL));
        CHECK(out == i);
    }
    return arg;
}

/* A loop with as many calls in flight as there is room for, while other threads call, too. */
static void crowd(uint32_t mode) {
    enum { CALLS = 2000, FLYING = 2 * DEPTH - THREADS };
    int fd = begin(2, mode);
    pthread_t threads[THREADS];
    rfaas_request flying[FLYING] = {0};
    uint64_t in[FLYING], out[FLYING];
    int started = 0, ended = 0, polls = 0;
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, call_on, NULL));
    while (ended < CALLS) {
        OK(rfaas_lease_arm(l));
        bool busy = false;
        for (int i = 0; i < FLYING; i++) {
            bool over = true;
            if (flying[i]) {
                OK(tested(&flying[i], &over));
                CHECK(!over || out[i] == in[i]);
                ended += over;
            }
            if (!over || started == CALLS)
                continue;
            in[i] = (uint64_t)++started;
            int status = rfaas_iinvoke(l, echo, &in[i], 8, &out[i], 8, NULL, &flying[i]);
            if (status == RFAAS_BUSY) { /* the other threads have the slots */
                started--;
                busy = true;
            } else {
                OK(status);
            }
        }
        if (ended < CALLS && !busy)
            CHECK(readable(fd, LONG));
        polls++;
    }
    stop = true;
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    stop = false;
    printf("crowd, mode %u: %d calls in %d polls\n", mode, ended, polls);
    OK(rfaas_lease_release(l));
}

static void *no_call(void *arg) {
    CHECK(rfaas_call_worker() == RFAAS_ANY_WORKER);
    return arg;
}

/* Which worker had a call. */
static void worker_of_call(void) {
    pthread_t t;
    uint64_t in = 1, out;
    rfaas_request r[2];
    rfaas_call_options c = RFAAS_CALL_OPTIONS_INIT;
    l = lease(2, DEPTH, RFAAS_WAIT_ADAPTIVE);
    echo = find(l, "echo");
    crash = find(l, "crash");
    for (int again = 0; again < 2; again++) { /* then as a lease that several threads use */
        for (c.worker = 0; c.worker < 2; c.worker++) {
            OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &c));
            CHECK(rfaas_call_worker() == c.worker);
            OK(rfaas_iinvoke(l, echo, &in, 8, &out, 8, &c, &r[c.worker]));
        }
        OK(rfaas_wait(&r[0], NULL));
        CHECK(rfaas_call_worker() == 0);
        OK(rfaas_wait(&r[1], NULL));
        CHECK(rfaas_call_worker() == 1);
        c.worker = 0;
        CHECK(rfaas_invoke(l, crash, NULL, 0, NULL, 0, NULL, &c) == RFAAS_WORKER_DIED);
        CHECK(rfaas_call_worker() == 0);
        int fd;
        OK(rfaas_lease_descriptor(l, &fd));
        for (int i = 0; i < 10; i++) { /* until the thread has shared the lease */
            OK(rfaas_lease_arm(l));
            CHECK(readable(fd, LONG));
            OK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &c));
        }
    }
    CHECK(!pthread_create(&t, NULL, no_call, NULL));
    CHECK(!pthread_join(t, NULL));
    OK(rfaas_lease_release(l));
}

/* A child of fork has neither the lease nor its descriptor. */
static void in_child(void) {
    int fd = begin(1, RFAAS_WAIT_WARM), status = -1;
    rfaas_request r;
    bool over;
    uint64_t brief = 2000000;
    start_long(0, &brief, &r, 0);
    OK(rfaas_lease_arm(l));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int got;
        FAILS(rfaas_lease_arm(l), RFAAS_INVALID, "");
        FAILS(rfaas_lease_descriptor(l, &got), RFAAS_INVALID, "");
        _exit(failures != 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(readable(fd, LONG));
    OK(tested(&r, &over));
    CHECK(over);
    OK(rfaas_lease_release(l));
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    for (uint32_t mode = RFAAS_WAIT_ADAPTIVE; mode <= RFAAS_WAIT_WARM; mode++) {
        loop(2, mode);
        crowd(mode);
    }
    loop(1, RFAAS_WAIT_ADAPTIVE);
    worker_of_call();
    in_child();
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

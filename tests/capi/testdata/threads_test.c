/* Several threads in one lease (threads_test.go). Arguments: echo.so and which part. TEST_CALLS: calls of each thread. Exit status 0: all
 * good. */
#define CHECK_ARGUMENT part
static const char *part;
#include <stdatomic.h>

#include "check.h"

#define MS 1000000ll
#define MANY 16

static rfaas_lease *l;
static rfaas_function echo, sleep_ns, pid, call_abort;
static atomic_uint errors; /* of threads: CHECK is for one at a time */
static pthread_mutex_t report_mu = PTHREAD_MUTEX_INITIALIZER;

#define TCHECK(x) ((x) ? (void)0 : thread_report(__LINE__, #x))
static void thread_report(int line, const char *what) {
    pthread_mutex_lock(&report_mu);
    if (errors++ < 20)
        report(line, what);
    failures++;
    pthread_mutex_unlock(&report_mu);
}

typedef struct worker_thread {
    pthread_t thread;
    uint64_t index, calls, good, other;
    double longest;
    int (*may)(int status); /* whether a status other than RFAAS_OK is right */
} worker_thread;

static uint64_t calls_each(void) {
    const char *s = getenv("TEST_CALLS");
    return s ? strtoull(s, NULL, 10) : 20000;
}

static rfaas_lease *open_lease(uint32_t workers, uint32_t mode) {
    rfaas_lease *r = lease(workers, 8, mode);
    echo = find(r, "echo");
    sleep_ns = find(r, "sleep_ns");
    pid = find(r, "pid");
    call_abort = find(r, "call_abort");
    return r;
}

static void run_threads(int n, void *(*f)(void *), worker_thread *t, uint64_t calls, int (*may)(int)) {
    for (int i = 0; i < n; i++) {
        t[i] = (worker_thread){.index = (uint64_t)i, .calls = calls, .may = may};
        CHECK(!pthread_create(&t[i].thread, NULL, f, &t[i]));
    }
}

static void join(int n, worker_thread *t) {
    for (int i = 0; i < n; i++)
        pthread_join(t[i].thread, NULL);
}

/* ---- calls ---- */

static void *calls(void *arg) {
    worker_thread *t = arg;
    char in[6000], out[sizeof in];
    memset(in, (int)t->index + 1, sizeof in);
    for (uint64_t i = 0; i < t->calls; i++) {
        /* By the mailbox, by the ring, and by both. */
        size_t size = i % 64 ? 8 : i % 128 ? 300 : sizeof in, n = 0;
        uint64_t word = t->index << 32 | i;
        memcpy(in, &word, sizeof word);
        memset(out, 0, size);
        double start = now();
        int status = rfaas_invoke(l, echo, in, size, out, size, &n, NULL);
        double took = now() - start;
        t->longest = took > t->longest ? took : t->longest;
        if (status == RFAAS_OK) {
            TCHECK(n == size && !memcmp(in, out, size));
            t->good++;
        } else {
            TCHECK(t->may && t->may(status));
            t->other++;
        }
    }
    return NULL;
}

static void all_calls(void) {
    for (uint32_t mode = RFAAS_WAIT_ADAPTIVE; mode <= RFAAS_WAIT_WARM; mode += RFAAS_WAIT_WARM) {
        for (uint32_t workers = 1; workers <= 4; workers *= 2) {
            worker_thread t[8];
            l = open_lease(workers, mode);
            double start = now();
            run_threads(8, calls, t, mode == RFAAS_WAIT_WARM ? calls_each() / 10 : calls_each(), NULL);
            join(8, t);
            double took = now() - start;
            uint64_t good = 0;
            double longest = 0;
            for (int i = 0; i < 8; i++) {
                CHECK(t[i].good == t[i].calls && t[i].other == 0);
                good += t[i].good;
                longest = t[i].longest > longest ? t[i].longest : longest;
            }
            rfaas_statistics s = {.struct_size = sizeof s};
            OK(rfaas_lease_statistics(l, &s));
            CHECK(s.calls == good && s.replies == good && s.abandoned == 0);
            printf("8 threads, %u workers, mode %u: %.0f calls/s, the longest took %.1f ms\n", workers, mode, (double)good / took,
                   longest * 1e3);
            OK(rfaas_lease_release(l));
        }
    }
}

/* ---- requests of one thread, waited for by others ---- */

#define RING 64
static rfaas_request ring[RING];
static uint64_t ring_in[RING], ring_out[RING];
static atomic_ullong started, finished;

static void *waits(void *arg) {
    worker_thread *t = arg;
    for (;;) {
        uint64_t i = finished++;
        if (i >= t->calls)
            return NULL;
        while (started <= i)
            sched_yield();
        size_t n = 0;
        rfaas_request r = ring[i % RING];
        if (i % 3 == 2) {
            int done = 0;
            while (!done)
                TCHECK(rfaas_test(&r, &done, &n) == RFAAS_OK);
        } else {
            TCHECK(rfaas_wait(&r, &n) == RFAAS_OK);
        }
        TCHECK(n == 8 && ring_out[i % RING] == i * 7 && r == RFAAS_REQUEST_NULL);
        ring_out[i % RING] = 0;
        atomic_thread_fence(memory_order_seq_cst);
        ring[i % RING] = RFAAS_REQUEST_NULL;
        t->good++;
    }
}

static void handed_over(void) {
    worker_thread t[3];
    uint64_t n = calls_each();
    l = open_lease(2, RFAAS_WAIT_ADAPTIVE);
    started = finished = 0;
    run_threads(3, waits, t, n, NULL);
    for (uint64_t i = 0; i < n; i++) {
        while (*(volatile rfaas_request *)&ring[i % RING] != RFAAS_REQUEST_NULL)
            sched_yield();
        atomic_thread_fence(memory_order_seq_cst);
        ring_in[i % RING] = i * 7;
        int status;
        rfaas_request r;
        while ((status = rfaas_iinvoke(l, echo, &ring_in[i % RING], 8, &ring_out[i % RING], 8, NULL, &r)) == RFAAS_BUSY)
            sched_yield();
        OK(status);
        ring[i % RING] = r;
        started = i + 1;
    }
    join(3, t);
    OK(rfaas_lease_release(l));
}

static void *any(void *arg) {
    worker_thread *t = arg;
    rfaas_request r[4] = {0};
    uint64_t in[4], out[4], next = 0, done = 0;
    while (done < t->calls) {
        for (int i = 0; i < 4; i++) {
            if (r[i] || next == t->calls)
                continue;
            in[i] = t->index << 32 | next++;
            int status = rfaas_iinvoke(l, echo, &in[i], 8, &out[i], 8, NULL, &r[i]);
            TCHECK(status == RFAAS_OK); /* 2 threads with 4 each on 16 slots */
        }
        size_t at = 9, n = 0;
        TCHECK(rfaas_waitany(4, r, &at, &n) == RFAAS_OK);
        TCHECK(at < 4 && n == 8 && out[at] == in[at]);
        done++;
    }
    return NULL;
}

static void *maps(void *arg) {
    worker_thread *t = arg;
    uint64_t in[500], out[500];
    for (uint64_t round = 0; round < t->calls; round++) {
        rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
        o.chunk = 5;
        for (uint64_t i = 0; i < 500; i++)
            in[i] = t->index << 32 | round << 10 | i;
        memset(out, 0, sizeof out);
        TCHECK(rfaas_map(l, echo, in, 8, out, 8, 500, &o) == RFAAS_OK);
        TCHECK(!memcmp(in, out, sizeof in));
    }
    return NULL;
}

static void *others(void *arg) {
    worker_thread *t = arg;
    static char memory[4][70000];
    for (uint64_t i = 0; i < t->calls; i++) {
        rfaas_statistics s = {.struct_size = sizeof s};
        rfaas_event e = {.struct_size = sizeof e};
        rfaas_lease_details d = {.struct_size = sizeof d};
        void *b = NULL;
        TCHECK(rfaas_lease_statistics(l, &s) == RFAAS_OK);
        TCHECK(rfaas_lease_event(l, &e) == RFAAS_OK && e.kind == RFAAS_EVENT_NONE);
        TCHECK(rfaas_lease_info(l, &d) == RFAAS_OK && d.workers == 2);
        TCHECK(rfaas_alloc(l, 70000, &b) == RFAAS_OK);
        memset(b, (int)i, 70000);
        TCHECK(rfaas_register(l, memory[t->index & 3], 70000) == RFAAS_OK);
        TCHECK(rfaas_invoke(l, echo, b, 70000, memory[t->index & 3], 70000, NULL, NULL) == RFAAS_OK);
        TCHECK(!memcmp(b, memory[t->index & 3], 70000));
        int status;
        while ((status = rfaas_free(l, b)) == RFAAS_BUSY) /* others' calls are in flight */
            sched_yield();
        TCHECK(status == RFAAS_OK);
        while ((status = rfaas_unregister(l, memory[t->index & 3])) == RFAAS_BUSY)
            sched_yield();
        TCHECK(status == RFAAS_OK);
    }
    return NULL;
}

static void several(void) {
    worker_thread a[2], m[1], o[2], c[2];
    l = open_lease(2, RFAAS_WAIT_ADAPTIVE);
    run_threads(2, any, a, calls_each() / 2, NULL);
    join(2, a);
    run_threads(2, any, a, calls_each() / 10, NULL);
    run_threads(2, calls, c, calls_each() / 10, NULL);
    join(2, a);
    join(2, c);
    run_threads(1, maps, m, calls_each() / 1000 + 1, NULL);
    run_threads(2, calls, c, calls_each() / 10, NULL);
    run_threads(2, others, o, calls_each() / 200 + 1, NULL);
    join(1, m);
    join(2, c);
    join(2, o);
    OK(rfaas_lease_release(l));
}

/* ---- threads on other workers go on during a long call ---- */

/* Waits until n workers of the lease run sleep_ns. */
static void await_sleepers(int n) {
    rfaas_worker_details d = {.struct_size = sizeof d};
    int running;
    do {
        usleep(5000); /* since hot workers need the processors */
        running = 0;
        for (int w = 0; w < rfaas_lease_workers(l); w++) {
            OK(rfaas_worker_info(l, w, &d));
            running += !strcmp(d.running, "sleep_ns");
        }
    } while (running < n && !failures);
}

static atomic_int long_calls; /* that have ended */

static void *long_call(void *arg) {
    worker_thread *t = arg;
    uint64_t ns = t->calls, out = 0;
    TCHECK(rfaas_invoke(l, sleep_ns, &ns, 8, &out, 8, NULL, NULL) == RFAAS_OK && out == ns);
    long_calls++;
    return NULL;
}

static void *long_wait(void *arg) {
    worker_thread *t = arg;
    uint64_t ns = t->calls, out = 0;
    rfaas_request r;
    TCHECK(rfaas_iinvoke(l, sleep_ns, &ns, 8, &out, 8, NULL, &r) == RFAAS_OK);
    TCHECK(rfaas_wait(&r, NULL) == RFAAS_OK && out == ns);
    long_calls++;
    return NULL;
}

static void *long_any(void *arg) {
    worker_thread *t = arg;
    uint64_t ns = t->calls, out = 0;
    rfaas_request r;
    size_t at;
    TCHECK(rfaas_iinvoke(l, sleep_ns, &ns, 8, &out, 8, NULL, &r) == RFAAS_OK);
    TCHECK(rfaas_waitany(1, &r, &at, NULL) == RFAAS_OK && out == ns);
    long_calls++;
    return NULL;
}

static void during_long_calls(void) {
    void *(*const longs[])(void *) = {long_call, long_wait, long_any};
    for (size_t k = 0; k < 3; k++) {
        for (uint32_t mode = RFAAS_WAIT_ADAPTIVE; mode <= RFAAS_WAIT_WARM; mode++) {
            worker_thread t[1];
            uint64_t in = 1, out = 0;
            l = open_lease(2, mode);
            long_calls = 0;
            run_threads(1, longs[k], t, (uint64_t)(500 * MS), NULL);
            await_sleepers(1); /* its thread is the owner, and inside */
            int n = 0;
            for (; !long_calls; n++, in++)
                CHECK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL) == RFAAS_OK && out == in);
            CHECK(n > 3); /* none waits for the long one */
            join(1, t);
            OK(rfaas_lease_release(l));
        }
    }
}

/* ---- deadlines while all workers are busy ---- */

static int is_deadline(int status) { return status == RFAAS_DEADLINE; }

static void *impatient(void *arg) {
    worker_thread *t = arg;
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.timeout_ns = 30 * MS;
    for (uint64_t i = 0; i < t->calls; i++) {
        uint64_t out;
        double start = now();
        TCHECK(t->may(rfaas_invoke(l, echo, &i, 8, &out, 8, NULL, &o)));
        TCHECK(strstr(rfaas_last_error(), "invoke"));
        TCHECK(now() - start > 0.029 && !long_calls); /* it has not waited for a worker */
        t->longest = now() - start > t->longest ? now() - start : t->longest;
    }
    return NULL;
}

static void deadlines(void) {
    worker_thread busy[2], t[6];
    l = open_lease(2, RFAAS_WAIT_ADAPTIVE);
    long_calls = 0;
    run_threads(2, long_call, busy, (uint64_t)(3000 * MS), NULL);
    await_sleepers(2);
    run_threads(6, impatient, t, 5, is_deadline);
    join(6, t);
    join(2, busy);
    uint64_t in = 7, out = 0;
    CHECK(rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, NULL) == RFAAS_OK && out == in);
    OK(rfaas_lease_release(l));
}

/* One thread: a call waits for its own requests' slots, until its deadline. If this process gets no processor for so long that the first request has
 * ended by then, the call may have found a slot. Then it tries again with requests that take twice as long. */
static void own_requests(void) {
    rfaas_request r[8];
    uint64_t ns = (uint64_t)(20 * MS), out[8], in = 5, got = 0;
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    l = open_lease(1, RFAAS_WAIT_ADAPTIVE);
    o.timeout_ns = 5 * MS;
    for (int done = 1, full = 0; !full && done; ns *= 2) {
        for (int i = 0; i < 8; i++)
            OK(rfaas_iinvoke(l, sleep_ns, &ns, 8, &out[i], 8, NULL, &r[i]));
        full = rfaas_invoke(l, echo, &in, 8, &got, 8, NULL, &o) == RFAAS_DEADLINE && strstr(rfaas_last_error(), "free slot");
        CHECK(!full || rfaas_started() == RFAAS_NOT_STARTED);
        OK(rfaas_test(&r[0], &done, NULL));
        CHECK(full || done);
        CHECK(rfaas_invoke(l, echo, &in, 8, &got, 8, NULL, NULL) == RFAAS_OK && got == in);
        OK(rfaas_waitall(8, r, NULL, NULL));
        CHECK(out[7] == ns);
    }
    OK(rfaas_lease_release(l));
}

/* ---- a worker dies ---- */

static int is_death(int status) { return status == RFAAS_WORKER_DIED; }

static void *calls_and_requests(void *arg) {
    worker_thread *t = arg;
    for (uint64_t i = 0; i < t->calls; i++) {
        uint64_t in = t->index << 32 | i, out = 0;
        size_t n = 0;
        int status;
        if (i % 2) {
            status = rfaas_invoke(l, echo, &in, 8, &out, 8, &n, NULL);
        } else {
            rfaas_request r;
            while ((status = rfaas_iinvoke(l, echo, &in, 8, &out, 8, NULL, &r)) == RFAAS_BUSY)
                sched_yield();
            if (status == RFAAS_OK)
                status = rfaas_wait(&r, &n);
        }
        if (status == RFAAS_OK) {
            TCHECK(n == 8 && out == in);
            t->good++;
        } else {
            TCHECK(t->may(status) && strstr(rfaas_last_error(), "SIGABRT") && strstr(rfaas_last_error(), "echo"));
            t->other++;
        }
    }
    return NULL;
}

static void deaths(void) {
    worker_thread t[6];
    uint64_t out;
    l = open_lease(2, RFAAS_WAIT_ADAPTIVE);
    run_threads(6, calls_and_requests, t, calls_each() / 2, is_death);
    uint32_t died = 0;
    for (int i = 0; i < 10; i++, died++) {
        usleep(20000);
        FAILS(rfaas_invoke(l, call_abort, NULL, 0, &out, 8, NULL, NULL), RFAAS_WORKER_DIED, "SIGABRT");
        CHECK(strstr(rfaas_last_error(), "call_abort"));
    }
    join(6, t);
    uint64_t good = 0, other = 0;
    for (int i = 0; i < 6; i++) {
        good += t[i].good;
        other += t[i].other;
    }
    for (int i = 0; i < 2; i++) { /* the last one may not be missed yet */
        rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
        o.worker = i;
        OK(rfaas_invoke(l, pid, NULL, 0, &out, 8, NULL, &o));
    }
    rfaas_statistics s = {.struct_size = sizeof s};
    OK(rfaas_lease_statistics(l, &s));
    printf("%llu calls, %llu died with a worker, %u replaced\n", (unsigned long long)good, (unsigned long long)other, s.replaced);
    CHECK(s.replaced == died && other < 6 * 8 * died);
    OK(rfaas_lease_release(l));
}

/* ---- release ---- */

static atomic_int inside;

static void *until_released(void *arg) {
    worker_thread *t = arg;
    for (;;) {
        uint64_t in = t->index << 32 | t->good, out = 0, ns = (uint64_t)(20000 * MS);
        int status;
        inside++;
        if (t->index % 4 == 0) {
            rfaas_request r = RFAAS_REQUEST_NULL;
            status = rfaas_iinvoke(l, echo, &in, 8, &out, 8, NULL, &r);
            if (status == RFAAS_OK)
                status = rfaas_wait(&r, NULL);
            else if (status == RFAAS_BUSY)
                continue;
        } else if (t->index == 1) { /* a call so long that only the release ends it; its result would be wrong */
            status = rfaas_invoke(l, sleep_ns, &ns, 8, &out, 8, NULL, NULL);
        } else if (t->index == 2) {
            rfaas_request r = RFAAS_REQUEST_NULL;
            size_t at;
            status = rfaas_iinvoke(l, sleep_ns, &ns, 8, &out, 8, NULL, &r);
            if (status == RFAAS_OK)
                status = rfaas_waitany(1, &r, &at, NULL);
            else if (status == RFAAS_BUSY)
                continue;
        } else {
            rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
            o.timeout_ns = t->index % 2 ? 0 : 1 * MS;
            status = rfaas_invoke(l, echo, &in, 8, &out, 8, NULL, &o);
            if (status == RFAAS_DEADLINE)
                continue;
        }
        if (status != RFAAS_OK) {
            TCHECK(status == RFAAS_LEASE_ENDED || status == RFAAS_INVALID);
            TCHECK(strstr(rfaas_last_error(), "released"));
            return NULL;
        }
        TCHECK(out == in);
        t->good++;
    }
}

static void releases(void) {
    for (int round = 0; round < 6; round++) {
        worker_thread t[MANY];
        l = open_lease(1 + (uint32_t)round % 2, (uint32_t)round % 3);
        inside = 0;
        int n = round % 5 ? 8 : MANY;
        run_threads(n, until_released, t, 0, NULL);
        usleep((useconds_t)(round % 4 ? round * 2000 : 0));
        rfaas_lease *gone = l;
        OK(rfaas_lease_release(gone));
        FAILS(rfaas_lease_release(gone), RFAAS_INVALID, "released");
        join(n, t);
    }
}

void everything(void) {
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"calls", all_calls},         {"handed-over", handed_over}, {"several", several},
                 {"long-calls", during_long_calls}, {"deadlines", deadlines},     {"own-requests", own_requests},
                 {"deaths", deaths},           {"releases", releases}};
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strcmp(parts[i].name, part))
            parts[i].run();
    OK(rfaas_session_close(session));
    OK(rfaas_finalize());
}

/* Calls with RFAAS_CALL_IN_PLACE (place_test.go). Second argument: "shm", "verbs", "tcp", or "here" if calls run in this process. */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>

enum { MIB = 1 << 20, BIG = 8 * MIB };

static bool in_place; /* calls are, as workers of this node make them */

static rfaas_lease *take(uint32_t workers) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = getenv("TEST_LIBRARY");
    o.workers = workers;
    o.bulk = MIB;
    o.flags = RFAAS_LEASE_LOCAL;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

static rfaas_call_options options(void) {
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.flags = RFAAS_CALL_IN_PLACE;
    return o;
}

static void fill(uint64_t *a, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        a[i] = seed + i;
}

static bool doubled(const uint64_t *a, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; i++)
        if (a[i] != 2 * (seed + i))
            return false;
    return true;
}

/* Sizes below, at and above what the lease carries otherwise; rfaas_invoke, rfaas_iinvoke and repeats. */
static void good_calls(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    static const size_t sizes[] = {8, 1016, 1024, 4096, 100000 & ~7u, MIB, MIB + 8, BIG};
    rfaas_function twice = find(l, "twice");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 3; kind++) {
            rfaas_call_options o = options();
            size_t size = sizes[i], n = 0;
            o.repeats = kind == 2;
            fill(a, size, i + (size_t)kind);
            memset(b, 1, size);
            if (size > MIB && !in_place) {
                FAILS(rfaas_invoke(l, twice, a, size, b, size, &n, &o), RFAAS_TOO_LARGE, "1048576");
                continue;
            }
            if (kind) {
                rfaas_request r = RFAAS_REQUEST_NULL;
                OK(rfaas_iinvoke(l, twice, a, size, b, size, &o, &r));
                OK(rfaas_wait(&r, &n));
            } else {
                OK(rfaas_invoke(l, twice, a, size, b, size, &n, &o));
            }
            CHECK(n == size && doubled(b, size, i + (size_t)kind) && a[size / 8 - 1] == i + (size_t)kind + size / 8 - 1);
        }
}

/* One of the two in place, the other in memory of the program. */
static void mixed_calls(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    rfaas_function twice = find(l, "twice");
    rfaas_call_options o = options();
    uint64_t own[4096];
    size_t n = 0;
    fill(a, sizeof own, 5);
    OK(rfaas_invoke(l, twice, a, sizeof own, own, sizeof own, &n, &o));
    CHECK(n == sizeof own && doubled(own, n, 5));
    fill(own, sizeof own, 6);
    OK(rfaas_invoke(l, twice, own, sizeof own, b, BIG, &n, &o)); /* with a large capacity */
    CHECK(n == sizeof own && doubled(b, n, 6));
    OK(rfaas_invoke(l, twice, own, sizeof own, own, sizeof own, &n, &o));
    CHECK(n == sizeof own && own[1] == 14);
    fill(a, sizeof own, 7);
    rfaas_piece in = RFAAS_PIECE(a, sizeof own), out = RFAAS_PIECE(b, sizeof own);
    OK(rfaas_invokev(l, twice, &in, 1, &out, 1, &n, &o));
    CHECK(n == sizeof own && doubled(b, n, 7));
    /* A result that is larger than the capacity, and a function that fails. */
    FAILS(rfaas_invoke(l, twice, a, 8192, b, 4096, &n, &o), RFAAS_RESULT_TOO_LARGE, "larger than the capacity" + (strcmp(what, "here") ? 12 : 0));
    a[0] = 700;
    FAILS(rfaas_invoke(l, find(l, "picky"), a, 4096, b, 4096, &n, &o), RFAAS_FUNCTION_FAILED, "item 700");
}

/* Payload and result of a chain are in place, and what one function passes to the other is not. */
static void chains(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    rfaas_function twice = find(l, "twice"), chain = 0, small = 0;
    rfaas_call_options o = options();
    size_t n = 0;
    OK(rfaas_lease_chain(l, twice, twice, &chain));
    fill(a, MIB, 8);
    OK(rfaas_invoke(l, chain, a, MIB, b, MIB, &n, &o));
    CHECK(n == MIB && b[0] == 32 && b[MIB / 8 - 1] == 4 * (8 + MIB / 8 - 1) && a[0] == 8);
    OK(rfaas_lease_chain(l, find(l, "spread"), find(l, "head"), &small));
    if (in_place) {
        a[0] = MIB;
        OK(rfaas_invoke(l, small, a, BIG, b, BIG, &n, &o));
        CHECK(n == 8 && b[0] == MIB);
    }
    a[0] = MIB + 8;
    FAILS(rfaas_invoke(l, small, a, 4096, b, 4096, &n, &o), RFAAS_FUNCTION_FAILED, "spread, the first function of a chain, ");
    CHECK(strstr(rfaas_last_error(), "its result has 1048584 bytes, and in this lease a chain passes on at most 1048576"));
}

static void refusals(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    rfaas_function twice = find(l, "twice");
    rfaas_call_options o = options();
    size_t n = 77;
    FAILS(rfaas_invoke(l, twice, a + 1, 4096, b, 4096, &n, &o), RFAAS_INVALID, "the payload in place, is not a multiple of 64");
    FAILS(rfaas_invoke(l, twice, a, 4096, b + 1, 4096, &n, &o), RFAAS_INVALID, "the result in place, is not a multiple of 64");
    FAILS(rfaas_invoke(l, twice, a, 4096, a + 8, 4096, &n, &o), RFAAS_INVALID, "overlap");
    FAILS(rfaas_invoke(l, twice, a, 4096, a, 4096, &n, &o), RFAAS_INVALID, "separate them");
    rfaas_request r = 5;
    FAILS(rfaas_iinvoke(l, twice, a, 4096, a, 4096, &o, &r), RFAAS_INVALID, "overlap");
    o.repeats = 1;
    o.attempt_ns = 1000000000;
    FAILS(rfaas_invoke(l, twice, a, 4096, b, 4096, &n, &o), RFAAS_INVALID, "attempt_ns is 1000000000");
    o.flags = 4;
    FAILS(rfaas_invoke(l, twice, a, 4096, b, 4096, &n, &o), RFAAS_INVALID, "0x4");
    CHECK(n == 77 && r == 5);
    o = options();
    CHECK(rfaas_invoke(l, twice, a + 1, 1000, b + 1, 1000, &n, &o) == RFAAS_OK); /* too small to be worth it */
}

/* A payload is read-only. Its worker ends, the payload does not change, and the new worker uses the same memory. */
static void written_payload(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    rfaas_call_options o = options();
    size_t n = 0;
    fill(a, MIB, 1);
    if (in_place)
        FAILS(rfaas_invoke(l, find(l, "scribble"), a, MIB, b, 8, &n, &o), RFAAS_WORKER_DIED, "function scribble of worker");
    else
        OK(rfaas_invoke(l, find(l, "scribble"), a, MIB, b, 8, &n, &o));
    CHECK(a[0] == 1 && a[MIB / 8 - 1] == MIB / 8);
    OK(rfaas_invoke(l, find(l, "twice"), a, MIB, b, MIB, &n, &o));
    CHECK(doubled(b, MIB, 1));
}

/* A call that was given up still uses the memory, which cannot be freed before it has ended. */
static void given_up(rfaas_lease *l, uint64_t *a) {
    rfaas_call_options o = options();
    size_t n = 0;
    void *c;
    if (!in_place)
        return;
    OK(rfaas_alloc(l, 4096, &c));
    memset(c, 1, 4096);
    o.worker = 0;
    OK(rfaas_invoke(l, find(l, "twice"), a, 8, a + 1024, 8, &n, &o)); /* so that the next one does not wait for a new worker */
    a[0] = 0;
    o.timeout_ns = 20000000;
    FAILS(rfaas_invoke(l, find(l, "watch"), a, 4096, c, 4096, &n, &o), RFAAS_DEADLINE, "");
    FAILS(rfaas_free(l, c), RFAAS_BUSY, "calls in flight");
    CHECK(((volatile char *)c)[100] == 1);
    __atomic_store_n((char *)a, 1, __ATOMIC_RELEASE); /* the function sees it */
    o.timeout_ns = 0;
    OK(rfaas_invoke(l, find(l, "twice"), a, 4096, a + 1024, 4096, &n, &o)); /* after that call */
    CHECK(((volatile char *)c)[100] == 0x77);
    OK(rfaas_free(l, c));
}

/* RFAAS_CALL_KILL: the call ends after the worker has ended, so nothing uses the memory any more. */
static void killed(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    for (int kind = 0; kind < 2 && in_place; kind++) {
        rfaas_call_options o = options();
        rfaas_worker_start start = {.struct_size = sizeof start};
        void *c;
        OK(rfaas_alloc(l, 4096, &c));
        OK(rfaas_worker_origin(l, 0, &start));
        a[0] = 0;
        o.flags |= RFAAS_CALL_KILL;
        o.timeout_ns = 20000000;
        o.worker = 0;
        rfaas_request r;
        if (kind)
            OK(rfaas_iinvoke(l, find(l, "watch"), a, 4096, c, 4096, &o, &r));
        FAILS(kind ? rfaas_wait(&r, NULL) : rfaas_invoke(l, find(l, "watch"), a, 4096, c, 4096, NULL, &o), RFAAS_DEADLINE,
              "the worker is killed and replaced");
        CHECK(kill((pid_t)start.pid, 0) && errno == ESRCH);
        OK(rfaas_free(l, c));
        fill(a, MIB, 2);
        o = options(); /* without a time limit */
        OK(rfaas_invoke(l, find(l, "twice"), a, MIB, b, MIB, NULL, &o));
        CHECK(doubled(b, MIB, 2));
    }
}

/* After the end of a lease, its worker may still write to a result in place. So the call is not repeated, although the lease can move. */
static void lease_ends(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_call_options c = options();
    rfaas_statistics s = {.struct_size = sizeof s};
    rfaas_lease *l;
    uint64_t *a;
    o.library = getenv("TEST_LIBRARY");
    o.flags = RFAAS_LEASE_FAILOVER;
    o.duration_ns = 100000000;
    OK(rfaas_lease_open(session, &o, &l));
    OK(rfaas_alloc(l, 8192, (void **)&a));
    a[0] = 0;
    c.repeats = 1;
    FAILS(rfaas_invoke(l, find(l, "watch"), a, 4096, a + 512, 4096, NULL, &c), RFAAS_LEASE_ENDED, "the lease on");
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.repeated == 0);
    OK(rfaas_lease_release(l));
}

typedef struct caller {
    rfaas_lease *l;
    rfaas_function f;
    uint64_t *a, *b;
    uint64_t seed;
} caller;

static void *calls(void *arg) {
    const caller *c = arg;
    rfaas_call_options o = options();
    for (uint64_t i = 0; i < 200; i++) {
        size_t n = 0;
        fill(c->a, 65536, c->seed + i);
        OK(rfaas_invoke(c->l, c->f, c->a, 65536, c->b, 65536, &n, &o));
        CHECK(n == 65536 && doubled(c->b, n, c->seed + i));
    }
    return NULL;
}

/* Other buffers come and go meanwhile. */
static void *allocates(void *arg) {
    for (int i = 0; i < 500; i++) {
        void *some[4];
        for (int k = 0; k < 4; k++)
            OK(rfaas_alloc(arg, 4096, &some[k]));
        for (int k = 0; k < 4; k++)
            while (rfaas_free(arg, some[k]) == RFAAS_BUSY) {
            }
    }
    return NULL;
}

static void threads(rfaas_lease *l, uint64_t *a, uint64_t *b) {
    enum { THREADS = 4 };
    pthread_t t[THREADS], other;
    caller c[THREADS];
    pthread_create(&other, NULL, allocates, l);
    for (int i = 0; i < THREADS; i++) {
        c[i] = (caller){l, find(l, "twice"), a + i * 8192, b + i * 8192, (uint64_t)i << 32};
        pthread_create(&t[i], NULL, calls, &c[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    pthread_join(other, NULL);
}

/* Payloads and results that are larger than the bulk area of a lease without settings. */
static void in_parts(void) {
    const bool emulated = !strcmp(what, "verbs"); /* its device is, so less must do */
    const size_t unit = emulated ? 65536 : MIB, ten = 10 * unit + 8;
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_call_options repeated = RFAAS_CALL_OPTIONS_INIT, placed = options();
    rfaas_lease *l = NULL, *m = NULL;
    rfaas_request r[2];
    uint64_t *in = malloc(ten), *out = malloc(ten), *other = malloc(ten), seed = 1;
    void *a;
    size_t n = 0;
    o.library = getenv("TEST_LIBRARY");
    o.flags = RFAAS_LEASE_LOCAL;
    if (emulated) {
        o.bulk = 2 * unit;
        o.bulk_max = 1 << 30;
    }
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_function twice = find(l, "twice");
    repeated.repeats = 2;
    for (; seed < 4; seed++) { /* later calls reuse the worker's memory */
        fill(in, ten, seed);
        memset(out, 0, ten);
        OK(rfaas_invoke(l, twice, in, ten, out, ten, &n, seed == 2 ? &repeated : NULL));
        CHECK(n == ten && doubled(out, n, seed));
    }
    fill(in, ten, seed);
    OK(rfaas_iinvoke(l, twice, in, ten, out, ten, NULL, &r[0]));
    fill(in, ten, seed + 9); /* the payload may be reused */
    OK(rfaas_iinvoke(l, twice, in, ten, other, ten, &repeated, &r[1]));
    OK(rfaas_wait(&r[1], &n));
    CHECK(n == ten && doubled(other, n, seed + 9));
    OK(rfaas_wait(&r[0], &n));
    CHECK(n == ten && doubled(out, n, seed));
    rfaas_piece from[] = {RFAAS_PIECE(in, 8), RFAAS_PIECE(in + 1, ten - 8)}, to = RFAAS_PIECE(out, ten);
    OK(rfaas_invokev(l, twice, from, 2, &to, 1, &n, NULL));
    CHECK(n == ten && doubled(out, n, seed + 9));
    OK(rfaas_alloc(l, ten, &a)); /* payload in place, large result not */
    fill(a, ten, 5);
    OK(rfaas_invoke(l, twice, a, ten, out, ten, &n, &placed));
    CHECK(n == ten && doubled(out, n, 5));
    OK(rfaas_invoke(l, twice, in, 80, out, ten, &n, NULL));
    CHECK(n == 80 && doubled(out, n, seed + 9));
    o.bulk = unit;
    o.bulk_max = 3 * unit;
    OK(rfaas_lease_release(l));
    OK(rfaas_lease_open(session, &o, &m));
    OK(rfaas_invoke(m, find(m, "twice"), in, 3 * unit, out, 3 * unit, &n, NULL));
    CHECK(n == 3 * unit && doubled(out, n, seed + 9));
    FAILS(rfaas_invoke(m, find(m, "twice"), in, 3 * unit + 8, out, 3 * unit, &n, NULL), RFAAS_TOO_LARGE, "; raise bulk_max");
    CHECK(emulated || strstr(rfaas_last_error(), "payload of 3145736 and capacity of 3145728 bytes, this lease carries up to 3145728 (eager 16384, "
                                                 "bulk 1048576)"));
    OK(rfaas_lease_release(m));
    o.bulk_max = (4ull << 30) + 1;
    FAILS(rfaas_lease_open(session, &o, &m), RFAAS_INVALID, "bulk_max 4294967297 bytes, want at most 4294967296");
    o.bulk_max = 1;
    o.bulk = RFAAS_NO_BULK;
    FAILS(rfaas_lease_open(session, &o, &m), RFAAS_INVALID, "bulk_max 1 bytes with RFAAS_NO_BULK");
    free(in);
    free(out);
    free(other);
}

/* Counts the mappings of a process that have `bytes` bytes, not private. */
static int mappings(int pid, size_t bytes) {
    char path[64], line[512];
    int n = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        unsigned long long from, to;
        char mode[8];
        n += sscanf(line, "%llx-%llx %7s", &from, &to, mode) == 3 && to - from == bytes && mode[3] == 's';
    }
    if (f)
        fclose(f);
    return n;
}

/* A worker maps a buffer to read and to write when a call needs it, and unmaps it after rfaas_free and after the lease. */
static void memory_of_worker(void) {
    enum { ODD = 3 * MIB + 4096 };
    rfaas_lease *l = take(1);
    rfaas_worker_start start = {.struct_size = sizeof start};
    rfaas_call_options o = options();
    void *a, *b;
    size_t n;
    OK(rfaas_worker_origin(l, 0, &start));
    OK(rfaas_alloc(l, ODD, &a));
    CHECK(mappings((int)start.pid, ODD) == 0);
    OK(rfaas_invoke(l, find(l, "twice"), a, 4096, (char *)a + MIB, 4096, &n, &o));
    CHECK(mappings((int)start.pid, ODD) == 2);
    OK(rfaas_free(l, a));
    OK(rfaas_alloc(l, ODD, &b));
    OK(rfaas_invoke(l, find(l, "twice"), b, 4096, (char *)b + MIB, 4096, &n, &o));
    CHECK(mappings((int)start.pid, ODD) == 2);
    OK(rfaas_lease_release(l));
    for (double end = now() + 20; mappings((int)start.pid, ODD) && now() < end;)
        usleep(1000);
    CHECK(mappings((int)start.pid, ODD) == 0);
    for (int i = 0; i < 3; i++) { /* with cached workers */
        l = take(1);
        OK(rfaas_alloc(l, BIG, &a));
        OK(rfaas_alloc(l, BIG, &b));
        good_calls(l, a, (uint64_t *)b);
        OK(rfaas_lease_release(l));
    }
}

void everything(void) {
    void *a, *b;
    in_place = !strcmp(what, "shm");
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    if (!strcmp(what, "here"))
        lease(2, 4, RFAAS_WAIT_WARM); /* no core is left */
    rfaas_lease *l = take(2);
    OK(rfaas_alloc(l, BIG, &a));
    OK(rfaas_alloc(l, BIG, &b));
    good_calls(l, a, b);
    mixed_calls(l, a, b);
    chains(l, a, b);
    refusals(l, a, b);
    written_payload(l, a, b);
    given_up(l, a);
    killed(l, a, b);
    threads(l, a, b);
    OK(rfaas_free(l, a));
    OK(rfaas_lease_release(l));
    in_parts();
    if (in_place) {
        memory_of_worker();
        lease_ends();
    }
    OK(rfaas_finalize());
}

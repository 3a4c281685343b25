/* Test of many calls at once through rfaas.h: waitall, waitany, map, registered memory, statistics. Needs what
 * api_test.c needs. Exit status 0: all good. */
#include "check.h"

#include <math.h>

/* The u64s 1..n come back doubled, by a library of this program's own directory: argv[2]. */
static rfaas_lease *doubling(uint32_t workers, uint32_t depth, uint32_t eager) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l = NULL;
    o.library = getenv("TEST_LIBRARY");
    o.workers = workers;
    o.depth = depth;
    o.bulk = 2 << 20;
    o.eager = eager;
    if (rfaas_lease_open(session, &o, &l)) {
        report(__LINE__, "lease");
        exit(1);
    }
    return l;
}

static void all(void) {
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE), *other = NULL;
    rfaas_function echo = find(l, "echo"), fail = find(l, "fail");
    rfaas_request r[5];
    uint64_t out[5];
    size_t sizes[5];
    int statuses[5];
    OK(rfaas_waitall(0, NULL, NULL, NULL));
    FAILS(rfaas_waitall(2, NULL, NULL, NULL), RFAAS_INVALID, "requests is NULL with count 2");
    for (uint64_t i = 0; i < 5; i++)
        OK(rfaas_iinvoke(l, i == 2 ? fail : echo, &i, sizeof i, &out[i], 8, NULL, &r[i]));
    OK(rfaas_wait(&r[4], NULL));
    FAILS(rfaas_waitall(5, r, sizes, statuses), RFAAS_FUNCTION_FAILED, "request 2 of 5");
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED);
    for (int i = 0; i < 5; i++) {
        CHECK(r[i] == RFAAS_REQUEST_NULL);
        CHECK(statuses[i] == (i == 2 ? RFAAS_FUNCTION_FAILED : RFAAS_OK));
        CHECK(i == 2 || (sizes[i] == (i == 4 ? 0u : 8u) && out[i] == (uint64_t)i));
    }
    OK(rfaas_waitall(5, r, sizes, statuses)); /* null requests */
    OK(rfaas_lease_release(l));

    /* Requests of two leases. */
    l = lease(1, 4, RFAAS_WAIT_ADAPTIVE);
    other = lease(1, 4, RFAAS_WAIT_WARM);
    for (uint64_t i = 0; i < 4; i++)
        OK(rfaas_iinvoke(i % 2 ? l : other, echo, &i, sizeof i, &out[i], 8, NULL, &r[i]));
    OK(rfaas_waitall(4, r, NULL, NULL));
    for (uint64_t i = 0; i < 4; i++)
        CHECK(out[i] == i);

    /* The one that ends first comes first, whichever lease it is of. */
    rfaas_function sleep_ns = find(l, "sleep_ns");
    uint64_t ns[3] = {700000000, 20000000, 700000000}; /* the last one begins when the first one ends */
    for (int i = 0; i < 3; i++)
        OK(rfaas_iinvoke(i == 1 ? other : l, sleep_ns, &ns[i], 8, &out[i], 8, NULL, &r[i]));
    size_t at, n;
    OK(rfaas_waitany(3, r, &at, &n));
    CHECK(at == 1 && n == 8 && out[1] == ns[1] && !r[1] && r[0] && r[2]);
    OK(rfaas_waitany(3, r, &at, &n));
    CHECK(at == 0);
    OK(rfaas_waitany(3, r, &at, &n));
    CHECK(at == 2);
    OK(rfaas_waitany(3, r, &at, &n));
    CHECK(at == RFAAS_UNDEFINED && n == 0);
    OK(rfaas_waitany(0, NULL, &at, NULL));

    /* For a while only. */
    OK(rfaas_waitany_for(3, r, 1000000000, &at, &n));
    CHECK(at == RFAAS_UNDEFINED && n == 0);
    OK(rfaas_iinvoke(l, sleep_ns, &ns[0], 8, &out[0], 8, NULL, &r[0]));
    double before = now();
    OK(rfaas_waitany_for(3, r, 0, &at, &n));
    OK(rfaas_waitany_for(3, r, -1, &at, &n));
    OK(rfaas_waitany_for(3, r, 20000000, &at, &n));
    CHECK(at == RFAAS_UNDEFINED && r[0] && now() - before > 0.019 && now() - before < 0.6);
    OK(rfaas_waitany_for(3, r, INT64_MAX, &at, &n));
    CHECK(at == 0 && n == 8 && out[0] == ns[0] && !r[0]);
    r[2] = 0xdeadbeefcafe;
    CHECK(rfaas_waitany(3, r, &at, &n) == RFAAS_INVALID && at == 2);
    r[2] = RFAAS_REQUEST_NULL;

    /* A deadline ends a wait for any, too. */
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.timeout_ns = 10000000;
    uint64_t longer = 1000000000;
    double start = now();
    OK(rfaas_iinvoke(l, sleep_ns, &longer, 8, &out[0], 8, &o, &r[0]));
    CHECK(rfaas_waitany(1, r, &at, &n) == RFAAS_DEADLINE && at == 0 && now() - start < 0.9);

    /* What is known of a lease without a message. */
    rfaas_worker_start from = {.struct_size = sizeof from};
    rfaas_lease_details about = {.struct_size = sizeof about};
    OK(rfaas_lease_status(l));
    OK(rfaas_worker_origin(l, 0, &from));
    CHECK(from.pid > 1 && from.start <= RFAAS_START_CACHED);
    FAILS(rfaas_worker_origin(l, 99, &from), RFAAS_INVALID, "worker 99");
    FAILS(rfaas_worker_origin(l, 0, NULL), RFAAS_INVALID, "start is NULL");
    from.struct_size = 4;
    FAILS(rfaas_worker_origin(l, 0, &from), RFAAS_INVALID, "struct_size");
    OK(rfaas_lease_info(l, &about));
    CHECK(about.functions > 1 && rfaas_lease_function_name(l, about.functions - 1) && !rfaas_lease_function_name(l, about.functions));
    CHECK(strcmp(rfaas_lease_function_name(l, sleep_ns), "sleep_ns") == 0);
    FAILS(rfaas_lease_function(l, "sleep_nz", &sleep_ns), RFAAS_NO_FUNCTION, "did you mean \"sleep_ns\"?");
    OK(rfaas_lease_release(other));
    OK(rfaas_lease_release(l));
    FAILS(rfaas_lease_status(l), RFAAS_INVALID, "released");
    CHECK(rfaas_session_cached(session) >= 0 && !rfaas_lease_function_name(l, 0));
    FAILS(rfaas_session_cached(NULL), RFAAS_INVALID, "session is NULL");
}

/* One worker answers in order, so nobody may be passed over for long. */
static void any_is_fair(void) {
    rfaas_lease *l = lease(1, 8, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo");
    rfaas_request r[8];
    uint64_t out[8];
    int seen[8] = {0};
    for (uint64_t i = 0; i < 8; i++)
        OK(rfaas_iinvoke(l, echo, &i, 8, &out[i], 8, NULL, &r[i]));
    for (int k = 0; k < 800; k++) {
        size_t at, n;
        uint64_t v = (uint64_t)k;
        OK(rfaas_waitany(8, r, &at, &n));
        if (at > 7) {
            report(__LINE__, "index");
            break;
        }
        seen[at]++;
        OK(rfaas_iinvoke(l, echo, &v, 8, &out[at], 8, NULL, &r[at]));
    }
    for (int i = 0; i < 8; i++)
        CHECK(seen[i] >= 50);
    OK(rfaas_waitall(8, r, NULL, NULL));
    OK(rfaas_lease_release(l));
}

static void map_n(rfaas_lease *l, rfaas_function f, size_t n, size_t chunk) {
    uint64_t *in = malloc(n * 8 + 8), *out = calloc(n + 1, 8);
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    o.chunk = chunk;
    for (size_t i = 0; i < n; i++)
        in[i] = i + 1;
    out[n] = 77; /* nothing is written behind the end */
    OK(rfaas_map(l, f, in, 8, out, 8, n, chunk ? &o : NULL));
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++)
        wrong += out[i] != 2 * (i + 1);
    CHECK(wrong == 0 && out[n] == 77);
    free(in);
    free(out);
}

static void maps(void) {
    rfaas_lease *l = doubling(2, 8, 4096);
    rfaas_function twice = find(l, "twice"), odd = find(l, "odd"), picky = find(l, "picky"), slow = find(l, "slow");
    static const size_t counts[] = {0, 1, 2, 3, 17, 1000, 100003};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        map_n(l, twice, counts[k], 0);
        map_n(l, twice, counts[k], 7);
        map_n(l, twice, counts[k], 512);
    }
    map_n(l, twice, 100003, 100000); /* chunks of bulk size */
    static uint64_t in[1000], out[1000];
    for (size_t i = 0; i < 1000; i++)
        in[i] = i;
    OK(rfaas_map(l, twice, in, 8, NULL, 0, 0, NULL));
    FAILS(rfaas_map(l, 999, in, 8, out, 8, 5, NULL), RFAAS_NO_FUNCTION, "999");
    FAILS(rfaas_map(l, twice, in, 0, out, 8, 5, NULL), RFAAS_INVALID, "in_item is 0");
    FAILS(rfaas_map(l, twice, in, 8, out, 8, SIZE_MAX / 4, NULL), RFAAS_INVALID, "more than memory");
    FAILS(rfaas_map(l, twice, in, 1u << 30, out, 8, 1, NULL), RFAAS_TOO_LARGE, "1073741824");
    rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
    o.chunk = 1 << 20;
    FAILS(rfaas_map(l, twice, in, 8, out, 8, 1000, &o), RFAAS_TOO_LARGE, "8388608");
    o.chunk = 0;
    o.timeout_ns = -3;
    FAILS(rfaas_map(l, twice, in, 8, out, 8, 1000, &o), RFAAS_INVALID, "-3");
    o.struct_size = 2;
    FAILS(rfaas_map(l, twice, in, 8, out, 8, 1000, &o), RFAAS_INVALID, "struct_size");
    /* A result of the wrong size, and an item that the function does not take. */
    FAILS(rfaas_map(l, odd, in, 8, out, 8, 1000, NULL), RFAAS_FUNCTION_FAILED, "want");
    rfaas_map_options single = RFAAS_MAP_OPTIONS_INIT;
    single.chunk = 1;
    FAILS(rfaas_map(l, picky, in, 8, out, 8, 1000, &single), RFAAS_FUNCTION_FAILED, "items 700..700");
    CHECK(strstr(rfaas_last_error(), "item 700"));
    map_n(l, twice, 1000, 0); /* the lease is good */
    /* A deadline. */
    single.timeout_ns = 30000000;
    double start = now();
    CHECK(rfaas_map(l, slow, in, 8, out, 8, 1000, &single) == RFAAS_DEADLINE && now() - start < 1);
    map_n(l, twice, 100, 0); /* although all slots were given up */

    /* Requests of the program's own in the same lease keep their slots, and take all of them. */
    rfaas_request r[16];
    uint64_t back[16];
    for (int i = 0; i < 5; i++)
        OK(rfaas_iinvoke(l, twice, &in[i], 8, &back[i], 8, NULL, &r[i]));
    map_n(l, twice, 5000, 3);
    for (int i = 5; i < 16; i++)
        OK(rfaas_iinvoke(l, twice, &in[i], 8, &back[i], 8, NULL, &r[i]));
    CHECK(rfaas_map(l, twice, in, 8, out, 8, 1000, NULL) == RFAAS_BUSY);
    OK(rfaas_waitall(16, r, NULL, NULL));
    for (uint64_t i = 0; i < 16; i++)
        CHECK(back[i] == 2 * i);
    map_n(l, twice, 5000, 3);
    OK(rfaas_lease_release(l));

    /* A worker that dies fails the map, and nothing of it is left to kill workers of the next. */
    l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo"), crash = find(l, "crash");
    for (size_t items = 1; items <= 10; items += 9) {
        CHECK(rfaas_map(l, crash, in, 8, out, 8, items, NULL) == RFAAS_WORKER_DIED && strstr(rfaas_last_error(), "SIGSEGV"));
        for (int k = 0; k < 50; k++) {
            memset(out, 0, sizeof out);
            OK(rfaas_map(l, echo, in, 8, out, 8, 1000, NULL));
            CHECK(!memcmp(in, out, sizeof in));
        }
    }
    OK(rfaas_lease_release(l));

    /* What is under way when an item fails is waited for; what takes too long loses its worker. */
    l = doubling(2, 4, 4096);
    rfaas_function late = find(l, "late"), ends = find(l, "never");
    twice = find(l, "twice");
    start = now();
    single.timeout_ns = 0;
    FAILS(rfaas_map(l, late, in, 8, out, 8, 8, &single), RFAAS_FUNCTION_FAILED, "item 0 fails");
    CHECK(now() - start > 0.1 && now() - start < 2);
    start = now();
    FAILS(rfaas_map(l, ends, in, 8, out, 8, 8, &single), RFAAS_FUNCTION_FAILED, "item 0 fails");
    CHECK(now() - start > 0.9 && now() - start < 4);
    rfaas_statistics s = {.struct_size = sizeof s};
    for (int w = 0; w < 2; w++)
        map_n(l, twice, 1000, 0);
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.replaced >= 1 && s.replaced <= 2);
    OK(rfaas_lease_release(l));
}

static rfaas_function chain(rfaas_lease *l, rfaas_function first, rfaas_function second) {
    rfaas_function c = 0;
    OK(rfaas_lease_chain(l, first, second, &c));
    return c;
}

static uint64_t calls_of(rfaas_lease *l, uint64_t *failed) {
    rfaas_worker_details d = {.struct_size = sizeof d};
    OK(rfaas_worker_info(l, 0, &d));
    *failed = d.failed;
    return d.calls;
}

/* Two functions in one call, by each way to call. */
static void chains(void) {
    rfaas_lease *l = doubling(1, 4, 4096);
    rfaas_function twice = find(l, "twice"), same = find(l, "same"), picky = find(l, "picky"), four = chain(l, twice, twice), c = 7;
    static uint64_t in[1000], out[1000];
    size_t n = 0;
    for (size_t i = 0; i < 1000; i++)
        in[i] = i;
    OK(rfaas_invoke(l, four, in, sizeof in, out, sizeof out, &n, NULL));
    CHECK(n == sizeof out && out[999] == 3996);
    rfaas_piece from[] = {RFAAS_PIECE(&in[1], 8), RFAAS_PIECE(&in[5], 8)}, to[] = {RFAAS_PIECE(&out[1], 8), RFAAS_PIECE(&out[0], 8)};
    OK(rfaas_invokev(l, four, from, 2, to, 2, &n, NULL));
    CHECK(n == 16 && out[1] == 4 && out[0] == 20);
    map_n(l, chain(l, twice, same), 1000, 3);
    rfaas_map_options each = RFAAS_MAP_OPTIONS_INIT;
    each.chunk = 1;
    FAILS(rfaas_map(l, chain(l, same, picky), in, 8, out, 8, 1000, &each), RFAAS_FUNCTION_FAILED, "picky, the second function of a chain, on worker 0");
    FAILS(rfaas_invoke(l, chain(l, picky, same), &in[700], 8, out, 8, NULL, NULL), RFAAS_FUNCTION_FAILED,
          "picky, the first function of a chain, on worker 0 failed: item 700");
    rfaas_request r;
    OK(rfaas_iinvoke(l, chain(l, twice, picky), &in[350], 8, out, 8, NULL, &r));
    FAILS(rfaas_wait(&r, NULL), RFAAS_FUNCTION_FAILED, "picky, the second function of a chain, on worker 0 failed: item 700");
    FAILS(rfaas_invoke(l, four, in, 16, out, 8, &n, NULL), RFAAS_RESULT_TOO_LARGE, "invoke twice, then twice: result of 16 bytes, the capacity is 8");
    CHECK(n == 16 && !rfaas_lease_function_name(l, four));

    /* Two calls of the worker, or one if the first function fails. */
    uint64_t failed, before, calls = calls_of(l, &before);
    OK(rfaas_invoke(l, four, in, 8, out, 8, NULL, NULL));
    CHECK(calls_of(l, &failed) == calls + 2 && failed == before);
    CHECK(rfaas_invoke(l, chain(l, picky, same), &in[700], 8, out, 8, NULL, NULL) == RFAAS_FUNCTION_FAILED);
    CHECK(calls_of(l, &failed) == calls + 3 && failed == before + 1);

    FAILS(rfaas_lease_chain(l, four, twice, &c), RFAAS_INVALID, "is a chain itself");
    FAILS(rfaas_lease_chain(l, twice, four, &c), RFAAS_INVALID, "is a chain itself");
    FAILS(rfaas_lease_chain(l, twice, 99, &c), RFAAS_NO_FUNCTION, "function 99, the library has functions 0..");
    FAILS(rfaas_lease_chain(l, twice, 65535, &c), RFAAS_NO_FUNCTION, "function 65535");
    FAILS(rfaas_lease_chain(l, twice, twice, NULL), RFAAS_INVALID, "chain is NULL");
    FAILS(rfaas_lease_chain(NULL, twice, twice, &c), RFAAS_INVALID, "NULL");
    FAILS(rfaas_invoke(l, twice | 100u << 16, in, 8, out, 8, NULL, NULL), RFAAS_NO_FUNCTION, "function 6553"); /* made by hand */
    CHECK(c == 7);
    OK(rfaas_lease_release(l));
}

static void subtract(void *accumulator, const void *result, size_t size, void *arg) {
    double *a = accumulator;
    const double *r = result;
    CHECK(size == 16);
    CHECK(r[1] == (double)(*(uint64_t *)arg)++); /* in the order of the items */
    *a = *a / 2 - r[0];
}

/* Results are combined in the order of the items, however the calls are divided and whichever is answered first. */
static void reductions(void) {
    rfaas_lease *l = doubling(2, 8, 4096);
    rfaas_function fractions = find(l, "fractions"), twice = find(l, "twice"), picky = find(l, "picky"), odd = find(l, "odd");
    enum { N = 20000 };
    static uint64_t in[N];
    double sum[2] = {0.1, 0}, folded = 1;
    for (uint64_t i = 0; i < N; i++) {
        in[i] = i;
        sum[0] += 1 / ((double)i + 3);
        sum[1] += (double)i;
        folded = folded / 2 - 1 / ((double)i + 3);
    }
    static const size_t chunks[] = {0, 1, 7, 512, 20000};
    for (size_t k = 0; k < sizeof chunks / sizeof *chunks; k++) {
        rfaas_map_options o = RFAAS_MAP_OPTIONS_INIT;
        double got[2] = {0.1, 0}, other = 1;
        uint64_t next = 0;
        o.chunk = chunks[k];
        OK(rfaas_reduce(l, fractions, in, 8, got, 16, N, RFAAS_SUM, RFAAS_FLOAT64, &o));
        CHECK(!memcmp(got, sum, sizeof sum));
        OK(rfaas_reduce_with(l, fractions, in, 8, &other, 16, N, subtract, &next, &o));
        CHECK(other == folded && next == N);
    }
    double most[2] = {-1, -1}, least[2] = {9, 9};
    OK(rfaas_reduce(l, fractions, in, 8, most, 16, N, RFAAS_MAX, RFAAS_FLOAT64, NULL));
    CHECK(most[0] == 1.0 / 3 && most[1] == N - 1);
    OK(rfaas_reduce(l, fractions, in, 8, least, 16, N, RFAAS_MIN, RFAAS_FLOAT64, NULL));
    CHECK(least[0] == 1 / (N + 2.0) && least[1] == 0);

    /* Elements of each type. The function doubles the bits, and the accumulator need not be aligned. */
    union {
        int64_t i64[2];
        int32_t i32[4];
        float f[4];
        char bytes[17];
    } a;
    int64_t pairs[][2] = {{5, INT64_MAX / 4}, {-7, INT64_MAX / 4}, {3, INT64_MAX / 4}};
    memset(&a, 0, sizeof a);
    OK(rfaas_reduce(l, twice, pairs, 16, a.bytes + 1, 16, 3, RFAAS_SUM, RFAAS_INT64, NULL));
    memmove(a.bytes, a.bytes + 1, 16);
    CHECK(a.i64[0] == 2 && a.i64[1] == (int64_t)(6 * (uint64_t)(INT64_MAX / 4))); /* which has wrapped around */
    a.i64[0] = a.i64[1] = 0;
    OK(rfaas_reduce(l, twice, pairs, 16, a.i64, 16, 3, RFAAS_MIN, RFAAS_INT64, NULL));
    CHECK(a.i64[0] == -14 && a.i64[1] == 0);
    int32_t quads[][4] = {{1, -2, 3, -4}, {-1, -1, 5, -5}};
    memset(&a, 0, sizeof a);
    OK(rfaas_reduce(l, twice, quads[0], 16, a.i32, 16, 0, RFAAS_SUM, RFAAS_INT32, NULL)); /* no items */
    CHECK(a.i64[0] == 0 && a.i64[1] == 0);
    a.i32[2] = 4;
    OK(rfaas_reduce(l, find(l, "same"), quads, 16, a.i32, 16, 2, RFAAS_MAX, RFAAS_INT32, NULL));
    CHECK(a.i32[0] == 1 && a.i32[1] == 0 && a.i32[2] == 5 && a.i32[3] == 0);
    float rows[][4] = {{1.5f, 0.25f, -1, NAN}, {2, 0.5f, -3, 4}};
    memset(&a, 0, sizeof a);
    OK(rfaas_reduce(l, find(l, "same"), rows, 16, a.f, 16, 2, RFAAS_SUM, RFAAS_FLOAT32, NULL));
    CHECK(a.f[0] == 3.5f && a.f[1] == 0.75f && a.f[2] == -4 && isnan(a.f[3]));
    memset(&a, 0, sizeof a);
    OK(rfaas_reduce(l, find(l, "same"), rows, 16, a.f, 16, 2, RFAAS_MIN, RFAAS_FLOAT32, NULL));
    CHECK(a.f[2] == -3 && a.f[3] == 0); /* NaN is ignored */

    double d[2] = {0, 0};
    FAILS(rfaas_reduce(l, twice, in, 8, d, 8, 5, 4, RFAAS_FLOAT64, NULL), RFAAS_INVALID, "operation is 4");
    FAILS(rfaas_reduce(l, twice, in, 8, d, 8, 5, RFAAS_SUM, 0, NULL), RFAAS_INVALID, "type is 0");
    FAILS(rfaas_reduce(l, twice, in, 8, d, 12, 5, RFAAS_SUM, RFAAS_FLOAT64, NULL), RFAAS_INVALID, "12 bytes");
    FAILS(rfaas_reduce(l, twice, in, 8, d, 0, 5, RFAAS_SUM, RFAAS_FLOAT64, NULL), RFAAS_INVALID, "out_item is 0");
    FAILS(rfaas_reduce(l, twice, in, 8, NULL, 8, 5, RFAAS_SUM, RFAAS_FLOAT64, NULL), RFAAS_INVALID, "accumulator is NULL");
    FAILS(rfaas_reduce_with(l, twice, in, 8, d, 8, 5, NULL, NULL, NULL), RFAAS_INVALID, "combine is NULL");
    FAILS(rfaas_reduce(NULL, twice, in, 8, d, 8, 5, RFAAS_SUM, RFAAS_FLOAT64, NULL), RFAAS_INVALID, "NULL");
    FAILS(rfaas_reduce(l, odd, in, 8, d, 8, 1000, RFAAS_SUM, RFAAS_INT64, NULL), RFAAS_FUNCTION_FAILED, "reduce: odd");
    rfaas_map_options single = RFAAS_MAP_OPTIONS_INIT;
    single.chunk = 1;
    FAILS(rfaas_reduce(l, picky, in, 8, d, 8, 1000, RFAAS_SUM, RFAAS_INT64, &single), RFAAS_FUNCTION_FAILED, "items 700..700");
    map_n(l, twice, 1000, 0); /* the lease is good */
    OK(rfaas_lease_release(l));
}

static void registered(void) {
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function sum = find(l, "sum"), sleep_ns = find(l, "sleep_ns");
    size_t size = 1 << 20;
    unsigned char *b = malloc(size + 3);
    void *a = NULL;
    memset(b, 1, size + 3);
    FAILS(rfaas_register(l, b, 0), RFAAS_INVALID, "size 0");
    OK(rfaas_register(l, b + 3, size));
    FAILS(rfaas_register(l, b, 4), RFAAS_INVALID, "overlap");
    FAILS(rfaas_register(l, b + size + 2, 1), RFAAS_INVALID, "overlap");
    OK(rfaas_register(l, b, 3));
    OK(rfaas_alloc(l, 100000, &a));
    memset(a, 1, 100000);
    static const size_t sizes[] = {0, 1, 17000, 1 << 20};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t s = 0;
        OK(rfaas_invoke(l, sum, b + 3, sizes[k], &s, 8, NULL, NULL));
        CHECK(s == sizes[k]);
    }
    uint64_t s = 0;
    OK(rfaas_invoke(l, sum, b + 1, size, &s, 8, NULL, NULL)); /* across two buffers: copied */
    CHECK(s == size);
    OK(rfaas_invoke(l, sum, a, 100000, &s, 8, NULL, NULL));
    CHECK(s == 100000);
    FAILS(rfaas_unregister(l, a), RFAAS_INVALID, "rfaas_register gave");
    FAILS(rfaas_free(l, b), RFAAS_INVALID, "rfaas_alloc gave");
    FAILS(rfaas_unregister(l, b + 5), RFAAS_INVALID, "not a buffer");
    rfaas_request r;
    uint64_t ns = 700000000; /* longer than this program may be held up */
    OK(rfaas_iinvoke(l, sleep_ns, &ns, 8, &s, 8, NULL, &r));
    FAILS(rfaas_unregister(l, b), RFAAS_BUSY, "in flight");
    OK(rfaas_wait(&r, NULL));
    OK(rfaas_unregister(l, b));
    OK(rfaas_unregister(l, b + 3));
    OK(rfaas_unregister(l, NULL));
    FAILS(rfaas_unregister(l, b), RFAAS_INVALID, "not a buffer");
    OK(rfaas_register(l, b, size)); /* left to the lease's end */
    OK(rfaas_lease_release(l));
    memset(b, 2, size);
    free(b);
}

static void statistics(void) {
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_ADAPTIVE);
    rfaas_function echo = find(l, "echo");
    char in[100], out[100];
    rfaas_statistics s = {.struct_size = sizeof s};
    memset(in, 1, sizeof in);
    for (int i = 0; i < 10; i++)
        OK(rfaas_invoke(l, echo, in, 100, out, 100, NULL, NULL));
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.calls == 10 && s.replies == 10 && s.bytes_in == 1000 && s.bytes_out == 1000 && !s.abandoned && !s.replaced);
    CHECK(rfaas_invoke(l, find(l, "crash"), NULL, 0, NULL, 0, NULL, NULL) == RFAAS_WORKER_DIED);
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    for (o.worker = 0; o.worker < 2; o.worker++)
        OK(rfaas_invoke(l, echo, in, 100, out, 100, NULL, &o));
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.calls == 13 && s.replies == 12 && s.replaced == 1);
    s.struct_size = 3;
    FAILS(rfaas_lease_statistics(l, &s), RFAAS_INVALID, "struct_size");
    OK(rfaas_lease_release(l));
}

void everything(void) {
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    all();
    any_is_fair();
    maps();
    chains();
    reductions();
    registered();
    statistics();
    OK(rfaas_finalize());
}

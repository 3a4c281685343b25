/* rfaas_invokev and rfaas_iinvokev (pieces_test.go). Second argument "busy": calls run in this process, because all cores are taken;
 * otherwise a name of the run. Exit status 0: all good. */
#define CHECK_ARGUMENT what
static const char *what;
#include "check.h"

#include <signal.h>
#include <stdbool.h>

enum { ROWS = 40, COLUMNS = 30 };

static rfaas_piece piece(const void *base, size_t size, size_t count, ptrdiff_t stride) {
    return (rfaas_piece){(void *)base, size, count, stride};
}

/* Two columns and a row of a matrix go, and come back as rows and columns of another one. */
static void matrix(rfaas_lease *l, rfaas_function echo, int calls) {
    static const ptrdiff_t row = COLUMNS * sizeof(double);
    double(*a)[COLUMNS] = malloc(sizeof(double[ROWS][COLUMNS])), (*b)[COLUMNS] = malloc(sizeof(double[ROWS][COLUMNS]));
    for (int call = 0; call < calls; call++) {
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLUMNS; j++)
                a[i][j] = call * 10000 + i * 100 + j, b[i][j] = -1;
        int c = call % (COLUMNS - 2) + 1, r = call % ROWS;
        rfaas_piece in[] = {piece(&a[0][c], sizeof(double), ROWS, row), RFAAS_PIECE(a[r], sizeof a[r]),
                            piece(&a[ROWS - 1][0], sizeof(double), ROWS, -row)};
        rfaas_piece out[] = {piece(&b[0][0], sizeof(double), ROWS, row), piece(NULL, 8, 0, 0),
                             piece(&b[0][1], sizeof(double), COLUMNS, row), piece(&b[0][2], sizeof(double), ROWS, row)};
        size_t n = 0;
        if (call % 2) {
            rfaas_request q = RFAAS_REQUEST_NULL;
            OK(rfaas_submitv(l, echo, in, 3, out, 4, NULL, &q));
            memset(in, 0xff, sizeof in); /* the arrays may be reused */
            memset(out, 0xff, sizeof out);
            OK(rfaas_wait(&q, &n));
        } else {
            OK(rfaas_invokev(l, echo, in, 3, out, 4, &n, NULL));
        }
        CHECK(n == sizeof(double) * (2 * ROWS + COLUMNS));
        for (int i = 0; i < ROWS; i++) {
            CHECK(b[i][0] == a[i][c] && b[i][2] == a[ROWS - 1 - i][0]);
            CHECK(i < COLUMNS ? b[i][1] == a[r][i] : b[i][1] == -1);
            for (int j = 3; j < COLUMNS; j++)
                CHECK(b[i][j] == -1);
        }
    }
    free(a);
    free(b);
}

static void refused(rfaas_lease *l, rfaas_function echo) {
    char in[64] = "payload", out[64];
    size_t n = 9;
    rfaas_request r = 77;
    rfaas_piece good = RFAAS_PIECE(in, 8), to = RFAAS_PIECE(out, 64), empty = RFAAS_PIECE(NULL, 0);
    memset(out, 1, sizeof out);
#define BOTH(in, in_count, out, out_count, status, word)                                                                                \
    do {                                                                                                                                 \
        FAILS(rfaas_invokev(l, echo, in, in_count, out, out_count, &n, NULL), status, word);                                             \
        CHECK(rfaas_started() == RFAAS_NOT_STARTED);                                                                                     \
        FAILS(rfaas_iinvokev(l, echo, in, in_count, out, out_count, NULL, &r), status, word);                                            \
        CHECK(rfaas_started() == RFAAS_NOT_STARTED && n == 9 && r == 77);                                                                \
    } while (0)
    BOTH(NULL, 2, &to, 1, RFAAS_INVALID, "echo: in is NULL with 2 pieces");
    BOTH(&good, 1, NULL, 3, RFAAS_INVALID, "echo: out is NULL with 3 pieces");
    rfaas_piece null[2] = {good, piece(NULL, 3, 7, 3)}, close[2] = {good, piece(in, 8, 2, 7)}, back[2] = {to, piece(out, 8, 2, -3)};
    BOTH(null, 2, &to, 1, RFAAS_INVALID, "base of in[1] is NULL with 7 elements of 3 bytes");
    BOTH(&good, 1, null, 2, RFAAS_INVALID, "base of out[1] is NULL");
    BOTH(close, 2, &to, 1, RFAAS_INVALID, "stride of in[1] is 7, less than its element size 8");
    BOTH(&good, 1, back, 2, RFAAS_INVALID, "stride of out[1] is -3");
    rfaas_piece large = piece(in, 1 << 20, 1 << 12, 1 << 20), over = piece(in, SIZE_MAX, SIZE_MAX, 0), sum[2] = {good, piece(in, SIZE_MAX - 3, 1, 0)};
    over.size = SIZE_MAX / 3, over.stride = PTRDIFF_MAX;
    BOTH(&large, 1, &to, 1, RFAAS_TOO_LARGE, "4294967296");
    BOTH(&over, 1, &to, 1, RFAAS_TOO_LARGE, "18446744073709551615");
    BOTH(sum, 2, &to, 1, RFAAS_TOO_LARGE, "18446744073709551615");
    FAILS(rfaas_invokev(l, 99, &good, 1, &to, 1, &n, NULL), RFAAS_NO_FUNCTION, "99");
    FAILS(rfaas_iinvokev(l, echo, &good, 1, &to, 1, NULL, NULL), RFAAS_INVALID, "request is NULL");
    FAILS(rfaas_invokev(NULL, echo, &good, 1, &to, 1, &n, NULL), RFAAS_INVALID, "invokev");
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    o.timeout_ns = -5;
    FAILS(rfaas_invokev(l, echo, &good, 1, &to, 1, &n, &o), RFAAS_INVALID, "-5");
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(out[i] == 1);

    /* A result that does not fit is not stored, not even in part. */
    rfaas_piece whole = RFAAS_PIECE(in, 64), small[2] = {RFAAS_PIECE(out, 30), RFAAS_PIECE(out + 30, 33)};
    FAILS(rfaas_invokev(l, echo, &whole, 1, small, 2, &n, NULL), RFAAS_RESULT_TOO_LARGE, "");
    CHECK(n == 64 && rfaas_started() == RFAAS_MAYBE_EXECUTED);
    n = 0;
    OK(rfaas_iinvokev(l, echo, &whole, 1, small, 2, NULL, &r));
    FAILS(rfaas_wait(&r, &n), RFAAS_RESULT_TOO_LARGE, "");
    CHECK(n == 64);
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(out[i] == 1);

    /* Nothing, in several ways. A capacity above the lease's limit counts as the limit. */
    n = 9;
    OK(rfaas_invokev(l, echo, NULL, 0, NULL, 0, &n, NULL));
    CHECK(n == 0);
    OK(rfaas_invokev(l, echo, &empty, 1, &empty, 1, NULL, NULL));
    rfaas_piece mixed[3] = {empty, good, piece(in, 0, 5, 0)}, huge[2] = {to, piece(in, (size_t)1 << 40, 1, 0)};
    OK(rfaas_invokev(l, echo, mixed, 3, huge, 2, &n, NULL));
    CHECK(n == 8 && !memcmp(out, in, 8) && out[8] == 1);
    /* More elements than a size_t can count the bytes of: the products are 8 and 0. */
    rfaas_piece endless[2] = {piece(out + 16, 8, SIZE_MAX / 8 + 2, 8), piece(out + 32, (size_t)1 << 32, (size_t)1 << 32, (size_t)1 << 32)};
    for (int i = 0; i < 2; i++) {
        char *at = endless[i].base;
        OK(rfaas_invokev(l, echo, &good, 1, &endless[i], 1, &n, NULL));
        CHECK(n == 8 && !memcmp(at, in, 8) && at[8] == 1);
    }
    OK(rfaas_iinvokev(l, echo, NULL, 0, NULL, 0, NULL, &r));
    OK(rfaas_wait(&r, &n));
    CHECK(n == 0);

    /* Pieces of the payload overlap. So do pieces of the result: each common byte has the value that one of them gives it. */
    rfaas_piece twice[2] = {RFAAS_PIECE("abcdefgh", 8), RFAAS_PIECE("ABCDEFGH", 8)}, over_out[2] = {RFAAS_PIECE(out, 8), RFAAS_PIECE(out + 4, 8)};
    OK(rfaas_invokev(l, echo, twice, 2, over_out, 2, &n, NULL));
    CHECK(n == 16 && !memcmp(out, "abcd", 4) && !memcmp(out + 8, "EFGH", 4));
    for (int i = 0; i < 4; i++)
        CHECK(out[4 + i] == "efgh"[i] || out[4 + i] == "ABCD"[i]);
}

/* Functions that have returned, in all workers. Not counted for calls in this process. */
static uint64_t calls_of(rfaas_lease *l) {
    uint64_t calls = 0;
    for (int i = 0; i < rfaas_lease_workers(l); i++) {
        rfaas_worker_details d = {.struct_size = sizeof d};
        if (rfaas_worker_info(l, i, &d) == RFAAS_OK)
            calls += d.calls;
    }
    return calls;
}

static void *take_kept(void *size) { /* another thread than the one that has waited */
    char out[64];
    FAILS(rfaas_kept_result(out, sizeof out, size), RFAAS_INVALID, "no result is kept");
    return NULL;
}

/* Takes the kept result, after one look at its size, and compares it with the payload. The function does not run again. */
static void take(rfaas_lease *l, const unsigned char *in, size_t size, int line) {
    unsigned char *out = calloc(1, size);
    uint64_t calls = calls_of(l);
    size_t n = 9;
    pthread_t other;
    CHECK(!pthread_create(&other, NULL, take_kept, NULL));
    pthread_join(other, NULL);
    FAILS(rfaas_kept_result(NULL, 0, &n), RFAAS_RESULT_TOO_LARGE, "kept_result: result of");
    CHECK(n == size);
    FAILS(rfaas_kept_result(out, size - 1, &n), RFAAS_RESULT_TOO_LARGE, "the capacity is");
    OK(rfaas_kept_result(out, size, NULL));
    if (memcmp(out, in, size) || calls_of(l) != calls)
        report(line, "the kept result differs, or the function has run again");
    FAILS(rfaas_kept_result(out, size, &n), RFAAS_INVALID, "no result is kept");
    free(out);
}

/* Results that are larger than the caller's memory (option keep). */
static void kept(rfaas_lease *l, rfaas_function echo) {
    enum { LARGE = 1 << 20 };
    unsigned char *in = malloc(LARGE), out[700];
    for (size_t i = 0; i < LARGE; i++)
        in[i] = (unsigned char)(i * 7 + i / 256);
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_request r[2];
    size_t n = 0, at = 9;
    int done = 0;
    o.keep = 1000;
    for (int pieces = 0; pieces < 2; pieces++) {
        rfaas_piece from = RFAAS_PIECE(in, 600), to[2] = {piece(out, 4, 50, 12), RFAAS_PIECE(out + 600, 100)};
#define CALL(bytes) (from.size = bytes, pieces ? rfaas_invokev(l, echo, &from, 1, to, 2, &n, &o) : rfaas_invoke(l, echo, in, bytes, out, 300, &n, &o))
#define START(bytes, q) (from.size = bytes, pieces ? rfaas_iinvokev(l, echo, &from, 1, to, 2, &o, q) : rfaas_iinvoke(l, echo, in, bytes, out, 300, &o, q))
        OK(CALL(300));
        CHECK(n == 300);
        FAILS(CALL(600), RFAAS_RESULT_TOO_LARGE, "result of 600 bytes, the capacity is 300. rfaas_kept_result");
        CHECK(n == 600 && rfaas_started() == RFAAS_MAYBE_EXECUTED);
        OK(CALL(300)); /* does not replace the result */
        take(l, in, 600, __LINE__);
        FAILS(CALL(1001), RFAAS_RESULT_TOO_LARGE, "");
        CHECK(n == 1001);
        FAILS(rfaas_kept_result(out, sizeof out, &n), RFAAS_INVALID, "no result is kept");
        FAILS(CALL(600), RFAAS_RESULT_TOO_LARGE, "");
        FAILS(rfaas_invoke(l, echo, in, 600, out, 300, &n, NULL), RFAAS_RESULT_TOO_LARGE, "");
        FAILS(rfaas_kept_result(out, sizeof out, &n), RFAAS_INVALID, "no result is kept");

        OK(START(1000, &r[0]));
        FAILS(rfaas_wait(&r[0], &n), RFAAS_RESULT_TOO_LARGE, "rfaas_kept_result");
        CHECK(n == 1000);
        take(l, in, 1000, __LINE__);
        OK(START(301, &r[0]));
        OK(START(299, &r[1]));
        for (int i = 0; i < 2; i++) {
            int st = rfaas_waitany(2, r, &at, &n);
            CHECK(at < 2 && (at ? st == RFAAS_OK && n == 299 : st == RFAAS_RESULT_TOO_LARGE && n == 301));
        }
        take(l, in, 301, __LINE__);
        OK(START(400, &r[0]));
        OK(rfaas_cancel(&r[0]));
        for (int i = 0; i < 2; i++) { /* answered after the call that was cancelled */
            o.worker = rfaas_lease_workers(l) > 1 ? i : RFAAS_ANY_WORKER;
            FAILS(CALL(400), RFAAS_RESULT_TOO_LARGE, "");
        }
        o.worker = RFAAS_ANY_WORKER;
        OK(START(500, &r[0]));
        int st;
        for (done = 0; !done;)
            st = rfaas_test(&r[0], &done, &n);
        CHECK(st == RFAAS_RESULT_TOO_LARGE && n == 500);
        take(l, in, 500, __LINE__);
    }
    FAILS(rfaas_invoke(l, echo, in, 600, NULL, 0, &n, &o), RFAAS_RESULT_TOO_LARGE, "the capacity is 0");
    take(l, in, 600, __LINE__);
    FAILS(rfaas_invokev(l, echo, &(rfaas_piece)RFAAS_PIECE(in, 600), 1, NULL, 0, &n, &o), RFAAS_RESULT_TOO_LARGE, "the capacity is 0");
    take(l, in, 600, __LINE__);
    o.keep = UINT64_MAX; /* counts as the limit of the lease */
    FAILS(rfaas_invoke(l, echo, in, LARGE, out, sizeof out, &n, &o), RFAAS_RESULT_TOO_LARGE, "result of 1048576 bytes");
    take(l, in, LARGE, __LINE__);
    unsigned char *large = calloc(2, LARGE); /* the capacity alone is above that limit */
    OK(rfaas_invoke(l, echo, in, LARGE, large, 2 * LARGE, &n, &o));
    CHECK(n == LARGE && !memcmp(large, in, LARGE));
    OK(rfaas_iinvoke(l, echo, in, LARGE, large, 2 * LARGE, &o, &r[0]));
    OK(rfaas_wait(&r[0], &n));
    CHECK(n == LARGE);
    free(large);
    free(in);
}

/* A piece for every byte: the number of pieces has no limit. */
static void many(rfaas_lease *l, rfaas_function echo) {
    enum { N = 1 << 20 };
    rfaas_piece *in = malloc(N * sizeof *in), *out = malloc(N * sizeof *out);
    unsigned char *from = malloc(N), *to = calloc(N, 1);
    size_t n = 0;
    for (size_t i = 0; i < N; i++) {
        from[i] = (unsigned char)(i * 7 + i / 256);
        in[i] = piece(&from[i], 1, 1, 0);
        out[i] = piece(&to[N - 1 - i], 1, 1, 0);
    }
    OK(rfaas_invokev(l, echo, in, N, out, N, &n, NULL));
    CHECK(n == N);
    for (size_t i = 0; i < N; i++)
        if (to[N - 1 - i] != from[i]) {
            report(__LINE__, "many pieces");
            break;
        }
    free(in);
    free(out);
    free(from);
    free(to);
}

static void failures_of_calls(rfaas_lease *l) {
    rfaas_function fail = find(l, "fail"), crash = find(l, "crash"), sleep_ns = find(l, "sleep_ns"), echo = find(l, "echo");
    uint64_t ns = 300000000, out = 0;
    rfaas_piece text[2] = {RFAAS_PIECE("negative", 8), RFAAS_PIECE(" rate", 5)}, time[2] = {RFAAS_PIECE(&ns, 4), RFAAS_PIECE((char *)&ns + 4, 4)},
                to[2] = {RFAAS_PIECE(&out, 4), RFAAS_PIECE((char *)&out + 4, 4)};
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    rfaas_statistics s = {.struct_size = sizeof s};
    rfaas_request r[2];
    size_t n = 0;
    FAILS(rfaas_invokev(l, fail, text, 2, to, 2, &n, NULL), RFAAS_FUNCTION_FAILED, "negative rate");
    OK(rfaas_iinvokev(l, fail, text, 2, to, 2, NULL, &r[0]));
    FAILS(rfaas_wait(&r[0], &n), RFAAS_FUNCTION_FAILED, "negative rate");
    o.timeout_ns = 2000000;
    FAILS(rfaas_invokev(l, sleep_ns, time, 2, to, 2, &n, &o), RFAAS_DEADLINE, "");
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED && out == 0);
    o.timeout_ns = 0;
    OK(rfaas_iinvokev(l, sleep_ns, time, 2, to, 2, NULL, &r[0]));
    OK(rfaas_cancel(&r[0]));
    CHECK(out == 0);

    /* Dead workers, with repeats and without. The pieces are gathered again for each attempt. */
    FAILS(rfaas_invokev(l, crash, text, 2, to, 2, &n, NULL), RFAAS_WORKER_DIED, "SIGSEGV");
    CHECK(rfaas_started() == RFAAS_MAYBE_EXECUTED);
    OK(rfaas_lease_statistics(l, &s));
    uint64_t before = s.repeated;
    o.repeats = 2;
    FAILS(rfaas_invokev(l, crash, text, 2, to, 2, &n, &o), RFAAS_WORKER_DIED, "SIGSEGV");
    OK(rfaas_lease_statistics(l, &s));
    CHECK(s.repeated == before + 2);
    matrix(l, echo, 4);
    for (int i = 0; i < 2; i++) {
        rfaas_worker_details victim = {.struct_size = sizeof victim};
        o.worker = i;
        OK(rfaas_invokev(l, echo, text, 1, to, 2, &n, &o)); /* replaces a dead one */
        OK(rfaas_worker_info(l, i, &victim));
        out = 0;
        OK(rfaas_iinvokev(l, sleep_ns, time, 2, to, 2, &o, &r[0]));
        if (!getenv("TEST_REMOTE"))
            OK(kill((pid_t)victim.pid, SIGKILL));
        OK(rfaas_wait(&r[0], &n));
        CHECK(n == 8 && out == ns);
    }
}

typedef struct thread_args {
    rfaas_lease *l;
    rfaas_function echo;
} thread_args;

static void *call_much(void *arg) {
    const thread_args *a = arg;
    matrix(a->l, a->echo, 300);
    return NULL;
}

void everything(void) {
    bool local = !strcmp(what, "busy");
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    rfaas_lease *l = lease(2, 4, RFAAS_WAIT_WARM), *other = NULL;
    if (local) {
        rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
        o.library = library;
        o.bulk = 1 << 20;
        o.flags = RFAAS_LEASE_LOCAL;
        OK(rfaas_lease_open(session, &o, &other));
        l = other;
    }
    rfaas_function echo = find(l, "echo");
    matrix(l, echo, 100);
    refused(l, echo);
    many(l, echo);
    kept(l, echo);
    if (!local)
        failures_of_calls(l);
    pthread_t thread[4];
    thread_args a = {l, echo};
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&thread[i], NULL, call_much, &a));
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    refused(l, echo);
    kept(l, echo);
    if (!local) {
        failures_of_calls(l);
        /* More requests than there are slots. */
        char c = 'c', to = 0;
        rfaas_piece in = RFAAS_PIECE(&c, 1), out = RFAAS_PIECE(&to, 1);
        rfaas_request r[9];
        int i = 0, status = RFAAS_OK;
        while (i < 9 && (status = rfaas_iinvokev(l, echo, &in, 1, &out, 1, NULL, &r[i])) == RFAAS_OK)
            i++;
        CHECK(i == 8 && status == RFAAS_BUSY);
        OK(rfaas_waitall((size_t)i, r, NULL, NULL));
    }
    rfaas_call_options o = RFAAS_CALL_OPTIONS_INIT;
    char few[1];
    rfaas_request never;
    o.keep = 1000;
    OK(rfaas_iinvoke(l, echo, "nobody waits", 12, few, sizeof few, &o, &never)); /* the end frees its memory */
    OK(rfaas_finalize());
}
